"""Seconds a round of FedAvg as a plain PyTorch loop over clients: what a simulator is compared with.

    python -m benchmarks.torch_loop --workload=w1 --rounds=8 --threads=1 [--tuned | --compiled] [--device=cuda]

Plain, as research code is written: each client has its own model and its own DataLoader. Tuned: one model for
all clients, batches by indexing, channels-last memory. Compiled: tuned, in bfloat16 (autocast) by torch.compile.
Needs PyTorch and NumPy, nothing else of this project.
"""

# pyright: reportMissingImports=false

import contextlib
import itertools
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


def client_batches(workload: Workload, rng: np.random.Generator, *, tuned: bool, device: str = "cpu") -> Batches:
    """One client's random data, as a function that gives the batches of one epoch in a fresh order.

    If tuned, the data lies on the device; otherwise each batch is copied there.
    """
    height, width, channels = workload.shape
    count, batch = workload.per_client, workload.batch
    images = torch.from_numpy(rng.standard_normal((count, channels, height, width), np.float32))
    labels = torch.from_numpy(rng.integers(0, CLASSES, count))
    if not tuned:
        loader = DataLoader(TensorDataset(images, labels), batch_size=batch, shuffle=True)
        return lambda: ((x.to(device), y.to(device)) for x, y in loader)
    images, labels = images.to(device, memory_format=torch.channels_last), labels.to(device)
    return lambda: ((images[i], labels[i]) for i in torch.randperm(count, device=device).split(batch))


def train(model, forward, batches: Batches, epochs: int, half) -> None:
    """Local epochs with a fresh optimiser; `forward` is the model or its compiled form, `half` a precision context."""
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY)
    for images, labels in itertools.chain.from_iterable(batches() for _ in range(epochs)):
        optimiser.zero_grad()
        with half:
            loss = cross_entropy(forward(images), labels)
        loss.backward()
        optimiser.step()


def round_of(server, replicas: list, clients: list[Batches], epochs: int, half=None) -> None:
    """Every client trains from the server's weights; their mean is loaded into the server.

    Args:
      replicas: pairs of a model and its forward pass, which the clients take in turn.
    """
    sent, mean = server.state_dict(), {}
    for k, batches in enumerate(clients):
        model, forward = replicas[k % len(replicas)]
        model.load_state_dict(sent)
        train(model, forward, batches, epochs, half or contextlib.nullcontext())
        for name, value in model.state_dict().items():
            share = value / len(clients)
            mean[name] = mean[name] + share if k else share
    server.load_state_dict(mean)


def finished(device: str) -> tuple[float, float]:
    """The clocks, once the device has finished its work."""
    if device != "cpu":
        torch.cuda.synchronize()
    return workloads.clocks()


def measure(
    name: str,
    workload: Workload,
    rounds: int,
    threads: int,
    *,
    tuned: bool,
    device: str = "cpu",
    compiled: bool = False,
) -> dict:
    """The record that is printed; compiled is tuned, in bfloat16 and by torch.compile."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tuned = tuned or compiled
    if tuned and device != "cpu":  # TF32, as JAX has it by default; the plain loop keeps PyTorch's default
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if tuned else torch.contiguous_format
    rng = np.random.default_rng(0)
    # Equal clients take equal time, so those of the first cohort stand for all.
    clients = [client_batches(workload, rng, tuned=tuned, device=device) for _ in range(workload.participants)]
    count = 1 if tuned else workload.participants
    server, *models = (torch_models.build(workload).to(device, memory_format=layout) for _ in range(1 + count))
    replicas = [(model, torch.compile(model) if compiled else model) for model in models]
    half = torch.autocast(device, torch.bfloat16) if compiled else None
    marks = [finished(device)]
    for _ in range(rounds + 1):
        round_of(server, replicas, clients, workload.epochs, half)
        marks.append(finished(device))
    bench = "torch_loop_compiled" if compiled else "torch_loop_tuned" if tuned else "torch_loop"
    return {"bench": bench, "workload": name, "threads": threads, **costs(workload, marks, server.parameters(), device)}


def costs(workload: Workload, marks: list[tuple[float, float]], parameters: Iterable[Any], device: str) -> dict:
    """The part of a record that all benchmarks in PyTorch share."""
    on_cpu = device == "cpu"
    return {
        **workloads.timing(marks, workload.samples),
        "peak_memory_mb": workloads.peak_memory_mb(),
        "device_peak_memory_mb": None if on_cpu else round(torch.cuda.max_memory_allocated() / 2**20, 1),
        "clients": workload.clients,
        "params": sum(p.numel() for p in parameters),
        "device": device if on_cpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def main(argv: list[str] | None = None) -> None:
    parser = workloads.parser(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="tuned, bfloat16 and torch.compile")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args(argv)
    record = measure(
        args.workload, workloads.chosen(args), args.rounds, args.threads, tuned=args.tuned, device=args.device,
        compiled=args.compiled,
    )  # fmt: skip
    workloads.report(record, quiet=args.json)


if __name__ == "__main__":
    main()
