"""What only a GPU can decide: claims in the papers' own settings, how long that is predicted to take, and what runs it.

Nothing was timed: a step of ResNet18 on an H100 is predicted from its compiled program, launches as they are, the rest
by the pixels of a batch (benchmarks/results/predicted.json). Other networks have no prediction.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_pcdd.data.sources import DATASETS
from fedjax_pcdd.report.tables import markdown, texts
from fedjax_pcdd.training.config import RunConfig
from fedjax_pcdd.training.fields import read_text
from reproduction.claims import Claim, Finding
from reproduction.plan import Cell, configured

PREDICTED = Path("benchmarks/results/predicted.json")
OWN = ("paper", "gpu", "full")  # scales with the papers' own settings
HEADING = """## What only a GPU can decide

These are the papers' own settings that no plan for a CPU has, mostly ResNet18 and larger. Hours are predicted, not
measured: the training steps of both rows and all seeds on an H100, each taken to last as long as FedAvg's, from the
compiled program ([performance.md](performance.md)). No kernel reaches such a bound, and what a method computes beyond
FedAvg's step is not counted. On an H200 such a step took 1.55 times as long with one lane and 1.14 times with ten. "–"
means that no step of that network was predicted. Where a part is named, `python -m benchmarks.gpu --part=3` runs it
with one seed ([gpu.md](gpu.md)); `python experiments/reproduce.py --scale=gpu` runs the splits named so, most wanted
first; a claim's own command runs all of its splits, with `--only` some of them.
"""


class Need(NamedTuple):
    """A claim on a split that only a GPU can decide.

    Args:
      claim, split: which.
      by_cell: hours predicted for each cell of both rows, all seeds in the paper's settings, by table and name; None
        where nothing is.
      part: of the GPU plan (benchmarks/gpu) that runs them, None where none does.
      planned: whether the plan `gpu` has both rows.
    """

    claim: Claim
    split: str
    by_cell: Mapping[str, float | None]
    part: int | None
    planned: bool

    @property
    def hours(self) -> float | None:
        """Of all its cells."""
        known = [one for one in self.by_cell.values() if one is not None]
        return sum(known) if len(known) == len(self.by_cell) else None

    @property
    def command(self) -> str:
        """What runs its cells."""
        return f"{command(self.claim)} --only={self.claim.table}/paper-{self.split}-"


def command(claim: Claim) -> str:
    """What runs all cells of a claim in the paper's settings."""
    return f'python experiments/reproduce.py --scale=paper --claim="{claim.text}" --data-dir=data'


def about(claim: Claim, cell: Cell) -> bool:
    """Whether a cell is of the table itself, and a row and a split that a claim is about."""
    row = f"{cell.method} {cell.variant or ''}".rstrip()
    return not cell.tag and (cell.table, row in (claim.higher, claim.lower), cell.split in claim.splits) == (
        claim.table, True, True
    )  # fmt: skip


def needs(
    findings: Iterable[Finding], plans: Mapping[str, Sequence[Cell]], hours: Callable[[Cell], float | None]
) -> list[Need]:
    """The claims on the splits that have cells of their own, none of which a CPU runs in the papers' settings.

    Args:
      findings: of all claims.
      plans: cells of `paper`, of `full`, which a CPU can run, and of `gpu`.
      hours: predicted for a cell, None where nothing is.
    """
    known: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        known.setdefault((one.claim.text, one.split), []).append(one)
    made = []
    for own in known.values():
        claim, split = own[0].claim, own[0].split
        cells = {name: [cell for cell in plan if cell.split == split and about(claim, cell)]
                 for name, plan in plans.items()}  # fmt: skip
        if cells["paper"] and not cells["full"] and not any(one.scale in OWN for one in own):
            each = {f"{cell.table} {cell.name}": hours(cell) for cell in cells["paper"]}
            both = len({(cell.method, cell.variant) for cell in cells["gpu"]}) == 2
            made.append(Need(claim, split, each, claim.gpu_part.get(split), both))
    return made


def predicted_hours(repository: Path, presets: Path) -> Callable[[Cell], float | None]:
    """What predicts the hours of a cell's training on a GPU from a repository's file; None for what that has not."""
    path = repository / PREDICTED
    step = json.loads(read_text(path)) if path.is_file() else None

    def hours(cell: Cell) -> float | None:
        config, _ = configured(cell, presets)
        images = re.search(r"(\d+) \+ \d+ .*?(\d+)x", DATASETS.get(config.dataset, ""))
        if step is None or images is None or config.local_epochs is None or config.model != step["model"]:
            return None  # tasks have their own networks and epochs
        launches = step["launch_us"] * step["kernels"]
        pixels = config.batch_size * int(images[2]) ** 2 / (step["batch"] * step["side"] ** 2)
        return (
            _steps(config, config.local_epochs * int(images[1]))
            * (launches + (step["step_us"] - launches) * pixels)
            / 3.6e9
        )

    return hours


def _steps(config: RunConfig, samples: int) -> float:
    """Training steps of a run, of whose rounds each would be on so many samples if all clients took part."""
    taking_part = config.cohort / config.clients if config.cohort and config.clients else 1.0
    return config.rounds * samples * taking_part / config.batch_size


def gpu_section(known: Sequence[Need]) -> list[str]:
    """A part of the page: a line for each claim, and its command."""
    if not known:
        return []
    lines, commands = [], []
    for text in dict.fromkeys(one.claim.text for one in known):
        own = [one for one in known if one.claim.text == text]
        hours = [one.hours for one in own if one.hours is not None]
        runs: dict[str, list[str]] = {}
        for one in own:
            for plan in [f"part {one.part}"] * (one.part is not None) + ["`--scale=gpu`"] * one.planned:
                runs.setdefault(plan, []).append(one.split)
        at = "; ".join(f"{plan}: {' '.join(splits)}" for plan, splits in runs.items())
        told = f"{sum(hours):.1f}" + " and more" * (len(hours) < len(own)) if hours else "–"
        lines.append((text, " ".join(one.split for one in own), told, at or "–"))
        commands.append(f"    {command(own[0].claim)}")
    heads = ("claim", "splits", "hours, predicted", "run by")
    table = markdown(texts("", heads, lines, left=("splits", "run by")), escape=str)
    return [HEADING, table, "<details><summary>Commands</summary>", "", *commands, "", "</details>", ""]
