"""Searches: their space, suggestions that do not change after an interruption, trials that are not run again."""

import csv
import json
import math
import sys

import pytest

import fedjax_pcdd as fp
from fedjax_pcdd.api import sweep_folder
from fedjax_pcdd.api.search import Search
from fedjax_pcdd.cli.search import search_main
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.config import dump
from fedjax_pcdd.training.options import configure

pytest.importorskip("optuna")
DRAWS_PICTURES = True
SPACE = {"method": "fedprox", "lr": "0.001:1:log", "mu": "0.1,1,10", "local_epochs": "1:9", "seed": "0:2"}
SMALL = {
    "rounds": "1", "fine_tune_epochs": "0", "lanes": "1", "clients": "3", "min_samples": "1", "local_epochs": "1",
    "validation": "0.2", "select_on": "validation", "lr": "0.01:0.1",
}  # fmt: skip


def made_up_search(count, earlier_results=(), **options):
    """A search whose accuracy is best at lr=0.03 and mu=1, without any training."""
    results = dict(earlier_results)
    search = Search(SPACE, results, **options)
    for stage in search.stages(count):
        for run in stage:
            accuracy = 0.9 - 0.1 * abs(math.log10(float(run.given["lr"]) / 0.03)) - 0.05 * (run.given["mu"] != "1")
            results[run.name] = results.get(run.name) or {"ga_best": accuracy + 0.01 * int(run.given["seed"])}
    return search, results


def test_an_interrupted_search_makes_the_same_suggestions():
    uninterrupted, results = made_up_search(16)
    earlier_results = {name: result for name, result in results.items() if name < "trial-009"}
    assert len(earlier_results) == 18
    assert made_up_search(16, earlier_results)[0].trials == uninterrupted.trials
    assert made_up_search(16, seed=1)[0].trials != uninterrupted.trials


@pytest.mark.parametrize("together", [1, 5])
def test_trials_that_have_begun_keep_their_options_when_an_earlier_one_that_failed_succeeds(tmp_path, together):
    def searched(failed, together=1):
        search = Search(SPACE | {"mu": "0.10,1,1e1"}, results := {})
        for stage in search.stages(13, together, tmp_path):
            for run in stage:
                (tmp_path / run.name).mkdir(exist_ok=True)
                (tmp_path / run.name / "config.yaml").write_text(dump(*configure(run.given)))
                results[run.name] = {} if run.group in failed else {"ga_best": float(run.given["lr"])}
        return search.trials

    first = searched(["trial-001", "trial-003", "trial-005"])
    assert searched([], together) == first


@pytest.mark.thorough
def test_suggestions_stay_within_their_bounds_and_come_nearer_to_the_best():
    search, _ = made_up_search(40)
    rates = [float(trial.options["lr"]) for trial in search.trials]
    assert all(0.001 <= rate <= 1 for rate in rates)
    assert {trial.options["local_epochs"] for trial in search.trials} <= set("123456789")
    distances = [abs(math.log10(rate / 0.03)) for rate in rates]
    assert sum(distances[-10:]) < sum(distances[:10])
    assert search.best()["mu"] == "1"


def test_a_suggestion_stays_within_its_bounds_when_it_is_rounded():
    search = Search({"method": "fedavg", "lr": "0.01234:0.01236"}, {})
    next(search.stages(3, together=3))
    assert all(0.01234 <= float(trial.options["lr"]) <= 0.01236 for trial in search.trials)


def test_a_trial_is_a_run_of_every_seed_and_no_trial_is_repeated():
    search, _ = made_up_search(3)
    assert [experiment.name for experiment in search.trials[0].experiments] == ["trial-000-s0", "trial-000-s1"]
    finite = Search({"mu": "1,2", "method": "fedprox"}, results := {})
    for stage in finite.stages(20, together=3):
        results |= {experiment.name: {"ga_best": 0.5} for experiment in stage}
    assert sorted(trial.options["mu"] for trial in finite.trials) == ["1", "2"]


def test_a_failed_trial_ranks_last():
    search, results = made_up_search(4)
    best = search.ranking()[0]
    results[best.experiments[0].name] = results[best.experiments[1].name] = UserError("the loss is not finite")
    assert search.ranking()[-1] == best


def test_a_trial_scores_its_mean_metric_over_seeds_on_the_selecting_samples():
    for select_on, accuracy in (("validation", 0.5), ("test", 0.25)):
        space = {"method": "fedprox", "mu": "1,2", "seed": "0:2", "validation": "0.2", "select_on": select_on}
        search = Search(space, results := {}, metric="pa")
        for seed, experiment in enumerate(next(search.stages(1))):
            personal = {"pa_best": 0.25 * 2 * seed, "pa_validation_best": 0.25 + seed / 2}
            results[experiment.name] = {"ga_best": 1.0, "ga_validation_best": 1.0, **personal}
        assert search.score(search.trials[0]) == accuracy


@pytest.mark.parametrize(
    ("argument", "words"),
    [("--lr=0.3:0.1", "must rise"), ("--lr=0:1:log", "above 0"), ("--bn=1:2", "bn"), ("--lr=0.1", "nothing to search"),
     ("--method=fedavg,moon", "--method is one"), ("--mu=1:2", "--mu belongs to"), ("--lr=0.1,-1", "above 0"),
     ("--run-dir=x", "--sweep-dir"), ("--trials=0", "at least 1")],
)  # fmt: skip
def test_mistakes_are_reported_before_anything_runs(tmp_path, capsys, argument, words):
    assert search_main([argument, f"--sweep-dir={tmp_path / 'search'}"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "search").exists()


def test_without_optuna_one_sentence_names_the_extra_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert search_main(["--lr=0.1:0.2"]) == 2
    assert capsys.readouterr().err == "optuna is missing: pip install 'fedjax-pcdd[search]'.\n"


@pytest.mark.thorough
def test_a_search_of_the_command_line_is_continued_from_python(tmp_path, monkeypatch, capsys):
    folder, argv = tmp_path / "search", [f"--{name.replace('_', '-')}={text}" for name, text in SMALL.items()]
    assert search_main([*argv, "--trials=2", f"--sweep-dir={folder}"]) == 0
    captured = capsys.readouterr()
    assert "best: --lr=0.0" in captured.out
    assert captured.err == ""  # chosen on validation samples
    rows = list(csv.DictReader((folder / "trials.csv").read_text().splitlines()))
    assert {row["experiment"] for row in rows} == {"trial-000", "trial-001"}
    trained = []
    monkeypatch.setattr(
        sweep_folder, "run", lambda config, *_, **__: trained.append(config.run_dir.name) or {"ga_best": 0.0}
    )
    results = fp.search({**SMALL, "lr": (0.01, 0.1)}, trials=3, folder=folder)
    assert trained == ["trial-002"]
    assert results.best == {"lr": rows[0]["lr"]}
    assert len(results.load(results.table()[0]["experiment"])) == 1
    before = sorted(folder.iterdir())
    assert search_main([*argv, "--trials=4", f"--sweep-dir={folder}", "--status"]) == 0
    status = capsys.readouterr().out
    assert "2 done, 0 running, 1 waiting, 0 failed" in status  # the third is suggested, as nothing was written of it
    assert sorted(folder.iterdir()) == before


def test_the_status_of_a_search_shows_what_was_suggested_after_a_failed_trial(tmp_path, monkeypatch, capsys):
    def train(config, method, *_, **__):
        config.run_dir.mkdir()
        (config.run_dir / "config.yaml").write_text(dump(config, method))
        if config.run_dir.name == "trial-001":
            raise UserError("it diverged.")
        summary = {"method": "fedavg", "rounds": 1, "ga_best": 0.5, "ga_validation_best": 0.5}
        (config.run_dir / "summary.json").write_text(json.dumps(summary))
        return summary

    argv = [*(f"--{name.replace('_', '-')}={text}" for name, text in SMALL.items()), f"--sweep-dir={tmp_path}"]
    monkeypatch.setattr(sweep_folder, "run", train)
    assert search_main([*argv, "--trials=3"]) == 1
    monkeypatch.setattr(sweep_folder, "run", lambda *_, **__: pytest.fail("a status trains nothing"))
    capsys.readouterr()
    assert search_main([*argv, "--trials=3", "--status"]) == 0
    assert "2 done, 0 running, 0 waiting, 1 failed" in capsys.readouterr().out
    assert search_main([*argv, "--trials=4", "--status"]) == 0
    assert "2 done, 0 running, 1 waiting, 1 failed" in capsys.readouterr().out


def test_a_search_on_test_samples_warns(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="trials are chosen on test samples"), pytest.raises(UserError, match="file"):
        fp.search({"lr": (0.1, 0.2)}, folder=tmp_path / "file")


def test_a_search_selects_on_what_the_split_of_its_preset_says(tmp_path):
    preset = "run: {dataset: digits}\nsplits: {held: {select_on: validation, validation: 0.2}}"
    (tmp_path / "own.yaml").write_text(preset)
    search = Search({"method": "fedgela", "preset": str(tmp_path / "own.yaml"), "split": "held", "ew": "1,4"}, {})
    assert not search.on_test


@pytest.mark.parametrize(
    ("metric", "options", "on_test"),
    [
        ("pa", {"method": "fedgela", "pa_protocol": "best_epoch"}, True),
        ("pa", {"method": "fedgela", "pa_protocol": "best_mean"}, True),
        ("pa", {"method": "fedgela", "pa_protocol": "last"}, False),
        ("ga", {"method": "fedgela", "pa_protocol": "best_epoch"}, False),
    ],
)
def test_a_search_for_pa_of_epochs_that_tests_choose_is_one_on_test_samples(metric, options, on_test):
    search = Search({"select_on": "validation", "validation": "0.2", "lr": "0.1,0.2", **options}, {}, metric=metric)
    assert search.on_test == on_test
    assert search._measure == f"{metric}_validation_best"


def test_a_tuple_of_seeds_is_a_list_of_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_folder, "run", lambda *_, **__: {"ga_best": 0.5, "ga_validation_best": 0.5})
    results = fp.search({**SMALL, "lr": (0.01, 0.1), "seed": (3, 5)}, trials=1, folder=tmp_path / "a")
    assert sorted(results) == ["trial-000-s3", "trial-000-s5"]


def test_an_option_that_no_trial_takes_is_refused_at_once():
    with pytest.raises(UserError, match="mu belongs to"):
        fp.search({"lr": (0.1, 0.2), "mu": 3})
