"""Presets: YAML files with the settings of a published table, its splits, the weights of each method, and variants.

    run: {rounds: 100, lr: 0.01}                     options of every run
    splits: {P5C2: {partition: pcdd, clients: 5}}    chosen by `split`
    methods: {fedprox: {mu: 0.01, splits: {P5C2: {mu: 0.001}}}}
    variants: {intra-only: {method: fedmr, terms: intra}}    chosen by `variant`, where a table has several of a method

Later ones win: run, the split, the method, the method's split, the variant, the variant's split. A run's config.yaml,
flat, is a preset too.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pcdd import methods
from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods import Method
from fedjax_pcdd.registry import is_import_path
from fedjax_pcdd.training.config import FOLDERS, RUN, RunConfig, parse_config
from fedjax_pcdd.training.fields import as_mapping, convert_all, load_mapping, options_of, read_text, short_nearest

SECTIONS = ("run", "splits", "methods", "variants")
_RUN = {name: option for name, option in RUN.items() if name not in FOLDERS}
_PART = {name: option for name, option in _RUN.items() if name != "method"}


class Preset(NamedTuple):
    """A preset file; the values are as written, with keys in the spelling of fields."""

    source: str
    run: dict[str, Any]
    splits: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    variants: dict[str, dict[str, Any]]


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


def _parse(text: str, source: str) -> Preset:
    top = load_mapping(text, source)
    if not set(top) & set(SECTIONS):
        return _from_flat(top, source)
    for key in top:
        if key not in SECTIONS:
            raise UserError(f"unknown key '{key}' in {source}: {nearest(key, SECTIONS)}")
    preset = Preset(
        source,
        as_mapping(top.get("run"), f"'run' in {source}"),
        _named(top, "splits", source),
        {
            name: as_mapping(value, f"method '{name}' in {source}")
            for name, value in as_mapping(top.get("methods"), f"'methods' in {source}").items()
        },
        _named(top, "variants", source),
    )
    _check_methods(preset)
    return preset


def _named(top: dict[str, Any], section: str, source: str) -> dict[str, dict[str, Any]]:
    """The parts of a section, whose names stay as they are written."""
    parts = top.get(section) or {}
    if not isinstance(parts, dict):
        raise UserError(f"'{section}' in {source} must name {section}, not {str(parts)[:40]!r}.")
    part = section.removesuffix("s")
    return {str(name): as_mapping(value, f"{part} '{name}' in {source}") for name, value in parts.items()}


def _check_methods(preset: Preset) -> None:
    for name, variant in preset.variants.items():
        if "method" not in variant:
            raise UserError(f"variant '{name}' in {preset.source} needs a line `method: NAME`.")
    for name in [*preset.methods, *(str(variant["method"]) for variant in preset.variants.values())]:
        plain = methods.plain_name(name)
        if plain not in methods.METHODS and not is_import_path(plain):
            raise UserError(f"unknown method '{plain}' in {preset.source}: {short_nearest(plain, methods.METHODS)}")


def _from_flat(flat: dict[str, Any], source: str) -> Preset:
    """A recorded configuration; the folder it was written to is not repeated."""
    name = str(flat.get("method", RUN["method"].default))
    hyper = options_of(methods.get(name))
    run = {key: value for key, value in flat.items() if key not in hyper and key not in FOLDERS}
    return Preset(source, run, {}, {name: {key: value for key, value in flat.items() if key in hyper}}, {})


def preset_method(preset: Preset, variant: str | None = None) -> str | None:
    """The method that a variant, or else the preset for all its runs, names, if any; UserError: no such variant."""
    name = _variant(preset, variant).get("method", preset.run.get("method"))
    return None if name is None else str(name)


def preset_values(preset: Preset, method: str, split: str | None, variant: str | None = None) -> dict[str, Any]:
    """Checked values of one run, by field name.

    Raises:
      UserError: an unknown or missing split or variant, an unknown key, or a value that does not fit.
    """
    run = convert_all(preset.run, _RUN, preset.source)
    chosen = convert_all(_split(preset, split), _PART, f"split '{split}' of {preset.source}")
    tuned = _tuned(preset, preset.methods.get(method, {}), method, split, f"method '{method}' of {preset.source}")
    own = {key: value for key, value in _variant_of(preset, method, variant).items() if key != "method"}
    return run | chosen | tuned | _tuned(preset, own, method, split, f"variant '{variant}' of {preset.source}")


def _tuned(preset: Preset, part: dict[str, Any], method: str, split: str | None, where: str) -> dict[str, Any]:
    """Checked values of a method or a variant, then those of it on this split alone."""
    known = _PART | options_of(methods.get(method))
    every = {key: value for key, value in part.items() if key != "splits"}
    special = _special(preset, part.get("splits"), split, where)
    return convert_all(every, known, where) | convert_all(special, known, where)


def _special(preset: Preset, splits: Any, split: str | None, where: str) -> dict[str, Any]:
    """What a method or a variant has on this split alone."""
    if splits is None:
        return {}
    if not isinstance(splits, dict) or not set(splits) <= set(preset.splits):
        raise UserError(f"'splits' of {where} may name no other splits than {', '.join(preset.splits)}.")
    return as_mapping(splits.get(split), f"split '{split}' of {where}")


def _variant_of(preset: Preset, method: str, variant: str | None) -> dict[str, Any]:
    """The variant, which must be one of this method and may only be left out where the method has none."""
    chosen = _variant(preset, variant)
    if variant is None:
        own = [name for name, one in preset.variants.items() if one["method"] == method]
        if own:
            raise UserError(f"{preset.source} has variants of {method}: add `variant` with one of {', '.join(own)}.")
    elif chosen["method"] != method:
        raise UserError(
            f"variant '{variant}' of {preset.source} is one of {chosen['method']}, not of {method}: drop `method` or "
            "choose another `variant`."
        )
    return chosen


def _variant(preset: Preset, variant: str | None) -> dict[str, Any]:
    if variant is None:
        return {}
    if not preset.variants:
        raise UserError(f"{preset.source} has no variants: drop `variant`.")
    if variant not in preset.variants:
        raise UserError(f"{preset.source} has no variant '{variant}': {nearest(variant, preset.variants)}")
    return preset.variants[variant]


def _split(preset: Preset, split: str | None) -> dict[str, Any]:
    if not preset.splits:
        if split is not None:
            raise UserError(f"{preset.source} has no splits: drop `split`.")
        return {}
    if split is None:
        raise UserError(f"{preset.source} has several splits: add `split` with one of {', '.join(preset.splits)}.")
    if split not in preset.splits:
        raise UserError(f"{preset.source} has no split '{split}': {nearest(split, preset.splits)}")
    return preset.splits[split]


def read_run(folder: Path) -> tuple[RunConfig, Method]:
    """The configuration that a run has written into its folder; UserError where there is none."""
    if not os.path.isdir(folder):
        raise UserError(f"there is no folder {folder}: give `resume` the folder of a run.")
    file = folder / "config.yaml"
    if not os.path.isfile(file):
        raise UserError(f"{folder} holds no config.yaml, so no run can be resumed there: give `resume` another folder.")
    from fedjax_pcdd.training.outside import OUTSIDE, check_unchanged

    text = read_text(file)
    check_unchanged(load_mapping(text, str(file)).get(OUTSIDE), str(file))
    return parse_config(text, str(file))
