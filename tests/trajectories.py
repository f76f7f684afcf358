"""The golden trajectories: a tiny federation with fixed batches, trained through the same lanes as a real run."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import toy

from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine import schedule
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.models.classifier import Classifier

# Fields that a server draws, and the golden arrays that hold their values.
DRAWN = [("etf", "in_etf_M"), ("etf", "in_etf"), ("sparse_etf", "in_ssec")]
LAYERS = [("backbone", "first"), ("backbone", "second"), ("head", None)]


class TwoLayers(nn.Module):
    """a = relu(x W1 + b1), z = a W2 + b2."""

    hidden: int
    features: int

    @nn.compact
    def __call__(self, x, *, train, mask=None):
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(self.hidden, param_dtype=x.dtype, name="first")(x))
        self.sow("intermediates", "layers", x)
        x = nn.Dense(self.features, param_dtype=x.dtype, name="second")(x)
        self.sow("intermediates", "layers", x)
        return x


def sizes(g):
    """H, inputs, D, C, batch size and epochs; where a file does not list them, they follow from its arrays."""
    if "par_sizes" in g:
        inputs, hidden, *others = (int(v) for v in g["par_sizes"])
        return [hidden, inputs, *others]
    if "par_shapes" in g:
        return [int(v) for v in g["par_shapes"]]
    inputs, (dim, classes) = g["in_x0"].shape[1], g["in_ssec"].shape
    hidden = (len(g["in_p0"]) - dim - classes * (dim + 1)) // (inputs + 1 + dim)
    return hidden, inputs, dim, classes, math.gcd(*g["in_n"].astype(int)), g["in_perm0"].shape[1]


def rates(g):
    """Learning rate, momentum and weight decay."""
    if "par_lr_rho_wd" in g:
        return [float(v) for v in g["par_lr_rho_wd"]]
    lr, decay = (float(v) for v in g["par_lr_wd"])
    return [lr, float(g["par_momentum"]) if "par_momentum" in g else 0.0, decay]


class Problem:
    """The federation of one golden file, its model and its fixed batches."""

    def __init__(self, g):
        self.g = g
        clients = len(g["in_n"])
        xs = [g[f"in_x{k}"] for k in range(clients)]
        ys = np.concatenate([g[f"in_y{k}"] for k in range(clients)])
        self.clients, self.n = clients, g["in_n"].astype(int)
        self.first = np.concatenate([[0], np.cumsum(self.n)])
        self.x = np.concatenate(xs)
        self.hidden, inputs, self.dim, self.classes, self.batch, self.epochs = sizes(g)
        blank_images = np.zeros((len(ys), 1, 1, inputs), np.uint8)
        dataset = Dataset("toy", blank_images, ys, blank_images[:1], ys[:1], self.classes)
        index_lists = tuple(np.arange(self.first[k], self.first[k + 1]) for k in range(clients))
        self.federation = Federation(dataset, Partition(index_lists, tuple(x[:0] for x in index_lists)))
        self.selected = g["in_selected"] > 0

    def unflatten(self, flat):
        """Flax's tree from the golden order [W1, b1, W2, b2, Wc, bc], with weights (out, in)."""
        shapes = [(self.hidden, self.x.shape[1]), (self.dim, self.hidden), (self.classes, self.dim)]
        params, offset = {"backbone": {}}, 0
        for (part, name), (rows, columns) in zip(LAYERS, shapes, strict=True):
            kernel = flat[offset : offset + rows * columns].reshape(rows, columns).T
            offset += rows * columns
            layer = {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(flat[offset : offset + rows])}
            offset += rows
            params[part] = params[part] | {name: layer} if name else layer
        return params

    def flatten(self, params):
        """The inverse; a projection takes the head's place, a model without either gives the backbone's part alone."""
        params = params | ({"neck": params["neck"]["fc1"]} if "neck" in params else {})
        layers = [params["backbone"]["first"], params["backbone"]["second"]]
        layers += [params[part] for part in ("head", "neck") if part in params]
        arrays = [(np.asarray(p["kernel"]), p.get("bias")) for p in layers]
        vectors = [np.concatenate([w.T.ravel(), np.zeros(w.shape[1]) if b is None else b]) for w, b in arrays]
        return np.concatenate(vectors)

    def simulation(self, method, *, lanes, momentum=None, decay=None, clip=None, weights="method"):
        lr, rho, wd = rates(self.g)
        momentum, decay = rho if momentum is None else momentum, wd if decay is None else decay
        model = method.build(Classifier(TwoLayers(self.hidden, self.dim), self.classes, param_dtype=jnp.float64))
        local = Local(self.epochs, self.batch, "keep", "sgd", lr, momentum, decay, clip)
        experiment = Experiment(self.federation, method, local, seed=0)
        simulation = Simulation(
            model, [experiment], pipeline=Pipeline(), cohort=self.clients,
            execution=Execution(lanes=lanes, dtype=jnp.float64, param_dtype=jnp.float64), weights=weights,
        )  # fmt: skip
        images = jnp.asarray(self.x[:, None, None, :])  # float images are not scaled
        simulation.data = simulation.data._replace(train=simulation.data.train._replace(images=images))
        return toy.shared(simulation)

    def plan(self, simulation, round, chosen):
        """The golden batches of a round as a schedule."""
        batches = [
            self.first[k] + self.g[f"in_perm{k}"][round].reshape(-1, self.batch).astype(np.int32) for k in chosen
        ]
        batches += [np.zeros((0, self.batch), np.int32)] * (self.clients - len(chosen))
        clients, weight = np.zeros((1, self.clients), np.int32), np.zeros((1, self.clients))
        clients[0, : len(chosen)] = chosen
        cohort_weights = simulation.weights[0, chosen]
        weight[0, : len(chosen)] = cohort_weights / cohort_weights.sum()
        jobs = simulation.table(clients, weight, batches)
        return schedule.pack(batches, simulation.program.lanes, steps=simulation.capacity), jobs


@functools.cache
def train(g, name, lanes, *, everyone=False, momentum=None, decay=None, clip=None, weights="method", **hyper):
    """The problem and the states after each round, as NumPy arrays; they are cached: do not change them."""
    problem = Problem(g)
    options = {"momentum": momentum, "decay": decay, "clip": clip, "weights": weights}
    simulation = problem.simulation(METHODS[name](**hyper), lanes=lanes, **options)
    model, params = simulation.program.model, problem.unflatten(g["in_p0"])
    if model.neck:
        params["neck"] = {"fc1": params.pop("head")}
    elif not model.head:
        params.pop("head")
    elif not model.head_bias:
        params["head"].pop("bias")
    state = simulation.start({"params": jax.tree.map(lambda x: x[None], params)})
    golden_fields = {field: jnp.asarray(g[name])[None] for field, name in DRAWN if name in g}
    servers = state.servers._replace(**{f: x for f, x in golden_fields.items() if f in state.servers._fields})
    state = state._replace(servers=servers)
    states = []
    for r, row in enumerate(problem.selected):
        chosen = np.arange(problem.clients) if everyone else np.flatnonzero(row)
        state, _ = simulation.step(state, r, problem.plan(simulation, r, chosen))
        states.append(jax.tree.map(np.array, state))
    return problem, states
