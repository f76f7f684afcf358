"""Prints the results of a process with eight virtual devices as JSON: python eight_devices.py FOLDER."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import toy  # noqa: E402
from flax import struct  # noqa: E402

from fedjax_pcdd import models  # noqa: E402
from fedjax_pcdd.cli.run import main  # noqa: E402
from fedjax_pcdd.engine.planning import Experiment  # noqa: E402
from fedjax_pcdd.engine.simulation import Simulation  # noqa: E402
from fedjax_pcdd.methods import METHODS  # noqa: E402
from fedjax_pcdd.methods.method import Local, Message, Method, Server  # noqa: E402


@struct.dataclass
class Stacking(Method):
    """FedAvg whose server receives the stacked models of the cohort."""

    def upload(self, variables, summary, context):
        return (), Message(each=variables)

    def aggregate(self, server, message, weights, context):
        return Server(jax.tree.map(lambda x: jnp.tensordot(weights, x, 1), message.each))


TWO = ({"mu": 0.0}, {"mu": 1.0})
CASES = {
    "fedavg": {"devices": ((2, 2), (8, 1))},
    "scaffold, clients on the host": {"name": "scaffold", "devices": ((4, 2),), "client_state": "host"},
    "fedmr": {"devices": ((2, 1),)},
    "fedgela": {"devices": ((4, 1),), "tests_epochs": True},
    "stacked messages": {"name": Stacking, "devices": ((2, 1),)},
    "no global model": {"name": "fedrep", "devices": ((4, 1),)},
    "ensemble": {"name": "lgfedavg", "hyper": ({"record_ensemble": True},) * 2, "devices": ((4, 1),)},
    "ensemble, clients on the host": {
        "name": "lgfedavg",
        "hyper": ({"record_ensemble": True},),
        "devices": ((4, 1),),
        "client_state": "host",
    },
    "layers of the clients' own": {"local_layers": True, "name": "fedavg", "devices": ((4, 1),)},
    "two experiments": {"name": "fedprox", "hyper": TWO, "devices": ((2, 2),)},
    "blocks of two experiments": {"name": "fedprox", "hyper": TWO, "devices": ((2, 3),), "block": 2},
    "blocks, clients on the host": {"name": "scaffold", "devices": ((4, 2),), "client_state": "host", "block": 2},
    "samples from the host": {"name": "fedrep", "devices": ((4, 1),), "stream": 10**6},
    "blocks of whole jobs": {"name": "fedmr", "devices": ((2, 4), (8, 2)), "block": 4},
}


def simulate(name, devices, lanes, *, hyper=({},), **options):
    federation = toy.federation()
    method_class = METHODS[name] if isinstance(name, str) else name
    methods = [method_class(**values) for values in hyper]
    model = models.build("mlp", num_classes=toy.CLASSES, image_shape=federation.image_shape)
    local = Local(2, 8, "drop", "sgd", 0.05, 0.9, 1e-4)
    return Simulation(
        methods[0].build(model), [Experiment(federation, method, local, e) for e, method in enumerate(methods)],
        pipeline=toy.PLAIN, cohort=4, rounds=3,
        **toy.options(lanes=lanes, devices=devices, dtype=jnp.float64, param_dtype=jnp.float64, **options),
    )  # fmt: skip


def trained(simulated):
    """The state, the reports and the evaluation counts after two rounds, on the host."""
    state, reports = simulated.start(), []
    for r in range(2):
        state, report = simulated.step(state, r)
        reports.append(report)
    counts = simulated.evaluate(state, personal=True)
    return jax.tree.map(np.asarray, {"state": state, "reports": reports, "counts": counts})


def difference(one, other):
    """The largest relative difference; both must have NaN at the same positions."""
    largest = 0.0
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        a, b = np.nan_to_num(a.astype(float)), np.nan_to_num(b.astype(float))
        largest = max(largest, float(np.max(np.abs(a - b) / (1 + np.abs(a)), initial=0)))
    return largest


def compare(name, devices, hyper=({},), block=None, stream=None, **options):
    on_one = trained(simulate(name, 1, 1, hyper=hyper, **options))
    comparisons = []
    for count, lanes in devices:
        simulated = simulate(name, count, lanes, hyper=hyper, block=block, stream=stream, **options)
        on_several = trained(simulated)
        comparisons.append({
            "devices": count, "difference": difference(on_one, on_several), "compilations": simulated.compilations,
            "counts": difference(on_one["counts"], on_several["counts"]) == 0,
            "repeated": difference(on_several, trained(simulated)) == 0,
        })  # fmt: skip
    return comparisons


def placement():
    """How the clients' states, the members and the servers are spread over four devices."""
    simulated = simulate("scaffold", 4, 1, client_state="host")
    plan = simulated.plan(0)
    state = simulated.fetch(simulated.start(), plan)
    shards = {leaf.addressable_shards[0].data.shape[0] for leaf in jax.tree.leaves(state.clients)}
    servers = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state.servers)}
    return {"shards": sorted(shards), "most": plan[0].members.shape[1], "servers": sorted(servers)}


def command(folder, devices):
    options = ["--rounds=2", "--local-epochs=1", "--batch-size=32", "--lanes=1", "--fine-tune-epochs=0", "--quiet"]
    protocol = ["--method=fedgela", "--pa-protocol=best_epoch", "--track=angles"]
    assert main([*options, *protocol, f"--devices={devices}", f"--run-dir={folder}"]) == 0
    rows, tracked = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "track.jsonl")
    )
    names = ("ga", "pa", "loss", "pa_last", "pa_received", "pa_best_epoch", "pa_best_mean")
    angles = [[row["angles"]["local"][key] for key in sorted(row["angles"]["local"])] for row in tracked]
    return [[row[name] for name in names] + row_angles for row, row_angles in zip(rows, angles, strict=True)]


if __name__ == "__main__":
    with jax.enable_x64(True):
        results = {case: compare(options.get("name", case), **{k: v for k, v in options.items() if k != "name"})
                   for case, options in CASES.items()}  # fmt: skip
        results["placement"] = placement()
    results |= {f"run on {n}": command(Path(sys.argv[1]) / str(n), n) for n in (1, 2)}
    print(json.dumps(results))
