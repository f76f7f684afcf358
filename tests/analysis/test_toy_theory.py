"""The three-class example of FedMR's section 3.2, and rounds to an accuracy."""

import csv
from pathlib import Path

import numpy as np
import pytest

from fedjax_pcdd.analysis.curves import rounds_to, speed_up
from fedjax_pcdd.analysis.toy import error_rates, optimal_pair, three_class_aggregation


def test_mean_of_the_clients_is_the_printed_matrix():
    aggregation = three_class_aggregation()
    height = (np.sqrt(3) + 2) / 6
    np.testing.assert_allclose(aggregation.aggregated, [[1 / 3, 0], [-1 / 6, height], [-1 / 6, -height]], atol=1e-15)


def test_second_and_third_class_turn_by_exactly_45_degrees():
    np.testing.assert_allclose(three_class_aggregation().angle_shift_degrees, [0, 45, 45], atol=1e-12)


def test_printed_clients_are_the_solutions_for_the_printed_centres():
    clients = three_class_aggregation().clients
    for k, present in enumerate([(0, 1), (0, 2), (1, 2)]):
        np.testing.assert_allclose(clients[k], optimal_pair(present), atol=1e-15)


def test_mean_classifies_all_discs_correctly_and_the_printed_optimum_does_not():
    aggregation = three_class_aggregation()
    assert error_rates(aggregation.aggregated).max() == 0
    first, *others = error_rates(aggregation.optimal)
    assert first == 0
    assert others == pytest.approx([0.02, 0.02], abs=0.004)


def test_regular_simplex_would_turn_by_15_degrees():
    simplex = np.array([[1, 0], [-0.5, np.sqrt(3) / 2], [-0.5, -np.sqrt(3) / 2]])
    mean = three_class_aggregation().aggregated
    cosines = (simplex * mean).sum(1) / np.linalg.norm(mean, axis=1)
    np.testing.assert_allclose(np.degrees(np.arccos(np.clip(cosines, -1, 1))), [0, 15, 15], atol=1e-6)


def test_speed_ups_are_those_that_fedmr_prints():
    """Rounds and speed-ups of Table 4 agree with each other wherever both are printed."""
    text = (Path(__file__).parents[2] / "fedjax_pcdd/papers/expected/fedmr_table4.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    cells = {}
    for row in rows:
        cells.setdefault((row["split"], row["method"]), {})[row["metric"]] = row["value"]
    checked = 0
    for values in cells.values():
        if {"rounds_to_target", "speedup"} <= values.keys() and values["rounds_to_target"].isdigit():
            assert speed_up(int(values["rounds_to_target"]), 400) == pytest.approx(float(values["speedup"]), abs=0.006)
            checked += 1
    assert checked > 5


def test_a_target_that_is_never_reached_has_no_round():
    assert rounds_to(np.array([0.1, np.nan, 0.3]), 0.4) is None
    assert speed_up(None, 400) is None
