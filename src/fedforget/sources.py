"""From the name of a dataset and a partition to one data source for each silo, so that a command can do it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedforget.data import datasets, partition
from fedforget.errors import DataError, PlanError
from fedforget.federation.silo import read_source
from fedforget.types import Dataset, DataSource, PhysicalDeletion, Samples

Rows = Mapping[str, NDArray[np.int64]]
PartitionKind = Literal["even", "dirichlet", "shards", "sites"]


@dataclass(frozen=True)
class Partition:
    """How a dataset is shared out among silos."""

    kind: PartitionKind = "even"
    silos: int = 10
    alpha: float = 0.5
    """For `dirichlet`: the smaller, the more the silos' classes differ."""
    shards: int = 2
    """For `shards`: label shards for each silo."""
    seed: int = 0

    def rows(self, labels: Tensor) -> Rows:
        """The rows of each silo."""
        if self.kind == "even":
            return partition.even(len(labels), self.silos, self.seed)
        if self.kind == "dirichlet":
            return partition.dirichlet(labels.numpy(), self.silos, self.alpha, self.seed)
        if self.kind == "shards":
            return partition.label_shards(labels.numpy(), self.silos, self.shards, self.seed)
        raise PlanError(f"partition {self.kind!r} is unknown: use even, dirichlet, shards or sites")


@dataclass(frozen=True)
class Origin:
    """Where a run's data comes from. The rows are kept once drawn: a partition is never redrawn."""

    dataset: str
    partition: Partition
    data_dir: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, list[int]] | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {**vars(self), "partition": vars(self.partition)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Origin:
        """The origin that `as_dict` wrote."""
        return Origin(**{**data, "partition": Partition(**data["partition"])})

    def load(self) -> Dataset:
        """Read the dataset."""
        if self.dataset == "csv":
            if self.data_dir is None:
                raise DataError("dataset csv needs --data-dir: the folder with one CSV file for each site")
            return datasets.csv_sites(self.data_dir, **self.options)
        if self.dataset.startswith("hub:"):
            return datasets.from_hub(self.dataset.removeprefix("hub:"), **self.options)
        return datasets.load(self.dataset, self.data_dir)


def pooled(dataset: Dataset) -> Samples:
    """All training samples of a dataset in one pool; those of sites one after the other, with new ids."""
    if dataset.pool is not None:
        return dataset.pool
    if any(isinstance(source, PhysicalDeletion) for source in dataset.sites.values()):
        raise DataError(f"dataset {dataset.name} deletes samples at its sites: share it out by site, not from one pool")
    parts = [read_source(source) for source in dataset.sites.values()]
    x = torch.cat([part.x for part in parts])
    return Samples(tuple(range(len(x))), x, torch.cat([part.y for part in parts]))


def share_out(pool: Samples, rows: Rows) -> dict[str, Samples]:
    """The silos' samples, numbered 0 … n_k - 1 at each; the rows are the map back to the dataset."""
    shared: dict[str, Samples] = {}
    for name, of_silo in rows.items():
        index = torch.as_tensor(of_silo, dtype=torch.long)
        shared[name] = Samples(tuple(range(len(index))), pool.x[index], pool.y[index])
    return shared


def by_site(dataset: Dataset) -> dict[str, DataSource]:
    """One silo for each site of the dataset."""
    if not dataset.sites:
        raise DataError(f"dataset {dataset.name} has no sites: choose another partition than `sites`")
    return dict(dataset.sites)


def open_origin(origin: Origin) -> tuple[Origin, Dataset, dict[str, DataSource]]:
    """The dataset, its silos' sources, and the origin with the rows that were drawn."""
    dataset = origin.load()
    if origin.dataset == "csv" and origin.options.get("classes") is None:
        # Kept once read: deleting the last sample of a class must not renumber the others.
        origin = replace(origin, options={**origin.options, "classes": list(dataset.classes)})
    if origin.partition.kind == "sites":
        return origin, dataset, by_site(dataset)
    pool = pooled(dataset)
    rows = origin.rows or {name: part.tolist() for name, part in origin.partition.rows(pool.y).items()}
    if sum(map(len, rows.values())) != len(pool):
        raise DataError(
            f"dataset {dataset.name} has {len(pool)} samples now, and had {sum(map(len, rows.values()))} when it was "
            "shared out: restore it, for a sample's id is its row"
        )
    return (
        replace(origin, rows=rows),
        dataset,
        dict(share_out(pool, {name: np.asarray(part) for name, part in rows.items()})),
    )
