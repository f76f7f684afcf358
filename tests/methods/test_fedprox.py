"""FedProx: how its proximal term holds weights back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct

from fedjax_pcdd.methods import Method
from fedjax_pcdd.methods.fedprox import FedProx

A, BEST, START = 2.0, 3.0, 1.0  # of the local loss A / 2 * (w - BEST)^2, from w = START
STRENGTHS = (0.0, 0.1, 1.0, 10.0)


def trained(mu, steps=400, lr=0.05):
    """The weight of one client after gradient descent on the quadratic."""
    context = toy.context(start={"params": jnp.asarray(START)})

    def objective(w):
        return A / 2 * (w - BEST) ** 2 + FedProx(mu=mu).regulariser(w, context)

    return jax.lax.fori_loop(0, steps, lambda _, w: w - lr * jax.grad(objective)(w), jnp.asarray(START))


@pytest.mark.parametrize("mu", STRENGTHS)
def test_one_clients_fixed_point_is_between_its_optimum_and_the_received_weight(mu):
    np.testing.assert_allclose(trained(mu), (A * BEST + mu * START) / (A + mu), rtol=1e-5)


def test_term_matches_the_worked_example():
    context = toy.context(start={"params": {"w": jnp.zeros(2)}})
    params = {"w": jnp.asarray([1.0, 2.0])}
    value, gradient = jax.value_and_grad(FedProx(mu=0.1).regulariser)(params, context)
    np.testing.assert_allclose(value, 0.25, rtol=1e-6)
    np.testing.assert_allclose(gradient["w"], [0.1, 0.2], rtol=1e-6)


def distance_moved(method):
    """How far a round of one client moves the weights."""
    simulated = toy.simulation(method=method, cohort=1, lanes=1)
    before, after = simulated.start(), toy.train(simulated, (0,))[0]
    pairs = zip(*(jax.tree.leaves(s.servers.variables["params"]) for s in (before, after)), strict=True)
    return np.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in pairs))


@pytest.mark.thorough
def test_larger_mu_keeps_the_weights_nearer():
    distances = [distance_moved(FedProx(mu=mu)) for mu in STRENGTHS]
    assert np.all(np.diff(distances) < 0)
    np.testing.assert_allclose(distances[0], distance_moved(Method()), rtol=1e-5)


@struct.dataclass
class Corrected(Method):
    """FedProx whose term is added to the gradients by hand."""

    mu: float

    def local_update(self, evaluate, step, variables, batch, context):
        loss, state, gradients = evaluate(variables)
        w, start = variables["params"], context.start["params"]
        return loss, state, step(jax.tree.map(lambda g, w, w0: g + self.mu * (w - w0), gradients, w, start))


@pytest.mark.thorough
def test_recorded_losses_exclude_the_term():
    (state, report), (expected, expected_report) = (
        toy.train(toy.simulation(method=m(mu=1.0))) for m in (FedProx, Corrected)
    )
    np.testing.assert_allclose(report.loss, expected_report.loss, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (state.servers, expected.servers)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
