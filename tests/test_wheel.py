"""The wheel and the source distribution, tried where nothing else of this repository is: issue 17's last line."""

import os
import signal
import site
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
KEEP = (ROOT / "docs/adding_a_method.md").read_text().split("```python\n")[1].split("```")[0]
NET = """
import flax.linen as nn

class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.relu(nn.Dense(16)(x.reshape(len(x), -1)))
"""
PYTHON = """
import fedjax_pcdd as fp
from fedjax_pcdd.cli.report import report_main
from fedkeep import FedKeep
from net import Net

federation = fp.partition(fp.load_dataset("mine", "."), clients=4, beta=0.5)
settings = {"rounds": 40, "local_epochs": 1, "batch_size": 20, "lanes": 1, "fine_tune_epochs": 1}
history = fp.simulate(federation, FedKeep(), model=Net, run_dir="python", resume=True, **settings)
report_main(["python", "--output=reported"])
print(len(history), history.ga[-1] == fp.load_run("python", model=Net).ga[-1])
"""
RUN = ["run", "--method=fedkeep.py:FedKeep", "--model=net.py:Net", "--dataset=mine.npz", "--clients=4", "--beta=0.5"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the source distribution."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def program(built, tmp_path_factory):
    """The installed program of an environment that has the wheel, and of this one the dependencies alone."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin/python"
    packages = next(folder.glob("lib/python*/site-packages"))
    # What .pth files of these folders add, as an editable installation, is not seen.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", str(wheel)], check=True)
    return folder / "bin/fedjax-pcdd"


@pytest.fixture
def empty(tmp_path):
    """A folder with a method, a model and data of a user's own."""
    rng, labels = np.random.default_rng(0), np.arange(300) % 3
    images = np.clip(60 * labels[:, None, None, None] + rng.normal(60, 20, (300, 6, 6, 1)), 0, 255).astype(np.uint8)
    arrays = {"x_train": images[:240], "y_train": labels[:240], "x_test": images[240:], "y_test": labels[240:]}
    np.savez(tmp_path / "mine.npz", **arrays)
    (tmp_path / "fedkeep.py").write_text(KEEP)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def environment():
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}


def call(program, *words, cwd):
    done = subprocess.run([program, *words], cwd=cwd, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill_after_rounds(command, metrics, cwd):
    """Start a command and kill it when it has written three rounds of the 40."""
    process = subprocess.Popen(command, cwd=cwd, env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.time() + 400
    while time.time() < deadline and (not metrics.exists() or metrics.read_text().count("\n") < 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (metrics.parent / "summary.json").exists()


def test_a_wheel_runs_is_killed_goes_on_and_reports_in_an_empty_folder(program, empty):
    short = ["--rounds=40", "--local-epochs=1", "--batch-size=20", "--lanes=1", "--fine-tune-epochs=1", "--run-dir=r"]
    lines = empty / "r/metrics.jsonl"
    kill_after_rounds([program, *RUN, *short], lines, empty)
    call(program, "run", "--resume=r", cwd=empty)
    assert lines.read_text().count("\n") == 40
    call(program, "report", "r", "--output=rep", cwd=empty)
    assert "FedKeep" in (empty / "rep/report.html").read_text()


def test_the_same_in_python_takes_less_than_25_lines(program, empty):
    """Killed, the same script goes on: its own method, its own model, its own data."""
    assert PYTHON.count("\n") < 25
    (empty / "script.py").write_text(PYTHON)
    python, lines = program.with_name("python"), empty / "python/metrics.jsonl"
    kill_after_rounds([python, "script.py"], lines, empty)
    assert call(python, "script.py", cwd=empty).splitlines()[-1] == "40 True"
    assert lines.read_text().count("\n") == 40
    assert "FedKeep" in (empty / "reported/report.html").read_text()


def test_presets_and_printed_numbers_are_there_from_any_folder(program, empty):
    shown = call(program, "analyse", "traffic", cwd=empty)
    assert "P10C" in shown or "P5C" in shown or "millions" in shown
    code = "import fedjax_pcdd; from fedjax_pcdd.training.presets import read_preset; read_preset('fedgela/table2')"
    call(program.with_name("python"), "-c", code, cwd=empty)


def test_both_distributions_hold_what_is_read_and_no_more(built):
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("py.typed", "__init__.pyi", "papers/presets/fedmr/table1.yaml", "papers/expected/fedmr_table1.csv"):
        assert f"fedjax_pcdd/{part}" in names
    assert all(name.startswith(("fedjax_pcdd/", "fedjax_pcdd-")) for name in names)
    assert source.stat().st_size < 30e6


def test_the_source_distribution_gives_the_same_wheel(built, tmp_path):
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=unpacked, check=True)
    (again,) = (tmp_path / "dist").glob("*.whl")
    sizes = [{one.filename: one.file_size for one in zipfile.ZipFile(path).infolist()} for path in (wheel, again)]
    assert sizes[0] == sizes[1]
