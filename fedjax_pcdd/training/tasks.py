"""Runs of participants with models of their own: over a partition, or over the domains of a task (FCCL).

In a task, GA is the inter-domain accuracy (mean over the other domains) and PA the intra-domain accuracy (on the own
domain), both averaged over the participants (FCCL, equations 8 and 9, read as referring to the own domain).
Letters: K participants, D = K domains, C classes.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from fedjax_pcdd.analysis import pictures
from fedjax_pcdd.data import augment
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.domains import Task, load_task
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine.groups import Groups, Public
from fedjax_pcdd.engine.pretraining import pretrained
from fedjax_pcdd.engine.program import State
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import Method
from fedjax_pcdd.methods.method import Traits
from fedjax_pcdd.methods.participant import Exchanging
from fedjax_pcdd.models import with_uniform_kernels
from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.training import build
from fedjax_pcdd.training.accuracies import Accuracies, further
from fedjax_pcdd.training.config import RunConfig
from fedjax_pcdd.training.folder import RunFolder
from fedjax_pcdd.training.loop import Callback, RoundReport, Run
from fedjax_pcdd.training.metrics import accuracy, balanced, mean, plain, spread
from fedjax_pcdd.training.setup import NOTHING, Given, Pair, Setup

PRETRAIN_EPOCHS = 50
PRIVATE_BATCH = 500
ARCHITECTURES = ("resnet10", "resnet12", "efficientnet_b0", "mobilenet_v2")
SMALL_ARCHITECTURES = ("mlp", "simple_cnn", "mcmahan_cnn", "fedrl_cnn")


def has_participants(config: RunConfig, method: Method) -> bool:
    """Whether clients have models of their own or are the domains of a task, so that each trains in every round."""
    traits = method.traits()
    keeps_models = traits.exchange != "never" or traits.averages != "never" or config.models or config.pretrain_epochs
    return config.task is not None or bool(keeps_models)


def setup(pairs: Sequence[Pair], given: Given = NOTHING) -> Setup:
    """The `Setup` of experiments that share a program, of the class that their options call for."""
    config, method = pairs[0]
    several_models = isinstance(given.model, list | tuple) and method.traits().own_models
    if not (several_models or has_participants(config, method)):
        return Setup(pairs, given)
    if given.pipeline is not None or (given.model is not None and config.task is not None):
        raise UserError(f"{config.method} takes a task's models by name, and the customary pipeline: drop your own.")
    return TaskSetup(pairs, given) if config.task is not None else ParticipantSetup(pairs, given)


class ParticipantSetup(Setup):
    """One experiment in which clients keep their models and may differ in architecture."""

    epochs: tuple[int, ...] | None = None  # local epochs of each participant, if they differ

    def make(self, lanes: int) -> Groups:
        """The groups of equal architectures."""
        (config, method), federation = self.pairs[0], self.federations[0]
        labels = self.public_labels if method.traits().transfer_epochs else None
        self.check_options(method)
        models = [self.in_form(build.build_model(config, model, federation.dataset)) for model in self.models()]
        private, pipeline = self.pipelines()
        public = Public(self.public, pipeline, config.public_batch) if method.traits().needs_public else None
        return Groups(
            models, federation, method, build.local_training(config, method), seed=config.seed, epochs=self.epochs,
            public=public, public_labels=labels, pipeline=private, execution=self._execution(lanes),
            **self._settings(),
        )  # fmt: skip

    @cached_property
    def public_labels(self) -> np.ndarray:
        """Labels [N] of the public images."""
        return build.public_labels(self.config)

    def models(self) -> list[Any]:
        """The architecture of each participant, as a name or the object that was given."""
        config, federation, given_model = self.config, self.federations[0], self.given.model
        listed, participants = config.models or config.model, federation.num_clients
        names = [name.strip() for name in (listed or build.default_model(federation.dataset)).split(",")]
        if given_model is not None:
            names = list(given_model) if isinstance(given_model, list | tuple) else [given_model]
        if not names:
            raise UserError("takes at least one architecture: name one, or drop the empty list.", field="model")
        if len(names) > participants:
            raise UserError(f"`models` names {len(names)} architectures for {participants} participants: name fewer.")
        return [names[k % len(names)] for k in range(participants)]

    def check_options(self, method: Method) -> None:
        """Raise UserError for options that have no meaning here."""
        config = self.config
        if config.cohort not in (None, self.federations[0].num_clients) or config.client_state != "device":
            raise UserError("all participants take part in every round: drop `cohort` and `client_state`.")
        if config.availability is not None or config.lost_share:
            raise UserError(
                "clients that exchange or keep models are always there: drop `availability` and `lost_share`."
            )
        if config.data == "stream":
            raise UserError("participants with models of their own have all samples on the device: drop `data`.")
        if config.devices not in ("auto", 1) or jax.process_count() > 1:
            raise UserError("participants with models of their own train on one device: drop `devices`, `coordinator`.")
        if config.model and config.models:
            raise UserError("`models` names all architectures: drop `model`.")
        if not method.traits().own_models and config.pretrain_epochs:
            raise UserError(f"{config.method} has one common model, so nobody is pre-trained: drop `pretrain_epochs`.")
        if not method.traits().own_models and config.task is None:
            raise UserError(f"{config.method} has one common model: name it with `model`, not `models`.")

    def with_fastest_lanes(self, state: State, jobs: int) -> Any:
        """The simulation that trains all participants of an architecture at once; on a CPU, one after another."""
        return self.make(1 if jax.default_backend() == "cpu" else jobs)

    def prepared(self, state: State) -> State:
        """The state after pre-training, if any, on public and on private images."""
        epochs, transfer = self.config.pretrain_epochs or 0, self.simulation.traits.transfer_epochs
        if not (epochs or transfer):
            return state
        return pretrained(self.simulation, state, epochs, self.config.pretrain_batch_size, transfer=transfer)


class TaskSetup(ParticipantSetup):
    """One experiment on a task, each of whose domains is a participant."""

    task: Task

    def completed(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        """The experiment, with the task's settings for options that were not given."""
        ((config, method),) = pairs
        if config.model is not None:
            raise UserError("`model` is for a data set: name the participants' architectures with `models`.")
        task = self.task = load_task(config.task or "", config.data_dir, seed=config.seed, split=config.task_split)
        if isinstance(method, Exchanging) and method.public_epochs is None:
            method = replace(method, public_epochs=task.recipe.public_epochs)
        if not config.local_epochs:
            self.epochs = task.recipe.local_epochs
        traits, task_images = method.traits(), config.public in (None, task.recipe.public)
        pretrain_epochs = PRETRAIN_EPOCHS if traits.own_models else 0
        config = replace(
            config, models=config.models or self._models(traits), public=config.public or task.recipe.public,
            public_samples=config.public_samples or (task.recipe.public_samples if task_images else None),
            pretrain_epochs=pretrain_epochs if config.pretrain_epochs is None else config.pretrain_epochs,
        )  # fmt: skip
        return [(config, method)]

    def federate(self) -> list[Federation]:
        """The domains as one federation, one domain per participant."""
        return [federation_of(self.task)]

    def _models(self, traits: Traits) -> str:
        if not traits.own_models or traits.averages != "never" or traits.common_features:
            return "simple_cnn" if self.task.side < 32 else ARCHITECTURES[0]
        return ",".join(SMALL_ARCHITECTURES if self.task.side < 32 else ARCHITECTURES)

    def in_form(self, model: Classifier) -> Classifier:
        """As in any run, but with uniformly initialised kernels, like all those of the FCCL paper."""
        return with_uniform_kernels(super().in_form(model))

    def check_options(self, method: Method) -> None:
        """Raise UserError also for options that have no meaning in a task."""
        super().check_options(method)
        if self.config.pa_protocol is not None:
            raise UserError("in a task PA is the intra-domain accuracy after each round: drop `pa_protocol`.")
        if self.config.augmentation is not None:
            raise UserError("the images of a task are as they are: drop `augmentation`.")
        if self.config.fine_tune_epochs and method.traits().fine_tunes:
            raise UserError("in a task PA is that of the models as they are: use `fine_tune_epochs=0`.")

    def pipelines(self) -> tuple[augment.Pipeline, augment.Pipeline]:
        """The pipeline of all domains' images, and that of the public images."""
        return augment.DOMAIN_PIPELINE, augment.public_pipeline(self.config.public or "", self.task.side)

    def accuracies(self, e: int, **more: Any) -> Accuracies:
        """The callback that measures inter- and intra-domain accuracies."""
        return DomainAccuracies(self.config.method, every=self.config.eval_every, top=self.task.recipe.top, **more)

    def pictures(self, folder: RunFolder) -> list[Callback]:
        """Callbacks for the pre-trained models' accuracies and the correlation of the participants' logits."""
        return [Start(folder), Correlation(folder, [domain.name for domain in self.task.domains])]

    def more_results(self, run: Run) -> dict[str, Any]:
        """The participants, and the accuracy of each on every domain."""
        rows = [row for row in run.history.rows if row.get("intra")]
        return {
            "dataset": self.task.name,
            "pa_protocol": "intra-domain accuracy; GA is the inter-domain one",
            "domains": [domain.name for domain in self.task.domains],
            "models": self.models(),
            "intra": rows[-1]["intra"],
            "inter": rows[-1]["inter"],
            "domain_accuracy": domain_shares(run)[:, :, 0].tolist(),
        }


class DomainAccuracies(Accuracies):
    """Measures PA as the intra-domain accuracy and GA as the inter-domain one, and both as top-1 and top-5."""

    def __init__(self, name: str, *, top: int = 1, **options: Any):
        """As `Accuracies`; `top` is 1 or 5, whichever top-k accuracy PA and GA are."""
        super().__init__(name, **options)
        self.top = top

    def on_start(self, run: Run) -> None:
        """Nothing to measure: all participants take part in the first round."""

    def trained(self, run: Run, report: RoundReport, after: np.ndarray) -> None:
        """Nothing to record: PA is that of the models between rounds only."""

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Measure the round; the local objective is the plain mean over the participants (FCCL, Figure 6b)."""
        super().on_round(run, report)
        run.history.rows[-1]["local_objective"] = mean(report.loss)

    def measure(self, run: Run, row: dict[str, Any], report: RoundReport) -> None:
        """Fill in the accuracies of a round."""
        correct, top = run.simulation.domain_correct(run.state), 0 if self.top == 1 else 1
        shares = _shares(run, correct)
        row |= _means(shares)
        intra, inter = intra_and_inter(shares[:, :, top])
        row |= {"pa": float(intra.mean()), "ga": float(inter.mean()), **spread(intra)}
        row["intra"], row["inter"] = plain(intra), plain(inter)
        balanced_shares = intra_and_inter(balanced(correct[:, :, top], run.federation.test_class_counts))
        row["pa_balanced"], row["ga_balanced"] = (float(values.mean()) for values in balanced_shares)
        row |= further(run, run.simulation.general(run.state)[1])
        run.history.update_clients(np.arange(len(intra)), intra)
        run.history.update_best(inter)


class Start(Callback):
    """Writes the accuracies of the pre-trained models as start.json, the round 0 of FCCL's Figure 6."""

    def __init__(self, folder: RunFolder):
        self.folder = folder

    def on_start(self, run: Run) -> None:
        """Write them, only before the first round."""
        if not run.round:
            self.folder.write_json("start.json", {"round": 0, **_means(domain_shares(run))})


class Correlation(Callback):
    """Writes how the participants' logits correlate with their mean, on the public images and on each participant's
    private images (FCCL, Figure 5)."""

    def __init__(self, folder: RunFolder, names: Sequence[str]):
        self.folder, self.names = folder, list(names)

    def on_end(self, run: Run) -> None:
        """Write correlation.npz and correlation.png, if there are public images."""
        if run.error is None and run.simulation.public is not None:
            public = np.asarray(pictures.correlation_matrices(run.simulation.public_logits(run.state)))
            private = np.stack([self._private(run, k) for k in range(len(self.names))])
            means = np.array([pictures.diagonals(public), pictures.diagonals(private)])
            arrays = {"matrices": public, "private": private, "means": means, "participants": self.names}
            self.folder.draw("correlation.npz", lambda path: np.savez_compressed(path, **arrays))
            self.folder.draw("correlation.png", lambda path: pictures.draw_matrices(public, private, self.names, path))

    def _private(self, run: Run, k: int) -> np.ndarray:
        """Correlation matrix [C, C] of participant k on its own training images."""
        images = run.federation.dataset.x_train[run.federation.partition.train[k]]
        batches = np.array_split(images, -(-len(images) // PRIVATE_BATCH))
        logits = [[run.outputs(batch, client=j).logits for batch in batches] for j in range(len(self.names))]
        return np.asarray(pictures.correlation_matrices(np.stack([*map(np.concatenate, logits)]))[k])


def _means(shares: np.ndarray) -> dict[str, float]:
    """Mean intra- and inter-domain accuracies, top-1 and top-5, from shares [K, D, 2]."""
    row = {}
    for name, top in (("top1", 0), ("top5", 1)):
        intra, inter = intra_and_inter(shares[:, :, top])
        row |= {f"intra_{name}": float(intra.mean()), f"inter_{name}": float(inter.mean())}
    return row


def domain_shares(run: Run) -> np.ndarray:
    """Accuracy of every participant's model on every domain, top-1 and top-5 [K, D, 2]."""
    return _shares(run, run.simulation.domain_correct(run.state))


def _shares(run: Run, correct: np.ndarray) -> np.ndarray:
    """The same from correct predictions [K, D, 2, C]."""
    return accuracy(correct.sum(-1), run.federation.test_sizes[:, None])


def intra_and_inter(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy on each participant's own domain, and the mean over the others, [K] each (FCCL, equations 8 and 9).

    Args:
      shares: [K, K] accuracy of participant i's model on domain j.

    >>> [x.tolist() for x in intra_and_inter(np.array([[1.0, 0.25], [0.5, 0.75]]))]
    [[1.0, 0.75], [0.25, 0.5]]
    """
    intra = np.diagonal(shares)
    return intra.copy(), (shares.sum(1) - intra) / (len(shares) - 1)


def federation_of(task: Task) -> Federation:
    """All domains as one data set, of which each participant holds its own part."""
    sizes = [len(d.y_train) for d in task.domains], [len(d.y_test) for d in task.domains]
    lists = [tuple(np.split(np.arange(sum(s)), np.cumsum(s)[:-1])) for s in sizes]
    x_train, y_train, x_test, y_test = (
        np.concatenate([getattr(domain, name) for domain in task.domains])
        for name in ("x_train", "y_train", "x_test", "y_test")
    )
    return Federation(Dataset(task.name, x_train, y_train, x_test, y_test, task.recipe.num_classes), Partition(*lists))
