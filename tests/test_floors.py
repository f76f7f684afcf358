"""The floors (layers) of the package: imports only go down, and no code below the command line spells an option."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fedjax_pcdd"
FLOORS = {
    **dict.fromkeys(("errors", "trees", "beside", "registry", "screen", "__init__"), 0),
    **dict.fromkeys(("losses", "models", "data"), 1), "methods": 2, "engine": 3, "analysis": 4, "training": 5,
    **dict.fromkeys(("api", "report"), 6), **dict.fromkeys(("cli", "testing", "__main__"), 7),
}  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))
OPTION = re.compile(r"(?<![\w-])--(?!xla_)[a-z]")
COMMAND = re.compile(r"`(?:python|fedjax-pcdd) [^`]*`")


def floor_of(path):
    return FLOORS[path.relative_to(PACKAGE).parts[0].removesuffix(".py")]


def imported_modules(tree):
    """Top-level modules of the package that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedjax_pcdd"):
            _, *submodules = node.module.split(".")
            yield from [submodules[0]] if submodules else [alias.name for alias in node.names if alias.name in FLOORS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_nothing_from_a_higher_floor(path):
    if path.name == "__init__.py" and path.parent == PACKAGE:
        return  # the front door re-exports names from every floor
    higher = [name for name in imported_modules(ast.parse(path.read_text())) if FLOORS[name] > floor_of(path)]
    assert higher == []


@pytest.mark.parametrize("path", [p for p in FILES if floor_of(p) < 7], ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_option_is_spelled_below_the_command_line(path):
    """Except options of XLA, and whole commands in docstrings, such as `python experiments/run.py --list-datasets`."""
    lines = COMMAND.sub("", path.read_text()).splitlines()
    assert [line for line in lines if OPTION.search(line)] == []
