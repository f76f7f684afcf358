"""The templates for Slurm and TPU pods: they are valid bash, their options exist, and the batch script trains."""

import json
import os
import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest
import slurm_stand_in

import fedjax_pcdd as fp
from fedjax_pcdd.cli import options as cli
from fedjax_pcdd.cli import sweep

ROOT = Path(__file__).parent.parent
PAGE = "docs/scale.md"


def blocks():
    """The indented blocks of the page, without their indentation."""
    indented_blocks = re.findall(r"(?:^    .*\n|^\n)+", (ROOT / PAGE).read_text(), re.MULTILINE)
    return [text for block in indented_blocks if (text := textwrap.dedent(block).strip("\n") + "\n").strip()]


def batch_script():
    """The page's template for sbatch."""
    [script] = [text for text in blocks() if text.startswith("#!/bin/bash")]
    return script


def pod_command():
    """The command that every host of a pod runs."""
    [block] = [text for text in blocks() if text.startswith("gcloud ")]
    script = f'gcloud() {{ printf "%s\\0" "$@"; }}\n{block}'
    words = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout.split("\0")
    [command] = [word for word in words if word.startswith("--command=")]
    return command.partition("=")[2]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Replaces Slurm's programs, with one process a step; submits a script with words appended to its commands."""
    slurm_stand_in.install(tmp_path / "bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAND_IN_TASKS", "1")

    def submit(script, appended):
        Path("job.sh").write_text(script)
        variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        variables |= {"STAND_IN_MORE": appended, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.run([tmp_path / "bin" / "sbatch", "job.sh"], env=os.environ | variables, timeout=300, **pipes)

    return submit


def test_every_block_of_commands_is_valid_bash():
    scripts = [text for text in blocks() if re.match(r"#!/bin/bash|gcloud|srun|python|fedjax-pcdd", text)]
    assert scripts
    for script in [*scripts, pod_command()]:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)


@pytest.mark.parametrize("run_exists", [False, True])
def test_the_batch_script_runs_a_command_that_parses_and_resumes_an_existing_run(cluster, run_exists):
    if run_exists:
        Path("runs/many").mkdir(parents=True)
        Path("runs/many/config.yaml").touch()
    job = cluster(batch_script(), "show")
    assert job.returncode == 0, job.stderr
    words = json.loads(job.stdout)
    assert words[:2] == ["fedjax-pcdd", "run"]
    options = cli.scan(words[2:])
    assert options["coordinator"] == "auto"
    assert options.get("resume") == ("runs/many" if run_exists else None)
    if not run_exists:
        assert str(cli.configure(options)[0].run_dir) == "runs/many"


def test_the_command_of_a_pod_parses():
    words = shlex.split(pod_command())
    assert words[: words.index("run") + 1] == ["cd", "project", "&&", "fedjax-pcdd", "run"]
    config, _ = cli.configure(cli.scan(words[words.index("run") + 1 :]))
    assert (config.coordinator, config.data, config.client_state) == ("auto", "stream", "host")


def test_the_sweep_of_the_page_parses_and_submitit_accepts_its_parameters():
    submitit = pytest.importorskip("submitit")
    [text] = re.findall(r"`fedjax-pcdd sweep \.\.\. ([^`]*)`", (ROOT / PAGE).read_text())
    slurm = [word for word in text.split() if word.startswith("--slurm.")]
    sweep_options = sweep.own_options(cli.scan([word for word in text.split() if word not in slurm]), sweep.OPTIONS)
    assert (sweep_options["workers"], sweep_options["launcher"]) == (16, "slurm")
    valid_parameters = submitit.SlurmExecutor._valid_parameters()
    assert {word.removeprefix("--slurm.").partition("=")[0] for word in slurm} <= set(valid_parameters)


def metrics(folder):
    """[rounds, 3]: GA, PA and loss of a run, which do not depend on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([[row["ga"], row["pa"], row["loss"]] for row in rows])


def write_federation(folder):
    """Write a federation of a thousand clients, as many as the template's cohort, with two training samples each."""
    rng = np.random.default_rng(0)
    clients = ((rng.normal(size=(3, 6)).astype(np.float32), rng.integers(0, 3, 3)) for _ in range(1000))
    fp.write_federation(folder, ((x[:2], y[:2], x[2:], y[2:]) for x, y in clients), num_classes=3)


@pytest.mark.slow
def test_the_batch_script_trains_in_two_processes_and_resumes_if_resubmitted(cluster, monkeypatch):
    write_federation(Path("federation"))
    script, options = (batch_script(), "--local-epochs=1 --lanes=1 --fine-tune-epochs=0 --momentum=0 --rounds=3")
    metrics_of = {}
    for tasks in (1, 2):
        monkeypatch.setenv("STAND_IN_TASKS", str(tasks))
        for appended in (options, ""):
            job = cluster(script, appended)
            assert job.returncode == 0, job.stderr
            if appended:  # as after a kill in the last round
                shutil.rmtree("runs/many/checkpoints/3")
        assert Path("runs/many/checkpoints/3").is_dir()
        assert json.loads(Path("runs/many/summary.json").read_text())["devices"] == tasks
        metrics_of[tasks] = metrics(Path("runs/many"))
        Path("runs").rename(f"runs-{tasks}")
    assert len(metrics_of[2]) == 3
    np.testing.assert_allclose(metrics_of[2], metrics_of[1], 1e-5)
