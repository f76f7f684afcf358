"""FedVLS, FedNTD and FedLMD: the received model teaches, and costs one forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pcdd import models
from fedjax_pcdd.losses.masked_distillation import label_masking_distillation
from fedjax_pcdd.methods import METHODS, Method
from fedjax_pcdd.methods.fedlmd import FedLMD
from fedjax_pcdd.methods.fedntd import FedNTD
from fedjax_pcdd.methods.method import Batch, Facts, Keys, Setting
from fedjax_pcdd.models import forward
from fedjax_pcdd.models.classifier import initialise

SHAPE, CLASSES = (8, 8, 1), 4
COUNTS = jnp.asarray([9.0, 0.0, 4.0, 0.0])
BATCH = Batch(
    jnp.asarray(np.random.default_rng(0).normal(size=(6, *SHAPE)), jnp.float32),
    jnp.asarray([0, 0, 2, 0, 2, 0]),
    jnp.ones(6),
)
each_method = pytest.mark.parametrize("name", ["fedvls", "fedntd", "fedlmd"])


def problem(method, *, norm=False):
    """A configured method, its variables, and the context of a client that received others; `norm`: with batch norm."""
    model = models.build("mlp", num_classes=CLASSES, image_shape=SHAPE).clone(feature_norm=norm)
    variables, received = (initialise(model, jax.random.key(k), SHAPE) for k in (0, 1))
    facts = Facts(jnp.zeros((), int), COUNTS, COUNTS.sum(), COUNTS[None])
    keys = Keys.of(jax.random.key(2))
    method, _ = method.configure(Setting(CLASSES, 200, 1, 1, 1, 6, False), None)
    return method, variables, toy.context(model=model, start=received, facts=facts, keys=keys)


def gradient(method, *, norm=False):
    """The gradient of the local objective, and new running statistics."""
    method, variables, context = problem(method, norm=norm)

    def objective(params):
        return method.loss({**variables, "params": params}, BATCH, context)

    return jax.grad(objective, has_aux=True)(variables["params"])


def count_products(function, *arguments):
    """The number of matrix products in a function."""
    return str(jax.make_jaxpr(function)(*arguments)).count("dot_general")


def products_of_a_step(method):
    method, variables, context = problem(method)

    def objective(params, start):
        return method.loss({"params": params}, BATCH, context._replace(start=start))[0]

    return count_products(jax.grad(objective), variables["params"], context.start)


def products_of_a_forward_pass():
    _, variables, context = problem(Method())
    return count_products(lambda v: forward(context.model, v, BATCH.images, train=False)[0].logits, variables)


@each_method
def test_a_step_costs_one_further_forward_pass_and_no_more(name):
    further_products = products_of_a_step(METHODS[name]()) - products_of_a_step(Method())
    assert further_products == products_of_a_forward_pass() > 0


def test_a_teacher_free_step_costs_no_further_pass():
    assert products_of_a_step(FedLMD(teacher_free=True)) == products_of_a_step(Method())


@pytest.mark.thorough
@each_method
@pytest.mark.parametrize("teacher", ["eval", "train"])
def test_running_statistics_are_those_of_the_student_alone(name, teacher):
    _, state = gradient(METHODS[name](teacher=teacher), norm=True)
    _, expected = gradient(Method(), norm=True)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


@pytest.mark.parametrize("teacher", ["eval", "train"])
def test_batch_norm_of_the_teacher_is_in_the_mode_asked_for(teacher):
    method, _, context = problem(FedNTD(teacher=teacher), norm=True)
    outputs, _ = forward(context.model, context.start, BATCH.images, train=teacher == "train")
    np.testing.assert_allclose(method.received_logits(BATCH, context), outputs.logits, 1e-5, 1e-5)


@pytest.mark.parametrize("empty", ["skip", "published"])
def test_fedlmd_treats_samples_without_a_class_to_distil_as_asked(empty):
    method, variables, context = problem(FedLMD(empty=empty))
    counts = jnp.asarray([1.0, 9.0, 9.0, 9.0])  # of the samples with label 0, none has another minority class
    context = context._replace(facts=context.facts._replace(class_counts=counts))
    outputs, _ = forward(context.model, variables, BATCH.images, train=True)
    value = method.penalty(variables, outputs, BATCH, context)
    teacher, majority = method.received_logits(BATCH, context), counts > 7
    expected = label_masking_distillation(teacher, outputs.logits, BATCH.labels, majority, empty=empty)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.thorough
def test_gradient_of_not_true_distillation_is_proportional_to_its_weight():
    gradients = [gradient(FedNTD(beta_ntd=weight))[0]["head"]["bias"] for weight in (0.0, 1.0, 2.0)]
    assert np.any(gradients[1] != gradients[0])
    np.testing.assert_allclose(gradients[2] - gradients[1], gradients[1] - gradients[0], rtol=1e-3, atol=1e-7)


def test_advice_is_given_where_nothing_is_distilled():
    two_classes = Setting(2, 4, 5, 1, 1, 4, False)
    five_classes = two_classes._replace(num_classes=5)
    for method in (FedNTD(), FedLMD()):
        assert "it is FedAvg" in method.configure(two_classes, None)[1][0]
        assert method.configure(five_classes, None)[1] == []
    assert "no effect" in FedLMD(teacher_free=True, teacher="train").configure(five_classes, None)[1][0]
