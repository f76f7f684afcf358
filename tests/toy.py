"""Simulations on the made-up federation of `fedjax_pcdd.testing`; equal ones are shared, with what they compiled."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd import models
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.groups import Groups, Public
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.round import Simulation
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
    """The simulation, with the compiled programs of an earlier one that differs from it in numbers alone."""
    numbers = (simulated.methods, simulated.hyper, simulated.data, simulated.keys)
    types, structure = jax.tree.flatten(jax.tree.map(jax.typeof, numbers))
    size = (simulated.cohort_size, simulated.capacity, simulated.execution.client_state)
    first = _first.setdefault((simulated.program, structure, tuple(types), size), simulated)
    for own, compiled in ((simulated, first), (simulated.evaluator, first.evaluator)):
        vars(own).update({name: held for name, held in vars(compiled).items() if hasattr(held, "lower")})
    return simulated


def forget():
    """Let go of all simulations."""
    for kept in (simulation.cache_clear, groups.cache_clear, _first.clear):
        kept()


def options(**given: Any) -> dict[str, Any]:
    """What `Simulation` takes, those among the given that are fields of its `Execution` as one."""
    own = {field.name: given.pop(field.name) for field in dataclasses.fields(Execution) if field.name in given}
    return given | {"execution": Execution(**own)}


@functools.cache
def simulation(
    name="fedavg", *, lanes=2, cohort=3, model="mlp", seed=0, method=None, batch_size=8, last_batch="drop",
    norm="batch", epochs=2, weights="method", local_statistics=False, momentum=0.9, clip=None,
    client_state="device", lr=0.05, noise=40, pipeline=PLAIN, eval_batch=500, optimizer="sgd",
    block=None, dtype=jnp.float32, **hyper,
):  # fmt: skip
    """A simulation of one method on the toy federation; equal arguments share one, and what it has compiled."""
    parts = federation(noise=noise)
    method = METHODS[name](**hyper) if method is None else method
    if isinstance(model, str):
        model = models.build(model, num_classes=CLASSES, image_shape=parts.image_shape, norm=norm)
    local = Local(epochs, batch_size, last_batch, optimizer, lr, momentum, 1e-4, clip)
    simulated = Simulation(
        method.build(model), [Experiment(parts, method, local, seed)], pipeline=pipeline, cohort=cohort,
        rounds=3, weights=weights, local_statistics=local_statistics,
        execution=Execution(
            lanes=lanes, client_state=client_state, eval_batch=eval_batch, block=block, dtype=dtype, param_dtype=dtype
        ),
    )  # fmt: skip
    return shared(simulated)


def narrow_resnet(norm="batch"):
    """A residual network with batch norm that compiles fast."""
    plain = models.build("mlp", num_classes=CLASSES, image_shape=(5, 5, 1))
    return plain.clone(backbone=ResNet((1,), width=4, norm=norm))


def architectures(*necks: int) -> list:
    """An mlp for each of the five clients; those with equal necks are one architecture."""
    plain = models.build("mlp", num_classes=CLASSES, image_shape=(5, 5, 1))
    return [plain.clone(neck=neck) for neck in necks]


@functools.cache
def groups(
    name="fedmd", *, necks=(0, 1, 0, 1, 0), lanes=2, method=None, parts=None, images=21, batch=8, seed=0, epochs=2,
    batch_size=8, last_batch="keep", optimizer="adam", lr=1e-3, weight_decay=0.0, own_epochs=None, public=PLAIN,
    block=None, dtype=jnp.float32, labels=None, **hyper,
):  # fmt: skip
    """Participants on the toy federation, two architectures by default; equal arguments share one."""
    method = METHODS[name](**hyper) if method is None else method
    local = Local(epochs, batch_size, last_batch, optimizer, lr, 0.9, weight_decay, None)
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
    """A context of which a test gives only what its hook looks at."""
    fields: dict[str, Any] = dict.fromkeys(Context._fields)
    return Context(**fields | {"hyper": Local()} | known)
