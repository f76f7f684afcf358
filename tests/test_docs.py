"""The documentation: its example method runs, its links lead somewhere, its commands parse. Nothing else is trained."""

import itertools
import json
import re
import runpy
import shlex
import sys
import types
from fnmatch import fnmatch
from pathlib import Path

import jax
import numpy as np
import pytest
import toy
import yaml
from commands import parse

import method_pages
from documentation import relinked
from fedjax_pcdd import registry
from fedjax_pcdd.api import grid
from fedjax_pcdd.api.search import Search
from fedjax_pcdd.cli import options as cli
from fedjax_pcdd.cli import search, sweep
from fedjax_pcdd.cli.help import information
from fedjax_pcdd.cli.main import COMMANDS
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.data.partition import PARTITIONS
from fedjax_pcdd.methods import METHODS, SERVER_OPTIMISERS, FedMR, FedProx
from fedjax_pcdd.registry import origin_of_file, recall
from fedjax_pcdd.training.config import run_folder
from fedjax_pcdd.training.fields import options_of
from fedjax_pcdd.training.loggers import LOGGERS

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", ROOT / "BUILD.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md"]
FILES += sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks/results").glob("*.md")])
EXAMPLE = (ROOT / "docs/adding_a_method.md").read_text().split("```python\n")[1].split("```")[0]
PRESET = (ROOT / "docs/presets.md").read_text().split("```yaml\n")[1].split("```")[0]


BRING_YOUR_OWN = (ROOT / "docs/bring_your_own.md").read_text()
RECIPES = [text.split("```")[0] for text in BRING_YOUR_OWN.split("```python\n")[1:]]


def name_of(path):
    return str(path.relative_to(ROOT))


def commands(path):
    """Every command of a file, as the name of its script and words; a backslash at the end of a line continues it.

    A shell variable becomes 0 where it is the value of an option; a word that is a shell variable is left out.
    """
    text = re.sub(r"=\$\w+", "=0", path.read_text().replace("\\\n", " "))
    names = "|".join(COMMANDS)
    installed = rf"(?:^ *|`)fedjax-pcdd ({names})\b(?! \.\.\.)"
    calls = re.findall(rf"(?:python experiments/(\w+)\.py|{installed})([^`|\n#;]*)", text, re.MULTILINE)
    return [[script or name, *(word for word in shlex.split(rest) if not word.startswith("$"))]
            for script, name, rest in calls]  # fmt: skip


def every_command():
    return [pytest.param(words, id=f"{path.name}-{i}") for path in FILES for i, words in enumerate(commands(path))]


@pytest.fixture(scope="module")
def example():
    """The method class that the page on adding a method defines."""
    module = types.ModuleType("fedjax_pcdd.methods.fedkeep")
    sys.modules[module.__name__] = module
    exec(compile(EXAMPLE, "docs/adding_a_method.md", "exec"), module.__dict__)
    yield module.FedKeep
    del sys.modules[module.__name__]


@pytest.fixture
def registered(monkeypatch, tmp_path, example):
    """Registers the example by its name and as the file that commands of the documentation use."""
    monkeypatch.setitem(METHODS, "fedkeep", example)
    (tmp_path / "fedkeep.py").write_text(EXAMPLE)
    monkeypatch.setattr(registry, "_recorded", dict(registry._recorded))
    recall({"fedkeep.py:FedKeep": origin_of_file(tmp_path / "fedkeep.py", "FedKeep")})


def models(method, lanes):
    state, report = toy.train(toy.simulation(method=method, lanes=lanes))
    return [np.array(x) for x in jax.tree.leaves((state.servers.variables, report.loss))]


def assert_close(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """The namespace that the recipes of the page share; the working folder is a new one."""
    folder = tmp_path_factory.mktemp("session")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for names in (METHODS, SERVER_OPTIMISERS, PARTITIONS, LOGGERS):
            patch.setattr(names, "data", dict(names.data))
        yield {"__name__": "bring_your_own"}


def test_the_preset_on_the_page_of_presets_is_one(tmp_path):
    (tmp_path / "mine.yaml").write_text(PRESET)
    config, method = parse([f"--preset={tmp_path / 'mine.yaml'}", "--method=fedprox", "--split=P5C2"])
    assert (config.rounds, config.partition, config.clients, method) == (100, "pcdd", 5, FedProx(mu=0.001))
    config, method = parse([f"--preset={tmp_path / 'mine.yaml'}", "--split=P5C2", "--variant=intra-only"])
    assert (config.method, method) == ("fedmr", FedMR(terms="intra"))


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_every_recipe_of_bring_your_own_runs(session, number):
    if "import datasets" in RECIPES[number]:
        pytest.importorskip("datasets")
    exec(compile(RECIPES[number], f"bring_your_own.md, block {number}", "exec"), session)


@pytest.mark.thorough
def test_the_recipes_use_the_data_metric_and_logger_that_they_define(session):
    assert session["mine"].class_names == session["pictures"].class_names == ("cat", "dog", "fox", "owl")
    assert session["table"].x_train.dtype == np.float32
    assert (session["history"].rows[-1]["worst"], Path("lines.csv").read_text().count("\n")) == (
        session["history"].pa_per_client.min(), 1
    )  # fmt: skip


@pytest.mark.thorough
def test_the_recipe_of_a_pretrained_backbone_keeps_it_and_trains_the_head(session):
    params = session["frozen"].variables["params"]
    for name, array in session["pretrained"]["params"]["Dense_0"].items():
        np.testing.assert_allclose(params["backbone"]["Dense_0"][name], array, 1e-6)
    assert np.any(params["head"]["bias"] != 0)


def test_the_example_method_has_at_most_thirty_lines():
    assert EXAMPLE.count("\n") <= 30


@pytest.mark.thorough
def test_the_example_method_runs_from_the_command_line(registered, tmp_path):
    options = ["--method=fedkeep", "--mu=0.5", "--clients=3", "--rounds=2", "--local-epochs=1", "--fine-tune-epochs=1"]
    assert main([*options, "--lanes=1", "--quiet", f"--run-dir={tmp_path / 'run'}"]) == 0
    assert json.loads((tmp_path / "run/summary.json").read_text())["rounds"] == 2


@pytest.mark.thorough
def test_the_example_method_does_not_depend_on_lanes(example):
    assert_close(models(example(mu=1.0), lanes=1), models(example(mu=1.0), lanes=2))


@pytest.mark.thorough
def test_the_example_method_reduces_to_fedavg(example):
    assert_close(models(example(mu=0.0), lanes=2), models(METHODS["fedavg"](), lanes=2))


@pytest.mark.thorough
def test_the_example_method_holds_the_head_columns_of_absent_classes(example):
    """No client has class 3: the larger mu, the closer its column stays to its initial value."""
    changes = []
    for mu in (0.0, 5.0):
        simulated = toy.simulation(method=example(mu=mu), lanes=2)
        start = np.array(simulated.start().servers.variables["params"]["head"]["kernel"])[0, :, 3]
        state, _ = toy.train(simulated, (0,))
        changes.append(np.abs(np.array(state.servers.variables["params"]["head"]["kernel"])[0, :, 3] - start).max())
    assert changes[1] < 0.8 * changes[0]


# The help's list of methods is read once, before the example is registered.
@pytest.mark.filterwarnings("ignore:The field `selection.method`:UserWarning")
@pytest.mark.parametrize("words", every_command())
def test_every_command_of_the_documentation_parses(registered, words, monkeypatch, capsys):
    script, *argv = words
    method = "fccl" if any(word.startswith("--task") for word in argv) else "fedavg"
    argv = [word.replace("METHOD", method) for word in argv]
    if script == "run":
        options = cli.scan(argv)
        assert "resume" in options or information(options) or cli.configure(options)
    elif script == "sweep":
        options = {name: text for name, text in cli.scan(argv).items() if name not in sweep.OPTIONS}
        assert all(cli.configure(experiment.given) for experiment in grid.expand(options))
    elif script == "search":
        pytest.importorskip("optuna")
        options = {name: text for name, text in cli.scan(argv).items() if name not in search.OPTIONS}
        assert next(Search(options, {}).stages(1))
    else:
        help_text = help_of(script, argv, monkeypatch, capsys)
        assert all(word.partition("=")[0] in help_text for word in argv if word.startswith("-"))


def help_of(script, argv, monkeypatch, capsys):
    """What a script prints for --help; for `analyse`, the first word selects the subcommand."""
    subcommand = itertools.takewhile(lambda word: not word.startswith("-"), argv[:1] if script == "analyse" else [])
    file = ROOT / f"experiments/{script}.py"
    monkeypatch.setattr(sys, "argv", [script, *([] if file.exists() else [script]), *subcommand, "--help"])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(file if file.exists() else ROOT / "fedjax_pcdd/__main__.py"), run_name="__main__")
    assert not exit_info.value.code
    return capsys.readouterr().out


def slugs(path):
    """The anchors of the headings in a Markdown file."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_relative_link_leads_to_a_file_and_a_heading(path):
    links = re.findall(r"\]\(([^)\s:]+)\)", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL))
    for link in links:
        target, _, anchor = link.partition("#")
        linked_file = path.parent / target if target else path
        assert linked_file.exists(), link
        assert not anchor or anchor in slugs(linked_file), link


def test_every_page_of_the_folder_is_in_the_navigation():
    nav = json.dumps(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    names = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert {name for name in names if f'"{name}"' not in nav} == set()


@pytest.mark.parametrize("name", METHODS)
def test_the_page_of_a_method_shows_its_options_its_hooks_and_its_source(name):
    text, cls = method_pages.method_page(name), METHODS[name]
    assert all(f"| `{cli.flag(option.name)}`" in text for option in options_of(cls).values())
    assert all(f"| `{hook}` |" in text for hook in ("upload", "penalty") if hook in vars(cls))
    assert f"class {cls.__name__}" in text


@pytest.mark.parametrize("name", METHODS)
def test_the_command_on_the_page_of_a_method_parses(name):
    assert parse(shlex.split(method_pages.command(name))[2:])


def test_the_command_of_a_method_names_a_task_only_where_participants_exchange():
    exchanging = {name for name in METHODS if "--task=" in method_pages.command(name)}
    assert exchanging == {"fccl", "fedmd", "rcfl", "fedmatch"}


def folders_made_by(words):
    """The folders of the runs that a command makes."""
    script, *argv = words
    options = cli.scan(argv) if script in ("run", "sweep") else {}
    if script == "run" and "resume" not in options and not information(options):
        return [str(run_folder(cli.configure(options)[0]))]
    if script == "sweep":
        folder = options.pop("sweep_dir")  # without this option its name is a digest
        return [f"{folder}/{experiment.name}" for experiment in grid.expand(options)]
    return []


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_run_folders_that_a_page_reads_are_made_by_its_earlier_commands(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = []
    for words in commands(ROOT / page):
        inputs = [word for word in words if not word.startswith("--sweep-dir=")]
        for pattern in re.findall(r"(?:^|[ =])(runs/\S*)", " ".join(inputs)):
            assert any(fnmatch(folder, pattern.rstrip("/") + end) for folder in folders for end in ("", "/*")), pattern
        folders += folders_made_by(words)
    assert folders


def test_links_out_of_docs_become_pages_of_the_site_or_plain_names():
    text = "[a](../benchmarks/README.md), [b](../fedjax_pcdd/trees.py), [c](https://example.org), ![d](images/x.png)"
    assert relinked(text, "results.md") == "[a](benchmarks/index.md), b, [c](https://example.org), ![d](images/x.png)"
    assert relinked("[all](../fedjax_pcdd/methods)", "results.md") == "[all](methods/index.md)"


def test_the_table_of_overheads_in_the_documentation_is_the_measured_one():
    measured = (ROOT / "benchmarks/results/overhead.md").read_text().partition("## In short")[2].split("\n\n")[1]
    assert measured.startswith("| method |")
    assert measured.strip() in (ROOT / "docs/results.md").read_text()
