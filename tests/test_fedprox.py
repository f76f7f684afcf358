"""FedProx: what its term holds back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pcdd.methods import Method
from fedjax_pcdd.methods.fedprox import FedProx

A, BEST, START = 2.0, 3.0, 1.0  # of the local loss A / 2 * (w - BEST)^2, from w = START
STRENGTHS = (0.0, 0.1, 1.0, 10.0)


def trained(mu, steps=400, lr=0.05):
    """The weight of one client after gradient descent on the quadratic."""
    context = toy.context(start={"params": jnp.asarray(START)})

    def objective(w):
        return A / 2 * (w - BEST) ** 2 + FedProx(mu=mu).penalty({"params": w}, None, None, context)

    return jax.lax.fori_loop(0, steps, lambda _, w: w - lr * jax.grad(objective)(w), jnp.asarray(START))


@pytest.mark.parametrize("mu", STRENGTHS)
def test_one_clients_fixed_point_is_between_its_optimum_and_the_received_weight(mu):
    np.testing.assert_allclose(trained(mu), (A * BEST + mu * START) / (A + mu), rtol=1e-5)


def test_term_has_the_sheets_value():
    context = toy.context(start={"params": {"w": jnp.zeros(2)}})
    params = {"params": {"w": jnp.asarray([1.0, 2.0])}}
    value, gradient = jax.value_and_grad(lambda v: FedProx(mu=0.1).penalty(v, None, None, context))(params)
    np.testing.assert_allclose(value, 0.25, rtol=1e-6)
    np.testing.assert_allclose(gradient["params"]["w"], [0.1, 0.2], rtol=1e-6)


def distance(method):
    """How far a round of one client moves the weights."""
    simulated = toy.simulation(method=method, cohort=1, lanes=1)
    before, after = simulated.start(), toy.train(simulated, (0,))[0]
    pairs = zip(*(jax.tree.leaves(s.servers.variables["params"]) for s in (before, after)), strict=True)
    return np.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in pairs))


def test_larger_mu_keeps_the_weights_nearer():
    found = [distance(FedProx(mu=mu)) for mu in STRENGTHS]
    assert np.all(np.diff(found) < 0)
    np.testing.assert_allclose(found[0], distance(Method()), rtol=1e-5)
