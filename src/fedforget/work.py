"""Work that was begun: noted before the first effect, so that a crash at any moment is only a pause."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedforget.types import Plan, SampleId


@dataclass(frozen=True)
class Work:
    """A training (`plan` is set) or a deletion with its retraining (`method` is set), on the way to a release."""

    version: int
    """The release that it will make."""
    attempt: int = 0
    """Grows when the work is begun anew with other settings, so that nothing of an earlier try is taken up."""
    plan: Plan | None = None
    failed: bool = False
    """A training that ended with an error: its plan can be tried again, or given up for another."""
    method: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    baseline: bool = False
    requests: tuple[str, ...] = ()
    """Keyed hashes of the deletion requests that it answers, by which a repeated one is recognised."""
    ids: Mapping[str, Sequence[SampleId] | None] | None = None
    """What silos have still to delete; None, and so kept nowhere, once all have acknowledged."""
    deleted: Mapping[str, int] = field(default_factory=dict)

    @property
    def run(self) -> str:
        """What the work's training is called at the silos."""
        return f"release-{self.version}-{self.attempt}"

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {**vars(self), "plan": self.plan.as_dict() if self.plan else None}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Work:
        """The work that `as_dict` wrote."""
        plan = Plan.from_dict(data["plan"]) if data["plan"] else None
        return Work(**{**data, "plan": plan, "requests": tuple(data["requests"])})


@dataclass(frozen=True)
class Share:
    """So many of a silo's samples as make up this share of all training samples of the federation (the paper's r)."""

    rate: float


Deletions = Mapping[str, Sequence[SampleId] | Share | Literal["all"]]
"""What to delete at each silo: sample ids, a share, or all that it holds."""


def request_digest(request: Deletions, key: bytes) -> str:
    """What tells one deletion request from another; without the key nobody can try ids out on it."""
    plain = {
        silo: ["share", part.rate] if isinstance(part, Share) else part if part == "all" else sorted(map(str, part))
        for silo, part in request.items()
    }
    return hmac.digest(key, json.dumps(plain, sort_keys=True).encode(), "sha256").hex()
