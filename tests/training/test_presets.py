"""The papers' presets: every cell can be run, variants are chosen, and printed numbers stand beside the right cells.

A cell is (split, method, variant); the variant is "" for a method that has none in the preset.
"""

import csv
import functools
from pathlib import Path

import pytest
from commands import parse

from fedjax_pcdd.api import runs
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.data.domains import TASKS
from fedjax_pcdd.data.sources import DATASETS
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.fedgela import FedGELA
from fedjax_pcdd.methods.fedmr import FedMR
from fedjax_pcdd.models import MODELS
from fedjax_pcdd.training import fields as options
from fedjax_pcdd.training.config import TASK_DEFAULTS, build, dump, partition_tag, values
from fedjax_pcdd.training.options import configure
from fedjax_pcdd.training.presets import PAPERS, PRESETS, Preset, preset_method, preset_values, read_preset

ROOT = Path(__file__).parents[2]
SHIPPED = [str(path.relative_to(PRESETS).with_suffix("")) for path in sorted(PRESETS.rglob("*.yaml"))]
TABLES = [path.stem for path in sorted((PAPERS / "expected").glob("*.csv")) if not path.stem.endswith("_counts")]
COLUMNS = ["split", "method", "variant", "metric", "value", "std", "note"]

WITHOUT_PRESET = {
    "fedmr_table3": "sizes of messages, no runs",
    "fedmr_c5": "two differences that the text prints: fedmr/shakespeare",
}
WITHOUT_NUMBERS = {
    "fccl/figure7": "a picture", "fccl/figure8": "a picture", "fedgela/energy": "readings of Table 2",
    "fedgela/isic2019": "a reading of Table 3", "fedmr/isic2019": "a reading of Table 2",
    "fedgela/femnist": "appendix, not at hand", "fedgela/shakespeare": "appendix, not at hand",
    "fedmr/onehot": "a sentence", "fedmr/shakespeare": "two differences: fedmr_c5.csv",
}  # fmt: skip
SEARCHED = {"fedmr/table9": "what is printed was searched", "fedmr/table10": "what is printed was searched"}
NO_RUN = {
    ("fedmr_table15", "best-baseline", ""): "the best of several methods",
    ("fedgela_table5", "best-baseline", ""): "the best of several methods",
}
# Rows of a table that a preset runs and whose printed numbers are not in fedjax_pcdd/papers/expected/.
NOT_COPIED = {"fedvls_baselines": {"fedprox", "moon", "fedrs", "fedlc", "fedmr", "fedgela"}}


@pytest.fixture(autouse=True)
def read_once(monkeypatch):
    """Cache reading, as the same few texts are read thousands of times."""
    monkeypatch.setattr(options, "_read", _READ)


_READ = functools.cache(options._read)


@functools.cache
def preset_of(name: str) -> Preset:
    return read_preset(name, PRESETS)


def rows_of(preset: Preset) -> list[tuple[str, str]]:
    """(method, variant) of the rows of a preset's table."""
    method_of_variant = {name: str(variant["method"]) for name, variant in preset.variants.items()}
    plain = [(method, "") for method in preset.methods if method not in method_of_variant.values()]
    return plain + [(method, name) for name, method in method_of_variant.items()]


def run_of(preset: Preset, split: str, method: str, variant: str):
    return build(preset_values(preset, method, split, variant or None) | {"method": method})


@functools.cache
def printed(table: str) -> list[dict[str, str]]:
    with open(PAPERS / "expected" / f"{table}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def averaged_splits(row: dict[str, str]) -> list[str]:
    """The splits whose mean a printed number is, from its note; else its own split."""
    start = "mean of "
    is_mean = row["split"].endswith("avg") and row["note"].startswith(start)
    return row["note"].split(";")[0].removeprefix(start).split() if is_mean else [row["split"]]


def table_of(name: str) -> str:
    return name.replace("/", "_")


COVERED = [name for name in SHIPPED if table_of(name) in TABLES]
SPLITS = [(name, split) for name in SHIPPED for split in preset_of(name).splits]


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_every_cell_of_a_preset_has_a_valid_configuration(name, split):
    preset = preset_of(name)
    for method, variant in rows_of(preset):
        config, _ = run_of(preset, split, method, variant)
        assert config.method == method
        assert set((config.models or config.model or "").split(",")) <= set(MODELS)
        assert config.task in TASKS if config.task else config.dataset in DATASETS


@pytest.mark.parametrize("name", COVERED)
def test_every_printed_number_belongs_to_cells_of_its_preset(name):
    preset, table = preset_of(name), table_of(name)
    cells = {(split, *row) for split in preset.splits for row in rows_of(preset)}
    strangers = [
        row
        for row in printed(table)
        if (table, row["method"], row["variant"]) not in NO_RUN
        and not {(split, row["method"], row["variant"]) for split in averaged_splits(row)} <= cells
    ]
    assert strangers == []


@pytest.mark.parametrize("name", COVERED)
def test_every_cell_of_a_preset_has_a_printed_number(name):
    preset, table = preset_of(name), table_of(name)
    printed_cells = {(split, row["method"], row["variant"]) for row in printed(table) for split in averaged_splits(row)}
    copied_rows = [row for row in rows_of(preset) if row[0] not in NOT_COPIED.get(table, ())]
    cells = {(split, *row) for split in preset.splits for row in copied_rows}
    assert cells - printed_cells == set()


def test_every_listed_exception_is_still_needed():
    rows = {(table, row["method"], row["variant"]) for table in TABLES for row in printed(table)}
    assert set(NO_RUN) <= rows
    assert not {(table, method) for table, methods in NOT_COPIED.items() for method in methods} & {f[:2] for f in rows}


@pytest.mark.parametrize("name", SHIPPED)
def test_methods_outside_a_presets_table_have_a_valid_configuration_too(name):
    preset = preset_of(name)
    varied_methods = {str(variant["method"]) for variant in preset.variants.values()}
    for method in set(METHODS) - varied_methods:
        assert run_of(preset, next(iter(preset.splits)), method, "")[0].method == method


def test_every_preset_has_printed_numbers_or_a_reason():
    assert {name for name in SHIPPED if name not in COVERED} == set(WITHOUT_NUMBERS)


def test_a_table_without_a_preset_is_listed_with_its_reason():
    assert {table for table in TABLES if table not in map(table_of, COVERED)} <= set(WITHOUT_PRESET)


@pytest.mark.parametrize("table", TABLES)
def test_expected_tables_have_one_layout(table):
    with open(PAPERS / "expected" / f"{table}.csv", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == COLUMNS
    assert {len(row) for row in rows} == {len(COLUMNS)}


@pytest.mark.parametrize("table", TABLES)
def test_a_cell_is_printed_once(table):
    keys = [tuple(row[column] for column in COLUMNS[:4]) for row in printed(table)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("table", TABLES)
def test_a_printed_value_is_a_number_or_its_absence_is_noted(table):
    for row in printed(table):
        assert float(row["value"]) >= 0 if row["value"] else row["note"]
        assert not row["std"] or float(row["std"]) > 0


def test_means_of_table_1_of_fedmr_follow_from_its_rows_or_the_note_says_not():
    cells = {(row["split"], row["method"]): float(row["value"]) for row in printed("fedmr_table1")}
    wrong = []
    for row in printed("fedmr_table1"):
        mean = sum(cells[split, row["method"]] for split in averaged_splits(row)) / len(averaged_splits(row))
        if abs(mean - float(row["value"])) > 0.0101:
            wrong.append(f"the rows give {mean:.2f}" in row["note"])
    assert wrong == [True] * 4


@functools.cache
def tuned_weights() -> dict[tuple, float]:
    """(data set, partition, method, option) -> the weight of Tables 9 and 10 of FedMR."""
    weights = {}
    for table, name in (("fedmr_table9", "fedmr/table1"), ("fedmr_table10", "fedmr/table2")):
        for row in printed(table):
            if not row["note"].startswith("as printed"):  # one weight is a misprint
                config, _ = run_of(preset_of(name), row["split"], row["method"], "")
                weights[config.dataset, partition_tag(vars(config)), row["method"], row["metric"]] = float(row["value"])
    return weights


WITHOUT_TUNED_WEIGHTS = {"fedmr/table13", "fedmr/table15", "fedmr/shakespeare"}  # data sets without tuned weights
WITH_TUNED_WEIGHTS = [
    name for name in SHIPPED if name.startswith("fedmr/") and name not in {*WITHOUT_TUNED_WEIGHTS, *SEARCHED}
]


@pytest.mark.parametrize("name", WITH_TUNED_WEIGHTS)
def test_the_methods_of_fedmr_have_the_printed_weights(name):
    preset, compared = preset_of(name), 0
    for split in preset.splits:
        for method, variant in rows_of(preset):
            config, chosen = run_of(preset, split, method, variant)
            for option in set(values(config, chosen)) - set(preset.variants.get(variant, {})):
                weight = tuned_weights().get((config.dataset, partition_tag(vars(config)), method, option))
                if weight is not None:
                    assert getattr(chosen, option) == weight, (split, method, option)
                    compared += 1
    assert compared >= len(preset.splits)


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith(("fedmr/", "fedgela/", "fedrl/"))])
def test_a_partition_is_the_one_that_its_split_names(name):
    preset = preset_of(name)
    method, variant = rows_of(preset)[0]
    for split in preset.splits:
        config, _ = run_of(preset, split, method, variant)
        tag = partition_tag(vars(config)).replace("dirichlet", "dir").lower()
        assert split.lower().endswith(tag), split
        assert (config.cohort is not None) == ((config.clients or 0) > 10), split
        assert ("partial" in split) <= (config.clients == 50), split


@pytest.mark.parametrize("name", ["fccl/table1", "fccl/table2", "fccl/table3"])
def test_presets_of_fccl_have_the_settings_of_its_tasks(name):
    preset = preset_of(name)
    for split in preset.splits:
        config, _ = parse([f"--preset={name}", f"--split={split}", "--method=fccl"])
        task, _ = parse([f"--task={config.task}", "--method=fccl"])
        recipe = TASKS[config.task or ""]
        assert {field: getattr(config, field) for field in TASK_DEFAULTS} == {
            field: getattr(task, field) for field in TASK_DEFAULTS
        }
        assert (config.public, config.public_samples) == (recipe.public, recipe.public_samples)
        assert len((config.models or "").split(",")) in (1, len(recipe.domains))


def test_models_are_averaged_in_table_3_of_fccl_but_not_in_table_1():
    averages = {}
    for name in ("fccl/table1", "fccl/table3"):
        _, method = parse([f"--preset={name}", "--split=office-home", "--method=fccl"])
        averages[name] = method.traits().averages
    assert averages == {"fccl/table1": "never", "fccl/table3": "exchanged"}


def test_every_preset_is_on_the_docs_page():
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    assert [name for name in SHIPPED if f"`{name}`" not in page] == []


def test_every_table_without_a_preset_is_on_the_docs_page():
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    assert [table for table in TABLES if table in WITHOUT_PRESET and f"`{table}`" not in page] == []


def test_a_cell_is_run_by_the_names_of_preset_method_and_split():
    config, method = parse(["--preset=fedmr/table1", "--method=fedmr", "--split=P10C2"])
    assert (config.dataset, config.model, config.rounds) == ("fashion_mnist", "resnet18", 100)
    assert (partition_tag(vars(config)), method) == ("P10C2", FedMR(mu1=0.01, mu2=1e-4))


def test_options_win_over_a_preset():
    options = ["--model=simple_cnn", "--rounds=3", "--dataset=cifar100_subset"]
    config, _ = parse(["--preset=fedmr/table1", "--split=svhn-P10C2", "--method=moon", *options])
    assert (config.dataset, config.model, config.rounds, config.batch_size) == ("cifar100_subset", "simple_cnn", 3, 128)


PRESET_TEXT = """
run: {lr: 0.1}
splits: {a: {lr: 0.2}, b: {rounds: 3}}
methods: {fedmr: {mu1: 0.3, mu2: 0.4, splits: {b: {mu1: 0.5}}}}
variants:
  intra-only: {method: fedmr, terms: intra}
  strong: {method: fedmr, mu1: 7, batch-size: 9, splits: {a: {mu1: 8}}}
  fedge: {method: fedgela, phi: none}
"""


@pytest.fixture
def preset_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(PRESET_TEXT)
    return file


@pytest.mark.parametrize(
    ("split", "variant", "expected"),
    [
        ("a", "intra-only", {"lr": 0.2, "mu1": 0.3, "mu2": 0.4, "terms": "intra"}),
        ("b", "intra-only", {"lr": 0.1, "rounds": 3, "mu1": 0.5, "mu2": 0.4, "terms": "intra"}),
        ("a", "strong", {"lr": 0.2, "mu1": 8.0, "mu2": 0.4, "batch_size": 9}),
        ("b", "strong", {"lr": 0.1, "rounds": 3, "mu1": 7.0, "mu2": 0.4, "batch_size": 9}),
    ],
)
def test_a_variant_wins_over_its_method(preset_file, split, variant, expected):
    assert preset_values(read_preset(str(preset_file), PRESETS), "fedmr", split, variant) == expected


def test_a_variant_implies_its_method(preset_file):
    config, method = parse([f"--preset={preset_file}", "--split=a", "--variant=fedge"])
    assert (config.method, method) == ("fedgela", FedGELA(phi="none"))


def test_a_variant_may_be_given_together_with_its_method(preset_file):
    config, _ = parse([f"--preset={preset_file}", "--split=a", "--variant=fedge", "--method=fedgela"])
    assert config.method == "fedgela"


def test_the_folder_of_a_run_is_not_a_preset_but_its_configuration_is(tmp_path):
    (tmp_path / "config.yaml").write_text("method: fedavg\nlr: 0.5\n")
    with pytest.raises(UserError, match=r"is the folder of a run: take its configuration, .*config\.yaml\."):
        read_preset(str(tmp_path), PRESETS)
    assert parse([f"--preset={tmp_path / 'config.yaml'}"])[0].lr == 0.5


def test_options_win_over_a_variant(preset_file):
    _, method = parse([f"--preset={preset_file}", "--split=a", "--variant=strong", "--mu1=1"])
    assert method == FedMR(mu1=1.0, mu2=0.4)


def test_a_method_without_variants_needs_none(preset_file):
    assert parse([f"--preset={preset_file}", "--split=a", "--method=fedavg"])[0].method == "fedavg"


def test_without_a_variant_this_preset_names_no_method(preset_file):
    assert preset_method(read_preset(str(preset_file), PRESETS)) is None


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--preset=FILE --split=a --method=fedmr", "FILE has variants of fedmr: add --variant with one of intra-only,"),
        ("--preset=FILE --split=a --variant=intra", "FILE has no variant 'intra': did you mean 'intra-only'?"),
        (
            "--preset=FILE --split=a --variant=fedge --method=fedmr",
            "variant 'fedge' of FILE is one of fedgela, not of fedmr: drop --method, or choose one of fedmr's,",
        ),
        (
            "--preset=FILE --split=a --variant=fedge --method=fedavg",
            "variant 'fedge' of FILE is one of fedgela, not of fedavg: drop --method, or drop --variant.",
        ),
        ("--preset=fedmr/table1 --split=P5C2 --variant=full", "PRESETS/fedmr/table1.yaml has no variants: drop"),
        ("--variant=full", "--variant chooses a variant of a preset: add --preset, or drop it."),
        ("--variant", "--variant needs a value: write --variant=VALUE."),
        ("--preset=missing/own.yaml", "there is no file missing/own.yaml: correct the path of --preset."),
        ("--resume=. --variant=a", "--resume continues a run as it was started: drop --variant."),
    ],
)
def test_a_wrong_variant_is_refused_in_one_sentence(preset_file, capsys, monkeypatch, argv, sentence):
    monkeypatch.setattr(runs, "run", lambda *_, **__: pytest.fail("this must not run"))
    assert main(argv.replace("FILE", str(preset_file)).split()) == 2
    message = capsys.readouterr().err.replace(str(preset_file), "FILE").replace(str(PRESETS), "PRESETS")
    assert message.startswith(sentence)
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("variants: {a: {terms: intra}}", "variant 'a' in FILE needs a line `method: NAME`."),
        ("variants: {a: {method: fedmrr}}", "unknown method 'fedmrr' in FILE: did you mean 'fedmr'?"),
        ("variants: {a: {method: fedmr, ew: 1}}", "unknown key 'ew' in variant 'a' of FILE: "),
        ("variants: {a: {method: fedmr, mu1: x}}", "'mu1' in variant 'a' of FILE takes a number"),
        ("variants: {a: {method: fedmr, splits: {z: {}}}}", "'splits' of variant 'a' of FILE may name no other"),
        ("variants: [a]", "'variants' in FILE must name variants, not"),
        ("variants: {a: 3}", "variant 'a' in FILE must hold `name: value` lines"),
    ],
)
def test_an_invalid_variant_in_a_preset_file_is_refused(tmp_path, text, sentence):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        preset_values(read_preset("mine", tmp_path), "fedmr", None, "a")
    assert str(error.value).replace(str(tmp_path / "mine.yaml"), "FILE").startswith(sentence)


def test_a_split_may_be_named_by_a_number(tmp_path):
    (tmp_path / "mine.yaml").write_text("splits: {10: {clients: 10}}\nmethods: {fedmr: {splits: {10: {mu1: 0.5}}}}")
    assert preset_values(read_preset("mine", tmp_path), "fedmr", "10") == {"clients": 10, "mu1": 0.5}


def test_the_help_shows_the_option_variant(capsys):
    main(["--help"])
    assert "--variant " in capsys.readouterr().out


def test_a_variant_with_its_methods_name_need_not_be_given():
    preset = read_preset("fccl/table3")
    plain, fedavg = (preset_values(preset, "fccl", "office-home", variant) for variant in (None, "fedavg"))
    changed = {key: value for key, value in fedavg.items() if plain.get(key) != value}
    assert changed == {"collaborate": False, "continual": False}
    assert fedavg["average"] == plain["average"] == "exchanged"
    assert "average" not in preset_values(preset, "fedavg", "office-home")


def test_a_recorded_configuration_is_a_preset_without_its_run_folder(tmp_path):
    (tmp_path / "config.yaml").write_text(dump(*build({"method": "fedprox", "mu": 0.5, "lr": 0.3, "run_dir": "a/b"})))
    config, method = configure({"preset": str(tmp_path / "config.yaml"), "lr": "0.2"})
    assert (config.method, method.mu, config.lr, config.run_dir) == ("fedprox", 0.5, 0.2, None)
