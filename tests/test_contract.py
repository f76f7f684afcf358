"""What every registered method must fulfil; a new method is tested the day it is registered.

Methods that need public images: test_contract_public.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pcdd.engine import schedule
from fedjax_pcdd.engine.devices import CompileClock
from fedjax_pcdd.methods import METHODS, Method

# Hyper-parameters that switch a method's own part off; None with the reason where FedAvg is no special case of it.
REDUCES = {
    "fedavg": {},
    "fedprox": {"mu": 0.0},
    "fedgen": {"alpha": 0.0, "beta_kl": 0.0},
    "fedrl": {"mu": 0.0},
    "fedproc": {"mu": 0.0},
    "fedmr": {"mu1": 0.0, "mu2": 0.0},
    "fedgela": {"classifier": "learned", "phi": "none", "layers": 0},
    "moon": {"mu": 0.0},
    "fedproto": None,  # models are never aggregated
    "fednova": None,  # only where all clients make equally many steps, see its tests
    "feddyn": None,  # uniform weights, see its tests
    "feddc": None,  # drifts are added whatever the coefficients
    "scaffold": None,  # only in the first round, see its tests
    "solo": None,  # nothing is aggregated
    "fedrs": {"alpha": 1.0, "bias": True},
    "fedlc": {"tau": 0.0},
    "fedvls": {"lam": 0.0, "omega": 0.0, "calibrated": False},
    "fedntd": {"beta_ntd": 0.0},
    "fedlmd": {"beta_lmd": 0.0},
    "feddecorr": {"beta_dec": 0.0},
    "feduv": {"lam": 0.0, "mu": 0.0},
    "fedetf": None,  # another classifier
    "fedloge": None,  # the body never learns from a head
    "fedrep": None,  # the head is never shared
    "fedbabu": None,  # the head is never trained
    "fedrod": {"prior_power": 0.0},
    "fml": None,  # private models stay, see its tests
}
BUILT = {"fml": {"meme": "mlp"}}  # whose defaults are too large for a test


NAMES = [name for name, method in METHODS.items() if not method().traits().needs_public]
everyone = pytest.mark.parametrize("name", NAMES)


def simulation(name, **options):
    return toy.simulation(name, **BUILT.get(name, {}), **options)


def leaves(state):
    return [np.array(x) for x in jax.tree.leaves(state)]


def assert_close(one, other, tolerance):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_allclose(a, b, tolerance, tolerance)


@everyone
def test_three_rounds_with_changing_cohorts_compile_once(name):
    simulated = simulation(name)
    state, _ = simulated.step(simulated.start(), 0)
    jax.block_until_ready(state)
    clock = CompileClock()
    cohorts = {tuple(simulated.clients_of(r)[0]) for r in range(3)}
    for r in (1, 2):
        state, _ = jax.block_until_ready(simulated.step(state, r))
    assert len(cohorts) > 1
    assert (simulated.compilations, clock.count) == (1, 0)


@everyone
def test_lanes_do_not_change_results(name):
    assert_close(toy.train(simulation(name)), toy.train(simulation(name, lanes=1)), 1e-5)


QUICK = ("fedavg", "fedmr", "scaffold")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_a_lane_for_every_client_does_not_change_results(name):
    assert_close(toy.train(simulation(name, lanes=3)), toy.train(simulation(name, lanes=1)), 1e-5)


@everyone
def test_client_state_on_the_host_does_not_change_results(name):
    device = simulation(name)
    if not jax.tree.leaves(device.start().clients):
        pytest.skip(f"clients of {name} keep nothing")
    host = simulation(name, client_state="host")
    state, report = toy.train(device)
    other, other_report = toy.train(host)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(other.clients))
    assert_close((state, report), (other, other_report), 1e-6)
    assert_close(device.evaluate(state, personal=True), host.evaluate(other, personal=True), 0)


@everyone
def test_order_of_clients_does_not_change_results(name):
    simulated = simulation(name)
    jobs, batches = simulated.jobs(0)
    order = np.array([2, 0, 1])
    shuffled = jobs._replace(
        **{k: getattr(jobs, k)[order] for k in ("row", "number", "slot", "weight", "steps", "epoch_steps")}
    )
    plan = schedule.pack([batches[i] for i in order], 2, steps=simulated.capacity)
    expected, _ = simulated.step(simulated.start(), 0)
    state, _ = simulated.step(simulated.start(), 0, (plan, shuffled))
    assert_close(state, expected, 1e-6)


@everyone
def test_continuing_from_a_copied_state_is_bitwise_the_same(name):
    state, _ = toy.train(simulation(name), (0, 1))
    copy = jax.tree.map(lambda x: jnp.asarray(np.array(x)), state)
    straight, _ = toy.train(simulation(name))
    resumed, _ = simulation(name).step(copy, 2)
    for a, b in zip(leaves(straight), leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_method_says_whether_it_reduces_to_fedavg():
    assert set(REDUCES) == set(NAMES)


@pytest.mark.parametrize("name", [n for n, hyper in REDUCES.items() if hyper is not None])
def test_zero_coefficients_reduce_to_fedavg(name):
    simulated = toy.simulation(name, **REDUCES[name])
    state, _ = toy.train(simulated)
    plain = toy.simulation(method=Method())
    if name == "fedgela":  # its learned classifier has no bias
        plain = toy.simulation(method=Biasless())
    expected, _ = toy.train(plain)
    assert_close(state.servers.variables, expected.servers.variables, 1e-6)


class Biasless(Method):
    def build(self, model):
        return model.clone(head_bias=False)


jax.tree_util.register_dataclass(Biasless, [], [])


@everyone
def test_ragged_federation_gives_no_nan(name):
    simulated = simulation(name)
    rounds = (0, 2)
    chosen = {int(k) for r in rounds for k in simulated.clients_of(r)[0]}
    assert 0 in chosen  # the client with one sample
    assert len(chosen) < 5  # one never takes part
    state, report = toy.train(simulated, rounds)
    assert all(np.isfinite(x).all() for x in leaves(state))
    assert np.isfinite(np.array(report.loss)).all()


@everyone
def test_a_round_without_clients_changes_nothing(name):
    simulated = simulation(name)
    jobs, batches = simulated.jobs(0)
    nobody = [b[:0] for b in batches]
    plan = schedule.pack(nobody, 2, steps=simulated.capacity)
    jobs = jobs._replace(weight=jobs.weight * 0, steps=jobs.steps * 0)
    before = leaves(simulated.start())
    state, _ = simulated.step(simulated.start(), 0, (plan, jobs))
    for a, b in zip(before, leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
