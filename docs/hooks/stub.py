"""Writes fedjax_pcdd/__init__.pyi, which names the whole Python interface: python docs/hooks/stub.py"""

from pathlib import Path

import fedjax_pcdd
from fedjax_pcdd import methods

STUB = Path(fedjax_pcdd.__file__).with_suffix(".pyi")
API = {
    "analysis.quantities": ["Quantity"],
    "api": ["register_augmentation", "register_dataset", "register_logger", "register_method", "register_model",
            "register_partition", "register_quantity", "register_server_optimiser"],
    "api.data": ["build_model", "from_arrays", "load_dataset", "partition"],
    "api.history": ["History", "plot", "table"],
    "api.runs": ["load_run", "resume"],
    "api.search": ["search"],
    "api.simulate": ["simulate"],
    "api.sweep": ["sweep"],
    "data.adapters": ["from_folder", "from_huggingface", "from_torch"],
    "data.augment": ["Pipeline"],
    "data.dataset": ["Dataset"],
    "data.federation": ["Federation"],
    "data.lists": ["Partition"],
    "data.natural": ["write_federation"],
    "engine.executables": ["compiled_once"],
    "errors": ["UserError"],
    "methods.method": ["Message", "Method", "Summary", "Traits", "hyperparameter"],
    "methods.server_optimised": ["ServerOptimised"],
    "training.callbacks": ["EarlyStopping"],
    "training.loop": ["Callback"],
}  # fmt: skip


def stub() -> str:
    """The text of the stub file."""
    homes = API | {"methods": sorted(cls.__name__ for cls in methods.OWN.values())}
    lines = [
        '"""The Python interface; docs/hooks/stub.py writes this file, and `__init__.py` reads it."""',
        "# ruff: noqa: I001",
        "",
    ]
    lines += [f"from fedjax_pcdd import {name} as {name}" for name in ("methods", "models")]
    lines += [f"from fedjax_pcdd.{home} import {name} as {name}" for home in sorted(homes) for name in homes[home]]
    return "\n".join([*lines, "", "__version__: str", ""])


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
