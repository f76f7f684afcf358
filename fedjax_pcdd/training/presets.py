"""Presets: YAML files with the settings of a published table: its splits, each method's hyper-parameters, and variants.

    run: {rounds: 100, lr: 0.01}                     options of every run
    splits: {P5C2: {partition: pcdd, clients: 5}}    chosen by `split`
    methods: {fedprox: {mu: 0.01, splits: {P5C2: {mu: 0.001}}}}
    variants: {intra-only: {method: fedmr, terms: intra}}    chosen by `variant`, if a table has several of a method
    grid: {fedprox: {mu: [0.01, 0.1]}}               what a sweep searches, one hyper-parameter after another

Later settings override earlier ones: run, the split, the method, the method's split, the variant, the variant's split.
A run's config.yaml, which is flat, is a preset too.
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pcdd import methods
from fedjax_pcdd.errors import UserError, is_there, nearest
from fedjax_pcdd.methods import Method
from fedjax_pcdd.registry import is_import_path, recall
from fedjax_pcdd.training.config import FOLDERS, RUN, RunConfig, parse_config
from fedjax_pcdd.training.fields import as_mapping, convert_all, load_mapping, options_of, read_text, short_nearest

PAPERS = Path(__file__).parents[1] / "papers"  # has `presets`, and `expected`: what the papers print
PRESETS = PAPERS / "presets"
SECTIONS = ("run", "splits", "methods", "variants", "grid")
_RUN = {name: option for name, option in RUN.items() if name not in FOLDERS}
_PART = {name: option for name, option in _RUN.items() if name != "method"}


class Preset(NamedTuple):
    """A preset file; the values are as written, with keys in the spelling of fields."""

    source: str
    run: dict[str, Any]
    splits: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    variants: dict[str, dict[str, Any]]
    grid: dict[str, dict[str, list]]


def read_preset(name: str, folder: Path = PRESETS) -> Preset:
    """The preset with a name such as `fedmr/table1` below a folder, or at a path; UserError if none can be read."""
    for path in (folder / f"{name}.yaml", folder / name, Path(name)):
        if is_there(path):
            return _parse(read_text(path), str(path))
    if is_there(configuration := Path(name) / "config.yaml"):
        raise UserError(f"`preset={name}` is the folder of a run: take its configuration, {configuration}.")
    if Path(name).suffix in (".yaml", ".yml") and not is_there(folder / Path(name).parent, Path.is_dir):
        raise UserError(f"there is no file {name}: correct the path of `preset`.")
    known = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    advice = nearest(name.removesuffix(".yaml"), known) if known else f"{folder} holds none."
    raise UserError(f"there is no preset '{name}': {advice}")


@lru_cache(64)
def _parse(text: str, source: str) -> Preset:
    """The preset in a text; cached, as plans and pages ask for it again and again, so its parts must not be changed."""
    top = load_mapping(text, source)
    if not set(top) & set(SECTIONS):
        return _from_flat(top, source)
    for key in top:
        if key not in SECTIONS:
            raise UserError(f"unknown key '{key}' in {source}: {nearest(key, SECTIONS)}")
    named = (_named(top.get(section) or {}, section, source) for section in SECTIONS[1:])
    preset = Preset(source, as_mapping(top.get("run"), f"'run' in {source}"), *named)
    for name, variant in preset.variants.items():
        if "method" not in variant:
            raise UserError(f"variant '{name}' in {source} needs a line `method: NAME`.")
    for name in [*preset.methods, *(str(variant["method"]) for variant in preset.variants.values())]:
        plain = methods.plain_name(name)
        if plain not in methods.METHODS and not is_import_path(plain):
            raise UserError(f"unknown method '{plain}' in {source}: {short_nearest(plain, methods.METHODS)}")
    for name, hyper_grid in preset.grid.items():
        for option, values in hyper_grid.items():
            if option not in options_of(methods.get(name)) or not isinstance(values, list):
                raise UserError(f"'grid' in {source} must list values of {name}'s own options, not {option}: {values}.")
    return preset


def _named(parts: Any, section: str, source: str) -> dict[str, dict[str, Any]]:
    """The parts of a section by name; the names stay as they are written."""
    if not isinstance(parts, dict):
        raise UserError(f"'{section}' in {source} must name {section}, not {str(parts)[:40]!r}.")
    part = section.removesuffix("s")
    return {str(name): as_mapping(value, f"{part} '{name}' in {source}") for name, value in parts.items()}


def _from_flat(flat: dict[str, Any], source: str) -> Preset:
    """The preset of a recorded configuration, without the folder that it was written to."""
    from fedjax_pcdd.training.outside import OUTSIDE, recorded_origins

    flat = dict(flat)
    recall(recorded_origins(flat.pop(OUTSIDE, None), source))
    name = str(flat.get("method", RUN["method"].default))
    hyper = options_of(methods.get(name))
    run = {key: value for key, value in flat.items() if key not in hyper and key not in FOLDERS}
    return Preset(source, run, {}, {name: {key: value for key, value in flat.items() if key in hyper}}, {}, {})


def preset_method(preset: Preset, variant: str | None = None) -> str | None:
    """The method named by the variant, else by the preset for all its runs, if any; UserError: no such variant."""
    name = _part(preset, "variant", variant).get("method", preset.run.get("method"))
    return None if name is None else str(name)


def listed_as(preset: Preset, method: str) -> str:
    """The name under which the preset has a method: with its suffixes if it lists these, else without them."""
    named = {*preset.methods, *preset.grid, *(str(variant["method"]) for variant in preset.variants.values())}
    return method if method in named else methods.plain_name(method)


def preset_values(preset: Preset, method: str, split: str | None, variant: str | None = None) -> dict[str, Any]:
    """Checked values of one run by field name; UserError: wrong or missing split or variant, wrong key or value."""
    source, known = preset.source, _PART | options_of(methods.get(method))
    run = convert_all(preset.run, _RUN, source)
    if preset.splits and split is None:
        raise UserError(f"{source} has several splits: add `split` with one of {', '.join(preset.splits)}.")
    overrides = convert_all(_part(preset, "split", split), _PART, f"split '{split}' of {source}")
    name = listed_as(preset, method)
    variant_settings = _variant_of(preset, name, variant)
    for part, where in (preset.methods.get(name, {}), f"method '{name}'"), (variant_settings, f"variant '{variant}'"):
        where = f"{where} of {source}"
        overrides |= convert_all({key: value for key, value in part.items() if key != "splits"}, known, where)
        overrides |= convert_all(_on_split(preset, part.get("splits"), split, where), known, where)
    return run | overrides


def _on_split(preset: Preset, splits: Any, split: str | None, where: str) -> dict[str, Any]:
    """The settings of a method or a variant for this split only."""
    if splits is None:
        return {}
    by_split = {str(name): values for name, values in splits.items()} if isinstance(splits, dict) else None
    if by_split is None or not set(by_split) <= set(preset.splits):
        raise UserError(f"'splits' of {where} may name no other splits than {', '.join(preset.splits)}.")
    return as_mapping(by_split.get(str(split)), f"split '{split}' of {where}")


def _variant_of(preset: Preset, method: str, variant: str | None) -> dict[str, Any]:
    """The settings of a variant of this method; for None, of the one with its name, else the method must have none."""
    variants = [name for name, settings in preset.variants.items() if settings["method"] == method]
    variant = method if variant is None and method in variants else variant
    selected = _part(preset, "variant", variant)
    if variant is None and variants:
        raise UserError(f"{preset.source} has variants of {method}: add `variant` with one of {', '.join(variants)}.")
    if variant is not None and selected["method"] != method:
        advice = f"choose one of {method}'s, {', '.join(variants)}" if variants else "drop `variant`"
        what = f"variant '{variant}' of {preset.source} is one of {selected['method']}, not of {method}"
        raise UserError(f"{what}: drop `method`, or {advice}.")
    return {key: value for key, value in selected.items() if key != "method"}


def _part(preset: Preset, kind: str, name: str | None) -> dict[str, Any]:
    """The settings of the split or variant of this name, {} for None."""
    parts = preset.splits if kind == "split" else preset.variants
    if name is None:
        return {}
    if not parts:
        raise UserError(f"{preset.source} has no {kind}s: drop `{kind}`.")
    if name not in parts:
        raise UserError(f"{preset.source} has no {kind} '{name}': {nearest(name, parts)}")
    return parts[name]


def read_run(folder: Path) -> tuple[RunConfig, Method]:
    """The configuration and method that a run has written into its folder; UserError if there are none."""
    if not is_there(folder, Path.is_dir):
        what = f"{folder} is a file" if is_there(folder) else f"there is no folder {folder}"
        raise UserError(f"{what}: name the folder of a run.")
    file = folder / "config.yaml"
    if not is_there(file):
        raise UserError(f"{folder} holds no config.yaml, so it is not a run: name the folder of one.")
    from fedjax_pcdd.training.outside import check_unchanged

    text = read_text(file)
    check_unchanged(load_mapping(text, str(file)), str(file))
    config, method = parse_config(text, str(file))
    if has_own_partition(config.partition, config.run_dir):  # which is there wherever the folder is now
        config = replace(config, partition=str((folder / "partition.npz").absolute()))
    return config, method


def has_own_partition(partition: str, run_dir: Any) -> bool:
    """Whether the partition in a run's options is the file in its own folder."""
    file, began_in = Path(partition), Path(run_dir or "").parts
    return file.name == "partition.npz" and bool(began_in) and file.parent.parts[-len(began_in) :] == began_in
