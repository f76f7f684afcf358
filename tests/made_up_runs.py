"""Run folders and presets that tests write themselves; nothing is trained."""

import json

import numpy as np
from matplotlib.figure import Figure

from fedjax_pcdd.training.config import build, dump

PRESET = """
run: {dataset: digits, rounds: 3}
splits: {A: {partition: pcdd, clients: 2}, B: {partition: pcdd, clients: 4}}
methods: {fedprox: {mu: 0.5}}
variants: {weak: {method: fedrs, alpha: 0.1}, strong: {method: fedrs, alpha: 0.9}}
"""
EXPECTED = """split,method,variant,metric,value,std,note
A,fedavg,,ga_pct,50.0,0.5,
A,fedprox,,ga_pct,60.0,,as printed
A,moon,,ga_pct,55.0,,
A,fedrs,weak,ga_pct,70.0,,
B,fedavg,,ga_pct,40.0,,
avg,fedavg,,ga_pct,44.0,,mean of A B; ours
A,fedavg,,rounds_to_target,2,,
A,fedavg,,speedup,1,,
A,fedavg,,upload_millions,3,,
"""


def write_experiments(folder):
    """A folder with one preset, `toy/table1`, and the numbers that its paper prints."""
    (folder / "presets/toy").mkdir(parents=True)
    (folder / "presets/toy/table1.yaml").write_text(PRESET)
    (folder / "expected").mkdir()
    (folder / "expected/toy_table1.csv").write_text(EXPECTED)
    return folder


def write_run(folder, ga=0.5, pa=0.8, *, finished=True, shift=0, origin=None, rounds=3, **options):
    """A run folder with accuracies that rise to `ga` and `pa`."""
    folder.mkdir(parents=True)
    options = {"method": "fedavg", "rounds": rounds} | options
    (folder / "config.yaml").write_text(dump(*build(options)))
    (folder / "resolved.json").write_text(json.dumps({"lanes": 1} | (origin or {})))
    rows = [
        {"round": r, "ga": ga * r / rounds, "pa": pa * r / rounds, "loss": 1 / r, "ga_per_class": [ga, None]}
        for r in range(1, rounds + (1 if finished else 0))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "clients.jsonl").write_text(json.dumps({"round": rounds, "pa_per_client": [pa, 0.25]}) + "\n")
    np.savez(folder / "partition.npz", train=np.arange(5) + shift)
    figure = Figure(figsize=(1, 1))
    figure.add_subplot().plot([shift, 1])
    figure.savefig(folder / "partition.png")
    if finished:
        summary = {"method": options["method"], "rounds": rounds, "seconds_per_round": 0.5}
        summary |= {"ga_best": ga, "ga_last": ga, "ga_mean_last10": ga / 2, "pa_best": pa, "pa_last": pa}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def in_preset(folder, split, method="fedavg", variant=None, ga=0.5, seed=0, **more):
    """The folder of a run that was started from the preset."""
    preset_options = {"partition": "pcdd", "clients": {"A": 2, "B": 4}[split]}
    preset_options |= {"fedprox": {"mu": 0.5}, "fedrs": {"alpha": {"weak": 0.1, "strong": 0.9}.get(variant or "")}}.get(
        method, {}
    )
    origin = {"preset": "toy/table1", "split": split, "variant": variant, "command": "python experiments/run.py <x>"}
    return write_run(folder, ga, method=method, seed=seed, origin=origin, **(preset_options | more))
