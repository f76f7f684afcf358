"""Optional experiment trackers, which log the scalars of each round."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from fedjax_pcdd.errors import UserError, imported, in_one_line
from fedjax_pcdd.registry import Registry, called, takes
from fedjax_pcdd.training.fields import names_in
from fedjax_pcdd.training.loop import Callback, RoundReport, Run


class Logger(Callback):
    """Passes the scalars of every round to `write`."""

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log the scalars of a round."""
        raise NotImplementedError

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Log the newest row of the history."""
        self.write(run.round, scalars(run.history.rows[-1]))


@contextmanager
def reaching(service: str, noted: Path | None = None) -> Iterator[None]:
    """A context for calls of a tracker's package, whose errors (no login, no server) it turns into a `UserError`.

    Args:
      noted: the file of `_last_name`, named in the sentence if it exists.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        anew = f"; to log as another run, remove {noted}" if noted is not None and noted.is_file() else ""
        what_to_do = f"put that right, or go on without it{anew}"
        raise UserError(f"{service} does not log ({in_one_line(error)}): {what_to_do}.") from error


def _last_name(noted: Path) -> str | None:
    """The tracker's name for the run, by which a resumed run continues it, from a file in the run's folder."""
    return noted.read_text(encoding="utf-8").strip() or None if noted.is_file() else None


class TensorBoard(Logger):
    """Event files for TensorBoard."""

    def __init__(self, folder: Path):
        """UserError without tensorboardX."""
        self._open, self._writer = partial(load("tensorboard").SummaryWriter, str(folder)), None

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log one point per scalar; a run that resumes hides what was logged after its checkpoint."""
        with reaching("TensorBoard"):
            self._writer = self._writer or self._open(purge_step=round)
            for name, value in values.items():
                self._writer.add_scalar(name, value, round)

    def on_end(self, run: Run) -> None:
        """Flush and close the event file."""
        if self._writer:
            with reaching("TensorBoard"):
                self._writer.close()


class WandB(Logger):
    """A run of Weights & Biases; the environment variables of wandb choose project, entity and mode."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        """UserError without wandb."""
        self._package, self._folder, self._config = load("wandb"), Path(folder), config
        self._run: Any = None  # until it starts

    def on_start(self, run: Run) -> None:
        """Start the run, or continue the one that the folder names; UserError if it cannot start."""
        noted = self._folder / "wandb.txt"
        with reaching("wandb", noted):
            self._run = self._package.init(
                dir=str(self._folder),
                name=self._folder.name,
                config=dict(self._config),
                id=_last_name(noted),
                resume="allow",
                reinit="create_new",  # not the run of an experiment that is trained together with this one
            )
            noted.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log all scalars at once."""
        with reaching("wandb"):
            self._run.log(dict(values), step=round)

    def on_end(self, run: Run) -> None:
        """Finish the run, if it could start."""
        if self._run is not None:
            with reaching("wandb"):
                self._run.finish()


class MLflow(Logger):
    """A run of MLflow, named after the folder; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME choose where it goes."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        """UserError without mlflow."""
        self._client, self._folder, self._config = load("mlflow"), Path(folder), config
        self._run: Any = None  # until it starts

    def on_start(self, run: Run) -> None:
        """Start the run, or continue the one that the folder names; UserError if it cannot start."""
        noted = self._folder / "mlflow.txt"
        with reaching("mlflow", noted):
            last = _last_name(noted)
            self._run = self._client.start_run(run_id=last, run_name=None if last else self._folder.name, nested=True)
            if last is None:
                self._client.log_params({name: str(value) for name, value in self._config.items()})
                noted.write_text(f"{self._run.info.run_id}\n", encoding="utf-8")
            self._newest = -1 if last is None else self._newest_round()

    def _newest_round(self) -> int:
        """The last round that MLflow has: a resumed run repeats some, and MLflow would keep them twice.

        Every round has its seconds; other metrics may be those of MLflow itself, whose steps are no rounds.
        """
        history = self._client.MlflowClient().get_metric_history(self._run.info.run_id, "seconds")
        return max((point.step for point in history), default=-1)

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log all scalars at once, unless MLflow has this round."""
        if round > self._newest:
            with reaching("mlflow"):
                self._client.log_metrics(dict(values), step=round, run_id=self._run.info.run_id)

    def on_end(self, run: Run) -> None:
        """End the run, if it could start."""
        if self._run is not None:
            with reaching("mlflow"):
                self._client.end_run("FAILED" if run.error else "FINISHED")


LOGGERS: Registry[Callable[[Path, Mapping[str, Any]], Callback]] = Registry("logger", "loggers")
"""Loggers from outside this package, by name: functions of a run's folder and options that return a `Callback`."""


class Onlooker(Callback):
    """A logger that ends no run, whatever it returns: of several processes only the first one would know of it."""

    def __init__(self, logger: Callback):
        self.on_start, self.on_end, self._logger = logger.on_start, logger.on_end, logger

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Let the logger see the round."""
        self._logger.on_round(run, report)


OWN = ("tensorboard", "wandb", "mlflow")


def check(config: Any) -> None:
    """Raise UserError if a logger that a `RunConfig` asks for, or its package, is missing; before a folder is made."""
    for name in OWN:
        if getattr(config, name):
            load(name)
    for name in names_in(config.loggers):
        if not takes(LOGGERS.find(name), 2):
            raise UserError(f"logger {name} must be a function of the run's folder and its options.")


def made(config: Any, folder: Path) -> list[Callback]:
    """The loggers that a `RunConfig` asks for; of several processes the first one has them."""
    if jax.process_index() > 0:
        return []
    options = asdict(config)
    loggers: list[Callback] = [TensorBoard(folder / "tensorboard")] if config.tensorboard else []
    loggers += [WandB(folder, options)] if config.wandb else []
    loggers += [MLflow(folder, options)] if config.mlflow else []
    return loggers + [_logger(name, folder, options) for name in names_in(config.loggers)]


def _logger(name: str, folder: Path, options: dict[str, Any]) -> Callback:
    logger = called(f"logger {name}", LOGGERS.find(name), folder, options, of="the run's folder and its options")
    if not isinstance(logger, Callback):
        raise UserError(f"logger {name} must give an fp.Callback, not {type(logger).__name__}.")
    if type(logger).state is not Callback.state:
        what_to_do = "write it into the run's folder, or pass an object of the class to Python's `callbacks`"
        raise UserError(f"logger {name} has a state, and loggers are in no checkpoint: {what_to_do}.")
    return Onlooker(logger)


def load(name: str) -> ModuleType:
    """The package of one of `OWN`; UserError if it is missing."""
    return imported({"tensorboard": "tensorboardX"}.get(name, name), name)


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The entries that can be plotted over rounds.

    >>> scalars({"round": 3, "ga": 0.5, "pa": None, "per_class": [1, 2]})
    {'ga': 0.5}
    """
    numbers = (int, float, np.number)
    return {
        name: float(value)
        for name, value in row.items()
        if name != "round" and isinstance(value, numbers) and not isinstance(value, bool)
    }
