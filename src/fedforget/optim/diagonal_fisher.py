"""The optimizer of rapid retraining: Eq. 15 of Liu et al., "The Right to be Forgotten in Federated Learning"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast, overload

import torch
from torch import Tensor, nn

from fedforget.optim.fisher_update import Member, diagonal_fisher
from fedforget.optim.settings import check_number, check_rate
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
        lr: η; the paper trains at 0.001.
        betas: (β₁, β₂).
        eps: ε, the damping, for parameters whose gradients vanish have a Γ of 0. The paper has none; with η = ε no step
            is longer than m itself.
        block_size: how many neighbouring parameters share one Γ; 1: each has its own.
        fisher_every: Γ_i enters v at the first step and each so many steps after; the steps between divide by the
            last v and cost what a plain step costs. The sums of v then run over these steps alone.
        fisher_share: the part of each batch, from its front, that Γ is the mean over: at least one sample. Right for
            batches in random order.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.003,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 3e-3,
        block_size: int = 3,
        fisher_every: int = 1,
        fisher_share: float = 1.0,
    ) -> None:
        settings: dict[str, Any] = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "block_size": block_size,
            "fisher_every": fisher_every,
            "fisher_share": fisher_share,
        }
        check_settings(**settings)
        self._squared_grads = SquaredGrads(model)
        parameters = list(self._squared_grads.names)
        if not parameters:
            raise ValueError("the model has no trainable parameter: set requires_grad before building the optimizer")
        super().__init__(parameters, settings)
        self._plan_next()

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where another optimizer stood."""
        super().load_state_dict(state_dict)
        self._plan_next()

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
                beta1, beta2 = group["betas"]
                diagonal_fisher(
                    [self._member(parameter, fishers) for parameter in group["params"] if parameter.grad is not None],
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    eps=group["eps"],
                    block_size=group["block_size"],
                )
            self._plan_next()
        return loss

    def _member(self, parameter: Tensor, fishers: dict[nn.Parameter, Tensor]) -> Member:
        """What this step needs of a parameter; its counts go up."""
        state = self.state[parameter]
        if not state:
            # Plain numbers: loading a state moves tensors to the device, and reading them there would wait for it.
            state["step"] = state["refreshes"] = 0
            state["mean_gradient"] = torch.zeros_like(parameter)
            state["mean_squared_fisher"] = torch.zeros_like(parameter)
        fisher = fishers.get(cast(nn.Parameter, parameter))
        state["step"] += 1
        state["refreshes"] += fisher is not None
        assert parameter.grad is not None
        return Member(
            parameter,
            parameter.grad,
            fisher,
            state["mean_gradient"],
            state["mean_squared_fisher"],
            state["step"],
            state["refreshes"],
        )

    def _plan_next(self) -> None:
        """Say which Γ the next pass is to gather; a parameter that has none yet always needs its own."""
        (group,) = self.param_groups
        self._squared_grads.share = group["fisher_share"]
        self._squared_grads.needed = {
            parameter
            for parameter in group["params"]
            if not (state := self.state.get(parameter)) or state["step"] % group["fisher_every"] == 0
        }


def check_settings(
    *, lr: float, betas: Sequence[float], eps: float, block_size: int, fisher_every: int, fisher_share: float
) -> None:
    """Refuse settings with which the rule makes no sense."""
    check_rate("lr", lr)
    named = {"eps": eps, "fisher_share": fisher_share}
    for name, value in (*named.items(), *((f"beta{number}", beta) for number, beta in enumerate(betas, start=1))):
        check_number(name, value)
    for number, beta in enumerate(betas, start=1):
        if not 0 <= beta < 1:
            raise ValueError(f"beta{number} is {beta!r}: it must lie in [0, 1)")
    if len(betas) != 2:
        raise ValueError(f"betas is {betas!r}: it must be a pair")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps is {eps!r}: it must be greater than 0, since Γ is 0 where no gradient flows")
    for name, value in (("block_size", block_size), ("fisher_every", fisher_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: it must be a whole number of at least 1")
    if not 0 < fisher_share <= 1:
        raise ValueError(f"fisher_share is {fisher_share!r}: it must be greater than 0 and at most 1")
