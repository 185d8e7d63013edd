"""How many samples are worked on at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

ELEMENTS = 2**24
"""Per-sample numbers held at once, 64 MiB in float32: few large products, as a GPU wants them."""

ELEMENTS_IN_CACHE = 2**18
"""The same on a processor, 1 MiB: what is computed is squared and summed while it is still in a core's own cache."""


def limit(device: torch.device) -> int:
    """How many numbers to hold at once on this device."""
    return min(ELEMENTS, ELEMENTS_IN_CACHE) if device.type == "cpu" else ELEMENTS


def chunks(samples: int, elements: int, limit: int) -> Iterator[slice]:
    """The first `samples` samples, of which each needs so many numbers, in runs that need no more than the limit."""
    step = max(1, limit // max(1, elements))
    for start in range(0, samples, step):
        yield slice(start, min(start + step, samples))
