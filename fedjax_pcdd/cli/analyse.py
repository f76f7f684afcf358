"""Figures and tables of the papers that are not accuracies, from the folders of finished runs.

    fedjax-pcdd analyse classes RUN...    accuracy on classes that clients have or lack; --output=PICTURE.png
    fedjax-pcdd analyse angles RUN...     classifier angles (FedGELA, Figure 2); --output=PICTURE.png
    fedjax-pcdd analyse features RUN...   feature angles (FedGELA, Figures 3 and 5); --output=PICTURE.png
    fedjax-pcdd analyse spectrum RUN...   eigenvalues of the features (FedMR, Table 7); --output=PICTURE.png
    fedjax-pcdd analyse intra RUN...      intra-class loss (FedMR, Figure 7); --output=PICTURE.png
    fedjax-pcdd analyse gradients RUN...  norms of gradients, clipped steps, weights; --output=PICTURE.png
    fedjax-pcdd analyse traffic           uploads with and without prototypes (FedMR, Table 3), as with
                                                    --preset=fedmr/table3
    fedjax-pcdd analyse traffic RUN...    what runs sent
    fedjax-pcdd analyse rounds RUN...     rounds to FedAvg's accuracy (FedMR, Table 4; FedRL, Table 2);
                                                    --target=best or last
    fedjax-pcdd analyse burden RUN...     memory and time of a client (FedMR, Figure 4; FedRL, Table 3);
                                                    --output=PICTURE.png
    fedjax-pcdd analyse bilateral RUN...  GA and PA against E_W (FedGELA, Figure 4); --output=PICTURE.png
    fedjax-pcdd analyse grid RUN...       the best weights of a search beside the printed ones (FedMR, Tables
                                                    9 and 10)
    fedjax-pcdd analyse partition ...     heat maps (FedMR, Figures 5 and 6; FedRL, Figure 3) from the
                                                    options of a run, as --partition=pcdd --clients=10; a panel for
                                                    each value of --split or --beta; --counts=FILE draws counts in
                                                    place of a data set; --output=PICTURE.png
    fedjax-pcdd analyse tasks RUN...      own domain and local objective by round (FCCL, Figure 6)
    fedjax-pcdd analyse ablation RUN...   by public images and continual learning (FCCL, Figures 7 and 8)
    fedjax-pcdd analyse correlation RUN   logits of public and of own images (FCCL, Figure 5); --clip-colours
    fedjax-pcdd analyse embedding RUN...  features of two participants in the plane (FCCL, Figure 4)

The last four draw with --output=PICTURE.png, too; classes, angles and features with --by-split beside it draw a column
for each partition (FedGELA, Figure 5).
RUN is the folder of a run, or one that holds such folders. What --track wrote is read; a run without it is looked at in
its last checkpoint, where the clients' models are those after the local training of one further round.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_pcdd.analysis.quantities import QUANTITIES
from fedjax_pcdd.cli.analysis_text import Options
from fedjax_pcdd.cli.cost_analyses import burden, rounds, traffic
from fedjax_pcdd.cli.messages import flag, guarded
from fedjax_pcdd.cli.options import configure, scan
from fedjax_pcdd.cli.quantity_analyses import tracked
from fedjax_pcdd.cli.sweep_analyses import bilateral, grid
from fedjax_pcdd.cli.task_analyses import ablation, correlation, embedding, tasks
from fedjax_pcdd.data.federation import heat_maps, map_of, read_counts
from fedjax_pcdd.errors import UserError, as_path, at_once, nearest
from fedjax_pcdd.report.collect import RunRecord, collect
from fedjax_pcdd.training.config import RUN

OUTPUT = "another `output`"
PICTURES = (".png", ".pdf", ".svg", ".jpg")


class Command(NamedTuple):
    """One analysis; `work` takes runs and options and returns the text to print."""

    work: Callable[[list[RunRecord], Options], str]
    options: tuple[str, ...] = ()
    alone: bool = False  # whether it works without any run


def analyse_main(argv: Sequence[str] | None = None) -> int:
    """Print a table and draw a picture; exit code 0, or 2 for a mistake of the user (one sentence on stderr)."""
    return guarded(_main, argv)


def _main(arguments: Sequence[str]) -> None:
    if not arguments or {"-h", "--help"} & set(arguments):
        flags = [flag(option.name) for option in RUN.values() if option.group == "data"]
        flags += [flag(name) for name in ("preset", "split", "seed", "counts", "output")]
        print((__doc__ or "") + (f"\nOptions of partition: {', '.join(flags)}" if "partition" in arguments else ""))
        return
    print(_run(arguments[0], arguments[1:]))


def _run(name: str, arguments: Sequence[str]) -> str:
    if name == "partition":
        return _partition(_located(scan(arguments)))
    if name not in COMMANDS:
        raise UserError(f"there is no analysis '{name}': {nearest(name, [*COMMANDS, 'partition'])}")
    command = COMMANDS[name]
    paths: list[str] = []
    options = _located(scan(arguments, {"by_split", "clip_colours"}, paths, own=command.options))
    for option in options:
        if option not in command.options:
            available = ", ".join(map(flag, command.options))
            advice = f"its options are {available}." if available else "it has none."
            raise UserError(f"{name} has no option {flag(option)}: {advice}")
    _check_suffix(options.get("output"))
    records = [] if command.alone and not paths else _finished(collect(paths))
    if "output" not in options:
        return command.work(records, options)
    with at_once(Path(options["output"]), OUTPUT, parents=True) as temporary:  # so that a mistake in it comes first
        return command.work(records, options | {"output": str(temporary)})


def _located(options: Mapping[str, str]) -> dict[str, str]:
    """The options, with ~ expanded to the home folder in those that are files."""
    return {name: str(as_path(text, name)) if name in ("output", "counts") else text for name, text in options.items()}


def _check_suffix(output: str | None) -> None:
    if output is not None and (suffix := Path(output).suffix) not in PICTURES:
        raise UserError(f"must end with {', '.join(PICTURES)}, not '{suffix}'.", field="output")


def _finished(records: list[RunRecord]) -> list[RunRecord]:
    finished = [record for record in records if record.summary is not None]
    if not finished:
        raise UserError(f"{records[0].path} is unfinished: continue it with `resume={records[0].path}`.")
    for record in records:
        if record.summary is None:
            print(f"left out: {record.path} {'failed' if record.failure else 'is unfinished'}.", file=sys.stderr)
    return finished


def _partition(options: Options) -> str:
    from fedjax_pcdd.api.grid import expand
    from fedjax_pcdd.training.build import federate

    output = options.pop("output", "partition.png")
    _check_suffix(output)
    if "counts" in options:
        if len(options) > 1:
            raise UserError("is all that is drawn: leave the other options out.", field="counts")
        maps = [read_counts(Path(options["counts"]))]
    else:
        if "task" in options:
            raise UserError("is divided by domains, which have no heat map: leave it out.", field="task")
        splits = [{"split": name} for name in options.pop("split", "").split(",") if name] or [{}]
        points = [experiment.given for split in splits for experiment in expand(options | split)]
        maps = [map_of(federate(configure(point)[0])) for point in points]
    with at_once(Path(output), OUTPUT, parents=True) as temporary:
        heat_maps(maps, temporary)
    owned = [(heat_map.counts > 0).sum(1) for heat_map in maps]
    words = [f"{len(counts)} clients with {counts.min()} to {counts.max()} classes" for counts in owned]
    return f"{'; '.join(words)}: written to {output}"


COMMANDS = {
    **{
        name: Command(tracked(name), ("output", *["by_split"] * (name in ("classes", "angles", "features"))))
        for name in QUANTITIES
    },
    "traffic": Command(traffic, ("preset",), alone=True),
    "rounds": Command(rounds, ("target",)),
    "burden": Command(burden, ("output",)),
    "bilateral": Command(bilateral, ("output",)),
    "grid": Command(grid),
    "correlation": Command(correlation, ("output", "clip_colours")),
    "tasks": Command(tasks, ("output",)),
    "ablation": Command(ablation, ("output",)),
    "embedding": Command(embedding, ("output",)),
}
