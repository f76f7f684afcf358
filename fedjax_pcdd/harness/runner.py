"""One experiment from a configuration to its result: rounds, metrics, checkpoints, and the summary at the end."""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.federation import Federation, heat_map
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.harness import display, records
from fedjax_pcdd.harness.assembly import assemble, federate
from fedjax_pcdd.harness.checkpoint import Checkpoints, required_bytes
from fedjax_pcdd.harness.config import RunConfig, dump, run_folder
from fedjax_pcdd.harness.disk import check_space
from fedjax_pcdd.harness.fine_tuning import from_global, from_last
from fedjax_pcdd.harness.metrics import History, accuracy, mean, new_history, plain
from fedjax_pcdd.harness.writers import require, writers_for
from fedjax_pcdd.methods import Method
from fedjax_pcdd.simulation.devices import CompileClock, choose_lanes, select_device
from fedjax_pcdd.simulation.program import State, Tree
from fedjax_pcdd.simulation.round import Report


class Progress(NamedTuple):
    """A run between two rounds."""

    round: int  # completed rounds
    state: State
    best: Tree  # global variables [1, ...] of the best GA, () where no fine-tuning starts from them
    history: History


class Run:
    """Everything a running experiment needs; `launch.run` is the way in."""

    def __init__(self, config: RunConfig, method: Method):
        """Prepare the simulation and open or create the run folder; UserError before anything is written."""
        self.config, self.clock, self.started = config, CompileClock(), time.perf_counter()
        select_device(config.device)
        require(config.tensorboard, config.wandb)
        self.federation = self._federate()
        jobs = config.cohort or self.federation.num_clients

        def make(lanes):
            return self._assemble(method, lanes)

        self.simulation = make(1)
        self.method = jax.tree.map(lambda x: x[0], self.simulation.methods)
        self._check_cohort(jobs)
        self._advise()
        state = self.simulation.start()
        self.folder, lanes = self._folder(config, method, state)
        if lanes is None:
            lanes = self._measured_lanes(make, state, jobs) if config.lanes == "auto" else int(config.lanes)
            self.folder.write_json("resolved.json", {"lanes": lanes, "hyperparameters": self._hyperparameters()})
        if lanes > 1:
            self.simulation = make(lanes)
        self.tunes = self.method.fine_tune and config.fine_tune_epochs > 0
        self.keeps_best = self.tunes and self.method.global_model
        self.checkpoints = Checkpoints(
            self.folder.path / "checkpoints", keep=config.keep, every=config.checkpoint_every,
            clients_every=config.checkpoint_clients_every,
        )  # fmt: skip
        self.writers = writers_for(config.tensorboard, config.wandb, self.folder.path, dataclasses.asdict(config))

    def _federate(self) -> Federation:
        """The data and who holds it."""
        return federate(self.config)

    def _assemble(self, method: Method, lanes: int) -> Any:
        """The simulation."""
        return assemble(self.config, method, self.federation, lanes)

    def _measured_lanes(self, make: Callable[[int], Any], state: State, jobs: int) -> int:
        """The number of lanes for --lanes=auto."""
        return choose_lanes(make, state, jobs, self.config.rounds)

    def _prepared(self, state: State) -> State:
        """What the first round starts from."""
        return state

    def _check_cohort(self, cohort: int) -> None:
        if cohort > self.federation.num_clients:
            raise UserError(
                f"--cohort={cohort} is more than the {self.federation.num_clients} clients: choose a smaller one."
            )
        if not (self.simulation.steps > 0).any():
            raise UserError(
                "no client has enough samples for one batch: choose a smaller --batch-size or --last-batch=keep."
            )

    def _advise(self) -> None:
        """Say what the method thinks of these settings."""
        if not self.config.quiet:
            hyper = jax.tree.map(lambda x: x[0], self.simulation.hyper)
            for sentence in self.method.advise(self.simulation.program.setting, hyper):
                print(f"warning: {sentence}", file=sys.stderr)

    def _generic(self, state: State) -> Tree:
        """A copy of the global variables [1, ...] that GA is read from."""
        variables = jax.vmap(lambda method, server: method.generic_variables(server))
        return jax.tree.map(jnp.copy, variables(self.simulation.methods, state.servers))

    def _folder(self, config: RunConfig, method: Method, state: State) -> tuple[records.RunFolder, int | None]:
        """The run folder, and the number of lanes if the run had begun."""
        if config.resume:
            folder = records.RunFolder.open(config.resume)
            resolved = folder.read_json("resolved.json")
            return folder, resolved and resolved["lanes"]
        path = run_folder(config)
        size = required_bytes((state.servers, state.servers), (state.clients, state.statistics))
        check_space(path, size * (config.keep + 1))
        folder = records.RunFolder.create(path, dump(config, method))
        self.federation.save(path / "partition.npz")
        heat_map(self.federation, path / "partition.png")
        return folder, None

    def _hyperparameters(self) -> dict[str, Any]:
        """The method's hyper-parameters as they are used, defaults filled in."""
        values = dataclasses.asdict(self.method)
        return {k: v if isinstance(v, str | int | bool | None) else float(v) for k, v in values.items()}

    def begin(self) -> Progress:
        """The start, or the newest intact checkpoint."""
        state = self.simulation.start()
        best = self._generic(state) if self.keeps_best else ()
        history = new_history(self.federation.num_clients)
        found = None
        if self.config.resume:
            found = self.checkpoints.restore((state.servers, best), (state.clients, state.statistics))
        if found is None:
            state = self._prepared(state)
            self._first_accuracies(state, history)
            self.folder.truncate([])
            return Progress(0, state, best, history)
        servers, best = found.server
        history = History(**found.history)
        self.folder.truncate(history.rows)
        return Progress(found.round, State(servers, *found.clients), best, history)

    def _first_accuracies(self, state: State, history: History) -> None:
        """Until a client makes a step, its personal model is the initial one."""
        chosen = self.simulation.clients_of(0)[0]
        if (self.simulation.steps[0, chosen] > 0).sum() < self.federation.num_clients:
            correct = np.array(self.simulation.evaluate(state, personal=True).personal)
            pa = accuracy(correct.sum(1), self.federation.test_sizes)
            history.update_clients(np.arange(len(pa)), pa)

    def rounds(self, progress: Progress) -> Progress:
        """Train from `progress` to the last round."""
        simulation, config = self.simulation, self.config
        done, state, best, history = progress
        plan = simulation.plan(min(done, config.rounds - 1))
        with display.progress(config.rounds, done, config.quiet) as bar:
            for r in range(done, config.rounds):
                begun = time.perf_counter()
                state, report = simulation.step(state, r, plan)
                jobs, plan = plan[1], simulation.plan(min(r + 1, config.rounds - 1))  # while the device computes
                row = {"round": r + 1, "ga": None, "pa": None, "loss": self._loss(r, report, jobs, state)}
                row["seconds"] = time.perf_counter() - begun
                self._evaluate(row, state, report, jobs, history)
                history.rows.append(row)
                if self.keeps_best and history.is_best("ga"):
                    best = self._generic(state)
                self._record(row, history)
                parts = (state.servers, best), (state.clients, state.statistics)
                self.checkpoints.save(r + 1, *parts, history.to_json(), force=r + 1 == config.rounds)
                bar.update(row)
        self.checkpoints.wait()
        return Progress(config.rounds, state, best, history)

    def _loss(self, round: int, report: Report, jobs, state: State) -> float:
        """Training loss, weighted as the aggregation; UserError if a client's is not finite."""
        loss, trained = np.array(report.loss), jobs.steps > 0
        wrong = np.flatnonzero(trained & ~np.isfinite(loss))
        if len(wrong):
            clients = ", ".join(str(int(k)) for k in jobs.row[wrong][:5])
            raise UserError(
                f"the loss of client {clients} is not finite in round {round + 1} of {self.config.method}: choose a "
                f"smaller --lr or set --grad-clip; the checkpoints before it in {self.folder.path} are good."
            )
        return float(np.sum(loss[trained] * jobs.weight[trained]))

    def _evaluate(self, row: dict, state: State, report: Report, jobs, history: History) -> None:
        """Fill in GA and PA of a round, and the per-client record."""
        sizes, trained = self.federation.test_sizes, jobs.steps > 0
        if self.method.personal_model == "local":
            clients = jobs.row[trained]
            pa = accuracy(np.array(report.correct)[trained].sum(1), sizes[clients])
            history.update_clients(clients, pa)
        if row["round"] % self.config.eval_every and row["round"] != self.config.rounds:
            return
        begun, server = time.perf_counter(), self.method.personal_model == "server"
        counts = self.simulation.evaluate(state, personal=server)
        if server:
            pa = accuracy(np.array(counts.personal).sum(1), sizes)
            history.update_clients(np.arange(len(pa)), pa)
        total = np.bincount(self.federation.dataset.y_test, minlength=self.simulation.program.setting.num_classes)
        ga_local = None
        if self.method.global_model:
            correct = np.array(counts.generic)[0]
            row["ga"] = float(accuracy(correct.sum(), total.sum()))
            row |= {f"ga_{k}": float(accuracy(np.array(v)[0].sum(), total.sum())) for k, v in counts.further.items()}
        else:
            correct = np.array(counts.local)
            ga_local = accuracy(correct.sum(1), np.full(len(correct), total.sum()))
            correct, row["ga"] = correct.mean(0), float(ga_local.mean())
        row["pa"] = mean(np.array([np.nan if v is None else v for v in history.pa_clients]))
        row["ga_per_class"] = plain(accuracy(correct, total))
        row["eval_seconds"] = time.perf_counter() - begun
        history.update_best(ga_local)

    def _record(self, row: dict, history: History) -> None:
        self.folder.append(row)
        if row["ga"] is not None:
            self.folder.append({"round": row["round"], "pa_per_client": history.pa_clients}, "clients.jsonl")
        for writer in self.writers:
            writer.write(row)

    def _fine_tuned(self, progress: Progress, result: dict[str, Any]) -> dict[str, Any]:
        """What fine-tuning after the last round changes in the result."""
        tuner, rounds = self.simulation.tuner(self.config.fine_tune_epochs), self.config.rounds
        if not self.keeps_best:
            return from_last(tuner, progress.state, rounds)
        return from_global(tuner, progress.best, self._generic(progress.state), rounds, result)

    def summary(self, progress: Progress) -> dict[str, Any]:
        """The result: best and last of GA and PA, cost, and what it ran on."""
        history, config = progress.history, self.config
        (ga_best, ga_round), (pa_best, pa_round) = history.best("ga"), history.best("pa")
        result = {
            "method": config.method, "dataset": config.dataset, "seed": config.seed, "rounds": config.rounds,
            "lanes": self.simulation.program.lanes, "ga_best": ga_best, "ga_last": history.last("ga"),
            "pa_best": pa_best, "pa_last": history.last("pa"), "ga_best_round": ga_round, "pa_best_round": pa_round,
            "ga_mean_last10": history.mean_last("ga"), "pa_mean_last10": history.mean_last("pa"),
            "pa_protocol": "during training", "pa_best_per_client": history.best_pa_clients,
        }  # fmt: skip
        if not self.method.global_model:
            result |= {"ga_best": history.without_global_model(), "ga_best_round": None}
        if self.tunes:
            result |= self._fine_tuned(progress, result)
        return result | self._cost(history)

    def _cost(self, history: History) -> dict[str, Any]:
        seconds = np.array([row["seconds"] for row in history.rows])
        typical = float(np.median(seconds[1:] if len(seconds) > 1 else seconds)) if len(seconds) else None
        _, batches = self.simulation.jobs(0)
        samples = sum(int((b >= 0).sum()) for b in batches)
        memory = records.peak_memory_mb()
        return {
            "seconds_per_round": typical,
            "compile_seconds": self.clock.seconds,
            "compilations": self.simulation.compilations,
            "samples_per_second": samples / typical if typical else None,
            "peak_memory_mb": memory["host"],
            "device_peak_memory_mb": memory["device"],
            "wall_seconds": time.perf_counter() - self.started,
            **records.describe_machine(),
        }
