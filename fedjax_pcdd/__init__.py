"""fedjax_pcdd: federated learning under partially class-disjoint data, with vectorised clients.

    import fedjax_pcdd as fp

    digits = fp.load_dataset("digits")
    federation = fp.partition(digits, "dirichlet", clients=10, beta=0.1, seed=0)
    history = fp.simulate(federation, fp.FedGELA(), rounds=20, seed=0)

The names of the Python interface stand in `__init__.pyi`, for type checkers and for `dir(fp)` alike. What they name is
imported when it is first used, so that importing the package costs nothing.
"""

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

if sys.platform == "win32":  # which has no locks, links and limits as run folders need them
    raise ImportError("fedjax_pcdd needs Linux or macOS: on Windows, install it in WSL.")


def _names() -> dict[str, str]:
    """The module of every public name, "" for a subpackage."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {name.name: (node.module or "").removeprefix(__name__) for node in imports for name in node.names}


_HOMES = _names()
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """A public name: a subpackage, or what a module of the package defines."""
    if name not in _HOMES:
        # Python adds what may have been meant.
        raise AttributeError(f"module '{__name__}' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    module = importlib.import_module(__name__ + (_HOMES[name] or f".{name}"))
    return getattr(module, name) if _HOMES[name] else module


def __dir__() -> list[str]:
    """All public names; nothing is imported for them."""
    return sorted([*globals(), *_HOMES])
