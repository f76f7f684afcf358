"""Simulations on the made-up federation of `fedjax_pcdd.testing`; equal ones share their compiled programs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd import models
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.federation import hold_out
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.groups import Groups, Public
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods import METHODS, Context
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.models.resnet import ResNet
from fedjax_pcdd.testing import CLASSES as CLASSES
from fedjax_pcdd.testing import OWNED as OWNED
from fedjax_pcdd.testing import SIZES as SIZES
from fedjax_pcdd.testing import federation as federation
from fedjax_pcdd.testing import public_images as public_images
from fedjax_pcdd.testing import train as train

PLAIN = Pipeline()

_first: dict[Any, Simulation] = {}


def shared(simulated: Simulation) -> Simulation:
    """The simulation, with the compiled programs of an earlier one that differs from it only in numbers."""
    numbers = (simulated.methods, simulated.hyper, simulated.data, simulated.keys)
    types, structure = jax.tree.flatten(jax.tree.map(jax.typeof, numbers))
    size = (simulated.cohort_size, simulated.capacity, simulated.execution.client_state)
    earlier = _first.setdefault((simulated.program, structure, tuple(types), size), simulated)
    for target, source in ((simulated, earlier), (simulated.evaluator, earlier.evaluator)):
        vars(target).update({name: value for name, value in vars(source).items() if hasattr(value, "lower")})
    return simulated


def forget():
    """Drop all cached simulations."""
    for clear in (simulation.cache_clear, groups.cache_clear, _first.clear):
        clear()


def options(**given: Any) -> dict[str, Any]:
    """Arguments of `Simulation`: those that are fields of `Execution` are gathered in one."""
    execution = {field.name: given.pop(field.name) for field in dataclasses.fields(Execution) if field.name in given}
    return given | {"execution": Execution(**execution)}


@functools.cache
def simulation(
    name="fedavg", *, lanes=2, cohort=3, model="mlp", seed=0, method=None, batch_size=8, last_batch="drop",
    norm="batch", epochs=2, weights="method", local_statistics=False, momentum=0.9, clip=None,
    client_state="device", lr=0.05, noise=40, pipeline=PLAIN, eval_batch=500, optimizer="sgd",
    block=None, dtype=jnp.float32, unowned=None, held=False, **hyper,
):  # fmt: skip
    """A simulation of one method on the toy federation; equal arguments share one, with its compiled programs."""
    toy_federation = federation(noise=noise, unowned=unowned)
    toy_federation = hold_out(toy_federation, 0.3, 0) if held else toy_federation
    method = METHODS[name](**hyper) if method is None else method
    if isinstance(model, str):
        model = models.build(model, num_classes=CLASSES, image_shape=toy_federation.image_shape, norm=norm)
    local = Local(epochs, batch_size, last_batch, optimizer, lr, momentum, 1e-4, clip)
    simulated = Simulation(
        method.build(model), [Experiment(toy_federation, method, local, seed)], pipeline=pipeline, cohort=cohort,
        rounds=3, weights=weights, local_statistics=local_statistics,
        execution=Execution(
            lanes=lanes, client_state=client_state, eval_batch=eval_batch, block=block, dtype=dtype, param_dtype=dtype
        ),
    )  # fmt: skip
    return shared(simulated)


def narrow_resnet(norm="batch"):
    """A residual network with batch norm that compiles fast."""
    classifier = models.build("mlp", num_classes=CLASSES, image_shape=(5, 5, 1))
    return classifier.clone(backbone=ResNet((1,), width=4, norm=norm))


def architectures(*necks: int) -> list:
    """An MLP for each of the five clients; those with equal necks have the same architecture."""
    classifier = models.build("mlp", num_classes=CLASSES, image_shape=(5, 5, 1))
    return [classifier.clone(neck=neck) for neck in necks]


@functools.cache
def groups(
    name="fedmd", *, necks=(0, 1, 0, 1, 0), lanes=2, method=None, parts=None, images=21, batch=8, seed=0, epochs=2,
    batch_size=8, last_batch="keep", optimizer="adam", lr=1e-3, weight_decay=0.0, own_epochs=None, public=PLAIN,
    block=None, dtype=jnp.float32, labels=None, clip=None, **hyper,
):  # fmt: skip
    """Participants on the toy federation, by default of two architectures; equal arguments share one table."""
    method = METHODS[name](**hyper) if method is None else method
    local = Local(epochs, batch_size, last_batch, optimizer, lr, 0.9, weight_decay, clip)
    table = Groups(
        architectures(*necks), parts or federation(), method, local, seed=seed, epochs=own_epochs,
        public=Public(public_images(images), public, batch), pipeline=PLAIN,
        public_labels=None if labels is None else np.array(labels), rounds=3,
        execution=Execution(lanes=lanes, block=block, dtype=dtype, param_dtype=dtype),
    )  # fmt: skip
    for group in table.groups:
        shared(group)
    return table


def context(**known: Any) -> Context:
    """A context for which a test gives only what its hook reads; the other fields are None."""
    fields: dict[str, Any] = dict.fromkeys(Context._fields)
    return Context(**fields | {"hyper": Local()} | known)
