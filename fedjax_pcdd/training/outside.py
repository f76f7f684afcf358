"""The parts of a run from outside this package: recorded in config.yaml, and unchanged when the run is resumed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_pcdd import methods, models
from fedjax_pcdd.analysis.quantities import QUANTITIES
from fedjax_pcdd.beside import imported_files
from fedjax_pcdd.data.augment import AUGMENTATIONS
from fedjax_pcdd.data.partition import PARTITIONS
from fedjax_pcdd.data.sources import LOADERS, federation_file
from fedjax_pcdd.errors import UserError, is_there
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.registry import Origin, Registry, file_sha256, is_import_path, located, origin_of, origin_of_file
from fedjax_pcdd.training.fields import names_in
from fedjax_pcdd.training.loggers import LOGGERS

OUTSIDE = "from_outside"  # the key of config.yaml that names them


def origins_of(config: Any) -> dict[str, Origin]:
    """The origins of the parts of a `RunConfig` that come from outside this package, by their names in it.

    Files that these import from beside them are there by their paths, except those of parts that only look on.
    UserError if two parts of different kinds have the same name.
    """
    named: list[tuple[Registry, str | None]] = [
        (METHODS, methods.plain_name(config.method)),
        *((methods.SERVER_OPTIMISERS, suffix) for suffix in methods.suffixes_of(config.method)),
        (LOADERS, None if config.task else config.dataset),
        (LOADERS, config.public),
        (PARTITIONS, None if config.task else config.partition),
        (PARTITIONS, None if config.availability == "model" else config.availability),
        (models.BACKBONES, config.model),
        (AUGMENTATIONS, config.augmentation),
        *((models.BACKBONES, name) for name in names_in(config.models)),
        *((QUANTITIES, name) for name in names_in(config.track)),
        *((LOGGERS, name) for name in names_in(config.loggers)),
    ]
    origins: dict[str, Origin] = {}
    for name, origin in ((name, _origin(registry, name)) for registry, name in named if name):
        if origin is not None and origins.setdefault(name, origin) != origin:
            both = f"{origins[name].object} and {origin.object}"
            raise UserError(f"'{name}' names two parts from outside, {both}: register one under another name.")
    weights = config.initial_weights
    if weights is not None and is_there(file := located(str(weights))):  # if missing, reported elsewhere
        origins[str(weights)] = origin_of_file(file)
    computing = {origin.path for name, origin in origins.items() if name not in onlookers(vars(config))}
    files = {Path(path) for path in computing if path.endswith(".py")}
    beside = {path for file in sorted(files) for path in imported_files(file)} - files
    return origins | {str(path): origin_of_file(path) for path in sorted(beside)}


def onlookers(options: Mapping[str, Any]) -> set[str]:
    """The names of what watches a run and cannot change its results: tracked quantities and loggers."""
    texts = (options.get(name) for name in ("track", "loggers"))
    return {name for text in texts if isinstance(text, str) for name in names_in(text)}


def _origin(registry: Registry, name: str) -> Origin | None:
    if registry is LOADERS and (file := federation_file(name)):
        return origin_of_file(file)
    if name.endswith(".npz"):
        return origin_of_file(located(name)) if is_there(located(name)) else None  # if missing, reported elsewhere
    if is_import_path(name):
        return origin_of(registry.find(name), name)
    return origin_of(registry.find(name)) if name in registry and name not in registry.own else None


def recorded_origins(value: Any, source: str) -> dict[str, Origin]:
    """The origins that a configuration has under `OUTSIDE`; UserError if that is something else."""
    try:
        return {str(name): Origin(**{k: str(v) for k, v in origin.items()}) for name, origin in (value or {}).items()}
    except (AttributeError, TypeError):
        raise UserError(f"{OUTSIDE} in {source} must give path, object and sha256 of each name.") from None


def check_unchanged(options: Mapping[str, Any], source: str) -> None:
    """Raise UserError if a part from outside that does not only look on is not the one that the run began with."""
    for name, origin in recorded_origins(options.get(OUTSIDE), source).items():
        if name in onlookers(options):
            continue
        file = Path(origin.path)
        if not is_there(file):
            raise UserError(f"{name} of this run was in {file}, which is gone: put it back, or start a new run.")
        if file_sha256(file) != origin.sha256:
            raise UserError(f"{file} has changed since this run began: put it back as it was, or start a new run.")
