"""FedGELA: the classifier is a fixed simplex ETF for all clients, locally rescaled by the client's class distribution.

Fan et al., "Federated Learning with Bilateral Curation for Partially Class-Disjoint Data", NeurIPS 2023, section 3.
Sent: backbone and neck each way. The ETF follows from a seed, so no classifier is sent, unless the ablation
`classifier=learned` trains one. A client keeps Phi [C].
Follows the paper except for three choices of the published code: all classes in the denominator (`present` is the
printed equation), two linear layers, clipping at 20. kappa = sqrt(E_W) = 100 suits a ResNet; models without
normalisation need far less: of 1, 2, 5, 10 (20 to 50 rounds of an MLP on digits and a CNN on Fashion-MNIST), 1 and 2
gave the best GA.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.logit_adjustment import class_scales, scaled_logits
from fedjax_pcdd.methods.method import Method, Traits, Tree, hyperparameter
from fedjax_pcdd.methods.parts import PersonalModel, protocol_of
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.models.etf import draw_etf


class Server(NamedTuple):
    """Global backbone and neck, and the ETF's directions [D, C], which never change."""

    variables: Tree
    etf: Any  # () with a learned classifier


ETF = {"classifier": ("etf",)}  # what some hyper-parameters need


@struct.dataclass
class FedGELA(Method):
    """Cross-entropy over kappa * Phi_kc * (m_c . h / |h|); GA without Phi, PA with it."""

    ew: float | None = hyperparameter(
        None,
        symbol="E_W",
        help="energy of the ETF; by default 1e4 if the backbone has norm layers, else 4",
        above=0.0,
        needs=ETF,
    )
    scale: Literal["sqrt", "linear"] = hyperparameter(
        "sqrt", symbol="kappa", help="root of E_W, or E_W", static=True, needs=ETF
    )
    phi: Literal["identity", "sqrt", "exp", "none"] = hyperparameter(
        "identity", symbol="Phi", help="local scale as a function of n_kc / n_k; none is FedGE", static=True
    )
    gamma: Literal["class", "localgamma", "serverscaled"] | None = hyperparameter(
        None, symbol="gamma", help="1/C (default of identity), or the client's or (default) server's mean", static=True
    )
    denominator: Literal["all", "present"] = hyperparameter(
        "all", help="classes in the local softmax: all, or those the client has (the printed equation)", static=True
    )
    classifier: Literal["etf", "learned"] = hyperparameter(
        "etf", help="fixed ETF, or a trained and averaged classifier (the ablation 'LA only')", static=True
    )
    layers: Literal[0, 1, 2] = hyperparameter(2, help="linear layers between backbone and ETF", static=True)
    normalise: Literal["l2", "batch"] = hyperparameter(
        "l2",
        help="features before the ETF: unit length, or batch norm as the published command has it",
        static=True,
        needs=ETF,
    )
    pa_model: PersonalModel | None = hyperparameter(
        None, help="another name of `pa_protocol`: local of last, server of received", static=True
    )

    def traits(self):
        """PA is measured with Phi, on the backbone that `pa_model` names."""
        fields = {"target": "both", "fine_tunes": False, "protocol": protocol_of(self.pa_model)}
        return Traits("Fan et al., NeurIPS 2023", own_loss=True, clip=20.0, **fields)

    def build(self, model):
        """The model with a neck; without a trained head if there is an ETF, else with one that has no bias."""
        learned = self.classifier == "learned"
        batch = self.normalise == "batch" and not learned
        return model.clone(neck=self.layers, head=learned, head_bias=False, feature_norm=batch)

    def configure(self, setting, hyper):
        """Defaults of E_W (of an ETF) and gamma; advice on options that do nothing."""
        gamma = self.gamma or ("class" if self.phi == "identity" else "serverscaled")
        ew = (1e4 if setting.normalised else 4.0) if self.ew is None and self.classifier == "etf" else self.ew
        advice = []
        if self.denominator == "present" and not self._masks:
            advice.append(f"`denominator=present` does nothing with `phi={self.phi}`, where all classes count.")
        if self.gamma and self.phi == "none":
            advice.append(f"`gamma={self.gamma}` does nothing with `phi=none`.")
        if setting.one_class_clients and self._masks:
            number = setting.one_class_clients
            advice.append(f"{number} clients have one class, where the loss has no gradient: use `denominator=all`.")
        return dataclasses.replace(self, ew=ew, gamma=gamma), advice

    def init_server(self, setting, variables, class_counts, key):
        """The ETF, which needs D >= C; none with a learned classifier."""
        etf = () if self.classifier == "learned" else draw_etf(key, setting.feature_dim, setting.num_classes)
        return Server(variables, etf)

    def init_client(self, setting, server, facts, key):
        """Phi_k [C]; ones for FedGE."""
        return class_scales(facts.class_counts, facts.federation_counts, function=self.phi, gamma=self.gamma or "class")

    @property
    def _masks(self) -> bool:  # with exp a missing class has Phi > 0 and stays
        return self.denominator == "present" and self.phi in ("identity", "sqrt")

    def _scores(self, server, outputs, phi):
        if self.classifier == "learned":
            return phi * outputs.logits
        ew: Any = self.ew
        kappa = jnp.sqrt(ew) if self.scale == "sqrt" else ew
        return scaled_logits(outputs.features, server.etf, phi, kappa, unit=self.normalise == "l2")

    def _allowed(self, facts):
        """Classes of the local softmax [C], None for all."""
        return facts.class_counts > 0 if self._masks else None

    def classification(self, outputs, batch, context):
        """Cross-entropy over the locally scaled logits, a scalar (section 3.3)."""
        logits = self._scores(context.server, outputs, context.client)
        return cross_entropy(logits, batch.labels, mask=batch.mask, classes=self._allowed(context.facts))

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        """m_c . h; for a client's model Phi_c m_c . h, over its own classes if the softmax had only those.

        GA uses the latter too where it is that of clients' models (`bn=local-layers`, tasks by domain).
        """
        outputs, _ = forward(model, variables, images, train=False)
        scores = self._scores(server, outputs, 1.0 if scope == "generic" else client)
        allowed = None if scope == "generic" else self._allowed(facts)
        return scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)
