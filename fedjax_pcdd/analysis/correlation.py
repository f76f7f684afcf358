"""Cross-correlation of what participants say of public images (FCCL, Figure 5).

Huang, Ye and Du, "Learn from Others and Be Yourself in Heterogeneous Federated Learning", CVPR 2022.
Letters: K participants, N public images, C classes.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from fedjax_pcdd.losses.correlation import cross_correlation


def correlation_matrices(logits: jax.Array) -> jax.Array:
    """M_uv of each participant: the correlation of its logits for class u with the mean logits for class v.

    Args:
      logits: [K, N, C], N >= 2.

    Returns:
      [K, C, C] in float32 or better, entries in [-1, 1] (equation 3); a class without any spread has 0.
    """
    return jax.vmap(lambda own: cross_correlation(own, logits.mean(0)))(logits)


def draw_matrices(matrices: np.ndarray, names: Sequence[str], path: str | Path) -> None:
    """A picture of matrices [K, C, C] side by side, blue for -1 and red for 1, each under its participant's name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 2.4 * len(matrices), 2.8), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    for panel, matrix, name in zip(panels, matrices, names, strict=True):
        image = panel.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r")
        panel.set(title=name, xlabel="class of the mean", xticks=[], yticks=[])
    panels[0].set_ylabel("class of its own")
    figure.colorbar(image, ax=list(panels), shrink=0.8)
    figure.savefig(path)
