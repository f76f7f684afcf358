"""Runs of participants with models of their own: over a partition, or over the domains of a task (FCCL).

In a task GA is the inter-domain accuracy, the mean over the other domains, and PA the intra-domain accuracy on the own
one, each averaged over the participants (FCCL, equations 8 and 9, the own domain read as what is meant).
Letters: K participants, D = K domains, C classes.
"""

from dataclasses import replace

import jax
import numpy as np

from fedjax_pcdd.analysis import correlation
from fedjax_pcdd.data import augment
from fedjax_pcdd.data.domains import Task, load_task
from fedjax_pcdd.data.federation import Dataset, Federation
from fedjax_pcdd.data.partition import Partition
from fedjax_pcdd.engine.groups import Groups, Public
from fedjax_pcdd.engine.program import State
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import Method
from fedjax_pcdd.methods.participant import Exchanging
from fedjax_pcdd.training.build import PRODUCTS, TYPES, build_model, default_model, local_training, public_images
from fedjax_pcdd.training.metrics import History, accuracy, plain
from fedjax_pcdd.training.runner import Run

PRETRAIN_EPOCHS = 50
ARCHITECTURES = ("resnet10", "resnet12", "efficientnet_b0", "mobilenet_v2")
SMALL_ARCHITECTURES = ("mlp", "simple_cnn", "mcmahan_cnn", "fedrl_cnn")


class ParticipantRun(Run):
    """A run in which clients keep their models and may differ in architecture."""

    def _model_names(self, method: Method) -> list[str]:
        """An architecture for each participant."""
        names = [name.strip() for name in (self.config.models or self._default_models(method)).split(",")]
        participants = self.federation.num_clients
        if len(names) > participants:
            raise UserError(f"--models names {len(names)} architectures for {participants} participants: name fewer.")
        return [names[k % len(names)] for k in range(participants)]

    def _default_models(self, method: Method) -> str:
        return self.config.model or default_model(self.federation.dataset)

    def _pipelines(self) -> tuple[augment.Pipeline, augment.Pipeline]:
        """Of private and of public images."""
        config, shape = self.config, self.federation.image_shape
        own = augment.pipeline(config.dataset, config.augment, shape, text=self.federation.dataset.text)
        return own, augment.pipeline(config.dataset, False, shape)

    def _public(self, method: Method, pipeline: augment.Pipeline) -> Public | None:
        if method.exchange == "never" and not method.distils:
            return None
        return Public(public_images(self.config, self.federation.image_shape), pipeline, self.config.public_batch)

    def _epochs(self) -> tuple[int, ...] | None:
        """Local epochs of each participant, if they differ."""
        return None

    def _check(self, method: Method) -> None:
        """UserError for options that mean nothing here."""
        config = self.config
        if config.cohort not in (None, self.federation.num_clients) or config.client_state == "host":
            raise UserError("all participants take part in every round: drop --cohort and --client-state.")
        if config.devices not in ("auto", 1) or jax.process_count() > 1:
            raise UserError("participants with models of their own train on one device: drop --devices, --coordinator.")
        if config.model and config.models:
            raise UserError("--models names all architectures: drop --model.")
        if not method.own_models and config.pretrain_epochs:
            raise UserError(f"{config.method} has one common model, so nobody is pre-trained: drop --pretrain-epochs.")
        if not method.own_models and config.task is None:
            raise UserError(f"{config.method} has one common model: name it with --model, not --models.")

    def _assemble(self, method: Method, lanes: int) -> Groups:
        config = self.config
        self._check(method)
        ways = {"precision": PRODUCTS[config.precision], "convolutions": self.convolutions}
        names = self._model_names(method)
        plain_models = [build_model(config, name, self.federation.dataset).clone(**ways) for name in names]
        private, public = self._pipelines()
        return Groups(
            plain_models, self.federation, method, local_training(config, method), seed=config.seed,
            epochs=self._epochs(), public=self._public(method, public), pipeline=private, lanes=lanes,
            rounds=config.rounds, weights=config.weights, local_statistics=config.bn == "local",
            keeps_optimiser=config.optimizer_state == "kept", eval_batch=config.eval_batch,
            dtype=TYPES[config.precision],
        )  # fmt: skip

    def _fastest(self, make, state, jobs):
        """All participants of an architecture at once, but one after another on a CPU."""
        return make(1 if jax.default_backend() == "cpu" else jobs)

    def _prepared(self, state: State) -> State:
        epochs = self._pretrain_epochs()
        return self.simulation.pretrain(state, epochs, self.config.pretrain_batch_size) if epochs else state

    def _pretrain_epochs(self) -> int:
        return self.config.pretrain_epochs or 0


class TaskRun(ParticipantRun):
    """A run over the domains of a task."""

    task: Task

    def _federate(self) -> Federation:
        config = self.config
        if config.model is not None:
            raise UserError("--model is for a data set: name the participants' architectures with --models.")
        self.task = load_task(config.task or "", config.data_dir, seed=config.seed, split=config.task_split)
        return federation_of(self.task)

    def _check(self, method):
        super()._check(method)
        if self.config.fine_tune_epochs and method.fine_tune:
            raise UserError("in a task PA is that of the models as they are: use --fine-tune-epochs=0.")

    def _assemble(self, method, lanes):
        if isinstance(method, Exchanging) and method.public_epochs is None:
            method = replace(method, public_epochs=self.task.public_epochs)
        return super()._assemble(method, lanes)

    def _default_models(self, method: Method) -> str:
        if not method.own_models or method.averages != "never":
            return "simple_cnn" if self.task.side < 32 else ARCHITECTURES[0]
        return ",".join(SMALL_ARCHITECTURES if self.task.side < 32 else ARCHITECTURES)

    def _pipelines(self):
        name = self.config.public or self.task.public
        return augment.DOMAIN_PIPELINE, augment.public_pipeline(name, self.task.side)

    def _public(self, method, pipeline):
        config, task = self.config, self.task
        if method.exchange == "never" and not method.distils:
            return None
        samples = config.public_samples or (task.public_samples if config.public in (None, task.public) else None)
        named = replace(config, public=config.public or task.public, public_samples=samples)
        return Public(public_images(named, self.federation.image_shape), pipeline, config.public_batch)

    def _epochs(self):
        return None if self.config.local_epochs else self.task.local_epochs

    def _pretrain_epochs(self):
        if not self.method.own_models:
            return 0  # and nobody asked for more, see `_check`
        return PRETRAIN_EPOCHS if self.config.pretrain_epochs is None else self.config.pretrain_epochs

    def _first_accuracies(self, state: State, history: History) -> None:
        """All participants take part in the first round."""

    def _evaluate(self, row, state, report, jobs, history):
        """Inter- and intra-domain accuracies of a round, top-1 and top-5."""
        if row["round"] % self.config.eval_every and row["round"] != self.config.rounds:
            return
        shares = self.shares(state)
        for name, top in (("top1", 0), ("top5", 1)):
            intra, inter = intra_and_inter(shares[:, :, top])
            row[f"intra_{name}"], row[f"inter_{name}"] = float(intra.mean()), float(inter.mean())
        main = intra_and_inter(shares[:, :, 0 if self.task.top == 1 else 1])
        row["pa"], row["ga"] = float(main[0].mean()), float(main[1].mean())
        row["intra"], row["inter"] = plain(main[0]), plain(main[1])
        row |= self._of_further(self.simulation.general(state)[1])
        history.update_clients(np.arange(len(main[0])), main[0])
        history.update_best(main[1])

    def shares(self, state: State) -> np.ndarray:
        """Accuracy of every participant's model on every domain, top-1 and top-5 [K, D, 2]."""
        return accuracy(
            self.simulation.domain_correct(state).sum(-1),
            np.broadcast_to(self.federation.test_sizes[None, :, None], (*[self.federation.num_clients] * 2, 2)),
        )

    def summary(self, progress):
        """As every run's, and who the participants were."""
        found = super().summary(progress)
        rows = [row for row in progress.history.rows if row.get("intra")]
        found["dataset"] = self.task.name
        found["pa_protocol"] = "intra-domain accuracy; GA is the inter-domain one"
        found["domains"] = [domain.name for domain in self.task.domains]
        found["models"] = self._model_names(self.method)
        found["intra"], found["inter"] = rows[-1]["intra"], rows[-1]["inter"]
        found["domain_accuracy"] = self.shares(progress.state)[:, :, 0].tolist()
        self._write_correlation(progress.state)
        return found

    def _write_correlation(self, state: State) -> None:
        """How the participants' logits on the public images correlate with their mean (FCCL, Figure 5)."""
        if self.simulation.public is None:
            return
        matrices = np.asarray(correlation.correlation_matrices(self.simulation.public_logits(state)))
        names = [domain.name for domain in self.task.domains]
        np.savez_compressed(self.folder.path / "correlation.npz", matrices=matrices, participants=names)
        correlation.draw_matrices(matrices, names, self.folder.path / "correlation.png")


def intra_and_inter(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy on the own domain, and the mean over the others, [K] each (FCCL, equations 8 and 9).

    Args:
      shares: [K, K] accuracy of participant i's model on domain j.

    >>> [x.tolist() for x in intra_and_inter(np.array([[1.0, 0.25], [0.5, 0.75]]))]
    [[1.0, 0.75], [0.25, 0.5]]
    """
    own = np.diagonal(shares)
    return own.copy(), (shares.sum(1) - own) / (len(shares) - 1)


def federation_of(task: Task) -> Federation:
    """All domains as one data set, of which each participant holds its own part."""
    sizes = [len(d.y_train) for d in task.domains], [len(d.y_test) for d in task.domains]
    lists = [tuple(np.split(np.arange(sum(s)), np.cumsum(s)[:-1])) for s in sizes]
    x_train, y_train, x_test, y_test = (
        np.concatenate([getattr(domain, name) for domain in task.domains])
        for name in ("x_train", "y_train", "x_test", "y_test")
    )
    return Federation(Dataset(task.name, x_train, y_train, x_test, y_test, task.num_classes), Partition(*lists))
