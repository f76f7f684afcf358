"""`accelerator all`: everything that has to compile for an accelerator, the table of it, and what became worse.

Records are written one by one, with a digest of the program that was compiled. A survey lowers every case again, which
takes seconds, and compiles only programs that differ from their record's: neither an interrupted survey nor a change
that leaves the programs as they are makes records stale.
"""

import json
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cases import PARTS, Case
from fedjax_pcdd.training.fields import write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accelerator"
COUNTS = ("turns", "kernels", "temp_mb")
MARGIN, SLACK_MB = 1.1, 1.0  # memory may grow by a tenth and a MiB
WORKER_MB = 5000  # what a compilation may need
SMALL = "mlp,simple_cnn,mcmahan_cnn,fedrl_cnn"
LARGE = "resnet10,resnet12,efficientnet_b0,mobilenet_v2"
RESNETS = ("resnet10", "resnet18", "resnet50")
SECTIONS = ("rounds", "methods", "other programs", "models", "forms")
Record = dict[str, Any]
Measure = Callable[[Case, str], Record]
Digests = Callable[[str], AbstractContextManager[Callable[[Case], str]]]


def all_cases() -> dict[str, dict[str, Case]]:
    """Sections of named cases."""
    from benchmarks.forms import TEXT, model_layers, side_of
    from fedjax_pcdd.methods import METHODS
    from fedjax_pcdd.models import MODELS

    rounds = {
        "w1, 1 lane": Case("round", workload="w1"),
        "w1, 10 lanes": Case("round", workload="w1", lanes=10),
        "w2, 10 lanes": Case("round", workload="w2", lanes=10),
        **{f"w3, {n} lane{'s'[: n > 1]}": Case("round", workload="w3", lanes=n) for n in (1, 2, 10)},
        "w4, 500 lanes": Case("round", lanes=500),
        "w4, scaffold, 500 lanes": Case("round", method="scaffold", lanes=500),
        "w4, 5000 clients, 5000 lanes": Case("round", clients=5000, lanes=5000),
        "dirichlet, 100 lanes": Case("round", workload="dirichlet", lanes=100),
    }
    other_programs = {
        f"{program}, {workload}, {lanes} lanes": Case("round", program, workload=workload, lanes=lanes)
        for program, workload, lanes in (
            ("generic", "w1", 10), ("personal", "w1", 10), ("personal", "dirichlet", 100), ("tuning", "w1", 10),
            ("tuning", "w4", 500),
        )
    }  # fmt: skip
    exchanging = [name for name, method in METHODS.items() if method().traits().exchange != "never"]
    other_programs |= {f"exchange, {name}": Case("round", "exchange", method=name, model=SMALL) for name in exchanging}
    other_programs["exchange, fccl, large models"] = Case("round", "exchange", method="fccl", model=LARGE)
    models = {
        f"{name} {part}, {n} lane{'s'[: n > 1]}": Case("model", part, model=name, lanes=n, side=side_of(name))
        for name in MODELS for part in PARTS for n in (1, 4)
    }  # fmt: skip
    for name in MODELS:
        models[f"{name} gradient, bfloat16"] = replace(models[f"{name} gradient, 1 lane"], precision="bfloat16")
    return {
        "rounds": rounds,
        "methods": {f"{name}, w1, 10 lanes": Case("round", workload="w1", method=name, lanes=10) for name in METHODS},
        "other programs": other_programs,
        "models": {name: case for name, case in models.items() if not (case.model in TEXT and "bfloat16" in name)},
        "forms": {name: Case("forms", layer=name) for name in model_layers()},
    }


def is_quick(section: str, case: Case) -> bool:
    """Whether a case is checked on every change: what breaks most often, in a quarter of an hour."""
    if section == "models":
        return case.model in RESNETS and case.program == "gradient"
    if section == "forms":
        return str(case.layer).startswith(("3x3 / 2, 64", "5x5, 3 to 6"))
    if case.program == "exchange":
        return case.method == "fccl" and case.model == SMALL
    return not (case.workload in ("w2", "w3") and case.lanes > 1)


class Survey:
    """The records of all targets, as they are in the file."""

    def __init__(self, path: Path = RESULTS, *, writes: bool = True):
        """Args: path: without its ending."""
        self.path, self.writes = path, writes
        self.targets: dict[str, dict[str, dict[str, Record]]] = read(path)
        self.cases: dict[str, dict[str, Case]] = {}
        self._lock = threading.Lock()

    def add(self, target: str, section: str, name: str, record: Record) -> None:
        """Add a record, and write the files."""
        with self._lock:
            sections = self.targets.setdefault(target, {})
            records = sections.get(section, {}) | {name: record}
            sections[section] = {name: records[name] for name in sorted(records, key=in_order)}
            self.targets[target] = {name: sections[name] for name in SECTIONS if name in sections}
            if self.writes:
                write_text(self.path.with_suffix(".json"), json.dumps(self.targets, indent=1) + "\n", "another `out`")
                write_text(self.path.with_suffix(".md"), markdown(self.targets, self.cases), "another `out`")


def in_order(name: str) -> list[str]:
    """The key that sorts names of cases by the numbers in them.

    >>> sorted(["w3, 10 lanes", "w3, 2 lanes"], key=in_order)
    ['w3, 2 lanes', 'w3, 10 lanes']
    """
    return [part.zfill(6) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def read(path: Path) -> dict[str, dict[str, dict[str, Record]]]:
    """The records in a file; {} if there is no file."""
    file = path.with_suffix(".json")
    return json.loads(file.read_text()) if file.exists() else {}


def run(
    survey: Survey, target: str, measure: Measure, digests: Digests, *, quick: bool, only: str = "", workers: int = 2
) -> Iterator[tuple[str, str, Record]]:
    """Measure the cases whose program is not that of their record.

    Args:
      measure: returns the record of a case on a target.
      digests: returns, for a target, a function that returns the digest of a case, one at a time.
      quick: leave out cases that are not `is_quick`.
      only: leave out cases whose "section: name" does not contain this.
      workers: compilations at once, fewer if memory is short.

    Yields:
      (section, name, record) of each case as they come, unchanged ones too.
    """

    def update(job: tuple[str, str, Case]) -> tuple[str, str, Record]:
        section, name, case = job
        previous = survey.targets.get(target, {}).get(section, {}).get(name, {})
        if "program" in previous and previous["program"] == digest(case):
            return section, name, previous
        record = summary(measure(case, target))
        if section == "forms" and not record["ok"]:
            record["failing"] = failing_forms(case, target, measure)
        survey.add(target, section, name, record)
        return section, name, record

    def digest(case: Case) -> str:
        lowering = idle.get()
        try:
            return lowering(case)
        finally:
            idle.put(lowering)

    survey.cases = all_cases()
    jobs = [(section, name, case) for section, cases in survey.cases.items() for name, case in cases.items()]
    selected = [job for job in jobs if only in f"{job[0]}: {job[1]}" and (not quick or is_quick(job[0], job[2]))]
    workers, idle = affordable(workers), queue.SimpleQueue()
    with ExitStack() as stack, ThreadPoolExecutor(workers) as pool:
        for _ in range(workers):
            idle.put(stack.enter_context(digests(target)))
        yield from pool.map(update, selected)


def failing_forms(case: Case, target: str, measure: Measure) -> list[str]:
    """Which forms of a layer do not compile."""
    from benchmarks.forms import forms_of, model_layers

    names = map(str, forms_of(model_layers()[case.layer or ""]))
    return [name for name in names if not measure(replace(case, form=name), target)["ok"]]


def affordable(workers: int) -> int:
    """The number of workers, reduced if memory is short."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return workers
    line = next(x for x in info.read_text().splitlines() if x.startswith("MemAvailable"))
    return max(1, min(workers, int(line.split()[1]) // 1024 // WORKER_MB))


def summary(record: Record) -> Record:
    """The part of a record that is kept."""
    names = ("ok", *COUNTS, "compile_s", "longest", "branches", "uncounted", "reason", "program")
    result = {name: record[name] for name in names if record.get(name) not in (None, "")}
    bodies = record.get("bodies", ()) if record.get("kernels") else ()
    launched = [[body["runs"], body["kernels"]] for body in bodies if body["kernels"]]
    return result | ({"launched": launched} if launched else {})


def worse(section: str, name: str, record: Record, known: Mapping[str, Any] | None) -> str:
    """A sentence if a record is worse than the committed one, else "".

    >>> worse("rounds", "w1", {"ok": True, "turns": 9}, {"ok": True, "turns": 8})
    'rounds, w1: 9 turns, were 8.'
    """
    if known is None:
        return f"{section}, {name}: there is no committed record, run `all` without --check."
    if not record["ok"]:
        return f"{section}, {name}: {record.get('reason', 'failed')}." if known["ok"] else ""
    if record.get("uncounted") and not known.get("uncounted"):
        return f"{section}, {name}: {record['uncounted']}."
    for count in COUNTS:
        old, new = known.get(count), record.get(count)
        limit = None if old is None else old * MARGIN + (SLACK_MB if count == "temp_mb" else 0)
        if limit is not None and new is not None and new > limit:
            return f"{section}, {name}: {new:,} {count}, were {old:,}."
    return ""


def markdown(targets: Mapping[str, Mapping[str, Mapping[str, Record]]], cases: Mapping[str, Mapping[str, Case]]) -> str:
    """All records as tables, after what does not compile and which cases have no record yet."""
    lines = ["# What XLA makes of the engine on accelerators", "", NOTE]
    for target, sections in targets.items():
        lines += ["", f"## {target}", "", *_failures(sections), *_unknown(sections, cases)]
        for section, records in sections.items():
            lines += ["", f"### {section}", "", *_table(records)]
    return "\n".join(lines) + "\n"


def _failures(sections: Mapping[str, Mapping[str, Record]]) -> list[str]:
    failed = [(name, r) for records in sections.values() for name, r in records.items() if not r["ok"]]
    total = sum(map(len, sections.values()))
    lines = [f"{total - len(failed)} of {total} programs compile." + (" Not:" if failed else "")]
    for name, record in failed:
        forms = f" ({', '.join(record['failing'])})" if record.get("failing") else ""
        lines.append(f"- {name}{forms}: {record.get('reason', '')}")
    return lines


def _unknown(sections: Mapping[str, Mapping[str, Record]], cases: Mapping[str, Mapping[str, Case]]) -> list[str]:
    lacking = {
        section: len(section_cases.keys() - sections.get(section, {}).keys())
        for section, section_cases in cases.items()
    }
    texts = [f"{count} of {len(cases[section])} {section}" for section, count in lacking.items() if count]
    without_digest = sum("program" not in record for records in sections.values() for record in records.values())
    lines = ["", f"Not compiled yet: {', '.join(texts)}."] if texts else []
    return lines + (
        ["", f"{without_digest} records are of earlier programs, without a digest."] if without_digest else []
    )


def _table(records: Mapping[str, Record]) -> list[str]:
    headings = {"turns": "turns", "kernels": "kernels", "launched": "that is", "temp_mb": "temp MiB"}
    headings |= {"compile_s": "compile, s"}
    columns = [column for column in headings if any(column in record for record in records.values())]
    lines = [f"| | compiles | {' | '.join(headings[c] for c in columns)} |", "|---" * (len(columns) + 2) + "|"]
    for name, record in records.items():
        cells = [_cell(record, column) for column in columns]
        lines.append(f"| {name} | {'yes' if record['ok'] else '**no**'} | {' | '.join(cells)} |")
    return lines


def _cell(record: Record, column: str) -> str:
    """A value as text.

    >>> _cell({"kernels": 39, "launched": [[1, 19], [5, 4]], "branches": 5}, "kernels")
    'at most 39'
    >>> _cell({"launched": [[1, 19], [5, 4]]}, "launched")
    '19 + 5 · 4'
    """
    value, longest = record.get(column), record.get("longest")
    if value is None:
        return "–"
    if column == "launched":
        return " + ".join(f"{runs:,} · {kernels}" if runs != 1 else f"{kernels}" for runs, kernels in value)
    if column == "turns" and longest and longest > 1:
        return f"{value:,} (longest client: {longest} steps)"
    return f"{'at most ' if column == 'kernels' and record.get('branches') else ''}{value:,.0f}"


NOTE = """Compiled by `python -m benchmarks.accelerator all` for devices that were not there: nothing was timed on one.
Turns are those of loops of unknown length in one run of the program, each of which costs a GPU a trip to the host;
kernels are all that the run launches, that is those outside of loops and, for each loop, turns · kernels of its body;
of branches the larger is counted ("at most"). Temp MiB is memory beside arguments and results; seconds to compile are
those of a busy CPU and say little. A model is compiled on a batch of 50 images of 32x32 pixels (`efficientnet_b0_isic`
64x64, `lstm` texts of 80 letters). Forms are those of a convolution's three operations, alone and in 4 lanes, in
float32 and bfloat16, all in one program. A TPU runs a program as a whole: kernels are not counted there."""
