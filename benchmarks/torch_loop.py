"""Seconds a round of FedAvg as a plain PyTorch loop over clients: what a simulator is compared with.

    python -m benchmarks.torch_loop --workload=w1 --rounds=8 --threads=1 [--tuned]

Plain, as research code is written: each client has its own model and its own DataLoader. Tuned: one model for
all clients, batches by indexing, channels-last memory. Needs PyTorch and NumPy, nothing else of this project.
"""

# pyright: reportMissingImports=false

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.workloads import CLASSES, LR, MOMENTUM, WEIGHT_DECAY, Workload

try:
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    from benchmarks import torch_models
except ImportError as error:
    sys.exit(f"This benchmark needs PyTorch ({error}): install torch in the interpreter that runs it.")

Batches = Callable[[], Iterable[tuple[Any, Any]]]


def client_batches(workload: Workload, rng: np.random.Generator, *, tuned: bool) -> Batches:
    """One client's random data, as a function that gives the batches of one epoch in a fresh order."""
    height, width, channels = workload.shape
    count, batch = workload.per_client, workload.batch
    images = torch.from_numpy(rng.standard_normal((count, channels, height, width), np.float32))
    labels = torch.from_numpy(rng.integers(0, CLASSES, count))
    if not tuned:
        return DataLoader(TensorDataset(images, labels), batch_size=batch, shuffle=True).__iter__
    images = images.to(memory_format=torch.channels_last)
    return lambda: ((images[i], labels[i]) for i in torch.randperm(count).split(batch))


def train(model, batches: Batches) -> None:
    """One local epoch with a fresh optimiser."""
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY)
    for images, labels in batches():
        optimiser.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimiser.step()


def round_of(server, replicas: list, clients: list[Batches]) -> None:
    """Every client trains from the server's weights; their mean is loaded into the server."""
    sent, mean = server.state_dict(), {}
    for k, batches in enumerate(clients):
        model = replicas[k % len(replicas)]
        model.load_state_dict(sent)
        train(model, batches)
        for name, value in model.state_dict().items():
            share = value / len(clients)
            mean[name] = mean[name] + share if k else share
    server.load_state_dict(mean)


def measure(name: str, workload: Workload, rounds: int, threads: int, *, tuned: bool) -> dict:
    """The record that is printed."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layout = torch.channels_last if tuned else torch.contiguous_format
    rng = np.random.default_rng(0)
    clients = [client_batches(workload, rng, tuned=tuned) for _ in range(workload.clients)]
    replicas = 1 if tuned else workload.clients
    server, *models = (torch_models.build(workload).to(memory_format=layout) for _ in range(1 + replicas))
    marks = [workloads.clocks()]
    for _ in range(rounds + 1):
        round_of(server, models, clients)
        marks.append(workloads.clocks())
    return {
        "bench": "torch_loop_tuned" if tuned else "torch_loop",
        "workload": name,
        **workloads.timing(marks, workload.samples),
        "peak_memory_mb": workloads.peak_memory_mb(),
        "threads": threads,
        "clients": workload.clients,
        "params": sum(p.numel() for p in server.parameters()),
        "torch": torch.__version__,
    }


def main(argv: list[str] | None = None) -> None:
    parser = workloads.parser(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tuned", action="store_true")
    args = parser.parse_args(argv)
    record = measure(args.workload, workloads.chosen(args), args.rounds, args.threads, tuned=args.tuned)
    workloads.report(record, quiet=args.json)


if __name__ == "__main__":
    main()
