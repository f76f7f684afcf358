"""The registry of methods: name on the command line -> class. A new method is one file and one line here."""

from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods.fedavg import FedAvg
from fedjax_pcdd.methods.fedgela import FedGELA
from fedjax_pcdd.methods.fedmr import FedMR
from fedjax_pcdd.methods.fedprox import FedProx
from fedjax_pcdd.methods.method import Batch, Context, Facts, Message, Method, Server, Setting
from fedjax_pcdd.methods.solo import Solo

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedmr": FedMR,
    "fedgela": FedGELA,
    "solo": Solo,
}

__all__ = ["METHODS", "Batch", "Context", "Facts", "Message", "Method", "Server", "Setting", "get"]


def get(name: str) -> type[Method]:
    """The class of a method by its name on the command line; UserError for an unknown one."""
    if name not in METHODS:
        raise UserError(f"there is no method '{name}': {nearest(name, METHODS)}")
    return METHODS[name]
