"""Ditto: each client has a model of its own, tied to the received global one, which is trained by plain FedAvg.

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, algorithm 1.
Sent: as FedAvg. A client keeps its own model and that model's running statistics.
Both models see the same batches and take one step each, with optimisers that are new each round and clipping of each by
itself; the proximal term, which is inside the clipping, pulls towards w^t as received. The mean is weighted by n_k (the
published code weighs equally, `weights=uniform`); lambda is one number, not chosen by each client on held-out data.
The recorded loss is the sum of both, without the proximal term; with `personal_epochs`, where the own model has epochs
of its own after the global one's and each step costs one model's, the mean over the steps of both.
"""

from typing import Any

import jax
from flax import struct

from fedjax_pcdd.methods.method import Context, Traits, hyperparameter
from fedjax_pcdd.methods.personal_copy import PERSONAL, PersonalCopy, copy_of, without_copy
from fedjax_pcdd.trees import squared_distance, where


@struct.dataclass
class Ditto(PersonalCopy):
    """L = CE(w) + CE(v) + (lambda / 2) * ||v - w^t||^2."""

    lam: float = hyperparameter(1.0, symbol="lambda", help="weight of the distance to the global model", low=0.0)

    personal_epochs: int | None = hyperparameter(
        None,
        help="epochs of the own model after those of the global one; by default both see the same batches",
        low=1,
        static=True,
    )

    def traits(self):
        """PA is that of the own models; each model is clipped by itself."""
        more = self.personal_epochs or 0
        return Traits("Li et al., ICML 2021", target="both", fine_tunes=False, apart=(PERSONAL,), more_epochs=more)

    def configure(self, setting, hyper):
        """The steps of the proximal term must contract; without it the own model learns alone."""
        lr, momentum, lam = float(hyper.lr), float(hyper.momentum), float(self.lam)
        if lam == 0:
            return self, ["Ditto with `lam=0` trains own models that never see the global one: choose `lam` above 0."]
        if lr * lam <= 2 * (1 + momentum):
            return self, []
        limit = f"{2 * (1 + momentum) / lr:.3g}"
        return self, [
            f"Ditto with `lam={lam:g}` diverges at `lr={lr:g}`: choose `lam` below {limit}, or a smaller `lr`."
        ]

    def _own(self, context: Context) -> Any:
        """Whether this step is one of the own model's epochs, scalar."""
        return context.epoch >= context.epochs - (self.personal_epochs or 0)

    def trainable(self, params, context):
        """Both, or the one whose epoch it is."""
        if self.personal_epochs is None:
            return None
        own = self._own(context)
        moving = {name: own if name == PERSONAL else ~own for name in params}
        return {name: jax.tree.map(lambda _, m=moving[name]: m, part) for name, part in params.items()}

    def loss(self, variables, batch, context):
        """The losses of both models, whose gradients do not mix; or that of the one whose epoch it is."""
        if self.personal_epochs is not None:
            return self._loss_of_one(variables, batch, context)
        value, state = super().loss(without_copy(variables), batch, context)
        own, statistics = super().loss(copy_of(variables), batch, context)
        return value + own, {**state, PERSONAL: statistics}

    def _loss_of_one(self, variables: Any, batch: Any, context: Context) -> tuple[jax.Array, Any]:
        """The loss of the model whose epoch it is, and both models' statistics."""
        own, v, w = self._own(context), copy_of(variables), without_copy(variables)
        value, state = super().loss(where(own, v, w), batch, context)
        statistics = {name: where(own, tree, v[name]) for name, tree in state.items()}
        return value, {**{name: where(own, w[name], tree) for name, tree in state.items()}, PERSONAL: statistics}

    def regulariser(self, params, context):
        """(lambda / 2) * ||v - w^t||^2, a scalar."""
        received = {name: tree for name, tree in context.start["params"].items() if name != PERSONAL}
        return 0.5 * self.lam * squared_distance(params[PERSONAL], received)
