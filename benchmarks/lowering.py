"""Programs as a target's compiler receives them, and their digests from processes that lower one after another.

Starting a process takes longer than lowering most programs; unlike compiling, lowering does not crash it.
"""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cases import Case
from benchmarks.targets import environment, imagine

ROOT = Path(__file__).parents[1]


class Program(NamedTuple):
    """A program that is not compiled yet.

    Attributes:
      lowered: the input of the compiler.
      digest: digest of the program, and of all else that its record depends on.
      record: what is already known of the program.
      turns: turns of its loops, by their names.
    """

    lowered: Any
    digest: str
    record: dict[str, Any]
    turns: dict[str, int]


def counted(traced: Any) -> tuple[dict[str, Any], list[Any]]:
    """What is known of a traced program of the engine before it is lowered, and its loops."""
    from benchmarks.turns import count_turns

    count = count_turns(traced.jaxpr, traced.args)
    return {"turns": count.turns, "equations": count.equations, "longest": traced.longest}, list(count.loops)


def lower(case: Case, target: str) -> Program:
    """The program of a case, lowered in this process, which must imagine the target (`imagine`)."""
    from benchmarks import hlo, programs

    traced = programs.trace(case)
    record, depends, turns = {}, (), {}
    if case.view == "round":
        record, loops = counted(traced)
        turns = {loop.name: loop.turns for loop in loops}
        depends = json.dumps(turns), Path(hlo.__file__).read_text()
    lowered = programs.lower(traced, target)
    return Program(lowered, programs.digest(lowered, target, *depends), record, turns)


class Digests:
    """A process that lowers cases for a target; if it ends during a case, the next case starts another one."""

    def __init__(self, target: str):
        self.target = target
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Digests":
        return self

    def __call__(self, case: Case) -> str:
        """The digest of the program of a case, "" if it cannot be lowered."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.lowering", self.target], cwd=ROOT, env=environment(self.target),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):  # the process was killed meanwhile
            print(json.dumps(asdict(case)), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().strip()
        if not answer:
            self._end()
        return answer

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()
        self._process = None


if __name__ == "__main__":
    imagine(sys.argv[1])
    for line in sys.stdin:
        print(lower(Case(**json.loads(line)), sys.argv[1]).digest, flush=True)
