"""A release as its user holds it, and the verdict on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedforget.errors import DataError
from fedforget.federation.preprocessing import prepare
from fedforget.federation.registry import Registry
from fedforget.federation.training import EVALUATION_BATCH
from fedforget.runs import ReleaseRecord
from fedforget.types import Fit, Plan, RoundRecord, State, TrainingResult
from fedforget.verify.utility import SpeedUp, sape, speed_up

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Verification:
    """Whether a release is bit for bit the model of a federation that never held what was deleted."""

    identical: bool
    version: int
    deleted: int
    """Samples deleted so far, over all silos."""
    digest: str
    reference_digest: str

    def __bool__(self) -> bool:
        return self.identical

    def __str__(self) -> str:
        without = (
            f"a federation that never held the {self.deleted} deleted samples" if self.deleted else "a second training"
        )
        if self.identical:
            return f"release {self.version} is bit for bit the model of {without} (SHA-256 {self.digest[:16]}…)"
        digests = f"SHA-256 {self.digest[:16]}… against {self.reference_digest[:16]}…"
        return f"release {self.version} is NOT the model of {without} ({digests})"


@dataclass(frozen=True)
class Baseline:
    """The retrained baseline beside a release, on the same remaining samples; it is measured, never released."""

    records: tuple[RoundRecord, ...]

    @property
    def accuracy(self) -> float:
        """Of the last round's model."""
        return self.records[-1].accuracy


@dataclass(frozen=True)
class Release:
    """A model that a federation made: its weights, and everything that is known about how it came to be."""

    record: ReleaseRecord = field(repr=False)
    state: State = field(repr=False)
    fit: Fit | None = field(repr=False)
    baseline: Baseline | None = field(repr=False)
    registry: Registry = field(repr=False)
    check: Callable[[Release], Verification] = field(repr=False)

    @property
    def version(self) -> int:
        """The release's number within its run."""
        return self.record.version

    @property
    def plan(self) -> Plan:
        """The plan that it was trained by."""
        return self.record.plan

    @property
    def records(self) -> tuple[RoundRecord, ...]:
        """What each round did."""
        return self.record.records

    @property
    def result(self) -> TrainingResult:
        """What its training gave."""
        return TrainingResult(self.plan, self.state, self.fit, self.records)

    @property
    def accuracy(self) -> float:
        """Of the last round's model on the evaluation samples."""
        return self.record.records[-1].accuracy

    @property
    def deleted(self) -> Mapping[str, int]:
        """How many samples each silo deleted for this release."""
        return self.record.deleted

    @property
    def sape(self) -> float | None:
        """SAPE of the accuracy against the baseline's, where one was run."""
        return sape(self.baseline.accuracy, self.accuracy) if self.baseline else None

    @property
    def speed_up(self) -> SpeedUp | None:
        """v against the baseline at equal accuracy, where one was run."""
        if self.baseline is None:
            return None
        return speed_up(self.baseline.records, self.records, len(self.record.classes), self.record.metrics)

    def model(self) -> nn.Module:
        """The trained model, in evaluation mode; it takes prepared samples (`predict` takes them as they are)."""
        return _built(self.registry, self.plan, self.state)

    def predict(self, x: Tensor) -> Tensor:
        """The probability of each class for samples as the data source gives them."""
        return probabilities(self.registry, self.result, x)

    def verify(self) -> Verification:
        """Train the reference in a fresh process, on what remains, and compare bit for bit."""
        return self.check(self)


def _built(registry: Registry, plan: Plan, state: State) -> nn.Module:
    model = registry.model(plan)
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def probabilities(registry: Registry, trained: TrainingResult, x: Tensor, device: torch.device = CPU) -> Tensor:
    """The probability of each class, for samples as the data source gives them, computed on a device."""
    plan = trained.plan
    shape = plan.shape or ()
    if x.ndim == len(shape):
        x = x.unsqueeze(0)
    if tuple(x.shape[1:]) != shape:
        raise DataError(f"the model takes samples of shape {shape}, these have shape {tuple(x.shape[1:])}")
    assert plan.preprocessing is not None, "releases have complete plans"
    model = _built(registry, plan, trained.state).to(device)
    parts = [
        model(prepare(part.to(device), plan.preprocessing, trained.fit, getattr(torch, plan.dtype))).softmax(1).cpu()
        for part in torch.split(x, EVALUATION_BATCH)
    ]
    return torch.cat(parts)
