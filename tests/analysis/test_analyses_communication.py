"""FedMR's Table 3: uploads counted from the messages, beside the printed numbers."""

import csv
from pathlib import Path

import pytest

from fedjax_pcdd.analysis.traffic import COLUMNS, Upload, as_printed, upload

EXPECTED = Path(__file__).parents[2] / "fedjax_pcdd/papers/expected/fedmr_table3.csv"
PRINTED = list(csv.DictReader(EXPECTED.read_text().splitlines()))


@pytest.mark.thorough
@pytest.mark.parametrize("split", [split for split in COLUMNS if split != "svhn"])  # whose sizes are CIFAR-10's
def test_uploads_are_those_that_fedmr_prints(split):
    expected = [float(row["value"]) for row in PRINTED if row["split"] == split]
    assert len(expected) == 3
    assert list(as_printed(upload(COLUMNS[split]))) == expected


def test_svhn_is_printed_as_cifar10():
    assert COLUMNS["svhn"] == COLUMNS["cifar10"]
    values = {split: [row["value"] for row in PRINTED if row["split"] == split] for split in ("svhn", "cifar10")}
    assert values["svhn"] == values["cifar10"]


def test_prototypes_are_what_fedmr_adds():
    counts = Upload(fedavg=100, fedmr=135, counters=7, prototypes=30)
    assert (counts.without_prototypes, counts.with_prototypes) == (107, 137)
