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

    Of an entry `pairs` are the seeds behind its difference, `seeds` the most that the claim has at any scale.

    Args:
      findings: of all claims.
      planned: tables and splits that a plan for a CPU has.
      departures: the claims under other settings.
      needs: what only a GPU can decide in the papers' settings.
    """
    turned: dict[tuple[str, str, str], list[Departure]] = {}
    for one in departures:
        if one.turns:
            turned.setdefault((one.claim.text, one.split, one.base), []).append(one)
    by_gpu = {(one.claim.text, one.split): one for one in needs}
    most: dict[tuple[str, str, str], int] = {}
    for one in findings:
        key = one.claim.text, one.split, one.tag
        most[key] = max(most.get(key, 0), len(one.best.seeds) if one.best else 0)
    rows = []
    for one in findings:
        needs_gpu = (one.claim.table, one.split) not in planned and one.best is None
        others = [f"{other.scale} {other.tag}: {other.settings}".strip()
                  for other in turned.get((one.claim.text, one.split, one.tag), [])
                  if (other.scale, other.tag) != (one.scale, one.tag)]  # fmt: skip
        gpu = _on_gpu(by_gpu.get((one.claim.text, one.split)))
        seeds = most[one.claim.text, one.split, one.tag]
        rows.append(_row(one, seeds) | {"needs_gpu": needs_gpu, "turns_with": others} | gpu)
    return rows


def _row(one: Finding, seeds: int) -> dict[str, Any]:
    best, alone = one.best, one.alone
    return {
        "claim": one.claim.text, "table": one.claim.table, "split": one.split, "tag": one.tag,
        "scale": one.scale or None, "seeds": seeds, "pairs": len(best.seeds) if best else 0,
        "mixed_pairs": best.mixed if best else 0,
        "paper": one.paper, "difference": best and best.mean,
        "interval": [best.low, best.high] if best and best.low is not None else None,
        "p": alone and alone.p, "p_table": one.in_table, "p_page": best and best.p, "verdict": one.verdict,
        "superseded": in_words(one.superseded) or None, "hinges_on": one.claim.hinges or None,
    }  # fmt: skip


def _on_gpu(need: Need | None) -> dict[str, Any]:
    """How a GPU decides it in the paper's own settings: command, predicted hours and part of the GPU plan."""
    if need is None:
        return {"gpu_command": None, "gpu_hours_predicted": None, "gpu_part": None}
    return {"gpu_command": need.command, "gpu_hours_predicted": need.hours, "gpu_part": need.part}
