"""What the methods share that exchange logits: passes over public images, and the mean of what all say."""

import jax.numpy as jnp
import numpy as np
import pytest
from participants import NORMED, context, images, normed_variables, public_batch

from fedjax_pcdd.methods.fccl import FCCL, Learner
from fedjax_pcdd.methods.fedmatch import FedMatch
from fedjax_pcdd.methods.fedmd import FedMD
from fedjax_pcdd.methods.method import Server
from fedjax_pcdd.methods.participant import Exchanging, over_all
from fedjax_pcdd.methods.rcfl import RCFL
from fedjax_pcdd.models.classifier import forward


@pytest.mark.parametrize(("total", "batch"), [(7, 3), (6, 3), (2, 5), (1, 1)])
def test_a_pass_over_public_images_has_one_result_for_each_in_order(total, batch):
    sizes = []

    def twice(index):
        sizes.append(len(index))
        return {"x": 2 * index, "y": jnp.stack([index, index], 1)}

    results = over_all(twice, total, batch)
    np.testing.assert_array_equal(results["x"], 2 * np.arange(total))
    assert results["y"].shape == (total, 2)
    assert set(sizes) == {min(batch, total)}


def test_the_mean_of_what_all_say_is_theirs_to_the_last_bit_if_they_agree():
    said = np.float32([[0.1, -3.3, 1e-8, 7e5]])
    for participants in (3, 5, 7, 10):
        _, target = Exchanging().agree((), jnp.asarray(np.repeat(said, participants, axis=0)), None)
        np.testing.assert_array_equal(target, np.repeat(said, participants, axis=0))
    logits = np.random.default_rng(0).normal(size=(5, 4, 3)).astype(np.float32)
    _, target = Exchanging().agree((), jnp.asarray(logits), None)
    np.testing.assert_allclose(target, np.broadcast_to(logits.mean(0), logits.shape), rtol=1e-5, atol=1e-7)


def assert_in_mode(spoken, own, train):
    """Assert that logits are those of a model with batch norm in training or in eval mode, which differ."""
    in_mode, otherwise = (forward(NORMED, own, images(), train=t)[0].logits for t in (train, not train))
    np.testing.assert_allclose(spoken, in_mode, 1e-5, 1e-5)
    assert not np.allclose(spoken, otherwise, atol=1e-2)


@pytest.mark.parametrize(
    ("method", "train"),
    [
        (Exchanging(), True),
        (FedMD(), True),
        (FedMD(consensus="per_round"), False),
        (RCFL(), False),
        (FedMatch(), False),
    ],
    ids=["exchanging", "fedmd-per-batch", "fedmd-per-round", "rcfl", "fedmatch"],
)
def test_participants_speak_in_the_mode_of_their_method(method, train):
    own = normed_variables(0)
    client = method.init_client(None, Server(own), None, None)
    assert_in_mode(method.say(client, public_batch(), context(model=NORMED)), own, train)


def test_in_fccl_the_current_model_speaks_in_training_mode_and_the_previous_one_in_eval_mode():
    current, previous = normed_variables(0), normed_variables(1)
    client_context = context(model=NORMED, client=Learner(current, previous, current))
    spoken = FCCL(own="previous").say(current, public_batch(), client_context)
    assert_in_mode(spoken.current, current, True)
    assert_in_mode(spoken.previous, previous, False)
