"""Names in a plan, resolved to what is installed here: built-in names, or `package.module:callable`."""

from __future__ import annotations

import copy
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedforget.errors import PlanError
from fedforget.federation.aggregate import BUILT_IN as AGGREGATIONS
from fedforget.types import BatchedRule, Choice, Plan


def _accepts(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def imported(name: str, kind: str) -> Any:
    """The object that `package.module:name` names."""
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # a module may raise anything while it is imported
        raise PlanError(f"{kind} {name!r} cannot be imported here: {error}") from error
    return found


class _Spare:
    """The model that was built last, as it was built; where a registry is pickled, it stays behind."""

    def __init__(self) -> None:
        self.built: tuple[tuple[Any, ...], nn.Module] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Spare, ()


def _is_copied_whole(model: nn.Module) -> bool:
    """Whether it is made of torch's and this project's own layers alone, none of which holds a function.

    A function is not copied, so that a closure over `self` in a copy would go on with the parameters of the original.
    """
    return all(
        type(module).__module__.split(".")[0] in ("torch", "fedforget")
        and not any(isinstance(value, types.FunctionType | types.MethodType) for value in vars(module).values())
        and not any(value for name, value in vars(module).items() if name.endswith("_hooks"))
        for module in model.modules()
    )


@dataclass(frozen=True)
class Registry:
    """What a silo or coordinator can build by name; nothing else is ever run."""

    models: Mapping[str, Callable[..., nn.Module]]
    optimizers: Mapping[str, Callable[..., torch.optim.Optimizer]]
    aggregations: Mapping[str, Callable[..., Any]] = field(default_factory=lambda: AGGREGATIONS)
    batched: Mapping[str, Callable[..., BatchedRule]] = field(default_factory=dict)
    """The optimizers, by the same names, whose steps can be taken for many silos at once."""
    _spare: _Spare = field(default_factory=_Spare, repr=False, compare=False)

    def _find(self, kind: str, name: str) -> Callable[..., Any]:
        entries: Mapping[str, Callable[..., Any]] = getattr(self, f"{kind}s")
        if name in entries:
            return entries[name]
        if ":" not in name:
            known = ", ".join(entry for entry in sorted(entries) if ":" not in entry)
            raise PlanError(f"{kind} {name!r} is unknown: use {known}, or your own as package.module:callable")
        found = imported(name, kind)
        if not callable(found):
            raise PlanError(f"{kind} {name!r} is not callable")
        return found  # type: ignore[no-any-return]  # callable() narrows Any to an unknown callable

    def model(self, plan: Plan) -> nn.Module:
        """A fresh model of the plan, initialised from torch's current generator."""
        factory = self._find("model", plan.model or "")
        known = {"shape": plan.shape, "classes": plan.classes}
        try:
            model = factory(**{name: value for name, value in known.items() if _accepts(factory, name)})
        except Exception as error:  # the factory may be the user's: whatever it raises is told with its model's name
            raise PlanError(
                f"model {plan.model!r} cannot be built for samples of shape {plan.shape}: {error}"
            ) from error
        if not isinstance(model, nn.Module):
            raise PlanError(f"model {plan.model!r} made a {type(model).__name__}, not a torch.nn.Module")
        return model.to(getattr(torch, plan.dtype))

    def blank(self, plan: Plan, device: torch.device) -> nn.Module:
        """A model of the plan on a device, whose parameters the caller will overwrite.

        A copy of one that was built before, where a copy is sure to share nothing with it: to initialise a large model
        takes longer than an accelerator trains it.
        """
        key = (plan.model, plan.shape, plan.classes, plan.dtype, device)
        if self._spare.built is None or self._spare.built[0] != key:
            self._spare.built = key, self.model(plan).to(device)
        spare = self._spare.built[1]
        return copy.deepcopy(spare) if _is_copied_whole(spare) else self.model(plan).to(device)

    def optimizer(self, plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
        """The plan's optimizer on this model; torch's own classes are given the parameters, all others the model."""
        chosen = self._chosen(plan.optimizer)
        build = self._find("optimizer", chosen.name)
        target: Any = model.parameters() if "params" in inspect.signature(build).parameters else model
        try:
            optimizer = build(target, **chosen.settings)
        except Exception as error:  # the optimizer may be the user's
            raise PlanError(f"optimizer {chosen}: {error}") from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PlanError(f"optimizer {chosen} is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        return optimizer

    def batched_rule(self, plan: Plan, model: nn.Module) -> BatchedRule | None:
        """The plan's optimizer for many silos at once, where it has such a form."""
        build = self.batched.get(self._chosen(plan.optimizer).name)
        return None if build is None else build(self.optimizer(plan, model), model)

    def aggregation(self, plan: Plan) -> Callable[..., Any]:
        """The plan's aggregation: called with the silos' states in name order, and their numbers of samples."""
        chosen = self._chosen(plan.aggregation)
        function = self._find("aggregation", chosen.name)
        try:
            inspect.signature(function).bind([], [], **chosen.settings)
            if function in AGGREGATIONS.values():
                function([{}], [1], **chosen.settings)  # they check their settings when called
        except TypeError as error:
            raise PlanError(f"aggregation {chosen}: {error}") from error
        return lambda states, counts: function(states, counts, **chosen.settings)

    @staticmethod
    def _chosen(part: Choice | str) -> Choice:
        return part if isinstance(part, Choice) else Choice(part)
