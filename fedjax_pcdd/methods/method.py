"""The contract of a method: a frozen dataclass of hyper-parameters whose methods are the hooks of a federated round.

Every default is FedAvg's, so a method's file overrides only what distinguishes it. Hooks are pure functions of
pytrees, written for ONE experiment and, where they take a client, for ONE client; the engine vectorises them over
lanes, clients and experiments. In the order of a run:

    before training   traits, build, configure, init_server, init_client, weight
    each client       download -> local_update x steps -> summarise -> upload
    the server        aggregate
    evaluation        generic_variables, further_models, personal_variables, logits, fine_tuner

A local step is `local_update(evaluate, step, variables, batch, context)`. `evaluate(variables)` returns loss, state and
gradients of the objective: `loss` (a forward pass, then `classification` + `penalty`) + `regulariser`.
`step(gradients)` returns the optimiser's updates, after clipping and weight decay, for the parameters that are
`trainable`. FedAvg evaluates once and steps once; a method that corrects gradients, takes a second gradient elsewhere,
or changes the updates afterwards overrides `local_update`.

A method that only adds a term to the loss overrides `penalty` and nothing else. Letters: B batch, C classes, D
features, K clients, S clients of the round (cohort).
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
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
    """The pass over a client's training data after local training, for `summarise`.

    Attributes:
      augmented: whether images are augmented as in training.
      train: whether the model is in training mode, with batches of B; otherwise batches may have any size.
      last: how many of the last rounds make this pass. Before them the sums count as zeros, the pass is left out, and
        `upload` may be given (). 0: every round makes it.
    """

    augmented: bool = False
    train: bool = False
    last: int = 0


class Traits(NamedTuple):
    """What the engine and the reports must know about a method before anything is traced.

    Attributes:
      paper: authors and where it was published.
      target: the accuracy that the paper optimises.
      global_model: whether there is one; if not, GA is the mean accuracy of the local models on the global test set.
      fine_tunes: whether PA is measured after every client has fine-tuned, by `fine_tuner`.
      personal_model: whether PA is measured on the model just trained (local) or on `personal_variables` (server).
      protocol: the PA protocol, if one of the method's own options sets it.
      own_loss: whether its supervised term is a different softmax loss, which `loss` and `class_weights` do not change.
      clip: largest norm of the gradient, unless the user sets another.
      ensemble: whether `ga_ensemble`, the GA of the mean of all clients' softmax outputs, is recorded beside GA.
      recorded: names of the scalar fields of the server that are recorded in each round's metrics.
      apart: parts of the parameters that are clipped separately, each by its own norm.
      resumed: the only parts of the parameters whose optimiser state may be kept between rounds; None: all.
      epochs: local epochs of a round, in place of the E asked for.
      least_epochs: minimum number of local epochs.
      more_epochs: local epochs that are added to these.
      summary: the pass over the local data after training; None for no pass.
      public: whether hooks read the public images in their context.
      validation: whether hooks read the client's validation samples in their context.
      own_models: whether each client keeps its own model, perhaps of different architectures.
      exchange: whether logits on public images are exchanged, before or after local training; see `participant.py`.
      targets: whether the targets of an exchange are made for every batch, or once a round for all public images.
      averages: whether own models, all of one architecture, are averaged, after the exchange or after local training.
      pauses: whether the last round trains nothing and only makes a further model (CCVR's calibrated one); refused with
        a server step, which would still move the model in that round.
      transfer_epochs: epochs on labelled public images, before any other training of own models.
      common_start: whether own models of one architecture share their initialisation.
      common_server: whether the server of each group of one architecture receives the messages of all groups.
      common_features: whether what is sent has D features, so that all architectures must have the same D.
    """

    paper: str = ""
    target: Literal["generic", "personal", "both"] = "generic"
    global_model: bool = True
    fine_tunes: bool = True
    personal_model: Literal["local", "server"] = "local"
    protocol: Literal["last", "received"] | None = None
    own_loss: bool = False
    clip: float | None = None
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
        """Whether a run needs public images."""
        return self.public or self.exchange != "never"


class Setting(NamedTuple):
    """What is fixed for all experiments of one program (static).

    Attributes:
      num_classes: C.
      feature_dim: D.
      num_clients: K.
      rounds: T.
      epochs: E, the largest number of local epochs of any client; of several architectures, of those with this one, as
        are B and the steps.
      batch_size: B.
      normalised: whether the backbone has normalisation layers, over batches or groups.
      one_class_clients: number of clients whose samples are all of one class.
      fewest_classes: smallest number of classes of any client that has samples.
      most_classes: largest number of classes of any client.
      rarest_class: training samples, over all clients, of the class that has the fewest.
      own_weights: whether means over clients are weighted by `Method.weight`.
      steps: largest number of local steps of any client in a round; 0 if not known.
      cohort: S, clients per round, among those with samples; 0 if not known.
      own_layers: paths of the parameters that stay with their client.
      keeps_optimiser: whether the local optimiser's state stays with the client (`optimizer_state=kept`).
      image_shape: of what the model reads, without B, as (H, W, channels); () if not known.
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
    most_classes: int = 2**31
    rarest_class: int = 2**31
    own_weights: bool = True
    steps: int = 0
    cohort: int = 0
    own_layers: tuple[tuple[str, ...], ...] = ()
    keeps_optimiser: bool = False
    image_shape: tuple[int, ...] = ()


class Facts(NamedTuple):
    """What is known about one client before training.

    Attributes:
      client: scalar int32, its index in [0, K).
      class_counts: [C] training samples of each class.
      num_samples: scalar, n_k.
      federation_counts: [K, C] of all clients; only for constants that a server sends once.
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
    """Options of local training, from the epochs to the optimiser: what every client does in a round.

    Floats are traced: hooks see scalars of this round, a simulation holds [E]. In both, momentum is 0 under Adam, which
    has none of SGD's kind, and a clip of None is inf. All other fields are static and equal in all experiments.
    """

    epochs: int | tuple[int, ...] = struct.field(default=10, pytree_node=False)  # for all clients, or for each
    batch_size: int = struct.field(default=100, pytree_node=False)
    last_batch: LastBatch = struct.field(default="drop", pytree_node=False)
    optimizer: str = struct.field(default="sgd", pytree_node=False)
    lr: Any = 0.01
    momentum: Any = 0.9
    weight_decay: Any = 1e-4
    clip: Any = None  # largest global norm of the raw gradient
    shuffle: bool = struct.field(default=True, pytree_node=False)  # a new permutation each epoch, else stored order
    lr_steps: tuple[int, ...] = struct.field(default=(), pytree_node=False)  # rounds; each multiplies lr by lr_decay
    lr_decay: float = struct.field(default=0.1, pytree_node=False)
    local_steps: int | None = struct.field(default=None, pytree_node=False)  # of a round; hooks see one epoch
    loss: Literal["ce", "focal"] = struct.field(default="ce", pytree_node=False)
    focal_gamma: float = struct.field(default=2.0, pytree_node=False)
    class_weights: Literal["none", "pooled", "local"] = struct.field(default="none", pytree_node=False)


class Keys(NamedTuple):
    """Independent streams of random numbers; each is a key to be used once, or to be split."""

    augment: jax.Array  # for the engine's augmentation of images
    dropout: jax.Array  # for forward passes in training mode
    method: jax.Array  # for a method's own draws

    @classmethod
    def of(cls, key: jax.Array) -> "Keys":
        """The streams of a key, which must not be used for anything else."""
        return cls(*(jax.random.fold_in(key, i) for i in range(len(cls._fields))))


class Unlabelled(NamedTuple):
    """Public images without labels."""

    images: jax.Array  # [N, H, W, channels] uint8
    prepare: Callable[..., jax.Array]  # (index [B], a key, or None for no augmentation) -> a model's input [B, ...]


class Context(NamedTuple):
    """What a hook may read while one client trains.

    Attributes:
      model: as `build` returned it.
      setting: what is fixed for all experiments of the program.
      hyper: options of local training in this round.
      server: the server's state (see `init_server`) at the start of the round.
      client: this client's state (see `init_client`) at the start of the round.
      start: the variables that local training started from (w^t), but with own layers as they are now.
      facts: of this client.
      epoch: local epoch, from 0.
      epochs: local epochs of this client; `Setting.epochs` is the largest of any client.
      step: local step, from 0; in `upload` the number of steps that the client made.
      round: communication round, from 0.
      keys: random streams of this step.
      public: the public images, if the run has any.
      validation: sums a function of a batch over this client's validation samples; given if `Traits.validation` is set.
      untouched: w^t with own layers as they were at the start; given if clients have such layers.
      exchanging: whether this is an exchange on public images, see `participant.py`; static.
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
        """The received model, for forward passes: `start`, but with own layers as they were at the start."""
        return self.start if self.untouched is None else self.untouched


class ServerContext(NamedTuple):
    """What the server may read when it aggregates.

    Attributes:
      model: as `build` returned it.
      setting: what is fixed for all experiments of the program.
      hyper: options of local training in this round.
      round: communication round, from 0.
      clients: [S] the cohort, indices in [0, K); K for a place that no client took or whose client made no step, whose
        writes JAX drops (`table.at[clients].set(...)`).
      count: scalar, how many of them trained and sent a message.
      key: random key of this round.
      public: the public images, if the run has any.
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

    loss: jax.Array  # scalar, as `Method.loss` returns it
    state: Tree  # collections that this batch updates, e.g. {"batch_stats": ...}, or {}
    gradients: Tree  # of the objective with `regulariser`, structured as the parameters


class Step(NamedTuple):
    """What the local optimiser returns for gradients."""

    updates: Tree  # to be added to the parameters
    optimiser: Tree  # the optimiser's next state


class Message(NamedTuple):
    """What a client sends. `mean` and `total` are reduced as clients finish, so they are never stacked over the cohort.

    Their leaves of fewer than 32 bits are summed, and arrive, as float32 or int32.

    Attributes:
      mean: reduced to sum_k p_k * mean_k.
      total: reduced to sum_k total_k.
      each: stacked to [S, ...]; rows of clients that were lost or have no batch mean nothing, and their weight is 0.
    """

    mean: Tree = ()
    total: Tree = ()
    each: Tree = ()


class Derived(NamedTuple):
    """A part of a message that a server can compute from the clients' models: it is not counted as sent."""

    value: Tree


class Server(NamedTuple):
    """The server state of a method that shares one model and nothing else."""

    variables: Tree


def hyperparameter(
    default, *, help: str, symbol: str = "", low=None, high=None, above=None, static: bool = False,
    several: bool = False, needs: Mapping[str, tuple] | None = None,
):  # fmt: skip
    """A field of a method: traced (changing it recompiles nothing) unless `static`.

    Args:
      default: None means that `Method.configure` chooses.
      help: meaning and unit, for the command line and the documentation.
      symbol: the paper's symbol.
      low, high: inclusive bounds, checked by the command line.
      above: exclusive lower bound.
      static: True if another value needs another program (a flag, a choice of formula).
      several: True if a single value may contain commas, at which a sweep must not split it.
      needs: values of other hyper-parameters, by their names, without which this one has no effect; a run that sets it
        all the same says so.
    """
    metadata = {"help": help, "symbol": symbol, "low": low, "high": high, "above": above, "static": static}
    metadata |= {"several": several, "needs": needs}
    return struct.field(pytree_node=not static, default=default, metadata=metadata)


def class_weights(facts: Facts, kind: Literal["none", "pooled", "local"]) -> jax.Array | None:
    """n / n_c [C] of all clients' training samples (pooled) or this one's, 0 for a class without any; None for none."""
    if kind == "none":
        return None
    counts = facts.federation_counts.sum(0) if kind == "pooled" else facts.class_counts
    return jnp.where(counts > 0, counts.sum() / jnp.maximum(counts, 1), 0.0)


class Described:
    """The docstring of a method: the text as written, then its hyper-parameters, described from their metadata."""

    def __init__(self, text: str | None):
        """Args: text: as written."""
        self.text = inspect.cleandoc(text or "")

    def __get__(self, method: Any, cls: type) -> str:
        """The complete docstring."""
        fields = [field for field in dataclasses.fields(cls) if "help" in field.metadata]
        return "\n".join([self.text, *["\nHyper-parameters:"] * bool(fields), *map(_in_words, fields)])


def _in_words(field: dataclasses.Field) -> str:
    metadata, limits = field.metadata, {"low": "at least", "above": "above", "high": "at most"}
    symbol = f" ({metadata['symbol']})" if metadata["symbol"] else ""
    bounds = " and ".join(f"{words} {metadata[key]:g}" for key, words in limits.items() if metadata[key] is not None)
    return f"  {field.name}{symbol}: {metadata['help']}{f' [{bounds}]' if bounds else ''}; default: {field.default!r}."


@struct.dataclass
class Method:
    """FedAvg's hooks; see the module docstring for the order in which a run calls them."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        cls.__doc__ = Described(vars(cls).get("__doc__"))  # pyright: ignore[reportAttributeAccessIssue]

    def __new__(cls, *_: Any, **__: Any) -> "Method":
        """UserError unless the class itself is a Flax dataclass: its fields would be ignored, or not traced."""
        if "_flax_dataclass" not in vars(cls):
            kind = "a dataclass, but not one of Flax" if "__dataclass_fields__" in vars(cls) else "not a dataclass"
            raise UserError(f"{cls.__name__} is {kind}: write @flax.struct.dataclass above `class {cls.__name__}`.")
        return super().__new__(cls)

    def traits(self) -> Traits:
        """What must be known before anything is traced; may depend on static fields only."""
        return Traits()

    def build(self, model: Classifier) -> Classifier:
        """The model that this method trains, derived from the plain one (another neck, no bias, no head).

        May depend on static fields only.
        """
        return model

    def configure(self, setting: Setting, hyper: Local) -> tuple["Method", list[str]]:
        """The method with defaults that depend on the setting, and advice; UserError for what cannot work.

        Args:
          hyper: options of local training in the first round, as concrete values (not traced).

        Returns:
          The method, and one sentence for each setting that runs but is unstable or pointless.
        """
        return self, []

    def init_server(self, setting: Setting, variables: Tree, class_counts: jax.Array, key: jax.Array) -> Tree:
        """Server state from the initial variables and all clients' class counts [K, C]."""
        return Server(variables)

    def init_client(self, setting: Setting, server: Tree, facts: Facts, key: jax.Array) -> Tree:
        """State that this client keeps between rounds; () for none. Traced once, for all clients."""
        return ()

    def weight(self, facts: Facts) -> jax.Array:
        """Aggregation weight before normalisation over the cohort: n_k."""
        return facts.num_samples

    def download(self, server: Tree, client: Tree) -> Tree:
        """Variables that local training starts from.

        Besides the model's variables they may contain further parts of "params", and collections that steps update
        without gradient; the model ignores both, and `upload` removes them again.
        """
        return server.variables

    def classification(self, outputs: Outputs, batch: Batch, context: Context) -> jax.Array:
        """The supervised term, a scalar: mean cross-entropy over the batch, or the loss that the options select."""
        local = context.hyper
        if (local.loss, local.class_weights) == ("ce", "none"):
            return cross_entropy(outputs.logits, batch.labels, mask=batch.mask)
        gamma = local.focal_gamma if local.loss == "focal" else 0.0
        weights = class_weights(context.facts, local.class_weights)
        return focal_loss(outputs.logits, batch.labels, gamma=gamma, weights=weights, mask=batch.mask)

    def penalty(self, variables: Tree, outputs: Outputs, batch: Batch, context: Context) -> jax.Array | float:
        """The term that the method adds to the supervised one, a scalar, already weighted."""
        return 0.0

    def loss(self, variables: Tree, batch: Batch, context: Context) -> tuple[jax.Array, Tree]:
        """Local objective without `regulariser`, a scalar, and the collections that this batch updates."""
        outputs, state = train_forward(variables, batch, context)
        return objective(self, variables, outputs, batch, context), state

    def regulariser(self, params: Tree, context: Context) -> jax.Array | float:
        """A term that depends on the trainable parameters alone, a scalar, already weighted.

        Only its gradient is computed: recorded losses exclude it (and include `penalty`).
        """
        return 0.0

    def trainable(self, params: Tree, context: Context) -> Tree | None:
        """Which parameters move in this step: a tree of booleans (traced or not), None for all.

        Frozen parameters are moved neither by gradients nor by weight decay nor by remaining momentum.
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
          evaluate: maps variables to loss, state and gradients of the objective on this batch.
          step: maps gradients, structured as the parameters, to the optimiser's updates after clipping and weight
            decay. Its keyword `unclipped`, a further gradient, is added after clipping.
          variables: before the step.

        Returns:
          The loss to record, the collections of the variables that change, and the step to take.
        """
        loss, state, gradients = evaluate(variables)
        return loss, state, step(gradients)

    def summarise(self, variables: Tree, batch: Batch, context: Context) -> Tree:
        """Statistics of one batch of local data under the trained variables; summed over the client's data.

        Called if `traits().summary` asks for this pass; it also says how the batches are made.
        """
        return ()

    def upload(self, variables: Tree, summary: Tree, context: Context) -> tuple[Tree, Message]:
        """The client's next state and its message, after the last local step."""
        return context.client, Message(mean=variables)

    def aggregate(self, server: Tree, message: Message, weights: jax.Array, context: ServerContext) -> Tree:
        """The next server state from the reduced messages; weights [S] are the normalised p_k."""
        return server._replace(variables=message.mean)

    def generic_variables(self, server: Tree) -> Tree:
        """Variables of the global model."""
        return server.variables

    def further_models(self, server: Tree) -> dict[str, Tree]:
        """Other models of the server, name -> variables; their accuracy is recorded beside GA, as `ga_<name>`."""
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
          variables: from `generic_variables`, `further_models`, `personal_variables` or local training.
          client, facts: state and facts of the client whose model it is; () and None for a model of the server.
          scope: "generic", a model of the server, on all classes; "personal", a client's own model on its own data
            (PA); "local", a client's own model on all classes (GA of methods without a global model).
        """
        return forward(model, variables, images, train=False)[0].logits

    def fine_tuner(self, setting: Setting, epochs: int) -> "Method":
        """The method by which every client fine-tunes for PA; by default the supervised loss alone, on all parameters.

        Fine-tuning starts from the best and from the last global model, or from the last state as it is if this method
        has no global model. If the returned method has none, GA becomes the mean GA of the clients' fine-tuned models.
        For a global model the server is a new one: `init_server` gets what `generic_variables` returned, and other
        fields of the server's state are lost. What losses or logits need of them belongs into these variables as a
        further collection, from which `init_server` takes it where it finds it.

        Args:
          epochs: fine-tuning epochs that the user asks for.
        """
        return Method()


def train_forward(variables: Tree, batch: Batch, context: Context) -> tuple[Outputs, Tree]:
    """Run the model on a batch in training mode: its outputs, and new running statistics or {}."""
    key = context.keys.dropout
    return forward(context.model, variables, batch.images, train=True, mask=batch.mask, key=key)


def objective(method: Method, variables: Tree, outputs: Outputs, batch: Batch, context: Context) -> jax.Array:
    """`classification` + `penalty` of a method on a batch, a scalar."""
    supervised = scalar(method, "classification", method.classification(outputs, batch, context))
    return supervised + scalar(method, "penalty", method.penalty(variables, outputs, batch, context))
