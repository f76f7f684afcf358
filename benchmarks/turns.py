"""How often the loops of a program turn, counted without computing what the loops are for.

On a GPU the host reads the condition of a loop of unknown length before every turn, so turns are what such a loop costs
beside its kernels. A program's equations are evaluated one by one on the CPU, but only those that decide how loops and
branches go: a round of 5000 models is counted in seconds, as no model is trained.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

LOOPS = ("while", "scan")
CALLS = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")  # parameters in which primitives that only call keep the program
TAG = re.compile(r"loop_([\d_]+)")
Wanted = tuple[bool, ...]


class Loop(NamedTuple):
    """A loop of a program; its name is its position, "2_1" the first loop in the body of the second."""

    name: str
    known: bool  # whether its length is known when it is compiled
    turns: int  # in the whole program


class Count(NamedTuple):
    """What the loops of a program did."""

    loops: tuple[Loop, ...]  # those reached, in the order of the program; of known length only those with others inside
    equations: int  # evaluated by the whole program; for a branch on values that are not needed, the largest

    @property
    def turns(self) -> int:
        """Turns of all loops of unknown length."""
        return sum(loop.turns for loop in self.loops if not loop.known)


def count_turns(program: core.ClosedJaxpr, args: Sequence[Any]) -> Count:
    """Count the turns of a program that `tagged` returned.

    Args:
      program: a program of one device.
      args: its arguments, flat; those that decide no loop may be anything, for example shapes.
    """
    counter = _Counter()
    counter.run(program.jaxpr, program.consts, args, (False,) * len(program.jaxpr.outvars))
    return Count(tuple(Loop(*entry) for entry in counter.loops()), counter.equations)


def tagged(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The program with its loops named, also in the metadata of what XLA compiles from it."""
    return core.ClosedJaxpr(_tagged(program.jaxpr, _Names()), program.consts)


def tag_of(text: str) -> str | None:
    """The name of the innermost loop in a stack of names, None if there is none.

    >>> tag_of("jit(round)/loop_2/while/body/loop_2_1/while/body/add")
    '2_1'
    """
    names = TAG.findall(text)
    return names[-1] if names else None


class _Names:
    """Names of the loops in one body, counted through all that it calls."""

    def __init__(self, outer: str = ""):
        self.outer, self.count = outer, 0

    def next(self) -> str:
        self.count += 1
        return f"{self.outer}_{self.count}" if self.outer else str(self.count)


def _tagged(jaxpr: core.Jaxpr, names: _Names) -> core.Jaxpr:
    equations = []
    for equation in jaxpr.eqns:
        name = ""
        if equation.primitive.name in LOOPS:
            name = names.next()
            info = equation.source_info
            stack = info.name_stack.extend(f"loop_{name}")
            equation = equation.replace(source_info=info.replace(name_stack=stack))
        inside = _Names(name) if name else names
        params = {key: _tagged_param(value, inside) for key, value in equation.params.items()}
        equations.append(equation.replace(params=params))
    return jaxpr.replace(eqns=equations)


def _tagged_param(value: Any, names: _Names) -> Any:
    if isinstance(value, core.ClosedJaxpr) and has_loop(value.jaxpr):
        return core.ClosedJaxpr(_tagged(value.jaxpr, names), value.consts)
    if isinstance(value, core.Jaxpr) and has_loop(value):
        return _tagged(value, names)
    if isinstance(value, tuple) and any(isinstance(x, core.ClosedJaxpr) for x in value):
        return tuple(_tagged_param(x, names) for x in value)
    return value


def has_loop(jaxpr: core.Jaxpr) -> bool:
    """Whether a program has a loop of unknown length."""
    return any(_decides(equation) for equation in jaxpr.eqns)


def _decides(equation: core.JaxprEqn) -> bool:
    """Whether an equation is, or has, a loop of unknown length."""
    return equation.primitive.name == "while" or any(has_loop(part) for part in _parts(equation))


def _parts(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """The programs in an equation's parameters."""
    values = [v for value in equation.params.values() for v in (value if isinstance(value, tuple) else (value,))]
    return [v.jaxpr if isinstance(v, core.ClosedJaxpr) else v for v in values if isinstance(v, _PROGRAMS)]


_PROGRAMS = (core.Jaxpr, core.ClosedJaxpr)


def _called(equation: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[Any]] | None:
    """The program that an equation only calls, and its constants; None for any other equation."""
    if equation.primitive.name in (*LOOPS, "cond", "scatter", "scatter-add", "reduce", "reduce_window"):
        return None
    for key in CALLS:
        value = equation.params.get(key)
        if isinstance(value, core.ClosedJaxpr):
            return value.jaxpr, value.consts
        if isinstance(value, core.Jaxpr) and not value.constvars:
            return value, ()
    return None


def _either(*flags: Sequence[bool]) -> Wanted:
    return tuple(any(flag_group) for flag_group in zip(*flags, strict=True))


class _Counter:
    """Evaluates what decides the loops of a program, and counts their turns."""

    def __init__(self):
        self.equations = 0
        self._turns: dict[str, list] = {}  # name to [known, turns]
        self._needs: dict[tuple[int, Wanted], tuple[Wanted, list[Wanted]]] = {}
        self._sizes: dict[int, int] = {}
        self._alive: list[Any] = []  # programs whose identities are keys

    def loops(self):
        """(name, known, turns) of all loops that were reached, in the order of the program."""
        ordered = sorted(self._turns, key=lambda name: [int(n) for n in name.split("_")])
        return ((name, *self._turns[name]) for name in ordered)

    # What is needed, traced backwards from the wanted results and from what decides loops.

    def _need(self, jaxpr: core.Jaxpr, wanted: Wanted) -> tuple[Wanted, list[Wanted]]:
        """Which inputs (constants first) are needed, and which results of each equation."""
        key = (id(jaxpr), wanted)
        if key not in self._needs:
            self._alive.append(jaxpr)
            live = {v for v, want in zip(jaxpr.outvars, wanted, strict=True) if want and isinstance(v, core.Var)}
            results = []
            for equation in reversed(jaxpr.eqns):
                needed = tuple(v in live for v in equation.outvars)
                flags = zip(equation.invars, self._inputs(equation, needed), strict=True)
                live |= {v for v, need in flags if need and isinstance(v, core.Var)}
                results.append(needed)
            inputs = tuple(v in live for v in (*jaxpr.constvars, *jaxpr.invars))
            self._needs[key] = inputs, results[::-1]
        return self._needs[key]

    def _inputs(self, equation: core.JaxprEqn, wanted: Wanted) -> Wanted:
        """Which inputs of an equation are needed."""
        name, params = equation.primitive.name, equation.params
        if not any(wanted) and not _decides(equation):
            return (False,) * len(equation.invars)
        if name == "while":
            return self._while_inputs(params, wanted)
        if name == "scan":
            return self._scan_inputs(params, wanted)
        if name == "cond":
            branches = (self._need(b.jaxpr, wanted)[0][-len(b.jaxpr.invars) :] for b in params["branches"])
            return (True, *_either(*branches)) if len(equation.invars) > 1 else (True,)
        if called := _called(equation):
            return self._need(called[0], wanted)[0][-len(equation.invars) :]
        return (True,) * len(equation.invars)

    def _while_inputs(self, params, wanted: Wanted) -> Wanted:
        conditions, constants = params["cond_nconsts"], params["body_nconsts"]
        condition = self._need(params["cond_jaxpr"].jaxpr, (True,))[0]
        carry = _either(wanted, condition[conditions:])
        while True:
            body = self._need(params["body_jaxpr"].jaxpr, carry)[0]
            if (grown := _either(carry, body[constants:])) == carry:
                return (*condition[:conditions], *body[:constants], *carry)
            carry = grown

    def _scan_inputs(self, params, wanted: Wanted) -> Wanted:
        (constants, carried), body = _constants_and_carried(params), params["jaxpr"].jaxpr
        carry, outputs = wanted[:carried], wanted[carried:]
        while True:
            inputs = self._need(body, (*carry, *outputs))[0]
            if (grown := _either(carry, inputs[constants:][:carried])) == carry:
                return (*inputs[:constants], *carry, *inputs[constants + carried :])
            carry = grown

    # Evaluation, forwards; None stands for values that are not needed.

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], wanted: Wanted) -> list[Any]:
        """The wanted results."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for equation, needed in zip(jaxpr.eqns, self._need(jaxpr, wanted)[1], strict=True):
            inputs = [v.val if isinstance(v, core.Literal) else values.get(v) for v in equation.invars]
            results = self._evaluate(equation, inputs, needed)
            if results is not None:
                values |= dict(zip(equation.outvars, results, strict=True))
        return [v.val if isinstance(v, core.Literal) else values.get(v) for v in jaxpr.outvars]

    def _evaluate(self, equation: core.JaxprEqn, inputs: list[Any], wanted: Wanted) -> list[Any] | None:
        if _decides(equation):
            return self._inside(equation, inputs, wanted)
        self.equations += self._size(equation)
        if not any(wanted):
            return None
        if not all(self._inputs(equation, wanted)):  # then it cannot be evaluated as a whole
            return _Counter()._inside(equation, inputs, wanted)
        results = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
        return results if equation.primitive.multiple_results else [results]

    def _inside(self, equation: core.JaxprEqn, inputs: list[Any], wanted: Wanted) -> list[Any]:
        """Evaluate the equations inside an equation one by one."""
        name, params = equation.primitive.name, equation.params
        if name in LOOPS:
            loop = self._while if name == "while" else self._scan
            return loop(params, inputs, wanted, tag_of(str(equation.source_info.name_stack)) or "")
        if name == "cond":
            self.equations += 1
            branch = params["branches"][int(np.clip(int(inputs[0]), 0, len(params["branches"]) - 1))]
            return self.run(branch.jaxpr, branch.consts, inputs[1:], wanted)
        if called := _called(equation):
            return self.run(*called, inputs, wanted)
        raise NotImplementedError(f"the loops in a {name} are not counted: take one device.")

    def _turn(self, name: str, known: bool) -> None:
        self._turns.setdefault(name, [known, 0])[1] += 1

    def _while(self, params, inputs, wanted: Wanted, name: str) -> list[Any]:
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = inputs[second:]
        needed = self._while_inputs(params, wanted)[second:]
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        self._turns.setdefault(name, [False, 0])
        while True:
            going = np.asarray(self.run(condition.jaxpr, condition.consts, (*inputs[:first], *carry), (True,))[0])
            if not going.any():
                return carry
            self._turn(name, known=False)
            after = self.run(body.jaxpr, body.consts, (*inputs[first:second], *carry), needed)
            carry = [_kept(going, *pair) if need else None for need, *pair in zip(needed, after, carry, strict=True)]

    def _scan(self, params, inputs, wanted: Wanted, name: str) -> list[Any]:
        (constants, carried), body = _constants_and_carried(params), params["jaxpr"]
        flags = self._scan_inputs(params, wanted)
        needed = (*flags[constants : constants + carried], *wanted[carried:])
        fixed, carry, sequences = (*inputs[:constants],), inputs[constants:][:carried], inputs[constants + carried :]
        turns = range(params["length"])
        outputs = []
        for i in reversed(turns) if params["reverse"] else turns:
            self._turn(name, known=True)
            elements = [x[i] if need else None for x, need in zip(sequences, flags[constants + carried :], strict=True)]
            results = self.run(body.jaxpr, body.consts, (*fixed, *carry, *elements), needed)
            carry = results[:carried]
            outputs.append(results[carried:])
        ordered = outputs[::-1] if params["reverse"] else outputs
        stacked = zip(wanted[carried:], *ordered, strict=True)
        return [*carry, *(jnp.stack(elements) if want else None for want, *elements in stacked)]

    def _size(self, equation: core.JaxprEqn) -> int:
        """Number of equations that an equation evaluates, if none of them is counted individually."""
        if (key := id(equation)) not in self._sizes:
            self._alive.append(equation)
            self._sizes[key] = self._measured(equation)
        return self._sizes[key]

    def _measured(self, equation: core.JaxprEqn) -> int:
        def total(jaxpr):
            return sum(map(self._size, jaxpr.eqns))

        if equation.primitive.name == "scan":
            return equation.params["length"] * total(equation.params["jaxpr"].jaxpr)
        if equation.primitive.name == "cond":
            return 1 + max(total(branch.jaxpr) for branch in equation.params["branches"])
        called = _called(equation)
        return total(called[0]) if called else 1


def _constants_and_carried(params: Any) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried."""
    if "ft_in" not in params:  # before JAX 0.11
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return constants, carried


def _kept(going: np.ndarray, new: Any, old: Any) -> Any:
    """The carry after a turn: under vmap a loop turns until all its lanes are done, and finished lanes keep theirs."""
    return jnp.where(going.reshape(going.shape + (1,) * (new.ndim - going.ndim)), new, old) if going.ndim else new
