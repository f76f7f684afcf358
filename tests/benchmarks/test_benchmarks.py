"""The benchmarks run, and print what their tables are made from. No timing is asserted."""

import doctest
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import paired

ROOT = Path(__file__).parents[2]
SMALL = ("--workload=w4lr", "--rounds=2", "--clients=3", "--per-client=8", "--batch=4", "--json")
SHARED_KEYS = {
    "bench",
    "workload",
    "median_s",
    "min_s",
    "cpu_s",
    "samples_per_s",
    "rounds",
    "compile_s",
    "peak_memory_mb",
    "params",
}


def run(*command):
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)


def record_of(module):
    completed = run("-m", f"benchmarks.{module}", *SMALL)
    assert completed.returncode == 0, completed.stderr
    (line,) = completed.stdout.splitlines()
    return json.loads(line)


@pytest.mark.thorough
def test_round_time_prints_one_json_line():
    record = record_of("round_time")
    assert record.keys() >= SHARED_KEYS | {"lanes", "clients", "backend", "device", "device_peak_memory_mb", "jax"}
    assert (record["params"], record["clients"], record["rounds"]) == (7850, 3, 2)
    assert min(record["bare_s"], record["matrix_s"], record["matrix_gflops"]) > 0


@pytest.mark.thorough
def test_checkpoints_are_counted_where_each_round_writes_one(tmp_path):
    completed = run(
        *("-m", "benchmarks.checkpoints", "--workloads", "digits", "--rounds=15", "--repeats=1"),
        f"--out={tmp_path / 'out'}",
    )
    assert completed.returncode == 0, completed.stderr
    rounds = json.loads((tmp_path / "out.json").read_text())["results"]["digits"]["rounds"]
    assert {side: writes for side, (_, writes) in rounds.items() if side != "auto"} == {"every round": 5, "none": 1}
    assert 1 <= rounds["auto"][1] <= 5


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is optional")
def test_torch_loop_prints_one_json_line():
    record = record_of("torch_loop")
    assert record.keys() >= SHARED_KEYS | {"torch"}
    assert record["params"] == 7850


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is here")
def test_without_pytorch_torch_loop_says_what_to_install():
    completed = run("-m", "benchmarks.torch_loop", *SMALL)
    assert completed.returncode == 1
    assert completed.stderr.count("\n") == 1
    assert "install torch" in completed.stderr


@pytest.mark.thorough
def test_round_time_needs_neither_the_command_line_library_nor_data_sets():
    missing = ("tyro", "tensorflow_datasets", "tensorflow", "array_record")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing}))
from benchmarks.round_time import main
main({[*SMALL]})
"""
    completed = run("-c", code)
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout)["params"] == 7850


def test_torch_loop_and_table_do_not_import_jax():
    code = """
import sys, benchmarks.table
try:
    import benchmarks.torch_loop
except SystemExit:
    pass
print(sorted({"jax", "fedjax_pcdd"} & set(sys.modules)))
"""
    assert run("-c", code).stdout == "[]\n"


def test_a_batch_size_that_leaves_a_partial_batch_is_refused():
    code = "from benchmarks.workloads import *; chosen(parser(None).parse_args(['--workload=w1', '--batch=7']))"
    assert "--batch=7 must divide --per-client=500" in run("-c", code).stderr


@pytest.mark.thorough
def test_convolutions_of_a_model_are_found_measured_and_written_as_a_table():
    code = """
import json
from benchmarks.convolutions import *
first, second = layers([Workload("mcmahan_cnn", (4, 4, 1), clients=1, per_client=2, batch=2)])
record = measure(first, "weight_gradient", lanes=2, repeats=1)
text = markdown("here", 2, [row(first, record)])
table = rewritten({"cpu": {"measured": None, "shapes": []}}, "gpu", "here", [entry(first, [record]), entry(second, [])])
print(json.dumps([record, text, json.loads(table)]))
"""
    completed = run("-c", code)
    assert completed.returncode == 0, completed.stderr
    record, text, table = json.loads(completed.stdout)
    assert record["single"].keys() >= {"direct", "gemm", "rows", "pieces", "cut"}
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    assert table["cpu"]["shapes"] == []
    assert [(s["inputs"], s["outputs"], s["image"]) for s in table["gpu"]["shapes"]] == [
        (1, 32, [4, 4]),
        (32, 64, [2, 2]),
    ]


@pytest.mark.parametrize(("workload", "channels"), [("w1", [(3, 6), (6, 16)]), ("w2", [(1, 32), (32, 64)])])
def test_the_convolutions_of_cnns_are_found_where_they_are_pooled_too(workload, channels):
    code = "from benchmarks.convolutions import *; print([(x.inputs, x.outputs) for x in layers([CASES['%s']])])"
    assert run("-c", code % workload).stdout == f"{channels}\n"


@pytest.mark.thorough
def test_large_prints_the_keys_of_one_setting():
    completed = run("-m", "benchmarks.large", "--clients=120", "--method=scaffold", "--rounds=1", "--json")
    assert completed.returncode == 0, completed.stderr
    record = json.loads(completed.stdout)
    assert record.keys() == {"clients", "method", "median_s", "start_s", "peak_memory_mb"}
    assert (record["clients"], record["method"]) == (120, "scaffold")
    assert record["start_s"] > record["median_s"] > 0


class Clockwork:
    """A contestant whose rounds take the given seconds, and which logs each of them."""

    def __init__(self, name, log, seconds):
        self.name, self.log, self.seconds = name, log, iter(seconds)

    def round(self):
        self.log.append(self.name)
        return next(self.seconds)


def test_paired_times_one_round_of_each_in_turn_after_two_warm_up_rounds():
    log = []
    ours, theirs = Clockwork("ours", log, [9, 9, 1, 1, 1, 1, 1]), Clockwork("theirs", log, [9, 9, 2, 2, 3, 4, 4])
    times = paired.race({"ours": ours, "theirs": theirs}, 0.0)
    assert log[:4] == ["ours", "theirs"] * 2
    turns = [log[i : i + 2] for i in range(4, 14, 2)]
    assert [sorted(turn) for turn in turns] == [["ours", "theirs"]] * 5
    assert len(set(map(tuple, turns))) == 2  # in either order
    assert paired.ratio(times["theirs"], times["ours"]) == {"low": 2.0, "median": 3.0, "high": 4.0, "least": 2.0}


def test_a_paired_table_says_of_each_workload_where_it_was_measured():
    machine = {"cpu": "A CPU", "cores": 2, "date": "2026-01-01"}
    seconds = {"ours": [1.0] * 5, "before": [2.0] * 5}
    entry = {"machine": machine, "idle": True, "ours": "abc1234", "before": None, "seconds": seconds}
    text = paired.markdown({"w1": entry, "w2": entry, "w3": entry | {"idle": False, "before": "def5678"}})
    assert text.splitlines()[:2] == [
        "w1, w2: A CPU, 1 of 2 cores, no other work on the machine, 2026-01-01, ours at commit abc1234.",
        "w3: A CPU, 1 of 2 cores, other work on the machine, 2026-01-01, ours at commit abc1234, before at def5678.",
    ]


WITH_EXAMPLES = [path for path in (ROOT / "benchmarks").rglob("*.py") if ">>>" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", sorted(WITH_EXAMPLES), ids=lambda path: path.stem)
def test_the_examples_of_benchmarks_are_true(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    tried = doctest.testmod(module)
    assert tried.attempted
    assert not tried.failed


@pytest.mark.slow
def test_ten_thousand_clients_of_scaffold_peak_at_little_more_than_their_state():
    command = ("-m", "benchmarks.large", "--method=scaffold", "--data=stream", "--client-state=host", "--rounds=3")
    few, many = (json.loads(run(*command, f"--clients={n}").stdout.splitlines()[-1]) for n in (100, 10_000))
    state_mb = many["client_state_mb"] - few["client_state_mb"]
    assert state_mb > 290  # of 7850 parameters each
    assert many["peak_memory_mb"] - few["peak_memory_mb"] < 1.3 * state_mb
