"""The files beside a file of the user that it imports: what a run computes depends on them, too."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = __name__.partition(".")[0]


def imported_files(file: Path) -> dict[Path, str]:
    """Files beside a file that it imports, directly or not, with their modules' names; none of this library.

    Imports are read from the text, wherever in it they stand; nothing is executed.
    """
    root, package = file.parent, ""
    while (root / "__init__.py").exists():
        root, package = root.parent, root.name
    names: dict[Path, str] = {}
    unread = [file]
    while unread:
        importing = unread.pop()
        for base, parts in _imports(importing, root):
            if base == root and (parts[0] == PACKAGE or package not in ("", parts[0])):
                continue
            for path in _files_of(base, parts):
                if path not in names and path != file:
                    names[path] = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
                    unread.append(path)
    return names


def _imports(file: Path, root: Path) -> Iterator[tuple[Path, list[str]]]:
    """What a file imports: the folder in which it is looked for, and the parts of its dotted name."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((root, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(file.parents):
            base, module = file.parents[node.level - 1] if node.level else root, (node.module or "").split(".")
            yield from ((base, [*filter(None, module), alias.name]) for alias in node.names)


def _files_of(base: Path, parts: list[str]) -> Iterator[Path]:
    """The files of a module and of the packages that it is in, as far as they exist."""
    for end in range(1, len(parts) + 1):
        path = base.joinpath(*parts[:end])
        candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
        yield from (candidate for candidate in candidates if candidate.is_file())
