"""Invented results for a table of a made-up paper, and a claim about them."""

from fedjax_pcdd.report.expected import Expected
from reproduction.claims import Claim


def made_up(method, ga, seed=0, *, split="A", variant=None, tag="", status="finished", **over):
    """A result of the table toy/table1."""
    name = f"{method}-{split}"
    return {
        "status": status, "scale": "cpu", "table": "toy/table1", "split": split, "method": method, "variant": variant,
        "tag": tag, "seed": seed, "command": f"python experiments/run.py --method={name} --seed={seed}",
        "over_preset": over, "options": {"local_epochs": 2}, "metrics": {"ga_pct": ga},
        "ga_best": ga / 100, "ga_best_round": 3, "ga_last": (ga - 2) / 100, "ga_mean_last10": (ga - 5) / 100,
        "seconds": 36.0, "machine": {"device": "cpu"},
        "sentence": "it diverged.",
    }  # fmt: skip


def printed_numbers(**values):
    """Printed numbers of split A; the printed mean of A and B is that of A plus one."""
    numbers = [Expected("A", name, "", "ga_pct", value, None, "", ()) for name, value in values.items()]
    means = [Expected("avg", name, "", "ga_pct", value + 1, None, "", ("A", "B")) for name, value in values.items()]
    return {"toy/table1": [*numbers, *means]}


PAPER = printed_numbers(fedavg=60.0, fedmr=70.0, moon=65.0)
CLAIM = Claim("FedMR is above FedAvg", "toy/table1", "fedmr", "fedavg", "ga_pct", ("A", "B"))
