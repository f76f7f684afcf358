"""What each method costs over FedAvg: seconds a round, and scalars that a client holds while it trains.

python -m benchmarks.overhead --workloads w1 w4 --rounds 8 --out benchmarks/results/overhead

A method's rounds and FedAvg's are timed in turn, so that a machine that becomes slower meanwhile slows both; bound to
one core (--cores=1), seconds are the processor's. Beside the ratio stands what it would be if nothing but this cost
more, each part measured by itself in the same process: the method's passes (further forward passes, gradients, epochs,
layers, generated features), then also its server, reading and writing what its clients keep between rounds once, and
arithmetic on arrays as large as the parameters.
"""

import itertools
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.limits import seconds_of
from benchmarks.racing import clock
from benchmarks.round_time import build, federation, simulation
from benchmarks.table import hardware, on, parser, pin, save
from benchmarks.workloads import CLASSES, LR, MOMENTUM, WEIGHT_DECAY, WORKLOADS, Workload
from fedjax_pcdd.analysis.traffic import in_words, traffic
from fedjax_pcdd.engine.executables import compiler_options
from fedjax_pcdd.engine.jobs import Inputs
from fedjax_pcdd.engine.lanes import run_lanes
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import ServerContext
from fedjax_pcdd.models.classifier import forward, initialise
from fedjax_pcdd.models.generator import generate
from fedjax_pcdd.trees import select

# Forward passes over a client's data in addition to the training step's own, in a round of one local epoch.
EXTRA_FORWARDS = {
    "moon": 2, "fedrl": 1, "fedmr": 1, "fedproc": 1, "fedproto": 1, "fedvls": 1, "fedntd": 1, "fedlmd": 1, "fedtgp": 1,
}  # fmt: skip

# Training steps in addition to a step's own: a second gradient at another point, or of a second model.
EXTRA_STEPS = {"fedsam": 1, "mofedsam": 1, "fedsmoo": 1, "fedgf": 1, "ditto": 1, "apfl": 1}

# Arrays as large as the parameters that a method reads or writes in addition to FedAvg's, in a step (its gradient) and
# in an upload (what is sent and summed), each once; reading and writing the client's state is counted separately.
PARAMETER_ARRAYS = {
    "fedprox": (1, 0),  # w^t
    "fednova": (1, 1),  # as FedProx, whose term it may have; w^t in what is sent
    "feddyn": (2, 2),  # w^t, v_k; the same
    "feddc": (4, 6),  # w^t, h_k, Delta, Delta_k; the same, and a sum read and written
    "scaffold": (2, 5),  # c, c_k; w^t, c, c_k, a sum read and written
}

# What a client holds while it trains, as the papers count it.
PUBLISHED = {
    "fedavg": "P", "fedprox": "2P", "fedproc": "P + C D", "fedmr": "P + C D", "moon": "3P", "fedproto": "P + C D",
    "fednova": "P", "feddyn": "3P", "feddc": "5P", "scaffold": "4P", "fedrs": "P", "fedlc": "P", "fedrl": "2P",
    "fedgen": "P + generator", "fedrod": "P + head",
}  # fmt: skip

UNLIKE = ("fml",)  # one would only time its second model, ResNet10


class Cost(NamedTuple):
    """One method on one workload; the ratios are to FedAvg's round."""

    method: str
    seconds: float
    ratio: float
    cpu_ratio: float  # of processor time
    passes: float  # the ratio that its passes explain
    everything: float  # the ratio that passes, server, clients' state and arithmetic explain
    held: str


def simulate(name: str, workload: Workload, parts: Any) -> Simulation:
    """One local epoch of a method on one lane."""
    return simulation(workload, parts, 1, method=name, rounds=1000)  # CCVR's last round is different


def timer(simulated: Simulation) -> Callable[[], tuple[float, float]]:
    """A function that runs a round and returns its seconds by wall clock and by processor; compiled here."""
    state, rounds = [simulated.start()], itertools.count()

    def run() -> tuple[float, float]:
        wall, cpu = clock(), time.process_time()
        state[0], report = simulated.step(state[0], next(rounds))
        jax.block_until_ready((state[0], report))
        return clock() - wall, time.process_time() - cpu

    run()
    return run


def fastest(function: Callable[[Any, Any], Any], argument: Any, times: int) -> float:
    """Seconds of one of `times` repetitions of function(i, argument) in one program, which carries the argument."""

    @partial(jax.jit, donate_argnums=0, compiler_options=compiler_options())
    def repeat(argument):
        return jax.lax.fori_loop(0, times, lambda i, x: function(i, x), argument)

    seconds, argument = [], repeat(argument)
    for _ in range(7):
        start = clock()
        argument = jax.block_until_ready(repeat(argument))
        seconds.append(clock() - start)
    return min(seconds) / times


@cache
def pass_seconds(model: Any, workload: Workload) -> tuple[float, float]:
    """Seconds of a training step and of a forward pass on one batch."""
    images = jax.random.normal(jax.random.key(1), (workload.batch, *workload.shape))

    def predict(params):
        outputs = forward(model, {"params": params}, images, train=True)[0]
        return outputs.features if outputs.logits is None else outputs.logits

    def train(_, carry):
        params, momentum = carry
        gradient = jax.grad(lambda p: jnp.square(predict(p)).mean())(params)
        momentum = jax.tree.map(lambda m, g, p: MOMENTUM * m + g + WEIGHT_DECAY * p, momentum, gradient, params)
        return jax.tree.map(lambda p, m: p - LR * m, params, momentum), momentum

    def infer(_, carry):
        params, total = carry
        changed = jax.tree.map(lambda p: p + 1e-9 * total, params)  # keeps XLA from moving the pass out of the loop
        return params, total + predict(changed).sum()

    def fresh():
        return initialise(model, jax.random.key(0), workload.shape)["params"]

    return fastest(train, (fresh(), fresh()), 20), fastest(infer, (fresh(), jnp.zeros(())), 20)


def generated_seconds(name: str, simulated: Simulation, workload: Workload) -> float:
    """Seconds of a step's generated features, for the one method that has them."""
    if name != "fedgen":
        return 0.0
    server = select(simulated.start().servers, 0)
    labels = jnp.arange(2 * workload.batch) % CLASSES

    def make(i, total):
        noisy = jax.tree.map(lambda x: x + 1e-9 * total, server.generator)
        key = jax.random.fold_in(jax.random.key(0), i)
        return total + generate(noisy, key, labels, CLASSES, noise="uniform")[1].sum()

    return fastest(make, jnp.zeros(()), 20)


def state_seconds(simulated: Simulation) -> float:
    """Seconds of reading and writing every client's state once."""
    state = simulated.start().clients

    def touch(i, state):
        return jax.tree.map(lambda x: x.at[i].multiply(jnp.asarray(2, x.dtype)), state)

    if not jax.tree.leaves(state):
        return 0.0
    clients = jax.tree.leaves(state)[0].shape[0]
    return fastest(touch, state, clients) * clients


def array_seconds(simulated: Simulation) -> float:
    """Seconds of reading or writing one array as large as the parameters in arithmetic on several of them."""
    params = select(simulated.start().servers, 0).variables["params"]
    other = jax.tree.map(lambda x: x + 1, params)  # read, as the first, which is also written
    return fastest(lambda i, x: jax.tree.map(lambda a, b: 0.9 * a + b, x, other), params, 200) / 3


def server_seconds(simulated: Simulation) -> float:
    """Seconds of an aggregation."""
    state, (plan, jobs) = simulated.start(), simulated.plan(0)
    keys = jnp.repeat(simulated.keys[:1], len(jobs.row))
    inputs = Inputs(simulated.methods, simulated.hyper, state.servers, simulated.data, jobs, keys, jnp.int32(0))
    sent = jax.eval_shape(partial(run_lanes, simulated.program), inputs, state, plan).message
    message = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), sent)
    method, hyper = select((simulated.methods, simulated.hyper), 0)
    program, clients = simulated.program, jnp.asarray(jobs.row)
    context = ServerContext(
        program.model, program.setting, hyper, jnp.int32(0), clients, jnp.int32(len(clients)), keys[0]
    )
    aggregate = jax.jit(lambda server, message, weights: method.aggregate(server, message, weights, context))
    return seconds_of(lambda: aggregate(select(state.servers, 0), message, jnp.asarray(jobs.weight)), 5)


class Parts(NamedTuple):
    """Seconds of a round by part, each measured separately."""

    passes: float
    server: float
    state: float
    arithmetic: float


def parts_of(name: str, simulated: Simulation, workload: Workload) -> Parts:
    """The parts of a round of the method."""
    training, inference = pass_seconds(simulated.program.model, workload)  # pyright: ignore[reportArgumentType]
    step = training + generated_seconds(name, simulated, workload)
    per_step = (
        float(simulated.epochs[0]) * (1 + EXTRA_STEPS.get(name, 0)) * step + EXTRA_FORWARDS.get(name, 0) * inference
    )
    steps = workload.samples // workload.batch
    a_step, an_upload = PARAMETER_ARRAYS.get(name, (0, 0))
    arithmetic = (steps * a_step + workload.clients * an_upload) * array_seconds(simulated)
    return Parts(per_step * steps, server_seconds(simulated), state_seconds(simulated), arithmetic)


def measure(workload: Workload, names: list[str], rounds: int) -> list[Cost]:
    """The costs of the methods, whose rounds alternate with FedAvg's."""
    federated, costs = federation(workload), []
    fedavg = simulate("fedavg", workload, federated)
    run_fedavg, fedavg_parts = timer(fedavg), parts_of("fedavg", fedavg, workload)
    for name in names:
        simulated = simulate(name, workload, federated)
        run = timer(simulated)
        # [rounds, FedAvg or method, wall or processor]
        times = np.array([(run_fedavg(), run()) for _ in range(rounds)])
        (base, base_cpu), (seconds, cpu) = np.median(times, 0)
        extra = np.maximum(np.subtract(parts_of(name, simulated, workload), fedavg_parts), 0) / base
        sizes = traffic(METHODS[name](), build(workload), workload.shape)
        ratios = seconds / base, cpu / base_cpu, 1 + extra[0], 1 + extra.sum()
        costs.append(Cost(name, float(seconds), *map(float, ratios), held=in_words(sizes.held, sizes, CLASSES)))
        print(f"{name}: {ratios[0]:.2f} times FedAvg, {ratios[2]:.2f} and {ratios[3]:.2f} explained", flush=True)
    return costs


def markdown(machine: dict, results: dict[str, list[Cost]]) -> str:
    """One table for each workload."""
    text = [f"One lane. {on(machine)}, jax {jax.__version__} ({jax.default_backend()}), {machine['date']}."]
    header = "| method | s a round | times FedAvg | by processor time | passes explain | with all parts | held |"
    for workload, costs in results.items():
        text += ["", f"## {workload.upper()}", "", header, "|---" * 7 + "|"]
        for c in costs:
            ratios = " | ".join(f"{x:.2f}" for x in (c.ratio, c.cpu_ratio, c.passes, c.everything))
            text.append(f"| {c.method} | {c.seconds:.4f} | {ratios} | {c.held} |")
    return "\n".join([*text, "", "## In short", "", *summary(results)]) + "\n"


def summary(results: dict[str, list[Cost]]) -> list[str]:
    """Lines of a table: each method's ratios on all workloads, measured and explained, and what its clients hold."""
    columns = [f"{workload.upper()} | by passes | with all parts" for workload in results]
    rule = "|---" + "|---:" * 3 * len(results) + "|---|---|"
    lines = [f"| method | {' | '.join(columns)} | held | published |", rule]
    for costs in zip(*results.values(), strict=True):
        ratios = [f"{x:.2f}" for c in costs for x in (c.ratio, c.passes, c.everything)]
        held, published = costs[0].held, PUBLISHED.get(costs[0].method, "–")
        lines.append(f"| {costs[0].method} | {' | '.join(ratios)} | {held} | {published} |")
    return lines


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["w1", "w4"])
    options.add_argument("--methods", nargs="+", help="by default all that need no public images")
    options.set_defaults(rounds=8, cores=None)
    args = options.parse_args(argv)
    machine = hardware(pin(args.cores) if args.cores else None)
    plain = [name for name, cls in METHODS.items() if not cls().traits().needs_public and name not in UNLIKE]
    names = args.methods or plain
    results: dict[str, list[Cost]] = {}
    for name in args.workloads:
        results[name] = measure(WORKLOADS[name], names, args.rounds)
    records = {workload: [cost._asdict() for cost in costs] for workload, costs in results.items()}
    save(args.out, {"machine": machine, "results": records}, markdown(machine, results))


if __name__ == "__main__":
    main()
