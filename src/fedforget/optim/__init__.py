"""Optimizers: what a plan can name, and the paper's own rule for any training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fedforget.optim.batched import BATCHED
from fedforget.optim.diagonal_fisher import DiagonalFisher
from fedforget.optim.muon import Muon
from fedforget.optim.settings import check_adam, check_sgd
from fedforget.types import Choice

__all__ = ["BATCHED", "BUILT_IN", "SGD", "Adam", "DiagonalFisher", "Muon"]


def SGD(lr: float = 0.1, momentum: float = 0.0, nesterov: bool = False) -> Choice:  # noqa: N802 - reads like torch's
    """For a plan: stochastic gradient descent."""
    check_sgd(lr, momentum, nesterov)
    return _choice("sgd", {"lr": lr}, {"momentum": (momentum, 0.0), "nesterov": (nesterov, False)})


def Adam(lr: float = 0.001, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Choice:  # noqa: N802
    """For a plan: Adam."""
    check_adam(lr, beta1, beta2, eps)
    return _choice("adam", {"lr": lr}, {"beta1": (beta1, 0.9), "beta2": (beta2, 0.999), "eps": (eps, 1e-8)})


def build_sgd(
    model: nn.Module, *, lr: float = 0.1, momentum: float = 0.0, nesterov: bool = False
) -> torch.optim.Optimizer:
    """Stochastic gradient descent, with momentum if asked."""
    check_sgd(lr, momentum, nesterov)
    return torch.optim.SGD(_trainable(model), lr=lr, momentum=momentum, nesterov=nesterov)


def build_adam(
    model: nn.Module, *, lr: float = 0.001, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8
) -> torch.optim.Optimizer:
    """Adam."""
    check_adam(lr, beta1, beta2, eps)
    return torch.optim.Adam(_trainable(model), lr=lr, betas=(beta1, beta2), eps=eps)


def build_diagonal_fisher(
    model: nn.Module,
    *,
    lr: float = 0.003,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 3e-3,
    block_size: int = 3,
    fisher_every: int = 1,
    fisher_share: float = 1.0,
) -> torch.optim.Optimizer:
    """The paper's rule."""
    return DiagonalFisher(
        model,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        block_size=block_size,
        fisher_every=fisher_every,
        fisher_share=fisher_share,
    )


BUILT_IN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": build_sgd,
    "adam": build_adam,
    "diagonal-fisher": build_diagonal_fisher,
    "muon": Muon,
}
"""What a plan can name: each is called with the model and the plan's settings."""


def _trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


def _choice(name: str, settings: dict[str, Any], defaults: dict[str, tuple[Any, Any]]) -> Choice:
    # Only what differs from its default is written, so that SGD(lr=0.1) is the same plan as Choice("sgd", {"lr": 0.1}).
    changed = {key: value for key, (value, default) in defaults.items() if value != default}
    return Choice(name, settings | changed)
