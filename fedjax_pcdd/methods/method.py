"""The contract of a method: a frozen dataclass of hyper-parameters whose methods are the hooks of a federated round.

Every default is FedAvg's, so a method's file overrides only what distinguishes it. Hooks are pure functions of
pytrees, written for ONE experiment and, where they take a client, for ONE client; the simulation lifts them over lanes,
clients and experiments. A round calls them in this order:

    download -> [ loss (classification + penalty) + regulariser -> correct -> optimiser -> adjust ] x steps
             -> summarise -> upload -> aggregate

Letters: B batch, C classes, D features, K clients, S clients of the round (cohort).
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
from flax import struct

from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.models.classifier import Classifier, Outputs, forward

Tree = Any


class Setting(NamedTuple):
    """What is fixed for all experiments of one program (static)."""

    num_classes: int  # C
    feature_dim: int  # D
    num_clients: int  # K
    rounds: int  # T
    epochs: int  # E, of the client with the most
    batch_size: int  # B
    normalised: bool  # whether the backbone has normalisation layers, over batches or groups
    one_class_clients: int = 0  # clients with samples of a single class
    own_weights: bool = True  # whether clients weigh in a mean as `Method.weight` says


class Facts(NamedTuple):
    """What is known of one client before training."""

    client: jax.Array  # scalar int32, its index in [0, K)
    class_counts: jax.Array  # [C] training samples of each class
    num_samples: jax.Array  # scalar, n_k
    federation_counts: jax.Array  # [K, C] of everybody: only for constants that a server hands out once


class Batch(NamedTuple):
    """One mini-batch, prepared (augmented, normalised)."""

    images: jax.Array  # [B, H, W, channels]
    labels: jax.Array  # [B] integers in [0, C)
    mask: jax.Array  # [B] 1 for a sample, 0 for padding


class Hyper(NamedTuple):
    """Settings of local training in this round; scalars, traced."""

    lr: jax.Array
    momentum: jax.Array
    weight_decay: jax.Array
    clip: jax.Array  # largest global norm of the raw gradient; inf for no clipping


class Context(NamedTuple):
    """What a hook may look at while one client trains."""

    model: Classifier
    setting: Setting
    hyper: Hyper
    server: Tree  # as `init_server` made it, at the start of the round
    client: Tree  # this client's own state, at the start of the round
    start: Tree  # the variables that local training started from (w^t)
    facts: Facts
    epoch: jax.Array  # local epoch, from 0
    epochs: jax.Array  # local epochs of this client, of which `Setting.epochs` is the most of any
    step: jax.Array  # local step, from 0
    round: jax.Array  # communication round, from 0
    key: jax.Array  # for this method's own draws in this step
    public: "Unlabelled | None" = None  # where the run has public images


class Unlabelled(NamedTuple):
    """Public images, whose labels nobody has."""

    images: jax.Array  # [N, H, W, channels] uint8
    prepare: Callable[..., jax.Array]  # of index [B] and a key, None for no augmentation: a model's input [B, ...]


class ServerContext(NamedTuple):
    """What the server may look at when it trains."""

    model: Classifier
    setting: Setting
    public: Unlabelled
    round: jax.Array
    key: jax.Array


class Message(NamedTuple):
    """What a client sends. `mean` and `total` are reduced as clients finish, so a cohort is never stacked for them."""

    mean: Tree = ()  # reduced to sum_k p_k * mean_k
    total: Tree = ()  # reduced to sum_k total_k
    each: Tree = ()  # stacked to [S, ...]
    count: Tree = ()  # for `aggregate`: how many clients sent one, a scalar; the simulation counts


class Server(NamedTuple):
    """The server of a method that shares one model and nothing else."""

    variables: Tree


def hyperparameter(default, *, help: str, symbol: str = "", low=None, high=None, above=None, static: bool = False):
    """A field of a method: traced (changing it recompiles nothing) unless `static`.

    Args:
      default: None means that `Method.configure` chooses.
      help: meaning and unit, for the command line and the documentation.
      symbol: the paper's symbol.
      low, high: inclusive bounds, checked by the command line.
      above: exclusive bound.
      static: True where another value is another program (a flag, a choice of formula).
    """
    metadata = {"help": help, "symbol": symbol, "low": low, "high": high, "above": above, "static": static}
    return struct.field(pytree_node=not static, default=default, metadata=metadata)


@struct.dataclass
class Method:
    """FedAvg's hooks; see the module's text for the order in which a round calls them."""

    paper: ClassVar[str] = ""
    target: ClassVar[str] = "generic"  # generic, personal or both: which accuracy the paper optimises
    global_model: ClassVar[bool] = True  # False: GA is the mean of the local models on the global test set
    fine_tune: ClassVar[bool] = True  # True: PA is that of models fine-tuned by each client, see `tuner`
    grad_clip: ClassVar[float | None] = None  # default of --grad-clip
    personal_model: ClassVar[str] = "local"  # PA of the model just trained ("local") or of `personal_variables`
    own_models: ClassVar[bool] = False  # True: clients keep their models, perhaps of different architectures
    exchange: ClassVar[Literal["never", "before", "after"]] = "never"  # on public images, see `participant.py`
    averages: ClassVar[Literal["never", "exchanged", "trained"]] = "never"  # own models, where all are alike
    renewed: ClassVar[tuple[str, ...]] = ()  # parts of the parameters whose optimiser is new each round in any case
    distils: ClassVar[bool] = False  # the server trains on public images, by `distil`
    summary_augmented: ClassVar[bool | None] = None  # None: no pass over the local data after training
    summary_train: ClassVar[bool] = False  # that pass is in training mode, so its batches are those of training, B

    def build(self, model: Classifier) -> Classifier:
        """The model this method trains, made from the plain one (another neck, no bias, no head)."""
        return model

    def configure(self, setting: Setting) -> "Method":
        """Fill in defaults that depend on the model; UserError for a setting that cannot work."""
        return self

    def advise(self, setting: Setting, hyper: Hyper) -> list[str]:
        """One sentence for each setting that runs but is unstable or pointless; said before training.

        Args:
          hyper: of the first round, with values, not traced.
        """
        return []

    def local_epochs(self, epochs: int) -> int:
        """Local epochs in a round, where a method has phases of its own beside the E asked for."""
        return epochs

    def tuner(self, setting: Setting, epochs: int) -> "Method":
        """The method by which every client fine-tunes for PA: plain cross-entropy on all parameters.

        It starts from the best and the last global model, or from the last state as it is where this method has no
        global model. If it has none itself, GA becomes the mean over clients of the fine-tuned models'.

        Args:
          epochs: as --fine-tune-epochs asks.
        """
        return Method()

    def init_server(self, setting: Setting, variables: Tree, class_counts: jax.Array, key: jax.Array) -> Tree:
        """Server state from the initial variables and everybody's class counts [K, C]."""
        return Server(variables)

    def init_client(self, setting: Setting, server: Tree, facts: Facts, key: jax.Array) -> Tree:
        """State that this client keeps between rounds; () for none."""
        return ()

    def weight(self, facts: Facts) -> jax.Array:
        """Aggregation weight before normalisation over the cohort: n_k."""
        return facts.num_samples

    def download(self, server: Tree, client: Tree) -> Tree:
        """Variables that local training starts from."""
        return server.variables

    def classification(self, outputs: Outputs, batch: Batch, context: Context) -> jax.Array:
        """The supervised term, a scalar: mean cross-entropy over the batch."""
        return cross_entropy(outputs.logits, batch.labels, mask=batch.mask)

    def penalty(self, variables: Tree, outputs: Outputs, batch: Batch, context: Context) -> jax.Array | float:
        """What the method adds to the supervised term, a scalar, already weighted."""
        return 0.0

    def loss(self, variables: Tree, batch: Batch, context: Context) -> tuple[jax.Array, Tree]:
        """Local objective but for `regulariser`, and the model state after this batch (running statistics or {})."""
        key = jax.random.fold_in(context.key, 1)
        outputs, state = forward(context.model, variables, batch.images, train=True, mask=batch.mask, key=key)
        value = self.classification(outputs, batch, context)
        seen = jax.lax.stop_gradient(self.observe(variables, outputs, batch, context))
        return value + self.penalty(variables, outputs, batch, context), {**state, **seen}

    def regulariser(self, params: Tree, context: Context) -> jax.Array | float:
        """A term on the trainable parameters alone, a scalar, already weighted.

        Only its gradient is computed: recorded losses are without it (and with `penalty`).
        """
        return 0.0

    def observe(self, variables: Tree, outputs: Outputs, batch: Batch, context: Context) -> dict[str, Tree]:
        """Collections of the variables that a step updates without gradient, as sums over what was seen.

        `download` adds them to the variables, `upload` takes them away again; the model ignores them.
        """
        return {}

    def correct(self, gradients: Tree, variables: Tree, context: Context) -> Tree:
        """Gradients of the trainable parameters, corrected before the optimiser sees them."""
        return gradients

    def trainable(self, params: Tree, context: Context) -> Tree | None:
        """Which parameters move in this step: a tree of booleans (traced or not), None for all.

        What is frozen takes neither gradient nor weight decay nor what is left of its momentum.
        """
        return None

    def adjust(self, updates: Tree, context: Context) -> Tree:
        """The optimiser's updates (to be added to the parameters), before they are applied."""
        return updates

    def summarise(self, variables: Tree, batch: Batch, context: Context) -> Tree:
        """Statistics of one batch of local data under the trained variables; summed over the client's data.

        Called where `summary_augmented` is not None, which says whether the images are augmented; in batches of B
        where `summary_train` says so, else in batches of any size.
        """
        return ()

    def upload(self, variables: Tree, summary: Tree, context: Context) -> tuple[Tree, Message]:
        """The client's next state and its message, after the last local step."""
        return context.client, Message(mean=variables)

    def aggregate(self, server: Tree, message: Message, weights: jax.Array) -> Tree:
        """The next server from the reduced messages; weights [S] are the normalised p_k."""
        return server._replace(variables=message.mean)

    def distil(self, server: Tree, message: Message, context: ServerContext) -> Tree:
        """The server after training on public images; called after `aggregate` where `distils`."""
        return server

    def merge(self, servers: tuple[Tree, ...], shares: tuple[float, ...]) -> tuple[Tree, ...]:
        """Servers of all architectures after a round; `shares` are their parts of the aggregation weights."""
        return servers

    def generic_variables(self, server: Tree) -> Tree:
        """Variables of the global model."""
        return server.variables

    def further_models(self, server: Tree) -> dict[str, Tree]:
        """Variables of other models of the server whose accuracy is recorded beside GA, as `ga_<name>`, by name."""
        return {}

    def personal_variables(self, server: Tree, client: Tree) -> Tree:
        """Variables of a client's personal model between rounds."""
        return server.variables

    def predict_generic(self, model: Classifier, server: Tree, variables: Tree, images: jax.Array) -> jax.Array:
        """Logits [B, C] of a model that is to know all classes."""
        return self._logits(model, variables, images)

    def predict_personal(
        self, model: Classifier, server: Tree, client: Tree, facts: Facts, variables: Tree, images: jax.Array
    ) -> jax.Array:
        """Logits [B, C] of a client's own model."""
        return self._logits(model, variables, images)

    def predict_local(
        self, model: Classifier, server: Tree, client: Tree, facts: Facts, variables: Tree, images: jax.Array
    ) -> jax.Array:
        """Logits [B, C] of a client's own model on everybody's data: GA of methods without a global model."""
        return self.predict_personal(model, server, client, facts, variables, images)

    def _logits(self, model, variables, images):
        return forward(model, variables, images, train=False)[0].logits
