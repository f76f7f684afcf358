"""Analyses of runs over the domains of a task (FCCL's figures): tables and pictures from run folders."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_pcdd.analysis import domain_figures
from fedjax_pcdd.analysis.pictures import diagonals, draw_matrices
from fedjax_pcdd.cli.analysis_text import Options, labels_of, table
from fedjax_pcdd.data.domains import TASKS
from fedjax_pcdd.data.npz import read_arrays
from fedjax_pcdd.errors import UserError, is_there
from fedjax_pcdd.report.collect import RunRecord, readable
from fedjax_pcdd.report.grouping import differing, listed_by, of_common_seeds
from fedjax_pcdd.report.tables import NOTHING
from fedjax_pcdd.training.folder import RunFolder

EACH = 50  # samples of a class in an embedding


def tasks(records: list[RunRecord], given: Options) -> str:
    """Intra-domain accuracy and local objective over the rounds (Figure 6), and how much the former fluctuates."""
    labels = labels_of(records)
    of_tasks = readable(records, _recipe)
    records = [record for record, _ in of_tasks]
    top, *other_tops = dict.fromkeys(recipe.top for _, recipe in of_tasks)
    if other_tops:
        raise UserError(f"some of these runs count top-{top}, others top-{other_tops[0]}: name runs of one task.")
    rows = {labels[record.path]: run_rows for record, run_rows in readable(records, _with_start)}
    if "output" in given:
        domain_figures.draw_tasks(rows, top, given["output"])
    lines = []
    for label, run_rows in rows.items():
        intra = np.array([row[f"intra_top{top}"] for row in run_rows if row.get(f"intra_top{top}") is not None])
        numbers = (100 * intra[0], 100 * intra[-1], 100 * domain_figures.fluctuation(intra))
        lines.append([label, *(f"{x:.2f}" for x in numbers), f"{run_rows[-1]['local_objective']:.4f}"])
    heads = ["run", f"own domain, top-{top}, first (%)", "last", "mean change, last 20 evaluations"]
    return table([*heads, "local objective, last"], lines)


def _with_start(record: RunRecord) -> list[dict[str, Any]]:
    """The rounds of a run, before them the accuracies of the pre-trained models if they were written."""
    start, own_domain = RunFolder(record.path).read_json("start.json"), f"intra_top{_recipe(record).top}"
    if not any(row.get(own_domain) is not None for row in record.rows):
        raise UserError(f"{record.path} has no round with {own_domain}: leave it out.")
    return [start, *record.rows] if start else record.rows


def ablation(records: list[RunRecord], given: Options) -> str:
    """Accuracies of the last round by public data set, and with and without CON (Figures 7 and 8), of common seeds.

    Methods other than FCCL have no such term, and a dash in its column.
    """
    of_domains = readable(records, _domains)
    records = [record for record, _ in of_domains]
    records_by_setting = listed_by(
        ((str(r.config["public"] or _recipe(r).public), r.config.get("continual")), r) for r in records
    )
    domains = of_domains[0][1]
    if any(other != domains for _, other in of_domains):
        raise UserError("these runs are of tasks with other domains: name runs of one task.")
    _check_alike(records)
    compared = of_common_seeds(records_by_setting)
    if not compared:
        raise UserError("these settings have no seed in common: run all of them with the same seeds.")
    means = {key: _over_seeds(setting_records) for key, setting_records in compared.items()}
    if "output" in given:
        domain_figures.draw_bars(*_bars(means, domains), given["output"])
    lines = []
    for (public, continual), accuracies in means.items():
        numbers = [
            f"{100 * x:.2f}" for name in ("inter", "intra") for x in (*accuracies[name], accuracies[name].mean())
        ]
        lines.append([public, {True: "with", False: "without", None: NOTHING}[continual], *numbers])
    heads = [f"{name} {domain} (%)" for name in ("inter", "intra") for domain in (*domains, "mean")]
    return table(["public images", "CON", *heads], lines)


def _check_alike(records: list[RunRecord]) -> None:
    """UserError if runs differ in more than their public images and CON."""
    differences = set(differing([record.config for record in records])) - {"public", "public_samples", "continual"}
    if differences:
        which = "method" if "method" in differences else ", ".join(sorted(differences))
        raise UserError(f"these runs differ in {which}, too: name those of one setting.")


def _over_seeds(records: list[RunRecord]) -> dict[str, np.ndarray]:
    """Mean accuracies [K] on the other domains and on the own one."""
    return {name: np.mean([r.result[name] for r in records], axis=0) for name in ("inter", "intra")}


def _bars(means: dict[tuple[str, bool | None], Any], domains: Sequence[str]) -> tuple[dict, list[str]]:
    """Panels and groups: with and without CON by public data set, or by domain if all runs are of one kind."""
    kinds = sorted({continual for _, continual in means}, key=bool, reverse=True)
    publics = list(dict.fromkeys(public for public, _ in means))
    if len(kinds) == 1:
        bars = {public: [*accuracies["inter"], accuracies["inter"].mean()] for (public, _), accuracies in means.items()}
        return {"other domains": bars}, [*domains, "mean"]
    missing = {"inter": np.array([np.nan]), "intra": np.array([np.nan])}
    names: dict[bool | None, str] = {True: "FCCL", False: "without CON"}
    return {
        title: {names[k]: [means.get((public, k), missing)[name].mean() for public in publics] for k in kinds}
        for name, title in (("inter", "other domains"), ("intra", "own domain"))
    }, publics


def correlation(records: list[RunRecord], given: Options) -> str:
    """How the participants' logits correlate with their mean, on public and on own images (Figure 5)."""
    if "output" in given and len(records) > 1:
        raise UserError("one picture is of one run: name one, or leave `output` out.")
    lines, labels, clip = [], labels_of(records), given.get("clip_colours") == "true"
    for record, (matrices, private, names) in readable(records, _correlations):
        if "output" in given:
            draw_matrices(matrices, private, names.tolist(), given["output"], clip=clip)
        means = (*diagonals(matrices), *diagonals(private))
        lines.append([labels[record.path], *(f"{x:.3f}" for x in means)])
    heads = [f"{images}, {part}" for images in ("public", "own") for part in ("same class", "other classes")]
    return table(["run", *heads], lines)


def _correlations(record: RunRecord) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Matrices [K, C, C] on public and on own images, and the participants' names [K]."""
    path = record.path / "correlation.npz"
    if not is_there(path):
        raise UserError(f"{record.path} has no correlation.npz, as runs of a task with public images have.")
    arrays = read_arrays(path, ("matrices", "private", "participants"))
    shapes = [array.shape for array in arrays.values()]
    if len(shapes) < 3 or not shapes[0] == shapes[1] == (*shapes[2], *shapes[0][1:2] * 2):
        raise UserError(f"{path} is not what a run writes: leave {record.path} out.")
    return arrays["matrices"], arrays["private"], arrays["participants"]


def embedding(records: list[RunRecord], given: Options) -> str:
    """How well the features of the first two participants separate the classes of own and other domain (Figure 4)."""
    panels: dict[str, list] = {"own domain": [], "other domain": []}
    lines, labels = [], labels_of(records)
    for record, samples in readable(records, _embedded):
        label = labels[record.path]
        for row, participant, domain, sample in samples:
            panels[row].append((f"{label}: {participant} on {domain}", sample))
            lines.append([label, participant, domain, *(f"{x:.3f}" for x in domain_figures.separation(*sample))])
    if "output" in given:
        domain_figures.draw_embeddings(panels, given["output"])
    return table(["run", "participant", "images", "between over within classes", "silhouette"], lines)


def _embedded(record: RunRecord) -> list[tuple[str, str, str, tuple[np.ndarray, np.ndarray]]]:
    """Of the first two participants: own or other domain, participant, domain, and the features and labels there."""
    from fedjax_pcdd.api.runs import load_run  # only this analysis restores checkpoints

    names, history = _domains(record), load_run(record.path)
    dataset, tests = history.federation.dataset, history.federation.partition.test
    samples = []
    for client in (0, 1):
        for row, domain in (("own domain", client), ("other domain", 1 - client)):
            indices = tests[domain][domain_figures.balanced(dataset.y_test[tests[domain]], EACH)]
            features = np.asarray(history.outputs(dataset.x_test[indices], client=client).features)
            samples.append((row, names[client], names[domain], (features, dataset.y_test[indices])))
    return samples


def _domains(record: RunRecord) -> list[str]:
    """Names of the domains of a run; UserError if it is no run over domains."""
    _recipe(record)
    accuracies: list[Any]
    domains, *accuracies = (record.result.get(name) for name in ("domains", "intra", "inter"))
    if not isinstance(domains, list) or any(np.shape(values) != (len(domains),) for values in accuracies):
        raise UserError(f"{record.path / 'summary.json'} is not that of a run over domains: leave {record.path} out.")
    return domains


def _recipe(record: RunRecord):
    task = record.config["task"]
    if task not in TASKS:
        raise UserError(f"{record.path} is not a run over the domains of a task: leave it out.")
    return TASKS[task]
