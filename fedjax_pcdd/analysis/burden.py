"""What a method asks of a client, and what it gives for it (FedMR, Figure 4)."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pcdd.analysis.curves import COLOURS, frame


class Burden(NamedTuple):
    """Of one method: scalars held in training, seconds of local training over FedAvg's, and best GA in [0, 1]."""

    label: str
    held: float
    seconds: float
    ga: float


def pareto(burdens: Sequence[Burden]) -> list[Burden]:
    """Those that no other beats in accuracy without more time, by rising time.

    >>> [one.label for one in pareto([Burden("a", 1, 2, 0.5), Burden("b", 1, 1, 0.4), Burden("c", 1, 3, 0.45)])]
    ['b', 'a']
    """
    best: list[Burden] = []
    for one in sorted(burdens, key=lambda one: (one.seconds, -one.ga)):
        best += [one] if not best or one.ga > best[-1].ga else []
    return best


def draw_burdens(burdens: Sequence[Burden], path: str | Path) -> None:
    """Memory and time as bars, and accuracy over time with its Pareto points joined."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.0), dpi=100, layout="constrained")
    bars, scatter = figure.subplots(1, 2)
    at, time = np.arange(len(burdens)), bars.twinx()
    bars.bar(at - 0.2, [one.held / 1e6 for one in burdens], 0.4, color=COLOURS[0])
    time.bar(at + 0.2, [one.seconds for one in burdens], 0.4, color=COLOURS[1])
    frame(bars, title="what a client holds and computes", across="", upwards="millions of scalars (left bars)")
    bars.set_xticks(at, [one.label for one in burdens], rotation=60, fontsize=8)
    time.set_ylabel("seconds, times FedAvg (right bars)")
    front = pareto(burdens)
    scatter.plot([one.seconds for one in front], [100 * one.ga for one in front], color="0.7", zorder=0)
    for one in burdens:
        scatter.plot(one.seconds, 100 * one.ga, "o", color=COLOURS[0])
        scatter.annotate(one.label, (one.seconds, 100 * one.ga), (4, 3), textcoords="offset points", fontsize=8)
    frame(scatter, title="accuracy for time", across="seconds, times FedAvg", upwards="best GA, mean over splits (%)")
    figure.savefig(path)
