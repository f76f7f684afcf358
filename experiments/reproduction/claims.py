"""Which claims of the papers the results bear out: one method above another on a split, in the paper and here."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.expected import METRICS, PA, PA_LAST
from fedjax_pcdd.report.statistics import Difference, family
from fedjax_pcdd.training.fields import as_mapping, load_mapping, read_text
from reproduction.columns import BASELINE, Column, Epochs, Expectations, alike, difference, in_words, printed
from reproduction.verdicts import UNLIKE, VERDICTS, against

POINTS = "pct", "fraction"  # endings of the metrics that are in percent points


class Claim(NamedTuple):
    """The claim that one row of a table is above another.

    Args:
      text: the claim in words.
      table: as `fedmr/table1`.
      higher, lower: rows, as `fedmr` or `fedmr full`.
      metric: a metric of the expected tables.
      splits: the splits that the claim is about.
      tags: tags of the columns that may bear it out; "" for the table itself.
      printed_on: the split with the paper's numbers, if the table prints only means; None if it is the same split.
      hinges: what the claim is known or thought to depend on.
      gpu_part: the part of the GPU plan (benchmarks/gpu) that runs both rows, by split.
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
        """Whether its differences are in percent points."""
        return self.metric.partition(":")[0].endswith(POINTS)


class Finding(NamedTuple):
    """What the results say of a claim on one split.

    Args:
      claim, split, tag, scale: the claim, and the column that the finding is from.
      paper: the printed difference.
      best: difference of the best round, its p-value adjusted for all claims of the page that were tried; None if this
        one was not.
      unchosen: difference where no test chose the round, adjusted likewise: of the mean of the last ten rounds, for PA
        of fine-tuned models of the last round.
      of_last: whether that is the last round.
      by_last: difference of the models after their last epoch, adjusted likewise, for a claim about PA.
      alone, alone_by_last, alone_unchosen: `best`, `by_last` and `unchosen` with unadjusted p-values.
      in_table: the best round's p-value adjusted for the claims on the same table and scale.
      images: the data set or the task, if it is not that of the table.
      superseded: options that the runs had from a preset which has other values today.
      pa_epochs: local epochs between the server's model and the test in the higher and the lower row, for a claim about
        PA where they differ; then it has no p-values.
      averages: whether the split is a mean over other ones.
    """

    claim: Claim
    split: str
    tag: str
    scale: str
    paper: float | None
    best: Difference | None
    unchosen: Difference | None
    by_last: Difference | None = None
    alone: Difference | None = None
    alone_by_last: Difference | None = None
    alone_unchosen: Difference | None = None
    in_table: float | None = None
    images: str = ""
    superseded: Mapping[str, str] = {}
    of_last: bool = False
    pa_epochs: tuple[Epochs, Epochs] | None = None
    averages: bool = False

    @property
    def where(self) -> str:
        """Split, tag, and the options in which the preset has changed since the run."""
        old_options = f"({in_words(self.superseded)})" if self.superseded else ""
        return " ".join(part for part in (self.split, self.tag, old_options) if part)

    @property
    def claimed(self) -> float:
        """The paper's difference, or +1 if it prints none for this split."""
        return 1.0 if self.paper is None else self.paper

    @property
    def verdict(self) -> str:
        """The verdict by the best round, as in the papers; for PA the model after the last epoch must agree with it."""
        if self.best is None or self.pa_epochs:
            return UNLIKE if self.pa_epochs else "not tried"
        verdict = against(self.best, self.claimed)
        agreed = self.by_last is None or against(self.by_last, self.claimed) == verdict
        return verdict if agreed else "not distinguishable"

    @property
    def uncorrected(self) -> str:
        """The verdict without a correction for other claims."""
        return self._replace(best=self.alone or self.best, by_last=self.alone_by_last or self.by_last).verdict


def read_claims(path: Path) -> list[Claim]:
    """The claims in a YAML file; UserError if one has a wrong or missing key."""
    claims = []
    for number, entry in enumerate(load_mapping(read_text(path), str(path)).get("claims", []), 1):
        location = f"claim {number} of {path}"
        fields: dict[str, Any] = {"metric": "ga_pct"} | as_mapping(entry, location)
        fields |= {name: tuple(fields[name]) for name in ("splits", "tags") if name in fields}
        try:
            claims.append(Claim(**fields))
        except TypeError:
            raise UserError(f"{location} needs the keys text, table, higher, lower and splits.") from None
    return claims


def findings(claims: Iterable[Claim], columns: Sequence[Column], expected: Expectations) -> list[Finding]:
    """Every claim on each of its splits, at each scale that has it; without any result it is listed as not tried.

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
            candidates = [
                column
                for column in columns
                if (column.table, column.split) == (claim.table, split) and column.tag in claim.tags
            ]
            tried = [finding for column in candidates if (finding := _finding(claim, column, paper)) is not None]
            all_findings += tried or [Finding(claim, split, "", "", paper, None, None)]
    return _adjusted(all_findings)


def _finding(claim: Claim, column: Column, paper: float | None) -> Finding | None:
    """What a column says of a claim, None if it lacks a row or has no pair."""
    higher, lower = column.row(claim.higher), column.row(claim.lower)
    best = None if higher is None or lower is None else difference(higher, lower, claim.metric)
    if higher is None or lower is None or best is None:
        return None
    found = Finding(
        claim, column.split, column.tag, column.scale, paper, best, None, images=higher.images,
        superseded=lower.superseded | higher.superseded, averages="options" not in higher.results[0],
    )  # fmt: skip
    if not alike(higher, lower, claim.metric):
        return found._replace(best=best._replace(p=None), pa_epochs=(higher.pa_epochs, lower.pa_epochs))
    of_last = claim.metric == PA and (higher.tuned or lower.tuned)
    unchosen = difference(higher, lower, claim.metric, of="last" if of_last else "last ten")
    last_epoch = difference(higher, lower, PA_LAST) if claim.metric == PA else None
    return found._replace(
        unchosen=unchosen, of_last=of_last, by_last=last_epoch,
        alone=best, alone_by_last=last_epoch, alone_unchosen=unchosen,
    )  # fmt: skip


def _adjusted(all_findings: Sequence[Finding]) -> list[Finding]:
    """The findings with p-values adjusted as one family over the page, and as one for each table and scale."""
    names = ("best", "unchosen", "by_last")
    bests, unchosen, last_epochs = (family([getattr(finding, name) for finding in all_findings]) for name in names)
    of_table: dict[int, float | None] = {}
    for key in dict.fromkeys((finding.claim.table, finding.scale) for finding in all_findings):
        indices = [i for i, finding in enumerate(all_findings) if (finding.claim.table, finding.scale) == key]
        adjusted = family([all_findings[i].best for i in indices])
        of_table |= {i: delta and delta.p for i, delta in zip(indices, adjusted, strict=True)}
    return [
        finding._replace(best=best, unchosen=by_unchosen, by_last=last_epoch, in_table=of_table[i])
        for i, (finding, best, by_unchosen, last_epoch) in enumerate(
            zip(all_findings, bests, unchosen, last_epochs, strict=True)
        )
    ]


class Count(NamedTuple):
    """How many differences to FedAvg of one table have the paper's sign, at one scale."""

    scale: str
    table: str
    metric: str
    verdicts: Counter


def counts(columns: Sequence[Column], expected: Expectations) -> list[Count]:
    """All methods against FedAvg on all splits that the paper prints; each table, metric and scale is one family.

    Metrics without a best value, as seconds, are left out, and PA that follows other numbers of local epochs.
    """
    members: dict[tuple[str, str, str], list[tuple[Difference, float]]] = {}
    for column in columns:
        for metric in dict.fromkeys(expectation.metric for expectation in expected.get(column.table, ())):
            if (description := METRICS.get(metric.partition(":")[0])) and not description.best:
                continue
            numbers = printed(expected[column.table], column.split, metric)
            for row in column.rows if not column.tag and BASELINE in numbers else ():
                delta = column.over_baseline(row, metric) if column.like_baseline(row, metric) else None
                if delta is not None and row.name in numbers:
                    delta_and_claimed = delta, numbers[row.name] - numbers[BASELINE]
                    members.setdefault((column.scale, column.table, metric), []).append(delta_and_claimed)
    return [Count(*key, Counter(_verdicts(pairs))) for key, pairs in members.items()]


def _verdicts(pairs: Sequence[tuple[Difference, float]]) -> list[str]:
    adjusted = family([delta for delta, _ in pairs])
    return [against(delta, claimed) for delta, (_, claimed) in zip(adjusted, pairs, strict=True) if delta]


def ordered(verdicts: Iterable[str]) -> list[str]:
    """The verdicts that occur, in the order of `VERDICTS`."""
    present = set(verdicts)
    return [verdict for verdict in (*VERDICTS, UNLIKE) if verdict in present]
