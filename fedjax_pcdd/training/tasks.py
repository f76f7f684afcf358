"""Runs of participants with models of their own: over a partition, or over the domains of a task (FCCL).

In a task GA is the inter-domain accuracy, the mean over the other domains, and PA the intra-domain accuracy on the own
one, each averaged over the participants (FCCL, equations 8 and 9, the own domain read as what is meant).
Letters: K participants, D = K domains, C classes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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
from fedjax_pcdd.training.accuracies import Accuracies, further
from fedjax_pcdd.training.build import (
    NOTHING,
    Given,
    Pair,
    Setup,
    build_model,
    default_model,
    local_training,
    public_images,
)
from fedjax_pcdd.training.config import RunConfig
from fedjax_pcdd.training.folder import RunFolder
from fedjax_pcdd.training.loop import Callback, Run
from fedjax_pcdd.training.metrics import accuracy, plain

PRETRAIN_EPOCHS = 50
ARCHITECTURES = ("resnet10", "resnet12", "efficientnet_b0", "mobilenet_v2")
SMALL_ARCHITECTURES = ("mlp", "simple_cnn", "mcmahan_cnn", "fedrl_cnn")


def has_participants(config: RunConfig, method: Method) -> bool:
    """Whether clients have models of their own or are the domains of a task, so that each trains in every round."""
    traits = method.traits()
    own = traits.exchange != "never" or traits.averages != "never" or config.models or config.pretrain_epochs
    return config.task is not None or bool(own)


def setup(pairs: Sequence[Pair], given: Given = NOTHING) -> Setup:
    """The parts of experiments that share a program, of the kind that their options ask for."""
    config, method = pairs[0]
    if not has_participants(config, method):
        return Setup(pairs, given)
    if given.model is not None or given.pipeline is not None:
        raise UserError(f"{config.method} takes models by name, and the customary pipeline: drop your own.")
    return TaskSetup(pairs, given) if config.task is not None else ParticipantSetup(pairs, given)


class ParticipantSetup(Setup):
    """One experiment, in which clients keep their models and may differ in architecture."""

    def make(self, lanes: int) -> Groups:
        """The groups of equal architectures."""
        (config, method), federation = self.pairs[0], self.federations[0]
        method = self._completed(method)
        self._check_options(method)
        names = self.model_names(method)
        models = [self._in_form(build_model(config, name, federation.dataset)) for name in names]
        private, public = self._pipelines()
        return Groups(
            models, federation, method, local_training(config, method), seed=config.seed, epochs=self._epochs(),
            public=self._public(method, public), pipeline=private, **self._settings(lanes),
        )  # fmt: skip

    def _completed(self, method: Method) -> Method:
        return method

    def model_names(self, method: Method) -> list[str]:
        """An architecture for each participant."""
        names = [name.strip() for name in (self.config.models or self._default_models(method)).split(",")]
        participants = self.federations[0].num_clients
        if len(names) > participants:
            raise UserError(f"`models` names {len(names)} architectures for {participants} participants: name fewer.")
        return [names[k % len(names)] for k in range(participants)]

    def _default_models(self, method: Method) -> str:
        return self.config.model or default_model(self.federations[0].dataset)

    def _public(self, method: Method, pipeline: augment.Pipeline) -> Public | None:
        if not method.traits().needs_public:
            return None
        named = self._with_public()
        return Public(public_images(named, self.federations[0].image_shape), pipeline, named.public_batch)

    def _with_public(self) -> RunConfig:
        """The options, with the data set of the public images if it is known."""
        return self.config

    def _epochs(self) -> tuple[int, ...] | None:
        """Local epochs of each participant, if they differ."""
        return None

    def _check_options(self, method: Method) -> None:
        """UserError for options that mean nothing here."""
        config = self.config
        if config.cohort not in (None, self.federations[0].num_clients) or config.client_state == "host":
            raise UserError("all participants take part in every round: drop `cohort` and `client_state`.")
        if config.devices not in ("auto", 1) or jax.process_count() > 1:
            raise UserError("participants with models of their own train on one device: drop `devices`, `coordinator`.")
        if config.model and config.models:
            raise UserError("`models` names all architectures: drop `model`.")
        if not method.traits().own_models and config.pretrain_epochs:
            raise UserError(f"{config.method} has one common model, so nobody is pre-trained: drop `pretrain_epochs`.")
        if not method.traits().own_models and config.task is None:
            raise UserError(f"{config.method} has one common model: name it with `model`, not `models`.")

    def _with_fastest_lanes(self, state: State, jobs: int) -> Any:
        """All participants of an architecture at once, but one after another on a CPU."""
        return self.make(1 if jax.default_backend() == "cpu" else jobs)

    def prepared(self, simulation: Any, state: State) -> State:
        """The state after pre-training, if there is any."""
        epochs = self._pretrain_epochs()
        return simulation.pretrain(state, epochs, self.config.pretrain_batch_size) if epochs else state

    def _pretrain_epochs(self) -> int:
        return self.config.pretrain_epochs or 0


class TaskSetup(ParticipantSetup):
    """The domains of a task, each of which is a participant."""

    task: Task

    def _federate(self) -> list[Federation]:
        config = self.config
        if config.model is not None:
            raise UserError("`model` is for a data set: name the participants' architectures with `models`.")
        self.task = load_task(config.task or "", config.data_dir, seed=config.seed, split=config.task_split)
        return [federation_of(self.task)]

    def _check_options(self, method: Method) -> None:
        super()._check_options(method)
        if self.config.fine_tune_epochs and method.traits().fine_tunes:
            raise UserError("in a task PA is that of the models as they are: use `fine_tune_epochs=0`.")

    def _completed(self, method: Method) -> Method:
        if isinstance(method, Exchanging) and method.public_epochs is None:
            return replace(method, public_epochs=self.task.public_epochs)
        return method

    def _default_models(self, method: Method) -> str:
        traits = method.traits()
        if not traits.own_models or traits.averages != "never":
            return "simple_cnn" if self.task.side < 32 else ARCHITECTURES[0]
        return ",".join(SMALL_ARCHITECTURES if self.task.side < 32 else ARCHITECTURES)

    def _pipelines(self) -> tuple[augment.Pipeline, augment.Pipeline]:
        name = self.config.public or self.task.public
        return augment.DOMAIN_PIPELINE, augment.public_pipeline(name, self.task.side)

    def _with_public(self) -> RunConfig:
        config, task = self.config, self.task
        samples = config.public_samples or (task.public_samples if config.public in (None, task.public) else None)
        return replace(config, public=config.public or task.public, public_samples=samples)

    def _epochs(self) -> tuple[int, ...] | None:
        return None if self.config.local_epochs else self.task.local_epochs

    def _pretrain_epochs(self) -> int:
        if not self.methods[0].traits().own_models:
            return 0  # and nobody asked for more, see `_check_options`
        return PRETRAIN_EPOCHS if self.config.pretrain_epochs is None else self.config.pretrain_epochs

    def accuracies(self, e: int, **more: Any) -> Callback:
        """Inter- and intra-domain accuracies."""
        return DomainAccuracies(self.config.method, every=self.config.eval_every, top=self.task.top, **more)

    def pictures(self, folder: RunFolder) -> list[Callback]:
        """How the participants' logits correlate."""
        return [Correlation(folder, [domain.name for domain in self.task.domains])]

    def more_results(self, run: Run) -> dict[str, Any]:
        """Who the participants were, and how well each does on every domain."""
        rows = [row for row in run.history.rows if row.get("intra")]
        return {
            "dataset": self.task.name,
            "pa_protocol": "intra-domain accuracy; GA is the inter-domain one",
            "domains": [domain.name for domain in self.task.domains],
            "models": self.model_names(self.methods[0]),
            "intra": rows[-1]["intra"],
            "inter": rows[-1]["inter"],
            "domain_accuracy": domain_shares(run)[:, :, 0].tolist(),
        }


class DomainAccuracies(Accuracies):
    """PA is the intra-domain accuracy, GA the inter-domain one; top-1 and top-5."""

    def __init__(self, name: str, *, top: int = 1, **options: Any):
        """As `Accuracies`; `top` says which of top-1 and top-5 are PA and GA."""
        super().__init__(name, **options)
        self.top = top

    def on_start(self, run: Run) -> None:
        """All participants take part in the first round."""

    def measure(self, run: Run, row: dict[str, Any]) -> None:
        """Fill in the accuracies of a round."""
        shares = domain_shares(run)
        for name, top in (("top1", 0), ("top5", 1)):
            intra, inter = intra_and_inter(shares[:, :, top])
            row[f"intra_{name}"], row[f"inter_{name}"] = float(intra.mean()), float(inter.mean())
        intra, inter = intra_and_inter(shares[:, :, 0 if self.top == 1 else 1])
        row["pa"], row["ga"] = float(intra.mean()), float(inter.mean())
        row["intra"], row["inter"] = plain(intra), plain(inter)
        row |= further(run, run.simulation.general(run.state)[1])
        run.history.update_clients(np.arange(len(intra)), intra)
        run.history.update_best(inter)


class Correlation(Callback):
    """Writes how the participants' logits on the public images correlate with their mean (FCCL, Figure 5)."""

    def __init__(self, folder: RunFolder, names: Sequence[str]):
        """Args: names: of the participants."""
        self.folder, self.names = folder, list(names)

    def on_end(self, run: Run) -> None:
        """correlation.npz and correlation.png, if there are public images."""
        if run.error is None and run.simulation.public is not None:
            matrices = np.asarray(correlation.correlation_matrices(run.simulation.public_logits(run.state)))
            np.savez_compressed(self.folder.path / "correlation.npz", matrices=matrices, participants=self.names)
            correlation.draw_matrices(matrices, self.names, self.folder.path / "correlation.png")


def domain_shares(run: Run) -> np.ndarray:
    """Accuracy of every participant's model on every domain, top-1 and top-5 [K, D, 2]."""
    clients, sizes = run.federation.num_clients, run.federation.test_sizes
    correct = run.simulation.domain_correct(run.state).sum(-1)
    return accuracy(correct, np.broadcast_to(sizes[None, :, None], (clients, clients, 2)))


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
