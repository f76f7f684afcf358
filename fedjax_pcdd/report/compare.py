"""Paired comparison: the same seeds and partitions under two methods or settings."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.collect import OF_DATA, RunRecord
from fedjax_pcdd.report.contents import ACCURACIES
from fedjax_pcdd.report.grouping import (
    PARTITION,
    Entry,
    alike_in_pa,
    data_of,
    differing,
    entries,
    listed_by,
    pa_kind,
    unlike,
)
from fedjax_pcdd.report.statistics import Difference, family, paired, signed
from fedjax_pcdd.report.tables import NOTHING, Table, texts
from fedjax_pcdd.training.metrics import chosen_by
from fedjax_pcdd.training.progress import with_pa_named

HEADINGS = ("compared", "metric", "pairs", "difference", "interval", "p (t)", "p (Wilcoxon)", "verdict")


class Comparison(NamedTuple):
    """How far another experiment is above the first; accuracies in percentage points."""

    data: str  # data set and partition
    first: str  # the experiments that are compared
    other: str
    metric: str  # entry of summary.json
    heading: str  # of the metric; for PA with when it was measured, if that is the same for both
    difference: Difference  # other minus first; p-values are adjusted for the comparisons of this metric on this data
    chosen_by: str  # what chose the best rounds, in words
    alike: bool = True  # whether the metric is the same quantity in both; if not, there is no verdict


def compare(runs: Sequence[RunRecord], confidence: float = 0.95) -> tuple[list[Comparison], list[str]]:
    """Compare every experiment with that of the first run, on each data set and partition.

    That is the experiment with its method and settings; on data other than its own, the only one of its method.

    Args:
      runs: as collected; unfinished ones are left out, and a sentence says so.
      confidence: of the intervals, in (0, 1).

    Returns:
      The comparisons, and a sentence for everything that could not be paired.

    Raises:
      UserError: nothing to compare, or no pair.
    """
    if not 0 < confidence < 1:
        raise UserError(f"must be above 0 and below 1, not {confidence:g}.", field="confidence")
    unfinished = [run for run in runs if run.summary is None]
    notes = [f"{run.path} {'failed' if run.failure else 'is unfinished'} and is left out." for run in unfinished]
    results: list[Comparison] = []
    for data, members in listed_by((data_of(run), run) for run in runs if run.summary is not None).items():
        results += _compare(" · ".join(data), runs[0], entries(members), confidence, notes)
    if not results:
        raise UserError("these runs hold no pair: " + (notes[0] if notes else "give runs of two methods or settings."))
    return results, notes


def _compare(
    data: str, reference: RunRecord, members: list[Entry], confidence: float, notes: list[str]
) -> list[Comparison]:
    first = _first(members, reference)
    if first is None:
        notes.append(f"{data} has no finished {reference.method} with the settings of {reference.path}: left out.")
        return []
    other_entries = [entry for entry in members if entry is not first]
    notes += [f"{run.path} repeats a seed and is left out." for entry in members for run in entry.repeated]
    notes += [sentence for entry in members for run in entry.runs for sentence in _not_finite(run)]
    notes += [f"{data}: {sentence}" for sentence in unlike(run for entry in members for run in entry.runs)]
    if not other_entries:
        notes.append(f"{data} has {first.label} alone: nothing to compare.")
    pairs = [_pairs(data, first, other, notes) for other in other_entries]
    reasons = [
        _unlike_pa(first, other) | _unlike_selection(first, other) | _unlike_rounds(first, other)
        for other in other_entries
    ]
    notes += [f"{data}: {sentence}" for reason in reasons for sentence in dict.fromkeys(reason.values())]
    alike = {metric: [metric not in reason for reason in reasons] for metric in ACCURACIES}
    by_metric = {metric: _differences(metric, pairs, alike[metric], confidence) for metric in ACCURACIES}
    return [
        Comparison(
            data, first.label, other.label, metric,
            with_pa_named(ACCURACIES[metric], [run.result for run in (*first.runs, *other.runs)]), difference,
            _chosen_by(first, other), alike[metric][i],
        )
        for i, other in enumerate(other_entries)
        for metric in ACCURACIES
        if (difference := by_metric[metric][i]) is not None
    ]  # fmt: skip


def _differences(
    metric: str, pairs: Sequence[tuple[list[RunRecord], list[RunRecord]]], alike: Sequence[bool], confidence: float
) -> list[Difference | None]:
    """The differences in a metric; only comparisons of like quantities are a family, in which p-values are adjusted."""
    raw = [paired(_values(b, metric), _values(a, metric), confidence) for a, b in pairs]
    adjusted = family([difference if same else None for difference, same in zip(raw, alike, strict=True)])
    return [new if same else old for new, old, same in zip(adjusted, raw, alike, strict=True)]


def _unlike_pa(first: Entry, other: Entry) -> dict[str, str]:
    """A sentence for each metric of PA, if PA has another protocol or other local training in the two experiments."""
    kinds = [{pa_kind(run) for run in entry.runs} for entry in (first, other)]
    if alike_in_pa(set.union(*kinds)):
        return {}
    advice = "Give both the same `pa_protocol`." if len({protocol for *_, protocol in set.union(*kinds)}) > 1 else (
        "With fine_tune_epochs equal to local_epochs both follow equally many local epochs; with fine_tune_epochs=0 "
        "both are of the models in training."
    )  # fmt: skip
    sentence = (
        f"PA of {first.label} and of {other.label} are different quantities, {_in_words(kinds[0])} and "
        f"{_in_words(kinds[1])}, so there is no verdict on it. {advice}"
    )
    return {metric: sentence for metric in ACCURACIES if metric.startswith("pa")}


def _unlike_selection(first: Entry, other: Entry) -> dict[str, str]:
    """A sentence for each metric of best rounds that were chosen by other samples, or by another accuracy."""
    results = [run.result for entry in (first, other) for run in entry.runs]
    criteria = {
        "ga_best": {result.get("ga_best_selected_on", result.get("selected_on", "test")) for result in results},
        "pa_best": {result.get("selected_on", "test") for result in results},
    }
    metrics = [metric for metric, values in criteria.items() if len(values) > 1]
    names = " and ".join(ACCURACIES[metric] for metric in metrics)
    sentence = (
        f"{names} of {first.label} and of {other.label} are different quantities, of rounds chosen by "
        f"{_chosen_by(first)} and by {_chosen_by(other)}, so there is no verdict on them."
    )
    return dict.fromkeys(metrics, sentence)


def _unlike_rounds(first: Entry, other: Entry) -> dict[str, str]:
    """A sentence for each metric of rounds that were tested at other intervals, or chosen for each client alone."""
    runs = [run for entry in (first, other) for run in entry.runs]
    labels = f"of {first.label} and of {other.label} are different quantities"
    sentences = {}
    if len({run.config.get("eval_every", 1) for run in runs}) > 1:
        sentence = f"Best rounds and means of the last ten tests {labels}, as `eval_every` differs: no verdict on them."
        sentences = {metric: sentence for metric in ACCURACIES if not metric.endswith("_last")}
    if len({"ga_best_mean" in run.result for run in runs}) > 1:
        own = "without a global model it is the mean over clients of each one's model in its own best round of PA"
        sentences["ga_best"] = f"GA best {labels} ({own}): no verdict on it."
    return sentences


def _chosen_by(*members: Entry) -> str:
    return chosen_by(run.result for entry in members for run in entry.runs)


def _in_words(kinds: set[tuple[str, int | None, str]]) -> str:
    details = {
        (name, ", ".join([f"{epochs} epoch{'s' * (epochs != 1)}"] * bool(epochs) + [protocol] * bool(protocol)))
        for name, epochs, protocol in kinds
    }
    texts = (name.removeprefix("PA ") + (f" ({more})" if more else "") for name, more in details)
    return " or ".join(sorted(texts))


def _not_finite(run: RunRecord) -> list[str]:
    names = [name for metric, name in ACCURACIES.items() if not math.isfinite(run.result.get(metric) or 0.0)]
    sentences = [f"{run.path} has no finite number as its {name}, which is left out." for name in names]
    diverged = f"{run.path} diverged in fine-tuning, so that it has no PA: its seed is left out of differences in PA."
    return sentences + [diverged] * ("diverged_client" in run.result)


def _first(members: Sequence[Entry], reference: RunRecord) -> Entry | None:
    """The experiment that has the settings of a run, among those of one data set and partition."""
    of_data = {"dataset", "task", OF_DATA, *PARTITION}
    same_method = [entry for entry in members if entry.runs[0].method == reference.method]
    for entry in same_method:
        if not {*differing([entry.runs[0].settings, reference.settings])} - of_data:
            return entry
    other_data = data_of(members[0].runs[0]) != data_of(reference)
    return same_method[0] if other_data and len(same_method) == 1 else None


def _pairs(data: str, first: Entry, other: Entry, notes: list[str]) -> tuple[list[RunRecord], list[RunRecord]]:
    """Runs of both experiments with the same seed and partition."""
    a, b = ({run.seed: run for run in entry.runs} for entry in (first, other))
    for entry, partner, unpaired in ((first, other, a.keys() - b.keys()), (other, first, b.keys() - a.keys())):
        if unpaired:
            seeds = ", ".join(map(str, sorted(unpaired)))
            notes.append(f"{data}: seed {seeds} of {entry.label} has no partner in {partner.label} and is left out.")
    seeds = sorted(a.keys() & b.keys())
    for seed in seeds:
        names = f"{first.label} and {other.label}"
        without = [run.path for run in (a[seed], b[seed]) if run.partition is None]
        if len(without) == 1:
            notes.append(f"{without[0]} has no partition.npz and is left out: resume it, which writes that again.")
        elif a[seed].partition != b[seed].partition:
            notes.append(f"{data}: seed {seed} of {names} has different data or partitions and is left out.")
        elif without:
            notes.append(f"{data}: seed {seed} of {names} has no partition.npz, so that partitions may differ.")
    paired_seeds = [seed for seed in seeds if a[seed].partition == b[seed].partition]
    return [a[seed] for seed in paired_seeds], [b[seed] for seed in paired_seeds]


def _values(runs: Sequence[RunRecord], metric: str) -> dict[int, float]:
    """A metric in percent, by seed, of the runs that have it."""
    by_seed = {run.seed: run.result.get(metric) for run in runs}
    return {seed: 100 * value for seed, value in by_seed.items() if value is not None}


def comparison_tables(comparisons: Sequence[Comparison], confidence: float) -> list[Table]:
    """One table for each data set and partition."""
    tables = []
    for data in dict.fromkeys(comparison.data for comparison in comparisons):
        lines = [_line(comparison, 1 - confidence) for comparison in comparisons if comparison.data == data]
        chosen = " or ".join(dict.fromkeys(one.chosen_by for one in comparisons if one.data == data))
        title = (
            f"{data}: difference in percent points, {100 * confidence:g} % interval of Student's t; best rounds chosen "
            f"by {chosen}"
        )
        tables.append(texts(title, HEADINGS, lines, left=("metric", "verdict")))
    return tables


def _line(comparison: Comparison, alpha: float) -> list[str]:
    difference = comparison.difference
    low, high = difference.low, difference.high
    bounds = NOTHING if low is None or high is None else f"[{signed(low)}, {signed(high)}]"
    judged = (difference.p, difference.rank_p) if comparison.alike else (None, None)
    p_values = [NOTHING if p is None else f"{p:.3f}" for p in judged]
    return [
        f"{comparison.other} less {comparison.first}", comparison.heading, str(len(difference.seeds)),
        signed(difference.mean), bounds, *p_values,
        difference.verdict(alpha) if comparison.alike else "different quantities",
    ]  # fmt: skip
