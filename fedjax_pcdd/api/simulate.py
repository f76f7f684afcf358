"""`simulate`: one experiment in memory or in a folder, computed as the command line computes it.

Letters: K clients, C classes, T rounds.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fedjax_pcdd import methods
from fedjax_pcdd.api.data import DRAWN, LOADED, partition
from fedjax_pcdd.api.history import History
from fedjax_pcdd.api.records import Asked, unmeasured
from fedjax_pcdd.api.runs import LastRoundLost, check_same, clients_in, finished, history_of, load_run, recorded, warn
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.errors import UserError, as_path, is_there, nearest, shortened
from fedjax_pcdd.methods.method import Method
from fedjax_pcdd.methods.wrappers import SEPARATOR, in_front
from fedjax_pcdd.registry import Registry, origin_of, takes
from fedjax_pcdd.training.build import share_kept
from fedjax_pcdd.training.callbacks import Metrics, as_callbacks
from fedjax_pcdd.training.config import RUN, RunConfig, as_read
from fedjax_pcdd.training.fields import is_written, options_of, read_value
from fedjax_pcdd.training.folder import CONFIG, SUMMARY, RunFolder
from fedjax_pcdd.training.loop import Callback, RoundReport, Run
from fedjax_pcdd.training.metrics import plain
from fedjax_pcdd.training.progress import bars
from fedjax_pcdd.training.setup import Given

# Run options that apply in memory, in addition to those that are arguments of `simulate` by name.
OPTIONS = tuple(
    name
    for name, option in RUN.items()
    if option.group in ("model", "training", "evaluation") and name != "model" and not name.startswith("track")
) + (
    *("cohort", "client_state", "data", "data_memory", "tune", "data_dir", "models", "public", "public_samples"),
    *("public_batch", "pretrain_epochs", "pretrain_batch_size", "validation", "select_on", "select_by"),
)


def simulate(
    federation: Federation,
    method: Method | str = "fedavg",
    *,
    model: Any = None,
    rounds: int = 50,
    local_epochs: int | None = None,
    batch_size: int = 100,
    lr: float = 0.01,
    seed: int = 0,
    lanes: int | Literal["auto"] = "auto",
    pipeline: Pipeline | None = None,
    callback: Callable[[History], object] | None = None,
    callbacks: Sequence[Callback | Callable] = (),
    metrics: Mapping[str, Callable[[Run], float]] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    label: str | None = None,
    progress: bool = False,
    **options: Any,
) -> History:
    """Train a federation with a method.

    Args:
      federation: as `fp.partition` returns it.
      method: an object like `fp.FedGELA(ew=4.0)`, or a name for its defaults.
      model: name of an architecture, a module from `fp.build_model`, or any Flax module (Linen or NNX) or module class:
        a backbone from images to features, or a whole classifier that ends with a dense layer. A list of these if
        clients have models of their own. None for mlp on the digits, lstm on text, else simple_cnn.
      rounds: T.
      local_epochs: E; None for 10, or if `local_steps` sets the number of updates.
      batch_size: B.
      lr: learning rate of the clients.
      seed: of initial weights, cohorts and batches; the partition has its own.
      lanes: clients trained in one step; "auto" measures which number is fastest. Results depend on it only through
        rounding.
      pipeline: preprocessing and augmentation of images; None for what is customary for the data set of this name.
      callback: called after every round with the history so far, whose `state` is valid only until the function
        returns; returning True ends the run.
      callbacks: `fp.Callback` objects, such as `fp.EarlyStopping("pa", patience=5)`, or functions of the run and the
        report of a round; if one of them returns True, the run ends.
      metrics: functions of the run, by the names of their values in the history's rows; called when a round is
        evaluated. A run has `variables`, `client_variables(k)`, `outputs(images)`, `federation` and `history`.
      run_dir: folder that is written as the command line writes it, checkpoints included; None to write nothing.
      resume: continue the run in `run_dir` if there is one, or load it if it is finished.
      label: name of this experiment in curves and tables; None for the method's name.
      progress: whether a progress bar is shown.
      options: further options of the command line, with its defaults; lists replace its commas: cohort, momentum,
        weight_decay, optimizer, optimizer_state, last_batch, lr_steps, lr_decay, shuffle, grad_clip, weights,
        augmentation, neck, bn, precision, local_steps, loss, focal_gamma, class_weights, initial_weights, select_by,
        augment, client_state, data, data_memory, tune, eval_every, fine_tune_epochs, calibrate, pa_protocol,
        eval_batch, validation, select_on; data_dir, public, public_samples, public_batch for methods that need public
        images; models, pretrain_epochs, pretrain_batch_size for methods whose clients have models of their own.

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
    if local_epochs is None and options.get("local_steps") is None:
        local_epochs = RUN["local_epochs"].default
    named_options = {"rounds": rounds, "local_epochs": local_epochs, "batch_size": batch_size, "lr": lr, "seed": seed}
    named_options |= {"lanes": lanes, "model": model if isinstance(model, str) else None}
    if not isinstance(method, Method | str) or not isinstance(federation, Federation):
        raise UserError("simulate takes what fp.partition returns and a method, as fp.FedAvg(): pass these two.")
    _check_objects(pipeline=pipeline, callback=callback, label=label, resume=resume, run_dir=run_dir)
    method_object = as_read(methods.get(method)() if isinstance(method, str) else method)
    config = _config(federation, named_options | {"method": _name(method)} | dict(_known(options, method_object)))
    given = Given(federation, None if isinstance(model, str) else model, pipeline)
    all_callbacks = [*([] if metrics is None else [Metrics(metrics)]), *as_callbacks(callbacks)]
    folder = None if run_dir is None else as_path(run_dir, "run_dir").absolute()
    if callback is not None:
        all_callbacks.append(_Told(callback, label, Asked(config, method_object, given=given), folder))
    asked = Asked(config, method_object, callbacks=all_callbacks, last=bars(progress), given=given)
    return finished(asked, label) if folder is None else _in_folder(asked, folder, resume, label)


class _Told(Callback):
    """Calls a function with the history so far after every round."""

    def __init__(self, function: Callable[[History], object], label: str | None, asked: Asked, folder: Path | None):
        """Args: folder: of a run that is continued, with its earlier rounds."""
        self.function, self.label, self.asked, self.folder = function, label, asked, folder
        self.of_clients: dict[int, Any] = {}

    def on_start(self, run: Run) -> None:
        self.of_clients = clients_in(RunFolder(self.folder)) if self.folder and run.round else {}

    def on_round(self, run: Run, report: RoundReport) -> Any:
        """What the function returns; True ends the run."""
        if run.history.rows[-1]["ga"] is not None:
            self.of_clients[run.round] = plain(run.history.pa_clients)
        return self.function(history_of(run, self.asked, self.of_clients, self.label))


def _in_folder(asked: Asked, folder: Path, resume: bool, label: str | None) -> History:
    """Run an experiment in a folder, or continue or load the run that is there."""
    config, method, given = asked.config, asked.method, asked.given
    for own in options_of(type(method)):
        if not is_written(getattr(method, own)):
            raise UserError(f"`{own}` is no number, name or path, all that a run folder holds: drop `run_dir`.")
    assert given.federation is not None
    for registry, cls in _parts(type(method)):
        if _part_name(registry, cls) == cls.__name__:
            registry.register(cls.__name__)(cls)  # a class of the calling script, which may load the run
    load_options = LOADED.get(given.federation.dataset)
    if load_options and config.data_dir not in (None, load_options.get("data_dir", config.data_dir)):
        load_options = None  # the public images lie elsewhere, and the options of a run know one folder
    overrides: dict[str, Any] = {"run_dir": folder, "partition": str(folder / "partition.npz")}
    config = replace(config, **overrides | (load_options or {}))
    objects = {name: part for name, part in given._asdict().items() if part is not None}
    if not resume and is_there(folder / CONFIG):
        raise UserError(f"{folder} already holds a run: continue it with `resume=True`, or choose another `run_dir`.")
    if not is_there(folder / CONFIG):
        missing = [name for name in objects if name != "federation" or load_options is None]
        origin = {"given": missing, "drawn": DRAWN.get(given.federation)}
        return finished(asked._replace(config=config, origin={k: v for k, v in origin.items() if v}), label)
    continued = recorded(folder, objects)
    check_same((continued.config, continued.method), (config, method), folder)
    if is_there(folder / SUMMARY):
        with suppress(LastRoundLost):
            history = load_run(folder, **objects)
            for sentence in unmeasured(asked.callbacks, history.rows):
                warn(sentence)
            return replace(history, label=label) if label else history
    return finished(continued._replace(callbacks=asked.callbacks, last=asked.last), label)


def _check_objects(*, pipeline: Any, callback: Any, label: Any, resume: Any, run_dir: Any) -> None:
    if not isinstance(label, str | None):
        raise UserError(f"takes a text, not {shortened(label)}.", field="label")
    if not isinstance(resume, bool):
        raise UserError(f"takes True or False, not {shortened(resume)}: the folder is `run_dir`.", field="resume")
    if resume and run_dir is None:
        raise UserError("continues the run of a folder: name it as `run_dir`.", field="resume")
    if not isinstance(pipeline, Pipeline | None):
        raise UserError(f"takes an fp.Pipeline, not {pipeline!r}.", field="pipeline")
    if not (callback is None or callable(callback)):
        raise UserError(f"takes a function of the history, not {callback!r}.", field="callback")
    if callback is not None and not takes(callback, 1):
        raise UserError("takes a function of one argument, the history so far.", field="callback")


def _known(options: Mapping[str, Any], method: Method) -> Mapping[str, Any]:
    for name in options:
        if name in OPTIONS:
            continue
        if name in options_of(type(method)):
            hint = f"give it to the method, as {type(method).__name__}({name}={shortened(options[name])})."
        elif name in inspect.signature(partition).parameters:
            hint = "give it to fp.partition, which makes the federation."
        elif name in RUN:
            hint = "it is for the command line and fp.sweep."
        else:
            hint = nearest(name, OPTIONS)
        raise UserError(f"simulate takes no argument '{name}': {hint}")
    return options


def _name(method: Method | str) -> str:
    """A method's name on the command line."""
    if isinstance(method, str):
        return method
    return SEPARATOR.join(_part_name(registry, cls) for registry, cls in _parts(type(method)))


def _parts(cls: type[Method]) -> list[tuple[Registry, type[Method]]]:
    """The classes that a class with suffixes is made of, in the order of its name, and where these have their names."""
    recipe = vars(cls).get("_recipe")
    if recipe is None or recipe.function is not in_front:
        return [(methods.METHODS, cls)]
    addition, _, behind, _ = recipe.args
    return [*_parts(behind), (methods.SERVER_OPTIMISERS, addition)]


def _part_name(registry: Registry, cls: type[Method]) -> str:
    """The name of one of these classes, or its import path; if it has neither, as it is written in the code."""
    known = methods.METHODS.data if registry is methods.METHODS else methods.known_suffixes()
    name = next((name for name, registered in known.items() if registered is cls), None)
    origin = None if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__ else origin_of(cls)
    return name or (f"{origin.path}:{origin.object}" if origin else cls.__name__)


def _config(federation: Federation, options: Mapping[str, Any]) -> RunConfig:
    """The options of a run, read as the command line reads them; UserError for a value that does not fit."""
    if options.get("validation") is None:
        options = {**options, "validation": share_kept(federation) or None}
    parsed = {name: read_value(RUN[name], value) for name, value in options.items()}
    return RunConfig(dataset=federation.dataset.name, clients=federation.num_clients, **parsed)
