"""The templates for Slurm and TPU pods: shells read them, their options exist, and what they say is what runs."""

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
    """Indented blocks of the page, without their indentation."""
    pieces = re.findall(r"(?:^    .*\n|^\n)+", (ROOT / PAGE).read_text(), re.MULTILINE)
    return [text for piece in pieces if (text := textwrap.dedent(piece).strip("\n") + "\n").strip()]


def batch_script():
    """The page's template for sbatch."""
    [script] = [text for text in blocks() if text.startswith("#!/bin/bash")]
    return script


def pod_command():
    """What every host of a pod runs."""
    [block] = [text for text in blocks() if text.startswith("gcloud ")]
    shown = f'gcloud() {{ printf "%s\\0" "$@"; }}\n{block}'
    words = subprocess.run(["bash", "-c", shown], stdout=subprocess.PIPE, text=True, check=True).stdout.split("\0")
    [command] = [word for word in words if word.startswith("--command=")]
    return command.partition("=")[2]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Programs in place of Slurm's, one process a step; submits a script, with words behind its commands."""
    slurm_stand_in.install(tmp_path / "bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAND_IN_TASKS", "1")

    def submit(script, more):
        Path("job.sh").write_text(script)
        known = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        known |= {"STAND_IN_MORE": more, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.run([tmp_path / "bin" / "sbatch", "job.sh"], env=os.environ | known, timeout=300, **pipes)

    return submit


def test_shells_read_every_block_of_commands():
    scripts = [text for text in blocks() if re.match(r"#!/bin/bash|gcloud|srun|python|fedjax-pcdd", text)]
    assert scripts
    for script in [*scripts, pod_command()]:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)


@pytest.mark.parametrize("there", [False, True])
def test_the_batch_script_runs_a_command_that_parses_and_resumes_a_run_that_is_there(cluster, there):
    if there:
        Path("runs/many").mkdir(parents=True)
        Path("runs/many/config.yaml").touch()
    ended = cluster(batch_script(), "show")
    assert ended.returncode == 0, ended.stderr
    words = json.loads(ended.stdout)
    assert words[:2] == ["fedjax-pcdd", "run"]
    given = cli.scan(words[2:])
    assert given["coordinator"] == "auto"
    assert given.get("resume") == ("runs/many" if there else None)
    if not there:
        assert str(cli.configure(given)[0].run_dir) == "runs/many"


def test_the_command_of_a_pod_parses():
    words = shlex.split(pod_command())
    assert words[: words.index("run") + 1] == ["cd", "project", "&&", "fedjax-pcdd", "run"]
    config, _ = cli.configure(cli.scan(words[words.index("run") + 1 :]))
    assert (config.coordinator, config.data, config.client_state) == ("auto", "stream", "host")


def test_the_sweep_of_the_page_parses_and_submitit_knows_its_parameters():
    submitit = pytest.importorskip("submitit")
    [text] = re.findall(r"`fedjax-pcdd sweep \.\.\. ([^`]*)`", (ROOT / PAGE).read_text())
    slurm = [word for word in text.split() if word.startswith("--slurm.")]
    own = sweep.own_options(cli.scan([word for word in text.split() if word not in slurm]), sweep.OPTIONS)
    assert (own["workers"], own["launcher"]) == (16, "slurm")
    known = submitit.SlurmExecutor._valid_parameters()
    assert {word.removeprefix("--slurm.").partition("=")[0] for word in slurm} <= set(known)


def metrics(folder):
    """[rounds, 3]: what does not depend on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([[row["ga"], row["pa"], row["loss"]] for row in rows])


def federation(folder):
    """A thousand clients, as many as the template's cohort, of two samples each."""
    random = np.random.default_rng(0)
    clients = ((random.normal(size=(3, 6)).astype(np.float32), random.integers(0, 3, 3)) for _ in range(1000))
    fp.write_federation(folder, ((x[:2], y[:2], x[2:], y[2:]) for x, y in clients), num_classes=3)


@pytest.mark.slow
def test_the_batch_script_trains_in_two_processes_and_goes_on_when_it_is_submitted_again(cluster, monkeypatch):
    federation(Path("federation"))
    script, more = (batch_script(), "--local-epochs=1 --lanes=1 --fine-tune-epochs=0 --momentum=0 --rounds=3")
    found = {}
    for tasks in (1, 2):
        monkeypatch.setenv("STAND_IN_TASKS", str(tasks))
        for words in (more, ""):
            ended = cluster(script, words)
            assert ended.returncode == 0, ended.stderr
            if words:  # as after a kill in the last round
                shutil.rmtree("runs/many/checkpoints/3")
        assert Path("runs/many/checkpoints/3").is_dir()
        assert json.loads(Path("runs/many/summary.json").read_text())["devices"] == tasks
        found[tasks] = metrics(Path("runs/many"))
        Path("runs").rename(f"runs-{tasks}")
    assert len(found[2]) == 3
    np.testing.assert_allclose(found[2], found[1], 1e-5)
