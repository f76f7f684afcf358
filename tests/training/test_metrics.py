"""The history of a run: its copies in checkpoints, and the accuracies that a summary takes from it."""

import json

import jax
import numpy as np
import pytest

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.training import metrics
from fedjax_pcdd.training.folder import dumps
from fedjax_pcdd.training.metrics import SELECTED, History, new_history


def add_rounds(history, rounds):
    for round in rounds:
        history.rows.append({"round": round, "ga": round / 7, "pa": None, "ga_per_class": [1 / 3, None]})
        history.update_clients([round % 3], np.array([round / 11]))
        history.update_best(np.full(3, round / 13))


def test_every_checkpoint_gives_back_the_history_of_its_round():
    history = new_history(3)
    texts = []
    for round in range(1, 5):
        add_rounds(history, [round])
        texts.append(history.to_json())
    for rounds, text in enumerate(texts, 1):
        expected = new_history(3)
        add_rounds(expected, range(1, rounds + 1))
        assert History(**json.loads(text)) == expected


def test_a_restored_history_goes_on_as_if_not_interrupted():
    whole, interrupted = new_history(3), new_history(3)
    add_rounds(whole, range(1, 6))
    add_rounds(interrupted, range(1, 3))
    restored = History(**json.loads(interrupted.to_json()))
    add_rounds(restored, range(3, 6))
    assert restored.to_json() == whole.to_json()


def test_a_row_is_encoded_once_however_many_checkpoints_follow(monkeypatch):
    encoded = []
    monkeypatch.setattr(metrics.json, "dumps", lambda value, **_: encoded.append(value) or "{}")
    history = new_history(3)
    for round in range(1, 9):
        add_rounds(history, [round])
        history.to_json()
    assert [value["round"] for value in encoded if "round" in value] == list(range(1, 9))


@pytest.mark.parametrize("entry", [{(0, 1): 1.0}, {"key": jax.random.key(0)}, {"set": {1}}], ids=str)
def test_a_row_that_json_cannot_hold_is_refused(entry):
    with pytest.raises(UserError, match=r"^a callback records what cannot be written: .*\.$"):
        History([entry]).to_json()


def test_a_random_key_in_a_row_is_refused_where_it_is_written():
    with pytest.raises(UserError, match="a callback keeps or records what cannot be written"):
        dumps({"key": jax.random.key(0)})


def test_ga_of_local_models_is_that_of_each_clients_best_round_by_own_tests():
    history = new_history(3)  # the third client has no tests, so it is left out
    for pa, ga in (([0.9, 0.7, np.nan], [0.30, 0.35, 1.0]), ([0.8, 0.95, np.nan], [0.40, 0.20, 1.0])):
        history.update_clients(np.arange(3), np.array(pa))
        history.update_best(np.array(ga))
    summary = metrics.result(History(**json.loads(history.to_json())), METHODS["fedproto"]())
    assert summary["ga_best"] == pytest.approx(0.25)
    assert summary["ga_best_mean"] == pytest.approx(0.325)
    assert summary["ga_best_clients"] == pytest.approx(0.375)


def test_best_local_models_have_no_common_best_round():
    history = new_history(1)
    history.rows.append({"round": 1, "ga": 0.5, "pa": 0.5})
    best_rounds = [metrics.result(history, METHODS[name]())["ga_best_round"] for name in ("fedavg", "fedproto")]
    assert best_rounds == [1, None]


def test_a_summary_says_that_tests_choose_the_rounds_of_local_models_even_where_validation_chooses_others():
    history = new_history(1)
    history.select_on = "validation"
    summaries = [metrics.result(history, METHODS[name]()) for name in ("fedavg", "fedproto")]
    assert [summary.get("ga_best_selected_on") for summary in summaries] == [None, "test"]


def test_pa_under_every_protocol_has_the_best_round_that_validation_chooses():
    history = new_history(1)
    for round, (pa, on_validation, received) in enumerate(((0.5, 0.9, 0.2), (0.6, 0.3, 0.8)), 1):
        history.rows.append({"round": round, "pa": pa, "pa_validation": on_validation, "pa_received": received})
    history.select_on = "validation"
    assert (history.best("pa"), history.best("pa_received")) == ((0.5, 1), (0.2, 1))


def test_the_first_of_a_clients_equally_good_rounds_gives_its_ga():
    history = new_history(1)
    for ga in (0.3, 0.4):
        history.update_clients(np.array([0]), np.array([0.9]))
        history.update_best(np.array([ga]))
    assert history.ga_of_best.tolist() == [0.3]


def test_best_accuracies_of_clients_are_those_of_their_own_best_rounds():
    history = new_history(2)
    for pa in ([0.9, 0.5], [0.7, 0.8]):
        history.update_clients(np.arange(2), np.array(pa))
        history.update_best(None)
    summary = metrics.result(history, METHODS["fedavg"]())
    assert summary["pa_best_per_client"] == [0.9, 0.8]
    assert summary["pa_best_clients"] == pytest.approx(0.85)


def test_the_best_loss_is_the_smallest():
    rows = [{"round": r, "ga": ga, "loss": loss} for r, ga, loss in ((1, 0.2, 3.0), (2, 0.3, 2.0), (3, 0.1, 4.0))]
    history = new_history(2)
    history.rows.extend(rows)
    assert (history.best("ga"), history.best("loss")) == ((0.3, 2), (2.0, 2))
    assert history.best("ga_validation") == (None, None)
    with pytest.raises(UserError, match="no round has 'gaa': did you mean 'ga'"):
        history.last("gaa")


def test_the_mean_of_the_last_ten_is_over_ten_evaluated_rounds():
    history = new_history(1)
    history.rows += [{"round": r, "ga": None if r % 2 else r / 64, "pa": r / 64} for r in range(1, 31)]
    summary = metrics.result(history, METHODS["fedavg"]())
    assert summary["ga_mean_last10"] == pytest.approx(np.mean(range(12, 31, 2)) / 64)
    assert summary["pa_mean_last10"] == pytest.approx(np.mean(range(21, 31)) / 64)


@pytest.mark.parametrize(("clients", "worst"), [(10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_size_of_the_worst_tenth_is_rounded_up(clients, worst):
    assert metrics.spread(np.arange(clients))["pa_worst10"] == np.mean(range(worst))


def test_a_checkpoint_of_very_many_clients_holds_only_the_measured_ones():
    history = metrics.new_history(metrics.MOST_WRITTEN + 1)
    history.update_clients(np.array([3, 7000]), np.array([0.25, 1.0]), "pa_last")
    history.pa_clients = history.also["pa_last"].copy()
    history.update_best(None)
    text = history.to_json()
    assert len(text) < 1000
    restored = metrics.History(**json.loads(text))
    assert restored == history
    assert restored.best_pa_clients[[3, 7000]].tolist() == [0.25, 1.0]


@pytest.mark.parametrize("select_on", SELECTED)
def test_a_round_is_best_if_it_is_the_first_with_the_maximum_of_what_chooses(select_on):
    draw = np.random.default_rng(0)
    history = History(select_on=select_on)
    found = []
    for number in range(1, 200):
        row = {f"ga{suffix}": draw.integers(0, 1 + number // 4) / 60 for suffix in SELECTED.values()}
        history.rows.append({"round": number} | (row if draw.random() < 0.7 else {}))
        if draw.random() < 0.8:  # not asked after every round
            assert history.is_best("ga") == history.is_best("ga") == (history.best("ga")[1] == number)
            found.append(history.is_best("ga"))
    assert 5 < sum(found) < 100
    assert not History().is_best("ga")
