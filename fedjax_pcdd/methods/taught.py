"""What FedVLS, FedNTD and FedLMD share: the received model is a constant teacher on every batch.

It costs one more forward pass a step, no gradient and no traffic; the client only holds what it received.
"""

from typing import Literal

import jax
from flax import struct

from fedjax_pcdd.methods.method import Batch, Context, Method, hyperparameter
from fedjax_pcdd.models.classifier import forward


@struct.dataclass
class Taught(Method):
    """A method whose local objective reads the logits of w^t."""

    teacher: Literal["eval", "train"] = hyperparameter(
        "eval", help="batch norm of the received model: its running statistics, or those of the batch", static=True
    )

    def received_logits(self, batch: Batch, context: Context) -> jax.Array:
        """Logits [B, C] of w^t on the batch, without gradient; its running statistics stay as they are."""
        train, key = self.teacher == "train", context.keys.dropout
        outputs, _ = forward(context.model, context.received, batch.images, train=train, mask=batch.mask, key=key)
        return jax.lax.stop_gradient(outputs.logits)
