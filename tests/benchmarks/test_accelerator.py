"""What `benchmarks.accelerator` counts is what one counts by hand, and it complains of what became worse."""

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
KNOWN = 'backend_config={"known_trip_count":{"n":"5"}}'
NAMED = 'metadata={op_name="jit(f)/loop_2/while/body/loop_2_1/while"}'


def counted(function, *args):
    return count_turns(tagged(jax.make_jaxpr(function)(*args)), args)


def turns(function, *args):
    return {loop.name: loop.turns for loop in counted(function, *args).loops}


def repeat(times, x):
    return lax.fori_loop(0, times, lambda _, x: jnp.sin(x), x)


def test_loops_in_loops_are_counted_over_the_whole_program():
    def function(n, x):
        return lax.fori_loop(0, n, lambda i, x: repeat(2, repeat(i, x)), x)

    assert turns(function, 4, 1.0) == {"1": 4, "1_1": 0 + 1 + 2 + 3}


def test_equations_are_counted_as_often_as_they_are_evaluated():
    count = counted(lambda n, x: lax.fori_loop(0, n, lambda _, x: jnp.sin(x) * 2, x), 3, 1.0)
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
    assert counted(function, jnp.array([1, 5, 2]), 0.5).turns == 8


@pytest.mark.parametrize(("flag", "expected"), [(0, {"1": 3}), (1, {"2": 7})])
def test_of_a_branch_the_one_taken_is_counted(flag, expected):
    def function(flag, n):
        return lax.cond(flag > 0, lambda: repeat(2 * n + 1, 0.5), lambda: repeat(n, 0.5))

    assert turns(function, flag, 3) == expected


def test_loops_in_what_a_function_calls_are_counted():
    called = jax.jit(jax.checkpoint(lambda n, x: repeat(n, x)))
    assert turns(lambda n, x: called(n, x) + called(n + 1, x), 2, 0.5) == {"1": 2, "2": 3}


def test_what_decides_no_loop_is_not_computed_and_may_be_a_mere_shape():
    images = jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)
    program = tagged(jax.make_jaxpr(lambda n, x: repeat(n, x @ x))(3, images))
    assert count_turns(program, [3, images]).turns == 3


def test_of_a_loop_of_known_length_only_what_decides_another_is_computed():
    def function(n, x):
        n, x = lax.fori_loop(0, 3, lambda _, both: (both[0] + 2, both[1] @ both[1]), (n, x))
        return repeat(n, x)

    images = jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)
    program = tagged(jax.make_jaxpr(function)(1, images))
    assert count_turns(program, [1, images]).turns == 7


def test_the_names_of_loops_stand_in_the_compiled_program():
    def function(n, x):
        return lax.fori_loop(0, n, lambda i, x: repeat(i, x), repeat(n, x))

    args = (3, jnp.ones(4))
    program = tagged(jax.make_jaxpr(function)(*args))
    text = jax.jit(core.jaxpr_as_fun(program)).lower(*args).compile().as_text()
    launched = hlo.launches(text or "", turns(function, *args))
    assert not launched.reason
    assert {body.name: body.runs for body in launched.bodies} == {"entry": 1, "1": 3, "2": 3, "2_1": 0 + 1 + 2}


def test_kernels_are_counted_as_often_as_their_loop_turns():
    launched = hlo.launches(HLO.replace("INNER", NAMED), {"2": 3, "2_1": 7})
    assert [(b.name, b.kernels, b.runs) for b in launched.bodies] == [("entry", 2, 1), ("2", 1, 3), ("2_1", 2, 7)]
    assert launched.kernels == 2 * 1 + 1 * 3 + 2 * 7


def test_the_turns_that_xla_knows_are_multiplied_by_those_of_the_loop_around():
    assert hlo.launches(HLO.replace("INNER", KNOWN), {"2": 3}).kernels == 2 * 1 + 1 * 3 + 2 * 3 * 5


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


def test_of_branches_the_one_that_launches_most_is_counted_as_a_bound():
    either = "%f = f32[4]{0} conditional(%p, %p, %p), branch_computations={%small, %large}"
    text = HLO.replace("%f = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused", either).replace(
        "ENTRY", BRANCHES + "ENTRY"
    )
    launched = hlo.launches(text.replace("INNER", KNOWN), {"2": 3})
    asking, larger, g = 1, 1 + 5 * 2, 1
    assert (launched.kernels, launched.branches) == (asking + larger + g + 1 * 3 + 2 * 3 * 5, 1)


@pytest.mark.parametrize(
    ("inner", "reason"),
    [("sharding={}", "none of the program's own"), (NAMED.replace("loop_2_1/", ""), "stands twice")],
)
def test_kernels_of_a_loop_whose_turns_cannot_be_told_are_not_guessed(inner, reason):
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
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
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
def test_no_method_has_a_loop_before_whose_turns_a_gpu_asks_the_host(name, monkeypatch):
    """Not in FedAvg's round, hence neither in the passes of others, where all clients train at once."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    round = programs.trace(Case("round", workload="w4", clients=3, lanes=3, method=name))
    assert not has_loop(round.jaxpr.jaxpr)


def test_every_form_of_a_layer_is_a_program_of_the_operation():
    layer = Layer(Window((8, 8), (3, 3), (1, 1), ((1, 1), (1, 1))), 2, 3, 4)
    every = list(forms.forms_of(layer))
    assert {(form.operation, form.form) for form in every} == {(name, f) for name in FORMS for f in FORMS[name]}
    assert {(form.way, form.precision) for form in every} == set(itertools.product(("alone", *LANES), PRECISIONS))
    shapes = {"forward": (2, 8, 8, 4), "input_gradient": (2, 8, 8, 3), "weight_gradient": (3, 3, 3, 4)}
    for form in every:
        function, operands = forms.program_of(layer, form)
        result = jax.eval_shape(function, *operands)[2]
        lanes = () if form.way == "alone" else (forms.LANES,)
        assert (result.shape, result.dtype.name) == ((*lanes, *shapes[form.operation]), form.precision)


@pytest.fixture
def all_of_two(monkeypatch, tmp_path):
    """`accelerator all` of two programs; the list has the names of those that are compiled, the mapping digests."""
    compiled, programs = [], {"w1": "one", "w4": "four"}

    def measure(case, target, timeout):
        compiled.append(case.workload)
        return {"program": programs[case.workload], "ok": True, "turns": 10, "kernels": 100, "temp_mb": 50.0}

    monkeypatch.setattr(accelerator, "missing", lambda target: "")
    monkeypatch.setattr(accelerator, "measure", measure)
    monkeypatch.setattr(accelerator, "Digests", lambda target: nullcontext(lambda case: programs[case.workload]))
    monkeypatch.setattr(survey, "all_cases", lambda: {"rounds": {n: Case("round", workload=n) for n in ("w1", "w4")}})

    def run(*options):
        return accelerator.main(["all", f"--out={tmp_path / 'kept'}", *options])

    return run, compiled, programs, tmp_path / "kept.json"


def test_all_goes_on_where_it_was_stopped(all_of_two):
    run, compiled, _, file = all_of_two
    assert run("--only=rounds: w1") == 0
    assert "Not compiled yet: 1 of 2 rounds." in file.with_suffix(".md").read_text()
    assert run() == 0
    assert "Not compiled yet" not in file.with_suffix(".md").read_text()
    assert compiled == ["w1", "w4"]
    assert "| w4 | yes | 10 | 100 | 50 |" in file.with_suffix(".md").read_text()


def test_all_compiles_what_is_another_program_than_its_record(all_of_two):
    run, compiled, programs, file = all_of_two
    run()
    programs["w4"] = "another"
    assert run() == 0
    assert compiled == ["w1", "w4", "w4"]
    assert json.loads(file.read_text())["h100"]["rounds"]["w4"]["program"] == "another"


def test_a_process_that_ends_while_it_lowers_has_no_digest_and_is_followed_by_another(monkeypatch, tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nread case\necho one\nread case\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(lowering.sys, "executable", str(script))
    with lowering.Digests("h100") as digest:
        assert [digest(Case("round")) for _ in range(5)] == ["one", "", "one", "", "one"]


def lowered(function):
    return jax.jit(function).lower(jnp.ones(4))


def test_the_digest_is_of_the_program_and_not_of_the_lines_that_made_it(monkeypatch):
    monkeypatch.setattr(programs, "version", lambda name: "1.0")
    one = programs.digest(lowered(lambda x: jnp.sin(x) + 1), "h100")
    another_line = programs.digest(lowered(lambda x: jnp.sin(x) + 1), "h100")
    assert one == another_line
    assert one != programs.digest(lowered(lambda x: jnp.sin(x) + 2), "h100")
    assert one != programs.digest(lowered(lambda x: jnp.sin(x) + 1), "h100", "other turns")
    monkeypatch.setattr(programs, "version", lambda name: "1.1")
    assert one != programs.digest(lowered(lambda x: jnp.sin(x) + 1), "h100")


@pytest.fixture
def process(monkeypatch):
    """Sets what a process of one's own prints on both streams, and how it ends (an exception is raised)."""

    def ends(code, output="", errors=""):
        def run(command, *, stdout, stderr, **_):
            stdout.write(output)
            stderr.write(errors)
            if isinstance(code, Exception):
                raise code
            return subprocess.CompletedProcess(command, code)

        monkeypatch.setattr(accelerator.subprocess, "run", run)

    return ends


def test_what_does_not_compile_has_the_digest_of_its_program(process):
    process(-6, '{"program": "one"}\n', "F0000 00:00:1.2 77 tiling.cc:627] Check failed: a == b")
    record = accelerator.measure(Case("round"), "h100")
    assert (record["program"], record["ok"]) == ("one", False)
    assert record["reason"] == "the compiler ended its process: tiling.cc:627] Check failed: a == b"


def test_what_took_too_long_is_tried_again(process):
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
def test_check_fails_where_a_count_grew_by_more_than_a_tenth(all_of_two, count, committed, code, capsys):
    run, compiled, programs, file = all_of_two
    run()
    known = json.loads(file.read_text())
    known["h100"]["rounds"]["w4"][count] = committed
    file.write_text(json.dumps(known))
    programs["w4"] = "another"
    assert run("--check") == code
    assert compiled == ["w1", "w4", "w4"]
    assert ("rounds, w4: " in capsys.readouterr().out.splitlines()[-1]) == bool(code)
    assert json.loads(file.read_text()) == known


def test_check_fails_where_something_no_longer_compiles_or_was_never_committed(all_of_two, monkeypatch, capsys):
    run, _, programs, _ = all_of_two
    run("--only=w1")
    programs["w1"] = "another"
    aborted = {"ok": False, "reason": "aborted"}
    monkeypatch.setattr(accelerator, "measure", lambda case, target, timeout: aborted)
    assert run("--check") == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "rounds, w1: aborted.",
        "rounds, w4: there is no committed record, run `all` without --check.",
    ]
