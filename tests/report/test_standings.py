"""Results of the leaderboard as tables and as accuracies."""

import numpy as np

from fedjax_pcdd.report import standings


def cell_result(method, accuracies, failed=0):
    seeds = [{"seed": i, "ga_best": x, "ga_last": x, "ga_mean_last10": x} for i, x in enumerate(accuracies)]
    seeds += [{"seed": len(seeds) + i, "failed": "not finite"} for i in range(failed)]
    return {"network": "mlp", "split": "dir", "method": method, "trials": [], "chosen": {}, "floats": 1, "seeds": seeds}


def test_methods_with_failed_seeds_come_last_without_a_rank():
    table = standings.table(
        "mlp", "dir", [cell_result("a", [0.9], failed=2), cell_result("b", [0.7] * 3), cell_result("c", [0.8] * 3)]
    )
    assert [(row.label, row.cells[0].rank) for row in table.rows] == [("c", 1), ("b", 2), ("a", 0)]


def test_methods_with_fewer_seeds_are_left_out_and_those_that_failed_are_not():
    cells = [("mlp", "dir", name) for name in "abc"]
    results = [cell_result("a", [0.9]), cell_result("b", [0.5] * 3), cell_result("c", [])]
    names, _, scores, _ = standings.over_splits(results, cells)
    assert names == ["b", "c"]
    np.testing.assert_array_equal(scores[:, 0], [[0.5] * 3, [-np.inf] * 3])


def test_a_seed_that_failed_is_below_all_others_in_the_ranks():
    _, _, scores, _ = standings.over_splits([cell_result("a", [0.5], failed=2)], [("mlp", "dir", "a")])
    assert sorted(scores[0, 0]) == [-np.inf, -np.inf, 0.5]


def test_a_method_without_a_global_model_is_marked_and_has_no_best_round():
    local = cell_result("a", [0.3] * 3) | {"global_model": False}
    table = standings.table("mlp", "dir", [local, cell_result("b", [0.7] * 3)])
    assert [(row.label, row.cells[0].mean is None) for row in table.rows] == [("b", False), ("a*", True)]
    names, _, _, _ = standings.over_splits([local], [("mlp", "dir", "a")])
    assert names == ["a*"]


def test_each_moment_of_pa_has_its_columns_and_its_spread_is_not_ranked():
    moments = {"a": "PA in training", "b": "PA after fine-tuning", "c": "PA in training"}
    results = [cell_result(name, [0.5]) | {"pa": moment} for name, moment in moments.items()]
    for result, pa in zip(results, (0.25, 0.5, 0.75), strict=True):
        result["seeds"][0] |= {"pa_best": pa, "pa_std": pa}
    table = standings.table("mlp", "dir", results)
    rows = {row.label: dict(zip(table.headings[1:], row.cells, strict=True)) for row in table.rows}
    assert [rows[name]["PA in training best"].mean for name in "abc"] == [25.0, None, 75.0]
    assert [rows[name]["PA in training best"].rank for name in "ac"] == [2, 1]
    assert [rows[name]["spread of PA in training"].rank for name in "ac"] == [0, 0]


def test_ranks_ignore_how_many_seeds_results_of_another_plan_have():
    cells = [("mlp", "dir", name) for name in "ab"]
    unplanned = cell_result("a", [0.9] * 5) | {"split": "another"}
    names, _, _, _ = standings.over_splits([cell_result("a", [0.9] * 3), cell_result("b", [0.5] * 3), unplanned], cells)
    assert names == ["a", "b"]


def test_methods_are_ordered_and_ranked_by_the_last_ten_rounds_not_the_best():
    risen, fallen = cell_result("risen", [0.6] * 3), cell_result("fallen", [0.5] * 3)
    for seed in fallen["seeds"]:
        seed["ga_best"] = 0.9
    assert [row.label for row in standings.table("mlp", "dir", [fallen, risen]).rows] == ["risen", "fallen"]
    names, _, scores, _ = standings.over_splits([fallen, risen], [("mlp", "dir", name) for name in ("risen", "fallen")])
    assert dict(zip(names, scores[:, 0, 0], strict=True)) == {"risen": 0.6, "fallen": 0.5}


def test_a_table_holds_only_results_of_its_network_and_split():
    others = [cell_result("b", [0.5]) | {"network": "cnn"}, cell_result("c", [0.5]) | {"split": "iid"}]
    assert [row.label for row in standings.table("mlp", "dir", [cell_result("a", [0.5]), *others]).rows] == ["a"]


def test_splits_keep_the_order_of_the_plan_in_names_and_scores():
    results = [cell_result("a", [score]) | {"split": split} for split, score in (("first", 0.1), ("another", 0.2))]
    _, splits, scores, _ = standings.over_splits(results, [("mlp", "first", "a"), ("mlp", "another", "a")])
    assert (splits, scores[0, :, 0].tolist()) == (["first", "another"], [0.1, 0.2])


def test_failed_trials_and_failed_seeds_are_counted_separately():
    result = cell_result("a", [0.5], failed=2) | {"trials": [{"failed": "not finite"}, *[{"score": 0.5}] * 3]}
    *_, failures = standings.table("mlp", "dir", [result]).rows[0].cells
    assert failures.text == "1 of 4 trials failed; 2 of 3 seeds failed"


def test_seconds_are_those_of_one_round():
    result = cell_result("a", [0.5])
    result["seeds"][0] |= {"seconds_per_round": 2.0, "wall_seconds": 50.0}
    table = standings.table("mlp", "dir", [result])
    assert table.rows[0].cells[table.headings.index("seconds a round") - 1].mean == 2.0


def test_a_split_without_any_result_yet_excludes_no_method():
    cells = [("mlp", split, name) for split in ("dir", "later") for name in "ab"]
    names, splits, _, lacking = standings.over_splits([cell_result("a", [0.5]), cell_result("b", [0.4])], cells)
    assert (names, splits, lacking) == (["a", "b"], ["dir"], [])
