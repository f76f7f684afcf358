"""Optional experiment trackers: the scalars of each round, over rounds."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from fedjax_pcdd.errors import UserError


class Writer(Protocol):
    """Takes the rows of metrics.jsonl."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Write the scalars of a row at `row["round"]`."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path):
        """Open the event file; UserError without tensorboardX."""
        self._writer = _load("tensorboardX", "tensorboard").SummaryWriter(str(folder))

    def write(self, row: Mapping[str, Any]) -> None:
        """One point a scalar."""
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, row["round"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases; the environment variables of wandb choose project, entity and mode."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        """Start the run, named as the folder; UserError without wandb."""
        wandb = _load("wandb", "wandb")
        self._run = wandb.init(dir=str(folder), name=Path(folder).name, config=dict(config))

    def write(self, row: Mapping[str, Any]) -> None:
        """All scalars of a row at once."""
        self._run.log(scalars(row), step=row["round"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def writers_for(tensorboard: bool, wandb: bool, folder: Path, config: Mapping[str, Any]) -> list[Writer]:
    """The trackers asked for.

    Args:
      tensorboard: write event files into `folder`/tensorboard.
      wandb: log to Weights & Biases.
      folder: of the run.
      config: shown by Weights & Biases.

    Raises:
      UserError: a package is missing.
    """
    writers: list[Writer] = []
    if tensorboard:
        writers.append(TensorBoard(Path(folder) / "tensorboard"))
    if wandb:
        writers.append(WandB(folder, config))
    return writers


def require(tensorboard: bool, wandb: bool) -> None:
    """UserError where a tracker's package is missing; asked before a run folder is made."""
    if tensorboard:
        _load("tensorboardX", "tensorboard")
    if wandb:
        _load("wandb", "wandb")


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


def _load(package: str, extra: str) -> ModuleType:
    try:
        return __import__(package)
    except ImportError as error:
        raise UserError(f"{package} is missing: pip install 'fedjax-pcdd[{extra}]'.") from error
