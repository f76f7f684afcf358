"""FML: two models that teach each other, of which one travels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from participants import (
    MODEL,
    NORMED,
    ONE,
    SGD,
    arrays,
    assert_close,
    assert_equal,
    context,
    images,
    logits,
    normed_variables,
    row,
    same,
)

from fedjax_pcdd import models
from fedjax_pcdd.engine.pretraining import pretrained
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.fml import FML
from fedjax_pcdd.methods.method import Batch, Message, Method
from fedjax_pcdd.methods.solo import Solo
from fedjax_pcdd.models.classifier import Classifier, forward, initialise
from fedjax_pcdd.models.pair import Pair, join, part
from fedjax_pcdd.models.resnet import ResNet

RUN_OPTIONS = {"cohort": 5, "lanes": 1, "epochs": 1}
LABELLED = Batch(images(), jnp.asarray([0, 1, 2, 0, 1, 2, 0, 1]), jnp.ones(8))


def model_and_variables(seed=0):
    model = FML(meme="mlp").build(MODEL)
    return model, initialise(model, jax.random.key(seed), (5, 5, 1))


def after_a_round(simulated, variables):
    """The state after a round that starts from these variables."""
    state, _ = simulated.step(simulated.start(jax.tree.map(lambda x: x[None], variables)), 0)
    return state


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("option", "weights"), [({}, "uniform"), ({"meme_weights": "samples"}, "method")], ids=["equal", "samples"]
)
def test_with_only_label_losses_the_models_are_those_of_solo_and_fedavg(option, weights):
    simulated = toy.simulation("fml", meme="mlp", alpha=1.0, beta_meme=1.0, **option, **RUN_OPTIONS)
    variables = model_and_variables()[1]
    state = after_a_round(simulated, variables)
    solo = after_a_round(toy.simulation(method=Solo(), **RUN_OPTIONS), part(variables, "private"))
    fedavg = after_a_round(toy.simulation(method=Method(), weights=weights, **RUN_OPTIONS), part(variables, "meme"))
    assert_close(arrays(state.clients), arrays(solo.clients), 1e-5)
    assert_close(arrays(state.servers.variables), arrays(fedavg.servers.variables), 1e-5)


def loss(variables, **hyper):
    method, model = FML(meme="mlp", **hyper), model_and_variables()[0]
    return method.loss(variables, LABELLED, context(model=model))[0]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "weight_name"), [("private", "alpha"), ("meme", "beta_meme")])
def test_the_weight_of_a_label_loss_affects_only_its_own_model(name, weight_name):
    variables = model_and_variables()[1]
    low, high = (arrays(jax.grad(loss)(variables, **{weight_name: weight})) for weight in (0.2, 0.9))
    other_name = "meme" if name == "private" else "private"
    assert not same(part(low, name), part(high, name))
    assert_close(part(low, other_name), part(high, other_name), 1e-6)


@pytest.mark.thorough
def test_equal_models_teach_each_other_nothing():
    private = part(model_and_variables()[1], "private")
    variables = join(private=private, meme=private)
    gradient = arrays(jax.grad(lambda v: loss(v, alpha=0.0, beta_meme=0.0))(variables))
    assert all(np.abs(g).max() < 1e-6 for g in jax.tree.leaves(gradient))


@pytest.mark.thorough
def test_the_teacher_of_the_private_model_is_the_meme():
    variables = model_and_variables()[1]
    value = loss(variables, alpha=0.0, beta_meme=1.0)
    meme, private = (np.asarray(jax.nn.log_softmax(logits(part(variables, n), images()))) for n in ("meme", "private"))
    expected = (np.exp(meme) * (meme - private)).sum(1).mean() - meme[np.arange(8), LABELLED.labels].mean()
    np.testing.assert_allclose(value, expected, 1e-4)


def test_running_statistics_of_both_models_move_in_training():
    own = {name: normed_variables(seed) for seed, name in enumerate(("private", "meme"))}
    _, state = FML().loss(join(**own), LABELLED, context(model=Pair(NORMED, NORMED.clone())))
    for name, model_variables in own.items():
        assert_close(part(state, name), arrays(forward(NORMED, model_variables, images(), train=True)[1]))


@pytest.mark.thorough
def test_the_meme_does_not_depend_on_the_private_architecture():
    groups = toy.groups("fml", meme="mlp", **SGD)
    first, second = (arrays(state.variables) for state in groups.start().servers["groups"])
    assert_equal(first, second)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_meme_has_the_norm_asked_for_where_the_private_model_has_none(norm):
    private = models.build("mlp", num_classes=3, image_shape=(32, 32, 3), norm=norm)
    assert FML().build(private).meme.backbone.norm == norm


def test_the_meme_has_the_norm_of_a_private_model_built_by_hand():
    private = Classifier(ResNet((1, 1, 1, 1), norm="group"), 3)
    assert FML().build(private).meme.backbone.norm == "group"


@pytest.mark.thorough
def test_all_architectures_share_one_mean_meme():
    groups = toy.groups("fml", meme="mlp", **SGD)
    state, _ = groups.step(groups.start(), 0)
    first, second = (arrays(server.variables) for server in state.servers["groups"])
    assert_equal(first, second)


def test_merging_weights_architectures_by_their_shares():
    memes = [Message(mean={"params": {"w": jnp.full(2, v)}}) for v in (1.0, 5.0)]
    groups = toy.groups("fml", meme="mlp")
    np.testing.assert_allclose(groups._shares(), (0.6, 0.4))  # of five participants
    np.testing.assert_allclose(groups._message(memes).mean["params"]["w"], 2.6)


def test_a_participant_without_steps_has_no_share():
    groups = toy.groups("fml", meme="mlp", last_batch="strict")  # participant 0 has one sample, and a batch has 8
    np.testing.assert_allclose(groups._shares(), (0.5, 0.5))
    np.testing.assert_allclose(groups.jobs(0)[0].weight, [0, 0.25, 0.25, 0.25, 0.25])


def test_the_answer_is_that_of_the_model_asked_for():
    model, variables = model_and_variables()
    for name in ("private", "meme"):
        outputs = FML(meme="mlp", answer=name).logits(model, variables, images(), (), scope="personal")
        np.testing.assert_allclose(outputs, logits(part(variables, name), images()), 1e-6)


def test_the_meme_has_the_architecture_asked_for():
    assert FML(meme="simple_cnn").build(MODEL).meme.backbone != FML(meme="mlp").build(MODEL).meme.backbone


def test_an_unknown_meme_is_refused():
    with pytest.raises(UserError, match="mlp"):
        FML(meme="mpl").build(MODEL)


def test_a_meme_that_cannot_read_text_is_refused():
    reader = models.build("lstm", num_classes=10, image_shape=(80, 1, 1), text=True)
    with pytest.raises(UserError, match="lstm"):
        FML().build(reader)
    assert isinstance(FML(meme="lstm").build(reader), Pair)


@pytest.mark.thorough
def test_pretraining_does_not_change_the_shared_meme():
    groups = toy.groups("fml", necks=ONE, meme="mlp", weight_decay=0.1, **SGD)
    start = groups.start()
    before = arrays(start.servers), arrays(start.clients)
    after = pretrained(groups, start, 1, 8)
    assert_equal(before[0], arrays(after.servers))
    assert not same(row(before[1][0], 1), row(after.clients[0], 1))


def test_statistics_of_both_models_count_as_running_statistics():
    resnet = models.build("resnet10", num_classes=4, image_shape=(8, 8, 3))
    pairs = (MODEL, MODEL), (MODEL, resnet), (resnet, MODEL)
    assert [models.uses_batch_norm(Pair(*pair), (8, 8, 3)) for pair in pairs] == [False, True, True]
