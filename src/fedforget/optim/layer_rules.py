"""Per-sample gradients in closed form, by type of layer.

Of a batch-mean loss, row i of an output's gradient is the *share* (1/N)·∂l_i/∂output of sample i. Every function here
returns shares: N times smaller than the gradient of the sample's own loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedforget.optim.convolutions import convolution_elements, convolution_gradients, convolution_shares

Shares = Callable[[nn.Module, str, Tensor, Tensor], Tensor]
"""(layer, parameter name, input, output gradient) to one share a sample, stacked along dimension 0."""

Gradients = Callable[[nn.Module, list[str], Tensor, Tensor, int], tuple[dict[str, Tensor], dict[str, Tensor]]]
"""(layer, parameter names, input, output gradient, samples) to gradients, and Σ share² over the first samples."""


@dataclass(frozen=True)
class Rule:
    """How one type of layer answers."""

    shares: Shares
    dimensions: Callable[[Any], int]
    """The fewest dimensions an input has once it carries a batch."""
    elements: Callable[[Any, Tensor, Tensor], int] | None = None
    """Numbers that a sample needs for itself, for the size of the chunks; None: as many as the parameter has."""
    squares: Callable[[nn.Module, str, Tensor, Tensor], Tensor | None] | None = None
    """Σ over samples of share² without forming the shares; None where this input has no such shortcut."""
    gradients: Gradients | None = None
    """The parameters' gradients from the same products as Σ share²; None: they are left to autograd."""


def _linear_shares(_: nn.Module, name: str, inputs: Tensor, gradient: Tensor) -> Tensor:
    # A sample's positions add up to its one gradient before anything is squared: (Σ g aᵀ)², not Σ (g aᵀ)².
    gradient = gradient.reshape(len(gradient), -1, gradient.shape[-1])
    if name == "bias":
        return gradient.sum(1)
    return gradient.transpose(1, 2) @ inputs.reshape(len(inputs), -1, inputs.shape[-1])


def _linear_squares(_: nn.Module, name: str, inputs: Tensor, gradient: Tensor) -> Tensor | None:
    if inputs.dim() > 2:
        return None
    squared = gradient.square()
    return squared.sum(0) if name == "bias" else squared.T @ inputs.square()


def _linear_elements(layer: nn.Linear, inputs: Tensor, _: Tensor) -> int:
    # One product squares and sums the whole batch; positions need the shares themselves.
    return layer.weight.numel() if inputs.dim() > 2 else 1


def _embedding_parts(layer: nn.Embedding, tokens: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    tokens = tokens.reshape(len(tokens), -1)
    gradient = gradient.reshape(*tokens.shape, -1)
    if layer.padding_idx is not None:
        gradient = gradient.masked_fill((tokens == layer.padding_idx).unsqueeze(2), 0)
    return tokens, gradient


def _embedding_shares(layer: nn.Module, _: str, tokens: Tensor, gradient: Tensor) -> Tensor:
    assert isinstance(layer, nn.Embedding)
    tokens, gradient = _embedding_parts(layer, tokens, gradient)
    shares = gradient.new_zeros(len(tokens), *layer.weight.shape)
    return shares.scatter_add_(1, tokens.unsqueeze(2).expand_as(gradient), gradient)


def _embedding_squares(layer: nn.Module, _: str, tokens: Tensor, gradient: Tensor) -> Tensor:
    assert isinstance(layer, nn.Embedding)
    tokens, gradient = _embedding_parts(layer, tokens, gradient)
    # (Σ_l g_l)² = Σ_l g_l · Σ_l' g_l' over the positions l, l' of one sample that hold the same token.
    same = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).to(gradient.dtype)
    products = gradient * (same @ gradient)
    squares = torch.zeros_like(layer.weight)
    return squares.index_add_(0, tokens.flatten(), products.flatten(0, 1))


def _embedding_elements(_: nn.Embedding, tokens: Tensor, gradient: Tensor) -> int:
    return tokens[0].numel() ** 2 + 2 * gradient[0].numel()


def _layer_norm_shares(layer: nn.Module, name: str, inputs: Tensor, gradient: Tensor) -> Tensor:
    assert isinstance(layer, nn.LayerNorm)
    if name == "weight":
        gradient = gradient * functional.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    return gradient.reshape(len(gradient), -1, *layer.normalized_shape).sum(1)


def _group_norm_shares(layer: nn.Module, name: str, inputs: Tensor, gradient: Tensor) -> Tensor:
    assert isinstance(layer, nn.GroupNorm)
    if name == "weight":
        gradient = gradient * functional.group_norm(inputs, layer.num_groups, eps=layer.eps)
    return gradient.reshape(*gradient.shape[:2], -1).sum(2)


def _norm_elements(_: nn.Module, inputs: Tensor, __: Tensor) -> int:
    return 3 * inputs[0].numel()


_CONVOLUTION = Rule(
    convolution_shares,
    dimensions=lambda layer: len(layer.kernel_size) + 2,
    elements=convolution_elements,
    gradients=convolution_gradients,
)

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(_linear_shares, dimensions=lambda _: 2, elements=_linear_elements, squares=_linear_squares),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.Embedding: Rule(
        _embedding_shares, dimensions=lambda _: 1, elements=_embedding_elements, squares=_embedding_squares
    ),
    nn.LayerNorm: Rule(
        _layer_norm_shares, dimensions=lambda layer: len(layer.normalized_shape) + 1, elements=_norm_elements
    ),
    nn.GroupNorm: Rule(_group_norm_shares, dimensions=lambda _: 2, elements=_norm_elements),
}
