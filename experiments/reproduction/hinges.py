"""What the claims hinge on: the same difference under other readings, longer training or another network, where run."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from fedjax_pcdd.report.statistics import Difference
from fedjax_pcdd.training.config import RUN
from reproduction.claims import Claim
from reproduction.columns import Column, Row, difference, in_words
from reproduction.verdicts import against

CPU = "cpu"  # the scale that the others are compared with
# What a departure is of, by the options in which it departs: the first that has one of them.
KINDS = {
    "network and norm": {"model", "bn"},
    "length of training": {"rounds", "local_epochs", "train_samples"},
    "images": {"dataset"},
    "readings": set(),
}
MOST_NAMED = 4  # departures of a kind that a line tells of
HEADING = """## What the claims hinge on

Here each claim on each split appears again, under every other setting that was run: other readings of the paper
([ambiguities.md](ambiguities.md)), longer training, another network or norm, other images. A claim *turns* if the best
round's difference changes its sign, or if a paired t-test (with an unadjusted p-value) says something else. A single
seed turns easily; only differences with ± have more. Both differences are of the same seeds and of runs of one version
of this project. A row that a reading does not concern is that of the default.
"""


class Departure(NamedTuple):
    """A claim on a split under other settings, beside the usual ones.

    Args:
      claim, split: which.
      kind: of `KINDS`.
      scale, tag: of the column that departs.
      settings: the options in which it departs, as `local_epochs=10`.
      base: tag of the column that it departs from.
      usual, other: the differences, best round, in the metric of the table, over the same seeds.
      claimed: the paper's difference, or its sign.
    """

    claim: Claim
    split: str
    kind: str
    scale: str
    tag: str
    settings: str
    base: str
    usual: Difference
    other: Difference
    claimed: float

    @property
    def turns(self) -> bool:
        """Whether the sign, or what a test over several seeds says, is another."""
        pair = self.usual, self.other
        if self.usual.mean * self.other.mean <= 0:
            return True
        return all(one.p is not None for one in pair) and len({against(one, self.claimed) for one in pair}) > 1


def departures(
    claims: Iterable[Claim], every: Sequence[Column], paper: Callable[[Claim, str], float]
) -> list[Departure]:
    """All that the results have.

    Args:
      claims: of the papers.
      every: all columns, those of other readings too.
      paper: the printed difference of a claim on a split, or its sign.
    """
    return [
        one
        for claim in claims
        for split in claim.splits
        for column in every
        if (column.table, column.split) == (claim.table, split)
        and (one := _departure(claim, column, _usual(claim, column, every), paper(claim, split))) is not None
    ]


def _usual(claim: Claim, column: Column, every: Sequence[Column]) -> Column | None:
    """The column that one departs from, the nearest by its options: of its scale, else of the scale of a CPU."""
    own = claim.tags.index(column.tag) if column.tag in claim.tags else len(claim.tags)
    for scale, tags in ((column.scale, claim.tags[:own]), (CPU, claim.tags if column.scale != CPU else ())):
        near = [one for one in every if (one.scale, one.table, one.split) == (scale, column.table, column.split)
                and one.tag in tags and _settings(claim, one, column)]  # fmt: skip
        if near:
            return min(near, key=lambda one: (len(_settings(claim, one, column)), tags.index(one.tag)))
    return None


def _settings(claim: Claim, usual: Column, other: Column) -> dict[str, str]:
    """Options in which the upper or the lower row of a claim departs, {} where one column lacks the upper."""
    if usual.row(claim.higher) is None or other.row(claim.higher) is None:
        return {}
    changed: dict[str, str] = {}
    for name in (claim.lower, claim.higher):
        old, new = _options(usual.row(name)), _options(other.row(name))
        for key in dict.fromkeys([*new, *old]) if old is not None and new is not None else ():
            then, now = (_value(one.row(name), key) for one in (usual, other))
            changed |= {key: now} if then != now else {}
    return changed


def _options(row: Row | None) -> Mapping[str, str] | None:
    """What a row has over its preset, None of no row and of a mean over splits."""
    return None if row is None else row.results[0].get("over_preset")


def _value(row: Row | None, option: str) -> str:
    """What a row was run with; a scale may have the preset's value over the preset."""
    known = row.results[0].get("decisive", {}) if row else {}
    return known.get(option) or (_options(row) or {}).get(option, "preset")


def _departure(claim: Claim, column: Column, usual: Column | None, claimed: float) -> Departure | None:
    if usual is None:
        return None
    settings = _settings(claim, usual, column)
    other = _difference(claim, column, usual, settings)
    base = other and _difference(claim, usual, usual, seeds=other.seeds)
    if base is None or other is None or base.seeds != other.seeds:
        return None
    kind = next(name for name, options in KINDS.items() if not options or options & settings.keys())
    words = in_words(settings)
    return Departure(claim, column.split, kind, column.scale, column.tag, words, usual.tag, base, other, claimed)


def _difference(
    claim: Claim, column: Column, usual: Column, settings: Mapping[str, str] | None = None,
    seeds: Container[int] | None = None,
) -> Difference | None:  # fmt: skip
    """Of a column; the lower row may be the usual one's where only options of a method depart."""
    higher, lower = column.row(claim.higher), column.row(claim.lower)
    if lower is None and not RUN.keys() & (settings or {}).keys():
        lower = usual.row(claim.lower)
    return None if higher is None or lower is None else difference(higher, lower, claim.metric, seeds=seeds)


def hinges_section(claims: Sequence[Claim], known: Sequence[Departure]) -> list[str]:
    """A part of the page: a line for each claim of which something is known or thought."""
    lines = [HEADING]
    for claim in claims:
        own = [one for one in known if one.claim == claim]
        if not own and not claim.hinges:
            continue
        thought = f" Thought to hinge on: {claim.hinges}." if claim.hinges else ""
        lines.append(f"- **{claim.text}.**{thought}{'' if own else ' No other setting was run.'}")
        for kind in KINDS:
            lines += _of_kind(kind, [one for one in own if one.kind == kind])
    return [*lines, ""]


def _of_kind(kind: str, own: Sequence[Departure]) -> list[str]:
    turned = sorted((one for one in own if one.turns), key=lambda one: -len(one.other.seeds))
    if not own:
        return []
    named = [f"{where(one)}: {one.usual} → {one.other}" for one in turned[:MOST_NAMED]]
    more = [f"and {len(turned) - MOST_NAMED} more"] * (len(turned) > MOST_NAMED)
    told = f" ({'; '.join([*named, *more])})" if turned else ""
    return [f"    - {kind}: turns under {len(turned)} of {len(own)}{told}"]


def where(one: Departure) -> str:
    """Split, and tag or scale, of a departure."""
    return (
        f"{one.split} `{one.tag}`" + (f", scale `{one.scale}`" if one.scale != CPU else "")
        if one.tag
        else (f"{one.split}, scale `{one.scale}`")
    )
