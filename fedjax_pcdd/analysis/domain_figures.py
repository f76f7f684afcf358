"""Figures for tasks by domain: 2-D embeddings, accuracy over the rounds, ablations (FCCL, Figures 4, 6 to 8).

Huang, Ye and Du, "Learn from Others and Be Yourself in Heterogeneous Federated Learning", CVPR 2022.
Letters: n samples, D features, K participants, one per domain.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pcdd.analysis.curves import add_legend, curve, frame, look, new_figure, series

Sample = tuple[np.ndarray, np.ndarray]  # features [n, D] and labels [n]
LAST = 20  # number of rounds whose changes are averaged


def separation(features: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Between-class over within-class variance, and mean silhouette, of features [n, D] with labels [n], >= 2 classes.

    >>> separation(np.array([[0.0], [2.0], [10.0], [12.0]]), np.array([0, 0, 1, 1]))[0]
    25.0
    """
    from sklearn.metrics import silhouette_score

    classes, inverse = np.unique(labels, return_inverse=True)
    means = np.stack([features[labels == c].mean(0) for c in classes])[inverse]
    between, within = np.square(means - features.mean(0)).sum(), np.square(features - means).sum()
    return float(between / within), float(silhouette_score(features, labels))


def balanced(labels: np.ndarray, each: int, seed: int = 0) -> np.ndarray:
    """Rows of at most `each` random samples of every class, in the order of the classes."""
    random = np.random.default_rng(seed)
    return np.concatenate([random.permutation(np.flatnonzero(labels == c))[:each] for c in np.unique(labels)])


def draw_embeddings(panels: Mapping[str, Sequence[tuple[str, Sample]]], path: str | Path) -> None:
    """Write a PNG of t-SNE embeddings of features, one per panel, coloured by class (FCCL, Figure 4).

    Args:
      panels: for each row, by its name, its panels' titles and samples; all rows have the same length.
    """
    from sklearn.manifold import TSNE

    columns = max(map(len, panels.values()))
    figure = new_figure(2.6 * columns + 0.4, 2.7 * len(panels))
    axes = figure.subplots(len(panels), columns, squeeze=False)
    for row, (name, row_panels) in zip(axes, panels.items(), strict=True):
        for panel, (title, (features, labels)) in zip(row, row_panels, strict=True):
            perplexity = min(30.0, (len(features) - 1) / 3)
            x, y = TSNE(init="pca", perplexity=perplexity, random_state=0).fit_transform(features).T
            panel.scatter(x, y, c=labels, cmap="tab10", s=5)
            panel.set(xticks=[], yticks=[])
            panel.set_title(title, fontsize=9, parse_math=False)
        row[0].set_ylabel(name, parse_math=False)
    figure.savefig(path)


def fluctuation(values: np.ndarray) -> float:
    """Mean absolute change from round to round over the last `LAST` rounds of values [T]; nan for a single round."""
    return float(np.abs(np.diff(values[-LAST - 1 :])).mean()) if len(values) > 1 else float("nan")


def draw_tasks(runs: Mapping[str, Sequence[Mapping[str, Any]]], top: int, path: str | Path) -> None:
    """Write a PNG of intra-domain accuracy and local objective over the rounds, one line per run (FCCL, Figure 6).

    Args:
      runs: lines of metrics.jsonl by label; a line of round 0 is that of the pre-trained models.
      top: an answer is right if the label is among the first `top`.
    """
    figure = new_figure(9.0, 3.6)
    left, right = figure.subplots(1, 2)
    for i, (label, rows) in enumerate(runs.items()):
        colour, style = look(i)
        curve(left, *series(rows, f"intra_top{top}", factor=100), color=colour, linestyle=style, label=label)
        curve(right, *series(rows, "local_objective"), color=colour, linestyle=style)
    frame(left, title="own domain, mean over participants", upwards=f"top-{top} accuracy (%)")
    frame(right, title="local objective, mean over participants")
    add_legend(figure, loc="outside lower center", ncols=7, fontsize=9)
    figure.savefig(path)


def draw_bars(panels: Mapping[str, Mapping[str, Sequence[float]]], groups: Sequence[str], path: str | Path) -> None:
    """Write a PNG of groups of bars in percent, with a bar for each label (FCCL, Figures 7 and 8).

    Args:
      panels: by title and label, the number of each group, a share in [0, 1].
      groups: names below the bars.
    """
    figure = new_figure(4.6 * len(panels), 3.4)
    for panel, (title, bars) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        width, ticks = 0.8 / len(bars), np.arange(len(groups))
        for i, (label, shares) in enumerate(bars.items()):
            middles = ticks + (i - (len(bars) - 1) / 2) * width
            panel.bar(middles, 100 * np.array(shares), width, label=label, color=look(i)[0])
        frame(panel, title=title, across="", upwards="accuracy (%)")
        panel.set_xticks(ticks, groups, fontsize=8)
    add_legend(panel, fontsize=8)
    figure.savefig(path)
