"""What `--claims --json` prints: each claim on each split, at every scale that has it."""

from collections.abc import Container, Iterable, Sequence
from typing import Any

from reproduction.claims import Finding
from reproduction.columns import in_words
from reproduction.hinges import Departure
from reproduction.only_gpu import Need


def as_json(
    findings: Sequence[Finding],
    planned: Container[tuple[str, str]],
    departures: Iterable[Departure] = (),
    needs: Iterable[Need] = (),
) -> list[dict[str, Any]]:
    """One entry for each claim, split, tag and scale, and one without a scale for what was not tried.

    In an entry, `pairs` counts the seeds behind its difference, `seeds` the most that the claim has at any scale.

    Args:
      findings: those of all claims.
      planned: tables and splits that a plan for a CPU has.
      departures: the claims under other settings.
      needs: what only a GPU can decide in the papers' settings.
    """
    turned: dict[tuple[str, str, str, str], list[Departure]] = {}
    for departure in departures:
        if departure.turns:
            key = departure.claim.text, departure.split, departure.base_scale, departure.base
            turned.setdefault(key, []).append(departure)
    by_gpu = {(need.claim.text, need.split): need for need in needs}
    most: dict[tuple[str, str, str], int] = {}
    for finding in findings:
        key = finding.claim.text, finding.split, finding.tag
        most[key] = max(most.get(key, 0), len(finding.best.seeds) if finding.best else 0)
    rows = []
    for finding in findings:
        needs_gpu = (finding.claim.table, finding.split) not in planned and finding.best is None
        usual = finding.claim.text, finding.split, finding.scale, finding.tag
        turning = [f"{departure.scale} {departure.tag}: {departure.settings}".strip()
                  for departure in turned.get(usual, [])]  # fmt: skip
        gpu = _on_gpu(by_gpu.get((finding.claim.text, finding.split)))
        seeds = most[finding.claim.text, finding.split, finding.tag]
        rows.append(_row(finding, seeds) | {"needs_gpu": needs_gpu, "turns_with": turning} | gpu)
    return rows


def _row(finding: Finding, seeds: int) -> dict[str, Any]:
    best, alone = finding.best, finding.alone
    return {
        "claim": finding.claim.text, "table": finding.claim.table, "split": finding.split, "tag": finding.tag,
        "scale": finding.scale or None, "seeds": seeds, "pairs": len(best.seeds) if best else 0,
        "mixed_pairs": best.mixed if best else 0,
        "paper": finding.paper, "difference": best and best.mean,
        "interval": [best.low, best.high] if best and best.low is not None else None,
        "p": alone and alone.p, "p_table": finding.in_table, "p_page": best and best.p, "verdict": finding.verdict,
        "superseded": in_words(finding.superseded) or None, "hinges_on": finding.claim.hinges or None,
    }  # fmt: skip


def _on_gpu(need: Need | None) -> dict[str, Any]:
    """How a GPU decides a claim in the paper's own settings: command, predicted hours and part of the GPU plan."""
    if need is None:
        return {"gpu_command": None, "gpu_hours_predicted": None, "gpu_part": None}
    return {"gpu_command": need.command, "gpu_hours_predicted": need.hours, "gpu_part": need.part}
