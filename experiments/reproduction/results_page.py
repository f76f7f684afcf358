"""docs/reproduction.md: what was run of the papers' tables, beside the printed numbers, and which claims held."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

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
from reproduction.verdicts import VERDICTS, against

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
  network on all images for 100 rounds of 10 epochs.
- **Accuracies** are in percent, GA on the global test set, PA on the clients' own. "Best" is the best round, chosen on
  the test data as in the papers, which flatters every number; the mean of the last ten rounds is not chosen. PA of a
  method without a personal model is that of the fine-tuned global model, its mean of the last ten that of the local
  models.
- **Verdicts.** ± beside a mean is the standard deviation over seeds, beside a difference the standard error.
  Differences are paired by seed. A claim *held* or *did not hold* if a paired t-test says so at the level 0.05, with
  p-values adjusted by Holm for all claims of this page (in the tables: for their methods). Otherwise it is *not
  distinguishable*. With three to five seeds and this many claims, hardly any difference can pass, however large. So
  the list of claims has three p-values for the best round: unadjusted, adjusted for the claims on the same table and
  scale, and adjusted for the page, which decides. For a single seed only the sign is given.
- **Older settings.** Where a number is older than a preset or a default, its command has the options it was run with,
  and so do its row (or the line that says what is over the preset) and the comparisons it appears in.
- **PA and epochs.** Under the rule of a preset PA may be chosen among the epochs of a round on the clients' tests, as
  the published code does: for FedGELA each client's own best epoch, for FedAvg one epoch for all clients, which
  flatters less. The column "PA last" has the model after the last epoch. A claim about PA is judged by both, each
  adjusted by Holm; if they disagree it is not distinguishable. It is not judged by the last ten rounds, whose PA is of
  other models.
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
) -> str:
    """The text of the page.

    Args:
      results, columns, expected, findings, counts: what it shows.
      summary: lines that stand at its top.
      more: lines that stand below the list of claims.
    """
    if not results:
        return "\n".join([INTRODUCTION, READING, "Nothing has been run yet."]) + "\n"
    lines = [INTRODUCTION, *summary, READING, _extent(results), "", *_networks(results)]
    lines += [*_summary(findings), *_claims(findings), *more, *_counts(counts)]
    for scale, table in dict.fromkeys((one.scale, one.table) for one in columns):
        members = [one for one in columns if (one.scale, one.table) == (scale, table)]
        lines += _table(scale, table, members, expected.get(table, ()), results)
    return "\n".join(lines).rstrip() + "\n"


def _extent(results: Sequence[Result]) -> str:
    """How many runs, of which versions, and on what."""
    parts = []
    for scale in dict.fromkeys(one["scale"] for one in results):
        own = [one for one in results if one["scale"] == scale]
        finished = [one for one in own if one["status"] == "finished" and "same_run_as" not in one]
        versions = Counter(one.get("version", FIRST) for one in finished)
        hours = sum(one.get("seconds", 0.0) for one in own if "same_run_as" not in one) / 3600
        shared, failed = (sum(key in one for one in own) for key in ("same_run_as", "sentence"))
        devices = ", ".join(dict.fromkeys(processor(one["machine"]) for one in own))
        notes = [f"{shared} more cells share a run with another table"] * bool(shared)
        notes += [f"{failed} failed"] * bool(failed)
        together = sum("together" in one and "same_run_as" not in one for one in own)
        notes += [f"{together} of the runs trained together with others"] * bool(together)
        cells = f"; {', '.join(notes)}" if notes else ""
        of = ", ".join(f"{count} of version {name}" for name, count in sorted(versions.items(), reverse=True))
        runs = f"{len(finished)} run{'s' * (len(finished) != 1)}{f' ({of})' * bool(of)}"
        parts.append(f"Scale `{scale}`: {runs}, {hours:.1f} hours on {devices}{cells}.")
    return " ".join(parts)


def _networks(results: Sequence[Result]) -> list[str]:
    """What the networks are that were trained, and how many parameters they have on the papers' images."""
    trained: dict[str, dict[str, None]] = {}
    for one in results:
        trained.setdefault((one.get("options") or {}).get("model", ""), {})[f"`{one['scale']}`"] = None
    lines = []
    for name in filter(MODELS.__contains__, trained):
        grey, colour = (sizes(build(name, num_classes=10, image_shape=shape), shape).params for shape in IMAGES)
        counts = f"{grey} parameters for ten classes of grey images of 28x28, {colour} for colour ones of 32x32"
        lines.append(f"- `{name}`, at {', '.join(trained[name])}: {MODELS[name]}; {counts}.")
    return ["Networks:", "", *lines, ""] if lines else []


def _summary(findings: Sequence[Finding]) -> list[str]:
    """Which claims held, which did not, which could not be tried."""
    lines = ["## Which claims held", ""]
    for scale in dict.fromkeys(one.scale for one in findings if one.scale):
        own = [one for one in findings if one.scale == scale]
        lines += [f"At the scale `{scale}`, by the best round:", ""]
        for verdict in ordered(one.verdict for one in own):
            lines.append(f"- **{verdict}**: {_named(one for one in own if one.verdict == verdict)}")
        lines.append("")
    missing = [one for one in findings if one.best is None]
    if missing:
        lines += [f"- **not tried**: {_named(missing)}", ""]
    return lines


def _named(findings: Iterable[Finding]) -> str:
    """Claims with their splits."""
    splits: dict[str, list[str]] = {}
    for one in findings:
        splits.setdefault(one.claim.text, []).append(one.where)
    return "; ".join(f"{text} ({_listed(names)})" for text, names in splits.items()) + "."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} comparisons"


def _claims(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for one in findings:
        if one.best is not None:
            paper = NOTHING if one.paper is None else signed(one.paper)
            paper += f" ({one.claim.printed_on})" if one.claim.printed_on else ""
            ten = (NOTHING, "") if one.last_ten is None else (str(one.last_ten), against(one.last_ten, one.claimed))
            where = (one.claim.text, one.claim.table, one.where, one.scale)
            values = (one.alone and one.alone.p, one.in_table, one.best.p)
            p = [NOTHING if value is None else f"{value:.3f}" for value in values]
            lines.append((*where, paper, str(one.best), *p, one.verdict, *ten))
    tests = ("p", "p, table", "p, page")
    headings = ("claim", "table", "split", "scale", "paper", "best round", *tests, "", "mean of last ten", "")
    bests = [one.best for one in findings if one.best is not None]
    table = texts("Claim by claim", headings, lines, left=("table", "split", "scale", ""))
    remarks = (
        "Differences are in percent points, except those of eigenvalues. Brackets hold a mean of splits, where the "
        "paper prints no number for a single one. With a tag that names images, ours are of these and the paper's of "
        "the table's. Where a table prints only domains, the paper's number is their mean. "
        f"Of the {sum(len(one.seeds) for one in bests)} pairs of this list {sum(one.mixed for one in bests)} are mixed."
    )
    return [markdown(replace(table, remarks=remarks))] if lines else []


def _counts(counts: Sequence[Count]) -> list[str]:
    """All methods against FedAvg, table by table."""
    lines = [
        (one.table, kind(one.metric), one.scale, *(str(one.verdicts[verdict] or "") for verdict in VERDICTS))
        for one in counts
    ]
    headings = ("table", "metric", "scale", *VERDICTS)
    table = texts("", headings, lines, left=("metric", "scale"))
    remarks = (
        "How many differences from FedAvg have the sign that the paper prints. The differences of a line are one "
        "family for Holm's correction. It is smaller than the page's, so more can hold here than in the list of claims."
    )
    return ["## Every method against FedAvg", "", markdown(replace(table, remarks=remarks))] if lines else []


def _table(
    scale: str, table: str, members: Sequence[Column], expected: Sequence[Expected], results: Sequence[Result]
) -> list[str]:
    own = [one for one in results if (one["scale"], one["table"]) == (scale, table) and one["status"] == "finished"]
    over = in_words(common(one["over_preset"] for one in own))
    lines = [f"## {table}, scale {scale}", ""]
    lines += [f"Over the preset in all runs: {over}." if over else "As the preset says.", ""]
    for column in members:
        known = {metric for row in column.rows for one in row.results for metric in one["metrics"]}
        own_metrics = [metric for metric in dict.fromkeys(one.metric for one in expected) if metric in known]
        for metric in own_metrics or sorted(one for one in known if one.endswith(":mean")):
            lines += _split(column, metric, printed(expected, column.split, metric) if not column.tag else {})
        lines += _commands(column)
    return lines


def _split(column: Column, metric: str, numbers: Mapping[str, float]) -> list[str]:
    """One table: methods down."""
    rows = [row for row in column.rows if row.values(metric)]
    over = family([column.over_baseline(row, metric) for row in rows])
    last = metric == PA and any(row.values(PA_LAST) for row in rows)
    heads = [("best", "mean of last ten") if metric in LAST_TEN else ("ours",), ("seeds", "paper", "difference")]
    heads += [("PA last",)] * last
    columns = [Heading(heading) for several in [*heads, ("over FedAvg", "paper's")] for heading in several]
    heading = " · ".join(part for part in (column.split, column.tag, _title(metric)) if part)
    lines = tuple(
        Line(row.label, _cells(row, metric, numbers, one, last=last)) for row, one in zip(rows, over, strict=True)
    )
    order, count, seeds = column.order(metric, numbers)
    text = markdown(Table(heading, (*columns, Heading("", left=True)), lines))
    if order is None:
        return [text]
    means = f"means of the {len(seeds)} seeds" if len(seeds) > 1 else "numbers of the one seed"
    return [text, f"Rank correlation with the paper over {count} methods, {means} that all have: {signed(order)}.", ""]


def _cells(
    row: Row, metric: str, numbers: Mapping[str, float], over: Difference | None, *, last: bool
) -> tuple[Cell, ...]:
    values, paper, base = row.values(metric), numbers.get(row.name), numbers.get(BASELINE)
    ours = [over_seeds(row.values(metric).values())]
    if metric in LAST_TEN:
        ours.append(over_seeds(row.last_ten(metric).values()))
    claimed = None if paper is None or base is None or row.name == BASELINE else paper - base
    apart = None if paper is None or ours[0].mean is None else ours[0].mean - paper
    words = [
        str(len(values)), NOTHING if paper is None else f"{paper:.2f}", NOTHING if apart is None else signed(apart),
    ]  # fmt: skip
    beside = [over_seeds(row.values(PA_LAST).values())] if last else []
    words_over = [
        NOTHING if over is None else str(over), NOTHING if claimed is None else signed(claimed),
        "" if over is None or claimed is None else against(over, claimed),
    ]  # fmt: skip
    return (*ours, *(Cell(text=word) for word in words), *beside, *(Cell(text=word) for word in words_over))


def _commands(column: Column) -> list[str]:
    """What repeats each row, and what failed."""
    lines = [f"- {one['method']} seed {one['seed']} failed: {one['sentence']}" for one in column.failed]
    lines += [""] if lines else []
    commands = [f"    {row.command}" for row in column.rows if row.command]
    if not commands:
        return lines
    return [*lines, "<details><summary>Commands</summary>", "", *commands, "", "</details>", ""]


def _title(metric: str) -> str:
    name, _, domain = metric.partition(":")
    short = {"ga_pct": "GA, %", "pa_pct": "PA, %"}
    return f"{short.get(name) or title(name) or name} {domain}".rstrip()
