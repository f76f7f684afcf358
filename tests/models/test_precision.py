"""What --precision changes, and what it leaves in float32."""

import dataclasses
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine.devices import TYPES, products
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.models.cnn import simple_cnn
from fedjax_pcdd.models.resnet import ResNet

CLASSES, CLIENTS, SAMPLES_PER_CLIENT = 4, 2, 16
PRECISIONS = ("float32", "tf32", "bfloat16")


@functools.cache
def federation() -> Federation:
    """Two clients with images [16, 16, 3] that a small network tells apart."""
    rng = np.random.default_rng(0)
    labels = np.tile(np.arange(CLASSES), CLIENTS * SAMPLES_PER_CLIENT // CLASSES)
    means = np.array([[40, 40, 40], [220, 40, 40], [40, 220, 40], [220, 220, 220]]).reshape(CLASSES, 1, 1, 3)
    images = np.clip(means[labels] + rng.normal(0, 30, (len(labels), 16, 16, 3)), 0, 255).astype(np.uint8)
    lists = tuple(np.split(np.arange(len(labels)), CLIENTS))
    return Federation(Dataset("colours", images, labels, images, labels, CLASSES), Partition(lists, lists))


def network(name: str, precision: str) -> Classifier:
    dtype = TYPES[precision] if precision == "bfloat16" else None
    backbone = simple_cnn(dtype=dtype) if name == "w1" else ResNet((1, 1), width=4, norm="batch", dtype=dtype)
    return Classifier(backbone, CLASSES, dtype=dtype, precision=products(precision))


def simulation(name: str, precision: str, method="fedmr", lanes=1) -> Simulation:
    chosen = METHODS[method]()
    local = Local(2, 8, "drop", "sgd", 0.05, 0.9, 1e-4, None)
    return Simulation(
        chosen.build(network(name, precision)), [Experiment(federation(), chosen, local, 0)],
        pipeline=Pipeline((0.5,), (0.25,)), cohort=CLIENTS, rounds=3,
        execution=Execution(lanes=lanes, dtype=TYPES[precision]),
    )  # fmt: skip


@functools.cache
def trained(name: str, precision: str):
    """Losses of five rounds, correct predictions after them, and the last state."""
    simulated = simulation(name, precision)
    state, losses = simulated.start(), []
    for round in range(5):
        state, report = simulated.step(state, round)
        losses.append(float(np.mean(report.loss)))
    return np.array(losses), np.asarray(simulated.evaluate(state).generic).sum(), state


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["w1", pytest.param("resnet", marks=pytest.mark.slow)])
def test_tf32_is_float32_on_a_cpu(name):
    """A CPU has no shorter products of float32, so the programs are the same."""
    jax.tree.map(np.testing.assert_array_equal, trained(name, "tf32")[0], trained(name, "float32")[0])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["w1", "resnet"])
def test_a_model_trains_in_bfloat16_as_in_float32(name):
    """bfloat16 rounds by up to 2^-9 = 0.2 %; a loss, a mean over many samples and layers, moves by few such errors."""
    (exact_losses, exact_correct, _), (short_losses, short_correct, _) = (
        trained(name, "float32"),
        trained(name, "bfloat16"),
    )
    assert exact_losses[-1] < 0.6 * exact_losses[0]  # it has learned something
    np.testing.assert_allclose(short_losses, exact_losses, rtol=0.02, atol=0.02)
    assert abs(int(exact_correct) - int(short_correct)) <= 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["w1", "resnet"])
def test_state_kept_between_rounds_stays_float32_in_bfloat16(name):
    """Parameters, batch-norm statistics, prototypes and what clients keep."""
    floats = [x for x in jax.tree.leaves(trained(name, "bfloat16")[2]) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}


def lowered(simulated: Simulation, platform: str = "cuda") -> Counter:
    """(element type, precision) of each matrix product and convolution in the round as it is lowered for a device."""
    arguments = simulated.arguments(simulated.start(), 0, simulated.plan(0))
    text = simulated.round.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line or "stablehlo.convolution" in line]
    return Counter(_type_and_precision(line) for line in lines)


def _type_and_precision(line: str) -> tuple[str, str]:
    operand = re.search(r": \(tensor<(?:\d+x)*(\w+)>", line)
    precision = re.search(r"(HIGHEST|HIGH|DEFAULT)\b", line)
    assert operand, line
    return operand[1], precision[1] if precision else "DEFAULT"


@pytest.fixture
def gpu(monkeypatch):
    """Trace as on a GPU, without reusing what was traced for the CPU; nothing runs there."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.thorough
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("name", ["w1", "resnet"])
def test_products_on_a_gpu_have_the_requested_precision(gpu, name, lanes):
    exact, tf32, short = (lowered(simulation(name, precision, lanes=lanes)) for precision in PRECISIONS)
    assert set(exact) == {("f32", "HIGHEST")}
    assert set(tf32) == {("f32", "HIGHEST"), ("f32", "DEFAULT")}  # TF32 is the default of a GPU
    assert {product for product in short if product[0] == "f32"} == {("f32", "HIGHEST")}
    # The same products of the model, forward and backward, take the shorter type in TF32 and in bfloat16.
    shortened = sum(count for (kind, _), count in short.items() if kind == "bf16")
    assert tf32["f32", "DEFAULT"] == shortened >= 3 * 4 - 1
    assert exact.total() == tf32.total() == short.total()


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedproto", "fedgela", "moon", "fedgen"])
def test_no_product_of_a_method_has_the_default_precision_of_the_device(gpu, method):
    assert set(lowered(simulation("w1", "float32", method))) == {("f32", "HIGHEST")}


@pytest.mark.thorough
def test_a_tpu_takes_three_products_of_bfloat16_for_tf32(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert set(lowered(simulation("w1", "tf32"), "tpu")) == {("f32", "HIGHEST"), ("f32", "HIGH")}


def test_both_models_of_a_pair_have_the_same_precision():
    method = dataclasses.replace(METHODS["fml"](), meme="simple_cnn")
    pair = method.build(network("w1", "tf32"))
    assert pair.private.precision == pair.meme.precision == products("tf32")
