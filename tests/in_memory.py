"""Trains what options describe, without a run folder."""

from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.loop import loop
from fedjax_pcdd.training.tasks import setup


def trained(**options):
    """The run after its last round."""
    config, method = build(options)
    run_setup = setup([(config, method)])
    return loop(run_setup.simulation, run_setup.simulation.start(), config.rounds, [run_setup.accuracies(0)])
