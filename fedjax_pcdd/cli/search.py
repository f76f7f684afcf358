"""Searches: options of one method, suggested by Optuna, resumable, into the folder of a sweep.

    fedjax-pcdd search --method=fedprox --lr=0.01:0.3:log --mu=0.1,1,10 --validation=0.1 --select-on=validation

An option with bounds, LOW:HIGH or LOW:HIGH:log (both included), or with several values is searched. Seeds,
as --seed=0:3, are repetitions, over which a trial is the mean. A failed run counts as 0. All other options are those
of run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedjax_pcdd.api.grid import SEARCH
from fedjax_pcdd.cli.help import information
from fedjax_pcdd.cli.messages import flag, guarded, starting, warn
from fedjax_pcdd.cli.options import scan
from fedjax_pcdd.cli.sweep import CONSOLE, all_over, conclude, of_what_has_begun, own_options, status, train
from fedjax_pcdd.report.tables import terminal
from fedjax_pcdd.training.config import RUN
from fedjax_pcdd.training.fields import Option, convert

if TYPE_CHECKING:
    from fedjax_pcdd.api.sweep_folder import Standing, Sweep

OPTIONS = {**SEARCH, "sweep_dir": Option("sweep_dir", Path, True, None), "status": Option("status", bool, False, False)}
HELP = f"""{__doc__}
--trials=N          suggestions in all (default: 20), the first ten at random; the same command with more goes on
--metric=ga|pa      what is maximised (default: ga): the best round of it, chosen on the samples that --select-on names
--together=N        trials that are suggested at once and, where options allow it, trained as one program (default: 1)
--search-seed=N     of the suggestions (default: 0)
--sweep-dir=DIR     the folder of the trials; by default one below runs/ that is named by the first of them
--status            shows which trials are done, failed and left of those suggested so far, and trains nothing

The trials that a command asks for, the best one first, are written to trials.csv in that folder.
A search is one process, since a suggestion follows from the results before it: there is no --workers as of sweep."""


def search_main(argv: Sequence[str] | None = None) -> int:
    """Run the search that the arguments describe; exit code as for `sweep_main`."""
    return guarded(_main, argv)


def _main(argv: Sequence[str]) -> int:
    with starting():
        options = scan(argv, own=OPTIONS)
    if text := HELP if "help" in options else information(options):
        print(text)
        return 0
    settings, results = own_options(options, OPTIONS), {}
    quiet = convert(RUN["quiet"], options.get("quiet", "false"))
    if of_what_has_begun(options, settings):
        return 0
    from fedjax_pcdd.api.search import ON_TEST, Search

    search = Search(options, results, metric=settings["metric"], seed=settings["search_seed"])
    if search.on_test:
        warn(ON_TEST)
    standings: list[Standing] = []

    def before(sweep: "Sweep", folder: Path) -> bool:
        return not settings["status"] or all_over(sweep, standings, results)

    stages = search.stages(settings["trials"], settings["together"], settings["sweep_dir"])
    folder, _ = train(stages, results, settings["sweep_dir"], before=before, quiet=quiet)
    if settings["status"]:
        CONSOLE.print(terminal(status(standings)))
        return 0
    best = search.best()
    code = conclude(folder, search.rows(), tuple(best), file="trials.csv", quiet=quiet)
    if not quiet:
        print(f"best: {' '.join(f'{flag(name)}={text}' for name, text in best.items())}")
    return code
