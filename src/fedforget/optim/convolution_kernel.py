"""Σ share and Σ share² of a convolution's weight in one pass over a batch, as a Triton kernel for GPUs.

A sample's share is a product of what the outputs are owed and what the weight meets at each position. Each block of the
grid holds a tile of it in registers, adds it to the tile's two sums and goes on to the next sample, so no per-sample
gradient and no window of the input is ever written to memory.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedforget.optim.kernels import current

BLOCKS = 512
"""Blocks in a grid, about, whatever GPU it is: where they are cut decides in which order samples are summed."""


# The loop's index is a plain number to the interpreter, so it must not be asked for a type.
@triton.jit(do_not_specialize=["samples", "inputs_stride", "group_stride"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]  # it is Triton's language, not Python's
    gradient,  # (samples, groups · outputs, positions)
    inputs,  # padded, a sample each inputs_stride
    weights_at,  # where in a sample each of a group's weights meets the input at position 0
    positions_at,  # how far from there it meets it at the others
    sums,  # (parts, groups · outputs, elements)
    squares,
    samples,
    inputs_stride,
    group_stride,
    groups: tl.constexpr,
    outputs: tl.constexpr,  # of a group
    elements: tl.constexpr,
    positions: tl.constexpr,
    samples_a_part: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_elements: tl.constexpr,
    tile_positions: tl.constexpr,
    precision: tl.constexpr,
):
    pieces: tl.constexpr = (positions + tile_positions - 1) // tile_positions
    part = tl.program_id(2) // groups
    group = tl.program_id(2) % groups
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    element = tl.program_id(0) * tile_elements + tl.arange(0, tile_elements)
    is_output = output < outputs
    is_element = element < elements
    weight_at = tl.load(weights_at + element, mask=is_element, other=0)
    first = part * samples_a_part
    # A batch may have more numbers than 32 bits can count.
    first_owed = gradient + tl.cast(first, tl.int64) * (groups * outputs * positions) + group * outputs * positions
    seen_stride = tl.cast(inputs_stride, tl.int64)
    first_seen = inputs + first * seen_stride + group * group_stride
    total = tl.zeros((tile_outputs, tile_elements), tl.float32)
    square = tl.zeros((tile_outputs, tile_elements), tl.float32)
    share = tl.zeros((tile_outputs, tile_elements), tl.float32)
    # One loop over samples and pieces of their positions: two would drain the pipeline of loads at each sample.
    for step in range(samples_a_part * pieces):
        position = (step % pieces) * tile_positions + tl.arange(0, tile_positions)
        is_position = (position < positions) & (first + step // pieces < samples)
        position_at = tl.load(positions_at + position, mask=is_position, other=0)
        sample = tl.cast(step // pieces, tl.int64)
        owed = tl.load(
            first_owed + sample * (groups * outputs * positions) + output[:, None] * positions + position[None, :],
            mask=is_output[:, None] & is_position[None, :],
            other=0.0,
        )
        seen = tl.load(
            first_seen + sample * seen_stride + weight_at[:, None] + position_at[None, :],
            mask=is_element[:, None] & is_position[None, :],
            other=0.0,
        )
        if pieces == 1:
            share = tl.dot(owed, tl.trans(seen), input_precision=precision)
            total += share
            square += share * share
        else:
            share = tl.dot(owed, tl.trans(seen), share, input_precision=precision)
            if step % pieces == pieces - 1:
                total += share
                square += share * share
                share = tl.zeros((tile_outputs, tile_elements), tl.float32)
    at = tl.cast((part * groups + group) * outputs + output[:, None], tl.int64) * elements + element[None, :]
    is_weight = is_output[:, None] & is_element[None, :]
    tl.store(sums + at, total, mask=is_weight)
    tl.store(squares + at, square, mask=is_weight)


def sums_of_products(
    inputs: Tensor,
    gradient: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Σ share and Σ share² in float32, from an input that is padded already: (outputs, channels a group, *kernel)."""
    samples, all_outputs, *places = gradient.shape
    outputs, channels = all_outputs // groups, inputs.shape[1] // groups
    elements, positions = channels * math.prod(kernel_size), math.prod(places)
    inputs, gradient = inputs.contiguous(), gradient.contiguous()
    weights_at, positions_at = _offsets(
        channels, tuple(inputs.shape[2:]), kernel_size, stride, dilation, tuple(places), inputs.device
    )
    tile_outputs, tile_elements, tile_positions, warps, stages = tile(outputs, elements, positions)
    tiles = triton.cdiv(elements, tile_elements), triton.cdiv(outputs, tile_outputs)
    # A power of two, since each number is compiled for; the last part may be shorter.
    samples_a_part = triton.next_power_of_2(triton.cdiv(samples * math.prod(tiles) * groups, BLOCKS))
    parts = triton.cdiv(samples, samples_a_part)
    found = torch.empty(2, parts, all_outputs, elements, dtype=torch.float32, device=inputs.device)
    with current(inputs.device):
        _kernel[(*tiles, parts * groups)](
            gradient,
            inputs,
            weights_at,
            positions_at,
            found[0],
            found[1],
            samples,
            inputs.stride(0),
            channels * inputs.stride(1),
            groups,
            outputs,
            elements,
            positions,
            samples_a_part,
            tile_outputs,
            tile_elements,
            tile_positions,
            # What torch's own convolutions may do with float32, these products may.
            "tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
            num_warps=warps,
            num_stages=stages,
        )
    total, square = found.sum(1).view(2, all_outputs, channels, *kernel_size)
    return total, square


def tile(outputs: int, elements: int, positions: int) -> tuple[int, int, int, int, int]:
    """Sides of a block's tile (outputs, elements, positions at once), its warps and its stages of loads.

    Found on an H200 with the layers of `cnn` and `alexnet`.
    """
    widest_outputs, tile_positions, stages = (128, 16, 5) if positions <= 16 else (64, 32, 4)
    tile_outputs = min(widest_outputs, max(16, triton.next_power_of_2(outputs)))
    tile_elements = min(128, max(16, triton.next_power_of_2(elements)))
    warps = 8 if tile_outputs * tile_elements > 64 * 128 else 4
    return tile_outputs, tile_elements, tile_positions, warps, stages


@functools.lru_cache(maxsize=256)
def _offsets(
    channels: int,
    padded: tuple[int, ...],
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    places: tuple[int, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Where in a sample, (channels, *padded) in one piece, a group's weights and the positions lie."""
    strides = [math.prod(padded[axis + 1 :]) for axis in range(len(padded))]
    weights_at = torch.arange(channels) * math.prod(padded)
    positions_at = torch.zeros(1, dtype=torch.long)
    for axis, step in enumerate(strides):
        weights_at = weights_at[..., None] + torch.arange(kernel_size[axis]) * dilation[axis] * step
        positions_at = positions_at[..., None] + torch.arange(places[axis]) * stride[axis] * step
    return weights_at.flatten().int().to(device), positions_at.flatten().int().to(device)
