"""CCVR's last two rounds alone, for a global model that any method has trained (`calibrate=ccvr`).

Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data", NeurIPS 2021.
"""

from typing import ClassVar

import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.methods.gaussian_head import MOMENTS, SHIFT, GaussianHead
from fedjax_pcdd.methods.method import Summary, Traits
from fedjax_pcdd.methods.parts import moving
from fedjax_pcdd.trees import zeros_like


@struct.dataclass
class Calibration(GaussianHead):
    """Round 0 computes the shift, any later one calibrates; the given model does not change, bit for bit."""

    remedies: ClassVar = tuple(
        f"use `method=ccvr` with {option}"
        for option in ("`covariance=diagonal`", "`softmax=present`", "a smaller `drawn`")
    )

    def traits(self):
        """Every round makes a pass over the local data for the sums."""
        return Traits(summary=Summary())

    def stage(self, context):
        """The shift in round 0, then the moments."""
        return jnp.where(context.round == 0, SHIFT, MOMENTS)

    def trainable(self, params, context):
        """Nothing moves."""
        return moving(params, "head", False, others=False)

    def local_update(self, evaluate, step, variables, batch, context):
        """Nothing is evaluated, and nothing moves."""
        return jnp.zeros(()), {}, step(zeros_like(variables["params"]))

    def further_models(self, server):
        """The calibrated model, as `ccvr`."""
        return {"ccvr": self.calibrated_model(server)}
