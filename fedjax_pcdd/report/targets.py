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
    """What has to be reached: FedAvg's best GA, or with `last` that of its last round; with `above`, exceeded."""

    last: bool
    above: bool
    sentence: str


BEST = Rule(False, False, "Target: FedAvg's best GA with the same seed; FedAvg itself counts all its rounds.")
LAST = Rule(True, True, "Target: more than FedAvg's GA in its last round, with the same seed.")
RULES = {"fedmr/table4": BEST, "fedrl/table2": LAST}


def reached(run: RunRecord, references: Sequence[RunRecord], rule: Rule) -> tuple[int | None, float | None] | None:
    """The first round that reaches the target, and how many times fewer that is than all rounds.

    Args:
      run: a finished run; FedAvg's own count all their rounds, by convention.
      references: FedAvg's runs, of which `reference` gives the target.
      rule: of the paper.

    Returns:
      (None, None) where the target is never reached; None where no reference fits.
    """
    rounds = run.config["rounds"]
    if run.method == REFERENCE:
        return rounds, 1.0
    known = _accuracies(reference(run, references))
    if not np.isfinite(known).any():
        return None
    target = known[np.isfinite(known)][-1] if rule.last else np.nanmax(known)
    first = rounds_to(_accuracies(run), float(target), above=rule.above)
    return first, speed_up(first, rounds)


def reference(run: RunRecord, references: Sequence[RunRecord]) -> RunRecord | None:
    """The run of the same seed, rounds, data set and partition with the same options of the run.

    Where none has these it is the only experiment among them, and None where there are several.
    """
    wanted = (run.seed, run.config["rounds"], run.partition)
    fitting = [one for one in references if (one.seed, one.config["rounds"], one.partition) == wanted]
    same = [one for one in fitting if not _apart([run, one])]
    return next(iter(same or ([] if _apart(fitting) else fitting)), None)


def _apart(runs: Sequence[RunRecord]) -> list[str]:
    """Options of the run, but for the method, in which runs differ."""
    return [name for name in differing([run.config for run in runs]) if name in RUN and name != "method"]


def _accuracies(run: RunRecord | None) -> np.ndarray:
    """GA of each round [T], NaN where it was not measured."""
    accuracies = np.full(run.rounds_done if run else 0, np.nan)
    rounds, values = series(run.rows if run else [], "ga")
    accuracies[rounds - 1] = values
    return accuracies
