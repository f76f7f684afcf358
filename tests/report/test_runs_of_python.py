"""Runs of `fp.simulate` in reports: a partition of their own does not set them apart from others of its kind."""

import pytest

import fedjax_pcdd as fp
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.report.collect import collect
from fedjax_pcdd.report.grouping import Cells, group
from fedjax_pcdd.training.folder import RunFolder

SETTINGS = {"rounds": 1, "local_epochs": 1, "fine_tune_epochs": 0, "lanes": 1}


def dirichlet(seed):
    return fp.partition(fp.load_dataset("digits"), "dirichlet", clients=3, beta=0.5, seed=seed)


def experiments_in(folder):
    """Headings, names and seeds of the experiments that a report shows."""
    groups = group(collect([folder]), Cells(folder))
    return [(g.title, entry.label, [run.seed for run in entry.runs]) for g in groups for entry in g.entries]


def test_partitions_drawn_with_the_seeds_of_the_runs_are_seeds_of_one_experiment(tmp_path):
    for seed in (0, 1):
        fp.simulate(dirichlet(seed), "fedavg", seed=seed, run_dir=tmp_path / str(seed), **SETTINGS)
    options = ["--beta=0.5", "--clients=3", *(f"--{name.replace('_', '-')}={x}" for name, x in SETTINGS.items())]
    assert main(["--method=fedavg", "--seed=2", f"--run-dir={tmp_path / 'command'}", "--quiet", *options]) == 0
    assert experiments_in(tmp_path) == [("digits · dirichlet0.5 · default model", "fedavg", [0, 1, 2])]


def test_one_partition_for_all_seeds_is_an_experiment_of_its_own(tmp_path):
    federation = dirichlet(7)
    for seed in (0, 1):
        fp.simulate(federation, "fedavg", seed=seed, run_dir=tmp_path / str(seed), **SETTINGS)
    assert experiments_in(tmp_path) == [("digits · dirichlet0.5 of seed 7 · default model", "fedavg", [0, 1])]


def test_partitions_of_the_users_own_are_told_apart_by_their_content(tmp_path):
    for name, partition_seed, seed in (("a", 0, 0), ("b", 0, 1), ("c", 1, 0)):
        drawn = dirichlet(partition_seed)
        own = fp.Federation(drawn.dataset, drawn.partition)
        fp.simulate(own, "fedavg", seed=seed, run_dir=tmp_path / name, **SETTINGS)
    (first, _, seeds), (second, _, other_seeds) = experiments_in(tmp_path)
    assert first != second
    assert all(title.startswith("digits · partition ") for title in (first, second))
    assert (seeds, other_seeds) == ([0, 1], [0])


@pytest.mark.parametrize("drawn", [3, {}, {"partition": "dirichlet"}])
def test_a_record_that_does_not_say_how_the_partition_was_drawn_is_no_mistake(tmp_path, drawn):
    fp.simulate(dirichlet(0), "fedavg", run_dir=tmp_path / "a", **SETTINGS)
    folder = RunFolder(tmp_path / "a")
    folder.write_json("resolved.json", folder.read_json("resolved.json") | {"drawn": drawn})
    assert experiments_in(tmp_path)[0][0].startswith("digits · partition ")
