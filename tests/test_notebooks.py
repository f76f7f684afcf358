"""The notebooks run as scripts, whose assertions are their claims, and have the cells of their scripts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
QUICK = ("lemma_1", "simplex_etf", "three_class_aggregation")
LONG = ("fedgela_convergence", "first_experiment", "four_class_circles")
PICTURES = ("fedgela_convergence", "first_experiment", "four_class_circles", "three_class_aggregation")


def run(name, **environment):
    settings = os.environ | {"MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu"} | environment
    script = [sys.executable, str(FOLDER / f"{name}.py")]
    return subprocess.run(script, env=settings, capture_output=True, text=True, timeout=500)


def cells_of_script(name):
    """Type and text of each cell of a script in the percent format."""
    _, *parts = ("\n" + (FOLDER / f"{name}.py").read_text(encoding="utf-8")).split("\n# %%")
    for part in parts:
        head, _, body = part.partition("\n")
        lines = body.strip("\n").split("\n")
        if head == " [markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
        yield ("markdown" if head else "code"), "\n".join(lines)


def test_every_notebook_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*QUICK, *LONG}


@pytest.mark.parametrize("name", QUICK)
def test_quick_notebook_confirms_what_it_claims(name, tmp_path):
    done = run(name, FIGURES=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [path.stem for path in tmp_path.iterdir()] == [name] * (name in PICTURES)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_long_notebook_confirms_what_it_claims(name, tmp_path):
    done = run(name, FIGURES=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [path.stem for path in tmp_path.iterdir()] == [name] * (name in PICTURES)


@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_notebook_has_the_cells_of_its_script(name):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert cells == list(cells_of_script(name))


@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_notebook_is_stored_without_outputs(name):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert not any(cell.get("outputs") for cell in notebook["cells"])


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_the_docs_are_small(name):
    picture = FOLDER.parent / "docs" / "images" / f"{name}.png"
    assert 0 < picture.stat().st_size < 80_000
    assert f"images/{name}.png" in (FOLDER.parent / "docs" / "notebooks.md").read_text(encoding="utf-8")
