"""Learning curves of a group: the mean over seeds and a band of one standard deviation, as SVG."""

import io
import re
from collections.abc import Sequence
from html import escape

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fedjax_pcdd.analysis.curves import add_legend, axis_of, curve, frame, look, series
from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.report.grouping import Group

GREY = "#808080"  # legible on white and on black


def band(runs: Sequence[RunRecord], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Mean and deviation over seeds, round by round.

    Args:
      runs: of one experiment.
      name: key of metrics.jsonl, as `ga`.

    Returns:
      rounds [n] that all runs have, mean [n], sample deviation [n] or None for one run.
    """
    by_round = [dict(zip(*(values.tolist() for values in series(run.rows, name)), strict=True)) for run in runs]
    rounds = np.array(sorted(set.intersection(*map(set, by_round))), int)
    values = np.array([[run_values[r] for r in rounds.tolist()] for run_values in by_round], float)
    return rounds, values.mean(0), values.std(0, ddof=1) if len(runs) > 1 else None


def curves(group: Group, name: str, key: bool = False) -> str | None:
    """The curves of a group, or None where no run has values.

    Args:
      group: its experiments get the colours of `look` in their order.
      name: ga, pa or loss.
      key: whether to name the lines below the picture, for one that stands alone.
    """
    bands = [band(entry.runs, name) for entry in group.entries]
    if not any(len(rounds) for rounds, _, _ in bands):
        return None
    figure = Figure(figsize=(4.4, 3.1 + (0.2 * len(bands) if key else 0)), layout="constrained")
    axes = figure.add_subplot()
    upwards, factor = axis_of(name)
    for (colour, style, _), (rounds, mean, deviation) in zip(legend(group), bands, strict=True):
        marker, width = "o" if len(rounds) == 1 else None, deviation if deviation is None else factor * deviation
        curve(axes, rounds, factor * mean, deviation=width, color=colour, linestyle=style, marker=marker)
    frame(axes, upwards=upwards, colour=GREY)
    if key:
        lines = [axes.plot([], [], color=colour, linestyle=style)[0] for colour, style, _ in legend(group)]
        texts = [text for _, _, text in legend(group)]
        add_legend(figure, lines, texts, loc="outside lower left", fontsize=8, labelcolor=GREY)
    return as_svg(figure, in_words(group, name))


def in_words(group: Group, name: str) -> str:
    """What a picture shows, for readers who cannot see it."""
    return f"{axis_of(name)[0]} over the rounds: {', '.join(group.labels)}"


def legend(group: Group) -> list[tuple[str, str, str]]:
    """Colour, style, and name with number of seeds of each line."""
    counts = [len(entry.runs) for entry in group.entries]
    names = [f"{name}, {n} seed{'s' * (n != 1)}" for name, n in zip(group.labels, counts, strict=True)]
    return [(*look(i), name) for i, name in enumerate(names)]


def as_svg(figure: Figure, words: str) -> str:
    """A picture as an SVG file, the same bytes each time; `words` say what it shows to readers who cannot see it."""
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return text.getvalue().replace("<svg ", f'<svg role="img" aria-label="{escape(words)}" ', 1)


def inline(svg: str, prefix: str) -> str:
    """An SVG file for a page: without addresses; `prefix` before its ids tells them from those of other pictures."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    return re.sub(r'( id="| href="#|url\(#)', rf"\g<1>{prefix}-", svg)
