"""What a method sends and a client holds, counted from the program itself: FedMR's Table 3 and section 4.5.

A job is traced, not run. Sent up is what `upload` returns; sent down is every array of the server's state that a
client's job depends on and that `aggregate` changes (what never changes is sent only once); held is what the local
steps and the upload read. A server's table with a row for each client, of which a client gets its own, counts whole,
for two clients. Unit: scalars of one client in one round. Letters: P parameters, Q running statistics, C classes, D
features, N public images for which a client sends outputs in the round.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from fedjax_pcdd import models
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Lists, Partition
from fedjax_pcdd.engine.jobs import Inputs, context_of, load, train_step
from fedjax_pcdd.engine.lanes import summary_of
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.program import State, Tree
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Context, Derived, Keys, Local, Message, Method, ServerContext
from fedjax_pcdd.methods.participant import PublicBatch, model_of
from fedjax_pcdd.models.classifier import Classifier, initialise
from fedjax_pcdd.trees import select, size

PUBLIC = 5000  # default of N, without a run
PARTICIPANTS = 100  # of an exchange, more than any participant receives from


class Traffic(NamedTuple):
    """Scalars of one client in one round."""

    up: int  # sent to the server
    down: int  # sent by the server
    client: int  # kept between rounds
    held: int  # in memory during local training, without activations, optimiser and data
    model: int  # P + Q of the model that this method trains
    head: int  # those of the head
    features: int  # D
    public: int = 0  # N


def traffic(method: Method, model: Classifier, image_shape: tuple[int, ...], public: int = PUBLIC) -> Traffic:
    """Count the traffic of one method.

    Args:
      model: the plain model, before `Method.build`.
      image_shape: (H, W, channels).
      public: N; for a run as counted by `training.build.public_outputs`.
    """
    job = _Job(method, model, image_shape, public)
    job_reads = job.used(lambda server, client: job.uploaded(server, client, job.trained(server, client)))
    reads = job.used(job.steps, job.lane)
    leaves = zip(jax.tree.leaves(job.server), job_reads, job.changed(), strict=False)
    down = sum(x.size for x, used, moves in leaves if used and moves)
    held_sizes = [x.size for x, used in zip(jax.tree.leaves((job.server, job.client)), reads, strict=False) if used]
    variables, client, traits = job.lane.variables, size(job.client), method.traits()
    own = {name: tree for name, tree in job.fresh.items() if name in variables}
    averaged = client if traits.averages != "never" else 0
    logits, aims = job.exchanged(public) if traits.exchange != "never" else (0, 0)
    return Traffic(
        up=job.travelling() + logits + averaged, down=down + aims + averaged,
        client=client, held=size(variables) + sum(held_sizes),
        model=size(own), head=size(variables["params"].get("head", {})),
        features=job.program.setting.feature_dim, public=public,
    )  # fmt: skip


class _Job:
    """A job of a method with two clients and a few made-up samples, which is traced and never run.

    Its stages are functions of the server's and the client's state. The attributes `server`, `client`, `lane`, `sent`
    and `fresh` are shapes: of the states before the first round, of the loaded lane, of the message, and of the model's
    own variables (methods may train further ones).
    """

    def __init__(self, method: Method, model: Classifier, image_shape: tuple[int, ...], public: int):
        classes = model.num_classes
        labels = np.arange(2 * classes) % classes
        images = np.zeros((len(labels), *image_shape), np.uint8)
        halves = tuple(np.split(np.arange(len(labels)), 2))
        traits, pipeline = method.traits(), Pipeline(codes=hasattr(model.backbone, "vocabulary"))
        validation = Lists.of(halves) if traits.validation else None
        data = Federation(
            Dataset("none", images, labels, images, labels, classes), Partition(halves, halves), validation
        )
        self.simulated = Simulation(
            method.build(model), [Experiment(data, method, Local(epochs=1, batch_size=4), 0)], pipeline=pipeline,
            cohort=2, public=(np.zeros((public, *image_shape), np.uint8), pipeline) if traits.public else None,
        )  # fmt: skip
        self.method, self.program = select(self.simulated.methods, 0), self.simulated.program
        jobs, batches = self.simulated.jobs(0)
        self.jobs, self.indices = jax.tree.map(jnp.asarray, jobs), jnp.asarray(batches[0][0])
        self.fresh = jax.eval_shape(lambda: initialise(self.program.model, jax.random.key(0), image_shape))
        try:
            self.server, self.client = jax.eval_shape(self.begun)
        except jax.errors.ConcretizationTypeError:  # NumPy makes the server's state, from a random number
            self.server, self.client = jax.eval_shape(lambda state: state, self.begun())
        self.lane = jax.eval_shape(self.loaded, self.server, self.client)
        self.sent: Message = jax.eval_shape(self.uploaded, self.server, self.client, self.lane)[1]

    def begun(self) -> tuple[Tree, Tree]:
        """The server's and a client's state before the first round."""
        state = self.simulated.start(jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), self.fresh))
        return select(state.servers, 0), select(state.clients, 0)

    def inputs(self, server: Tree) -> Inputs:
        simulated = self.simulated
        servers = jax.tree.map(lambda x: x[None], server)
        keys = jnp.repeat(simulated.keys[:1], len(self.jobs.row))
        return Inputs(simulated.methods, simulated.hyper, servers, simulated.data, self.jobs, keys, jnp.int32(0))

    def loaded(self, server: Tree, client: Tree):
        stacked = jax.tree.map(lambda x: x[None], client)
        return load(self.program, self.inputs(server), State((), stacked, ()), 0, 0)

    def steps(self, server: Tree, client: Tree, lane):
        """One local step and the upload, given the loaded lane."""
        lane = lane._replace(client=client)
        lane = train_step(self.program, self.inputs(server), lane, self.indices, 0)
        return lane.variables, lane.optimiser, lane.loss, self.uploaded(server, client, lane)

    def trained(self, server: Tree, client: Tree):
        return train_step(self.program, self.inputs(server), self.loaded(server, client), self.indices, 0)

    def uploaded(self, server: Tree, client: Tree, lane) -> tuple[Tree, Message]:
        inputs = self.inputs(server)
        lane = lane._replace(client=client)
        context = context_of(self.program, inputs, lane, 1)
        summary = summary_of(self.program, inputs, lane, context)
        return self.method.upload(lane.variables, summary, context)

    def travelling(self) -> int:
        """Scalars of the message, without those that the server derives itself."""
        leaves = jax.tree.leaves(self.sent, is_leaf=lambda part: isinstance(part, Derived))
        return size([part for part in leaves if not isinstance(part, Derived)])

    def exchanged(self, number: int) -> tuple[int, int]:
        """Scalars of a participant's outputs for N public images, and of the targets that it imitates."""
        program, method = self.program, self.method
        images = jax.ShapeDtypeStruct((number, *self.simulated.image_shape), jnp.float32)
        public = jax.eval_shape(lambda: method.init_public(program.setting, number))

        def exchange(client, images):
            zero = jnp.zeros((), jnp.int32)
            context = Context(
                program.model, program.setting, select(self.simulated.hyper, 0), public, client, model_of(client),
                program.facts_of(self.simulated.data, 0), zero, zero, zero, zero, Keys.of(jax.random.key(0)),
            )  # fmt: skip
            logits = method.say(model_of(client), PublicBatch(images, images, ()), context)
            all_logits = jax.tree.map(lambda x: jnp.broadcast_to(x, (PARTICIPANTS, *x.shape)), logits)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), public)
            _, aims = method.agree(zeros, all_logits, jnp.ones((PARTICIPANTS, program.setting.num_classes)))
            return logits, select(aims, 0)

        logits, aims = jax.eval_shape(exchange, self.client, images)
        return size(logits), size(aims)

    def used(self, function, *arguments) -> list[bool]:
        """For each leaf of server, client and further arguments whether the results depend on it."""
        jaxpr: Any = jax.make_jaxpr(function)(self.server, self.client, *arguments).jaxpr
        return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]

    def changed(self) -> list[bool]:
        """For each leaf of the server's state whether a round changes it."""
        jobs, program = self.simulated.cohort_size, self.program
        stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((jobs, *x.shape), x.dtype), self.sent.each)
        context = ServerContext(
            program.model, program.setting, select(self.simulated.hyper, 0), jnp.int32(0), jnp.arange(jobs),
            jnp.int32(jobs), jax.random.key(0), program.unlabelled(self.simulated.data),
        )  # fmt: skip
        jaxpr: Any = jax.make_jaxpr(lambda *sent: self.method.aggregate(*sent, context))(
            self.server, self.sent._replace(each=stacked), jax.ShapeDtypeStruct((jobs,), jnp.float32)
        ).jaxpr
        before = jaxpr.invars[: len(jax.tree.leaves(self.server))]
        return [after is not old for after, old in zip(jaxpr.outvars, before, strict=True)]


def in_words(count: int, sizes: Traffic, classes: int) -> str:
    """Write a count as a sum of known sizes: P of the model (with statistics), C prototypes of D, N C logits, the head.

    >>> in_words(130, Traffic(0, 0, 0, 0, 100, 33, 8), 3)
    'P + 30'
    >>> in_words(127, Traffic(0, 0, 0, 0, 100, 33, 8), 3), in_words(319, Traffic(0, 0, 0, 0, 100, 33, 8), 3)
    ('P + C D + C', 'P + C(1+D+D²)')
    >>> in_words(224, Traffic(0, 0, 0, 0, 100, 33, 8), 3)
    '2P + C D'
    >>> in_words(168, Traffic(0, 0, 0, 0, 100, 33, 8), 3)
    '2P - head + 1'
    >>> in_words(136, Traffic(0, 0, 0, 0, 100, 33, 8, public=12), 3)
    'P + N C'
    """
    prototypes, logits = classes * sizes.features, sizes.public * classes
    names = {logits: "N C", 2 * logits: "2 N C", classes: "C", prototypes: "C D", prototypes + classes: "C D + C"}
    names |= {prototypes * sizes.features + prototypes + classes: "C(1+D+D²)", sizes.features: "D"}
    names |= {-sizes.head: "-head", 1 - sizes.head: "-head + 1"} if sizes.head else {}
    names |= {1: "1", 0: ""}
    fitting = [number for number in range(9) if count - number * sizes.model in names]
    number = fitting[0] if fitting else count // sizes.model
    remainder = count - number * sizes.model
    terms = [f"{number}P" if number > 1 else "P"] * (number > 0) + [names.get(remainder, str(remainder))]
    return " + ".join(filter(None, terms)).replace("+ -", "- ") or "0"


class Column(NamedTuple):
    """A data set of FedMR's Table 3: the paper's model, C, and (H, W, channels)."""

    model: str
    classes: int
    shape: tuple[int, int, int]


COLUMNS = {
    "fmnist": Column("resnet18", 10, (28, 28, 1)),
    "svhn": Column("resnet18", 10, (32, 32, 3)),
    "cifar10": Column("resnet18", 10, (32, 32, 3)),
    "cifar100": Column("wrn28_10", 100, (32, 32, 3)),
    "isic2019": Column("efficientnet_b0_isic", 8, (200, 200, 3)),
}


class Upload(NamedTuple):
    """Scalars of one client in one round: messages of FedAvg and FedMR, batch-norm counters, and FedMR's C D.

    The table lists the whole state of the published model, which has, beside parameters and running statistics, one
    batch counter per batch-norm layer, and the prototypes [C, D] alone. Our models have no such counters, and our
    clients also send the number of samples of each class [C]; the printed numbers follow from ours.
    """

    fedavg: int
    fedmr: int
    counters: int
    prototypes: int

    @property
    def without_prototypes(self) -> int:
        """FedAvg's message as the paper counts."""
        return self.fedavg + self.counters

    @property
    def with_prototypes(self) -> int:
        """FedMR's message as the paper counts."""
        return self.without_prototypes + self.prototypes


def upload(column: Column) -> Upload:
    """Counts for a column of the table; its model is traced, not run."""
    model = models.build(column.model, num_classes=column.classes, image_shape=column.shape)
    fedavg, fedmr = (_Job(METHODS[name](), model, column.shape, PUBLIC).travelling() for name in ("fedavg", "fedmr"))
    counters = models.sizes(model, column.shape).full - fedavg
    return Upload(fedavg, fedmr, counters, fedmr - fedavg - column.classes)


def as_printed(sent: Upload) -> tuple[float, float, float]:
    """Millions without and with prototypes, and the additional cost in percent, rounded as the paper does.

    The paper adds rounded numbers of millions, and truncates their percentage to three digits.

    >>> as_printed(Upload(11182410, 11187540, 20, 5120))
    (11.182, 11.187, 0.044)
    """
    without, prototypes = (round(count / 1000) for count in (sent.without_prototypes, sent.prototypes))
    return without / 1000, (without + prototypes) / 1000, math.floor(1e5 * prototypes / without) / 1000
