"""What is measured of participants: the models that a round ends with, and FML's meme beside them."""

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
    ("method", "kept"),
    [(FedMD(), "local"), (FedMD(average="trained"), "server"), (RCFL(), "server"), (FML(answer="meme"), "server")],
    ids=["fedmd", "fedmd-averaged", "rcfl", "fml-meme"],
)
def test_pa_is_of_the_model_that_a_round_ends_with(method, kept):
    assert method.traits().personal_model == kept


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedmd", "fml"])
def test_where_pa_is_read_in_training_nothing_changes_the_model_afterwards(name):
    more = {"meme": "mlp"} if name == "fml" else {}
    simulated = toy.groups(name, necks=ONE, **more)
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
    said = forward(simulated.groups[0].program.model.meme, variables, images, train=False)[0].logits
    expected = np.bincount(dataset.y_test[np.argmax(said, axis=1) == dataset.y_test], minlength=toy.CLASSES)
    np.testing.assert_array_equal(counts.further["meme"][0], expected)


def test_a_meme_too_large_for_the_images_is_one_sentence():
    plain = models.build("mlp", num_classes=4, image_shape=(5, 5, 1))
    with pytest.raises(UserError, match="the meme needs images of 16x16 pixels or more, not 5x5"):
        initialise(FML(meme="simple_cnn").build(plain), jax.random.key(0), (5, 5, 1))


@pytest.mark.thorough
def test_a_model_that_says_nothing_is_not_among_the_first_five():
    labels, mask = jnp.arange(10), jnp.ones(10, bool)
    assert both_tops(jnp.zeros((10, 65)), labels, mask, 65)[1].sum() == 5
    assert both_tops(jnp.full((10, 65), jnp.nan), labels, mask, 65)[1].sum() == 0


NORMED = MODEL.clone(feature_norm=True)


def moved_statistics():
    """Variables of the model with batch norm, whose running statistics are not those of the batch."""
    own = variables(model=NORMED)
    return {**own, "batch_stats": jax.tree.map(lambda x: x + 0.7, own["batch_stats"])}


def said_in(mode, own):
    outputs, _ = forward(NORMED, own, images(), train=mode == "train", key=context().keys.dropout)
    return outputs.logits


@pytest.mark.parametrize(
    ("method", "mode"),
    [(FCCL(), "train"), (FedMD(), "train"), (FedMD(consensus="per_round"), "eval"), (RCFL(), "eval")],
    ids=["fccl", "fedmd", "fedmd-per-round", "rcfl"],
)
def test_participants_speak_in_the_mode_that_the_methods_say(method, mode):
    own, other = moved_statistics(), {"train": "eval", "eval": "train"}[mode]
    assert np.abs(said_in(mode, own) - said_in(other, own)).max() > 0.01
    said = method.say(own, public_batch(), context(model=NORMED))
    np.testing.assert_allclose(jax.tree.leaves(said)[0], said_in(mode, own), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_fedmatch_speaks_in_evaluation_and_learns_in_training():
    method, own = FedMatch(), moved_statistics()
    split = method.init_client(None, Server(own), None, None)
    said = method.say(split, public_batch(), context(model=NORMED))
    np.testing.assert_allclose(said, said_in("eval", own), rtol=1e-5, atol=1e-6)
    target = jnp.stack([said, said], axis=1)
    _, state = method.imitate(split, public_batch(target), context(model=NORMED))
    assert np.abs(jax.tree.leaves(state)[0] - jax.tree.leaves(own["batch_stats"])[0]).max() > 1e-3


def test_an_imitation_is_in_training_mode():
    own = moved_statistics()
    target = jnp.zeros((8, toy.CLASSES))
    _, state = FedMD().imitate(own, public_batch(target), context(model=NORMED))
    assert np.abs(jax.tree.leaves(state)[0] - jax.tree.leaves(own["batch_stats"])[0]).max() > 1e-3
