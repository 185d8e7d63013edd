"""The optimizer of rapid retraining: Eq. 15 of Liu et al., "The Right to be Forgotten in Federated Learning"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, overload

import torch
from torch import Tensor, nn

from fedforget.optim.squared_grads import SquaredGrads


class DiagonalFisher(torch.optim.Optimizer):
    r"""Steps by the mean gradient divided by the running diagonal of the empirical Fisher (arXiv:2203.07320, Eq. 15).

    With Δ_i the gradient of step i and Γ_i the mean over the batch of squared per-sample gradients (Eq. 12),

        m_t = (1 - β₁) Σ_{i≤t} β₁^{t-i} Δ_i / (1 - β₁^t)
        v_t = sqrt((1 - β₂) Σ_{i≤t} β₂^{t-i} Γ_i Γ_i / (1 - β₂^t))
        ω_{t+1} = ω_t - η m_t / (v_t + ε)

    Γ itself is squared under the root, so the step divides by Γ and not, as Adam does, by the root of it. Each Γ_i is
    first averaged over blocks: every tensor is flattened and cut into groups of `block_size` neighbours, the last of
    which may be shorter.

    Drops into any training loop whose loss is the mean over the batch; hooks on the model gather Γ meanwhile:

        optimizer = DiagonalFisher(model, lr=0.003)
        for x, y in batches:
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()

    Args:
        model: the model to train; the parameters that are trainable now are stepped.
        lr: η.
        betas: (β₁, β₂).
        eps: ε, the damping; parameters whose gradients vanish have a Γ of 0.
        block_size: how many neighbouring parameters share one Γ; 1: each has its own.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        block_size: int = 3,
    ) -> None:
        check_settings(lr=lr, betas=betas, eps=eps, block_size=block_size)
        self._squared_grads = SquaredGrads(model)
        parameters = list(self._squared_grads.names)
        if not parameters:
            raise ValueError("the model has no trainable parameter: set requires_grad before building the optimizer")
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "block_size": block_size}
        super().__init__(parameters, defaults)

    def __getstate__(self) -> NoReturn:
        # A copy would come without its model's hooks and fail at its first step, far from here.
        raise TypeError(
            "a DiagonalFisher belongs to one model and cannot be copied or pickled: "
            "build one for the other model and give it this one's state_dict()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters that no hook watches; the model's own are added when the optimizer is built."""
        given = param_group["params"]
        for parameter in [given] if isinstance(given, Tensor) else list(given):
            if parameter not in self._squared_grads.names:
                raise ValueError(
                    "DiagonalFisher steps the parameters that its model had, trainable, when it was built: "
                    "build a new one for others"
                )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients and forget the Γ gathered with them."""
        super().zero_grad(set_to_none)
        self._squared_grads.clear()

    def close(self) -> None:
        """Remove the hooks from the model, which stays as trained; happens by itself when the optimizer is dropped."""
        self._squared_grads.close()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters from the one backward pass since the last step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            fishers = self._squared_grads.take()
            for group in self.param_groups:
                parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
                for parameter in parameters:
                    self._prepare(parameter)
                states = [self.state[parameter] for parameter in parameters]
                beta1, beta2 = group["betas"]
                diagonal_fisher(
                    parameters,
                    [parameter.grad for parameter in parameters],
                    [fishers[parameter] for parameter in parameters],
                    [state["mean_gradient"] for state in states],
                    [state["mean_squared_fisher"] for state in states],
                    [state["step"] for state in states],
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    eps=group["eps"],
                    block_size=group["block_size"],
                )
        return loss

    def _prepare(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            # On the processor, as torch's own optimizers keep it: reading it never waits for a device.
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["mean_gradient"] = torch.zeros_like(parameter)
            state["mean_squared_fisher"] = torch.zeros_like(parameter)


def check_settings(*, lr: float, betas: Sequence[float], eps: float, block_size: int) -> None:
    """Refuse settings with which the rule makes no sense."""
    if not 0 < lr < math.inf:
        raise ValueError(f"lr is {lr!r}: it must be greater than 0")
    for number, beta in enumerate(betas, start=1):
        if not 0 <= beta < 1:
            raise ValueError(f"beta{number} is {beta!r}: it must lie in [0, 1)")
    if len(betas) != 2:
        raise ValueError(f"betas is {betas!r}: it must be a pair")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps is {eps!r}: it must be greater than 0, since Γ is 0 where no gradient flows")
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size is {block_size!r}: it must be a whole number of at least 1")


def diagonal_fisher(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    fishers: Sequence[Tensor],
    mean_gradients: Sequence[Tensor],
    mean_squared_fishers: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    block_size: int,
) -> None:
    """One step of Eq. 15, in place on the parameters, the two running means and the numbers of steps."""
    for parameter, gradient, fisher, mean_gradient, mean_squared_fisher, step in zip(
        parameters, gradients, fishers, mean_gradients, mean_squared_fishers, steps, strict=True
    ):
        step.add_(1)
        t = float(step)
        gamma = block_average(fisher, block_size)
        mean_gradient.mul_(beta1).add_(gradient, alpha=1 - beta1)
        mean_squared_fisher.mul_(beta2).addcmul_(gamma, gamma, value=1 - beta2)
        m = mean_gradient / (1 - beta1**t)
        v = (mean_squared_fisher / (1 - beta2**t)).sqrt_()
        parameter.addcdiv_(m, v.add_(eps), value=-lr)


def block_average(values: Tensor, block_size: int) -> Tensor:
    """Each value replaced by the mean of its group of neighbours in the flattened tensor."""
    if block_size == 1 or values.numel() == 0:
        return values
    flat = values.reshape(-1)
    whole = len(flat) - len(flat) % block_size
    means = flat[:whole].view(-1, block_size).mean(1, keepdim=True).expand(-1, block_size).reshape(-1)
    if whole < len(flat):
        rest = flat[whole:]
        means = torch.cat([means, rest.mean().expand_as(rest)])
    return means.view_as(values)
