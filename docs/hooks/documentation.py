"""Hooks of MkDocs (see mkdocs.yml) for the documentation site; nothing is written to the source tree.

They add a page for each method and the Markdown files outside docs/, leave out of the navigation what is missing in a
checkout, and turn links to other files of the repository into plain names.
"""

import posixpath
import re
from typing import Any

from fedjax_pcdd.methods import METHODS
from method_pages import ROOT, method_page, overview

# Files outside docs/ -> their paths in the site.
OUTSIDE = {"CHANGELOG.md": "changelog.md", "BUILD.md": "building.md", "benchmarks/README.md": "benchmarks/index.md"}
# Folders of the repository, which GitHub lists -> pages of the site that show what is in them.
FOLDERS = {"fedjax_pcdd/methods": "methods/index.md"}
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w=.-]{1,28}(?![\w=.-])")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def outside() -> dict[str, str]:
    """Repository path -> site path of the existing Markdown files outside docs/."""
    results = sorted((ROOT / "benchmarks/results").glob("*.md"))
    paths = OUTSIDE | {f"benchmarks/results/{path.name}": f"benchmarks/{path.name}" for path in results}
    return {name: path for name, path in paths.items() if (ROOT / name).is_file()}


def pages() -> dict[str, str]:
    """Text of every page that is not a file of docs/, by its path in the site."""
    texts = {path: (ROOT / name).read_text() for name, path in outside().items()}
    texts["methods/index.md"] = overview()
    return texts | {f"methods/{name}.md": method_page(name) for name in METHODS}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and leave missing ones out of the navigation."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports] -- the extra docs

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    config.nav = _present(config.nav, {file.src_uri for file in files})
    return files


def _present(nav: list, available: set[str]) -> list:
    """The navigation without missing pages and empty sections, with every page of the methods and the benchmarks."""
    benchmark_pages = [path for path in outside().values() if path.startswith("benchmarks/")]
    within = {
        "methods/index.md": {name: f"methods/{name}.md" for name in METHODS},
        "benchmarks/index.md": {posixpath.basename(path)[:-3]: path for path in benchmark_pages if "index" not in path},
    }
    present = []
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            target = _present(target, available)
        elif target not in available:
            continue
        elif target in within:
            target = [target, *({name: path} for name, path in within[target].items())]
        if target:
            present.append({title: target})
    return present


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adapt the links to the site, and allow Markdown within <details>, as GitHub does."""
    return relinked(markdown, page.file.src_uri).replace("<details>", "<details markdown>")


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Keep options from being broken at their hyphens."""
    return whole_options(html)


def whole_options(html: str) -> str:
    """HTML whose short options stay on one line, except in blocks of code, which scroll.

    >>> whole_options("<code>run --lr-decay=0.9</code>, <pre><code>run --lr=1</code></pre>")
    '<code>run <span class="word">--lr-decay=0.9</span></code>, <pre><code>run --lr=1</code></pre>'
    """
    pieces = re.split(r"(<pre.*?</pre>|<[^>]*>)", html, flags=re.DOTALL)
    return "".join(
        piece if piece.startswith("<") else OPTION.sub(r'<span class="word">\g<0></span>', piece) for piece in pieces
    )


def relinked(markdown: str, path: str) -> str:
    """A page whose links to files of the repository lead to pages of the site, or become plain names if there is none.

    Args:
      markdown: its links are relative to the file that the page was made from.
      path: path of the page in the site.

    >>> relinked("[Changes](../CHANGELOG.md), [one](data.md#a), [code](../setup.py)", "tasks.md")
    '[Changes](changelog.md), [one](data.md#a), code'
    """
    sources = {site_path: name for name, site_path in outside().items()}
    folder = posixpath.dirname(sources.get(path, f"docs/{path}"))

    def changed(link: re.Match) -> str:
        text, target, anchor = link[1], posixpath.normpath(posixpath.join(folder, link[2])), link[3] or ""
        page = (outside() | FOLDERS).get(target) or (
            target.removeprefix("docs/") if target.startswith("docs/") else None
        )
        if page is None:
            return text
        return f"[{text}]({posixpath.relpath(page, posixpath.dirname(path) or '.')}{anchor})"

    return LINK.sub(changed, markdown)
