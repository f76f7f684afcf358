"""A GPU day: items that crash, hang or lack something do not end it, a call continues where the last one stopped, and
all of it is rehearsed on the CPU. The only timing that is asserted is that a call keeps to its minutes."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_items
import numpy as np
import pytest

from benchmarks.gpu import page, papers, speed, works
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.items import Item, Results, latest, read
from benchmarks.gpu.workers import Call, Clock

ROOT = Path(__file__).parents[2]
MISSING_MODULES = ("tyro", "tensorflow_datasets", "tensorflow", "array_record")


def work_off(folder, items, seconds=60.0, *, shared=False, workers=1, **options):
    """The results of one call, the latest of each item."""
    results = Results(folder)
    Call(results, Clock(seconds), workers=workers, shared=shared, say=lambda text: None).work_off(items, {}, **options)
    return latest(results.lines)


def item_of(name, work, seconds=1.0, **options):
    return Item(name, work, options, seconds)


def test_a_crash_is_a_result_and_the_next_item_runs(tmp_path):
    items = [
        item_of("first", gpu_items.crash),
        item_of("second", gpu_items.square, x=3),
        item_of("third", gpu_items.fail),
    ]
    results = work_off(tmp_path, items, shared=True)
    assert results["first"]["status"] == "failed"
    assert results["first"]["error"].splitlines()[-1] == "the process was ended by SIGABRT"
    assert "a check failed" in results["first"]["error"]
    assert (results["second"]["status"], results["second"]["square"]) == ("ok", 9)
    assert results["third"]["error"].endswith("of which this is the last")


@pytest.mark.thorough
def test_failed_items_are_retried_on_request_and_left_out_items_always(tmp_path):
    items = [item_of("fails", gpu_items.fail), item_of("lacks", gpu_items.lack, file=str(tmp_path / "data"))]
    assert work_off(tmp_path, items, shared=True)["lacks"]["reason"] == "there is no data"
    (tmp_path / "data").touch()
    assert work_off(tmp_path, items, shared=True)["lacks"]["status"] == "ok"
    assert [line["name"] for line in read(tmp_path / "results.jsonl")] == ["fails", "lacks", "lacks"]
    work_off(tmp_path, items, shared=True, again=True)
    assert [line["name"] for line in read(tmp_path / "results.jsonl")][3:] == ["fails"]


@pytest.mark.thorough
def test_a_call_ends_before_its_minutes_are_over_and_leaves_items_for_the_next(tmp_path):
    log = tmp_path / "log"
    long = Item("long", gpu_items.sleep, {"log": str(log)}, interruptible=True)
    items = [item_of("short", gpu_items.square, x=2), long, item_of("last", gpu_items.square, 1e6, x=4)]
    start = time.monotonic()
    results = work_off(tmp_path, items, 15.0)
    assert time.monotonic() - start < 15.0
    assert [results[name]["status"] for name in ("short", "long")] == ["ok", "interrupted"]
    assert "last" not in results
    assert 0 < float(log.read_text()) < 15  # the seconds that the item was given
    assert [item.name for item in Results(tmp_path).unfinished(items)] == ["long", "last"]


def test_an_item_that_hangs_is_recorded_as_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.workers.PATIENCE", 0.5)
    results = work_off(tmp_path, [item_of("hangs", gpu_items.sleep, 0.1, log=str(tmp_path / "log"))])
    assert (results["hangs"]["status"], results["hangs"]["error"]) == ("failed", "it took longer than 1 seconds")


def test_each_item_has_a_process_and_environment_variables_of_its_own(tmp_path):
    flagged = Item("flagged", gpu_items.process, environment={"GPU_DAY_FLAG": "on"}, together=True)
    results = work_off(tmp_path, [Item("plain", gpu_items.process, together=True), flagged], workers=2)
    assert (results["plain"]["flag"], results["flagged"]["flag"]) == (None, "on")
    assert len({os.getpid(), results["plain"]["pid"], results["flagged"]["pid"]}) == 3


def test_a_line_of_results_that_was_cut_short_is_ignored(tmp_path):
    Results(tmp_path).add({"name": "one", "status": "ok"})
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('{"name": "tw')
    assert [line["name"] for line in read(tmp_path / "results.jsonl")] == ["one"]
    Results(tmp_path).add({"name": "three", "status": "ok"})
    assert [line["name"] for line in read(tmp_path / "results.jsonl")] == ["one", "three"]


def test_names_of_items_are_unique():
    for items in (works.items(False), speed.items(False), papers.items(False, None, Path("runs"), [])):
        assert len({item.name for item in items}) == len(items)


def test_the_papers_runs_have_the_presets_settings():
    fedmr_runs, fedgela_runs, _ = papers.groups("P5C2")
    fedmr = fedmr_runs["fedmr P5C2, all rivals"]
    assert (fedmr["clients"], fedmr["rounds"], fedmr["batch_size"], fedmr["mu1"], fedmr["negatives"]) == (
        5, 100, 128, 0.01, "all",
    )  # fmt: skip
    fedavg = fedgela_runs["fedavg P5C2, two layers"]
    assert (fedavg["dataset"], fedavg["clients"], fedavg["neck"], fedavg["batch_size"]) == ("fashion_mnist", 5, 2, 100)
    assert papers.printed("P5C2", "fedmr") == 75.51


def test_part_three_takes_the_lanes_that_part_two_measured_as_fastest():
    line = {"status": "ok", "workload": "w3", "precision": "tf32", "form": None, "method": "fedavg"}
    measured = [line | {"lanes": 1, "median_s": 2.0}, line | {"lanes": 10, "median_s": 1.0}]
    assert [papers.best_lanes(results) for results in ([], measured)] == [1, 10]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The folder of a GPU day rehearsed in three calls, in processes without what a GPU machine may lack."""
    folder = tmp_path_factory.mktemp("gpu")
    rng = np.random.default_rng(0)
    labels = np.arange(400, dtype=np.uint8) % 10
    images = rng.integers(0, 256, (400, 28, 28, 1), np.uint8)
    np.savez(folder / "fashion_mnist.npz", x_train=images, y_train=labels, x_test=images[:40], y_test=labels[:40])
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({MISSING_MODULES}))\n")
    paths = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    for part in (1, 2, 3):
        command = [sys.executable, "-m", "benchmarks.gpu", f"--part={part}", f"--out={folder}", "--rehearse", "--page"]
        completed = subprocess.run(
            [*command, f"--data-dir={folder}"], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths},
            capture_output=True, text=True,
        )  # fmt: skip
        assert completed.returncode == 0, completed.stdout + completed.stderr
    return folder


@pytest.mark.slow
def test_all_parts_run_without_tyro_and_tensorflow(rehearsed):
    results = latest(read(rehearsed / "results.jsonl"))
    assert {line.get("part") for line in results.values()} == {1, 2, 3}
    failures = {name: line for name, line in results.items() if line["status"] not in ("ok", "machine")}
    if importlib.util.find_spec("torch"):
        assert not failures
    else:
        assert {name.split()[0] for name in failures} == {"torch"}
        assert {line["reason"] for line in failures.values()} == {"PyTorch is not installed"}


@pytest.mark.slow
def test_a_rehearsed_part_has_no_items_left(rehearsed, capsys):
    before = (rehearsed / "results.jsonl").read_text()
    assert main(["--part=1", f"--out={rehearsed}", "--rehearse"]) == 0
    added = (rehearsed / "results.jsonl").read_text().removeprefix(before).splitlines()
    assert [json.loads(line)["name"] for line in added] == ["machine"]
    assert capsys.readouterr().out == "0 of 6 items are left.\n"


@pytest.mark.slow
def test_a_killed_run_continues_with_the_same_losses(rehearsed):
    line = latest(read(rehearsed / "results.jsonl"))["killed and resumed"]
    assert (line["loss_difference"], line["rounds"]) == (0.0, 6)
    assert line["killed_after"] >= 2


@pytest.mark.slow
def test_the_papers_runs_stop_and_continue_at_their_stages(rehearsed):
    results = latest(read(rehearsed / "results.jsonl"))
    stages = [results[f"fedmr P10C2, to round {stage}"] for stage in (1, 3)]
    assert [line["rounds"] for line in stages] == [1, 3]
    assert stages[1]["ga_curve"][:1] == stages[0]["ga_curve"]
    assert stages[1]["printed_ga_pct"] == 74.97


@pytest.mark.slow
def test_the_page_shows_the_results(rehearsed):
    text = (rehearsed / "gpu.md").read_text()
    for fragment in (
        "## Does it work",
        "| fedmr | yes |",
        "## How fast is it",
        "| blocks of 2 | 4 | 2 |",
        "| PFLlib | fedavg |",
        "| fedmr P10C2 |",
    ):
        assert fragment in text
    assert "A rehearsal on a CPU" in text
    assert "Not measured yet" not in text


def test_the_committed_page_is_made_of_the_committed_results():
    assert page.PAGE.read_text() == page.page(read(page.COMMITTED))


def test_the_page_says_so_where_nothing_was_measured():
    assert "Not measured yet." in page.page([])


@pytest.mark.thorough
def test_engine_and_benchmarks_import_without_tyro_and_data_set_libraries():
    code = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({MISSING_MODULES}))
import benchmarks, fedjax_pcdd.engine
needs_torch = ("torch_loop", "torch_models", "torch_vmap")
for package in (benchmarks, fedjax_pcdd.engine):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith((*needs_torch, "__main__")):
            importlib.import_module(module.name)
import benchmarks.gpu.__main__, fedjax_pcdd.api
"""
    completed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
