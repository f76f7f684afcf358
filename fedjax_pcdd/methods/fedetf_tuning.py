"""FedETF's personal tuning after the last round: each client moves its ETF and its projection in turn.

Li et al., ICCV 2023, as `fedetf.py`. Sent: nothing; the tuned models are measured and discarded.
"""

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.methods.fedetf import ETF, FedETF, Server
from fedjax_pcdd.methods.method import Message, Step, Traits, hyperparameter
from fedjax_pcdd.methods.parts import joined, without, without_collection
from fedjax_pcdd.models.etf import draw_etf
from fedjax_pcdd.trees import zeros_like

PUBLISHED_LR = 0.04
TRACE = "tuning"  # the collection of the projection's momentum


@struct.dataclass
class FedETFTuning(FedETF):
    """E epochs as in a round; then, in turns, plain cross-entropy moves the ETF alone and the projection alone.

    The ETF is not renormalised. Both are trained by SGD, each with its own learning rate; the projection's has momentum
    0.9, which starts at 0 in each of its turns, and weight decay 5e-4. Batch norm still sees the client's batches.
    """

    epochs: int = hyperparameter(1, symbol="E", help="local epochs before the tuning", low=0, static=True)

    def traits(self):
        """E epochs and all turns, whatever number of epochs is asked for."""
        return Traits(epochs=self.epochs + 2 * self.tuning_cycles * self.tuning_epochs)

    def init_server(self, setting, variables, class_counts, key):
        """The trained model and the ETF that it was trained with, drawn from the same key."""
        return Server(variables, draw_etf(key, setting.feature_dim, setting.num_classes))

    def download(self, server, client):
        """The model, the ETF as parameters of the client's own, and the momentum of its projection."""
        trace = zeros_like(server.variables["params"]["neck"])
        return {**joined(server.variables, ETF, server.etf), TRACE: trace}

    def _turns(self, context):
        """Whether it is the turn of the ETF, and of the projection: booleans, both False in the first E epochs."""
        since = context.epoch - (context.epochs - 2 * self.tuning_cycles * self.tuning_epochs)
        odd = (since // self.tuning_epochs) % 2 == 1
        return (since >= 0) & ~odd, (since >= 0) & odd

    def classification(self, outputs, batch, context):
        """The balanced cross-entropy at first, then the plain one, a scalar."""
        on_etf, on_projection = self._turns(context)
        return self.balanced(outputs, batch, context, jnp.where(on_etf | on_projection, 0.0, self.prior_power))

    def local_update(self, evaluate, step, variables, batch, context):
        """A step as in a round, or one of the part whose turn it is."""
        loss, state, gradients = evaluate(variables)
        on_etf, on_projection = self._turns(context)
        usual = step({**gradients, ETF: jnp.zeros_like(gradients[ETF])})
        updates = jax.tree.map(lambda u: jnp.where(on_etf | on_projection, 0, u), usual.updates)
        neck = optax.tree.add_scale(gradients["neck"], 5e-4, variables["params"]["neck"])
        trace = optax.tree.add_scale(neck, 0.9, variables[TRACE])
        trace = jax.tree.map(lambda m: jnp.where(on_projection, m, 0), trace)
        scale = context.hyper.lr / PUBLISHED_LR if self.tuning_rates == "relative" else 1.0
        updates["neck"] = optax.tree.add_scale(updates["neck"], -self.projection_lr * scale, trace)
        updates[ETF] = -self.etf_lr * scale * jnp.where(on_etf, gradients[ETF], 0)
        return loss, {**state, TRACE: trace}, Step(updates, usual.optimiser)

    def upload(self, variables, summary, context):
        """The model without the client's own ETF and momentum."""
        return (), Message(mean=without_collection(without(variables, ETF), TRACE))

    def personal_variables(self, server, client):
        """The model before its tuning."""
        return joined(server.variables, ETF, server.etf)
