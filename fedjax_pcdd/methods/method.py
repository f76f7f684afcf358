"""The contract of a method: a frozen dataclass of hyper-parameters whose methods are the hooks of a federated round.

Every default is FedAvg's, so a method's file overrides only what distinguishes it. Hooks are pure functions of
pytrees, written for ONE experiment and, where they take a client, for ONE client; the engine lifts them over lanes,
clients and experiments. In the order of a run:

    before training   traits, build, configure, init_server, init_client, weight
    each client       download -> local_update x steps -> summarise -> upload
    the server        aggregate
    accuracy          generic_variables, further_models, personal_variables, logits, fine_tuner

A local step is `local_update(evaluate, step, variables, batch, context)`. `evaluate(variables)` gives loss, state and
gradients of the objective: `loss` (a forward pass, then `classification` + `penalty`) + `regulariser`.
`step(gradients)` gives the optimiser's updates, after clipping and weight decay, for what is `trainable`. FedAvg
evaluates once and steps once; corrected gradients, a second gradient elsewhere, and updates that are changed
afterwards are written there.

A method that only adds a term to the loss overrides `penalty`, and nothing else. Letters: B batch, C classes, D
features, K clients, S clients of the round (cohort).
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import cross_entropy, focal_loss
from fedjax_pcdd.methods.checks import scalar
from fedjax_pcdd.models.classifier import Classifier, Outputs, forward

Tree = Any
Scope = Literal["generic", "personal", "local"]


class Summary(NamedTuple):
    """How a client's training data are passed over after local training, for `summarise`.

    Attributes:
      augmented: whether images are augmented as in training.
      train: in training mode, so in batches of B; else in batches of any size.
      last: nothing but zeros before so many last rounds, so left out there: `upload` may be given (); 0: never.
    """

    augmented: bool = False
    train: bool = False
    last: int = 0


class Traits(NamedTuple):
    """What the engine and the reports must know of a method before anything is traced.

    Attributes:
      paper: authors and where it was published.
      target: the accuracy that the paper optimises.
      global_model: whether there is one; where not, GA is the mean of the local models on the global test set.
      fine_tunes: whether PA is that of models fine-tuned by each client, by `fine_tuner`.
      personal_model: whether PA is of the model just trained (local) or of `personal_variables` (server).
      protocol: of PA, where an option of the method's own says it.
      own_loss: whether its supervised term is another softmax, which `loss` and `class_weights` do not change.
      clip: largest norm of the gradient, unless the user says otherwise.
      rates: learning rates beside `lr` that may be too large.
      ensemble: whether `ga_ensemble`, of the mean of all clients' softmax outputs, is recorded beside GA.
      recorded: scalars of the server, by their fields, that each round's metrics have.
      apart: parts of the parameters that are clipped each by itself.
      resumed: the only parts of the parameters whose optimiser may be kept; None: all.
      epochs: local epochs of a round in place of the E asked for.
      least_epochs: local epochs that there are at least.
      more_epochs: local epochs after all these.
      summary: a pass over the local data after training; None for no pass.
      public: whether hooks read the public images in their context.
      validation: whether hooks read the client's validation samples in their context.
      own_models: whether clients keep their models, perhaps of different architectures.
      exchange: on public images, before or after local training; see `participant.py`.
      targets: of an exchange: made from every batch, or once a round from all.
      averages: which own models are averaged, where all are alike: as exchanged, or as trained.
      pauses: whether there are rounds that train nothing, in which a server's further step would go on.
      transfer_epochs: on labelled public images, before any other training of own models.
      common_start: whether own models of one architecture begin alike.
      common_server: whether the servers of groups of architectures are told what the clients of all groups sent.
      common_features: whether what is sent has D features, so architectures must have as many.
    """

    paper: str = ""
    target: Literal["generic", "personal", "both"] = "generic"
    global_model: bool = True
    fine_tunes: bool = True
    personal_model: Literal["local", "server"] = "local"
    protocol: Literal["last", "received"] | None = None
    own_loss: bool = False
    clip: float | None = None
    rates: tuple[str, ...] = ()
    ensemble: bool = False
    recorded: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    resumed: tuple[str, ...] | None = None
    epochs: int | None = None
    least_epochs: int = 0
    more_epochs: int = 0
    summary: Summary | None = None
    public: bool = False
    validation: bool = False
    own_models: bool = False
    exchange: Literal["never", "before", "after"] = "never"
    targets: Literal["batch", "round"] = "batch"
    averages: Literal["never", "exchanged", "trained"] = "never"
    pauses: bool = False
    transfer_epochs: int = 0
    common_start: bool = False
    common_server: bool = False
    common_features: bool = False

    @property
    def needs_public(self) -> bool:
        """Whether a run has to have public images."""
        return self.public or self.exchange != "never"


class Setting(NamedTuple):
    """What is fixed for all experiments of one program (static).

    Attributes:
      num_classes: C.
      feature_dim: D.
      num_clients: K.
      rounds: T.
      epochs: E, of the client with the most.
      batch_size: B.
      normalised: whether the backbone has normalisation layers, over batches or groups.
      one_class_clients: clients with samples of a single class.
      fewest_classes: that a client with samples has, at least.
      rarest_class: training samples that all clients have of it together.
      own_weights: whether clients weigh in a mean as `Method.weight` says.
      steps: local steps of a round, of the client with the most; 0 where that is not known.
      cohort: S, clients a round, of those with samples; 0 where that is not known.
      own_layers: parameters that stay with their client, by their paths.
    """

    num_classes: int
    feature_dim: int
    num_clients: int
    rounds: int
    epochs: int
    batch_size: int
    normalised: bool
    one_class_clients: int = 0
    fewest_classes: int = 1
    rarest_class: int = 2**31
    own_weights: bool = True
    steps: int = 0
    cohort: int = 0
    own_layers: tuple[tuple[str, ...], ...] = ()


class Facts(NamedTuple):
    """What is known of one client before training.

    Attributes:
      client: scalar int32, its index in [0, K).
      class_counts: [C] training samples of each class.
      num_samples: scalar, n_k.
      federation_counts: [K, C] of all clients: only for constants that a server hands out once.
    """

    client: jax.Array
    class_counts: jax.Array
    num_samples: jax.Array
    federation_counts: jax.Array


class Batch(NamedTuple):
    """One mini-batch, prepared (augmented, normalised).

    Attributes:
      images: [B, H, W, channels].
      labels: [B] integers in [0, C).
      mask: [B] 1 for a sample, 0 for padding.
    """

    images: jax.Array
    labels: jax.Array
    mask: jax.Array


LastBatch = Literal["drop", "keep", "top_up", "strict"]


@struct.dataclass
class Local:
    """Local training, from the options to the step: what every client does in a round.

    Floats are traced: for hooks scalars of this round, in a simulation [E], with momentum 0 under Adam, which has none
    of SGD's kind, and a clip of inf for None. The rest is static, and equal in all experiments.
    """

    epochs: int | tuple[int, ...] = struct.field(default=10, pytree_node=False)  # of all clients, or of each
    batch_size: int = struct.field(default=100, pytree_node=False)
    last_batch: LastBatch = struct.field(default="drop", pytree_node=False)
    optimizer: str = struct.field(default="sgd", pytree_node=False)
    lr: Any = 0.01
    momentum: Any = 0.9
    weight_decay: Any = 1e-4
    clip: Any = None  # largest global norm of the raw gradient
    shuffle: bool = struct.field(default=True, pytree_node=False)  # a fresh permutation each epoch, else as stored
    lr_steps: tuple[int, ...] = struct.field(default=(), pytree_node=False)  # rounds from which lr_decay applies again
    lr_decay: float = struct.field(default=0.1, pytree_node=False)
    local_steps: int | None = struct.field(default=None, pytree_node=False)  # of a round, one epoch to hooks
    loss: Literal["ce", "focal"] = struct.field(default="ce", pytree_node=False)
    focal_gamma: float = struct.field(default=2.0, pytree_node=False)
    class_weights: Literal["none", "pooled", "local"] = struct.field(default="none", pytree_node=False)


class Keys(NamedTuple):
    """Streams of random numbers that never meet; each is a key for one use, or to be split."""

    augment: jax.Array  # of the images; the engine's
    dropout: jax.Array  # of forward passes in training mode
    method: jax.Array  # of a method's own draws

    @classmethod
    def of(cls, key: jax.Array) -> "Keys":
        """The streams of a key, which is used for nothing else."""
        return cls(*(jax.random.fold_in(key, i) for i in range(len(cls._fields))))


class Unlabelled(NamedTuple):
    """Public images, whose labels nobody has."""

    images: jax.Array  # [N, H, W, channels] uint8
    prepare: Callable[..., jax.Array]  # of index [B] and a key, None for no augmentation: a model's input [B, ...]


class Context(NamedTuple):
    """What a hook may look at while one client trains.

    Attributes:
      model: as the method built it.
      setting: what is fixed for all experiments of the program.
      hyper: local training in this round.
      server: as `init_server` made it, at the start of the round.
      client: this client's own state, at the start of the round.
      start: the variables that local training started from (w^t), with own layers as they are now.
      facts: of this client.
      epoch: local epoch, from 0.
      epochs: local epochs of this client, of which `Setting.epochs` is the most of any.
      step: local step, from 0.
      round: communication round, from 0.
      keys: of this step.
      public: where the run has public images.
      validation: the sum of a function over batches of this client's validation samples, where `Traits.validation` asks
        for them.
      untouched: w^t with own layers as they were, where clients have such layers.
      exchanging: in an exchange on public images, see `participant.py`; static.
    """

    model: Classifier
    setting: Setting
    hyper: Local
    server: Tree
    client: Tree
    start: Tree
    facts: Facts
    epoch: jax.Array
    epochs: jax.Array
    step: jax.Array
    round: jax.Array
    keys: Keys
    public: Unlabelled | None = None
    validation: Callable[[Callable[[Batch], Tree]], Tree] | None = None
    untouched: Tree = None
    exchanging: bool = False

    @property
    def received(self) -> Tree:
        """The model that local training started from, for what it answers: `start` with own layers as they were."""
        return self.start if self.untouched is None else self.untouched


class ServerContext(NamedTuple):
    """What the server may look at when it aggregates.

    Attributes:
      model: as the method built it.
      setting: what is fixed for all experiments of the program.
      hyper: of local training in this round.
      round: communication round, from 0.
      clients: [S] the cohort, indices in [0, K).
      count: scalar, how many of them trained and sent a message.
      key: of this round.
      public: where the run has public images.
    """

    model: Classifier
    setting: Setting
    hyper: Local
    round: jax.Array
    clients: jax.Array
    count: jax.Array
    key: jax.Array
    public: Unlabelled | None = None


class Evaluated(NamedTuple):
    """The objective on one batch."""

    loss: jax.Array  # scalar, as `Method.loss` gives it
    state: Tree  # collections of the variables after this batch, as {"batch_stats": ...} or {}
    gradients: Tree  # of the objective with `regulariser`, as the parameters


class Step(NamedTuple):
    """What the local optimiser makes of gradients."""

    updates: Tree  # to be added to the parameters
    optimiser: Tree  # the optimiser's next state


class Message(NamedTuple):
    """What a client sends. `mean` and `total` are reduced as clients finish, so a cohort is never stacked for them.

    Attributes:
      mean: reduced to sum_k p_k * mean_k.
      total: reduced to sum_k total_k.
      each: stacked to [S, ...].
    """

    mean: Tree = ()
    total: Tree = ()
    each: Tree = ()


class Derived(NamedTuple):
    """A part of a message that a server with the clients' models makes itself: it is not counted as sent."""

    value: Tree


class Server(NamedTuple):
    """The server of a method that shares one model and nothing else."""

    variables: Tree


def hyperparameter(
    default, *, help: str, symbol: str = "", low=None, high=None, above=None, static: bool = False,
    several: bool = False,
):  # fmt: skip
    """A field of a method: traced (changing it recompiles nothing) unless `static`.

    Args:
      default: None means that `Method.configure` chooses.
      help: meaning and unit, for the command line and the documentation.
      symbol: the paper's symbol.
      low, high: inclusive bounds, checked by the command line.
      above: exclusive bound.
      static: True where another value is another program (a flag, a choice of formula).
      several: one value may have commas, which a sweep leaves in it.
    """
    metadata = {"help": help, "symbol": symbol, "low": low, "high": high, "above": above, "static": static}
    metadata["several"] = several
    return struct.field(pytree_node=not static, default=default, metadata=metadata)


def class_weights(facts: Facts, kind: Literal["none", "pooled", "local"]) -> jax.Array | None:
    """n / n_c of all clients' training samples or of this one's, [C], 0 for a class without any; None for `none`."""
    if kind == "none":
        return None
    counts = facts.federation_counts.sum(0) if kind == "pooled" else facts.class_counts
    return jnp.where(counts > 0, counts.sum() / jnp.maximum(counts, 1), 0.0)


class Described:
    """The docstring of a method: as written, then its hyper-parameters, of which the fields know what they mean."""

    def __init__(self, text: str | None):
        """Args: text: as written."""
        self.text = inspect.cleandoc(text or "")

    def __get__(self, method: Any, cls: type) -> str:
        """The whole."""
        known = [one for one in dataclasses.fields(cls) if "help" in one.metadata]
        return "\n".join([self.text, *["\nHyper-parameters:"] * bool(known), *map(_in_words, known)])


def _in_words(field: dataclasses.Field) -> str:
    known, signs = field.metadata, {"low": "at least", "above": "above", "high": "at most"}
    symbol = f" ({known['symbol']})" if known["symbol"] else ""
    bounds = " and ".join(f"{words} {known[key]:g}" for key, words in signs.items() if known[key] is not None)
    return f"  {field.name}{symbol}: {known['help']}{f' [{bounds}]' if bounds else ''}; default: {field.default!r}."


@struct.dataclass
class Method:
    """FedAvg's hooks; see the module's text for the order in which a run calls them."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        cls.__doc__ = Described(vars(cls).get("__doc__"))  # pyright: ignore[reportAttributeAccessIssue]

    def __new__(cls, *_: Any, **__: Any) -> "Method":
        """UserError for a class that is no dataclass of Flax itself: its fields would be nobody's, or not traced."""
        if "_flax_dataclass" not in vars(cls):
            kind = "a dataclass, but none of Flax" if "__dataclass_fields__" in vars(cls) else "no dataclass"
            raise UserError(f"{cls.__name__} is {kind}: write @flax.struct.dataclass above `class {cls.__name__}`.")
        return super().__new__(cls)

    def traits(self) -> Traits:
        """What must be known before anything is traced; depends on static fields alone."""
        return Traits()

    def build(self, model: Classifier) -> Classifier:
        """The model this method trains, made from the plain one (another neck, no bias, no head)."""
        return model

    def configure(self, setting: Setting, hyper: Local) -> tuple["Method", list[str]]:
        """The method with defaults that depend on the setting, and advice; UserError for what cannot work.

        Args:
          hyper: of the first round, with values, not traced.

        Returns:
          The method, and one sentence for each setting that runs but is unstable or pointless.
        """
        return self, []

    def init_server(self, setting: Setting, variables: Tree, class_counts: jax.Array, key: jax.Array) -> Tree:
        """Server state from the initial variables and all clients' class counts [K, C]."""
        return Server(variables)

    def init_client(self, setting: Setting, server: Tree, facts: Facts, key: jax.Array) -> Tree:
        """State that this client keeps between rounds; () for none."""
        return ()

    def weight(self, facts: Facts) -> jax.Array:
        """Aggregation weight before normalisation over the cohort: n_k."""
        return facts.num_samples

    def download(self, server: Tree, client: Tree) -> Tree:
        """Variables that local training starts from.

        Beside the model's they may have further parts of "params", and collections that steps update without gradient;
        the model ignores both, and `upload` takes them away again.
        """
        return server.variables

    def classification(self, outputs: Outputs, batch: Batch, context: Context) -> jax.Array:
        """The supervised term, a scalar: mean cross-entropy over the batch, or what the options put in its place."""
        local = context.hyper
        if (local.loss, local.class_weights) == ("ce", "none"):
            return cross_entropy(outputs.logits, batch.labels, mask=batch.mask)
        gamma = local.focal_gamma if local.loss == "focal" else 0.0
        weights = class_weights(context.facts, local.class_weights)
        return focal_loss(outputs.logits, batch.labels, gamma=gamma, weights=weights, mask=batch.mask)

    def penalty(self, variables: Tree, outputs: Outputs, batch: Batch, context: Context) -> jax.Array | float:
        """What the method adds to the supervised term, a scalar, already weighted."""
        return 0.0

    def loss(self, variables: Tree, batch: Batch, context: Context) -> tuple[jax.Array, Tree]:
        """Local objective but for `regulariser`, and the collections of the variables after this batch."""
        outputs, state = train_forward(variables, batch, context)
        return objective(self, variables, outputs, batch, context), state

    def regulariser(self, params: Tree, context: Context) -> jax.Array | float:
        """A term on the trainable parameters alone, a scalar, already weighted.

        Only its gradient is computed: recorded losses are without it (and with `penalty`).
        """
        return 0.0

    def trainable(self, params: Tree, context: Context) -> Tree | None:
        """Which parameters move in this step: a tree of booleans (traced or not), None for all.

        What is frozen takes neither gradient nor weight decay nor what is left of its momentum.
        """
        return None

    def local_update(
        self,
        evaluate: Callable[[Tree], Evaluated],
        step: Callable[..., Step],
        variables: Tree,
        batch: Batch,
        context: Context,
    ) -> tuple[jax.Array, Tree, Step]:
        """One local step.

        Args:
          evaluate: of variables: loss, state and gradients of the objective on this batch.
          step: of gradients, as the parameters: the optimiser's updates after clipping and weight decay. What is given
            as `unclipped`, too, joins the gradient after it was clipped.
          variables: before the step.

        Returns:
          The loss that is recorded, the collections of the variables that change, and the step to be taken.
        """
        loss, state, gradients = evaluate(variables)
        return loss, state, step(gradients)

    def summarise(self, variables: Tree, batch: Batch, context: Context) -> Tree:
        """Statistics of one batch of local data under the trained variables; summed over the client's data.

        Called where `traits().summary` asks for this pass, and says how the batches are made.
        """
        return ()

    def upload(self, variables: Tree, summary: Tree, context: Context) -> tuple[Tree, Message]:
        """The client's next state and its message, after the last local step."""
        return context.client, Message(mean=variables)

    def aggregate(self, server: Tree, message: Message, weights: jax.Array, context: ServerContext) -> Tree:
        """The next server from the reduced messages; weights [S] are the normalised p_k."""
        return server._replace(variables=message.mean)

    def generic_variables(self, server: Tree) -> Tree:
        """Variables of the global model."""
        return server.variables

    def further_models(self, server: Tree) -> dict[str, Tree]:
        """Variables of other models of the server whose accuracy is recorded beside GA, as `ga_<name>`, by name."""
        return {}

    def personal_variables(self, server: Tree, client: Tree) -> Tree:
        """Variables of a client's personal model between rounds."""
        return server.variables

    def logits(
        self,
        model: Classifier,
        variables: Tree,
        images: jax.Array,
        server: Tree,
        client: Tree = (),
        facts: Facts | None = None,
        *,
        scope: Scope = "generic",
    ) -> jax.Array:
        """Logits [B, C] of a trained model.

        Args:
          variables: as `generic_variables`, `further_models`, `personal_variables` or local training gave them.
          client, facts: of a client's own model; () and None of a server's.
          scope: "generic", a model of the server, which is to know all classes; "personal", a client's own model on its
            own data (PA); "local", a client's own model on all classes (GA of methods without a global model).
        """
        return forward(model, variables, images, train=False)[0].logits

    def fine_tuner(self, setting: Setting, epochs: int) -> "Method":
        """The method by which every client fine-tunes for PA: the run's supervised loss alone, on all parameters.

        It starts from the best and the last global model, or from the last state as it is where this method has no
        global model. If it has none itself, GA becomes the mean over clients of the fine-tuned models'.

        Args:
          epochs: as the user asks.
        """
        return Method()


def train_forward(variables: Tree, batch: Batch, context: Context) -> tuple[Outputs, Tree]:
    """The model on a batch in training mode: outputs, and new running statistics or {}."""
    key = context.keys.dropout
    return forward(context.model, variables, batch.images, train=True, mask=batch.mask, key=key)


def objective(method: Method, variables: Tree, outputs: Outputs, batch: Batch, context: Context) -> jax.Array:
    """`classification` + `penalty` of a method on a batch, a scalar."""
    supervised = scalar(method, "classification", method.classification(outputs, batch, context))
    return supervised + scalar(method, "penalty", method.penalty(variables, outputs, batch, context))
