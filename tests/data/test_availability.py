"""Availability of clients: selection, dropout, weights of a round, and files of probabilities."""

from pathlib import Path

import jax
import numpy as np
import pytest
import toy

import fedjax_pcdd as fp
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.availability import Availability, availability
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.schedule import cohort
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.models import build as build_model
from fedjax_pcdd.training.config import RunConfig, build
from fedjax_pcdd.training.inputs import check_inputs
from fedjax_pcdd.training.tasks import setup


def build_simulation(client_availability=None, method_name="scaffold"):
    federation, method = toy.federation(), METHODS[method_name]()
    model = build_model("mlp", num_classes=toy.CLASSES, image_shape=federation.image_shape)
    experiment = Experiment(federation, method, Local(1, 8, "keep", lr=0.05), 0, availability=client_availability)
    return Simulation(method.build(model), [experiment], pipeline=Pipeline(), cohort=4, rounds=3)


def test_unavailable_clients_are_not_selected_and_dropped_out_ones_weigh_nothing():
    client_availability = Availability(np.array([[1, 0, 1, 1, 1], [1, 1, 1, 1, 0]]), np.array([0, 0, 0, 1, 0]))
    simulation = build_simulation(client_availability)
    assert [simulation.clients_of(r)[0].tolist() for r in (0, 1, 2)] == [[0, 2, 4], [0, 1, 2], [0, 2, 4]]
    jobs = simulation.plan(0)[1]
    assert jobs.steps[3] == jobs.weight[3] == 0
    assert jobs.weight.sum() == pytest.approx(1)


def test_every_round_draws_anew_which_of_its_clients_drop_out():
    client_availability = Availability(np.ones((1, 5)), np.full(5, 0.5))
    unreliable, reliable = build_simulation(client_availability), build_simulation()
    for round in range(6):
        (selected,) = reliable.clients_of(round)
        stays = client_availability.stay(0, round)[selected]
        np.testing.assert_array_equal(unreliable.clients_of(round)[0], selected[stays])


@pytest.mark.thorough
def test_a_round_equals_one_of_only_the_clients_that_stay():
    """Absent clients keep their state, and the weights are of those that train."""
    client_availability = Availability(np.array([[1, 0, 1, 1, 1]]), np.array([0, 0, 0, 1, 0]))
    unreliable, reliable = build_simulation(client_availability), build_simulation()
    states = [
        unreliable.step(unreliable.start(), 0),
        reliable.step(reliable.start(), 0, reliable.plan(0, [np.array([0, 2, 4])])),
    ]
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_a_round_without_available_clients_changes_nothing():
    simulation = build_simulation(Availability(np.zeros((1, 5)), np.zeros(5)))
    before = jax.tree.map(np.array, simulation.start())
    after, _ = simulation.step(simulation.start(), 0)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_all_clients_are_fine_tuned_even_if_unavailable():
    tuner = build_simulation(Availability(np.zeros((1, 5)), np.zeros(5)), "fedavg").tuner(1)
    assert len(tuner.clients_of(0)[0]) == 5


def test_the_model_has_days_of_24_rounds_and_new_draws_in_every_round():
    small, large = (availability("model", 0.2, clients, 7) for clients in (50, 2000))
    assert [len(model.probability) for model in (small, large)] == [24, 24]
    available = np.stack([large.available(7, r) for r in range(48)])
    np.testing.assert_array_equal(available[3], large.available(7, 3))
    assert (available[3] != available[27]).any()
    noise = available.mean(0) - large.probability.mean(0)  # the probabilities of clients have a spread of 0.12
    assert noise.std() < 0.09
    assert (np.ptp(large.probability, 0) > 0.2).all()
    assert 0.3 < available.mean() < 0.5
    assert large.stay(7, 0).mean() == pytest.approx(0.8, abs=0.03)
    assert availability(None, 0.0, 50, 7) is None


def test_the_model_swings_between_a_tenth_and_eleven_tenths_of_each_clients_own_amplitude():
    probability = availability("model", 0.0, 2000, 7).probability
    low, high, amplitude = probability.min(0), probability.max(0), probability.mean(0) / 0.6
    uncut = high < 1
    np.testing.assert_allclose(low[uncut] / amplitude[uncut], 0.1, atol=0.01)  # the extremes lie between two rounds
    np.testing.assert_allclose(high[uncut] / amplitude[uncut], 1.1, atol=0.01)
    assert (amplitude.min(), high.max()) == (pytest.approx(0.3, abs=0.01), 1.0)
    assert (~uncut).mean() == pytest.approx(1 - (1 / 1.1 - 0.3) / 0.7, abs=0.02)


def test_the_probabilities_of_the_model_are_those_of_the_seed():
    first, again, other = (availability("model", 0.0, 50, seed).probability for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any(0).all()


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x": np.zeros(5)}, "holds no probability of clients"),
        ({"probability": np.zeros((24, 4))}, r"probability is \[24, 4\], but there are 5 clients"),
        ({"probability": np.full(5, 1.5)}, "probability must be numbers from 0 to 1"),
        ({"probability": np.ones(5), "lost": np.ones((2, 5))}, "lost is"),
        ({"probability": np.zeros((2, 5))}, "no client is ever there until a round ends"),
        ({"probability": np.eye(5) > 0, "lost": np.ones(5) > 0}, "no client is ever there until a round ends"),
    ],
)
def test_unsuitable_files_are_refused_with_a_sentence(tmp_path, arrays, sentence):
    np.savez(tmp_path / "there.npz", **arrays)
    with pytest.raises(fp.UserError, match=sentence):
        availability(str(tmp_path / "there.npz"), 0.0, 5, 0)


def test_probabilities_of_a_file_repeat_and_it_may_set_dropouts(tmp_path):
    np.savez(tmp_path / "there.npz", probability=[[0, 1], [1, 0]], lost=[0.0, 1.0])
    from_file = availability(str(tmp_path / "there.npz"), 0.0, 2, 0)
    assert [from_file.available(0, r).tolist() for r in (0, 1, 2)] == [[False, True], [True, False], [False, True]]
    assert from_file.stay(0, 0).tolist() == [True, False]
    with pytest.raises(fp.UserError, match="says who is lost: drop lost_share"):
        availability(str(tmp_path / "there.npz"), 0.5, 2, 0)


@pytest.mark.thorough
def test_availability_dropout_and_selection_are_independent():
    clients, rounds, cohort_size = 20, 6000, 3
    client_availability = Availability(np.full((1, clients), 0.3), np.full(clients, 0.1))
    available = np.stack([client_availability.available(5, r) for r in range(rounds)])
    stays = np.stack([client_availability.stay(5, r) for r in range(rounds)])
    selected = np.zeros_like(available)
    for r in range(rounds):
        selected[r, cohort(5, r, np.arange(clients), cohort_size, available[r])] = True
    deviation = np.sqrt(0.09 / available.sum())
    assert 1 - stays[available].mean() == pytest.approx(0.1, abs=4 * deviation)
    assert 1 - stays[selected].mean() == pytest.approx(0.1, abs=4 * np.sqrt(0.09 / selected.sum()))
    selection_rates = selected.sum(0) / available.sum(0)
    assert np.ptp(selection_rates) < 0.1  # each is about 0.5, over some 1800 rounds
    cohorts = np.stack([cohort(5, r, np.arange(clients), cohort_size) for r in range(rounds)])
    dropout_rates = np.array([1 - stays[(cohorts == k).any(1), k].mean() for k in range(clients)])
    assert dropout_rates.max() < 0.16


def test_a_run_with_other_draws_of_clients_is_not_resumed():
    options = {"method": "fedavg", "clients": 4, "beta": 1.0, "lost_share": 0.5}
    configurations = [build(options), build(options | {"seed": 1}), build(options | {"lost_share": 0.0})]
    inputs, other_seed, no_dropout = (
        {"options": {}, "availability": setup([configuration]).inputs(0, *configuration)["availability"]}
        for configuration in configurations
    )
    assert no_dropout["availability"] is None
    check_inputs(inputs, inputs, Path("run"), print)
    for recorded in (other_seed, no_dropout, {"options": {}}):  # the last is of a version that recorded no availability
        with pytest.raises(fp.UserError, match="clients were drawn otherwise when the run in run began"):
            check_inputs(recorded, inputs, Path("run"), print)
    check_inputs({"options": {}}, no_dropout, Path("run"), print)


def test_the_first_round_of_the_model_follows_its_probabilities():
    model = availability("model", 0.0, 20_000, 3)
    available, probabilities = model.available(3, 0), model.probability[0]
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 0.9)):
        clients = (probabilities >= low) & (probabilities < high)
        assert available[clients].mean() == pytest.approx(probabilities[clients].mean(), abs=0.03)


@pytest.mark.parametrize("options", [{"availability": "night"}, {"lost_share": 0.1, "task": "digits_domains"}])
def test_unsuitable_options_are_refused(options):
    with pytest.raises(fp.UserError, match="availability"):
        RunConfig(**options, local_epochs=1)


def test_a_file_without_rounds_is_refused(tmp_path):
    np.savez(tmp_path / "none.npz", probability=np.zeros((0, 3)))
    with pytest.raises(fp.UserError, match="give one each"):
        availability(str(tmp_path / "none.npz"), 0.0, 3, 0)
