"""The generated pages: what is computed from results, and whether the committed pages match the results."""

import functools
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from commands import parse
from made_up_results import CLAIM, PAPER, made_up

from fedjax_pcdd import methods
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.expected import EXPECTED, Expected, read_expected
from fedjax_pcdd.training.config import RUN, values
from fedjax_pcdd.training.fields import options_of
from fedjax_pcdd.training.presets import PRESETS, preset_values, read_preset
from reproduction.ambiguities import Ambiguity, Measured, ambiguities_page, effects, read_ambiguities, tags_of
from reproduction.claims import counts, findings, read_claims
from reproduction.claims_json import as_json
from reproduction.columns import columns, printed, with_means
from reproduction.command import CPU_PLANS, reproduce_main
from reproduction.only_gpu import Need
from reproduction.pages import known, pages, write_pages
from reproduction.plan import Cell, configured, read_plan
from reproduction.results import as_run, command, decisive, read_results, superseded
from reproduction.results_page import results_page
from reproduction.summary import Facts, sentences

REPOSITORY = Path(__file__).resolve().parents[2]
EXPERIMENTS = REPOSITORY / "experiments"
PLANS = sorted(path.stem for path in (EXPERIMENTS / "reproduction").glob("*.yaml") if path.stem not in {
    "claims", "ambiguities", "coverage"
})  # fmt: skip


CELL = ("scale", "table", "split", "method", "variant", "tag", "seed")


@functools.cache
def committed():
    """The results of this repository."""
    return read_results(REPOSITORY / "results")


# Tables


def test_rows_are_in_the_papers_order_and_hold_all_seeds():
    results = [made_up("moon", 50.0), made_up("fedmr", 40.0, 1), made_up("fedmr", 42.0), made_up("fedavg", 45.0)]
    (column,) = columns(results, PAPER)
    assert [row.name for row in column.rows] == ["fedavg", "fedmr", "moon"]
    assert column.rows[1].values("ga_pct") == {0: 42.0, 1: 40.0}


def test_runs_with_different_settings_are_separate_rows():
    results = [made_up("fedmr", 40.0, lr="1"), made_up("fedmr", 42.0, 1, lr="2"), made_up("fedavg", 1.0, lr="1")]
    (column,) = columns(results, PAPER)
    assert [row.label for row in column.rows] == ["fedavg (lr=1)", "fedmr (lr=1)", "fedmr (lr=2)"]


def test_failed_runs_are_in_no_row():
    (column,) = columns([made_up("fedmr", 40.0, status="failed")], PAPER)
    assert column.rows == ()
    assert len(column.failed) == 1


def test_one_command_repeats_all_seeds_of_a_row():
    (column,) = columns([made_up("fedmr", 40.0, seed) for seed in (0, 2)], PAPER)
    command = column.rows[0].command
    assert command == "for seed in 0 2; do python experiments/run.py --method=fedmr-A --seed=$seed; done"


def test_a_seed_that_was_run_with_other_options_has_its_own_command():
    results = [made_up("fedmr", 40.0, seed) for seed in (0, 1, 2)]
    results[0]["command"] += " --distance=per_sample"
    (column,) = columns(results, PAPER)
    command_of_one_seed, command_of_two_seeds = column.rows[0].command.split("; for ")
    assert command_of_one_seed.endswith("--seed=0 --distance=per_sample")
    assert command_of_two_seeds == "seed in 1 2; do python experiments/run.py --method=fedmr-A --seed=$seed; done"


def test_the_seeds_of_every_committed_row_were_run_with_the_same_options():
    for column in columns(committed(), {}):
        for row in column.rows:
            usual = {name: str(option.default) for name, option in (RUN | options_of(methods.get(row.method))).items()}
            options = [usual | result["decisive"] | {"seed": ""} for result in row.results]
            assert all(other == options[0] for other in options), (column.table, column.split, column.tag, row.label)


def on_processor(processor, *results):
    """The results, as if they had been computed on this processor."""
    return [result | {"machine": {"device": "cpu", "processor": processor}} for result in results]


def test_rows_are_ranked_by_the_seeds_that_all_of_them_have():
    on_easier_seed = [made_up("moon", 90.0, 1), made_up("fedmr", 95.0, 1)]
    results = [made_up("fedavg", 50.0), made_up("moon", 40.0), made_up("fedmr", 30.0), *on_easier_seed]
    (column,) = columns(results, PAPER)
    assert column.order("ga_pct", {"fedavg": 60.0, "moon": 65.0, "fedmr": 70.0}) == (-1.0, 3, (0,))
    text = results_page(results, [column], PAPER, [], [])
    assert "over 3 methods, numbers of the one seed that all have: −1.00." in text


def test_pairs_of_runs_on_different_processors_count_and_are_marked():
    lower = [made_up("fedavg", 40.0, seed) for seed in range(3)]
    higher = [made_up("fedmr", 42.0, seed, split=split) for split in "AB" for seed in range(3)]
    lower += [result | {"split": "B"} for result in lower]
    results = [*on_processor("Abacus", *higher, *lower[:2], lower[3]), *on_processor("Rule", *lower[2:3], *lower[4:])]
    all_columns = with_means(columns(results, PAPER), PAPER)
    assert [str(column.over_baseline(column.row("fedmr"), "ga_pct")) for column in all_columns] == [
        "+2.00 ± 0.00 †1", "+2.00 ± 0.00 †2", "+2.00 ± 0.00 †2",
    ]  # fmt: skip
    judged = findings([CLAIM], all_columns, PAPER)
    assert [row["mixed_pairs"] for row in as_json(judged, set())] == [1, 2]
    assert "Of the 6 pairs of this list 3 are mixed." in results_page(results, all_columns, PAPER, judged, [])


@pytest.mark.parametrize("name", PLANS)
def test_committed_results_have_the_settings_of_todays_plan(name):
    plan = {(cell.table, cell.name): cell for cell in read_plan(name, EXPERIMENTS / "reproduction", PRESETS).cells}
    plan_results = [result for result in committed() if result["scale"] == name]
    # The other seeds have the same options, as a test above checks.
    for result in (any_seed for any_seed in plan_results if any_seed["seed"] == 0):
        cell = plan[result["table"], Cell(**{field: result[field] for field in CELL}, settings={}).name]
        today = {**result, "command": command(cell, values(*configured(cell, PRESETS)))}
        assert superseded(today, PRESETS) == {}, cell.name


def test_superseded_settings_are_shown_in_row_header_and_comparison():
    older_settings = {name: {"over_preset": settings, "superseded": settings} for name, settings in
            (("fedmr", {"lr": "1", "mu": "2"}), ("fedavg", {"lr": "1"}))}  # fmt: skip
    results = [made_up(name, ga) | older_settings[name] for name, ga in (("fedmr", 50.0), ("fedavg", 40.0))]
    judged = findings([CLAIM], columns(results, PAPER), PAPER)
    text = results_page(results, columns(results, PAPER), PAPER, judged, [])
    assert "Over the preset in all runs: lr=1." in text
    assert "| fedmr (mu=2) |" in text
    assert "| A (lr=1, mu=2) |" in text
    assert as_json(judged, set())[0]["superseded"] == "lr=1, mu=2"


def test_a_result_of_an_older_preset_states_it_and_its_command_repeats_it():
    (today,) = (result for result in committed() if result["scale"] == "full" and result["method"] == "fedrl")
    older = {**today, "decisive": today["decisive"] | {"grad_clip": "method", "distance": "per_sample"}}
    run = as_run(older, PRESETS)
    assert run["superseded"] == {"grad_clip": "method", "distance": "per_sample"}
    assert run["over_preset"] == {"fine_tune_epochs": "0"} | run["superseded"]
    assert run["command"].startswith(older["command"])
    assert superseded(run, PRESETS) == {}


def test_printed_means_are_taken_over_seeds_that_all_splits_have():
    results = [made_up("fedmr", 40.0, 0), made_up("fedmr", 44.0, 1), made_up("fedmr", 60.0, 1, split="B")]
    average = with_means(columns(results, PAPER), PAPER)[-1]
    assert average.split == "avg"
    assert average.rows[0].values("ga_pct") == {1: 52.0}


def test_a_mean_without_one_of_its_splits_is_left_out():
    assert len(with_means(columns([made_up("fedmr", 40.0)], PAPER), PAPER)) == 1


def test_a_mean_over_splits_has_only_the_metrics_that_all_of_them_have():
    results = [made_up("fedmr", 40.0), made_up("fedmr", 50.0, split="B")]
    results[0]["metrics"]["pa_pct"] = 80.0
    (row,) = with_means(columns(results, PAPER), PAPER)[-1].rows
    assert (row.values("ga_pct"), row.values("pa_pct")) == ({0: 45.0}, {})


# Claims


def test_a_claim_is_judged_by_the_sign_that_the_paper_prints():
    results = [made_up(name, ga, seed) for seed in (0, 1) for name, ga in (("fedmr", 50.0 + seed), ("fedavg", 40.0))]
    first, second = findings([CLAIM], columns(results, PAPER), PAPER)
    assert (first.paper, first.best.mean, first.verdict) == (10.0, 10.5, "held")
    assert second.verdict == "not tried"


def with_pa(method, pa, last=None):
    """A made-up result with PA, and PA after the last epoch if the rule of its preset chooses an epoch on tests."""
    return made_up(method, 50.0) | {"metrics": {"pa_pct": pa} | ({} if last is None else {"pa_last_pct": last})}


@pytest.mark.parametrize(("last", "verdict"), [
    ((85.0, 80.0), "one seed, same sign"), ((75.0, 80.0), "not distinguishable"), ((None, None), "one seed, same sign"),
])  # fmt: skip
def test_a_claim_about_pa_holds_only_where_pa_after_the_last_epoch_agrees(last, verdict):
    printed = [Expected("A", name, "", "pa_pct", value, None, "", ()) for name, value in
               (("fedmr", 90.0), ("fedavg", 85.0))]  # fmt: skip
    results = [with_pa("fedmr", 92.0, last[0]), with_pa("fedavg", 90.0, last[1])]
    expected = {"toy/table1": printed}
    finding, _ = findings([CLAIM._replace(metric="pa_pct")], columns(results, expected), expected)
    assert finding.verdict == verdict


@pytest.mark.parametrize(("epochs", "expected"), [(None, (4.0, False)), (2, (1.0, True))])
def test_rounds_that_no_test_chose_are_the_last_ten_and_the_last_where_a_model_is_fine_tuned(epochs, expected):
    """In training, PA is of other models than after fine-tuning."""
    tuned = f"global model fine-tuned for {epochs} epochs, best" if epochs else "during training, best"
    results = [
        {**with_pa("fedmr", 92.0), "pa_mean_last10": 0.84, "pa_last": 0.91, "pa_protocol": "during training"},
        {**with_pa("fedavg", 90.0), "pa_mean_last10": 0.80, "pa_last": 0.90, "pa_protocol": tuned},
    ]
    finding, _ = findings([CLAIM._replace(metric="pa_pct")], columns(results, {}), {})
    assert (finding.best.mean, finding.pa_epochs) == (2.0, None)
    assert (finding.unchosen.mean, finding.of_last) == (pytest.approx(expected[0]), expected[1])


def test_pa_after_other_numbers_of_local_epochs_has_no_verdict_and_is_in_no_count_or_family():
    training, tuned = {"pa_protocol": "during training"}, {"pa_protocol": "global model fine-tuned for 10 epochs"}
    results = [
        result
        for seed in range(3)
        for result in (
            made_up("fedmr", 50.0, seed) | {"metrics": {"pa_pct": 92.0 + seed}} | training,
            made_up("fedavg", 50.0, seed) | {"metrics": {"pa_pct": 80.0}} | tuned,
        )
    ]
    printed = {"toy/table1": [Expected("A", name, "", "pa_pct", value, None, "", ()) for name, value in
                              (("fedmr", 90.0), ("fedavg", 85.0))]}  # fmt: skip
    finding, _ = findings([CLAIM._replace(metric="pa_pct")], made_columns := columns(results, printed), printed)
    assert (finding.verdict, finding.uncorrected, finding.pa_epochs) == (*["different quantities"] * 2, (2, 10))
    assert (finding.best.mean, finding.best.p, finding.alone, finding.in_table) == (13.0, None, None, None)
    assert counts(made_columns, printed) == []
    lines = results_page(results, made_columns, printed, [finding], []).splitlines()
    (row,) = (line for line in lines if line.startswith("| fedmr "))
    assert row.endswith("+13.00 ± 0.58 | +5.00 | different quantities |")
    of_fedmr = finding._replace(claim=finding.claim._replace(table="fedmr/table1"))
    text = sentences(Facts([], [of_fedmr, of_fedmr._replace(pa_epochs=None)], [], []))[3]
    assert "in 1 of 1 comparisons" in text
    assert "; 1 more compare PA after other numbers of local epochs)" in text


@pytest.mark.parametrize(("epochs", "compared"), [(2, 1), (10, 0)])
def test_a_mean_over_splits_of_pa_after_other_numbers_of_local_epochs_is_in_no_count(epochs, compared):
    protocols = {"fedmr": "during training", "fedavg": f"global model fine-tuned for {epochs} epochs"}
    results = [
        made_up(name, 50.0, split=split) | {"metrics": {"pa_pct": 80.0}, "pa_protocol": protocol}
        for split in "AB"
        for name, protocol in protocols.items()
    ]
    expected = {"toy/table1": [Expected("avg", name, "", "pa_pct", 90.0, None, "", ("A", "B")) for name in protocols]}
    averages = with_means(columns(results, expected), expected)[2:]
    assert [column.split for column in averages] == ["avg"]
    assert len(counts(averages, expected)) == compared


def test_a_mean_over_domains_that_is_not_printed_is_the_mean_of_the_printed_ones():
    numbers = [Expected("A", "fccl", "", f"inter_top5_pct:{name}", value, None, "", ()) for name, value in
               (("art", 60.0), ("clipart", 64.0))]  # fmt: skip
    assert printed(numbers, "A", "inter_top5_pct:mean") == {"fccl": 62.0}
    printed_mean = Expected("A", "fccl", "", "inter_top5_pct:mean", 63.0, None, "", ())
    assert printed([*numbers, printed_mean], "A", "inter_top5_pct:mean") == {"fccl": 63.0}


def test_a_claim_that_its_paper_contradicts_is_refused():
    opposite = CLAIM._replace(higher="fedavg", lower="fedmr")
    with pytest.raises(UserError, match=r"'FedMR is above FedAvg': the paper prints the opposite on A, -10\.00"):
        findings([opposite], [], PAPER)


def test_a_claim_has_p_values_alone_and_corrected_over_its_table_and_the_page():
    results = [made_up(name, ga, seed, split=split) for seed in (0, 1, 2) for split in "AB"
             for name, ga in (("fedmr", 60.0 + seed * seed), ("fedavg", 50.0))]  # fmt: skip
    other_claim = CLAIM._replace(table="toy/table2")
    other_results = [{**result, "table": "toy/table2"} for result in results]
    other_scale = [{**result, "scale": "mid"} for result in results]
    all_columns = columns([*results, *other_results, *other_scale], PAPER)
    first, *_ = findings([CLAIM, other_claim], all_columns, PAPER | {"toy/table2": PAPER["toy/table1"]})
    assert first.in_table == pytest.approx(2 * first.alone.p)
    assert first.best.p == pytest.approx(6 * first.alone.p)
    assert first.best.p < 0.1  # which is not cut at 1


def test_a_claim_is_listed_at_every_scale_that_has_it():
    results = [made_up(name, ga) for name, ga in (("fedmr", 50.0), ("fedavg", 40.0))]
    two_scales = [*results, *({**result, "scale": "mid"} for result in results)]
    judged = findings([CLAIM._replace(splits=("A",))], columns(two_scales, PAPER), PAPER)
    assert [row["scale"] for row in as_json(judged, set())] == ["cpu", "mid"]
    two_seeds = [*two_scales, *(made_up(name, ga, 1) for name, ga in (("fedmr", 50.0), ("fedavg", 40.0)))]
    judged = findings([CLAIM._replace(splits=("A",))], columns(two_seeds, PAPER), PAPER)
    assert [(row["seeds"], row["pairs"]) for row in as_json(judged, set())] == [(2, 2), (2, 1)]


@pytest.mark.thorough
def test_every_claim_that_a_cpu_can_try_was_tried_with_three_seeds():
    reproduction = known(REPOSITORY / "results", EXPERIMENTS)
    cells = [cell for name in CPU_PLANS for cell in read_plan(name, EXPERIMENTS / "reproduction", PRESETS).cells]
    rows = as_json(reproduction.findings, {(cell.table, cell.split or "") for cell in cells})
    assert [row["claim"] for row in rows if row["seeds"] < 3 and not row["needs_gpu"]] == []
    assert all(row["pairs"] <= row["seeds"] for row in rows)
    assert any(row["pairs"] < row["seeds"] for row in rows)


def test_claims_are_listed_with_what_only_a_gpu_can_decide():
    results = [made_up(name, ga, seed) for seed in (0, 1) for name, ga in (("fedmr", 50.0 + seed), ("fedavg", 40.0))]
    judged = findings([CLAIM], columns(results, PAPER), PAPER)
    tried, not_tried = as_json(judged, {("toy/table1", "A")}, [], [Need(CLAIM, "B", {"a": 1.0, "b": 2.0}, 3, True)])
    assert (tried["seeds"], tried["needs_gpu"], tried["gpu_command"]) == (2, False, None)
    assert tried["interval"][0] < tried["difference"] == 10.5 < tried["interval"][1]
    assert (not_tried["seeds"], not_tried["needs_gpu"], not_tried["verdict"]) == (0, True, "not tried")
    assert "--only=toy/table1/paper-B-" in not_tried["gpu_command"]
    assert (not_tried["gpu_hours_predicted"], not_tried["gpu_part"]) == (3.0, 3)


@pytest.mark.thorough
def test_the_papers_claims_are_printed_as_json(capsys):
    assert reproduce_main(EXPERIMENTS, ["--claims", "--json", f"--results-dir={REPOSITORY / 'results'}"]) == 0
    keys = {
        "claim",
        "table",
        "split",
        "scale",
        "seeds",
        "needs_gpu",
        "difference",
        "interval",
        "verdict",
        "p",
        "p_table",
    }
    assert all(keys <= set(row) for row in json.loads(capsys.readouterr().out))


def test_a_reading_with_a_tag_counts_only_for_claims_that_name_the_tag():
    results = [made_up("fedmr", 50.0, tag="other"), made_up("fedavg", 40.0, tag="other")]
    all_columns = columns(results, PAPER)
    assert findings([CLAIM], all_columns, PAPER)[0].verdict == "not tried"
    assert findings([CLAIM._replace(tags=("other",))], all_columns, PAPER)[0].verdict == "one seed, same sign"


def test_verdicts_of_methods_against_fedavg_are_counted():
    results = [made_up("fedavg", 50.0), made_up("fedmr", 40.0), made_up("moon", 60.0)]
    (count,) = counts(columns(results, PAPER), PAPER)
    assert count.verdicts == Counter({"one seed, opposite sign": 1, "one seed, same sign": 1})


def test_the_effect_of_a_reading_is_its_difference_from_the_default(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "ambiguities: [{paper: P, question: Q, evidence: S, default: D, other: [], "
        "measured: {table: toy/table1, split: A, rows: [fedmr], tags: [other]}}]"
    )
    (ambiguity,) = read_ambiguities(tmp_path / "a.yaml")
    results = [made_up("fedmr", 50.0), made_up("fedmr", 43.0, tag="other")]
    (effect,) = effects(ambiguity.measured, columns(results, PAPER))
    assert (effect.tag, effect.best.mean) == ("other", -7.0)
    for another in ({"version": "0.2"}, {"over_preset": {"dataset": "digits"}}):
        assert effects(ambiguity.measured, columns([results[0] | another, results[1]], PAPER)) == []


def test_a_reading_and_the_default_are_compared_with_the_paper_on_the_same_seeds():
    default = [made_up("fedmr", ga, seed) for seed, ga in enumerate((52.0, 52.0, 30.0))]
    fedavg = [made_up("fedavg", 40.0, seed) for seed in range(3)]
    reading = [made_up("fedmr", 45.0, seed, tag="other") for seed in (0, 1)]
    ambiguity = Ambiguity("P", "Q", "S", "D", (), Measured("toy/table1", "A", ("fedmr",), ("other",)))
    text = ambiguities_page([ambiguity], columns([*default, *fedavg, *reading], PAPER), PAPER, [])
    assert "| A | fedmr | cpu | other | 2 | +5.00 ± 0.00 | +12.00 ± 0.00 | +10.00 | 5.00 | **2.00** |" in text


def test_differences_in_seconds_are_not_counted_as_claims():
    numbers = [Expected("A", name, "", "compute_seconds", value, None, "", ()) for name, value in
               (("fedmr", 20.0), ("fedavg", 18.0))]  # fmt: skip
    results = [made_up(name, 50.0) | {"metrics": {"compute_seconds": 1.0}} for name in ("fedmr", "fedavg")]
    assert counts(columns(results, {"toy/table1": numbers}), {"toy/table1": numbers}) == []


@pytest.mark.parametrize(("reader", "key"), [(read_claims, "claims"), (read_ambiguities, "ambiguities")])
def test_a_file_of_claims_or_ambiguities_with_a_wrong_key_is_refused(tmp_path, reader, key):
    (tmp_path / "a.yaml").write_text(f"{key}: [{{text: T, colour: red}}]")
    with pytest.raises(UserError, match=r"1 of .*a\.yaml"):
        reader(tmp_path / "a.yaml")


# Pages


@pytest.mark.thorough
def test_the_committed_pages_are_what_the_committed_results_give():
    for name, text in pages(REPOSITORY / "results", EXPERIMENTS).items():
        page = (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
        assert page == text, f"run python experiments/reproduce.py --page: docs/{name} is not what results/ gives"


def test_pa_after_the_last_epoch_has_a_column_where_pa_is_chosen_on_tests():
    printed = {"toy/table1": [Expected("A", "fedavg", "", "pa_pct", 85.0, None, "", ())]}
    for result, has_column in ((with_pa("fedavg", 91.0, 83.5), True), (with_pa("fedavg", 91.0), False)):
        all_columns = columns([result], printed)
        lines = results_page([result], all_columns, printed, [], []).splitlines()
        head = lines.index("### A · PA, %") + 2
        cells = dict(zip(lines[head].split(" | "), lines[head + 2].split(" | "), strict=True))
        assert (cells["seeds"], cells["paper"], cells["difference"]) == ("1", "85.00", "+6.00")
        assert cells.get("PA last") == ("83.50" if has_column else None)


def test_runs_that_were_trained_together_are_counted():
    results = [made_up("fedavg", 50.0), made_up("fedmr", 50.0) | {"together": 2}]
    text = results_page(results, columns(results, PAPER), PAPER, [], [])
    assert "1 of the runs trained together with others." in text


def test_versions_and_processors_are_stated():
    machine = {"device": "cpu", "processor": "Abacus 1"}
    results = [made_up("fedavg", 50.0), made_up("fedmr", 50.0) | {"version": "0.9", "machine": machine}]
    text = results_page(results, columns(results, PAPER), PAPER, [], [], left={"cpu": "Much is left."})
    versions = "2 runs (1 of version 0.9, 1 of version 0.1)"
    assert f"Scale `cpu`: {versions}, 0.0 hours on cpu, Abacus 1; 2 failed. Much is left." in text


@pytest.mark.thorough
def test_pages_are_written_for_participants_without_a_global_model(tmp_path):
    command = "python experiments/run.py --preset=fccl/table1 --split=digits --method=fccl --seed=0"
    fields = {"ga_best_round": None, "table": "fccl/table1", "split": "digits", "command": command, "decisive": {}}
    (tmp_path / "results").mkdir()
    (tmp_path / "results/one.json").write_text(json.dumps({**made_up("fccl", 50.0), **fields}))
    text = write_pages(tmp_path / "results", EXPERIMENTS, tmp_path / "docs")[1].read_text(encoding="utf-8")
    assert text.partition("the last ten rounds")[0].count("Scale") == 0
    assert "- Not measured yet.\n" in text


@pytest.mark.thorough
def test_pages_are_written_to_the_given_folder(tmp_path):
    written = write_pages(tmp_path / "none", EXPERIMENTS, tmp_path / "docs")
    assert [path.name for path in written] == ["reproduction.md", "ambiguities.md", "coverage.md"]
    assert "Nothing has been run yet." in written[0].read_text(encoding="utf-8")


# The files beside the plans


def test_every_claim_is_about_rows_and_splits_of_its_preset():
    for claim in read_claims(EXPERIMENTS / "reproduction/claims.yaml"):
        preset = read_preset(claim.table, PRESETS)
        numbers = read_expected(EXPECTED, claim.table)
        for split in claim.splits:
            rows = printed(numbers, claim.printed_on or split, claim.metric)
            assert {claim.higher, claim.lower} <= rows.keys(), f"{claim.text}: {split}"
        split = next(split for split in claim.splits if split in preset.splits)
        for row in (claim.higher, claim.lower):
            method, _, variant = row.partition(" ")
            preset_values(preset, method, split, variant or None)


def test_options_of_every_other_reading_parse():
    for entry in read_ambiguities(EXPERIMENTS / "reproduction/ambiguities.yaml"):
        for options in entry.other:
            parse(options.split())


def test_every_measured_reading_is_in_the_cpu_plan():
    planned = {
        (cell.table, cell.split, cell.tag, cell.method)
        for cell in read_plan("cpu", EXPERIMENTS / "reproduction", PRESETS).cells
    }
    for entry in read_ambiguities(EXPERIMENTS / "reproduction/ambiguities.yaml"):
        for tag in entry.measured.tags if entry.measured else ():
            for row in entry.measured.rows:
                assert (entry.measured.table, entry.measured.split, tag, row) in planned, (
                    f"{entry.question}: {tag} {row}"
                )


@pytest.mark.parametrize("name", PLANS)
def test_a_reading_departs_from_its_base_only_in_options_that_it_names(name):
    cells = {(cell.table, cell.split, cell.tag, cell.method): cell
             for cell in read_plan(name, EXPERIMENTS / "reproduction", PRESETS).cells if cell.seed == 0}  # fmt: skip
    for entry in read_ambiguities(EXPERIMENTS / "reproduction/ambiguities.yaml"):
        named = {option.partition("=")[0].replace("-", "_") for text in entry.other for option in text.split(" --")}
        for tag, row in itertools.product(entry.measured.tags, entry.measured.rows) if entry.measured else ():
            base, other = (cells.get((entry.measured.table, entry.measured.split, tag, row))
                           for tag in (entry.measured.base, tag))  # fmt: skip
            if base and other and base.settings.get("dataset") == other.settings.get("dataset"):
                base_options, other_options = (decisive(values(*configured(cell, PRESETS))) for cell in (base, other))
                departures = {option for option in other_options if other_options[option] != base_options[option]}
                assert departures <= named, f"{entry.question}: {tag} {row}"


def test_the_tag_of_a_whole_table_is_not_a_tag_of_a_reading():
    readings = tags_of(read_ambiguities(EXPERIMENTS / "reproduction/ambiguities.yaml"))
    assert "fmnist" not in readings


@pytest.mark.parametrize("name", PLANS)
def test_plans_name_only_what_their_presets_have(name):
    cells = read_plan(name, EXPERIMENTS / "reproduction", PRESETS).cells
    for cell in {(cell.table, cell.method, cell.variant): cell for cell in cells}.values():
        configured(cell, PRESETS)


def test_plans_are_valid_yaml_without_data_folders():
    for name in PLANS:
        text = (EXPERIMENTS / f"reproduction/{name}.yaml").read_text(encoding="utf-8")
        assert yaml.safe_load(text)["blocks"]
        assert "data_dir" not in text
