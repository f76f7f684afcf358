"""Presets: YAML files with the settings of a published table, its splits, and the weights of each method.

    run: {rounds: 100, lr: 0.01}                     options of every run
    splits: {P5C2: {partition: pcdd, clients: 5}}    chosen by --split
    methods: {fedprox: {mu: 0.01, splits: {P5C2: {mu: 0.001}}}}

Later ones win: run, the split, the method, the method's split. A run's config.yaml, flat, is a preset too.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pcdd import methods
from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.harness.config import (
    PLACE,
    RUN,
    RunConfig,
    as_mapping,
    convert_all,
    load_mapping,
    parse_config,
    short_nearest,
)
from fedjax_pcdd.harness.options import options_of
from fedjax_pcdd.methods import Method

SECTIONS = ("run", "splits", "methods")
_RUN = {name: option for name, option in RUN.items() if name not in PLACE}
_PART = {name: option for name, option in _RUN.items() if name != "method"}


class Preset(NamedTuple):
    """A preset file; the values are as written, with keys in the spelling of fields."""

    source: str
    run: dict[str, Any]
    splits: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]


def read_preset(name: str, folder: Path) -> Preset:
    """The preset `fedmr/table1` below a folder, or a YAML file by its path.

    Raises:
      UserError: there is none, or it cannot be read.
    """
    for path in (folder / f"{name}.yaml", folder / name, Path(name)):
        if os.path.isfile(path):
            return _parse(read_text(path), str(path))
    known = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    advice = nearest(name.removesuffix(".yaml"), known) if known else f"{folder} holds none."
    raise UserError(f"there is no preset '{name}': {advice}")


def read_text(path: Path) -> str:
    """The text of a file; UserError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(f"{path} cannot be read ({reason}).") from None


def _parse(text: str, source: str) -> Preset:
    top = load_mapping(text, source)
    if not set(top) & set(SECTIONS):
        return _from_flat(top, source)
    for key in top:
        if key not in SECTIONS:
            raise UserError(f"unknown key '{key}' in {source}: {nearest(key, SECTIONS)}")
    splits = top.get("splits") or {}
    if not isinstance(splits, dict):
        raise UserError(f"'splits' in {source} must name splits, not {str(splits)[:40]!r}.")
    return Preset(
        source,
        as_mapping(top.get("run"), f"'run' in {source}"),
        {str(name): as_mapping(value, f"split '{name}' in {source}") for name, value in splits.items()},
        {
            name: as_mapping(value, f"method '{name}' in {source}")
            for name, value in as_mapping(top.get("methods"), f"'methods' in {source}").items()
        },
    )


def _from_flat(flat: dict[str, Any], source: str) -> Preset:
    """A recorded configuration; the folder it was written to is not repeated."""
    name = str(flat.get("method", RUN["method"].default))
    hyper = options_of(methods.get(name))
    run = {key: value for key, value in flat.items() if key not in hyper and key not in PLACE}
    return Preset(source, run, {}, {name: {key: value for key, value in flat.items() if key in hyper}})


def preset_method(preset: Preset) -> str | None:
    """The method that a preset names for all its runs, if any."""
    name = preset.run.get("method")
    return None if name is None else str(name)


def preset_values(preset: Preset, method: str, split: str | None) -> dict[str, Any]:
    """Checked values of one run, by field name.

    Raises:
      UserError: an unknown or missing split, an unknown key, or a value that does not fit.
    """
    known = _PART | options_of(methods.get(method))
    run = convert_all(preset.run, _RUN, preset.source)
    chosen = convert_all(_split(preset, split), _PART, f"split '{split}' of {preset.source}")
    for name in preset.methods:
        if name not in methods.METHODS:
            raise UserError(f"unknown method '{name}' in {preset.source}: {short_nearest(name, methods.METHODS)}")
    where = f"method '{method}' of {preset.source}"
    tuned = dict(preset.methods.get(method, {}))
    special = _special(preset, tuned.pop("splits", None), split, where)
    return run | chosen | convert_all(tuned, known, where) | convert_all(special, known, where)


def _special(preset: Preset, splits: Any, split: str | None, where: str) -> dict[str, Any]:
    """What a method was tuned to on this split alone."""
    if splits is None:
        return {}
    if not isinstance(splits, dict) or not set(splits) <= set(preset.splits):
        raise UserError(f"'splits' of {where} may name no other splits than {', '.join(preset.splits)}.")
    return as_mapping(splits.get(split), f"split '{split}' of {where}")


def _split(preset: Preset, split: str | None) -> dict[str, Any]:
    if not preset.splits:
        if split is not None:
            raise UserError(f"{preset.source} has no splits: drop --split.")
        return {}
    if split is None:
        raise UserError(f"{preset.source} has several splits: add --split with one of {', '.join(preset.splits)}.")
    if split not in preset.splits:
        raise UserError(f"{preset.source} has no split '{split}': {nearest(split, preset.splits)}")
    return preset.splits[split]


def read_run(folder: Path) -> tuple[RunConfig, Method]:
    """The configuration that a run has written into its folder; UserError where there is none."""
    if not os.path.isdir(folder):
        raise UserError(f"there is no folder {folder}: give --resume the folder of a run.")
    file = folder / "config.yaml"
    if not os.path.isfile(file):
        raise UserError(f"{folder} holds no config.yaml, so no run can be resumed there: give --resume another folder.")
    return parse_config(read_text(file), str(file))
