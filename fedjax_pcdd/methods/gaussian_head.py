"""What CCVR and `calibrate=ccvr` share: a Gaussian of each class, from which the server calibrates the classifier.

Clients pass over their data twice. Float32 sums of z z^T lose the digits of a covariance if features are far from 0, so
what is summed is z - a: the first pass yields a, the mean feature over all clients, and the second one the moments.
A class with one sample takes part with its mean. M_c, epochs, learning rate and batch size are ours, as the paper's are
not known to us.
"""

from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.class_gaussians import class_moments, no_moments
from fedjax_pcdd.methods.calibrated_head import calibrated_head
from fedjax_pcdd.methods.method import Message, Method, Setting, hyperparameter
from fedjax_pcdd.methods.parts import joined
from fedjax_pcdd.models.classifier import forward

LARGEST = 2**28  # scalars in a client's sums that a server accepts, and in the features that it draws: 1 GiB
MANY = 2**26  # products a sample, with the covariances of all classes, from which there is advice: a guess
NOTHING, SHIFT, MOMENTS = range(3)  # what the pass of a round is for


class Server(NamedTuple):
    """Global model, its calibrated head, and the shift [D] that is subtracted from features before they are summed."""

    variables: Any
    head: Any
    shift: Any


@struct.dataclass
class GaussianHead(Method):
    """Cross-entropy of the head alone on M_c features of each class, z = mu_c + R_c xi."""

    drawn: int = hyperparameter(500, symbol="M_c", help="features drawn for each class", low=1, static=True)
    calibration_epochs: int = hyperparameter(10, help="passes over the drawn features", low=0, static=True)
    calibration_lr: float = hyperparameter(0.01, help="learning rate of the calibration's SGD", low=0.0)
    calibration_momentum: float = hyperparameter(0.9, help="momentum of the calibration's SGD", low=0.0, high=0.999)
    calibration_batch: int = hyperparameter(64, help="drawn features of a step", low=1, static=True)
    covariance: Literal["full", "diagonal"] = hyperparameter(
        "full", help="covariances of the features, or variances alone", static=True
    )
    relu: bool = hyperparameter(False, help="ReLU on the drawn features, where the model's come after one", static=True)
    softmax: Literal["all", "present"] = hyperparameter(
        "all", help="classes in the calibration's softmax: all, or those that clients have", static=True
    )

    remedies: ClassVar[tuple[str, ...]] = (
        "choose `covariance=diagonal`", "set `softmax=present`", "choose a smaller `drawn`"
    )  # fmt: skip

    def stage(self, context) -> Any:
        """What this round's pass is for: NOTHING, SHIFT or MOMENTS, scalar."""
        raise NotImplementedError

    def configure(self, setting, hyper):
        """UserError for covariances or drawn features that are too large; advice on slow or singular ones."""
        scalars = setting.num_classes * setting.feature_dim**2
        if self.covariance == "full" and scalars > LARGEST:
            raise UserError(f"CCVR would send {scalars:.2g} numbers a client: {self.remedies[0]}.")
        features = setting.num_classes * self.drawn * setting.feature_dim
        if features > LARGEST:
            raise UserError(f"CCVR would draw {features:.2g} numbers at once: {self.remedies[2]}.")
        slow = f"CCVR takes {scalars:.2g} products a sample for its covariances: if it is slow, {self.remedies[0]}."
        return self, [slow] * (self.covariance == "full" and scalars > MANY) + self._gaussian_advice(setting)

    def _gaussian_advice(self, setting: Setting) -> list[str]:
        """A sentence on classes that have no Gaussian, or a covariance of less than full rank."""
        rarest, width = setting.rarest_class, setting.feature_dim
        if rarest == 0 and self.softmax == "all":
            return [f"CCVR draws no features of classes without samples, so their logits fall: {self.remedies[1]}."]
        if 0 < rarest <= width and self.covariance == "full":
            cause = f"CCVR has {rarest} samples of a class for {width} features, so its covariance is singular"
            return [f"{cause} and features are drawn in the samples' span alone: for more {self.remedies[0]}."]
        return []

    def init_server(self, setting, variables, class_counts, key):
        """The calibrated head is the model's own, until it is calibrated."""
        return Server(variables, variables["params"]["head"], jnp.zeros(setting.feature_dim))

    def summarise(self, variables, batch, context):
        """The sums of 1, x and x x^T of each class, x = z - a; no x x^T in stage SHIFT, zeros in stage NOTHING."""
        diagonal, setting = self.covariance == "diagonal", context.setting
        none = no_moments(setting.num_classes, setting.feature_dim, diagonal=diagonal)

        def sums(diagonal):
            # Not with the client's own running statistics, which the calibrated model will not have.
            model = {**context.server.variables, "params": variables["params"]}
            features = forward(context.model, model, batch.images, train=False, mask=batch.mask)[0].features
            options = {"diagonal": diagonal, "mask": batch.mask, "shift": context.server.shift}
            return class_moments(features, batch.labels, setting.num_classes, **options)

        def first_moments():
            return sums(diagonal=True)._replace(squares=none.squares)

        passes = [lambda: none, first_moments, lambda: sums(diagonal)]
        typed = [lambda run=run: jax.tree.map(lambda x, like: x.astype(like.dtype), run(), none) for run in passes]
        return jax.lax.switch(self.stage(context), typed)

    def upload(self, variables, summary, context):
        """The model and the sums."""
        return context.client, Message(mean=variables, total=summary)

    def aggregate(self, server, message, weights, context):
        """Set the shift to the mean feature, or calibrate the head by the moments; the model stays as it is."""
        moments = message.total

        def shifted():
            return server._replace(shift=moments.sums.sum(0) / jnp.maximum(moments.counts.sum(), 1))

        def calibrated():
            head = self.calibrated(server.variables["params"]["head"], moments, context.key, server.shift)
            return server._replace(head=head)

        return jax.lax.cond(self.stage(context) == MOMENTS, calibrated, shifted)

    def calibrated(self, head, moments, key, shift=0.0):
        """The head, {"kernel": [D, C], ...}, retrained on features that are drawn from the Gaussians of the moments."""
        optimiser = optax.sgd(self.calibration_lr, self.calibration_momentum)
        sizes = {"drawn": self.drawn, "epochs": self.calibration_epochs, "size": self.calibration_batch, "shift": shift}
        present = self.softmax == "present"
        return calibrated_head(head, moments, key, optimiser=optimiser, relu=self.relu, present=present, **sizes)

    def calibrated_model(self, server: Server) -> Any:
        """The global model with the calibrated head."""
        return joined(server.variables, "head", server.head)
