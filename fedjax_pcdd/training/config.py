"""The configuration of a run: `RunConfig` and a method's hyper-parameters, and both as one flat YAML text."""

# ruff: noqa: RUF009 - run_option is a dataclass field, not a value

import dataclasses
import inspect
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from fedjax_pcdd.data.partition import CLIENTS, check_name, has_clients
from fedjax_pcdd.errors import UserError, is_there, shortened
from fedjax_pcdd.registry import check_unedited, recall, short_name
from fedjax_pcdd.training import fields
from fedjax_pcdd.training.fields import check, options_of, run_option

if TYPE_CHECKING:  # methods load JAX, which options do not need
    from fedjax_pcdd.methods import Method

GROUPS = {
    "data": "The data set and how it is divided among the clients.",
    "model": "What every client trains.",
    "task": "Tasks by domain, participants with models of their own, and public images.",
    "training": "Rounds, local optimisation and aggregation.",
    "evaluation": "Generic accuracy (GA) and personal accuracy (PA).",
    "run": "Seed, hardware, what is written and what is shown.",
}

# Options that determine other options; they are not part of a run's configuration.
RESERVED = ("preset", "split", "variant", "list_methods", "list_datasets", "list_models", "list_tasks", "help")

# Defaults that `task` changes to FCCL's settings; `local_epochs` None stands for those of each domain.
TASK_DEFAULTS = {
    "rounds": 40, "local_epochs": None, "batch_size": 512, "last_batch": "keep", "optimizer": "adam", "lr": 1e-3,
    "weight_decay": 0.0, "fine_tune_epochs": 0,
}  # fmt: skip

# Where a run is stored has no influence on what it computes.
FOLDERS = ("run_dir", "resume")

# May differ when a run is continued: they say where it runs and what is written, not what is computed.
MAY_CHANGE = {
    *("quiet", "profile", "keep", "checkpoint_every", "checkpoint_clients_every", "tensorboard", "wandb", "mlflow"),
    *("loggers", "track", "track_every", "track_local", "device", "devices", "data_dir"),
    *("data", "data_memory"),
    *("coordinator", "processes", "process", "patience"),
}

NOT_COMPUTED = {*FOLDERS, *MAY_CHANGE}  # two runs that differ only in these compute the same


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The options of a run, without its method's hyper-parameters; UserError for a value out of its bounds."""

    # fmt: off
    method: str = run_option("fedavg", "", "method, see `list_methods`")

    dataset: str = run_option("digits", "data", "data set, see `list_datasets`; your own: docs/data.md")
    data_dir: Path | None = run_option(None, "data",
        "folder of npz files or of prepared data sets; by default where TensorFlow Datasets keeps them")
    partition: Literal["dirichlet", "pcdd", "extended_dirichlet", "quantity", "iid", "natural"] | str = run_option(
        "dirichlet", "data",
        "how samples are divided among clients; pcdd is P{clients}C{classes-per-client}, extended_dirichlet the same "
        "with shares by Dirichlet(beta), quantity gives unequal sizes by Dirichlet(beta); or a file of index lists "
        "(lists.npz), or a function (split.py:by_hospital)")
    beta: float = run_option(0.1, "data", "Dirichlet concentration; smaller is more skewed", above=0)
    clients: int | None = run_option(None, "data",
        "number of clients K; by default 10, or all that natural and lists have (fewer of natural: those with the most "
        "samples); a function gets it if it has this parameter", low=1, high=10**6)
    classes_per_client: int = run_option(2, "data", "classes of each client, for pcdd and extended_dirichlet", low=1)
    cohort: int | None = run_option(None, "data", "clients drawn for each round, S; by default all", low=1)
    availability: str | None = run_option(None, "data",
        "which clients can be drawn for a round: model (day and night, with a probability and time zone for each), or "
        "an npz file of probabilities; by default all; docs/scale.md")
    lost_share: float = run_option(0.0, "data",
        "probability that a client of the cohort is lost in mid-round, so that its work does not count", low=0, below=1)
    min_samples: int = run_option(10, "data",
        "fewest training samples of a client, in dirichlet with `retry` and in quantity", low=0)
    retry: bool = run_option(True, "data", "redraw a Dirichlet partition until every client has `min_samples`")
    doubled: bool = run_option(False, "data", "pcdd as in the published FedMR code, which hands out every sample twice")
    train_samples: int | None = run_option(None, "data",
        "training samples used, drawn class by class from the seed; by default all", low=1)
    test_samples: int | None = run_option(None, "data", "test samples used, drawn likewise; by default all", low=1)
    validation: float | None = run_option(None, "data",
        "share of each client's training samples, drawn class by class, that is held out for validation",
        above=0, below=1)
    select_on: Literal["test", "validation"] = run_option("test", "data",
        "samples that choose the best round, and the best experiment of a search or grid")

    select_by: Literal["plain", "balanced"] = run_option("plain", "data",
        "accuracy that chooses the best round: share of correct answers, or mean recall of the classes")

    model: str | None = run_option(None, "model",
        "architecture, see `list_models`; by default lstm for text, mlp for digits and tables, else simple_cnn")
    neck: Literal[0, 1, 2] = run_option(0, "model",
        "linear layers between backbone and head, unless the method sets them (FedGELA has two)")
    bn: Literal["average", "local", "local-layers", "group"] = run_option("average", "model",
        "batch norm: statistics averaged; statistics kept by each client; whole layers kept by each client (FedBN), so "
        "that GA is the mean over the clients' models, and ga_server_average that of the model with the mean of their "
        "layers; or group norm instead")
    precision: Literal["float32", "tf32", "bfloat16"] = run_option("float32", "model",
        "precision of the model's products: exact; operands rounded to 10 bits where that makes a GPU or TPU faster; "
        "or all activations in bfloat16. Parameters, sums, statistics and losses are float32; docs/performance.md")
    initial_weights: Path | None = run_option(None, "model",
        "npz file of parameters and statistics, by path, from which the backbone starts; docs/data.md")

    task: str | None = run_option(None, "task",
        "a task whose domains are the participants, instead of data set and partition; see `list_tasks`")
    task_split: Literal["held_out", "code"] = run_option("held_out", "task",
        "test images of office_home: 30 % of each class, or as in the published code")
    models: str | None = run_option(None, "task",
        "architectures of the participants, such as resnet10,resnet12; repeated in turn if there are fewer")
    public: str | None = run_option(None, "task",
        "data set of the unlabelled public images; by default the task's, digits_public for digits")
    public_samples: int | None = run_option(None, "task",
        "number of public images; by default the task's, else 1000 of digits_public and 5000 of others", low=1)
    public_batch: int = run_option(512, "task", "public images in a step; an incomplete batch is dropped",
        low=1, high=10**6)
    pretrain_epochs: int | None = run_option(None, "task",
        "epochs that each participant trains alone before round 1; by default 50 in a task, else 0", low=0, high=10**4)
    pretrain_batch_size: int = run_option(256, "task", "batch size in these epochs", low=1, high=10**4)

    rounds: int = run_option(50, "training", "communication rounds T", low=1, high=10**7)
    local_epochs: int | None = run_option(10, "training",
        "epochs E of local training in a round; in a task by default each domain's own", low=1, high=10**4)
    local_steps: int | None = run_option(None, "training",
        "updates of a client in a round, instead of epochs; its order of samples continues across rounds",
        low=1, high=10**6)
    batch_size: int = run_option(100, "training", "mini-batch size B", low=1, high=10**6)
    last_batch: Literal["drop", "keep", "top_up", "strict"] = run_option("drop", "training",
        "what happens to an epoch's incomplete batch: dropped, kept, or filled up with the epoch's first samples. A "
        "client with less than one batch trains on what it has, except with strict, which drops that too (the "
        "published code)")
    optimizer: Literal["sgd", "adam"] = run_option("sgd", "training", "local optimiser")
    optimizer_state: Literal["fresh", "kept"] = run_option("fresh", "training",
        "momentum or moments: reset each round, or kept by each client (as in FedGen's and FML's code)")
    lr: float = run_option(0.01, "training", "learning rate eta", above=0)
    lr_steps: str = run_option("", "training",
        "rounds after which the learning rate falls, such as 40,80; by default never")
    lr_decay: float = run_option(0.1, "training", "factor by which it falls", above=0, high=1)
    momentum: float = run_option(0.9, "training", "momentum rho of sgd", low=0, below=1)
    weight_decay: float = run_option(1e-4, "training", "weight decay, added to the gradient", low=0)
    shuffle: bool = run_option(True, "training", "shuffle the samples in each epoch, else keep their stored order")
    loss: Literal["ce", "focal"] = run_option("ce", "training",
        "supervised loss, for methods without a softmax of their own: cross-entropy or focal")
    focal_gamma: float = run_option(2.0, "training", "exponent of the focal loss; 0 is cross-entropy", low=0)
    class_weights: Literal["none", "pooled", "local"] = run_option("none", "training",
        "class weights of that loss: n / n_c of all clients' training samples, or of each client's own")
    grad_clip: Literal["method", "none"] | float = run_option("method", "training",
        "largest global norm of the gradient; method: as in the method's code (FedGELA: 20)", above=0)
    weights: Literal["method", "uniform", "batches"] = run_option("method", "training",
        "aggregation weights p_k: the method's (mostly n_k), equal, or a client's number of full batches")
    augment: bool = run_option(True, "training", "augment training images in the way customary for the data set")
    augmentation: str | None = run_option(None, "training",
        "a function of one image and a key to use instead, such as mine.py:cutout")

    seed: int = run_option(0, "run", "seed of everything random", low=0, high=2**32 - 1)
    lanes: Literal["auto"] | int = run_option("auto", "run",
        "clients that are trained together as one step; auto measures which number is fastest", low=1, high=10**5)
    tune: Literal["auto", "off"] = run_option("auto", "run",
        "how convolutions are computed on a GPU or TPU: timed once per kind of device (at most 20 s), or a fixed rule")
    data: Literal["auto", "device", "stream"] = run_option("auto", "run",
        "where samples are stored: on the device, or on the host, which sends a cohort's samples while the device "
        "computes; auto: on the host if they exceed a third of the device's free memory")
    data_memory: int | None = run_option(None, "run",
        "device memory in MB (10^6 bytes) for samples that are sent from the host, those in use and the next ones; by "
        "default a third of what is free",
        low=1)
    client_state: Literal["device", "host", "disk"] = run_option("device", "run",
        "where clients' states are stored between rounds: use host or disk if clients times parameters exceed the "
        "device's or the host's memory. Files on disk are temporary (TMPDIR)")
    device: Literal["auto", "cpu", "gpu", "tpu"] = run_option("auto", "run", "where to compute")
    devices: Literal["auto"] | int = run_option("auto", "run",
        "devices of this process among which a round's clients are divided, with `lanes` on each; auto: all GPUs or "
        "TPUs, or one CPU", low=1, high=256)
    coordinator: str | None = run_option(None, "run",
        "HOST:PORT of process 0, for one run in several processes; auto where SLURM, Open MPI or a TPU provides it")
    processes: int | None = run_option(None, "run", "number of these processes", low=1)
    process: int | None = run_option(None, "run", "number of this process, from 0", low=0)
    patience: int = run_option(100, "run",
        "seconds that processes wait for each other at the start, and for a sign of life later", low=5)

    eval_every: int = run_option(1, "evaluation", "rounds between evaluations", low=1)
    fine_tune_epochs: int = run_option(10, "evaluation",
        "epochs of fine-tuning for PA, for methods without a personal model", low=0, high=10**4)
    pa_protocol: Literal["last", "received", "best_epoch", "best_mean"] | None = run_option(None, "evaluation",
        "which model of a round gives PA: after the last epoch (default), as received, or after the best epoch, for "
        "each client or in the mean over clients, chosen on their tests; docs/concepts.md")
    calibrate: Literal["none", "ccvr"] = run_option("none", "evaluation",
        "calibrate the head of the last global model with all clients after training; its accuracy is ga_ccvr")
    eval_batch: int | None = run_option(None, "evaluation",
        "batch size of evaluation; by default 100 on a CPU, else 500, or what all lanes train at once if that is more",
        low=1, high=10**6)
    track: str | None = run_option(None, "evaluation",
        "what to record beside GA and PA, such as classes,angles,features,spectrum,intra,gradients; docs/analyses.md")
    track_every: int = run_option(1, "evaluation", "rounds between two records of what is tracked", low=1)
    track_local: bool = run_option(True, "evaluation",
        "also track the clients' models right after local training, which is repeated for this; always on if there is "
        "no global model")

    run_dir: Path | None = run_option(None, "run",
        "folder of this run; by default runs/METHOD-DATASET-PARTITION-sSEED, with a number if that exists")
    resume: Path | None = run_option(None, "run", "folder of a run to continue with the options it was started with")
    checkpoint_every: Literal["auto"] | int = run_option("auto", "run",
        "rounds between checkpoints; auto: one after every round, or fewer where writing them would take more than a "
        "tenth of the time (several processes: after every round)", low=1)
    checkpoint_clients_every: int = run_option(1, "run",
        "only every n-th checkpoint holds the clients' states; resuming goes back to one that does, or to the start",
        low=1)
    keep: int = run_option(3, "run", "number of checkpoints to keep; the one before the last is the fallback", low=2)
    profile: bool = run_option(False, "run",
        "trace the second and third round into profile/ in the run folder, for xprof or Perfetto")
    quiet: bool = run_option(False, "run", "show nothing but errors and warnings")
    tensorboard: bool = run_option(False, "run", "also log to TensorBoard")
    wandb: bool = run_option(False, "run", "also log to Weights & Biases")
    mlflow: bool = run_option(False, "run", "also log to MLflow")
    loggers: str | None = run_option(None, "run",
        "further loggers, several with commas, such as mine.py:Logger: callbacks made from the run's folder and its "
        "options")
    # fmt: on

    def __post_init__(self):
        for option in options_of(type(self)).values():
            check(option, getattr(self, option.name))
        if self.local_epochs is None and self.task is None and self.local_steps is None:
            raise UserError("`local_epochs=none` stands for the epochs of a task's domains: give a number, or `task`.")
        if self.local_steps is not None and (self.local_epochs is not None or self.task is not None):
            raise UserError("`local_steps` stands in place of epochs: use `local_epochs=none`, and no `task`.")
        others = {"`select_on=validation`": self.select_on == "validation", "`task`": self.task is not None}
        if self.select_by == "balanced" and any(others.values()):
            given = " and ".join(name for name, is_given in others.items() if is_given)
            raise UserError(f"`select_by=balanced` is measured on one test set for all: drop it, or {given}.")
        self._check_processes()
        rounds_of(self.lr_steps)
        if self.track is not None:
            from fedjax_pcdd.training.tracking import names_of  # imported only by runs that track

            names_of(self.track)
        if self.select_on == "validation" and self.validation is None:
            raise UserError("`select_on=validation` needs validation samples: give their share, as `validation=0.1`.")
        if self.validation is not None and (self.task is not None or self.models is not None):
            raise UserError("`validation` is for clients with one architecture: leave it out, or `task` and `models`.")
        self._check_availability()
        if self.task is None:
            check_name(self.partition)
        if self.clients is None and not has_clients(self.partition):
            object.__setattr__(self, "clients", CLIENTS)
        if self.cohort is not None and self.clients is not None and self.cohort > self.clients:
            raise UserError(f"`cohort={self.cohort}` is more than the {self.clients} clients: lower it or raise them.")

    @property
    def chosen_on(self) -> str:
        """The criterion that chooses the best round, a key of `metrics.SELECTED`."""
        return "test, balanced accuracy" if self.select_by == "balanced" else self.select_on

    def _check_availability(self) -> None:
        may_be_absent = self.availability is not None or self.lost_share > 0
        if may_be_absent and (self.task is not None or self.models is not None):
            raise UserError("`availability` and `lost_share` are for clients with one architecture: leave them out.")
        if self.availability not in (None, "model") and not str(self.availability).endswith(".npz"):
            raise UserError(f"`availability={self.availability}` must be model or the path of an npz file.")

    def _check_processes(self) -> None:
        """Raise UserError unless `coordinator`, `processes` and `process` are consistent."""
        _check_address(self.coordinator)
        has_address, numbers = self.coordinator not in (None, "auto"), (self.processes, self.process)
        if has_address != (None not in numbers) or (not has_address and numbers != (None, None)):
            raise UserError("several processes need `coordinator=HOST:PORT`, `processes` and `process`, or auto alone.")
        if self.process is not None and self.process >= (self.processes or 1):
            raise UserError(f"`process={self.process}` must be below `processes={self.processes}`: they count from 0.")


def rounds_of(lr_steps: str) -> tuple[int, ...]:
    """The rounds in an option like "40,80"; UserError unless they are round numbers in rising order."""
    rounds = tuple(int(part) if re.fullmatch(r"\d{1,9}", part) else 0 for part in fields.names_in(lr_steps))
    if any(before >= after for before, after in pairwise((0, *rounds))):
        raise UserError(f"`lr_steps={lr_steps}` must be rising round numbers with commas between them, as 40,80.")
    return rounds


def _check_address(coordinator: str | None) -> None:
    if coordinator not in (None, "auto") and not re.fullmatch(r"\S+:\d{1,5}", coordinator or ""):
        raise UserError(f"`coordinator={coordinator}` must be HOST:PORT of process 0, or auto.")


RUN = options_of(RunConfig)


def check_written(given: Mapping[str, str]) -> None:
    """Raise UserError for a run option whose text is wrong whatever the other options are; loads no method."""
    values = {name: fields.convert(RUN[name], text) for name, text in given.items()}
    _check_address(values.get("coordinator"))
    rounds_of(values.get("lr_steps") or "")


def check_names(method: type["Method"]) -> None:
    """Raise UserError if a hyper-parameter has the name of a run option, which would be ambiguous, or of a hook."""
    for name in options_of(method):
        if name in RUN or name in RESERVED:
            raise UserError(f"{method.__name__} has a hyper-parameter {name}, as an option of every run: rename it.")
        if inspect.isfunction(inspect.getattr_static(method, name, None)):
            raise UserError(f"{method.__name__} has a hyper-parameter and a function {name}: rename one of them.")


def as_read(method: "Method") -> "Method":
    """The method, with its hyper-parameters read as the command line reads them.

    Fields of types that options do not have, such as arrays, may hold anything.

    Raises:
      UserError: a value that does not fit, or a class that cannot be traced or called as it is written.
    """
    from fedjax_pcdd.methods.declared import check_declared  # loads JAX, which the help of a run does not need

    check_names(type(method))
    entries = {name: (option, getattr(method, name)) for name, option in options_of(type(method)).items()}
    parsed = {name: fields.read_value(*entry) for name, entry in entries.items() if fields.is_plain(entry[0].kind)}
    for name in entries.keys() - parsed.keys():
        check(*entries[name])
    method = dataclasses.replace(method, **parsed)
    check_declared(method)
    return method


def values(config: RunConfig, method: "Method") -> dict[str, Any]:
    """Run options, then hyper-parameters, by field name."""
    run = {name: getattr(config, name) for name in RUN}
    return run | {name: getattr(method, name) for name in options_of(type(method))}


def build(given: Mapping[str, Any]) -> tuple[RunConfig, "Method"]:
    """Configuration and method from values by field name; fields that are not given have their defaults.

    Raises:
      UserError: an unknown method, or a value out of its bounds.
    """
    from fedjax_pcdd import methods
    from fedjax_pcdd.methods.declared import check_declared

    if given.get("local_steps") is not None:
        given = dict[str, Any](local_epochs=None) | dict(given)
    config = RunConfig(**{name: value for name, value in given.items() if name in RUN})
    cls = methods.get(config.method)
    check_names(cls)
    method = _made(cls, {name: value for name, value in given.items() if name not in RUN})
    check_declared(method)
    return config, method


def _made(cls: type["Method"], given: Mapping[str, Any]) -> "Method":
    """A method from hyper-parameters by name; UserError for one that is missing, out of its bounds, or no option."""
    for field in filter(lambda field: field.init, dataclasses.fields(cls)):
        if field.default is field.default_factory is dataclasses.MISSING and field.name not in given:
            raise UserError(f"`{field.name}` has no default: give its value.")
    method = cls(**given)
    for option in options_of(cls).values():
        value = getattr(method, option.name)
        if not fields.is_written(value):
            raise UserError(f"`{option.name}`, {shortened(value)}, {fields.NOT_PLAIN}.")
        check(option, value)
    return method


def dump(config: RunConfig, method: "Method") -> str:
    """Every run option and every hyper-parameter as flat YAML, and the origins of parts from outside this package.

    UserError if the file of the method is no longer what was imported.
    """
    from fedjax_pcdd.training.outside import OUTSIDE, origins_of  # imports much that the help does not need

    check_unedited(type(method))  # the origins are of the files as they are now, and a sweep imports its methods once
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in values(config, method).items()}
    origins = {name: origin._asdict() for name, origin in origins_of(config).items()}
    plain |= {OUTSIDE: origins} if origins else {}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=1000)


def parse_config(text: str, source: str = "the configuration") -> tuple[RunConfig, "Method"]:
    """The configuration and method that `dump` wrote; `source` names the text in error messages, as by its path.

    Raises:
      UserError: invalid YAML, an unknown key, or a value that does not fit.
    """
    from fedjax_pcdd import methods
    from fedjax_pcdd.training.outside import OUTSIDE, recorded_origins

    flat = fields.load_mapping(text, source)
    recall(recorded_origins(flat.pop(OUTSIDE, None), source))
    cls = methods.get(str(flat.get("method", RUN["method"].default)))
    return build(fields.convert_all(flat, RUN | options_of(cls), source))


def difference(recorded: tuple[RunConfig, "Method"], given: tuple[RunConfig, "Method"]) -> list[str]:
    """Names of the fields that make two pairs (configuration, method) compute differently, or that one pair lacks."""
    a, b = ({n: v for n, v in values(*pair).items() if n not in NOT_COMPUTED} for pair in (recorded, given))
    return [name for name in a | b if name not in a or name not in b or a[name] != b[name]]


def partition_tag(options: Mapping[str, Any]) -> str:
    """The partition as a folder's name has it, such as `dirichlet0.1`, `P10C2` or `iid`, from a run's options."""
    if options["task"] is not None:
        return "domains"
    match options["partition"]:
        case "dirichlet" | "quantity" as kind:
            return f"{kind}{options['beta']:g}"
        case "pcdd":
            return f"P{options['clients']}C{options['classes_per_client']}"
        case "extended_dirichlet":
            return f"P{options['clients']}C{options['classes_per_client']}dirichlet{options['beta']:g}"
    return short_name(options["partition"])


def run_folder(config: RunConfig) -> Path:
    """`run_dir`, or if that is None, a folder below runs/ that does not exist yet."""
    if config.run_dir is not None:
        return config.run_dir
    dataset = short_name(config.task or config.dataset).replace("/", "_")
    first = Path("runs") / f"{short_name(config.method)}-{dataset}-{partition_tag(vars(config))}-s{config.seed}"
    folder, number = first, 1
    while is_there(folder, Path.exists):
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    return folder
