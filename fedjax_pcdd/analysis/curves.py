"""Curves over the rounds, drawn in a uniform style, and the rounds to an accuracy.

Rounds to an accuracy and speed-ups are those of FedMR's Table 4 and FedRL's Table 2.
"""

import math
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

# Okabe and Ito, without the colours that vanish on white or on black; further curves repeat them in other line styles.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A6FD1", "#808080")
STYLES = ("-", "--", ":", "-.")
FEW = 30  # up to this number, points have markers
CURVES = {"ga": "GA", "pa": "PA in training", "loss": "training loss"}  # key of metrics.jsonl -> display name
OWN_COLOURS = {"ga": COLOURS[0], "pa": COLOURS[1], "loss": "#555555"}


def look(index: int) -> tuple[str, str]:
    """Colour and line style of the i-th of several curves."""
    return COLOURS[index % len(COLOURS)], STYLES[index // len(COLOURS) % len(STYLES)]


def axis_of(name: str) -> tuple[str, int]:
    """Axis label of a number of a round, and the factor for it: accuracies are shown in percent.

    >>> axis_of("pa"), axis_of("loss"), axis_of("ga_balanced"), axis_of("drift")
    (('PA in training (%)', 100), ('training loss', 1), ('ga_balanced (%)', 100), ('drift', 1))
    """
    in_percent = name.split("_")[0] in ("ga", "pa")
    return f"{CURVES.get(name, name)}{' (%)' if in_percent else ''}", 100 if in_percent else 1


def series(rows: Iterable[Mapping[str, Any]], *names: str, factor: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Rounds and values [n] of a number in lines of metrics.jsonl or track.jsonl, if it is known and finite.

    Args:
      names: key of the number, preceded by the keys of the mappings that contain it.
      factor: by which the number is multiplied.

    >>> [x.tolist() for x in series([{"round": 1, "ga": None}, {"round": 2, "ga": 0.5}], "ga", factor=100)]
    [[2], [50.0]]
    >>> rows = [{"round": 1, "intra": {"global": {"loss": 0.5}}}, {"round": 2, "intra": {"global": None}}]
    >>> [x.tolist() for x in series(rows, "intra", "global", "loss")]
    [[1], [0.5]]
    """
    values = [(row["round"], reduce(lambda of, name: (of or {}).get(name), names, row)) for row in rows]
    points = [(round, value) for round, value in values if value is not None and math.isfinite(value)]
    return np.array([x for x, _ in points], int), factor * np.array([y for _, y in points], float)


def new_figure(width: float, height: float, dpi: int = 100) -> Any:
    """A figure of this size in inches; matplotlib is imported when the first one is drawn."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def curve(axes: Any, x: np.ndarray, y: np.ndarray, *, deviation: np.ndarray | None = None, **style: Any) -> None:
    """Draw a curve of x and y [n] on axes of matplotlib, with markers if there are few points.

    Args:
      deviation: [n] half the width of a band around the curve.
      style: of the line, for matplotlib.
    """
    line = {"linewidth": 1.6, "marker": "o" if len(x) <= FEW else None, "markersize": 3} | style
    colour = axes.plot(x, y, **line)[0].get_color()
    if deviation is not None:
        axes.fill_between(x, y - deviation, y + deviation, color=colour, alpha=0.2, linewidth=0)


def add_legend(owner: Any, *args: Any, **options: Any) -> None:
    """Add a legend to a figure or to axes, in whose texts a dollar begins no formula, as names of runs may have one."""
    for text in owner.legend(*args, frameon=False, **options).get_texts():
        text.set_parse_math(False)


def frame(axes: Any, *, title: str = "", across: str = "round", upwards: str = "", colour: str | None = None) -> None:
    """Set title, labels, grid and frame of a panel; `colour` applies to all, for backgrounds of unknown colour."""
    if title:
        axes.set_title(title, fontsize=10, parse_math=False)
    axes.set(xlabel=across, ylabel=upwards)
    if across == "round":
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.grid(color=colour or "0.92", alpha=0.25 if colour else 1, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if colour:
        axes.tick_params(colors=colour)
        axes.spines[["left", "bottom"]].set_color(colour)
        for text in (axes.xaxis.label, axes.yaxis.label):
            text.set_color(colour)


def draw_curves(
    rows: Iterable[Mapping[str, Any]], path: str | Path, title: str, best: Mapping[str, int | None]
) -> None:
    """Write a PNG of GA and PA of a run in percent, with their best rounds marked, and the loss below.

    Args:
      rows: as in metrics.jsonl; rounds without evaluation have None or no entry.
      best: the best rounds of "ga" and "pa", by what chose them; None where there is none.
    """
    rows = list(rows)
    figure = new_figure(7.5, 5.2, dpi=150)
    accuracy, loss = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    curves = {name: points for name in ("ga", "pa") if len((points := series(rows, name, factor=100))[0])}
    for name, (rounds, values) in curves.items():
        curve(accuracy, rounds, values, color=OWN_COLOURS[name])
        chosen = rounds == best[name]
        accuracy.plot(rounds[chosen], values[chosen], "o", ms=7, mfc="white", mec=OWN_COLOURS[name], mew=1.6, zorder=3)
    curve(loss, *series(rows, "loss"), color=OWN_COLOURS["loss"])
    frame(accuracy, across="", upwards="accuracy (%)")
    frame(loss, upwards=CURVES["loss"])
    accuracy.set_title(title, loc="left", fontsize=11, parse_math=False)
    _name_ends(accuracy, curves, best)
    figure.savefig(path)


def _name_ends(axes: Any, curves: Mapping[str, tuple[np.ndarray, np.ndarray]], best: Mapping[str, int | None]) -> None:
    """Name each curve at its end; where two ends are close, move the names apart."""
    low, high = axes.get_ylim()
    ends = {name: float(values[-1]) for name, (_, values) in curves.items()}
    missing = 0.16 * (high - low) - (max(ends.values(), default=0.0) - min(ends.values(), default=0.0))
    upper = max(ends, key=lambda name: ends[name], default=None)
    for name, (rounds, values) in curves.items():
        shift = max(missing, 0) / 2 * (1 if name == upper else -1) if len(ends) > 1 else 0.0
        chosen = [f"\nbest {value:.2f} (round {best[name]})" for value in values[rounds == best[name]]]
        text = "".join([f"{CURVES[name]} {values[-1]:.2f}", *chosen])
        axes.annotate(
            text, (1.01, ends[name] + shift), xycoords=axes.get_yaxis_transform(), annotation_clip=False,
            color=OWN_COLOURS[name], fontsize=9, va="center",
        )  # fmt: skip


def rounds_to(accuracies: np.ndarray, target: float, *, above: bool = False) -> int | None:
    """The first round, from 1, whose accuracy reaches a target; None if it is never reached.

    Args:
      accuracies: [T] of each round; NaN where it was not measured.
      target: in FedMR the best accuracy of FedAvg, in FedRL that of FedAvg's last round.
      above: whether the target must be exceeded, as in FedRL.

    >>> rounds_to(np.array([0.2, 0.5, 0.4, 0.6]), 0.5)
    2
    >>> rounds_to(np.array([0.2, 0.5, 0.4, 0.6]), 0.5, above=True)
    4
    """
    values = np.asarray(accuracies, float)
    reached = np.flatnonzero(values > target if above else values >= target)
    return int(reached[0]) + 1 if len(reached) else None


def speed_up(rounds: int | None, reference: int) -> float | None:
    """How many times fewer rounds than the reference, 400 / 149 = 2.68 in FedMR's Table 4; None if never reached.

    >>> round(speed_up(149, 400), 2)
    2.68
    """
    return None if rounds is None else reference / rounds
