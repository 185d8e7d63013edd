"""Aggregations: from the silos' states, in silo-name order, and their numbers of samples, to the next global state.

Eq. 9 of the paper as printed adds two averages, so its weights sum to two; Eq. 5 gives the meaning, which is `fedavg`
here: one average over all participants, weighted by the samples that remain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedforget.errors import PlanError
from fedforget.types import State, is_number

Aggregation = Callable[..., State]


def _combine(states: Sequence[State], average: Callable[[list[Tensor]], Tensor]) -> State:
    """Average what is a floating-point number; of counters (as BatchNorm keeps) the largest goes on."""
    combined: State = {}
    for name, first in states[0].items():
        tensors = [state[name] for state in states]
        combined[name] = average(tensors) if first.is_floating_point() else torch.stack(tensors).amax(0)
    return combined


def fedavg(states: Sequence[State], counts: Sequence[int]) -> State:
    """Σ n_k/n · ω_k over the participants (McMahan et al. 2017)."""
    total = sum(counts)

    def average(tensors: list[Tensor]) -> Tensor:
        mean = torch.zeros_like(tensors[0])
        for tensor, count in zip(tensors, counts, strict=True):
            mean.add_(tensor, alpha=count / total)
        return mean

    return _combine(states, average)


def median(states: Sequence[State], counts: Sequence[int]) -> State:  # noqa: ARG001  # every silo has one vote
    """The coordinate-wise median, mean of the middle two where their number is even (Yin et al. 2018)."""
    return _combine(states, lambda tensors: _middle(tensors, (len(tensors) - 1) // 2))


def trimmed_mean(states: Sequence[State], counts: Sequence[int], trim: float = 0.1) -> State:  # noqa: ARG001
    """The coordinate-wise mean without the share `trim` of the lowest and of the highest values (Yin et al. 2018)."""
    if not is_number(trim) or not 0 <= trim < 0.5:
        raise PlanError(f"aggregation trimmed-mean: trim is {trim!r}, it must be a number in [0, 0.5)")
    return _combine(states, lambda tensors: _middle(tensors, int(trim * len(tensors))))


def _middle(tensors: list[Tensor], cut: int) -> Tensor:
    """The mean of each coordinate's values without the `cut` lowest and the `cut` highest."""
    ordered = torch.stack(tensors).sort(0).values
    return ordered[cut : len(tensors) - cut].mean(0)


BUILT_IN: dict[str, Aggregation] = {"fedavg": fedavg, "median": median, "trimmed-mean": trimmed_mean}
