"""Hooks of MkDocs (see mkdocs.yml) for the documentation site; nothing is written to the source tree.

They add a page for each method and the Markdown files outside docs/, leave out of the navigation what a checkout does
not have, and turn links to other files of the repository into plain names.
"""

import posixpath
import re
from typing import Any

from fedjax_pcdd.methods import METHODS
from method_pages import ROOT, method_page, overview

# Files outside docs/ -> their places in the site.
OUTSIDE = {"CHANGELOG.md": "changelog.md", "BUILD.md": "building.md", "benchmarks/README.md": "benchmarks/index.md"}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def outside() -> dict[str, str]:
    """Repository path -> site path of the Markdown files outside docs/ that are there."""
    results = sorted((ROOT / "benchmarks/results").glob("*.md"))
    found = OUTSIDE | {f"benchmarks/results/{path.name}": f"benchmarks/{path.name}" for path in results}
    return {name: place for name, place in found.items() if (ROOT / name).is_file()}


def pages() -> dict[str, str]:
    """Text of every page that is no file of docs/, by its place in the site."""
    found = {place: (ROOT / name).read_text() for name, place in outside().items()}
    found["methods/index.md"] = overview()
    return found | {f"methods/{name}.md": method_page(name) for name in METHODS}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and leave what is not there out of the navigation."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports] -- the extra docs

    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    config.nav = _present(config.nav, {file.src_uri for file in files})
    return files


def _present(nav: list, known: set[str]) -> list:
    """The navigation without pages that are not there and sections without pages; methods and benchmarks one by one."""
    results = [place for place in outside().values() if place.startswith("benchmarks/")]
    within = {
        "methods/index.md": {name: f"methods/{name}.md" for name in METHODS},
        "benchmarks/index.md": {posixpath.basename(place)[:-3]: place for place in results if "index" not in place},
    }
    found = []
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            target = _present(target, known)
        elif target not in known:
            continue
        elif target in within:
            target = [target, *({name: place} for name, place in within[target].items())]
        if target:
            found.append({title: target})
    return found


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as the site has them."""
    return relinked(markdown, page.file.src_uri)


def relinked(markdown: str, place: str) -> str:
    """A page whose links to files of the repository lead to pages of the site, or are plain names without one.

    Args:
      markdown: links are relative to the file that the page was made from.
      place: of the page in the site.

    >>> relinked("[Changes](../CHANGELOG.md), [one](data.md#a), [code](../setup.py)", "tasks.md")
    '[Changes](changelog.md), [one](data.md#a), code'
    """
    sources = {to: name for name, to in outside().items()}
    here = posixpath.dirname(sources.get(place, f"docs/{place}"))

    def changed(found: re.Match) -> str:
        text, target, anchor = found[1], posixpath.normpath(posixpath.join(here, found[2])), found[3] or ""
        there = outside().get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if there is None:
            return text
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(place) or '.')}{anchor})"

    return LINK.sub(changed, markdown)
