"""Figures of the analyses.

Tracked quantities have one colour per run, solid for the global model, dashed for the clients' models. Letters: K
participants, N public images, C classes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_pcdd.analysis.curves import add_legend, curve, frame, look, new_figure, series
from fedjax_pcdd.losses.correlation import cross_correlation
from fedjax_pcdd.registry import short_name

STYLES = {"global": "-", "local": "--"}
NAMES = {"global": "global model", "local": "clients' models"}
Rows = Sequence[Mapping[str, Any]]

# Quantity -> its panels: title, label of the axis, and keys below `global` and `local`.
PANELS = {
    "classes": [("classes that a client has", "accuracy", "existing"), ("classes that it lacks", "", "missing")],
    "angles": [("classes that a client has", "angle (degrees)", "existing"), ("classes that it lacks", "", "missing")],
    "features": [("classes that a client has", "angle (degrees)", "existing"), ("all classes", "", "all")],
    "spectrum": [("over the rounds", "variance of top-50 eigenvalues", "variance")],
    "intra": [("", "intra-class loss", "loss")],
    "gradients": [("gradients before clipping", "norm", "norm"), ("clipped steps", "share", "clipped"),
                  ("weights of the backbone", "norm", "weights")],
}  # fmt: skip
TITLES = {
    "classes": "accuracy on the tests of a client's classes and of the others",
    "angles": "angles between class vectors of the classifier",
    "features": "angles between mean features of classes",
    "spectrum": "spectrum of the features",
    "intra": "FedMR's intra-class loss",
    "gradients": "local training",
}


def panels_of(name: str, runs: Mapping[str, Rows]) -> list[tuple[str, str, str]]:
    """The panels of a quantity; for one from outside, one panel for each of its numbers."""
    if name in PANELS:
        return PANELS[name]
    entries = [row.get(name) or {} for rows in runs.values() for row in rows]
    values = [(key, value) for entry in entries for model in STYLES for key, value in (entry.get(model) or {}).items()]
    return [("", key, key) for key in dict.fromkeys(key for key, value in values if isinstance(value, int | float))]


def draw(name: str, runs: Mapping[str, Rows], path: str | Path) -> None:
    """Write a PNG of one quantity of one or several runs; nothing if it has no numbers.

    Args:
      name: a key of `PANELS`, or a quantity from outside.
      runs: lines of track.jsonl by the run's label; "" for a single run.
    """
    panels = panels_of(name, runs)
    if not panels:
        return
    number = len(panels) + (name == "spectrum")
    figure = new_figure(1.2 + 3.6 * max(number, 1.2), 3.6)
    axes = figure.subplots(1, number, squeeze=False)[0]
    for panel, (title, label, key) in zip(axes, panels, strict=False):
        _curves(panel, name, runs, key)
        frame(panel, title=title, upwards=label)
    if name == "spectrum":
        _eigenvalues(axes[-1], runs)
    _finish(figure, axes[0], name, runs, 3 * number, path)


def draw_columns(name: str, groups: Mapping[str, Mapping[str, Rows]], path: str | Path) -> None:
    """Write a PNG of one quantity, with a column per group of runs and a row per number (FedGELA, Figure 5).

    Args:
      name: classes, angles or features; the second row shows classes that a client lacks.
      groups: lines of track.jsonl by group and by the run's label; a label has the same colour in all groups.
    """
    rows = [("classes that a client has", "existing"), ("classes that it lacks", "missing")]
    labels = list(dict.fromkeys(label for runs in groups.values() for label in runs))
    figure = new_figure(1.2 + 3.4 * len(groups), 6.4)
    panels = figure.subplots(2, len(groups), squeeze=False, sharey="row")
    for column, (group, runs) in zip(panels.T, groups.items(), strict=True):
        for panel, (title, key) in zip(column, rows, strict=True):
            _curves(panel, name, {label: runs.get(label, ()) for label in labels}, key)
            frame(panel, title=f"{group}\n{title}", upwards=PANELS[name][0][1] if panel in panels[:, 0] else "")
    all_rows = {label: [row for runs in groups.values() for row in runs.get(label, ())] for label in labels}
    _finish(figure, panels[0][0], name, all_rows, 4, path)


def _curves(panel: Any, name: str, runs: Mapping[str, Rows], key: str) -> None:
    for i, rows in enumerate(runs.values()):
        for model, style in STYLES.items():
            colour = look(i)[0]
            fill = "white" if model == "local" else colour  # of a single point, which shows no style of a line
            curve(panel, *series(rows, name, model, key), linestyle=style, color=colour, markerfacecolor=fill)
    angles = [row[name]["etf"] for rows in runs.values() for row in rows if "etf" in (row.get(name) or {})]
    if angles:
        panel.axhline(angles[0], color="0.5", linewidth=1, linestyle=":")


def _eigenvalues(panel: Any, runs: Mapping[str, Rows]) -> None:
    """Draw the last known spectrum of each run, in descending order."""
    for i, rows in enumerate(runs.values()):
        curves = [row["spectrum"]["global"]["eigenvalues"] for row in rows if (row.get("spectrum") or {}).get("global")]
        if curves:
            values = np.array(curves[-1], float)
            panel.plot(np.arange(1, len(values) + 1), np.where(values > 1e-6, values, np.nan), color=look(i)[0])
    panel.set_yscale("log")
    frame(panel, title="global model, last round", across="number of the eigenvalue", upwards="eigenvalue")


def _finish(figure: Any, panel: Any, name: str, runs: Mapping[str, Rows], ncols: int, path: str | Path) -> None:
    """Write a figure with a legend: runs by colour, if they have labels, the styles that occur, the reference angle."""
    figure.suptitle(TITLES.get(name, short_name(name)), fontsize=11, parse_math=False)
    keys = [key for *_, key in panels_of(name, runs)]
    models = [m for m in STYLES if any(len(series(r, name, m, k)[0]) for r in runs.values() for k in keys)]
    entries = [(label, "-", look(i)[0]) for i, label in enumerate(runs) if label]
    entries += [(NAMES[model], STYLES[model], "0.3") for model in models]
    entries += [("simplex ETF", ":", "0.5")] * (name in ("angles", "features"))
    lines = [panel.plot([], [], style, color=colour)[0] for _, style, colour in entries]
    texts = [text for text, _, _ in entries]
    add_legend(figure, lines, texts, loc="outside lower center", ncols=ncols, fontsize=9)
    figure.savefig(path)


def draw_bilateral(
    curves: Mapping[str, np.ndarray], references: Mapping[str, Sequence[float]], path: str | Path, *, pa: str = "PA",
    reference: str = "FedAvg",
) -> None:  # fmt: skip
    """Write a PNG of GA beside PA in percent over log10 E_W (FedGELA, Figure 4), with a line per label.

    Args:
      curves: by label, [n, 5]: E_W, ascending, GA and its deviation over seeds, PA and its deviation.
      references: GA and PA of FedAvg for some of the labels, drawn as dashed lines.
      pa: name of PA, which tells when it is measured.
      reference: name of the dashed lines in the panel of PA.
    """
    figure = new_figure(8.0, 3.6)
    panels = figure.subplots(1, 2)
    for i, (label, numbers) in enumerate(curves.items()):
        energies, *accuracies = numbers.T
        for panel, mean, spread in zip(panels, accuracies[::2], accuracies[1::2], strict=True):
            panel.errorbar(np.log10(energies), mean, spread, marker="o", capsize=3, label=label, color=look(i)[0])
        for panel, fedavg in zip(panels, references.get(label, ()), strict=False):
            panel.axhline(fedavg, color=look(i)[0], linestyle="--", linewidth=1)
    titles = ("generic accuracy (GA)", "FedAvg"), (f"personal accuracy ({pa})", reference)
    for panel, (title, dashed) in zip(panels, titles, strict=True):
        frame(panel, title=title, across="log10 E_W" + (f"; dashed: {dashed}" if references else ""), upwards="%")
    add_legend(panels[0], fontsize=8)
    figure.savefig(path)


@jax.jit
def correlation_matrices(logits: jax.Array) -> jax.Array:
    """M_uv of each participant: correlation of its logits for class u with the mean logits for v (FCCL, Figure 5).

    Args:
      logits: [K, N, C], N >= 2.

    Returns:
      [K, C, C] in float32 or better, entries in [-1, 1] (equation 1); 0 for a class without spread.
    """
    return jax.vmap(lambda participant_logits: cross_correlation(participant_logits, logits.mean(0)))(logits)


def draw_matrices(
    public: np.ndarray, private: np.ndarray, names: Sequence[str], path: str | Path, *, clip: bool = False
) -> None:
    """Write a PNG of matrices [K, C, C] side by side, each under its participant's name; blue for -1 and red for 1.

    Args:
      public, private: computed on the public images, and on each participant's own, for a second row.
      names: of the participants.
      clip: draw negative entries as 0, as the published code does.
    """
    figure = new_figure(1 + 2.4 * len(public), 5.2, dpi=120)
    panels = figure.subplots(2, len(public), squeeze=False)
    for line, row_matrices, title in zip(panels, (public, private), ("public images", "own images"), strict=True):
        for panel, matrix, name in zip(line, row_matrices, names, strict=True):
            image = panel.imshow(np.maximum(matrix, 0) if clip else matrix, vmin=-1, vmax=1, cmap="RdBu_r")
            panel.set(xlabel="class of the mean", xticks=[], yticks=[])
            panel.set_title(name, parse_math=False)
        line[0].set_ylabel(f"class of its own\n{title}")
    figure.colorbar(image, ax=list(panels.flat), shrink=0.8)
    figure.savefig(path)


def diagonals(matrices: np.ndarray) -> tuple[float, float]:
    """Means over the diagonals of matrices [K, C, C], and over all other entries.

    >>> diagonals(np.array([[[1.0, 0.5], [0.0, 0.5]]]))
    (0.75, 0.25)
    """
    same = np.eye(matrices.shape[-1], dtype=bool)
    return float(matrices[:, same].mean()), float(matrices[:, ~same].mean())
