"""The parts of a run from its options: data, federation, model, local training, simulation."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from fedjax_pcdd import models
from fedjax_pcdd.data import augment, sources
from fedjax_pcdd.data.domains import load_public
from fedjax_pcdd.data.federation import Dataset, Federation, largest_groups
from fedjax_pcdd.data.partition import partition
from fedjax_pcdd.data.subset import subset
from fedjax_pcdd.engine.devices import count_devices
from fedjax_pcdd.engine.round import Experiment, Local, Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import Method
from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.models.convolution_choices import Choices
from fedjax_pcdd.training.config import RunConfig

# For --precision: the type of images and activations, and how JAX calls what products of float32 operands take.
TYPES = {"float32": jnp.float32, "tf32": jnp.float32, "bfloat16": jnp.bfloat16}
PRODUCTS = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": "bfloat16"}


def load(config: RunConfig) -> Dataset:
    """The data set, cut down to what the run uses of it."""
    dataset = sources.load(config.dataset, config.data_dir)
    if config.partition == "natural" and config.clients is not None:
        dataset = largest_groups(dataset, config.clients)
    dataset = subset(dataset, config.train_samples, config.test_samples, config.seed)
    if not len(dataset.y_test):
        raise UserError(f"data set '{dataset.name}' has no test samples, so nothing could be measured: add some.")
    return dataset


def federate(config: RunConfig, dataset: Dataset | None = None) -> Federation:
    """The data set, loaded unless it is given, divided among the clients."""
    dataset = load(config) if dataset is None else dataset
    train, test = dataset.groups_train, dataset.groups_test
    groups = None if train is None or test is None else (train, test)
    parts = partition(
        config.partition, dataset.y_train, dataset.y_test, num_classes=dataset.num_classes,
        clients=config.clients or 0, seed=config.seed, beta=config.beta, classes_per_client=config.classes_per_client,
        retry=config.retry, min_size=config.min_samples, doubled=config.doubled, groups=groups,
    )  # fmt: skip
    return Federation(dataset, parts)


def _steps(text: str) -> tuple[int, ...]:
    """Rounds in an option like "40,80"."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UserError(f"--lr-steps={text} must be round numbers with commas between them, as 40,80.") from None


def default_model(dataset: Dataset) -> str:
    """What is trained without --model: lstm on text, mlp on digits, else simple_cnn."""
    if dataset.text:
        return "lstm"
    return "mlp" if dataset.name == "digits" else "simple_cnn"


def build_model(config: RunConfig, name: str, dataset: Dataset) -> Classifier:
    """A plain model as the options want it."""
    model = models.build(
        name, num_classes=dataset.num_classes, image_shape=dataset.x_train.shape[1:], text=dataset.text,
        norm="group" if config.bn == "group" else "batch",
        dtype=TYPES[config.precision] if config.precision == "bfloat16" else None,
    )  # fmt: skip
    return model.clone(neck=config.neck) if config.neck else model


def local_training(config: RunConfig, method: Method) -> Local:
    """The options of local training."""
    clip = method.grad_clip if config.grad_clip == "method" else config.grad_clip
    return Local(
        config.local_epochs or 1, config.batch_size, config.last_batch, config.optimizer, config.lr, config.momentum,
        config.weight_decay, None if clip in (None, "none") else float(clip), config.shuffle, _steps(config.lr_steps),
        config.lr_decay,
    )  # fmt: skip


def public_images(config: RunConfig, shape: tuple[int, ...]) -> np.ndarray:
    """Unlabelled images [N, H, W, channels] in the shape of the private ones; colours are averaged for grey ones.

    Raises:
      UserError: no data set is named, and none is built in for these images.
    """
    name = config.public or ("digits_public" if config.dataset == "digits" and config.task is None else None)
    if name is None:
        raise UserError(
            "this method needs unlabelled public images: name a data set with --public, as --public=cifar10."
        )
    samples = config.public_samples or (1000 if name == "digits_public" else 5000)
    images = load_public(name, config.data_dir, samples=samples, seed=config.seed, side=shape[0])
    return images if shape[2] == 3 else np.round(images.mean(-1, keepdims=True)).astype(np.uint8)


def experiment(config: RunConfig, method: Method, federation: Federation) -> Experiment:
    """One experiment of a simulation."""
    return Experiment(federation, method, local_training(config, method), config.seed)


def assemble(
    config: RunConfig,
    method: Method,
    federation: Federation,
    lanes: int,
    *,
    model: Classifier | None = None,
    pipeline: augment.Pipeline | None = None,
    others: Sequence[Experiment] = (),
    convolutions: Choices | None = None,
) -> Simulation:
    """Model, method and data as one simulation; a model or pipeline of one's own in place of what the options say.

    Args:
      others: experiments that share the program, after this one.
      convolutions: forms that were timed on the device.
    """
    dataset, shape = federation.dataset, federation.image_shape
    pipeline = pipeline or augment.pipeline(config.dataset, config.augment, shape, text=dataset.text)
    public = None
    if method.distils:
        plain = augment.pipeline(config.dataset, False, shape, text=dataset.text)
        public = public_images(config, shape), plain
    plain_model = model or build_model(config, config.model or default_model(dataset), dataset)
    plain_model = plain_model.clone(
        precision=plain_model.precision or PRODUCTS[config.precision], convolutions=convolutions
    )
    return Simulation(
        method.build(plain_model), [experiment(config, method, federation), *others], pipeline=pipeline,
        cohort=config.cohort or federation.num_clients, lanes=lanes,
        devices=count_devices(config.devices), rounds=config.rounds, weights=config.weights,
        local_statistics=config.bn == "local", keeps_optimiser=config.optimizer_state == "kept",
        client_state=config.client_state, public=public, eval_batch=config.eval_batch,
        dtype=TYPES[config.precision],
    )  # fmt: skip
