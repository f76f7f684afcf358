"""GA by ten rounds at the length of the papers."""

import numpy as np
import pytest
from made_up_results import made_up

from reproduction.columns import columns
from reproduction.lengths import FILE, lengths_section


def run(method, first, then, seed, *, scale="long", **options):
    """A result whose GA is `first` percent in ten rounds and `then` in the ten (and three) that follow."""
    ga = [first / 100] * 10 + [then / 100] * 13
    return made_up(method, then, seed, split="P5C2", **options) | {"scale": scale, "ga": ga}


def section(results):
    lines, pictures = lengths_section(columns(results, {}))
    return "\n".join(lines), pictures


def test_means_of_ten_rounds_stand_beside_their_differences_from_fedavg():
    runs = [run("fedavg", 30, 60, seed) for seed in (0, 1)]
    runs += [run("fedmr", 40 + 2 * seed, 50, seed, tag="all", negatives="all") for seed in (0, 1)]
    text, pictures = section(runs)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == ["method", "10", "20"]
    assert lines[2:] == [
        ["fedavg", "30.00 ± 0.00", "60.00 ± 0.00"],
        ["fedmr all", "41.00 ± 1.41", "50.00 ± 0.00"],
        ["fedmr all less fedavg", "+11.00 ± 1.00", "−10.00 ± 0.00"],
    ]
    assert f"]({FILE})" in text
    assert 'aria-label="GA by ten rounds at the length of the papers: P5C2 fedavg, fedmr all"' in pictures[FILE]


def test_rounds_that_were_not_tested_are_left_out():
    result = run("fedavg", 30, 60, 0) | {"ga": [None, 0.2, 0.4] + 17 * [None]}
    (line,) = [line for line in section([result])[0].splitlines() if line.startswith("| fedavg")]
    assert line.split("|")[2].strip() == f"{np.mean([20, 40]):.2f}"


@pytest.mark.parametrize(
    "results", [[], [run("fedavg", 1, 2, 0, scale="mid")], [run("fedavg", 1, 2, 0) | {"ga": None}]]
)
def test_without_rounds_there_is_no_section(results):
    assert section(results) == ("", {})
