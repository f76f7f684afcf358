"""Searches: options of one method, suggested by Optuna, resumable, into the folder of a sweep.

    fedjax-pcdd search --method=fedprox --lr=0.01:0.3:log --mu=0.1,1,10 --validation=0.1 --select-on=validation

An option with bounds, LOW:HIGH or LOW:HIGH:log (both included), or with several values is searched. Seeds,
as --seed=0:3, are repetitions, over which a trial is the mean. A failed run counts as 0. All other options are those
of run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fedjax_pcdd.cli.messages import flag, guarded, sentence
from fedjax_pcdd.cli.options import scan
from fedjax_pcdd.cli.sweep import conclude, own_options, train
from fedjax_pcdd.training.fields import Option

OPTIONS = {
    "trials": Option("trials", int, False, 20, low=1),
    "metric": Option("metric", Literal["ga", "pa"], False, "ga"),
    "together": Option("together", int, False, 1, low=1),
    "search_seed": Option("search_seed", int, False, 0, low=0),
    "sweep_dir": Option("sweep_dir", Path, True, None),
}
HELP = f"""{__doc__}
--trials=N          suggestions in all (default: 20), the first ten at random; the same command with more goes on
--metric=ga|pa      what is maximised: the best round of it, chosen on the samples that --select-on names
--together=N        trials that are suggested at once and, where options allow it, trained as one program (default: 1)
--search-seed=N     of the suggestions (default: 0)
--sweep-dir=DIR     the folder of the trials; by default one below runs/ that is named by the first of them"""


def search_main(argv: Sequence[str] | None = None) -> int:
    """Search as the arguments say; exit code as `sweep_main`."""
    argv = sys.argv[1:] if argv is None else argv
    return guarded(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    given = scan(argv)
    if "help" in given:
        print(HELP)
        return 0
    own, results = own_options(given, OPTIONS), {}
    from fedjax_pcdd.api.search import ON_TEST, Search

    search = Search(given, results, metric=own["metric"], seed=own["search_seed"])
    if search.on_test:
        print(f"warning: {sentence(ON_TEST)}", file=sys.stderr)
    folder, _ = train(search.stages(own["trials"], own["together"]), results, own["sweep_dir"])
    best = search.best()
    code = conclude(folder, search.rows(), given, tuple(best))
    print(f"best: {' '.join(f'{flag(name)}={text}' for name, text in best.items())}")
    return code
