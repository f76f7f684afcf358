"""What is read from the folder of one finished run for `analyse.py`: tracked quantities, counts of scalars."""

from typing import Any, NamedTuple

from fedjax_pcdd.analysis.traffic import in_words, traffic
from fedjax_pcdd.data import sources
from fedjax_pcdd.data.federation import load_partition
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.training.build import build_model, default_model
from fedjax_pcdd.training.config import parse_config
from fedjax_pcdd.training.folder import TRACK, RunFolder
from fedjax_pcdd.training.tracking import Tracker


def rows_of(record: RunRecord, name: str) -> list[dict[str, Any]]:
    """Lines of track.jsonl that have a quantity; where there are none, one of the run's last checkpoint."""
    found = [row for row in RunFolder(record.path).rows(TRACK) if name in row]
    return found or [_last(record, name)]


def _last(record: RunRecord, name: str) -> dict[str, Any]:
    from fedjax_pcdd.api.runs import load_run

    history = load_run(record.path)
    round, simulation = len(history.rows), history.simulation
    tracker, plan = Tracker([name], simulation, history.config.seed), simulation.plan(round)
    return {"round": round, **tracker.entry(history.state, plan[1], tracker.before(round, history.state, plan))}


class Counted(NamedTuple):
    """What a run's method sends, keeps and holds.

    Attributes:
      up, down, held: scalars of one client in one round, see `analysis.traffic.Traffic`.
      cohort: clients of a round.
      up_words, down_words, kept_words, held_words: the same as sums of known sizes.
    """

    up: int
    down: int
    held: int
    cohort: int
    up_words: str
    down_words: str
    kept_words: str
    held_words: str


def counted(record: RunRecord) -> Counted:
    """Counts with the method, model and data set of a run.

    Raises:
      UserError: it is a run over the domains of a task, or its data set is not at hand.
    """
    config, method = parse_config(record.text, str(record.path / "config.yaml"))
    if config.task is not None:
        raise UserError(f"{record.path} is a run over the domains of a task, which are not counted: leave it out.")
    dataset = sources.load(config.dataset, config.data_dir)
    name = (config.models or config.model or default_model(dataset)).split(",")[0]
    found = traffic(method, build_model(config, name, dataset), dataset.x_train.shape[1:])
    cohort = config.cohort or len(load_partition(record.path / "partition.npz").train)
    counts = (found.up, found.down, found.client, found.held)
    words = [in_words(count, found, dataset.num_classes) for count in counts]
    return Counted(found.up, found.down, found.held, cohort, *words)
