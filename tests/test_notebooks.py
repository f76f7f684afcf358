"""Notebooks: their scripts run and assert what they claim, and each notebook has the cells of its script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
QUICK = ("lemma_1", "simplex_etf", "theorem_1", "three_class_aggregation")
LONG = ("fedgela_convergence", "first_experiment", "four_class_circles")
PICTURES = ("fedgela_convergence", "first_experiment", "four_class_circles", "three_class_aggregation")


def run(name, **environment):
    settings = os.environ | {"MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu"} | environment
    script = [sys.executable, str(FOLDER / f"{name}.py")]
    return subprocess.run(script, env=settings, capture_output=True, text=True, timeout=500)


def cells_of_script(name):
    """Type and text of each cell of a script in the percent format."""
    _, *cells = ("\n" + (FOLDER / f"{name}.py").read_text(encoding="utf-8")).split("\n# %%")
    for cell in cells:
        marker, _, body = cell.partition("\n")
        lines = body.strip("\n").split("\n")
        if marker == " [markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
        yield ("markdown" if marker else "code"), "\n".join(lines)


def test_every_notebook_is_listed_as_quick_or_long():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*QUICK, *LONG}


@pytest.mark.thorough
@pytest.mark.parametrize("name", QUICK)
def test_quick_notebook_confirms_what_it_claims(name, tmp_path):
    process = run(name, FIGURES=str(tmp_path))
    assert process.returncode == 0, process.stderr
    assert [path.stem for path in tmp_path.iterdir()] == [name] * (name in PICTURES)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_long_notebook_confirms_what_it_claims(name, tmp_path):
    process = run(name, FIGURES=str(tmp_path))
    assert process.returncode == 0, process.stderr
    assert [path.stem for path in tmp_path.iterdir()] == [name] * (name in PICTURES)


@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_notebook_has_the_cells_of_its_script(name):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert cells == list(cells_of_script(name))


@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_notebook_is_stored_with_the_outputs_of_a_whole_run_without_errors(name):
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert kinds
    assert "error" not in kinds
    assert all(output.get("name") != "stderr" for cell in cells for output in cell["outputs"])
    assert len(text) < 400_000


CELLS = (
    "import fedjax_pcdd as fp\n"
    "federation = fp.partition(fp.load_dataset('digits'), clients=2, beta=1.0)\n"
    "settings = dict(rounds=2, local_epochs=1, lanes=1, fine_tune_epochs=0)\n"
    "history = fp.simulate(federation, progress=True, **settings)",
    "history.plot()",
    "figure = history.plot()",
    "figure",
    "fp.simulate(federation, lr=-1)",
    "grid = {'method': ['fedavg', 'fedprox'], 'dataset': 'digits', 'clients': 3, 'min_samples': 1, 'lanes': 1,\n"
    "        'train_samples': 200, 'rounds': 2, 'local_epochs': 1, 'fine_tune_epochs': 0}\n"
    "results = fp.sweep(grid, folder='sweep', progress=True)",
)


@pytest.mark.slow
def test_notebooks_update_bars_in_place_show_figures_once_and_name_arguments(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=500, allow_errors=True, resources=resources).execute()
    simulated, plotted, assigned, displayed, error, swept = (cell["outputs"] for cell in notebook["cells"])
    assert [output["data"]["text/plain"].partition("  ")[0] for output in simulated] == ["round 2/2"]
    assert [output["data"]["text/plain"].partition("  ")[0] for output in swept] == ["round 4/4"]
    for outputs in (plotted, assigned, displayed):
        assert ["image/png" in output["data"] for output in outputs] == [True]
    assert [(output["ename"], output["evalue"]) for output in error] == [("UserError", "lr must be above 0, not -1.")]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_notebooks_are_small_and_shown_in_the_docs(name):
    picture = FOLDER.parent / "docs" / "images" / f"{name}.png"
    assert 0 < picture.stat().st_size < 80_000
    assert f"images/{name}.png" in (FOLDER.parent / "docs" / "notebooks.md").read_text(encoding="utf-8")
