"""FedRep: personal heads on a shared body."""

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
    ("local_epochs", "hyper", "expected"),
    [(10, {}, 10), (1, {}, 2), (10, {"body_epochs": 5}, 10), (10, {"head_epochs": 10}, 11), (10, PHASES, 2)],
    ids=["9 and 1", "1 and 1", "5 and 5", "10 and 1", "1 and 1 as given"],
)
def test_local_epochs_count_both_phases(local_epochs, hyper, expected):
    assert (toy.simulation("fedrep", epochs=local_epochs, **hyper).epochs == expected).all()


@pytest.mark.thorough
def test_by_default_the_head_trains_in_all_epochs_but_the_last():
    default, _ = toy.train(toy.simulation("fedrep"))
    explicit, _ = toy.train(toy.simulation("fedrep", head_epochs=1, body_epochs=1))
    assert not np.allclose(body(default)[0], body(toy.simulation("fedrep").start())[0], atol=1e-4)
    jax.tree.map(
        np.testing.assert_array_equal, (default.servers, default.clients), (explicit.servers, explicit.clients)
    )


@pytest.mark.thorough
def test_the_body_is_trained_in_each_clients_last_epoch():
    simulated = toy.simulation("fedrep", epochs=(6, 2, 2, 2, 2))
    state, _ = simulated.step(simulated.start(), 0, simulated.plan(0, [np.array([1])]))
    two_epochs = toy.simulation("fedrep", epochs=2)
    expected, _ = two_epochs.step(two_epochs.start(), 0, two_epochs.plan(0, [np.array([1])]))
    assert np.abs(body(state)[0] - body(simulated.start())[0]).max() > 1e-4
    for a, b in zip(body(state), body(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.thorough
def test_the_body_does_not_change_in_head_epochs():
    simulated = toy.simulation("fedrep", head_epochs=2, body_epochs=0)
    before, heads = body(simulated.start()), np.array(simulated.start().clients["kernel"])
    state, _ = simulated.step(simulated.start(), 0)
    for a, b in zip(before, body(state), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-7)
    selected = simulated.clients_of(0)[0]
    assert all(np.abs(np.array(state.clients["kernel"]) - heads)[selected].max(axis=(1, 2)) > 1e-4)


@pytest.mark.thorough
def test_heads_of_unselected_clients_are_bitwise_unchanged():
    simulated = toy.simulation("fedrep")
    state, _ = simulated.step(simulated.start(), 0)
    before = np.array(state.clients["kernel"])
    state, _ = simulated.step(state, 1)
    unselected = np.setdiff1d(np.arange(5), simulated.clients_of(1)[0])
    assert len(unselected)
    np.testing.assert_array_equal(before[unselected], np.array(state.clients["kernel"])[unselected])


@pytest.mark.thorough
def test_adam_starts_afresh_on_the_body_after_the_head_epochs():
    simulated = toy.simulation(
        "fedrep", head_epochs=3, body_epochs=1, batch_size=30, cohort=1, optimizer="adam", lr=0.01
    )  # one step per epoch
    before = body(simulated.start())
    state, _ = simulated.step(simulated.start(), 0)
    moved = max(np.abs(a - b).max() for a, b in zip(before, body(state), strict=True))
    np.testing.assert_allclose(moved, 0.01, 1e-3)


def server_and_client(state, k):
    """The server, and the state of client k."""
    return jax.tree.map(lambda x: x[0], state.servers), jax.tree.map(lambda x: x[k], state.clients)


def test_personal_model_is_the_shared_body_with_the_clients_head():
    simulated = toy.simulation("fedrep")
    state, _ = toy.train(simulated, (0,))
    k = int(simulated.clients_of(0)[0][-1])
    server, client = server_and_client(state, k)
    expected = {"params": {"backbone": server.variables["params"]["backbone"], "head": client}}
    variables = FedRep().personal_variables(server, client)
    assert jax.tree.structure(variables) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, variables, expected)


@pytest.mark.thorough
def test_pa_counts_each_clients_test_samples_under_its_personal_model():
    simulated = toy.simulation("fedrep")
    state, _ = toy.train(simulated)
    federation = simulated.experiments[0].federation
    expected = np.zeros((5, toy.CLASSES))
    for k, indices in enumerate(federation.partition.test):
        images = prepare(Pipeline(), federation.dataset.x_test[indices], None, train=False)
        server, client = server_and_client(state, k)
        variables = {"params": server.variables["params"] | {"head": client}}
        predictions = np.argmax(forward(simulated.program.model, variables, images, train=False)[0].logits, -1)
        np.add.at(expected[k], federation.dataset.y_test[indices], predictions == federation.dataset.y_test[indices])
    correct = np.array(simulated.evaluate(state, personal=True).personal)
    np.testing.assert_array_equal(correct, expected)
    assert 0 < expected.sum() < sum(map(len, federation.partition.test))


@pytest.mark.thorough
def test_without_head_epochs_it_is_fedavg_of_the_body_with_the_initial_head():
    state, _ = toy.train(toy.simulation("fedrep", head_epochs=0, body_epochs=2))
    expected, _ = toy.train(toy.simulation("fedbabu"))
    for a, b in zip(body(state), body(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-6)


def test_no_epochs_at_all_are_refused():
    with pytest.raises(UserError, match="head_epochs"):
        toy.simulation("fedrep", head_epochs=0, body_epochs=0)


@pytest.mark.parametrize(("head_epochs", "expected"), [(None, 10), (3, 10), (12, 12)])
def test_heads_are_tuned_for_a_rounds_epochs_and_at_least_head_epochs(head_epochs, expected):
    setting = toy.simulation("fedrep").program.setting
    tuner = FedRep(head_epochs=head_epochs).fine_tuner(setting, 10)
    assert tuner.traits().epochs == expected


@pytest.mark.thorough
def test_heads_are_fine_tuned_only_if_asked():
    assert not FedRep().traits().fine_tunes
    assert FedRep(fine_tune_heads=True).traits().fine_tunes
