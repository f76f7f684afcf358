"""The ten sentences at the top of the page of results, every figure in them computed from the results."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedjax_pcdd.report.statistics import Difference, signed
from reproduction.claims import Finding
from reproduction.columns import Result
from reproduction.hinges import Departure, where
from reproduction.only_gpu import OWN, Need

ENOUGH = 3  # seeds with which a comparison counts as repeated
FEDMR = ("fedmr/table1", "fedmr", "fedavg")  # table and rows of FedMR's main claim
MOST_NAMED = 3  # comparisons that a sentence names
HEADING = """## In ten sentences

Each is computed from the results below. Differences are in percent points, with their 95 % interval over the seeds in
brackets. *Clearly* means by a single paired t-test at the level 0.05, which is more lenient than the verdicts of this
page. `fmnist` behind a split means the images of Fashion-MNIST, where the paper prints a number for CIFAR-10. For each
scale a sentence names the comparison with the most seeds (among equals the one nearest to the paper's table, then the
one with the largest printed difference), followed by how many comparisons there are and how they came out. Options in
brackets behind a split are those that the preset no longer has; † is explained below.
"""


class Facts(NamedTuple):
    """What sentences are made from: all results, the claims judged, other settings, and what needs a GPU."""

    results: Sequence[Result]
    findings: Sequence[Finding]
    departures: Sequence[Departure]
    needs: Sequence[Need]

    def tried(self, wanted: Callable[[Finding], bool] = lambda one: True) -> list[Finding]:
        """Comparisons with a result."""
        return [one for one in self.findings if one.best is not None and wanted(one)]


def summary_section(facts: Facts) -> list[str]:
    """A part of the page: the ten sentences, numbered."""
    return [HEADING, *(f"{number}. {text}" for number, text in enumerate(sentences(facts), 1)), ""]


def sentences(facts: Facts) -> list[str]:
    """The ten, in the order in which they are read."""
    return [make(facts) for make in (
        _extent, _verdicts, _directions, _fedmr, _fedmr_rivals, _fedmr_hinges, _fedmr_terms, _fedgela, _fedgela_parts,
        _others,
    )]  # fmt: skip


def _extent(facts: Facts) -> str:
    pairs = {(one.claim.text, one.split) for one in facts.findings}
    most: dict[tuple[str, str], int] = {}
    for one in facts.tried():
        key = one.claim.text, one.split
        most[key] = max(most.get(key, 0), len(_best(one).seeds))
    repeated = sum(seeds >= ENOUGH for seeds in most.values())
    own = [one for one in facts.results if _finished(one) and one["scale"] in OWN]
    older = sum(bool(one.get("superseded")) for one in own)
    behind = {(one.scale, one.claim.table, one.split, one.tag, row)
              for one in facts.tried() for row in (one.claim.higher, one.claim.lower)}  # fmt: skip
    runs = sum(_finished(one) for one in facts.results)
    counted = sum(_finished(one) and _key(one) in behind for one in facts.results)
    gpu = {(one.claim.text, one.split) for one in facts.needs}
    predicted = {(one.claim.text, one.split) for one in facts.needs if one.hours}
    hours = sum({name: one or 0.0 for need in facts.needs for name, one in need.by_cell.items()}.values())
    return (
        f"The papers make the {len({text for text, _ in pairs})} claims listed here, {len(pairs)} counting each split: "
        f"{len(most)} were tried, {repeated} of them with {ENOUGH} or more seeds, in {counted} of {runs} runs; "
        f"{len(own)} of all runs have a paper's own network, as far as it is printed, and its length"
        f"{f' ({older} of them with settings that its preset no longer has)' * bool(older)}, and "
        f"{len(gpu)} of the {len(pairs)} need a GPU in the paper's own settings (some {hours:.0f} predicted hours for "
        f"the {len(predicted)} that have a prediction), so nothing here confirms or refutes the numbers printed for "
        f"these."
    )


def _verdicts(facts: Facts) -> str:
    several = [one for one in facts.tried() if len(_best(one).seeds) > 1]
    adjusted = [one.verdict for one in several]
    alone = [one.uncorrected for one in several]
    single = len(facts.tried()) - len(several)
    have = "comparison has" if single == 1 else "comparisons have"
    return (
        f"Of the {len(several)} comparisons with more than one seed, {adjusted.count('held')} held after Holm's "
        f"correction over the page, {adjusted.count('did not hold')} did not hold, and "
        f"{adjusted.count('not distinguishable')} cannot be distinguished from no difference; without any correction "
        f"{alone.count('held')} would have held and {alone.count('did not hold')} not; {single} more {have} a single "
        f"seed, which decides nothing."
    )


def _directions(facts: Facts) -> str:
    own = [one for one in facts.tried() if len(_best(one).seeds) >= ENOUGH]
    same = sum(_best(one).mean * one.claimed > 0 for one in own)
    ten = [(one.last_ten, one.claimed) for one in own if one.last_ten is not None]
    same_ten = sum(one.mean * claimed > 0 for one, claimed in ten)
    inside = [one for one in own if one.paper is not None and _best(one).low is not None and _alike(one)]
    covered = sum(_covers(_best(one), one.paper) for one in inside)
    return (
        f"With {ENOUGH} or more seeds the best round has the claimed sign in {same} of {len(own)} comparisons, the "
        f"mean of the last ten rounds in {same_ten} of the {len(ten)} that are in GA; where the paper prints a "
        f"difference in percent points for the same split and images, it lies within our interval, wide as it is, in "
        f"{covered} of {len(inside)} cases."
    )


def _fedmr(facts: Facts) -> str:
    own = facts.tried(lambda one: _rows(one) == FEDMR)
    return f"FedMR above FedAvg, the main claim of its paper: {_by_scale(own, most=2)}; {_counted(own)}."


def _fedmr_rivals(facts: Facts) -> str:
    own = facts.tried(lambda one: _rows(one)[:2] == FEDMR[:2] and _rows(one) != FEDMR)
    names = ", ".join(dict.fromkeys(one.claim.text.split(" above ")[-1] for one in own))
    return f"FedMR above its rivals ({names or 'none was tried'}): {_counted(own)}."


def _fedmr_hinges(facts: Facts) -> str:
    own = [one for one in facts.departures if _rows(one) == FEDMR]
    above, usual = (sum(one.mean > 0 for one in pair) for pair in ([x.other for x in own], [x.usual for x in own]))
    several = sorted((one for one in own if len(one.other.seeds) > 1), key=lambda one: -len(one.other.seeds))
    clear = {side: [one for one in several if one.other.verdict() == side] for side in ("above", "below")}
    named = "; ".join(f"{where(one)}, {one.settings}: {_told(one.other)}" for one in clear["above"][:MOST_NAMED])
    return (
        f"In {above} of {len(own)} comparisons under other settings (readings, length, network) FedMR is above FedAvg, "
        f"against {usual} with the usual settings and the same seeds; of the {len(several)} with more than one seed it "
        f"is clearly above in {len(clear['above'])}{f' ({named})' * bool(named)} and clearly below in "
        f"{len(clear['below'])}."
    )


def _fedmr_terms(facts: Facts) -> str:
    own = facts.tried(lambda one: one.claim.table == "fedmr/table12")
    return f"FedMR's two terms together above either of them alone: {_counted(own)}."


def _fedgela(facts: Facts) -> str:
    ga, pa = (
        facts.tried(lambda one, metric=metric: one.claim.metric == metric and _rows(one) == (
            "fedgela/table2", "fedgela", "fedavg"))
        for metric in ("ga_pct", "pa_pct")
    )  # fmt: skip
    return f"FedGELA above FedAvg: in GA {_by_scale(ga)}, {_counted(ga)}; in PA {_by_scale(pa)}, {_counted(pa)}."


def _fedgela_parts(facts: Facts) -> str:
    own = facts.tried(lambda one: one.claim.table == "fedgela/table4")
    named = "; ".join(f"{one.claim.text}: {_told(_best(one))}, printed {_printed(one)}" for one in own[:MOST_NAMED])
    return f"What FedGELA's parts are worth, on Dirichlet(0.1) of Fashion-MNIST: {named or 'not tried'}."


def _others(facts: Facts) -> str:
    rl = facts.tried(lambda one: _rows(one) == ("fedrl/table1", "fedrl", "fedavg"))
    solo = facts.tried(lambda one: _rows(one) == ("fccl/table1", "fccl", "solo"))
    mean = facts.tried(lambda one: _rows(one) == ("fccl/table3", "fccl fccl", "fccl fedavg"))
    return (
        f"FedRL above FedAvg: {_by_scale(rl)}, {_counted(rl)}; FCCL above training alone: {_by_scale(solo)}; above "
        f"FedAvg, one network for all: {_by_scale(mean)}."
    )


def _by_scale(own: Sequence[Finding], most: int = 1) -> str:
    """Of each scale the comparisons with most seeds, of equal ones those nearest to the table, then printed largest."""
    if not own:
        return "not tried"
    parts = []
    for scale in dict.fromkeys(one.scale for one in own):
        at_scale = [one for one in own if one.scale == scale]
        at_scale.sort(key=lambda one: (-len(_best(one).seeds), one.claim.tags.index(one.tag), -(one.paper or 0.0)))
        told = [f"{_told(_best(one))} on {one.where}, printed {_printed(one)} ({_in_words(one)})"
                for one in at_scale[:most]]  # fmt: skip
        parts.append(f"at scale `{scale}` {' and '.join(told)}")
    return ", ".join(parts)


def _counted(own: Sequence[Finding]) -> str:
    """How many have the claimed sign, and how many clearly so, of those with several seeds."""
    several = [one for one in own if len(_best(one).seeds) > 1]
    if not several:
        return "not tried with more than one seed"
    same = sum(_best(one).mean * one.claimed > 0 for one in several)
    clear = [one.uncorrected for one in several]
    verdicts = [one.verdict for one in several]
    return (
        f"in {same} of {len(several)} comparisons with more than one seed, clearly in {clear.count('held')}, and "
        f"clearly the other way round in {clear.count('did not hold')} (after Holm's correction "
        f"{verdicts.count('held')} and {verdicts.count('did not hold')})"
    )


def _rows(one: Finding | Departure) -> tuple[str, str, str]:
    """The table of a claim, and its upper and lower row."""
    return one.claim.table, one.claim.higher, one.claim.lower


def _told(difference: Difference) -> str:
    """A difference with its interval, and over how many seeds."""
    count = len(difference.seeds)
    if difference.low is None or difference.high is None:
        return f"{signed(difference.mean)} [one seed{difference.mark}]"
    interval = f"{signed(difference.low)} to {signed(difference.high)}"
    return f"{signed(difference.mean)} [{interval}, {count} seeds{difference.mark}]"


def _in_words(one: Finding) -> str:
    """Verdict of a comparison, and what a test alone says where that is another."""
    if one.verdict == one.uncorrected:
        return one.verdict
    return f"{one.verdict} after Holm's correction, {one.uncorrected} without"


def _best(one: Finding) -> Difference:
    """The difference of a comparison that was tried."""
    assert one.best is not None
    return one.best


def _printed(one: Finding) -> str:
    where = f" for {one.claim.printed_on}" if one.claim.printed_on else ""
    return "nothing" if one.paper is None else signed(one.paper) + where


def _finished(result: Result) -> bool:
    """Whether it is a run of its own that reached its end."""
    return result["status"] == "finished" and "same_run_as" not in result


def _key(result: Result) -> tuple[str, ...]:
    """Scale, table, split, tag and row."""
    row = f"{result['method']} {result['variant'] or ''}".rstrip()
    return result["scale"], result["table"], result["split"] or "", result["tag"], row


def _alike(one: Finding) -> bool:
    """Whether the printed difference is of the same split, images and unit."""
    return one.claim.in_points and not one.claim.printed_on and not one.images


def _covers(difference: Difference, value: float | None) -> bool:
    low, high = difference.low, difference.high
    return None not in (low, high, value) and low <= value <= high  # pyright: ignore
