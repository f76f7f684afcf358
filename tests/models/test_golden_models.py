"""Models against the golden vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_vectors import cases

from fedjax_pcdd.models import build, etf_from, forward
from fedjax_pcdd.models.layers import BatchNorm

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def simple_cnn_outputs(g):
    """The outputs with the weights of a golden file, which has kernels as OIHW and linear weights as (out, in)."""
    layers = {"conv1": (2, 3, 1, 0), "conv2": (2, 3, 1, 0), "fc1": (1, 0), "fc2": (1, 0), "cls": (1, 0)}
    layers = {
        name: {
            "kernel": jnp.asarray(g[f"par_{name}_weight"].transpose(axes), jnp.float64),
            "bias": jnp.asarray(g[f"par_{name}_bias"], jnp.float64),
        }
        for name, axes in layers.items()
    }
    head = layers.pop("cls")
    x = jnp.asarray(g["in_x_nchw"].transpose(0, 2, 3, 1))
    classes = len(g["par_cls_bias"])
    model = build("simple_cnn", num_classes=classes, image_shape=x.shape[1:], param_dtype=jnp.float64)
    return forward(model, {"params": {"backbone": layers, "head": head}}, x, train=True)[0]


@pytest.mark.parametrize("g", cases("simplecnn"))
def test_simple_cnn_features(g, x64):
    np.testing.assert_allclose(simple_cnn_outputs(g).features, g["out_h"], **CLOSE)


@pytest.mark.parametrize("g", cases("simplecnn"))
def test_simple_cnn_logits(g, x64):
    np.testing.assert_allclose(simple_cnn_outputs(g).logits, g["out_logits"], **CLOSE)


class BatchNormCase:
    """A batch norm layer on the inputs of a golden file, in NHWC."""

    def __init__(self, g):
        self.layer = BatchNorm(epsilon=float(g["par_eps"]), momentum=float(g["par_momentum"]), param_dtype=jnp.float64)
        self.x, self.cotangent = (jnp.asarray(nhwc(g[key])) for key in ("in_x_nchw", "in_cotangent"))
        self.params = {"scale": jnp.asarray(g["in_scale"]), "bias": jnp.asarray(g["in_bias"])}
        fresh = self.layer.init(jax.random.key(0), self.x, train=False)
        self.fresh = fresh["batch_stats"]

    def train(self, x):
        variables = {"params": self.params, "batch_stats": self.fresh}
        out, updated = self.layer.apply(variables, x, train=True, mutable=["batch_stats"])
        return out, updated["batch_stats"]

    def evaluate(self, statistics):
        return self.layer.apply({"params": self.params, "batch_stats": statistics}, self.x, train=False)


def nhwc(array):
    return array.transpose(0, 2, 3, 1)


@pytest.mark.parametrize("g", cases("batchnorm"))
def test_batch_norm_in_training(g, x64):
    case = BatchNormCase(g)
    np.testing.assert_allclose(case.train(case.x)[0], nhwc(g["out_train"]), **CLOSE)


@pytest.mark.parametrize("g", cases("batchnorm"))
def test_batch_norm_gradient(g, x64):
    case = BatchNormCase(g)
    _, pullback = jax.vjp(lambda x: case.train(x)[0], case.x)
    np.testing.assert_allclose(pullback(case.cotangent)[0], nhwc(g["out_grad_x"]), **CLOSE)


@pytest.mark.parametrize("g", cases("batchnorm"))
def test_batch_norm_running_statistics(g, x64):
    case = BatchNormCase(g)
    statistics = case.train(case.x)[1]
    np.testing.assert_allclose(statistics["mean"], g["out_running_mean"], **CLOSE)
    np.testing.assert_allclose(statistics["var"], g["out_running_var"], **CLOSE)


@pytest.mark.parametrize("g", cases("batchnorm"))
def test_batch_norm_in_evaluation(g, x64):
    case = BatchNormCase(g)
    out = case.evaluate(case.train(case.x)[1])
    np.testing.assert_allclose(out, nhwc(g["out_eval_after"]), **CLOSE)


@pytest.mark.parametrize("g", cases("fedgela"))
def test_etf_from_a_matrix_is_that_of_the_golden_file(g):
    np.testing.assert_allclose(etf_from(g["in_a"]), g["out_M"], **CLOSE)


@pytest.mark.parametrize("g", cases("fedgela"))
def test_etf_factor_is_the_published_one(g):
    classes = g["in_a"].shape[1]
    centre = np.eye(classes) - 1 / classes
    expected = np.sqrt(classes / (classes - 1)) * g["in_qr_P"] @ centre
    np.testing.assert_allclose(etf_from(g["in_a"]), expected, **CLOSE)
