"""Slow and obvious: what the fast code of `fedforget.optim` must agree with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
"""The batch-mean loss of a model on a batch given as tensors."""


def loop_over_samples(
    model: nn.Module, loss: Loss, batch: tuple[Tensor, ...], dimensions: tuple[int, ...]
) -> dict[str, Tensor]:
    """Γ of Eq. 12 by one backward pass a sample; `dimensions` says where each tensor carries the batch."""
    size = batch[0].shape[dimensions[0]]
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    squares = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for sample in range(size):
        one = tuple(tensor.narrow(dimension, sample, 1) for tensor, dimension in zip(batch, dimensions, strict=True))
        gradients = torch.autograd.grad(loss(model, one), list(named.values()), materialize_grads=True)
        for name, gradient in zip(named, gradients, strict=True):
            squares[name] += gradient**2
    return {name: square / size for name, square in squares.items()}


def blocks(values: list[float], size: int) -> list[float]:
    """Every value replaced by the mean of its block."""
    averaged = []
    for start in range(0, len(values), size):
        block = values[start : start + size]
        averaged += [sum(block) / len(block)] * len(block)
    return averaged


def equation_15(
    start: Tensor,
    gradients: list[Tensor],
    fishers: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    block_size: int,
) -> Tensor:
    """The parameters after all steps, with Eq. 15's sums written out over all i ≤ t, one number at a time."""
    beta1, beta2 = betas
    omega = start.flatten().tolist()
    deltas = [gradient.flatten().tolist() for gradient in gradients]
    gammas = [blocks(fisher.flatten().tolist(), block_size) for fisher in fishers]
    for t in range(1, len(gradients) + 1):
        for j in range(len(omega)):
            m = (1 - beta1) * sum(beta1 ** (t - i) * deltas[i - 1][j] for i in range(1, t + 1)) / (1 - beta1**t)
            second = (1 - beta2) * sum(beta2 ** (t - i) * gammas[i - 1][j] ** 2 for i in range(1, t + 1))
            v = math.sqrt(second / (1 - beta2**t))
            omega[j] -= lr * m / (v + eps)
    return torch.tensor(omega, dtype=start.dtype).reshape(start.shape)
