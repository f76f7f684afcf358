"""Which runs repeat one experiment with other seeds, and which experiments stand side by side."""

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from fedjax_pcdd.errors import UserError, is_there
from fedjax_pcdd.report.collect import INPUTS, RunRecord
from fedjax_pcdd.training.config import NOT_COMPUTED, RUN, TASK_DEFAULTS, build, partition_tag, values
from fedjax_pcdd.training.presets import Preset, preset_values, read_preset
from fedjax_pcdd.training.progress import pa_epochs, pa_name

# These options do not change what is computed.
INDIFFERENT = {*NOT_COMPUTED, "seed", "lanes", "client_state", "eval_batch"}
PARTITION = ("clients", "partition", "beta", "classes_per_client")

Names = tuple[str, str, str]  # method, variant of the preset ("" without), settings as `mu=0.1`
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class Entry:
    """One experiment: finished runs that differ only in their seeds, one per seed."""

    names: Names  # the settings are those in which it differs from its neighbours, or from its preset
    runs: tuple[RunRecord, ...]  # by rising seed
    repeated: tuple[RunRecord, ...] = ()  # runs of a seed that a newer run has too; they do not count

    @property
    def label(self) -> str:
        """Its name in sentences."""
        return label(self.names)


@dataclass(frozen=True)
class Group:
    """Experiments that stand side by side: those of a preset's split, or of one data set, partition and model."""

    title: str
    preset: str | None
    split: str | None
    entries: tuple[Entry, ...]

    @property
    def labels(self) -> list[str]:
        """Names of its experiments, without the settings that all of them have."""
        names = [entry.names for entry in self.entries]
        return [label(entry_names, shared(names)) for entry_names in names]


def listed_by(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, all in order of appearance."""
    lists: dict[K, list[V]] = {}
    for key, value in pairs:
        lists.setdefault(key, []).append(value)
    return lists


def label(names: Names, known: str = "") -> str:
    """A name for an experiment; settings that are `known` are not repeated.

    >>> label(("fedmr", "full", "rounds=2")), label(("fedmr", "", "rounds=2"), "rounds=2")
    ('fedmr full (rounds=2)', 'fedmr')
    """
    method, variant, settings = names
    name = f"{method} {variant}".rstrip()
    return f"{name} ({settings})" if settings not in ("", known) else name


def shared(names: Iterable[Names]) -> str:
    """The settings that all have, "" if they differ."""
    settings = {text for _, _, text in names}
    return settings.pop() if len(settings) == 1 else ""


class Cells:
    """The configurations that the cells of the presets in a folder stand for."""

    def __init__(self, folder: Path):
        self._folder, self._config = folder, cache(self._read)

    def preset(self, name: str) -> Preset:
        """The preset of this name; UserError if there is none."""
        return read_preset(name, self._folder)

    def settings(self, run: RunRecord, preset: str, split: str | None, variant: str | None) -> str:
        """Options in which a run differs from a cell, "" for none."""
        cell = self._config(preset, split, run.method, variant)
        return "no cell of the preset" if cell is None else _settings(run, differing([run.config, cell]))

    def _read(self, preset: str, split: str | None, method: str, variant: str | None) -> dict[str, Any] | None:
        try:
            options = preset_values(self.preset(preset), method, split, variant)
            options = (TASK_DEFAULTS if options.get("task") else {}) | options | {"method": method}
            return values(*build(options))
        except UserError:
            return None

    def cell(self, run: RunRecord, preset: str) -> tuple[str | None, str | None] | None:
        """(split, variant) of a preset that a run belongs to, as recorded or by equal options; None if to none."""
        if not is_there(self._folder / f"{preset}.yaml"):
            return None
        if run.preset == preset:
            return run.resolved.get("split"), run.resolved.get("variant")
        table = self.preset(preset)
        variants = [name for name, options in table.variants.items() if options["method"] == run.method] or [None]
        splits = [name for name, part in table.splits.items() if _agree(part, run.config)] if table.splits else [None]
        cells = ((split, variant) for split in splits for variant in variants)
        return next((cell for cell in cells if not self.settings(run, preset, *cell)), None)


def _agree(part: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether a run has the data and partition of a split."""
    return all(config.get(name) == value for name, value in part.items() if name in ("dataset", *PARTITION))


def group(runs: Sequence[RunRecord], cells: Cells, preset: str | None = None) -> list[Group]:
    """Finished runs in groups, in order of appearance.

    Args:
      runs: finished or not.
      preset: only the runs that belong to this one; None to group each run by the preset that it records.
    """
    members: dict[tuple[str, str | None, str | None], list[tuple[Names, RunRecord]]] = {}
    for run in (run for run in runs if run.summary is not None):
        name = preset or run.preset
        if name and (cell := cells.cell(run, name)) is not None:
            split, variant = cell
            names = run.method, variant or "", cells.settings(run, name, split, variant)
            members.setdefault((f"{name} · {split}" if split else name, name, split), []).append((names, run))
        elif preset is None:
            members.setdefault((_problem(run), None, None), []).append((("", "", ""), run))
    return [
        Group(*key, tuple(_by_name(_told_apart(named_runs)) if key[1] else entries(run for _, run in named_runs)))
        for key, named_runs in members.items()
    ]


def _told_apart(named: Sequence[tuple[Names, RunRecord]]) -> list[tuple[Names, RunRecord]]:
    """Runs of a preset's split, with the inputs in which they differ among their settings."""
    varied = [name for name in differing([run.settings for _, run in named]) if name in INPUTS]
    parts = [(names, _settings(run, varied), run) for names, run in named]
    return [((*names[:2], ", ".join(filter(None, (names[2], inputs)))), run) for names, inputs, run in parts]


def _problem(run: RunRecord) -> str:
    """Data set, partition and model."""
    given = run.inputs.get("model object", "by name") != "by name"
    default = "model of one's own" if given else "default model"
    return " · ".join([*data_of(run), str(run.config["models"] or run.config["model"] or default)])


def data_of(run: RunRecord) -> tuple[str, str]:
    """Data set and partition, as in a folder's name."""
    return run.dataset, partition_tag(run.config)


def entries(runs: Iterable[RunRecord]) -> list[Entry]:
    """Runs of one group as experiments, each named by the options in which they differ."""
    runs = list(runs)
    common = {*RUN, *INPUTS} - {"method", "method object"}
    run_options = [name for name in differing([run.settings for run in runs]) if name in common]
    named = []
    for method, members in listed_by((run.method, run) for run in runs).items():
        method_options = [name for name in differing([run.settings for run in members]) if name not in common]
        named += [((method, "", _settings(run, [*run_options, *method_options])), run) for run in members]
    return _by_name(named)


def _by_name(named: Iterable[tuple[Names, RunRecord]]) -> list[Entry]:
    """Runs of the same name as one experiment; of a repeated seed the newest counts."""
    experiments = []
    for names, runs in listed_by(named).items():
        kept = newest(runs)
        experiments.append(Entry(names, kept, tuple(run for run in runs if run not in kept)))
    return experiments


def newest(runs: Iterable[RunRecord]) -> tuple[RunRecord, ...]:
    """The newest run of each seed, by rising seed."""
    by_seed = {run.seed: run for run in sorted(runs, key=RunRecord.changed)}
    return tuple(by_seed[seed] for seed in sorted(by_seed))


def of_common_seeds(members: dict[Any, list[RunRecord]]) -> dict[Any, list[RunRecord]]:
    """The newest runs of each value, of the seeds that all values have; {} if there is no such seed.

    Runs that are left out are named on stderr.
    """
    common = set.intersection(*({run.seed for run in runs} for runs in members.values()))
    kept = {value: [run for run in newest(runs) if run.seed in common] for value, runs in members.items()}
    for run in [run for value, runs in members.items() for run in runs if run not in kept[value]]:
        why = "repeats a seed" if run.seed in common else f"has a seed, {run.seed}, that the others beside it have not"
        print(f"left out: {run.path} {why}.", file=sys.stderr)
    return kept if common else {}


def counted(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """The runs, except those that have the options and the seed of a newer one."""
    members = listed_by((str([(k, v) for k, v in r.settings.items() if k not in INDIFFERENT]), r) for r in runs)
    return [run for repeated in members.values() for run in newest(repeated)]


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the options and inputs that change what is computed and are not the same in all.

    Inputs that a run has not recorded, as older versions' runs, are taken for the same.
    """
    names = dict.fromkeys(name for config in configs for name in config if name not in INDIFFERENT)
    known = {name: [config for config in configs if name not in INPUTS or name in config] for name in names}
    return [name for name in names if any(c.get(name) != known[name][0].get(name) for c in known[name])]


def pa_kind(run: RunRecord) -> tuple[str, int | None, str]:
    """PA's name, the local epochs between the server's model and the test (None if not fixed), and the protocol."""
    protocol = str(run.result.get("pa_protocol")).partition(", ")[2]
    return pa_name(run.result), pa_epochs(run.result, run.config.get("local_epochs")), protocol


def alike_in_pa(kinds: Set[tuple[str, int | None, str]]) -> bool:
    """Whether PA of these `pa_kind`s is one quantity: of one protocol, and of one name or as many epochs."""
    names, epochs, protocols = (set(values) for values in zip(*kinds, strict=True))
    return len(protocols) == 1 and (len(names) == 1 or (len(epochs) == 1 and None not in epochs))


def unlike(runs: Iterable[RunRecord]) -> list[str]:
    """Sentences about what makes the numbers of finished runs less comparable: versions, devices, rounds left out."""
    runs = list(runs)
    found = {
        "versions of this library": {run.version for run in runs},
        "kinds of device": {run.result.get("device") for run in runs},
        "intervals between tests (eval_every)": {run.config.get("eval_every", 1) for run in runs},
    }
    several = {kind: sorted(values - {None}) for kind, values in found.items()}
    sentences = [f"Runs are of several {kind}: {', '.join(map(str, v))}." for kind, v in several.items() if len(v) > 1]
    lengths = [(run.path, run.rounds_done, run.config["rounds"]) for run in runs]
    ended = [f"{path} after {done} of {rounds}" for path, done, rounds in lengths if done < rounds]
    more = f", and {len(ended) - 3} more" if len(ended) > 3 else ""
    return sentences + [f"Callbacks ended runs early: {', '.join(ended[:3])} rounds{more}."] * bool(ended)


def _settings(run: RunRecord, names: Iterable[str]) -> str:
    return ", ".join(f"{name}={run.settings.get(name)}" for name in names)
