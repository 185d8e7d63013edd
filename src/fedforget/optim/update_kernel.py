"""One step of Eq. 15 (arXiv:2203.07320) on one tensor in one pass over memory, as a Triton kernel for GPUs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fedforget.optim.kernels import current

SIZE = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]  # it is Triton's language, not Python's
    parameter,
    gradient,
    fisher,
    mean_gradient,
    mean_squared_fisher,
    count,
    beta2,
    new_gradient,  # 1 - β₁: in single precision it would be another number
    new_fisher,  # 1 - β₂
    length,
    damping,
    refreshed: tl.constexpr,
    block_size: tl.constexpr,
    size: tl.constexpr,
):
    at = tl.cast(tl.program_id(0), tl.int64) * size + tl.arange(0, size)
    inside = at < count
    mean = tl.load(mean_gradient + at, mask=inside, other=0.0)
    mean += (tl.load(gradient + at, mask=inside, other=0.0) - mean) * new_gradient
    tl.store(mean_gradient + at, mean, mask=inside)
    square = tl.load(mean_squared_fisher + at, mask=inside, other=0.0)
    if refreshed:
        start = at // block_size * block_size
        gamma = tl.zeros((size,), tl.float32)
        for neighbour in range(block_size):
            gamma += tl.load(fisher + start + neighbour, mask=start + neighbour < count, other=0.0)
        # The last block may be shorter; beyond the tensor's end anything but 0 will do.
        gamma /= tl.cast(tl.maximum(tl.minimum(count - start, block_size), 1), tl.float32)
        square = square * beta2 + gamma * gamma * new_fisher
        tl.store(mean_squared_fisher + at, square, mask=inside)
    before = tl.load(parameter + at, mask=inside, other=0.0)
    tl.store(parameter + at, before - length * mean / (tl.sqrt(square) + damping), mask=inside)


def update(
    parameter: Tensor,
    gradient: Tensor,
    mean_gradient: Tensor,
    mean_squared_fisher: Tensor,
    fisher: Tensor | None = None,
    *,
    beta1: float,
    beta2: float,
    length: float,
    damping: float,
    block_size: int,
) -> None:
    """In place on the parameter and its two running means; all are in float32 and in one piece."""
    count = parameter.numel()
    with current(parameter.device):
        _kernel[(triton.cdiv(count, SIZE),)](
            parameter,
            gradient,
            gradient if fisher is None else fisher,
            mean_gradient,
            mean_squared_fisher,
            count,
            beta2,
            1 - beta1,
            1 - beta2,
            length,
            damping,
            fisher is not None,
            block_size,
            SIZE,
        )
