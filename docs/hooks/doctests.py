"""An extension of Griffe, which reads docstrings for the reference: doctests are examples, as code."""

from typing import Any

try:
    from griffe import Extension  # pyright: ignore[reportMissingImports]
except ImportError:  # without the extra docs only the function below is of use
    Extension = object


class Doctests(Extension):
    """Puts a heading above the doctests of every docstring, by which they are recognised."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = with_examples(obj.docstring.value)


def with_examples(text: str) -> str:
    """A docstring whose first doctest has the heading of a section; every other line stays.

    >>> with_examples("Twice as much.\\n\\n>>> 2 * 2\\n4")
    'Twice as much.\\n\\nExamples:\\n    >>> 2 * 2\\n    4'
    """
    before, sign, after = text.partition("\n>>> ")
    if not sign:
        return text
    lines = f">>> {after}".split("\n")
    return "\n".join([before, "Examples:", *(f"    {line}" if line else "" for line in lines)])
