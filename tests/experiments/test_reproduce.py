"""Plans of the papers' cells and sessions that run them: one tiny plan on the built-in digits."""

import gc
import json
import signal
import time

import numpy as np
import pytest
from made_up_runs import write_run

import fedjax_pcdd
from fedjax_pcdd.analysis.spectrum import eigenvalue_variance
from fedjax_pcdd.api import runs
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.collect import read_record
from fedjax_pcdd.training import folder as records
from fedjax_pcdd.training.config import values
from reproduction import cells as cells_module
from reproduction import results
from reproduction.cells import Folders, OutOfTime, deadline
from reproduction.command import reproduce_main
from reproduction.eigenvalues import mean_variance
from reproduction.plan import check, configured, read_plan
from reproduction.session import Budget, typical_seconds, unfinished, work_off

PRESET = """
run: {dataset: digits, model: mlp, rounds: 3, lanes: 1, local_epochs: 1, fine_tune_epochs: 0, lr: 0.1}
splits: {A: {partition: pcdd, clients: 5}, B: {partition: iid, clients: 4}}
methods: {fedavg: {}, fedprox: {mu: 0.5}}
variants: {intra-only: {method: fedmr, terms: intra}}
"""
PLAN = """
settings: {train_samples: 200, test_samples: 100}
blocks:
  - {table: toy/table1, splits: [A], methods: [fedavg, fedprox], seeds: [0, 1], own: {fedprox: {mu: 0.1}}}
  - {table: toy/table1, splits: [A], methods: [fedavg], tag: fast, settings: {lr: 0.2}}
  - {table: toy/table2, splits: [A], methods: [fedavg]}
"""
EXPECTED = "split,method,variant,metric,value,std,note\nA,fedavg,,{metric},50.0,,\nA,fedprox,,{metric},60.0,,\n"


@pytest.fixture
def folders(tmp_path):
    experiments = tmp_path / "experiments"
    for folder in ("presets/toy", "expected", "reproduction"):
        (experiments / folder).mkdir(parents=True)
    for table, metric in (("table1", "ga_pct"), ("table2", "eigenvalue_variance")):
        (experiments / f"presets/toy/{table}.yaml").write_text(PRESET)
        (experiments / f"expected/toy_{table}.csv").write_text(EXPECTED.format(metric=metric))
    (experiments / "reproduction/tiny.yaml").write_text(PLAN)
    return Folders(tmp_path / "runs", tmp_path / "results", None, experiments / "presets", experiments / "expected")


def planned(folders, text=PLAN):
    (folders.presets.parent / "reproduction/tiny.yaml").write_text(text)
    return read_plan("tiny", folders.presets.parent / "reproduction", folders.presets).cells


def cells_named(folders, name, text=PLAN):
    return [cell for cell in planned(folders, text) if cell.name == name and cell.table == "toy/table1"]


def run_session(folders, cells, seconds=None):
    lines = []
    return work_off(cells, folders, Budget(seconds), lines.append), lines


def result(folders, cell):
    return json.loads(results.result_path(folders.results, cell).read_text())


# Plans


def test_all_methods_of_the_first_seed_come_first(folders):
    names = [cell.name for cell in planned(folders)[:4]]
    assert names == ["tiny-A-fedavg-s0", "tiny-A-fedprox-s0", "tiny-A-fedavg-s1", "tiny-A-fedprox-s1"]


def test_all_splits_of_the_first_seed_come_first(folders):
    cells = planned(folders, "blocks: [{table: toy/table1, methods: [fedavg], seeds: [0, 1]}]")
    assert [(c.seed, c.split) for c in cells] == [(0, "A"), (0, "B"), (1, "A"), (1, "B")]


def test_a_method_with_variants_has_no_row_without_one_by_default(folders):
    (folders.presets / "toy/table1.yaml").write_text(PRESET.replace("fedprox: {mu: 0.5}", "fedmr: {}"))
    rows = {(c.method, c.variant) for c in planned(folders, "blocks: [{table: toy/table1}]")}
    assert rows == {("fedavg", None), ("fedmr", "intra-only")}


def test_a_block_without_names_has_every_row_and_split_of_its_preset(folders):
    cells = planned(folders, "blocks: [{table: toy/table1}]")
    assert [(c.split, c.method, c.variant) for c in cells] == [
        (split, *row)
        for split in "AB"
        for row in (("fedavg", None), ("fedprox", None), ("fedmr", "intra-only"))
    ]  # fmt: skip


def test_settings_of_one_method_override_those_of_the_block_and_of_the_plan(folders):
    text = "settings: {mu: 1, lr: 1}\nblocks: [{table: toy/table1, settings: {lr: 2}, own: {fedprox: {mu: 3}}}]"
    cell = cells_named(folders, "tiny-A-fedprox-s0", text)[0]
    assert cell.settings == {"mu": "3", "lr": "2"}


def test_the_same_cell_with_other_settings_needs_a_tag(folders):
    text = "blocks: [{table: toy/table1}, {table: toy/table1, settings: {lr: 2}}]"
    with pytest.raises(UserError, match=r"block 2 of .*tiny-A-fedavg-s0 with other settings .*give it a tag"):
        planned(folders, text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("blocks: [{table: toy/table1, split: [A]}]", "unknown key 'split' in block 1 .*did you mean 'splits'"),
        ("blocks: [{splits: [A]}]", "needs a line `table"),
        ("blocks: [{table: toy/table1, splits: A}]", "'splits' of block 1 .* must be a list"),
        ("blocks: [{table: toy/table1, variants: [intra]}]", "has no variant 'intra': did you mean 'intra-only'"),
        ("cells: []", "must hold 'settings' and a list of 'blocks'"),
        ("blocks: []", "must hold 'settings' and a list of 'blocks'"),
        ("blocks: [{table: toy/table1, seeds: [0:3]}]", "'seeds' of block 1 .* takes an integer, not '0:3'"),
        ("blocks: [{table: toy/table1, seeds: [0.5]}]", "'seeds' of block 1 .* takes an integer, not '0.5'"),
        ("blocks: [{table: toy/table1, own: {fedprx: {mu: 5}}}]", "no method or variant by 'fedprx': .*'fedprox'"),
        ("blocks: [{table: toy/table1, own: [fedprox]}]", "'own' of block 1 .* must hold `method: settings` lines"),
        ("settings: {seed: 7}\nblocks: [{table: toy/table1}]", "settings of block 1 .* have 'seed', which decides"),
        ("blocks: [{table: toy/table1, own: {fedprox: {method: moon}}}]", "block 1 .* have 'method', which decides"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_sentence(folders, text, sentence):
    with pytest.raises(UserError, match=sentence):
        planned(folders, text)


def test_settings_of_single_methods_name_variants_and_methods_from_outside(folders):
    own = "own: {intra-only: {mu1: 2}, fedavg+adam: {server_lr: 1}, mine.py:Mine: {mu: 3}, moon: {mu: 1}}"
    cells = cells_named(folders, "tiny-A-fedmr-intra-only-s0", f"blocks: [{{table: toy/table1, {own}}}]")
    assert cells[0].settings == {"mu1": "2"}


def test_a_split_that_is_a_number_is_named(folders):
    with pytest.raises(UserError, match=r"toy/table1 tiny-10-fedavg-s0: .*no split '10'"):
        check(planned(folders, "blocks: [{table: toy/table1, splits: [10], methods: [fedavg]}]"), folders.presets)


def test_a_cell_that_cannot_run_is_named_before_anything_runs(folders):
    with pytest.raises(UserError, match=r"toy/table1 tiny-C-fedavg-s0: .*no split 'C'"):
        check(planned(folders, "blocks: [{table: toy/table1, splits: [C], methods: [fedavg]}]"), folders.presets)


# Sessions


@pytest.mark.thorough
def test_a_finished_cell_has_a_result_and_is_not_run_again(folders, monkeypatch):
    cells = cells_named(folders, "tiny-A-fedavg-s0")
    assert run_session(folders, cells)[0] == (1, 0, False)
    cell_result = result(folders, cells[0])
    assert cell_result["status"] == "finished"
    assert cell_result["metrics"] == {"ga_pct": pytest.approx(100 * cell_result["ga_best"], abs=0.01)}
    assert len(cell_result["ga"]) == 3
    assert max(cell_result["ga"]) == cell_result["ga_best"]
    assert cell_result["command"].startswith("python experiments/run.py --preset=toy/table1 --split=A --method=fedavg ")
    monkeypatch.setattr(runs, "run", lambda *_, **__: pytest.fail("run again"))
    assert run_session(folders, cells)[0] == (0, 0, False)


@pytest.mark.thorough
def test_an_interrupted_cell_continues_and_ends_with_the_same_numbers(folders, monkeypatch, tmp_path):
    cells = cells_named(folders, "tiny-A-fedavg-s0")
    append, stop = records.RunFolder.append, {"at": 2}

    def append_or_stop(self, row, name=records.METRICS):
        append(self, row, name)
        if row["round"] == stop["at"]:
            stop["at"] = None
            raise OutOfTime

    monkeypatch.setattr(records.RunFolder, "append", append_or_stop)
    assert run_session(folders, cells)[0] == (0, 0, True)
    assert unfinished(cells, folders) == cells
    assert run_session(folders, cells)[0] == (1, 0, False)
    uninterrupted = folders._replace(runs=tmp_path / "other", results=tmp_path / "whole")
    run_session(uninterrupted, cells)
    assert result(folders, cells[0])["ga"] == result(uninterrupted, cells[0])["ga"]


@pytest.mark.thorough
def test_a_diverging_cell_is_recorded_as_failed_and_not_run_again(folders):
    text = "blocks: [{table: toy/table1, splits: [A], methods: [fedavg], settings: {lr: 1.0e30}}]"
    cells = cells_named(folders, "tiny-A-fedavg-s0", text)
    assert run_session(folders, cells)[0] == (1, 0, False)
    cell_result = result(folders, cells[0])
    assert cell_result["status"] == "failed"
    assert "is not finite" in cell_result["sentence"]
    assert str(folders.runs) not in cell_result["sentence"]
    assert unfinished(cells, folders) == []


@pytest.mark.thorough
def test_a_full_disk_ends_the_session_and_fails_no_cell(folders, monkeypatch):
    def run_on_a_full_disk(*_, **__):
        raise UserError("no space left on the disk") from OSError("no space")

    monkeypatch.setattr(runs, "run", run_on_a_full_disk)
    cells = cells_named(folders, "tiny-A-fedavg-s0")
    with pytest.raises(UserError, match="no space left"):
        run_session(folders, cells)
    assert unfinished(cells, folders) == cells


def test_a_result_without_a_version_is_of_an_older_one():
    assert results.is_current({"version": fedjax_pcdd.__version__})
    assert not results.is_current({})


def test_a_result_has_the_seconds_of_training_and_evaluation_and_a_place_for_each_round(folders, tmp_path):
    folder, cell = write_run(tmp_path / "run"), cells_named(folders, "tiny-A-fedavg-s0")[0]
    rows = [{"round": r, "ga": None, "pa": None, "seconds": 2.0} for r in (1, 2, 3)]
    rows[2] |= {"ga": 0.5, "pa": 0.5, "eval_seconds": 0.5}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = results.finished(cell, read_record(folder), folders.expected)
    assert (result["seconds"], result["ga"]) == (6.5, [None, None, 0.5])


def test_cells_with_different_seeds_share_no_run(folders):
    first, second = (cells_named(folders, f"tiny-A-fedavg-s{seed}")[0] for seed in (0, 1))
    options = [values(*configured(cell, folders.presets)) for cell in (first, second)]
    earlier_results = [results.failed(first, options[0], "it diverged.")]
    assert results.repeated(first, options[0], earlier_results)
    assert results.repeated(second, options[1], earlier_results) is None


@pytest.mark.thorough
def test_cells_with_the_same_options_share_one_run(folders, monkeypatch):
    text = "blocks: [{table: toy/table1, splits: [A], methods: [fedavg]}, {table: toy/table3, splits: [A]}]"
    (folders.presets / "toy/table3.yaml").write_text(PRESET.split("methods:")[0] + "methods: {fedavg: {}}")
    first, second = planned(folders, text)
    run_session(folders, [first])
    monkeypatch.setattr(runs, "run", lambda *_, **__: pytest.fail("run again"))
    run_session(folders, [second])
    shared_result = result(folders, second)
    assert (shared_result["table"], shared_result["same_run_as"]) == ("toy/table3", "toy/table1 A")
    assert shared_result["ga"] == result(folders, first)["ga"]


@pytest.mark.thorough
def test_results_of_another_version_are_replaced_on_request(folders, tmp_path):
    first, other = cells_named(folders, "tiny-A-fedavg-s0")[0], cells_named(folders, "tiny-A-fedprox-s0")[0]
    run_session(folders, [first])
    path = results.result_path(folders.results, first)
    original = json.loads(path.read_text())
    assert original["version"] == fedjax_pcdd.__version__
    path.write_text(json.dumps({**original, "version": "0.0.1", "ga_best": -1.0}))
    assert run_session(folders, [first])[0] == (0, 0, False)
    current_only = folders._replace(current=True, runs=tmp_path / "runs of this version")
    assert unfinished([first, other], current_only) == [first, other]
    assert run_session(current_only, [first])[0] == (1, 0, False)
    assert result(folders, first)["ga_best"] == original["ga_best"]
    assert unfinished([first], current_only) == []


@pytest.mark.thorough
def test_runs_of_another_version_give_no_results_of_this_one(folders, monkeypatch):
    cell = cells_named(folders, "tiny-A-fedavg-s0")[0]
    run_session(folders, [cell])
    path = results.result_path(folders.results, cell)
    assert json.loads(path.read_text())["commit"]
    monkeypatch.setattr(results, "__version__", "9.9")
    monkeypatch.setattr("reproduction.cells.__version__", "9.9")
    with pytest.raises(UserError, match=r"holds a run of version .*: remove it"):
        run_session(folders._replace(current=True), [cell])
    path.unlink()
    run_session(folders, [cell])
    assert json.loads(path.read_text())["version"] == fedjax_pcdd.__version__  # that which ran it


def test_cells_whose_data_is_missing_are_skipped_and_stay_unfinished(folders):
    text = "blocks: [{table: toy/table1, splits: [A], methods: [fedavg, fedprox], settings: {dataset: cifar10}}]"
    cells = planned(folders._replace(data=folders.runs), text)
    outcome, lines = run_session(folders._replace(data=folders.runs), cells)
    assert outcome == (0, 2, False)
    assert len(lines) == 1
    assert unfinished(cells, folders) == list(cells)


def test_the_variance_of_eigenvalues_is_a_mean_over_batches():
    features = np.random.default_rng(0).normal(size=(300, 4))
    batch_variances = [eigenvalue_variance(batch)[1] for batch in (features[:128], features[128:256])]
    assert mean_variance(features) == pytest.approx(np.mean(batch_variances))


@pytest.mark.thorough
def test_a_table_of_eigenvalues_gets_them_from_the_last_checkpoint(folders):
    cells = [cell for cell in planned(folders) if cell.table == "toy/table2"]
    run_session(folders, cells)
    assert result(folders, cells[0])["metrics"]["eigenvalue_variance"] > 0


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--page", "--claims"], "--page and --claims ask for different things: choose one."),
        (["--list", "--status"], "--status and --list ask for different things: choose one."),
        (["--dry-run", "--page"], "--page and --dry-run ask for different things: choose one."),
        (["--claims", "--scale=cpu"], "--scale chooses cells, and --claims is of all results: leave it out."),
        (["--coverage", "--claim=above"], "--claim chooses cells, and --coverage is of all results: leave it out."),
        (["--budget-minutes=-1"], "--budget-minutes must be above 0"),
        (["--page", "--results-dir=nowhere"], "there is no folder nowhere: name that of the results."),
    ],
)
def test_options_that_would_be_ignored_are_refused(capsys, argv, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reproduce_main(tmp_path, argv) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# Time


def test_the_deadline_interrupts_and_restores_the_signal_handler():
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OutOfTime), deadline(0.05):
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_sigterm_interrupts_as_the_deadline_does():
    with pytest.raises(OutOfTime), deadline(None):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM])
def test_a_signal_during_garbage_collection_interrupts_after_it(number):
    def callback(phase, info):
        if phase == "stop":
            signal.raise_signal(number)
            collected.append(phase)

    def collect_and_wait():
        gc.collect()
        time.sleep(5)

    collected = []
    gc.callbacks.append(callback)
    try:
        with pytest.raises(OutOfTime), deadline(None):
            collect_and_wait()
    finally:
        gc.callbacks.remove(callback)
    assert collected


@pytest.mark.parametrize(
    ("typical", "allowed"), [(None, True), (30.0, True), (50.0, False), (90.0, False), (110.0, True)]
)
def test_a_cell_starts_if_it_fits_the_time_left_or_exceeds_the_whole_budget(typical, allowed):
    now = iter([0.0, *[60.0] * 5])
    assert Budget(100.0, clock=lambda: next(now)).allows(typical) is allowed


def test_the_typical_time_is_that_of_the_same_method_if_it_has_results(folders):
    cell = planned(folders)[1]
    earlier_results = [
        {"scale": "tiny", "table": "toy/table1", "method": method, "seconds": seconds}
        for method, seconds in (("fedavg", 10.0), ("fedavg", 20.0), ("fedprox", 90.0))
    ]
    assert typical_seconds(cell, earlier_results) == 90.0
    assert typical_seconds(cell, earlier_results[:2]) == 10.0


# Command line


@pytest.mark.thorough
def test_the_command_line_runs_cells_lists_them_and_prints_those_left(folders, capsys):
    experiments = folders.presets.parent
    flags = [f"--runs-dir={folders.runs}", f"--results-dir={folders.results}", "--scale=tiny"]
    assert reproduce_main(experiments, [*flags, "--only=toy/table1/tiny-A-fedavg-s0"], folders.presets.parent) == 0
    assert "1 cells done, 0 left" in capsys.readouterr().out
    assert reproduce_main(experiments, [*flags, "--list"], experiments) == 0
    assert "finished toy/table1 tiny-A-fedavg-s0" in capsys.readouterr().out
    assert reproduce_main(experiments, [*flags, "--dry-run"], experiments) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(planned(folders)) - 1


def test_selecting_table_1_does_not_select_table_11(folders, capsys):
    experiments = folders.presets.parent
    (folders.presets / "toy/table11.yaml").write_text(PRESET)
    (experiments / "reproduction/tiny.yaml").write_text(PLAN + "  - {table: toy/table11, splits: [A]}\n")
    flags = [f"--runs-dir={folders.runs}", f"--results-dir={folders.results}", "--scale=tiny", "--list"]
    listed = []
    for only in ("toy/table1", "toy/table11", "toy"):
        assert reproduce_main(experiments, [*flags, f"--only={only}"], experiments) == 0
        listed.append({line.split()[1] for line in capsys.readouterr().out.splitlines()[:-1]})
    assert listed == [{"toy/table1"}, {"toy/table11"}, {"toy/table1", "toy/table11", "toy/table2"}]


@pytest.mark.parametrize(
    "flags", [["--only=fccl"], ["--scale=none"], ["--budget=1"], ["--budget-minutes=soon"], ["--budget-minutes=nan"]]
)
def test_mistakes_give_one_sentence_and_exit_code_2(folders, capsys, flags):
    experiments = folders.presets.parent
    assert reproduce_main(experiments, ["--scale=tiny", *flags], experiments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.thorough
def test_a_result_does_not_contain_the_data_folder(folders):
    data = folders.runs.parent / "data"
    data.mkdir()
    cells = cells_named(folders, "tiny-A-fedavg-s0")
    run_session(folders._replace(data=data), cells)
    assert str(folders.runs.parent) not in results.result_path(folders.results, cells[0]).read_text()


@pytest.mark.thorough
def test_compiled_programs_of_a_cell_are_cleared(folders, monkeypatch):
    cleared = []
    monkeypatch.setattr(cells_module.jax, "clear_caches", lambda: cleared.append(True))
    monkeypatch.setattr(runs, "run", lambda *_, **__: (_ for _ in ()).throw(UserError("no.")))
    run_session(folders, cells_named(folders, "tiny-A-fedavg-s0"))
    assert cleared


def test_results_older_than_an_option_are_shared_as_if_run_with_its_default(folders):
    cell = cells_named(folders, "tiny-A-fedavg-s0")[0]
    options = values(*configured(cell, folders.presets))
    earlier_result = results.failed(cell, options, "no.")
    del earlier_result["decisive"]["train_samples"], earlier_result["decisive"]["doubled"]
    assert results.repeated(cell, options, [earlier_result]) is None
    assert results.repeated(cell, options | {"train_samples": None}, [earlier_result]) is not None
