"""The link: how tasks travel from the coordinator to silos, and replies back.

`call` takes one task for each silo it names and gives back one reply, or one failure, for each of them. A task that is
sent again has the same effect and the same reply. A failure's text never holds a sample or its id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedforget.errors import DivergedError
from fedforget.federation.preprocessing import FeatureSums
from fedforget.types import Fit, Plan, SampleId, State


@dataclass(frozen=True)
class Count:
    """How many samples remain, and the sums that the plan's preprocessing is fit from."""

    plan: Plan


@dataclass(frozen=True)
class Train:
    """One round of local training from the global state."""

    run: str
    plan: Plan
    round: int
    previous: int | None
    """The silo's last turn in this run, from whose optimizer state it goes on; None: this is its first."""
    state: State
    fit: Fit | None
    durable: bool
    """Keep the optimizer's state on disk: the coordinator will resume from a checkpoint that needs it."""


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the global state on the share that the silo set aside."""

    plan: Plan
    state: State
    fit: Fit | None


@dataclass(frozen=True)
class Forget:
    """Delete samples for good (`ids` None: all that the silo holds); without `commit`, only say what would happen."""

    plan: Plan
    ids: tuple[SampleId, ...] | None
    commit: bool


@dataclass(frozen=True)
class Wipe:
    """Drop all side state of training runs: optimizer state, caches."""


Task = Count | Train | Evaluate | Forget | Wipe


@dataclass(frozen=True)
class Counted:
    """Training samples that remain; sums are None where the plan fits nothing."""

    samples: int
    sums: FeatureSums | None


@dataclass(frozen=True)
class Trained:
    """The silo's state after local training."""

    state: State
    samples: int
    loss: float


@dataclass(frozen=True)
class Evaluated:
    """Counts only: no answer to a single sample leaves the silo."""

    correct: int
    samples: int


@dataclass(frozen=True)
class Forgotten:
    """A silo's acknowledgement: the deletion is durable (or, without commit, possible)."""

    deleted: int
    already_deleted: int
    remaining: int
    """Samples left to train on."""


@dataclass(frozen=True)
class Wiped:
    """No side state is left at the silo."""


@dataclass(frozen=True)
class Failure:
    """Why a silo did not carry out its task; the reason names the silo."""

    reason: str
    diverged: bool = False
    """The numbers ran away: with a smaller step the task might succeed."""

    @staticmethod
    def of(silo: str, error: Exception) -> Failure:
        """What the coordinator is told of a silo's error."""
        text = str(error)
        reason = text if text.startswith(f"silo {silo}") else f"silo {silo}: {text}"
        return Failure(reason, isinstance(error, DivergedError))


Reply = Counted | Trained | Evaluated | Forgotten | Wiped


class Link(Protocol):
    """A way to reach silos."""

    @property
    def name(self) -> str:
        """What a release says of how its silos were reached: over another link, sums may be rounded otherwise."""
        ...

    @property
    def silos(self) -> tuple[str, ...]:
        """The names of all silos, in name order."""
        ...

    def how(self, plan: Plan, silos: int, samples: int) -> str:
        """In words, how a round of so many silos, of so many samples at the most, is trained by this plan, and why."""
        ...

    def call(self, tasks: Mapping[str, Task], timeout: float | None = None) -> dict[str, Reply | Failure]:
        """Carry out one task at each silo that is named; no reply within `timeout` seconds is a failure."""
        ...


def tensor_bytes(state: Mapping[str, Tensor]) -> int:
    """The bytes of a state's tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
