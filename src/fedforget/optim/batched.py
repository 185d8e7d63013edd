"""The optimizers' steps for many models at once: tensors with a leading dimension of models, one step for all.

What each does to one of the models is what the optimizer of the same name does to it alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedforget.optim import muon
from fedforget.types import BatchedRule, Stack


class SGD:
    """Stochastic gradient descent."""

    squares_share: float | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, _: nn.Module) -> None:
        (group,) = optimizer.param_groups
        self._lr, self._momentum, self._nesterov = group["lr"], group["momentum"], group["nesterov"]

    def fresh(self, parameters: Stack) -> Stack:
        """The momentum before the first step."""
        return _zeros(parameters, "momentum") if self._momentum else {}

    def wants_squares(self, _: Tensor) -> bool:
        """Never."""
        return False

    def step(self, parameters: Stack, gradients: Stack, state: Stack, _: Tensor, __: Stack | None) -> None:
        """One step, in place."""
        for name, parameter in parameters.items():
            ahead = gradients[name]
            if self._momentum:
                kept = state[f"momentum/{name}"].mul_(self._momentum).add_(ahead)
                ahead = ahead.add(kept, alpha=self._momentum) if self._nesterov else kept
            parameter.add_(ahead, alpha=-self._lr)


@dataclass(frozen=True)
class _AdamStep:
    """Adam's rule, of Adam itself and of what Muon does not orthogonalise."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def fresh(self, parameters: Stack) -> Stack:
        """Both means before the first step."""
        return {**_zeros(parameters, "mean"), **_zeros(parameters, "square")}

    def step(self, parameters: Stack, gradients: Stack, state: Stack, steps: Tensor) -> None:
        """One step, in place."""
        for name, parameter in parameters.items():
            gradient = gradients[name]
            mean = state[f"mean/{name}"].lerp_(gradient, 1 - self.beta1)
            square = state[f"square/{name}"].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
            length = _over((self.lr / (1 - self.beta1 ** (steps + 1))), parameter)
            correction = _over((1 - self.beta2 ** (steps + 1)).sqrt(), parameter)
            parameter.sub_(mean / square.sqrt().div_(correction).add_(self.eps) * length)


class Adam:
    """Adam."""

    squares_share: float | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, _: nn.Module) -> None:
        (group,) = optimizer.param_groups
        beta1, beta2 = group["betas"]
        self._rule = _AdamStep(group["lr"], beta1, beta2, group["eps"])

    def fresh(self, parameters: Stack) -> Stack:
        """Both means before the first step."""
        return self._rule.fresh(parameters)

    def wants_squares(self, _: Tensor) -> bool:
        """Never."""
        return False

    def step(self, parameters: Stack, gradients: Stack, state: Stack, steps: Tensor, _: Stack | None) -> None:
        """One step, in place."""
        self._rule.step(parameters, gradients, state, steps)


class Muon:
    """Muon: matrices by their orthogonalised momentum, everything else by Adam."""

    squares_share: float | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._matrices: list[str] = []
        for group in optimizer.param_groups:
            if group["orthogonal"]:
                self._matrices = [names[parameter] for parameter in group["params"]]
                self._lr, self._momentum, self._slice_size = group["lr"], group["momentum"], group["slice_size"]
            else:
                self._others = _AdamStep(group["lr"])

    def fresh(self, parameters: Stack) -> Stack:
        """The momentum of matrices, and Adam's means of the others."""
        matrices, others = self._parted(parameters)
        return {**_zeros(matrices, "momentum"), **(self._others.fresh(others) if others else {})}

    def wants_squares(self, _: Tensor) -> bool:
        """Never."""
        return False

    def step(self, parameters: Stack, gradients: Stack, state: Stack, steps: Tensor, _: Stack | None) -> None:
        """One step, in place."""
        matrices, others = self._parted(parameters)
        for name, parameter in matrices.items():
            gradient = gradients[name]
            kept = state[f"momentum/{name}"].lerp_(gradient, 1 - self._momentum)
            ahead = gradient.lerp(kept, self._momentum).flatten(2)
            length = self._lr * math.sqrt(max(1, ahead.shape[1] / ahead.shape[2]))
            parameter.sub_(muon.orthogonal_stack(ahead, self._slice_size).reshape(parameter.shape), alpha=length)
        if others:
            self._others.step(others, gradients, state, steps)

    def _parted(self, parameters: Stack) -> tuple[Stack, Stack]:
        matrices = {name: parameters[name] for name in self._matrices}
        return matrices, {name: tensor for name, tensor in parameters.items() if name not in matrices}


class DiagonalFisher:
    """The paper's rule, Eq. 15 of arXiv:2203.07320."""

    def __init__(self, optimizer: torch.optim.Optimizer, _: nn.Module) -> None:
        (group,) = optimizer.param_groups
        self._lr, (self._beta1, self._beta2), self._eps = group["lr"], group["betas"], group["eps"]
        self._block_size, self._every = group["block_size"], group["fisher_every"]
        self.squares_share: float | None = group["fisher_share"]

    def fresh(self, parameters: Stack) -> Stack:
        """The means of Δ and of Γ² before the first step."""
        return {**_zeros(parameters, "mean"), **_zeros(parameters, "square")}

    def wants_squares(self, steps: Tensor) -> bool:
        """Whether a model is due for its Γ."""
        return bool((steps % self._every == 0).any())

    def step(self, parameters: Stack, gradients: Stack, state: Stack, steps: Tensor, squares: Stack | None) -> None:
        """One step, in place."""
        due = steps % self._every == 0
        # Γ came at steps 0, k, 2k, …
        refreshes = torch.div(steps, self._every, rounding_mode="floor") + 1
        correction = (1 - self._beta2**refreshes).sqrt()
        for name, parameter in parameters.items():
            mean = state[f"mean/{name}"].lerp_(gradients[name], 1 - self._beta1)
            square = state[f"square/{name}"]
            if squares is not None:
                gamma = block_averages(squares[name], self._block_size)
                refreshed = square.mul(self._beta2).addcmul_(gamma, gamma, value=1 - self._beta2)
                square.copy_(torch.where(_over(due, square, torch.bool), refreshed, square))
            length = _over(self._lr * correction / (1 - self._beta1 ** (steps + 1)), parameter)
            parameter.sub_(mean / (square.sqrt() + _over(self._eps * correction, parameter)) * length)


BATCHED: Mapping[str, Callable[..., BatchedRule]] = {
    "sgd": SGD,
    "adam": Adam,
    "muon": Muon,
    "diagonal-fisher": DiagonalFisher,
}
"""By the names of plans; each is called with the optimizer of that name, whose settings it takes, and its model."""


def block_averages(values: Tensor, block_size: int) -> Tensor:
    """Each value replaced by the mean of its group of neighbours in its model's flattened tensor."""
    flat = values.reshape(len(values), -1)
    whole = flat.shape[1] - flat.shape[1] % block_size
    parts = (
        [flat[:, :whole].reshape(len(flat), -1, block_size).mean(2).repeat_interleave(block_size, 1)] if whole else []
    )
    if whole < flat.shape[1]:
        rest = flat[:, whole:]
        parts.append(rest.mean(1, keepdim=True).expand_as(rest))
    return torch.cat(parts, 1).view(values.shape) if parts else values


def _zeros(parameters: Stack, slot: str) -> Stack:
    return {f"{slot}/{name}": torch.zeros_like(parameter) for name, parameter in parameters.items()}


def _over(numbers: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A number a model, in the shape in which it meets the model's tensor."""
    return numbers.to(like.device, dtype or like.dtype).view(-1, *[1] * (like.dim() - 1))
