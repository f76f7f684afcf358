"""Paired comparison: the same seeds and partitions under two methods or settings.

A difference between two runs of one seed each is mostly noise; what can be said is the mean over pairs and how far
it would move with other pairs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import bootstrap

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.report.grouping import Entry, data_of, entries
from fedjax_pcdd.report.tables import ACCURACIES

FEW = 5  # with fewer pairs the interval is too narrow
RESAMPLES = 9999


class Comparison(NamedTuple):
    """How much another experiment is above the first; accuracies in percent points.

    Args:
      data: data set and partition.
      first, other: what is compared.
      metric: entry of summary.json.
      seeds: the pairs.
      difference: mean over the pairs, other less first.
      low, high: bootstrap interval of it, None for one pair.
    """

    data: str
    first: str
    other: str
    metric: str
    seeds: tuple[int, ...]
    difference: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """What the interval says."""
        if self.low is None or self.high is None:
            return "one pair: no interval, likely noise"
        side = "above" if self.low > 0 else "below" if self.high < 0 else "not told apart"
        return f"{side}; few pairs, interval too narrow" if len(self.seeds) < FEW else side


def compare(runs: Sequence[RunRecord], confidence: float = 0.95) -> tuple[list[Comparison], list[str]]:
    """Every experiment against the one of the first run, on each data set and partition.

    Args:
      runs: as collected; unfinished ones are left out and said.
      confidence: of the intervals, in (0, 1).

    Returns:
      The comparisons, and a sentence for everything that could not be paired.

    Raises:
      UserError: nothing to compare, or no pair.
    """
    if not 0 < confidence < 1:
        raise UserError(f"--confidence must be above 0 and below 1, not {confidence:g}.")
    notes = [f"{run.path} is unfinished and left out." for run in runs if run.summary is None]
    problems: dict[tuple[str, str], list[RunRecord]] = {}
    for run in runs:
        if run.summary is not None:
            problems.setdefault(data_of(run), []).append(run)
    found: list[Comparison] = []
    for data, members in problems.items():
        found += _compare(" · ".join(data), entries(members), confidence, notes)
    if not found:
        raise UserError("these runs hold no pair: " + (notes[0] if notes else "give runs of two methods or settings."))
    return found, notes


def _compare(data: str, members: list[Entry], confidence: float, notes: list[str]) -> list[Comparison]:
    first, *others = members
    notes += [f"{run.path} repeats a seed and is left out." for entry in members for run in entry.repeated]
    if not others:
        notes.append(f"{data} has {first.label} alone: nothing to compare.")
    found = []
    for other in others:
        pairs = _pairs(data, first, other, notes)
        for metric in ACCURACIES if pairs else ():
            one = _difference(pairs, metric, confidence)
            if one is not None:
                found.append(Comparison(data, first.label, other.label, metric, *one))
    return found


def _pairs(data: str, first: Entry, other: Entry, notes: list[str]) -> list[tuple[RunRecord, RunRecord]]:
    """Runs of the same seed and partition."""
    a, b = ({run.seed: run for run in entry.runs} for entry in (first, other))
    for entry, alone in ((first, sorted(a.keys() - b.keys())), (other, sorted(b.keys() - a.keys()))):
        if alone:
            seeds = ", ".join(map(str, alone))
            notes.append(f"{data}: seed {seeds} of {entry.label} has no partner and is left out.")
    pairs = []
    for seed in sorted(a.keys() & b.keys()):
        if a[seed].partition == b[seed].partition:
            pairs.append((a[seed], b[seed]))
        else:
            names = f"{first.label} and {other.label}"
            notes.append(f"{data}: seed {seed} of {names} has different partitions and is left out.")
    return pairs


def _difference(pairs: Sequence[tuple[RunRecord, RunRecord]], metric: str, confidence: float):
    """Seeds, mean difference and interval in percent points; None where no pair has the metric."""
    values = {
        a.seed: 100 * (y - x)
        for a, b in pairs
        if (x := (a.summary or {}).get(metric)) is not None and (y := (b.summary or {}).get(metric)) is not None
    }
    if not values:
        return None
    differences = np.array(list(values.values()))
    return tuple(values), float(differences.mean()), *interval(differences, confidence)


def interval(differences: np.ndarray, confidence: float) -> tuple[float | None, float | None]:
    """Percentile bootstrap of the mean of paired differences [n]; (None, None) for one.

    The percentiles need no jackknife, so they hold for two pairs and for equal differences too.
    """
    if len(differences) < 2:
        return None, None
    found = bootstrap(
        (differences,), np.mean, n_resamples=RESAMPLES, confidence_level=confidence, method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


def as_markdown(comparisons: Sequence[Comparison], confidence: float) -> str:
    """One table for each data set and partition."""
    lines = []
    for data in dict.fromkeys(one.data for one in comparisons):
        lines += [f"### {data}: difference in percent points, {100 * confidence:g} % bootstrap interval", ""]
        lines += ["| compared | metric | pairs | difference | interval | |", "|---|---|---:|---:|---:|---|"]
        for one in (one for one in comparisons if one.data == data):
            bounds = "–" if one.low is None else f"[{one.low:+.2f}, {one.high:+.2f}]".replace("-", "−")
            names, pairs = f"{one.other} less {one.first}", len(one.seeds)
            difference = f"{one.difference:+.2f}".replace("-", "−")
            cells = (names, ACCURACIES[one.metric], str(pairs), difference, bounds, one.verdict)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
