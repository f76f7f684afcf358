"""The callback that measures GA, PA and loss of every round, as a row of the run's history.

Letters: K clients, C classes, S cohort.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.engine.program import Evaluation
from fedjax_pcdd.engine.schedule import Jobs
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.registry import is_of_package
from fedjax_pcdd.training.fields import options_of
from fedjax_pcdd.training.loop import Callback, RoundReport, Run
from fedjax_pcdd.training.metrics import MOST_WRITTEN, accuracy, balanced, mean, personal, plain, spread
from fedjax_pcdd.training.protocols import Protocol, by_epoch, needs_epochs, rules
from fedjax_pcdd.training.trained_models import parts_of
from fedjax_pcdd.trees import on_leaves

MANY = 1000  # clients; with more, models as received (an extra test pass per evaluated round) only on request
_AT_A_TIME = 4096  # clients whose accuracies are computed together, which takes 33 C bytes each


_copied = on_leaves(jnp.copy)  # one program for all leaves


class Accuracies(Callback):
    """Appends a row for every round; must be called before any callback that reads the history."""

    def __init__(
        self, name: str, *, every: int = 1, keeps_best: bool = False, kept: Callable[[], str] = str,
        per_client: bool = False, select_on: str = "test", protocol: Protocol = "last",
    ):  # fmt: skip
        """Prepare.

        Args:
          name: name of the method in error messages.
          every: rounds between evaluations; the last round is always evaluated.
          keeps_best: keep the global variables with the best GA as `run.best`.
          kept: returns the end of the message about values that are not finite: what there is to go back to.
          per_client: whether a row also holds the PA of every client.
          protocol: of the rows' PA; if clients fine-tune later, rows use `last` in place of one that chooses epochs.
          select_on: the criterion that chooses the best round, a key of `metrics.SELECTED`.
        """
        self.name, self.every, self.keeps_best, self.kept, self.per_client = name, every, keeps_best, kept, per_client
        self.select_on = select_on
        self.rule: Protocol = "last" if keeps_best and needs_epochs(protocol) else protocol  # of the rows' PA

    def on_start(self, run: Run) -> None:
        """Measure the initial models if needed: until a client makes a step, its personal model is the initial one."""
        run.history.select_on = self.select_on
        if self.keeps_best and not run.round:
            run.best = _copied(run.generic)
        if not run.round and self._has_idle_client(run):
            correct = run.evaluate(personal=True)[0].personal
            for clients in np.array_split(np.arange(len(correct)), -(-len(correct) // _AT_A_TIME)):
                self._take(run, clients, correct[clients], self._measured(run))
            self._choose(run)

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Measure the round."""
        row = {"round": run.round, "ga": None, "pa": None, "loss": self._loss(run, report), "seconds": report.seconds}
        if run.traits.personal_model == "local":
            self.trained(run, report, report.correct)
        if run.traits.recorded:
            taken = [n for n in run.traits.recorded if n in (*row, "eval_seconds") or n.startswith(("ga_", "pa_"))]
            if taken:
                raise _clash(run, "traits.recorded", taken[0])
            servers = parts_of(run.simulation)[0].of(run.runs.state).servers  # of all experiments: no copy is made
            row |= {name: float(np.array(getattr(servers, name))[run.index]) for name in run.traits.recorded}
        run.history.rows.append(row)
        if run.round % self.every == 0 or run.round == run.rounds:
            self.complete(run, report)
        elif self.per_client:
            row["pa_per_client"] = None

    def complete(self, run: Run, report: RoundReport) -> None:
        """Evaluate the models, for the newest row."""
        row = run.history.rows[-1]
        self.measure(run, row, report)
        if self.per_client:
            small = run.federation.num_clients <= MOST_WRITTEN
            row["pa_per_client"] = plain(run.history.pa_clients) if small else None
        if self.keeps_best and run.history.is_best("ga"):
            run.best = _copied(run.generic)

    def measure(self, run: Run, row: dict[str, Any], report: RoundReport) -> None:
        """Fill in GA, PA under each protocol and GA of each class."""
        received = "received" in self._measured(run)
        counts, seconds = run.evaluate(personal=received)
        if received:
            by_server = run.traits.personal_model == "server"  # then PA between rounds is also that of the last epoch
            protocols: list[Protocol] = ["received", "last"] if by_server else ["received"]
            self._take(run, np.arange(len(counts.personal)), counts.personal, protocols)
            if by_server:
                self.trained(run, report, counts.personal[report.jobs.row])
        self._choose(run)
        row |= {"pa": mean(run.history.pa_clients), **spread(run.history.pa_clients)}
        row |= {name: mean(values) for name, values in run.history.also.items()}
        if run.traits.pauses and not (run.round == run.rounds and report.jobs.weight.any()):
            counts = counts._replace(further={})  # the model that the last round makes is not there
        row |= self._generic(run, counts) | {"eval_seconds": seconds}

    def _generic(self, run: Run, counts: Evaluation) -> dict[str, Any]:
        """GA of the global model (else mean over the clients' models), also per class, and of further server models."""
        federation, classes = run.federation, run.federation.dataset.num_classes
        total = np.bincount(federation.dataset.y_test, minlength=classes)
        all_correct = np.asarray(counts.generic)[:1] if run.traits.global_model else np.asarray(counts.local)
        correct = all_correct[:, :classes]  # of the global model, or of each client's model
        shares = accuracy(correct.sum(1), total.sum())
        run.history.update_best(None if run.traits.global_model else shares)
        row = {"ga": float(shares.mean()), "ga_per_class": plain(accuracy(correct.mean(0), total))}
        row["ga_balanced"] = float(balanced(correct, total).mean())
        if federation.validation is not None:
            on_validation = all_correct[:, classes:].sum(1)
            row["ga_validation"] = float(accuracy(on_validation, len(federation.validation.flat)).mean())
        return {**row, **further(run, counts.further)}

    def _loss(self, run: Run, report: RoundReport) -> float | None:
        """Training loss, weighted like the aggregation; None if no client trained, UserError if one is not finite.

        Clients with models of their own also train where none has a weight; then they count alike.
        """
        jobs, trained = report.jobs, report.jobs.steps > 0
        wrong = np.flatnonzero(trained & ~np.isfinite(report.loss))
        if len(wrong):
            clients = ", ".join(str(int(k)) for k in jobs.row[wrong][:5])
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise self._not_finite(run, f"the loss of client{'s' * (len(wrong) > 1)} {clients}{more}")
        if wrong := run.not_finite():  # after aggregation, distillation or exchange, even if losses are
            raise self._not_finite(run, f"a value in {wrong}")
        weight = jobs.weight if jobs.weight.any() else trained / max(1, trained.sum())
        return float(np.sum(report.loss[trained] * weight[trained])) if trained.any() else None

    def _not_finite(self, run: Run, what: str) -> UserError:
        own = [name for name in options_of(type(run.method)) if name == "eta_g" or name.endswith("_lr")]
        rates = " or ".join(f"`{rate}`" for rate in ("lr", *own))
        where = f"in round {run.round} of {self.name}"
        advice = f"choose a smaller {rates} or set `grad_clip`"
        if not is_of_package(type(run.method)):
            advice += f", or look for a division by zero or a logarithm of zero in {type(run.method).__name__}"
        return UserError(f"{what} is not finite {where}: {advice}{self.kept()}.")

    def _measured(self, run: Run) -> list[Protocol]:
        """The protocols that are measured; with very many clients, models as received only if these are asked for."""
        rule = self.rule
        tests_received = run.federation.num_clients <= MANY or run.traits.personal_model == "server"
        names: list[Protocol] = ["last", *(["received"] if tests_received or rule == "received" else [])]
        return [*names, "best_epoch", "best_mean"] if needs_epochs(rule) else names

    def _choose(self, run: Run) -> None:
        run.history.pa_clients = run.history.also[f"pa_{self.rule}"].copy()

    def trained(self, run: Run, report: RoundReport, after: np.ndarray) -> None:
        """Record the accuracies of the clients that trained; `after` [S, C] are correct predictions at the end.

        If PA is that of aggregated models, the models just trained count as one more epoch.
        """
        trained = report.jobs.steps > 0
        jobs = Jobs(*(column[trained] for column in report.jobs))
        before = report.before[trained]
        counts = by_epoch(jobs, before, report.correct[trained])
        if run.traits.personal_model == "server":
            counts = np.concatenate([counts[:, before.shape[1] == 0 :], after[trained][:, None]], axis=1)
        for rule, correct in rules(counts, run.federation.test_class_counts[jobs.row]).items():
            self._take(run, jobs.row, correct, (rule,))

    def _has_idle_client(self, run: Run) -> bool:
        """Whether a client makes no step in the first round."""
        simulation = run.simulation
        cohort = simulation.clients_of(0)[run.index]
        return (simulation.steps[run.index, cohort] > 0).sum() < run.federation.num_clients

    def _take(self, run: Run, clients: np.ndarray, correct: np.ndarray, protocols: Sequence[Protocol]) -> None:
        """Record the accuracies of some clients' models, from their correct predictions [n, C].

        These models give PA under the protocols; other accuracies are recorded for the rows' protocol only.
        """
        pa, *other_accuracies = personal(run.federation, clients, correct).items()
        for protocol in protocols:
            run.history.update_clients(clients, pa[1], f"pa_{protocol}")
        for name, values in other_accuracies if self.rule in protocols else ():
            run.history.update_clients(clients, values, name)


class LastRound(Callback):
    """Evaluates the models of a run that a callback has ended in a round without evaluation."""

    def __init__(self, measuring: Sequence[Any]):
        """Args: measuring: the callbacks that fill a row in rounds with evaluation, by `complete` in this one."""
        self.measuring = measuring

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Complete the last row; must be called after the callbacks that may end the run."""
        if run.stopped and run.history.rows[-1]["ga"] is None:
            for callback in self.measuring:
                callback.complete(run, report)


def further(run: Run, correct: dict[str, Any]) -> dict[str, float]:
    """Accuracy `ga_<name>` on the whole test set of each further server model, from its correct predictions [1, C]."""
    if taken := correct.keys() & {"per_class", "balanced", "validation"}:
        raise _clash(run, "further_models", min(taken))
    dataset = run.federation.dataset
    totals = {name: np.array(counts)[0, : dataset.num_classes].sum() for name, counts in correct.items()}
    return {f"ga_{name}": float(accuracy(count, len(dataset.y_test))) for name, count in totals.items()}


def _clash(run: Run, hook: str, name: str) -> UserError:
    what_to_do = "which is, or may become, a name of the rows' own: choose another"
    return UserError(f"{type(run.method).__name__}.{hook} names '{name}', {what_to_do}.")
