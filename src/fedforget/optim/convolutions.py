"""Per-sample gradients of convolutions, and the weight's own gradient from the same products.

Rows of an output's gradient are shares, as everywhere in this package: (1/N)·∂l_i/∂output of a batch-mean loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedforget.optim import kernels
from fedforget.optim.chunks import chunks, limit

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Products = Callable[[Convolution, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, weight, input, output gradient) to Σ share and Σ share²."""

SMALL = 2**20
"""Multiplications a sample below which a call of the processor's convolution costs more than what it computes."""

SHARE = 2**20
"""Numbers of shares that the processor computes at once: they stay in its caches until they are summed."""


def convolution_shares(layer: nn.Module, name: str, inputs: Tensor, gradient: Tensor) -> Tensor:
    """One share a sample."""
    assert isinstance(layer, Convolution)
    samples = len(gradient)
    if name == "bias":
        return gradient.flatten(2).sum(2)
    windows = _windows(layer, inputs)
    positions = gradient[0, 0].numel()
    # One batched product for all samples and groups; functional.unfold would launch a kernel a sample on a GPU.
    products = torch.bmm(
        gradient.reshape(samples * layer.groups, -1, positions),
        windows.reshape(samples * layer.groups, -1, positions).transpose(1, 2),
    )
    return products.reshape(samples, *layer.weight.shape)


def convolution_elements(layer: nn.Module, _: Tensor, gradient: Tensor) -> int:
    """Numbers that a sample's share needs: itself and its windows."""
    assert isinstance(layer, Convolution)
    return layer.weight.numel() + layer.groups * layer.weight[0].numel() * gradient[0, 0].numel()


def convolution_gradients(
    layer: nn.Module, names: list[str], inputs: Tensor, gradient: Tensor, samples: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By parameter: its gradient, and Σ share² over the first `samples` samples, from the same products."""
    assert isinstance(layer, Convolution)
    # Under autocast the output's gradient says in which type the layer was computed.
    inputs = inputs.to(gradient.dtype)
    gradients: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    if "bias" in names:
        shares = gradient.flatten(2).sum(2, dtype=layer.weight.dtype)
        gradients["bias"], squares["bias"] = shares.sum(0), shares[:samples].square().sum(0)
    if "weight" in names:
        weight = layer.weight.detach().to(gradient.dtype)
        products = _fastest(layer, gradient)
        gradients["weight"], squares["weight"] = products(layer, weight, inputs[:samples], gradient[:samples])
        if samples < len(gradient):
            gradients["weight"] += _weight_gradient(layer, weight, inputs[samples:], gradient[samples:])
    return gradients, squares


def _fastest(layer: Convolution, gradient: Tensor) -> Products:
    """The way to take the products: on a processor, each wins for some layers (the models of the benchmark)."""
    if gradient.dtype != torch.float64 and kernels.run_on(gradient.device):
        return products_in_registers
    if gradient.device.type != "cpu" or layer.weight.numel() * gradient[0, 0].numel() < SMALL:
        return _products_in_chunks
    return _products_in_groups if layer.weight.numel() <= SHARE // 8 else _products_by_sample


def products_in_registers(layer: Convolution, _: Tensor, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Σ share and Σ share²: a GPU's own kernel, which writes no share to memory."""
    # Imported here: Triton comes with torch's builds for GPUs alone.
    from fedforget.optim.convolution_kernel import sums_of_products

    total, square = sums_of_products(
        _padded(layer, inputs), gradient, layer.kernel_size, layer.stride, layer.dilation, layer.groups
    )
    # In the memory layout of the weight, without which the update could not take all tensors at once.
    return torch.empty_like(layer.weight).copy_(total), torch.empty_like(layer.weight).copy_(square)


def _products_in_groups(layer: Convolution, weight: Tensor, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Σ share and Σ share²: the processor's own convolution of some samples, each a group of channels."""
    total, square = torch.zeros_like(layer.weight), torch.zeros_like(layer.weight)
    inputs, pads = _evenly_padded(layer, inputs)
    for samples in chunks(len(gradient), weight.numel(), SHARE):
        part, owed = inputs[samples], gradient[samples]
        count = len(owed)
        shares: Tensor = torch.ops.aten.convolution_backward(
            owed.reshape(1, -1, *owed.shape[2:]),
            part.reshape(1, -1, *part.shape[2:]),
            weight.repeat(count, *[1] * (weight.dim() - 1)),
            None,
            layer.stride,
            pads,
            layer.dilation,
            False,
            [0] * len(pads),
            count * layer.groups,
            (False, True, False),
        )[1]
        shares = shares.view(count, *weight.shape).to(total.dtype)
        total += shares.sum(0)
        square += shares.square_().sum(0)
    return total, square


def _products_by_sample(layer: Convolution, weight: Tensor, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Σ share and Σ share²: the processor's own convolution a sample, which builds no windows."""
    total, square = torch.zeros_like(layer.weight), torch.zeros_like(layer.weight)
    # Large weights come by output channels: memory of this size is used again, larger ones are new for each sample.
    channels = max(1, SHARE // weight[0].numel()) if layer.groups == 1 else layer.out_channels
    by_channels = (torch.split(tensor, channels) for tensor in (weight, total, square))
    for part, sums, squares, owed in zip(*by_channels, torch.split(gradient, channels, dim=1), strict=True):
        for one_input, one_gradient in zip(torch.split(inputs, 1), torch.split(owed, 1), strict=True):
            share = _weight_gradient(layer, part, one_input, one_gradient).to(sums.dtype)
            sums.add_(share)
            squares.addcmul_(share, share)
    return total, square


def _products_in_chunks(layer: Convolution, _: Tensor, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Σ share and Σ share²: one batched product for as many samples as fit."""
    total, square = torch.zeros_like(layer.weight), torch.zeros_like(layer.weight)
    elements = convolution_elements(layer, inputs, gradient)
    for samples in chunks(len(gradient), elements, limit(gradient.device)):
        shares = convolution_shares(layer, "weight", inputs[samples], gradient[samples]).to(total.dtype)
        total += shares.sum(0)
        square += shares.square_().sum(0)
    return total, square


def _weight_gradient(layer: Convolution, weight: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor:
    """The ordinary gradient on these samples, of the weight's part for the output channels of this gradient."""
    inputs, pads = _evenly_padded(layer, inputs)
    result: Tensor = torch.ops.aten.convolution_backward(
        gradient,
        inputs,
        weight,
        None,
        layer.stride,
        pads,
        layer.dilation,
        False,
        [0] * len(pads),
        layer.groups,
        (False, True, False),
    )[1]
    return result


def _pads(layer: Convolution) -> list[tuple[int, int]]:
    """How far each spatial axis is padded before and after."""
    if layer.padding == "same":
        totals = [dilation * (size - 1) for size, dilation in zip(layer.kernel_size, layer.dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    return [(int(pad), int(pad)) for pad in layer.padding]


def _evenly_padded(layer: Convolution, inputs: Tensor) -> tuple[Tensor, list[int]]:
    """The input and the zeros that torch is to put on both sides of each axis, where it can; else all is done here."""
    pads = _pads(layer)
    if layer.padding_mode != "zeros" or any(before != after for before, after in pads):
        return _padded(layer, inputs), [0] * len(pads)
    return inputs, [before for before, _ in pads]


def _padded(layer: Convolution, inputs: Tensor) -> Tensor:
    pads = _pads(layer)
    if all(pad == (0, 0) for pad in pads):
        return inputs
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    # functional.pad counts from the last dimension backwards.
    return functional.pad(inputs, [side for pad in reversed(pads) for side in pad], mode=mode)


def _windows(layer: Convolution, inputs: Tensor) -> Tensor:
    """(N, channels, *kernel, *positions): what each weight meets at each position, as a strided view of the input."""
    inputs = _padded(layer, inputs)
    for axis, (size, stride, dilation) in enumerate(
        zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), start=2
    ):
        inputs = inputs.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    spatial = len(layer.kernel_size)
    return inputs.permute(0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial))
