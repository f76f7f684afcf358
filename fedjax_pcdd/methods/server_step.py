"""A step of the server's own, in place of adopting the clients' mean, for any method that averages.

By itself such a method is FedAvg with another server (`method=fedadam`). Its class also goes in front of any other
method X that averages models (`method=fedgela+adam`): in the derived class, X's hooks come after the server's. A run
has one such step, so two of them are refused.
"""

from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.wrappers import Addition, averages_models, with_defaults


@struct.dataclass
class ServerStep(Addition):
    """FedAvg, or the method that it is in front of, with another last step of `aggregate`."""

    at_server = True

    @classmethod
    def unsuitable(cls, other):
        """The reason, if there is no mean, or already a step."""
        if issubclass(other, ServerStep):
            return "has a step of the server already, so drop one of them."
        if with_defaults(other).traits().pauses:
            return "has rounds that train nothing, in which a step of the server would go on, so drop the suffix."
        return super().unsuitable(other)

    def configure(self, setting, hyper):
        """As X; UserError if it does not average models in this form."""
        method, advice = super().configure(setting, hyper)
        if not averages_models(method):
            raise UserError("a step of the server needs a method that averages models in this form: drop the suffix.")
        return method, advice
