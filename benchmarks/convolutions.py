"""Every form of every convolution of our models, measured on this backend; with --update, the table that models read.

python -m benchmarks.convolutions [--out=benchmarks/results/convolutions] [--update]

Forward, input gradient and weight gradient of each distinct layer run in a loop, as in a training step, alone and in
lanes. The forms of an operation are timed in turn in this process; of each the least and the median of its repeats
count. A form enters `fedjax_pcdd/models/convolution_table.json` in place of the default rule's where it is faster by a
tenth or more by both. Beside the forms stand trials that models do not offer: another layout, the batch cut in
four or five parts, and options of XLA.
"""

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.racing import Runner, race
from benchmarks.table import hardware, pin, save
from benchmarks.workloads import CLASSES, WORKLOADS, Workload
from fedjax_pcdd.engine.tuning import COMPUTE, MARGIN
from fedjax_pcdd.models import build
from fedjax_pcdd.models.convolution_forms import FORMS, Window, fits
from fedjax_pcdd.models.convolution_table import LANES, TABLE, Listing, Rule, choosing, default_rule

CASES = {name: WORKLOADS[name] for name in ("w1", "w2", "w3")} | {
    "digits": Workload("mcmahan_cnn", (8, 8, 1), clients=10, per_client=100, batch=50),
    "resnet8": Workload("resnet8", (32, 32, 3), clients=10, per_client=1000, batch=50),
}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "512-bit": {"xla_cpu_prefer_vector_width": 512},
        "YNNPACK": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"},
    }
}
TRIALS = ("NCHW", "cut", "512-bit", "YNNPACK")


class Layer(NamedTuple):
    """A convolution of a model: its window, B and the channels in and out."""

    window: Window
    batch: int
    inputs: int
    outputs: int

    @property
    def gflop(self) -> float:
        """Multiplications and additions of one of its operations, in 10^9; padding counts as image."""
        height, width = self.window.kernel
        places = self.batch * self.window.out[0] * self.window.out[1]
        return 2e-9 * places * height * width * self.inputs * self.outputs

    @property
    def shape(self) -> dict[str, Any]:
        """The layer's key in the table."""
        kernel, strides, image = (list(pair) for pair in (self.window.kernel, self.window.strides, self.window.image))
        return {"kernel": kernel, "strides": strides, "inputs": self.inputs, "outputs": self.outputs, "image": image}

    def __str__(self):
        sides = ["x".join(map(str, pair)) for pair in (self.window.kernel, self.window.image)]
        stride = "" if self.window.strides == (1, 1) else f" / {self.window.strides[0]}"
        return f"{sides[0]}{stride}, {self.inputs} to {self.outputs}, {sides[1]}, batch {self.batch}"

    def operands(self, operation: str, lanes: tuple[int, ...] = ()) -> tuple[jax.Array, jax.Array]:
        """Random operands of one of the three operations, with leading lane axes."""
        x = (self.batch, *self.window.image, self.inputs)
        w = (*self.window.kernel, self.inputs, self.outputs)
        dy = (self.batch, *self.window.out, self.outputs)
        first, second = {"forward": (x, w), "input_gradient": (dy, w), "weight_gradient": (x, dy)}[operation]
        keys = jax.random.split(jax.random.key(0))
        return jax.random.normal(keys[0], lanes + first), jax.random.normal(keys[1], lanes + second)


def layers(workloads: Iterable[Workload]) -> list[Layer]:
    """The convolutions that `client_conv` computes for these models, each shape once, found by tracing them."""
    listing, distinct = Listing(), {}
    with choosing(listing):
        for workload in workloads:
            model = build(workload.model, num_classes=CLASSES, image_shape=workload.shape)
            images = jax.ShapeDtypeStruct((workload.batch, *workload.shape), jnp.float32)
            jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), images)
    for asked in listing.asked:
        layer = Layer(asked.window, asked.batch, asked.inputs, asked.outputs)
        distinct.setdefault(json.dumps(layer.shape), layer)
    return list(distinct.values())


def singles(layer: Layer, operation: str, single: str) -> dict[str, Runner]:
    """Runners for the forms of an operation and for the trials; the trial with a cut batch takes the form `single`."""
    operands = layer.operands(operation)

    def runner(form, *options):
        return Runner(_computed(operation, form, layer.window), operands, *options)

    shape = (operation, layer.window, layer.inputs, layer.outputs)
    runners = {form: runner(form) for form in FORMS[operation] if fits(form, *shape)}
    if operation == "forward":
        runners["NCHW"] = _channels_first(layer, *operands)
    pieces = next((n for n in (4, 5, 2) if layer.batch % n == 0), 1)
    if pieces > 1:
        compute = functools.partial(_cut, operation, single, layer.window, pieces)
        runners["cut"] = Runner(compute, operands)
    return runners | {
        name: runner("direct", options) for name, options in OPTIONS.get(jax.default_backend(), {}).items()
    }


def laned(layer: Layer, operation: str, single: str, lanes: int) -> dict[str, Runner]:
    """The ways to run a batch of convolutions, as the models do."""
    compute = _computed(operation, single, layer.window)
    ways: dict[str, Callable[..., jax.Array]] = {
        "loop": lambda a, b: lax.map(lambda pair: compute(*pair), (a, b)),
        "gemm": jax.vmap(_computed(operation, "gemm", layer.window)),
        "grouped": jax.vmap(_computed(operation, "direct", layer.window)),
    }
    operands = layer.operands(operation, (lanes,))
    return {name: Runner(ways[name], operands) for name in LANES}


def _computed(operation: str, form: str, window: Window) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda a, b: COMPUTE[operation](form, a, b, window)


def _channels_first(layer: Layer, x, w) -> Runner:
    """The forward convolution of operands that lie in NCHW and OIHW already."""
    window, numbers = layer.window, ("NCHW", "OIHW", "NCHW")
    compute = functools.partial(
        lax.conv_general_dilated, window_strides=window.strides, padding=window.pads, dimension_numbers=numbers
    )
    return Runner(compute, (x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)))


def _cut(operation: str, form: str, window: Window, pieces: int, a, b):
    """The operation on pieces of the batch, one after another."""
    compute = _computed(operation, form, window)

    def cut(array):
        return array.reshape(pieces, -1, *array.shape[1:])

    if operation == "weight_gradient":
        return lax.map(lambda pair: compute(*pair), (cut(a), cut(b))).sum(0)
    results = lax.map(lambda piece: compute(piece, b), cut(a))
    return results.reshape(-1, *results.shape[2:])


def best(times: dict[str, list[float]], names: Iterable[str], default: str) -> str:
    """The fastest of these if it beats the default by the margin in its least and in its median time, else the default.

    >>> best({"direct": [1.2, 1.3], "gemm": [1.0, 1.4], "rows": [1.15, 1.1]}, ("direct", "gemm", "rows"), "direct")
    'direct'
    """
    fastest = min((name for name in names if name in times), key=lambda name: min(times[name]))
    wins = all(
        statistic(times[default]) >= MARGIN * statistic(times[fastest]) for statistic in (min, statistics.median)
    )
    return fastest if wins else default


def measure(layer: Layer, operation: str, lanes: int, repeats: int) -> dict[str, Any]:
    """The measurements of one operation of a layer; "chosen" is a rule."""
    default = default_rule(jax.default_backend(), operation, layer.window, layer.inputs, layer.outputs)
    alone = race(singles(layer, operation, default.single), repeats)
    single = best(alone, FORMS[operation], default.single)
    together = race(laned(layer, operation, single, lanes), repeats)
    return {
        "operation": operation,
        "default": default,
        "chosen": Rule(single, best(together, LANES, default.lanes)),
        "single": _summary(alone),
        "lanes": _summary(together),
    }


def _summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"min_s": min(seconds), "median_s": statistics.median(seconds), "repeats": len(seconds)}
        for name, seconds in times.items()
    }


def entry(layer: Layer, records: list[dict[str, Any]]) -> dict[str, Any]:
    """An entry of the table: the shape, and what differs from the default rule."""
    return layer.shape | {r["operation"]: list(r["chosen"]) for r in records if r["chosen"] != r["default"]}


def joined(known: dict[str, Any], measured: str, shapes: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """A backend's part of the table updated with newly measured shapes: what it was measured on, and its shapes.

    >>> old = {"measured": "an old CPU", "shapes": [{"inputs": 3, "forward": ["gemm", "loop"]}, {"inputs": 6}]}
    >>> joined(old, "w1: a new one", [{"inputs": 3}])
    ('an old CPU; w1: a new one', [{'inputs': 6}, {'inputs': 3}])
    """
    new = {_known_by(shape) for shape in shapes}
    unchanged = [shape for shape in known["shapes"] if _known_by(shape) not in new]
    return f"{known['measured']}; {measured}", [*unchanged, *shapes]


def _known_by(shape: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in shape.items() if name not in FORMS})


def rewritten(table: dict[str, Any], backend: str, measured: str, shapes: list[dict[str, Any]]) -> str:
    """The table's text, one shape a line, with one backend's part replaced."""
    sections = []
    for name, content in (table | {backend: {"measured": measured, "shapes": shapes}}).items():
        lines = ",".join(f"\n   {json.dumps(shape)}" for shape in content["shapes"])
        sections.append(f' "{name}": {{\n  "measured": {json.dumps(content["measured"])},\n  "shapes": [{lines}]\n }}')
    return "{\n" + ",\n".join(sections) + "\n}\n"


def row(layer: Layer, record: dict[str, Any]) -> str:
    """A line of the Markdown: milliseconds of the default rule, and how many times as fast the others are."""
    default, alone, together = Rule(*record["default"]), record["single"], record["lanes"]

    def ratios(times, against, names):
        return [f"{times[against]['min_s'] / times[n]['min_s']:.2f}" if n in times else "–" for n in names]

    changes = " ".join(new for old, new in zip(default, record["chosen"], strict=True) if old != new)
    cells = [str(layer), record["operation"].replace("_", " "), default.single]
    least = alone[default.single]["min_s"]
    cells += [f"{least * 1e3:.2f}", f"{layer.gflop / least:.0f}"]
    cells += ratios(alone, default.single, (*FORMS["weight_gradient"], *TRIALS))
    cells += [default.lanes, f"{together[default.lanes]['min_s'] * 1e3:.2f}"]
    cells += [*ratios(together, default.lanes, LANES), changes or "default"]
    return f"| {' | '.join(cells)} |"


def markdown(measured: str, lanes: int, rows: list[str]) -> str:
    """The table, with the machine that it was measured on."""
    names = ["layer", "operation", "default", "ms", "GFLOP/s", *FORMS["weight_gradient"], *TRIALS]
    names += ["lanes' default", f"ms, {lanes} lanes", *LANES, "chosen"]
    head = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return "\n".join([f"Convolutions in a loop, float32. {measured}.", "", *head, *rows, "", NOTE])


NOTE = """A layer is kernel, channels in and out, image, batch. Milliseconds and GFLOP/s are the default rule's; the
other numbers are ratios to it, above 1 where the form is faster: the least of the repeats of each, on one core of a CPU
by processor time. NCHW to YNNPACK are trials that the models do not offer: operands that lie in NCHW from the start
(forward only), the default form on the batch cut in four or five parts, and the direct form under XLA's options for
512-bit vectors and YNNPACK kernels. Lanes run one after another (loop, in the chosen form), as batched matrix products,
or as XLA's grouped convolution. Chosen: what the models' table takes in the default's place, because it is faster by a
tenth or more by the least and by the median. The input gradient of a model's first layer is seldom needed.
"""


def measure_all(models: Iterable[str], lanes: int, repeats: int) -> list[tuple[Layer, list[dict[str, Any]]]]:
    """Each layer of these models with its operations; prints the results as they come."""
    measured = []
    for layer in layers(CASES[name] for name in models):
        measured.append((layer, [measure(layer, operation, lanes, repeats) for operation in FORMS]))
        print(*(row(layer, record) for record in measured[-1][1]), sep="\n", file=sys.stderr, flush=True)
    return measured


def main(argv: list[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES), help="whose layers are measured")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9, help="timings of each form")
    parser.add_argument("--cores", type=int, default=1, help="cores on which everything runs")
    parser.add_argument("--out", help="path of the files to write, without their ending")
    parser.add_argument("--update", action="store_true", help=f"write these models' shapes into {TABLE.name}")
    args = parser.parse_args(argv)
    machine = hardware(pin(args.cores)) | {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    machine["load"] = " ".join(f"{x:.1f}" for x in os.getloadavg())
    measured_on = "{cpu}, {cores_used} of {cores} cores, jax {jax} ({device}), load {load}, {date}".format(**machine)
    measured = measure_all(args.models, args.lanes, args.repeats)
    results = [layer._asdict() | {"operations": records} for layer, records in measured]
    rows = [row(layer, record) for layer, records in measured for record in records]
    save(
        args.out, {"machine": machine, "lanes": args.lanes, "results": results}, markdown(measured_on, args.lanes, rows)
    )
    if args.update:
        shapes = [entry(layer, records) for layer, records in measured]
        table, backend = json.loads(TABLE.read_text()), jax.default_backend()
        if set(args.models) != set(CASES):
            measured_on, shapes = joined(table[backend], f"{', '.join(args.models)}: {measured_on}", shapes)
        TABLE.write_text(rewritten(table, backend, measured_on, shapes))


if __name__ == "__main__":
    main()
