"""Pictures: names are drawn as they are, however odd, and any number of bars has a colour."""

import numpy as np
import pytest

from fedjax_pcdd.analysis.burden import Burden, draw_burdens
from fedjax_pcdd.analysis.curves import draw_curves
from fedjax_pcdd.analysis.domain_figures import draw_bars, draw_tasks
from fedjax_pcdd.analysis.pictures import draw, draw_bilateral, draw_columns, draw_matrices
from fedjax_pcdd.analysis.ranks import draw_ranks, ranks
from fedjax_pcdd.data.federation import Map, heat_maps

ODD = "x$^$y"  # as a formula it cannot be parsed
ANGLES = [{"round": 1, "angles": {"global": {"existing": 60.0, "missing": 50.0}, "local": {"existing": 9.0}}}]
ROUNDS = [{"round": i, "ga": 0.5, "pa": 0.5, "loss": 1.0, "intra_top1": 0.5, "local_objective": 0.5} for i in (1, 2)]
DRAWN = {
    "track": lambda path: draw("angles", {ODD: ANGLES, "b": ANGLES}, path),
    "columns": lambda path: draw_columns("angles", {ODD: {ODD: ANGLES}}, path),
    "bilateral": lambda path: draw_bilateral({ODD: np.ones((2, 5))}, {ODD: [1.0, 1.0]}, path),
    "matrices": lambda path: draw_matrices(np.eye(3)[None], np.eye(3)[None], [ODD], path),
    "tasks": lambda path: draw_tasks({ODD: ROUNDS}, 1, path),
    "bars": lambda path: draw_bars({ODD: {f"{ODD}{i}": [0.5, 0.4] for i in range(20)}}, ["a", "b"], path),
    "burdens": lambda path: draw_burdens([Burden(ODD, 1, 1, 0.5)], path),
    "ranks": lambda path: draw_ranks([ODD, "b"], ranks(np.array([[[0.2]], [[0.1]]])), path),
    "curves": lambda path: draw_curves(ROUNDS, path, ODD, {"ga": 1, "pa": None}),
    "heat map": lambda path: heat_maps([Map(ODD, np.ones((2, 3), int), [ODD, "b", "c"])], path),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_name_with_dollars_is_drawn(tmp_path, name):
    DRAWN[name](tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_single_points_of_the_clients_models_are_hollow(tmp_path):
    draw("angles", {"a": ANGLES}, tmp_path / "both.svg")
    hollow = (tmp_path / "both.svg").read_text().count("fill: #ffffff; stroke: #0072b2")
    draw("angles", {"a": [{"round": 1, "angles": {"global": {"existing": 60.0}}}]}, tmp_path / "one.svg")
    assert hollow > (tmp_path / "one.svg").read_text().count("fill: #ffffff; stroke: #0072b2")
