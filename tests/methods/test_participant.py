"""What the methods share that exchange logits: passes over public images, and the mean of what all say."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd.methods.participant import Exchanging, over_all


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
