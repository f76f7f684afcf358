"""Parts of a run from its options: data, federation, model, local training."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from fedjax_pcdd import models
from fedjax_pcdd.data import sources
from fedjax_pcdd.data.availability import Availability, availability
from fedjax_pcdd.data.dataset import Dataset, keep_all, largest_groups, sampler, subset
from fedjax_pcdd.data.domains import load_public, load_public_labels
from fedjax_pcdd.data.federation import Federation, hold_out
from fedjax_pcdd.data.lists import Lists, load_validation
from fedjax_pcdd.data.partition import is_file, partition
from fedjax_pcdd.engine.devices import TYPES
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import Method
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.registry import located
from fedjax_pcdd.training.config import RunConfig, rounds_of


def load(config: RunConfig) -> Dataset:
    """The data set, reduced to the samples that the run uses."""
    keep = sampler(config.dataset, config.train_samples, config.test_samples, config.seed)
    largest = config.clients if config.partition == "natural" else None
    dataset = sources.load(config.dataset, config.data_dir, keep_all if largest else keep, config.data == "stream")
    return subset(largest_groups(dataset, largest) if largest else dataset, keep)


def federate(config: RunConfig, dataset: Dataset | None = None) -> Federation:
    """The data set, loaded unless it is given, divided among the clients."""
    dataset = load(config) if dataset is None else dataset
    _check_tests(dataset)
    by_client = partition(
        config.partition, dataset.y_train, dataset.y_test, num_classes=dataset.num_classes,
        clients=config.clients, seed=config.seed, beta=config.beta, classes_per_client=config.classes_per_client,
        retry=config.retry, min_size=config.min_samples, doubled=config.doubled, groups=dataset.groups,
    )  # fmt: skip
    if is_file(config.partition) and config.clients not in (None, len(by_client.train)):
        raise UserError(f"{config.partition} has {len(by_client.train)} clients, not {config.clients}: drop `clients`.")
    validation = load_validation(located(config.partition)) if is_file(config.partition) else None
    federation = Federation(dataset, by_client, validation)
    if validation is not None and config.validation is None:  # without the option, all samples are for training
        joined = [np.concatenate(lists) for lists in zip(by_client.train, validation, strict=True)]
        federation = replace(federation, partition=by_client._replace(train=Lists.of(joined)), validation=None)
    return validated(config, federation)


def share_kept(federation: Federation) -> float | None:
    """The share of the clients' samples that is kept for validation; None if there are no validation lists."""
    if federation.validation is None:
        return None
    kept_samples = federation.validation.flat.size
    return kept_samples / max(kept_samples + int(federation.sizes.sum()), 1)


def _check_tests(dataset: Dataset) -> None:
    if not len(dataset.y_test):
        raise UserError(f"data set '{dataset.name}' has no test samples, so nothing could be measured: add some.")


def validated(config: RunConfig, federation: Federation) -> Federation:
    """The federation, with validation samples held out if the options ask for them and it has none.

    Raises:
      UserError: it keeps another share than the options ask for, none can be kept, or there are no test samples.
    """
    _check_tests(federation.dataset)
    if config.validation is None:
        return federation
    if federation.validation is not None:
        share, total = share_kept(federation) or 0.0, federation.sizes.sum() + federation.validation.flat.size
        if abs(share - config.validation) * total > federation.num_clients:  # by more than one sample per client
            raise UserError(
                f"the partition keeps {share:.3g} of its samples for validation, not {config.validation:g}: use "
                f"`validation={share:.3g}`, or a partition without validation samples."
            )
        return federation
    result = hold_out(federation, config.validation, config.seed)
    if result.validation is not None and not result.validation.flat.size:
        raise UserError(f"`validation={config.validation:g}` keeps no sample of any client: raise it.")
    return result


def availability_of(config: RunConfig, clients: int) -> Availability | None:
    """The availability of the clients; None if all are always available."""
    source = config.availability
    file = source if source in (None, "model") else str(located(source))
    return availability(file, config.lost_share, clients, config.seed)


def default_model(dataset: Dataset) -> str:
    """The model that is trained if none is named: lstm on text, mlp on digits and tables, else simple_cnn."""
    if dataset.text:
        return "lstm"
    return "mlp" if dataset.name == "digits" or dataset.x_train.shape[1] == 1 else "simple_cnn"


def build_model(config: RunConfig, model: Any, dataset: Dataset) -> Classifier:
    """The classifier of a model's name or module, built as the options say; a `Classifier` is used as it is."""
    if isinstance(model, Classifier):
        if config.neck or config.bn == "group":
            raise UserError("the model that was given has a neck and norms of its own: drop `neck` and `bn=group`.")
        if config.precision != "bfloat16" or models.is_own(model):
            return model
        dtype = TYPES[config.precision]
        return model.clone(dtype=dtype, backbone=model.backbone.clone(dtype=dtype))
    model = models.build(
        model, num_classes=dataset.num_classes, image_shape=dataset.x_train.shape[1:], text=dataset.text,
        norm="group" if config.bn == "group" else "batch",
        dtype=TYPES[config.precision] if config.precision == "bfloat16" else None,
    )  # fmt: skip
    if config.bn == "group" and models.uses_batch_norm(model, dataset.x_train.shape[1:]):
        raise UserError("`bn=group` leaves the model's own batch norms: its class must take the argument norm, a name.")
    return model.clone(neck=config.neck) if config.neck else model


def local_training(config: RunConfig, method: Method) -> Local:
    """The options of local training."""
    shared = {field.name: getattr(config, field.name) for field in fields(Local) if hasattr(config, field.name)}
    clip = method.traits().clip if config.grad_clip == "method" else config.grad_clip
    clip = None if clip in (None, "none") else float(clip)
    return Local(**shared | {"epochs": config.local_epochs or 1, "clip": clip, "lr_steps": rounds_of(config.lr_steps)})


def public_images(config: RunConfig, federation: Federation) -> np.ndarray:
    """Unlabelled images [N, H, W, channels] in the shape of the private ones; colours are averaged for grey ones.

    Raises:
      UserError: no data set is named, none is built in for these images, or there are no public images of their shape.
    """
    name, samples = _public_set(config)
    shape = federation.image_shape
    if shape[0] != shape[1] or shape[2] not in (1, 3) or federation.dataset.text:
        private = "a text" if federation.dataset.text else f"images of {'x'.join(map(str, shape))}"
        raise UserError(
            f"public images are square with 1 or 3 channels, and the clients have {private}: choose another method."
        )
    images = load_public(name, config.data_dir, samples=samples, seed=config.seed, side=shape[0])
    return images if shape[2] == 3 else np.round(images.mean(-1, keepdims=True)).astype(np.uint8)


def public_outputs(config: RunConfig, method: Method) -> int:
    """N, public images that a client sends outputs for in a round; if by batch, those of whole batches in every pass.

    Raises:
      UserError: the method needs public images, and no data set of them is named.
    """
    traits = method.traits()
    if not traits.needs_public:
        return 0
    _, samples = _public_set(config)
    if traits.exchange == "never" or traits.targets == "round":
        return samples
    batch = min(config.public_batch, samples)
    return samples // batch * batch * (getattr(method, "public_epochs", None) or 1)


def public_labels(config: RunConfig) -> np.ndarray:
    """Labels [N] of the public images; UserError if they have none."""
    name, samples = _public_set(config)
    return load_public_labels(name, config.data_dir, samples=samples, seed=config.seed)


def _public_set(config: RunConfig) -> tuple[str, int]:
    """The name of the public images' data set, and how many of them there are."""
    name = config.public or ("digits_public" if config.dataset == "digits" and config.task is None else None)
    if name is None:
        raise UserError(
            "this method needs unlabelled public images: name a data set with `public`, as `public=cifar10`."
        )
    return name, config.public_samples or (1000 if name == "digits_public" else 5000)
