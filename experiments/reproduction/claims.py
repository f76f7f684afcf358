"""Which claims of the papers the results bear out: one method above another on a split, in the paper and here."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.expected import METRICS, PA, PA_LAST
from fedjax_pcdd.report.statistics import Difference, family
from fedjax_pcdd.training.fields import as_mapping, load_mapping, read_text
from reproduction.columns import BASELINE, Column, Expectations, Row, difference, in_words, printed
from reproduction.verdicts import VERDICTS, against

POINTS = "pct", "fraction"  # ends of the metrics that are in percent points


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

    @property
    def in_points(self) -> bool:
        """Whether its differences are percent points."""
        return self.metric.partition(":")[0].endswith(POINTS)


class Finding(NamedTuple):
    """What the results say of a claim on one split.

    Args:
      claim, split, tag, scale: which, and from which column.
      paper: the printed difference.
      best: of the best round, its p-value adjusted for all claims of the page that were tried; None where it was not.
      last_ten: of the mean of the last ten rounds, adjusted likewise; None for PA, which there is of other models.
      by_last: of the models after their last epoch, adjusted likewise, for a claim about PA.
      alone, alone_by_last: `best` and `by_last` as they are.
      in_table: the best round's p-value adjusted for the claims on the same table and scale.
      images: the data set or the task, where it is not that of the table.
      superseded: options that the runs have had from a preset which has others today.
    """

    claim: Claim
    split: str
    tag: str
    scale: str
    paper: float | None
    best: Difference | None
    last_ten: Difference | None
    by_last: Difference | None = None
    alone: Difference | None = None
    alone_by_last: Difference | None = None
    in_table: float | None = None
    images: str = ""
    superseded: Mapping[str, str] = {}

    @property
    def where(self) -> str:
        """Split, tag, and what was run as the preset no longer is."""
        then = f"({in_words(self.superseded)})" if self.superseded else ""
        return " ".join(part for part in (self.split, self.tag, then) if part)

    @property
    def claimed(self) -> float:
        """The paper's difference, or +1 where it prints none for this split."""
        return 1.0 if self.paper is None else self.paper

    @property
    def verdict(self) -> str:
        """By the best round, as the papers have it; of PA by the model after the last epoch too: they must agree."""
        if self.best is None:
            return "not tried"
        verdict = against(self.best, self.claimed)
        agreed = self.by_last is None or against(self.by_last, self.claimed) == verdict
        return verdict if agreed else "not distinguishable"

    @property
    def uncorrected(self) -> str:
        """The verdict without a correction for other claims."""
        return self._replace(best=self.alone or self.best, by_last=self.alone_by_last or self.by_last).verdict


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
    """Every claim on each of its splits, at each scale that has it; one that nothing has is there as not tried.

    Raises:
      UserError: a paper prints the opposite of a claim.
    """
    all_findings = []
    for claim in claims:
        for split in claim.splits:
            numbers = printed(expected.get(claim.table, ()), claim.printed_on or split, claim.metric)
            higher, lower = (numbers.get(name) for name in (claim.higher, claim.lower))
            paper = None if higher is None or lower is None else higher - lower
            if paper is not None and paper <= 0:
                raise UserError(f"claim '{claim.text}': the paper prints the opposite on {split}, {paper:+.2f}.")
            here = [one for one in columns if (one.table, one.split) == (claim.table, split) and one.tag in claim.tags]
            tried = [found for one in here if (found := _finding(claim, one, paper)) is not None]
            all_findings += tried or [Finding(claim, split, "", "", paper, None, None)]
    return _adjusted(all_findings)


def _finding(claim: Claim, column: Column, paper: float | None) -> Finding | None:
    """What a column says, None where it lacks a row or has no pair."""
    higher, lower = column.row(claim.higher), column.row(claim.lower)
    best = None if higher is None or lower is None else difference(higher, lower, claim.metric)
    if higher is None or lower is None or best is None:
        return None
    ten = None if claim.metric == PA else difference(higher, lower, claim.metric, last_ten=True)
    last = difference(higher, lower, PA_LAST) if claim.metric == PA else None
    return Finding(
        claim, column.split, column.tag, column.scale, paper, best, ten, last, best, last,
        images=_images(higher), superseded=lower.superseded | higher.superseded,
    )  # fmt: skip


def _images(row: Row) -> str:
    over = row.results[0].get("over_preset", {})
    return over.get("dataset") or over.get("task", "")


def _adjusted(all_findings: Sequence[Finding]) -> list[Finding]:
    """With the p-values of the page as those of one family, and of each table and scale as another."""
    names = ("best", "last_ten", "by_last")
    bests, tens, lasts = (family([getattr(one, name) for one in all_findings]) for name in names)
    of_table: dict[int, float | None] = {}
    for key in dict.fromkeys((one.claim.table, one.scale) for one in all_findings):
        own = [i for i, one in enumerate(all_findings) if (one.claim.table, one.scale) == key]
        adjusted = family([all_findings[i].best for i in own])
        of_table |= {i: one and one.p for i, one in zip(own, adjusted, strict=True)}
    return [
        one._replace(best=best, last_ten=ten, by_last=last, in_table=of_table[i])
        for i, (one, best, ten, last) in enumerate(zip(all_findings, bests, tens, lasts, strict=True))
    ]


class Count(NamedTuple):
    """How many differences to FedAvg of one table have the paper's sign, at one scale."""

    scale: str
    table: str
    metric: str
    verdicts: Counter


def counts(columns: Sequence[Column], expected: Expectations) -> list[Count]:
    """All methods against FedAvg on all splits that the paper prints, by table, metric and scale: each a family.

    Metrics of which no value is the best, as seconds, are left out.
    """
    members: dict[tuple[str, str, str], list[tuple[Difference, float]]] = {}
    for column in columns:
        for metric in dict.fromkeys(one.metric for one in expected.get(column.table, ())):
            if (known := METRICS.get(metric.partition(":")[0])) and not known.best:
                continue
            numbers = printed(expected[column.table], column.split, metric)
            for row in column.rows if not column.tag and BASELINE in numbers else ():
                delta = column.over_baseline(row, metric)
                if delta is not None and row.name in numbers:
                    pair = delta, numbers[row.name] - numbers[BASELINE]
                    members.setdefault((column.scale, column.table, metric), []).append(pair)
    return [Count(*key, Counter(_verdicts(pairs))) for key, pairs in members.items()]


def _verdicts(pairs: Sequence[tuple[Difference, float]]) -> list[str]:
    adjusted = family([delta for delta, _ in pairs])
    return [against(delta, claimed) for delta, (_, claimed) in zip(adjusted, pairs, strict=True) if delta]


def ordered(verdicts: Iterable[str]) -> list[str]:
    """Verdicts that occur, in the order of `VERDICTS`."""
    known = set(verdicts)
    return [verdict for verdict in VERDICTS if verdict in known]
