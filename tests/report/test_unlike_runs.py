"""Runs that are not of one experiment, or whose numbers are less comparable than they look."""

import json

import pytest
from made_up_runs import in_preset, write_experiments, write_run

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.collect import collect, short
from fedjax_pcdd.report.compare import compare
from fedjax_pcdd.report.contents import OWN_MODELS, own_table, paper_tables, pivot
from fedjax_pcdd.report.expected import read_expected
from fedjax_pcdd.report.grouping import Cells, group
from fedjax_pcdd.report.targets import BEST, reached
from fedjax_pcdd.training.protocols import IN_WORDS


def inputs(data="a", model=None, method=None, pipeline=None, version="0.2.0"):
    """What resolved.json records of these inputs."""
    objects = {"model": model, "method": method}
    versions = {"fedjax-pcdd": version}
    return {"inputs": {"data set": data, "pipeline": pipeline, "objects": objects, "versions": versions}}


def grouped(folder):
    """The groups of the runs in a folder: title, and of each experiment its label and seeds."""
    groups = group(collect([folder]), Cells(folder))
    return [(g.title, [(entry.label, [run.seed for run in entry.runs]) for entry in g.entries]) for g in groups]


def remarks_and_marks(folder):
    """The remarks of the only group's table, and the marks of its first column."""
    (runs,) = group(collect([folder]), Cells(folder))
    table = own_table(runs)
    return table.remarks, [row.cells[0].rank for row in table.rows]


def summarise(folder, **entries):
    """Add entries to a run's summary, and drop the rounds that it then has not."""
    file = folder / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    if "rounds" in entries:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[: entries["rounds"]]))


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (inputs("a"), inputs("b"), "data set"),
        (inputs(pipeline="Pipeline(mean=(0.5,))"), inputs(), "pipeline"),
        (inputs(method="m1"), inputs(method="m2"), "method object"),
    ],
)
@pytest.mark.parametrize("seeds", [(0, 1), (0, 0)])
def test_seeds_of_other_inputs_are_other_experiments(tmp_path, first, second, name, seeds):
    write_run(tmp_path / "x", seed=seeds[0], origin=first)
    write_run(tmp_path / "y", seed=seeds[1], origin=second)
    ((_, ((one, seeds_of_one), (other, seeds_of_other))),) = grouped(tmp_path)
    assert [seeds_of_one, seeds_of_other] == [[seeds[0]], [seeds[1]]]
    assert all(label.startswith(f"fedavg ({name}=") for label in (one, other))
    if seeds[0] != seeds[1]:
        with pytest.raises(UserError, match="no pair"):
            compare(collect([tmp_path]))


def test_a_model_of_ones_own_is_not_the_default_one(tmp_path):
    write_run(tmp_path / "x", seed=0, origin=inputs(model="net"))
    write_run(tmp_path / "y", seed=0, origin=inputs())
    assert [title.split(" · ")[-1] for title, _ in grouped(tmp_path)] == ["model of one's own", "default model"]


def test_inputs_that_are_the_same_or_not_recorded_tell_no_runs_apart(tmp_path):
    for seed, origin in enumerate((inputs("a"), {}, inputs("a", version="0.2.0"))):
        write_run(tmp_path / str(seed), seed=seed, origin=origin)
    assert grouped(tmp_path)[0][1] == [("fedavg", [0, 1, 2])]


def test_samples_that_are_drawn_by_the_seed_tell_no_runs_apart(tmp_path):
    for seed, digest in enumerate("ab"):
        write_run(tmp_path / str(seed), seed=seed, origin=inputs(digest), train_samples=500)
    assert grouped(tmp_path)[0][1] == [("fedavg", [0, 1])]


def test_runs_of_a_preset_on_other_samples_are_told_apart(tmp_path):
    folder = write_experiments(tmp_path)
    for seed, digest in enumerate("aab"):
        run = in_preset(tmp_path / f"runs/{seed}", "A", seed=seed)
        file = run / "resolved.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | inputs(digest)))
    (split,) = group(collect([tmp_path / "runs"]), Cells(folder / "presets"))
    names = {digest: f"data set={short(digest)}" for digest in "ab"}
    assert [(e.names[2], len(e.runs)) for e in split.entries] == [(names["a"], 2), (names["b"], 1)]


def test_runs_that_a_callback_ended_are_named_and_not_marked(tmp_path):
    for name, method, ga in (("a", "fedavg", 0.5), ("b", "fedprox", 0.6)):
        write_run(tmp_path / name, ga, method=method)
    remarks, marks = remarks_and_marks(tmp_path)
    assert "ended" not in remarks
    assert sum(map(bool, marks)) > 0
    summarise(tmp_path / "b", rounds=2)
    remarks, marks = remarks_and_marks(tmp_path)
    assert f"Callbacks ended runs early: {tmp_path / 'b'} after 2 of 3 rounds." in remarks
    assert not any(marks)
    assert any("ended runs early" in note for note in compare(collect([tmp_path]))[1])


def test_a_best_round_of_ga_that_tests_chose_is_said_and_not_marked(tmp_path):
    for name, method, more in (("a", "fedavg", {}), ("b", "solo", {"ga_best_selected_on": "test"})):
        write_run(tmp_path / name, method=method)
        summarise(tmp_path / name, selected_on="validation", **more)
    remarks, marks = remarks_and_marks(tmp_path)
    assert "validation samples (fedavg); validation samples, those of GA by test samples (solo)" in remarks
    assert not any(marks)


def test_ga_best_of_the_clients_own_models_is_not_marked_beside_that_of_a_global_model(tmp_path):
    folder = write_experiments(tmp_path)
    for method, ga in (("fedavg", 0.5), ("moon", 0.4)):
        in_preset(tmp_path / "runs" / method, "A", method, ga=ga)
    runs = collect([tmp_path / "runs"])
    (tables, pivoted) = ga_tables(runs, folder), pivot(runs, "method", None, "ga_best")
    assert all(marks(table) == [1, 2] and OWN_MODELS not in table.remarks for table in [*tables, pivoted])
    summarise(tmp_path / "runs/moon", ga_best_mean=0.4)
    runs = collect([tmp_path / "runs"])
    (tables, pivoted) = ga_tables(runs, folder), pivot(runs, "method", None, "ga_best")
    assert all(marks(table) == [0, 0] and OWN_MODELS in table.remarks for table in [*tables, pivoted])
    assert marks(tables[0], "GA last") == [1, 2]


def ga_tables(runs, folder):
    """The own table of the only group of runs, and that of GA beside the paper's."""
    groups = group(runs, Cells(folder / "presets"))
    paper, *_ = paper_tables("toy/table1", groups, read_expected(folder / "expected", "toy/table1"))
    return own_table(groups[0]), paper


def marks(table, heading=None):
    """The marks of the rows of FedAvg and MOON in a column, by default the first."""
    rows = {row.label: row for row in table.rows}
    column = 0 if heading is None else table.headings.index(heading) - 1
    return [rows[name].cells[column].rank for name in ("fedavg", "moon")]


@pytest.mark.parametrize(
    ("protocols", "ranks"), [(("best_mean", "best_epoch"), [0, 0]), (("best_mean", "best_mean"), [1, 2])]
)
def test_pa_of_another_protocol_is_not_marked(tmp_path, protocols, ranks):
    for (method, pa), protocol in zip((("fedavg", 0.5), ("moon", 0.4)), protocols, strict=True):
        write_run(tmp_path / method, 0.3, pa, method=method, pa_protocol="best_mean")
        summarise(tmp_path / method, pa_protocol="during training" + IN_WORDS[protocol])
    (runs,) = group(collect([tmp_path]), Cells(tmp_path))
    assert marks(own_table(runs), "PA in training best") == ranks


def test_several_versions_and_devices_are_said(tmp_path):
    for name, method, version in (("a", "fedavg", "0.1.0"), ("b", "fedprox", "0.2.0")):
        write_run(tmp_path / name, method=method, origin=inputs(version=version))
        summarise(tmp_path / name, device={"0.1.0": "cpu", "0.2.0": "H200"}[version])
    sentences = ("Runs are of several versions of this library: 0.1.0, 0.2.0.", "several kinds of device: H200, cpu.")
    remarks, _ = remarks_and_marks(tmp_path)
    notes = " ".join(compare(collect([tmp_path]))[1])
    assert all(sentence in text for sentence in sentences for text in (remarks, notes))


def test_the_target_is_fedavgs_in_the_round_that_was_chosen(tmp_path):
    write_run(tmp_path / "a", ga=0.6)
    write_run(tmp_path / "b", ga=0.6, method="moon")
    summarise(tmp_path / "a", ga_best_round=2, selected_on="validation")
    reference, run = collect([tmp_path])
    assert reached(run, [reference], BEST) == (2, 1.5)


def test_the_rounds_of_a_fedavg_that_ended_early_are_those_that_it_ran(tmp_path):
    write_run(tmp_path / "a", ga=0.6, rounds=6)
    write_run(tmp_path / "b", ga=0.6, rounds=6, method="moon")
    summarise(tmp_path / "a", rounds=3)
    reference, run = collect([tmp_path])
    assert reached(reference, [reference], BEST) == (3, 1.0)
    assert reached(run, [reference], BEST) == (3, 1.0)


@pytest.mark.parametrize("damage", [{"inputs": 3}, {"inputs": {"objects": 3}}, {"inputs": [1]}])
def test_a_damaged_record_of_inputs_is_named(tmp_path, damage):
    write_run(tmp_path / "a", origin=damage)
    with pytest.raises(UserError, match=r"resolved\.json is damaged"):
        collect([tmp_path])


def test_runs_of_python_have_no_command_that_would_train_something_else(tmp_path):
    from fedjax_pcdd.cli.report import command_of

    write_run(tmp_path / "a", origin={"given": ["model", "federation"]})
    assert command_of(collect([tmp_path])[0]) == "in Python, with its own model, federation"
