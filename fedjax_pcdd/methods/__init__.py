"""The registry of methods: name -> class. A new method of this package is one file and one line here."""

from contextlib import suppress
from typing import Any

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.apfl import APFL
from fedjax_pcdd.methods.ccvr import CCVR
from fedjax_pcdd.methods.ditto import Ditto
from fedjax_pcdd.methods.fccl import FCCL
from fedjax_pcdd.methods.fedavg import FedAvg
from fedjax_pcdd.methods.fedavgm import FedAvgM
from fedjax_pcdd.methods.fedbabu import FedBABU
from fedjax_pcdd.methods.fedcm import FedCM
from fedjax_pcdd.methods.feddc import FedDC
from fedjax_pcdd.methods.feddecorr import FedDecorr
from fedjax_pcdd.methods.feddf import FedDF
from fedjax_pcdd.methods.feddyn import FedDyn
from fedjax_pcdd.methods.fedetf import FedETF
from fedjax_pcdd.methods.fedexp import FedExP
from fedjax_pcdd.methods.fedgela import FedGELA
from fedjax_pcdd.methods.fedgen import FedGen
from fedjax_pcdd.methods.fedgf import FedGF
from fedjax_pcdd.methods.fedlc import FedLC
from fedjax_pcdd.methods.fedlesam import FedLESAM
from fedjax_pcdd.methods.fedlmd import FedLMD
from fedjax_pcdd.methods.fedloge import FedLoGe
from fedjax_pcdd.methods.fedmatch import FedMatch
from fedjax_pcdd.methods.fedmd import FedMD
from fedjax_pcdd.methods.fedmr import FedMR
from fedjax_pcdd.methods.fednova import FedNova
from fedjax_pcdd.methods.fedntd import FedNTD
from fedjax_pcdd.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fedjax_pcdd.methods.fedper import FedPer
from fedjax_pcdd.methods.fedproc import FedProc
from fedjax_pcdd.methods.fedproto import FedProto
from fedjax_pcdd.methods.fedprox import FedProx
from fedjax_pcdd.methods.fedrep import FedRep
from fedjax_pcdd.methods.fedrl import FedRL
from fedjax_pcdd.methods.fedrod import FedRoD
from fedjax_pcdd.methods.fedrs import FedRS
from fedjax_pcdd.methods.fedsam import FedSAM
from fedjax_pcdd.methods.fedsmoo import FedSMOO
from fedjax_pcdd.methods.fedtgp import FedTGP
from fedjax_pcdd.methods.feduv import FedUV
from fedjax_pcdd.methods.fedvls import FedVLS
from fedjax_pcdd.methods.fml import FML
from fedjax_pcdd.methods.lgfedavg import LGFedAvg
from fedjax_pcdd.methods.method import Batch, Context, Facts, Message, Method, Server, Setting, Traits
from fedjax_pcdd.methods.mofedsam import MoFedSAM
from fedjax_pcdd.methods.moon import MOON
from fedjax_pcdd.methods.rcfl import RCFL
from fedjax_pcdd.methods.scaffold import Scaffold
from fedjax_pcdd.methods.server_step import ServerStep
from fedjax_pcdd.methods.solo import Solo
from fedjax_pcdd.methods.with_prototypes import Prototypes
from fedjax_pcdd.methods.wrappers import SEPARATOR, Addition, wrapped
from fedjax_pcdd.registry import Registry

_OWN = (
    FedAvg, FedProx, FedProc, FedMR, FedGELA, MOON, FedProto, FedNova, FedDyn, FedDC, Scaffold, Solo, FedRS, FedLC,
    FedVLS, FedNTD, FedLMD, FedDecorr, FedUV, FedETF, FedLoGe, FedAvgM, FedAdam, FedYogi, FedAdagrad, FedExP, FedSAM,
    MoFedSAM, FedLESAM, FedSMOO, FedGF, FedCM, FedGen, FedRL, FedRep, FedBABU, FedRoD, FedPer, LGFedAvg, Ditto, APFL,
    FedTGP, CCVR, FCCL, FedMD, FML, RCFL, FedDF, FedMatch,
)  # fmt: skip
OWN: dict[str, type[Method]] = {cls.__name__.lower(): cls for cls in _OWN}

METHODS: Registry[type[Method]] = Registry("method", "methods", OWN)
"""Classes of methods by name, and by the import path of a class elsewhere."""

# The suffixes of `X+suffix`; a new one is one file and one line here.
_SERVERS: dict[str, type[ServerStep]] = {
    "avgm": FedAvgM, "adam": FedAdam, "yogi": FedYogi, "adagrad": FedAdagrad, "exp": FedExP,
}  # fmt: skip
SERVER_OPTIMISERS: Registry[type[ServerStep]] = Registry("server optimiser", "server_optimisers", _SERVERS)
_ADDITIONS: dict[str, type[Addition]] = {
    "prototypes": Prototypes, "decorr": FedDecorr, "sam": FedSAM, "lesam": FedLESAM,
}  # fmt: skip

__all__ = [
    "METHODS", "SERVER_OPTIMISERS", "Batch", "Context", "Facts", "Message", "Method", "Server", "Setting", "Traits",
]  # fmt: skip


def get(name: str) -> type[Method]:
    """The class of a method by its name or import path, as "moon", "moon+prototypes" or "fedkeep.py:FedKeep".

    Raises:
      UserError: it does not exist, or is no method.
    """
    plain, suffixes = plain_name(name), suffixes_of(name)
    cls = METHODS.find(plain)
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise UserError(f"{plain} is not a method: derive a dataclass from fp.Method.")
    named = [suffix for suffix in suffixes if SERVER_OPTIMISERS.knows(suffix)]
    added = {suffix: _addition(suffix, SERVER_OPTIMISERS.find(suffix)) for suffix in named}
    return wrapped(cls, plain, suffixes, {**known_suffixes(), **added} if suffixes else {})


def every() -> dict[str, type[Method]]:
    """All methods by name; those of other packages that cannot be imported, or are no methods, are left out."""
    return {
        name: cls for name, cls in METHODS.importable().items() if isinstance(cls, type) and issubclass(cls, Method)
    }


def known_suffixes() -> dict[str, type[Addition]]:
    """What each suffix adds that may follow a plus sign; server optimisers are among them.

    Those of other packages that cannot be imported, or are no server optimisers, are left out.
    """
    optimisers = {}
    for name, optimiser in SERVER_OPTIMISERS.importable().items():
        with suppress(UserError):
            optimisers[name] = _addition(name, optimiser)
    return {**_ADDITIONS, **optimisers}


def _addition(name: str, candidate: Any) -> type[Addition]:
    """The class that a name or import path behind a plus sign stands for; UserError if a method cannot have it."""
    if not (isinstance(candidate, type) and issubclass(candidate, Addition)):
        raise UserError(f"{name} cannot stand behind a method: derive a dataclass from fp.ServerOptimised.")
    return candidate


def plain_name(name: str) -> str:
    """The name of a method without its suffixes.

    >>> [plain_name(name) for name in ("moon+prototypes", "c++/keep.py:FedKeep+prototypes", "moon+lion.py:Lion")]
    ['moon', 'c++/keep.py:FedKeep', 'moon']
    """
    prefix = name.partition(SEPARATOR)[0]
    if METHODS.knows(prefix) or ":" in prefix:  # else the plus sign may be part of a folder's name
        return prefix
    folder, colon, tail = name.rpartition(":")
    return folder + colon + tail.split(SEPARATOR)[0]


def suffixes_of(name: str) -> list[str]:
    """The suffixes of a method, as names or import paths.

    >>> suffixes_of("moon+prototypes+lion.py:Lion"), suffixes_of("c++/keep.py:FedKeep")
    (['prototypes', 'lion.py:Lion'], [])
    """
    return name.removeprefix(plain_name(name)).split(SEPARATOR)[1:]
