"""The command line as a user runs it, on the built-in digits; in a separate process where the claim needs one."""

import importlib.util
import json
import shutil

import pytest
from commands import call, call_here, kill_after, results, resumed, undisturbed
from conftest import SHIPPED_FLAGS

DRAWS_PICTURES = True
SMALL = ["--rounds=6", "--local-epochs=2", "--lanes=1", "--batch-size=32", "--quiet"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a small run; a test that changes it works on a copy."""
    folder = tmp_path_factory.mktemp("end_to_end") / "run"
    code, _, err = call_here("--method=fedmr", "--mu2=0.5", *SMALL, f"--run-dir={folder}")
    assert code == 0, err
    return folder


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_command_of_the_readme_learns(tmp_path, seed):
    folder = tmp_path / "run"
    options = ["--method=fedgela", "--beta=0.1", f"--seed={seed}", "--lanes=1", f"--run-dir={folder}"]
    code, out, err = call(*options, XLA_FLAGS=SHIPPED_FLAGS)
    assert code == 0, err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ga_last"] > 0.5
    assert summary["pa_last"] > 0.5
    assert summary["compilations"] == 1
    assert "GA" in out
    assert "PA" in out


def test_run_folder_is_complete(trained):
    names = {
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "partition.npz",
        "partition.png",
        "curves.png",
        "checkpoints",
    }
    assert names <= {p.name for p in trained.iterdir()}
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(1, 7))
    assert all({"round", "ga", "pa", "loss", "seconds"} <= set(row) for row in rows)


@pytest.mark.thorough
def test_config_alone_repeats_the_run(tmp_path, trained):
    code, _, err = call_here(f"--preset={trained / 'config.yaml'}", f"--run-dir={tmp_path / 'again'}")
    assert code == 0, err
    assert results(tmp_path / "again") == results(trained)


# FedDC keeps state on the server and at its clients, FedMR on the server, Solo at its clients.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "lanes"),
    [("feddc", 2), *(pytest.param(*values, marks=pytest.mark.slow) for values in (("fedmr", 1), ("solo", 2)))],
)
def test_killed_run_resumes_to_the_same_bits(tmp_path, method, lanes):
    common = [f"--method={method}", "--clients=6", "--cohort=4", "--rounds=20", "--fine-tune-epochs=2", *SMALL[1:]]
    common += [f"--lanes={lanes}"]
    expected = undisturbed(tmp_path / "whole", *common)
    kill_after(6, tmp_path / "killed", *common)
    assert resumed(tmp_path / "killed") == expected


@pytest.mark.thorough
def test_damaged_newest_checkpoint_is_reported_and_skipped(tmp_path, trained):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / "summary.json").unlink()
    newest = max((folder / "checkpoints").iterdir(), key=lambda p: int(p.name) if p.name.isdigit() else -1)
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    code, _, err = call_here(f"--resume={folder}")
    assert code == 0, err
    assert "round 6 is damaged" in err
    assert results(folder) == results(trained)


def test_run_folder_of_another_run_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("method: fedavg\n")
    code, _, err = call_here(f"--run-dir={tmp_path}")
    assert code == 2
    assert "--resume" in err
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_resume_with_another_setting_names_it(trained):
    code, _, err = call_here(f"--resume={trained}", "--lr=0.5")
    assert code == 2
    assert "--lr" in err


@pytest.mark.thorough
def test_loss_that_is_not_finite_stops_the_run(tmp_path):
    code, _, err = call_here("--method=fedavg", "--lr=1e30", *SMALL, f"--run-dir={tmp_path / 'run'}")
    assert code == 2
    assert "client" in err
    assert "round" in err
    assert "fedavg" in err
    assert "Traceback" not in err
    assert not list((tmp_path / "run").glob("summary.json"))


MISTAKES = {
    "unknown method": (["--method=fedgella"], "fedgela"),
    "unknown model": (["--model=simple_cn"], "simple_cnn"),
    "unknown data set": (["--dataset=digit"], "digits"),
    "missing data set": (["--dataset=cifar10", "--data-dir=."], "fedjax-pcdd prepare cifar10"),
    "unknown option": (["--bta=0.1"], "--beta"),
    "another method's option": (["--method=fedprox", "--ew=5"], "fedgela"),
    "beta of zero": (["--beta=0"], "--beta"),
    "too many classes a client": (["--partition=pcdd", "--classes-per-client=11"], "--classes-per-client"),
    "too few slots for all classes": (["--partition=pcdd", "--clients=3", "--classes-per-client=2"], "--clients"),
    "cohort larger than clients": (["--cohort=11"], "--cohort"),
    "no space for so many clients": (["--clients=400"], "--min-samples"),
    "resume of nothing": (["--resume=nowhere"], "nowhere"),
    "gpu asked for and absent": (["--device=gpu"], "gpu"),
}

if importlib.util.find_spec("wandb") is None:
    MISTAKES["tracker that is not installed"] = (["--wandb"], "fedjax-pcdd[wandb]")


OWN_PROCESS = {"unknown method", "missing data set", "gpu asked for and absent"}  # each stops at another stage of a run


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.thorough if case in OWN_PROCESS else ()) for case in MISTAKES]
)
def test_mistake_of_the_user_is_one_sentence_and_writes_no_file(tmp_path, case):
    options, word = MISTAKES[case]
    code, _, err = (call if case in OWN_PROCESS else call_here)(*options, cwd=tmp_path)
    assert code == 2
    assert word in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
