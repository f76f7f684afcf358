"""An extension of Griffe, which reads docstrings for the reference: doctests are examples, as code."""

import contextlib
from typing import Any

Extension: Any = object  # without the extra docs only the function below is of use
with contextlib.suppress(ImportError):
    from griffe import Extension  # pyright: ignore[reportMissingImports]


class Doctests(Extension):
    """Puts the heading by which doctests are recognised above those of every docstring."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = with_examples(obj.docstring.value)


def with_examples(text: str) -> str:
    """A docstring with the heading of a section above its first doctest; the lines before stay as they are.

    >>> with_examples("Twice as much.\\n\\n>>> 2 * 2\\n4")
    'Twice as much.\\n\\nExamples:\\n    >>> 2 * 2\\n    4'
    """
    before, sign, after = text.partition("\n>>> ")
    if not sign:
        return text
    lines = f">>> {after}".split("\n")
    return "\n".join([before, "Examples:", *(f"    {line}" if line else "" for line in lines)])
