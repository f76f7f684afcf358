"""Generic and personal accuracy against the energy E_W of FedGELA's classifier (FedGELA, Figure 4)."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pcdd.analysis.curves import frame


class Bilateral(NamedTuple):
    """Means over the seeds of each of n energies, in rising order.

    Attributes:
      ew: [n] E_W.
      ga, pa: [n] accuracies as they were given.
      ga_std, pa_std: [n] sample standard deviations, nan for a single seed.
      seeds: [n] how many.
    """

    ew: np.ndarray
    ga: np.ndarray
    ga_std: np.ndarray
    pa: np.ndarray
    pa_std: np.ndarray
    seeds: np.ndarray


def bilateral(points: Iterable[tuple[float, float, float]]) -> Bilateral:
    """Curves from single runs.

    Args:
      points: (E_W, GA, PA) of each run.

    >>> found = bilateral([(1e4, 0.5, 0.9), (1e2, 0.6, 0.8), (1e4, 0.7, 0.9)])
    >>> found.ew.tolist(), found.ga.tolist(), found.seeds.tolist()
    ([100.0, 10000.0], [0.6, 0.6], [1, 2])
    """
    values = np.array(list(points), float).reshape(-1, 3)
    energies = np.unique(values[:, 0])
    groups = [values[values[:, 0] == ew, 1:] for ew in energies]
    means = np.array([group.mean(0) for group in groups]).reshape(-1, 2)
    nothing = np.full(2, np.nan)
    spread = np.array([group.std(0, ddof=1) if len(group) > 1 else nothing for group in groups]).reshape(-1, 2)
    seeds = np.array([len(group) for group in groups], int)
    return Bilateral(energies, means[:, 0], spread[:, 0], means[:, 1], spread[:, 1], seeds)


def draw_bilateral(curves: dict[str, Bilateral], path: str | Path) -> None:
    """GA beside PA in percent over E_W on a logarithmic axis, a line for each label.

    Args:
      curves: accuracies as shares in [0, 1].
      path: of the PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.6), dpi=100, layout="constrained")
    panels = figure.subplots(1, 2)
    for label, found in curves.items():
        for panel, mean, spread in zip(panels, (found.ga, found.pa), (found.ga_std, found.pa_std), strict=True):
            panel.errorbar(found.ew, 100 * mean, 100 * np.nan_to_num(spread), marker="o", capsize=3, label=label)
    for panel, title in zip(panels, ("generic accuracy (GA)", "personal accuracy (PA)"), strict=True):
        panel.set_xscale("log")
        frame(panel, title=title, across="E_W", upwards="%")
    panels[0].legend(frameon=False)
    figure.savefig(path)
