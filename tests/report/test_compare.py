"""Paired comparison over made-up run folders."""

import json

import pytest
from made_up_runs import write_run

from fedjax_pcdd.cli.report import compare_main
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.collect import collect
from fedjax_pcdd.report.compare import compare, comparison_tables
from fedjax_pcdd.report.contents import pivot
from fedjax_pcdd.training.protocols import IN_WORDS


def pairs(folder, first, second, **options):
    """Runs of FedAvg and FedGELA with these GAs, over seeds 0, 1, ..."""
    for seed, (a, b) in enumerate(zip(first, second, strict=True)):
        write_run(folder / f"a{seed}", a, seed=seed, shift=seed)
        write_run(folder / f"b{seed}", b, seed=seed, shift=seed, method="fedgela", **options)
    return collect([folder])


def rewrite(folder, **entries):
    """Change entries of a finished run's summary."""
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_a_difference_is_the_mean_over_pairs(tmp_path):
    results, notes = compare(pairs(tmp_path, (0.3, 0.5, 0.7), (0.31, 0.52, 0.73)))
    (best,) = [result for result in results if result.metric == "ga_best"]
    assert (best.first, best.other, best.difference.seeds, notes) == ("fedavg", "fedgela", (0, 1, 2), [])
    assert best.difference.mean == pytest.approx(2.0)


def test_equal_differences_have_an_interval_of_no_width(tmp_path):
    results, _ = compare(pairs(tmp_path, (0.3, 0.5, 0.7), (0.35, 0.55, 0.75)))
    assert (results[0].difference.low, results[0].difference.high) == (pytest.approx(5.0), pytest.approx(5.0))


def test_a_single_pair_gives_only_the_sign_of_its_difference(tmp_path):
    results, _ = compare(pairs(tmp_path, (0.3,), (0.5,)))
    assert (results[0].difference.low, results[0].difference.verdict()) == (None, "one seed, above")


@pytest.mark.thorough
def test_comparisons_of_two_methods_with_the_first_are_adjusted_as_one_family(tmp_path):
    first, second = (0.3, 0.4, 0.5), (0.31, 0.42, 0.51)
    alone = compare(pairs(tmp_path / "runs", first, second))[0][0].difference
    for seed, ga in enumerate((0.9, 0.1, 0.5)):
        write_run(tmp_path / f"runs/c{seed}", ga, seed=seed, shift=seed, method="moon")
    results, _ = compare(collect([tmp_path / "runs"]))
    adjusted = next(result.difference for result in results if result.other == "fedgela" and result.metric == "ga_best")
    assert adjusted.p == pytest.approx(2 * alone.p)
    assert (adjusted.low, adjusted.high) == (alone.low, alone.high)


@pytest.mark.parametrize(
    ("fine_tune_epochs", "suffix", "tuned_suffix", "verdicts"),
    [
        (4, "", "", {"different quantities"}),
        (2, "", "", {"above"}),
        (2, ", as received", "", {"different quantities"}),
        (2, ", best epoch", ", best epoch", {"above"}),
        (4, ", best epoch", ", best epoch", {"different quantities"}),
    ],
)
def test_pa_after_more_training_or_by_another_protocol_has_no_verdict(
    tmp_path, capsys, fine_tune_epochs, suffix, tuned_suffix, verdicts
):
    tuned = f"global model fine-tuned for {fine_tune_epochs} epochs{tuned_suffix}"
    for seed in range(3):
        for name, method, protocol in (("a", "fedgela", "during training" + suffix), ("b", "fedavg", tuned)):
            options = {"method": method, "local_epochs": 2, "fine_tune_epochs": fine_tune_epochs}
            pa = {"a": 0.5, "b": 0.6}[name] + seed / 50 * (name == "b")
            folder = write_run(tmp_path / f"{name}{seed}", 0.3, pa, seed=seed, shift=seed, **options)
            rewrite(folder, pa_protocol=protocol)
    assert compare_main([f"{tmp_path}/{name}{seed}" for name in "ab" for seed in range(3)]) == 0
    printed = capsys.readouterr().out
    lines = [line.split("|") for line in printed.splitlines() if "PA (" in line.partition("fedavg less fedgela |")[2]]
    assert {line[-2].strip() for line in lines} == verdicts
    assert ("PA of fedgela and of fedavg are different quantities" in printed) == ("above" not in verdicts)
    assert ("fine_tune_epochs equal to local_epochs" in printed) == (fine_tune_epochs == 4)
    assert ("the same `pa_protocol`" in printed) == (suffix != tuned_suffix)


@pytest.mark.parametrize(("epochs", "rank"), [(2, 1), (10, 0)])
def test_a_pivot_marks_nothing_among_pa_after_other_numbers_of_local_epochs(tmp_path, epochs, rank):
    options = {"local_epochs": 2, "fine_tune_epochs": epochs}
    rewrite(write_run(tmp_path / "a", pa=0.5, method="fedgela", **options), pa_protocol="during training")
    rewrite(write_run(tmp_path / "b", pa=0.6, **options), pa_protocol=f"global model fine-tuned for {epochs} epochs")
    table = pivot(collect([tmp_path]), "method", None, "pa_best")
    assert table.rows[1].cells[0].rank == rank
    assert ("PA is of different quantities" in table.remarks) == (rank == 0)


def test_one_epoch_is_named_in_the_singular(tmp_path):
    rewrite(write_run(tmp_path / "a", method="fedgela", local_epochs=1), pa_protocol="during training")
    rewrite(write_run(tmp_path / "b", local_epochs=1), pa_protocol="global model fine-tuned for 10 epochs")
    _, notes = compare(collect([tmp_path]))
    assert any("in training (1 epoch) and after fine-tuning (10 epochs)" in note for note in notes)


def test_pa_of_one_method_by_two_protocols_has_no_verdict(tmp_path):
    for seed in range(3):
        for name, protocol in (("a", "last"), ("b", "best_epoch")):
            folder = write_run(tmp_path / f"{name}{seed}", 0.3, 0.5, seed=seed, shift=seed, pa_protocol=protocol)
            rewrite(folder, pa_protocol="during training" + IN_WORDS[protocol])
    results, notes = compare(collect([tmp_path]))
    assert {result.metric for result in results if not result.alike} == {"pa_best", "pa_last"}
    assert " of fedavg (pa_protocol=best_epoch) are different quantities, in training" in notes[0]


@pytest.mark.parametrize(
    ("options", "entries", "unlike"),
    [({"eval_every": 5}, {}, {"ga_best", "ga_mean_last10", "pa_best"}), ({}, {"ga_best_mean": 0.4}, {"ga_best"})],
)
def test_best_rounds_of_fewer_tests_or_of_each_client_alone_have_no_verdict(tmp_path, options, entries, unlike):
    for seed in range(3):
        write_run(tmp_path / f"a{seed}", 0.3, 0.5, seed=seed, shift=seed)
        folder = write_run(tmp_path / f"b{seed}", 0.4, 0.6, seed=seed, shift=seed, method="moon", **options)
        rewrite(folder, **entries)
    results, notes = compare(collect([tmp_path]))
    assert {result.metric for result in results if not result.alike} == unlike
    assert any("no verdict on" in note for note in notes)


def test_a_comparison_of_unlike_quantities_is_of_no_family(tmp_path):
    runs = pairs(tmp_path, (0.3, 0.4, 0.5), (0.31, 0.42, 0.51))
    alone = {result.metric: result.difference.p for result in compare(runs)[0]}
    for seed, ga in enumerate((0.9, 0.1, 0.5)):
        write_run(tmp_path / f"c{seed}", ga, seed=seed, shift=seed, method="moon", eval_every=5)
    results, _ = compare(collect([tmp_path]))
    (best, last) = (next(r for r in results if "fedgela" in r.other and r.metric == x) for x in ("ga_best", "ga_last"))
    assert best.difference.p == pytest.approx(alone["ga_best"])
    assert last.difference.p == pytest.approx(2 * alone["ga_last"])


@pytest.mark.parametrize(
    ("entries", "unlike"),
    [
        ({}, set()),
        ({"selected_on": "validation"}, {"ga_best", "pa_best"}),
        ({"ga_best_selected_on": "validation"}, {"ga_best"}),
    ],
)
def test_best_rounds_that_other_samples_chose_have_no_verdict(tmp_path, entries, unlike):
    for seed in range(3):
        write_run(tmp_path / f"a{seed}", 0.3, 0.5, seed=seed, shift=seed)
        rewrite(write_run(tmp_path / f"b{seed}", 0.4, 0.6, seed=seed, shift=seed, method="moon"), **entries)
    results, notes = compare(collect([tmp_path]))
    assert {result.metric for result in results if not result.alike} == unlike
    names = " and ".join(name for metric, name in (("ga_best", "GA best"), ("pa_best", "PA best")) if metric in unlike)
    assert [note.partition(" of fedavg and of moon are different quantities")[0] for note in notes] == [
        f"digits · dirichlet0.1: {names}" for _ in notes
    ]
    assert len(notes) == bool(unlike)
    (table,) = comparison_tables(results, 0.95)
    assert "; best rounds chosen by test samples" in table.title


def test_seeds_that_diverged_in_fine_tuning_are_named(tmp_path):
    runs = pairs(tmp_path, (0.3, 0.5, 0.7), (0.31, 0.52, 0.73))
    rewrite(runs[0].path, pa_best=None, pa_last=None, diverged_client=2)
    results, notes = compare(collect([tmp_path]))
    assert {len(result.difference.seeds) for result in results if result.metric.startswith("pa")} == {2}
    assert notes == [
        f"{runs[0].path} diverged in fine-tuning, so that it has no PA: its seed is left out of differences in PA."
    ]


def test_seeds_without_a_partner_are_left_out_with_a_note(tmp_path):
    runs = pairs(tmp_path, (0.3, 0.5), (0.4, 0.6))
    extra = collect([write_run(tmp_path / "c", seed=9)])
    results, notes = compare([*runs, *extra])
    assert results[0].difference.seeds == (0, 1)
    assert notes == ["digits · dirichlet0.1: seed 9 of fedavg has no partner in fedgela and is left out."]


def test_other_partitions_of_the_same_seed_are_not_compared(tmp_path):
    write_run(tmp_path / "runs/a", shift=1)
    write_run(tmp_path / "runs/b", shift=2, method="fedgela")
    with pytest.raises(UserError, match=r"no pair: .* seed 0 of fedavg and fedgela has different data or partitions"):
        compare(collect([tmp_path / "runs"]))


def test_one_method_alone_cannot_be_compared(tmp_path):
    with pytest.raises(UserError, match="fedavg alone: nothing to compare"):
        compare(collect([write_run(tmp_path / "a")]))


def test_settings_of_one_method_can_be_compared(tmp_path):
    write_run(tmp_path / "runs/a", method="fedprox", mu=0.1)
    write_run(tmp_path / "runs/b", method="fedprox", mu=1.0)
    results, _ = compare(collect([tmp_path / "runs"]))
    assert (results[0].first, results[0].other) == ("fedprox (mu=0.1)", "fedprox (mu=1.0)")


def test_the_first_run_sets_the_baseline_on_all_data(tmp_path):
    for beta in (0.1, 0.5):
        for mu in (1.0, 0.1):
            write_run(tmp_path / f"b{mu}-{beta}", method="fedprox", mu=mu, beta=beta)
        write_run(tmp_path / f"a{beta}", beta=beta)
    results, notes = compare(collect([tmp_path / "b1.0-0.5", tmp_path]))
    assert {(result.data, result.first) for result in results} == {
        ("digits · dirichlet0.1", "fedprox (mu=1.0)"), ("digits · dirichlet0.5", "fedprox (mu=1.0)")
    }  # fmt: skip
    assert notes == []


def test_data_without_the_baseline_are_left_out_with_a_note(tmp_path):
    write_run(tmp_path / "a0", method="fedprox", mu=1.0)
    write_run(tmp_path / "a1", method="moon")
    for name, mu in (("b0", 0.1), ("b1", 0.5)):
        write_run(tmp_path / name, method="fedprox", mu=mu, beta=0.5)
    _, notes = compare(collect([tmp_path]))
    assert notes == [f"digits · dirichlet0.5 has no finished fedprox with the settings of {tmp_path / 'a0'}: left out."]


def test_an_unfinished_or_damaged_first_run_is_not_replaced_by_another(tmp_path, capsys):
    pairs(tmp_path / "runs", (0.3, 0.5), (0.4, 0.6))
    write_run(tmp_path / "first", method="moon", finished=False)
    with pytest.raises(UserError, match=r"no pair: .*first is unfinished"):
        compare(collect([tmp_path / "first", tmp_path / "runs"]))
    (tmp_path / "first/resolved.json").write_text("{")
    assert compare_main([str(tmp_path / "first"), str(tmp_path / "runs")]) == 2
    assert "name another run first" in capsys.readouterr().err


def test_accuracies_not_finite_and_missing_partitions_are_noted(tmp_path):
    for folder in (write_run(tmp_path / "a"), write_run(tmp_path / "b", method="moon")):
        (folder / "partition.npz").unlink()
    (folder / "summary.json").write_text(
        (folder / "summary.json").read_text().replace('"ga_best": 0.5', '"ga_best": NaN')
    )
    results, notes = compare(collect([tmp_path]))
    assert "ga_best" not in [result.metric for result in results]
    assert "has no finite number as its GA best" in notes[0]
    assert "seed 0 of fedavg and moon has no partition.npz" in notes[1]


def test_a_run_that_lacks_its_partition_is_named_and_said_to_be_mended_by_resuming(tmp_path):
    pairs(tmp_path, (0.3, 0.5), (0.2, 0.4))
    runs = collect([tmp_path])
    (runs[0].path / "partition.npz").unlink()
    results, notes = compare(collect([tmp_path]))
    assert {len(result.difference.seeds) for result in results} == {1}
    assert notes == [f"{runs[0].path} has no partition.npz and is left out: resume it, which writes that again."]


def test_the_command_prints_a_comparison(tmp_path, capsys):
    pairs(tmp_path, (0.3, 0.5), (0.2, 0.4))
    assert compare_main([str(tmp_path)]) == 0
    assert (
        "| fedgela less fedavg | GA best | 2 | −10.00 | [−10.00, −10.00] | 0.500 | – | not distinguishable |"
        in capsys.readouterr().out
    )


def test_the_verdict_depends_on_the_confidence(tmp_path, capsys):
    pairs(tmp_path, (0.3, 0.5), (0.2, 0.4))
    assert compare_main([str(tmp_path), "--confidence=0.5"]) == 0
    assert (
        "| fedgela less fedavg | GA best | 2 | −10.00 | [−10.00, −10.00] | 0.500 | – | below |"
        in capsys.readouterr().out
    )
