"""The seam of a way to unlearn: settings, a declared guarantee, and one function."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from fedforget.errors import PlanError
from fedforget.federation.coordinator import Watch
from fedforget.types import Choice, Deletion, History, Plan, TrainingResult

Guarantee = Literal["exact", "approximate"]


class Trainer(Protocol):
    """What a method needs of a coordinator: training runs over the samples that remain."""

    def train(self, plan: Plan, watch: Watch | None = None) -> TrainingResult:
        """Train from a fresh model; a DivergedError ends a run that diverges, or of which `watch` says so."""
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


def changed(plan: Plan, **settings: Any) -> Plan:
    """The original plan with what a method's settings put in place of its own."""
    return dataclasses.replace(plan, **{name: value for name, value in settings.items() if value is not None})


def settings_of(method: Method) -> dict[str, Any]:
    """A method's settings as plain JSON data, from which `from_settings` makes an equal method."""
    given: Any = method  # a protocol cannot ask for a frozen dataclass
    if isinstance(method, type) or not isinstance(method, Method):
        raise PlanError(f"{given!r} is not a method: give one with its settings, such as RapidRetrain()")
    dataclass_options = getattr(given, "__dataclass_params__", None)
    if dataclass_options is None or not dataclass_options.frozen:
        raise PlanError(f"method {method.name!r} must be a frozen dataclass of its settings")
    values = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise PlanError(f"{name} is {value}: it must be a finite number")
    settings = {
        name: {"name": value.name, "settings": dict(value.settings)} if isinstance(value, Choice) else value
        for name, value in values.items()
    }
    try:
        again = from_settings(type(method), json.loads(json.dumps(settings, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise PlanError(f"method {method.name!r}: its settings are not plain data: {error}") from error
    if again != method:
        raise PlanError(f"method {method.name!r}: its settings are not the same once written and read again")
    return settings


def from_settings(kind: type[Method], settings: Mapping[str, Any]) -> Method:
    """The method that `settings_of` described."""
    values = {
        name: Choice(**value) if isinstance(value, Mapping) and set(value) == {"name", "settings"} else value
        for name, value in settings.items()
    }
    return kind(**values)
