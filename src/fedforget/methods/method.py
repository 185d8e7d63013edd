"""The seam of a way to unlearn: settings, a declared guarantee, and one function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from fedforget.errors import PlanError
from fedforget.types import Choice, Deletion, History, Plan, TrainingResult

Guarantee = Literal["exact", "approximate"]


class Trainer(Protocol):
    """What a method needs of a coordinator: training runs over the samples that remain."""

    def train(self, plan: Plan) -> TrainingResult:
        """Train from a fresh model."""
        ...


@runtime_checkable
class Method(Protocol):
    """A way to unlearn: a frozen dataclass of its settings.

    `guarantee` is `exact` where the outcome is bit for bit what the method would make of silos that never held the
    deleted samples; `fedforget verify` holds it to that. Deletion itself is done, durably, before `unlearn` is called.
    """

    @property
    def name(self) -> str:
        """What the method is called in commands and reports."""
        ...

    @property
    def guarantee(self) -> Guarantee:
        """What the method promises."""
        ...

    def plan(self, original: Plan) -> Plan:
        """The plan that the method will train by; it is checked before anything is deleted."""
        ...

    def unlearn(self, history: History, deletion: Deletion, coordinator: Trainer) -> TrainingResult:
        """Make the model that is to be released."""
        ...


def changed(plan: Plan, optimizer: Choice | str | None, rounds: int | None, target_accuracy: float | None) -> Plan:
    """The original plan with what a method's settings put in place of its own."""
    wanted: dict[str, Any] = {"optimizer": optimizer, "rounds": rounds, "target_accuracy": target_accuracy}
    return dataclasses.replace(plan, **{name: value for name, value in wanted.items() if value is not None})


def settings_of(method: Method) -> dict[str, Any]:
    """A method's settings as plain JSON data."""
    try:
        fields = dataclasses.fields(method)  # type: ignore[arg-type]  # a protocol cannot ask for a dataclass
    except TypeError as error:
        raise PlanError(f"method {method.name!r} must be a frozen dataclass of its settings") from error
    values = {field.name: getattr(method, field.name) for field in fields}
    return {
        name: {"name": value.name, "settings": dict(value.settings)} if isinstance(value, Choice) else value
        for name, value in values.items()
    }


def from_settings(kind: type[Method], settings: Mapping[str, Any]) -> Method:
    """The method that `settings_of` described."""
    values = {
        name: Choice(value["name"], value["settings"]) if isinstance(value, Mapping) else value
        for name, value in settings.items()
    }
    return kind(**values)
