"""The files beside a file of the user that it imports: what a run computes depends on them, too."""

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGE = __name__.partition(".")[0]


def package_of(file: Path) -> tuple[Path, str]:
    """The folder that a file's package is in, and the package's dotted name; without one, the file's folder and ""."""
    root, names = file.parent, []
    while (root / "__init__.py").exists():
        root, names = root.parent, [root.name, *names]
    return root, ".".join(names)


def imported_files(file: Path) -> dict[Path, str]:
    """Files beside a file that it imports, directly or not, with their modules' names; none of this library.

    Imports are read from the text, wherever in it they stand; nothing is executed.
    """
    names: dict[Path, str] = {}
    unread = [file]
    while unread:
        importing = unread.pop()
        for level, parts in _imports(importing):
            folder, parts = _absolute(level, parts, importing, file)
            if folder is None:
                continue
            for path in _files_of(folder, parts):
                if path not in names and path != file:
                    names[path] = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
                    unread.append(path)
    return names


def _imports(file: Path) -> Iterator[tuple[int, list[str]]]:
    """What a file imports: the number of leading dots, and the parts of the dotted name."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((0, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(file.parents):
            module = filter(None, (node.module or "").split("."))
            yield from ((node.level, [*module, alias.name]) for alias in node.names)


def _absolute(level: int, parts: list[str], importing: Path, file: Path) -> tuple[Path | None, list[str]]:
    """The folder, if it is the user's, in which Python looks for an import, and the parts of its name from there on."""
    root, package = package_of(file)
    if level:
        above = importing.parents[level - 1]
        return (root, [*above.relative_to(root).parts, *parts]) if above.is_relative_to(root) else (None, parts)
    if parts[0] == PACKAGE or parts[0] in sys.builtin_module_names:
        return None, parts
    if package.partition(".")[0] in ("", parts[0]):
        return root, parts
    found = PathFinder.find_spec(parts[0])  # on `sys.path`, which comes before the file's own folder
    beside = found is None or (found.origin and Path(found.origin).resolve().is_relative_to(file.parent))
    return file.parent if beside else None, parts


def _files_of(folder: Path, parts: list[str]) -> Iterator[Path]:
    """The files of a module and of the packages that it is in, as far as they exist."""
    for end in range(1, len(parts) + 1):
        path = folder.joinpath(*parts[:end])
        candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
        yield from (candidate for candidate in candidates if candidate.is_file())
