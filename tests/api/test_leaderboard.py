"""The leaderboard: equally many trials per method, chosen on validation samples; nothing runs twice; its ranks."""

import itertools
import json
import signal
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import rankdata, ttest_1samp

from fedjax_pcdd.analysis.ranks import cliques, ranks
from fedjax_pcdd.api import leaderboard
from fedjax_pcdd.cli import leaderboard as cli_leaderboard
from fedjax_pcdd.cli.leaderboard import _ranking
from fedjax_pcdd.cli.main import main
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.training import interrupts
from fedjax_pcdd.training.options import configure

METHOD_CODE = """
import fedjax_pcdd as fp
from flax import struct

@struct.dataclass
class Keep(fp.FedAvg):
    "FedAvg under another name."
"""
PLAN = """
run: {rounds: 2, local_epochs: 1, batch_size: 20, train_samples: 200, test_samples: 60, clients: 3, min_samples: 1,
      fine_tune_epochs: 0, validation: 0.2, select_on: validation, lanes: 1}
splits:
  dir: {dataset: digits, partition: dirichlet, beta: 1}
networks: [mlp]
seeds: 2
trials: {default: [{lr: 0.0001}, {lr: 0.1}], fedprox: [{lr: 0.1, mu: 0}, {lr: 1.0e+30, mu: 0}]}
public: {}
"""

RESULT = {
    "network": "mlp", "split": "dir", "method": "fedavg", "trials": [], "chosen": {}, "floats": 1,
    "seeds": [{"seed": 0, "ga_best": 0.5}],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaderboard")
    (folder / "mine.py").write_text(METHOD_CODE)
    (folder / "plan.yaml").write_text(PLAN)
    assert main(command(folder, f"--method=fedprox,{folder}/mine.py:Keep")) == 0
    return folder


def command(folder, *flags):
    options = [f"--plan={folder}/plan.yaml", f"--results={folder}/results", f"--runs-dir={folder}/runs", *flags]
    return ["leaderboard", *options]


def result(folder, name):
    return json.loads((folder / "results" / "mlp" / "dir" / f"{name}.json").read_text())


@pytest.mark.thorough
def test_a_users_method_runs_all_trials_and_the_best_trial_on_all_seeds(folder):
    outcome = result(folder, "Keep")
    scores = [trial["score"] for trial in outcome["trials"]]
    assert outcome["chosen"] == [{"lr": 0.0001}, {"lr": 0.1}][int(np.argmax(scores))] == {"lr": 0.1}
    assert [seed["seed"] for seed in outcome["seeds"]] == [0, 1]
    runs = folder / "runs" / "mlp" / "dir" / "Keep"
    assert sorted(path.name for path in runs.glob("trial*")) == ["trial0-s0", "trial1-s0", "trial1-s1"]
    summary = json.loads((runs / "trial1-s1" / "summary.json").read_text())
    assert outcome["seeds"][1]["ga_mean_last10"] == summary["ga_mean_last10"]
    assert summary["selected_on"] == "validation"


@pytest.mark.thorough
def test_a_trial_that_diverges_is_recorded_as_failed(folder):
    outcome = result(folder, "fedprox")
    assert outcome["chosen"] == {"lr": 0.1, "mu": 0}
    assert "not finite" in outcome["trials"][1]["failed"]
    assert str(folder) not in outcome["trials"][1]["failed"]  # results are committed: they name no folder of a machine
    assert outcome["floats"] == result(folder, "Keep")["floats"] > 0


@pytest.mark.thorough
def test_a_cell_that_has_a_result_is_not_run_again(folder, capsys):
    before = (folder / "results" / "mlp" / "dir" / "fedprox.json").stat().st_mtime_ns
    assert main(command(folder, "--method=fedprox")) == 0
    assert (folder / "results" / "mlp" / "dir" / "fedprox.json").stat().st_mtime_ns == before
    printed = capsys.readouterr().out
    assert "Keep" in printed  # results of other methods are listed too
    assert "1 of 1 cells have a result." in printed
    assert all(heading in printed for heading in ("GA best", "GA, last 10", "chosen"))  # not squeezed at 80 columns
    assert "failed" in printed


@pytest.mark.thorough
def test_a_result_of_a_method_edited_since_is_refused(folder, capsys):
    argv = command(folder, f"--method={folder}/mine.py:Keep", "--status")
    assert main(argv) == 0
    (folder / "mine.py").write_text(f"{METHOD_CODE}\n# edited\n")
    try:
        assert main(argv) == 2
        assert "was made with another content of" in capsys.readouterr().err
    finally:
        (folder / "mine.py").write_text(METHOD_CODE)


@pytest.mark.thorough
def test_the_page_has_tables_and_ranks(folder):
    page = folder / "docs" / "leaderboard.md"
    page.parent.mkdir()
    page.write_text(f"# Mine\n\nBefore.\n{'<!-- leaderboard: begin -->'}\nold\n<!-- leaderboard: end -->\nAfter.\n")
    assert main(command(folder, f"--method=fedprox,{folder}/mine.py:Keep", f"--page={page}")) == 0
    text = page.read_text()
    assert "Before." in text
    assert "After." in text
    assert "old" not in text
    assert "1 of 2 trials failed" in text
    assert "| Keep |" in text
    assert "Of one split only seeds are drawn again" in text
    assert (page.parent / "images" / "leaderboard_mlp.png").is_file()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"), [("rounds: 2", "rounds: 3"), ("seeds: 2", "seeds: 3"), ("beta: 1", "beta: 2"), ("0.0001", "0.001")]
)
def test_results_of_another_plan_are_refused(folder, tmp_path, capsys, old, new):
    (tmp_path / "plan.yaml").write_text(PLAN.replace(old, new))
    options = [f"--plan={tmp_path}/plan.yaml", f"--results={folder}/results", f"--runs-dir={tmp_path}/runs"]
    for flags in (["--method=fedavg", "--status"], [f"--method={folder}/mine.py:Keep"]):
        assert main(["leaderboard", *options, *flags]) == 2
        assert "Keep.json was made with another plan: choose another --results" in capsys.readouterr().err


def test_committed_results_fit_the_packaged_plan():
    plan, folder = leaderboard.read_plan(), Path(__file__).parents[2] / "results" / "leaderboard"
    results = [result for result in leaderboard.read_results(folder) if result["split"] in plan.splits]
    for result in results:
        leaderboard.check_plan(plan, result, folder)
    assert results


@pytest.mark.parametrize("method", ["fedmd", "rcfl", "fedmatch", "feddf"])
def test_committed_floats_count_the_public_images_that_were_used(method):
    root = Path(__file__).parents[2]
    plan = leaderboard.read_plan(root / "experiments" / "equal_data" / "digits.yaml")
    cell = leaderboard.Cell("mlp", "digits", method)
    committed = json.loads(cell.path(root / "results" / "leaderboard").read_text())
    one_way = {"fedmd": 5120, "rcfl": 10_000, "fedmatch": 7680, "feddf": 64 * 200 + 200 + 200 * 10 + 10}[method]
    assert leaderboard.sent(plan, cell, committed["chosen"], {}) == committed["floats"] == 2 * one_way


def test_results_of_a_split_with_a_slash_in_its_name_are_read(tmp_path):
    cell = leaderboard.Cell("mine/net.py:Net", "a/b", "fedavg")
    leaderboard.write_result(RESULT, cell.path(tmp_path))
    assert len(leaderboard.read_results(tmp_path)) == 1


@pytest.mark.parametrize("splits", [[], ["dir"]])
def test_a_ranking_over_no_splits_or_no_seeds_is_left_out(tmp_path, splits):
    no_scores = np.zeros((2, len(splits), 0 if splits else 3))
    assert _ranking(tmp_path / "page.md", "mlp", ["fedavg", "fedprox"], splits, no_scores, []) == []


@pytest.mark.parametrize("names", [["fedavg", "moon"], ["fedprox", "moon"]])
def test_p_values_are_explained_only_where_fedavg_is_ranked(tmp_path, names):
    text, _ = _ranking(tmp_path / "page.md", "mlp", names, ["dir"], np.array([[[0.5, 0.6]], [[0.4, 0.5]]]), [])
    assert ("P-values" in text) == ("p, Holm" in text) == ("fedavg" in names)


def test_a_name_that_is_written_twice_counts_once(tmp_path, capsys):
    (tmp_path / "plan.yaml").write_text(PLAN)
    assert main(command(tmp_path, "--method=fedavg", "--split=dir, dir", "--network=mlp,mlp", "--status")) == 0
    assert capsys.readouterr().out == "0 of 1 cells have a result.\n"


def test_a_page_and_the_status_are_not_asked_for_together(tmp_path, capsys):
    assert main(["leaderboard", "--status", f"--page={tmp_path / 'page.md'}"]) == 2
    sentence = "--page writes the tables, and --status shows one line: give one of them.\n"
    assert capsys.readouterr().err == sentence


@pytest.mark.thorough
def test_mistakes_are_said_before_anything_runs(folder, capsys):
    assert main(command(folder, "--split=dri")) == 2
    assert capsys.readouterr().err == "--split names no split of the plan by 'dri': did you mean 'dir'?\n"
    assert main(["leaderboard", f"--plan={folder}/mine.py"]) == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_signal_ends_a_leaderboard_and_its_workers_once_the_round_is_saved(tmp_path, monkeypatch, capsys, workers):
    def cell_in_which_a_signal_comes(*_):
        with interrupts.rounds():
            signal.raise_signal(signal.SIGTERM)
            interrupts.end_after(int(interrupts.pending(3) is not None))
        return RESULT

    def wait_for_workers(*_):
        signal.raise_signal(signal.SIGTERM)

    (tmp_path / "plan.yaml").write_text(PLAN)
    monkeypatch.setattr(leaderboard, "run_cell", cell_in_which_a_signal_comes)
    monkeypatch.setattr(cli_leaderboard, "processes", wait_for_workers)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert main(command(tmp_path, "--method=fedavg", f"--workers={workers}")) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "stopped; the same command continues.\n"


@pytest.mark.parametrize("method", METHODS)
def test_the_packaged_plan_has_four_trials_for_every_method(method):
    plan = leaderboard.read_plan()
    trials = plan.trials_of(method, "simple_cnn")
    assert len(trials) == 4
    for trial in trials:
        config, built_method = configure(
            leaderboard.options(plan, leaderboard.Cell("simple_cnn", "cifar10-P10C3", method), trial, 1, {})
        )
        assert config.select_on == "validation"
        values = {**vars(config), **vars(built_method)}
        assert all(values[name] == value for name, value in trial.items())


def test_ranks_are_those_computed_by_hand():
    scores = np.array([[[0.9, 0.9], [0.8, 0.8]], [[0.7, 0.7], [0.9, 0.9]], [[0.1, -np.inf], [0.1, 0.1]]])
    ranking = ranks(scores)
    np.testing.assert_array_equal(ranking.mean, [1.5, 1.5, 3.0])
    np.testing.assert_array_equal(ranking.low, [1.0, 1.0, 1.0])
    np.testing.assert_array_equal(ranking.high, [3.0, 3.0, 3.0])  # of two splits the factor of Student is 12.7
    assert ranking.critical == pytest.approx(2.343 * np.sqrt(3 * 4 / (6 * 2)), abs=2e-3)  # q of three methods


def test_means_that_are_equal_but_for_rounding_share_their_rank():
    seeds = np.array([[[0.1, 0.2, 0.3]], [[0.3, 0.2, 0.1]], [[0.1, 0.1, 0.1]]])
    assert seeds[0].mean() != seeds[1].mean()
    assert ranks(seeds).mean.tolist() == [1.5, 1.5, 3.0]


def test_with_one_split_rank_intervals_come_from_resampled_seeds():
    ranking = ranks(np.array([[[0.1, 0.4]], [[0.2, 0.3]]]))
    assert [ranking.mean.tolist(), ranking.low.tolist(), ranking.high.tolist()] == [[1.5, 1.5], [1.0, 1.0], [2.0, 2.0]]


def test_one_seed_of_one_split_says_nothing_about_the_ranks():
    ranking = ranks(np.array([[[0.9]], [[0.5]], [[0.1]]]), baseline=0)
    np.testing.assert_array_equal([ranking.low, ranking.high], [[1] * 3, [3] * 3])
    np.testing.assert_array_equal(ranking.over, [[-2, 2]] * 3)
    np.testing.assert_array_equal(ranking.p, [np.nan, 1, 1])


def test_ranks_that_no_draw_changes_have_the_p_value_of_equal_signs():
    ranking = ranks(np.array([[[0.9, 0.9, 0.8]], [[0.5, 0.5, 0.4]]]), baseline=0)
    np.testing.assert_array_equal(ranking.p, [np.nan, 0.25])
    scores = np.broadcast_to([[[0.6]], [[0.5]], [[0.1]]], (3, 5, 3)).copy()
    scores[2, ::3] = 0.9  # the means of ranks are no whole numbers, their difference is one but for rounding
    assert ranks(scores, baseline=1).p[0] == 0.5**4


def test_p_values_are_the_share_of_sign_flips_with_as_large_a_mean():
    scores = np.random.default_rng(1).normal(size=(7, 6, 3))
    split_ranks = rankdata(-scores.mean(-1), axis=0)
    differences = split_ranks - split_ranks[2]
    flips = np.array(list(itertools.product([-1, 1], repeat=6)))
    as_large = np.abs(differences @ flips.T) >= np.abs(differences.sum(1, keepdims=True)) - 1e-9
    np.testing.assert_allclose(np.delete(ranks(scores, baseline=2).p, 2), np.delete(as_large.mean(1), 2))


@pytest.mark.parametrize("splits", [1, 5, 8])
def test_a_lost_seed_makes_neither_the_p_value_smaller_nor_the_interval_narrower(splits):
    scores = np.broadcast_to([[[1.0]], [[0.0]]], (2, splits, 3)).copy()
    always = ranks(scores, baseline=1)
    scores[0, 0, 0] = -1.5  # its mean over the seeds is still above
    once_lost = ranks(scores, baseline=1)
    assert once_lost.p[0] >= always.p[0] == 0.5 ** ((splits if splits > 1 else 3) - 1)
    widths = [np.diff(one.over[0]) for one in (always, once_lost)]
    assert 0 < widths[0] <= widths[1]


def test_rank_intervals_of_equal_seeds_are_students():
    scores = np.random.default_rng(0).normal(size=(9, 6, 1)).repeat(3, axis=2)
    split_ranks, ranking = rankdata(-scores[..., 0], axis=0), ranks(scores, baseline=0)
    expected = ttest_1samp(split_ranks - split_ranks[0], 0, axis=1).confidence_interval(0.95)
    np.testing.assert_allclose(ranking.over[1:].T, np.clip(expected, -8, 8)[:, 1:], atol=0.2)
    expected = ttest_1samp(split_ranks, 0, axis=1).confidence_interval(0.95)
    np.testing.assert_allclose([ranking.low, ranking.high], np.clip(expected, 1, 9), atol=0.2)


@pytest.mark.thorough
@pytest.mark.parametrize(("between_splits", "between_seeds"), [(2.0, 0.5), (1.0, 1.0), (3.0, 0.2), (0.3, 1.0)])
def test_rank_intervals_of_five_splits_contain_what_they_estimate(between_splits, between_seeds):
    rng, centres = np.random.default_rng(0), np.linspace(0, 3, 10)[:, None, None]

    def drawn(splits):
        of_split = between_splits * rng.normal(size=(10, splits, 1))
        return centres + of_split + between_seeds * rng.normal(size=(10, splits, 3))

    true = rankdata(-drawn(20_000).mean(-1), axis=0).mean(-1)
    repeated = [ranks(drawn(5), baseline=4) for _ in range(100)]
    own = np.mean([(one.low <= true) & (true <= one.high) for one in repeated])
    over = np.mean([(one.over[:, 0] <= true - true[4]) & (true - true[4] <= one.over[:, 1]) for one in repeated])
    assert min(own, over) > 0.92  # that they are no wider than they need be is the test above


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("select_on: validation", "select_on: test", "chooses nothing on 'dir'"),
        ("public: {}", "scores: {ditto: [pa_best]}", "'scores' in .* needs an entry 'default'"),
        ("public: {}", "scores: {default: pa_best}", "the scores of 'default' in .* must be a list"),
        ("validation: 0.2, ", "", "chooses nothing on 'dir'"),
        ("{lr: 0.1, mu: 0}, ", "", r"as many settings for each method: 'fedprox' has 1 and 'default' 2\."),
        ("trials: {default", "trials: {fedavg", "'trials' in .* needs an entry 'default'"),
        ("seeds: 2", "seeds: three", "'seeds' in"),
        ("networks: [mlp]", "networks: mlp", "at least one network"),
        ("default: [{lr: 0.0001}, {lr: 0.1}]", "default: [1, 2]", "the trials of 'default'"),
        ("default: [{lr: 0.0001}, {lr: 0.1}]", "default: []", "the trials of 'default'"),
        ("public: {}", "public: 3", "'public' in"),
        ("networks: [mlp]", "networks: [5]", "has '5' in place of a name: put it in quotes"),
        ("  dir: {", "  0.5: {", "has '0.5' in place of a name"),
        ("beta: 1", "1: 2", "has '1' in place of a name"),
        ("trials: {", "trials: {1: [{lr: 0.1}, {lr: 0.2}], ", "has '1' in place of a name"),
        ("dir: {dataset: digits, partition: dirichlet, beta: 1}", "dir: 3", "'dir' of 'splits'"),
    ],
)
def test_an_invalid_plan_is_refused(tmp_path, old, new, message):
    (tmp_path / "plan.yaml").write_text(PLAN.replace(old, new))
    with pytest.raises(UserError, match=message):
        leaderboard.read_plan(tmp_path / "plan.yaml")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fedprx", r"'trials' in .* names no method by 'fedprx': did you mean 'fedprox'\?"),
        ("decorated", r"names no method by 'decorated': .* of its class, as Mine of mine.py:Mine\."),
    ],
)
def test_trials_of_a_name_that_no_method_has_are_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.setattr(METHODS, "data", dict(METHODS.data))
    (tmp_path / "decorated.py").write_text(METHOD_CODE.replace("@struct", '@fp.register_method("decorated")\n@struct'))
    own = f"{tmp_path}/decorated.py:Keep"
    assert METHODS.find(own) is METHODS.find("decorated")
    plan = leaderboard.read_plan()._replace(trials={"default": [{"lr": 0.1}], name: [{"lr": 0.2}]})
    with pytest.raises(UserError, match=message):
        leaderboard.check_names(plan, [own], [], tmp_path / "plan.yaml")


def test_trials_of_ones_own_method_go_by_its_class_or_its_path(tmp_path):
    names = ["a/mine.py:Mine", "other.py:Other", "third.py:Third+prototypes", "fedprox"]
    trials = {"default": [{"lr": 0}], "Mine": [{"lr": 1}], "other.py:Other": [{"lr": 2}], "moon+sam": [{"lr": 3}]}
    plan = leaderboard.read_plan()._replace(trials=trials, scores={"default": ["ga_best"], "Mine": ["pa_best"]})
    assert [plan.trials_of(name, "mlp") for name in names] == [[{"lr": lr}] for lr in (1, 2, 0, 0)]
    assert [plan.scores_of(name) for name in names] == [["pa_best"], *[["ga_best"]] * 3]
    leaderboard.check_names(plan, ["fedavg"], names, tmp_path)


def test_results_that_are_damaged_or_of_another_class_are_refused(tmp_path):
    cell = leaderboard.Cell("mlp", "dir", "two.py:Mine")
    other_class = RESULT | {"method": "one.py:Mine"}
    leaderboard.write_result(other_class, cell.path(tmp_path))
    with pytest.raises(UserError, match=r"is of method=one.py:Mine: rename one of the classes"):
        leaderboard.has_result(leaderboard.read_plan(), cell, tmp_path)
    damaged = [json.dumps(other_class | {"seeds": seeds}) for seeds in ("x", ["x"], [{"ga_best": "x"}])]
    for text, message in (
        ("{", "is damaged"),
        *((invalid, "is not a result of the leaderboard") for invalid in ("{}", *damaged)),
    ):
        cell.path(tmp_path).write_text(text)
        with pytest.raises(UserError, match=message):
            leaderboard.read_results(tmp_path)


def test_a_results_folder_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    cell = leaderboard.Cell("mlp", "dir", "fedavg")
    with pytest.raises(UserError, match=r"cannot write to .*: choose another results\."):
        leaderboard.write_result(RESULT, cell.path(tmp_path / "file"))


def test_methods_are_listed_in_the_order_of_their_ranks(tmp_path):
    scores = np.array([[[0.1], [0.2]], [[0.5], [0.6]], [[0.3], [0.4]]])
    text, _ = _ranking(tmp_path / "page.md", "mlp", ["a", "b", "c"], ["x", "y"], scores, ["d"])
    assert [line[2] for line in text.splitlines() if line[:2] == "| " and line[3] == " "] == ["b", "c", "a"]
    left_out = "Without a rank in mlp, as not all splits and seeds have a result: d."
    assert left_out in text
    assert _ranking(tmp_path / "page.md", "mlp", ["a"], ["x"], scores[:1, :1], ["d"]) == [f"{left_out}\n"]


def test_the_second_score_decides_between_trials_equal_in_the_first():
    outcomes = [{"ga": 0.5, "pa": 0.1}, {"ga": 0.5, "pa": 0.3}, {"ga": 0.4, "pa": 0.9}, UserError("it diverged")]
    assert leaderboard._best(outcomes, ["ga"]) == 0
    assert leaderboard._best(outcomes, ["ga", "pa"]) == 1
    assert leaderboard._best(outcomes[3:], ["ga", "pa"]) == 0
    assert leaderboard._best([outcomes[3], {"loss": -2.0}], ["loss"]) == 1
    with pytest.raises(UserError, match="a run has no 'PA' in its summary: name another entry"):
        leaderboard._best(outcomes, ["ga", "PA"])


def test_scores_equal_up_to_float_rounding_are_equal():
    assert leaderboard._best([{"ga": 0.3, "pa": 0.2}, {"ga": 0.1 + 0.2, "pa": 0.1}], ["ga", "pa"]) == 0


def test_methods_with_fedavgs_global_model_choose_trials_by_ga_then_pa():
    plan = leaderboard.read_plan()
    assert plan.scores_of("ditto") == plan.scores_of("apfl") == ["ga_validation_best", "pa_validation_best"]
    assert plan.scores_of("fedavg") == ["ga_validation_best"]


def test_shared_draws_distinguish_methods_whose_intervals_overlap():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(1, 6, 3))
    # The first is always just above the second.
    scores = np.concatenate([noise + 0.1, noise, rng.normal(size=(4, 6, 3))])
    ranking = ranks(scores, baseline=1)
    assert ranking.over[0, 1] < 0
    assert ranking.high[0] > ranking.low[1]
    np.testing.assert_array_equal(ranking.over[1], [0, 0])
    assert ranks(scores).over is None


def test_one_split_gives_no_groups_of_indistinguishable_methods():
    assert cliques(np.array([1.0, 2.0, 3.0]), float("nan")) == []


def test_mean_ranks_that_differ_by_just_the_critical_difference_are_told_apart():
    assert cliques(np.array([1.0, 2.0, 2.5]), 1.0) == [(1, 2)]


@pytest.mark.thorough
def test_the_page_and_the_workers_create_their_folders(tmp_path, folder, capsys):
    assert main(command(folder, f"--page={tmp_path}/new/page.md", "--method=fedprox")) == 0
    assert (tmp_path / "new/page.md").is_file()
    options = [f"--plan={folder}/plan.yaml", f"--results={folder}/results", f"--runs-dir={tmp_path}/fresh"]
    assert main(["leaderboard", *options, "--method=fedprox", "--workers=2"]) == 0
    assert (tmp_path / "fresh" / "worker-0.log").is_file()


def test_a_plan_with_its_own_splits_takes_the_packaged_trials(tmp_path):
    plan_text = "run: {validation: 0.1, select_on: validation}\nsplits: {mine: {dataset: digits}}\nnetworks: [mlp]\n"
    (tmp_path / "plan.yaml").write_text(plan_text)
    plan, packaged = leaderboard.read_plan(tmp_path / "plan.yaml"), leaderboard.read_plan()
    assert (plan.trials, plan.seeds, plan.networks) == (packaged.trials, 3, ["mlp"])
    cell = leaderboard.Cell("mlp", "mine", "fml")
    assert leaderboard.options(plan, cell, plan.trials_of("fml", "mlp")[0], 0, {})["meme"] == "mlp"
    (tmp_path / "plan.yaml").write_text("run: {}\nsplits: {}\n")
    with pytest.raises(UserError, match="needs a section 'networks'"):
        leaderboard.read_plan(tmp_path / "plan.yaml")
