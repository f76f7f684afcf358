"""One run in several processes, perhaps on several hosts: how they join, which one writes, what is printed if one dies.

All processes compute the same plan and train their shares; only the first writes the run's folder and prints. Each of
the others has a folder of its own, which is removed when it ends.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_pcdd.engine.devices import select_device
from fedjax_pcdd.errors import UserError, in_one_line
from fedjax_pcdd.methods import Method
from fedjax_pcdd.training import loggers
from fedjax_pcdd.training.config import FOLDERS, RUN, RunConfig, values

# Words in the errors of collective operations and of JAX's coordination service when a process is gone.
GONE = ("gloo", "nccl", "unavailable", "deadline_exceeded", "coordination", "heartbeat", "connection", "socket closed")

# Options that processes may have for themselves.
OF_A_PROCESS = {*FOLDERS, "process", "coordinator", "data_dir", "quiet", "profile", *loggers.OWN}

LISTEN = """
import shutil, sys
last = ""
for line in sys.stdin:
    last = line.strip()
if last:
    print(last, file=sys.stderr)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class Obituary:
    """Prints a sentence on stderr if this process ends without a message: killed, or aborted by JAX's service."""

    def __init__(self, folder: Path):
        """Start the process that prints it, and that removes the folder at the end."""
        command = [sys.executable, "-S", "-E", "-c", LISTEN, str(folder)]
        self._listener = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def prepare(self, sentence: str) -> None:
        """Set the sentence that is printed from now on; an empty one prints nothing."""
        assert self._listener.stdin is not None
        self._listener.stdin.write(f"{sentence}\n".encode())
        self._listener.stdin.flush()

    def drop(self) -> None:
        """Print nothing and remove the folder: there was no error, or it has been printed."""
        self.prepare("")
        self._listener.communicate()


@contextmanager
def together(config: RunConfig, method: Method, spell: Callable[[str], str]) -> Iterator[RunConfig]:
    """Take part in a run of several processes, if the options say so; if something fails in it, the process ends.

    Args:
      config, method: of all processes; other options in one of them end all.
      spell: writes the fields in a sentence as the user knows them.

    Yields:
      The options of this process: without those about processes, and for all but the first with a temporary folder.
    """
    if config.coordinator is None:
        with _survived(config, spell):
            yield config
        return
    temporary = Path(tempfile.mkdtemp())
    obituary = Obituary(temporary)
    try:
        missing = f"not all processes came to `coordinator={config.coordinator}` within {config.patience} s"
        obituary.prepare(spell(f"{missing}: start all of them, with the same `coordinator` and `processes`."))
        _join(config)
        select_device(config.device, config.devices)  # before `_who`, which initialises JAX
        obituary.prepare(spell(f"{_who()} ended, killed or because another one did: {_advice(config)}"))
        agree({f"`{name}`": value for name, value in values(config, method).items() if name not in OF_A_PROCESS})
        yield _own_options(config, temporary)
        jax.distributed.shutdown()
    except BaseException as error:
        code, sentence = _ending(error, config)
        print(spell(sentence).replace(str(temporary / "run"), str(config.resume or config.run_dir)), file=sys.stderr)
        obituary.drop()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an orderly exit would wait for the other processes
    obituary.drop()


@contextmanager
def _survived(config: RunConfig, spell: Callable[[str], str]) -> Iterator[None]:
    """Print advice if a compiler ends the process, as those for GPUs do when one of their checks fails."""
    select_device(config.device, config.devices)
    if jax.default_backend() == "cpu":
        yield
        return
    obituary = Obituary(Path(tempfile.mkdtemp()))
    advice = "or try another `precision`, or `tune=off`, in a new one"
    obituary.prepare(spell(f"the run ended, killed or by a compiler that failed: {_advice(config)[:-1]}, {advice}."))
    try:
        yield
    finally:
        obituary.drop()


def _join(config: RunConfig) -> None:
    has_address = config.coordinator != "auto"
    jax.config.update("jax_enable_preemption_service", False)  # it would treat SIGTERM as a mere notice
    try:
        jax.distributed.initialize(
            config.coordinator if has_address else None, config.processes, config.process,
            cluster_detection_method="deactivate" if has_address else None, initialization_timeout=config.patience,
            heartbeat_timeout_seconds=config.patience,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        if "must be defined" in str(error) or "should be defined" in str(error):
            raise UserError(
                "JAX finds neither SLURM, Open MPI nor a TPU that tells of other processes: give "
                "`coordinator=HOST:PORT`, `processes` and `process`."
            ) from error
        check = f"check `coordinator={config.coordinator}`"
        raise UserError(f"cannot meet the other processes ({in_one_line(error)}): {check}.") from error


def _own_options(config: RunConfig, temporary: Path) -> RunConfig:
    process_options = ("coordinator", "processes", "process", "patience")
    config, folder = replace(config, **{name: RUN[name].default for name in process_options}), temporary / "run"
    if jax.process_index() == 0:
        return config
    config = replace(config, run_dir=folder, quiet=True, tensorboard=False, wandb=False, mlflow=False)
    if config.resume is None:
        return config
    folder.mkdir()
    for name in ("config.yaml", "resolved.json"):
        with suppress(FileNotFoundError):
            shutil.copy(config.resume / name, folder)
    for name in ("checkpoints", "clients"):
        (folder / name).symlink_to((config.resume / name).absolute())
    return replace(config, resume=folder)


def _who() -> str:
    return f"process {jax.process_index()} of {jax.process_count()}"


def _advice(config: RunConfig) -> str:
    folder = config.resume or config.run_dir or "the run's folder"
    return f"continue with `resume={folder}`, in any number of processes."


def _ending(error: BaseException, config: RunConfig) -> tuple[int, str]:
    """The exit code of this process, and why it ends."""
    if isinstance(error, UserError):
        return 2, error.sentence
    if isinstance(error, KeyboardInterrupt):
        return getattr(error, "code", 130), f"stopped; {f'{error}: ' if str(error) else ''}{_advice(config)}"
    if not any(word in str(error).lower() for word in GONE):
        return 1, "".join(traceback.format_exception(error)).rstrip()
    return 1, f"{_who()} lost another one ({in_one_line(error)}): {_advice(config)}"


@contextmanager
def in_turn() -> Iterator[None]:
    """A context that the first process goes through before all others."""
    is_distributed, is_first = jax.process_count() > 1, jax.process_index() == 0
    if is_distributed and not is_first:
        multihost_utils.sync_global_devices("the first process is done")
    try:
        yield
    finally:
        if is_distributed and is_first:
            multihost_utils.sync_global_devices("the first process is done")


def agree(own: Mapping[str, Any]) -> None:
    """Raise a UserError in every process unless all of them have the same values, which are written as JSON."""
    if jax.process_count() == 1:
        return
    own = json.loads(json.dumps(own, default=str))
    first = json.loads(told_by_first(json.dumps(own)))
    wrong = [name for name in first | own if own.get(name) != first.get(name)]
    same = "start all processes with the same options and data"
    if not multihost_utils.process_allgather(np.array(bool(wrong))).any():
        return
    if not wrong:
        raise UserError(f"another process has other options or data than {_who()}: {same}.")
    name, here, there = wrong[0], own.get(wrong[0]), first.get(wrong[0])
    difference = f"is {here}, and {there} in the first one" if name.startswith("`") else "is not that of the first one"
    raise UserError(f"in {_who()} {name} {difference}: {same}.")


def told_by_first(text: str) -> str:
    """The first process's text, in every process."""
    if jax.process_count() == 1:
        return text
    content = np.frombuffer(os.fsencode(text), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
    return os.fsdecode(bytes(np.asarray(multihost_utils.broadcast_one_to_all(np.resize(content, size)))))
