"""What only a GPU can decide: claims in the papers' own settings, the hours predicted for them, and their commands.

Nothing was timed: a step of ResNet18 on an H100 is predicted from its compiled program; the time of its launches is
taken as it is, the rest scales with the pixels of a batch (benchmarks/results/predicted.json). Other networks have no
prediction.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_pcdd.data.sources import DATASETS
from fedjax_pcdd.report.tables import markdown, texts
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
      claim, split: the claim and one of its splits.
      by_run: hours predicted for each run of both rows, all seeds in the paper's settings, by its name, as tables share
        runs; None without a prediction.
      part: the part of the GPU plan (benchmarks/gpu) that runs them, None if none does.
      planned: whether the plan `gpu` has both rows.
    """

    claim: Claim
    split: str
    by_run: Mapping[str, float | None]
    part: int | None
    planned: bool

    @property
    def hours(self) -> float | None:
        """Hours of all its runs, None if one has no prediction."""
        predicted = [hours for hours in self.by_run.values() if hours is not None]
        return sum(predicted) if len(predicted) == len(self.by_run) else None

    @property
    def command(self) -> str:
        """The command that runs its cells."""
        return f"{command(self.claim)} --only={self.claim.table}/paper-{self.split}-"


def command(claim: Claim) -> str:
    """The command that runs all cells of a claim in the paper's settings."""
    return f'python experiments/reproduce.py --scale=paper --claim="{claim.text}" --data-dir=data'


def about(claim: Claim, cell: Cell) -> bool:
    """Whether a claim is about the row and the split of a cell, and the cell is one of the table itself."""
    is_row = f"{cell.method} {cell.variant or ''}".rstrip() in (claim.higher, claim.lower)
    return not cell.tag and cell.table == claim.table and is_row and cell.split in claim.splits


def needs(
    findings: Iterable[Finding], plans: Mapping[str, Sequence[Cell]], hours: Callable[[Cell], float | None],
    name: Callable[[Cell], str],
) -> list[Need]:  # fmt: skip
    """The claims, by split, that have cells of their own, none of which a CPU runs in the papers' settings.

    Args:
      findings: those of all claims.
      plans: the cells of `paper`, of `full`, which a CPU can run, and of `gpu`.
      hours: gives the hours predicted for a cell, None without a prediction.
      name: names the run of a cell.
    """
    by_claim: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        by_claim.setdefault((finding.claim.text, finding.split), []).append(finding)
    all_needs = []
    for members in by_claim.values():
        claim, split = members[0].claim, members[0].split
        cells = {name: [cell for cell in plan if cell.split == split and about(claim, cell)]
                 for name, plan in plans.items()}  # fmt: skip
        if cells["paper"] and not cells["full"] and not any(finding.scale in OWN for finding in members):
            by_run = {name(cell): hours(cell) for cell in cells["paper"]}
            planned = len({(cell.method, cell.variant) for cell in cells["gpu"]}) == 2
            all_needs.append(Need(claim, split, by_run, claim.gpu_part.get(split), planned))
    return all_needs


def predicted_hours(repository: Path, presets: Path) -> Callable[[Cell], float | None]:
    """A function that predicts a cell's GPU hours from the repository's file; it gives None for what that lacks."""
    path = repository / PREDICTED
    step = json.loads(read_text(path)) if path.is_file() else None

    def hours(cell: Cell) -> float | None:
        config, _ = configured(cell, presets)
        images = re.search(r"(\d+) \+ \d+ .*?(\d+)x", DATASETS.get(config.dataset, ""))
        if step is None or images is None or config.local_epochs is None or config.model != step["model"]:
            return None  # tasks have their own networks and epochs
        launches = step["launch_us"] * step["kernels"]
        pixels = config.batch_size * int(images[2]) ** 2 / (step["batch"] * step["side"] ** 2)
        taking_part = config.cohort / config.clients if config.cohort and config.clients else 1.0
        steps = config.rounds * (config.local_epochs * int(images[1])) * taking_part / config.batch_size
        return steps * (launches + (step["step_us"] - launches) * pixels) / 3.6e9

    return hours


def gpu_section(known: Sequence[Need]) -> list[str]:
    """A section of the page: a line for each claim, and its command."""
    if not known:
        return []
    lines, commands = [], []
    for text in dict.fromkeys(need.claim.text for need in known):
        members = [need for need in known if need.claim.text == text]
        hours = [need.hours for need in members if need.hours is not None]
        by_plan: dict[str, list[str]] = {}
        for need in members:
            for plan in [f"part {need.part}"] * (need.part is not None) + ["`--scale=gpu`"] * need.planned:
                by_plan.setdefault(plan, []).append(need.split)
        run_by = "; ".join(f"{plan}: {' '.join(splits)}" for plan, splits in by_plan.items())
        hours_text = f"{sum(hours):.1f}" + " and more" * (len(hours) < len(members)) if hours else "–"
        lines.append((text, " ".join(need.split for need in members), hours_text, run_by or "–"))
        commands.append(f"    {command(members[0].claim)}")
    headings = ("claim", "splits", "hours, predicted", "run by")
    table = markdown(texts("", headings, lines, left=("splits", "run by")), escape=str)
    return [HEADING, table, "<details><summary>Commands</summary>", "", *commands, "", "</details>", ""]
