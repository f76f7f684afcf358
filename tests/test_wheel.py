"""The wheel and the source distribution, tested where nothing else of this repository is (issue 17, last line)."""

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
METHOD = (ROOT / "docs/adding_a_method.md").read_text().split("```python\n")[1].split("```")[0]
MODEL = """
import flax.linen as nn

class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.relu(nn.Dense(16)(x.reshape(len(x), -1)))
"""
SCRIPT = """
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
def distributions(tmp_path_factory):
    """A folder with the wheel and the source distribution."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def program(distributions, tmp_path_factory):
    """The program of a new environment that has the wheel and, of the environment of the tests, only dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    interpreter = folder / "bin/python"
    packages = next(folder.glob("lib/python*/site-packages"))
    # .pth files in these folders, as of an editable installation, have no effect in the new environment.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    (wheel,) = distributions.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", str(wheel)], check=True)
    return folder / "bin/fedjax-pcdd"


@pytest.fixture
def user_folder(tmp_path):
    """A folder that holds only a user's own method, model and data."""
    rng, labels = np.random.default_rng(0), np.arange(300) % 3
    images = np.clip(60 * labels[:, None, None, None] + rng.normal(60, 20, (300, 6, 6, 1)), 0, 255).astype(np.uint8)
    arrays = {"x_train": images[:240], "y_train": labels[:240], "x_test": images[240:], "y_test": labels[240:]}
    np.savez(tmp_path / "mine.npz", **arrays)
    (tmp_path / "fedkeep.py").write_text(METHOD)
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path


def environment():
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}


def call(program, *words, cwd):
    process = subprocess.run([program, *words], cwd=cwd, env=environment(), capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


def kill_after_rounds(command, metrics, cwd):
    """Start a command and kill it when it has written three rounds of the 40."""
    process = subprocess.Popen(command, cwd=cwd, env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.time() + 400
    while time.time() < deadline and (not metrics.exists() or metrics.read_text().count("\n") < 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (metrics.parent / "summary.json").exists()


def test_the_installed_program_trains_resumes_after_a_kill_and_reports(program, user_folder):
    options = ["--rounds=40", "--local-epochs=1", "--batch-size=20", "--lanes=1", "--fine-tune-epochs=1", "--run-dir=r"]
    metrics = user_folder / "r/metrics.jsonl"
    kill_after_rounds([program, *RUN, *options], metrics, user_folder)
    call(program, "run", "--resume=r", cwd=user_folder)
    assert metrics.read_text().count("\n") == 40
    call(program, "report", "r", "--output=rep", cwd=user_folder)
    assert "FedKeep" in (user_folder / "rep/report.html").read_text()


def test_a_script_of_less_than_25_lines_resumes_after_a_kill_and_reports(program, user_folder):
    """The script has its own method, model and data; started again after a kill, it resumes."""
    assert SCRIPT.count("\n") < 25
    (user_folder / "script.py").write_text(SCRIPT)
    interpreter, metrics = program.with_name("python"), user_folder / "python/metrics.jsonl"
    kill_after_rounds([interpreter, "script.py"], metrics, user_folder)
    assert call(interpreter, "script.py", cwd=user_folder).splitlines()[-1] == "40 True"
    assert metrics.read_text().count("\n") == 40
    assert "FedKeep" in (user_folder / "reported/report.html").read_text()


def test_presets_and_printed_numbers_are_found_from_any_folder(program, user_folder):
    output = call(program, "analyse", "traffic", cwd=user_folder)
    assert "without (millions)" in output
    assert "36.564957" in output  # CIFAR-100
    code = "import fedjax_pcdd; from fedjax_pcdd.training.presets import read_preset; read_preset('fedgela/table2')"
    call(program.with_name("python"), "-c", code, cwd=user_folder)


def test_the_wheel_holds_only_the_package_and_the_source_is_below_30_mb(distributions):
    (wheel,), (source,) = distributions.glob("*.whl"), distributions.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("py.typed", "__init__.pyi", "papers/presets/fedmr/table1.yaml", "papers/expected/fedmr_table1.csv"):
        assert f"fedjax_pcdd/{part}" in names
    assert all(name.startswith(("fedjax_pcdd/", "fedjax_pcdd-")) for name in names)
    assert source.stat().st_size < 30e6


def test_the_source_distribution_gives_the_same_wheel(distributions, tmp_path):
    (wheel,), (source,) = distributions.glob("*.whl"), distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=unpacked, check=True)
    (rebuilt,) = (tmp_path / "dist").glob("*.whl")
    sizes = [{info.filename: info.file_size for info in zipfile.ZipFile(path).infolist()} for path in (wheel, rebuilt)]
    assert sizes[0] == sizes[1]
