"""Which runs repeat one experiment with other seeds, and which experiments stand side by side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.training.config import MAY_CHANGE, PLACE, RUN, TASK_DEFAULTS, RunConfig, build, partition_tag, values
from fedjax_pcdd.training.presets import Preset, preset_values, read_preset

# These options do not change what is computed.
INDIFFERENT = {*PLACE, *MAY_CHANGE, "seed", "lanes", "client_state", "eval_batch"}
PARTITION = ("clients", "partition", "beta", "classes_per_client")


@dataclass(frozen=True)
class Entry:
    """One experiment: finished runs that differ in their seeds alone, one a seed.

    Args:
      method: its name.
      variant: of the preset, "" without.
      settings: what tells it from its neighbours, or from its preset, as `mu=0.1`.
      runs: by rising seed.
      repeated: runs of a seed that a newer run has too; they do not count.
    """

    method: str
    variant: str
    settings: str
    runs: tuple[RunRecord, ...]
    repeated: tuple[RunRecord, ...] = ()

    @property
    def label(self) -> str:
        """How tables and curves call it."""
        return label(self.method, self.variant, self.settings)


@dataclass(frozen=True)
class Group:
    """Experiments that stand side by side: those of a preset's split, or of one data set, partition and model."""

    title: str
    preset: str | None
    split: str | None
    entries: tuple[Entry, ...]

    @property
    def labels(self) -> list[str]:
        """What its experiments are called, without the settings that all of them have."""
        same = shared(entry.settings for entry in self.entries)
        return [label(entry.method, entry.variant, entry.settings, same) for entry in self.entries]


def label(method: str, variant: str, settings: str, known: str = "") -> str:
    """A name for an experiment; settings that are `known` are not repeated.

    >>> label("fedmr", "full", "rounds=2"), label("fedmr", "", "rounds=2", "rounds=2")
    ('fedmr full (rounds=2)', 'fedmr')
    """
    name = f"{method} {variant}".rstrip()
    return f"{name} ({settings})" if settings not in ("", known) else name


def shared(settings: Iterable[str]) -> str:
    """The settings that all have, "" where they differ."""
    found = set(settings)
    return found.pop() if len(found) == 1 else ""


class Cells:
    """What the cells of the presets in a folder would run."""

    def __init__(self, folder: Path):
        self._folder, self._presets, self._configs = folder, {}, {}

    def preset(self, name: str) -> Preset:
        """The preset of this name; UserError: there is none."""
        if name not in self._presets:
            self._presets[name] = read_preset(name, self._folder)
        return self._presets[name]

    def known(self, name: str | None) -> bool:
        """Whether the folder holds this preset."""
        return name is not None and (self._folder / f"{name}.yaml").is_file()

    def deviations(self, run: RunRecord, preset: str, split: str | None, variant: str | None) -> dict[str, Any] | None:
        """Options in which a run differs from a cell; None where the preset has no such cell."""
        key = (preset, split, run.method, variant)
        if key not in self._configs:
            self._configs[key] = self._config(*key)
        cell = self._configs[key]
        return None if cell is None else {name: run.config.get(name) for name in _differing([run.config, cell])}

    def _config(self, preset: str, split: str | None, method: str, variant: str | None) -> dict[str, Any] | None:
        try:
            given = preset_values(self.preset(preset), method, split, variant)
            given = (TASK_DEFAULTS if given.get("task") else {}) | given | {"method": method}
            return values(*build(given))
        except UserError:
            return None

    def place(self, run: RunRecord, preset: str) -> tuple[str | None, str | None] | None:
        """(split, variant) of a preset where a run belongs: recorded, or the same options; None: nowhere."""
        if run.preset == preset:
            return run.resolved.get("split"), run.resolved.get("variant")
        found = self.preset(preset)
        variants = [name for name, one in found.variants.items() if one["method"] == run.method] or [None]
        splits = [name for name, part in found.splits.items() if _agree(part, run.config)] if found.splits else [None]
        places = ((split, variant) for split in splits for variant in variants)
        return next((place for place in places if self.deviations(run, preset, *place) == {}), None)


def _agree(part: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether what a split says of data and partition holds for a run."""
    return all(config.get(name) == value for name, value in part.items() if name in ("dataset", *PARTITION))


def group(runs: Sequence[RunRecord], cells: Cells, preset: str | None = None) -> list[Group]:
    """Finished runs in groups, in order of appearance.

    Args:
      runs: finished or not.
      cells: the presets.
      preset: only the runs that belong to this one; without it each run where it was recorded.
    """
    places: dict[_Place, list[tuple[RunRecord, str | None]]] = {}
    for run in runs:
        if run.summary is None:
            continue
        name = preset if preset is not None else run.preset
        place = cells.place(run, name) if name is not None and cells.known(name) else None
        if place is not None:
            title = " · ".join(part for part in (name, place[0]) if part)
            places.setdefault(_Place(title, name, place[0]), []).append((run, place[1]))
        elif preset is None:
            places.setdefault(_Place(_problem(run), None, None), []).append((run, None))
    return [_group(place, members, cells) for place, members in places.items()]


class _Place(NamedTuple):
    """Where a run belongs: the key of its group."""

    title: str
    preset: str | None
    split: str | None


def _group(place: _Place, members: list[tuple[RunRecord, str | None]], cells: Cells) -> Group:
    title, preset, split = place
    if preset is None:
        return Group(title, None, None, tuple(entries(run for run, _ in members)))
    found: dict[tuple[str, str, str], list[RunRecord]] = {}
    for run, variant in members:
        deviations = cells.deviations(run, preset, split, variant)
        settings = "no cell of the preset" if deviations is None else _text(deviations)
        found.setdefault((run.method, variant or "", settings), []).append(run)
    return Group(title, preset, split, tuple(_entry(*names, same) for names, same in found.items()))


def _problem(run: RunRecord) -> str:
    """Data set, partition and model."""
    return " · ".join([*data_of(run), str(run.config["models"] or run.config["model"] or "default model")])


def data_of(run: RunRecord) -> tuple[str, str]:
    """Data set and partition, as a folder's name has them."""
    chosen = {name: run.config[name] for name in ("task", *PARTITION)}
    return run.dataset, partition_tag(RunConfig(**chosen))


def entries(runs: Iterable[RunRecord]) -> list[Entry]:
    """Runs of one group as experiments, each told from the others by the options in which they differ."""
    runs = list(runs)
    by_method: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    everywhere = [name for name in _differing([run.config for run in runs]) if name in RUN and name != "method"]
    found: dict[tuple[str, str], list[RunRecord]] = {}
    for method, same in by_method.items():
        own = [name for name in _differing([run.config for run in same]) if name not in RUN]
        for run in same:
            settings = _text({name: run.config.get(name) for name in (*everywhere, *own)})
            found.setdefault((method, settings), []).append(run)
    return [_entry(method, "", settings, same) for (method, settings), same in found.items()]


def _entry(method: str, variant: str, settings: str, runs: Sequence[RunRecord]) -> Entry:
    newest: dict[int, RunRecord] = {}
    for run in sorted(runs, key=RunRecord.changed):
        newest[run.seed] = run
    kept = tuple(newest[seed] for seed in sorted(newest))
    return Entry(method, variant, settings, kept, tuple(run for run in runs if run not in kept))


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the options that matter and are not the same in all."""
    names = dict.fromkeys(name for config in configs for name in config)
    first = configs[0]
    return [
        name for name in names
        if name not in INDIFFERENT and any(config.get(name) != first.get(name) for config in configs)
    ]  # fmt: skip


def _text(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
