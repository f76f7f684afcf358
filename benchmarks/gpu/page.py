"""docs/gpu.md: what a GPU day measured, from its results."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.items import FINAL, latest, read

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks/results/gpu.jsonl"
PAGE = ROOT / "docs/gpu.md"

Line = Mapping[str, Any]

HEAD = """# Measured on a GPU

This page is written by `python -m benchmarks.gpu --page`. Three commands make the measurements, each within the minutes
that it is given; repeated, a command continues where it stopped:

```bash
python -m benchmarks.gpu --part=1 --minutes=9 --out=runs/gpu    # does it work
python -m benchmarks.gpu --part=2 --minutes=9 --out=runs/gpu    # how fast is it
python -m benchmarks.gpu --part=3 --minutes=9 --out=runs/gpu --data-dir=DATA    # the papers, on Fashion-MNIST
```
"""
NOTHING = "\nNot measured yet.\n"
SHARED = """The methods and models below ran at the same time, on one device and the same processor cores, and without
XLA's timing of kernels, so their seconds say little.
"""


def write(folder: Path) -> None:
    """Add a folder's results, if it has any, to the committed ones, and write the page from these."""
    committed = COMMITTED.read_text().splitlines() if COMMITTED.exists() else []
    new = [json.dumps(line) for line in read(folder / "results.jsonl")]
    if lines := list(dict.fromkeys([*committed, *new])):
        COMMITTED.write_text("\n".join(lines) + "\n")
    PAGE.write_text(page(read(COMMITTED)), encoding="utf-8")


def page(lines: Sequence[Line]) -> str:
    """The page's text from all lines of a file of results."""
    items = [line for line in latest(lines).values() if line["status"] != "machine"]
    if not items:
        return HEAD + NOTHING
    succeeded = [line for line in items if line["status"] == "ok"]
    sections = [_machines(lines), _works(items, succeeded), _fast(succeeded), _papers(items), _troubles(items)]
    return "\n".join([HEAD, *(section for section in sections if section)])


def _machines(lines: Sequence[Line]) -> str:
    """The machines it ran on, each once, and how far it has come."""
    machines = []
    for line in (line for line in lines if line["status"] == "machine"):
        versions = ", ".join(f"{name} {number}" for name, number in line["versions"].items())
        gpu = "; ".join(line["gpu"]) or "no GPU"
        machines.append(
            f"- {gpu}; {line['cpu']}, {line['cores']} cores; Python {line['python']}, {versions}; {line['date']}."
        )
    note = "\n**A rehearsal on a CPU: these numbers mean nothing.**" if any(x.get("rehearsed") for x in lines) else ""
    return "\n".join([*dict.fromkeys(machines), note, _progress(lines), ""])


def _progress(lines: Sequence[Line]) -> str:
    """How many items of each part have a result."""
    from benchmarks.gpu import papers, speed, works  # a starting worker does not need what items are made from

    rehearsed, last_lines = any(line.get("rehearsed") for line in lines), latest(lines)
    parts = works.items(rehearsed), speed.items(rehearsed), papers.items(rehearsed, None, Path("runs"), lines)
    counts = [(sum(last_lines.get(i.name, {}).get("status") in FINAL for i in items), len(items)) for items in parts]
    words = ", ".join(f"{done} of {every} items of part {number}" for number, (done, every) in enumerate(counts, 1))
    rest = " The rest has not been measured." if any(done < every for done, every in counts) else ""
    return f"Done so far: {words}.{rest}"


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, with numbers to three digits and nothing for None; "" without rows."""
    cells = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    rule = "|---" + "|---:" * (len(heads) - 1) + "|"
    return "\n".join([f"| {' | '.join(heads)} |", rule, *cells, ""]) if cells else ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _section(title: str, *parts: str) -> str:
    """A section of those parts that are not empty; "" if all are."""
    filled = [part for part in parts if part]
    return "\n".join([f"## {title}", "", *filled]) if filled else ""


def _titled(title: str, text: str) -> str:
    return f"### {title}\n\n{text}" if text else ""


def _named(lines: Sequence[Line], start: str) -> list[Line]:
    return [line for line in lines if line["name"].startswith(start)]


def _columns(lines: Sequence[Line], *names: str) -> list[list[Any]]:
    return [[line.get(name) for name in names] for line in lines]


def _works(items: Sequence[Line], succeeded: Sequence[Line]) -> str:
    """Part 1."""
    ceilings = []
    for line in _named(succeeded, "ceilings"):
        ceilings.append(["copy, GB/s read and written", line["copy_gb_s"]])
        for precision in ("float32", "tf32", "bfloat16"):
            ceilings.append([f"large product, {precision}, TFLOP/s", line[f"{precision}_tflop_s"]])
    resumed = _columns(_named(succeeded, "killed"), "killed_after", "rounds", "loss_difference")
    lanes = _columns(_named(succeeded, "lanes"), "name", "difference_1_round", "difference_3_rounds")
    memory = _columns(_named(succeeded, "memory"), "clients", "device_peak_memory_mb", "images_mb")
    return _section(
        "Does it work",
        _titled("The device's ceilings", table(["", "measured"], ceilings)),
        SHARED if _named(items, "method ") else "",
        *(_titled(f"Every {kind}, two rounds", _two_rounds(_named(items, f"{kind} "))) for kind in ("method", "model")),
        _titled("A run ended by SIGKILL and continued, beside an undisturbed one",
                table(["killed after round", "rounds", "largest relative difference of a loss"], resumed)),
        _titled("One lane and ten, full float32: largest difference over the largest parameter",
                table(["", "after one round", "after three"], lanes)),
        _titled("Memory of W4 in 500 lanes", table(["clients", "peak MiB", "of which images"], memory)),
    )  # fmt: skip


def _two_rounds(lines: Sequence[Line]) -> str:
    headings = ["", "works", "compiling, s", "second round, s", "peak MB of the device"]
    rows = _columns(lines, "compile_seconds", "seconds_per_round", "device_peak_memory_mb")
    states = ({"ok": "yes", "failed": "**no**"}.get(line["status"], line["status"]) for line in lines)
    names = (line["name"].partition(" ")[2] for line in lines)
    return table(headings, ([name, state, *row] for name, state, row in zip(names, states, rows, strict=True)))


def _fast(succeeded: Sequence[Line]) -> str:
    """Part 2."""
    ours = [line for line in succeeded if "median_s" in line and "precision" in line]
    grid = sorted(ours, key=lambda line: (line["workload"], line["method"], line["median_s"]))
    steps = _columns(_named(succeeded, "barrier"), "name", "step_s", "tflop_s", "compiling_and_all_s")
    turns = _columns(_named(succeeded, "turns"), "name", "sums", "turn_us")
    headings = {
        "lanes": "lanes", "precision": "precision", "form": "lanes of convolutions", "median_s": "s a round",
        "samples_per_s": "samples a second", "compile_s": "compiling, s", "device_peak_memory_mb": "peak MiB",
    }  # fmt: skip
    cells = ([_label(line), *map(line.get, headings)] for line in grid)
    accuracy = _columns(_named(succeeded, "accuracy"), "precision", "ga_best", "ga_mean_last10", "seconds_per_round")
    return _section(
        "How fast is it",
        _titled("Seconds a round, beside PyTorch on the same device", _versus(ours, _named(succeeded, "torch"))),
        _titled("Lanes, precision and forms", table(["", *headings.values()], cells)),
        _titled("Experiments of a sweep together, and one after another", _sweeps(_named(succeeded, "sweep"))),
        _titled("What the device executes in a round", _launches(_named(succeeded, "launches"))),
        _titled("Unequal clients: Dirichlet(0.1), 100 clients of 200 samples on average", _unequal(succeeded)),
        _titled("A turn of a loop of small sums", table(["", "sums a turn", "microseconds"], turns)),
        _titled(
            "A training step of ResNet18, batch 50, alone", table(["", "s", "TFLOP/s", "all with compiling, s"], steps)
        ),
        _titled("Precision and accuracy, a CNN on digits", table(["", "GA best", "last ten", "s a round"], accuracy)),
        _titled("Workloads for which others printed numbers", _printed(_named(succeeded, "printed"))),
    )


def _label(line: Line) -> str:
    """The workload, with the method unless it is FedAvg."""
    return line["workload"] + ("" if line["method"] == "fedavg" else f", {line['method']}")


def _fastest(lines: Iterable[Line], allowed: Callable[[Line], bool]) -> Line | None:
    return min(filter(allowed, lines), key=lambda line: line["median_s"], default=None)


def _versus(ours: Sequence[Line], torch: Sequence[Line]) -> str:
    """Our best setting with float32 products (TF32) and in bfloat16, beside PyTorch's variants, by workload."""
    rows = []
    for name in dict.fromkeys(line["workload"] for line in ours if line["method"] == "fedavg"):
        fedavg_lines = [line for line in ours if line["workload"] == name and line["method"] == "fedavg"]
        tf32 = _fastest(fedavg_lines, lambda line: line["precision"] == "tf32")
        half = _fastest(fedavg_lines, lambda line: line["precision"] == "bfloat16")
        torch_seconds = {line["kind"]: line["median_s"] for line in torch if line["workload"] == name}
        seconds = [line and line["median_s"] for line in (tf32, half)]
        best = min((s for kind, s in torch_seconds.items() if kind != "compiled"), default=None)
        ratio = best / seconds[0] if best and seconds[0] else None
        rows.append([name, *seconds, *(torch_seconds.get(k) for k in ("plain", "tuned", "vmap", "compiled")), ratio])
    headings = ["", "ours, TF32", "ours, bfloat16", "plain loop", "tuned loop", "torch.func.vmap",
             "tuned, bfloat16 and torch.compile", "best of PyTorch without bfloat16 / ours in TF32"]  # fmt: skip
    return table(headings, rows)


def _sweeps(lines: Sequence[Line]) -> str:
    rows = [
        [line["name"].removeprefix("sweep "), line["experiments"], line["alone"]["wall_s"], line["together"]["wall_s"],
         line["ratios"]["all"], line["ratios"]["without_compiling"], line["ratios"]["round"]]
        for line in lines
    ]  # fmt: skip
    return table(["", "experiments", "alone, s", "together, s", "ratio", "without compiling", "of a round"], rows)


def _launches(lines: Sequence[Line]) -> str:
    rows = _columns(lines, "name", "lanes", "kernels", "predicted_kernels", "copies", "busy_ms")
    return table(["", "lanes", "kernels", "predicted without a device", "copies", "device busy, ms"], rows)


def _unequal(succeeded: Sequence[Line]) -> str:
    """Jobs in blocks of b; the program's own choice should not be far from the best."""
    lines = _named(succeeded, "unequal")
    names = (line["name"].rpartition(", ")[2] for line in lines)
    rows = _columns(lines, "lanes", "block", "median_s", "compile_s", "device_peak_memory_mb")
    headings = ["", "lanes", "b", "s a round", "compiling, s", "peak MiB"]
    return table(headings, ([name, *row] for name, row in zip(names, rows, strict=True)))


def _printed(lines: Sequence[Line]) -> str:
    rows = _columns(lines, "workload", "method", "lanes", "median_s", "printed_s")
    sources = dict.fromkeys(f"- {line['workload']}: {line['source']}." for line in lines)
    text = table(["", "method", "lanes", "ours, s a round", "printed"], rows)
    return "\n".join([text, *sources, ""]) if text else ""


def _papers(items: Sequence[Line]) -> str:
    """Part 3: every run as far as it has come."""
    runs: dict[str, Line] = {}
    for line in (line for line in items if "run" in line):
        if line["rounds"] >= runs.get(line["run"], {"rounds": 0})["rounds"]:
            runs[line["run"]] = line
    rows = []
    for run, line in runs.items():
        shares = [line.get(key) for key in ("ga_best", "ga_mean_last10", "pa_best", "pa_mean_last10")]
        percent = [None if share is None else f"{100 * share:.2f}" for share in shares]
        rows.append([run, f"{line['rounds']} of {line['of']}", *percent, line["printed_ga_pct"],
                     line.get("seconds_per_round")])  # fmt: skip
    headings = ["", "rounds", "GA best, %", "GA last ten", "PA best", "PA last ten", "printed GA after all rounds",
                "s a round"]  # fmt: skip
    return _section("The papers: ResNet18 on Fashion-MNIST", table(headings, rows))


def _troubles(items: Sequence[Line]) -> str:
    """What failed, and what was left out and why."""
    failed = [f"- {line['name']}:\n\n        " + line["error"].replace("\n", "\n        ") for line in items
              if line["status"] == "failed"]  # fmt: skip
    left_out = [f"- {line['name']}: {line['reason']}." for line in items if line["status"] == "left out"]
    return _section("What failed, or was left out", *failed, *left_out)
