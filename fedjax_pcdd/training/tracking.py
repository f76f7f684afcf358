"""Tracked quantities besides accuracy: one line per round in track.jsonl, and a picture of each at the end.

A line holds, by the name of the quantity, numbers of the `global` model and means over the clients of the round
(`local`: right after local training; for participants that exchange logits, between rounds), null if there are none.
What is computed depends only on (seed, round) and the state, so a resumed run writes the same lines.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.analysis.angles import etf_angle
from fedjax_pcdd.analysis.pictures import draw
from fedjax_pcdd.analysis.quantities import QUANTITIES, Quantity, mean_of
from fedjax_pcdd.analysis.trained import STEPS, look_after_training, look_between_rounds
from fedjax_pcdd.analysis.views import View, random_probe
from fedjax_pcdd.engine.devices import full_precision
from fedjax_pcdd.engine.evaluation import logits_of
from fedjax_pcdd.engine.groups import Groups
from fedjax_pcdd.engine.program import Data, Program, State, Tree
from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods.parts import without_collection
from fedjax_pcdd.registry import called, from_outside, short_name, takes
from fedjax_pcdd.training.folder import TRACK, RunFolder
from fedjax_pcdd.training.loop import Callback, RoundReport, Run
from fedjax_pcdd.training.trained_models import parts_of
from fedjax_pcdd.trees import select

_GIVEN = {  # functions of a quantity: how many arguments they get, and which
    "of_client": (1, "a view"),
    "of_server": (2, "a view and test samples"),
    "per_client": (1, "the clients' results"),
    "overall": (4, "the result, the clients that count, the labels and the number of classes"),
}


def names_of(text: str | None) -> tuple[str, ...]:
    """The quantities that a text lists, each once; UserError for an unknown one.

    >>> names_of("angles,spectrum")
    ('angles', 'spectrum')
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(","))) if text else ()
    for name in names:
        if not QUANTITIES.knows(name):
            raise UserError(f"knows no '{name}': {nearest(name, QUANTITIES)}", field="track")
        if not isinstance(QUANTITIES.find(name), Quantity):
            raise UserError(f"takes an `fp.Quantity`, which {name} is not: see docs/bring_your_own.md.", field="track")
        for part, (count, given) in _GIVEN.items():
            if not (callable(function := getattr(QUANTITIES.find(name), part)) and takes(function, count)):
                raise UserError(f"quantity {name}: '{part}' must be a function of {given}.")
    return names


def _call(name: str, part: str, *given: Any) -> Any:
    """What a function of a quantity returns; UserError if it fails."""
    return called(f"quantity {name}: '{part}'", getattr(QUANTITIES.find(name), part), *given, of=_GIVEN[part][1])


def _arrays(name: str, part: str, *given: Any) -> Tree:
    """The arrays that a compiled function of a quantity returns; UserError if it fails or returns anything else."""
    result = _call(name, part, *given)
    with from_outside(f"quantity {name}: '{part}' must return arrays"):
        return jax.tree.map(jnp.asarray, result)


def _numbers(name: str, part: str, *given: Any) -> dict[str, np.ndarray]:
    """The numbers that a function of a quantity returns by name; UserError if it returns something else."""
    result = _call(name, part, *given)
    with from_outside(f"quantity {name}: '{part}' must return a dictionary of numbers"):
        numbers = {str(key): np.asarray(value, float) for key, value in result.items()}
    if part == "per_client" and any(values.ndim != 1 for values in numbers.values()):
        raise UserError(f"quantity {name}: '{part}' must return a number of each client, [S], by name.")
    return numbers


def _json(values: np.ndarray) -> Any:
    """A number, None for NaN, or lists."""
    return values.tolist() if values.ndim else mean_of(values[None])


class Tracker:
    """Measures the tracked quantities of a running simulation."""

    def __init__(self, names: Sequence[str], simulation: Any, seed: int, *, local: bool = True):
        """Prepare the programs; nothing is compiled yet.

        Args:
          names: keys of QUANTITIES.
          simulation: a `Simulation` of one experiment, or `Groups`.
          seed: seed of the test samples that are looked at.
          local: whether to look at the clients' models too (always, if there is no global one), for which they are
            trained once more.
        """
        self.names, self.simulation = tuple(names), simulation
        self.parts = parts_of(simulation)
        self.method = select(simulation.methods, 0)
        traits = self.method.traits()
        local = local or not traits.global_model
        self.federation = simulation.federations[0]
        self.probe = random_probe(len(self.federation.dataset.y_test), seed)
        exchanged = traits.exchange != "never" or traits.averages == "exchanged"
        self.after, self.between = local and not exchanged, local and exchanged
        if any(not _has_samples(part.simulation, self.between) for part in self.parts):
            raise UserError(
                "`track` looks at more samples than are on the device: use `data=device`, or one device and a "
                "`data_memory` that holds those of two cohorts."
            )
        programs = [part.simulation.program for part in self.parts]
        pairs = [(program, partial(_look, program, self.names)) for program in programs]
        of_steps = any(QUANTITIES.find(name).of_steps for name in self.names)
        self._after = [jax.jit(partial(look_after_training, *pair, of_steps=of_steps)) for pair in pairs]
        self._between = [jax.jit(partial(look_between_rounds, *pair)) for pair in pairs]
        self._general = jax.jit(partial(_general, programs[0], self.names))

    def before(self, round: int, state: State, plan: Any) -> list[Tree] | None:
        """The quantities of the clients' models after local training in a round (from 0), given the state before."""
        if not self.after:
            return None
        plans = plan[0] if isinstance(self.simulation, Groups) else [plan]
        shown = []
        for part, look, (arrays, jobs) in zip(self.parts, self._after, plans, strict=True):
            simulation, fetched = part.simulation, part.simulation.fetch(part.of(state), (arrays, jobs))
            data = _with_tests(simulation, simulation.data_of(arrays, jobs))
            sent = simulation.sent(arrays, jobs, round)
            values = look(simulation.methods, simulation.hyper_at(round), data, simulation.keys, fetched, sent)
            shown.append(select(jax.tree.map(np.asarray, values), jobs.steps > 0))
        return shown

    def entry(self, state: State, jobs: Any, shown: list[Tree] | None) -> dict[str, Any]:
        """The quantities of a round, from the state after it, its jobs, and the result of `before`."""
        if self.between:
            shown = [
                look(part.simulation.methods, part.simulation.data, part.of(state), np.arange(len(part.members)))
                for look, part in zip(self._between, self.parts, strict=True)
            ]
            shown = jax.tree.map(np.asarray, shown)
        overall, entries = self._overall(state, jobs), {}
        for name in self.names:
            local = None if shown is None else self._local(name, shown)
            entries[name] = {"global": overall.get(name), "local": local or None}
            if name in ("angles", "features") and self.federation.dataset.num_classes > 1:
                entries[name]["etf"] = etf_angle(self.federation.dataset.num_classes)
        return entries

    def _local(self, name: str, shown: list[Tree]) -> dict[str, float | None]:
        """Means over all clients."""
        numbers = [_numbers(name, "per_client", values[name]) for values in shown]
        return {key: mean_of(np.concatenate([client_values[key] for client_values in numbers])) for key in numbers[0]}

    def _overall(self, state: State, jobs: Any) -> dict[str, Any]:
        if not self.method.traits().global_model:
            return {}
        simulation, labels = self.parts[0].simulation, self.federation.dataset.y_test[self.probe]
        present = self.federation.class_counts[jobs.row] > 0
        servers, data = self.parts[0].of(state).servers, _with_tests(simulation, simulation.data)
        values = self._general(simulation.methods, servers, data, present, self.probe)
        given = (jobs.steps > 0, labels, self.federation.dataset.num_classes)
        numbers = {name: _numbers(name, "overall", values[name], *given) for name in self.names}
        return {name: {key: _json(x) for key, x in entry.items()} for name, entry in numbers.items()}


class Tracking(Callback):
    """Writes the quantities of a tracker into the folder of a run, and draws them at the end."""

    def __init__(self, names: Sequence[str], folder: RunFolder, *, every: int = 1, local: bool = True, seed: int = 0):
        """As `Tracker`; `every`: rounds between two looks; round T is always looked at."""
        self.names, self.folder, self.every, self.local, self.seed = names, folder, every, local, seed
        self._before: list[Tree] | None = None

    def on_start(self, run: Run) -> None:
        """Look at the state that the first round starts from."""
        self.tracker = Tracker(self.names, run.simulation, self.seed, local=self.local)
        self._look(run)

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Write the round, and look at the state that the next one starts from."""
        if self._is_due(run, run.round):
            entry = self.tracker.entry(run.state, report.jobs, self._before)
            self.folder.append({"round": run.round, **entry}, TRACK)
        self._look(run)

    def _look(self, run: Run) -> None:
        next_round, self._before = run.round + 1, None
        if not run.is_over and self._is_due(run, next_round):
            self._before = self.tracker.before(run.round, run.state, run.runs.plan)

    def _is_due(self, run: Run, round: int) -> bool:
        return round % self.every == 0 or round == run.rounds

    def on_end(self, run: Run) -> None:
        """Draw the pictures `track_<name>.png`, unless the run had ended before anything was tracked."""
        rows = self.folder.rows(TRACK)
        for name in self.names if rows and run.error is None else ():
            self.folder.draw(f"track_{short_name(name)}.png", partial(draw, name, {"": rows}))


def _has_samples(simulation: Any, all_clients: bool) -> bool:
    """Whether the device has the samples that are looked at, or gets them from the host."""
    streamed = simulation.streamed
    return streamed is None or not (all_clients or streamed.chunked or streamed.devices > 1)


def _with_tests(simulation: Any, data: Data) -> Data:
    """The data with all test samples."""
    return data._replace(test=simulation.streamed.tests) if simulation.streamed else data


def _look(program: Program, names: tuple[str, ...], data: Data, server: Tree, variables: Tree, row, logits) -> Tree:
    """The quantities of one client's model."""
    model, present, steps = without_collection(variables, STEPS), data.class_counts[row] > 0, variables.get(STEPS)
    view = View(program, server, model, logits, data.train, row, present, data.test, steps)
    return {name: _arrays(name, "of_client", view) for name in names}


@full_precision
def _general(program: Program, names: tuple[str, ...], methods, servers, data: Data, present, probe) -> Tree:
    """The quantities of the global model."""
    method, server = select((methods, servers), 0)
    variables = method.generic_variables(server)

    def logits(images):
        return logits_of(program, method, variables, images, server)

    view = View(program, server, variables, logits, data.test, None, present)
    return {name: _arrays(name, "of_server", view, probe) for name in names}
