"""The counts of `benchmarks.accelerator` agree with counts by hand, and it reports what became worse."""

import itertools
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend import core

from benchmarks import accelerator, forms, hlo, lowering, programs, survey, targets
from benchmarks.cases import PARTS, PRECISIONS, Case
from benchmarks.convolutions import Layer
from benchmarks.turns import count_turns, has_loop, tagged
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.models import MODELS
from fedjax_pcdd.models.convolution_forms import FORMS, Window
from fedjax_pcdd.models.convolution_table import LANES

ROOT = Path(__file__).parents[2]
HLO = """HloModule jit_round, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %m = f32[4]{0} multiply(%p, %p)
}

%inner_body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[4]{0} get-tuple-element(%t), index=1
  %a = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
  %b = f32[4]{0} custom-call(%a), custom_call_target="__cublas$gemm"
  ROOT %r = (s32[], f32[4]{0}) tuple(%i, %b)
}

%outer_body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %s = ((f32[4]{0}), f32[4]{0}, s32[]) copy-start(%t)
  %d = f32[4]{0} copy-done(%s)
  %w = (s32[], f32[4]{0}) while(%t), condition=%c, body=%inner_body, INNER
  ROOT %r = (s32[], /*index=1*/f32[4]{0}) tuple(%w, %d)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0), metadata={op_name="args[0]"}
  %f = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
  %g = f32[4]{0:T(128)} fusion(%f), kind=kLoop, calls=%fused
  %t = (s32[], f32[4]{0}) tuple(%p, %g)
  %w = (s32[], f32[4]{0}) while(%t), condition=%c, body=%outer_body, metadata={op_name="jit(f)/loop_2/while"}
  ROOT %x = f32[4]{0} get-tuple-element(%w), index=1
}
"""
KNOWN_TURNS = 'backend_config={"known_trip_count":{"n":"5"}}'
NAMED_LOOP = 'metadata={op_name="jit(f)/loop_2/while/body/loop_2_1/while"}'


def counts_of(function, *args):
    return count_turns(tagged(jax.make_jaxpr(function)(*args)), args)


def turns(function, *args):
    return {loop.name: loop.turns for loop in counts_of(function, *args).loops}


def repeat(times, x):
    return lax.fori_loop(0, times, lambda _, x: jnp.sin(x), x)


def test_loops_in_loops_are_counted_over_the_whole_program():
    def function(n, x):
        return lax.fori_loop(0, n, lambda i, x: repeat(2, repeat(i, x)), x)

    assert turns(function, 4, 1.0) == {"1": 4, "1_1": 0 + 1 + 2 + 3}


def test_equations_are_counted_as_often_as_they_are_evaluated():
    count = counts_of(lambda n, x: lax.fori_loop(0, n, lambda _, x: jnp.sin(x) * 2, x), 3, 1.0)
    condition, body = 1, 3  # i < n; i + 1, sin, times 2
    assert count.equations == 4 * condition + 3 * body


def test_a_loop_under_vmap_turns_until_the_last_is_done():
    def halve(x):
        return lax.while_loop(lambda x: x > 1, lambda x: x / 2, x)

    assert turns(jax.vmap(halve), jnp.array([8.0, 1.0, 64.0])) == {"1": 6}


def test_a_loop_in_a_loop_of_known_length_is_counted_at_every_turn():
    def function(lengths, x):
        return lax.scan(lambda x, n: (repeat(n, x), x), x, lengths)

    assert turns(function, jnp.array([1, 5, 2]), 0.5) == {"1": 3, "1_1": 8}
    assert counts_of(function, jnp.array([1, 5, 2]), 0.5).turns == 8


@pytest.mark.parametrize(("flag", "expected"), [(0, {"1": 3}), (1, {"2": 7})])
def test_only_the_branch_that_is_taken_is_counted(flag, expected):
    def function(flag, n):
        return lax.cond(flag > 0, lambda: repeat(2 * n + 1, 0.5), lambda: repeat(n, 0.5))

    assert turns(function, flag, 3) == expected


def test_loops_in_functions_that_a_program_calls_are_counted():
    called = jax.jit(jax.checkpoint(lambda n, x: repeat(n, x)))
    assert turns(lambda n, x: called(n, x) + called(n + 1, x), 2, 0.5) == {"1": 2, "2": 3}


def test_values_that_decide_no_loop_are_not_computed_and_may_be_shapes():
    images = jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)
    program = tagged(jax.make_jaxpr(lambda n, x: repeat(n, x @ x))(3, images))
    assert count_turns(program, [3, images]).turns == 3


def test_a_loop_of_known_length_computes_only_what_decides_another_loop():
    def function(n, x):
        n, x = lax.fori_loop(0, 3, lambda _, carry: (carry[0] + 2, carry[1] @ carry[1]), (n, x))
        return repeat(n, x)

    images = jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)
    program = tagged(jax.make_jaxpr(function)(1, images))
    assert count_turns(program, [1, images]).turns == 7


def test_the_compiled_program_has_the_names_of_loops():
    def function(n, x):
        return lax.fori_loop(0, n, lambda i, x: repeat(i, x), repeat(n, x))

    args = (3, jnp.ones(4))
    program = tagged(jax.make_jaxpr(function)(*args))
    text = jax.jit(core.jaxpr_as_fun(program)).lower(*args).compile().as_text()
    launched = hlo.launches(text or "", turns(function, *args))
    assert not launched.reason
    assert {body.name: body.runs for body in launched.bodies} == {"entry": 1, "1": 3, "2": 3, "2_1": 0 + 1 + 2}


def test_kernels_are_counted_as_often_as_their_loop_turns():
    launched = hlo.launches(HLO.replace("INNER", NAMED_LOOP), {"2": 3, "2_1": 7})
    assert [(b.name, b.kernels, b.runs) for b in launched.bodies] == [("entry", 2, 1), ("2", 1, 3), ("2_1", 2, 7)]
    assert launched.kernels == 2 * 1 + 1 * 3 + 2 * 7


def test_turns_that_xla_knows_are_multiplied_by_those_of_the_outer_loop():
    assert hlo.launches(HLO.replace("INNER", KNOWN_TURNS), {"2": 3}).kernels == 2 * 1 + 1 * 3 + 2 * 3 * 5


BRANCHES = """
%small (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %a = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
}

%large (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %a = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
  %w = (s32[], f32[4]{0}) while(%p), condition=%c, body=%inner_body, INNER
  ROOT %x = f32[4]{0} get-tuple-element(%w), index=1
}
"""


def test_the_branch_that_launches_most_kernels_is_counted_as_a_bound():
    conditional = "%f = f32[4]{0} conditional(%p, %p, %p), branch_computations={%small, %large}"
    text = HLO.replace("%f = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused", conditional).replace(
        "ENTRY", BRANCHES + "ENTRY"
    )
    launched = hlo.launches(text.replace("INNER", KNOWN_TURNS), {"2": 3})
    conditional_itself, larger_branch, g = 1, 1 + 5 * 2, 1
    assert (launched.kernels, launched.branches) == (conditional_itself + larger_branch + g + 1 * 3 + 2 * 3 * 5, 1)


@pytest.mark.parametrize(
    ("inner", "reason"),
    [("sharding={}", "none of the program's own"), (NAMED_LOOP.replace("loop_2_1/", ""), "stands twice")],
)
def test_kernels_of_a_loop_with_an_unknown_number_of_turns_are_not_guessed(inner, reason):
    launched = hlo.launches(HLO.replace("INNER", inner), {"2": 3, "2_1": 7})
    assert launched.kernels is None
    assert reason in launched.reason


def test_a_failed_check_of_the_compiler_is_the_reason():
    errors = "I0000 loading\nF0000 00:00:1.2 77 tiling.cc:627] Check failed: a == b (1 vs. 2)\n*** stack ***"
    assert (
        accelerator.reason_of(-6, errors)
        == "the compiler ended its process: tiling.cc:627] Check failed: a == b (1 vs. 2)"
    )
    assert accelerator.reason_of(-9, "") == "ended by signal 9: no message"
    assert accelerator.reason_of(1, "Traceback\nValueError: no such shape\n") == "ValueError: no such shape"


@pytest.mark.thorough
def test_loops_prints_one_json_object_and_needs_no_accelerator():
    command = ["-m", "benchmarks.accelerator", "loops", "--workload=w4lr", "--clients=3", "--lanes=2", "--json"]
    completed = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    record = json.loads(completed.stdout)
    assert record.keys() == {"turns", "equations"}
    assert record["equations"] > record["turns"] > 0


def test_without_the_compiler_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install -e '\.\[accelerator\]'"):
        accelerator.main(["round", "--target=v5e", "--json"])


def test_all_goes_through_every_model_and_method(monkeypatch):
    monkeypatch.setattr(forms, "model_layers", lambda: {"a layer": None})
    cases = survey.all_cases()
    models = {(case.model, case.program, case.lanes) for case in cases["models"].values()}
    assert models >= {(name, part, lanes) for name in MODELS for part in PARTS for lanes in (1, 4)}
    assert {case.method for case in cases["methods"].values()} == METHODS.keys()
    assert [case.layer for case in cases["forms"].values()] == ["a layer"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", METHODS)
def test_no_method_has_a_loop_whose_every_turn_a_gpu_must_ask_the_host_for(name, monkeypatch):
    """FedAvg's round has no such loop, hence neither have the passes of others, where all clients train at once."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    traced_round = programs.trace(Case("round", workload="w4", clients=3, lanes=3, method=name))
    assert not has_loop(traced_round.jaxpr.jaxpr)


def test_every_form_of_a_layer_is_a_program_of_the_operation():
    layer = Layer(Window((8, 8), (3, 3), (1, 1), ((1, 1), (1, 1))), 2, 3, 4)
    layer_forms = list(forms.forms_of(layer))
    assert {(form.operation, form.form) for form in layer_forms} == {(name, f) for name in FORMS for f in FORMS[name]}
    assert {(form.way, form.precision) for form in layer_forms} == set(itertools.product(("alone", *LANES), PRECISIONS))
    shapes = {"forward": (2, 8, 8, 4), "input_gradient": (2, 8, 8, 3), "weight_gradient": (3, 3, 3, 4)}
    for form in layer_forms:
        function, operands = forms.program_of(layer, form)
        result = jax.eval_shape(function, *operands)[2]
        lanes = () if form.way == "alone" else (forms.LANES,)
        assert (result.shape, result.dtype.name) == ((*lanes, *shapes[form.operation]), form.precision)


@pytest.fixture
def two_programs(monkeypatch, tmp_path):
    """`accelerator all` of two programs: a function that runs it, names compiled, digests, file of records."""
    compiled, digests = [], {"w1": "one", "w4": "four"}

    def measure(case, target, timeout):
        compiled.append(case.workload)
        return {"program": digests[case.workload], "ok": True, "turns": 10, "kernels": 100, "temp_mb": 50.0}

    monkeypatch.setattr(accelerator, "missing", lambda target: "")
    monkeypatch.setattr(accelerator, "measure", measure)
    monkeypatch.setattr(accelerator, "Digests", lambda target: nullcontext(lambda case: digests[case.workload]))
    monkeypatch.setattr(survey, "all_cases", lambda: {"rounds": {n: Case("round", workload=n) for n in ("w1", "w4")}})

    def run(*options):
        return accelerator.main(["all", f"--out={tmp_path / 'kept'}", *options])

    return run, compiled, digests, tmp_path / "kept.json"


def test_all_continues_where_it_was_stopped(two_programs):
    run, compiled, _, file = two_programs
    assert run("--only=rounds: w1") == 0
    assert "Not compiled yet: 1 of 2 rounds." in file.with_suffix(".md").read_text()
    assert run() == 0
    assert "Not compiled yet" not in file.with_suffix(".md").read_text()
    assert compiled == ["w1", "w4"]
    assert "| w4 | yes | 10 | 100 | 50 |" in file.with_suffix(".md").read_text()


def test_all_compiles_a_program_that_differs_from_its_record_again(two_programs):
    run, compiled, digests, file = two_programs
    run()
    digests["w4"] = "another"
    assert run() == 0
    assert compiled == ["w1", "w4", "w4"]
    assert json.loads(file.read_text())["h100"]["rounds"]["w4"]["program"] == "another"


def test_a_process_that_ends_while_lowering_gives_no_digest_and_is_replaced(monkeypatch, tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nread case\necho one\nread case\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(lowering.sys, "executable", str(script))
    with lowering.Digests("h100") as digest:
        assert [digest(Case("round")) for _ in range(5)] == ["one", "", "one", "", "one"]


def lowered(function):
    return jax.jit(function).lower(jnp.ones(4))


def test_the_digest_depends_on_the_program_and_not_on_its_source_lines(monkeypatch):
    monkeypatch.setattr(programs, "version", lambda name: "1.0")
    digest = programs.digest(lowered(lambda x: jnp.sin(x) + 1), "h100")
    digest_of_another_line = programs.digest(lowered(lambda x: jnp.sin(x) + 1), "h100")
    assert digest == digest_of_another_line
    assert digest != programs.digest(lowered(lambda x: jnp.sin(x) + 2), "h100")
    assert digest != programs.digest(lowered(lambda x: jnp.sin(x) + 1), "h100", "other turns")
    monkeypatch.setattr(programs, "version", lambda name: "1.1")
    assert digest != programs.digest(lowered(lambda x: jnp.sin(x) + 1), "h100")


@pytest.fixture
def process(monkeypatch):
    """Sets the exit code of a subprocess, or the exception that it raises, and what it prints on both streams."""

    def set_process(code, output="", errors=""):
        def run(command, *, stdout, stderr, **_):
            stdout.write(output)
            stderr.write(errors)
            if isinstance(code, Exception):
                raise code
            return subprocess.CompletedProcess(command, code)

        monkeypatch.setattr(accelerator.subprocess, "run", run)

    return set_process


def test_the_record_of_a_program_that_does_not_compile_has_its_digest(process):
    process(-6, '{"program": "one"}\n', "F0000 00:00:1.2 77 tiling.cc:627] Check failed: a == b")
    record = accelerator.measure(Case("round"), "h100")
    assert (record["program"], record["ok"]) == ("one", False)
    assert record["reason"] == "the compiler ended its process: tiling.cc:627] Check failed: a == b"


def test_the_record_of_a_timeout_has_no_digest_so_it_is_tried_again(process):
    process(subprocess.TimeoutExpired("python", 7.0), '{"program": "one"}\n')
    record = accelerator.measure(Case("round"), "h100", timeout=7.0)
    assert record == {"ok": False, "reason": "not compiled within 7 s"}


@pytest.mark.parametrize(
    ("count", "committed", "code"),
    [
        ("turns", 9, 1),
        ("turns", 10, 0),
        ("kernels", 90, 1),
        ("kernels", 95, 0),
        ("temp_mb", 40.0, 1),
        ("temp_mb", 45.5, 0),
    ],
)
def test_check_fails_where_a_count_grew_by_more_than_a_tenth(two_programs, count, committed, code, capsys):
    run, compiled, digests, file = two_programs
    run()
    records = json.loads(file.read_text())
    records["h100"]["rounds"]["w4"][count] = committed
    file.write_text(json.dumps(records))
    digests["w4"] = "another"
    assert run("--check") == code
    assert compiled == ["w1", "w4", "w4"]
    assert ("rounds, w4: " in capsys.readouterr().out.splitlines()[-1]) == bool(code)
    assert json.loads(file.read_text()) == records


def test_check_fails_where_a_program_does_not_compile_or_has_no_record(two_programs, monkeypatch, capsys):
    run, _, digests, _ = two_programs
    run("--only=w1")
    digests["w1"] = "another"
    aborted = {"ok": False, "reason": "aborted"}
    monkeypatch.setattr(accelerator, "measure", lambda case, target, timeout: aborted)
    assert run("--check") == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "rounds, w1: aborted.",
        "rounds, w4: there is no committed record, run `all` without --check.",
    ]
