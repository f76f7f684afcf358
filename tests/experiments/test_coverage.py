"""What the papers show: every table, figure and theorem has a command, every command is one, and every one runs."""

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
STEPS = sorted({step for one in ITEMS if one.command for step in steps(one.command)})
COMMANDS = {one.command: f"{one.paper} {one.item}" for one in ITEMS if one.command}

# What makes a run as small as can be, whatever its model, data and rounds.
SMALL = ("rounds=1", "local_epochs=1", "fine_tune_epochs=0", "lanes=1", "quiet=true")
OF_DATA = (*SMALL, "batch_size=8", "min_samples=1", "model=mlp")
OF_TASK = (
    *SMALL,
    "batch_size=128",
    "models=mlp",
    "public_samples=16",
    "public_batch=8",
    "pretrain_epochs=1",
    "pretrain_batch_size=32",
)
WITHOUT = {"solo": {"pretrain_epochs"}, "fedavg": {"pretrain_epochs", "public_samples"}}
MEME = "mlp"  # of FML, whose own network would take minutes


def given(words):
    """Options of a run or a sweep as name -> text."""
    return scan(words)


# The list


@pytest.mark.thorough
def test_the_list_is_printed_as_json(capsys):
    assert reproduce_main(EXPERIMENTS, ["--coverage", "--json", f"--results-dir={ROOT / 'results'}"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(ITEMS)
    assert set(rows[0]) == {"paper", "item", "kind", "command", "scale", "result"}


def test_everything_that_bears_data_has_a_command():
    assert [one for one in ITEMS if (one.command is None) != (one.kind == "diagram")] == []


def test_every_printed_table_and_preset_is_on_the_list():
    tables = {path.stem for path in (PAPERS / "expected").glob("*_table*.csv")}
    named = {f"{one.paper.lower()}_{one.item.lower().replace(' ', '')}" for one in ITEMS}
    assert tables <= named
    presets = {
        str(path.relative_to(PAPERS / "presets").with_suffix("")) for path in (PAPERS / "presets").rglob("*.yaml")
    }
    used = {name for name in presets if any(name in (one.command or "") for one in ITEMS)}
    assert presets - used <= {"fedvls/baselines", "fedgela/energy"}  # another paper's, and readings


def test_where_a_result_is_said_to_be_there_is_one():
    for one in ITEMS:
        for link in (one.result or "").split(", "):
            assert not link or (ROOT / link.partition("#")[0]).is_file(), f"{one.paper} {one.item}: {link}"
        assert (one.scale is None) == (one.result is None)


def test_a_wrong_item_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "a.yaml").write_text("items: [{paper: P, item: T, kind: table, shows: S}]")
    with pytest.raises(UserError, match=r"item 1 of .*all but diagrams have a command"):
        read_coverage(tmp_path / "a.yaml", [])


# Every command is one


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_a_command_line(step):
    python, script, *words = shlex.split(step)
    assert python == "python"
    assert (ROOT / script).is_file()
    name = Path(script).stem
    if name == "run":
        configure(given(words))
    elif name == "sweep":
        options = given(words)
        options.pop("sweep_dir")
        options.pop("together", None)
        grid = bool(read_preset(options["preset"], PAPERS / "presets").grid)
        first = next(stages(options, {})) if grid else expand(options)
        for one in first:
            configure(one.given)
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


def images(random, samples, side=16, channels=3, classes=10, groups=0):
    """Arrays of an npz with images of random classes, that a model can tell apart."""
    arrays = {}
    for fold, n in (("train", samples), ("test", max(120, classes))):
        y = np.arange(n) % classes
        arrays[f"x_{fold}"] = random.integers(0, 255, (n, side, side, channels), dtype=np.uint8)
        arrays[f"y_{fold}"] = y.astype(np.uint8)
        if groups:
            arrays[f"writer_{fold}"] = (np.arange(n) // classes % groups).astype(np.int32)
    return arrays


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that looks like a clone, with small data sets of the papers' names in `data`."""
    folder, random = tmp_path_factory.mktemp("clone"), np.random.default_rng(0)
    (folder / "data").mkdir()
    for name in ("experiments", "notebooks", "fedjax_pcdd"):
        (folder / name).symlink_to(ROOT / name)
    made = {
        "cifar10": images(random, 1500), "svhn": images(random, 5200),
        **{name: images(random, 1500, channels=1) for name in ("fashion_mnist", "mnist")},
        "usps": images(random, 200, channels=1), "syn": images(random, 1900),
        "cifar100": images(random, 3000, classes=100),
        "tiny_imagenet": images(random, 100, 64), "hyperkvasir": images(random, 600, classes=20),
        "odir": images(random, 300, classes=8), "isic2019": images(random, 600, 32, classes=8, groups=6),
        "femnist": images(random, 3720, 16, 1, 62, groups=60),
    }  # fmt: skip
    for name, arrays in made.items():
        np.savez(folder / "data" / f"{name}.npz", **arrays)
    length = 110  # of a speech; two a speaker make 46 samples for training
    text = random.integers(97, 122, 60 * 2 * length).astype(np.uint8)
    start = np.arange(0, len(text), length, dtype=np.int32)
    numbers = (np.arange(len(start)) // 2).astype(np.int16)
    speakers = {"speech_speaker": numbers, "speakers": np.array([f"s{i}" for i in range(60)])}
    np.savez(folder / "data/shakespeare.npz", text=text, speech_start=start, speech_end=start + length, **speakers)
    side = images(random, 65 * 80, 32, classes=65)
    names = np.array(["Art", "Clipart", "Product", "Real World"])
    domains = {"domain": (np.arange(65 * 80) // 65 % 4).astype(np.uint8), "domains": names}
    np.savez(folder / "data/office_home.npz", x=side["x_train"], y=side["y_train"], **domains)
    return folder


def small(words):
    """The words of a run or a sweep, made small."""
    options = given(words)
    preset = read_preset(options["preset"], PAPERS / "presets")
    task = "task" in preset.run or any("task" in split for split in preset.splits.values())
    method = options.get("method", "")
    left_out = WITHOUT.get(method, set()) if task else set()
    every = OF_TASK if task else OF_DATA
    smaller = [f"--{one.replace('_', '-')}" for one in every if one.partition("=")[0] not in left_out]
    if "fml" in method.split(","):
        smaller.append(f"--meme={MEME}")
    if options.get("dataset") == "shakespeare" or "shakespeare" in options["preset"]:
        smaller = [one for one in smaller if "model" not in one and "batch" not in one]
        smaller += ["--batch-size=64", "--clients=10", "--cohort=2"]
    return [*words, *smaller]


def reproduced(words, folder):
    """The first cell of each row of a table in place of all of them."""
    options = dict(word[2:].split("=") for word in words)
    preset = read_preset(options["only"], PAPERS / "presets")
    task = any("task" in split for split in preset.splits.values())
    block = {"table": options["only"], "splits": list(preset.splits)[:1]}
    settings = dict(one.split("=") for one in (OF_TASK if task else OF_DATA) if "quiet" not in one)
    if task:
        block["methods"] = [name for name in preset.methods if name not in WITHOUT]
        block["own"] = {"fml": {"meme": MEME}}
    plan = folder / f"small-{options['only'].replace('/', '-')}.yaml"
    plan.write_text(yaml.safe_dump({"settings": settings, "blocks": [block]}))
    return [f"--scale={plan}", f"--only={options['only']}", "--data-dir=data", f"--results-dir={folder / 'results'}"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=COMMANDS.values())
def test_every_command_runs_at_its_smallest(command, clone, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    for step in steps(command):
        _, script, *words = shlex.split(step)
        name = Path(script).stem
        if name == "run":
            folder = given(words)["run_dir"]
            assert Path(folder, "summary.json").is_file() or run_main(small(words)) == 0, capsys.readouterr().err
        elif name == "sweep":
            assert sweep_main(small(words)) == 0, capsys.readouterr()
        elif name == "analyse":
            assert analyse.analyse_main(words) == 0, capsys.readouterr().err
            drawn = next((word.partition("=")[2] for word in words if word.startswith("--output=")), None)
            assert drawn is None or Path(drawn).read_bytes().startswith(b"\x89PNG")
        elif name == "report":
            assert report_main(words) == 0
        elif name == "reproduce" and "--page" not in words:
            assert reproduce_main(EXPERIMENTS, reproduced(words, clone)) == 0
            results = read_results(clone / "results")
            assert [one for one in results if one["status"] != "finished"] == []
        elif name == "reproduce":
            assert reproduce_main(EXPERIMENTS, ["--page", "--results-dir=results", "--docs-dir=docs"]) == 0
        else:
            assert os.path.isfile(script)  # test_notebooks runs them
