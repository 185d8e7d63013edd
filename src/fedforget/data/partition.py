"""Splitting one pool of samples over silos: pure functions of their arguments and a seed.

Each gives {silo name: sorted row numbers}; every row goes to exactly one silo, and no silo is left empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedforget.errors import DataError, PlanError

Rows = npt.NDArray[np.int64]


def even(count: int, silos: int, seed: int) -> dict[str, Rows]:
    """Shuffle, then cut into parts whose sizes differ by at most one: the paper's split."""
    _check(count, silos)
    return _named(np.array_split(_generator(seed).permutation(count), silos))


def dirichlet(labels: npt.ArrayLike, silos: int, alpha: float, seed: int) -> dict[str, Rows]:
    """Split each class over the silos in shares drawn from Dirichlet(alpha): the smaller alpha, the more they differ.

    A silo that would end empty is given a sample of the largest one.
    """
    values = _flat(labels)
    _check(len(values), silos)
    # Beyond 1e9 the shares are even to nine digits, and far beyond it drawing them overflows.
    if not 0 < alpha <= 1e9:
        raise PlanError(f"alpha is {alpha!r}: it must be above 0 and at most 1e9")
    generator = _generator(seed)
    parts: list[list[Rows]] = [[] for _ in range(silos)]
    for label in np.unique(values):
        rows = generator.permutation(np.flatnonzero(values == label))
        shares = generator.dirichlet(np.full(silos, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    held = [np.concatenate(part) for part in parts]
    for silo in range(silos):
        if not len(held[silo]):
            largest = max(range(silos), key=lambda other: len(held[other]))
            held[silo], held[largest] = held[largest][-1:], held[largest][:-1]
    return _named(held)


def label_shards(labels: npt.ArrayLike, silos: int, shards_per_silo: int, seed: int) -> dict[str, Rows]:
    """Sort by label, cut into silos * shards_per_silo shards and deal them out (McMahan et al., arXiv:1602.05629).

    With two shards most silos hold two classes only.
    """
    values = _flat(labels)
    _check(len(values), silos)
    if shards_per_silo < 1:
        raise PlanError(f"shards_per_silo is {shards_per_silo!r}: it must be at least 1")
    shards = silos * shards_per_silo
    if shards > len(values):
        raise DataError(f"{len(values)} samples cannot be cut into {shards} shards: use fewer silos or shards")
    pieces = np.array_split(np.argsort(values, kind="stable"), shards)
    dealt = _generator(seed).permutation(shards).reshape(silos, shards_per_silo)
    return _named([np.concatenate([pieces[shard] for shard in hand]) for hand in dealt])


def _generator(seed: int) -> np.random.Generator:
    if seed < 0:
        raise PlanError(f"seed is {seed!r}: it must be 0 or more")
    # Named, not default_rng: the default may change from one numpy to the next, and a partition must not.
    return np.random.Generator(np.random.PCG64(seed))


def _flat(labels: npt.ArrayLike) -> npt.NDArray[np.generic]:
    values = np.asarray(labels)
    if values.ndim != 1:
        raise DataError(f"labels have shape {values.shape}: give one label a sample")
    if values.dtype.kind == "f" and any(map(math.isnan, values)):
        raise DataError("a label is NaN: give every sample a label")
    return values


def _check(count: int, silos: int) -> None:
    if silos < 1:
        raise PlanError(f"{silos} silos: there must be at least 1")
    if silos > count:
        raise DataError(f"{count} samples cannot be split over {silos} silos: every silo needs at least one")


def _named(parts: Sequence[npt.NDArray[np.integer]]) -> dict[str, Rows]:
    return {f"silo-{number}": np.sort(part).astype(np.int64) for number, part in enumerate(parts)}
