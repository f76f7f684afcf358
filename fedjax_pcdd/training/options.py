"""Options as they are written, in a command or a grid, made into a configuration and a method."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_pcdd import methods
from fedjax_pcdd.data.partition import PARTITIONS
from fedjax_pcdd.data.sources import DATASETS
from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods import METHODS, Method
from fedjax_pcdd.models import BACKBONES
from fedjax_pcdd.registry import is_import_path
from fedjax_pcdd.training.config import RESERVED, RUN, TASK_DEFAULTS, RunConfig, build
from fedjax_pcdd.training.fields import convert, options_of
from fedjax_pcdd.training.presets import PRESETS, preset_method, preset_values, read_preset

# What others call an option -> its name among ours; `ALIASES` has the same for values.
HINTS = {
    "algo": "method", "algorithm": "method", "num_clients": "clients", "num_rounds": "rounds", "epochs": "local_epochs",
    "learning_rate": "lr", "participation": "cohort", "alpha": "beta", "concentration": "beta", "data": "dataset",
    "server_optimiser": "server_optimizer", "server_opt": "server_optimizer",
}  # fmt: skip
SERVER = "server_optimizer"  # another way to write a suffix of the method, see `with_server`
ALIASES = {"dir": "dirichlet", "lda": "dirichlet"}
# Options whose values are registered names.
NAMED: dict[str, Mapping] = {"method": METHODS, "dataset": DATASETS, "model": BACKBONES, "partition": PARTITIONS}


def configure(given: Mapping[str, str], presets: Path = PRESETS) -> tuple[RunConfig, Method]:
    """The configuration from defaults, then the preset, then the given options; UserError for any mistake in these."""
    preset = read_preset(given["preset"], presets) if "preset" in given else None
    for option in ("split", "variant"):
        if preset is None and option in given:
            raise UserError(f"chooses a {option} of a preset: add `preset`, or drop it.", field=option)
    name = method_of(given, presets)
    values = own_values(given, name)
    base = preset_values(preset, name, given.get("split"), given.get("variant")) if preset else {}
    if values.get("local_steps") is not None or values.get("local_epochs") is not None:  # either replaces the preset's
        base = {name: value for name, value in base.items() if name not in ("local_steps", "local_epochs")}
    task = (base | values).get("task")
    if task:
        for option, value in values.items():
            if option in RUN and RUN[option].group == "data" and option != "data_dir" and value is not None:
                raise UserError(f"a task brings its own data and participants: drop `{option}`, or `task`.")
    return build((TASK_DEFAULTS if task else {}) | base | values | {"method": name})


def with_server(given: Mapping[str, str]) -> dict[str, str]:
    """The options with `server_optimizer=adam` written as `method=X+adam`; several of each give all their pairs.

    >>> with_server({"method": "fedgela,moon", "server_optimizer": "none,adam"})
    {'method': 'fedgela,fedgela+adam,moon,moon+adam'}
    """
    servers = [in_any_case(part.strip(), methods.SERVER_OPTIMISERS) for part in given.get(SERVER, "none").split(",")]
    other_options = {name: text for name, text in given.items() if name != SERVER}
    if servers == ["none"]:
        return other_options
    if "preset" in given and "method" not in given:
        raise UserError("goes with a method: add `method`, as the preset may have several.", field=SERVER)
    for server in servers:
        if server not in ("none", *methods.SERVER_OPTIMISERS) and not is_import_path(server):
            choices = ["none", *methods.SERVER_OPTIMISERS]
            raise UserError(f"knows no '{server}': {nearest(server, choices)}", field=SERVER)
    names = [name.strip() for name in given.get("method", str(RUN["method"].default)).split(",")]
    combined = [name if server == "none" else f"{name}+{server}" for name in names for server in servers]
    return other_options | {"method": ",".join(combined)}


def method_of(given: Mapping[str, str], presets: Path = PRESETS) -> str:
    """The method that the options name, else that of their preset, else the default; UserError for a faulty preset."""
    method_name = None
    if "method" not in given and "preset" in given:
        method_name = preset_method(read_preset(given["preset"], presets), given.get("variant"))
    return in_any_case(given.get("method", method_name or RUN["method"].default), METHODS)


def in_any_case(name: str, known: Mapping[str, Any]) -> str:
    """The name as it is registered, in whatever case it is written; a name that is not registered stays as it is.

    >>> [in_any_case(name, METHODS) for name in ("FedGELA", "MOON+prototypes", "mine.py:FedKeep")]
    ['fedgela', 'moon+prototypes', 'mine.py:FedKeep']
    """
    plain = methods.plain_name(name)
    return name if plain in known or plain.lower() not in known else plain.lower() + name.removeprefix(plain)


def own_values(given: Mapping[str, str], method: str) -> dict[str, Any]:
    """Checked values of the run options and the method's hyper-parameters that are given."""
    options = RUN | options_of(methods.get(method))
    result = {}
    for name, text in given.items():
        if name in options:
            registered = in_any_case(text, NAMED[name]) if name in NAMED else text
            if name == "partition":
                registered = ALIASES.get(registered.lower(), registered)
            result[name] = convert(options[name], registered)
        elif name == SERVER:
            raise UserError(f"is written as a suffix here: `method={method}+{text}`.", field=SERVER)
        elif name not in RESERVED:
            raise UserError(_foreign(name, method, [*options, *RESERVED, SERVER], resumed="resume" in given))
    return result


def _foreign(name: str, method: str, known: Sequence[str], *, resumed: bool) -> str:
    owners = [other for other, cls in methods.every().items() if name in options_of(cls)]
    wrappers = [suffix for suffix in methods.known_suffixes() if name in options_of(methods.get(f"fedavg+{suffix}"))]
    if wrappers and not owners:
        owners = [f"{method}+{suffix}" for suffix in wrappers]
    if not owners:
        return no_option(name, known)
    owner_names = ", ".join(owners)
    other = "" if resumed else f" or use `method={owners[0]}`"
    hint = f" Dirichlet's concentration is `{HINTS[name]}`." if name == "alpha" else ""
    return f"`{name}` belongs to {owner_names}, not to {method}: drop it{other}.{hint}"


def no_option(name: str, known: Collection[str]) -> str:
    """A sentence about an option that does not exist, with the nearest one that does."""
    close = HINTS.get(name) if HINTS.get(name) in known else None
    if close is None and (advice := nearest(name, known)).startswith("did"):
        close = advice.split("'")[1]
    return f"there is no option `{name}`: " + (f"did you mean '`{close}`'?" if close else "`help` lists them all.")
