"""Methods "with prototypes": a method's objective plus FedProc's contrast."""

import jax
import numpy as np
import pytest
import toy

from fedjax_pcdd import methods
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.fedproc import FedProc


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def trained(method, rounds=2, lanes=2):
    simulated = toy.simulation(method=method, lanes=lanes, cohort=5)
    state = simulated.start()
    for r in range(rounds):
        state, _ = simulated.step(state, r)
    return state


def method_of(name, **hyper):
    return methods.get(name)(**hyper)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedprox", "feddc"])
def test_with_zero_weight_it_is_the_plain_method(name):
    plain, extended = trained(method_of(name)), trained(method_of(f"{name}+prototypes", prototype_mu=0.0))
    np.testing.assert_array_equal(flat(extended.servers.variables), flat(plain.servers.variables))
    jax.tree.map(np.testing.assert_array_equal, extended.clients, plain.clients)


@pytest.mark.thorough
def test_a_pass_that_method_and_prototypes_need_serves_both():
    plain = trained(method_of("scaffold", control="I"))
    extended = trained(method_of("scaffold+prototypes", control="I", prototype_mu=0.0))
    np.testing.assert_allclose(flat(extended.servers.control), flat(plain.servers.control), rtol=1e-6, atol=1e-8)
    assert extended.servers.valid.any()


def test_a_form_that_averages_no_models_cannot_have_prototypes():
    with pytest.raises(UserError, match="a contrast to prototypes asks for a method that averages models"):
        trained(method_of("feddf+prototypes", form="participants"))


@pytest.mark.thorough
def test_fedavg_with_prototypes_is_fedproc():
    with_prototypes = trained(method_of("fedavg+prototypes", prototype_mu=0.3, prototype_tau=0.2)).servers
    fedproc = trained(FedProc(mu=0.3, tau=0.2)).servers
    np.testing.assert_allclose(flat(with_prototypes.variables), flat(fedproc.variables), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(with_prototypes.prototypes, fedproc.prototypes, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(with_prototypes.valid[0], [True, True, True, False])


OTHERS = ("fedavg", "fedprox", "fedgela", "feddyn", "feddc", "fedrs", "fedlc", "fedbabu", "fedrod")
SLOW_OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["moon", "fednova", "fedrl", "fedgen", "scaffold", *SLOW_OTHERS])
def test_the_contrast_acts_from_the_second_round_on(name):
    first_strong, first_plain = (
        trained(method_of(f"{name}+prototypes", prototype_mu=mu), rounds=1) for mu in (1.0, 0.0)
    )
    np.testing.assert_array_equal(flat(first_strong.servers.variables), flat(first_plain.servers.variables))
    strong, plain = (trained(method_of(f"{name}+prototypes", prototype_mu=mu)) for mu in (1.0, 0.0))
    assert np.abs(flat(strong.servers.variables) - flat(plain.servers.variables)).max() > 1e-4


@pytest.mark.thorough
def test_lanes_do_not_change_results():
    one_lane, three_lanes = (trained(method_of("feddyn+prototypes", prototype_mu=0.3), lanes=lanes) for lanes in (1, 3))
    np.testing.assert_allclose(
        flat(three_lanes.servers.variables), flat(one_lane.servers.variables), rtol=1e-5, atol=1e-6
    )


def test_methods_that_average_models_can_have_prototypes():
    for name in ("fedavg", "moon", "scaffold", "feddf", "fedgela", "fednova"):
        assert issubclass(methods.get(f"{name}+prototypes"), methods.METHODS[name])


@pytest.mark.parametrize("name", ["fedmr", "solo", "fccl", "fedproto"])
def test_methods_that_do_not_only_average_models_cannot_have_prototypes(name):
    with pytest.raises(UserError, match=rf"method={name}\+prototypes does not exist"):
        methods.get(f"{name}+prototypes")


def test_an_unknown_method_is_named_without_the_suffix():
    with pytest.raises(UserError, match="there is no method 'fedprx': did you mean 'fedprox'"):
        methods.get("fedprx+prototypes")
