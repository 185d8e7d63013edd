"""All randomness of a run, drawn from (seed, round, silo) and from nothing else.

The history of requests, release numbers and clocks never enter, so that a federation that lost samples draws exactly
what a federation that never had them would draw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def digest(*parts: int | str) -> bytes:
    """SHA-256 of the parts, kept apart from each other."""
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def seed_from(*parts: int | str) -> int:
    """A seed for torch's generators, from the parts."""
    return int.from_bytes(digest(*parts)[:8], "big") >> 1


def shuffled(count: int, *parts: int | str) -> Tensor:
    """A random order of `count` positions, decided by the parts."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed_from(*parts)))


@contextmanager
def seeded(device: torch.device, *parts: int | str) -> Iterator[None]:
    """Inside, torch's own generators (initialisation, dropout) start from the parts; outside they are untouched."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed = seed_from(*parts)
        # Not torch.manual_seed: it also notes the seed, with a stack trace, for every kind of device that never comes.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def participants(silos: Collection[str], count: int | None, seed: int, number: int) -> tuple[str, ...]:
    """The silos that take part in round `number`: the `count` with the smallest hash, in name order."""
    drawn = sorted(silos, key=lambda name: digest("participants", seed, number, name))[:count]
    return tuple(sorted(drawn))


def held_out(silo: str, sample_id: int | str, share: float) -> bool:
    """Whether a silo sets this sample aside for evaluation: its id alone decides, so that no deletion moves another."""
    return int.from_bytes(digest("holdout", silo, str(sample_id))[:8], "big") < share * 2**64
