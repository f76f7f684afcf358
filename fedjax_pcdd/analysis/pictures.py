"""Pictures of the tracked quantities: one colour a run, solid for the global model, dashed for the clients' own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pcdd.analysis.curves import curve, frame, look
from fedjax_pcdd.registry import short_name

STYLES = {"global": "-", "local": "--"}
NAMES = {"global": "global model", "local": "clients' models"}
Rows = Sequence[Mapping[str, Any]]

# Quantity -> its panels: title, label of the axis, and keys below `global` and `local`.
PANELS = {
    "angles": [("classes that a client has", "angle (degrees)", "existing"), ("classes that it lacks", "", "missing")],
    "features": [("classes that a client has", "angle (degrees)", "existing"), ("all classes", "", "all")],
    "spectrum": [("over the rounds", "variance of top-50 eigenvalues", "variance")],
    "intra": [("", "intra-class loss", "loss")],
}
TITLES = {
    "angles": "angles between class vectors of the classifier",
    "features": "angles between mean features of classes",
    "spectrum": "spectrum of the features",
    "intra": "FedMR's intra-class loss",
}


def tracked(rows: Rows, name: str, model: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds and values [n] of one number in the lines of track.jsonl, where it is known.

    >>> rows = [{"round": 1, "intra": {"global": {"loss": 0.5}}}, {"round": 2, "intra": {"global": None}}]
    >>> [x.tolist() for x in tracked(rows, "intra", "global", "loss")]
    [[1], [0.5]]
    """
    values = [(row["round"], ((row.get(name) or {}).get(model) or {}).get(key)) for row in rows]
    known = [(round, value) for round, value in values if value is not None]
    return np.array([x for x, _ in known], int), np.array([y for _, y in known], float)


def panels_of(name: str, runs: Mapping[str, Rows]) -> list[tuple[str, str, str]]:
    """The panels of a quantity; of one from outside one for each number that it has."""
    if name in PANELS:
        return PANELS[name]
    kept = [row.get(name) or {} for rows in runs.values() for row in rows]
    values = [(key, value) for one in kept for model in STYLES for key, value in (one.get(model) or {}).items()]
    return [("", key, key) for key in dict.fromkeys(key for key, value in values if isinstance(value, int | float))]


def draw(name: str, runs: Mapping[str, Rows], path: str | Path) -> None:
    """Draw one quantity of one or several runs; nothing where it has no numbers.

    Args:
      name: angles, features, spectrum or intra, or one from outside.
      runs: lines of track.jsonl by the run's label; "" for a single run.
      path: of the PNG.
    """
    from matplotlib.figure import Figure

    panels = panels_of(name, runs)
    if not panels:
        return
    number = len(panels) + (name == "spectrum")
    figure = Figure(figsize=(1.2 + 3.6 * max(number, 1.2), 3.6), dpi=100, layout="constrained")
    axes = figure.subplots(1, number, squeeze=False)[0]
    for panel, (title, label, key) in zip(axes, panels, strict=False):
        _curves(panel, name, runs, key)
        frame(panel, title=title, upwards=label)
    if name == "spectrum":
        _eigenvalues(axes[-1], runs)
    figure.suptitle(TITLES.get(name, short_name(name)), fontsize=11)
    lines, labels = _key(axes[0], name, runs)
    figure.legend(lines, labels, loc="outside lower center", ncols=3 * number, frameon=False, fontsize=9)
    figure.savefig(path)


def _curves(panel: Any, name: str, runs: Mapping[str, Rows], key: str) -> None:
    for i, rows in enumerate(runs.values()):
        for model, style in STYLES.items():
            curve(panel, *tracked(rows, name, model, key), linestyle=style, color=look(i)[0])
    known = [row[name]["etf"] for rows in runs.values() for row in rows if "etf" in (row.get(name) or {})]
    if known:
        panel.axhline(known[0], color="0.5", linewidth=1, linestyle=":")


def _eigenvalues(panel: Any, runs: Mapping[str, Rows]) -> None:
    """The last known spectrum of each run, descending."""
    for i, rows in enumerate(runs.values()):
        known = [row["spectrum"]["global"]["eigenvalues"] for row in rows if (row.get("spectrum") or {}).get("global")]
        if known:
            values = np.array(known[-1], float)
            panel.plot(np.arange(1, len(values) + 1), np.where(values > 1e-6, values, np.nan), color=look(i)[0])
    panel.set_yscale("log")
    frame(panel, title="global model, last round", across="number of the eigenvalue", upwards="eigenvalue")


def _key(panel: Any, name: str, runs: Mapping[str, Rows]) -> tuple[list, list[str]]:
    """Runs by colour, where they are named, then the styles that occur, then the reference angle."""
    keys = [key for *_, key in panels_of(name, runs)]
    known = [m for m in STYLES if any(len(tracked(r, name, m, k)[0]) for r in runs.values() for k in keys)]
    entries = [(label, "-", look(i)[0]) for i, label in enumerate(runs) if label]
    entries += [(NAMES[model], STYLES[model], "0.3") for model in known]
    entries += [("simplex ETF", ":", "0.5")] * (name in ("angles", "features"))
    lines = [panel.plot([], [], style, color=colour)[0] for _, style, colour in entries]
    return lines, [text for text, _, _ in entries]
