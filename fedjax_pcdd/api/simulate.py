"""`simulate`: one experiment in memory, computed as `experiments/run.py` computes it.

Letters: K clients, C classes, T rounds.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fedjax_pcdd import methods
from fedjax_pcdd.api.history import History
from fedjax_pcdd.api.runs import warn
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.engine.device_errors import OutOfMemory, in_sentences
from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods.method import Method
from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.training.build import Given, Setup
from fedjax_pcdd.training.callbacks import Function, as_callbacks
from fedjax_pcdd.training.config import RUN, RunConfig
from fedjax_pcdd.training.fields import Option, check, convert, options_of
from fedjax_pcdd.training.fine_tuning import after_training
from fedjax_pcdd.training.loop import Callback, Run, loop
from fedjax_pcdd.training.metrics import result
from fedjax_pcdd.training.progress import bar
from fedjax_pcdd.training.tasks import setup

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
    callbacks: Sequence[Callback | Callable] = (),
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
      callback: called after every round with the history so far, whose `state` is valid until it returns; True ends
        the run.
      callbacks: `fp.Callback` objects, as `fp.EarlyStopping("pa", patience=5)`, or functions of the run and the report
        of a round; a True that one of them returns ends the run.
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
      UserError: an argument that is unknown, of the wrong kind or out of its bounds, or a loss that is not finite.

    >>> import fedjax_pcdd as fp
    >>> federation = fp.partition(fp.load_dataset("digits"), "dirichlet", clients=4, beta=0.5)
    >>> history = fp.simulate(federation, fp.FedProx(mu=0.1), rounds=2, local_epochs=1, lanes=1, fine_tune_epochs=0)
    >>> history.ga.shape, history.ga_per_class.shape, history.pa_per_client.shape
    ((2,), (2, 10), (2, 4))
    """
    named = {"rounds": rounds, "local_epochs": local_epochs, "batch_size": batch_size, "lr": lr, "seed": seed}
    named |= {"lanes": lanes, "model": model if isinstance(model, str) else None}
    if not isinstance(method, Method | str) or not isinstance(federation, Federation):
        raise UserError("simulate takes what fp.partition returns and a method, as fp.FedAvg(): pass these two.")
    _check_objects(model=model, pipeline=pipeline, callback=callback)
    chosen = methods.get(method)() if isinstance(method, str) else method
    config = _config(federation, chosen, named | {"method": _name(method)} | dict(_known(options)))
    own_model = model if isinstance(model, Classifier) else None
    parts = setup([(config, chosen)], Given(federation, own_model, pipeline))
    for sentence in parts.advice(0):
        warn(sentence)

    def history(run: Run, summary: dict[str, Any]) -> History:
        return History(
            label or config.method, run.method, federation, config, list(run.history.rows), run.state, summary,
            run.simulation,
        )  # fmt: skip

    told: list[Callback] = [parts.accuracies(0, per_client=True), *as_callbacks(callbacks)]
    if callback is not None:
        told.append(Function(lambda run, _: callback(history(run, {}))))
    return _trained(parts, [*told, *([bar()] if progress else [])], history)


def _trained(parts: Setup, callbacks: list[Callback], history: Callable, noted: Any = None) -> History:
    """A run from its start to its end; anew with half of the lanes where the device is out of memory."""
    first = [(callback, copy.deepcopy(callback.state())) for callback in callbacks]
    with in_sentences("preparing the run"):
        state = parts.simulation.start()
        simulation = parts.settled(state, noted, warn)
    try:
        with in_sentences("training"):
            run: Any = loop(simulation, parts.prepared(simulation, state), parts.config.rounds, callbacks)
            return history(run, _summary(parts, run))
    except OutOfMemory as error:
        noted = parts.notes_out_of_memory(simulation, error, warn)
    del simulation, state  # and what they have on the device
    for callback, kept in first:
        if kept is not None:
            callback.restore(kept)
    return _trained(parts, callbacks, history, noted)


def _check_objects(*, model: Any, pipeline: Any, callback: Any) -> None:
    """UserError for an object that is not understood."""
    if not isinstance(model, str | Classifier | None):
        raise UserError(f"takes a name, as 'mlp', or a module of fp.build_model, not {model!r}.", field="model")
    if not isinstance(pipeline, Pipeline | None):
        raise UserError(f"takes an fp.Pipeline, not {pipeline!r}.", field="pipeline")
    if not (callback is None or callable(callback)):
        raise UserError(f"takes a function of the history, not {callback!r}.", field="callback")


def _summary(parts: Setup, run: Run) -> dict[str, Any]:
    """As summary.json, but for what the machine and the clock say."""
    config, summary = parts.config, result(run.history, run.method)
    if parts.tunes:
        best = run.best if parts.keeps_best else None
        (change,) = after_training(run.simulation, config.fine_tune_epochs, run.round, run.state, best, [summary])
        summary |= change
    head = {"method": config.method, "dataset": config.dataset, "seed": config.seed, "rounds": run.round}
    lanes = run.simulation.program.lanes
    return head | {"lanes": lanes} | summary | {"compilations": run.simulation.compilations}


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
            check(option, value)
    read = {name: _read(RUN[name], value) for name, value in given.items()}
    return RunConfig(dataset=federation.dataset.name, clients=federation.num_clients, **read)


def _read(option: Option, value: Any) -> Any:
    return convert(option, None if value is None else str(value))
