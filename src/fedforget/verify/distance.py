"""How far apart two models are: bit for bit, in their parameters, and in their outputs (d_u of Liu et al. 2022)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from fedforget.types import Fit


def state_digest(state: Mapping[str, Tensor], fit: Fit | None = None) -> str:
    """SHA-256 over names, types, shapes and bytes: equal exactly when two models are the same bit for bit.

    The constants of a fitted preprocessing are part of a model: a mean over deleted samples would live on in them.
    """
    digest = hashlib.sha256()
    constants = {} if fit is None else {f"preprocessing {name}": tensor for name, tensor in vars(fit).items()}
    for name, tensor in sorted({**state, **constants}.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def parameter_distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The Euclidean distance of two states of one model."""
    squares = [(first[name].double() - second[name].double()).square().sum() for name in first]
    return float(torch.stack(squares).sum().sqrt())


def output_distance(first: Tensor, second: Tensor) -> float:
    """d_u as a mean: the Euclidean distance of two models' class probabilities, averaged over the samples."""
    return float((first.double() - second.double()).norm(dim=1).mean())
