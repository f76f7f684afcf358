"""The programs whose cost on an accelerator is counted: what the engine compiles for a run, and models by themselves.

Nothing is trained: the engine is asked for a round or an evaluation, and the compiled function that it calls is
captured with its arguments before it runs.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.stages import Lowered

from benchmarks import forms, round_time
from benchmarks.cases import FEDERATIONS, PARTS, Case
from benchmarks.targets import TARGETS, sharding_on
from benchmarks.turns import tagged
from benchmarks.workloads import CLASSES, LR, MOMENTUM
from fedjax_pcdd import models
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.groups import Groups, Public
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods import get
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.models.classifier import forward, initialise

PUBLIC_IMAGES, PUBLIC_BATCH = 256, 64


class Traced(NamedTuple):
    """A program with its arguments."""

    jaxpr: core.ClosedJaxpr  # its loops have names
    args: list[Any]  # flat, arrays or their shapes
    donated: tuple[int, ...]
    longest: int | None = None  # steps of the client with the most, in a round


def trace(case: Case) -> Traced:
    """The program of a case."""
    if case.view == "forms":
        return _forms(case)
    if case.program in PARTS:
        return _model(case)
    if case.program == "exchange":
        groups = _groups(case)
        return _captured(groups, lambda: groups.exchange(groups.start(), 0))
    simulation = _simulation(case)
    if case.program in ("round", "tuning"):
        simulation = simulation.tuner(1) if case.program == "tuning" else simulation
        state = simulation.start()
        longest = int((simulation.steps * simulation.epochs).max())
        return _captured(simulation, lambda: simulation.step(state, 0))._replace(longest=longest)
    evaluator, state = simulation.evaluator, simulation.start()
    count = evaluator.general if case.program == "generic" else evaluator.personal
    return _captured(evaluator, lambda: count(state))


def lower(program: Traced, target: str) -> Lowered:
    """What JAX hands to a target's compiler."""
    sharding = sharding_on(target)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in program.jaxpr.in_avals]
    traced = jax.jit(core.jaxpr_as_fun(program.jaxpr), donate_argnums=program.donated).trace(*shapes)
    return traced.lower(lowering_platforms=(TARGETS[target].platform,))


def digest(lowered: Lowered, target: str, *further: str) -> str:
    """Digest of all that a record depends on: the program without its locations, the versions of JAX and the compiler.

    Args:
      further: what else it depends on.
    """
    compiler = TARGETS[target].package
    inputs = (lowered.as_text(), version("jax"), f"{compiler} {version(compiler)}", *further)
    return hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:16]


class _Reached(Exception):
    """A compiled function was called; its arguments are (function, its arguments)."""


def _captured(owner: Any, call: Callable[[], Any]) -> Traced:
    """The first compiled function of an object that a call reaches."""

    def stop(function):
        def reached(*args):
            raise _Reached(function, args)

        return reached

    compiled = {name: value for name, value in vars(owner).items() if hasattr(value, "lower")}
    vars(owner).update({name: stop(function) for name, function in compiled.items()})
    try:
        call()
    except _Reached as reached:
        return _of(*reached.args)
    raise AssertionError("the engine called no compiled function: see what `_captured` looks for")


def _of(function: Any, args: Sequence[Any]) -> Traced:
    """The program of a compiled function with its arguments; bools and strings are static."""
    traced = function.trace(*args)
    flat = jax.tree.leaves([x for x in args if not isinstance(x, (bool, str))])
    donated = [i for i, info in enumerate(jax.tree.leaves(traced.args_info)) if info.donated]
    return Traced(tagged(traced.jaxpr), flat, tuple(donated))


def _simulation(case: Case) -> Simulation:
    """The simulation of a case."""
    workload = FEDERATIONS[case.workload]
    workload = replace(workload, clients=case.clients or workload.clients)
    federated, traits = round_time.federation(workload), get(case.method)().traits()
    public = (_images(PUBLIC_IMAGES, workload.shape), Pipeline()) if traits.public else None
    return round_time.simulation(workload, federated, case.lanes, method=case.method, public=public)


def _images(count: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)


def _groups(case: Case) -> Groups:
    """Participants with one domain each."""
    names, shape, per_client = case.model.split(","), (case.side, case.side, 3), 100
    labels = np.arange(len(names) * per_client) % CLASSES
    images = _images(len(labels), shape)
    lists = tuple(np.split(np.arange(len(labels)), len(names)))
    federated = Federation(Dataset("random", images, labels, images, labels, CLASSES), Partition(lists, lists))
    return Groups(
        [models.build(name, num_classes=CLASSES, image_shape=shape) for name in names], federated, get(case.method)(),
        Local(1, case.batch, "drop", "adam", 1e-3, MOMENTUM, 0.0), seed=0, pipeline=Pipeline(),
        execution=Execution(lanes=case.lanes),
        public=Public(_images(PUBLIC_IMAGES, shape), Pipeline(), PUBLIC_BATCH),
    )  # fmt: skip


def _forms(case: Case) -> Traced:
    """All forms of a layer, or one of them."""
    layer = forms.model_layers()[case.layer or ""]
    selected = [form for form in forms.forms_of(layer) if case.form in (None, str(form))]
    functions, operands = zip(*(forms.program_of(layer, form) for form in selected), strict=True)

    def function(*operands):
        return [program(*arguments) for program, arguments in zip(functions, operands, strict=True)]

    return _of(jax.jit(function), operands)


def _model(case: Case) -> Traced:
    """Forward pass, gradient, or a loop of gradient steps of a model; several lanes get an axis of their own."""
    dtype = None if case.precision == "float32" else jnp.dtype(case.precision)
    text = case.model == "lstm"
    shape = (80, 1, 1) if text else (case.side, case.side, 3)
    model = models.build(case.model, num_classes=CLASSES, image_shape=shape, text=text, dtype=dtype)
    variables = dict(jax.eval_shape(lambda: initialise(model, jax.random.key(0), shape)))
    params = variables.pop("params")
    images = jax.ShapeDtypeStruct((case.batch, *shape), jnp.float32)

    def loss(params, rest, images):
        key = jax.random.key(0)
        outputs, _ = forward(model, {**rest, "params": params}, images, train=True, key=key)
        return -jax.nn.log_softmax(outputs.logits)[:, 0].mean()

    def steps(params, rest, images):
        def step(_, params):
            return jax.tree.map(lambda p, g: p - LR * g, params, jax.grad(loss)(params, rest, images))

        return jax.lax.fori_loop(0, 3, step, params)

    function = {"forward": loss, "gradient": jax.grad(loss), "steps": steps}[case.program]
    args = (params, variables, images)
    if case.lanes > 1:
        function = jax.vmap(function)
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct((case.lanes, *x.shape), x.dtype), args)
    return _of(jax.jit(function), args)
