"""Frozen dataclasses and protocols that cross module borders (tier 0: imports nothing of the package but errors)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedforget.errors import DataError, PlanError

SampleId = int | str
State = dict[str, Tensor]
"""A model's parameters and buffers by name, as `Module.state_dict` gives them."""
Stack = dict[str, Tensor]
"""The same tensors of many models, each with a leading dimension of models."""


def is_number(value: Any) -> bool:
    """Whether a setting is a number: from a command line or a file it may be a text, or true."""
    return isinstance(value, Real) and not isinstance(value, bool)


def id_order(sample_id: SampleId) -> tuple[int, int, str]:
    """The one order of ids that training relies on: whole numbers by value, then texts."""
    return (0, sample_id, "") if isinstance(sample_id, int) else (1, 0, sample_id)


@dataclass(frozen=True)
class Samples:
    """Samples with their stable ids, held in memory; itself a data source."""

    ids: tuple[SampleId, ...]
    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.x) == len(self.y):
            raise DataError(
                f"{len(self.ids)} ids, {len(self.x)} inputs and {len(self.y)} labels: give one of each a sample"
            )
        # Compared as text, because that is how an id is typed in a command and hashed into a tombstone.
        if len({str(sample_id) for sample_id in self.ids}) != len(self.ids):
            raise DataError("sample ids are not unique within the silo: give every sample its own id")

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[SampleId, Tensor, Tensor]]:
        return zip(self.ids, self.x, self.y, strict=True)

    def select(self, positions: list[int]) -> Samples:
        """The samples at these positions, in this order, in memory of their own."""
        index = torch.tensor(positions, dtype=torch.long)
        return Samples(tuple(self.ids[i] for i in positions), self.x[index], self.y[index])

    def ordered(self) -> Samples:
        """The same samples in the order of their ids."""
        order = sorted(range(len(self)), key=lambda i: id_order(self.ids[i]))
        return self if order == list(range(len(self))) else self.select(order)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])


class DataSource(Protocol):
    """Where a silo's samples come from: anything that yields (id, x, y) with ids that stay the same."""

    def __iter__(self) -> Iterator[tuple[SampleId, Any, Any]]:
        """Yield every sample that the source still holds."""
        ...


@runtime_checkable
class PhysicalDeletion(Protocol):
    """A data source that can delete samples where they are stored."""

    def delete(self, ids: Collection[SampleId]) -> None:
        """Delete these samples for good; ids that are not held any more are passed over."""
        ...


@dataclass(frozen=True)
class Preprocessing:
    """What is done to a sample before the model sees it.

    `scale` is (x - shift) / scale with constants; `standardize` subtracts each feature's mean, divides by its standard
    deviation and replaces a missing value (NaN) by the mean, all recomputed from the samples that remain in each run.
    """

    kind: Literal["none", "scale", "standardize"] = "none"
    shift: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("none", "scale", "standardize"):
            raise PlanError(f"preprocessing {self.kind!r} is unknown: use none, scale or standardize")
        if self.scale == 0:
            raise PlanError("preprocessing cannot divide by a scale of 0")


@dataclass(frozen=True)
class Dataset:
    """A named dataset: either one pool of samples to be partitioned, or one data source per site."""

    name: str
    classes: tuple[str, ...]
    preprocessing: Preprocessing = Preprocessing()
    pool: Samples | None = None
    sites: Mapping[str, DataSource] = field(default_factory=dict)
    test: Samples | None = None
    """A public test split, held by the coordinator; None where silos set a share aside themselves."""


@dataclass(frozen=True)
class Choice:
    """A named part of a plan with its settings: an optimizer or an aggregation, as plain data."""

    name: str
    settings: Mapping[str, float | int | bool | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Choice, (self.name, dict(self.settings))

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.settings.items()))))

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in sorted(self.settings.items()))
        return f"{self.name}({settings})" if settings else self.name


def choice(value: Choice | str) -> Choice:
    """A choice, or a bare name with its default settings."""
    return Choice(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Plan:
    """All that decides a training run, as plain data.

    The last five fields are None until a federation fills in what it knows: its model, the shape and number of
    classes of its samples, how they are prepared, and the share that silos set aside for evaluation.
    """

    rounds: int = 20
    optimizer: Choice | str = field(default_factory=lambda: Choice("sgd", {"lr": 0.1}))
    seed: int = 0
    batch_size: int = 32
    local_epochs: int = 1
    silos_per_round: int | None = None
    """How many silos take part in a round; None: every silo that has data."""
    aggregation: Choice | str = field(default_factory=lambda: Choice("fedavg"))
    l2: float = 0.0
    """λ of Eq. 1: λ/2·‖ω‖² is added to the loss; its gradient enters the step, never Γ."""
    target_accuracy: float | None = None
    """Stop after the first round whose model reaches this accuracy (0 to 1)."""
    dtype: Literal["float32", "float64"] = "float32"
    autocast: bool = False
    """Compute losses and gradients in bfloat16 where torch holds that safe; parameters and optimizers keep dtype."""
    model: str | None = None
    shape: tuple[int, ...] | None = None
    classes: int | None = None
    preprocessing: Preprocessing | None = None
    holdout: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", choice(self.optimizer))
        object.__setattr__(self, "aggregation", choice(self.aggregation))
        if self.shape is not None:
            object.__setattr__(self, "shape", tuple(self.shape))
        for name in ("rounds", "batch_size", "local_epochs", "silos_per_round"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise PlanError(f"{name} is {value!r}: it must be a whole number of at least 1")
        if type(self.seed) is not int:
            raise PlanError(f"seed is {self.seed!r}: it must be a whole number")
        if not 0 <= self.l2 < math.inf:
            raise PlanError(f"l2 is {self.l2!r}: it must be a number of 0 or more")
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise PlanError(f"target_accuracy is {self.target_accuracy!r}: it must lie in (0, 1]")
        if self.holdout is not None and not 0 <= self.holdout < 1:
            raise PlanError(f"holdout is {self.holdout!r}: it must lie in [0, 1)")
        if self.dtype not in ("float32", "float64"):
            raise PlanError(f"dtype is {self.dtype!r}: it must be float32 or float64")
        if type(self.autocast) is not bool:
            raise PlanError(f"autocast is {self.autocast!r}: it must be true or false")
        if self.autocast and self.dtype != "float32":
            raise PlanError("autocast computes in bfloat16 for parameters of float32: leave it out, or set that dtype")

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain JSON data."""
        return {
            name: {"name": value.name, "settings": dict(value.settings)}
            if isinstance(value, Choice)
            else asdict(value)
            if isinstance(value, Preprocessing)
            else list(value)
            if isinstance(value, tuple)
            else value
            for name, value in vars(self).items()
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        """The plan that `as_dict` wrote."""
        fields = dict(data)
        for name in ("optimizer", "aggregation"):
            fields[name] = Choice(fields[name]["name"], fields[name]["settings"])
        if fields["preprocessing"] is not None:
            fields["preprocessing"] = Preprocessing(**fields["preprocessing"])
        return Plan(**fields)

    def digest(self) -> str:
        """SHA-256 of the plan's canonical JSON."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class RoundRecord:
    """What one round did, without anything that belongs to a single sample."""

    round: int
    participants: tuple[str, ...]
    loss: float
    """Mean training loss over the round's local steps, weighted by samples."""
    accuracy: float
    """Of the global model after the round."""
    seconds: float
    """Training and aggregation; evaluation excluded."""
    bytes: int
    """Model parameters sent to silos and received from them."""


class TombstoneStore(Protocol):
    """Where a silo keeps keyed hashes of the ids of deleted samples."""

    def add(self, ids: Collection[SampleId]) -> int:
        """Keep these ids' tombstones; durable when it returns. How many were new."""
        ...

    def held(self, ids: Collection[SampleId]) -> set[SampleId]:
        """Which of these ids have a tombstone."""
        ...

    def count(self) -> int:
        """How many tombstones there are."""
        ...


class BatchedRule(Protocol):
    """An optimizer's step for many models at once; what it does to one is what the optimizer does to it alone."""

    squares_share: float | None
    """The part of each batch, from its front, over which squared per-sample gradients are averaged; None: of none."""

    def fresh(self, parameters: Stack, /) -> Stack:
        """The state before the first step."""
        ...

    def wants_squares(self, steps: Tensor, /) -> bool:
        """Whether a model that took so many steps needs squared per-sample gradients for its next."""
        ...

    def step(self, parameters: Stack, gradients: Stack, state: Stack, steps: Tensor, squares: Stack | None, /) -> None:
        """One step of each model, in place on parameters and state; `steps` each took before, a number on the host."""
        ...


@dataclass(frozen=True)
class Fit:
    """Means and standard deviations of the samples that remain in a run, a value for each feature."""

    mean: Tensor
    deviation: Tensor


@dataclass(frozen=True)
class TrainingResult:
    """What a training run, or a way to unlearn, came to."""

    plan: Plan
    state: State
    fit: Fit | None
    records: tuple[RoundRecord, ...]
    discarded: tuple[RoundRecord, ...] = ()
    """Rounds of tries before this one that diverged."""


@dataclass(frozen=True)
class History:
    """What a way to unlearn may look at: the original plan and how its training went."""

    plan: Plan
    records: tuple[RoundRecord, ...] = ()


@dataclass(frozen=True)
class Deletion:
    """How many samples each silo deleted; their ids stay at the silos."""

    samples: Mapping[str, int]
