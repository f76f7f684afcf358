"""The callback that saves a run, and the check before a run begins that the disk has room for it."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from fedjax_pcdd.engine.storage import OnHost
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training import interrupts
from fedjax_pcdd.training.checkpoint import Checkpoints
from fedjax_pcdd.training.client_log import Changed
from fedjax_pcdd.training.loop import Callback, Progress, RoundReport, Run
from fedjax_pcdd.training.metrics import History
from fedjax_pcdd.training.named_arrays import bytes_of

_SMALL_FILES = 2**17


class Checkpoint(Callback):
    """Saves a run and the state of its other callbacks; the last round is always saved."""

    def __init__(self, checkpoints: Checkpoints, callbacks: Sequence[Callback] = ()):
        """Args: callbacks: those that may have a state."""
        self.checkpoints = checkpoints
        self.resolved: Mapping[str, Any] | None = None  # content of resolved.json, kept in each checkpoint
        self.began_with: dict[str, Any] | None = None  # inputs of the restored run
        self.missing: list[str] = []  # callbacks that the restored run had and this one lacks
        self._named: dict[str, Callback] = {}  # by class; later ones of a class of the same name have a number
        for callback in callbacks:
            name = type(callback).__name__
            number = 1 + sum(type(other).__name__ == name for other in self._named.values())
            self._named[name if number == 1 else f"{name}-{number}"] = callback

    def begin(self, state: Any, best: Any) -> tuple[Any, Progress] | None:
        """State and progress of the newest intact full checkpoint, if there is any; restores the callbacks too.

        Args:
          state: a `State` with the wanted shapes.
          best: variables with the shapes of the best global model's, () if none is kept.
        """
        restored = self.checkpoints.restore((state.servers, best), (state.clients, state.statistics))
        if restored is None:
            return None
        (servers, best), record = restored.server, dict(restored.history)
        states, stopped = record.pop("callbacks", {}), record.pop("stopped", False)
        self.began_with = record.pop("resolved", {}).get("inputs")
        self.missing = sorted(states.keys() - self._named.keys())
        for name in states.keys() & self._named.keys():
            self._named[name].restore(states[name])
        clients, statistics = restored.clients
        state = state._replace(servers=servers, clients=clients, statistics=statistics)
        return state, Progress(restored.round, History(**record), best, stopped)

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Save the round if it is due or the last one: its state, its history and what else is to be restored."""
        last = interrupts.pending(run.round) is not None or run.is_over
        if not (self.checkpoints.is_due(run.round) or last):
            return
        started, state = perf_counter(), run.state
        history = run.history.to_json()
        states = {name: saved for name, callback in self._named.items() if (saved := callback.state()) is not None}
        extra = {"callbacks": states, "stopped": run.stopped, "resolved": self.resolved}
        if extra := {name: value for name, value in extra.items() if value}:
            try:
                history = f"{history[:-1]}, {json.dumps(extra)[1:]}"
            except (TypeError, ValueError) as error:
                names = " or ".join(states)
                raise UserError(f"the state of {names} is not JSON ({error}): return numbers or texts.") from error
        clients, storage = (state.clients, state.statistics), getattr(run.simulation, "storage", None)
        saved_clients: Any = clients
        if isinstance(storage, OnHost) and len(run.runs) == 1 and jax.tree.leaves(clients):
            saved_clients = lambda: Changed(storage.changed(), clients, storage.owners)  # noqa: E731
        self.checkpoints.save(run.round, (state.servers, run.best), saved_clients, history, force=last, started=started)

    def on_end(self, run: Run) -> None:
        """Write what is not yet written."""
        self.checkpoints.close()


def required_bytes(server: Any, clients: Any) -> int:
    """Disk space in bytes of one full checkpoint; the trees may be abstract."""
    return bytes_of(server) + bytes_of(clients) + _SMALL_FILES


def check_space(folder: Path, required: int) -> None:
    """Raise UserError if the disk of a folder, which need not exist yet, has fewer free bytes than required."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    free = shutil.disk_usage(existing).free
    if free < required:
        raise UserError(
            f"{folder} needs {required / 1e6:.2f} MB for checkpoints, its disk has {free / 1e6:.2f} MB left: "
            "free some space, choose another `run_dir` or keep fewer checkpoints."
        )
