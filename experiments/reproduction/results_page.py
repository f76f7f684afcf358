"""docs/reproduction.md: the runs of the papers' tables beside the printed numbers, and which claims held."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from fedjax_pcdd.models import MODELS, build
from fedjax_pcdd.models.classifier import sizes
from fedjax_pcdd.report.expected import PA, PA_LAST, Expected, kind, title
from fedjax_pcdd.report.statistics import Difference, family, signed
from fedjax_pcdd.report.tables import NOTHING, Cell, Table, markdown, over_seeds, texts
from fedjax_pcdd.report.tables import Column as Heading
from fedjax_pcdd.report.tables import Row as Line
from reproduction.claims import Count, Finding, ordered
from reproduction.columns import (
    BASELINE,
    FIRST,
    LAST_TEN,
    Column,
    Expectations,
    Result,
    Row,
    common,
    in_words,
    printed,
    processor,
)
from reproduction.verdicts import UNLIKE, VERDICTS, against

INTRODUCTION = """# Reproduction

Written by `python experiments/reproduce.py --page` from `results/` and `fedjax_pcdd/papers/expected/`; do not edit it.

What the papers claim, what they print, and what came out here. Every row comes with the command that repeats it
(`DATA` is the folder of the data sets, [data.md](data.md)); `python experiments/reproduce.py` runs whatever is still
missing ([presets.md](presets.md)). Other readings of what the papers leave open are in
[ambiguities.md](ambiguities.md).
"""
READING = """## How to read it

- **Scales.** `cpu` is a small network on a few thousand images for a few rounds. Its numbers do not reproduce the
  printed ones, and a claim that does not hold there is not refuted. Only the papers' own settings can confirm or
  refute a claim: `full`, for the table whose network is small enough for a CPU, and `gpu`, mostly ResNet18. Between
  them lie `mid`, a residual network with batch norm on 10 000 images for 50 rounds of 5 epochs, and `long`, the small
  network on all images for 100 rounds of 10 epochs. At `mid` the plan has each method on P10C2, P5C2 and Dirichlet(0.1)
  of Fashion-MNIST and of CIFAR-10 (FedNova, FedDyn and FedDC only on P10C2 and P5C2 of the former), also where its
  paper prints no number. Readings, weights and group norm are varied on the split of their own paper's claims. What a
  plan has and was not run yet is counted below these remarks.
- **Accuracies** are in percent, GA on the global test set, PA on the clients' own. "Best" is the best round, chosen on
  the test data as in the papers, which flatters every number; the mean of the last ten rounds is not chosen. PA of a
  method without a personal model is that of the fine-tuned global model (at `mid` and `long`, where nothing is
  fine-tuned, that of the local models), its mean of the last ten always that of the local models. GA best of a method
  without a global model (FedRep, FedProto, SOLO) is a mean over the clients' own models, each in its best round
  of PA, as in the papers.
- **Verdicts.** ± beside a mean is the standard deviation over seeds, beside a difference the standard error.
  Differences are paired by seed. A claim *held* or *did not hold* if a paired t-test says so at the level 0.05, with
  p-values adjusted by Holm for all claims of this page (in the tables: for their methods). Otherwise it is *not
  distinguishable*. With three to five seeds and this many claims, hardly any difference can pass, however large. So
  the list of claims has three p-values for the best round: unadjusted, adjusted for the claims on the same table and
  scale, and adjusted for the page, which decides. For a single seed only the sign is given.
- **Looked at twice.** Of the comparisons that three seeds did not decide, those of the papers' main claims were given
  two more seeds. Their p-values, of all five, are not corrected for this, so that chance passes the level more often
  than one in twenty times.
- **Versions.** Pairs are of runs of one version, but version 0.2.0 grew for weeks while they were made; the result of a
  newer run also names its commit.
- **Older settings.** Where a number is older than a preset or a default, its command has the options it was run with,
  and so do its row (or the line that says what is over the preset) and the comparisons it appears in.
- **PA and epochs.** Under the rule of a preset PA may be chosen among the epochs of a round on the clients' tests, as
  the published code does: for FedGELA each client's own best epoch, for FedAvg one epoch for all clients, which
  flatters less. The column "PA last" has the model after the last epoch. A claim about PA is judged by both, each
  adjusted by Holm; if they disagree it is not distinguishable. Where PA follows other numbers of local epochs in the
  two rows, it is of *different quantities*, and there is no verdict.
- **PA and rounds.** The best round of a fine-tuned model is the one with the best GA, that of a model in training the
  one with the best PA, which flatters the latter. So the list of claims has beside the best round what no test chose:
  the mean of the last ten rounds or, where a model is fine-tuned, the last round (in training, PA is of other models).
- **Bits.** A command repeats its number bit for bit with the same version of this project and of JAX on the same kind
  of machine. Another order of summation rounds differently, and after many rounds the accuracy of a single round may
  differ by whole points. This concerns runs on another kind of processor, and runs that were trained together with
  others of their program (counted below if there are any). Such pairs count, but †2 behind a difference says that two
  of its pairs are *mixed*, with runs on two kinds of processors.
"""
IMAGES = ((28, 28, 1), (32, 32, 3))
MOST_NAMED = 4  # splits of a claim that the summary lists


def results_page(
    results: Sequence[Result],
    columns: Sequence[Column],
    expected: Expectations,
    findings: Sequence[Finding],
    counts: Sequence[Count],
    summary: Sequence[str] = (),
    more: Sequence[str] = (),
    left: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The text of the page.

    Args:
      results, columns, expected, findings, counts: what the page shows.
      summary: lines at its top.
      more: lines below the list of claims.
      left: scale -> a sentence about what its plan has and was not run yet.
    """
    if not results:
        return "\n".join([INTRODUCTION, READING, "Nothing has been run yet."]) + "\n"
    lines = [INTRODUCTION, *summary, READING, _extent(results, left), "", *_networks(results)]
    lines += [*_summary(findings), *_claims(findings), *more, *_counts(counts)]
    for scale, table in dict.fromkeys((column.scale, column.table) for column in columns):
        members = [column for column in columns if (column.scale, column.table) == (scale, table)]
        lines += _table(scale, table, members, expected.get(table, ()), results)
    return "\n".join(lines).rstrip() + "\n"


def _extent(results: Sequence[Result], left: Mapping[str, str]) -> str:
    """How many runs there are, of which versions, on which devices, and what is left."""
    sentences = []
    for scale in dict.fromkeys(result["scale"] for result in results):
        at_scale = [result for result in results if result["scale"] == scale]
        finished = [result for result in at_scale if result["status"] == "finished" and "same_run_as" not in result]
        versions = Counter(result.get("version", FIRST) for result in finished)
        hours = sum(result.get("seconds", 0.0) for result in at_scale if "same_run_as" not in result) / 3600
        shared, failed = (sum(key in result for result in at_scale) for key in ("same_run_as", "sentence"))
        devices = ", ".join(dict.fromkeys(processor(result["machine"]) for result in at_scale))
        notes = [f"{shared} more cells share a run with another table"] * bool(shared)
        notes += [f"{failed} failed"] * bool(failed)
        together = sum("together" in result and "same_run_as" not in result for result in at_scale)
        notes += [f"{together} of the runs trained together with others"] * bool(together)
        cells = f"; {', '.join(notes)}" if notes else ""
        by_version = ", ".join(f"{count} of version {name}" for name, count in sorted(versions.items(), reverse=True))
        runs = f"{len(finished)} run{'s' * (len(finished) != 1)}{f' ({by_version})' * bool(by_version)}"
        sentences.append(f"Scale `{scale}`: {runs}, {hours:.1f} hours on {devices}{cells}.")
        sentences.append(left.get(scale, ""))
    return " ".join([*filter(None, sentences), "Hours are by the clock, beside other work and with pauses."])


def _networks(results: Sequence[Result]) -> list[str]:
    """The networks that were trained, and how many parameters they have on the papers' images."""
    trained: dict[str, dict[str, None]] = {}
    for result in results:
        trained.setdefault((result.get("options") or {}).get("model", ""), {})[f"`{result['scale']}`"] = None
    lines = []
    for name in filter(MODELS.__contains__, trained):
        grey, colour = (sizes(build(name, num_classes=10, image_shape=shape), shape).params for shape in IMAGES)
        counts = f"{grey} parameters for ten classes of grey images of 28x28, {colour} for colour ones of 32x32"
        lines.append(f"- `{name}`, at {', '.join(trained[name])}: {MODELS[name]}; {counts}.")
    return ["Networks:", "", *lines, ""] if lines else []


def _summary(findings: Sequence[Finding]) -> list[str]:
    """Which claims held, which did not, and which were not tried."""
    lines = ["## Which claims held", ""]
    for scale in dict.fromkeys(finding.scale for finding in findings if finding.scale):
        at_scale = [finding for finding in findings if finding.scale == scale]
        lines += [f"At the scale `{scale}`, by the best round:", ""]
        for verdict in ordered(finding.verdict for finding in at_scale):
            lines.append(f"- **{verdict}**: {_named(finding for finding in at_scale if finding.verdict == verdict)}")
        lines.append("")
    missing = [finding for finding in findings if finding.best is None]
    if missing:
        lines += [f"- **not tried**: {_named(missing)}", ""]
    return lines


def _named(findings: Iterable[Finding]) -> str:
    """The claims with their splits."""
    splits: dict[str, list[str]] = {}
    for finding in findings:
        splits.setdefault(finding.claim.text, []).append(finding.where)
    return "; ".join(f"{text} ({_listed(names)})" for text, names in splits.items()) + "."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} comparisons"


def _claims(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for finding in findings:
        if finding.best is not None:
            paper = NOTHING if finding.paper is None else signed(finding.paper)
            paper += f" ({finding.claim.printed_on})" if finding.claim.printed_on else ""
            delta, last_epoch = finding.unchosen, NOTHING if finding.by_last is None else str(finding.by_last)
            where = " (last round)" * finding.of_last
            unchosen = (NOTHING, "") if delta is None else (f"{delta}{where}", against(delta, finding.claimed))
            subject = (finding.claim.text, finding.claim.table, finding.where, finding.scale)
            values = (finding.alone and finding.alone.p, finding.in_table, finding.best.p)
            p = [NOTHING if value is None else f"{value:.3f}" for value in values]
            lines.append((*subject, paper, str(finding.best), last_epoch, *p, finding.verdict, *unchosen))
    tests = ("p", "p, table", "p, page")
    headings = ("claim", "table", "split", "scale", "paper", "best round", "PA last", *tests, "", "last ten", "")
    bests = [finding.best for finding in findings if finding.best is not None]
    table = texts("Claim by claim", headings, lines, left=("table", "split", "scale", ""))
    remarks = (
        "Differences are in percent points, except those of eigenvalues. Brackets hold a mean of splits, where the "
        "paper prints no number for a single one. With a tag that names images, ours are of these and the paper's of "
        "the table's. Where a table prints only domains, the paper's number is their mean. "
        f"Of the {sum(len(best.seeds) for best in bests)} pairs of this list "
        f"{sum(best.mixed for best in bests)} are mixed."
    )
    return [markdown(replace(table, remarks=remarks))] if lines else []


def _counts(counts: Sequence[Count]) -> list[str]:
    """All methods against FedAvg, table by table."""
    lines = [
        (count.table, kind(count.metric), count.scale, *(str(count.verdicts[verdict] or "") for verdict in VERDICTS))
        for count in counts
    ]
    headings = ("table", "metric", "scale", *VERDICTS)
    table = texts("", headings, lines, left=("metric", "scale"))
    remarks = (
        "How many differences from FedAvg have the sign that the paper prints. The differences of a line are one "
        "family for Holm's correction. It is smaller than the page's, so more can hold here than in the list of claims."
        " PA that follows other numbers of local epochs than FedAvg's is left out. Means over splits that the paper"
        " prints count beside their splits."
    )
    return ["## Every method against FedAvg", "", markdown(replace(table, remarks=remarks))] if lines else []


def _table(
    scale: str, table: str, members: Sequence[Column], expected: Sequence[Expected], results: Sequence[Result]
) -> list[str]:
    finished = [
        result
        for result in results
        if (result["scale"], result["table"]) == (scale, table) and result["status"] == "finished"
    ]
    shared = in_words(common(result["over_preset"] for result in finished))
    lines = [f"## {table}, scale {scale}", ""]
    lines += [f"Over the preset in all runs: {shared}." if shared else "As the preset says.", ""]
    for column in members:
        measured = {metric for row in column.rows for result in row.results for metric in result["metrics"]}
        table_metrics = [
            metric for metric in dict.fromkeys(expectation.metric for expectation in expected) if metric in measured
        ]
        for metric in table_metrics or sorted(name for name in measured if name.endswith(":mean")):
            lines += _split(column, metric, printed(expected, column.split, metric) if not column.tag else {})
        lines += _commands(column)
    return lines


def _split(column: Column, metric: str, numbers: Mapping[str, float]) -> list[str]:
    """One table with a row for each method."""
    rows = [row for row in column.rows if row.values(metric)]
    raw = [(column.over_baseline(row, metric), column.like_baseline(row, metric)) for row in rows]
    adjusted = family([delta if like else None for delta, like in raw])
    compared = [(new or old, like) for new, (old, like) in zip(adjusted, raw, strict=True)]
    last = metric == PA and any(row.values(PA_LAST) for row in rows)
    groups = [("best", "mean of last ten") if metric in LAST_TEN else ("ours",), ("seeds", "paper", "difference")]
    groups += [("PA last",)] * last
    columns = [Heading(heading) for group in [*groups, ("over FedAvg", "paper's")] for heading in group]
    heading = " · ".join(part for part in (column.split, column.tag, _title(metric)) if part)
    lines = tuple(
        Line(row.label, _cells(row, metric, numbers, delta, like=like, last=last))
        for row, (delta, like) in zip(rows, compared, strict=True)
    )
    order, count, seeds = column.order(metric, numbers)
    text = markdown(Table(heading, (*columns, Heading("", left=True)), lines))
    if order is None:
        return [text]
    means = f"means of the {len(seeds)} seeds" if len(seeds) > 1 else "numbers of the one seed"
    return [text, f"Rank correlation with the paper over {count} methods, {means} that all have: {signed(order)}.", ""]


def _cells(
    row: Row, metric: str, numbers: Mapping[str, float], delta: Difference | None, *, like: bool, last: bool
) -> tuple[Cell, ...]:
    values, paper, base = row.values(metric), numbers.get(row.name), numbers.get(BASELINE)
    ours = [over_seeds(row.values(metric).values())]
    if metric in LAST_TEN:
        ours.append(over_seeds(row.last_ten(metric).values()))
    claimed = None if paper is None or base is None or row.name == BASELINE else paper - base
    gap = None if paper is None or ours[0].mean is None else ours[0].mean - paper
    count_and_paper = [
        str(len(values)), NOTHING if paper is None else f"{paper:.2f}", NOTHING if gap is None else signed(gap),
    ]  # fmt: skip
    last_epoch = [over_seeds(row.values(PA_LAST).values())] if last else []
    comparison = [
        NOTHING if delta is None else str(delta), NOTHING if claimed is None else signed(claimed),
        "" if delta is None or claimed is None else against(delta, claimed) if like else UNLIKE,
    ]  # fmt: skip
    before, after = ([Cell(text=text) for text in part] for part in (count_and_paper, comparison))
    return (*ours, *before, *last_epoch, *after)


def _commands(column: Column) -> list[str]:
    """The command that repeats each row, and the runs that failed."""
    lines = [f"- {result['method']} seed {result['seed']} failed: {result['sentence']}" for result in column.failed]
    lines += [""] if lines else []
    commands = [f"    {row.command}" for row in column.rows if row.command]
    if not commands:
        return lines
    return [*lines, "<details><summary>Commands</summary>", "", *commands, "", "</details>", ""]


def _title(metric: str) -> str:
    name, _, domain = metric.partition(":")
    short = {"ga_pct": "GA, %", "ga_fraction": "GA, %", "pa_pct": "PA, %"}
    return f"{short.get(name) or title(name) or name} {domain}".rstrip()
