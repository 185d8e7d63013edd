"""Local training of many silos as one program: their models stacked, one step for all that have a batch left.

It does what `training.train` does to each of them, in the same order of samples; sums are rounded in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fedforget.federation.randomness import seeded, shuffled
from fedforget.federation.registry import Registry
from fedforget.types import BatchedRule, Plan, Stack, State

HELD = 2**20
"""Numbers that the models worked on at once may hold between forward and backward, to stay in a processor's caches."""
PER_SAMPLE = 2**24
"""The most numbers of per-sample gradients at once, on a processor."""
ACCELERATORS = 2**6
"""How many times more of both an accelerator is given."""


@dataclass(frozen=True)
class Turn:
    """One silo's part in a round."""

    silo: str
    first: int
    """Where its samples begin among all silos' samples."""
    count: int
    state: Mapping[str, Any] | None
    """Its optimizer's state after its last turn."""


@dataclass(frozen=True)
class Turned:
    """What came of it."""

    state: State
    optimizer_state: dict[str, Any]
    loss: float
    finite: bool


@dataclass(frozen=True)
class Program:
    """A plan's model and optimizer for many silos at once."""

    plan: Plan
    model: nn.Module
    rule: BatchedRule
    held: int
    """Numbers that a sample's way through the model leaves for the backward pass, about."""
    multiplications: int
    """Of a sample's forward pass."""
    aliases: Mapping[str, str]
    """Names of a state that stand for a parameter with another name."""

    def round(self, number: int, state: State, x: Tensor, y: Tensor, turns: Sequence[Turn]) -> list[Turned]:
        """One round; the last row of x and y is padding: zeros."""
        # Those with the most samples first, so that whoever has a batch left is at the front.
        order = sorted(range(len(turns)), key=lambda index: (-turns[index].count, turns[index].silo))
        found: dict[int, Turned] = {}
        widest = min(self.plan.batch_size, max(turn.count for turn in turns))
        at_once = max(1, HELD * _times(x.device) // (widest * self.held))
        for chunk in (order[start : start + at_once] for start in range(0, len(order), at_once)):
            made = self._chunk(number, state, x, y, [turns[index] for index in chunk])
            found.update(zip(chunk, made, strict=True))
        return [found[index] for index in range(len(turns))]

    def _chunk(self, number: int, state: State, x: Tensor, y: Tensor, turns: list[Turn]) -> list[Turned]:
        trained = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        fixed = {name: tensor for name, tensor in state.items() if self.aliases.get(name, name) not in trained}
        parameters = {name: state[name].expand(len(turns), *state[name].shape).clone() for name in trained}
        kept, steps = self._stacked([turn.state for turn in turns], parameters)
        losses = torch.zeros(len(turns), dtype=torch.float64, device=x.device)
        for positions, counts in self._batches(number, turns, len(y) - 1):
            # Whoever has no batch left in this epoch stands behind those that have.
            front = len(counts)
            rows = positions.to(x.device)
            moving = {name: tensor[:front] for name, tensor in parameters.items()}
            inputs, labels = _rows(x, rows), _rows(y, rows)
            weights = _weights(counts, inputs)
            gradients, squares, loss = self._gradients(moving, fixed, inputs, labels, weights, counts, steps[:front])
            if self.plan.l2:
                # Not in place: two parameters' gradients may be one tensor.
                gradients = {name: part.add(moving[name], alpha=self.plan.l2) for name, part in gradients.items()}
            of_front = {name: tensor[:front] for name, tensor in kept.items()}
            self.rule.step(moving, gradients, of_front, steps[:front], squares)
            steps[:front] += 1
            losses[:front] += loss * counts.to(loss.device)
        seen = torch.tensor([turn.count * self.plan.local_epochs for turn in turns], device=x.device)
        losses /= seen
        finite = torch.stack(
            [losses.isfinite(), *(part.isfinite().view(len(part), -1).all(1) for part in parameters.values())]
        )
        return self._unstacked(state, parameters, kept, steps, losses.tolist(), finite.all(0).tolist())

    def _batches(self, number: int, turns: list[Turn], padding: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each step the rows of all silos that have a batch left, padded to one length, and their numbers."""
        size = self.plan.batch_size
        counts = torch.tensor([turn.count for turn in turns])
        for epoch in range(self.plan.local_epochs):
            orders = [shuffled(turn.count, self.plan.seed, number, epoch, turn.silo).add_(turn.first) for turn in turns]
            rows = nn.utils.rnn.pad_sequence(orders, batch_first=True, padding_value=padding)
            for start in range(0, rows.shape[1], size):
                left = (counts - start).clamp(max=size)
                front = int((left > 0).sum())
                yield rows[:front, start : start + int(left[0])], left[:front]

    def _gradients(
        self, parameters: Stack, fixed: State, x: Tensor, y: Tensor, weights: Tensor, counts: Tensor, steps: Tensor
    ) -> tuple[Stack, Stack | None, Tensor]:
        """Each silo's gradient, where they are wanted its mean squared per-sample gradients, and its loss."""
        share = self.rule.squares_share
        if share is None or not self.rule.wants_squares(steps):
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
            scores = vmap(self._scores, in_dims=(0, None, 0))(leaves, fixed, x)
            each = functional.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
            losses = (each * weights).sum(1)
            # Each silo's loss depends on its own parameters alone, so the sum's gradient is all silos' gradients.
            found = torch.autograd.grad(losses.sum(), list(leaves.values()))
            return dict(zip(leaves, found, strict=True)), None, losses.detach()
        first = torch.tensor([max(1, round(share * count)) for count in counts.tolist()])
        shares = _weights(first, x)
        gradients = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
        squares = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
        losses = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        # No per-sample gradient is kept beyond some samples of all silos.
        wide = sum(tensor.numel() for tensor in parameters.values())
        for part in torch.split(torch.arange(x.shape[1]), max(1, PER_SAMPLE * _times(x.device) // wide)):
            columns = slice(int(part[0]), int(part[-1]) + 1)
            per_sample, loss = vmap(
                vmap(grad_and_value(self._sample_loss), in_dims=(None, None, 0, 0)), in_dims=(0, None, 0, 0)
            )(parameters, fixed, x[:, columns], y[:, columns])
            losses += (loss * weights[:, columns]).sum(1)
            for name, gradient in per_sample.items():
                flat = gradient.reshape(*gradient.shape[:2], -1)
                gradients[name] += _mixed(weights[:, columns], flat).view_as(gradients[name])
                squares[name] += _mixed(shares[:, columns], flat.square()).view_as(squares[name])
        return gradients, squares, losses

    def _scores(self, parameters: State, fixed: State, x: Tensor) -> Tensor:
        scores: Tensor = functional_call(self.model, {**fixed, **parameters}, (x,))
        return scores

    def _sample_loss(self, parameters: State, fixed: State, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self._scores(parameters, fixed, x[None]), y[None])

    def _stacked(self, states: list[Mapping[str, Any] | None], parameters: Stack) -> tuple[Stack, Tensor]:
        """All silos' optimizer states, of zeros for those that have none yet, and the steps that each took."""
        fresh = self.rule.fresh(parameters)
        steps = torch.tensor([0 if state is None else state["steps"] for state in states], dtype=torch.float64)
        if any(state is not None for state in states):
            for name, tensor in fresh.items():
                rows = [zeros if state is None else state[name] for zeros, state in zip(tensor, states, strict=True)]
                fresh[name] = torch.stack([row.to(tensor.device) for row in rows])
        return fresh, steps

    def _unstacked(
        self, state: State, parameters: Stack, kept: Stack, steps: Tensor, losses: list[float], finite: list[bool]
    ) -> list[Turned]:
        rows = {name: tensor.unbind() for name, tensor in parameters.items()}
        kept_rows = {name: tensor.unbind() for name, tensor in kept.items()}
        names = {name: self.aliases.get(name, name) for name in state}
        return [
            Turned(
                {name: rows[own][index] if own in rows else state[name].clone() for name, own in names.items()},
                # Rows of its own: a view would keep all other silos' states alive with it.
                {"steps": int(taken), **{name: tensor[index].clone() for name, tensor in kept_rows.items()}},
                losses[index],
                finite[index],
            )
            for index, taken in enumerate(steps.tolist())
        ]


def _rows(values: Tensor, rows: Tensor) -> Tensor:
    # Many times faster on a processor than values[rows].
    return values.index_select(0, rows.flatten()).view(*rows.shape, *values.shape[1:])


def _times(device: torch.device) -> int:
    return 1 if device.type == "cpu" else ACCELERATORS


def _weights(counts: Tensor, like: Tensor) -> Tensor:
    """Of each silo's rows those that count, each with its share of the mean."""
    whole = counts[:, None].to(like.dtype)
    return ((torch.arange(like.shape[1]) < whole) / whole).to(like.device)


def _mixed(weights: Tensor, values: Tensor) -> Tensor:
    """Σ over samples of weight · value, for each silo."""
    return torch.bmm(weights[:, None], values)[:, 0]


def program_for(registry: Registry, plan: Plan, device: torch.device) -> Program | str:
    """The plan as a program for many silos, or why it cannot be one; both are found by trying it on made-up samples."""
    if plan.autocast:
        return "autocast is on"
    with seeded(device, "discarded"):
        model = registry.blank(plan, device).train()
        rule = registry.batched_rule(plan, model)
        if rule is None:
            return f"the optimizer {plan.optimizer} has no step for many silos at once"
        try:
            return _obstacle(model) or _tried(plan, model, rule, device)
        except Exception as error:  # the model may be the user's, and torch refuses in many ways
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if "random operation" in reason:
                return f"model {plan.model!r} draws random numbers"
            return f"model {plan.model!r} does not go through torch.func: {reason}"


def _obstacle(model: nn.Module) -> str | None:
    """A layer that is known not to go with other silos' models."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        drops = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            drops = module.dropout
        if drops:
            return f"its layer {name or kind} draws random numbers ({kind})"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"its layer {name or kind} mixes the samples of a batch ({kind})"
    return None


def _attributes(model: nn.Module) -> list[dict[str, str]]:
    """What its modules hold besides parameters and buffers, as text: a list that grows is the same list."""
    return [{name: repr(value) for name, value in vars(module).items() if name[0] != "_"} for module in model.modules()]


def _tried(plan: Plan, model: nn.Module, rule: BatchedRule, device: torch.device) -> Program | str:
    assert plan.shape is not None
    assert plan.classes is not None
    dtype = getattr(torch, plan.dtype)
    # As last batches are, one of them of a single sample: models that treat that otherwise are found out.
    counts = torch.tensor([3, 2, 1])
    # Whole numbers suit models of tokens too.
    x = torch.randint(2, (3, 3, *plan.shape)).to(device, dtype)
    x[torch.arange(3) >= counts[:, None]] = 0
    y = torch.arange(9).view(3, 3).remainder(plan.classes).to(device)
    by_identity = {parameter: name for name, parameter in model.named_parameters()}
    aliases = {
        name: by_identity[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if by_identity[parameter] != name
    }
    program = Program(plan, model, rule, *_sizes(model, x[0, :1]), aliases)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    buffers = [(tensor, tensor.clone()) for tensor in model.buffers()]
    attributes = _attributes(model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    fixed = {name: tensor for name, tensor in state.items() if aliases.get(name, name) not in trained}
    stack = {name: torch.stack([state[name] * scale for scale in (1.0, 1.1, 0.9)]) for name in trained}
    expected: list[State] = []
    for silo, count in enumerate(counts.tolist()):
        own = {name: stack[aliases.get(name, name)][silo] for name in (*trained, *aliases)}
        model.load_state_dict({**state, **own})
        model.zero_grad()
        functional.cross_entropy(model(x[silo, :count]), y[silo, :count]).backward()  # type: ignore[no-untyped-call]
        if idle := [name for name, parameter in trained.items() if parameter.grad is None]:
            return f"parameter {idle[0]} has no gradient"
        expected.append(
            {name: parameter.grad.clone() for name, parameter in trained.items() if parameter.grad is not None}
        )
        if not all(bool(gradient.isfinite().all()) for gradient in expected[-1].values()):
            return f"model {plan.model!r} has gradients that are not finite on made-up samples"
    held_now = list(model.buffers())
    if any(
        now is not tensor or not torch.equal(now, before)
        for now, (tensor, before) in zip(held_now, buffers, strict=True)
    ):
        return f"model {plan.model!r} changes its buffers while it trains"
    if _attributes(model) != attributes:
        return f"model {plan.model!r} changes its attributes while it trains"
    found, _, _ = program._gradients(stack, fixed, x, y, _weights(counts, x), counts, torch.zeros(3))
    for silo, gradients in enumerate(expected):
        for name, gradient in gradients.items():
            if not torch.allclose(found[name][silo], gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max())):
                return f"model {plan.model!r} mixes the samples of a batch: padding would change its gradients"
    model.load_state_dict(state)
    model.zero_grad()
    return program


def _sizes(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Numbers that a sample's forward pass leaves behind, and multiplications that it takes."""
    held = 0

    def count(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal held
        if isinstance(output, Tensor):
            held += output.numel()

    model.eval()
    hooks = [module.register_forward_hook(count) for module in model.modules() if not list(module.children())]
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
        model.train()
    return max(1, held + x.numel()), counter.get_total_flops() // 2
