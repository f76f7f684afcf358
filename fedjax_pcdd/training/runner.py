"""One experiment from a configuration to its result: rounds, metrics, checkpoints, and the summary at the end."""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.federation import Federation, heat_map
from fedjax_pcdd.engine.device_errors import OutOfMemory
from fedjax_pcdd.engine.devices import CompileClock, choose_lanes, select_device
from fedjax_pcdd.engine.program import State, Tree
from fedjax_pcdd.engine.round import Evaluation, Report
from fedjax_pcdd.engine.schedule import Jobs
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import Method
from fedjax_pcdd.models.convolution_choices import Choices
from fedjax_pcdd.training import folder as records
from fedjax_pcdd.training import progress as display
from fedjax_pcdd.training.build import assemble, federate
from fedjax_pcdd.training.checkpoint import Checkpoints, required_bytes
from fedjax_pcdd.training.config import RunConfig, dump, run_folder, unused
from fedjax_pcdd.training.disk import check_space
from fedjax_pcdd.training.fine_tuning import after_training
from fedjax_pcdd.training.loggers import require, writers_for
from fedjax_pcdd.training.loop import Progress as Progress
from fedjax_pcdd.training.loop import Trained, profiled, train
from fedjax_pcdd.training.metrics import History, accuracy, mean, new_history, plain
from fedjax_pcdd.training.tracking import Recorder, Tracker, names_of
from fedjax_pcdd.training.tuning import convolutions_of, fewer_lanes, lanes_of, note
from fedjax_pcdd.trees import select


class Run:
    """Everything a running experiment needs; `launch.run` is the way in."""

    index = 0  # of this experiment among those of its simulation
    together = 1  # how many those are
    recorder: Recorder | None = None  # of what --track names
    convolutions: Choices | None = None  # forms that were timed on the device

    def __init__(self, config: RunConfig, method: Method):
        """Prepare the simulation and open or create the run folder; UserError before anything is written."""
        self.config, self.clock, self.started = config, CompileClock(), time.perf_counter()
        select_device(config.device, config.devices)
        require(config.tensorboard, config.wandb)
        self.federation = self._federate()
        jobs = config.cohort or self.federation.num_clients

        def make(lanes):
            return self._assemble(method, lanes)

        self.simulation = make(1)
        self.method = select(self.simulation.methods, 0)
        self._check_cohort(jobs)
        self._advise()
        state = self.simulation.start()
        resolved = self._open(config, method, state)
        self.convolutions = convolutions_of(config, self.simulation, state, resolved)
        lanes = config.lanes if resolved is None else resolved["lanes"]
        if lanes == "auto":
            self.simulation = self._fastest(make, state, jobs)
            lanes = lanes_of(self.simulation)
        elif lanes > 1 or self.convolutions:
            self.simulation = make(lanes)
        if resolved is None:
            noted = note(self.convolutions)
            self.resolve(lanes=lanes, convolutions=noted, hyperparameters=self._hyperparameters())
        tracker = Tracker(names_of(config.track), self.simulation, config.seed, local=config.track_local)
        self.recorder = Recorder(tracker, self.folder, every=config.track_every, rounds=config.rounds)

    def _open(self, config: RunConfig, method: Method, state: State) -> dict[str, Any] | None:
        """Open or create all that is written to; what the run has noted if it had begun."""
        self.folder, resolved = self._folder(config, method, state)
        self.tunes = self.method.fine_tune and config.fine_tune_epochs > 0
        self.keeps_best = self.tunes and self.method.global_model
        self.checkpoints = Checkpoints(
            self.folder.path / "checkpoints", keep=config.keep, every=config.checkpoint_every,
            clients_every=config.checkpoint_clients_every,
        )  # fmt: skip
        self.writers = writers_for(config.tensorboard, config.wandb, self.folder.path, dataclasses.asdict(config))
        return resolved

    def resolve(self, **values: Any) -> None:
        """Note in resolved.json what was not said in the options."""
        self.folder.write_json("resolved.json", (self.folder.read_json("resolved.json") or {}) | values)

    def with_fewer_lanes(self, error: OutOfMemory) -> RunConfig:
        """The options that continue a run which is out of memory, with half of its lanes, as resolved.json then notes.

        Raises:
          OutOfMemory: the error, where there is but one lane or where other processes would have to know.
        """
        lanes = fewer_lanes(lanes_of(self.simulation), error)
        self.resolve(lanes=lanes)
        if jax.process_count() > 1:
            raise OutOfMemory(f"{error} Continued with --resume, the run has {lanes} lanes.") from error
        return dataclasses.replace(self.config, resume=self.folder.path)

    def _federate(self) -> Federation:
        """The data and who holds it."""
        return federate(self.config)

    def _assemble(self, method: Method, lanes: int) -> Any:
        """The simulation."""
        return assemble(self.config, method, self.federation, lanes, convolutions=self.convolutions)

    def _fastest(self, make: Callable[[int], Any], state: State, jobs: int) -> Any:
        """The simulation for --lanes=auto."""
        return choose_lanes(make, state, jobs, self.config.rounds)

    def _prepared(self, state: State) -> State:
        """What the first round starts from."""
        return state

    def _check_cohort(self, cohort: int) -> None:
        if cohort > self.federation.num_clients:
            raise UserError(
                f"--cohort={cohort} is more than the {self.federation.num_clients} clients: choose a smaller one."
            )
        if not (self.simulation.steps[self.index] > 0).any():
            raise UserError(
                "no client has enough samples for one batch: choose a smaller --batch-size or --last-batch=keep."
            )

    def _advise(self) -> None:
        """Say what is without effect, and what the method thinks of these settings."""
        if not self.config.quiet:
            hyper = select(self.simulation.hyper, self.index)
            for sentence in unused(self.config) + self.method.advise(self.simulation.program.setting, hyper):
                print(f"warning: {sentence}", file=sys.stderr)

    def _generic(self, state: State) -> Tree:
        """A copy of the global variables [1, ...] that GA is read from."""
        return jax.tree.map(jnp.copy, jax.vmap(self.method.generic_variables)(state.servers))

    def _folder(self, config: RunConfig, method: Method, state: State) -> tuple[records.RunFolder, dict | None]:
        """The run folder, and what it has noted if the run had begun."""
        if config.resume:
            folder = records.RunFolder.open(config.resume)
            return folder, folder.read_json("resolved.json")
        path = run_folder(config)
        size = required_bytes((state.servers, state.servers), (state.clients, state.statistics))
        check_space(path, size * (config.keep + 1) * self.together)
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
        progress = self._restored(self.simulation.start())
        if progress.round:
            return progress
        state = self._prepared(progress.state)
        self._first_accuracies(state, progress.history)
        return progress._replace(state=state)

    def _restored(self, state: State) -> Progress:
        """The newest intact checkpoint, else the start; the folder goes back to what it knows."""
        best, found = self._generic(state) if self.keeps_best else (), None
        if self.config.resume:
            found = self.checkpoints.restore((state.servers, best), (state.clients, state.statistics))
        if found is None:
            self.folder.truncate([])
            return Progress(0, state, best, new_history(self.federation.num_clients))
        servers, best = found.server
        history = History(**found.history)
        self.folder.truncate(history.rows)
        return Progress(found.round, State(servers, *found.clients), best, history)

    def _first_accuracies(self, state: State, history: History) -> None:
        """Until a client makes a step, its personal model is the initial one."""
        if self._somebody_waits():
            self._personal(self.simulation.evaluate(state, personal=True).personal, history)

    def _somebody_waits(self) -> bool:
        """Whether a client takes no part in the first round."""
        chosen = self.simulation.clients_of(0)[self.index]
        return (self.simulation.steps[self.index, chosen] > 0).sum() < self.federation.num_clients

    def _personal(self, correct: Any, history: History) -> None:
        """Take over the accuracies of all personal models, from their correct predictions [K, C]."""
        pa = accuracy(np.array(correct).sum(1), self.federation.test_sizes)
        history.update_clients(np.arange(len(pa)), pa)

    def rounds(self, progress: Progress, bar: display.Bar | None = None) -> Progress:
        """Train from `progress` to the last round; `bar` in place of one of its own."""
        rounds, (done, state, best, history) = self.config.rounds, progress
        with bar or display.progress(rounds, done, self.config.quiet) as bar:
            steps = train(self.simulation, state, done, rounds, self.recorder)
            for trained in profiled(steps, self.folder.path / "profile") if self.config.profile else steps:
                state, row = trained.state, self._row(trained)
                self._evaluate(row, state, trained.report, trained.jobs, history)
                if self.recorder:
                    self.recorder.write(trained.round - 1, state, trained.jobs, trained.seen)
                best = self._keep(row, state, best, history)
                bar.update(row)
        self.checkpoints.wait()
        return Progress(rounds, state, best, history)

    def _row(self, trained: Trained) -> dict[str, Any]:
        """The line of a round before its evaluation."""
        loss = self._loss(trained.round, trained.report, trained.jobs)
        return {"round": trained.round, "ga": None, "pa": None, "loss": loss, "seconds": trained.seconds}

    def _keep(self, row: dict, state: State, best: Tree, history: History) -> Tree:
        """Write down a round that is evaluated; the best global variables from now on."""
        history.rows.append(row)
        if self.keeps_best and history.is_best("ga"):
            best = self._generic(state)
        self._record(row, history)
        parts, last = ((state.servers, best), (state.clients, state.statistics)), row["round"] == self.config.rounds
        self.checkpoints.save(row["round"], *parts, history.to_json(), force=last)
        return best

    def _loss(self, round: int, report: Report, jobs: Jobs) -> float:
        """Training loss, weighted as the aggregation; UserError if a client's is not finite."""
        loss, trained = np.array(report.loss), jobs.steps > 0
        wrong = np.flatnonzero(trained & ~np.isfinite(loss))
        if len(wrong):
            clients = ", ".join(str(int(k)) for k in jobs.row[wrong][:5])
            raise UserError(
                f"the loss of client {clients} is not finite in round {round} of {self.config.method}: choose a "
                f"smaller --lr or set --grad-clip; the checkpoints before it in {self.folder.path} are good."
            )
        return float(np.sum(loss[trained] * jobs.weight[trained]))

    def _evaluate(self, row: dict, state: State, report: Report, jobs: Jobs, history: History) -> None:
        """Fill in GA and PA of a round, and the per-client record."""
        self._trained(report, jobs, history)
        if self._is_due(row["round"]):
            begun = time.perf_counter()
            counts = self.simulation.evaluate(state, personal=self.method.personal_model == "server")
            self._measure(row, counts, history)
            row["eval_seconds"] = time.perf_counter() - begun

    def _trained(self, report: Report, jobs: Jobs, history: History) -> None:
        """PA of the models just trained, where it is theirs."""
        if self.method.personal_model == "local":
            trained = jobs.steps > 0
            clients = jobs.row[trained]
            pa = accuracy(np.array(report.correct)[trained].sum(1), self.federation.test_sizes[clients])
            history.update_clients(clients, pa)

    def _is_due(self, round: int) -> bool:
        """Whether a round is evaluated."""
        return round % self.config.eval_every == 0 or round == self.config.rounds

    def _measure(self, row: dict, counts: Evaluation, history: History) -> None:
        """GA, PA and GA of each class, from what this experiment's models said correctly."""
        if self.method.personal_model == "server":
            self._personal(counts.personal, history)
        total = np.bincount(self.federation.dataset.y_test, minlength=self.simulation.program.setting.num_classes)
        ga_local = None
        if self.method.global_model:
            correct = np.array(counts.generic)[0]
            row["ga"] = float(accuracy(correct.sum(), total.sum()))
        else:
            correct = np.array(counts.local)
            ga_local = accuracy(correct.sum(1), np.full(len(correct), total.sum()))
            correct, row["ga"] = correct.mean(0), float(ga_local.mean())
        row["pa"] = mean(np.array([np.nan if v is None else v for v in history.pa_clients]))
        row["ga_per_class"] = plain(accuracy(correct, total))
        row |= self._of_further(counts.further)
        history.update_best(ga_local)

    def _of_further(self, correct: dict[str, Any]) -> dict[str, float]:
        """Accuracy `ga_<name>` on the whole test set of each further model of the server, from its counts [1, C]."""
        samples = np.array(len(self.federation.dataset.y_test))
        return {f"ga_{name}": float(accuracy(np.array(counts)[0].sum(), samples)) for name, counts in correct.items()}

    def _record(self, row: dict, history: History) -> None:
        self.folder.append(row)
        if row["ga"] is not None:
            self.folder.append({"round": row["round"], "pa_per_client": history.pa_clients}, "clients.jsonl")
        for writer in self.writers:
            writer.write(row)

    def summary(self, progress: Progress) -> dict[str, Any]:
        """The result: best and last of GA and PA, cost, and what it ran on."""
        result = self._result(progress.history)
        if self.tunes:
            epochs, best = self.config.fine_tune_epochs, progress.best if self.keeps_best else None
            result |= after_training(self.simulation, epochs, self.config.rounds, progress.state, best, [result])[0]
        return result | self._cost(progress.history)

    def _result(self, history: History) -> dict[str, Any]:
        """What the rounds gave."""
        config = self.config
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
        return result

    def conclude(self, summary: dict[str, Any], history: History) -> None:
        """Write the result and draw the curves."""
        config = self.config
        self.folder.write_summary(summary)
        title = f"{config.method}, {config.task or config.dataset}, seed {config.seed}"
        records.draw_curves(history.rows, self.folder.path / "curves.png", title)
        if self.recorder:
            self.recorder.draw()

    def close(self) -> None:
        """Wait for what is still being written."""
        try:
            self.checkpoints.close()
        finally:
            for writer in self.writers:
                writer.close()

    def _cost(self, history: History) -> dict[str, Any]:
        seconds = np.array([row["seconds"] for row in history.rows])
        typical = float(np.median(seconds[1:] if len(seconds) > 1 else seconds)) if len(seconds) else None
        _, batches = self.simulation.jobs(0)
        size = len(batches) // self.together
        samples = sum(int((b >= 0).sum()) for b in batches[self.index * size : (self.index + 1) * size])
        memory = records.peak_memory_mb()
        return {
            "seconds_per_round": typical,
            "compile_seconds": self.clock.seconds / self.together,
            "compilations": self.simulation.compilations,
            "samples_per_second": samples / typical if typical else None,
            "peak_memory_mb": memory["host"],
            "device_peak_memory_mb": memory["device"],
            "wall_seconds": (time.perf_counter() - self.started) / self.together,
            **records.describe_machine(),
        }
