"""Optimizers that stand beside the project's own in benchmarks: Adam with linear decay, and AdaHessian."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedforget.federation import training
from fedforget.types import Plan


class DecayingAdam(torch.optim.Adam):
    """Adam whose learning rate falls linearly, from its first step to 0 after `steps` steps."""

    def __init__(self, params: Any, lr: float, steps: int) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.update(first_lr=lr, steps=steps)

    def step(self, closure: Any = None) -> Any:
        """Take a step at the rate of its number."""
        for group in self.param_groups:
            state = self.state[group["params"][0]]
            done = float(state["step"]) if state else 0.0
            group["lr"] = group["first_lr"] * max(0.0, 1 - done / group["steps"])
        return super().step(closure)


class AdaHessian(torch.optim.Optimizer):
    """AdaHessian (Yao et al. 2021, arXiv:2006.00719): Adam with Hutchinson's diagonal of the Hessian in Γ's place.

    A convolution's diagonal is averaged over each kernel's positions, as its authors do. The backward pass must keep
    its graph: train inside `keeping_graphs`.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def step(self, closure: Any = None) -> None:  # noqa: ARG002  # a training loop of the project gives none
        """Take a step from gradients whose graph is still there."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in parameters]
            signs = [torch.randint_like(parameter, 2) * 2 - 1 for parameter in parameters]
            products = torch.autograd.grad(gradients, parameters, signs)
            with torch.no_grad():
                for parameter, gradient, sign, product in zip(parameters, gradients, signs, products, strict=True):
                    self._update(group, parameter, gradient.detach(), _smoothed(sign * product))
                    parameter.grad = None  # A gradient with a graph would keep its parameter alive.

    def _update(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, diagonal: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=torch.zeros(()), mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["mean"].lerp_(gradient, 1 - beta1)
        state["square"].mul_(beta2).addcmul_(diagonal, diagonal, value=1 - beta2)
        t = float(state["step"])
        v = (state["square"] / (1 - beta2**t)).sqrt().add_(group["eps"])
        parameter.addcdiv_(state["mean"] / (1 - beta1**t), v, value=-group["lr"])


def _smoothed(diagonal: Tensor) -> Tensor:
    if diagonal.ndim < 4:
        return diagonal.abs()
    return diagonal.abs().mean((2, 3), keepdim=True).expand_as(diagonal)


def _train_keeping_graphs(
    model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, plan: Plan, number: int, silo: str
) -> Tensor:
    """The project's local training, with gradients that can be differentiated once more."""
    model.train()
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    seen = 0
    for positions in training.batches(len(y), plan, number, silo, x.device):
        loss = functional.cross_entropy(model(x[positions]), y[positions])
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # torch.autograd.grad, for backward(create_graph=True) makes cycles that are freed late.
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters, create_graph=True), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
        total += loss.detach() * len(positions)
        seen += len(positions)
    return total / seen


@contextmanager
def keeping_graphs() -> Iterator[None]:
    """Inside, silos train with gradients that keep their graph."""
    with mock.patch.object(training, "train", _train_keeping_graphs):
        yield
