"""A picture for each paper: our differences with their intervals beside the printed ones, claim by claim."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedjax_pcdd.analysis.curves import COLOURS, frame
from fedjax_pcdd.report.plots import GREY, as_svg
from reproduction.claims import Finding

NAMES = {"fedmr": "FedMR", "fedgela": "FedGELA", "fedrl": "FedRL", "fccl": "FCCL"}
ROW, MARGIN, WIDTH = 0.17, 0.5, 7.6  # inches
TICKS = (-50, -20, -10, -5, 0, 5, 10, 20, 50)
LABELS, KEYS = 0.52, 0.28  # share of the width left of the axes, inches above them
HEADING = """## Ours beside the papers

Differences of the best round in percent points with their 95 % interval over the seeds, none for one seed, and what the
paper prints for the same split, or for a mean of splits and other images where the list above says so. One line a claim
and split, as that list has them, but for the eigenvalues.
"""


def figures_section(findings: Sequence[Finding]) -> tuple[list[str], dict[str, str]]:
    """A part of the page, and its pictures: by file name, SVG."""
    lines, pictures = [HEADING], {}
    for paper, name in NAMES.items():
        own = [one for one in findings if one.claim.table.startswith(f"{paper}/") and _shown(one)]
        if own:
            file, words = f"images/reproduction_{paper}.svg", in_words(name, own)
            pictures[file] = picture(own, words)
            lines += [f"![{words}]({file})", ""]
    return (lines, pictures) if pictures else ([], {})


def in_words(name: str, findings: Sequence[Finding]) -> str:
    """What a picture shows, for who does not see it."""
    printed = [one for one in findings if one.paper is not None]
    same = sum(one.best.mean * one.claimed > 0 for one in printed if one.best)
    splits = f"{len(findings)} comparison{'s' * (len(findings) != 1)}"
    return (
        f"{name}: our differences beside the printed ones in {splits}, {same} of {len(printed)} with the printed sign"
    )


def picture(findings: Sequence[Finding], words: str) -> str:
    """The SVG of some claims of a paper.

    Args:
      findings: tried, in percent points.
      words: what it shows, for who does not see it.
    """
    inches = MARGIN + KEYS + ROW * len(findings)
    figure = Figure(figsize=(WIDTH, inches))
    # Not laid out by the widths of letters, which depend on the fonts of a machine.
    axes = figure.add_axes((LABELS, MARGIN / inches, 0.97 - LABELS, ROW * len(findings) / inches))
    for at, one in enumerate(findings):
        _draw(axes, at, one)
    _frame(axes, [_label(one) for one in findings])
    handles = [
        axes.plot([], [], "o", color=COLOURS[0], ms=4)[0],
        axes.plot([], [], "D", color=COLOURS[1], ms=4, mfc="none")[0],
    ]
    axes.legend(
        handles, ["ours, with 95 % over the seeds", "printed"], loc="lower left", bbox_to_anchor=(0, 1), ncols=2,
        frameon=False, fontsize=8, labelcolor=GREY, borderaxespad=0.2,
    )  # fmt: skip
    return as_svg(figure, words)


def _shown(one: Finding) -> bool:
    return one.best is not None and one.claim.in_points


def _draw(axes: Axes, at: int, one: Finding) -> None:
    if one.best is None:
        return
    if one.best.low is not None and one.best.high is not None:
        axes.plot([one.best.low, one.best.high], [at, at], color=COLOURS[0], lw=1.2)
    filled = COLOURS[0] if len(one.best.seeds) > 1 else "none"
    axes.plot([one.best.mean], [at], "o", color=COLOURS[0], mfc=filled, ms=4)
    if one.paper is not None:
        axes.plot([one.paper], [at], "D", color=COLOURS[1], mfc="none", ms=4)


def _label(one: Finding) -> str:
    words = one.claim.text.partition(" (")[0]
    return f"{words} · {one.split} {one.tag}".rstrip() + f" · {one.scale}"


def _frame(axes: Axes, labels: Sequence[str]) -> None:
    frame(axes, across="percent points, on a logarithmic scale beyond 10", colour=GREY)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels, fontsize=6.5)
    axes.axvline(0, color=GREY, lw=0.8)
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xticks(TICKS, [f"{tick:+d}".replace("-", "−").replace("+0", "0") for tick in TICKS], fontsize=8)
    axes.xaxis.label.set_fontsize(8)
    axes.minorticks_off()
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
