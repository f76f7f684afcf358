"""One run from the command line: its arguments, and what it prints."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedjax_pcdd.cli.messages import guarded, invocation, sentence, starting, warn
from fedjax_pcdd.errors import is_there
from fedjax_pcdd.training.config import RUN, RunConfig, check_written, run_folder

GRACE = 30.0  # seconds that a run has after SIGTERM or SIGINT to end its round and save it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment that the arguments describe; exit codes are those that docs/reliability.md lists."""
    return guarded(_main, argv)


def _main(argv: Sequence[str]) -> None:
    check_written(_plainly_written(argv))  # before methods and JAX are loaded, which takes seconds
    with starting():
        from fedjax_pcdd.cli.help import information
        from fedjax_pcdd.cli.options import configure, scan

        options = scan(argv)
        if text := information(options):
            print(text)
            return
        config, method = configure(options)
        from fedjax_pcdd.api import runs  # noqa: F401 - loaded here, where Ctrl-C ends it; not needed for the help
        from fedjax_pcdd.training.lock import Taken

    while True:
        named = config if config.resume else replace(config, run_dir=run_folder(config))
        try:
            _train(named, method, {} if config.resume else origin(options, argv))
            return
        except Taken:  # by a command that began at the same time
            if named == config or config.coordinator is not None:
                raise


def _how_to_continue(config: RunConfig) -> str:
    from fedjax_pcdd.training.folder import CONFIG

    began = config.run_dir is not None and is_there(config.run_dir / CONFIG)
    return f"continue with `resume={config.run_dir}`" if began else "nothing was written"


def _plainly_written(argv: Sequence[str]) -> dict[str, str]:
    """Options that every run has, among arguments like --name=value; {} if the help is asked for."""
    words = [word[2:].partition("=") for word in argv if word.startswith("--") and "=" in word]
    options = {name.replace("-", "_"): text for name, _, text in words}
    return {} if {"-h", "--help"} & {*argv} else {name: text for name, text in options.items() if name in RUN}


def _train(config: RunConfig, method: Any, origin: Mapping[str, Any]) -> None:
    import jax

    from fedjax_pcdd.api import runs
    from fedjax_pcdd.training import hosts, interrupts, progress

    def killed() -> str:
        return sentence(f"stopped in the midst of a round: {_how_to_continue(config)}")

    try:
        with interrupts.watch(GRACE, killed), hosts.together(config, method, sentence) as host_config:
            say = warn if jax.process_index() == 0 else lambda _: None
            bars = [] if host_config.quiet else [progress.RunBar()]
            summary = runs.run(host_config, method, origin, last=bars, say=say)
            if bars:
                progress.show(summary, host_config.run_dir or Path())
    except KeyboardInterrupt as stop:
        stop.args = (f"{f'{stop}: ' if str(stop) else ''}{_how_to_continue(config)}",)
        raise


def origin(given: Mapping[str, str], argv: Sequence[str]) -> dict[str, Any]:
    """How a run was requested; from it a report knows the cell of a paper's table."""
    cell = {name: given.get(name) for name in ("preset", "split", "variant")}
    return {**cell, "command": f"{invocation('run')} {shlex.join(argv)}".rstrip()}
