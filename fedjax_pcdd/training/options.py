"""From options as they are written, in a command or a grid, to a configuration and a method."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_pcdd import methods
from fedjax_pcdd.data.partition import PARTITIONS
from fedjax_pcdd.data.sources import DATASETS
from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods import METHODS, Method
from fedjax_pcdd.registry import is_import_path
from fedjax_pcdd.training.config import RESERVED, RUN, TASK_DEFAULTS, RunConfig, build
from fedjax_pcdd.training.fields import convert, options_of
from fedjax_pcdd.training.presets import PRESETS, preset_method, preset_values, read_preset

# What others call an option, and its name among ours; and names of values.
HINTS = {
    "algo": "method", "algorithm": "method", "num_clients": "clients", "num_rounds": "rounds", "epochs": "local_epochs",
    "learning_rate": "lr", "participation": "cohort", "alpha": "beta", "concentration": "beta", "data": "dataset",
    "server_optimiser": "server_optimizer", "server_opt": "server_optimizer",
}  # fmt: skip
SERVER = "server_optimizer"  # another way to write a suffix, which `with_server` takes
ALIASES = {"dir": "dirichlet", "lda": "dirichlet"}


def configure(given: Mapping[str, str], presets: Path = PRESETS) -> tuple[RunConfig, Method]:
    """Defaults, then the preset, then what was given; UserError for any mistake in it."""
    chosen = read_preset(given["preset"], presets) if "preset" in given else None
    for option in ("split", "variant"):
        if chosen is None and option in given:
            raise UserError(f"chooses a {option} of a preset: add `preset`, or drop it.", field=option)
    name = method_of(given, presets)
    own = own_values(given, name)
    base = preset_values(chosen, name, given.get("split"), given.get("variant")) if chosen else {}
    if own.get("local_steps") is not None or own.get("local_epochs") is not None:  # either replaces the preset's
        base = {name: value for name, value in base.items() if name not in ("local_steps", "local_epochs")}
    task = (base | own).get("task")
    if task:
        _check_task(own)
    return build((TASK_DEFAULTS if task else {}) | base | own | {"method": name})


def with_server(given: Mapping[str, str]) -> dict[str, str]:
    """The options with `server_optimizer=adam` written as `method=X+adam`; several of each are all their pairs.

    >>> with_server({"method": "fedgela,moon", "server_optimizer": "none,adam"})
    {'method': 'fedgela,fedgela+adam,moon,moon+adam'}
    """
    servers = [in_any_case(part.strip(), methods.SERVER_OPTIMISERS) for part in given.get(SERVER, "none").split(",")]
    rest = {name: text for name, text in given.items() if name != SERVER}
    if servers == ["none"]:
        return rest
    if "preset" in given and "method" not in given:
        raise UserError("goes with a method: add `method`, as the preset may have several.", field=SERVER)
    for server in servers:
        if server not in ("none", *methods.SERVER_OPTIMISERS) and not is_import_path(server):
            known = ["none", *methods.SERVER_OPTIMISERS]
            raise UserError(f"there is no '{server}': {nearest(server, known)}", field=SERVER)
    names = [name.strip() for name in given.get("method", str(RUN["method"].default)).split(",")]
    both = [name if server == "none" else f"{name}+{server}" for name in names for server in servers]
    return rest | {"method": ",".join(both)}


def method_of(given: Mapping[str, str], presets: Path = PRESETS) -> str:
    """The method of options, or that of their preset, or the default; UserError for a preset with a mistake."""
    fixed = None
    if "method" not in given and "preset" in given:
        fixed = preset_method(read_preset(given["preset"], presets), given.get("variant"))
    return in_any_case(given.get("method", fixed or RUN["method"].default), METHODS)


def in_any_case(name: str, known: Mapping[str, Any]) -> str:
    """The name as it is registered, however its letters are written; what is not, as it is.

    >>> [in_any_case(name, METHODS) for name in ("FedGELA", "MOON+prototypes", "mine.py:FedKeep")]
    ['fedgela', 'moon+prototypes', 'mine.py:FedKeep']
    """
    plain = methods.plain_name(name)
    return name if plain in known or plain.lower() not in known else plain.lower() + name.removeprefix(plain)


def _check_task(own: Mapping[str, Any]) -> None:
    """UserError where options say how a data set is spread over clients, beside a task."""
    for name, value in own.items():
        if name in RUN and RUN[name].group == "data" and name != "data_dir" and value is not None:
            raise UserError(f"a task brings its own data and participants: drop `{name}`, or `task`.")


def own_values(given: Mapping[str, str], method: str) -> dict[str, Any]:
    """Checked values of the run options and of the method's hyper-parameters among what is given."""
    known = RUN | options_of(methods.get(method))
    result = {}
    for name, text in given.items():
        if name in known:
            result[name] = convert(known[name], _named(name, text))
        elif name == SERVER:
            raise UserError(f"is written as a suffix here: `method={method}+{text}`.", field=SERVER)
        elif name not in RESERVED:
            raise UserError(_foreign(name, method, [*known, *RESERVED, SERVER]))
    return result


def _named(option: str, text: str) -> str:
    """The value of an option that takes a name, as it is registered."""
    match option:
        case "method":
            return in_any_case(text, METHODS)
        case "dataset":
            return in_any_case(text, DATASETS)
        case "model":
            from fedjax_pcdd.models import BACKBONES

            return in_any_case(text, BACKBONES)
        case "partition":
            text = in_any_case(text, PARTITIONS)
            return ALIASES.get(text.lower(), text)
    return text


def _foreign(name: str, method: str, known: Sequence[str]) -> str:
    owners = [other for other, cls in methods.every().items() if name in options_of(cls)]
    wrappers = [suffix for suffix in methods.known_suffixes() if name in options_of(methods.get(f"fedavg+{suffix}"))]
    if wrappers and not owners:
        owners = [f"{method}+{suffix}" for suffix in wrappers]
    if not owners:
        return no_option(name, known)
    several = ", ".join(owners)
    hint = f" Dirichlet's concentration is `{HINTS[name]}`." if name == "alpha" else ""
    return f"`{name}` belongs to {several}, not to {method}: drop it or use `method={owners[0]}`.{hint}"


def no_option(name: str, known: Sequence[str] | set[str]) -> str:
    """A sentence about an option that there is not, with the nearest that there is."""
    close = HINTS.get(name) if HINTS.get(name) in known else None
    if close is None and (advice := nearest(name, known)).startswith("did"):
        close = advice.split("'")[1]
    return f"there is no option `{name}`: " + (f"did you mean '`{close}`'?" if close else "`help` lists them all.")
