"""What a round is compiled for (`Program`), and the arrays it works on (`Data`, `State`).

Letters: E experiments, K clients, R = E * K rows (one per client of each experiment), C classes, S cohort.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Lists
from fedjax_pcdd.engine.blocks import Blocks, Pass
from fedjax_pcdd.engine.optimiser import make_optimiser
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Facts, Local, Method, Setting, Unlabelled
from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.trees import at, select, summable, zeros_like

Tree = Any

OPTIMISER, LAYERS = "optimiser", "layers"  # names, besides running statistics, in what the engine keeps for a client

STREAMS = ("model", "rounds", "server", "client", "exchange")  # a seed has a stream of keys for each


def stream_of(seed: int, which: str) -> jax.Array:
    """The key for all random draws of one kind."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), STREAMS.index(which))


@dataclass(frozen=True, kw_only=True)
class Program:
    """Everything static; two rounds with equal programs and array shapes share one executable."""

    model: Classifier
    method: type  # as JAX takes trees of two Flax dataclasses for one structure, and would share a program
    setting: Setting
    pipeline: Pipeline
    lanes: int  # of each device
    experiments: int
    clip: bool  # whether any experiment clips gradients
    local_statistics: bool  # running statistics stay with the client
    masked: bool  # False where every batch is full
    blocks: Blocks
    eval_batch: int  # samples at a time in passes without training, over all models of a block together
    train_pass: Pass  # over one client's training data
    batch_pass: Pass  # the same in training batches
    test_pass: Pass  # over one client's test data
    held_pass: Pass  # over one client's validation samples
    dtype: Any  # of the images that enter the model
    public_pipeline: Pipeline | None
    devices: int
    split_data: bool  # each device has only the samples of its own jobs
    split_clients: bool  # the clients' state that a round sees is divided among the devices, as their jobs
    tests_epochs: int  # epochs before which clients are tested on their own data, 0 for none
    validated: bool  # each client's tests are followed by its validation samples, whose labels are C higher
    in_place: bool  # a job writes its client's state where it read it, see `compiler_options`
    aggregates: bool = True  # False where rounds return messages, to be combined with those of other architectures
    summarises: bool = True  # False in rounds that leave out the method's pass over the clients' data

    @property
    def counts(self) -> int:
        """Number of counts of correct predictions: C, and another C with validation samples."""
        return self.setting.num_classes * (1 + self.validated)

    def eval_batch_of(self, models: int) -> int:
        """Samples of each of so many models at a time, in passes without training, where blocks share `eval_batch`."""
        return self.eval_batch if self.blocks.size == 1 else max(1, self.eval_batch // models)

    def layers_of(self, params: Tree) -> Tree:
        """The parameters that stay with their client."""
        flat = flatten_dict(params)
        return unflatten_dict({path: flat[path] for path in self.setting.own_layers})

    def optimiser(self, method: Method, local: Local) -> optax.GradientTransformationExtraArgs:
        """The optimiser of a method's local steps."""
        return make_optimiser(local, clip=self.clip, apart=method.traits().apart)

    def experiment_of(self, row) -> Any:
        """Number of the experiment that a row belongs to."""
        return 0 if self.experiments == 1 else row // self.setting.num_clients

    def of_experiment(self, tree: Tree, experiment) -> Tree:
        """Row of a tree with leading axis [E]; no gather where there is one experiment."""
        return alone(tree) if self.experiments == 1 else select(tree, experiment)

    def unlabelled(self, data: "Data") -> Unlabelled | None:
        """The public images, for hooks."""
        pipeline = self.public_pipeline
        if pipeline is None:
            return None

        def prepared(index, key):
            return prepare(pipeline, data.public[index], key, train=key is not None, dtype=self.dtype)

        return Unlabelled(data.public, prepared)

    def facts_of(self, data: "Data", row) -> Facts:
        """The facts about the client in a row."""
        clients, counts = self.setting.num_clients, data.class_counts
        client_data = at(counts, row), at(data.train.size, row)
        if self.experiments == 1:
            client, all_counts = (at(data.whole.numbers, row), data.whole.counts) if data.whole else (row, counts)
            return Facts(client, *client_data, all_counts)
        all_counts = select(counts.reshape(self.experiments, clients, -1), self.experiment_of(row))
        return Facts(row % clients, *client_data, all_counts)


class Samples(NamedTuple):
    """Images, labels and who owns them: row r has order[start : start + size[r]], with start from `start_of`."""

    images: jax.Array  # [n, H, W, channels] uint8
    labels: jax.Array  # [n] int32
    order: jax.Array  # [m] int32, the rows' index lists one after another
    start: jax.Array  # [R] int32, or [M] of the M rows that are present
    size: jax.Array  # [R] int32
    numbers: Any = ()  # [n] int32, of the samples in the data set, if only some of them are present
    rows: Any = ()  # [M] int32, which rows are present, if not all are; R for none


def start_of(samples: Samples, row: Any) -> Any:
    """Where a row's list begins in the order; 0 for a row that is not present.

    A shard has no starts of all R rows, as these would have to be sent with it each round.
    """
    if isinstance(samples.rows, tuple):
        return at(samples.start, row)
    return jnp.where(samples.rows == row, samples.start, 0).max()


class Whole(NamedTuple):
    """The federation of which the clients of a program are a part."""

    numbers: jax.Array  # [R] of these clients in it
    counts: jax.Array  # [K, C] training samples of all its clients


class Data(NamedTuple):
    """The federations of all experiments over one data set."""

    train: Samples
    test: Samples
    class_counts: jax.Array  # [R, C] training samples
    public: Any = ()  # [N, H, W, channels] uint8, if the run has public images
    held: Any = ()  # [R] how many validation samples follow the tests of each row, if they are on the device
    whole: Any = ()  # a `Whole` if the clients are a part of a federation


class State(NamedTuple):
    """What is carried from one round to the next."""

    servers: Tree  # [E, ...]
    clients: Tree  # [R, ...], or [J, ...] within a round whose clients were fetched from the host
    statistics: Tree  # what the engine keeps for each client: running statistics, `OPTIMISER` and `LAYERS`; or ()


def samples_of(images, labels, lists: Sequence[np.ndarray]) -> Samples:
    """Device arrays of one split; `lists` are the index lists of all rows."""
    rows = Lists.of(lists)
    order = rows.flat if len(rows.flat) else np.zeros(1)
    numbers = (np.asarray(x, np.int32) for x in (order, rows.starts, rows.sizes))
    return Samples(*map(jnp.asarray, (images, labels, *numbers)))


def tests_of(federations: Sequence[Federation]) -> tuple[Any, Any, Lists]:
    """Images, labels and lists of the tests; validation samples follow their client's tests, with labels C higher."""
    first, dataset = federations[0], federations[0].dataset
    tests = Lists.join([f.partition.test for f in federations])
    validation = first.validation
    if validation is None:
        return dataset.x_test, dataset.y_test, tests
    if len(federations) > 1:
        raise UserError("experiments with `validation` are trained one by one: their samples differ.")
    split_sizes = np.stack([tests.sizes, validation.sizes], 1)
    owners = [np.repeat(np.arange(len(tests)), sizes) for sizes in split_sizes.T]
    flat = np.concatenate([tests.flat, len(dataset.y_test) + np.arange(len(validation.flat))])
    lists = Lists(flat[np.argsort(np.concatenate(owners), kind="stable")], split_sizes.sum(1))
    labels = np.concatenate([dataset.y_test, dataset.y_train[validation.flat] + dataset.num_classes])
    return np.concatenate([dataset.x_test, dataset.x_train[validation.flat]]), labels, lists


def load_data(federations: Sequence[Federation], public: Any = None, whole: Whole | tuple[()] = ()) -> Data:
    """Device arrays of the federations of all experiments, which share a data set, and of public images."""
    dataset, partitions = federations[0].dataset, [f.partition for f in federations]
    train = samples_of(dataset.x_train, dataset.y_train, Lists.join([p.train for p in partitions]))
    test = samples_of(*tests_of(federations))
    counts = np.concatenate([f.class_counts for f in federations])
    validation = federations[0].validation
    return Data(
        train, test, jnp.asarray(counts, jnp.result_type(float)), () if public is None else jnp.asarray(public),
        () if validation is None else jnp.asarray(validation.sizes, jnp.int32), whole,
    )  # fmt: skip


class Report(NamedTuple):
    """What a round reports to the host."""

    loss: jax.Array  # [J] mean training loss of each job, 0 for a job without steps
    correct: jax.Array  # [J, C] (`Program.counts`) correct predictions of the model just trained, on its client's tests
    before: jax.Array  # [J, epochs, C] the same before each local epoch; no epochs if not requested


class Evaluation(NamedTuple):
    """Correct predictions; () where a method has no such model or it was not requested."""

    generic: Any  # [E, C] global model, whole test set
    personal: Any  # [R, C] personal model between rounds, own test set
    local: Any  # [R, C] personal model between rounds, whole test set
    further: dict[str, Any]  # [E, C] of each further global model by its name, whole test set


def overlaid(params: Tree, layers: Tree) -> Tree:
    """The parameters with some of them replaced."""
    return unflatten_dict(flatten_dict(params) | flatten_dict(layers)) if layers else params


def with_own(variables: Tree, statistics: Tree) -> Tree:
    """Variables with what the engine keeps for a client put in place: running statistics and layers of its own."""
    kept = dict(statistics)
    kept.pop(OPTIMISER, None)
    layers = kept.pop(LAYERS, {})
    return {**variables, **kept, "params": overlaid(variables["params"], layers)}


def put(tree: Tree, row, value: Tree, live: Any = None) -> Tree:
    """The tree with one row of every leaf's leading axis replaced, or several distinct rows.

    Args:
      row: a scalar, or [b].
      value: leaves [...], or [b, ...].
      live: [b] which of several rows to replace; the others are padding.
    """

    def write_one(x, v):
        return jax.lax.dynamic_update_index_in_dim(x, v.astype(x.dtype), row, 0, allow_negative_indices=False)

    def write(x, v):
        outside = x.shape[0] + jnp.arange(len(live))  # distinct rows, as XLA is promised
        rows = jnp.where(live, row, outside)
        return x.at[rows].set(v.astype(x.dtype), mode="drop", unique_indices=True)

    return jax.tree.map(write if jnp.ndim(row) else write_one, tree, value)


def block_of(array: Any, first, size: int) -> jax.Array:
    """Entries [b] of an array from `first` on; for a block of one, the entry itself."""
    return at(array, first) if size == 1 else jax.lax.dynamic_slice_in_dim(array, first, size)


def alone(tree: Tree) -> Tree:
    """The tree without its leading axis, of size 1."""
    return jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), tree)


def over(size: int, function: Callable, in_axes: Any = 0, name: str | None = None) -> Callable:
    """vmap over `size` items; a single item has no axis, so that XLA on a CPU can update it in place."""
    return function if size == 1 else jax.vmap(function, in_axes, axis_name=name)


def lift(function: Callable, size: int) -> Callable:
    """vmap over a leading axis; an axis of size 1 is removed instead, so that ordinary operations are compiled."""
    if size > 1:
        return jax.vmap(function)

    def single(*args):
        return jax.tree.map(lambda x: x[None], function(*alone(args)))

    return single


def sum_over_samples(function: Callable, samples: Samples, start, size, how: Pass, template: Tree = None) -> Tree:
    """Sum of function(index [B], mask [B]) over `size` entries of samples.order from `start`, in m batches.

    A batch takes every m-th entry, so a list sorted by class gives mixed batches, and none is nearly empty.
    The template has the shapes and dtypes of the function's result, which is traced once more to learn them without it.
    """
    batch, turns = how
    batches = turns or (size + batch - 1) // batch

    def part(i):
        position = i + batches * jnp.arange(batch)
        entry = jnp.clip(start + jnp.minimum(position, size - 1), 0, samples.order.shape[0] - 1)
        index = samples.order[entry]  # for a row without samples, another row's, masked
        return summable(function(index, position < size))

    if turns == 1:
        return part(0)
    if template is None:
        template = jax.eval_shape(part, 0)
    return jax.lax.fori_loop(0, batches, lambda i, total: jax.tree.map(jnp.add, total, part(i)), zeros_like(template))
