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

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_pcdd.analysis.quantities import QUANTITIES
from fedjax_pcdd.cli.messages import flag, guarded
from fedjax_pcdd.cli.options import configure, scan
from fedjax_pcdd.cli.run_analyses import Options, bilateral, burden, grid, labels_of, rounds, table, tracked, traffic
from fedjax_pcdd.cli.task_analyses import Lines, ablation, correlation, embedding, tasks
from fedjax_pcdd.data.federation import heat_maps, map_of, read_counts
from fedjax_pcdd.errors import UserError, as_path, at_once, nearest
from fedjax_pcdd.report.collect import RunRecord, collect
from fedjax_pcdd.training.config import RUN

OUTPUT = "another `output`"
PICTURES = (".png", ".pdf", ".svg", ".jpg")


class Command(NamedTuple):
    """What a word of the command line does with runs and options; it returns what is to be printed."""

    work: Callable[[list[RunRecord], Options], str]
    options: tuple[str, ...] = ()
    alone: bool = False  # whether it works without any run


def analyse_main(argv: Sequence[str] | None = None) -> int:
    """Print a table and draw a picture.

    Args:
      argv: arguments without the program's name; None for those of the process.

    Returns:
      Exit code: 0, or 2 for a mistake of the user (one sentence on stderr).
    """
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
    given = _located(scan(arguments, {"by_split", "clip_colours"}, paths))
    for option in given:
        if option not in command.options:
            known = ", ".join(flag(one) for one in command.options) or "none"
            raise UserError(f"{name} has no option {flag(option)}: its options are {known}.")
    _check_suffix(given.get("output"))
    if not paths and not command.alone:
        raise UserError("name at least one folder of runs, as runs/.")
    records = _finished(collect(paths)) if paths else []
    if "output" not in given:
        return command.work(records, given)
    with at_once(Path(given["output"]), OUTPUT) as half:
        return command.work(records, given | {"output": str(half)})


def _located(given: Mapping[str, str]) -> dict[str, str]:
    """The options, ~ in those that are files being the home folder."""
    return {name: str(as_path(text, name)) if name in ("output", "counts") else text for name, text in given.items()}


def _check_suffix(output: str | None) -> None:
    """UserError for a picture in a format that is not written."""
    if output is not None and (suffix := Path(output).suffix) not in PICTURES:
        raise UserError(f"must end with {', '.join(PICTURES)}, not '{suffix}'.", field="output")


def _finished(records: list[RunRecord]) -> list[RunRecord]:
    finished = [record for record in records if record.summary is not None]
    if not finished:
        raise UserError(f"{records[0].path} is unfinished: continue it with `resume={records[0].path}`.")
    return finished


def _of_task(analysis: Callable[..., Lines]) -> Command:
    """The table and picture of an analysis of tasks."""

    def work(records: list[RunRecord], given: Options) -> str:
        return table(*analysis(records, labels_of(records), given.get("output")))

    return Command(work, ("output",))


def _correlation(records: list[RunRecord], given: Options) -> str:
    if "output" in given and len(records) > 1:
        raise UserError("one picture is of one run: name one, or leave `output` out.")
    return table(*correlation(records, labels_of(records), given.get("output"), given.get("clip_colours") == "true"))


def _partition(given: Options) -> str:
    from fedjax_pcdd.api.grid import expand
    from fedjax_pcdd.training.build import federate

    output = given.pop("output", "partition.png")
    _check_suffix(output)
    if "counts" in given:
        if len(given) > 1:
            raise UserError("is all that is drawn: leave the other options out.", field="counts")
        maps = [read_counts(Path(given["counts"]))]
    else:
        if "task" in given:
            raise UserError("is divided by domains, which have no heat map: leave it out.", field="task")
        splits = [{"split": one} for one in given.pop("split", "").split(",") if one] or [{}]
        points = [one.given for split in splits for one in expand(given | split)]
        maps = [map_of(federate(configure(point)[0])) for point in points]
    with at_once(Path(output), OUTPUT) as half:
        heat_maps(maps, half)
    owned = [(one.counts > 0).sum(1) for one in maps]
    words = [f"{len(one)} clients with {one.min()} to {one.max()} classes" for one in owned]
    return f"{'; '.join(words)}: written to {output}"


COMMANDS = (
    {
        name: Command(tracked(name), ("output", *["by_split"] * (name in ("classes", "angles", "features"))))
        for name in QUANTITIES
    }
    | {
        "traffic": Command(traffic, ("preset",), alone=True),
        "rounds": Command(rounds, ("target",)),
        "burden": Command(burden, ("output",)),
        "bilateral": Command(bilateral, ("output",)),
        "grid": Command(grid),
        "correlation": Command(_correlation, ("output", "clip_colours")),
    }
    | {one.__name__: _of_task(one) for one in (tasks, ablation, embedding)}
)
