"""The cases of `benchmarks.accelerator`, each a program; imports nothing beyond the standard library."""

from dataclasses import asdict, dataclass

from benchmarks.workloads import DIRICHLET, WORKLOADS

VIEWS = ("loops", "round", "model", "forms")
ENGINE = ("round", "tuning", "generic", "personal", "exchange")
PARTS = ("forward", "gradient", "steps")
FEDERATIONS = {**WORKLOADS, "dirichlet": DIRICHLET}
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case:
    """One program; a view reads a few of the fields, which are options of the command line.

    Attributes:
      view: one of `VIEWS`.
      program: one of `ENGINE`, or one of `PARTS` for a model.
      workload: for a round or an evaluation, one of `FEDERATIONS`; "dirichlet" has unequal clients.
      clients: number of clients, None for the workload's.
      model: a model's name; in an exchange one for each participant, separated by commas.
      batch: batch size of a model, or of an exchange's participants.
      side: side of their images, in pixels.
      precision: for a model, one of `PRECISIONS`.
      layer: one of `forms.model_layers`, for its forms.
      form: one of the layer's forms, None for all.
    """

    view: str
    program: str = "round"
    workload: str = "w4"
    method: str = "fedavg"
    model: str = "resnet18"
    lanes: int = 1
    clients: int | None = None
    batch: int = 50
    side: int = 32
    precision: str = "float32"
    layer: str | None = None
    form: str | None = None

    def options(self) -> list[str]:
        """The case as a command line."""
        fields = asdict(self)
        return [fields.pop("view"), *(f"--{name}={value}" for name, value in fields.items() if value is not None)]
