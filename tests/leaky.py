"""Ways to unlearn that leave something of the deleted samples behind: the checks must catch each of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedforget.federation.silo import read_source
from fedforget.types import Choice, Deletion, History, Plan, Preprocessing, TrainingResult


class KeepsMoment(torch.optim.SGD):
    """Momentum that outlives the run: it is kept by the class, not by the silo's state."""

    moment: ClassVar[dict[int, Tensor]] = {}

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                moment = self.moment.setdefault(number, torch.zeros_like(parameter))
                moment.mul_(0.9).add_(parameter.grad)
                parameter.grad.copy_(moment)
        super().step(closure)


def keeps_moment(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return KeepsMoment(model.parameters(), lr=lr)


@dataclass(frozen=True)
class LeakyMoment:
    """Says that it retrains from nothing, but its optimizer remembers the run before."""

    name: ClassVar[str] = "leaky-moment"
    guarantee: ClassVar[str] = "exact"

    def plan(self, original: Plan) -> Plan:
        return dataclasses.replace(original, optimizer=Choice("tests.leaky:keeps_moment"))

    def unlearn(self, history: History, deletion: Deletion, coordinator: Any) -> TrainingResult:
        return coordinator.train(self.plan(history.plan))


@dataclass(frozen=True)
class LeakyNormalisation:
    """Shifts by a mean over all rows of the sources, the deleted ones included."""

    name: ClassVar[str] = "leaky-normalisation"
    guarantee: ClassVar[str] = "exact"

    def plan(self, original: Plan) -> Plan:
        return original

    def unlearn(self, history: History, deletion: Deletion, coordinator: Any) -> TrainingResult:
        held = [read_source(silo.source).x for silo in coordinator.link._silos.values()]
        shift = float(torch.cat(held).mean())
        plan = dataclasses.replace(history.plan, preprocessing=Preprocessing("scale", shift=shift))
        return coordinator.train(plan)


kept: dict[str, Any] = {}


@dataclass(frozen=True)
class LeakyConstants:
    """Retrains honestly, then serves the model with the means that the run before had found."""

    name: ClassVar[str] = "leaky-constants"
    guarantee: ClassVar[str] = "exact"

    def plan(self, original: Plan) -> Plan:
        return original

    def unlearn(self, history: History, deletion: Deletion, coordinator: Any) -> TrainingResult:
        result = coordinator.train(history.plan)
        return dataclasses.replace(result, fit=kept.get("fit", result.fit))


@dataclass(frozen=True)
class LeakyPlan:
    """Retrains honestly, then writes a number that it remembers into the plan that is served."""

    name: ClassVar[str] = "leaky-plan"
    guarantee: ClassVar[str] = "exact"

    def plan(self, original: Plan) -> Plan:
        return original

    def unlearn(self, history: History, deletion: Deletion, coordinator: Any) -> TrainingResult:
        result = coordinator.train(history.plan)
        shift = Preprocessing("scale", shift=kept.get("shift", 0.0))
        return dataclasses.replace(result, plan=dataclasses.replace(result.plan, preprocessing=shift), fit=None)


@dataclass(frozen=True)
class WarmStart:
    """Goes on from the model that is served instead of a fresh one."""

    name: ClassVar[str] = "warm-start"
    guarantee: ClassVar[str] = "exact"

    def plan(self, original: Plan) -> Plan:
        return dataclasses.replace(original, model="tests.leaky:warm")

    def unlearn(self, history: History, deletion: Deletion, coordinator: Any) -> TrainingResult:
        return coordinator.train(self.plan(history.plan))


served: dict[str, Tensor] = {}


def warm(shape: tuple[int, ...], classes: int) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(shape[0], classes))
    if served:
        model.load_state_dict(served)
    return model
