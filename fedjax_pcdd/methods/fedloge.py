"""FedLoGe: a fixed sparse ETF trains the body, and two heads beside it, common and personal, exchange their norms.

Xiao et al., "FedLoGe: Joint Local and Generic Federated Learning under Long-tailed Data", ICLR 2024.
Sent: as in FedAvg, body and auxiliary head; the sparse ETF (SSE-C) once. A client keeps its personal head.
The body learns from the sparse ETF alone, each head from its own loss on the features. GA: the auxiliary head with rows
of equal norm. PA: the auxiliary head with the personal head's norms, plus the personal head, over the client's classes.
Nothing is fine-tuned. `ga_ssec` and `ga_aux` are the accuracies of the sparse ETF and of the unchanged auxiliary head.
Follows the published script. The biases and unit rows of its README are options, and so is the frozen random bias of
the script's ETF, where the paper's classifier is a matrix (`ssec_bias=frozen`: uniform in +-1 / sqrt(D), as a layer's
bias is initialised there). The personal head begins as a copy of the auxiliary one. Published runs have no weight
decay.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.methods.method import Traits, hyperparameter
from fedjax_pcdd.methods.parts import PersonalHead, joined
from fedjax_pcdd.models.classifier import apply_head, forward
from fedjax_pcdd.models.etf import draw_sparse_etf


class Server(NamedTuple):
    """Global body and auxiliary head; the sparse ETF [D, C] and its bias [C], which never change."""

    variables: Any
    sparse_etf: jax.Array
    bias: Any = 0.0


@struct.dataclass
class FedLoGe(PersonalHead):
    """L = CE(S^T z) + CE(g(sg[z])) + CE(l_k(sg[z])), with the sparse ETF S and heads g and l_k."""

    sparsity: float = hyperparameter(0.6, help="share of the ETF's entries that are 0", low=0.0, high=0.95, static=True)
    ssec_norm: float = hyperparameter(
        0.1, help="norm of its columns; small networks learn faster with 1", above=0.0, static=True
    )
    ssec_bias: Literal["none", "frozen"] = hyperparameter(
        "none", help="bias of the ETF: none, or drawn once and never trained, as the published code", static=True
    )
    head_norm: float = hyperparameter(1.7, help="norm of the rows of the generic head in GA", above=0.0)
    rows: Literal["raw", "unit"] = hyperparameter(
        "raw", help="rows of the common head that take the personal norms: as they are, or of length 1", static=True
    )
    biases: Literal["script", "readme"] = hyperparameter(
        "script", help="personal logits: the published script's, or with plain common rows, as its README", static=True
    )

    def traits(self):
        """PA is measured with the server's body and heads; each head is clipped separately."""
        fields = {"target": "both", "fine_tunes": False, "personal_model": "server"}
        return Traits("Xiao et al., ICLR 2024", own_loss=True, apart=("head", "personal"), **fields)

    def configure(self, setting, hyper):
        """UserError if there are fewer features than classes: there is no such ETF."""
        classes, width = setting.num_classes, setting.feature_dim
        if width < classes:
            raise UserError(f"FedLoGe has no ETF of {classes} classes in {width} features: choose a wider model.")
        return self, []

    def init_server(self, setting, variables, class_counts, key):
        """The model and the sparse ETF, made on the host: about a second for 10 classes, some ten for 100."""
        size = setting.feature_dim, setting.num_classes
        etf = draw_sparse_etf(key, *size, sparsity=self.sparsity, length=self.ssec_norm)
        limit = setting.feature_dim**-0.5 if self.ssec_bias == "frozen" else 0.0
        bias = jax.random.uniform(jax.random.fold_in(key, 1), size[1:], etf.dtype, -limit, limit)
        if self.ssec_bias == "frozen" and "bias" not in variables["params"]["head"]:
            raise UserError("`ssec_bias=frozen` needs a model whose last layer has a bias: use `ssec_bias=none`.")
        return Server(variables, etf, bias)

    def classification(self, outputs, batch, context):
        """CE(S^T z), a scalar; the body learns from it alone."""
        logits = outputs.features @ context.server.sparse_etf + context.server.bias
        return cross_entropy(logits, batch.labels, mask=batch.mask)

    def penalty(self, variables, outputs, batch, context):
        """CE of both heads on constant features, a scalar."""
        features = jax.lax.stop_gradient(outputs.features)
        heads = (variables["params"][part] for part in ("head", "personal"))
        losses = [cross_entropy(apply_head(head, features), batch.labels, mask=batch.mask) for head in heads]
        return losses[0] + losses[1]

    def generic_variables(self, server):
        """The global model with the auxiliary head, its rows scaled to equal norm."""
        head = server.variables["params"]["head"]
        kernel = self.head_norm * head["kernel"] / _norms(head["kernel"])
        return joined(server.variables, "head", {**head, "kernel": kernel})

    def further_models(self, server):
        """The global model with the sparse ETF (`ssec`), and with the auxiliary head as it is (`aux`)."""
        head = server.variables["params"]["head"]
        fixed = {**jax.tree.map(jnp.zeros_like, head), "kernel": server.sparse_etf.astype(head["kernel"].dtype)}
        if "bias" in head:
            fixed["bias"] = fixed["bias"] + server.bias
        return {"ssec": joined(server.variables, "head", fixed), "aux": server.variables}

    def personal_variables(self, server, client):
        """The global body with one head: the sum of both, the common one scaled to the personal norms first."""
        return joined(server.variables, "head", self._joint_head(server.variables["params"]["head"], client))

    def _joint_head(self, common, personal):
        """The common head with the norms of the personal one, plus the personal one."""
        kernel = common["kernel"] / _norms(common["kernel"]) if self.rows == "unit" else common["kernel"]
        added_kernel = personal["kernel"] if self.biases == "script" else common["kernel"]
        head = jax.tree.map(jnp.add, common, personal)
        return {**head, "kernel": kernel * _norms(personal["kernel"]) + added_kernel}

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        """Logits of the model's head; for PA, also during training, of the joint head over the client's own classes."""
        parts = variables["params"]
        if scope == "personal" and "personal" in parts:
            variables = joined(variables, "head", self._joint_head(parts["head"], parts["personal"]))
        logits = forward(model, variables, images, train=False)[0].logits
        if scope != "personal" or facts is None:
            return logits
        return jnp.where(facts.class_counts > 0, logits, -jnp.inf)


def _norms(kernel):
    """Norms [C] of the columns of a kernel [D, C], which are the rows of the paper's W; not less than 1e-12."""
    return jnp.maximum(jnp.linalg.norm(kernel, axis=0), 1e-12)
