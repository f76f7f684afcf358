"""Clients that are not always there: who is drawn, who is lost, what counts, and files of probabilities."""

from pathlib import Path

import jax
import numpy as np
import pytest
import toy

import fedjax_pcdd as fp
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.availability import Availability, availability
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.engine.schedule import cohort
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.models import build as build_model
from fedjax_pcdd.training.config import RunConfig, build
from fedjax_pcdd.training.inputs import check_inputs
from fedjax_pcdd.training.tasks import setup


def simulated(known=None, name="scaffold"):
    parts, method = toy.federation(), METHODS[name]()
    model = build_model("mlp", num_classes=toy.CLASSES, image_shape=parts.image_shape)
    experiment = Experiment(parts, method, Local(1, 8, "keep", lr=0.05), 0, availability=known)
    return Simulation(method.build(model), [experiment], pipeline=Pipeline(), cohort=4, rounds=3)


def test_nobody_is_drawn_who_is_not_there_and_nobody_counts_who_is_lost():
    known = Availability(np.array([[1, 0, 1, 1, 1], [1, 1, 1, 1, 0]]), np.array([0, 0, 0, 1, 0]))
    one = simulated(known)
    assert [one.clients_of(r)[0].tolist() for r in (0, 1, 2)] == [[0, 2, 4], [0, 1, 2], [0, 2, 4]]
    jobs = one.plan(0)[1]
    assert jobs.steps[3] == jobs.weight[3] == 0
    assert jobs.weight.sum() == pytest.approx(1)


@pytest.mark.thorough
def test_a_round_is_that_of_the_clients_that_stayed():
    """Which `test_contract` asks of every method: those absent keep their state, weights are of those who trained."""
    known = Availability(np.array([[1, 0, 1, 1, 1]]), np.array([0, 0, 0, 1, 0]))
    one, other = simulated(known), simulated()
    states = [one.step(one.start(), 0), other.step(other.start(), 0, other.plan(0, [np.array([0, 2, 4])]))]
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_a_round_without_anybody_changes_nothing():
    one = simulated(Availability(np.zeros((1, 5)), np.zeros(5)))
    before = jax.tree.map(np.array, one.start())
    after, _ = one.step(one.start(), 0)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_all_are_tuned_whoever_is_there():
    tuner = simulated(Availability(np.zeros((1, 5)), np.zeros(5)), "fedavg").tuner(1)
    assert len(tuner.clients_of(0)[0]) == 5


def test_the_model_has_days_and_draws_that_belong_to_the_client():
    small, large = (availability("model", 0.2, clients, 7) for clients in (50, 2000))
    assert [len(one.probability) for one in (small, large)] == [24, 24]
    there = np.stack([large.available(7, r) for r in range(48)])
    np.testing.assert_array_equal(there[3], large.available(7, 3))
    assert (there[3] != there[27]).any()
    np.testing.assert_allclose(large.probability.mean(0), there.mean(0), atol=0.4)
    assert (np.ptp(large.probability, 0) > 0.2).all()
    assert 0.3 < there.mean() < 0.5
    assert large.stay(7, 0).mean() == pytest.approx(0.8, abs=0.03)
    assert availability(None, 0.0, 50, 7) is None


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
def test_a_file_of_something_else_is_a_sentence(tmp_path, arrays, sentence):
    np.savez(tmp_path / "there.npz", **arrays)
    with pytest.raises(fp.UserError, match=sentence):
        availability(str(tmp_path / "there.npz"), 0.0, 5, 0)


def test_a_file_is_repeated_and_may_say_who_is_lost(tmp_path):
    np.savez(tmp_path / "there.npz", probability=[[0, 1], [1, 0]], lost=[0.0, 1.0])
    known = availability(str(tmp_path / "there.npz"), 0.0, 2, 0)
    assert [known.available(0, r).tolist() for r in (0, 1, 2)] == [[False, True], [True, False], [False, True]]
    assert known.stay(0, 0).tolist() == [True, False]
    with pytest.raises(fp.UserError, match="says who is lost: drop lost_share"):
        availability(str(tmp_path / "there.npz"), 0.5, 2, 0)


@pytest.mark.thorough
def test_who_is_there_who_is_lost_and_who_is_drawn_are_independent():
    clients, rounds, size = 20, 6000, 3
    known = Availability(np.full((1, clients), 0.3), np.full(clients, 0.1))
    there = np.stack([known.available(5, r) for r in range(rounds)])
    stay = np.stack([known.stay(5, r) for r in range(rounds)])
    drawn = np.zeros_like(there)
    for r in range(rounds):
        drawn[r, cohort(5, r, np.arange(clients), size, there[r])] = True
    deviation = np.sqrt(0.09 / there.sum())
    assert 1 - stay[there].mean() == pytest.approx(0.1, abs=4 * deviation)
    assert 1 - stay[drawn].mean() == pytest.approx(0.1, abs=4 * np.sqrt(0.09 / drawn.sum()))
    shares = drawn.sum(0) / there.sum(0)
    assert np.ptp(shares) < 0.1  # some 0.5, of 1800 rounds each
    everyone = np.stack([cohort(5, r, np.arange(clients), size) for r in range(rounds)])
    lost = np.array([1 - stay[(everyone == k).any(1), k].mean() for k in range(clients)])
    assert lost.max() < 0.16


def test_a_run_whose_clients_were_drawn_otherwise_is_not_continued():
    given = {"method": "fedavg", "clients": 4, "beta": 1.0, "lost_share": 0.5}
    pairs = [build(given), build(given | {"seed": 1}), build(given | {"lost_share": 0.0})]
    one, other, nobody = ({"options": {}, "availability": setup([p]).inputs(0, *p)["availability"]} for p in pairs)
    assert nobody["availability"] is None
    check_inputs(one, one, Path("run"), print)
    for before in (other, nobody, {"options": {}}):  # the last as one of before this was noted
        with pytest.raises(fp.UserError, match="clients were drawn otherwise when the run in run began"):
            check_inputs(before, one, Path("run"), print)
    check_inputs({"options": {}}, nobody, Path("run"), print)


def test_the_first_round_of_the_model_follows_its_probabilities():
    known = availability("model", 0.0, 20_000, 3)
    there, chances = known.available(3, 0), known.probability[0]
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 0.9)):
        some = (chances >= low) & (chances < high)
        assert there[some].mean() == pytest.approx(chances[some].mean(), abs=0.03)


@pytest.mark.parametrize("options", [{"availability": "night"}, {"lost_share": 0.1, "task": "digits_domains"}])
def test_options_that_make_no_sense_are_a_sentence(options):
    with pytest.raises(fp.UserError, match="availability"):
        RunConfig(**options, local_epochs=1)


def test_a_file_without_rounds_is_refused(tmp_path):
    np.savez(tmp_path / "none.npz", probability=np.zeros((0, 3)))
    with pytest.raises(fp.UserError, match="give one each"):
        availability(str(tmp_path / "none.npz"), 0.0, 3, 0)
