"""One step of Eq. 15 (arXiv:2203.07320) on plain tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fedforget.optim import kernels

SHORT = 8
"""Blocks of so many neighbours at the most are averaged where they are needed, longer ones by torch's reduction."""

PIECE = 3 * 2**15
"""Numbers of one tensor that a processor updates at once: what a piece reads and writes stays in its caches."""


@dataclass(frozen=True)
class Member:
    """A parameter and all that its step needs; the tensors have one shape."""

    parameter: Tensor
    gradient: Tensor
    fisher: Tensor | None
    """Γ of this step; None: v stays as it is."""
    mean_gradient: Tensor
    mean_squared_fisher: Tensor
    steps: int
    """How many gradients the first mean has seen, this one included."""
    refreshes: int
    """How many Γ the second has."""

    def tensors(self) -> dict[str, Tensor]:
        """By name."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def diagonal_fisher(
    members: list[Member], *, lr: float, beta1: float, beta2: float, eps: float, block_size: int
) -> None:
    """In place on the parameters and the two running means."""
    fits = [block_size <= SHORT and _fits_kernel(member) for member in members]
    for member in itertools.compress(members, fits):
        length, damping = _step(member, lr, beta1, beta2, eps)
        _update_by_kernel(member, beta1, beta2, length, damping, block_size)
    for group in _groups([member for member, fit in zip(members, fits, strict=True) if not fit], block_size):
        lengths, dampings = zip(*(_step(member, lr, beta1, beta2, eps) for member in group), strict=True)
        mean_gradients = [member.mean_gradient for member in group]
        torch._foreach_lerp_(mean_gradients, [member.gradient for member in group], 1 - beta1)
        if refreshed := [member.mean_squared_fisher for member in group if member.fisher is not None]:
            gammas = [block_average(member.fisher, block_size) for member in group if member.fisher is not None]
            torch._foreach_mul_(refreshed, beta2)
            torch._foreach_addcmul_(refreshed, gammas, gammas, value=1 - beta2)
        denominators = torch._foreach_sqrt([member.mean_squared_fisher for member in group])
        torch._foreach_add_(denominators, dampings)
        torch._foreach_addcdiv_(
            [member.parameter for member in group], mean_gradients, denominators, [-length for length in lengths]
        )


def _step(member: Member, lr: float, beta1: float, beta2: float, eps: float) -> tuple[float, float]:
    """The length of the step and the damping, into which the corrections of m and v go: each is one number."""
    correction = math.sqrt(1 - beta2**member.refreshes)
    return lr * correction / (1 - beta1**member.steps), eps * correction


def _fits_kernel(member: Member) -> bool:
    return (
        kernels.run_on(member.parameter.device)
        and all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in member.tensors().values())
        and member.parameter.numel() > 0
    )


def _update_by_kernel(
    member: Member, beta1: float, beta2: float, length: float, damping: float, block_size: int
) -> None:
    # Imported here: Triton comes with torch's builds for GPUs alone.
    from fedforget.optim.update_kernel import update

    update(**member.tensors(), beta1=beta1, beta2=beta2, length=length, damping=damping, block_size=block_size)


def _groups(members: list[Member], block_size: int) -> Iterator[list[Member]]:
    """What to update at once: everything, but for large tensors on a processor, which come piece by piece."""
    large = [member for member in members if _comes_in_pieces(member)]
    small = [member for member in members if not _comes_in_pieces(member)]
    if small:
        yield small
    length = max(1, PIECE // block_size) * block_size
    for member in large:
        cut = {name: torch.split(tensor.view(-1), length) for name, tensor in member.tensors().items()}
        for pieces in zip(*cut.values(), strict=True):
            yield [replace(member, **dict(zip(cut, pieces, strict=True)))]


def _comes_in_pieces(member: Member) -> bool:
    return (
        member.parameter.device.type == "cpu"
        and member.parameter.numel() > PIECE
        and all(tensor.is_contiguous() for tensor in member.tensors().values())
    )


def block_average(values: Tensor, block_size: int) -> Tensor:
    """Each value replaced by the mean of its group of neighbours in the flattened tensor."""
    if block_size == 1 or values.numel() == 0:
        return values
    flat = values.reshape(-1)
    whole = len(flat) - len(flat) % block_size
    rows = flat[:whole].view(-1, block_size)
    # Column by column where rows are short, since their mean takes a processor several times as long.
    means = sum(rows.unbind(1), start=flat.new_zeros(())) / block_size if block_size <= SHORT else rows.mean(1)
    means = means.repeat_interleave(block_size)
    if whole < len(flat):
        rest = flat[whole:]
        means = torch.cat([means, rest.mean().expand_as(rest)])
    means = means.view(values.shape)
    # In the memory layout that it came in: tensors of different ones would be updated one by one.
    return means if values.is_contiguous() else torch.empty_like(values).copy_(means)
