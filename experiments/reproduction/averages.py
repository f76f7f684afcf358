"""The means over splits that the papers print, where all of their splits have results."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_pcdd.report.expected import Expected
from reproduction.tables import LAST_TEN, Column, Result, Row

FIELDS = tuple(dict.fromkeys(LAST_TEN.values()))


def averages(columns: Sequence[Column], expected: Mapping[str, Sequence[Expected]]) -> list[Column]:
    """A column for each printed mean whose splits all have a row in common, beside the given ones."""
    by_place = {(one.scale, one.table, one.split, one.tag): one for one in columns}
    found = []
    for scale, table in dict.fromkeys((one.scale, one.table) for one in columns if not one.tag):
        means = {one.split: one.splits for one in expected.get(table, ()) if one.splits}
        for split, parts in means.items():
            members = [by_place.get((scale, table, part, "")) for part in parts]
            known = [one for one in members if one is not None]
            rows = _rows(known) if len(known) == len(parts) else ()
            if rows:
                found.append(Column(scale, table, split, "", rows, ()))
    return [*columns, *found]


def _rows(members: Sequence[Column]) -> tuple[Row, ...]:
    """Rows that all splits have, with the seeds that all splits have."""
    rows = []
    for first in members[0].rows:
        same = [one.row(first.name) for one in members]
        by_seed = [{r["seed"]: r for r in row.results} for row in same if row is not None]
        if len(by_seed) == len(members):
            seeds = sorted(set.intersection(*(set(known) for known in by_seed)))
            results = tuple(_mean(seed, [known[seed] for known in by_seed]) for seed in seeds)
            rows += [Row(first.method, first.variant, first.settings, results)] if results else []
    return tuple(rows)


def _mean(seed: int, results: Sequence[Result]) -> dict[str, Any]:
    """A result whose accuracies are the means of these; its command is those of its splits."""
    metrics = {
        name: float(np.mean([r["metrics"][name] for r in results])) for name in _in_all(r["metrics"] for r in results)
    }
    last = {name: float(np.mean([r[name] for r in results])) for name in FIELDS if all(name in r for r in results)}
    return {"seed": seed, "metrics": metrics, **last, "command": ""}


def _in_all(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    every = list(mappings)
    return [name for name in every[0] if all(name in one for one in every)]
