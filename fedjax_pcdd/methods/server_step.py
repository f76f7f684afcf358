"""What the server does with the clients' mean in place of taking it: a step of its own, for any method that averages.

Such a method is FedAvg with a server of its own (`method=fedadam`), and its class goes in front of any other one that
averages models (`method=fedgela+adam`): the derived class has X's hooks behind the server's. A run has one such
step, so two of them are refused.
"""

from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.wrappers import Addition, averages_models


@struct.dataclass
class ServerStep(Addition):
    """FedAvg, or what it is in front of, with another last step of `aggregate`."""

    @classmethod
    def unsuitable(cls, other):
        """Where there is no mean, or already a step."""
        if issubclass(other, ServerStep):
            return "has a step of the server already, so drop one of them."
        if other().traits().pauses:
            return "has rounds that train nothing, in which a step of the server would go on, so drop the suffix."
        return super().unsuitable(other)

    def configure(self, setting, hyper):
        """As X, in a form that averages models."""
        method, advice = super().configure(setting, hyper)
        if not averages_models(method):
            raise UserError("a step of the server needs a method that averages models in this form: drop the suffix.")
        return method, advice
