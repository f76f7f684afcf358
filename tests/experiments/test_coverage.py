"""Every table, figure and theorem of the papers has a command; every command parses, and every one runs."""

import json
import os
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml

from fedjax_pcdd.api.grid import expand, stages
from fedjax_pcdd.cli import analyse
from fedjax_pcdd.cli.options import configure, scan
from fedjax_pcdd.cli.report import report_main
from fedjax_pcdd.cli.run import main as run_main
from fedjax_pcdd.cli.sweep import sweep_main
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.presets import PAPERS, read_preset
from reproduction.command import reproduce_main
from reproduction.coverage import read_coverage, steps
from reproduction.plan import read_plan
from reproduction.results import read_results

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
FILE = EXPERIMENTS / "reproduction/coverage.yaml"
ITEMS = read_coverage(FILE, read_results(ROOT / "results"))
STEPS = sorted({step for item in ITEMS if item.command for step in steps(item.command)})
COMMANDS = {item.command: f"{item.paper} {item.item}" for item in ITEMS if item.command}

# Settings that make a run as small as possible, whatever its model, data and rounds.
SMALL = ("rounds=1", "local_epochs=1", "fine_tune_epochs=0", "lanes=1", "quiet=true")
SMALL_FEDERATION = (*SMALL, "batch_size=8", "min_samples=1", "model=mlp")
SMALL_TASK = (
    *SMALL,
    "batch_size=128",
    "models=mlp",
    "public_samples=16",
    "public_batch=8",
    "pretrain_epochs=1",
    "pretrain_batch_size=32",
)
# Options of a small task that a method does not take.
OPTIONS_NOT_TAKEN = {"solo": {"pretrain_epochs"}, "fedavg": {"pretrain_epochs", "public_samples"}}
MEME = "mlp"  # for FML, whose own network would take minutes


def options_of(words):
    """The options of a run or a sweep, as name -> text."""
    return scan(words)


# The list


@pytest.mark.thorough
def test_the_list_is_printed_as_json(capsys):
    assert reproduce_main(EXPERIMENTS, ["--coverage", "--json", f"--results-dir={ROOT / 'results'}"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(ITEMS)
    assert set(rows[0]) == {"paper", "item", "kind", "command", "scale", "result"}


def test_every_item_but_diagrams_has_a_command():
    assert [item for item in ITEMS if (item.command is None) != (item.kind == "diagram")] == []


def test_every_printed_table_and_preset_is_on_the_list():
    tables = {path.stem for path in (PAPERS / "expected").glob("*_table*.csv")}
    named = {f"{item.paper.lower()}_{item.item.lower().replace(' ', '')}" for item in ITEMS}
    assert tables <= named
    presets = {
        str(path.relative_to(PAPERS / "presets").with_suffix("")) for path in (PAPERS / "presets").rglob("*.yaml")
    }
    used = {name for name in presets if any(name in (item.command or "") for item in ITEMS)}
    # The first preset is another paper's, the second holds readings.
    assert presets - used <= {"fedvls/baselines", "fedgela/energy"}


def test_every_result_that_an_item_names_exists():
    for item in ITEMS:
        for link in (item.result or "").split(", "):
            assert not link or (ROOT / link.partition("#")[0]).is_file(), f"{item.paper} {item.item}: {link}"
        assert (item.scale is None) == (item.result is None)


def test_a_wrong_item_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "a.yaml").write_text("items: [{paper: P, item: T, kind: table, shows: S}]")
    with pytest.raises(UserError, match=r"item 1 of .*all but diagrams have a command"):
        read_coverage(tmp_path / "a.yaml", [])


# Every command parses


@pytest.mark.parametrize("step", STEPS)
def test_every_step_parses_as_a_command_line(step):
    python, script, *words = shlex.split(step)
    assert python == "python"
    assert (ROOT / script).is_file()
    name = Path(script).stem
    if name == "run":
        configure(options_of(words))
    elif name == "sweep":
        options = options_of(words)
        options.pop("sweep_dir")
        options.pop("together", None)
        has_grid = bool(read_preset(options["preset"], PAPERS / "presets").grid)
        experiments = next(stages(options, {})) if has_grid else expand(options)
        for experiment in experiments:
            configure(experiment.given)
    elif name == "analyse":
        command = analyse.COMMANDS.get(words[0])
        options = [word.partition("=")[0][2:].replace("-", "_") for word in words if word.startswith("--")]
        assert words[0] == "partition" or (command and set(options) <= set(command.options))
    elif name == "reproduce" and "--page" not in words:
        options = dict(word[2:].split("=") for word in words)
        cells = read_plan(options["scale"], EXPERIMENTS / "reproduction", PAPERS / "presets").cells
        assert any(cell.table == options["only"] for cell in cells)
    else:
        assert name in ("reproduce", "report") or "notebooks" in script


# Every command runs


def random_images(rng, samples, side=16, channels=3, classes=10, groups=0):
    """The arrays of an npz file with random images, whose labels go through all classes in turn."""
    arrays = {}
    for fold, count in (("train", samples), ("test", max(120, classes))):
        labels = np.arange(count) % classes
        arrays[f"x_{fold}"] = rng.integers(0, 255, (count, side, side, channels), dtype=np.uint8)
        arrays[f"y_{fold}"] = labels.astype(np.uint8)
        if groups:
            arrays[f"writer_{fold}"] = (np.arange(count) // classes % groups).astype(np.int32)
    return arrays


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that looks like a clone of the repository, with small data sets of the papers' names in `data`."""
    folder, rng = tmp_path_factory.mktemp("clone"), np.random.default_rng(0)
    (folder / "data").mkdir()
    for name in ("experiments", "notebooks", "fedjax_pcdd"):
        (folder / name).symlink_to(ROOT / name)
    image_sets = {
        "cifar10": random_images(rng, 1500), "svhn": random_images(rng, 5200),
        **{name: random_images(rng, 1500, channels=1) for name in ("fashion_mnist", "mnist")},
        "usps": random_images(rng, 200, channels=1), "syn": random_images(rng, 1900),
        "cifar100": random_images(rng, 3000, classes=100),
        "tiny_imagenet": random_images(rng, 100, 64), "hyperkvasir": random_images(rng, 600, classes=20),
        "odir": random_images(rng, 300, classes=8), "isic2019": random_images(rng, 600, 32, classes=8, groups=6),
        "femnist": random_images(rng, 3720, 16, 1, 62, groups=60),
    }  # fmt: skip
    for name, arrays in image_sets.items():
        np.savez(folder / "data" / f"{name}.npz", **arrays)
    length = 110  # of a speech; the two speeches of a speaker make 46 training samples
    text = rng.integers(97, 122, 60 * 2 * length).astype(np.uint8)
    start = np.arange(0, len(text), length, dtype=np.int32)
    speaker_numbers = (np.arange(len(start)) // 2).astype(np.int16)
    speakers = {"speech_speaker": speaker_numbers, "speakers": np.array([f"s{i}" for i in range(60)])}
    np.savez(folder / "data/shakespeare.npz", text=text, speech_start=start, speech_end=start + length, **speakers)
    office_images = random_images(rng, 65 * 80, 32, classes=65)
    domain_names = np.array(["Art", "Clipart", "Product", "Real World"])
    domains = {"domain": (np.arange(65 * 80) // 65 % 4).astype(np.uint8), "domains": domain_names}
    np.savez(folder / "data/office_home.npz", x=office_images["x_train"], y=office_images["y_train"], **domains)
    return folder


def shrunk(words):
    """The words of a run or a sweep, with options appended that make it small."""
    options = options_of(words)
    preset = read_preset(options["preset"], PAPERS / "presets")
    task = "task" in preset.run or any("task" in split for split in preset.splits.values())
    method = options.get("method", "")
    not_taken = OPTIONS_NOT_TAKEN.get(method, set()) if task else set()
    small_options = SMALL_TASK if task else SMALL_FEDERATION
    smaller = [f"--{option.replace('_', '-')}" for option in small_options if option.partition("=")[0] not in not_taken]
    if "fml" in method.split(","):
        smaller.append(f"--meme={MEME}")
    if options.get("dataset") == "shakespeare" or "shakespeare" in options["preset"]:
        smaller = [option for option in smaller if "model" not in option and "batch" not in option]
        smaller += ["--batch-size=64", "--clients=10", "--cohort=2"]
    return [*words, *smaller]


def small_plan_options(words, folder):
    """Options to reproduce only the first cell of each row of a table, from a plan that is written here."""
    options = dict(word[2:].split("=") for word in words)
    preset = read_preset(options["only"], PAPERS / "presets")
    task = any("task" in split for split in preset.splits.values())
    block = {"table": options["only"], "splits": list(preset.splits)[:1]}
    settings = dict(option.split("=") for option in (SMALL_TASK if task else SMALL_FEDERATION) if "quiet" not in option)
    if task:
        block["methods"] = [name for name in preset.methods if name not in OPTIONS_NOT_TAKEN]
        block["own"] = {"fml": {"meme": MEME}}
    plan = folder / f"small-{options['only'].replace('/', '-')}.yaml"
    plan.write_text(yaml.safe_dump({"settings": settings, "blocks": [block]}))
    return [f"--scale={plan}", f"--only={options['only']}", "--data-dir=data", f"--results-dir={folder / 'results'}"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=COMMANDS.values())
def test_every_command_runs_with_small_settings(command, clone, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    for step in steps(command):
        _, script, *words = shlex.split(step)
        name = Path(script).stem
        if name == "run":
            folder = options_of(words)["run_dir"]
            assert Path(folder, "summary.json").is_file() or run_main(shrunk(words)) == 0, capsys.readouterr().err
        elif name == "sweep":
            assert sweep_main(shrunk(words)) == 0, capsys.readouterr()
        elif name == "analyse":
            assert analyse.analyse_main(words) == 0, capsys.readouterr().err
            picture = next((word.partition("=")[2] for word in words if word.startswith("--output=")), None)
            assert picture is None or Path(picture).read_bytes().startswith(b"\x89PNG")
        elif name == "report":
            assert report_main(words) == 0
        elif name == "reproduce" and "--page" not in words:
            assert reproduce_main(EXPERIMENTS, small_plan_options(words, clone)) == 0
            results = read_results(clone / "results")
            assert [result for result in results if result["status"] != "finished"] == []
        elif name == "reproduce":
            assert reproduce_main(EXPERIMENTS, ["--page", "--results-dir=results", "--docs-dir=docs"]) == 0
        else:
            assert os.path.isfile(script)  # test_notebooks runs them
