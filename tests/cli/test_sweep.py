"""Sweeps: the grid, which experiments are run and which are not run again, and the table."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from rich.console import Console

import fedjax_pcdd as fp
from fedjax_pcdd.api import sweep_folder
from fedjax_pcdd.api.grid import Experiment, expand, stages, summarise, values_of
from fedjax_pcdd.api.records import Asked
from fedjax_pcdd.api.search import Search
from fedjax_pcdd.api.sweep_folder import Sweep
from fedjax_pcdd.cli import sweep as cli_sweep
from fedjax_pcdd.cli.run import main as run_main
from fedjax_pcdd.cli.search import search_main
from fedjax_pcdd.cli.sweep import as_table, launch, processes, sweep_main
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.config import build, dump
from fedjax_pcdd.training.folder import failure_file
from fedjax_pcdd.training.lock import Lock
from fedjax_pcdd.training.metrics import MEASURES
from fedjax_pcdd.training.options import configure
from fedjax_pcdd.training.progress import SweepBar

DRAWS_PICTURES = True
SMALL = ["--rounds=1", "--local-epochs=1", "--fine-tune-epochs=0", "--lanes=1", "--clients=3", "--min-samples=1"]


def test_grid_gives_options_to_the_methods_that_have_them():
    experiments = expand({"method": "fedavg,fedgela", "beta": "0.1,0.5", "seed": "0:2", "ew": "1e3,1e4"})
    assert len(experiments) == 2 * 2 + 2 * 2 * 2
    assert len({e.name for e in experiments}) == len(experiments)
    assert all(("ew" in e.given) == (e.given["method"] == "fedgela") for e in experiments)
    assert {e.group for e in experiments if e.given["method"] == "fedavg"} == {"fedavg-beta=0.1", "fedavg-beta=0.5"}


def test_a_sweep_combines_several_server_optimizers_with_its_methods(tmp_path, capsys):
    argv = ["--method=fedavg,fedgela", "--server-optimizer=none,adam", f"--sweep-dir={tmp_path / 'sweep'}", "--status"]
    assert sweep_main([*SMALL, *argv]) == 0
    status = capsys.readouterr().out
    assert "4 waiting" in status
    assert all(name in status for name in ("fedavg ", "fedavg+adam", "fedgela ", "fedgela+adam"))


def test_experiments_that_would_share_a_folder_are_refused():
    with pytest.raises(UserError, match=r"dataset=a/x.npz and dataset=a_x.npz would share the folder fedavg-dataset="):
        expand({"method": "fedavg", "dataset": "a/x.npz,a_x.npz", "seed": "0"})


def test_a_value_that_is_written_twice_counts_once():
    experiments = expand(
        {"method": "fedprox", "seed": "1,01,+1", "lr": "0.1,0.10,1e-1", "mu": "1,1.0", "partition": "dir,lda"}
    )
    assert [experiment.name for experiment in experiments] == ["fedprox-s1"]


def test_an_experiment_whose_folder_would_have_too_long_a_name_is_refused():
    with pytest.raises(UserError, match="vary fewer options at once, or give shorter values"):
        expand({"method": "fedavg", "dataset": f"{'a' * 230}.npz,digits"})


@pytest.mark.parametrize("grid", [
    {"seed": "0:100000000"}, {"rounds": "0:100000000"}, {"seed": "0:60000,60000:120000"},
    {"seed": "0:999", "lr": "1:999"},
])  # fmt: skip
def test_a_grid_of_too_many_experiments_is_refused_before_it_is_expanded(grid):
    with pytest.raises(UserError, match="more than 100000"):
        expand({"method": "fedavg", **grid})


def test_only_numbers_have_ranges():
    assert (values_of("seed", "1:3"), values_of("method", "1:3")) == (["1", "2"], ["1:3"])


def test_commas_belong_to_a_single_value_of_some_hyper_parameters():
    ditto_experiments = expand({"method": "ditto", "lambda_candidates": "0.1,1,2", "seed": "0:2"})
    assert {experiment.given["lambda_candidates"] for experiment in ditto_experiments} == {"0.1,1,2"}
    fedper_and_fedgela = expand({"method": "fedper,fedgela", "layers": "0,1"})
    assert [experiment.given["layers"] for experiment in fedper_and_fedgela] == ["0,1", "0", "1"]


def test_a_method_with_a_suffix_has_the_preset_settings_of_the_plain_method():
    for preset, split, name, field in [
        ("fedgela/table2", "full-dir0.1", "moon", "mu"),
        ("fedmr/table1", "P5C2", "fedmr", "mu1"),
    ]:
        plain, suffixed = (
            configure({"preset": preset, "split": split, "method": m})[1] for m in (name, f"{name}+adam")
        )
        assert getattr(plain, field) == getattr(suffixed, field) != getattr(type(plain)(), field)


def test_a_method_with_a_suffix_searches_the_preset_grid_of_the_plain_method():
    plain, suffixed = (
        list(next(stages({"preset": "fedmr/table9", "split": "cifar10-P10C3", "method": method}, {})))
        for method in ("fedprox", "fedprox+adam")
    )
    assert len(plain) == len(suffixed) > 1
    assert {experiment.given["method"] for experiment in suffixed} == {"fedprox+adam"}


PRESET = """
run: {dataset: digits}
methods: {fedprox: {}, fedmr: {mu2: 0.5}}
grid: {fedprox: {mu: [1, 2]}, fedmr: {mu1: [1, 2], mu2: [3, 4]}}
"""


def test_a_presets_grid_is_searched_one_hyper_parameter_after_another(tmp_path):
    (tmp_path / "a.yaml").write_text(PRESET)
    results, searched = {}, []
    for stage in stages({"preset": str(tmp_path / "a.yaml"), "seed": "0:2"}, results):
        searched.append([{k: v for k, v in e.given.items() if k.startswith("mu")} for e in stage if "s0" in e.name])
        results |= {e.name: dict.fromkeys(MEASURES, 0.1 * ("=2" in e.name)) for e in stage}
    assert searched == [
        [{"mu": "1"}, {"mu": "2"}, {"mu1": "1"}, {"mu1": "2"}],
        [{"mu1": "2", "mu2": "3"}, {"mu1": "2", "mu2": "4"}],
    ]


def test_a_value_with_which_a_seed_failed_is_not_chosen_for_its_other_seeds(tmp_path):
    (tmp_path / "a.yaml").write_text(PRESET)
    results = {}
    found = stages({"preset": str(tmp_path / "a.yaml"), "method": "fedmr", "seed": "0:3"}, results)
    for experiment in next(found):
        survives = "mu1=1" in experiment.name or experiment.name.endswith("s0")
        ga = 0.59 if "mu1=1" in experiment.name else 0.6
        results[experiment.name] = dict.fromkeys(MEASURES, ga) if survives else UserError("it diverged")
    assert {experiment.given["mu1"] for experiment in next(found)} == {"1"}


@pytest.mark.parametrize("best", [1, 2])
def test_later_stages_are_named_by_what_was_chosen_before(tmp_path, best):
    (tmp_path / "a.yaml").write_text(PRESET)
    results, names = {}, []
    for stage in stages({"preset": str(tmp_path / "a.yaml"), "method": "fedmr", "seed": "3"}, results):
        names.append([experiment.name for experiment in stage])
        results |= {e.name: dict.fromkeys(MEASURES, float(f"mu1={best}" in e.name)) for e in stage}
    assert names[1] == [f"fedmr-mu1={best}-mu2={mu2}-s3" for mu2 in (3, 4)]


def test_a_run_of_a_presets_grid_that_two_stages_have_is_trained_once(tmp_path, monkeypatch, capsys):
    def train(config, method, *_, **__):
        trained.append((method.mu1, method.mu2))
        config.run_dir.mkdir(parents=True)
        (config.run_dir / "config.yaml").write_text(dump(config, method))
        (config.run_dir / "metrics.jsonl").write_text('{"round": 1, "ga": null, "pa": null}\n')
        summary = dict.fromkeys(MEASURES, method.mu1) | {"method": "fedmr", "rounds": config.rounds}
        (config.run_dir / "summary.json").write_text(json.dumps(summary))
        return summary

    trained = []
    (tmp_path / "a.yaml").write_text(PRESET.replace("mu2: 0.5", "mu2: 3").replace("digits}", "digits, rounds: 1}"))
    monkeypatch.setattr(sweep_folder, "run", train)
    results = fp.sweep({"preset": tmp_path / "a.yaml", "method": "fedmr"}, folder=tmp_path / "sweep", together=1)
    assert trained == [(1, 3), (2, 3), (2, 4)]
    assert results["fedmr-mu1=2-mu2=3"] == results["fedmr-mu1=2"]
    argv = [f"--preset={tmp_path / 'a.yaml'}", "--method=fedmr", f"--sweep-dir={tmp_path / 'sweep'}", "--status"]
    assert sweep_main(argv) == 0
    assert "4 done, 0 running, 0 waiting" in capsys.readouterr().out  # of both stages
    shutil.rmtree(tmp_path / "sweep/fedmr-mu1=2-mu2=4")
    assert sweep_main(argv) == 0
    assert "3 done, 0 running, 1 waiting" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "values"), [("select_on", "test,validation"), ("select_by", "plain,balanced")])
def test_a_presets_grid_is_searched_by_one_criterion(tmp_path, name, values):
    (tmp_path / "a.yaml").write_text(PRESET)
    with pytest.raises(UserError, match=f"{name} chooses the rounds that a search compares: give one value"):
        next(stages({"preset": str(tmp_path / "a.yaml"), "validation": "0.1", name: values}, {}))


def test_a_sweep_over_the_criterion_says_in_each_row_what_chose_its_best_rounds():
    rows = [row | dict.fromkeys(MEASURES, 0.5) for row in ({"selected_on": "test"}, {"selected_on": "validation"})]
    results = dict(zip("ab", rows, strict=True))
    for names, words in (("a", ["best rounds chosen by test samples"]), ("ab", ["best by", "validation"])):
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(as_table(summarise([Experiment(name, name, {}) for name in names], results)))
        text = console.export_text()
        assert all(word in text for word in words)
        assert ("validation" in text) == (names == "ab")


def test_of_equally_good_values_of_a_grid_the_first_is_kept(tmp_path):
    (tmp_path / "a.yaml").write_text(PRESET)
    results = {}
    for stage in stages({"preset": str(tmp_path / "a.yaml"), "method": "fedmr"}, results):
        results |= {e.name: dict.fromkeys(MEASURES, 0.5) for e in stage}
    assert stage[0].given["mu1"] == "1"


def test_a_hyper_parameter_that_is_given_is_not_searched(tmp_path):
    (tmp_path / "a.yaml").write_text(PRESET)
    (stage,) = stages({"preset": str(tmp_path / "a.yaml"), "mu": "7", "method": "fedprox"}, {})
    assert [e.given for e in stage] == [{"method": "fedprox", "preset": str(tmp_path / "a.yaml"), "mu": "7"}]


def test_a_search_gives_the_option_of_one_method_to_no_other_method(tmp_path):
    (tmp_path / "a.yaml").write_text(PRESET)
    stage = next(stages({"preset": str(tmp_path / "a.yaml"), "mu1": "7"}, {}))
    options = [{name: value for name, value in experiment.given.items() if name != "preset"} for experiment in stage]
    assert options[:2] == [{"method": "fedprox", "mu": "1"}, {"method": "fedprox", "mu": "2"}]
    assert options[2:] == [{"method": "fedmr", "mu1": "7", "mu2": mu2} for mu2 in "34"]


def test_a_method_without_a_grid_is_run_once(tmp_path):
    (tmp_path / "a.yaml").write_text(PRESET)
    results, methods = {}, []
    for stage in stages({"preset": str(tmp_path / "a.yaml"), "method": "fedavg,fedmr"}, results):
        methods.append([experiment.given["method"] for experiment in stage])
        results |= {experiment.name: dict.fromkeys(MEASURES, 0.1) for experiment in stage}
    assert methods == [["fedavg", "fedmr", "fedmr"], ["fedmr", "fedmr"]]


def test_means_and_deviations_are_over_seeds():
    experiments = expand({"method": "fedavg", "seed": "0,1"})
    results = {
        experiment.name: dict.fromkeys(("ga_best", "ga_last", "pa_best", "pa_last"), accuracy)
        for experiment, accuracy in zip(experiments, (0.4, 0.6), strict=True)
    }
    (row,) = summarise(experiments, results)
    assert row["ga_best"] == pytest.approx(50)
    assert row["ga_best_std"] == pytest.approx(14.142, abs=1e-3)
    (row,) = summarise(experiments, {**results, experiments[1].name: "the loss is not finite"})
    assert (row["seeds"], row["failed"], row["ga_best_std"]) == (1, 1, None)


def test_seeds_whose_fine_tuning_diverged_are_counted():
    experiments = expand({"method": "fedavg", "seed": "0,1,2"})
    results = {experiment.name: dict.fromkeys(MEASURES, 0.5) | {"selected_on": "test"} for experiment in experiments}
    results[experiments[1].name] |= {"pa_best": None, "pa_last": None, "diverged_client": 0}
    rows = summarise(experiments, results)
    assert (rows[0]["seeds"], rows[0]["failed"], rows[0]["without_pa"]) == (3, 0, 1)
    assert str(next(as_table(rows).columns[1].cells)) == "3 (1 without PA)"


@pytest.mark.thorough
def test_a_sweep_writes_runs_as_run_py_does_and_does_not_repeat_them(tmp_path, monkeypatch, capsys):
    argv = ["--method=fedavg,solo", "--seed=0:2", *SMALL, f"--sweep-dir={tmp_path}"]
    assert sweep_main(argv) == 0
    rows = list(csv.DictReader((tmp_path / "summary.csv").read_text().splitlines()))
    assert [row["experiment"] for row in rows] == ["fedavg", "solo"]
    summary = json.loads((tmp_path / "solo-s1" / "summary.json").read_text())
    assert (summary["method"], summary["seed"]) == ("solo", 1)
    assert (tmp_path / "fedavg-s0" / "partition.png").is_file()
    table = (tmp_path / "summary.csv").read_text()

    def refuse(*_, **__):
        raise AssertionError("a finished experiment was run again")

    monkeypatch.setattr(sweep_folder, "run", refuse)
    monkeypatch.setattr(sweep_folder, "run_together", refuse)
    assert sweep_main(argv) == 0
    assert (tmp_path / "summary.csv").read_text() == table


@pytest.mark.parametrize(
    ("argument", "word"),
    [("--beta=0.1,-1", "beta"), ("--method=fedavg,fedgella", "fedgela"), ("--ew=3", "fedgela"), ("--seed=3:3", "range"),
     ("--run-dir=x", "--sweep-dir"), ("--coordinator=auto", "one process")],
)  # fmt: skip
def test_mistakes_are_reported_before_anything_runs(tmp_path, capsys, argument, word):
    assert sweep_main([argument, *SMALL, f"--sweep-dir={tmp_path / 'sweep'}"]) == 2
    error = capsys.readouterr().err
    assert word in error
    assert error.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


@pytest.mark.thorough
def test_a_failed_experiment_does_not_stop_the_others(tmp_path, capsys):
    argv = ["--method=fedavg", "--lr=0.01,1e30", "--momentum=0", *SMALL, f"--sweep-dir={tmp_path}"]
    assert sweep_main(argv) == 1
    captured = capsys.readouterr()
    assert captured.err.count("not finite") == 1
    assert "not finite" not in captured.out
    assert (tmp_path / "fedavg-lr=0.01" / "summary.json").is_file()


def table_of(folder):
    return (folder / "summary.csv").read_text()


@pytest.mark.thorough
def test_experiments_with_names_that_are_not_utf8_fail_as_others_do(tmp_path):
    weights = os.fsdecode(b"\xff.npz")
    argv = [*SMALL, "--method=fedavg,fedprox", f"--initial-weights={weights}", f"--sweep-dir={tmp_path}"]
    # Not pytest's own capture, whose text goes from process to process as UTF-8.
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(output):
        assert sweep_main(argv) == 1
        failure = failure_file(tmp_path / "fedavg")
        assert weights in failure.read_text(errors="surrogateescape")
        failure.write_bytes(b"\xff\xfe")
        assert sweep_main(argv) == 1
    assert output.getvalue().count("1 failed") == 4
    assert weights in failure.read_text(errors="surrogateescape")


def test_another_sweep_in_the_same_folder_is_refused_with_what_differs(tmp_path, capsys):
    argv = ["--method=fedavg", *SMALL, f"--sweep-dir={tmp_path}"]
    assert sweep_main(argv) == 0
    table = table_of(tmp_path)
    others = [word for word in argv if not word.startswith("--rounds=")]
    assert sweep_main([*others, "--rounds=2", "--beta=5"]) == 2
    error = capsys.readouterr().err
    assert "--beta was 0.1, not 5.0, --rounds was 1, not 2" in error
    assert error.count("\n") == 1
    assert table_of(tmp_path) == table


@pytest.mark.thorough
def test_the_default_folder_of_a_sweep_depends_on_its_grid_but_not_on_seeds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--method=fedavg", *SMALL]
    for options in (["--seed=0"], ["--seed=0,1"], ["--beta=0.3"]):
        assert sweep_main([*argv, *options]) == 0
    other_grid, first_grid = sorted(Path("runs").iterdir(), key=lambda path: len(list(path.glob("fedavg*"))))
    assert sorted(path.name for path in first_grid.glob("fedavg*")) == ["fedavg-s0", "fedavg-s1"]
    assert [path.name for path in other_grid.glob("fedavg*")] == ["fedavg"]


@pytest.mark.thorough
def test_experiments_of_another_process_are_left_to_it_until_it_dies(tmp_path, capsys):
    argv = ["--method=fedavg", "--seed=0,1", *SMALL, f"--sweep-dir={tmp_path}"]
    (tmp_path / "claims").mkdir()
    code = f"""
import sys
from pathlib import Path
from fedjax_pcdd.training.lock import Lock
Lock.take(Path({str(tmp_path / "claims/fedavg-s0.lock")!r}))
print("has it", flush=True)
sys.stdin.readline()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other_process:
        assert other_process.stdout.readline() == "has it\n"
        assert sweep_main([*argv, "--status"]) == 0
        assert f"process {other_process.pid}" in capsys.readouterr().out.replace("\n", " ")
        timer = threading.Timer(3, other_process.kill)
        timer.start()
        assert sweep_main(argv) == 0
        timer.join()
        assert other_process.poll() is not None or other_process.wait() < 0
    assert len(table_of(tmp_path).splitlines()) == 2
    assert sweep_main([*argv, "--status"]) == 0
    assert "2 done, 0 running" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_folder_of_a_sweep_alone_shows_its_progress(swept, tmp_path, capsys):
    assert sweep_main([f"--sweep-dir={swept}", "--status"]) == 0
    status = capsys.readouterr().out
    assert "1 done, 0 running" in status
    assert "1 of 1" in status
    assert "These have begun: repeat the sweep's options" in status
    assert sweep_main([f"--sweep-dir={tmp_path}", "--status"]) == 2
    assert "no experiments that have begun" in capsys.readouterr().err.replace("\n", " ")


def sweep_of_one(folder):
    """A sweep of one experiment of ten rounds, which is not started yet."""
    planned = {"one": Asked(*build({"rounds": 10}))}
    return Sweep(planned, folder, lambda name, error: None)


def run_quietly(planned_sweep):
    return planned_sweep.run(SweepBar({"one": 10}, Console(quiet=True)))


def test_the_time_left_is_that_of_the_remaining_rounds(tmp_path):
    (tmp_path / "one").mkdir()
    rows = [{"round": r, "ga": None, "pa": None, "seconds": s} for r, s in enumerate((9.0, 1.0, 2.0, 2.0), 1)]
    (tmp_path / "one/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sweep_of_one(tmp_path).standings() == [("one", "waiting", 4, 10, None, 12.0)]


def test_a_failure_is_retried_by_later_sweeps_once_and_by_concurrent_ones_never(tmp_path, monkeypatch):
    trained = []

    def diverges(config, *_, **__):
        trained.append(config.run_dir.name)
        raise UserError("it diverged.")

    monkeypatch.setattr(sweep_folder, "run", diverges)
    sweeps = [sweep_of_one(tmp_path) for _ in range(2)]
    assert [str(run_quietly(planned_sweep)["one"]) for planned_sweep in sweeps] == ["it diverged."] * 2
    assert trained == ["one"]
    sweeps = [sweep_of_one(tmp_path) for _ in range(2)]  # both know of the failure, and the first of them tries again
    assert [str(run_quietly(planned_sweep)["one"]).strip() for planned_sweep in sweeps] == ["it diverged."] * 2
    assert trained == ["one", "one"]


def test_a_failure_is_forgotten_when_its_experiment_has_succeeded(tmp_path, monkeypatch):
    results = [UserError("it diverged."), {"ga_best": 0.5}]

    def next_result(*_, **__):
        if isinstance(result := results.pop(0), UserError):
            raise result
        return result

    monkeypatch.setattr(sweep_folder, "run", next_result)
    run_quietly(sweep_of_one(tmp_path))
    assert sweep_of_one(tmp_path).standings()[0].state == "failed"
    assert run_quietly(sweep_of_one(tmp_path)) == {"one": {"ga_best": 0.5}}
    assert not failure_file(tmp_path / "one").exists()


def test_a_failed_experiment_that_is_tried_again_counts_as_running(tmp_path):
    failure_file(tmp_path / "one").parent.mkdir(parents=True)
    failure_file(tmp_path / "one").write_text("it diverged.")
    (tmp_path / "claims").mkdir(exist_ok=True)
    with Lock.take(tmp_path / "claims/one.lock", wait=0):
        assert sweep_of_one(tmp_path).standings()[0].state == "running"
    assert sweep_of_one(tmp_path).standings()[0].state == "failed"


@pytest.mark.parametrize("removed", [False, True])
def test_an_experiment_whose_folder_a_single_run_has_open_is_waited_for(tmp_path, monkeypatch, removed):
    tried, told, pauses, real_run = [], [], [], sweep_folder.run

    def run(config, *args, **options):
        tried.append(config.run_dir.name)
        return real_run(config, *args, **options)

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            outside.release()
            if removed:
                (tmp_path / "s0").rmdir()

    monkeypatch.setattr(sweep_folder, "run", run)
    monkeypatch.setattr(sweep_folder, "time", SimpleNamespace(sleep=pause))
    small = {"rounds": 1, "local_epochs": 1, "fine_tune_epochs": 0, "clients": 3, "min_samples": 1}
    planned = {f"s{seed}": Asked(*build({**small, "seed": seed})) for seed in range(2)}
    (tmp_path / "s0").mkdir()
    outside = Lock.take(tmp_path / "s0/lock")
    planned_sweep = Sweep(planned, tmp_path, lambda name, error: None, told.append)
    results = planned_sweep.run(SweepBar(dict.fromkeys(planned, 1), Console(quiet=True)), together=1)
    assert [results[name]["rounds"] for name in planned] == [1, 1]
    assert tried == ["s0", "s1", "s0"]  # while it waits nothing is prepared in vain
    assert len(pauses) == 3
    assert [sentence for sentence in told if "s0 waits: " in sentence and "is in use by" in sentence]


def test_experiments_with_validation_samples_are_not_trained_together(tmp_path, monkeypatch):
    seeds, planned = [], {str(seed): Asked(*build({"validation": 0.1, "seed": seed})) for seed in range(2)}
    monkeypatch.setattr(sweep_folder, "run", lambda config, *_, **__: seeds.append(config.seed) or {})
    monkeypatch.setattr(sweep_folder, "run_together", lambda *_: pytest.fail("they are"))
    planned_sweep = Sweep(planned, tmp_path, lambda name, error: None)
    planned_sweep.run(SweepBar(dict.fromkeys(planned, 10), Console(quiet=True)), together=2)
    assert seeds == [0, 1]


@pytest.mark.parametrize(("options", "together"), [(["--workers=2"], 3), (["--workers=2", "--together=4"], 4)])
def test_workers_are_started_once_and_train_at_most_their_share_together(tmp_path, monkeypatch, options, together):
    started = []

    def train(steps, results, folder, most, before, quiet):
        for name in ("first", "second"):  # stages of a search
            assert before(SimpleNamespace(left=dict.fromkeys(range(5))), tmp_path)
            results[name] = {}
        return tmp_path, next(iter(steps))

    monkeypatch.setattr(cli_sweep, "launch", lambda command, *_: started.append(command[-1]))
    monkeypatch.setattr(cli_sweep, "train", train)
    monkeypatch.setattr(cli_sweep, "summarise", lambda *_: [])
    monkeypatch.setattr(cli_sweep, "conclude", lambda *_, **__: 0)
    assert sweep_main(["--method=fedavg", *options]) == 0
    assert started == [f"--together={together}"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of a sweep of one finished experiment."""
    folder = tmp_path_factory.mktemp("swept") / "sweep"
    assert sweep_main(["--method=fedavg", *SMALL, f"--sweep-dir={folder}"]) == 0
    return folder


def test_a_larger_grid_keeps_the_runs_of_a_smaller_one_in_its_folder(swept, tmp_path, monkeypatch):
    folder, trained = tmp_path / "sweep", []
    shutil.copytree(swept, folder)
    grid = {word.split("=")[0].removeprefix("--").replace("-", "_"): word.split("=")[1] for word in SMALL}
    monkeypatch.setattr(sweep_folder, "run", lambda config, *_, **__: trained.append(config.run_dir.name) or {})
    monkeypatch.setattr(sweep_folder, "run_together", lambda *_: pytest.fail("there is one run to do"))
    results = fp.sweep({**grid, "method": "fedavg", "beta": [0.1, 0.5]}, folder=folder)
    assert trained == ["fedavg-beta=0.5"]
    assert results["fedavg-beta=0.1"] == json.loads((folder / "fedavg/summary.json").read_text())
    assert len(results.load("fedavg-beta=0.1").rows) == 1
    assert not (folder / "fedavg-beta=0.1").exists()


def test_a_run_of_a_smaller_grid_that_another_process_trains_is_left_to_it(swept, tmp_path, capsys):
    shutil.copytree(swept, tmp_path / "sweep")
    (tmp_path / "sweep/fedavg/summary.json").unlink()
    argv = ["--method=fedavg", *SMALL, "--beta=0.1,0.5", f"--sweep-dir={tmp_path / 'sweep'}", "--status"]
    with Lock.take(tmp_path / "sweep/claims/fedavg.lock", wait=0):
        assert sweep_main(argv) == 0
    assert "1 running, 1 waiting" in capsys.readouterr().out


def test_runs_that_are_none_of_a_grid_are_not_taken_for_its_own(swept, tmp_path):
    for name in ("a", "b", "objects", "stopped"):
        shutil.copytree(swept / "fedavg", tmp_path / name)
    (tmp_path / "b/summary.json").unlink()
    assert list(sweep_folder.runs_in(tmp_path).values()) == ["a"]
    for name in ("a", "b"):
        shutil.rmtree(tmp_path / name)
    text = (tmp_path / "stopped/config.yaml").read_text()
    (tmp_path / "stopped/config.yaml").write_text(text.replace("rounds: 1\n", "rounds: 9\n"))
    resolved = json.loads((tmp_path / "objects/resolved.json").read_text())
    (tmp_path / "objects/resolved.json").write_text(json.dumps(resolved | {"given": ["model"]}))
    assert sweep_folder.runs_in(tmp_path) == {}


@pytest.mark.parametrize("main", [sweep_main, search_main])
def test_a_folder_alone_shows_its_status_and_trains_nothing(swept, capsys, main):
    capsys.readouterr()
    assert main([f"--sweep-dir={swept}", "--status"]) == 0
    assert "1 done" in capsys.readouterr().out
    assert main([f"--sweep-dir={swept}", "--quiet"]) == 2
    assert "repeat that one, or ask for --status" in capsys.readouterr().err


@pytest.mark.parametrize(("main", "more"), [(sweep_main, ["--seed=0:2"]), (search_main, ["--lr=0.1,0.2"])])
def test_a_list_of_what_there_is_trains_nothing(tmp_path, capsys, main, more):
    assert main([*SMALL, *more, f"--sweep-dir={tmp_path / 'sweep'}", "--list-datasets"]) == 0
    assert "digits" in capsys.readouterr().out
    assert not (tmp_path / "sweep").exists()
    with pytest.raises(UserError, match="list_methods is for the command line: drop it"):
        (fp.sweep if main is sweep_main else fp.search)({"list_methods": True, "lr": [0.1, 0.2]}, folder=tmp_path / "a")


@pytest.mark.parametrize("main", [sweep_main, run_main])
def test_tracking_of_what_is_finished_is_said_to_record_nothing(swept, capsys, main):
    capsys.readouterr()
    where = [f"--sweep-dir={swept}", "--method=fedavg", *SMALL] if main is sweep_main else [f"--resume={swept}/fedavg"]
    assert main([*where, "--track=classes"]) in (0, None)
    words = "warning: --track=classes records rounds as they are trained, so nothing of a run that is finished"
    assert words in " ".join(("".join(capsys.readouterr())).split())
    assert not (swept / "fedavg/track.jsonl").exists()


def test_tracking_that_a_finished_run_has_is_not_denied(swept, tmp_path, capsys):
    shutil.copytree(swept, tmp_path / "sweep")  # config.yaml without it, as of a run that was continued with it
    (tmp_path / "sweep/fedavg/track.jsonl").write_text('{"round": 1, "classes": {}}\n')
    capsys.readouterr()
    assert sweep_main([f"--sweep-dir={tmp_path / 'sweep'}", "--method=fedavg", *SMALL, "--track=classes"]) == 0
    assert "--track" not in capsys.readouterr().err


def test_a_quiet_sweep_writes_its_table_and_shows_nothing(swept, capsys):
    (swept / "summary.csv").unlink()
    capsys.readouterr()
    assert sweep_main(["--method=fedavg", *SMALL, f"--sweep-dir={swept}", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert "fedavg" in table_of(swept)


def swept_again(swept, folder, damage):
    """Exit code of the same sweep in a copy of its folder, after `damage` to the folder of the experiment."""
    shutil.copytree(swept, folder)
    damage(folder / "fedavg")
    return sweep_main(["--method=fedavg", *SMALL, f"--sweep-dir={folder}"])


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "text"), [("summary.json", "{\n"), ("summary.json", "{}"), ("config.yaml", "{\n")])
def test_a_damaged_experiment_is_one_sentence_that_names_the_file(swept, tmp_path, capsys, name, text):
    capsys.readouterr()
    assert swept_again(swept, tmp_path / "sweep", lambda run_dir: (run_dir / name).write_text(text)) == 2
    err = capsys.readouterr().err
    assert str(tmp_path / "sweep" / "fedavg" / name) in err
    assert err.count("\n") == 1


def test_results_that_have_lost_their_config_are_refused(swept, tmp_path, capsys):
    assert swept_again(swept, tmp_path / "sweep", lambda run_dir: (run_dir / "config.yaml").unlink()) == 2
    assert "fedavg has lost its config.yaml" in capsys.readouterr().err


def test_the_folder_of_a_run_is_refused_for_a_sweep(swept, capsys):
    assert sweep_main(["--method=fedavg", *SMALL, f"--sweep-dir={swept / 'fedavg'}"]) == 2
    assert "is the folder of a run: choose another one for the sweep" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["resolved.json", "clients.jsonl", "metrics.jsonl", "mine.jsonl", "partition.npz"])
def test_files_that_a_finished_experiment_does_not_need_may_be_damaged(swept, tmp_path, monkeypatch, name):
    monkeypatch.delattr(sweep_folder, "run")  # nothing is trained
    monkeypatch.delattr(sweep_folder, "run_together")
    assert swept_again(swept, tmp_path / "sweep", lambda run_dir: (run_dir / name).write_bytes(b"")) == 0
    assert table_of(tmp_path / "sweep") == table_of(swept)


def unfinish(run_dir):
    """The folder as after a kill before the summary was written, with its other files damaged."""
    (run_dir / "summary.json").unlink()
    for name in ("resolved.json", "clients.jsonl", "metrics.jsonl", "partition.npz"):
        (run_dir / name).write_bytes(b"{\n")
    (run_dir / "mine.jsonl").write_text("not JSON\n")


def kill_at_the_start(run_dir):
    shutil.rmtree(run_dir)
    run_dir.mkdir()
    (run_dir / ".config.yaml.tmp").write_text("meth")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*clients.jsonl has lost the accuracies")
@pytest.mark.parametrize("damage", [unfinish, kill_at_the_start])
def test_a_damaged_unfinished_experiment_ends_with_the_same_numbers(swept, tmp_path, damage):
    assert swept_again(swept, tmp_path / "sweep", damage) == 0
    assert table_of(tmp_path / "sweep") == table_of(swept)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["processes", "local"])
def test_workers_divide_a_sweep_and_write_the_same_table(tmp_path, launcher):
    if launcher == "local":
        pytest.importorskip("submitit")
    argv = ["--method=fedavg,solo", "--seed=0:2", "--lr=0.01,1e30", "--momentum=0", *SMALL]
    assert sweep_main([*argv, f"--sweep-dir={tmp_path / 'one'}"]) == 1
    assert sweep_main([*argv, f"--sweep-dir={tmp_path / 'two'}", "--workers=2", f"--launcher={launcher}"]) == 1
    assert table_of(tmp_path / "one") == table_of(tmp_path / "two")
    if launcher == "processes":
        logs = [(tmp_path / f"two/claims/worker-{i}.log").read_text() for i in range(2)]
        assert all("FEDAVG" in log.upper() for log in logs)


class EndedWorker:
    """A worker that ends at once; `gpus` has the GPU that each one was given."""

    gpus: ClassVar[list[str]] = []

    def __init__(self, command, stdout, stderr, env):
        self.gpus.append(env["CUDA_VISIBLE_DEVICES"])

    def wait(self):
        """The worker has ended, with this exit code."""
        return 0

    terminate = wait


def test_workers_divide_the_cores_and_take_turns_on_the_gpus(tmp_path, monkeypatch):
    cores = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 4})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: cores.append(list(cpus)))
    monkeypatch.setattr(subprocess, "Popen", EndedWorker)
    monkeypatch.setattr(EndedWorker, "gpus", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    processes(["train"], tmp_path, 3)
    assert cores == [[0], [1, 2], [3, 4], [0, 1, 2, 3, 4]]  # in the end this process has all of them again
    assert EndedWorker.gpus == ["3", "5", "3"]


def test_slurm_gets_its_own_parameters_with_a_prefix_and_common_ones_without(tmp_path, monkeypatch):
    settings = {}

    class Executor:
        def __init__(self, folder, cluster):
            settings["cluster"] = cluster

        def update_parameters(self, **parameters):
            settings.update(parameters)

        def submit(self, function):
            return SimpleNamespace(wait=lambda: settings.update(jobs=settings.get("jobs", 0) + 1))

    helpers = SimpleNamespace(CommandFunction=lambda command, verbose: command)
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=Executor, helpers=helpers))
    arguments = ["--slurm.partition=gpu", "--slurm.timeout-min=30", "--slurm.mem-per-cpu=2G"]
    launch(["true"], tmp_path, {"launcher": "slurm", "workers": 2}, arguments)
    assert settings == {
        "cluster": "slurm", "name": "fedjax-pcdd", "slurm_partition": "gpu", "timeout_min": 30,
        "slurm_mem_per_cpu": "2G", "jobs": 2,
    }  # fmt: skip


def test_parameters_of_slurm_need_its_launcher(capsys):
    assert sweep_main(["--method=fedavg,fedprox", "--slurm.partition=gpu"]) == 2
    assert "--slurm.partition=gpu is for jobs of Slurm: add --launcher=slurm" in capsys.readouterr().err


def test_a_launcher_that_is_missing_or_refuses_is_one_sentence(tmp_path, monkeypatch):
    options = {"launcher": "slurm", "workers": 2}
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"submitit is missing: pip install 'fedjax-pcdd\[slurm\]'"):
        launch(["true"], tmp_path, options, [])
    monkeypatch.setitem(sys.modules, "submitit", RefusingSubmitit)
    with pytest.raises(UserError, match="the workers cannot be started: no partition gpu"):
        launch(["true"], tmp_path, options, ["--slurm.partition=gpu"])


def test_a_worker_that_dies_is_named(tmp_path, capsys):
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    processes([sys.executable, "-c", killed], tmp_path, 1)
    assert "Process 0 of 1 ended early (code -9)" in capsys.readouterr().err
    processes([sys.executable, "-c", "raise SystemExit(1)"], tmp_path, 1)  # of failed experiments
    assert not capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["file", "file/below", "/proc/nothing/sweep"])
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, capsys, name, workers):
    (tmp_path / "file").touch()
    argv = ["--method=fedavg", *SMALL, f"--workers={workers}", f"--sweep-dir={tmp_path / name}"]
    assert sweep_main(argv) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), "for the sweep." in err) == (1, True)


class RefusingSubmitit:
    """A stand-in for submitit whose scheduler refuses all jobs."""

    class AutoExecutor:
        def __init__(self, folder, cluster):
            raise RuntimeError("no partition gpu")


@pytest.mark.thorough
def test_python_runs_a_grid_as_a_sweep(tmp_path):
    grid = {"method": ["fedavg", "fedprox"], "mu": 0.1, "seed": range(2), "rounds": 1, "local_epochs": 1, "lanes": 1}
    grid |= {"fine_tune_epochs": 0, "clients": 3, "min_samples": 1}
    results = fp.sweep(grid, folder=tmp_path)
    assert sorted(results) == ["fedavg-s0", "fedavg-s1", "fedprox-s0", "fedprox-s1"]
    assert [(row["experiment"], row["seeds"]) for row in results.table()] == [("fedavg", 2), ("fedprox", 2)]
    assert results.load("fedprox-s1").ga[-1] == results["fedprox-s1"]["ga_last"]
    assert fp.sweep(grid, folder=tmp_path) == results
    with pytest.raises(UserError, match="did you mean 'rounds'"):
        fp.sweep({"round": 1})


@pytest.mark.thorough
@pytest.mark.parametrize("drawn", ["train_samples", "test_samples"])
def test_a_sweep_whose_seeds_draw_their_own_samples_is_accepted_again(tmp_path, drawn):
    grid = {"method": "fedavg", "seed": [0, 1], "rounds": 1, "local_epochs": 1, "lanes": 1, "model": "mlp", drawn: 60}
    grid |= {"fine_tune_epochs": 0, "partition": "iid", "clients": 3}
    first = fp.sweep(grid, folder=tmp_path)
    assert all(isinstance(result, dict) for result in first.values())
    assert fp.sweep(grid, folder=tmp_path) == first


def test_a_grid_search_selects_on_what_its_preset_says(tmp_path):
    (tmp_path / "a.yaml").write_text(PRESET.replace("digits}", "digits, validation: 0.1, select_on: validation}"))
    results, values = {}, []
    for stage in stages({"preset": str(tmp_path / "a.yaml"), "method": "fedmr"}, results):
        values.append([experiment.given["mu1"] for experiment in stage])
        results |= {
            experiment.name: dict.fromkeys(MEASURES, 0.1 * ("=2" in experiment.name))
            | {"ga_validation_best": 0.1 * ("=1" in experiment.name)}
            for experiment in stage
        }
    assert values == [["1", "2"], ["1", "1"]]


def test_a_sweep_takes_the_method_of_its_preset(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "{method: fedgela, dataset: digits, ew: 4, select_on: validation, validation: 0.1}"
    )
    grid = {"preset": str(tmp_path / "config.yaml"), "seed": "0:2"}
    assert [e.given["method"] for e in expand(grid)] == ["fedgela", "fedgela"]
    assert [e.name for stage in stages(grid, {}) for e in stage] == ["fedgela-s0", "fedgela-s1"]
    assert Search({**grid, "ew": "1,4"}, {}).on_test is False
    assert [e.given["method"] for e in expand({"preset": "fedmr/table6", "variant": "intra-only"})] == ["fedmr"]
    assert [e.given["method"] for e in expand({"method": "FedGELA,fedavg"})] == ["fedgela", "fedavg"]


def test_options_whose_values_contain_commas_take_one_value():
    with pytest.raises(UserError, match="takes one value in a sweep"):
        fp.sweep({"lr_steps": ["10", "20"]})
    with pytest.raises(UserError, match="layers takes one value in a sweep"):
        fp.sweep({"method": ["fedgela", "FedPer"], "layers": ["head", "backbone/fc2"]})
    assert values_of("loggers", "a.py:A,b.py:B") == ["a.py:A,b.py:B"]


def test_a_continued_sweep_takes_changed_options_that_affect_no_result(tmp_path):
    def sweep_with(**options):
        grid = expand({"method": "fedavg", "rounds": "1"} | options)
        planned = {experiment.name: Asked(*configure(experiment.given)) for experiment in grid}
        return Sweep(planned, tmp_path, lambda name, error: None)

    before = sweep_with(keep="3", data_dir="/old").left["fedavg"]
    (tmp_path / "fedavg").mkdir()
    (tmp_path / "fedavg" / "config.yaml").write_text(dump(before.config, before.method))
    after = sweep_with(keep="9", data_dir="/new").left["fedavg"].config
    assert (after.keep, str(after.data_dir), after.resume) == (9, "/new", tmp_path / "fedavg")


def test_an_experiment_that_was_killed_before_its_first_round_still_records_its_command(tmp_path):
    config, method = configure(dict(option[2:].replace("-", "_").split("=") for option in [*SMALL, "--method=fedavg"]))
    (tmp_path / "fedavg").mkdir()
    (tmp_path / "fedavg" / "config.yaml").write_text(dump(config, method))
    assert sweep_main(["--method=fedavg", *SMALL, f"--sweep-dir={tmp_path}"]) == 0
    resolved = json.loads((tmp_path / "fedavg" / "resolved.json").read_text())
    assert resolved["command"] == f"fedjax-pcdd run --method=fedavg {' '.join(SMALL)}"


BROKEN = """
from flax import struct
import fedjax_pcdd as fp

@struct.dataclass
class Broken(fp.Method):
    def penalty(self, variables, outputs, batch, context):
        return variables["params"]["hed"]
"""


def test_a_method_whose_code_fails_does_not_stop_the_other_experiments(tmp_path, capsys):
    (tmp_path / "broken.py").write_text(BROKEN)
    argv = [f"--method={tmp_path}/broken.py:Broken,fedavg", *SMALL, f"--sweep-dir={tmp_path / 'sweep'}"]
    assert sweep_main(argv) == 1
    assert "Traceback" in capsys.readouterr().err
    assert (tmp_path / "sweep" / "fedavg" / "summary.json").is_file()
    assert sweep_main([f"--sweep-dir={tmp_path / 'sweep'}", "--status"]) == 0
    assert "failed" in capsys.readouterr().out
