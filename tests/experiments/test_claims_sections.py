"""The page of results beside its tables: other settings, claims that need a GPU, pictures and ten sentences."""

import json
import re
from pathlib import Path

import pytest
from made_up_results import CLAIM, PAPER, made_up

from benchmarks.gpu import papers
from fedjax_pcdd.training.presets import PRESETS
from reproduction.claims import findings, read_claims
from reproduction.claims_json import as_json
from reproduction.columns import columns
from reproduction.command import reproduce_main
from reproduction.figures import figures_section
from reproduction.hinges import departures, hinges_section
from reproduction.only_gpu import OWN, PREDICTED, Need, about, gpu_section, needs, predicted_hours
from reproduction.pages import known, pages
from reproduction.plan import Cell, read_plan
from reproduction.summary import Facts, sentences

REPOSITORY = Path(__file__).resolve().parents[2]
EXPERIMENTS = REPOSITORY / "experiments"


def fedmr_fedavg(upper, lower, seeds=(0, 1, 2), *, fedmr=None, **options):
    """Results of FedMR and FedAvg with these seeds; differences spread a little; `fedmr` are options of FedMR alone."""
    results = []
    for seed in seeds:
        results.append(made_up("fedmr", upper + 0.1 * seed, seed, **options, **(fedmr or {})))
        results.append(made_up("fedavg", lower, seed, **options))
    return results


def departures_among(results, claim=CLAIM):
    return departures([claim], columns(results, PAPER))


# What a claim hinges on


def test_the_kind_of_a_departure_follows_from_the_options_it_changes():
    departing_runs = [
        *fedmr_fedavg(50.0, 40.0, tag="epochs", local_epochs="10"),
        *fedmr_fedavg(50.0, 40.0, tag="resnet", model="resnet8"),
        *fedmr_fedavg(50.0, 40.0, tag="form", fedmr={"form": "frobenius"}),
        *fedmr_fedavg(50.0, 40.0, tag="images", dataset="mnist"),
    ]  # fmt: skip
    kinds = {
        departure.tag: departure.kind for departure in departures_among([*fedmr_fedavg(50.0, 40.0), *departing_runs])
    }
    assert kinds == {
        "epochs": "length of training", "resnet": "network and norm", "form": "readings", "images": "images",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("upper", "seeds", "turns"),
    [(49.0, (0, 1, 2), False), (35.0, (0, 1, 2), True), (49.0, (0,), False), (35.0, (0,), True), (40.0, (0,), True)],
)
def test_a_claim_turns_where_the_sign_changes(upper, seeds, turns):
    (departure,) = departures_among(
        [*fedmr_fedavg(50.0, 40.0), *fedmr_fedavg(upper, 40.0, seeds, tag="form", fedmr={"form": "x"})]
    )
    assert departure.turns is turns


def test_a_claim_does_not_turn_where_the_methods_are_only_no_longer_distinguishable():
    spread_runs = [made_up("fedmr", ga, seed, tag="form", form="x") for seed, ga in enumerate((41.0, 70.0, 42.0))]
    (departure,) = departures_among([*fedmr_fedavg(50.0, 40.0), *spread_runs])
    assert departure.other.mean > 0
    assert not departure.turns


def test_only_a_reading_of_a_method_is_compared_with_a_row_of_the_default():
    """Longer training of one method alone is not."""
    reading = [made_up("fedmr", 45.0, tag="form", form="x")]
    longer_training = [made_up("fedmr", 45.0, tag="epochs", local_epochs="10")]
    (departure,) = departures_among([*fedmr_fedavg(50.0, 40.0), *reading, *longer_training])
    assert (departure.tag, departure.other.mean) == ("form", 5.0)


def test_a_departure_starts_from_the_nearest_column_of_the_claim():
    claim = CLAIM._replace(tags=("", "mnist"))
    results = [
        *fedmr_fedavg(50.0, 40.0), *fedmr_fedavg(60.0, 40.0, tag="mnist", dataset="mnist"),
        *fedmr_fedavg(61.0, 40.0, tag="mnist-form", dataset="mnist", fedmr={"form": "x"}),
    ]  # fmt: skip
    (departure,) = [departure for departure in departures_among(results, claim) if departure.tag == "mnist-form"]
    assert (departure.settings, round(departure.usual.mean)) == ("form=x", 20)


def test_both_differences_of_a_departure_are_over_the_same_seeds():
    usual = [*fedmr_fedavg(50.0, 40.0, (0, 1)), *fedmr_fedavg(70.0, 40.0, (2, 3))]
    (departure,) = departures_among([*usual, *fedmr_fedavg(45.0, 40.0, (0, 1), tag="form", fedmr={"form": "x"})])
    assert departure.usual.seeds == departure.other.seeds == (0, 1)
    assert departure.usual.mean == pytest.approx(10.05)


def test_runs_of_different_versions_are_not_paired():
    old = [{**result, "version": "0.1"} for result in fedmr_fedavg(50.0, 40.0)]
    new = [{**result, "version": "0.2"} for result in fedmr_fedavg(45.0, 40.0, tag="form", fedmr={"form": "x"})]
    assert [one.usual.mean - one.other.mean for one in departures_among([*old, *new])] == [pytest.approx(5.0)]
    new_fedmr = [result for result in new if result["method"] == "fedmr"]  # the default's FedAvg is of another version
    assert departures_among([*old, *new_fedmr]) == []
    mixed_versions = [{**result, "version": "0.2"} if result["method"] == "fedmr" else result for result in old]
    assert [finding.verdict for finding in judged(mixed_versions)] == ["not tried", "not tried"]


def test_a_departure_that_turns_a_claim_is_listed_at_its_usual_column():
    claim = CLAIM._replace(tags=("", "mnist"), splits=("A",))
    results = [
        *fedmr_fedavg(50.0, 40.0), *fedmr_fedavg(60.0, 40.0, tag="mnist", dataset="mnist"),
        *fedmr_fedavg(20.0, 40.0, tag="mnist-form", dataset="mnist", fedmr={"form": "x"}),
    ]  # fmt: skip
    rows = as_json(findings([claim], columns(results, PAPER), PAPER), set(), departures_among(results, claim))
    assert {row["tag"]: row["turns_with"] for row in rows} == {"": [], "mnist": ["cpu mnist-form: form=x"]}


def test_a_departure_that_turns_a_claim_is_listed_at_the_scale_of_its_usual_column():
    scales = {scale: [{**result, "scale": scale} for tag in ({}, {"tag": "form", "fedmr": {"form": "x"}})
                      for result in fedmr_fedavg(upper - 30.0 * bool(tag), 40.0, model=scale, **tag)]
              for scale, upper in (("cpu", 80.0), ("mid", 50.0))}  # fmt: skip
    results = [result for scale_results in scales.values() for result in scale_results]
    rows = as_json(findings([CLAIM], columns(results, PAPER), PAPER), set(), departures_among(results))
    assert {row["scale"]: row["turns_with"] for row in rows if row["split"] == "A"} == {
        "cpu": [], "mid": ["mid form: form=x"],
    }  # fmt: skip


def test_another_scale_is_compared_with_the_scale_of_a_cpu():
    mid_scale = [{**result, "scale": "mid"} for result in fedmr_fedavg(35.0, 40.0, model="resnet8", rounds="50")]
    (departure,) = departures_among([*fedmr_fedavg(50.0, 40.0, model="simple_cnn"), *mid_scale])
    assert (departure.scale, departure.kind, departure.turns) == ("mid", "network and norm", True)


def test_a_setting_that_equals_the_presets_own_value_is_no_departure():
    cpu_options = {"decisive": {"model": "mlp", "rounds": "30"}}
    cpu_scale = [result | cpu_options for result in fedmr_fedavg(50.0, 40.0, model="mlp", rounds="30")]
    full_scale = [
        result | {"scale": "full", "decisive": {"model": "mlp", "rounds": "120"}}
        for result in fedmr_fedavg(50.0, 40.0, lr="1")
    ]
    (departure,) = departures_among([*cpu_scale, *full_scale])
    assert (departure.kind, departure.settings) == ("length of training", "lr=1, rounds=120")


def test_the_section_names_a_departure_that_turns_with_both_differences():
    results = [*fedmr_fedavg(50.0, 40.0), *fedmr_fedavg(35.0, 40.0, tag="form", fedmr={"form": "x"})]
    claim = CLAIM._replace(hinges="the moon")
    text = "\n".join(hinges_section([claim], departures_among(results, claim)))
    assert "**FedMR is above FedAvg.** Thought to hinge on: the moon." in text
    assert "- readings: turns under 1 of 1 (A `form`: +10.10 ± 0.06 → −4.90 ± 0.06)" in text


# What only a GPU can decide


def cell(method, split="B", scale="paper", seed=0):
    return Cell(scale, "toy/table1", split, method, None, "", seed, {})


def gpu_needs(results=(), *, paper, full=(), gpu=()):
    judged = findings([CLAIM], columns(results, PAPER), PAPER)
    return needs(judged, {"paper": paper, "full": full, "gpu": gpu}, lambda cell: 1.5, lambda cell: cell.name)


def test_a_split_that_a_cpu_plan_runs_in_the_papers_settings_needs_no_gpu():
    paper = [cell(name, split) for name in ("fedmr", "fedavg", "moon") for split in "AB"]
    assert [(need.split, need.hours) for need in gpu_needs(paper=paper)] == [("A", 3.0), ("B", 3.0)]
    assert [need.split for need in gpu_needs(paper=paper, full=[cell("fedmr", "A", "full")])] == ["B"]
    assert [
        need.split for need in gpu_needs([{**result, "scale": "gpu"} for result in fedmr_fedavg(1.0, 0.0)], paper=paper)
    ] == ["B"]


def test_a_claim_is_planned_where_the_gpu_plan_has_both_its_rows():
    paper = [cell("fedmr"), cell("fedavg")]
    assert [need.planned for need in gpu_needs(paper=paper, gpu=paper)] == [True]
    assert [need.planned for need in gpu_needs(paper=paper, gpu=paper[:1])] == [False]


def test_the_section_has_command_hours_and_part_of_each_claim():
    need = Need(CLAIM, "B", {"a": 1.0, "b": 2.0}, 3, False)
    text = "\n".join(gpu_section([need, need._replace(split="C", by_run={"c": None}, part=None, planned=True)]))
    assert "| FedMR is above FedAvg | B C | 3.0 and more | part 3: B; `--scale=gpu`: C |" in text
    assert 'python experiments/reproduce.py --scale=paper --claim="FedMR is above FedAvg" --data-dir=data' in text


def test_predicted_hours_follow_from_the_predicted_step():
    step = json.loads((REPOSITORY / PREDICTED).read_text())
    plan = read_plan("paper", EXPERIMENTS / "reproduction", PRESETS).cells
    predicted_cell = next(cell for cell in plan if (cell.table, cell.split) == ("fedmr/table1", "cifar10-P10C2"))
    launch_us = step["kernels"] * step["launch_us"]
    seconds = 100 * 10 * 50000 / 128 * (launch_us + (step["step_us"] - launch_us) * 128 / step["batch"]) / 1e6
    assert predicted_hours(REPOSITORY, PRESETS)(predicted_cell) == pytest.approx(seconds / 3600)
    unpredicted_cell = next(cell for cell in plan if cell.split == "cifar100-P10C10")
    assert predicted_hours(REPOSITORY, PRESETS)(unpredicted_cell) is None
    assert predicted_hours(EXPERIMENTS, PRESETS)(predicted_cell) is None


def test_the_predicted_step_has_the_kernels_of_the_compiled_one():
    step = json.loads((REPOSITORY / PREDICTED).read_text())
    survey = json.loads((REPOSITORY / "benchmarks/results/accelerator.json").read_text())
    assert step["kernels"] in [kernels for _, kernels in survey["h100"]["rounds"]["w3, 1 lane"]["launched"]]


def test_parts_of_the_gpu_plan_run_the_claims_that_name_them():
    parts = {(claim.text, split): part for claim in read_claims(EXPERIMENTS / "reproduction/claims.yaml")
             for split, part in claim.gpu_part.items()}  # fmt: skip
    assert parts == {("FedMR is above FedAvg", split): 3 for split in ("P5C2", "P10C2")}
    for _, split in parts:
        assert {f"fedavg {split}", f"fedmr {split}"} <= papers.groups(split)[0].keys()


def test_a_claim_selects_the_cells_of_its_rows_and_splits(capsys):
    text = "FedMR is above FedProx"
    (claim,) = (claim for claim in read_claims(EXPERIMENTS / "reproduction/claims.yaml") if claim.text == text)
    assert reproduce_main(EXPERIMENTS, ["--scale=paper", f"--claim={text}", "--list", "--results-dir=none"]) == 0
    listed = {line.split()[2] for line in capsys.readouterr().out.splitlines()[:-1]}
    plan = read_plan("paper", EXPERIMENTS / "reproduction", PRESETS).cells
    assert listed == {cell.name for cell in plan if about(claim, cell)}
    assert {name.rpartition("-")[0] for name in listed} == {
        f"paper-{split}-{method}" for split in ("P5C2", "P10C2") for method in ("fedmr", "fedprox")
    }


def test_an_unknown_claim_is_refused_in_one_sentence(capsys):
    assert reproduce_main(EXPERIMENTS, ["--scale=paper", "--claim=FedMR is above FedPox", "--list"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean 'FedMR is above FedProx'" in line


# Pictures


def judged(results, claim=CLAIM):
    return findings([claim], columns([{**result, "table": claim.table} for result in results], {}), {})


def test_a_paper_has_a_picture_with_a_line_for_each_claim_that_was_tried():
    claim = CLAIM._replace(table="fedmr/table1")
    lines, pictures = figures_section(judged(fedmr_fedavg(50.0, 40.0), claim))
    (svg,) = pictures.values()
    assert list(pictures) == ["images/reproduction_fedmr.svg"]
    assert "FedMR is above FedAvg · A · cpu" in svg
    words = "FedMR: our differences beside the printed ones in 1 comparison, 0 of 0 with the printed sign"
    assert f'aria-label="{words}"' in svg
    assert f"![{words}](images/reproduction_fedmr.svg)" in lines


def test_a_claim_not_tried_or_not_in_percentage_points_is_in_no_picture():
    claim = CLAIM._replace(table="fedmr/table1")
    eigenvalue_results = [{**result, "metrics": {"eigenvalue_variance": 4.0}} for result in fedmr_fedavg(50.0, 40.0)]
    assert figures_section(judged(eigenvalue_results, claim._replace(metric="eigenvalue_variance"))) == ([], {})
    assert figures_section(judged([], claim)) == ([], {})


@pytest.mark.thorough
def test_pages_and_pictures_are_the_same_bytes_each_time():
    first, second = (pages(REPOSITORY / "results", EXPERIMENTS) for _ in range(2))
    assert first == second
    assert any(name.endswith(".svg") for name in first)


# Ten sentences


@pytest.fixture(scope="module")
def facts():
    reproduction = known(REPOSITORY / "results", EXPERIMENTS)
    return Facts(reproduction.results, reproduction.findings, reproduction.departures, reproduction.needs)


def check_ten_sentences(texts):
    assert len(texts) == 10
    for text in texts:
        sentence, *lines = text.split("\n    - ")
        assert sentence.endswith(".")
        assert not any("\n" in line for line in lines)
        assert not re.search(r"[.!?] [A-Z]", text), text


@pytest.mark.thorough
def test_there_are_ten_sentences_whatever_the_results_are(facts):
    check_ten_sentences(sentences(facts))
    check_ten_sentences(sentences(Facts([], [], [], [])))
    single_seed = [result for result in facts.results if result["seed"] == 0]
    check_ten_sentences(sentences(facts._replace(results=single_seed)))


@pytest.mark.thorough
def test_every_claim_that_was_tried_is_counted_once(facts):
    first, second, *_ = sentences(facts)
    pairs = {(finding.claim.text, finding.split) for finding in facts.findings}
    tried = {(finding.claim.text, finding.split) for finding in facts.findings if finding.best is not None}
    assert f"{len(pairs)} counting each split: {len(tried)} were tried" in first
    words = r"the (\d+) comparisons .*, (\d+) held .*, (\d+) did not hold, and (\d+) cannot .*; (\d+) more"
    repeated, held, opposite, undecided, single = map(int, re.search(words, second).groups())
    assert held + opposite + undecided == repeated
    judged_findings = [finding for finding in facts.findings if finding.best is not None and not finding.pa_epochs]
    assert repeated + single == len(judged_findings)


def test_the_main_claim_is_stated_with_interval_seeds_and_verdict():
    claim = CLAIM._replace(table="fedmr/table1")
    text = sentences(Facts([], judged(fedmr_fedavg(50.0, 40.0), claim), [], []))[3]
    assert text == (
        "FedMR above FedAvg, the main claim of its paper: in 1 of 1 comparisons with more than one seed, clearly in 1, "
        "and clearly the other way round in 0 (after Holm's correction 1 and 0; by rounds that no test chose in 1 of "
        "1, clearly in 1 and 0)."
        "\n    - scale `cpu`, A: +10.10 [+9.85 to +10.35, 3 seeds], printed nothing "
        "(held; by the last ten +10.10 ± 0.06)"
    )


def test_other_settings_of_the_main_claim_are_counted_and_clear_ones_named():
    claim = CLAIM._replace(table="fedmr/table1")
    spread_runs = [made_up("fedmr", ga, seed, tag="mu1", mu1="1") for seed, ga in enumerate((41.0, 70.0, 42.0))]
    results = [
        *fedmr_fedavg(50.0, 40.0), *fedmr_fedavg(45.0, 40.0, tag="form", fedmr={"form": "x"}), *spread_runs,
        *fedmr_fedavg(30.0, 40.0, (0,), tag="lite", fedmr={"lite": "1"}),
    ]  # fmt: skip
    under_other_settings = departures_among([{**result, "table": claim.table} for result in results], claim)
    assert sentences(Facts([], [], under_other_settings, []))[5] == (
        "In 2 of 3 comparisons under other settings (readings, length, network) FedMR is above FedAvg, against 1 of "
        "the 1 with usual settings that they are compared with; of the 2 with more than one seed it is clearly above "
        "in 1 and clearly below in 0."
        "\n    - A `form`, form=x: +5.10 [+4.85 to +5.35, 3 seeds]"
    )


def test_usual_settings_of_two_scales_are_counted_separately():
    claim = CLAIM._replace(table="fedmr/table1")
    results = [
        {**result, "scale": scale, "table": claim.table}
        for scale, upper in (("cpu", 50.0), ("mid", 30.0))
        for result in [
            *fedmr_fedavg(upper, 40.0, model=scale),
            *fedmr_fedavg(45.0, 40.0, tag="form", model=scale, fedmr={"form": "x"}),
        ]
    ]
    known_departures = departures_among(results, claim)
    assert {(one.scale, one.tag): (one.base_scale, one.base) for one in known_departures} == {
        ("cpu", "form"): ("cpu", ""), ("mid", "form"): ("mid", ""), ("mid", ""): ("cpu", ""),
    }  # fmt: skip
    assert "against 1 of the 2 with usual settings" in sentences(Facts([], [], known_departures, []))[5]


def test_a_difference_of_one_seed_is_stated_as_such():
    claim = CLAIM._replace(table="fedmr/table1")
    text = sentences(Facts([], judged(fedmr_fedavg(50.0, 40.0, (0,)), claim), [], []))[3]
    assert "A: +10.00 [one seed], printed nothing (one seed, same sign; by the last ten +10.00)" in text


def test_a_claim_that_holds_only_without_the_correction_is_stated_as_such():
    claim = CLAIM._replace(table="fedmr/table1")
    (finding,) = (finding for finding in judged(fedmr_fedavg(50.0, 40.0), claim) if finding.best)
    text = sentences(Facts([], [finding._replace(best=finding.best._replace(p=0.2))], [], []))[3]
    assert "(not distinguishable after Holm's correction, held without; by the last ten" in text


@pytest.mark.thorough
def test_hours_of_a_cell_that_claims_share_count_once(facts):
    need = Need(CLAIM, "B", {"a": 10.0, "b": 20.0}, None, False)
    text = sentences(facts._replace(needs=[need, need._replace(by_run={"a": 10.0, "c": 5.0})]))[0]
    assert "(some 35 predicted hours for" in text


def test_runs_with_a_papers_own_network_are_counted_separately(facts):
    runs = [run for run in facts.results if run["status"] == "finished" and "same_run_as" not in run]
    with_own_network = sum(run["scale"] in OWN for run in runs)
    sentence = sentences(facts)[0]
    assert f"of {len(runs)} runs; {with_own_network} of all runs have a paper's own network" in sentence
    assert "of them with settings that its preset no longer has" not in sentence
    older = [run | {"superseded": {"lr": "1"}} if run["scale"] in OWN else run for run in facts.results]
    sentence = sentences(facts._replace(results=older))[0]
    assert f"({with_own_network} of them with settings that its preset no longer has)" in sentence


def test_only_the_runs_of_a_claims_rows_are_counted_for_it():
    claim = CLAIM._replace(table="fedmr/table1")
    results = [{**result, "table": "fedmr/table1"} for result in [*fedmr_fedavg(50.0, 40.0), made_up("moon", 45.0)]]
    sentence = sentences(Facts(results, findings([claim], columns(results, PAPER), PAPER), [], []))[0]
    assert "in 6 of 7 runs" in sentence


def test_printed_differences_count_only_for_the_papers_split_and_images():
    """A printed difference can lie within our interval only where split, images and unit are the paper's."""

    def sentence_about(results, claim=CLAIM, expected=PAPER):
        return sentences(Facts([], findings([claim], columns(results, expected), expected), [], []))[2]

    assert "of 1 cases." in sentence_about(fedmr_fedavg(50.0, 40.0))
    assert "of 0 cases." in sentence_about(fedmr_fedavg(50.0, 40.0, dataset="mnist"))
    assert "of 0 cases." in sentence_about(fedmr_fedavg(50.0, 40.0, task="digits2"))
    printed_elsewhere = CLAIM._replace(printed_on="avg")
    assert "of 0 cases." in sentence_about(fedmr_fedavg(50.0, 40.0), printed_elsewhere)
    assert "printed +10.00 for avg" in "".join(
        sentences(Facts([], [finding._replace(claim=printed_elsewhere._replace(table="fedgela/table4")) for finding in
                             findings([printed_elsewhere], columns(fedmr_fedavg(50.0, 40.0), PAPER), PAPER)], [], []))
    )  # fmt: skip
