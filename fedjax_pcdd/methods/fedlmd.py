"""FedLMD: as FedNTD, but the received model is distilled on the client's minority and vacant classes alone.

Lu et al., "Federated Learning with Label-Masking Distillation", ACM MM 2023.
Sent: as in FedAvg. A client keeps nothing but its class counts, which stay with it; it holds the received weights.
A majority class has more samples than the mean over all C classes. Masks are exact, where the published code subtracts
1000, which fails if the label is the only minority class (`empty=published`). FedLMD-Tf, `teacher_free`, needs no
teacher model and distils the uniform distribution; as published, it does not run.
"""

from typing import Literal

import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.losses.masked_distillation import label_masking_distillation, majority_classes
from fedjax_pcdd.methods.method import Traits, hyperparameter
from fedjax_pcdd.methods.taught import Taught


@struct.dataclass
class FedLMD(Taught):
    """L = CE + beta * tau^2 * KL(q^t off label and majority || q off the label)."""

    beta_lmd: float = hyperparameter(1.0, symbol="beta", help="weight of the distillation; 0 is FedAvg", low=0.0)
    tau: float = hyperparameter(1.0, symbol="tau", help="temperature of the distillation", above=0.0)
    teacher_free: bool = hyperparameter(
        False, help="FedLMD-Tf: a uniform teacher in place of the received model", static=True
    )
    empty: Literal["skip", "published"] = hyperparameter(
        "skip", help="samples with no class to distil: add nothing, or what the published masks give", static=True
    )

    def traits(self):
        """FedAvg's traits, with the paper."""
        return Traits("Lu et al., ACM MM 2023")

    def configure(self, setting, hyper):
        """Advice: without the label, two classes leave one; FedLMD-Tf has no teacher model."""
        advice = ["FedLMD with two classes distils nothing: it is FedAvg."] if setting.num_classes == 2 else []
        if self.teacher_free and self.teacher == "train":
            advice.append("`teacher=train` has no effect with `teacher_free`, which asks no model.")
        return self, advice

    def penalty(self, variables, outputs, batch, context):
        """beta * L_lmd, a scalar."""
        logits = outputs.logits
        teacher = jnp.zeros_like(logits) if self.teacher_free else self.received_logits(batch, context)
        majority = majority_classes(context.facts.class_counts)
        return self.beta_lmd * label_masking_distillation(
            teacher, logits, batch.labels, majority, temperature=self.tau, empty=self.empty, mask=batch.mask
        )
