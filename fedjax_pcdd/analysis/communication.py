"""FedMR's Table 3: what a client uploads in a round, counted from the messages that the program sends.

The table lists the whole state of the published model, which has, beside parameters and running statistics, one counter
of batches for each batch-norm layer, and of the prototypes [C, D] alone. Our models have no such counters, and our
clients send the number of samples of each class [C] beside the prototypes; both are known here, so the printed numbers
follow. Letters: C classes, D features.
"""

import math
from typing import NamedTuple

from fedjax_pcdd import models
from fedjax_pcdd.analysis.traffic import uploaded
from fedjax_pcdd.methods import METHODS


class Column(NamedTuple):
    """A data set of the table: the paper's model, C, and (H, W, channels)."""

    model: str
    classes: int
    shape: tuple[int, int, int]


COLUMNS = {
    "fmnist": Column("resnet18", 10, (28, 28, 1)),
    "svhn": Column("resnet18", 10, (32, 32, 3)),
    "cifar10": Column("resnet18", 10, (32, 32, 3)),
    "cifar100": Column("wrn28_10", 100, (32, 32, 3)),
    "isic2019": Column("efficientnet_b0_isic", 8, (200, 200, 3)),
}


class Upload(NamedTuple):
    """Scalars of one client in one round.

    Attributes:
      fedavg: message of FedAvg.
      fedmr: message of FedMR.
      counters: batch-norm layers, each with one counter in the published model.
      prototypes: C D of FedMR's message, which has C numbers of samples besides.
    """

    fedavg: int
    fedmr: int
    counters: int
    prototypes: int

    @property
    def without_prototypes(self) -> int:
        """As the paper counts."""
        return self.fedavg + self.counters

    @property
    def with_prototypes(self) -> int:
        """As the paper counts."""
        return self.without_prototypes + self.prototypes


def upload(column: Column) -> Upload:
    """Counts for a column of the table; its model is traced, not run."""
    plain = models.build(column.model, num_classes=column.classes, image_shape=column.shape)
    fedavg, fedmr = (uploaded(METHODS[name](), plain, column.shape) for name in ("fedavg", "fedmr"))
    counters = models.sizes(plain, column.shape).full - fedavg
    return Upload(fedavg, fedmr, counters, fedmr - fedavg - column.classes)


def as_printed(found: Upload) -> tuple[float, float, float]:
    """Millions without and with prototypes, and the additional cost in percent, rounded as the paper does.

    It adds rounded millions, and cuts the percentage of them off after three digits.

    >>> as_printed(Upload(11182410, 11187540, 20, 5120))
    (11.182, 11.187, 0.044)
    """
    without, more = (round(count / 1000) for count in (found.without_prototypes, found.prototypes))
    return without / 1000, (without + more) / 1000, math.floor(1e5 * more / without) / 1000
