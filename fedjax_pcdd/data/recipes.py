"""The tasks by domain that are known: their participants, sizes, epochs and public images."""

from typing import NamedTuple

from fedjax_pcdd.data.domain_shifts import DOMAIN_SHIFTS


class Recipe(NamedTuple):
    """What is known of a task before its data is read; fields as in `domains.Task`.

    `layout` says where the images lie: "shifts" (made from the built-in digits), "files" (a data set for each domain)
    or "archive" (one file without a split). A size of None takes all images that are not tests.
    """

    description: str
    layout: str
    domains: tuple[str, ...]
    private: tuple[int | None, ...]
    local_epochs: tuple[int, ...]
    num_classes: int = 10
    top: int = 1
    public: str = "cifar100"
    public_samples: int = 5000
    public_epochs: int = 1
    side: int = 32


TASKS = {
    "digits_domains": Recipe(
        "four looks of scikit-learn's digits, built in", "shifts",
        tuple(DOMAIN_SHIFTS), (150,) * 4, (5,) * 4, public="digits_public", public_samples=1000, side=16,
    ),
    "digits2": Recipe("the first two domains of digits", "files", ("mnist", "usps"), (150, 80), (40, 35)),
    "digits": Recipe(
        "MNIST, USPS, SVHN and SYN (FCCL, tables 1 and 3)", "files",
        ("mnist", "usps", "svhn", "syn"), (150, 80, 5000, 1800), (40, 35, 3, 4),
    ),
    "office_caltech10": Recipe(
        "ten classes of objects from Amazon, Caltech-256, a DSLR and a webcam", "archive",
        ("amazon", "caltech10", "dslr", "webcam"), (None,) * 4, (15, 15, 30, 30),
    ),
    "office_home": Recipe(
        "Office-Home: 65 classes of objects in four styles (FCCL, tables 1 and 2)", "archive",
        ("Art", "Clipart", "Product", "Real World"), (1400, 2000, 2500, 2000), (10, 6, 6, 6),
        num_classes=65, top=5, public_epochs=2,
    ),
}  # fmt: skip
"""The tasks by name."""
