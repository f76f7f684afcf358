"""What a user should know before a run begins: options that have no effect with the others, the method or the model."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_pcdd import models
from fedjax_pcdd.data.dataset import LOOKED_AT, Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Lists
from fedjax_pcdd.data.partition import asked_for
from fedjax_pcdd.methods import Traits
from fedjax_pcdd.methods.method import Method
from fedjax_pcdd.models.classifier import Classifier, features_type
from fedjax_pcdd.training.config import RunConfig, rounds_of

PERCENT = 100  # with fewer samples, one of them is more than a percentage point
Reader = tuple[str, tuple[Any, ...]]  # an option that another depends on, and the values of it that read the other


def unused(config: RunConfig, traits: Traits) -> list[str]:
    """A sentence for each option without effect, because it is read only under another value of another option."""
    readers = _readers(config, traits)
    changed = {name: value for name in readers if (value := getattr(config, name)) != getattr(RunConfig, name)}
    return _too_late(config) + [
        _no_effect(name, value, other, used)
        for name, value in changed.items()
        for other, effective in [readers[name]]
        if (used := getattr(config, other)) not in effective and not (other == "partition" and config.task)
    ]


def idle(method: Method) -> list[str]:
    """A sentence for each hyper-parameter without effect, because another one has no value that it `needs`."""
    return [
        _no_effect(field.name, value, other, used)
        for field in dataclasses.fields(method)
        for other, effective in (field.metadata.get("needs") or {}).items()
        if (value := getattr(method, field.name)) != field.default and (used := getattr(method, other)) not in effective
    ]


def _no_effect(name: str, value: Any, other: str, used: Any) -> str:
    shown = value if isinstance(value, str | None) else f"{value:g}"
    return f"`{name}={shown}` has no effect " + (f"with `{other}={used}`." if used else f"without `{other}`.")


def too_few(config: RunConfig, federation: Federation) -> list[str]:
    """A sentence if the best round is chosen on so few validation samples that rounds are hardly told apart."""
    if config.select_on != "validation" or federation.validation is None:
        return []
    count = len(federation.validation.flat)
    end = "hardly tells rounds apart: raise it."
    return [f"`validation={config.validation:g}` keeps {count} samples in all, which {end}"] * (count < PERCENT)


def twice(federation: Federation) -> list[str]:
    """A sentence if a client has a sample twice, as in lists of labels, or shares it; none if all are dealt twice."""
    lists = Lists.of(federation.partition.train)
    dealt = np.bincount(lists.flat)
    if set(dealt[dealt > 0]) == {2}:  # as by `doubled`
        return []
    owners = np.repeat(np.arange(len(lists)), lists.sizes)
    order = np.lexsort((lists.flat, owners))
    again = (np.diff(lists.flat[order]) == 0) & (np.diff(owners[order]) == 0)
    end = "correct the lists, unless that is meant."
    if again.any():
        first = int(owners[order][1:][again][0])
        return [f"`partition` gives client {first} a sample more than once, which then counts as often: {end}"]
    shared = np.flatnonzero(dealt > 1)
    return [
        f"`partition` gives samples to several clients ({len(shared)} in all, as sample {n}): {end}" for n in shared[:1]
    ]


def only_tested(dataset: Dataset) -> list[str]:
    """A sentence if classes have tests and no training samples at all, as where the two were numbered apart."""
    trained, tested = (np.bincount(y, minlength=dataset.num_classes) > 0 for y in (dataset.y_train, dataset.y_test))
    classes = np.flatnonzero(tested & ~trained)
    which = ", ".join(map(str, classes[:5])) + " ..." * (len(classes) > 5)
    return [f"data set '{dataset.name}' has tests, but no training samples, of class {which}."] * bool(len(classes))


def on_other_scale(dataset: Dataset) -> list[str]:
    """A sentence if clients' images are numbers outside of [0, 1], to which public images are scaled."""
    x = dataset.x_train[:LOOKED_AT] if dataset.x_train.dtype == np.float32 else np.zeros(1)
    low, high = x.min(), x.max()
    sentence = f"`public` images reach models scaled to [0, 1], the clients' run from {low:g} to {high:g}: scale these."
    return [sentence] * bool(low < 0 or high > 1)


def _too_late(config: RunConfig) -> list[str]:
    """Sentences about what would take place in rounds that the run does not have."""
    late = [str(step) for step in rounds_of(config.lr_steps) if step >= config.rounds]
    sentences = [f"`lr_steps`: a step after {' or '.join(late)} of {config.rounds} rounds has no effect."] * bool(late)
    if config.profile and config.rounds == 1:
        sentences.append("`profile` has no effect on a single round: the second and third are traced.")
    return sentences


def _readers(config: RunConfig, traits: Traits) -> dict[str, Reader]:
    extended = "extended_dirichlet"
    public = (config.method,) if traits.needs_public or config.task else ()  # methods of a task share its images
    exchanged = (config.method,) if traits.exchange != "never" or config.task else ()
    pretrains = config.pretrain_epochs or traits.transfer_epochs or config.task  # a task has epochs of its own
    parameters = asked_for(config.partition)

    def of_partitions(*kinds: str, parameter: str) -> Reader:
        partitions = kinds if parameters is None else (config.partition,) if parameter in parameters else ()
        return "partition", partitions

    def where_given(name: str) -> Reader:
        return name, (value,) if (value := getattr(config, name)) else ()

    readers = {
        "beta": of_partitions("dirichlet", extended, "quantity", parameter="beta"),
        "classes_per_client": of_partitions("pcdd", extended, parameter="classes_per_client"),
        "doubled": of_partitions("pcdd", parameter="doubled"), "retry": of_partitions("dirichlet", parameter="retry"),
        "min_samples": of_partitions("dirichlet", "quantity", parameter="min_size"),
        "data_memory": ("data", ("auto", "stream")),
        "momentum": ("optimizer", ("sgd",)), "focal_gamma": ("loss", ("focal",)), "augment": ("task", (None,)),
        "lr_decay": where_given("lr_steps"), "task_split": where_given("task"),
        "track_every": where_given("track"), "track_local": where_given("track"),
        "patience": where_given("coordinator"),
        "public": ("method", public), "public_samples": ("method", public), "public_batch": ("method", exchanged),
        "pretrain_batch_size": ("pretrain_epochs", (config.pretrain_epochs,) if pretrains else ()),
    }  # fmt: skip
    if config.partition == "dirichlet" and not config.retry:
        readers["min_samples"] = "retry", (True,)
    if config.optimizer == "sgd":
        readers["optimizer_state"] = where_given("momentum")
    if traits.epochs is not None and config.local_epochs is not None:
        readers["local_epochs"] = "method", ()
    if config.fine_tune_epochs and not traits.fine_tunes:
        readers["fine_tune_epochs"] = "method", ()
    return readers


def about_neck(neck: int, model: Any) -> list[str]:
    """A sentence if the method made another neck than the option `neck` asks for; else none, as for FML's pair."""
    actual = getattr(model, "neck", neck)
    return [] if neck in (0, actual) else [f"`neck={neck}` has no effect: the method chooses the neck."]


def about_precision(precision: str, model: Classifier, image_shape: tuple[int, ...]) -> list[str]:
    """A sentence if the user's model does not compute in bfloat16 although the option says so."""
    if precision != "bfloat16" or not models.is_own(model) or features_type(model, image_shape) == jnp.bfloat16:
        return []
    advice = "give its layers dtype=jnp.bfloat16, or drop the option"
    return [f"`precision=bfloat16` reaches the images alone: the features of this model are float32; {advice}."]


def about_rounding(precision: str, dataset: Dataset) -> list[str]:
    """A sentence if samples hold whole numbers, as codes of words or columns are, that bfloat16 rounds to others."""
    x = dataset.x_train[:LOOKED_AT]
    if precision != "bfloat16" or x.dtype != np.float32:
        return []
    rounded = (x == np.rint(x)) & (x.astype(jnp.bfloat16) != x)
    sentence = "`precision=bfloat16` rounds whole numbers above 256 that samples hold: scale them, or drop the option."
    return [sentence] * bool(rounded.any())


def about_norms(bn: str, model: Classifier, image_shape: tuple[int, ...]) -> list[str]:
    """A sentence if the option `bn` has nothing to change in the model; else no sentence."""
    changes = {
        "average": True,
        "group": models.normalises(model, image_shape),
        "local": models.uses_batch_norm(model, image_shape),
        "local-layers": bool(models.normalisation_params(model, image_shape)),
    }
    return [] if changes[bn] else [f"`bn={bn}` has no effect: the model has no such norms."]
