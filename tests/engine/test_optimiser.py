"""The local optimiser against the reference framework's numbers, and its clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_vectors import cases

from fedjax_pcdd.engine.optimiser import make_optimiser
from fedjax_pcdd.methods.method import Local

# key, optimiser, lr, momentum, decay, clip, reset in every step (the constants of tests/golden/README.md)
SETTINGS = [
    ("out_sgd", "sgd", 0.1, 0.9, 1e-2, None, False),
    ("out_sgd_clip", "sgd", 0.1, 0.9, 1e-2, 0.5, False),
    ("out_adam", "adam", 0.01, 0.0, 1e-2, None, False),
    ("out_adam_reset_each_step", "adam", 0.01, 0.0, 0.0, None, True),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("optimisers"))
@pytest.mark.parametrize(("key", "name", "lr", "momentum", "decay", "clip", "reset"), SETTINGS)
def test_steps_agree_with_the_reference(g, key, name, lr, momentum, decay, clip, reset):
    local = Local(optimizer=name, lr=lr, momentum=momentum, weight_decay=decay, clip=clip)
    optimiser = make_optimiser(local, clip=clip is not None)
    w = jnp.asarray(g["in_w"])
    state = optimiser.init(w)
    for expected in g[key]:
        state = optimiser.init(w) if reset else state
        updates, state = optimiser.update(jnp.asarray(g["in_A"]) @ (w - g["in_b"]), state, w)
        w = optax.apply_updates(w, updates)
        np.testing.assert_allclose(w, expected, 1e-9)


def test_separate_parts_are_clipped_by_their_own_norms():
    local = Local(lr=1.0, momentum=0.0, weight_decay=0.0, clip=1.0)
    gradients = {"small": jnp.array([0.3, 0.4]), "large": jnp.array([30.0, 40.0]), "rest": jnp.array([0.6, 0.0])}
    for apart, small_norm in (((), 0.5 / 50), (("small", "large"), 0.5)):
        optimiser = make_optimiser(local, clip=True, apart=apart)
        updates, _ = optimiser.update(gradients, optimiser.init(gradients), gradients)
        norms = {name: np.linalg.norm(update) for name, update in updates.items()}
        assert norms["small"] == pytest.approx(small_norm, rel=1e-3)
        assert norms["large"] == pytest.approx(1.0, rel=1e-3)
    assert norms["rest"] == pytest.approx(0.6, rel=1e-3)


def test_unclipped_gradients_and_weight_decay_are_added_after_clipping():
    optimiser = make_optimiser(Local(lr=1.0, momentum=0.0, weight_decay=0.5, clip=1.0), clip=True)
    w, gradient = {"a": jnp.array([2.0, 4.0])}, {"a": jnp.array([30.0, 40.0])}
    updates, _ = optimiser.update(gradient, optimiser.init(w), w, unclipped={"a": jnp.array([10.0, 0.0])})
    np.testing.assert_allclose(updates["a"], [-(0.6 + 1 + 10), -(0.8 + 2)], rtol=1e-6)


def test_momentum_of_parameters_that_do_not_move_is_kept():
    optimiser = make_optimiser(Local(lr=1.0, momentum=0.5, weight_decay=0.0), clip=False)
    w, gradient = {"a": jnp.ones(2), "b": jnp.ones(2)}, {"a": jnp.full(2, 4.0), "b": jnp.full(2, 4.0)}
    _, state = optimiser.update(gradient, optimiser.init(w), w)
    moving = {"a": jnp.array(True), "b": False}
    for _ in range(3):
        _, state = optimiser.update({**gradient, "b": jnp.zeros(2)}, state, w, moving=moving)
    updates, _ = optimiser.update(gradient, state, w)
    np.testing.assert_array_equal(updates["a"], [-7.75, -7.75])
    np.testing.assert_array_equal(updates["b"], [-6.0, -6.0])


def adam():
    return make_optimiser(Local(optimizer="adam", lr=0.1, weight_decay=0.0), clip=False)


def test_adam_starts_fresh_only_for_parameters_that_had_not_moved():
    w, gradient = {"a": jnp.ones(2), "b": jnp.ones(3)}, {"a": jnp.full(2, 3.0), "b": jnp.full(3, -2.0)}
    moving_at_first, moving_later = {"a": True, "b": False}, {"a": jnp.array(True), "b": jnp.array(True)}
    masked_state, fresh_state, state_of_a = adam().init(w), adam().init(w), adam().init(w["a"])
    for _ in range(5):
        _, masked_state = adam().update({**gradient, "b": 0 * gradient["b"]}, masked_state, w, moving=moving_at_first)
        _, state_of_a = adam().update(gradient["a"], state_of_a, w["a"])
    updates, _ = adam().update(gradient, masked_state, w, moving=moving_later)
    np.testing.assert_array_equal(updates["a"], adam().update(gradient["a"], state_of_a, w["a"])[0])
    np.testing.assert_array_equal(updates["b"], adam().update(gradient, fresh_state, w)[0]["b"])


def test_adam_without_a_mask_is_optax_adam():
    rng = np.random.default_rng(0)
    w = {"a": jnp.ones(2), "b": {"c": jnp.ones((2, 3))}}
    ours, theirs = adam(), optax.adam(0.1)
    our_state, their_state = ours.init(w), theirs.init(w)
    for _ in range(7):
        gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), w)
        (our_updates, our_state), (their_updates, their_state) = (
            ours.update(gradient, our_state, w),
            theirs.update(gradient, their_state, w),
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), our_updates, their_updates)


def test_clipping_at_infinity_changes_nothing():
    local = Local(lr=0.1, momentum=0.9, weight_decay=0.0, clip=jnp.inf)
    w, gradient = {"a": jnp.arange(3.0)}, {"a": jnp.array([1e15, -3.0, 0.0])}
    optimisers = [make_optimiser(local, clip=clip) for clip in (False, True)]
    unclipped, clipped = (optimiser.update(gradient, optimiser.init(w), w)[0] for optimiser in optimisers)
    jax.tree.map(np.testing.assert_array_equal, unclipped, clipped)
