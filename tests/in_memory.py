"""A run of options without a folder."""

from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.loop import loop
from fedjax_pcdd.training.tasks import setup


def trained(**options):
    """The run after its last round."""
    config, method = build(options)
    parts = setup([(config, method)])
    return loop(parts.simulation, parts.simulation.start(), config.rounds, [parts.accuracies(0)])
