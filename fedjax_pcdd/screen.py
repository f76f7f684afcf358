"""Where commands print what is going on."""

from contextlib import suppress

from rich.console import Console


class Screen(Console):
    """A console whose reader may go, such as `head`: the work goes on, and nothing more is printed."""

    def on_broken_pipe(self) -> None:
        """Print nothing more, where rich would end the process."""
        with suppress(SystemExit):
            super().on_broken_pipe()
