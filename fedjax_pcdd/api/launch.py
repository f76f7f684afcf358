"""The way in: one experiment, run to its end."""

from collections.abc import Mapping
from typing import Any

from fedjax_pcdd.engine.device_errors import OutOfMemory, in_sentences
from fedjax_pcdd.methods import Method
from fedjax_pcdd.training import progress as display
from fedjax_pcdd.training.config import RunConfig
from fedjax_pcdd.training.runner import Run
from fedjax_pcdd.training.tasks import ParticipantRun, TaskRun


def kind_of_run(config: RunConfig, method: Method) -> type[Run]:
    """Whether clients are those of a partition, have models of their own, or are the domains of a task."""
    if config.task is not None:
        return TaskRun
    own = method.exchange != "never" or method.averages != "never" or config.models or config.pretrain_epochs
    return ParticipantRun if own else Run


def run(
    config: RunConfig, method: Method, origin: Mapping[str, Any] | None = None, bar: display.Bar | None = None
) -> dict[str, Any]:
    """Run (or resume) one experiment.

    Args:
      config: what to run.
      method: with its hyper-parameters.
      origin: the command and the cell of a preset that it stands for, for resolved.json; a resumed run keeps its own.
      bar: told of every round, in place of a bar of its own.

    Returns:
      What summary.json holds.

    Raises:
      UserError: a setting that cannot work, a loss that is no longer finite, or a device that fails; its text says
        what to do. One that is out of memory goes on with fewer lanes while there are any.
    """
    with in_sentences("preparing the run"):
        work = kind_of_run(config, method)(config, method)
    try:
        if origin and config.resume is None:
            work.resolve(**origin)
        with in_sentences("training"):
            progress = work.rounds(work.begin(), bar)
            summary = work.summary(progress)
        work.conclude(summary, progress.history)
        if not config.quiet:
            display.show(summary, work.folder.path)
        return summary
    except OutOfMemory as error:
        config = work.with_fewer_lanes(error)
    finally:
        work.close()
    del work  # and what it has on the device
    return run(config, method, origin, bar)
