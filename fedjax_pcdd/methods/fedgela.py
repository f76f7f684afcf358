"""FedGELA: the classifier is a fixed simplex ETF for everyone, locally rescaled by the client's class distribution.

Fan et al., "Federated Learning with Bilateral Curation for Partially Class-Disjoint Data", NeurIPS 2023, section 3.
Sent: backbone and neck each way, never a classifier (the ETF follows from a seed). A client keeps Phi [C].
Follows the paper but for the denominator: all classes, as the published code has it and as measured better; `present`
is the printed equation. kappa = sqrt(E_W) = 100 suits a ResNet; small models without batch norm need far less: of
1, 2, 5, 10 (20 to 50 rounds of an MLP on digits and a CNN on Fashion-MNIST) 1 and 2 gave the best GA.
"""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.logit_adjustment import class_scales, scaled_logits
from fedjax_pcdd.methods.method import Method, Tree, hyperparameter
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.models.etf import simplex_etf


class Server(NamedTuple):
    """Global backbone and neck, and the ETF's directions [D, C], which never change."""

    variables: Tree
    etf: jax.Array


@struct.dataclass
class FedGELA(Method):
    """Cross-entropy over kappa * Phi_kc * (m_c . h / |h|); GA without Phi, PA with it."""

    paper: ClassVar[str] = "Fan et al., NeurIPS 2023"
    target: ClassVar[str] = "both"
    fine_tune: ClassVar[bool] = False
    grad_clip: ClassVar[float | None] = 20.0

    ew: float | None = hyperparameter(
        None,
        symbol="E_W",
        help="classifier energy, kappa = sqrt(E_W); by default 1e4 with batch norm, else 4",
        low=0.0,
    )
    scale: Literal["sqrt", "linear"] = hyperparameter(
        "sqrt", symbol="kappa", help="kappa = sqrt(E_W) or E_W itself", static=True
    )
    phi: Literal["identity", "sqrt", "exp", "none"] = hyperparameter(
        "identity", symbol="Phi", help="local scale as a function of n_kc / n_k; none is FedGE", static=True
    )
    gamma: Literal["class", "localgamma", "serverscaled"] | None = hyperparameter(
        None,
        symbol="gamma",
        help="norm of Phi: 1/C, the client's mean or the server's; by default class for identity, else serverscaled",
        static=True,
    )
    denominator: Literal["all", "present"] = hyperparameter(
        "all", help="classes in the local softmax: all, or those the client has (the printed equation)", static=True
    )
    classifier: Literal["etf", "learned"] = hyperparameter(
        "etf", help="fixed ETF, or a trained and averaged classifier (the ablation 'LA only')", static=True
    )
    layers: Literal[0, 1, 2] = hyperparameter(2, help="linear layers between backbone and ETF", static=True)
    normalise: Literal["l2", "batch"] = hyperparameter(
        "l2", help="features before the ETF: unit length, or batch norm as the published command has it", static=True
    )
    pa_model: Literal["local", "server"] = hyperparameter(
        "local", help="PA of the model just trained, or of the aggregated one", static=True
    )

    @property
    def personal_model(self):
        """Which backbone PA is read from."""
        return self.pa_model

    def build(self, model):
        """Neck for everybody; no trained head beside an ETF, no bias in the learned one."""
        learned = self.classifier == "learned"
        batch = self.normalise == "batch" and not learned
        return model.clone(neck=self.layers, head=learned, head_bias=False, feature_norm=batch)

    def configure(self, setting):
        """E_W and gamma where they were left open; an ETF needs D >= C."""
        if self.classifier == "etf" and setting.feature_dim < setting.num_classes:
            raise UserError(
                f"a simplex ETF of {setting.num_classes} classes needs at least as many features, but the model has "
                f"{setting.feature_dim}: choose a wider --model."
            )
        ew = self.ew if self.ew is not None else (1e4 if setting.batch_norm else 4.0)
        gamma = self.gamma or ("class" if self.phi == "identity" else "serverscaled")
        return dataclasses.replace(self, ew=ew, gamma=gamma)

    def init_server(self, setting, variables, class_counts, key):
        """The ETF, from a seed that follows from the key."""
        etf = simplex_etf(setting.feature_dim, setting.num_classes, seed=int(jax.random.bits(key)))
        return Server(variables, jnp.asarray(etf, dtype=jnp.result_type(float)))

    def init_client(self, setting, server, facts, key):
        """Phi_k [C]; ones for FedGE."""
        if self.phi == "none":
            return jnp.ones(setting.num_classes)
        return class_scales(facts.class_counts, facts.federation_counts, function=self.phi, gamma=self.gamma or "class")

    def _scores(self, server, outputs, phi):
        if self.classifier == "learned":
            return phi * outputs.logits
        ew: Any = self.ew
        kappa = jnp.sqrt(ew) if self.scale == "sqrt" else ew
        if self.normalise == "batch":
            return kappa * phi * (outputs.features @ server.etf)
        return scaled_logits(outputs.features, server.etf, phi, kappa)

    def _allowed(self, facts):
        """Classes of the local softmax [C], None for all; with exp a missing class has Phi > 0 and stays."""
        return facts.class_counts > 0 if self.denominator == "present" and self.phi in ("identity", "sqrt") else None

    def classification(self, outputs, batch, context):
        """Cross-entropy over the locally scaled logits, a scalar (section 3.3)."""
        logits = self._scores(context.server, outputs, context.client)
        return cross_entropy(logits, batch.labels, mask=batch.mask, classes=self._allowed(context.facts))

    def predict_generic(self, model, server, variables, images):
        """argmax_c m_c . h; independent of kappa and Phi."""
        outputs, _ = forward(model, variables, images, train=False)
        return self._scores(server, outputs, 1.0)

    def predict_personal(self, model, server, client, facts, variables, images):
        """argmax_c Phi_c m_c . h, over the client's own classes where the softmax had only those."""
        outputs, _ = forward(model, variables, images, train=False)
        scores, allowed = self._scores(server, outputs, client), self._allowed(facts)
        return scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)
