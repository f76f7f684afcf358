"""FedRep: heads of each client's own over a shared body."""

import jax
import numpy as np
import pytest
import toy
from golden_vectors import cases
from trajectories import train

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.fedrep import FedRep

PHASES = {"head_epochs": 1, "body_epochs": 1}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("trajectories"))
def test_bodies_and_heads_agree_with_the_reference(g):
    problem, states = train(g, "fedrep", 2, **PHASES)
    bodies, heads = g["out_fedrep_head1_body1"], g["out_fedrep_head1_body1__heads"]
    for state, body, head in zip(states, bodies, heads, strict=True):
        params = jax.tree.map(lambda x: x[0], state.servers.variables["params"])
        np.testing.assert_allclose(problem.flatten({"backbone": params["backbone"]}), body, 1e-9, 1e-11)
        kernels = state.clients["kernel"].transpose(0, 2, 1).reshape(len(head), -1)
        np.testing.assert_allclose(np.concatenate([kernels, state.clients["bias"]], 1), head, 1e-9, 1e-11)


def body(state):
    return [np.array(x) for x in jax.tree.leaves(state.servers.variables["params"]["backbone"])]


def test_default_is_e_epochs_on_the_head_and_one_on_the_body():
    assert FedRep().local_epochs(7) == 8


def test_body_stands_still_in_the_epochs_of_the_head():
    simulated = toy.simulation("fedrep", head_epochs=2, body_epochs=0)
    before, heads = body(simulated.start()), np.array(simulated.start().clients["kernel"])
    state, _ = simulated.step(simulated.start(), 0)
    for a, b in zip(before, body(state), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-7)
    chosen = simulated.clients_of(0)[0]
    assert all(np.abs(np.array(state.clients["kernel"]) - heads)[chosen].max(axis=(1, 2)) > 1e-4)


def test_heads_of_clients_that_do_not_take_part_keep_their_bits():
    simulated = toy.simulation("fedrep")
    state, _ = simulated.step(simulated.start(), 0)
    before = np.array(state.clients["kernel"])
    state, _ = simulated.step(state, 1)
    absent = np.setdiff1d(np.arange(5), simulated.clients_of(1)[0])
    assert len(absent)
    np.testing.assert_array_equal(before[absent], np.array(state.clients["kernel"])[absent])


def test_without_epochs_of_the_head_it_is_fedavg_of_the_body_under_the_initial_head():
    state, _ = toy.train(toy.simulation("fedrep", head_epochs=0, body_epochs=2))
    expected, _ = toy.train(toy.simulation("fedbabu"))
    for a, b in zip(body(state), body(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-6)


def test_no_epochs_at_all_are_a_users_mistake():
    with pytest.raises(UserError, match="--head-epochs"):
        toy.simulation("fedrep", head_epochs=0, body_epochs=0)


@pytest.mark.parametrize(("head_epochs", "expected"), [(None, 10), (3, 10), (12, 12)])
def test_heads_are_fine_tuned_for_as_many_epochs_as_in_a_round_and_at_least_those_asked_for(head_epochs, expected):
    setting = toy.simulation("fedrep").program.setting
    tuner = FedRep(head_epochs=head_epochs).tuner(setting, 10)
    assert (tuner.local_epochs(10), tuner.body_epochs) == (expected, 0)


def test_heads_are_fine_tuned_only_if_asked_for():
    assert not FedRep().fine_tune
    assert FedRep(fine_tune_heads=True).fine_tune
