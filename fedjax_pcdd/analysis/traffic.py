"""What a method sends and what a client holds, counted from the program itself: FedMR's Table 3, and its section 4.5.

A job is traced, not run. Sent up is what `upload` returns, sent down is every array of the server's state that a
client's job depends on and that `aggregate` changes (what never changes is handed out once), held is what the local
steps and the upload read. Unit: scalars of one client in one round. Letters: P parameters, Q running statistics, C
classes, D features, N public images that a client speaks of in the round.
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
from fedjax_pcdd.engine.program import Tree, facts_of, unlabelled
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Context, Derived, Keys, Local, Message, Method, ServerContext
from fedjax_pcdd.methods.participant import PublicBatch, model_of
from fedjax_pcdd.models.classifier import Classifier, initialise
from fedjax_pcdd.trees import select, size

PUBLIC = 5000  # N where no run says it
PARTICIPANTS = 100  # of an exchange, more than anybody hears of


class Traffic(NamedTuple):
    """Scalars of one client in one round."""

    up: int  # sent to the server
    down: int  # sent by it
    client: int  # kept between rounds
    held: int  # in memory during local training, but for activations, optimiser and data
    model: int  # P + Q of the model that this method trains
    head: int  # of them in the head
    features: int  # D
    public: int = 0  # N


def traffic(method: Method, model: Classifier, image_shape: tuple[int, ...], public: int = PUBLIC) -> Traffic:
    """Count for one method.

    Args:
      method: as made from its options.
      model: the plain model, before `Method.build`.
      image_shape: (H, W, channels).
      public: N, of a run as `training.build.spoken_of` counts them.
    """
    simulated = _simulation(method, model, image_shape, public)
    method, (job, server, client, lane, sent) = select(simulated.methods, 0), _traced(simulated)
    needed = _used(lambda server, client: job.uploaded(server, client, job.trained(server, client)), server, client)
    changed = _changed(simulated, method, server, sent)
    reads = _used(job.steps, server, client, lane)
    leaves = zip(jax.tree.leaves(server), needed, changed, strict=False)
    down = sum(x.size for x, used, moves in leaves if used and moves)
    held = [x.size for x, used in zip(jax.tree.leaves((server, client)), reads, strict=False) if used]
    params = lane.variables["params"]
    traits = method.traits()
    exchanges, averaged = traits.exchange != "never", size(client) if traits.averages != "never" else 0
    logits, aims = _exchanged(simulated, method, client, image_shape, public) if exchanges else (0, 0)
    return Traffic(
        up=_travelling(sent) + logits + averaged, down=down + aims + averaged,
        client=size(client), held=size(lane.variables) + sum(held),
        model=size(_model_part(simulated, lane.variables)), head=size(params.get("head", {})),
        features=simulated.program.setting.feature_dim, public=public,
    )  # fmt: skip


def uploaded(method: Method, model: Classifier, image_shape: tuple[int, ...]) -> int:
    """Scalars that `Method.upload` sends, but for what is said of public images; arguments as `traffic`."""
    return _travelling(_traced(_simulation(method, model, image_shape, PUBLIC))[-1])


def _travelling(sent: Message) -> int:
    """Scalars of a message, but for what the server makes itself."""
    parts = jax.tree.leaves(sent, is_leaf=lambda part: isinstance(part, Derived))
    return size([part for part in parts if not isinstance(part, Derived)])


def _traced(simulated: Simulation) -> tuple["_Job", Tree, Tree, Any, Message]:
    """A job, and the shapes of the server before it, of the client, of the loaded lane, and of what is sent."""
    (server, client), job = _begun(simulated), _Job(simulated)
    lane = jax.eval_shape(job.loaded, server, client)
    return job, server, client, lane, jax.eval_shape(job.uploaded, server, client, lane)[1]


def _begun(simulated: Simulation) -> tuple[Tree, Tree]:
    """Shapes of the server before the first round, and of a client."""
    shape = simulated.image_shape
    fresh = jax.eval_shape(lambda: initialise(simulated.program.model, jax.random.key(0), shape))

    def begin():
        state = simulated.start(jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), fresh))
        return select(state.servers, 0), select(state.clients, 0)

    try:
        return jax.eval_shape(begin)
    except jax.errors.ConcretizationTypeError:  # a server that numpy makes, from a number drawn
        return jax.eval_shape(lambda state: state, begin())


class _Job:
    """The stages of one job as functions of the server's and the client's state."""

    def __init__(self, simulated: Simulation):
        jobs, batches = simulated.jobs(0)
        self.jobs = jax.tree.map(jnp.asarray, jobs)
        self.simulated, self.indices = simulated, jnp.asarray(batches[0][0])
        self.program = simulated.program

    def inputs(self, server: Tree) -> Inputs:
        one = self.simulated
        servers = jax.tree.map(lambda x: x[None], server)
        keys = jnp.repeat(one.keys[:1], len(self.jobs.row))
        return Inputs(one.methods, one.hyper, servers, one.data, self.jobs, keys, jnp.int32(0))

    def loaded(self, server: Tree, client: Tree):
        stacked = jax.tree.map(lambda x: x[None], client)
        return load(self.program, self.inputs(server), stacked, (), 0, 0)

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
        return select(self.simulated.methods, 0).upload(lane.variables, summary, context)


def _exchanged(
    simulated: Simulation, method: Any, client: Tree, image_shape: tuple[int, ...], number: int
) -> tuple[int, int]:
    """What a participant says of N public images, and what it is to imitate."""
    program = simulated.program
    images = jax.ShapeDtypeStruct((number, *image_shape), jnp.float32)
    public = jax.eval_shape(lambda: method.init_public(program.setting, number))

    def exchange(client, images):
        first = jnp.zeros((), jnp.int32)
        context = Context(
            program.model, program.setting, select(simulated.hyper, 0), public, client, model_of(client),
            facts_of(program, simulated.data, 0), first, first, first, first, Keys.of(jax.random.key(0)),
        )  # fmt: skip
        logits = method.say(model_of(client), PublicBatch(images, images, ()), context)
        of_all = jax.tree.map(lambda x: jnp.broadcast_to(x, (PARTICIPANTS, *x.shape)), logits)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), public)
        _, aims = method.agree(zeros, of_all, jnp.ones((PARTICIPANTS, program.setting.num_classes)))
        return logits, select(aims, 0)

    logits, aims = jax.eval_shape(exchange, client, images)
    return size(logits), size(aims)


def _used(function, *arguments) -> list[bool]:
    """Which leaves of the arguments the results depend on."""
    closed = jax.make_jaxpr(function)(*arguments)
    jaxpr: Any = closed.jaxpr
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]


def _changed(simulated: Simulation, method: Method, server: Tree, sent: Message) -> list[bool]:
    """Which leaves of the server's state a round changes."""
    jobs = simulated.cohort_size
    each = jax.tree.map(lambda x: jax.ShapeDtypeStruct((jobs, *x.shape), x.dtype), sent.each)
    message = Message(sent.mean, sent.total, each)
    weights, program = jax.ShapeDtypeStruct((jobs,), jnp.float32), simulated.program
    known = ServerContext(
        program.model, program.setting, select(simulated.hyper, 0), jnp.int32(0), jnp.arange(jobs), jnp.int32(jobs),
        jax.random.key(0), unlabelled(program, simulated.data),
    )  # fmt: skip

    def aggregate(server, message, weights):
        return method.aggregate(server, message, weights, known)

    jaxpr: Any = jax.make_jaxpr(aggregate)(server, message, weights).jaxpr
    before = jaxpr.invars[: len(jax.tree.leaves(server))]
    return [after is not old for after, old in zip(jaxpr.outvars, before, strict=True)]


def _model_part(simulated: Simulation, variables: Tree) -> Tree:
    """The variables that the model itself has; methods may train further ones."""
    own = jax.eval_shape(
        lambda: simulated.program.model.init(jax.random.key(0), jnp.zeros((1, *simulated.image_shape)), train=False)
    )
    return {name: tree for name, tree in own.items() if name in variables}


def _simulation(method: Method, model: Classifier, image_shape: tuple[int, ...], number: int) -> Simulation:
    """Two clients with a few made-up samples; nothing of it is run."""
    classes = model.num_classes
    labels = np.arange(2 * classes) % classes
    images = np.zeros((len(labels), *image_shape), np.uint8)
    halves = tuple(np.split(np.arange(len(labels)), 2))
    held = Lists.of(halves) if method.traits().validation else None
    parts = Federation(Dataset("none", images, labels, images, labels, classes), Partition(halves, halves), held)
    pipeline = Pipeline(codes=hasattr(model.backbone, "vocabulary"))
    public = (np.zeros((number, *image_shape), np.uint8), pipeline) if method.traits().public else None
    return Simulation(
        method.build(model), [Experiment(parts, method, Local(epochs=1, batch_size=4), 0)], pipeline=pipeline,
        cohort=2, public=public,
    )  # fmt: skip


def in_words(count: int, sizes: Traffic, classes: int) -> str:
    """A count as a sum of known sizes: P of the model (statistics included), C prototypes of D, N C logits, the head.

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
    known = {logits: "N C", 2 * logits: "2 N C", classes: "C", prototypes: "C D", prototypes + classes: "C D + C"}
    known |= {prototypes * sizes.features + prototypes + classes: "C(1+D+D²)", sizes.features: "D"}
    known |= {-sizes.head: "-head", 1 - sizes.head: "-head + 1"} if sizes.head else {}
    known |= {1: "1", 0: ""}
    fitting = [number for number in range(9) if count - number * sizes.model in known]
    number = fitting[0] if fitting else count // sizes.model
    rest = count - number * sizes.model
    terms = [f"{number}P" if number > 1 else "P"] * (number > 0) + [known.get(rest, str(rest))]
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
    """Scalars of one client in one round: messages of FedAvg and FedMR, batch-norm layers, and C D of the latter.

    The table lists the whole state of the published model, which has, beside parameters and running statistics, one
    counter of batches for each batch-norm layer, and of the prototypes [C, D] alone. Our models have no such counters,
    and our clients send the number of samples of each class [C] beside the prototypes; so the printed numbers follow.
    """

    fedavg: int
    fedmr: int
    counters: int
    prototypes: int

    @property
    def without_prototypes(self) -> int:
        """As the paper counts."""
        return self.fedavg + self.counters

    @property
    def with_prototypes(self) -> int:
        """As the paper counts."""
        return self.without_prototypes + self.prototypes


def upload(column: Column) -> Upload:
    """Counts for a column of the table; its model is traced, not run."""
    plain = models.build(column.model, num_classes=column.classes, image_shape=column.shape)
    fedavg, fedmr = (uploaded(METHODS[name](), plain, column.shape) for name in ("fedavg", "fedmr"))
    counters = models.sizes(plain, column.shape).full - fedavg
    return Upload(fedavg, fedmr, counters, fedmr - fedavg - column.classes)


def as_printed(sent: Upload) -> tuple[float, float, float]:
    """Millions without and with prototypes, and the additional cost in percent, rounded as the paper does.

    It adds rounded millions, and cuts the percentage of them off after three digits.

    >>> as_printed(Upload(11182410, 11187540, 20, 5120))
    (11.182, 11.187, 0.044)
    """
    without, more = (round(count / 1000) for count in (sent.without_prototypes, sent.prototypes))
    return without / 1000, (without + more) / 1000, math.floor(1e5 * more / without) / 1000
