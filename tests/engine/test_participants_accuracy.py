"""Which models of participants are measured: those that a round ends with and, under FML, also the meme."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from participants import MODEL, ONE, context, images, public_batch, variables

from fedjax_pcdd import models
from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.engine.evaluation import both_tops
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.fccl import FCCL
from fedjax_pcdd.methods.fedmatch import FedMatch
from fedjax_pcdd.methods.fedmd import FedMD
from fedjax_pcdd.methods.fml import FML
from fedjax_pcdd.methods.method import Server
from fedjax_pcdd.methods.rcfl import RCFL
from fedjax_pcdd.models.classifier import forward, initialise


@pytest.mark.parametrize(
    ("method", "personal_model"),
    [(FedMD(), "local"), (FedMD(average="trained"), "server"), (RCFL(), "server"), (FML(answer="meme"), "server")],
    ids=["fedmd", "fedmd-averaged", "rcfl", "fml-meme"],
)
def test_pa_measures_the_model_that_a_round_ends_with(method, personal_model):
    assert method.traits().personal_model == personal_model


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedmd", "fml"])
def test_pa_read_during_training_is_that_of_the_model_after_the_round(name):
    hyper = {"meme": "mlp"} if name == "fml" else {}
    simulated = toy.groups(name, necks=ONE, **hyper)
    assert simulated.traits.personal_model == "local"
    state, report = simulated.step(simulated.start(), 0)
    counts = simulated.evaluate(state, personal=True)
    np.testing.assert_array_equal(report.correct[1:], counts.personal[1:])  # the first participant makes no step


@pytest.mark.thorough
def test_fml_counts_the_mean_meme_beside_the_private_models():
    simulated = toy.groups("fml", necks=(0, 1, 0, 1, 0), meme="mlp")
    state, _ = simulated.step(simulated.start(), 0)
    counts = simulated.evaluate(state)
    variables = jax.tree.map(lambda x: x[0], state.servers["groups"][0].variables)
    dataset = toy.federation().dataset
    images = prepare(toy.PLAIN, jnp.asarray(dataset.x_test), None, train=False)
    logits = forward(simulated.groups[0].program.model.meme, variables, images, train=False)[0].logits
    expected = np.bincount(dataset.y_test[np.argmax(logits, axis=1) == dataset.y_test], minlength=toy.CLASSES)
    np.testing.assert_array_equal(counts.further["meme"][0], expected)


def test_a_meme_too_large_for_the_images_is_a_user_error():
    plain = models.build("mlp", num_classes=4, image_shape=(5, 5, 1))
    with pytest.raises(UserError, match="the meme needs images of 16x16 pixels or more, not 5x5"):
        initialise(FML(meme="simple_cnn").build(plain), jax.random.key(0), (5, 5, 1))


@pytest.mark.thorough
def test_nan_logits_never_count_towards_top_five_accuracy():
    labels, mask = jnp.arange(10), jnp.ones(10, bool)
    assert both_tops(jnp.zeros((10, 65)), labels, mask, 65)[1].sum() == 5
    assert both_tops(jnp.full((10, 65), jnp.nan), labels, mask, 65)[1].sum() == 0


NORMED = MODEL.clone(feature_norm=True)


def variables_with_shifted_statistics():
    """Variables of the model with batch norm, whose running statistics differ from those of the batch."""
    initial = variables(model=NORMED)
    return {**initial, "batch_stats": jax.tree.map(lambda x: x + 0.7, initial["batch_stats"])}


def logits_in(mode, model_variables):
    outputs, _ = forward(NORMED, model_variables, images(), train=mode == "train", key=context().keys.dropout)
    return outputs.logits


@pytest.mark.parametrize(
    ("method", "mode"),
    [(FCCL(), "train"), (FedMD(), "train"), (FedMD(consensus="per_round"), "eval"), (RCFL(), "eval")],
    ids=["fccl", "fedmd", "fedmd-per-round", "rcfl"],
)
def test_participants_send_logits_of_the_mode_that_their_method_defines(method, mode):
    model_variables, other_mode = variables_with_shifted_statistics(), {"train": "eval", "eval": "train"}[mode]
    assert np.abs(logits_in(mode, model_variables) - logits_in(other_mode, model_variables)).max() > 0.01
    sent = method.say(model_variables, public_batch(), context(model=NORMED))
    np.testing.assert_allclose(jax.tree.leaves(sent)[0], logits_in(mode, model_variables), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_fedmatch_sends_logits_of_evaluation_and_imitates_in_training():
    method, model_variables = FedMatch(), variables_with_shifted_statistics()
    client = method.init_client(None, Server(model_variables), None, None)
    sent = method.say(client, public_batch(), context(model=NORMED))
    np.testing.assert_allclose(sent, logits_in("eval", model_variables), rtol=1e-5, atol=1e-6)
    target = jnp.stack([sent, sent], axis=1)
    _, state = method.imitate(client, public_batch(target), context(model=NORMED))
    assert np.abs(jax.tree.leaves(state)[0] - jax.tree.leaves(model_variables["batch_stats"])[0]).max() > 1e-3


def test_imitation_runs_in_training_mode():
    model_variables = variables_with_shifted_statistics()
    target = jnp.zeros((8, toy.CLASSES))
    _, state = FedMD().imitate(model_variables, public_batch(target), context(model=NORMED))
    assert np.abs(jax.tree.leaves(state)[0] - jax.tree.leaves(model_variables["batch_stats"])[0]).max() > 1e-3
