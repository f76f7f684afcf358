"""The ten sentences at the top of the page of results, every figure in them computed from the results."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fedjax_pcdd.report.statistics import Difference, signed
from reproduction.claims import Finding
from reproduction.columns import Result
from reproduction.hinges import Departure, where
from reproduction.only_gpu import OWN, Need
from reproduction.verdicts import against

ENOUGH = 3  # seeds with which a comparison counts as repeated
FEDMR = ("fedmr/table1", "fedmr", "fedavg")  # table and rows of FedMR's main claim
MOST_NAMED = 3  # comparisons that a sentence names
HEADING = """## In ten sentences

Each is computed from the results below. Differences are in percent points, with their 95 % interval over the seeds in
brackets. *Clearly* means by a single paired t-test at the level 0.05, for PA by the best and by the last model, which
is more lenient than the verdicts of this page; where three seeds did not decide, two were added for some comparisons,
for which nothing is corrected. The best round is chosen on the tests, as in the papers; *rounds that no test chose* are
the last ten, in mean, and for PA of fine-tuned models the last one. `fmnist` behind a split means the images of
Fashion-MNIST, where the paper prints a number for CIFAR-10. A sentence counts all its comparisons, from the fourth on
without means of others; the lines below it show, for each scale, the one with the most seeds (among equals the one
nearest to the paper's table, then the one with the largest printed difference). Options in brackets behind a split are
those that the preset no longer has; † is explained below.
"""


class Facts(NamedTuple):
    """What the sentences are made from: all results, the verdicts, other settings, and what needs a GPU."""

    results: Sequence[Result]
    findings: Sequence[Finding]
    departures: Sequence[Departure]
    needs: Sequence[Need]

    def tried(self, wanted: Callable[[Finding], bool] = lambda finding: True) -> list[Finding]:
        """The comparisons that have a result."""
        return [finding for finding in self.findings if finding.best is not None and wanted(finding)]


def summary_section(facts: Facts) -> list[str]:
    """A section of the page: the ten sentences, numbered, each with its figures in a list below it."""
    return [HEADING, *(f"{number}. {text}" for number, text in enumerate(sentences(facts), 1)), ""]


def sentences(facts: Facts) -> list[str]:
    """The ten sentences, in the order of the page."""
    return [make(facts) for make in (
        _extent, _verdicts, _directions, _fedmr, _fedmr_rivals, _fedmr_hinges, _fedmr_terms, _fedgela, _fedgela_parts,
        _others,
    )]  # fmt: skip


def _extent(facts: Facts) -> str:
    comparisons = {(finding.claim.text, finding.split) for finding in facts.findings}
    most: dict[tuple[str, str], int] = {}
    for finding in facts.tried():
        key = finding.claim.text, finding.split
        most[key] = max(most.get(key, 0), len(_best(finding).seeds))
    repeated = sum(seeds >= ENOUGH for seeds in most.values())
    paper_runs = [result for result in facts.results if _finished(result) and result["scale"] in OWN]
    older = sum(bool(result.get("superseded")) for result in paper_runs)
    behind = {(finding.scale, finding.claim.table, finding.split, finding.tag, row)
              for finding in facts.tried() for row in (finding.claim.higher, finding.claim.lower)}  # fmt: skip
    runs = sum(_finished(result) for result in facts.results)
    counted = sum(_finished(result) and _key(result) in behind for result in facts.results)
    need_gpu = {(need.claim.text, need.split) for need in facts.needs}
    predicted = {(need.claim.text, need.split) for need in facts.needs if need.hours}
    hours = sum({name: hours or 0.0 for need in facts.needs for name, hours in need.by_run.items()}.values())
    return (
        f"The papers make the {len({text for text, _ in comparisons})} claims listed here, {len(comparisons)} counting "
        f"each split: {len(most)} were tried, {repeated} of them with {ENOUGH} or more seeds, in {counted} of {runs} "
        f"runs; {len(paper_runs)} of all runs have a paper's own network, as far as it is printed, and its length"
        f"{f' ({older} of them with settings that its preset no longer has)' * bool(older)}, and "
        f"{len(need_gpu)} of the {len(comparisons)}, besides means of others, need a GPU in the paper's own settings "
        f"(some {hours:.0f} predicted hours for the {len(predicted)} that have a prediction), so nothing here confirms "
        f"or refutes the numbers printed for these."
    )


def _verdicts(facts: Facts) -> str:
    judged = [finding for finding in facts.tried() if not finding.pa_epochs]
    multi_seed = [finding for finding in judged if len(_best(finding).seeds) > 1]
    adjusted = [finding.verdict for finding in multi_seed]
    uncorrected = [finding.uncorrected for finding in multi_seed]
    single = len(judged) - len(multi_seed)
    have = "comparison has" if single == 1 else "comparisons have"
    return (
        f"Of the {len(multi_seed)} comparisons with more than one seed, {adjusted.count('held')} held after Holm's "
        f"correction over the page, {adjusted.count('did not hold')} did not hold, and "
        f"{adjusted.count('not distinguishable')} cannot be distinguished from no difference; without any correction "
        f"{uncorrected.count('held')} would have held and {uncorrected.count('did not hold')} not; {single} more "
        f"{have} a single seed, which decides nothing."
    )


def _directions(facts: Facts) -> str:
    repeated = [finding for finding in facts.tried() if len(_best(finding).seeds) >= ENOUGH and not finding.pa_epochs]
    same_sign = sum(_best(finding).mean * finding.claimed > 0 for finding in repeated)
    unchosen = [(finding.unchosen, finding.claimed) for finding in repeated if finding.unchosen is not None]
    same_unchosen = sum(delta.mean * claimed > 0 for delta, claimed in unchosen)
    comparable = [
        finding
        for finding in repeated
        if finding.paper is not None and _best(finding).low is not None and _alike(finding)
    ]
    covered = sum(_covers(_best(finding), finding.paper) for finding in comparable)
    return (
        f"With {ENOUGH} or more seeds the best round has the claimed sign in {same_sign} of {len(repeated)} "
        f"comparisons, rounds that no test chose have it in {same_unchosen} of {len(unchosen)}; where the paper prints "
        f"a difference in percent points for the same split and images, it lies within our interval, wide as it is, in "
        f"{covered} of {len(comparable)} cases."
    )


def _fedmr(facts: Facts) -> str:
    findings = facts.tried(lambda finding: _rows(finding) == FEDMR)
    return f"FedMR above FedAvg, the main claim of its paper: {_counted(findings)}." + _by_scale(findings, most=2)


def _fedmr_rivals(facts: Facts) -> str:
    findings = facts.tried(lambda finding: _rows(finding)[:2] == FEDMR[:2] and _rows(finding) != FEDMR)
    names = ", ".join(dict.fromkeys(finding.claim.text.split(" above ")[-1] for finding in findings))
    return f"FedMR above its rivals ({names or 'none was tried'}): {_counted(findings)}."


def _fedmr_hinges(facts: Facts) -> str:
    departures = [departure for departure in facts.departures if _rows(departure) == FEDMR]
    above = sum(departure.other.mean > 0 for departure in departures)
    by_seeds = sorted(departures, key=lambda departure: len(departure.usual.seeds))
    usual = {  # of most seeds
        (departure.split, departure.base_scale, departure.base): departure.usual for departure in by_seeds
    }
    usual_above = sum(delta.mean > 0 for delta in usual.values())
    multi_seed = sorted(
        (departure for departure in departures if len(departure.other.seeds) > 1),
        key=lambda departure: -len(departure.other.seeds),
    )
    clear = {
        side: [departure for departure in multi_seed if departure.other.verdict() == side]
        for side in ("above", "below")
    }
    examples = _lines(
        f"{where(departure)}, {departure.settings}: {_told(departure.other)}"
        for departure in clear["above"][:MOST_NAMED]
    )
    return (
        f"In {above} of {len(departures)} comparisons under other settings (readings, length, network) FedMR is "
        f"above FedAvg, against {usual_above} of the {len(usual)} with usual settings that they are compared with; "
        f"of the {len(multi_seed)} with more than one seed it is clearly above in "
        f"{len(clear['above'])} and clearly below in {len(clear['below'])}.{examples}"
    )


def _fedmr_terms(facts: Facts) -> str:
    findings = facts.tried(lambda finding: finding.claim.table == "fedmr/table12")
    return f"FedMR's two terms together above either of them alone: {_counted(findings)}."


def _fedgela(facts: Facts) -> str:
    ga, pa = (
        facts.tried(lambda finding, metric=metric: finding.claim.metric == metric and _rows(finding) == (
            "fedgela/table2", "fedgela", "fedavg"))
        for metric in ("ga_pct", "pa_pct")
    )  # fmt: skip
    energies = [
        departure
        for departure in facts.departures
        if _rows(departure) == ("fedgela/table2", "fedgela", "fedavg") and departure.claim.metric == "ga_pct"
        and departure.settings.startswith("ew=") and len(departure.other.seeds) > 1
    ]  # fmt: skip
    return (
        f"FedGELA above FedAvg: in GA {_counted(ga)}; in PA {_counted(pa)}."
        + _by_scale(ga, name="GA, ")
        + _by_scale(pa, name="PA, ")
        + _lines(
            f"GA with another E_W, {where(departure)}: {departure.other} with {departure.settings}, where the default "
            f"with the same seeds gives {departure.usual}"
            for departure in energies
        )
    )


def _fedgela_parts(facts: Facts) -> str:
    findings = facts.tried(lambda finding: finding.claim.table == "fedgela/table4")
    return f"What FedGELA's parts are worth, on Dirichlet(0.1) of Fashion-MNIST: {_counted(findings)}." + _lines(
        f"{finding.claim.text.replace(' is above ', ' less ')}: {_shown(finding)}" for finding in findings[:MOST_NAMED]
    )


def _others(facts: Facts) -> str:
    rl = facts.tried(lambda finding: _rows(finding) == ("fedrl/table1", "fedrl", "fedavg"))
    solo = facts.tried(lambda finding: _rows(finding) == ("fccl/table1", "fccl", "solo"))
    mean = facts.tried(lambda finding: _rows(finding) == ("fccl/table3", "fccl fccl", "fccl fedavg"))
    return (
        f"FedRL above FedAvg: {_counted(rl)}; FCCL above training alone: {_counted(solo)}; above FedAvg, one network "
        f"for all: {_counted(mean)}."
        + _by_scale(rl, name="FedRL, ")
        + _by_scale(solo, name="FCCL less training alone, ")
        + _by_scale(mean, name="FCCL less FedAvg, ")
    )


def _lines(texts: Iterable[str]) -> str:
    """A list below a sentence."""
    return "".join(f"\n    - {text}" for text in texts)


def _by_scale(findings: Sequence[Finding], most: int = 1, name: str = "") -> str:
    """For each scale the comparisons with most seeds; of equals those nearest to the table, then printed largest."""
    shown = []
    for scale in dict.fromkeys(finding.scale for finding in findings):
        at_scale = [finding for finding in findings if finding.scale == scale]
        at_scale.sort(
            key=lambda finding: (
                -len(_best(finding).seeds),
                finding.claim.tags.index(finding.tag),
                -(finding.paper or 0.0),
            )
        )
        shown += [f"{name}scale `{scale}`, {finding.where}: {_shown(finding)}" for finding in at_scale[:most]]
    return _lines(shown)


def _shown(finding: Finding) -> str:
    """The differences of a comparison, the paper's, and the verdict."""
    rounds = "in the last round" if finding.of_last else "by the last ten"
    unchosen = f"; {rounds} {finding.unchosen}" if finding.unchosen else ""
    return f"{_told(_best(finding))}, printed {_printed(finding)} ({_in_words(finding)}{unchosen})"


def _counted(findings: Sequence[Finding]) -> str:
    """Of the findings with several seeds, how many have the claimed sign, and how many clearly so."""
    single_splits = [finding for finding in findings if len(_best(finding).seeds) > 1 and not finding.averages]
    multi_seed = [finding for finding in single_splits if not finding.pa_epochs]
    if not multi_seed:
        return "not tried with more than one seed"
    same_sign = sum(_best(finding).mean * finding.claimed > 0 for finding in multi_seed)
    clear = [finding.uncorrected for finding in multi_seed]
    verdicts = [finding.verdict for finding in multi_seed]
    unchosen = [(delta, finding.claimed) for finding in multi_seed if (delta := finding.alone_unchosen)]
    clear_unchosen = [against(delta, claimed) for delta, claimed in unchosen]
    same_unchosen = sum(delta.mean * claimed > 0 for delta, claimed in unchosen)
    unlike = len(single_splits) - len(multi_seed)
    by_unchosen = (
        f"; by rounds that no test chose in {same_unchosen} of {len(unchosen)}, clearly in "
        f"{clear_unchosen.count('held')} and {clear_unchosen.count('did not hold')}"
    )
    other_epochs = f"; {unlike} more compare PA after other numbers of local epochs"
    return (
        f"in {same_sign} of {len(multi_seed)} comparisons with more than one seed, clearly in {clear.count('held')}, "
        f"and clearly the other way round in {clear.count('did not hold')} (after Holm's correction "
        f"{verdicts.count('held')} and {verdicts.count('did not hold')}{by_unchosen * bool(unchosen)}"
        f"{other_epochs * bool(unlike)})"
    )


def _rows(comparison: Finding | Departure) -> tuple[str, str, str]:
    """The table of a claim, and its upper and lower row."""
    return comparison.claim.table, comparison.claim.higher, comparison.claim.lower


def _told(difference: Difference) -> str:
    """A difference with its interval and its number of seeds, in words."""
    count = len(difference.seeds)
    if difference.low is None or difference.high is None:
        return f"{signed(difference.mean)} [one seed{difference.mark}]"
    interval = f"{signed(difference.low)} to {signed(difference.high)}"
    return f"{signed(difference.mean)} [{interval}, {count} seeds{difference.mark}]"


def _in_words(finding: Finding) -> str:
    """The verdict of a comparison, and that of an uncorrected test if it differs."""
    if finding.verdict == finding.uncorrected:
        return finding.verdict
    return f"{finding.verdict} after Holm's correction, {finding.uncorrected} without"


def _best(finding: Finding) -> Difference:
    """The difference of a comparison that was tried."""
    assert finding.best is not None
    return finding.best


def _printed(finding: Finding) -> str:
    printed_on = f" for {finding.claim.printed_on}" if finding.claim.printed_on else ""
    return "nothing" if finding.paper is None else signed(finding.paper) + printed_on


def _finished(result: Result) -> bool:
    """Whether a result is of a run of its own that reached its end."""
    return result["status"] == "finished" and "same_run_as" not in result


def _key(result: Result) -> tuple[str, ...]:
    """Scale, table, split, tag and row of a result."""
    row = f"{result['method']} {result['variant'] or ''}".rstrip()
    return result["scale"], result["table"], result["split"] or "", result["tag"], row


def _alike(finding: Finding) -> bool:
    """Whether the printed difference is for the same split, images and unit."""
    return finding.claim.in_points and not finding.claim.printed_on and not finding.images


def _covers(difference: Difference, value: float | None) -> bool:
    low, high = difference.low, difference.high
    return None not in (low, high, value) and low <= value <= high  # pyright: ignore
