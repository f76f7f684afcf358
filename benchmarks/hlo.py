"""How many kernels a compiled program launches, read from XLA's text of it (the scheduled HLO module).

An instruction that is not just a view of memory is a kernel, and launched as often as the computation it is in is run:
once in the entry, in the body of a loop at every turn. The turns are XLA's own count where it knows one, else those of
the program's loop whose name (`turns.tagged`) stands in the metadata of the instruction. The comparison that ends a
loop is not counted. Which branch is taken is not known, so the one that launches most is counted: an upper bound.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.turns import tag_of

VIEWS = {"parameter", "tuple", "get-tuple-element", "constant", "bitcast", "after-all", "opt-barrier"}
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = .*? ([\w\-]+)\(")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)\s*\(.*\)\s*->.*\{\s*$")
ENTRY = ""


class Body(NamedTuple):
    """A computation that is run as a whole: the entry, or what a loop does at every turn."""

    name: str  # of the program's loop, "entry", or "?"
    depth: int  # of loops around it
    kernels: int  # of one run, those of loops in it not counted
    runs: int | None  # in the whole program; None where that cannot be told


class Launches(NamedTuple):
    """What a program launches."""

    bodies: tuple[Body, ...]
    reason: str  # why the kernels cannot be counted; "" where they can
    branches: int = 0  # times that one of several branches is taken; then the kernels are at most so many

    @property
    def kernels(self) -> int | None:
        """Kernels that the whole program launches; None where that cannot be told."""
        if self.reason:
            return None
        return sum(body.kernels * (body.runs or 0) for body in self.bodies)


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation of an HLO module; the entry's also under `ENTRY`."""
    result: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        if start := COMPUTATION.match(line):
            lines = result[start[2]] = []
            if start[1]:
                result[ENTRY] = lines
        elif lines is not None and line.startswith("  "):
            lines.append(line)
    return result


def launches(text: str, turns: Mapping[str, int]) -> Launches:
    """Count the kernels of a program.

    Args:
      text: of the module, as `compiled.as_text()`.
      turns: of the program's loops of unknown length, by their names.
    """
    counter = _Counter(computations(text), turns)
    counter.run("entry", ENTRY, 0, 1)
    return Launches(tuple(counter.bodies), counter.reason, counter.branches)


class _Counter:
    """Walks through a module from its entry."""

    def __init__(self, parts: dict[str, list[str]], turns: Mapping[str, int]):
        self.parts, self.turns = parts, turns
        self.bodies: list[Body] = []
        self.reason, self.branches = "", 0
        self._met: set[str] = set()

    def run(self, name: str, computation: str, depth: int, runs: int | None) -> None:
        """Count a computation and the loops in it."""
        at = len(self.bodies)
        self.bodies.append(Body(name, depth, 0, runs))
        self.bodies[at] = self.bodies[at]._replace(kernels=self._kernels(computation, depth, runs))

    def _kernels(self, computation: str, depth: int, runs: int | None) -> int:
        total = 0
        for line in self.parts.get(computation, ()):
            operation = INSTRUCTION.match(line)
            kind = operation[1] if operation else "parameter"
            if kind == "while":
                name, times = self._turns(line, runs)
                self.run(name, _reference(line, "body"), depth + 1, times)
            elif kind == "call":
                total += self._kernels(_reference(line, "to_apply"), depth, runs)
            elif kind == "conditional":
                total += 1 + self._conditional(line, depth, runs)
            elif kind not in VIEWS and not kind.endswith("-done"):
                total += 1
        return total

    def _turns(self, line: str, runs: int | None) -> tuple[str, int | None]:
        """A loop's name, and its turns in the whole program."""
        metadata = re.search(r'op_name="([^"]*)"', line)
        name = (metadata and tag_of(metadata[1])) or ""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
            return name or "known", None if runs is None else runs * int(known[1])
        if name in self.turns and name not in self._met:
            self._met.add(name)
            return name, self.turns[name]
        twice = "stands twice in the compiled program" if name else "is none of the program's own"
        self.reason = self.reason or f"a loop of unknown length {twice}, so its turns cannot be told"
        return name or "?", None

    def _conditional(self, line: str, depth: int, runs: int | None) -> int:
        """Kernels of the branch that launches most, whose loops are kept."""
        names = re.search(r"branch_computations=\{([^}]*)\}", line)
        branches = names[1].split(",") if names else [_reference(line, f"{x}_computation") for x in ("true", "false")]
        before, best = len(self.bodies), (0, 0, [])
        for branch in branches:
            own = self._kernels(branch.strip().lstrip("%"), depth, runs)
            loops, self.bodies[before:] = self.bodies[before:], []
            launched = own * (runs or 0) + sum(body.kernels * (body.runs or 0) for body in loops)
            best = max(best, (launched, own, loops), key=lambda one: one[0])
        self.bodies += best[2]
        self.branches += (runs or 0) * (best[0] > 0)
        return best[1]


def _reference(line: str, attribute: str) -> str:
    """The computation that an attribute of an instruction names."""
    match = re.search(rf"{attribute}=%?([\w.\-]+)", line)
    return match[1] if match else ENTRY
