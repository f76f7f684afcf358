"""Documentation pages generated from the code: one for each method, from docstrings, options and counted traffic."""

import inspect
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedjax_pcdd.cli.help import MethodRow, method_rows
from fedjax_pcdd.cli.messages import flag, sentence
from fedjax_pcdd.methods import METHODS, Method
from fedjax_pcdd.report.tables import markdown, texts
from fedjax_pcdd.training.fields import Option, bounds, choices, options_of
from fedjax_pcdd.training.presets import PRESETS, read_preset
from typeset import paragraphs, typeset

ROOT = Path(__file__).parents[2]
LETTERS = (
    "Scalars for one client and round: P parameters and running statistics of the method's model, C classes, "
    "D features, N public images. Counted from the program. Plain numbers are counted for `mlp` on grey images of "
    "28x28 pixels with 10 classes (P = 159 010, D = 200) and 5000 public images, every option at its default."
)


def title_and_idea(name: str) -> tuple[str, str]:
    """The title of a method, and the first sentence about it.

    >>> title_and_idea("fedavg")
    ('FedAvg', "The weighted mean of the clients' models.")
    """
    title, _, idea = (sys.modules[METHODS[name].__module__].__doc__ or "").partition("\n")[0].partition(": ")
    return title, idea[:1].upper() + idea[1:]


def overview() -> str:
    """The page of all methods."""
    lines = []
    for row in method_rows():
        title, idea = title_and_idea(row.name)
        lines.append((f"[{title}]({row.name}.md)", f"`{row.name}`", typeset(idea), row.paper, row.optimises))
    about = (
        "Each method is one file that says what distinguishes it from FedAvg. *Optimises* is the accuracy that its "
        "paper is about: the global model's (generic), the clients' own (personal), or both. `python "
        "experiments/run.py --list-methods` prints what each sends and keeps; [adding one](../adding_a_method.md) "
        "takes thirty lines."
    )
    return f"# Methods\n\n{about}\n\n" + table(("method", "name", "idea", "paper", "optimises"), lines)


def method_page(name: str) -> str:
    """The page of a method."""
    cls = METHODS[name]
    title, idea = title_and_idea(name)
    text = (sys.modules[cls.__module__].__doc__ or "").partition("\n\n")[2]
    cited = text.partition("\n")[0]
    cited, remainder = (cited, text.removeprefix(cited)) if cited.endswith(".") else ("", text)
    formula = typeset(" ".join((inspect.getdoc(cls) or "").partition("\n\nHyper-parameters:")[0].split()))
    sections = [
        f"# {title}", typeset(idea), f'!!! abstract "In a formula"\n\n    {formula}',
        "## Paper and choices", *paragraphs(cited), *paragraphs(remainder),
        "## Try it", f"```bash\n{command(name)}\n```", *_presets(name),
        "## Hyper-parameters", _hyperparameters(cls),
        "## What travels", LETTERS, _traffic(next(row for row in method_rows() if row.name == name)),
        "## Beside FedAvg", "A round calls the hooks of a method in a fixed order; these are its own.", _hooks(cls),
        "## The whole file", _source(cls),
    ]  # fmt: skip
    return "\n\n".join(sections) + "\n"


def _source(cls: type[Method]) -> str:
    file = Path(inspect.getfile(cls))
    code = textwrap.indent(f"```python\n{file.read_text()}```", "    ")
    return f'??? note "{file.name}"\n\n{code}'


def command(name: str) -> str:
    """A command that runs the method without any file of data."""
    task = " --task=digits_domains" if METHODS[name]().traits().exchange != "never" else ""
    return f"python experiments/run.py --method={name}{task}"


def _presets(name: str) -> list[str]:
    """A paragraph that names the presets with the papers' settings of the method."""
    names = []
    for path in sorted(PRESETS.rglob("*.yaml"), key=lambda path: (path.parent, len(path.name), path.name)):
        preset = read_preset(str(path))
        if name in {*preset.methods, *(variant["method"] for variant in preset.variants.values())}:
            names.append(f"`{path.relative_to(PRESETS).with_suffix('')}`")
    return [f"[Presets](../presets.md) that have it: {', '.join(names)}."] if names else []


def _hyperparameters(cls: type[Method]) -> str:
    lines = []
    for option in options_of(cls).values():
        default = "–" if option.default is None else f"`{option.default}`"
        static = cls.__dataclass_fields__[option.name].metadata.get("static")
        name = f"`{flag(option.name)}` {typeset(option.symbol)}".rstrip()
        lines.append((name, typeset(sentence(option.help)), default, _values(option), "yes" if static else ""))
    if not lines:
        return "None of its own."
    lines = table(("option", "meaning", "default", "values", "recompiles"), lines)
    return f'<div class="options" markdown>\n\n{lines}\n\n</div>'


def _values(option: Option) -> str:
    """The choices or bounds of an option."""
    return ", ".join(f"`{choice}`" for choice in choices(option.kind)) or bounds(option)


def _traffic(row: MethodRow) -> str:
    header = ("sent down", "sent up", "a client keeps", "held in training", "optimises", "status")
    return table(header, [(row.down, row.up, row.client, row.held, row.optimises, row.status)])


def _hooks(cls: type[Method]) -> str:
    """The hooks that differ from the contract's, with the first paragraph of their docstrings."""
    lines = []
    for name, default in vars(Method).items():
        attribute = inspect.getattr_static(cls, name)
        if attribute is default or not callable(attribute) or name in ("replace", "traits") or name.startswith("_"):
            continue
        text = (inspect.getdoc(attribute) or "").split("\n\n")[0]
        lines.append((f"`{name}`", typeset(" ".join(text.split()))))
    return table(("hook", "what it does"), lines) if lines else "All are the contract's defaults."


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table whose cells are Markdown."""
    return markdown(texts("", header, lines, left=header), escape=str).rstrip()
