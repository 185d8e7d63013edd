"""Which parts of a model have a rule of their own, and which are replayed as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

from fedforget.optim.layer_rules import RULES, Rule


@dataclass(eq=False)
class Unit:
    """The smallest part of the model that is handled as a whole: a layer with a rule, or a module to be replayed."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    rule: Rule | None
    loops: bool = False
    """Replayed sample by sample, not by vmap."""


def units(model: nn.Module) -> Iterator[Unit]:
    """The units with trainable parameters: a module with parameters of its own takes all that is below it."""
    seen: set[nn.Module] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        own = dict(module.named_parameters(recurse=False))
        rule = RULES.get(type(module))
        # A rule knows weight and bias; a layer whose weight is computed from other parameters is replayed.
        if rule is not None and ("weight" not in own or own.keys() - {"weight", "bias"}):
            rule = None
        if rule is not None or own or parametrize.is_parametrized(module):
            parameters = {key: value for key, value in module.named_parameters() if value.requires_grad}
            if parameters:
                # An RNN keeps a list of its weights besides, in which vmap would leave its own tensors behind.
                loops = any(isinstance(part, nn.RNNBase) for part in module.modules())
                yield Unit(called(name, module), module, parameters, rule, loops)
        if rule is None and not own and not parametrize.is_parametrized(module):
            waiting += [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]


def refuse_embeddings(model: nn.Module) -> None:
    """Refuse embeddings whose gradients are not those of single samples, or have no Γ, wherever they are."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.requires_grad:
            if module.sparse:
                raise ValueError(
                    f"{called(name, module)} has sparse gradients, which have no Γ: build it with sparse=False"
                )
            if module.scale_grad_by_freq:
                raise ValueError(
                    f"{called(name, module)} scales gradients by a token's frequency in the batch, so no sample "
                    "has a gradient of its own: build it with scale_grad_by_freq=False"
                )


def called(name: str, module: nn.Module) -> str:
    """How messages name a module."""
    kind = type(module).__name__
    return f"layer {name!r} ({kind})" if name else f"the model ({kind})"
