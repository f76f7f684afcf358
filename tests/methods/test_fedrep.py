"""FedRep: heads of each client's own over a shared body."""

import jax
import numpy as np
import pytest
import toy
from golden_vectors import cases
from trajectories import train

from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.fedrep import FedRep
from fedjax_pcdd.models.classifier import forward

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


@pytest.mark.parametrize(
    ("asked", "given", "epochs"),
    [(10, {}, 10), (1, {}, 2), (10, {"body_epochs": 5}, 10), (10, {"head_epochs": 10}, 11), (10, PHASES, 2)],
    ids=["9 and 1", "1 and 1", "5 and 5", "10 and 1", "1 and 1 as given"],
)
def test_local_epochs_count_both_phases(asked, given, epochs):
    assert (toy.simulation("fedrep", epochs=asked, **given).epochs == epochs).all()


@pytest.mark.thorough
def test_those_epochs_come_in_that_order():
    default, _ = toy.train(toy.simulation("fedrep"))
    explicit, _ = toy.train(toy.simulation("fedrep", head_epochs=1, body_epochs=1))
    assert not np.allclose(body(default)[0], body(toy.simulation("fedrep").start())[0], atol=1e-4)
    jax.tree.map(
        np.testing.assert_array_equal, (default.servers, default.clients), (explicit.servers, explicit.clients)
    )


@pytest.mark.thorough
def test_the_body_is_trained_in_the_clients_own_last_epoch():
    simulated = toy.simulation("fedrep", epochs=(6, 2, 2, 2, 2))
    alone, _ = simulated.step(simulated.start(), 0, simulated.plan(0, [np.array([1])]))
    equal = toy.simulation("fedrep", epochs=2)
    expected, _ = equal.step(equal.start(), 0, equal.plan(0, [np.array([1])]))
    assert np.abs(body(alone)[0] - body(simulated.start())[0]).max() > 1e-4
    for a, b in zip(body(alone), body(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.thorough
def test_body_stands_still_in_the_epochs_of_the_head():
    simulated = toy.simulation("fedrep", head_epochs=2, body_epochs=0)
    before, heads = body(simulated.start()), np.array(simulated.start().clients["kernel"])
    state, _ = simulated.step(simulated.start(), 0)
    for a, b in zip(before, body(state), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-7)
    chosen = simulated.clients_of(0)[0]
    assert all(np.abs(np.array(state.clients["kernel"]) - heads)[chosen].max(axis=(1, 2)) > 1e-4)


@pytest.mark.thorough
def test_heads_of_clients_that_do_not_take_part_keep_their_bits():
    simulated = toy.simulation("fedrep")
    state, _ = simulated.step(simulated.start(), 0)
    before = np.array(state.clients["kernel"])
    state, _ = simulated.step(state, 1)
    absent = np.setdiff1d(np.arange(5), simulated.clients_of(1)[0])
    assert len(absent)
    np.testing.assert_array_equal(before[absent], np.array(state.clients["kernel"])[absent])


@pytest.mark.thorough
def test_adams_first_step_on_the_body_is_a_first_step_although_the_head_went_before():
    simulated = toy.simulation(
        "fedrep", head_epochs=3, body_epochs=1, batch_size=30, cohort=1, optimizer="adam", lr=0.01
    )  # one step an epoch
    before = body(simulated.start())
    state, _ = simulated.step(simulated.start(), 0)
    moved = max(np.abs(a - b).max() for a, b in zip(before, body(state), strict=True))
    np.testing.assert_allclose(moved, 0.01, 1e-3)


def one_of(state, k):
    """The server, and the state of client k."""
    return jax.tree.map(lambda x: x[0], state.servers), jax.tree.map(lambda x: x[k], state.clients)


def test_personal_model_is_the_shared_body_under_the_own_head():
    simulated = toy.simulation("fedrep")
    state, _ = toy.train(simulated, (0,))
    k = int(simulated.clients_of(0)[0][-1])
    server, client = one_of(state, k)
    expected = {"params": {"backbone": server.variables["params"]["backbone"], "head": client}}
    found = FedRep().personal_variables(server, client)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.thorough
def test_pa_counts_the_clients_own_tests_under_its_personal_model():
    simulated = toy.simulation("fedrep")
    state, _ = toy.train(simulated)
    federation = simulated.experiments[0].federation
    expected = np.zeros((5, toy.CLASSES))
    for k, tests in enumerate(federation.partition.test):
        images = prepare(Pipeline(), federation.dataset.x_test[tests], None, train=False)
        server, client = one_of(state, k)
        variables = {"params": server.variables["params"] | {"head": client}}
        guess = np.argmax(forward(simulated.program.model, variables, images, train=False)[0].logits, -1)
        np.add.at(expected[k], federation.dataset.y_test[tests], guess == federation.dataset.y_test[tests])
    found = np.array(simulated.evaluate(state, personal=True).personal)
    np.testing.assert_array_equal(found, expected)
    assert 0 < expected.sum() < sum(map(len, federation.partition.test))


@pytest.mark.thorough
def test_without_epochs_of_the_head_it_is_fedavg_of_the_body_under_the_initial_head():
    state, _ = toy.train(toy.simulation("fedrep", head_epochs=0, body_epochs=2))
    expected, _ = toy.train(toy.simulation("fedbabu"))
    for a, b in zip(body(state), body(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-6)


def test_no_epochs_at_all_are_a_users_mistake():
    with pytest.raises(UserError, match="head_epochs"):
        toy.simulation("fedrep", head_epochs=0, body_epochs=0)


@pytest.mark.parametrize(("head_epochs", "expected"), [(None, 10), (3, 10), (12, 12)])
def test_heads_are_fine_tuned_for_as_many_epochs_as_in_a_round_and_at_least_those_asked_for(head_epochs, expected):
    setting = toy.simulation("fedrep").program.setting
    tuner = FedRep(head_epochs=head_epochs).fine_tuner(setting, 10)
    assert tuner.traits().epochs == expected


@pytest.mark.thorough
def test_heads_are_fine_tuned_only_if_asked_for():
    assert not FedRep().traits().fine_tunes
    assert FedRep(fine_tune_heads=True).traits().fine_tunes
