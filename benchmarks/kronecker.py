"""Kronecker-factored curvature, to stand beside the project's own optimizers in benchmarks: K-FAC and SOAP."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class KroneckerFisher(torch.optim.Optimizer):
    """K-FAC (Martens & Grosse 2015, arXiv:1503.05671; convolutions: Grosse & Martens 2016, arXiv:1602.01407).

    The Fisher of a layer is taken for the Kronecker product of A = E[a aᵀ], of its inputs with a 1 for the bias, and
    G = E[g gᵀ], of the gradients of its outputs: empirical, as Γ is, and both moving means. Steps by the momentum of
    G⁻¹ Δ A⁻¹, with factored Tikhonov damping. Knows Linear and plain Conv2d; norms' parameters are stepped by Adam's
    rule at a twentieth of the rate.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.3,
        momentum: float = 0.9,
        damping: float = 1e-2,
        decay: float = 0.9,
        every: int = 1,
        share: float = 1.0,
    ) -> None:
        self._layers = {layer.weight: layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
        super().__init__(
            model.parameters(),
            {"lr": lr, "momentum": momentum, "damping": damping, "decay": decay, "every": every, "share": share},
        )
        for layer in self._layers.values():
            layer.register_forward_hook(self._record)

    def _record(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        x = args[0].detach()
        output.register_hook(lambda gradient: self._gather(layer, x, gradient))

    @torch.no_grad()
    def _gather(self, layer: nn.Module, x: Tensor, gradient: Tensor) -> None:
        """Move the means of A and G by one batch; the loss is the batch's mean."""
        state = self.state[layer.weight]
        if state.get("step", 0) % self.param_groups[0]["every"]:
            return
        total, size = len(x), max(1, round(self.param_groups[0]["share"] * len(x)))
        # Under autocast they may come in half precision.
        x, gradient = x[:size].to(layer.weight.dtype), gradient[:size].to(layer.weight.dtype) * total
        if isinstance(layer, nn.Conv2d):
            inputs = _patches(layer, x)
            outputs = gradient.flatten(2).transpose(1, 2).flatten(0, 1)
        else:
            inputs, outputs = x.flatten(0, -2), gradient.flatten(0, -2)
        if layer.bias is not None:
            inputs = functional.pad(inputs, (0, 1), value=1.0)
        # Of a convolution, A is summed over positions and G is their mean, the homogeneous rule of the second paper.
        found = {"a": inputs.T @ inputs / size, "g": outputs.T @ outputs / len(outputs)}
        decay = self.param_groups[0]["decay"]
        for name, factor in found.items():
            if name not in state:
                state[name] = torch.zeros_like(factor)
            state[name].lerp_(factor, 1 - decay)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002  # a training loop of the project gives none
        """Precondition every layer's gradient and move."""
        (group,) = self.param_groups
        biases = {layer.bias for layer in self._layers.values() if layer.bias is not None}
        for parameter in group["params"]:
            if parameter.grad is None or parameter in biases:
                continue
            if parameter in self._layers:
                self._step_layer(group, self._layers[parameter])
            else:
                _adam(parameter, parameter.grad, self.state[parameter], group["lr"] / 20)

    def _step_layer(self, group: dict[str, Any], layer: nn.Module) -> None:
        state = self.state[layer.weight]
        done = state.get("step", 0)
        if done % group["every"] == 0:
            correction = 1 - group["decay"] ** (done // group["every"] + 1)
            a, g = state["a"] / correction, state["g"] / correction
            ratio = ((a.trace() / len(a)) / (g.trace() / len(g)).clamp(min=1e-30)).clamp(min=1e-30).sqrt()
            root = math.sqrt(group["damping"])
            state["a_inverse"] = _inverse(a, ratio * root)
            state["g_inverse"] = _inverse(g, root / ratio)
        state["step"] = done + 1
        gradient = layer.weight.grad.flatten(1)
        if layer.bias is not None:
            gradient = torch.cat([gradient, layer.bias.grad[:, None]], 1)
        direction = state["g_inverse"] @ gradient @ state["a_inverse"]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(direction)
        state["momentum"].mul_(group["momentum"]).add_(direction, alpha=1 - group["momentum"])
        move = state["momentum"]
        if layer.bias is not None:
            layer.bias.sub_(move[:, -1], alpha=group["lr"])
            move = move[:, :-1]
        layer.weight.sub_(move.reshape(layer.weight.shape), alpha=group["lr"])


def _patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """What each output position sees, a row each: a strided view, for functional.unfold launches a kernel a sample."""
    (before, after), (height, width) = layer.padding, layer.kernel_size
    x = functional.pad(x, (after, after, before, before))
    windows = x.unfold(2, height, layer.stride[0]).unfold(3, width, layer.stride[1])
    return windows.permute(0, 2, 3, 1, 4, 5).reshape(-1, layer.weight[0].numel())


def _inverse(factor: Tensor, damping: Tensor) -> Tensor:
    damped = factor + damping * torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return torch.cholesky_inverse(torch.linalg.cholesky(damped))


class Soap(torch.optim.Optimizer):
    """SOAP (Vyas et al. 2024, arXiv:2409.11321): Adam in the eigen bases of Shampoo's two factors."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        every: int = 1,
        longest: int = 1024,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "every": every, "longest": longest})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002  # a training loop of the project gives none
        """Turn, take Adam's step, turn back."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.ndim < 2:
                    _adam(parameter, parameter.grad, self.state[parameter], group["lr"], group["betas"])
                else:
                    self._step_matrix(group, parameter)

    def _step_matrix(self, group: dict[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        gradient = parameter.grad.flatten(1)
        sides = {"left": gradient @ gradient.T, "right": gradient.T @ gradient}
        if not state:
            state["step"] = 0
            state["mean"], state["square"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        for name, factor in sides.items():
            if len(factor) > group["longest"]:
                continue
            if name not in state:
                state[name] = factor.clone()
                state[f"{name}_basis"] = torch.linalg.eigh(factor).eigenvectors.flip(1)
                continue
            state[name].lerp_(factor, 1 - group["betas"][1])
            if state["step"] % group["every"] == 0:
                state[f"{name}_basis"] = torch.linalg.qr(state[name] @ state[f"{name}_basis"]).Q
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["mean"].lerp_(gradient, 1 - beta1)
        turned = _turn(gradient, state)
        state["square"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        mean = _turn(state["mean"], state) / (1 - beta1 ** state["step"])
        move = mean / ((state["square"] / (1 - beta2 ** state["step"])).sqrt() + 1e-8)
        parameter.sub_(_turn_back(move, state).reshape(parameter.shape), alpha=group["lr"])


def _turn(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    matrix = state["left_basis"].T @ matrix if "left_basis" in state else matrix
    return matrix @ state["right_basis"] if "right_basis" in state else matrix


def _turn_back(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    matrix = state["left_basis"] @ matrix if "left_basis" in state else matrix
    return matrix @ state["right_basis"].T if "right_basis" in state else matrix


def _adam(
    parameter: Tensor, gradient: Tensor, state: dict[str, Any], lr: float, betas: tuple[float, float] = (0.9, 0.999)
) -> None:
    if not state:
        state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
    state["step"] += 1
    state["mean"].lerp_(gradient, 1 - betas[0])
    state["square"].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    mean, square = state["mean"] / (1 - betas[0] ** state["step"]), state["square"] / (1 - betas[1] ** state["step"])
    parameter.addcdiv_(mean, square.sqrt().add_(1e-8), value=-lr)
