"""What `simulate` returns: the accuracies of all rounds and the trained models, which it can plot and tabulate.

Letters: T rounds, K clients, C classes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from fedjax_pcdd.analysis.curves import CURVES, axis_of, curve, frame, look, series
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.engine.groups import Groups
from fedjax_pcdd.engine.program import State
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError, as_path, at_once, imported, nearest, shortened
from fedjax_pcdd.methods.method import Method
from fedjax_pcdd.methods.own_layers import without_own_layers
from fedjax_pcdd.training.config import RunConfig
from fedjax_pcdd.training.metrics import MEASURES, selection
from fedjax_pcdd.training.setup import NOTHING, Given
from fedjax_pcdd.training.tasks import setup
from fedjax_pcdd.training.trained_models import TrainedModels


@dataclass(frozen=True, eq=False)
class History(TrainedModels):
    """One experiment and its models; accuracies are shares in [0, 1], NaN where a round was not evaluated.

    Attributes:
      label: its name in curves and tables.
      method: with the hyper-parameters that were used.
      federation: the data that it was trained on.
      config: the options.
      rows: one dictionary per round, as the lines of metrics.jsonl.
      state: servers after the last round, with a leading axis of one experiment, and states and statistics of the
        clients, [K, ...].
      summary: best and last GA and PA as in summary.json, with PA after fine-tuning if the method asks for it; empty
        in a callback.
      simulation: what computed it.
      given: the objects that were passed in place of options.
    """

    label: str
    method: Method
    federation: Federation
    config: RunConfig = field(repr=False)
    rows: list[dict[str, Any]] = field(repr=False)
    state: State = field(repr=False)
    summary: dict[str, Any] = field(repr=False)
    simulation: Simulation | Groups = field(repr=False)
    given: Given = field(default=NOTHING, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Everything except the compiled simulation, which is built again when it is needed."""
        return {name: value for name, value in vars(self).items() if name != "simulation"}

    def __getattr__(self, name: str) -> Any:
        """Build the simulation of a history that was pickled."""
        if name != "simulation" or "config" not in vars(self):
            raise AttributeError(f"a history has no '{name}'")
        given = self.given._replace(federation=self.federation)
        object.__setattr__(self, name, setup([(self.config, without_own_layers(self.method))], given).simulation)
        return vars(self)[name]

    def __len__(self) -> int:
        """Number of rounds T."""
        return len(self.rows)

    @property
    def rounds(self) -> np.ndarray:
        """Round numbers 1 ... T, [T]."""
        return self._column("round").astype(int)

    @property
    def ga(self) -> np.ndarray:
        """Generic accuracy [T]: on the whole test set, of the global model or else the mean of the clients' models."""
        return self._column("ga")

    @property
    def pa(self) -> np.ndarray:
        """Personal accuracy during training, [T]: mean accuracy of the clients' models on their own test samples."""
        return self._column("pa")

    @property
    def pa_std(self) -> np.ndarray:
        """Standard deviation over clients of their personal accuracies, [T]."""
        return self._column("pa_std")

    @property
    def pa_worst10(self) -> np.ndarray:
        """Mean personal accuracy of the worst tenth of the clients, at least one client, [T]."""
        return self._column("pa_worst10")

    @property
    def loss(self) -> np.ndarray:
        """Training loss of the round's clients, weighted as in the aggregation, [T]."""
        return self._column("loss")

    @property
    def ga_per_class(self) -> np.ndarray:
        """Generic accuracy of each class, [T, C]."""
        return self._table("ga_per_class", self.federation.dataset.num_classes)

    @property
    def pa_per_client(self) -> np.ndarray:
        """Personal accuracy of each client as last measured (docs/concepts.md), [T, K]; NaN without test samples."""
        return self._table("pa_per_client", self.federation.num_clients)

    def _column(self, name: str) -> np.ndarray:
        return np.array([np.nan if row.get(name) is None else row[name] for row in self.rows], float)

    def _table(self, name: str, width: int) -> np.ndarray:
        missing = [np.nan] * width
        return np.array([row.get(name) or missing for row in self.rows], float).reshape(-1, width)

    def save(self, path: str | Path, client: int | None = None) -> Path:
        """Write the weights of the global model, or of a client's, as safetensors, and return the path.

        Names are the variables' paths joined by dots, such as `params.head.kernel`; the metadata hold label, method,
        rounds, and the summary as JSON. To keep a whole history, use `pickle`.

        Raises:
          UserError: another suffix, a method without a global model, or safetensors is missing.
        """
        path = as_path(path, "path")
        if path.suffix != ".safetensors":
            raise UserError(f"weights are saved as .safetensors, not as '{path.name}': choose such a name.")
        save = imported("safetensors.numpy", "safetensors").save
        variables = self.variables if client is None else self.client_variables(client)
        arrays = {".".join(map(str, key)): np.array(x) for key, x in flatten_dict(dict(variables)).items()}
        metadata = {"label": self.label, "method": self.config.method, "rounds": str(len(self))}
        with at_once(path, "another path", parents=True) as temporary:
            temporary.write_bytes(save(arrays, metadata | {"summary": json.dumps(self.summary)}))
        return path

    def plot(self, ax: Any = None, *, what: str | None = None, label: str | None = None, **style: Any) -> Any:
        """Draw a curve over the rounds.

        Args:
          ax: matplotlib axes; None for a new figure with all curves.
          what: "ga", "pa", "loss", or another number of a round, such as a metric of your own; None for "ga", or for
            these three in a new figure.
          label: in the legend; None for the history's own.
          style: matplotlib's properties of the line.

        Returns:
          The axes; the figure if `ax` is None.

        Raises:
          UserError: there is no such curve.
        """
        if ax is None:
            return plot([self], list(CURVES) if what is None else what)
        what = what or "ga"
        if not hasattr(ax, "plot"):
            raise UserError(f"takes axes of matplotlib, not {shortened(ax)}: `what` names a curve.", field="ax")
        numbers = [
            name
            for row in self.rows
            for name, x in row.items()
            if name != "round" and (isinstance(x, int | float) or getattr(x, "ndim", 1) == 0)
        ]
        if what not in (known := dict.fromkeys([*CURVES, *numbers])):
            raise UserError(f"there is no curve '{what}': {nearest(what, known)}")
        upwards, factor = axis_of(what)
        rounds, values = series(self.rows, what, factor=factor)
        curve(ax, rounds, values, label=label or self.label, **style)
        frame(ax, upwards=upwards)
        return ax

    def to_table(self) -> list[dict[str, Any]]:
        """One row per round, which `pandas.DataFrame(history.to_table())` takes as it is.

        Returns:
          T dictionaries with label, round, ga, pa, loss and seconds; None where a round was not evaluated.
        """
        return [{"label": self.label} | {k: row[k] for k in ("round", *CURVES, "seconds")} for row in self.rows]


def _several(histories: Any) -> list[History]:
    """A list of one history or several; UserError for anything else, and for none."""
    entries = [histories] if isinstance(histories, History) else histories
    if not isinstance(entries, list | tuple) or not entries or not all(isinstance(item, History) for item in entries):
        raise UserError(
            f"takes at least one history that fp.simulate returned, not {shortened(histories)}.", "histories"
        )
    return list(entries)


def plot(histories: Sequence[History], what: str | Sequence[str] = ("ga", "pa", "loss")) -> Any:
    """Compare histories: a panel for each curve, a line for each history.

    Args:
      histories: at least one in a list, or a single history.
      what: one or several curves, as in `History.plot`.

    Returns:
      A pyplot figure.

    Raises:
      UserError: there is no such curve.
    """
    import matplotlib.pyplot as plt  # importing it chooses a backend, which only this function needs

    from fedjax_pcdd.api.shown_once import ShownOnce

    histories, what = _several(histories), [what] if isinstance(what, str) else what
    if not isinstance(what, list | tuple):
        raise UserError(f"takes the name of a curve, or several in a list, not {shortened(what)}.", field="what")
    if not what:
        raise UserError(f"name at least one curve, of {', '.join(CURVES)}.", field="what")
    size = (3.6 * len(what), 3.0)
    figure = plt.figure(FigureClass=ShownOnce, figsize=size, layout="constrained")
    panels = figure.subplots(1, len(what), squeeze=False)
    for ax, name in zip(panels[0], what, strict=True):
        for i, history in enumerate(histories):
            colour, style = look(i)
            history.plot(ax, what=name, color=colour, linestyle=style)
    if len(histories) > 1:
        panels[0][0].legend(fontsize=8, frameon=False)
    else:
        figure.suptitle(histories[0].label, x=0.01, ha="left", fontsize=11)
    return figure


def table(histories: Sequence[History]) -> list[dict[str, Any]]:
    """One row per history: label, best and last GA and PA, what chose the best rounds, and how PA was measured.

    Raises:
      UserError: a history is not finished, as in a callback.
    """
    histories = _several(histories)
    for history in histories:
        if not history.summary:
            raise UserError(f"{history.label} is not finished: use history.to_table() during training.")
    return [
        {"label": h.label} | {name: h.summary[name] for name in MEASURES}
        | {"selected_on": selection(h.summary), "pa_protocol": h.summary["pa_protocol"]}
        for h in histories
    ]  # fmt: skip
