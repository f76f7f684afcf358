"""Learning curves: the mean over seeds and a band of one standard deviation, as SVG."""

import io
import re
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.report.grouping import Group

# Okabe and Ito, but for the colours that vanish on white or on black; then the same, dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A6FD1", "#808080")
STYLES = ("-", "--", ":", "-.")
FRAME = "#808080"  # can be read on white and on black
LABELS = {"ga": "GA (%)", "pa": "PA in training (%)", "loss": "training loss"}


def look(index: int) -> tuple[str, str]:
    """Colour and line style of the i-th experiment of a group."""
    return COLOURS[index % len(COLOURS)], STYLES[index // len(COLOURS) % len(STYLES)]


def band(runs: Sequence[RunRecord], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Mean and deviation over seeds, round by round.

    Args:
      runs: of one experiment.
      name: key of metrics.jsonl, as `ga`.

    Returns:
      rounds [n] that all runs have, mean [n], sample deviation [n] or None for one run.
    """
    found = [{row["round"]: row[name] for row in run.rows if row.get(name) is not None} for run in runs]
    rounds = np.array(sorted(set.intersection(*map(set, found))), int)
    values = np.array([[one[r] for r in rounds.tolist()] for one in found], float)
    return rounds, values.mean(0), values.std(0, ddof=1) if len(runs) > 1 else None


def curves(group: Group, name: str, key: bool = False) -> str | None:
    """The curves of a group, or None where no run has values.

    Args:
      group: its experiments get the colours of `look` in their order.
      name: ga, pa or loss.
      key: name the lines below the picture, for one that stands alone.
    """
    found = [(look(i), band(entry.runs, name)) for i, entry in enumerate(group.entries)]
    if not any(len(rounds) for _, (rounds, _, _) in found):
        return None
    figure = Figure(figsize=(4.4, 3.1 + (0.2 * len(group.entries) if key else 0)), layout="constrained")
    axes = figure.add_subplot()
    factor = 1 if name == "loss" else 100
    for (colour, style), (rounds, mean, deviation) in found:
        marker = "o" if len(rounds) == 1 else None
        axes.plot(rounds, factor * mean, color=colour, linestyle=style, linewidth=1.8, marker=marker)
        if deviation is not None:
            low, high = factor * (mean - deviation), factor * (mean + deviation)
            axes.fill_between(rounds, low, high, color=colour, alpha=0.2, linewidth=0)
    _frame(axes, LABELS[name])
    if key:
        lines = [axes.plot([], [], color=colour, linestyle=style)[0] for colour, style, _ in legend(group)]
        texts = [text for _, _, text in legend(group)]
        figure.legend(lines, texts, loc="outside lower left", frameon=False, fontsize=8, labelcolor=FRAME)
    return _svg(figure)


def _frame(axes, label: str) -> None:
    axes.set_xlabel("round", color=FRAME)
    axes.set_ylabel(label, color=FRAME)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.tick_params(colors=FRAME)
    axes.grid(color=FRAME, alpha=0.25, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FRAME)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()


def inline(svg: str, prefix: str) -> str:
    """A picture that can stand in a page beside others: no addresses, and names of its own.

    Args:
      svg: a file from `curves`.
      prefix: unlike that of every other picture of the page.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    return re.sub(r'( id="| href="#|url\(#)', rf"\g<1>{prefix}-", svg)


def legend(group: Group) -> list[tuple[str, str, str]]:
    """Colour, style, and name with the number of seeds, of each line."""
    counts = [len(entry.runs) for entry in group.entries]
    texts = [f"{name}, {n} seed{'s' * (n != 1)}" for name, n in zip(group.labels, counts, strict=True)]
    return [(*look(i), text) for i, text in enumerate(texts)]
