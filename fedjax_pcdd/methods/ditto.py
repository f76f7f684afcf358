"""Ditto: each client has a model of its own, tied to the received global one, which is trained by plain FedAvg.

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, algorithm 1.
Sent: as in FedAvg. A client keeps its own model and that model's running statistics.
Both models see the same batches and take one step each, with optimisers that are new each round and separate clipping;
the proximal term, which is clipped with the gradient, pulls towards w^t as received. The mean is weighted by n_k (the
published code weighs equally, `weights=uniform`). Lambda is one number, or in each step the one of several candidates
whose step gives the least loss on the client's validation samples, in evaluation mode (`lambda_candidates`, as in the
code; a client without such samples takes the first). With `optimizer_state=kept`, the own model's optimiser may be the
only one that persists (`kept_optimizer`). The recorded loss is the sum of both losses, without the proximal term. With
`personal_epochs`, the own model is trained after the global one in epochs of its own, in which a step costs that of one
model; the recorded loss is then the mean over the steps of both.
"""

from typing import Any, Literal

import jax
import optax
from flax import struct

from fedjax_pcdd.methods.method import Context, Traits, hyperparameter
from fedjax_pcdd.methods.parts import moving
from fedjax_pcdd.methods.personal_copy import PERSONAL, PersonalCopy, copy_of, without_copy
from fedjax_pcdd.methods.validated_step import least, numbers_in, validation_loss
from fedjax_pcdd.trees import squared_distance, where


@struct.dataclass
class Ditto(PersonalCopy):
    """L = CE(w) + CE(v) + (lambda / 2) * ||v - w^t||^2."""

    lam: float = hyperparameter(
        1.0,
        symbol="lambda",
        help="weight of the distance to the global model",
        low=0.0,
        needs={"lambda_candidates": ("",)},
    )

    personal_epochs: int | None = hyperparameter(
        None,
        help="epochs of the own model after those of the global one; by default both see the same batches",
        low=1,
        static=True,
    )

    lambda_candidates: str = hyperparameter(
        "",
        symbol="lambda",
        help="numbers with commas between, as 0.1,1,2: each step of an own model takes the one with the least loss on "
        "the client's validation samples; by default `lam`",
        static=True,
        several=True,
    )
    kept_optimizer: Literal["both", "own"] = hyperparameter(
        "both", help="of which models `optimizer_state=kept` keeps the optimiser", static=True
    )

    def traits(self):
        """PA is that of the own models; each model is clipped separately."""
        traits = Traits("Li et al., ICML 2021", target="both", fine_tunes=False, apart=(PERSONAL,))
        resumed = (PERSONAL,) if self.kept_optimizer == "own" else None
        chooses = bool(self.lambda_candidates)
        return traits._replace(more_epochs=self.personal_epochs or 0, resumed=resumed, validation=chooses)

    def configure(self, setting, hyper):
        """Advice: the steps of the proximal term must contract; without it the own model learns alone."""
        lr, momentum = float(hyper.lr), float(hyper.momentum)
        name = "lambda_candidates" if self.lambda_candidates else "lam"
        largest = max(self.candidates) if self.lambda_candidates else float(self.lam)
        limit, value = 2 * (1 + momentum), self.lambda_candidates or f"{largest:g}"
        if largest == 0:
            problem, remedy = "trains own models that never see the global", f"choose `{name}` above 0."
        elif lr * largest > limit:
            problem = f"diverges at `lr={lr:g}`"
            remedy = f"choose `{name}` below {limit / lr:.3g}, or a smaller `lr`."
        else:
            return self, []
        return self, [f"Ditto with `{name}={value}` {problem}: {remedy}"]

    @property
    def candidates(self) -> list[float]:
        """The numbers that lambda is chosen from; UserError if the option is not a list of numbers."""
        return numbers_in("lambda_candidates", self.lambda_candidates)

    def _own(self, context: Context) -> Any:
        """Whether this step belongs to one of the own model's epochs, scalar."""
        return context.epoch >= context.epochs - (self.personal_epochs or 0)

    def trainable(self, params, context):
        """Both models, or the one whose epoch it is."""
        if self.personal_epochs is None:
            return None
        personal = self._own(context)
        return moving(params, PERSONAL, personal, others=~personal)

    def loss(self, variables, batch, context):
        """The losses of both models, whose gradients do not mix; or that of the one whose epoch it is."""
        if self.personal_epochs is not None:
            return self._loss_of_one(variables, batch, context)
        global_loss, state = super().loss(without_copy(variables), batch, context)
        own_loss, statistics = super().loss(copy_of(variables), batch, context)
        return global_loss + own_loss, {**state, PERSONAL: statistics}

    def _loss_of_one(self, variables: Any, batch: Any, context: Context) -> tuple[jax.Array, Any]:
        """The loss of the model whose epoch it is, and both models' statistics."""
        personal, v, w = self._own(context), copy_of(variables), without_copy(variables)
        value, state = super().loss(where(personal, v, w), batch, context)
        statistics = {name: where(personal, tree, v[name]) for name, tree in state.items()}
        return value, {**{name: where(personal, w[name], tree) for name, tree in state.items()}, PERSONAL: statistics}

    def regulariser(self, params, context):
        """(lambda / 2) * ||v - w^t||^2, a scalar; 0 with candidates, of which lambda is chosen after the gradients."""
        if self.lambda_candidates:
            return 0.0
        return 0.5 * self.lam * squared_distance(params[PERSONAL], without_copy(context.start)["params"])

    def local_update(self, evaluate, step, variables, batch, context):
        """One step of both models, with the candidate lambda that gives the own model the least validation loss."""
        if not self.lambda_candidates:
            return super().local_update(evaluate, step, variables, batch, context)
        loss, state, gradients = evaluate(variables)
        params = variables["params"]
        distance = optax.tree.sub(params[PERSONAL], without_copy(context.start)["params"])

        def step_with(lam):
            return step({**gradients, PERSONAL: optax.tree.add_scale(gradients[PERSONAL], lam, distance)})

        def loss_with(lam):
            stepped = optax.apply_updates(params, step_with(lam).updates)
            return validation_loss(self, copy_of({**variables, **state, "params": stepped}), context)

        return loss, state, step_with(least(self.candidates, loss_with))
