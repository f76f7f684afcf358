"""What the server does with the clients' mean in place of taking it: a step of its own, for any method that averages.

Such a method is FedAvg with a server of its own (`--method=fedadam`), and its class goes around any other one that
averages models (`--method=fedgela+adam`): the derived class has X's hooks behind the server's. A run has one such
step, so two of them are refused.
"""

import functools
from collections.abc import Callable

from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Method
from fedjax_pcdd.methods.wrappers import averages_models


@struct.dataclass
class ServerStep(Method):
    """FedAvg, or what it is wrapped about, with another last step of `aggregate`."""

    @classmethod
    def source(cls) -> str:
        """The paper of the server's step."""
        return ""

    def traits(self):
        """X's; of the step itself where it stands alone."""
        own = super().traits()
        return own if own.paper else own._replace(paper=self.source())

    def configure(self, setting, hyper):
        """As X, in a form that averages models."""
        method, advice = super().configure(setting, hyper)
        if not averages_models(method):
            raise UserError("a step of the server needs a method that averages models in this form: drop the suffix.")
        return method, advice


@functools.cache
def around(step: type[ServerStep], suffix: str) -> Callable[[type[Method], str], type[Method]]:
    """The wrapper that puts a step of the server around a method."""

    @functools.cache
    def wrap(cls: type[Method], name: str) -> type[Method]:
        missing = f"`method={name}+{suffix}` does not exist: {name}"
        if issubclass(cls, ServerStep):
            raise UserError(f"{missing} has a step of the server already, so drop one of them.")
        if not averages_models(cls()):
            raise UserError(f"{missing} is no method that averages models.")
        both = _own_names(cls) & _own_names(step)
        if both:
            raise UserError(f"{missing} has a `{min(both)}` of its own, so drop the suffix.")

        @struct.dataclass
        class Stepping(step, cls):
            __doc__ = f"{cls.__name__} with the server of {step.__name__}."
            __module__ = cls.__module__

        Stepping.__name__ = Stepping.__qualname__ = f"{cls.__name__}With{step.__name__}"
        return Stepping

    return wrap


def _own_names(cls: type[Method]) -> set[str]:
    """Options and functions that a method has and FedAvg has not: two with one name would take each other's part."""
    return {name for name in set(dir(cls)) - set(dir(Method)) if not name.startswith("__")}
