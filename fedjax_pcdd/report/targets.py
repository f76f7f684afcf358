"""Rounds to FedAvg's accuracy and speed-ups (FedMR, Table 4; FedRL, Table 2), pair by pair of the same seed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_pcdd.analysis.curves import rounds_to, series, speed_up
from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.report.grouping import differing
from fedjax_pcdd.training.config import RUN

REFERENCE = "fedavg"


class Rule(NamedTuple):
    """What is to be reached: FedAvg's best GA, or with `last` that of its last round; with `above`, to be exceeded."""

    last: bool
    above: bool
    sentence: str


BEST = Rule(False, False, "Target: FedAvg's best GA with the same seed; FedAvg itself counts all its rounds.")
LAST = Rule(True, True, "Target: more than FedAvg's GA in its last round, with the same seed.")
RULES = {"fedmr/table4": BEST, "fedrl/table2": LAST}


def reached(run: RunRecord, references: Sequence[RunRecord], rule: Rule) -> tuple[int | None, float | None] | None:
    """The first round that reaches the target, and how many times fewer that is than all rounds of FedAvg.

    Args:
      run: a finished run; FedAvg's own count all rounds that they ran, by convention.
      references: FedAvg's runs, of which `reference` gives the target.
      rule: of the paper.

    Returns:
      (None, None) if the target is never reached; None if no reference fits.
    """
    if run.method == REFERENCE:
        return run.rounds_done, 1.0
    fedavg = reference(run, references)
    if fedavg is None or not np.isfinite(baseline := _accuracies(fedavg)).any():
        return None
    chosen = fedavg.result.get("ga_best_round")  # validation samples may have chosen it
    best = np.nanmax(baseline) if chosen is None else baseline[chosen - 1]
    target = baseline[np.isfinite(baseline)][-1] if rule.last else best
    first = rounds_to(_accuracies(run), float(target), above=rule.above)
    return first, speed_up(first, fedavg.rounds_done)


def reference(run: RunRecord, references: Sequence[RunRecord]) -> RunRecord | None:
    """The reference with the same seed, rounds, data set and partition, and with the same run options.

    If none has the same run options, it is the only experiment that has the rest, or None if there are several.
    """
    key = (run.seed, run.config["rounds"], run.partition)
    candidates = [record for record in references if (record.seed, record.config["rounds"], record.partition) == key]
    same_options = [record for record in candidates if not _apart([run, record])]
    return next(iter(same_options or ([] if _apart(candidates) else candidates)), None)


def _apart(runs: Sequence[RunRecord]) -> list[str]:
    """Run options, except the method, in which runs differ."""
    return [name for name in differing([run.config for run in runs]) if name in RUN and name != "method"]


def _accuracies(run: RunRecord) -> np.ndarray:
    """GA of each round [T], NaN where it was not measured."""
    accuracies = np.full(run.rounds_done, np.nan)
    rounds, values = series(run.rows, "ga")
    accuracies[rounds - 1] = values
    return accuracies
