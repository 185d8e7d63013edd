"""How far apart two models are: bit for bit, in their parameters, and in their outputs (d_u of Liu et al. 2022)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def state_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes: equal exactly when two states are the same bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
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
