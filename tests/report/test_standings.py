"""Results of the leaderboard as tables and as accuracies."""

import numpy as np

from fedjax_pcdd.report import standings


def made(method, accuracies, failed=0):
    seeds = [{"seed": i, "ga_best": x, "ga_last": x, "ga_mean_last10": x} for i, x in enumerate(accuracies)]
    seeds += [{"seed": len(seeds) + i, "failed": "not finite"} for i in range(failed)]
    return {"network": "mlp", "split": "dir", "method": method, "trials": [], "chosen": {}, "floats": 1, "seeds": seeds}


def test_methods_of_which_seeds_failed_come_last_without_a_rank():
    table = standings.table("mlp", "dir", [made("a", [0.9], failed=2), made("b", [0.7] * 3), made("c", [0.8] * 3)])
    assert [(row.label, row.cells[0].rank) for row in table.rows] == [("c", 1), ("b", 2), ("a", 0)]


def test_fewer_seeds_are_no_failures():
    cells = [("mlp", "dir", name) for name in "abc"]
    results = [made("a", [0.9]), made("b", [0.5] * 3), made("c", [])]
    names, _, scores = standings.over_splits(results, cells)
    assert names == ["b", "c"]
    np.testing.assert_array_equal(scores[:, 0], [[0.5] * 3, [-np.inf] * 3])


def test_a_method_without_a_global_model_is_marked_and_has_no_best_round():
    local = made("a", [0.3] * 3) | {"global_model": False}
    table = standings.table("mlp", "dir", [local, made("b", [0.7] * 3)])
    assert [(row.label, row.cells[0].mean is None) for row in table.rows] == [("b", False), ("a*", True)]
    names, _, _ = standings.over_splits([local], [("mlp", "dir", "a")])
    assert names == ["a*"]


def test_pa_of_several_moments_has_columns_of_its_own_and_the_spread_has_no_best():
    moments = {"a": "PA in training", "b": "PA after fine-tuning", "c": "PA in training"}
    results = [made(name, [0.5]) | {"pa": moment} for name, moment in moments.items()]
    for one, pa in zip(results, (0.25, 0.5, 0.75), strict=True):
        one["seeds"][0] |= {"pa_best": pa, "pa_std": pa}
    table = standings.table("mlp", "dir", results)
    rows = {row.label: dict(zip(table.headings[1:], row.cells, strict=True)) for row in table.rows}
    assert [rows[name]["PA in training best"].mean for name in "abc"] == [25.0, None, 75.0]
    assert [rows[name]["PA in training best"].rank for name in "ac"] == [2, 1]
    assert [rows[name]["spread of PA in training"].rank for name in "ac"] == [0, 0]


def test_ranks_do_not_ask_for_the_seeds_of_another_plans_results():
    cells = [("mlp", "dir", name) for name in "ab"]
    other = made("a", [0.9] * 5) | {"split": "another"}
    names, _, _ = standings.over_splits([made("a", [0.9] * 3), made("b", [0.5] * 3), other], cells)
    assert names == ["a", "b"]


def test_methods_are_ordered_and_ranked_by_the_last_ten_rounds_not_by_the_best_one():
    risen, fallen = made("risen", [0.6] * 3), made("fallen", [0.5] * 3)
    for seed in fallen["seeds"]:
        seed["ga_best"] = 0.9
    assert [row.label for row in standings.table("mlp", "dir", [fallen, risen]).rows] == ["risen", "fallen"]
    names, _, scores = standings.over_splits([fallen, risen], [("mlp", "dir", name) for name in ("risen", "fallen")])
    assert dict(zip(names, scores[:, 0, 0], strict=True)) == {"risen": 0.6, "fallen": 0.5}


def test_a_table_has_its_network_and_its_split_alone():
    other = [made("b", [0.5]) | {"network": "cnn"}, made("c", [0.5]) | {"split": "iid"}]
    assert [row.label for row in standings.table("mlp", "dir", [made("a", [0.5]), *other]).rows] == ["a"]


def test_splits_keep_the_order_of_the_plan_in_names_and_scores():
    results = [made("a", [score]) | {"split": split} for split, score in (("first", 0.1), ("another", 0.2))]
    _, splits, scores = standings.over_splits(results, [("mlp", "first", "a"), ("mlp", "another", "a")])
    assert (splits, scores[0, :, 0].tolist()) == (["first", "another"], [0.1, 0.2])


def test_trials_and_seeds_that_failed_are_counted_of_their_own_number():
    one = made("a", [0.5], failed=2) | {"trials": [{"failed": "not finite"}, *[{"score": 0.5}] * 3]}
    *_, failures = standings.table("mlp", "dir", [one]).rows[0].cells
    assert failures.text == "1 of 4 trials failed; 2 of 3 seeds failed"


def test_seconds_are_those_of_a_round():
    one = made("a", [0.5])
    one["seeds"][0] |= {"seconds_per_round": 2.0, "wall_seconds": 50.0}
    table = standings.table("mlp", "dir", [one])
    assert table.rows[0].cells[table.headings.index("seconds a round") - 1].mean == 2.0


def test_a_split_without_any_result_yet_keeps_no_method_out():
    cells = [("mlp", split, name) for split in ("dir", "later") for name in "ab"]
    names, splits, _ = standings.over_splits([made("a", [0.5]), made("b", [0.4])], cells)
    assert (names, splits) == (["a", "b"], ["dir"])
