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
LABELS, KEYS = 0.52, 0.28  # share of the width to the left of the axes, inches above them
HEADING = """## Ours beside the papers

Differences of the best round in percent points with their 95 % interval over the seeds, none for one seed, and what the
paper prints for the same split, or for a mean of splits and other images where the list above says so. One line a claim
and split, as that list has them, but for the eigenvalues.
"""


def figures_section(findings: Sequence[Finding]) -> tuple[list[str], dict[str, str]]:
    """A section of the page, and its pictures as SVG by file name."""
    lines, pictures = [HEADING], {}
    for paper, name in NAMES.items():
        shown = [finding for finding in findings if finding.claim.table.startswith(f"{paper}/") and _shown(finding)]
        if shown:
            file, description = f"images/reproduction_{paper}.svg", in_words(name, shown)
            pictures[file] = picture(shown, description)
            lines += [f"![{description}]({file})", ""]
    return (lines, pictures) if pictures else ([], {})


def in_words(name: str, findings: Sequence[Finding]) -> str:
    """What a picture shows, as text for readers who cannot see it."""
    printed = [finding for finding in findings if finding.paper is not None]
    agree = sum(finding.best.mean * finding.claimed > 0 for finding in printed if finding.best)
    splits = f"{len(findings)} comparison{'s' * (len(findings) != 1)}"
    return (
        f"{name}: our differences beside the printed ones in {splits}, {agree} of {len(printed)} with the printed sign"
    )


def picture(findings: Sequence[Finding], words: str) -> str:
    """The SVG of a paper's claims.

    Args:
      findings: those that were tried and are in percent points.
      words: what the picture shows, as text for readers who cannot see it.
    """
    inches = MARGIN + KEYS + ROW * len(findings)
    figure = Figure(figsize=(WIDTH, inches))
    # No automatic layout: it uses the widths of letters, which depend on the fonts of a machine.
    axes = figure.add_axes((LABELS, MARGIN / inches, 0.97 - LABELS, ROW * len(findings) / inches))
    for y, finding in enumerate(findings):
        _draw(axes, y, finding)
    _frame(axes, [_label(finding) for finding in findings])
    handles = [
        axes.plot([], [], "o", color=COLOURS[0], ms=4)[0],
        axes.plot([], [], "D", color=COLOURS[1], ms=4, mfc="none")[0],
    ]
    axes.legend(
        handles, ["ours, with 95 % over the seeds", "printed"], loc="lower left", bbox_to_anchor=(0, 1), ncols=2,
        frameon=False, fontsize=8, labelcolor=GREY, borderaxespad=0.2,
    )  # fmt: skip
    return as_svg(figure, words)


def _shown(finding: Finding) -> bool:
    return finding.best is not None and finding.claim.in_points and not finding.pa_epochs


def _draw(axes: Axes, y: int, finding: Finding) -> None:
    if finding.best is None:
        return
    if finding.best.low is not None and finding.best.high is not None:
        axes.plot([finding.best.low, finding.best.high], [y, y], color=COLOURS[0], lw=1.2)
    face = COLOURS[0] if len(finding.best.seeds) > 1 else "none"
    axes.plot([finding.best.mean], [y], "o", color=COLOURS[0], mfc=face, ms=4)
    if finding.paper is not None:
        axes.plot([finding.paper], [y], "D", color=COLOURS[1], mfc="none", ms=4)


def _label(finding: Finding) -> str:
    claim_text = finding.claim.text.partition(" (")[0]
    return f"{claim_text} · {finding.split} {finding.tag}".rstrip() + f" · {finding.scale}"


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
