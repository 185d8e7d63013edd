"""The models of the paper's evaluation, and two small ones; each is built from the shape of one sample.

Every function here, and any of your own, is a model's *factory*: called anew for each training run, so that every run
starts from a fresh model. Parameters named `shape` and `classes`, where the factory has them, are filled in.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

ModelFactory = Callable[..., nn.Module]


def _image(shape: tuple[int, ...], least: int, model: str) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ValueError(f"{model} needs images of shape (channels, height, width), at least {least} pixels a side")
    return shape[0], shape[1], shape[2]


def logistic(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Multinomial logistic regression: one linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape: tuple[int, ...], classes: int, hidden: int = 64) -> nn.Module:
    """One hidden layer of rectified linear units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes))


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The paper's CNN: two padded 5×5 convolutions of 32 and 64 channels, each pooled, and a fully connected layer."""
    channels, height, width = _image(shape, 4, "cnn")
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), classes),
    )


def alexnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """AlexNet for 32×32 images: five convolutions, three poolings of stride 2, a 4096-wide head with dropout."""
    channels, height, width = _image(shape, 16, "alexnet")
    side = [math.ceil(pixels / 2) // 2 // 2 // 2 for pixels in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 192, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(256 * side[0] * side[1], 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, classes),
    )


class _Residual(nn.Module):
    """ResNet's basic block: two 3×3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.GroupNorm(32, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(32, outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Add what the body finds to what came in."""
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-18 with a 3×3 stem for small images.

    GroupNorm stands where the original has BatchNorm, which couples the samples of a batch: with it there are no
    per-sample gradients, and the statistics of deleted samples would live on in its buffers.
    """
    channels, _, _ = _image(shape, 8, "resnet18")
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    return nn.Sequential(
        nn.Conv2d(channels, 64, 3, padding=1, bias=False),
        nn.GroupNorm(32, 64),
        nn.ReLU(),
        *(_Residual(*block) for block in widths),
        _Residual(512, 512, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


BUILT_IN: dict[str, ModelFactory] = {
    "cnn": cnn,
    "alexnet": alexnet,
    "resnet18": resnet18,
    "mlp": mlp,
    "logistic": logistic,
}
