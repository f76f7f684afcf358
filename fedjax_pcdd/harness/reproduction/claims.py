"""Which claims of the papers the results bear out: one method above another on a split, in the paper and here."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.harness.reproduction.statistics import VERDICTS, Difference, difference
from fedjax_pcdd.harness.reproduction.tables import BASELINE, LAST_TEN, Column, printed
from fedjax_pcdd.report.expected import Expected
from fedjax_pcdd.training.fields import as_mapping, load_mapping, read_text


class Claim(NamedTuple):
    """That one row of a table is above another.

    Args:
      text: in words.
      table: as `fedmr/table1`.
      higher, lower: rows, as `fedmr` or `fedmr full`.
      metric: of the expected tables.
      splits: those it is about.
      tags: of the columns that may bear it out; "" for the table itself.
      printed_on: the split with the paper's numbers, where a table has means alone; None for the same one.
    """

    text: str
    table: str
    higher: str
    lower: str
    metric: str
    splits: tuple[str, ...]
    tags: tuple[str, ...] = ("",)
    printed_on: str | None = None


class Finding(NamedTuple):
    """What was found of a claim on one split; `best` and `last_ten` None where it was not tried."""

    claim: Claim
    split: str
    tag: str
    scale: str
    paper: float | None
    best: Difference | None
    last_ten: Difference | None

    @property
    def claimed(self) -> float:
        """The paper's difference, or +1 where it prints none for this split."""
        return 1.0 if self.paper is None else self.paper

    @property
    def verdict(self) -> str:
        """By the best round, as the papers have it."""
        return "not tried" if self.best is None else self.best.against(self.claimed)


def read_claims(path: Path) -> list[Claim]:
    """The claims in a YAML file; UserError where one has a wrong or missing key."""
    found = []
    for number, entry in enumerate(load_mapping(read_text(path), str(path)).get("claims", []), 1):
        where = f"claim {number} of {path}"
        given: dict[str, Any] = {"metric": "ga_pct"} | as_mapping(entry, where)
        given |= {name: tuple(given[name]) for name in ("splits", "tags") if name in given}
        try:
            found.append(Claim(**given))
        except TypeError:
            raise UserError(f"{where} needs the keys text, table, higher, lower and splits.") from None
    return found


def findings(
    claims: Iterable[Claim], columns: Sequence[Column], expected: Mapping[str, Sequence[Expected]]
) -> list[Finding]:
    """Every claim on each of its splits, at each scale that has it; one that nothing has is found as not tried."""
    found = []
    for claim in claims:
        for split in claim.splits:
            numbers = printed(expected.get(claim.table, ()), claim.printed_on or split, claim.metric)
            higher, lower = (numbers.get(name) for name in (claim.higher, claim.lower))
            paper = None if higher is None or lower is None else higher - lower
            tried = [
                Finding(claim, split, one.tag, one.scale, paper, *differences)
                for one in columns
                if (one.table, one.split) == (claim.table, split) and one.tag in claim.tags
                and (differences := _differences(claim, one)) is not None
            ]  # fmt: skip
            found += tried or [Finding(claim, split, "", "", paper, None, None)]
    return found


def _differences(claim: Claim, column: Column) -> tuple[Difference, Difference | None] | None:
    higher, lower = column.row(claim.higher), column.row(claim.lower)
    if higher is None or lower is None:
        return None
    best = difference(higher.values(claim.metric), lower.values(claim.metric))
    last = claim.metric in LAST_TEN
    ten = difference(higher.last_ten(claim.metric), lower.last_ten(claim.metric)) if last else None
    return None if best is None else (best, ten)


class Count(NamedTuple):
    """How many differences to FedAvg of one table have the paper's sign, at one scale."""

    scale: str
    table: str
    metric: str
    verdicts: Counter


def counts(columns: Sequence[Column], expected: Mapping[str, Sequence[Expected]]) -> list[Count]:
    """All methods against FedAvg on all splits that the paper prints, by table, metric and scale."""
    found: dict[tuple[str, str, str], Counter] = {}
    for column in columns:
        for metric in dict.fromkeys(one.metric for one in expected.get(column.table, ())):
            numbers = printed(expected[column.table], column.split, metric)
            for row in column.rows if not column.tag else ():
                delta = column.over_baseline(row, metric)
                if delta is None or row.name not in numbers or BASELINE not in numbers:
                    continue
                verdict = delta.against(numbers[row.name] - numbers[BASELINE])
                found.setdefault((column.scale, column.table, metric), Counter())[verdict] += 1
    return [Count(*key, verdicts) for key, verdicts in found.items()]


def ordered(verdicts: Iterable[str]) -> list[str]:
    """Verdicts that occur, in the order of `VERDICTS`."""
    known = set(verdicts)
    return [verdict for verdict in VERDICTS if verdict in known]
