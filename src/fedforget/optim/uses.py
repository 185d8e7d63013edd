"""One call of one part of the model, and what the parameters' per-sample gradients owe to it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedforget.optim.chunks import chunks, limit
from fedforget.optim.replay import Arguments, looped_shares, replayed_shares, tensors_in
from fedforget.optim.units import Unit


@dataclass(eq=False)
class Use:
    """One call of one unit: what it was given and, once the backward pass has come by, what its output was owed."""

    unit: Unit
    size: int
    samples: int
    """How many of the batch, from its front, Γ is taken from."""
    call: Arguments | None
    waiting: set[nn.Parameter]
    """The parameters that still need this use; when none is left, its tensors go."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    squares: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """Σ share² of this use alone, where the backward pass has found it already."""
    task: int = -1
    """The backward pass that the gradients belong to."""
    counted: bool = False
    """That pass has reached a parameter."""

    def settle(self, parameter: nn.Parameter) -> None:
        """This parameter has its Γ."""
        self.waiting.discard(parameter)
        self.squares.pop(parameter, None)
        if not self.waiting:
            self.call, self.gradients = None, {}

    def name(self, parameter: nn.Parameter) -> str:
        """What the unit calls the parameter."""
        return next(name for name, own in self.unit.parameters.items() if own is parameter)

    def pair(self, samples: slice) -> tuple[Tensor, Tensor]:
        """Input and output gradient of a layer with a rule, in the parameters' own type."""
        assert self.call is not None
        dtype = next(iter(self.unit.parameters.values())).dtype
        inputs = next(tensors_in((self.call.args, self.call.kwargs)))[samples]
        return inputs.to(dtype) if inputs.is_floating_point() else inputs, self.gradients[0][samples].to(dtype)

    def elements(self, parameter: nn.Parameter) -> int:
        """How many numbers one sample needs at once."""
        rule = self.unit.rule
        if rule is None or rule.elements is None:
            return parameter.numel()
        return rule.elements(self.unit.module, *self.pair(slice(0, 1)))

    def shares(self, names: list[str], samples: slice) -> dict[str, Tensor]:
        """Per-sample gradients, N times too small, of these parameters."""
        assert self.call is not None
        unit = self.unit
        if unit.rule is not None:
            return {name: unit.rule.shares(unit.module, name, *self.pair(samples)) for name in names}
        self.call.check_unchanged(f"what comes after {unit.name}")
        parameters = {name: unit.parameters[name] for name in names}
        if not unit.loops:
            try:
                return replayed_shares(unit.module, parameters, self.call, self.gradients, samples)
            except RuntimeError:
                # An operation that vmap cannot run; what is wrong for another reason fails again in the loop.
                unit.loops = True
        return looped_shares(unit.module, parameters, self.call, self.gradients, samples)


def summed_squares(parameter: nn.Parameter, uses: list[Use]) -> Tensor:
    """Σ_i (Σ over uses of share_i)² in chunks of samples, for layers that have a rule."""
    if len(uses) == 1 and parameter in uses[0].squares:
        return uses[0].squares[parameter]
    names = [use.name(parameter) for use in uses]
    rule = uses[0].unit.rule
    total: Tensor | None = None
    elements = sum(use.elements(parameter) for use in uses) + (parameter.numel() if len(uses) > 1 else 0)
    for samples in chunks(uses[0].samples, elements, limit(parameter.device)):
        squares = None
        if rule is not None and rule.squares is not None and len(uses) == 1:
            squares = rule.squares(uses[0].unit.module, names[0], *uses[0].pair(samples))
        if squares is None:
            shares = [use.shares([name], samples)[name] for use, name in zip(uses, names, strict=True)]
            squares = functools.reduce(torch.add, shares).square().sum(0)
        total = squares if total is None else total.add_(squares)
    assert total is not None
    return total


def attach(use: Use, inputs: Tensor, output: Tensor, parameters: dict[str, nn.Parameter]) -> Tensor:
    """The same output, in whose backward pass the use finds these parameters' gradients, and their squares with them.

    The layer itself must have been called without asking for these gradients, so that they are not computed twice.
    """
    attached: Tensor = _Gradients.apply(use, list(parameters), inputs, output, *parameters.values())  # type: ignore[no-untyped-call]
    return attached


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: Use, names: list[str], inputs: Tensor, output: Tensor, *_: nn.Parameter) -> Tensor:
        ctx.use, ctx.names = use, names
        ctx.save_for_backward(inputs)
        # Not a copy and not a view of the output: what follows may change it in place.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        use: Use = ctx.use
        rule = use.unit.rule
        assert rule is not None
        assert rule.gradients is not None
        (inputs,) = ctx.saved_tensors
        # Called inside autocast, the backward pass would compute Γ itself in half precision.
        with torch.autocast(gradient.device.type, enabled=False):
            gradients, squares = rule.gradients(use.unit.module, ctx.names, inputs, gradient, use.samples)
        use.squares = {use.unit.parameters[name]: value for name, value in squares.items()}
        owed = gradient if ctx.needs_input_grad[3] else None
        return None, None, None, owed, *(gradients[name] for name in ctx.names)
