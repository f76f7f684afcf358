"""fedjax_pcdd: federated learning under partially class-disjoint data, with vectorised clients.

    import fedjax_pcdd as fp

    digits = fp.load_dataset("digits")
    federation = fp.partition(digits, "dirichlet", clients=10, beta=0.1, seed=0)
    history = fp.simulate(federation, fp.FedGELA(), rounds=20, seed=0)

`fedjax_pcdd.api` says more. Its names, the classes of all methods, `fp.methods` and `fp.models` are loaded when they
are first used, so that importing the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_pcdd import methods, models
    from fedjax_pcdd.api import (
        Callback,
        Dataset,
        EarlyStopping,
        Federation,
        History,
        Message,
        Method,
        Partition,
        Pipeline,
        Quantity,
        Summary,
        Traits,
        UserError,
        build_model,
        from_arrays,
        hyperparameter,
        load_dataset,
        load_run,
        partition,
        plot,
        register_augmentation,
        register_dataset,
        register_logger,
        register_method,
        register_model,
        register_partition,
        register_quantity,
        resume,
        simulate,
        table,
    )

__version__ = "0.1.0"

__all__ = [
    "Callback", "Dataset", "EarlyStopping", "Federation", "History", "Message", "Method", "Partition", "Pipeline",
    "Quantity", "Summary", "Traits", "UserError", "build_model", "from_arrays", "hyperparameter", "load_dataset",
    "load_run", "methods", "models", "partition", "plot", "register_augmentation", "register_dataset",
    "register_logger", "register_method", "register_model", "register_partition", "register_quantity", "resume",
    "simulate", "table",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A name of the API, a subpackage of it, or the class of a method."""
    if name in ("methods", "models"):
        return importlib.import_module(f"fedjax_pcdd.{name}")
    if name in __all__:
        return getattr(importlib.import_module("fedjax_pcdd.api"), name)
    if name[0].isupper():
        registry = importlib.import_module("fedjax_pcdd.methods").METHODS
        classes = {cls.__name__: cls for cls in registry.values()}
        if name in classes:
            return classes[name]
    raise AttributeError(f"module 'fedjax_pcdd' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names of the API and the classes of all methods."""
    registry = importlib.import_module("fedjax_pcdd.methods").METHODS
    return sorted([*globals(), *__all__, *(cls.__name__ for cls in registry.values())])
