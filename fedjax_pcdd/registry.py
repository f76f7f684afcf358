"""Open registries: the parts of a run by name, whether of this package or from outside.

    @fp.register_method("fedkeep")               a decorator, where the part is defined
    [project.entry-points."fedjax_pcdd.methods"]  an installed package, found when a name is looked up
    method=fedkeep.py:FedKeep                     an import path, `file.py:object` or `package.module:object`

All three work wherever a name is taken. A part from outside has an `Origin`: the file that defines it and its SHA-256,
which a run records, so that it is not continued with a changed file.
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from fedjax_pcdd.beside import PACKAGE, imported_files, package_of
from fedjax_pcdd.errors import UserError, expanded, in_one_line, is_there, nearest

T = TypeVar("T")

_imported: dict[str, dict[Path, str]] = {}  # of files of the user, by their module: they and those beside, with SHA-256
_recorded: dict[str, "Origin"] = {}  # by name in the configurations that were read, for names that no longer resolve


class Origin(NamedTuple):
    """Where a part from outside this package comes from."""

    path: str  # absolute, of the file that defines it
    object: str  # its name in the file; "" for a data file
    sha256: str  # of the file


class Registry(UserDict[str, T], Generic[T]):
    """Parts of one kind by name, in the order in which they were added; entry points come last.

    Attributes:
      kind: what messages call a part, such as "method".
      group: name of the entry point group, such as "fedjax_pcdd.methods".
      own: names of the package's own parts.
    """

    def __init__(self, kind: str, plural: str, parts: Mapping[str, T] | None = None):
        """Start with the package's own parts."""
        self.kind, self.group, self.own = kind, f"{PACKAGE}.{plural}", frozenset(parts or ())
        super().__init__(parts or {})

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that adds a part under a name; UserError for a name that is taken or not allowed."""
        if not isinstance(name, str):
            raise UserError(f"a {self.kind} is registered by a name: put it in brackets behind the decorator.")
        if not name or set(name) & set(":+,= "):
            raise UserError(f"'{name}' cannot be the name of a {self.kind}: use letters, digits, - and _.")

        def add(part: T) -> T:
            if not callable(part) and type(part).__module__ == "builtins":
                raise UserError(f"{part!r} cannot be a {self.kind}: register a class or a function.")
            existing = self.data.get(name)
            if existing is not None and _identity(existing) != _identity(part):
                raise UserError(f"there is a {self.kind} '{name}' already: choose another name.")
            self[name] = part
            return part

        return add

    def knows(self, name: str) -> bool:
        """Whether `find` looks somewhere for a part of this name."""
        return name in self or is_import_path(name) or (name in _recorded and bool(_recorded[name].object))

    def find(self, name: str) -> T:
        """The part with a name or an import path; UserError if there is none, or its file cannot be imported."""
        if is_import_path(name):
            return load_object(name)
        if name in self:
            return self[name]
        if self.knows(name):
            return load_object(f"{_recorded[name].path}:{_recorded[name].object}")
        hint = "several are for a sweep." if "," in name else nearest_part(name, self)
        raise UserError(f"there is no {self.kind} '{name}': {hint}")

    def __missing__(self, name: str) -> T:
        """The part of an entry point, loaded when it is first requested."""
        point = self._points()[name]
        with from_outside(f"{self.kind} '{name}' ({point.value}) cannot be imported"):
            self[name] = point.load()
        return self[name]

    def __contains__(self, name: object) -> bool:
        """Whether there is a part of this name; nothing is loaded."""
        return name in self.data or name in self._points()

    def __iter__(self) -> Iterator[str]:
        """All names; nothing is loaded."""
        return iter(dict.fromkeys([*self.data, *self._points()]))

    def __len__(self) -> int:
        """Number of names."""
        return len(list(iter(self)))

    def importable(self) -> dict[str, T]:
        """All parts by name, for iterating over them; entry points that fail to import are left out."""
        parts = {}
        for name in self:
            with suppress(UserError):
                parts[name] = self[name]
        return parts

    def _points(self) -> dict[str, Any]:
        return _entry_points(self.group, tuple((folder, _changed(folder)) for folder in sys.path))


@lru_cache
def _entry_points(group: str, folders: tuple[tuple[str, float], ...]) -> dict[str, Any]:
    """Entry points by name; `folders`, the import path with modification times, is the cache key."""
    return {point.name: point for point in entry_points(group=group)}


def _changed(folder: str) -> float:
    try:
        return os.stat(folder or ".").st_mtime
    except OSError:
        return 0.0


def is_import_path(name: str) -> bool:
    """Whether a name is `file.py:object` or `package.module:object`.

    >>> [is_import_path(name) for name in ("fedavg", "fedkeep.py:FedKeep", "my.package:Net")]
    [False, True, True]
    """
    head, separator, tail = name.rpartition(":")
    return bool(separator and head) and tail.replace(".", "_").isidentifier()


def nearest_part(name: str, known: Iterable[str]) -> str:
    """As `nearest`, for parts that may also come from a file.

    >>> nearest_part("fedkeep.py", ["fedavg", "fedrep"])
    'of a file name the object too, as fedkeep.py:NAME.'
    """
    file = name.rstrip(":")
    if file.endswith(".py"):
        return f"of a file name the object too, as {file}:NAME."
    known = list(known)
    return nearest(name, known) if known else "there are none by name, so name a file and an object, as FILE.py:NAME."


def recall(origins: Mapping[str, Origin]) -> None:
    """Remember where the names of a recorded run come from: its folder or script may not be the present one."""
    _recorded.update(origins)


def located(name: str, path: str | None = None) -> Path:
    """The file of a name, or where the recorded run had it if it is missing; without a path the name is the path."""
    file = expanded(name if path is None else path)
    return Path(_recorded[name].path) if name in _recorded and not is_there(file) else file


def short_name(name: str) -> str:
    """A name for headings and folders: the object of an import path, the stem of a file.

    >>> [short_name(name) for name in ("moon+prototypes", "a/keep.py:FedKeep+prototypes", "runs/x/lists.npz")]
    ['moon+prototypes', 'FedKeep+prototypes', 'lists']
    >>> [short_name(name) for name in ("fedprox+a/lion.py:Lion", "c++/keep.py:FedKeep+sam+lion.py:Lion")]
    ['fedprox+Lion', 'FedKeep+sam+Lion']
    """
    if name.endswith(".npz"):
        return Path(name).stem
    *before, last = name.split(":")
    leading = (re.fullmatch(r"((?:[\w.-]+\+)*)[^+]*", part) for part in before)  # names, followed by a file's path
    return "".join(match[1] for match in leading if match) + last


def load_object(path: str) -> Any:
    """Load the object of an import path; UserError if file, module or object is missing or fails to import."""
    head, _, tail = path.rpartition(":")
    with from_outside(f"{path} cannot be imported"):
        module = _module_of_file(located(path, head)) if head.endswith(".py") else importlib.import_module(head)
    part: Any = module
    for name in tail.split("."):
        if not hasattr(part, name):
            names = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
            raise UserError(f"{head} defines no '{tail}': {nearest(tail, names) if names else 'it defines nothing.'}")
        part = getattr(part, name)
    return part


def _module_of_file(file: Path) -> ModuleType:
    """Import a file as a module of its package, if any, once for each path and content.

    On `sys.path` are meanwhile, first, the folder that the package is in, or that of a file without one; last, its own.
    """
    if not is_there(file):
        raise UserError(f"there is no file {file}: check the path.")
    file = file.resolve()
    root, package = package_of(file)
    content = file_sha256(file)
    name = f"{PACKAGE}_{file.stem}_{hashlib.sha256(f'{file} {content}'.encode()).hexdigest()[:12]}"
    name = f"{package}.{name}" if package else name
    if name in sys.modules:
        _check_beside(_imported.get(name, {}))
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # the file ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    last = [] if str(file.parent) in (str(root), *sys.path) else [str(file.parent)]
    sys.path[:] = [str(root), *sys.path, *last]
    try:
        # Not through the loader: its bytecode cache recognises an edited file by time and size alone.
        exec(compile(file.read_bytes(), file, "exec"), vars(module))
        _imported[name] = {file: content} | _loaded_beside(file)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        for folder in (str(root), *last):
            sys.path.remove(folder)
    return module


def _loaded_beside(file: Path) -> dict[Path, str]:
    """The SHA-256 of the files beside a file that it imports; UserError if Python has another module of a name."""
    beside = imported_files(file)
    for path, name in beside.items():
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded is not None and Path(loaded).resolve() != path.resolve():
            raise UserError(f"{file} imports {path.name}, but {loaded} has that name in this program: rename one.")
    return {path: file_sha256(path) for path in beside}


def check_unedited(cls: type) -> None:
    """Raise UserError if a file of the user that the class or a base of it comes from has changed since its import."""
    for base in cls.__mro__:
        _check_beside(_imported.get(base.__module__, {}))


def _check_beside(sha256: Mapping[Path, str]) -> None:
    for path, recorded in sha256.items():
        if not path.is_file() or file_sha256(path) != recorded:
            raise UserError(f"{path} has changed since it was imported: start Python anew.")


@contextmanager
def from_outside(fails: str) -> Iterator[None]:
    """Turn what foreign code raises in this context, SystemExit included, into a UserError that begins with `fails`."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{fails}: {type(error).__name__}: {in_one_line(error)}.") from error


def takes(function: Callable, arguments: int, *names: str) -> bool:
    """Whether a function can be called with so many arguments and those names, as far as its own signature tells."""
    try:
        inspect.signature(function, follow_wrapped=False).bind(*[None] * arguments, **dict.fromkeys(names))
    except TypeError:
        return False
    except ValueError:  # a function in C without a signature
        return True
    return True


def is_of_package(part: Any) -> bool:
    """Whether a class or function is one of this package."""
    return part.__module__.startswith("fedjax_pcdd.")


def called(part: str, function: Any, *given: Any, of: str = "") -> Any:
    """Call a function from outside and return its result.

    Args:
      part: what messages call the function.
      given: its arguments.
      of: description of the arguments.

    Raises:
      UserError: it is not a function, takes other arguments, or fails.
    """
    if not (callable(function) and takes(function, len(given))):
        raise UserError(f"{part} must be a function {f'of {of}' if of else 'without arguments'}.")
    with from_outside(f"{part} fails"):
        return function(*given)


def origin_of(part: Any, path: str = "") -> Origin | None:
    """Where a part comes from; None for one of this package, or without a file (a notebook's cell).

    Its `object` is "" for an instance that no module holds under a name. `path` is the import path that the part was
    found by, if any.
    """
    if path:
        head, _, tail = path.rpartition(":")
        file = located(path, head) if head.endswith(".py") else getattr(sys.modules.get(head), "__file__", None)
        return None if file is None else origin_of_file(Path(file), tail)
    module, name = (part.__module__, part.__qualname__) if hasattr(part, "__qualname__") else _held_by_module(part)
    if module is None or module.partition(".")[0] == PACKAGE:
        return None
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else origin_of_file(Path(file), name)


def _held_by_module(instance: Any) -> tuple[str, str]:
    """A module outside this package and the name that an instance has in it; else the module of its class, and ""."""
    for module, content in reversed(list(sys.modules.items())):  # what is imported comes after what imports it
        if module.partition(".")[0] != PACKAGE:
            names = (name for name, value in list(getattr(content, "__dict__", {}).items()) if value is instance)
            if (name := next(names, None)) is not None:
                return module, name
    return type(instance).__module__, ""


def origin_of_file(file: Path, name: str = "") -> Origin:
    """The origin of a part that lies in a file."""
    return Origin(str(file.resolve()), name, file_sha256(file))


def file_sha256(file: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _identity(part: Any) -> tuple[Any, Any]:
    """What two definitions of the same part have in common: a cell or a file that is run again has the same one."""
    module = getattr(part, "__module__", None)
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file or module, getattr(part, "__qualname__", id(part))
