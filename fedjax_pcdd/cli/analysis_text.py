"""What the analyses print: names of runs, the papers' numbers beside them, numbers and tables as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_pcdd.registry import short_name
from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.report.expected import EXPECTED, read_expected
from fedjax_pcdd.report.grouping import data_of
from fedjax_pcdd.report.tables import markdown, texts

Options = dict[str, str]


def labels_of(records: Sequence[RunRecord]) -> dict[Path, str]:
    """By their paths the names of the folders, or the whole paths if two have the same name."""
    names = {record.path: record.path.name for record in records}
    return names if len({*names.values()}) == len(names) else {path: str(path) for path in names}


def partition_of(record: RunRecord) -> str:
    """Data set, partition and number of clients, as `cifar10 dirichlet0.1, 10 clients` or `cifar10 P10C2`."""
    dataset, tag = data_of(record)
    partition, clients = record.config["partition"], record.config["clients"]
    tag = partition if tag == short_name(partition) else tag  # files in different folders may have the same name
    return f"{dataset} {tag}, {clients} clients" if clients and f"P{clients}C" not in tag else f"{dataset} {tag}"


def printed(record: RunRecord, metric: str, method: str | None = None) -> float | None:
    """The printed number of the cell that a run stands for, None if it stands for none."""
    if record.preset is None:
        return None
    cell = (record.resolved.get("split") or "", method or record.method, record.resolved.get("variant") or "", metric)
    numbers = read_expected(EXPECTED, record.preset)
    return next((n.value for n in numbers if (n.split, n.method, n.variant, n.metric) == cell), None)


def number(value: Any) -> str:
    """A number with four significant digits, - for None.

    >>> number(None), number(12), number(0.123456), number(1234.56)
    ('-', '12', '0.1235', '1235')
    """
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned so that it reads as text too."""
    return markdown(texts("", heads, lines), aligned=True).rstrip()
