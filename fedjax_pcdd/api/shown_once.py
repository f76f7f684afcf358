"""The figure of `plot`, in a file that is imported on the first plot, because matplotlib is slow to import."""

import io

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


class ShownOnce(Figure):
    """A figure that a notebook shows as the value of a cell, and not a second time below the cell."""

    def _ipython_display_(self) -> None:
        from IPython.display import Image, display  # pyright: ignore[reportMissingImports] -- a notebook has it

        picture = io.BytesIO()
        self.savefig(picture, format="png", bbox_inches="tight")
        display(Image(picture.getvalue()))
        plt.close(self)
