"""Ditto: each client has a model of its own, tied to the received global one, which is trained by plain FedAvg.

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, algorithm 1.
Sent: as FedAvg. A client keeps its own model and that model's running statistics.
Both models see the same batches and take one step each, with optimisers that are new each round and clipping of each by
itself; the proximal term, which is inside the clipping, pulls towards w^t as received. The mean is weighted by n_k (the
published code weighs equally, `--weights=uniform`); lambda is one number, not chosen by each client on held-out data.
The recorded loss is the sum of both, without the proximal term.
"""

from flax import struct

from fedjax_pcdd.methods.method import Traits, hyperparameter
from fedjax_pcdd.methods.personal_copy import PERSONAL, PersonalCopy, copy_of, without_copy
from fedjax_pcdd.trees import squared_distance


@struct.dataclass
class Ditto(PersonalCopy):
    """L = CE(w) + CE(v) + (lambda / 2) * ||v - w^t||^2."""

    lam: float = hyperparameter(1.0, symbol="lambda", help="weight of the distance to the global model", low=0.0)

    def traits(self):
        """PA is that of the own models; each model is clipped by itself."""
        return Traits("Li et al., ICML 2021", target="both", fine_tunes=False, apart=(PERSONAL,))

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

    def loss(self, variables, batch, context):
        """The losses of both models, whose gradients do not mix."""
        value, state = super().loss(without_copy(variables), batch, context)
        own, statistics = super().loss(copy_of(variables), batch, context)
        return value + own, {**state, PERSONAL: statistics}

    def regulariser(self, params, context):
        """(lambda / 2) * ||v - w^t||^2, a scalar."""
        received = {name: tree for name, tree in context.start["params"].items() if name != PERSONAL}
        return 0.5 * self.lam * squared_distance(params[PERSONAL], received)
