"""Two models on one input: a private one, whose output is used, and a meme, which is exchanged (FML)."""

from typing import Any

import flax.linen as nn
import jax

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.models.classifier import Classifier, Outputs, Variables


class Pair(nn.Module):
    """Parameters and statistics are {"private": ..., "meme": ...}; the output is the private model's.

    `forward(model.meme, part(variables, "meme"), ...)` runs the other one.
    """

    private: Classifier
    meme: Classifier
    smallest: int = 0  # side of the smallest images that the meme takes

    @property
    def num_classes(self) -> int:
        """C."""
        return self.private.num_classes

    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array | None = None) -> Outputs:
        """Runs [B, ...] inputs through the private model."""
        if self.is_initializing():
            if min(x.shape[1:3]) < self.smallest:
                size, least = f"{x.shape[1]}x{x.shape[2]}", f"{self.smallest}x{self.smallest}"
                raise UserError(f"the meme needs images of {least} pixels or more, not {size}: choose another `meme`.")
            self.meme(x, train=train, mask=mask)
        return self.private(x, train=train, mask=mask)


def part(variables: Variables, name: str) -> Variables:
    """The variables of "private" or "meme"."""
    return {collection: tree[name] for collection, tree in variables.items() if name in tree}


def join(**parts: Variables) -> dict[str, Any]:
    """Variables of a pair from those of its parts."""
    collections = {collection for variables in parts.values() for collection in variables}
    return {c: {name: v[c] for name, v in parts.items() if c in v} for c in sorted(collections)}
