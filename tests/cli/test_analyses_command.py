"""experiments/analyse.py: figures and tables of other quantities than accuracy, from run folders."""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from made_up_runs import write_run

from fedjax_pcdd.api import runs
from fedjax_pcdd.cli import analyse, cost_analyses
from fedjax_pcdd.cli.analyse import analyse_main
from fedjax_pcdd.cli.analysis_text import table
from fedjax_pcdd.data.federation import read_counts
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.folder import TRACK


def printed(capsys, *arguments):
    """The stdout of the command, which must succeed."""
    assert analyse_main([str(x) for x in arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys, *arguments):
    """The sentence on stderr for arguments that must be refused."""
    assert analyse_main([str(x) for x in arguments]) == 2
    return capsys.readouterr().err.strip()


def with_results(run, **results):
    """The folder of a run, after some results in its summary were set."""
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | results))
    return run


def cells(text):
    """The cells of each row of a Markdown table after the first cell, by the first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """A folder with two finished runs of one experiment: `plain` tracked nothing, `tracked` angles and spectrum."""
    folder = tmp_path_factory.mktemp("runs")
    common = {"clients": 4, "rounds": 2, "local_epochs": 1, "batch_size": 32, "lanes": 1, "quiet": True,
              "fine_tune_epochs": 0}  # fmt: skip
    for name, options in (("plain", {}), ("tracked", {"track": "angles,spectrum", "track_local": False})):
        runs.run(*build({"method": "fedavg", "run_dir": folder / name, **common, **options}))
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["angles", "spectrum"])
def test_the_last_checkpoint_gives_the_last_tracked_values(two_runs, name, capsys):
    table_rows = cells(printed(capsys, name, two_runs))
    last = json.loads((two_runs / "tracked" / TRACK).read_text().splitlines()[-1])[name]["global"]
    columns = {"angles": [(1, "existing"), (3, "missing")], "spectrum": [(1, "variance"), (3, "class_variance")]}[name]
    for column, key in columns:
        assert table_rows["plain"][column] == table_rows["tracked"][column] == f"{last[key]:.4g}"
    assert table_rows["plain"][0] == "2"


@pytest.mark.thorough
def test_an_analysis_leaves_the_files_of_a_run_unchanged(two_runs, capsys):
    times_before = {path: path.stat().st_mtime_ns for path in (two_runs / "plain").glob("*.*")}
    printed(capsys, "intra", two_runs / "plain")
    assert {path: path.stat().st_mtime_ns for path in (two_runs / "plain").glob("*.*")} == times_before


@pytest.mark.thorough
def test_a_picture_of_several_runs_is_drawn(two_runs, tmp_path, capsys):
    printed(capsys, "angles", two_runs, f"--output={tmp_path / 'a.png'}")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_traffic_of_fedavg_is_the_model_in_both_directions(two_runs, capsys):
    parameters = 64 * 200 + 200 + 200 * 10 + 10
    per_round, total = cells(printed(capsys, "traffic", two_runs / "plain"))["plain"][2:]
    assert float(per_round) == pytest.approx(2 * 4 * 4e-6 * parameters, abs=0.005)
    assert float(total) == pytest.approx(2 * float(per_round), abs=0.06)


def test_traffic_of_a_run_counts_its_own_public_images(tmp_path, capsys):
    """Whole batches of the 1000 images of digits, not of the 5000 of the tables; counted in each pass over them."""
    fewer = {"public_samples": 250, "public_batch": 96}
    runs = {"default": {}, "fewer": fewer, "twice": fewer | {"public_epochs": 2}}
    for name, options in runs.items():
        write_run(tmp_path / name, method="fedmd", clients=50, cohort=50, **options)
    table_rows = cells(printed(capsys, "traffic", tmp_path))
    assert {name: row[:2] for name, row in table_rows.items()} == {name: ["N C", "N C"] for name in runs}
    for name, images in (("default", 512), ("fewer", 192), ("twice", 384)):
        assert table_rows[name][2] == f"{2 * 10 * images * 50 * 4e-6:.2f}"


def test_total_traffic_is_that_of_the_rounds_that_were_trained(tmp_path, capsys):
    run = write_run(tmp_path / "run", method="fedmd", clients=50, cohort=50, rounds=3)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    with_results(run, rounds=2)  # as if a callback had stopped it
    assert cells(printed(capsys, "traffic", run))["run"][2:] == ["2.05", "4.1"]


@pytest.mark.thorough
def test_the_burden_of_a_run_is_relative_to_that_of_fedavg(two_runs, capsys):
    table_rows = cells(printed(capsys, "burden", two_runs))
    assert table_rows["plain"][0] == table_rows["tracked"][0] == "P"
    summaries = [json.loads((two_runs / name / "summary.json").read_text()) for name in ("plain", "tracked")]
    ratio = summaries[1]["seconds_per_round"] / summaries[0]["seconds_per_round"]
    assert float(table_rows["tracked"][4]) == pytest.approx(ratio, rel=1e-3)


def test_rounds_are_counted_until_the_accuracy_of_fedavg(tmp_path, capsys):
    write_run(tmp_path / "a", ga=0.5, rounds=10)
    write_run(tmp_path / "b", ga=0.8, rounds=10, method="fedprox")
    table_rows = cells(printed(capsys, "rounds", tmp_path))
    assert table_rows["a"][:2] == ["10", "1"]
    assert table_rows["b"][:2] == ["7", "1.429"]  # 0.8 * 7 / 10 is the first above 0.5


def test_fedavg_on_another_data_set_is_not_a_reference(tmp_path, capsys):
    """The same index lists are another partition on another data set."""
    random = np.random.default_rng(0)
    labels = np.arange(40) % 10
    for name in ("alpha", "beta"):
        images = random.integers(0, 256, (40, 8, 8), np.uint8)
        np.savez(tmp_path / f"{name}.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    common = {"data_dir": tmp_path, "cohort": 2, "clients": 2, "model": "mlp"}
    write_run(tmp_path / "runs" / "fedavg", 0.4, dataset="alpha", **common)
    write_run(tmp_path / "runs" / "other", 0.8, dataset="beta", method="fedprox", **common)
    write_run(tmp_path / "runs" / "same", 0.8, dataset="alpha", method="fedprox", **common)
    burdens, rounds = (cells(printed(capsys, name, tmp_path / "runs")) for name in ("burden", "rounds"))
    assert (burdens["other"][4], burdens["same"][4]) == ("-", "1")
    assert (rounds["other"][0], rounds["same"][0]) == ("-", "2")


def test_fedavg_with_other_work_or_device_is_not_a_reference_for_time(tmp_path, capsys):
    common = {"clients": 4, "cohort": 4, "model": "mlp"}
    write_run(tmp_path / "fedavg", **common)
    changes = ({}, {"local_epochs": 3}, {"batch_size": 7}, {"cohort": 2}, {"lr": 0.5}, {})
    runs = [write_run(tmp_path / str(i), method="fedprox", **common | change) for i, change in enumerate(changes)]
    with_results(runs[-1], device="another")
    table_rows = cells(printed(capsys, "burden", tmp_path))
    assert [table_rows[str(i)][4] for i in range(len(runs))] == ["1", "-", "-", "-", "1", "-"]


def test_the_burden_picture_has_means_over_partitions_that_all_methods_have(tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(cost_analyses, "draw_burdens", lambda burdens, path: drawn.extend(burdens))
    for method, results in {"fedavg": [(0.2, 1), (0.4, 1), (0.9, 1)], "fedprox": [(0.4, 2), (0.8, 8)]}.items():
        for i, (ga, seconds) in enumerate(results):
            run = write_run(tmp_path / f"{method}{i}", ga, method=method, shift=i, model="mlp", cohort=2)
            with_results(run, seconds_per_round=seconds)
    printed(capsys, "burden", tmp_path, f"--output={tmp_path / 'a.png'}")
    assert [(burden.label, burden.seconds, burden.ga) for burden in drawn] == [
        ("fedavg", 1, pytest.approx(0.3)), ("fedprox", pytest.approx(4), pytest.approx(0.6)),
    ]  # fmt: skip


def test_the_burden_picture_has_one_point_for_one_setting(tmp_path, capsys):
    for i, mu in enumerate((0.1, 0.5)):
        write_run(tmp_path / f"fedavg{i}", shift=i, model="mlp", cohort=2)
        write_run(tmp_path / f"fedprox{i}", method="fedprox", shift=i, mu=mu, model="mlp", cohort=2)
    message = refusal(capsys, "burden", tmp_path, f"--output={tmp_path / 'a.png'}")
    assert "one point for fedprox, and its runs differ in mu" in message


def test_rounds_are_counted_against_fedavg_with_the_same_options(tmp_path, capsys):
    write_run(tmp_path / "a", ga=0.1, rounds=10, lr=0.01)
    write_run(tmp_path / "b", ga=0.5, rounds=10, lr=0.05)
    write_run(tmp_path / "c", ga=0.8, rounds=10, lr=0.05, method="fedprox")
    write_run(tmp_path / "d", ga=0.8, rounds=10, lr=0.1, method="fedprox")
    table_rows = cells(printed(capsys, "rounds", tmp_path))
    assert (table_rows["c"][0], table_rows["d"][0]) == ("7", "-")


@pytest.mark.thorough
def test_bilateral_curves_are_read_from_a_sweep(tmp_path, capsys):
    for i, ew in enumerate((1.0, 100.0)):
        write_run(tmp_path / str(i), 0.25 * (i + 1), method="fedgela", origin={"hyperparameters": {"ew": ew}})
    text = printed(capsys, "bilateral", tmp_path, f"--output={tmp_path / 'b.png'}")
    rows = [line.split("|")[2:4] for line in text.splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [["1", "25.00"], ["100", "50.00"]]
    assert (tmp_path / "b.png").is_file()


def test_bilateral_curves_are_means_over_seeds(tmp_path, capsys):
    for i, (ew, ga) in enumerate([(100.0, 0.5), (10.0, 0.25), (100.0, 0.75)]):
        folder = write_run(tmp_path / str(i), ga, method="fedgela", seed=i, origin={"hyperparameters": {"ew": ew}})
        with_results(folder, pa_best=1 - ga)
    rows = [line.split("|")[2:6] for line in printed(capsys, "bilateral", tmp_path).splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["10", "25.00", "75.00", "1"], ["100", "62.50 ± 17.68", "37.50 ± 17.68", "2"],
    ]  # fmt: skip


def test_bilateral_curves_of_other_settings_stay_apart_and_copies_count_once(tmp_path, capsys):
    for name, phi, ga in (("a", "identity", 0.5), ("b", "none", 0.25), ("copy", "identity", 0.5)):
        origin = {"hyperparameters": {"ew": 1.0, "phi": phi}}
        write_run(tmp_path / name, ga, method="fedgela", ew=1.0, phi=phi, origin=origin)
    rows = [line.split("|") for line in printed(capsys, "bilateral", tmp_path).splitlines()[2:]]
    curves = {row[1].partition("(")[2].strip(): (row[3].strip(), row[5].strip()) for row in rows}
    assert curves == {"phi=identity)": ("50.00", "1"), "phi=none)": ("25.00", "1")}


def test_bilateral_curves_of_the_linear_scale_stay_apart(tmp_path, capsys):
    for i, scale in enumerate(("sqrt", "linear")):
        origin = {"hyperparameters": {"ew": 1.0, "scale": scale}}
        write_run(tmp_path / scale, 0.25 * (i + 1), method="fedgela", scale=scale, origin=origin)
    rows = [line.split("|") for line in printed(capsys, "bilateral", tmp_path).splitlines()[2:]]
    assert {row[1].strip().partition("(")[2]: row[3].strip() for row in rows} == {"": "25.00", "linear)": "50.00"}


def test_runs_without_personal_accuracy_are_in_no_bilateral_curve(tmp_path, capsys):
    for i, (ew, pa) in enumerate([(1.0, 0.5), (10.0, None)]):
        run = write_run(tmp_path / str(i), method="fedgela", ew=ew, origin={"hyperparameters": {"ew": ew}})
        with_results(run, pa_best=pa)
    with_results(write_run(tmp_path / "fedavg"), pa_best=None)
    rows = [line.split("|")[2].strip() for line in printed(capsys, "bilateral", tmp_path).splitlines()[2:]]
    assert rows == ["1"]


def test_bilateral_curves_of_each_partition_stay_apart(tmp_path, capsys):
    partitions = [
        {"partition": "quantity", "beta": 0.1}, {"partition": "quantity", "beta": 0.5}, {"partition": "dirichlet"},
        *(
            {"partition": "extended_dirichlet", "classes_per_client": classes, "beta": beta}
            for classes, beta in ((2, 0.1), (2, 1), (3, 1))
        ),
        {"partition": "pcdd", "classes_per_client": 2}, {"partition": "pcdd", "classes_per_client": 2, "clients": 5},
        *({"partition": f"{folder}/lists.npz"} for folder in "ab"),
    ]  # fmt: skip
    for i, partition in enumerate(partitions):
        write_run(tmp_path / str(i), method="fedgela", origin={"hyperparameters": {"ew": 1.0}}, **partition)
    assert list(cells(printed(capsys, "bilateral", tmp_path))) == [
        "digits quantity0.1, 10 clients", "digits quantity0.5, 10 clients", "digits dirichlet0.1, 10 clients",
        "digits P10C2dirichlet0.1", "digits P10C2dirichlet1", "digits P10C3dirichlet1", "digits P10C2", "digits P5C2",
        "digits a/lists.npz", "digits b/lists.npz",
    ]  # fmt: skip


def test_bilateral_curves_and_fedavg_beside_them_say_when_pa_was_measured(tmp_path, capsys):
    protocols = {"fedgela": "during training", "fedavg": "global model fine-tuned for 10 epochs"}
    for method, protocol in protocols.items():
        origin = {"hyperparameters": {"ew": 1.0}} if method == "fedgela" else {}
        folder = write_run(tmp_path / method, method=method, origin=origin)
        with_results(folder, pa_protocol=protocol)
    header, _, *rows = printed(capsys, "bilateral", tmp_path).splitlines()
    assert "PA in training best on test (%)" in header
    assert [row.split("|")[2].strip() for row in rows] == ["1", "FedAvg, PA after fine-tuning"]


@pytest.mark.thorough
@pytest.mark.parametrize("folder", ["{home}", "~"])
def test_a_partition_is_drawn_without_training(tmp_path, capsys, monkeypatch, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    picture, output = tmp_path / "p.png", f"--output={folder.format(home=tmp_path)}/p.png"
    text = printed(capsys, "partition", "--partition=pcdd", "--clients=5", "--classes-per-client=2", output)
    assert "5 clients with 2 to 2 classes" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["angels", "x"], "there is no analysis 'angels': did you mean 'angles'?"),
        (["angles"], "name at least one folder of runs, as runs/."),
        (["angles", "nowhere"], "there is no folder nowhere: name the folder of a run, or one that holds runs."),
        (["angles", "--outptu=a.png", "x"], "angles has no option --outptu: its options are --output, --by-split."),
        (["rounds", "{}", "--target=mean"], "--target takes best or last, not 'mean'."),
        (["bilateral", "{}"], "none of these runs has an E_W: sweep --ew=1,4,16 of fedgela."),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, capsys, arguments, sentence):
    write_run(tmp_path / "run")
    assert refusal(capsys, *(word.format(tmp_path) for word in arguments)) == sentence


def test_arguments_that_an_analysis_would_ignore_are_refused(two_runs, capsys):
    counts_error = refusal(capsys, "partition", "--counts=counts.csv", "--partition=pcdd")
    assert counts_error == "--counts is all that is drawn: leave the other options out."
    assert "no runs of one method and one seed differ in a single hyper-parameter" in refusal(
        capsys, "grid", two_runs / "plain"
    )
    preset_error = refusal(capsys, "traffic", two_runs / "plain", "--preset=fedmr/table3")
    assert preset_error == "--preset is for what the papers print: leave it out beside runs."


def test_an_error_names_the_unreadable_counts_and_not_the_picture(tmp_path, capsys, monkeypatch):
    (tmp_path / "counts").mkdir()
    assert "counts is not a file" in refusal(capsys, "partition", f"--counts={tmp_path / 'counts'}")
    (tmp_path / "closed.csv").touch()
    monkeypatch.setattr("builtins.open", lambda path, *_, **__: os.open(f"{path}/x", os.O_RDONLY))
    assert "closed.csv/x cannot be used" in refusal(capsys, "partition", f"--counts={tmp_path / 'closed.csv'}")


def test_the_folder_of_a_picture_is_made_before_anything_is_computed(tmp_path, capsys, monkeypatch):
    def look(_, options):
        assert Path(options["output"]).parent.is_dir()
        return "a table"

    monkeypatch.setitem(analyse.COMMANDS, "rounds", analyse.Command(look, ("output",)))
    write_run(tmp_path / "a")
    assert printed(capsys, "rounds", tmp_path / "a", f"--output={tmp_path / 'pictures/of/a.png'}") == "a table\n"
    (tmp_path / "file").touch()
    monkeypatch.setitem(analyse.COMMANDS, "rounds", analyse.Command(lambda *_: pytest.fail("late"), ("output",)))
    assert "another --output" in refusal(capsys, "rounds", tmp_path / "a", f"--output={tmp_path / 'file/a.png'}")


def test_a_picture_that_fails_leaves_the_previous_one_unchanged(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "run", method="fedgela", origin={"hyperparameters": {"ew": 1.0}})
    (tmp_path / "p.png").write_bytes(b"before")

    def save_half(figure, path):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save_half)
    sentence = refusal(capsys, "bilateral", tmp_path / "run", f"--output={tmp_path / 'p.png'}")
    assert sentence == f"no space left on the disk of {tmp_path / 'p.png'}: free some and try again."
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == {"p.png": b"before"}


def test_an_unfinished_run_is_refused(tmp_path, capsys):
    write_run(tmp_path / "run", finished=False)
    assert "is unfinished: continue it with --resume=" in refusal(capsys, "angles", tmp_path)


def test_without_arguments_the_analyses_are_listed(capsys):
    text = printed(capsys)
    assert all(word in text for word in ("angles", "features", "spectrum", "intra", "traffic", "burden", "bilateral"))


def test_columns_of_a_table_are_aligned():
    lines = table(["a", "bb"], [["ccc", "d"]]).splitlines()
    assert len(set(map(len, lines))) == 1
    assert np.char.count(lines, "|").tolist() == [3, 3, 3]


@pytest.mark.thorough
def test_values_may_follow_a_space_and_picture_formats_are_checked(two_runs, tmp_path, capsys):
    assert "| run" in printed(capsys, "angles", two_runs / "tracked", "--output", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    for argv in (("angles", two_runs), ("partition", "--partition=pcdd", "--clients=5", "--classes-per-client=2")):
        assert "--output must end with .png, .pdf, .svg, .jpg" in refusal(capsys, *argv, f"--output={tmp_path}/x.xyz")


def test_a_search_compares_runs_that_differ_in_the_searched_option_alone(tmp_path, capsys):
    points = [(0.1, 0.1, 0.9), (0.1, 0.01, 0.2), (1.0, 0.1, 0.8)]
    for i, (mu, lr, ga) in enumerate(points):
        write_run(tmp_path / str(i), ga, method="fedprox", mu=mu, lr=lr, origin={"hyperparameters": {"mu": mu}})
    line = printed(capsys, "grid", tmp_path).splitlines()[2]
    assert [cell.strip() for cell in line.split("|")[3:7]] == ["mu", "0.1", "test", "90.00"]


@pytest.mark.parametrize(
    ("other_selected_on", "expected"),
    [("validation", ["1", "validation", "60.00"]), ("test", ["0.1", "test", "90.00"])],
)
def test_a_search_selects_on_validation_samples_where_all_runs_have_them(tmp_path, capsys, other_selected_on, expected):
    points = [
        (0.1, 0.9, {"selected_on": "validation", "ga_validation_best": 0.5}),
        (1.0, 0.6, {"selected_on": other_selected_on}),
    ]
    for i, (mu, ga, results) in enumerate(points):
        run = write_run(tmp_path / str(i), ga, method="fedprox", mu=mu, origin={"hyperparameters": {"mu": mu}})
        with_results(run, **results | ({"ga_validation_best": 0.7} if i and other_selected_on == "validation" else {}))
    line = printed(capsys, "grid", tmp_path).splitlines()[2]
    assert [cell.strip() for cell in line.split("|")[4:7]] == expected


def test_a_copied_run_counts_once_in_a_search(tmp_path, capsys):
    others = [("c", 1.0, 0.2, 0), ("d", 1.0, 0.2, 1)]
    for name, mu, ga, seed in (("a", 0.1, 0.5, 0), ("b", 0.1, 0.9, 1), ("copy", 0.1, 0.9, 1), *others):
        write_run(tmp_path / name, ga, method="fedprox", mu=mu, seed=seed, origin={"hyperparameters": {"mu": mu}})
    assert "| 70.00 " in printed(capsys, "grid", tmp_path)


def test_runs_that_a_search_leaves_out_are_named(tmp_path, capsys):
    for name, mu, ga, seed in (("a", 0.1, 0.5, 0), ("b", 0.1, 0.9, 1), ("c", 1.0, 0.6, 0), ("d", 2.0, 0.7, 0)):
        write_run(tmp_path / name, ga, method="fedprox", mu=mu, seed=seed, origin={"hyperparameters": {"mu": mu}})
    with_results(tmp_path / "d", ga_best=None)
    write_run(tmp_path / "e", method="fedprox", origin={"hyperparameters": {"old": 1}})
    write_run(tmp_path / "f", method="fedprox", finished=False)
    assert analyse_main(["grid", str(tmp_path)]) == 0
    out, left_out = capsys.readouterr()
    assert [cell.strip() for cell in out.splitlines()[2].split("|")[4:8]] == ["1", "test", "60.00", "1"]
    assert sorted(left_out.splitlines()) == [
        f"left out: {tmp_path / 'b'} has a seed, 1, that the others beside it have not.",
        f"left out: {tmp_path / 'd'} has no mu, or no best GA.",
        f"left out: {tmp_path / 'e'} has no mu, or no best GA.",
        f"left out: {tmp_path / 'f'} is unfinished.",
    ]


def test_a_search_compares_values_over_the_seeds_that_all_of_them_have(tmp_path, capsys):
    for name, mu, ga, seed in (("a", 0.1, 0.5, 0), ("b", 0.1, 0.9, 1), ("c", 1.0, 0.6, 0)):
        write_run(tmp_path / name, ga, method="fedprox", mu=mu, seed=seed, origin={"hyperparameters": {"mu": mu}})
    line = printed(capsys, "grid", tmp_path).splitlines()[2]
    assert [cell.strip() for cell in line.split("|")[4:7]] == ["1", "test", "60.00"]


def test_runs_of_a_search_that_differ_in_two_options_are_not_compared(tmp_path, capsys):
    for i, (mu, lr) in enumerate(((0.1, 0.1), (1.0, 0.01), (10.0, 0.03))):
        write_run(tmp_path / str(i), method="fedprox", mu=mu, lr=lr, origin={"hyperparameters": {"mu": mu}})
    assert "differ in a single hyper-parameter" in refusal(capsys, "grid", tmp_path)


def test_of_several_sets_of_runs_that_differ_in_one_option_the_largest_is_named(tmp_path, capsys):
    points = [(0.1, 0.1, 0.9), (1.0, 0.1, 0.8), (0.1, 0.01, 0.1), (1.0, 0.01, 0.2), (10.0, 0.01, 0.3)]
    for i, (mu, lr, ga) in enumerate(points):
        write_run(tmp_path / str(i), ga, method="fedprox", mu=mu, lr=lr, origin={"hyperparameters": {"mu": mu}})
    line = printed(capsys, "grid", tmp_path).splitlines()[2]
    assert [cell.strip() for cell in line.split("|")[3:5]] == ["mu (largest of 2 sets of runs)", "10"]


def test_hyper_parameters_that_are_words_can_be_searched_too(tmp_path, capsys):
    for i, step in enumerate(("full", "none")):
        hyper = {"server_step": step}
        write_run(
            tmp_path / str(i), 0.4 + 0.1 * i, method="feddyn", server_step=step, origin={"hyperparameters": hyper}
        )
    assert "| none " in printed(capsys, "grid", tmp_path)


def test_bilateral_curves_of_other_learning_rates_stay_apart(tmp_path, capsys):
    for i, lr in enumerate((0.1, 0.01)):
        origin = {"hyperparameters": {"ew": 1.0}}
        write_run(tmp_path / str(i), 0.25 * (i + 1), method="fedgela", lr=lr, origin=origin)
    rows = printed(capsys, "bilateral", tmp_path).splitlines()[2:]
    assert [row.split("|")[3].strip() for row in rows] == ["25.00", "50.00"]
    assert "lr=0.01" in rows[1]


@pytest.mark.parametrize("analysis", ["tasks", "ablation", "embedding"])
def test_runs_without_a_task_are_left_out_beside_runs_of_a_task(tmp_path, capsys, analysis):
    task, plain = write_run(tmp_path / "task", task="digits_domains"), write_run(tmp_path / "plain")
    with_results(task, domains=["mnist", "usps"], inter=[0.2, 0.4], intra=[0.6, 0.8])
    code = analyse_main([analysis, str(task), str(plain)])
    captured = capsys.readouterr()
    assert f"left out: {plain} is not a run over the domains of a task" in captured.err
    if analysis == "ablation":
        assert code == 0
        assert "mnist" in captured.out
    else:  # the made-up run has neither rounds of a task nor checkpoints
        assert code == 2
        assert str(task) in captured.err
        assert captured.err.count("\n") <= 3
    assert f"{plain} is not a run over the domains of a task" in refusal(capsys, analysis, plain)


@pytest.mark.parametrize("analysis", ["traffic", "burden"])
def test_runs_that_are_not_counted_are_left_out_beside_others(two_runs, tmp_path, capsys, analysis):
    task = task_run(tmp_path / "task")
    assert analyse_main([analysis, str(two_runs / "plain"), str(task)]) == 0
    captured = capsys.readouterr()
    assert list(cells(captured.out)) == ["plain"]
    assert f"left out: {task} is a run over the domains of a task" in captured.err


def task_run(folder, **options):
    origin = {"hyperparameters": {"continual": True}}
    run = write_run(folder, **{"task": "digits_domains", "method": "fccl", "origin": origin} | options)
    return with_results(run, domains=["mnist", "usps"], inter=[0.2, 0.4], intra=[0.6, 0.8])


def test_an_ablation_is_of_one_setting_and_counts_each_seed_once(tmp_path, capsys):
    first = task_run(tmp_path / "a")
    assert "differ in method, too" in refusal(capsys, "ablation", first, task_run(tmp_path / "b", method="fedmd"))
    assert "differ in rounds, too" in refusal(capsys, "ablation", first, task_run(tmp_path / "c", rounds=7))
    same_seed = with_results(task_run(tmp_path / "d"), inter=[0.5, 0.5])
    row = printed(capsys, "ablation", first, same_seed).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")[3:6]] == ["50.00", "50.00", "50.00"]


def test_methods_without_continual_learning_have_a_dash_in_its_column(tmp_path, capsys):
    run = write_run(tmp_path / "run", task="digits_domains", method="solo")
    with_results(run, domains=["mnist", "usps"], inter=[0.2, 0.4], intra=[0.6, 0.8])
    assert printed(capsys, "ablation", run).splitlines()[-1].split("|")[2].strip() == "–"


def test_an_ablation_has_rows_with_and_without_continual_learning_of_the_seeds_that_both_have(tmp_path, capsys):
    runs = [task_run(tmp_path / str(i), seed=i) for i in range(2)]
    without = {"origin": {"hyperparameters": {"continual": False}}, "continual": False}
    with_results(task_run(tmp_path / "without", **without), intra=[0.1, 0.3])
    with_results(runs[1], intra=[0.2, 0.4])
    rows = [
        [cell.strip() for cell in row.split("|")[2:9]] for row in printed(capsys, "ablation", tmp_path).splitlines()[2:]
    ]
    assert {row[0]: row[-1] for row in rows} == {"with": "70.00", "without": "20.00"}
    shutil.rmtree(runs[0])
    assert "no seed in common" in refusal(capsys, "ablation", tmp_path)


def test_accuracies_of_a_task_begin_with_those_of_the_pretrained_models(tmp_path, capsys):
    run = task_run(tmp_path / "a", rounds=3)
    rows = [{"round": r, "intra_top1": 0.1 * 2**r, "local_objective": 1 / (r + 1)} for r in range(4)]
    (run / "start.json").write_text(json.dumps(rows[0]))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    assert cells(printed(capsys, "tasks", run))["a"] == ["10.00", "80.00", "23.33", "0.2500"]


@pytest.mark.parametrize(
    ("analysis", "file", "content"),
    [
        ("correlation", "correlation.npz", "x"),
        ("correlation", "correlation.npz", None),
        ("tasks", "start.json", "{"),
        ("tasks", "start.json", None),
    ],
)
def test_a_task_whose_file_is_damaged_is_left_out_of_its_analysis(tmp_path, capsys, analysis, file, content):
    runs = [task_run(tmp_path / name) for name in ("a", "b")]
    matrices, rows = np.ones((2, 3, 3)), [{"round": 1, "intra_top1": 0.5, "local_objective": 1.0}]
    for run in runs:
        np.savez(run / "correlation.npz", matrices=matrices, private=matrices, participants=["x", "y"])
        (run / "start.json").write_text(json.dumps(rows[0] | {"round": 0}))
        (run / "metrics.jsonl").write_text("".join(json.dumps(rows[0] | {"round": r}) + "\n" for r in (1, 2, 3)))
    if content is None and file == "correlation.npz":
        np.savez(runs[1] / file, matrices=matrices, private=matrices[:1], participants=["x", "y"])
    elif content is None:
        (runs[1] / file).write_bytes(b"\xff")
    else:
        (runs[1] / file).write_text(content)
    assert analyse_main([analysis, str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("left out: ")
    assert (str(runs[1] / file) in captured.err, captured.err.count("\n")) == (True, 1)
    assert [name for name in cells(captured.out) if name in ("a", "b")] == ["a"]
    assert str(runs[1] / file) in refusal(capsys, analysis, runs[1])


def test_tasks_that_count_top_1_and_top_5_are_not_in_one_table(tmp_path, capsys):
    folders = task_run(tmp_path / "a"), task_run(tmp_path / "b", task="office_home")
    assert "some of these runs count top-1, others top-5" in refusal(capsys, "tasks", *folders)


@pytest.mark.thorough
def test_by_split_is_for_pictures_of_angles_alone(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    assert "spectrum has no option --by-split" in refusal(capsys, "spectrum", run, "--by-split", "--output=a.png")
    assert "name the picture with --output" in refusal(capsys, "angles", run, "--by-split")


def test_a_partition_by_domains_has_no_heat_map(capsys):
    assert "--task is divided by domains" in refusal(capsys, "partition", "--task=digits_domains")


def test_counts_of_a_repeated_class_add_up_and_a_file_without_rows_is_refused(tmp_path, capsys):
    file = tmp_path / "counts.csv"
    file.write_text("centre,fold,class,count\na,train,x,5\na,train,x,6\n")
    np.testing.assert_array_equal(read_counts(file).counts, [[11]])
    file.write_text("centre,fold,class,count\na,test,x,5\n")
    assert "has no rows of the fold 'train'" in refusal(capsys, "partition", f"--counts={file}")
    file.write_text("centre,fold,class,count\na,train\n")
    assert "must have the columns" in refusal(capsys, "partition", f"--counts={file}")
