"""CCVR: FedAvg, after which the server retrains the classifier on features drawn from a Gaussian of each class.

Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data", NeurIPS 2021.
Sent: as FedAvg; in the last round the sums of 1, z and z z^T of each class up, C (1 + D + D^2). Clients keep nothing.
The last round of a run is the calibration: nothing is trained, and the clients that take part in it send the sums of
the global model's features, so the paper's calibration by all clients asks for a cohort of all. GA is that of the model
as trained, `ga_ccvr` that of the calibrated one (before the last round the same). M_c, epochs, learning rate and batch
size are ours, as the paper's are not known to us. A class with one sample takes part with its mean.
Float32 sums of z z^T lose the digits of a covariance where features are far from 0, so what is summed is z - a. The
shift a, the same for all, is the mean feature, read off such sums that the round before the last one sends, too.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.class_gaussians import class_moments, no_moments
from fedjax_pcdd.methods.calibration import calibrated_head
from fedjax_pcdd.methods.method import Message, Method, Setting, Summary, Traits, hyperparameter
from fedjax_pcdd.methods.parts import joined, moving
from fedjax_pcdd.methods.server_step import ServerStep
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.trees import where, zeros_like

LARGEST = 2**28  # scalars of the clients' sums that a server takes in, 1 GiB


class Server(NamedTuple):
    """Global model, its calibrated head, and what is taken off all features before they are summed [D]."""

    variables: Any
    head: Any
    shift: Any


@struct.dataclass
class CCVR(Method):
    """FedAvg; then cross-entropy of the head alone on M_c features of each class, z = mu_c + R_c xi."""

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
    ga: Literal["trained", "calibrated"] = hyperparameter(
        "trained", help="the global model that GA and fine-tuning take; the other's accuracy is beside GA", static=True
    )

    def traits(self):
        """A pass over the local data yields the sums, in the last round; in that before it, the shift."""
        return Traits("Luo et al., NeurIPS 2021", summary=Summary(last=2))

    def configure(self, setting, hyper):
        """The covariances must fit, and may be singular; a server's momentum would not stop for the calibration."""
        if isinstance(self, ServerStep):
            raise UserError(
                "CCVR's last round trains nothing, but a step of the server would go on: use `method=ccvr`."
            )
        scalars = setting.num_classes * setting.feature_dim**2
        if self.covariance == "full" and scalars > LARGEST:
            raise UserError(f"CCVR would send {scalars:.2g} numbers a client: choose `covariance=diagonal`.")
        few = (
            "CCVR with `rounds=1` calibrates the initial model, as its last round trains nothing: choose more `rounds`."
        )
        return self, [few] * (setting.rounds == 1) + self._gaussian_advice(setting)

    def _gaussian_advice(self, setting: Setting) -> list[str]:
        """A sentence for classes that have no Gaussian, or a covariance of less than full rank."""
        rarest, width = setting.rarest_class, setting.feature_dim
        if rarest == 0 and self.softmax == "all":
            return ["CCVR draws no features of classes without samples, so their logits fall: set `softmax=present`."]
        if 0 < rarest <= width and self.covariance == "full":
            few = f"CCVR has {rarest} samples of a class for {width} features, so its covariance is singular"
            return [f"{few} and features are drawn in the samples' span alone: for more set `covariance=diagonal`."]
        return []

    def init_server(self, setting, variables, class_counts, key):
        """The calibrated head is the model's own, until the last round."""
        return Server(variables, variables["params"]["head"], jnp.zeros(setting.feature_dim))

    def training(self, context):
        """Whether this round trains; the last one calibrates."""
        return context.round < context.setting.rounds - 1

    def trainable(self, params, context):
        """Nothing moves in the last round."""
        training = self.training(context)
        return moving(params, head=training, body=training)

    def local_update(self, evaluate, step, variables, batch, context):
        """As FedAvg; running statistics stand still in the last round, too."""
        loss, state, taken = super().local_update(evaluate, step, variables, batch, context)
        before = {name: variables[name] for name in state}
        return loss, where(self.training(context), state, before), taken

    def summarise(self, variables, batch, context):
        """The sums of 1, x and x x^T of each class, x = z - a; zeros before the last two rounds."""
        setting, diagonal = context.setting, self.covariance == "diagonal"

        def sums():
            features = forward(context.model, variables, batch.images, train=False, mask=batch.mask)[0].features
            how = {"diagonal": diagonal, "mask": batch.mask, "shift": context.server.shift}
            moments = class_moments(features, batch.labels, setting.num_classes, **how)
            return jax.tree.map(lambda x, like: x.astype(like.dtype), moments, zeros())

        def zeros():
            return no_moments(setting.num_classes, setting.feature_dim, diagonal=diagonal)

        return jax.lax.cond(context.round < setting.rounds - 2, zeros, sums)

    def upload(self, variables, summary, context):
        """The model and the sums."""
        return context.client, Message(mean=variables, total=summary)

    def aggregate(self, server, message, weights, context):
        """FedAvg and the mean feature; in the last round the calibration of the model as it is."""
        moments = message.total

        def train():
            shift = moments.sums.sum(0) / jnp.maximum(moments.counts.sum(), 1)
            return server._replace(variables=message.mean, head=message.mean["params"]["head"], shift=shift)

        def calibrate():
            head = self.calibrated(server.variables["params"]["head"], moments, context.key, server.shift)
            return server._replace(head=head)

        return jax.lax.cond(self.training(context), train, calibrate)

    def calibrated(self, head, moments, key, shift=0.0):
        """The head, {"kernel": [D, C], ...}, retrained on features that are drawn from the Gaussians of the sums."""
        optimiser = optax.sgd(self.calibration_lr, self.calibration_momentum)
        how = {"drawn": self.drawn, "epochs": self.calibration_epochs, "size": self.calibration_batch, "shift": shift}
        present = self.softmax == "present"
        return calibrated_head(head, moments, key, optimiser=optimiser, relu=self.relu, present=present, **how)

    def generic_variables(self, server):
        """The global model as trained, or calibrated."""
        return self._models(server)[self.ga]

    def further_models(self, server):
        """The other of the two, as `ccvr` or `trained`."""
        models = self._models(server)
        return {"ccvr": models["calibrated"]} if self.ga == "trained" else {"trained": models["trained"]}

    def _models(self, server):
        return {"trained": server.variables, "calibrated": joined(server.variables, "head", server.head)}


@struct.dataclass
class Calibration(CCVR):
    """CCVR's last two rounds alone, for the global model that any method has trained (`calibrate=ccvr`).

    Round 0 gives the shift and changes nothing else, any later one calibrates.
    """

    def traits(self):
        """Each round yields sums."""
        return super().traits()._replace(summary=Summary())

    def training(self, context):
        """The first round takes the place of one."""
        return context.round == 0

    def trainable(self, params, context):
        """Nothing moves."""
        return moving(params, head=False, body=False)

    def local_update(self, evaluate, step, variables, batch, context):
        """Nothing is evaluated, and nothing moves."""
        return jnp.zeros(()), {}, step(zeros_like(variables["params"]))

    def aggregate(self, server, message, weights, context):
        """The model is the one that was given, to the last bit."""
        after = super().aggregate(server, message, weights, context)
        head = where(self.training(context), server.head, after.head)
        return after._replace(variables=server.variables, head=head)
