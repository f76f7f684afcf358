"""SCAFFOLD: control variates replace the client's own direction in its gradients by the federation's.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, algorithm 1.
Sent: the model and the control c down (2P), the model and the change of c_k plus c up (2P). A client keeps c_k (P).
Follows the paper except for the weights: n_k, as in the benchmark code (`weights=uniform` is the paper's). That code
applies the correction after the optimiser (option) and to running statistics too (a mistake: variances may become
negative). The algorithm has neither momentum nor weight decay. Controls of option II contain the decay, as the update
does; those of option I do not: they are gradients in training mode, over batches of B. With momentum, tau_k as the
divisor of option II diverges. The norm of gradient + c - c_k is clipped at 10, as in the code of FedDC's authors for
all methods.
"""

from typing import Literal, NamedTuple

import jax
import optax
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Context, Message, Method, Summary, Traits, Tree, hyperparameter
from fedjax_pcdd.methods.own_layers import shared_part
from fedjax_pcdd.methods.steps import effective_steps, kept_advice, momentum_advice, optimiser_advice, state_advice
from fedjax_pcdd.trees import zeros_like


class Server(NamedTuple):
    """Global model, and the mean of all clients' controls, structured as the parameters."""

    variables: Tree
    control: Tree


@struct.dataclass
class Scaffold(Method):
    """w <- w - eta * (grad - c_k + c) in each local step."""

    eta_g: float = hyperparameter(1.0, symbol="eta_g", help="learning rate of the server", low=0.0)
    control: Literal["II", "I"] = hyperparameter(
        "II", help="control c_k: from the local update, or (I) the gradient at w^t over all local data", static=True
    )
    correction: Literal["gradient", "post_step"] = hyperparameter(
        "gradient", help="c - c_k joins the gradient before momentum, or the step after it", static=True
    )
    step_normaliser: Literal["auto", "steps", "a_k"] = hyperparameter(
        "auto",
        symbol="K_s",
        help="divisor in option II: tau_k, or FedNova's a_k, which counts momentum; auto: a_k, tau_k for post_step",
        static=True,
        needs={"control": ("II",)},
    )

    def traits(self):
        """Option I takes the training gradient from a pass over the local data, without augmentation."""
        summary = Summary(train=True) if self.control == "I" else None
        return Traits("Karimireddy et al., ICML 2020", summary=summary, clip=10.0)

    def configure(self, setting, hyper):
        """UserError for a_k with `correction=post_step`: a_k counts momentum, and that correction has none."""
        if self.control == "II" and self.correction == "post_step" and self.step_normaliser == "a_k":
            raise UserError("`step_normaliser=a_k` needs `correction=gradient`: choose it, or drop `step_normaliser`.")
        return self, self._advice(setting, hyper)

    def _advice(self, setting, hyper):
        """Controls must estimate gradients, and the correction must weigh as much as the gradients of the steps."""
        if self.control == "II" and hyper.optimizer != "sgd":
            return optimiser_advice("SCAFFOLD", hyper, " or `control=I`")
        if self.correction == "post_step":
            weak = "has gradients that weigh about {:.3g} times what its correction takes off them"
            return momentum_advice("SCAFFOLD", hyper.momentum, "`control=II`", weak) if self.control == "I" else []
        exact = self.control == "I" or self._counts_momentum
        kept = kept_advice("SCAFFOLD", setting, hyper) if self.control == "II" else []
        return [*kept, *state_advice("SCAFFOLD", setting, hyper, counts_momentum=exact)]

    @property
    def _counts_momentum(self) -> bool:
        """Whether K_s is a_k, which equals tau_k without momentum."""
        return self.step_normaliser != "steps" and self.correction == "gradient"

    def init_server(self, setting, variables, class_counts, key):
        """c = 0."""
        return Server(variables, zeros_like(variables["params"]))

    def init_client(self, setting, server, facts, key):
        """c_k = 0."""
        return zeros_like(server.control)

    def _correction(self, context: Context) -> Tree:
        return optax.tree.sub(context.server.control, context.client)

    def local_update(self, evaluate, step, variables, batch, context):
        """A step on grad - c_k + c, or w <- w - eta (c - c_k) beside the optimiser's own step."""
        loss, state, gradients = evaluate(variables)
        correction = self._correction(context)
        if self.correction == "gradient":
            return loss, state, step(optax.tree.add(gradients, correction))
        plain = step(gradients)
        updates = optax.tree.add_scale(plain.updates, -context.hyper.lr, correction)
        return loss, state, plain._replace(updates=updates)

    def summarise(self, variables, batch, context):
        """Sum over the batch of the loss's gradients at w^t, as the parameters."""

        def total(params):
            return batch.mask.sum() * self.loss({**context.received, "params": params}, batch, context)[0]

        return jax.grad(total)(context.received["params"])

    def upload(self, variables, summary, context):
        """c_k^+ = c_k - c + (w^t - w_k) / (K_s eta), or the mean gradient at w^t; sent is c_k^+ - c_k + c."""
        correction = self._correction(context)
        if self.control == "I":
            gradient = shared_part(context.setting, summary)
            control = jax.tree.map(lambda x: x / context.facts.num_samples, gradient)
            sent = optax.tree.add(control, correction)
        else:
            counts_momentum = self._counts_momentum
            most, momentum = context.setting.steps, context.hyper.momentum
            steps = effective_steps(context.step, momentum, most=most) if counts_momentum else context.step
            moved = optax.tree.sub(context.start["params"], variables["params"])
            sent = optax.tree.scale(1 / (steps * context.hyper.lr), moved)
            control = optax.tree.sub(sent, correction)
        return control, Message(mean=variables, total=optax.tree.scale(1 / context.setting.num_clients, sent))

    def aggregate(self, server, message, weights, context):
        """w + eta_g * sum_k p_k (w_k - w), and c + (1 / N) * sum of the changes; statistics are a plain mean."""
        old_share = 1 - self.eta_g
        params = jax.tree.map(lambda w, m: m + old_share * (w - m), server.variables["params"], message.mean["params"])
        silent_share = 1 - context.count / context.setting.num_clients  # each client that trained has sent c once
        control = optax.tree.add_scale(message.total, silent_share, server.control)
        return server._replace(variables={**message.mean, "params": params}, control=control)
