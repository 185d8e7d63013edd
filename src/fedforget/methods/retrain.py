"""Retraining from scratch: the baseline of Liu et al. 2022 (INFOCOM), and the yardstick of every other method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedforget.methods.method import Guarantee, Trainer, changed
from fedforget.types import Choice, Deletion, History, Plan, TrainingResult


@dataclass(frozen=True)
class Retrain:
    """A fresh model, the samples that remain, the original plan; another optimizer or number of rounds where given."""

    optimizer: Choice | str | None = None
    rounds: int | None = None
    target_accuracy: float | None = None
    batch_size: int | None = None

    name: ClassVar[str] = "retrain"
    summary: ClassVar[str] = "a fresh model, the remaining samples and the original plan: the baseline"
    guarantee: ClassVar[Guarantee] = "exact"

    def plan(self, original: Plan) -> Plan:
        """The original plan with these settings in place of its own."""
        return changed(original, **vars(self))

    def unlearn(self, history: History, deletion: Deletion, coordinator: Trainer) -> TrainingResult:  # noqa: ARG002
        """Retrain: what was deleted does not matter, for nothing of the old run is used."""
        return coordinator.train(self.plan(history.plan))
