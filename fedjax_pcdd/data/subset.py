"""Fewer samples of a data set, drawn class by class so that the proportions of the classes stay."""

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from fedjax_pcdd.data.federation import Dataset
from fedjax_pcdd.errors import UserError


def stratified(labels: ArrayLike, samples: int, random: np.random.Generator) -> np.ndarray:
    """Positions of `samples` of the labels, in rising order; every class keeps its share to within one sample.

    Args:
      labels: [n] integers.
      samples: how many to draw, at most n.
      random: what they are drawn with.

    Returns:
      [samples] int64.
    """
    labels = np.asarray(labels)
    classes, counts = np.unique(labels, return_counts=True)
    share = counts * (samples / len(labels))
    taken = share.astype(int)
    left_over = samples - taken.sum()
    taken[np.argsort(taken - share, kind="stable")[:left_over]] += 1
    chosen = [random.permutation(np.flatnonzero(labels == c))[:count] for c, count in zip(classes, taken, strict=True)]
    return np.sort(np.concatenate(chosen))


def subset(dataset: Dataset, train: int | None, test: int | None, seed: int) -> Dataset:
    """The data set with fewer training or test samples; None leaves them as they are.

    Raises:
      UserError: there are fewer than asked for.
    """
    changed = {}
    for part, samples in (("train", train), ("test", test)):
        if samples is None:
            continue
        labels, groups = (getattr(dataset, f"{name}_{part}") for name in ("y", "groups"))
        if samples > len(labels):
            raise UserError(
                f"'{dataset.name}' has {len(labels)} {part} samples, not --{part}-samples={samples}: lower it or "
                "leave it out."
            )
        kept = stratified(labels, samples, np.random.default_rng([seed, *f"{part} samples".encode()]))
        changed |= {f"x_{part}": getattr(dataset, f"x_{part}")[kept], f"y_{part}": labels[kept]}
        changed |= {} if groups is None else {f"groups_{part}": groups[kept]}
    return replace(dataset, **changed)
