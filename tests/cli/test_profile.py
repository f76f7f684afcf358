"""The option --profile."""

import gzip
import json
from types import SimpleNamespace

import jax
import pytest

from fedjax_pcdd.cli.run import main
from fedjax_pcdd.training.callbacks import Profile

RUN = ("--method=fedavg", "--clients=3", "--local-epochs=1", "--fine-tune-epochs=0", "--quiet")


@pytest.mark.thorough
def test_a_profile_of_later_rounds_is_readable_and_changes_no_result(tmp_path):
    for name, *options in (("plain",), ("profiled", "--profile")):
        assert main([*RUN, "--rounds=3", f"--run-dir={tmp_path / name}", *options]) == 0
    (trace,) = (tmp_path / "profiled" / "profile").rglob("perfetto_trace.json.gz")
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert list((tmp_path / "profiled" / "profile").rglob("*.xplane.pb"))
    plain, profiled = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "profiled")
    )
    assert [(r["ga"], r["loss"]) for r in profiled] == [(r["ga"], r["loss"]) for r in plain]


@pytest.mark.thorough
def test_a_run_of_one_round_writes_no_profile(tmp_path):
    assert main([*RUN, "--rounds=1", f"--run-dir={tmp_path / 'run'}", "--profile"]) == 0
    assert (tmp_path / "run" / "summary.json").is_file()
    assert not (tmp_path / "run" / "profile").exists()


def test_the_second_and_the_third_round_are_traced(tmp_path, monkeypatch):
    events, profile, run = [], Profile(tmp_path), SimpleNamespace(is_over=False)
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lambda *_, name=name, **__: events.append(name))
    for round in (1, 2, 3, 4):
        events.append(round)
        profile.on_round(run, None)
    assert events == [1, "start_trace", 2, 3, "stop_trace", 4]
