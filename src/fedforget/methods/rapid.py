"""Rapid retraining: Algorithm 1 of Liu et al. 2022, "The Right to be Forgotten in Federated Learning" (INFOCOM).

Deletion comes first and is the silos' own (lines 1 to 3 of the algorithm). Then the global model is initialised anew
and every silo, not only those that deleted, trains on what remains with a curvature-aware step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedforget.methods.guard import train_guarded
from fedforget.methods.method import Guarantee, Trainer, changed
from fedforget.types import Choice, Deletion, History, Plan, TrainingResult


@dataclass(frozen=True)
class RapidRetrain:
    """A fresh model, the samples that remain, and steps that know the loss's curvature: Muon's, or the paper's rule."""

    optimizer: Choice | str = "muon"
    rounds: int | None = None
    target_accuracy: float | None = None
    batch_size: int | None = None

    name: ClassVar[str] = "rapid"
    summary: ClassVar[str] = (
        "a fresh model and the remaining samples with curvature-aware steps: Algorithm 1 of the paper"
    )
    guarantee: ClassVar[Guarantee] = "exact"

    def plan(self, original: Plan) -> Plan:
        """The original plan with these settings in place of its own."""
        return changed(original, **vars(self))

    def unlearn(self, history: History, deletion: Deletion, coordinator: Trainer) -> TrainingResult:  # noqa: ARG002
        """Retrain rapidly: what was deleted does not matter, for nothing of the old run is used."""
        return train_guarded(coordinator, self.plan(history.plan), self.name)
