"""CCVR: FedAvg, after which the server retrains the classifier on features drawn from a Gaussian of each class.

Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data", NeurIPS 2021.
Sent: as in FedAvg; also up, in the last round, the sums of 1, z and z z^T of each class, C (1 + D + D^2), and in the
round before it those of 1 and z. Clients keep nothing. The last round of a run is the calibration: nothing is trained,
and the clients of its cohort send the sums of the global model's features, so the paper's calibration by all clients
needs a cohort of all. GA is that of the trained model, `ga_ccvr` that of the calibrated one, which is there only after
the last round.
"""

from typing import Literal

import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.methods.gaussian_head import MOMENTS, NOTHING, GaussianHead
from fedjax_pcdd.methods.method import Summary, Traits, hyperparameter
from fedjax_pcdd.methods.parts import moving
from fedjax_pcdd.trees import where


@struct.dataclass
class CCVR(GaussianHead):
    """FedAvg; then cross-entropy of the head alone on M_c features of each class, z = mu_c + R_c xi."""

    ga: Literal["trained", "calibrated"] = hyperparameter(
        "trained", help="the global model that GA and fine-tuning take; the other's accuracy is beside GA", static=True
    )

    def traits(self):
        """A pass over the local data yields the sums in the last round, and the shift in the round before it."""
        return Traits("Luo et al., NeurIPS 2021", summary=Summary(last=2), pauses=True)

    def configure(self, setting, hyper):
        """Advice: the calibration needs a round of its own, and all clients."""
        one_round = (
            "CCVR with `rounds=1` calibrates the initial model, as its last round trains nothing: choose more `rounds`."
        )
        part_of_clients = (
            f"CCVR calibrates with the {setting.cohort} of {setting.num_clients} clients that take part in the last "
            "round: train with another method and `calibrate=ccvr` for a calibration by all."
        )
        method, advice = super().configure(setting, hyper)
        partial = 0 < setting.cohort < setting.num_clients
        return method, [one_round] * (setting.rounds == 1) + [part_of_clients] * partial + advice

    def stage(self, context):
        """The shift in the last round but one, the moments in the last round."""
        return jnp.clip(context.round - context.setting.rounds + 3, NOTHING, MOMENTS)

    def training(self, context):
        """Whether this round trains; the last one calibrates."""
        return self.stage(context) < MOMENTS

    def trainable(self, params, context):
        """Nothing moves in the last round."""
        training = self.training(context)
        return moving(params, "head", training, others=training)

    def local_update(self, evaluate, step, variables, batch, context):
        """As in FedAvg; in the last round running statistics stay fixed as well."""
        loss, state, update = super().local_update(evaluate, step, variables, batch, context)
        old_state = {name: variables[name] for name in state}
        return loss, where(self.training(context), state, old_state), update

    def aggregate(self, server, message, weights, context):
        """FedAvg's mean, and the mean feature; in the last round the model stays fixed and is calibrated."""
        result, training = super().aggregate(server, message, weights, context), self.training(context)
        variables = where(training, message.mean, server.variables)
        return result._replace(variables=variables, head=where(training, message.mean["params"]["head"], result.head))

    def generic_variables(self, server):
        """The global model as trained, or calibrated."""
        return server.variables if self.ga == "trained" else self.calibrated_model(server)

    def further_models(self, server):
        """The other of the two, as `ccvr` or `trained`."""
        return {"ccvr": self.calibrated_model(server)} if self.ga == "trained" else {"trained": server.variables}
