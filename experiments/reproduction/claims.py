"""Which claims of the papers the results bear out: one method above another on a split, in the paper and here."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.expected import PA, PA_LAST
from fedjax_pcdd.report.statistics import VERDICTS, Difference, family, paired
from fedjax_pcdd.training.fields import as_mapping, load_mapping, read_text
from reproduction.columns import BASELINE, Column, Expectations, printed


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
      hinges: what it is known or thought to depend on.
      gpu_part: of the GPU plan (benchmarks/gpu) that runs both rows, by split.
    """

    text: str
    table: str
    higher: str
    lower: str
    metric: str
    splits: tuple[str, ...]
    tags: tuple[str, ...] = ("",)
    printed_on: str | None = None
    hinges: str = ""
    gpu_part: Mapping[str, int] = {}


class Finding(NamedTuple):
    """What the results say of a claim on one split; `best` and `last_ten` None where it was not tried.

    The p-values of both are adjusted for all claims of the page that were tried; `alone` is the best round's as it is,
    `in_table` its p-value adjusted for the claims on the same table and scale, `by_last` the difference in PA of the
    models after their last epoch, for a claim about PA.
    """

    claim: Claim
    split: str
    tag: str
    scale: str
    paper: float | None
    best: Difference | None
    last_ten: Difference | None
    alone: Difference | None = None
    in_table: float | None = None
    by_last: Difference | None = None

    @property
    def claimed(self) -> float:
        """The paper's difference, or +1 where it prints none for this split."""
        return 1.0 if self.paper is None else self.paper

    @property
    def verdict(self) -> str:
        """By the best round, as the papers have it; of PA by the model after the last epoch too: they must agree."""
        if self.best is None:
            return "not tried"
        verdict = self.best.against(self.claimed)
        agreed = self.by_last is None or self.by_last.mean * self.best.mean > 0
        return verdict if agreed else "not distinguishable"


def read_claims(path: Path) -> list[Claim]:
    """The claims in a YAML file; UserError where one has a wrong or missing key."""
    claims = []
    for number, entry in enumerate(load_mapping(read_text(path), str(path)).get("claims", []), 1):
        where = f"claim {number} of {path}"
        given: dict[str, Any] = {"metric": "ga_pct"} | as_mapping(entry, where)
        given |= {name: tuple(given[name]) for name in ("splits", "tags") if name in given}
        try:
            claims.append(Claim(**given))
        except TypeError:
            raise UserError(f"{where} needs the keys text, table, higher, lower and splits.") from None
    return claims


def findings(claims: Iterable[Claim], columns: Sequence[Column], expected: Expectations) -> list[Finding]:
    """Every claim on each of its splits, at each scale that has it; one that nothing has is there as not tried."""
    all_findings = []
    for claim in claims:
        for split in claim.splits:
            numbers = printed(expected.get(claim.table, ()), claim.printed_on or split, claim.metric)
            higher, lower = (numbers.get(name) for name in (claim.higher, claim.lower))
            paper = None if higher is None or lower is None else higher - lower
            tried = [
                Finding(claim, split, one.tag, one.scale, paper, *differences, by_last=_by_last(claim, one))
                for one in columns
                if (one.table, one.split) == (claim.table, split) and one.tag in claim.tags
                and (differences := _differences(claim, one)) is not None
            ]  # fmt: skip
            all_findings += tried or [Finding(claim, split, "", "", paper, None, None)]
    return _adjusted(all_findings)


def _differences(claim: Claim, column: Column) -> tuple[Difference, Difference | None] | None:
    higher, lower = column.row(claim.higher), column.row(claim.lower)
    if higher is None or lower is None:
        return None
    best = paired(higher.values(claim.metric), lower.values(claim.metric))
    return None if best is None else (best, paired(higher.last_ten(claim.metric), lower.last_ten(claim.metric)))


def _by_last(claim: Claim, column: Column) -> Difference | None:
    higher, lower = column.row(claim.higher), column.row(claim.lower)
    if claim.metric != PA or higher is None or lower is None:
        return None
    return paired(higher.values(PA_LAST), lower.values(PA_LAST))


def _adjusted(all_findings: Sequence[Finding]) -> list[Finding]:
    """With the p-values of the page as those of one family, and of each table and scale as another."""
    bests, tens = (family([getattr(one, name) for one in all_findings]) for name in ("best", "last_ten"))
    of_table: dict[int, float | None] = {}
    for key in dict.fromkeys((one.claim.table, one.scale) for one in all_findings):
        own = [i for i, one in enumerate(all_findings) if (one.claim.table, one.scale) == key]
        adjusted = family([all_findings[i].best for i in own])
        of_table |= {i: one and one.p for i, one in zip(own, adjusted, strict=True)}
    return [
        one._replace(best=best, last_ten=ten, alone=one.best, in_table=of_table[i])
        for i, (one, best, ten) in enumerate(zip(all_findings, bests, tens, strict=True))
    ]


class Count(NamedTuple):
    """How many differences to FedAvg of one table have the paper's sign, at one scale."""

    scale: str
    table: str
    metric: str
    verdicts: Counter


def counts(columns: Sequence[Column], expected: Expectations) -> list[Count]:
    """All methods against FedAvg on all splits that the paper prints, by table, metric and scale: each a family."""
    members: dict[tuple[str, str, str], list[tuple[Difference, float]]] = {}
    for column in columns:
        for metric in dict.fromkeys(one.metric for one in expected.get(column.table, ())):
            numbers = printed(expected[column.table], column.split, metric)
            for row in column.rows if not column.tag and BASELINE in numbers else ():
                delta = column.over_baseline(row, metric)
                if delta is not None and row.name in numbers:
                    pair = delta, numbers[row.name] - numbers[BASELINE]
                    members.setdefault((column.scale, column.table, metric), []).append(pair)
    return [Count(*key, Counter(_verdicts(pairs))) for key, pairs in members.items()]


def _verdicts(pairs: Sequence[tuple[Difference, float]]) -> list[str]:
    adjusted = family([delta for delta, _ in pairs])
    return [delta.against(claimed) for delta, (_, claimed) in zip(adjusted, pairs, strict=True) if delta]


def ordered(verdicts: Iterable[str]) -> list[str]:
    """Verdicts that occur, in the order of `VERDICTS`."""
    known = set(verdicts)
    return [verdict for verdict in VERDICTS if verdict in known]
