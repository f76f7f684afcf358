"""Seconds a round of FedAvg in PyTorch with all clients of the cohort at once, by torch.func.vmap.

    python -m benchmarks.torch_vmap --workload=w4 --rounds=8 --device=cuda

The models of all clients are one stack of parameters [S, ...], a step is one vectorised gradient. Batch norm takes the
batch's statistics and keeps no running ones, which vmap cannot write. Needs PyTorch and NumPy, as `torch_loop`.
"""

# pyright: reportMissingImports=false

from typing import Any

import torch
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, vmap
from torch.nn.functional import cross_entropy

from benchmarks import torch_models, workloads
from benchmarks.torch_loop import costs, finished
from benchmarks.workloads import CLASSES, LR, MOMENTUM, WEIGHT_DECAY, Workload

Params = dict[str, Any]


class Cohort:
    """The clients of one cohort, with their data [S, n, ...] on the device."""

    def __init__(self, workload: Workload, model, device: str):
        height, width, channels = workload.shape
        size = (workload.participants, workload.per_client)
        self.workload, self.device = workload, device
        self.images = torch.randn(*size, channels, height, width, device=device)
        self.labels = torch.randint(CLASSES, size, device=device)

        def loss(params, images, labels):
            return cross_entropy(functional_call(model, params, (images,)), labels)

        self.gradients = vmap(grad(loss), randomness="different")

    def order(self):
        """Sample indices [S, B] of each step of an epoch, with a permutation of its own for every client."""
        size = (self.workload.participants, self.workload.per_client)
        return torch.rand(size, device=self.device).argsort(1).split(self.workload.batch, 1)

    def round(self, server: Params) -> Params:
        """The mean of all clients' models after their local epochs."""
        clients = self.workload.participants
        params = {name: p.expand(clients, *p.shape).clone() for name, p in server.items()}
        momentum = {name: torch.zeros_like(p) for name, p in params.items()}
        rows = torch.arange(clients, device=self.device)[:, None]
        for _ in range(self.workload.epochs):
            for numbers in self.order():
                gradients = self.gradients(params, self.images[rows, numbers], self.labels[rows, numbers])
                for name, p in params.items():
                    momentum[name].mul_(MOMENTUM).add_(gradients[name]).add_(p, alpha=WEIGHT_DECAY)
                    p.sub_(momentum[name], alpha=LR)
        return {name: p.mean(0) for name, p in params.items()}


def measure(name: str, workload: Workload, rounds: int, device: str = "cpu") -> dict:
    """The record that is printed."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = torch_models.build(workload).to(device).train()
    replace_all_batch_norm_modules_(model)
    server = {key: p.detach() for key, p in model.named_parameters()}
    cohort = Cohort(workload, model, device)
    marks = [finished(device)]
    for _ in range(rounds + 1):
        server = cohort.round(server)
        marks.append(finished(device))
    return {"bench": "torch_vmap", "workload": name, **costs(workload, marks, server.values(), device)}


def main(argv: list[str] | None = None) -> None:
    parser = workloads.parser(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args(argv)
    record = measure(args.workload, workloads.chosen(args), args.rounds, args.device)
    workloads.report(record, quiet=args.json)


if __name__ == "__main__":
    main()
