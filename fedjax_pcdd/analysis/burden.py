"""What a method costs a client, and the accuracy it gains (FedMR, Figure 4)."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pcdd.analysis.curves import COLOURS, frame, new_figure


class Burden(NamedTuple):
    """Costs of one method: scalars held in training, local training time over FedAvg's; and its best GA in [0, 1]."""

    label: str
    held: float
    seconds: float
    ga: float


def pareto(burdens: Sequence[Burden]) -> list[Burden]:
    """The Pareto front by increasing time: methods that no other beats in accuracy without more time.

    >>> [one.label for one in pareto([Burden("a", 1, 2, 0.5), Burden("b", 1, 1, 0.4), Burden("c", 1, 3, 0.45)])]
    ['b', 'a']
    """
    best: list[Burden] = []
    for burden in sorted(burdens, key=lambda burden: (burden.seconds, -burden.ga)):
        best += [burden] if not best or burden.ga > best[-1].ga else []
    return best


def draw_burdens(burdens: Sequence[Burden], path: str | Path) -> None:
    """Draw memory and time as bars, and accuracy over time with the Pareto points joined."""
    figure = new_figure(10.0, 4.0)
    bars, scatter = figure.subplots(1, 2)
    positions, time = np.arange(len(burdens)), bars.twinx()
    bars.bar(positions - 0.2, [entry.held / 1e6 for entry in burdens], 0.4, color=COLOURS[0])
    time.bar(positions + 0.2, [entry.seconds for entry in burdens], 0.4, color=COLOURS[1])
    frame(bars, title="what a client holds and computes", across="", upwards="millions of scalars (left bars)")
    bars.set_xticks(positions, [entry.label for entry in burdens], rotation=60, fontsize=8, parse_math=False)
    time.set_ylabel("seconds, times FedAvg (right bars)")
    front = pareto(burdens)
    scatter.plot([entry.seconds for entry in front], [100 * entry.ga for entry in front], color="0.7", zorder=0)
    for entry in burdens:
        scatter.plot(entry.seconds, 100 * entry.ga, "o", color=COLOURS[0])
        point, style = (entry.seconds, 100 * entry.ga), {"fontsize": 8, "parse_math": False}
        scatter.annotate(entry.label, point, (4, 3), textcoords="offset points", **style)
    frame(scatter, title="accuracy for time", across="seconds, times FedAvg", upwards="best GA, mean over splits (%)")
    figure.savefig(path)
