"""FedAdagrad, FedAdam, FedYogi: an adaptive optimiser takes the server's model minus the clients' mean as a gradient.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, algorithm 2.
Sent: as in FedAvg, or as X in `X+adagrad`, `X+adam`, `X+yogi`. Clients keep nothing, the server both moments (2P).
Follows the paper: v starts at tau^2, without bias correction; the rules of optax and Keras are options (`server_form`).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import hyperparameter
from fedjax_pcdd.methods.server_moments import YOGI_START, Form, Rule, scale_by_moments, without_frozen
from fedjax_pcdd.methods.server_optimised import ServerOptimised


@struct.dataclass
class Adaptive(ServerOptimised):
    """w <- w - eta m / (sqrt(v) + tau)."""

    paper = "Reddi et al., ICLR 2021"

    server_lr: float = hyperparameter(0.1, symbol="eta", help="learning rate of the server", low=0.0)
    server_beta1: float = hyperparameter(0.9, symbol="beta_1", help="decay of the server's first moment", low=0.0)
    server_tau: float = hyperparameter(1e-3, symbol="tau", help="adaptivity: added to the root of v", above=0.0)
    server_form: Form = hyperparameter("paper", help="the printed rule, or that of optax or Keras", static=True)
    server_v0: float | None = hyperparameter(
        None, symbol="v_0", help="form paper: v at first, by default tau^2", low=0.0
    )

    def configure(self, setting, hyper):
        """The default of v_0; advice on steps that are too large for any model."""
        method, advice = super().configure(setting, hyper)
        if self.server_v0 is not None and self.server_form != "paper":
            raise UserError(f"`server_v0` is of `server_form=paper`: drop it, or `server_form={self.server_form}`.")
        if self.server_lr >= 1:
            problem = (
                f"`server_lr={self.server_lr:g}` lets an adaptive server move every parameter by about as much a round"
            )
            advice = [*advice, f"{problem}: lower it, to 0.1 or less."]
        v0 = self.server_tau**2 if self.server_v0 is None else self.server_v0
        return (dataclasses.replace(method, server_v0=v0) if self.server_form == "paper" else method), advice

    def _by_moments(self, rule: Rule, start: Any = (), beta2: Any = None) -> optax.GradientTransformation:
        """The rule in form paper, or in form keras with moments that start at `start`."""
        if self.server_form == "keras":
            return scale_by_moments(rule, self.server_beta1, self.server_tau, start, beta2)
        v0 = self.server_tau**2 if self.server_v0 is None else self.server_v0
        return scale_by_moments(rule, self.server_beta1, self.server_tau, (0.0, v0))


@struct.dataclass
class FedAdagrad(Adaptive):
    """v <- v + g^2."""

    server_beta1: float = hyperparameter(0.0, symbol="beta_1", help="decay of the server's first moment", low=0.0)

    def configure(self, setting, hyper):
        """UserError for what Adagrad cannot have; Keras's correction needs a second moment that decays."""
        if self.server_form == "keras":
            raise UserError("`server_form=keras` has no Adagrad: choose `server_form=paper` or `server_form=optax`.")
        if self.server_form == "optax" and self.server_beta1 > 0:
            raise UserError("optax's Adagrad has no first moment: drop `server_beta1`, or `server_form=optax`.")
        return super().configure(setting, hyper)

    def server_rule(self):
        """The printed rule, or optax's, whose sum starts at 0.1."""
        if self.server_form == "optax":
            return optax.scale_by_rss(0.1, self.server_tau)
        return self._by_moments(lambda v, square: v + square)


@struct.dataclass
class FedAdam(Adaptive):
    """v <- beta2 v + (1 - beta2) g^2."""

    server_beta2: float = hyperparameter(0.99, symbol="beta_2", help="decay of the server's second moment", low=0.0)

    def server_rule(self):
        """The printed rule, optax's, or Keras's."""
        beta2 = self.server_beta2
        if self.server_form == "optax":
            return optax.scale_by_adam(self.server_beta1, beta2, eps=self.server_tau)
        return self._by_moments(lambda v, square: beta2 * v + (1 - beta2) * square, (0.0, 0.0), beta2)


@struct.dataclass
class FedYogi(FedAdam):
    """v <- v - (1 - beta2) g^2 sign(v - g^2)."""

    def server_rule(self):
        """The printed rule, optax's, or Keras's; in the latter two, whose moments start above 0, frozen layers stay."""
        beta2 = self.server_beta2
        if self.server_form == "optax":
            return without_frozen(optax.scale_by_yogi(self.server_beta1, beta2, eps=self.server_tau))

        def rule(v, square):
            return v - (1 - beta2) * square * jnp.sign(v - square)

        optimiser = self._by_moments(rule, (YOGI_START, YOGI_START), beta2)
        return without_frozen(optimiser) if self.server_form == "keras" else optimiser
