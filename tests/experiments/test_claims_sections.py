"""What the page of results says beside its tables: other settings, what asks for a GPU, pictures and ten sentences."""

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


def pair(upper, lower, seeds=(0, 1, 2), *, own=None, **both):
    """Results of FedMR and FedAvg with as many seeds, whose differences spread a little; `own` are FedMR's options."""
    results = []
    for seed in seeds:
        results.append(made_up("fedmr", upper + 0.1 * seed, seed, **both, **(own or {})))
        results.append(made_up("fedavg", lower, seed, **both))
    return results


def departed(results, claim=CLAIM):
    return departures([claim], columns(results, PAPER), lambda claim, split: 10.0)


# What a claim hinges on


def test_a_departure_is_of_what_its_options_change():
    other = [
        *pair(50.0, 40.0, tag="epochs", local_epochs="10"), *pair(50.0, 40.0, tag="resnet", model="resnet8"),
        *pair(50.0, 40.0, tag="form", own={"form": "frobenius"}), *pair(50.0, 40.0, tag="images", dataset="mnist"),
    ]  # fmt: skip
    kinds = {one.tag: one.kind for one in departed([*pair(50.0, 40.0), *other])}
    assert kinds == {
        "epochs": "length of training", "resnet": "network and norm", "form": "readings", "images": "images",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("upper", "seeds", "turns"),
    [(49.0, (0, 1, 2), False), (35.0, (0, 1, 2), True), (49.0, (0,), False), (35.0, (0,), True), (40.0, (0,), True)],
)
def test_a_claim_turns_where_sign_or_test_says_something_else(upper, seeds, turns):
    (one,) = departed([*pair(50.0, 40.0), *pair(upper, 40.0, seeds, tag="form", own={"form": "x"})])
    assert one.turns is turns


def test_a_claim_turns_where_a_test_no_longer_tells_the_methods_apart():
    spread = [made_up("fedmr", ga, seed, tag="form", form="x") for seed, ga in enumerate((41.0, 70.0, 42.0))]
    (one,) = departed([*pair(50.0, 40.0), *spread])
    assert one.other.mean > 0
    assert one.turns


def test_a_reading_of_a_method_is_beside_the_other_row_of_the_default_and_longer_training_is_not():
    reading = [made_up("fedmr", 45.0, tag="form", form="x")]
    longer = [made_up("fedmr", 45.0, tag="epochs", local_epochs="10")]
    (one,) = departed([*pair(50.0, 40.0), *reading, *longer])
    assert (one.tag, one.other.mean) == ("form", 5.0)


def test_a_departure_is_from_the_nearest_column_of_the_claim():
    claim = CLAIM._replace(tags=("", "mnist"))
    results = [
        *pair(50.0, 40.0), *pair(60.0, 40.0, tag="mnist", dataset="mnist"),
        *pair(61.0, 40.0, tag="mnist-form", dataset="mnist", own={"form": "x"}),
    ]  # fmt: skip
    (one,) = [one for one in departed(results, claim) if one.tag == "mnist-form"]
    assert (one.settings, round(one.usual.mean)) == ("form=x", 20)


def test_both_differences_of_a_departure_are_of_the_same_seeds():
    usual = [*pair(50.0, 40.0, (0, 1)), *pair(70.0, 40.0, (2, 3))]
    (one,) = departed([*usual, *pair(45.0, 40.0, (0, 1), tag="form", own={"form": "x"})])
    assert one.usual.seeds == one.other.seeds == (0, 1)
    assert one.usual.mean == pytest.approx(10.05)


def test_runs_of_two_versions_are_no_pair():
    old = [{**one, "version": "0.1"} for one in pair(50.0, 40.0)]
    new = [{**one, "version": "0.2"} for one in pair(45.0, 40.0, tag="form", own={"form": "x"})]
    assert [one.usual.mean - one.other.mean for one in departed([*old, *new])] == [pytest.approx(5.0)]
    alone = [one for one in new if one["method"] == "fedmr"]  # beside the default's FedAvg, which is of another version
    assert departed([*old, *alone]) == []
    renewed = [{**one, "version": "0.2"} if one["method"] == "fedmr" else one for one in old]
    assert [one.verdict for one in judged(renewed)] == ["not tried", "not tried"]


def test_what_turns_a_claim_is_listed_at_the_column_from_which_it_departs():
    claim = CLAIM._replace(tags=("", "mnist"), splits=("A",))
    results = [
        *pair(50.0, 40.0), *pair(60.0, 40.0, tag="mnist", dataset="mnist"),
        *pair(20.0, 40.0, tag="mnist-form", dataset="mnist", own={"form": "x"}),
    ]  # fmt: skip
    rows = as_json(findings([claim], columns(results, PAPER), PAPER), set(), departed(results, claim))
    assert {row["tag"]: row["turns_with"] for row in rows} == {"": [], "mnist": ["cpu mnist-form: form=x"]}


def test_another_scale_is_beside_the_one_of_a_cpu():
    larger = [{**one, "scale": "mid"} for one in pair(35.0, 40.0, model="resnet8", rounds="50")]
    (one,) = departed([*pair(50.0, 40.0, model="simple_cnn"), *larger])
    assert (one.scale, one.kind, one.turns) == ("mid", "network and norm", True)


def test_the_presets_own_value_over_the_preset_is_no_departure():
    run = {"decisive": {"model": "mlp", "rounds": "30"}}
    small = [one | run for one in pair(50.0, 40.0, model="mlp", rounds="30")]
    whole = [one | {"scale": "full", "decisive": {"model": "mlp", "rounds": "120"}} for one in pair(50.0, 40.0, lr="1")]
    (one,) = departed([*small, *whole])
    assert (one.kind, one.settings) == ("length of training", "lr=1, rounds=120")


def test_the_section_names_what_turns_with_both_differences():
    results = [*pair(50.0, 40.0), *pair(35.0, 40.0, tag="form", own={"form": "x"})]
    claim = CLAIM._replace(hinges="the moon")
    text = "\n".join(hinges_section([claim], departed(results, claim)))
    assert "**FedMR is above FedAvg.** Thought to hinge on: the moon." in text
    assert "- readings: turns under 1 of 1 (A `form`: +10.10 ± 0.06 → −4.90 ± 0.06)" in text


# What only a GPU can decide


def cell(method, split="B", scale="paper", seed=0):
    return Cell(scale, "toy/table1", split, method, None, "", seed, {})


def needed(results=(), *, paper, full=(), gpu=()):
    judged = findings([CLAIM], columns(results, PAPER), PAPER)
    return needs(judged, {"paper": paper, "full": full, "gpu": gpu}, lambda cell: 1.5)


def test_what_a_plan_for_a_cpu_has_in_the_papers_settings_needs_no_gpu():
    paper = [cell(name, split) for name in ("fedmr", "fedavg", "moon") for split in "AB"]
    assert [(one.split, one.hours) for one in needed(paper=paper)] == [("A", 3.0), ("B", 3.0)]
    assert [one.split for one in needed(paper=paper, full=[cell("fedmr", "A", "full")])] == ["B"]
    assert [one.split for one in needed([{**one, "scale": "gpu"} for one in pair(1.0, 0.0)], paper=paper)] == ["B"]


def test_a_plan_runs_a_claim_where_it_has_both_rows():
    paper = [cell("fedmr"), cell("fedavg")]
    assert [one.planned for one in needed(paper=paper, gpu=paper)] == [True]
    assert [one.planned for one in needed(paper=paper, gpu=paper[:1])] == [False]


def test_the_section_has_command_hours_and_part_of_each_claim():
    one = Need(CLAIM, "B", {"a": 1.0, "b": 2.0}, 3, False)
    text = "\n".join(gpu_section([one, one._replace(split="C", by_cell={"c": None}, part=None, planned=True)]))
    assert "| FedMR is above FedAvg | B C | 3.0 and more | part 3: B; `--scale=gpu`: C |" in text
    assert 'python experiments/reproduce.py --scale=paper --claim="FedMR is above FedAvg" --data-dir=data' in text


def test_hours_are_those_of_the_predicted_steps():
    step = json.loads((REPOSITORY / PREDICTED).read_text())
    plan = read_plan("paper", EXPERIMENTS / "reproduction", PRESETS).cells
    one = next(cell for cell in plan if (cell.table, cell.split) == ("fedmr/table1", "cifar10-P10C2"))
    launches = step["kernels"] * step["launch_us"]
    seconds = 100 * 10 * 50000 / 128 * (launches + (step["step_us"] - launches) * 128 / step["batch"]) / 1e6
    assert predicted_hours(REPOSITORY, PRESETS)(one) == pytest.approx(seconds / 3600)
    other = next(cell for cell in plan if cell.split == "cifar100-P10C10")
    assert predicted_hours(REPOSITORY, PRESETS)(other) is None
    assert predicted_hours(EXPERIMENTS, PRESETS)(one) is None


def test_the_predicted_step_is_the_one_that_is_compiled():
    step = json.loads((REPOSITORY / PREDICTED).read_text())
    survey = json.loads((REPOSITORY / "benchmarks/results/accelerator.json").read_text())
    assert step["kernels"] in [kernels for _, kernels in survey["h100"]["rounds"]["w3, 1 lane"]["launched"]]


def test_parts_of_the_gpu_plan_run_what_the_claims_say():
    parts = {(claim.text, split): part for claim in read_claims(EXPERIMENTS / "reproduction/claims.yaml")
             for split, part in claim.gpu_part.items()}  # fmt: skip
    assert parts == {("FedMR is above FedAvg", split): 3 for split in ("P5C2", "P10C2")}
    for _, split in parts:
        assert {f"fedavg {split}", f"fedmr {split}"} <= papers.groups(split)[0].keys()


def test_a_claim_chooses_the_cells_of_its_rows_and_splits(capsys):
    text = "FedMR is above FedProx"
    (claim,) = (one for one in read_claims(EXPERIMENTS / "reproduction/claims.yaml") if one.text == text)
    assert reproduce_main(EXPERIMENTS, ["--scale=paper", f"--claim={text}", "--list", "--results-dir=none"]) == 0
    listed = {line.split()[2] for line in capsys.readouterr().out.splitlines()[:-1]}
    plan = read_plan("paper", EXPERIMENTS / "reproduction", PRESETS).cells
    assert listed == {cell.name for cell in plan if about(claim, cell)}
    assert {name.rpartition("-")[0] for name in listed} == {
        f"paper-{split}-{method}" for split in ("P5C2", "P10C2") for method in ("fedmr", "fedprox")
    }


def test_an_unknown_claim_is_one_sentence(capsys):
    assert reproduce_main(EXPERIMENTS, ["--scale=paper", "--claim=FedMR is above FedPox", "--list"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean 'FedMR is above FedProx'" in line


# Pictures


def judged(results, claim=CLAIM):
    return findings([claim], columns([{**one, "table": claim.table} for one in results], {}), {})


def test_a_paper_has_a_picture_with_a_line_for_each_claim_that_was_tried():
    claim = CLAIM._replace(table="fedmr/table1")
    lines, pictures = figures_section(judged(pair(50.0, 40.0), claim))
    (svg,) = pictures.values()
    assert list(pictures) == ["images/reproduction_fedmr.svg"]
    assert "FedMR is above FedAvg · A · cpu" in svg
    words = "FedMR: our differences beside the printed ones in 1 comparison, 0 of 0 with the printed sign"
    assert f'aria-label="{words}"' in svg
    assert f"![{words}](images/reproduction_fedmr.svg)" in lines


def test_what_is_not_in_percent_points_or_not_tried_is_in_no_picture():
    claim = CLAIM._replace(table="fedmr/table1")
    other = [{**one, "metrics": {"eigenvalue_variance": 4.0}} for one in pair(50.0, 40.0)]
    assert figures_section(judged(other, claim._replace(metric="eigenvalue_variance"))) == ([], {})
    assert figures_section(judged([], claim)) == ([], {})


@pytest.mark.thorough
def test_pages_and_pictures_are_the_same_bytes_each_time():
    first, second = (pages(REPOSITORY / "results", EXPERIMENTS) for _ in range(2))
    assert first == second
    assert any(name.endswith(".svg") for name in first)


# Ten sentences


@pytest.fixture(scope="module")
def facts():
    one = known(REPOSITORY / "results", EXPERIMENTS)
    return Facts(one.results, one.findings, one.departures, one.needs)


def check_ten(texts):
    assert len(texts) == 10
    for text in texts:
        assert text.endswith(".")
        assert not re.search(r"[.!?] [A-Z]", text), text


@pytest.mark.thorough
def test_there_are_ten_sentences_of_whatever_results_there_are(facts):
    check_ten(sentences(facts))
    check_ten(sentences(Facts([], [], [], [])))
    single = [one for one in facts.results if one["seed"] == 0]
    check_ten(sentences(facts._replace(results=single)))


@pytest.mark.thorough
def test_every_claim_that_was_tried_is_counted_once(facts):
    first, second, *_ = sentences(facts)
    pairs = {(one.claim.text, one.split) for one in facts.findings}
    tried = {(one.claim.text, one.split) for one in facts.findings if one.best is not None}
    assert f"{len(pairs)} counting each split: {len(tried)} were tried" in first
    words = r"the (\d+) comparisons .*, (\d+) held .*, (\d+) did not hold, and (\d+) cannot .*; (\d+) more"
    several, held, against, open_, single = map(int, re.search(words, second).groups())
    assert held + against + open_ == several
    assert several + single == sum(one.best is not None for one in facts.findings)


def test_the_main_claim_is_told_with_interval_seeds_and_verdict():
    claim = CLAIM._replace(table="fedmr/table1")
    text = sentences(Facts([], judged(pair(50.0, 40.0), claim), [], []))[3]
    assert text == (
        "FedMR above FedAvg, the main claim of its paper: at scale `cpu` +10.10 [+9.85 to +10.35, 3 seeds] on A, "
        "printed nothing (held); in 1 of 1 comparisons with more than one seed, clearly in 1, and clearly the other "
        "way round in 0 (after Holm's correction 1 and 0)."
    )


def test_other_settings_of_the_main_claim_are_counted_and_those_that_tell_the_methods_apart_named():
    claim = CLAIM._replace(table="fedmr/table1")
    spread = [made_up("fedmr", ga, seed, tag="mu1", mu1="1") for seed, ga in enumerate((41.0, 70.0, 42.0))]
    results = [
        *pair(50.0, 40.0), *pair(45.0, 40.0, tag="form", own={"form": "x"}), *spread,
        *pair(30.0, 40.0, (0,), tag="lite", own={"lite": "1"}),
    ]  # fmt: skip
    other = departed([{**one, "table": claim.table} for one in results], claim)
    assert sentences(Facts([], [], other, []))[5] == (
        "In 2 of 3 comparisons under other settings (readings, length, network) FedMR is above FedAvg, against 3 with "
        "the usual settings and the same seeds; of the 2 with more than one seed it is clearly above in 1 (A `form`, "
        "form=x: +5.10 [+4.85 to +5.35, 3 seeds]) and clearly below in 0."
    )


def test_one_seed_is_told_as_one_seed():
    claim = CLAIM._replace(table="fedmr/table1")
    text = sentences(Facts([], judged(pair(50.0, 40.0, (0,)), claim), [], []))[3]
    assert "+10.00 [one seed] on A, printed nothing (one seed, same sign)" in text


def test_what_a_correction_takes_away_is_said():
    claim = CLAIM._replace(table="fedmr/table1")
    (one,) = (one for one in judged(pair(50.0, 40.0), claim) if one.best)
    text = sentences(Facts([], [one._replace(best=one.best._replace(p=0.2))], [], []))[3]
    assert "(not distinguishable after Holm's correction, held without)" in text


@pytest.mark.thorough
def test_hours_of_a_cell_that_claims_share_count_once(facts):
    need = Need(CLAIM, "B", {"a": 10.0, "b": 20.0}, None, False)
    text = sentences(facts._replace(needs=[need, need._replace(by_cell={"a": 10.0, "c": 5.0})]))[0]
    assert "(some 35 predicted hours for" in text


def test_scales_with_the_papers_own_settings_are_told_apart(facts):
    runs = [one for one in facts.results if one["status"] == "finished" and "same_run_as" not in one]
    own = sum(one["scale"] in OWN for one in runs)
    older = sum(one["scale"] in OWN and bool(one["superseded"]) for one in runs)
    told = sentences(facts)[0]
    assert f"of {len(runs)} runs; {own} of all runs have a paper's own network" in told
    assert f"({older} of them with settings that its preset no longer has)" in told


def test_only_the_runs_of_a_claims_rows_stand_behind_it():
    claim = CLAIM._replace(table="fedmr/table1")
    results = [{**one, "table": "fedmr/table1"} for one in [*pair(50.0, 40.0), made_up("moon", 45.0)]]
    told = sentences(Facts(results, findings([claim], columns(results, PAPER), PAPER), [], []))[0]
    assert "in 6 of 7 runs" in told


def test_a_printed_difference_is_within_our_interval_only_where_split_images_and_unit_are_the_papers():
    def told(results, claim=CLAIM, expected=PAPER):
        return sentences(Facts([], findings([claim], columns(results, expected), expected), [], []))[2]

    assert "of 1 cases." in told(pair(50.0, 40.0))
    assert "of 0 cases." in told(pair(50.0, 40.0, dataset="mnist"))
    assert "of 0 cases." in told(pair(50.0, 40.0, task="digits2"))
    elsewhere = CLAIM._replace(printed_on="avg")
    assert "of 0 cases." in told(pair(50.0, 40.0), elsewhere)
    assert "printed +10.00 for avg" in "".join(
        sentences(Facts([], [one._replace(claim=elsewhere._replace(table="fedgela/table4")) for one in
                             findings([elsewhere], columns(pair(50.0, 40.0), PAPER), PAPER)], [], []))
    )  # fmt: skip
