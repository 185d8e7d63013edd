"""The links whose silos are all in this process, by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fedforget.errors import PlanError
from fedforget.federation.link import Link
from fedforget.federation.links.batched import BatchedLink
from fedforget.federation.links.in_process import InProcessLink
from fedforget.federation.registry import Registry
from fedforget.federation.silo import Silo

NAMES = ("auto", "in-process", "batched")


def local_link(name: str, silos: Iterable[Silo], registry: Registry, device: torch.device) -> Link:
    """A link of this name to silos in this process."""
    if name not in NAMES:
        raise PlanError(f"link {name!r} is unknown: use {', '.join(NAMES)}")
    if name == "in-process":
        return InProcessLink(silos)
    return BatchedLink(silos, registry, device, auto=name == "auto")
