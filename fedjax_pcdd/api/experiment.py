"""`simulate`: one experiment in memory, computed as `experiments/run.py` computes it.

Letters: K clients, C classes, T rounds.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax

from fedjax_pcdd import methods
from fedjax_pcdd.api.history import History
from fedjax_pcdd.api.launch import kind_of_run
from fedjax_pcdd.api.sentences import in_python, python_sentences
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.engine.device_errors import OutOfMemory, in_sentences
from fedjax_pcdd.engine.program import State
from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods.method import Method
from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.training.build import assemble
from fedjax_pcdd.training.config import RUN, RunConfig
from fedjax_pcdd.training.fields import Option, check, convert, options_of
from fedjax_pcdd.training.metrics import History as Record
from fedjax_pcdd.training.runner import Progress, Run
from fedjax_pcdd.training.tuning import fewer_lanes, lanes_of

__all__ = ["Pipeline", "simulate"]

# Run options that have a meaning in memory, beside the arguments of `simulate` that have the same names.
OPTIONS = tuple(
    name
    for name, option in RUN.items()
    if option.group in ("model", "training", "evaluation") and name != "model" and not name.startswith("track")
) + (
    *("cohort", "client_state", "tune", "data_dir", "models", "public", "public_samples", "public_batch"),
    *("pretrain_epochs", "pretrain_batch_size"),
)


def simulate(
    federation: Federation,
    method: Method | str = "fedavg",
    *,
    model: str | Classifier | None = None,
    rounds: int = 50,
    local_epochs: int = 10,
    batch_size: int = 100,
    lr: float = 0.01,
    seed: int = 0,
    lanes: int | Literal["auto"] = "auto",
    pipeline: Pipeline | None = None,
    callback: Callable[[History], object] | None = None,
    label: str | None = None,
    progress: bool = False,
    **options: Any,
) -> History:
    """Train a federation by a method.

    Args:
      federation: as `fp.partition` made it.
      method: an object like `fp.FedGELA(ew=4.0)`, or a name for its defaults.
      model: an architecture by its name, or a module that `fp.build_model` made; None for mlp on the digits, lstm on
        text, else simple_cnn.
      rounds: T.
      local_epochs: E.
      batch_size: B.
      lr: learning rate of the clients.
      seed: of initial weights, cohorts and batches; the partition has its own.
      lanes: clients trained as one step; "auto" measures what is fastest. Results do not depend on it but for rounding.
      pipeline: what is done to images; None for what is customary for the data set of this name.
      callback: called after every round with the history so far, whose `state` is valid until it returns.
      label: what curves and tables call this experiment; None for the method's name.
      progress: whether a bar is shown.
      options: further options of `experiments/run.py`, with its defaults: cohort, momentum, weight_decay, optimizer,
        optimizer_state, last_batch, lr_steps, lr_decay, shuffle, grad_clip, weights, augment, bn, precision,
        client_state, tune, eval_every, fine_tune_epochs, eval_batch; data_dir, public, public_samples, public_batch for
        methods that need public images; models, pretrain_epochs, pretrain_batch_size for methods whose clients have
        models of their own.

    Returns:
      Accuracies and losses of all rounds, and the final state.

    Raises:
      UserError: an option that is unknown or out of its bounds, or a loss that is not finite.

    >>> import fedjax_pcdd as fp
    >>> federation = fp.partition(fp.load_dataset("digits"), "dirichlet", clients=4, beta=0.5)
    >>> history = fp.simulate(federation, fp.FedProx(mu=0.1), rounds=2, local_epochs=1, lanes=1, fine_tune_epochs=0)
    >>> history.ga.shape, history.ga_per_class.shape, history.pa_per_client.shape
    ((2,), (2, 10), (2, 4))
    """
    named: dict[str, Any] = {
        "rounds": rounds,
        "local_epochs": local_epochs,
        "batch_size": batch_size,
        "lr": lr,
        "seed": seed,
    }
    named |= {"lanes": lanes, "quiet": not progress, "model": model if isinstance(model, str) else None}
    with python_sentences():
        chosen = methods.get(method)() if isinstance(method, str) else method
        if not isinstance(chosen, Method) or not isinstance(federation, Federation):
            raise UserError("simulate takes what fp.partition returns and a method, as fp.FedAvg(): pass these two.")
        config = _config(federation, chosen, named | {"method": _name(method)} | dict(_known(options)))
        kind = type("InMemory", (InMemory, kind_of_run(config, chosen)), {})
        own = model if isinstance(model, Classifier) else None
        given = Given(federation, own, pipeline, callback, label or config.method)
        return _simulated(kind, config, chosen, given)


def _simulated(kind: type["InMemory"], config: RunConfig, method: Method, given: "Given") -> History:
    """A run from its start to its end; anew with half of the lanes where the device is out of memory."""
    with in_sentences("preparing the run"):
        run = kind(config, method, given)
    try:
        with in_sentences("training"):
            done = run.rounds(run.begin())
            return run.history(done.state, done.history, run.summary(done))
    except OutOfMemory as error:
        lanes = fewer_lanes(lanes_of(run.simulation), error)
    del run  # and what it has on the device
    return _simulated(kind, replace(config, lanes=lanes), method, given)


def _known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, none of which is unknown."""
    for name in options:
        if name not in OPTIONS:
            raise UserError(f"simulate takes no argument '{name}': {nearest(name, OPTIONS)}")
    return options


def _name(method: Method | str) -> str:
    """A method's name on the command line, that of its class where it has none."""
    names = {cls: name for name, cls in methods.METHODS.items()}
    return method if isinstance(method, str) else names.get(type(method), type(method).__name__)


def _config(federation: Federation, method: Method, given: Mapping[str, Any]) -> RunConfig:
    """The options of a run, read as the command line reads them; UserError for a value that does not fit."""
    registered = type(method) in methods.METHODS.values()
    for option in options_of(type(method)).values():
        value = getattr(method, option.name)
        if registered:
            _read(option, value)
        else:
            check(option, value, option.name)
    read = {name: _read(RUN[name], value) for name, value in given.items()}
    return RunConfig(dataset=federation.dataset.name, clients=federation.num_clients, **read)


def _read(option: Option, value: Any) -> Any:
    return convert(option, None if value is None else str(value), option.name)


class Given(NamedTuple):
    """What a run in memory has beside its options."""

    federation: Federation
    model: Classifier | None
    pipeline: Pipeline | None
    callback: Callable[[History], object] | None
    label: str


class _Nothing:
    """A run folder that keeps nothing."""

    path = "memory"

    def truncate(self, rows: list) -> None:
        """Nothing to take back."""


class _Record(Record):
    """A record that stays in memory."""

    def to_json(self) -> Any:
        """Itself, where a checkpoint would have a text."""
        return self


class _Watch:
    """Stands where checkpoints are written, and shows every round to the callback."""

    def __init__(self, run: "InMemory"):
        self.run = run

    def save(self, round: int, server: Any, clients: Any, record: Any, *, force: bool) -> None:
        """After each round, with the parts of a checkpoint."""
        if self.run.given.callback is not None:
            self.run.given.callback(self.run.history(State(server[0], *clients), record, {}))

    def wait(self) -> None:
        """Nothing is under way."""


class InMemory(Run):
    """A run of given data that writes nothing; mixed into the kind of run that its options ask for."""

    def __init__(self, config: RunConfig, method: Method, given: Given):
        """Prepare the simulation."""
        self.given = given
        super().__init__(config, method)
        self.recorder = None

    def _open(self, config: RunConfig, method: Method, state: State) -> None:
        """Nothing is opened; what would be written to keeps nothing."""
        self.folder, self.checkpoints, self.writers = _Nothing(), _Watch(self), []  # pyright: ignore
        self.tunes = self.method.fine_tune and config.fine_tune_epochs > 0
        self.keeps_best = self.tunes and self.method.global_model

    def resolve(self, **values: Any) -> None:
        """Nobody asks what was not said in the options."""

    def _hyperparameters(self) -> dict[str, Any]:
        return {}  # those of a method of one's own may be arrays

    def _federate(self) -> Federation:
        return self.given.federation

    def _assemble(self, method: Method, lanes: int) -> Any:
        model, pipeline = self.given.model, self.given.pipeline
        if model is None and pipeline is None:
            return super()._assemble(method, lanes)
        if kind_of_run(self.config, method) is not Run:
            raise UserError(f"{self.config.method} takes models by name, and the customary pipeline: drop your own.")
        return assemble(
            self.config, method, self.federation, lanes, model=model, pipeline=pipeline, convolutions=self.convolutions
        )

    def _advise(self) -> None:
        hyper = jax.tree.map(lambda x: x[0], self.simulation.hyper)
        for sentence in self.method.advise(self.simulation.program.setting, hyper):
            warnings.warn(in_python(sentence), stacklevel=4)

    def _loss(self, *arguments: Any) -> float:
        try:
            return super()._loss(*arguments)
        except UserError as error:
            raise UserError(f"{str(error).partition(';')[0]}.") from None  # there are no checkpoints to speak of

    def begin(self) -> Progress:
        """The start, with a record that is not written as text every round."""
        progress = super().begin()
        first = progress.history
        return progress._replace(history=_Record(first.rows, first.pa_clients, first.best_pa_clients, first.ga_of_best))

    def _record(self, row: dict, history: Record) -> None:
        evaluated = row["ga"] is not None
        row["pa_per_client"] = list(history.pa_clients) if evaluated else None

    def _cost(self, history: Record) -> dict[str, Any]:
        return {"compilations": self.simulation.compilations}

    def history(self, state: State, record: Record, summary: dict[str, Any]) -> History:
        """What is known after a round."""
        return History(
            self.given.label, self.method, self.federation, self.config, list(record.rows), state, summary,
            self.simulation,
        )  # fmt: skip
