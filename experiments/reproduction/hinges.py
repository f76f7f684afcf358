"""What the claims hinge on: their differences under other readings, longer training or other networks, if run."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from fedjax_pcdd.report.statistics import Difference
from fedjax_pcdd.training.config import RUN
from reproduction.claims import Claim
from reproduction.columns import Column, Row, alike, difference, in_words

CPU = "cpu"  # the scale that the others are compared with
# The kind of a departure is the first one that lists an option in which it departs; an empty set takes the rest.
KINDS = {
    "network and norm": {"model", "bn"},
    "length of training": {"rounds", "local_epochs", "train_samples"},
    "images": {"dataset"},
    "readings": set(),
}
MOST_NAMED = 4  # departures of a kind that a line names
HEADING = """## What the claims hinge on

Here each claim on each split appears again, under every other setting that was run: other readings of the paper
([ambiguities.md](ambiguities.md)), longer training, another network or norm, other images. A claim *turns* if the best
round's difference changes its sign, which differences near zero do easily: compare them with their standard error after
the ±, which a single seed lacks. Both differences are of the same seeds and of runs of one version of this project. A
row that a reading does not concern is that of the default.
"""


class Departure(NamedTuple):
    """A claim on a split under other settings, compared with the usual ones.

    Args:
      claim, split: the claim and one of its splits.
      kind: one of `KINDS`.
      scale, tag: scale and tag of the column that departs.
      settings: the options in which it departs, as `local_epochs=10`.
      base_scale, base: scale and tag of the column that it departs from.
      usual, other: the differences of the best round, in the metric of the table, over the same seeds.
    """

    claim: Claim
    split: str
    kind: str
    scale: str
    tag: str
    settings: str
    base_scale: str
    base: str
    usual: Difference
    other: Difference

    @property
    def turns(self) -> bool:
        """Whether the sign changes."""
        return self.usual.mean * self.other.mean <= 0


def departures(claims: Iterable[Claim], every: Sequence[Column]) -> list[Departure]:
    """All departures that the results have.

    Args:
      claims: those of the papers.
      every: all columns, those of other readings too.
    """
    return [
        departure
        for claim in claims
        for split in claim.splits
        for column in every
        if (column.table, column.split) == (claim.table, split)
        and (departure := _departure(claim, column, _usual(claim, column, every))) is not None
    ]


def _usual(claim: Claim, column: Column, every: Sequence[Column]) -> Column | None:
    """The column that this one departs from: the nearest by options, of its own scale, else of the scale of a CPU."""
    position = claim.tags.index(column.tag) if column.tag in claim.tags else len(claim.tags)
    for scale, tags in ((column.scale, claim.tags[:position]), (CPU, claim.tags if column.scale != CPU else ())):
        candidates = [other for other in every
                      if (other.scale, other.table, other.split) == (scale, column.table, column.split)
                      and other.tag in tags and _settings(claim, other, column)]  # fmt: skip
        if candidates:
            return min(candidates, key=lambda other: (len(_settings(claim, other, column)), tags.index(other.tag)))
    return None


def _settings(claim: Claim, usual: Column, other: Column) -> dict[str, str]:
    """Options in which the upper or the lower row of a claim departs, {} if a column lacks the upper one."""
    if usual.row(claim.higher) is None or other.row(claim.higher) is None:
        return {}
    changed: dict[str, str] = {}
    for name in (claim.lower, claim.higher):
        old, new = _options(usual.row(name)), _options(other.row(name))
        for key in dict.fromkeys([*new, *old]) if old is not None and new is not None else ():
            usual_value, other_value = (_value(column.row(name), key) for column in (usual, other))
            changed |= {key: other_value} if usual_value != other_value else {}
    return changed


def _options(row: Row | None) -> Mapping[str, str] | None:
    """The options of a row over its preset, None without a row and for a mean over splits."""
    return None if row is None else row.results[0].get("over_preset")


def _value(row: Row | None, option: str) -> str:
    """The value that a row was run with; a scale may set an option to the value that the preset has."""
    decisive = row.results[0].get("decisive", {}) if row else {}
    return decisive.get(option) or (_options(row) or {}).get(option, "preset")


def _departure(claim: Claim, column: Column, usual: Column | None) -> Departure | None:
    if usual is None:
        return None
    settings = _settings(claim, usual, column)
    other = _difference(claim, column, usual, settings)
    base = other and _difference(claim, usual, usual, seeds=other.seeds)
    if base is None or other is None or base.seeds != other.seeds:
        return None
    kind = next(name for name, options in KINDS.items() if not options or options & settings.keys())
    departing = in_words(settings)
    return Departure(
        claim, column.split, kind, column.scale, column.tag, departing, usual.scale, usual.tag, base, other
    )


def _difference(
    claim: Claim, column: Column, usual: Column, settings: Mapping[str, str] | None = None,
    seeds: Container[int] | None = None,
) -> Difference | None:  # fmt: skip
    """The difference in a column, None without one of like quantities.

    Its lower row may come from the usual column if only options of a method depart.
    """
    higher, lower = column.row(claim.higher), column.row(claim.lower)
    if lower is None and not RUN.keys() & (settings or {}).keys():
        lower = usual.row(claim.lower)
    if higher is None or lower is None or not alike(higher, lower, claim.metric):
        return None
    return difference(higher, lower, claim.metric, seeds=seeds)


def hinges_section(claims: Sequence[Claim], known: Sequence[Departure]) -> list[str]:
    """A section of the page: a line for each claim that was run under other settings or has a hypothesis."""
    lines = [HEADING]
    for claim in claims:
        claim_departures = [departure for departure in known if departure.claim == claim]
        if not claim_departures and not claim.hinges:
            continue
        hypothesis = f" Thought to hinge on: {claim.hinges}." if claim.hinges else ""
        lines.append(f"- **{claim.text}.**{hypothesis}{'' if claim_departures else ' No other setting was run.'}")
        for kind in KINDS:
            lines += _of_kind(kind, [departure for departure in claim_departures if departure.kind == kind])
    return [*lines, ""]


def _of_kind(kind: str, members: Sequence[Departure]) -> list[str]:
    turned = sorted(
        (departure for departure in members if departure.turns), key=lambda departure: -len(departure.other.seeds)
    )
    if not members:
        return []
    named = [f"{where(departure)}: {departure.usual} → {departure.other}" for departure in turned[:MOST_NAMED]]
    unnamed = [f"and {len(turned) - MOST_NAMED} more"] * (len(turned) > MOST_NAMED)
    details = f" ({'; '.join([*named, *unnamed])})" if turned else ""
    return [f"    - {kind}: turns under {len(turned)} of {len(members)}{details}"]


def where(departure: Departure) -> str:
    """Split, with the tag of what it departs from, and tag or scale, of a departure, in words."""
    tag = "".join(f" {name}" for name in [departure.base] if name and name not in departure.tag)
    tag += f" `{departure.tag}`" if departure.tag else ""
    scale = f", scale `{departure.scale}`" if departure.scale != CPU or not departure.tag else ""
    return departure.split + tag + scale
