"""The callback that measures: GA, PA and loss of every round, as a row of the run's history.

Letters: K clients, C classes, S cohort.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.engine.round import Evaluation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.loop import Callback, RoundReport, Run
from fedjax_pcdd.training.metrics import accuracy, mean, plain


class Accuracies(Callback):
    """Appends a row for every round; to be called before whatever looks at the history."""

    def __init__(
        self, name: str, *, every: int = 1, keeps_best: bool = False, kept: str = "", per_client: bool = False
    ):
        """Prepare.

        Args:
          name: what a sentence calls the method.
          every: rounds between evaluations; the last is evaluated in any case.
          keeps_best: keep the global variables of the best GA as `run.best`.
          kept: the end of the sentence about a loss that is not finite: what there is to go back to.
          per_client: whether a row holds the PA of every client, too.
        """
        self.name, self.every, self.keeps_best, self.kept, self.per_client = name, every, keeps_best, kept, per_client

    def on_start(self, run: Run) -> None:
        """Until a client makes a step, its personal model is the initial one."""
        if self.keeps_best and not run.round:
            run.best = self._copy(run)
        if not run.round and self._has_idle_client(run):
            self._personal(run, run.evaluate(personal=True)[0].personal)

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Measure the round."""
        row = {"round": run.round, "ga": None, "pa": None, "loss": self._loss(run, report), "seconds": report.seconds}
        self._just_trained(run, report)
        if run.round % self.every == 0 or run.round == run.rounds:
            self.measure(run, row)
        if self.per_client:
            row["pa_per_client"] = None if row["ga"] is None else list(run.history.pa_clients)
        run.history.rows.append(row)
        if self.keeps_best and run.history.is_best("ga"):
            run.best = self._copy(run)

    def measure(self, run: Run, row: dict[str, Any]) -> None:
        """Fill in GA, PA and GA of each class."""
        own_model = run.traits.personal_model == "server"
        counts, seconds = run.evaluate(personal=own_model)
        if own_model:
            self._personal(run, counts.personal)
        row["pa"] = mean(np.array(run.history.pa_clients, float))
        row |= self._generic(run, counts) | {"eval_seconds": seconds}

    def _generic(self, run: Run, counts: Evaluation) -> dict[str, Any]:
        """GA of the global model, or the mean over the clients' models; of each class; of the server's other models."""
        dataset, ga_local = run.federation.dataset, None
        total = np.bincount(dataset.y_test, minlength=run.simulation.program.setting.num_classes)
        if run.traits.global_model:
            correct = counts.generic[0]
            ga = float(accuracy(correct.sum(), total.sum()))
        else:
            correct = counts.local
            ga_local = accuracy(correct.sum(1), np.full(len(correct), total.sum()))
            correct, ga = correct.mean(0), float(ga_local.mean())
        run.history.update_best(ga_local)
        return {"ga": ga, "ga_per_class": plain(accuracy(correct, total)), **further(run, counts.further)}

    def _loss(self, run: Run, report: RoundReport) -> float:
        """Training loss, weighted as the aggregation; UserError if a client's is not finite."""
        jobs, trained = report.jobs, report.jobs.steps > 0
        wrong = np.flatnonzero(trained & ~np.isfinite(report.loss))
        if len(wrong):
            clients = ", ".join(str(int(k)) for k in jobs.row[wrong][:5])
            raise UserError(
                f"the loss of client {clients} is not finite in round {run.round} of {self.name}: choose a smaller "
                f"`lr` or set `grad_clip`{self.kept}."
            )
        return float(np.sum(report.loss[trained] * jobs.weight[trained]))

    def _just_trained(self, run: Run, report: RoundReport) -> None:
        """PA of the models just trained, where they are what a client uses."""
        if run.traits.personal_model == "local":
            trained = report.jobs.steps > 0
            clients = report.jobs.row[trained]
            pa = accuracy(report.correct[trained].sum(1), run.federation.test_sizes[clients])
            run.history.update_clients(clients, pa)

    def _has_idle_client(self, run: Run) -> bool:
        """Whether a client makes no step in the first round."""
        simulation = run.simulation
        cohort = simulation.clients_of(0)[run.index]
        return (simulation.steps[run.index, cohort] > 0).sum() < run.federation.num_clients

    def _personal(self, run: Run, correct: np.ndarray) -> None:
        """Take over the accuracies of all personal models, from their correct predictions [K, C]."""
        pa = accuracy(correct.sum(1), run.federation.test_sizes)
        run.history.update_clients(np.arange(len(pa)), pa)

    def _copy(self, run: Run) -> Any:
        return jax.tree.map(jnp.copy, run.generic)


def further(run: Run, correct: dict[str, Any]) -> dict[str, float]:
    """Accuracy `ga_<name>` on the whole test set of each further model of the server, from its counts [1, C]."""
    samples = np.array(len(run.federation.dataset.y_test))
    return {f"ga_{name}": float(accuracy(np.array(counts)[0].sum(), samples)) for name, counts in correct.items()}
