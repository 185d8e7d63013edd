"""Preparing samples for the model, without letting a deleted sample live on in a mean or a scale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedforget.types import Fit, Preprocessing


@dataclass(frozen=True)
class FeatureSums:
    """A silo's sums over its remaining training samples, a value for each feature; a missing value counts nowhere."""

    count: Tensor
    total: Tensor
    squares: Tensor


def feature_sums(x: Tensor) -> FeatureSums:
    """The sums of these samples."""
    present = ~torch.isnan(x) if x.is_floating_point() else torch.ones_like(x, dtype=torch.bool)
    values = torch.where(present, x, torch.zeros_like(x)).to(torch.float64)
    return FeatureSums(present.sum(0).to(torch.float64), values.sum(0), values.square().sum(0))


def fit(parts: Iterable[FeatureSums]) -> Fit:
    """Means and deviations from the silos' sums, added in the order given; a constant feature is left unscaled."""
    sums = list(parts)
    count = sum((part.count for part in sums[1:]), sums[0].count).clamp(min=1)
    mean = sum((part.total for part in sums[1:]), sums[0].total) / count
    variance = sum((part.squares for part in sums[1:]), sums[0].squares) / count - mean.square()
    deviation = variance.clamp(min=0).sqrt()
    # Below the rounding error of the sums a deviation is noise: such a feature is constant.
    constant = deviation <= 1e-6 * mean.abs().clamp(min=1e-6)
    return Fit(mean, torch.where(constant, torch.ones_like(deviation), deviation))


def prepare(x: Tensor, preprocessing: Preprocessing, fit: Fit | None, dtype: torch.dtype) -> Tensor:
    """The samples as the model sees them."""
    x = x.to(dtype)
    if preprocessing.kind == "scale":
        return (x - preprocessing.shift) / preprocessing.scale
    if preprocessing.kind == "standardize":
        assert fit is not None, "the coordinator fits the preprocessing before it sends it"
        mean, deviation = fit.mean.to(x), fit.deviation.to(x)
        return (torch.where(torch.isnan(x), mean, x) - mean) / deviation
    return x
