"""Small federations for tests: a few samples of a problem that can be learned in a few rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fedforget as ff
from fedforget.types import SampleId, Samples

SHAPE = (4,)
CLASSES = 3


def samples(count: int, seed: int, ids: Sequence[SampleId] | None = None) -> Samples:
    """Points around one centre for each class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=generator)
    centres = torch.randn(CLASSES, *SHAPE, generator=torch.Generator().manual_seed(99))
    x = centres[y] + 0.5 * torch.randn(count, *SHAPE, generator=generator)
    return Samples(tuple(range(count)) if ids is None else tuple(ids), x, y)


def sources(sizes: Sequence[int], seed: int = 0) -> dict[str, Samples]:
    return {f"silo-{number}": samples(size, 1000 * seed + number) for number, size in enumerate(sizes)}


TEST = samples(40, 12345)


def federation(data: Mapping[str, Samples], folder: Path | None = None, **changes: Any) -> ff.Federation:
    options: dict[str, Any] = {"model": ff.models.logistic, "classes": CLASSES, "test": TEST, "folder": folder}
    return ff.Federation(data, **{**options, **changes})


def without(data: Mapping[str, Samples], gone: Mapping[str, Sequence[SampleId]]) -> dict[str, Samples]:
    """The same sources, built without these rows."""
    return {
        name: part.select([i for i, sample_id in enumerate(part.ids) if sample_id not in gone.get(name, ())])
        for name, part in data.items()
    }
