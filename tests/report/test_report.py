"""Which runs a report takes, how it groups them, and its numbers beside the papers'; nothing is trained."""

import csv
import io
import json
import os
import re
import sys

import numpy as np
import pytest
from commands import parse
from made_up_runs import in_preset, write_experiments, write_run

from fedjax_pcdd.cli.report import command_of, compare_main, report_main
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report import plots
from fedjax_pcdd.report.collect import collect, read_record
from fedjax_pcdd.report.contents import HELD_OUT, own_table, paper_tables, pivot
from fedjax_pcdd.report.expected import EXPECTED, FLATTERED, measured, read_expected
from fedjax_pcdd.report.grouping import Cells, Group, group
from fedjax_pcdd.report.plots import band
from fedjax_pcdd.report.tables import Cell, Column, Row, Table, aside, comma_separated, over_seeds, ranked, shown
from fedjax_pcdd.report.targets import BEST, LAST, reached
from fedjax_pcdd.training.config import dump
from fedjax_pcdd.training.presets import PRESETS, read_preset
from fedjax_pcdd.training.protocols import IN_WORDS


@pytest.fixture
def experiments(tmp_path):
    return write_experiments(tmp_path / "experiments")


@pytest.fixture
def cells(experiments):
    return Cells(experiments / "presets")


def toy_tables(runs, cells, experiments, preset=None):
    """The tables of the toy preset beside its paper's: accuracies, and rounds to the target."""
    return paper_tables("toy/table1", group(runs, cells, preset), read_expected(experiments / "expected", "toy/table1"))


def row(table, label):
    (matching,) = [candidate for candidate in table.rows if candidate.label == label]
    return dict(zip((column.heading for column in table.columns), matching.cells, strict=True))


def test_runs_below_a_folder_are_found_once(tmp_path):
    write_run(tmp_path / "runs/deep/a")
    write_run(tmp_path / "runs/b", seed=1)
    assert [run.path.name for run in collect([tmp_path / "runs/b", tmp_path / "runs"])] == ["b", "a"]


def test_runs_that_are_links_are_found_and_circular_links_end(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/link").symlink_to(write_run(tmp_path / "elsewhere"))
    (tmp_path / "runs/round").symlink_to(tmp_path / "runs")
    assert [run.path.name for run in collect([tmp_path / "runs"])] == ["link"]


def test_a_run_beside_a_link_to_it_counts_once(tmp_path):
    (tmp_path / "link").symlink_to(write_run(tmp_path / "run"))
    assert len(collect([tmp_path / "link", tmp_path / "run"])) == 1


def test_a_folder_without_a_run_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"holds no run .*: name the folder of a run\.$"):
        collect([tmp_path])


def test_a_configuration_of_another_program_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("theme: dark\n")
    with pytest.raises(UserError, match=r"is not the configuration of a run: leave .* out\.$"):
        collect([tmp_path])


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        collect([tmp_path / "nothing"])


def test_a_broken_summary_is_a_user_error(tmp_path):
    write_run(tmp_path / "a")
    (tmp_path / "a/summary.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        collect([tmp_path])


def test_options_missing_from_an_older_run_have_their_defaults(tmp_path):
    folder = write_run(tmp_path / "a")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub(r"momentum: .*\n", "", text))
    assert read_record(folder).config["momentum"] == 0.9


@pytest.mark.parametrize(
    "argv",
    [
        ["--method=fedprox", "--mu=0.5", "--no-retry", "--cohort=2", "--grad-clip=none", "--rounds=3"],
        ["--method=fccl", "--task=digits_domains", "--local-epochs=2"],
    ],
)
def test_a_command_that_was_not_recorded_is_rebuilt_from_the_options(tmp_path, argv):
    (tmp_path / "config.yaml").write_text(dump(*parse(argv)))
    command = command_of(read_record(tmp_path)).split()
    assert dump(*parse(command[2:])) == dump(*parse(argv))


def test_mean_and_sample_deviation_are_over_seeds(tmp_path, cells):
    for seed, ga in enumerate((0.5, 0.6, 0.7)):
        write_run(tmp_path / f"runs/{seed}", ga, seed=seed)
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    cell = row(own_table(run_group), "fedavg")["GA best"]
    assert (cell.mean, cell.std, cell.n) == (pytest.approx(60.0), pytest.approx(10.0), 3)


def test_one_seed_has_no_deviation(tmp_path, cells):
    (run_group,) = group(collect([write_run(tmp_path / "a")]), cells)
    assert row(own_table(run_group), "fedavg")["GA best"].std is None


def test_best_and_second_best_are_marked_and_ties_share_a_rank(tmp_path, cells):
    for method, ga in {"fedavg": 0.5, "fedprox": 0.7, "fedrs": 0.6, "fedlc": 0.6}.items():
        write_run(tmp_path / f"runs/{method}", ga, method=method)
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    ranks = {entry.label: entry.cells[0].rank for entry in own_table(run_group).rows}
    assert ranks == {"fedavg": 0, "fedprox": 1, "fedrs": 2, "fedlc": 2}


def test_means_equal_up_to_float_rounding_share_a_rank():
    cells = [Cell(100 * 0.57), Cell(57.0), Cell(50.0)]
    table = ranked(Table("", (Column("GA", best=1),), tuple(Row(str(cell.mean), (cell,)) for cell in cells)))
    assert [row.cells[0].rank for row in table.rows] == [1, 1, 2]


def test_numbers_that_are_not_finite_are_left_out_of_means():
    assert over_seeds([1.0, float("nan"), 3.0, float("-inf")]) == over_seeds([1.0, 3.0])


def test_nothing_is_marked_in_a_table_of_one_experiment(tmp_path, cells):
    (run_group,) = group(collect([write_run(tmp_path / "a")]), cells)
    assert {cell.rank for cell in own_table(run_group).rows[0].cells} == {0}


def test_means_over_different_numbers_of_seeds_are_not_ranked():
    rows = tuple(Row(str(n), (Cell(mean, 1.0, n),)) for mean, n in ((81.0, 3), (87.0, 1), (80.0, 3)))
    columns = (Column("GA", best=1),)
    assert [row.cells[0].rank for row in ranked(Table("", columns, rows)).rows] == [0, 0, 0]
    assert [row.cells[0].rank for row in ranked(Table("", columns, rows[::2])).rows] == [1, 2]


def test_seconds_are_not_ranked(tmp_path, cells):
    write_run(tmp_path / "runs/a")
    write_run(tmp_path / "runs/b", method="fedprox")
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    table = own_table(run_group)
    assert {entry.cells[table.headings.index("s a round") - 1].rank for entry in table.rows} == {0}


def add_to_summary(folder, **entries):
    """Add entries to a made-up run's summary."""
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_the_smallest_spread_and_the_largest_worst_tenth_rank_best(tmp_path, cells):
    for method, spread in {"fedavg": 0.3, "moon": 0.1}.items():
        add_to_summary(write_run(tmp_path / method, method=method), pa_std=spread, pa_worst10=spread)
    runs = collect([tmp_path])
    (run_group,) = group(runs, cells)
    for heading, best in (("PA std over clients", "moon"), ("PA of the worst tenth", "fedavg")):
        assert row(own_table(run_group), best)[heading].rank == 1
    table = pivot(runs, "method", None, "pa_std")
    assert [line.cells[0].rank for line in table.rows] == [2, 1]
    assert table.title == "PA std over clients, %, by method"


def test_runs_with_other_hyperparameters_are_not_averaged(tmp_path, cells):
    write_run(tmp_path / "runs/a", method="fedprox", mu=0.1)
    write_run(tmp_path / "runs/b", method="fedprox", mu=1.0, seed=1)
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    assert [entry.label for entry in run_group.entries] == ["fedprox (mu=0.1)", "fedprox (mu=1.0)"]


def test_methods_that_ran_for_different_rounds_are_labelled_with_them(tmp_path, cells):
    write_run(tmp_path / "runs/a")
    write_run(tmp_path / "runs/b", method="moon", rounds=5)
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    assert [entry.label for entry in run_group.entries] == ["fedavg (rounds=3)", "moon (rounds=5)"]


def test_options_that_change_no_result_do_not_split_an_experiment(tmp_path, cells):
    write_run(tmp_path / "runs/a", lanes=2, keep=5)
    write_run(tmp_path / "runs/b", seed=1, device="cpu", track_every=2)
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    assert [run.seed for run in run_group.entries[0].runs] == [0, 1]


def test_runs_without_a_preset_are_grouped_by_data_partition_and_model(tmp_path, cells):
    write_run(tmp_path / "runs/a")
    write_run(tmp_path / "runs/b", partition="pcdd")
    write_run(tmp_path / "runs/c", model="mcmahan_cnn")
    titles = [run_group.title for run_group in group(collect([tmp_path / "runs"]), cells)]
    descriptions = ["dirichlet0.1 · default model", "P10C2 · default model", "dirichlet0.1 · mcmahan_cnn"]
    assert titles == [f"digits · {description}" for description in descriptions]


def test_a_repeated_seed_counts_once(tmp_path, cells):
    write_run(tmp_path / "runs/a", 0.5)
    write_run(tmp_path / "runs/b", 0.5)
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    assert (len(run_group.entries[0].runs), len(run_group.entries[0].repeated)) == (1, 1)


def test_a_cell_has_the_papers_number_and_the_difference_to_it(tmp_path, cells, experiments):
    in_preset(tmp_path / "runs/a", "A", ga=0.52)
    in_preset(tmp_path / "runs/b", "A", ga=0.54, seed=1)
    table, _ = toy_tables(collect([tmp_path / "runs"]), cells, experiments)
    cell = row(table, "fedavg")["A"]
    assert (cell.mean, cell.beside.mean, cell.beside.std) == (pytest.approx(53.0), 50.0, 0.5)
    assert cell.difference == pytest.approx(3.0)


def test_methods_of_the_paper_without_a_run_keep_their_number(tmp_path, cells, experiments):
    table, _ = toy_tables(collect([in_preset(tmp_path / "a", "A")]), cells, experiments)
    cell = row(table, "moon")["A"]
    assert (cell.mean, cell.beside.mean, cell.difference) == (None, 55.0, None)


def test_the_csv_has_paper_numbers_without_a_run_but_no_empty_cells(tmp_path, cells, experiments):
    tables = toy_tables(collect([in_preset(tmp_path / "a", "A")]), cells, experiments)[:1]
    lines = [*csv.DictReader(io.StringIO(comma_separated(tables)))]
    assert {"fedavg": ("50.0", "50.0"), "moon": ("", "55.0")}.items() <= {
        line["method"]: (line["mean"], line["paper"]) for line in lines
    }.items()
    assert all(line["mean"] or line["paper"] for line in lines)


def test_splits_without_a_run_are_no_columns(tmp_path, cells, experiments):
    table, _ = toy_tables(collect([in_preset(tmp_path / "a", "A")]), cells, experiments)
    assert table.headings == ["method", "A"]


def test_a_variant_has_the_papers_number_of_its_name(tmp_path, cells, experiments):
    in_preset(tmp_path / "runs/a", "A", "fedrs", "weak", ga=0.72)
    in_preset(tmp_path / "runs/b", "A", "fedrs", "strong", ga=0.3)
    table, _ = toy_tables(collect([tmp_path / "runs"]), cells, experiments)
    assert row(table, "fedrs weak")["A"].difference == pytest.approx(2.0)
    assert row(table, "fedrs strong")["A"].beside is None


def test_a_smaller_run_is_labelled_with_what_differs_from_the_preset(tmp_path, cells, experiments):
    in_preset(tmp_path / "runs/a", "A", rounds=2)
    in_preset(tmp_path / "runs/b", "A")
    table, _ = toy_tables(collect([tmp_path / "runs"]), cells, experiments)
    assert row(table, "fedavg (rounds=2)")["A"].beside == row(table, "fedavg")["A"].beside == Cell(50.0, 0.5)


def test_what_differs_from_the_preset_in_all_runs_is_stated_once(tmp_path, cells, experiments):
    table, _ = toy_tables(collect([in_preset(tmp_path / "a", "A", rounds=2)]), cells, experiments)
    assert "fedavg" in [table_row.label for table_row in table.rows]
    assert table.remarks.startswith("Not as the preset in all runs: rounds=2. ")


def test_a_mean_over_splits_takes_the_seeds_that_all_splits_have(tmp_path, cells, experiments):
    in_preset(tmp_path / "runs/a", "A", ga=0.5)
    in_preset(tmp_path / "runs/a1", "A", ga=0.9, seed=1)
    in_preset(tmp_path / "runs/b", "B", ga=0.4)
    table, _ = toy_tables(collect([tmp_path / "runs"]), cells, experiments)
    cell = row(table, "fedavg")["avg"]
    assert (cell.mean, cell.n, cell.difference) == (pytest.approx(45.0), 1, pytest.approx(1.0))


def test_a_mean_over_splits_needs_the_number_of_each_split(tmp_path, cells, experiments):
    in_preset(tmp_path / "runs/a", "A", ga=0.5)
    add_to_summary(in_preset(tmp_path / "runs/b", "B"), ga_best=None)
    table, _ = toy_tables(collect([tmp_path / "runs"]), cells, experiments)
    assert (row(table, "fedavg")["A"].n, row(table, "fedavg")["avg"].n) == (1, 0)


def write_accuracies(folder, *shares):
    """Give a made-up run these GAs, from its first round on."""
    rows = [{"round": r, "ga": ga} for r, ga in enumerate(shares, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))


def test_rounds_to_fedavgs_best_and_speed_up_are_paired_by_seed(tmp_path, cells, experiments):
    for seed, best in enumerate((0.5, 0.8)):
        write_accuracies(in_preset(tmp_path / f"runs/a{seed}", "A", seed=seed), best, 0.1, best)
        write_accuracies(
            in_preset(tmp_path / f"runs/b{seed}", "A", "fedprox", seed=seed),
            *(best - 0.1, best, 0.9, 0.9)[seed : seed + 3],
        )
    _, table = toy_tables(collect([tmp_path / "runs"]), cells, experiments)
    fedprox = row(table, "fedprox")
    assert (fedprox["A rounds"].mean, fedprox["A rounds"].n) == (1.5, 2)
    assert fedprox["A speed-up"].mean == (3 / 2 + 3 / 1) / 2


def test_fedavg_itself_counts_all_its_rounds(tmp_path, cells, experiments):
    in_preset(tmp_path / "runs/a", "A")
    _, table = toy_tables(collect([tmp_path / "runs"]), cells, experiments)
    fedavg = row(table, "fedavg")
    assert (fedavg["A rounds"].mean, fedavg["A rounds"].beside.mean, fedavg["A speed-up"].mean) == (3.0, 2.0, 1.0)


def test_a_target_that_one_seed_missed_has_no_mean(tmp_path, cells):
    for seed, last in enumerate((0.6, 0.4)):
        write_accuracies(write_run(tmp_path / f"runs/a{seed}", seed=seed), 0.1, 0.2, 0.5)
        write_accuracies(write_run(tmp_path / f"runs/b{seed}", seed=seed, method="moon"), 0.1, 0.2, last)
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    cell = row(own_table(run_group), "moon")["rounds to target"]
    assert (cell.mean, cell.n, cell.note) == (None, 2, "not reached by 1 of them")
    assert shown(cell) == "/"


def test_a_run_without_fedavg_of_its_seed_has_no_rounds_to_a_target(tmp_path, cells):
    write_run(tmp_path / "runs/a")
    write_run(tmp_path / "runs/b", method="moon", seed=1)
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    assert shown(row(own_table(run_group), "moon")["rounds to target"]) == "–"


def test_the_target_is_of_the_fedavg_with_the_same_departures_from_the_preset(tmp_path, cells, experiments):
    preset = experiments / "presets/toy/table1.yaml"
    preset.write_text(preset.read_text().replace("{mu: 0.5}", "{mu: 0.5, lr: 0.05}"))
    for name, best, options in (("a", 0.2, {}), ("b", 0.4, {"lr": 0.05})):
        write_accuracies(in_preset(tmp_path / "runs" / name, "A", rounds=2, **options), best, best)
    write_accuracies(in_preset(tmp_path / "runs/c", "A", "fedprox", rounds=2, lr=0.05), 0.3, 0.5)
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    assert row(own_table(run_group), "fedprox (rounds=2)")["rounds to target"].mean == 1.0


def test_fedavg_with_more_rounds_gives_no_target(tmp_path, cells):
    write_run(tmp_path / "a", rounds=6)
    write_run(tmp_path / "b", method="moon")
    (run_group,) = group(collect([tmp_path]), cells)
    assert shown(row(own_table(run_group), "moon (rounds=3)")["rounds to target"]) == "–"


def test_fedavg_on_other_data_with_the_same_indices_gives_no_target(tmp_path):
    write_run(tmp_path / "a", dataset="fmnist")
    write_run(tmp_path / "b", method="moon")
    reference, run = collect([tmp_path])
    assert reached(run, [reference], BEST) is None


def test_the_fewest_rounds_are_the_best(tmp_path, cells):
    write_accuracies(write_run(tmp_path / "runs/a"), 0.1, 0.2, 0.5)
    write_accuracies(write_run(tmp_path / "runs/b", method="moon"), 0.5, 0.5, 0.5)
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    assert row(own_table(run_group), "moon")["rounds to target"].rank == 1


def test_the_target_is_that_of_the_fedavg_with_the_same_run_options(tmp_path, cells):
    for lr, ga in ((0.01, 0.1), (0.05, 0.5)):
        write_run(tmp_path / f"runs/a{lr}", ga, lr=lr)
        write_run(tmp_path / f"runs/b{lr}", 0.6, method="fedprox", mu=lr, lr=0.05)
    write_run(tmp_path / "runs/c", 0.6, method="moon", lr=0.1)
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    cells_by_method = {table_row.label.split()[0]: table_row.cells for table_row in own_table(run_group).rows}
    column = own_table(run_group).headings.index("rounds to target") - 1
    assert (shown(cells_by_method["fedprox"][column]), shown(cells_by_method["moon"][column])) == ("3.00", "–")


@pytest.mark.parametrize(("rule", "rounds"), [(BEST, 3), (LAST, 2)])
def test_targets_are_fedavgs_best_for_fedmr_and_above_its_last_for_fedrl(tmp_path, rule, rounds):
    write_accuracies(write_run(tmp_path / "a", shift=1), 0.5, 0.6, 0.55)
    write_accuracies(write_run(tmp_path / "b", method="moon", shift=1), 0.55, 0.58, 0.6)
    reference, run = collect([tmp_path])
    assert reached(run, [reference], rule) == (rounds, 3 / rounds)


def test_papers_numbers_for_targets_that_were_not_reached_are_strokes():
    folder = EXPECTED
    (table,) = paper_tables(
        "fedrl/table2", [Group("", "fedrl/table2", "cifar10-dir0.5", ())], read_expected(folder, "fedrl/table2")
    )
    assert aside(row(table, "scaffold")["cifar10-dir0.5 rounds"]) == "/"
    assert aside(row(table, "fedrl")["cifar10-dir0.5 speed-up"]) == "1.50"


def write_run_with_rule(folder, split, method="fedavg", *, pa, last, rule="best_epoch"):
    """Write a made-up run of the preset whose PA is chosen by a rule, with PA after the last epoch beside it."""
    run = in_preset(folder, split, method, pa_protocol=rule)
    protocol = "during training" + IN_WORDS[rule or "last"]
    summary = {
        "method": method,
        "rounds": 3,
        "ga_best": None,
        "pa_best": pa,
        "pa_last_best": last,
        "pa_protocol": protocol,
    }
    (run / "summary.json").write_text(json.dumps(summary))
    return run


@pytest.fixture
def pa_table(tmp_path, cells, experiments):
    """Makes the table of PA beside the paper's, from the runs written so far."""
    with open(experiments / "expected/toy_table1.csv", "a") as file:
        file.write("A,fedavg,,pa_pct,81.0,,\nA,fedprox,,pa_pct,84.0,,\n")

    def table():
        tables = toy_tables(collect([tmp_path / "runs"]), cells, experiments)
        (pa_only,) = [table for table in tables if table.columns[0].metric == "pa_pct"]
        return pa_only

    return table


def test_pa_chosen_on_tests_is_compared_and_pa_after_the_last_epoch_added(tmp_path, pa_table):
    write_run_with_rule(tmp_path / "runs/a", "A", pa=0.9, last=0.8, rule="best_mean")
    write_run_with_rule(tmp_path / "runs/b", "A", "fedprox", pa=0.88, last=0.85)
    table = pa_table()
    assert table.headings == ["method", "A", "A last"]
    fedavg, fedprox = (row(table, f"{name} (pa_protocol={rule})")
                       for name, rule in (("fedavg", "best_mean"), ("fedprox", "best_epoch")))  # fmt: skip
    assert (fedavg["A"].mean, fedavg["A"].difference) == (pytest.approx(90.0), pytest.approx(9.0))
    assert (fedavg["A last"].mean, fedavg["A last"].beside) == (pytest.approx(80.0), None)
    assert [fedprox[name].rank for name in ("A", "A last")] == [0, 1]  # only the latter is of one protocol


@pytest.mark.parametrize("rule", ["last", "received", None])
def test_pa_that_is_not_chosen_on_tests_has_one_column(tmp_path, pa_table, rule):
    write_run_with_rule(tmp_path / "runs/a", "A", pa=0.8, last=0.8, rule=rule)
    assert pa_table().headings == ["method", "A"]


def test_remarks_state_the_rule_of_pa_and_which_methods_it_is_of(tmp_path, cells):
    write_run_with_rule(tmp_path / "runs/a", "A", pa=0.9, last=0.8, rule="best_mean")
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    mean_rule, own_rule = (f"during training{IN_WORDS[rule]}" for rule in ("best_mean", "best_epoch"))
    assert f"PA: {mean_rule}." in own_table(run_group).remarks
    write_run_with_rule(tmp_path / "runs/b", "A", "fedprox", pa=0.9, last=0.8)
    (both_methods,) = group(collect([tmp_path / "runs"]), cells)
    assert re.search(rf"PA: {mean_rule} \(fedavg.*\); {own_rule} \(fedprox.*\)\.", own_table(both_methods).remarks)


def write_spectra(folder, *variances):
    """Give a made-up run a track.jsonl with these variances of eigenvalues, from its first round on."""
    rows = [{"round": r, "spectrum": {"global": {"variance": v}, "local": None}} for r, v in enumerate(variances, 1)]
    (folder / "track.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))


@pytest.fixture
def eigenvalues(tmp_path, cells, experiments):
    """Makes the column of eigenvalues beside the paper's, cells by label, from the runs written so far."""
    with open(experiments / "expected/toy_table1.csv", "a") as file:
        file.write("A,fedavg,,eigenvalue_variance,1201,,\n")

    def column():
        table = toy_tables(collect([tmp_path / "runs"]), cells, experiments)[-1]
        assert [column.metric for column in table.columns] == ["eigenvalue_variance"]
        return {line.label: line.cells[0] for line in table.rows}

    return column


def test_eigenvalues_are_those_tracked_after_the_last_round(tmp_path, eigenvalues):
    for seed, last in enumerate((10.0, 14.0)):
        write_spectra(in_preset(tmp_path / f"runs/a{seed}", "A", seed=seed), 99.0, 50.0, last)
    cell = eigenvalues()["fedavg"]
    assert (cell.mean, cell.n, cell.beside.mean) == (12.0, 2, 1201.0)


def test_the_smallest_variance_of_eigenvalues_ranks_best(tmp_path, eigenvalues):
    write_spectra(in_preset(tmp_path / "runs/a", "A"), 1.0, 2.0, 10.0)
    write_spectra(in_preset(tmp_path / "runs/b", "A", "fedprox"), 3.0, 2.0, 5.0)
    assert (eigenvalues()["fedprox"].rank, eigenvalues()["fedavg"].rank) == (1, 2)


@pytest.mark.parametrize(
    "line",
    [
        None,
        {"round": 2, "spectrum": {"global": {"variance": 5.0}, "local": None}},
        {"round": 3, "angles": {"global": {"existing": 5.0}, "local": None}},
        {"round": 3, "spectrum": {"global": None, "local": {"variance": 5.0}}},
    ],
    ids=["untracked", "before-the-last-round", "something-else", "no-global-model"],
)
def test_a_run_whose_last_global_spectrum_is_not_known_has_no_eigenvalues(tmp_path, eigenvalues, line):
    folder = in_preset(tmp_path / "runs/a", "A")
    if line is not None:
        (folder / "track.jsonl").write_text(json.dumps(line) + "\n")
    assert eigenvalues()["fedavg"].mean is None


def test_a_damaged_track_jsonl_is_a_user_error(tmp_path, eigenvalues):
    folder = in_preset(tmp_path / "runs/a", "A")
    (folder / "track.jsonl").write_text("{]\n")
    with pytest.raises(UserError, match="is damaged in line 1"):
        eigenvalues()


def test_files_beside_run_folders_are_ignored_but_refused_if_named_alone(tmp_path):
    write_run(tmp_path / "runs/a")
    (tmp_path / "runs/summary.csv").write_text("")
    assert len(collect(sorted((tmp_path / "runs").iterdir()))) == 1
    with pytest.raises(UserError, match="is a file: name the folder of a run"):
        collect([tmp_path / "runs/summary.csv"])


def test_unrecorded_runs_join_a_named_preset_by_their_options(tmp_path, cells, experiments):
    folder = tmp_path / "runs/a"
    in_preset(folder, "B", "fedprox")
    (folder / "resolved.json").unlink()
    write_run(tmp_path / "runs/other", beta=0.7)
    (run_group,) = group(collect([tmp_path / "runs"]), cells, "toy/table1")
    assert (run_group.split, [entry.label for entry in run_group.entries]) == ("B", ["fedprox"])


def test_an_unrecorded_run_joins_only_the_variant_whose_options_it_has(tmp_path, cells):
    for name, rounds in (("a", 3), ("b", 2)):
        in_preset(tmp_path / name, "A", "fedrs", "strong", rounds=rounds)
        (tmp_path / name / "resolved.json").unlink()
    (run_group,) = group(collect([tmp_path]), cells, "toy/table1")
    assert [(entry.label, len(entry.runs)) for entry in run_group.entries] == [("fedrs strong", 1)]


def test_the_expected_tables_of_the_papers_can_all_be_read():
    folder = EXPECTED
    presets = [path.stem.replace("_", "/", 1) for path in folder.glob("*.csv") if not path.stem.endswith("_counts")]
    assert "fedmr/table1" in presets
    assert all(read_expected(folder, preset) for preset in presets)


def test_expected_numbers_are_of_a_split_of_the_preset_or_a_mean_over_splits():
    paths = list(PRESETS.rglob("*.yaml"))
    assert paths
    for path in paths:
        name = str(path.relative_to(PRESETS).with_suffix(""))
        splits = read_preset(name).splits
        for expected in read_expected(EXPECTED, name):
            assert expected.split in splits or expected.splits or not splits, f"{name}: {expected.split}"
            assert splits.keys() >= set(expected.splits), f"{name}: {expected.note}"


def test_a_mean_over_domains_is_a_column_of_its_own():
    domains = Group("", "fccl/table1", "digits", ())
    table = paper_tables("fccl/table1", [domains], read_expected(EXPECTED, "fccl/table1"))[0]
    assert aside(row(table, "fccl")["digits mean"]) == "33.51"


def test_accuracies_of_a_task_are_those_of_its_domains_in_the_last_round(tmp_path):
    folder = write_run(tmp_path / "a", method="fccl", task="digits_domains")
    add_to_summary(folder, domains=["mnist", "usps"], intra=[0.75, 0.5], inter=[0.25, 0.125])
    rows = [{"round": r, "ga": None, "intra_top1": r / 4, "inter_top5": r / 8} for r in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ("intra_top1_pct:usps", "inter_top1_pct:usps", "intra_top1_pct:mean", "inter_top5_pct:mean")
    assert [measured(read_record(folder), name) for name in names] == [50.0, 12.5, 75.0, 37.5]
    assert measured(read_record(folder), "intra_top5_pct:usps") is None  # the summary has top-1 alone


def test_a_printed_mean_over_names_that_are_no_splits_stands_alone(experiments):
    with open(experiments / "expected/toy_table1.csv", "a") as file:
        file.write("mean,fedavg,,ga_pct,44.0,,mean of A D\n")
    expected = read_expected(experiments / "expected", "toy/table1")[-1]
    assert (expected.split, expected.splits) == ("mean", ())


def test_the_band_is_the_sample_deviation_drawn_in_percent(tmp_path, cells, monkeypatch):
    for seed, ga in enumerate((0.3, 0.6)):
        write_run(tmp_path / str(seed), ga, seed=seed)
    runs, drawn = collect([tmp_path]), []
    monkeypatch.setattr(plots, "curve", lambda axes, x, y, *, deviation, **style: drawn.append((y[-1], deviation[-1])))
    plots.curves(group(runs, cells)[0], "ga")
    assert drawn == [(pytest.approx(45.0), pytest.approx(np.std([30.0, 60.0], ddof=1)))]


def test_the_band_is_the_deviation_at_the_rounds_that_all_seeds_have(tmp_path):
    runs = [read_record(write_run(tmp_path / "a", 0.3)), read_record(write_run(tmp_path / "b", 0.6, rounds=6))]
    rounds, mean, deviation = band(runs, "ga")
    assert rounds.tolist() == band(runs[::-1], "ga")[0].tolist() == [1, 2, 3]
    np.testing.assert_allclose(mean, [0.1, 0.2, 0.3])
    assert deviation is not None
    np.testing.assert_allclose(deviation, 0, atol=1e-12)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "name at least one folder of runs, as runs/."),
        (["x", "--outptu=y"], "there is no option --outptu: did you mean '--output'?"),
        (["nowhere"], "there is no folder nowhere: name the folder of a run, or one that holds runs."),
        (["RUNS", "--metric=ga_last"], "--metric needs --rows, as --rows=method."),
        (["RUNS", "--preset=toy/table2"], "there is no preset 'toy/table2': did you mean 'toy/table1'?"),
        (["RUNS", "--preset=toy/table1"], "none of the 1 runs is a finished one of toy/table1: leave --preset out"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path, experiments, capsys, argv, sentence):
    runs = str(write_run(tmp_path / "runs/a", beta=0.7))
    assert report_main([runs if word == "RUNS" else word for word in argv], experiments) == 2
    error = capsys.readouterr().err
    assert error.startswith(sentence)
    assert error.count("\n") == 1


@pytest.mark.thorough
def test_an_output_folder_that_cannot_be_written_is_one_sentence(tmp_path, experiments, capsys):
    (tmp_path / "file").write_text("")
    assert report_main([str(write_run(tmp_path / "a")), f"--output={tmp_path / 'file/report'}"], experiments) == 2
    assert capsys.readouterr().err.endswith("(Not a directory): choose another --output.\n")


@pytest.mark.thorough
def test_a_folder_whose_name_is_not_utf8_is_in_the_report(tmp_path, experiments, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    for name, finished in ((b"bad\xff", True), (b"other\xff", False)):
        write_run(tmp_path / "runs" / os.fsdecode(name), seed=int(finished), finished=finished)
    assert report_main([str(tmp_path / "runs"), f"--output={tmp_path / 'out'}"], experiments) == 0
    assert b"bad\xff" in (tmp_path / "out/report.md").read_bytes()
    assert not list((tmp_path / "out").glob(".*"))


def test_an_invalid_value_of_an_option_is_one_sentence(capsys):
    assert compare_main(["runs", "--confidence=x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("main", [compare_main, report_main])
def test_help_lists_the_options(capsys, main):
    assert main(["--help"]) == 0
    assert "folders of runs" in capsys.readouterr().out


def test_a_run_records_the_cell_and_the_command(tmp_path, monkeypatch):
    from fedjax_pcdd.api import runs
    from fedjax_pcdd.cli.run import main

    recorded = {}
    monkeypatch.setattr(runs, "run", lambda config, method, origin, **_: recorded.update(origin) or {})
    assert main(["--method=fedavg", f"--run-dir={tmp_path / 'a b'}"]) == 0
    assert recorded == {
        "preset": None, "split": None, "variant": None,
        "command": f"fedjax-pcdd run --method=fedavg '--run-dir={tmp_path}/a b'",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["resolved.json", "clients.jsonl", "summary.json", "metrics.jsonl", "config.yaml"])
def test_a_run_that_cannot_be_read_is_left_out_and_named(tmp_path, capsys, name):
    write_run(tmp_path / "good")
    write_run(tmp_path / "bad")
    (tmp_path / "bad" / name).write_text("{\n")
    assert [record.path.name for record in collect([tmp_path])] == ["good"]
    assert f"left out: {tmp_path / 'bad' / name} " in capsys.readouterr().err


@pytest.mark.thorough
def test_a_custom_table_counts_the_newest_run_of_a_seed(tmp_path, experiments, capsys):
    for number, ga in enumerate((0.2, 0.8)):
        folder = write_run(tmp_path / "runs" / str(number), ga=ga, method="fedavg")
        for file in folder.iterdir():
            os.utime(file, (1000 + number, 1000 + number))
    out = tmp_path / "out"
    argv = [str(tmp_path / "runs"), "--rows=method", "--metric=ga_best", f"--output={out}"]
    assert report_main(argv, experiments) == 0
    table = (out / "report.md").read_text().split("### ")[1]
    assert "80.00" in table
    assert "50.00" not in table


@pytest.mark.thorough
def test_a_custom_table_comes_first_in_every_output(tmp_path, experiments, capsys):
    for method in ("fedavg", "fedprox"):
        for beta in (0.5, 0.1):
            for seed in (0, 1):
                folder = tmp_path / "runs" / f"{method}-{beta}-{seed}"
                write_run(folder, ga=0.4 + beta / 10 + seed / 10, method=method, beta=beta, seed=seed)
    out = tmp_path / "out"
    argv = [str(tmp_path / "runs"), "--rows=method", "--columns=beta", "--metric=ga_best", f"--output={out}"]
    assert report_main(argv, experiments) == 0
    table = (out / "report.md").read_text().split("### ")[1]
    assert table.startswith("GA best, %, by method and beta")
    assert "| method | beta=0.1 | beta=0.5 |" in table
    assert "46.00 ± 7.07" in table
    tex = (out / "report.tex").read_text().split(r"\end{table}")[0]
    assert r"\toprule" in tex
    assert r"beta=0.1 & beta=0.5" in tex
    assert "by method and beta" in (out / "report.html").read_text()
    assert report_main([*argv, "--rows=methods"], experiments) == 2
    assert "did you mean 'method'" in capsys.readouterr().err


def test_seeds_are_not_ranked_but_methods_are(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / str(seed), ga=0.4 + seed / 10, seed=seed)
    runs = collect([tmp_path])
    assert [[cell.rank for cell in row.cells] for row in pivot(runs, "seed", "method", "ga_best").rows] == [[0], [0]]
    for run in runs:
        run.config["method"] = f"m{run.seed}"
        run.config["seed"] = 0
    assert sorted(row.cells[0].rank for row in pivot(runs, "method", None, "ga_best").rows) == [1, 2]


@pytest.mark.parametrize(
    ("selections", "note", "marks"),
    [
        (("test", "test"), FLATTERED, {1, 2}),
        (("validation",) * 2, HELD_OUT, {1, 2}),
        (
            ("test", "validation"),
            "Best round, chosen by test samples or validation samples, which differs between runs: nothing is marked.",
            {0},
        ),
        (("a later rule",) * 2, "Best round, chosen by a later rule.", {1, 2}),
        (("test, balanced accuracy",) * 2, "Best round, chosen by balanced accuracy on test samples.", {1, 2}),
    ],
)
def test_a_papers_table_says_how_best_rounds_were_chosen(tmp_path, cells, experiments, selections, note, marks):
    for method, ga, selection in zip(("fedavg", "fedrs"), (0.4, 0.5), selections, strict=True):
        add_to_summary(in_preset(tmp_path / method, "A", method), ga_best=ga, selected_on=selection)
    table, _ = toy_tables(collect([tmp_path]), cells, experiments)
    assert table.remarks == note
    assert {cell.rank for row in table.rows for cell in row.cells if cell.mean is not None} == marks


def test_nothing_is_marked_among_means_over_different_seeds(tmp_path, experiments):
    for seed, method in enumerate(("fedavg", "fedprox")):
        write_run(tmp_path / method, ga=0.4 + seed / 10, seed=seed, method=method)
    runs = collect([tmp_path])
    (run_group,) = group(runs, Cells(experiments / "presets"))
    for table in (own_table(run_group), pivot(runs, "method", None, "ga_best")):
        assert "Means are over different seeds; among such nothing is marked." in table.remarks
        assert {cell.rank for row in table.rows for cell in row.cells} == {0}


def test_a_pivot_marks_nothing_among_runs_that_differ_in_what_it_does_not_show(tmp_path):
    for method, betas in (("fedavg", (0.1, 0.5)), ("fedprox", (0.5, 0.1)), ("moon", (0.5,))):
        for beta in betas:
            write_run(tmp_path / f"{method}{beta}", ga=0.4 + beta / 10, method=method, beta=beta)
    runs = collect([tmp_path])
    unbalanced = pivot(runs, "method", None, "ga_best")
    assert unbalanced.remarks.startswith("Runs also differ in beta; among cells of unlike ones nothing is marked.")
    assert {cell.rank for row in unbalanced.rows for cell in row.cells} == {0}
    balanced = pivot([run for run in runs if run.method != "moon"], "method", None, "ga_best")
    assert [row.cells[0].rank for row in balanced.rows] == [1, 1]
    assert {row.cells[1].rank for row in pivot(runs, "method", "beta", "ga_best").rows} == {1}


def test_a_cell_of_a_pivot_is_a_mean_over_seeds_of_means_over_their_runs(tmp_path):
    for seed, gas in enumerate(((0.2, 0.4), (0.5, 0.7))):
        for beta, ga in zip((0.1, 0.5), gas, strict=True):
            write_run(tmp_path / f"{beta}-{seed}", ga=ga, beta=beta, seed=seed)
    (row,) = pivot(collect([tmp_path]), "method", None, "ga_best").rows
    assert row.cells[0].n == 2
    assert (row.cells[0].mean, row.cells[0].std) == (pytest.approx(45.0), pytest.approx(np.std([30, 60], ddof=1)))


def test_a_pivot_sorts_its_columns_and_counts_the_newest_run_of_a_seed(tmp_path):
    for number, clients in enumerate((10, 2, 2)):
        folder = write_run(tmp_path / str(number), ga=number / 10, clients=clients)
        os.utime(folder / "metrics.jsonl", (1000 + number, 1000 + number))
    table = pivot(collect([tmp_path]), "method", "clients", "ga_best")
    assert table.headings[1:] == ["clients=2", "clients=10"]
    assert [(cell.mean, cell.n) for cell in table.rows[0].cells] == [(pytest.approx(20.0), 1), (0.0, 1)]


def test_a_pivot_sorts_its_rows_and_says_none_as_it_is_written(tmp_path):
    for cohort in (10, None, 2):
        write_run(tmp_path / str(cohort), cohort=cohort)
    assert [row.label for row in pivot(collect([tmp_path]), "cohort", None, "ga_best").rows] == ["2", "10", "none"]


def test_a_pivot_of_rounds_is_not_in_percent(tmp_path):
    add_to_summary(write_run(tmp_path / "a"), ga_best_round=3)
    table = pivot(collect([tmp_path]), "method", None, "ga_best_round")
    assert (table.title, table.rows[0].cells[0].mean) == ("ga_best_round by method", 3.0)


def test_a_pivot_of_seconds_has_the_digits_of_a_groups_own_table(tmp_path):
    write_run(tmp_path / "a")
    table = pivot(collect([tmp_path]), "method", None, "seconds_per_round")
    assert shown(table.rows[0].cells[0], table.columns[0]) == "0.500"


def test_headings_say_that_pa_is_after_fine_tuning(tmp_path, experiments):
    folder = write_run(tmp_path / "a")
    summary = json.loads((folder / "summary.json").read_text())
    tuned = {"pa_protocol": "global model fine-tuned for 10 epochs", "pa_std": 0.1, "pa_worst10": 0.2}
    (folder / "summary.json").write_text(json.dumps(summary | tuned))
    (run_group,) = group(collect([tmp_path]), Cells(experiments / "presets"))
    headings = own_table(run_group).headings
    assert {"PA after fine-tuning best", "PA after fine-tuning last", "PA std over clients"} < set(headings)


def test_pa_of_different_moments_has_separate_columns(tmp_path, experiments):
    tuned = {"pa_protocol": "global model fine-tuned for 10 epochs", "pa_best": 0.9, "pa_local_best": 0.7}
    trained = {"pa_protocol": "during training", "pa_best": 0.8}
    for name, entries in (("fedavg", tuned | {"pa_std": 0.1}), ("fedgela", trained | {"pa_std": 0.2})):
        folder = write_run(tmp_path / name, method=name)
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | entries))
    (run_group,) = group(collect([tmp_path]), Cells(experiments / "presets"))
    table = own_table(run_group)
    cells_by_method = {row.names[0]: dict(zip(table.headings[1:], row.cells, strict=True)) for row in table.rows}
    assert "PA best" not in table.headings
    assert [cells_by_method[name]["PA after fine-tuning best"].mean for name in ("fedavg", "fedgela")] == [90.0, None]
    assert [cells_by_method[name]["PA in training best"].mean for name in ("fedavg", "fedgela")] == [70.0, 80.0]
    for moment, spread in (("after fine-tuning", [10.0, None]), ("in training", [None, 20.0])):
        column = f"PA {moment} std over clients"
        assert [cells_by_method[name][column].mean for name in ("fedavg", "fedgela")] == spread


@pytest.mark.thorough
def test_no_file_of_a_report_calls_pa_after_fine_tuning_simply_pa(tmp_path, experiments):
    for seed in (0, 1):
        folder = write_run(tmp_path / f"runs/{seed}", seed=seed)
        summary = json.loads((folder / "summary.json").read_text())
        tuned = {"pa_protocol": "global model fine-tuned for 10 epochs", "pa_best_per_client": [0.5, 0.5]}
        (folder / "summary.json").write_text(json.dumps(summary | tuned))
    out = tmp_path / "out"
    argv = [str(tmp_path / "runs"), "--rows=method", "--metric=pa_best", f"--output={out}"]
    assert report_main(argv, experiments) == 0
    for name in ("report.html", "report.md", "report.tex", "report.csv"):
        text = (out / name).read_text()
        assert "PA after fine-tuning best" in text, name
        assert not re.search(r"\bPA (best|last|by)\b", text), name
    page = (out / "report.html").read_text()
    assert "PA after fine-tuning by client" in page
    assert page.count("after fine-tuning</td>") == 2  # in the table of runs
