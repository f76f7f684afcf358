"""Plans: which cells of the papers' tables to run, in which order, and with which settings over their presets.

    settings: {model: simple_cnn, rounds: 30}        over the preset, in every cell
    blocks:
      - table: fedmr/table1
        splits: [P10C2]                                by default all of the preset
        methods: [fedavg, fedmr]                       by default all of the preset that have no variants
        variants: [intra-only]                         by default all, if no methods are named either
        seeds: [0, 1, 2]
        settings: {lr: 0.02}                           over the plan's
        own: {fedgela: {ew: 4}}                        for one method or variant
        tag: doubled                                   a reading that the table does not have

Cells are in the order seed, split, method, so that a block that is cut short has all methods of its first seeds.
"""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pcdd.cli.options import configure
from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods import METHODS, Method, plain_name
from fedjax_pcdd.registry import is_import_path
from fedjax_pcdd.training.config import RUN, RunConfig
from fedjax_pcdd.training.fields import as_mapping, convert, load_mapping, read_text
from fedjax_pcdd.training.presets import Preset, read_preset

KEYS = ("table", "splits", "methods", "variants", "seeds", "settings", "own", "tag", "note")
CHOSEN = ("preset", "split", "method", "variant", "seed")  # by a block's other keys, which settings must not replace


class Cell(NamedTuple):
    """One run of a paper's table.

    Args:
      scale: the plan it is from.
      table: preset, as `fedmr/table1`.
      split: split of the preset, None if it has none.
      method: the method's name.
      variant: variant of the preset, None without one.
      tag: how it departs from the table, "" for a cell of the table.
      seed: seed of the run.
      settings: option -> text, over the preset.
    """

    scale: str
    table: str
    split: str | None
    method: str
    variant: str | None
    tag: str
    seed: int
    settings: dict[str, str]

    @property
    def name(self) -> str:
        """Name of its folder and its results, unique within the table."""
        parts = (self.scale, self.split, self.method, self.variant, self.tag, f"s{self.seed}")
        return "-".join(part for part in parts if part)

    @property
    def origin(self) -> dict[str, str]:
        """The options that choose the cell of the preset."""
        options = {"preset": self.table, "split": self.split, "method": self.method, "variant": self.variant}
        return {name: value for name, value in options.items() if value}

    @property
    def given(self) -> dict[str, str]:
        """Every option, as on the command line."""
        return {**self.origin, **self.settings, "seed": str(self.seed)}


class Plan(NamedTuple):
    """The cells in the order in which they run."""

    scale: str
    cells: tuple[Cell, ...]


def read_plan(scale: str, folder: Path, presets: Path) -> Plan:
    """The plan `cpu` in a folder, or a YAML file by its path.

    Raises:
      UserError: there is no such plan, it cannot be read, or a block names something that its preset lacks.
    """
    path = next((path for path in (folder / f"{scale}.yaml", Path(scale)) if path.is_file()), None)
    if path is None:
        plans = [p.stem for p in sorted(folder.glob("*.yaml")) if "blocks" in load_mapping(read_text(p), str(p))]
        raise UserError(f"there is no plan '{scale}': {nearest(scale, plans)}")
    top = load_mapping(read_text(path), str(path))
    blocks = top.get("blocks")
    if not set(top) <= {"settings", "blocks"} or not isinstance(blocks, list) or not blocks:
        raise UserError(f"{path} must hold 'settings' and a list of 'blocks'.")
    common = as_mapping(top.get("settings"), f"'settings' in {path}")
    cells: dict[tuple[str, str], Cell] = {}
    for number, block in enumerate(blocks, 1):
        location = f"block {number} of {path}"
        for cell in _cells(path.stem, as_mapping(block, location), common, location, presets):
            if cells.setdefault((cell.table, cell.name), cell) != cell:
                raise UserError(f"{location} has {cell.name} with other settings than a block before: give it a tag.")
    return Plan(path.stem, tuple(cells.values()))


def check(cells: Iterable[Cell], presets: Path) -> None:
    """Raise UserError if a cell cannot be run as planned."""
    distinct = {(c.table, c.split, c.method, c.variant, c.tag): c for c in cells}
    for cell in distinct.values():
        configured(cell, presets)


def configured(cell: Cell, presets: Path, **more: str) -> tuple[RunConfig, Method]:
    """The configuration and the method that a cell runs; UserError if an option of it is invalid."""
    try:
        return configure(cell.given | more, presets)
    except UserError as error:
        raise UserError(f"{cell.table} {cell.name}: {error}") from None


def _cells(scale: str, block: Mapping[str, Any], common: Mapping[str, Any], location: str, presets: Path) -> list[Cell]:
    for key in block:
        if key not in KEYS:
            raise UserError(f"unknown key '{key}' in {location}: {nearest(key, KEYS)}")
    if "table" not in block:
        raise UserError(f"{location} needs a line `table: PAPER/TABLE`.")
    preset = read_preset(str(block["table"]), presets)
    settings = {**common, **as_mapping(block.get("settings"), f"'settings' of {location}")}
    own_settings = _own(block, preset, location)
    splits = [x if x is None else str(x) for x in _listed(block, "splits", list(preset.splits) or [None], location)]
    seeds = [convert(RUN["seed"], str(x), f"'seeds' of {location}") for x in _listed(block, "seeds", [0], location)]
    rows, tag = _rows(preset, block, location), str(block.get("tag") or "")
    return [
        Cell(scale, str(block["table"]), split, method, variant, tag, seed, _texts(
            {**settings, **own_settings.get(method, {}), **own_settings.get(variant or "", {})}, location
        ))
        for seed, split, (method, variant) in itertools.product(seeds, splits, rows)
    ]  # fmt: skip


def _own(block: Mapping[str, Any], preset: Preset, location: str) -> dict[str, dict[str, Any]]:
    """Settings by the names of single methods and variants; others than the block's may share them."""
    own = block.get("own") or {}
    if not isinstance(own, dict):
        raise UserError(f"'own' of {location} must hold `method: settings` lines.")
    for name in map(str, own):
        if name not in preset.variants and (plain := plain_name(name)) not in METHODS and not is_import_path(plain):
            known = [*preset.variants, *METHODS]
            raise UserError(f"'own' of {location} names no method or variant by '{name}': {nearest(name, known)}")
    return {str(name): as_mapping(entry, f"'{name}' of {location}") for name, entry in own.items()}


def _rows(preset: Preset, block: Mapping[str, Any], location: str) -> list[tuple[str, str | None]]:
    """(method, variant) of each row of the table that the block names."""
    whole_table = "methods" not in block and "variants" not in block
    owners = {name: str(fields["method"]) for name, fields in preset.variants.items()}
    without_variants = [name for name in preset.methods if name not in owners.values()]
    methods = _listed(block, "methods", without_variants if whole_table else [], location)
    variants = _listed(block, "variants", list(owners) if whole_table else [], location)
    for name in variants:
        if name not in owners:
            raise UserError(f"{location}: {preset.source} has no variant '{name}': {nearest(str(name), list(owners))}")
    return [*((str(name), None) for name in methods), *((owners[name], name) for name in variants)]


def _listed(block: Mapping[str, Any], key: str, default: list, location: str) -> list:
    value = block.get(key, default)
    if not isinstance(value, list):
        raise UserError(f"'{key}' of {location} must be a list, as [{value}].")
    return value


def _texts(settings: Mapping[str, Any], location: str) -> dict[str, str]:
    """The values as they are written on the command line; UserError for what makes another cell of it."""
    if chosen := next((name for name in CHOSEN if name in settings), None):
        raise UserError(f"settings of {location} have '{chosen}', which decides what a cell is: leave it out.")
    return {
        name: str(value).lower() if value is None or isinstance(value, bool) else str(value)
        for name, value in settings.items()
    }
