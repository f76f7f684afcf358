"""The way in: one experiment, run to its end."""

from collections.abc import Mapping
from typing import Any

from fedjax_pcdd.harness import display, records
from fedjax_pcdd.harness.config import RunConfig
from fedjax_pcdd.harness.runner import Run
from fedjax_pcdd.harness.tasks import ParticipantRun, TaskRun
from fedjax_pcdd.methods import Method


def kind_of_run(config: RunConfig, method: Method) -> type[Run]:
    """Whether clients are those of a partition, have models of their own, or are the domains of a task."""
    if config.task is not None:
        return TaskRun
    own = method.exchange != "never" or method.averages != "never" or config.models or config.pretrain_epochs
    return ParticipantRun if own else Run


def run(config: RunConfig, method: Method, origin: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run (or resume) one experiment.

    Args:
      config: what to run.
      method: with its hyper-parameters.
      origin: the command and the cell of a preset that it stands for, for resolved.json; a resumed run keeps its own.

    Returns:
      What summary.json holds.

    Raises:
      UserError: a setting that cannot work, or a loss that is no longer finite; its text says what to do.
    """
    work = kind_of_run(config, method)(config, method)
    try:
        if origin and config.resume is None:
            work.folder.write_json("resolved.json", work.folder.read_json("resolved.json") | dict(origin))
        progress = work.rounds(work.begin())
        summary = work.summary(progress)
        work.folder.write_summary(summary)
        title = f"{config.method}, {config.task or config.dataset}, seed {config.seed}"
        records.draw_curves(progress.history.rows, work.folder.path / "curves.png", title)
    finally:
        work.checkpoints.close()
        for writer in work.writers:
            writer.close()
    if not config.quiet:
        display.show(summary, work.folder.path)
    return summary
