"""The workloads' models in PyTorch, with as many parameters as ours."""

# pyright: reportMissingImports=false

import math

import torch
from torch import nn

from benchmarks.workloads import CLASSES, Workload


def _small_cnn(inputs: int, channels: tuple[int, int], padding: int, flat: int, hidden: tuple[int, ...]):
    layers: list[nn.Module] = []
    for width in channels:
        layers += [nn.Conv2d(inputs, width, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
        inputs = width
    layers.append(nn.Flatten())
    for width in hidden:
        layers += [nn.Linear(flat, width), nn.ReLU()]
        flat = width
    return nn.Sequential(*layers, nn.Linear(flat, CLASSES))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    same = kernel // 2
    return [nn.Conv2d(inputs, outputs, kernel, stride, same, bias=False), nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """relu(path(x) + shortcut(x)), two 3x3 convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        first, second = _convolution(inputs, outputs, 3, stride), _convolution(outputs, outputs, 3, 1)
        self.path = nn.Sequential(*first, nn.ReLU(), *second)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


def _resnet18() -> nn.Module:
    layers = [*_convolution(3, 64, 3, 1), nn.ReLU()]
    inputs = 64
    for outputs in (64, 128, 256, 512):
        layers += [Residual(inputs, outputs, 1 if outputs == 64 else 2), Residual(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


def build(workload: Workload) -> nn.Module:
    """A fresh model."""
    pixels = math.prod(workload.shape)
    return {
        "simple_cnn": lambda: _small_cnn(3, (6, 16), 0, 400, (120, 84)),
        "mcmahan_cnn": lambda: _small_cnn(1, (32, 64), 2, 3136, (512,)),
        "resnet18": _resnet18,
        "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(pixels, 200), nn.ReLU(), nn.Linear(200, CLASSES)),
        "logistic_regression": lambda: nn.Sequential(nn.Flatten(), nn.Linear(pixels, CLASSES)),
    }[workload.model]()
