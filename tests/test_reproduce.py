"""Plans of the papers' cells and sessions that work them off: one tiny plan on the built-in digits."""

import json
import signal
import time

import pytest

from fedjax_pcdd.api import runs
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training import folder as records
from fedjax_pcdd.training.config import values
from reproduction import cells as cells_module
from reproduction import results
from reproduction.cells import Folders, OutOfTime, deadline
from reproduction.command import reproduce_main
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
def place(tmp_path):
    experiments = tmp_path / "experiments"
    for folder in ("presets/toy", "expected", "reproduction"):
        (experiments / folder).mkdir(parents=True)
    for table, metric in (("table1", "ga_pct"), ("table2", "eigenvalue_variance")):
        (experiments / f"presets/toy/{table}.yaml").write_text(PRESET)
        (experiments / f"expected/toy_{table}.csv").write_text(EXPECTED.format(metric=metric))
    (experiments / "reproduction/tiny.yaml").write_text(PLAN)
    return Folders(tmp_path / "runs", tmp_path / "results", experiments, None)


def planned(place, text=PLAN):
    (place.experiments / "reproduction/tiny.yaml").write_text(text)
    return read_plan("tiny", place.experiments / "reproduction", place.presets).cells


def one(place, name, text=PLAN):
    return [cell for cell in planned(place, text) if cell.name == name and cell.table == "toy/table1"]


def work(place, chosen, seconds=None):
    said = []
    return work_off(chosen, place, Budget(seconds), said.append), said


def result(place, cell):
    return json.loads(results.result_path(place.results, cell).read_text())


# Plans


def test_cells_run_all_methods_of_the_first_seed_first(place):
    names = [cell.name for cell in planned(place)[:4]]
    assert names == ["tiny-A-fedavg-s0", "tiny-A-fedprox-s0", "tiny-A-fedavg-s1", "tiny-A-fedprox-s1"]


def test_a_block_without_names_has_every_row_and_split_of_its_preset(place):
    found = planned(place, "blocks: [{table: toy/table1}]")
    assert [(c.split, c.method, c.variant) for c in found] == [
        (split, *row)
        for split in "AB"
        for row in (("fedavg", None), ("fedprox", None), ("fedmr", "intra-only"))
    ]  # fmt: skip


def test_settings_of_one_method_win_over_the_blocks_and_the_plans(place):
    text = "settings: {mu: 1, lr: 1}\nblocks: [{table: toy/table1, settings: {lr: 2}, own: {fedprox: {mu: 3}}}]"
    cell = one(place, "tiny-A-fedprox-s0", text)[0]
    assert cell.settings == {"mu": "3", "lr": "2"}


def test_the_same_cell_with_other_settings_needs_a_tag(place):
    text = "blocks: [{table: toy/table1}, {table: toy/table1, settings: {lr: 2}}]"
    with pytest.raises(UserError, match=r"block 2 of .*tiny-A-fedavg-s0 with other settings .*give it a tag"):
        planned(place, text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("blocks: [{table: toy/table1, split: [A]}]", "unknown key 'split' in block 1 .*did you mean 'splits'"),
        ("blocks: [{splits: [A]}]", "needs a line `table"),
        ("blocks: [{table: toy/table1, splits: A}]", "'splits' of block 1 .* must be a list"),
        ("blocks: [{table: toy/table1, variants: [intra]}]", "has no variant 'intra': did you mean 'intra-only'"),
        ("cells: []", "must hold 'settings' and a list of 'blocks'"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_sentence(place, text, sentence):
    with pytest.raises(UserError, match=sentence):
        planned(place, text)


def test_a_cell_that_cannot_run_is_named_before_anything_runs(place):
    with pytest.raises(UserError, match=r"toy/table1 tiny-C-fedavg-s0: .*no split 'C'"):
        check(planned(place, "blocks: [{table: toy/table1, splits: [C], methods: [fedavg]}]"), place.presets)


# Sessions


def test_a_finished_cell_has_its_numbers_and_is_not_run_again(place, monkeypatch):
    chosen = one(place, "tiny-A-fedavg-s0")
    assert work(place, chosen)[0] == (1, 0, False)
    found = result(place, chosen[0])
    assert found["status"] == "finished"
    assert found["metrics"] == {"ga_pct": pytest.approx(100 * found["ga_best"], abs=0.01)}
    assert len(found["ga"]) == 3
    assert max(found["ga"]) == found["ga_best"]
    assert found["command"].startswith("python experiments/run.py --preset=toy/table1 --split=A --method=fedavg ")
    monkeypatch.setattr(runs, "run", lambda *_, **__: pytest.fail("run again"))
    assert work(place, chosen)[0] == (0, 0, False)


def test_an_interrupted_cell_continues_and_ends_with_the_same_numbers(place, monkeypatch, tmp_path):
    chosen = one(place, "tiny-A-fedavg-s0")
    append, stop = records.RunFolder.append, {"at": 2}

    def interrupted(self, row, name=records.METRICS):
        append(self, row, name)
        if row["round"] == stop["at"]:
            stop["at"] = None
            raise OutOfTime

    monkeypatch.setattr(records.RunFolder, "append", interrupted)
    assert work(place, chosen)[0] == (0, 0, True)
    assert unfinished(chosen, place) == chosen
    assert work(place, chosen)[0] == (1, 0, False)
    whole = place._replace(runs=tmp_path / "other", results=tmp_path / "whole")
    work(whole, chosen)
    assert result(place, chosen[0])["ga"] == result(whole, chosen[0])["ga"]


def test_a_diverging_cell_is_failed_and_not_tried_again(place):
    text = "blocks: [{table: toy/table1, splits: [A], methods: [fedavg], settings: {lr: 1.0e30}}]"
    chosen = one(place, "tiny-A-fedavg-s0", text)
    assert work(place, chosen)[0] == (1, 0, False)
    found = result(place, chosen[0])
    assert found["status"] == "failed"
    assert "is not finite" in found["sentence"]
    assert str(place.runs) not in found["sentence"]
    assert unfinished(chosen, place) == []


def test_a_full_disk_ends_the_session_and_fails_no_cell(place, monkeypatch):
    def full(*_, **__):
        raise UserError("no space left on the disk") from OSError("no space")

    monkeypatch.setattr(runs, "run", full)
    chosen = one(place, "tiny-A-fedavg-s0")
    with pytest.raises(UserError, match="no space left"):
        work(place, chosen)
    assert unfinished(chosen, place) == chosen


def test_cells_with_the_same_options_share_one_run(place, monkeypatch):
    text = "blocks: [{table: toy/table1, splits: [A], methods: [fedavg]}, {table: toy/table3, splits: [A]}]"
    (place.presets / "toy/table3.yaml").write_text(PRESET.split("methods:")[0] + "methods: {fedavg: {}}")
    first, second = planned(place, text)
    work(place, [first])
    monkeypatch.setattr(runs, "run", lambda *_, **__: pytest.fail("run again"))
    work(place, [second])
    found = result(place, second)
    assert (found["table"], found["same_run_as"]) == ("toy/table3", "toy/table1 A")
    assert found["ga"] == result(place, first)["ga"]


def test_cells_without_their_data_wait_for_it(place):
    text = "blocks: [{table: toy/table1, splits: [A], methods: [fedavg, fedprox], settings: {dataset: cifar10}}]"
    chosen = planned(place._replace(data=place.runs), text)
    outcome, said = work(place._replace(data=place.runs), chosen)
    assert outcome == (0, 2, False)
    assert len(said) == 1
    assert unfinished(chosen, place) == list(chosen)


def test_a_table_of_eigenvalues_gets_them_from_the_last_checkpoint(place):
    chosen = [cell for cell in planned(place) if cell.table == "toy/table2"]
    work(place, chosen)
    assert result(place, chosen[0])["metrics"]["eigenvalue_variance"] > 0


# Time


def test_the_deadline_interrupts_and_gives_the_signals_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OutOfTime), deadline(0.05):
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_request_to_end_interrupts_as_the_deadline_does():
    with pytest.raises(OutOfTime), deadline(None):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("typical", "allowed"), [(None, True), (30.0, True), (50.0, False), (90.0, False), (110.0, True)]
)
def test_a_cell_starts_if_it_fits_or_if_no_budget_could_hold_it(typical, allowed):
    now = iter([0.0, *[60.0] * 5])
    assert Budget(100.0, clock=lambda: next(now)).allows(typical) is allowed


def test_the_typical_time_is_that_of_the_same_method_where_there_is_one(place):
    cell = planned(place)[1]
    known = [
        {"scale": "tiny", "table": "toy/table1", "method": method, "seconds": seconds}
        for method, seconds in (("fedavg", 10.0), ("fedavg", 20.0), ("fedprox", 90.0))
    ]
    assert typical_seconds(cell, known) == 90.0
    assert typical_seconds(cell, known[:2]) == 15.0


# Command line


def test_the_command_line_lists_runs_and_prints_what_is_left(place, capsys):
    flags = [f"--runs-dir={place.runs}", f"--results-dir={place.results}", "--scale=tiny"]
    assert reproduce_main(place.experiments, [*flags, "--only=toy/table1/tiny-A-fedavg-s0"]) == 0
    assert "1 cells done, 0 left" in capsys.readouterr().out
    assert reproduce_main(place.experiments, [*flags, "--list"]) == 0
    assert "finished toy/table1 tiny-A-fedavg-s0" in capsys.readouterr().out
    assert reproduce_main(place.experiments, [*flags, "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(planned(place)) - 1


@pytest.mark.parametrize("flags", [["--only=fccl"], ["--scale=none"], ["--budget=1"], ["--budget-minutes=soon"]])
def test_mistakes_are_one_sentence_and_exit_code_2(place, capsys, flags):
    assert reproduce_main(place.experiments, ["--scale=tiny", *flags]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_data_folder_is_no_part_of_a_result(place):
    data = place.runs.parent / "data"
    data.mkdir()
    chosen = one(place, "tiny-A-fedavg-s0")
    work(place._replace(data=data), chosen)
    assert str(place.runs.parent) not in results.result_path(place.results, chosen[0]).read_text()


def test_compiled_programs_of_a_cell_are_let_go(place, monkeypatch):
    cleared = []
    monkeypatch.setattr(cells_module.jax, "clear_caches", lambda: cleared.append(True))
    monkeypatch.setattr(runs, "run", lambda *_, **__: (_ for _ in ()).throw(UserError("no.")))
    work(place, one(place, "tiny-A-fedavg-s0"))
    assert cleared


def test_results_older_than_an_option_are_shared_as_if_they_had_its_default(place):
    cell = one(place, "tiny-A-fedavg-s0")[0]
    options = values(*configured(cell, place.presets))
    known = results.failed(cell, options, "no.")
    del known["decisive"]["train_samples"], known["decisive"]["doubled"]
    assert results.repeated(cell, options, [known]) is None
    assert results.repeated(cell, options | {"train_samples": None}, [known]) is not None
