"""Single silos, links and tasks for tests, without the pipeline around them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import fedforget as ff
from fedforget import models, optim
from fedforget.data.tombstones import Tombstones
from fedforget.federation import training
from fedforget.federation.coordinator import Coordinator
from fedforget.federation.link import Link, Train
from fedforget.federation.links.batched import BatchedLink
from fedforget.federation.links.in_process import InProcessLink
from fedforget.federation.registry import Registry
from fedforget.federation.silo import Silo
from fedforget.types import DataSource, State
from tests import small

CPU = torch.device("cpu")
REGISTRY = Registry(models.BUILT_IN, optim.BUILT_IN, batched=optim.BATCHED)
PLAN = ff.Plan(
    rounds=4,
    batch_size=4,
    optimizer=ff.optim.SGD(lr=0.1, momentum=0.9),
    model="logistic",
    shape=small.SHAPE,
    classes=small.CLASSES,
    preprocessing=ff.Preprocessing(),
    holdout=0.0,
)


def silo(folder: Path, name: str, source: DataSource, registry: Registry = REGISTRY) -> Silo:
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    return Silo(name, source, Tombstones(own), registry, own, CPU)


def in_process(folder: Path, data: Mapping[str, DataSource], registry: Registry = REGISTRY) -> InProcessLink:
    return InProcessLink([silo(folder, name, source, registry) for name, source in data.items()])


def batched(folder: Path, data: Mapping[str, DataSource], registry: Registry = REGISTRY) -> BatchedLink:
    return BatchedLink([silo(folder, name, source, registry) for name, source in data.items()], registry, CPU)


def coordinator(link: Link, run: str = "run", registry: Registry = REGISTRY, **options: Any) -> Coordinator:
    return Coordinator(link, registry, run, CPU, **{"public_test": small.TEST, **options})


def fresh(plan: ff.Plan = PLAN, seed: int = 0) -> State:
    torch.manual_seed(seed)
    return training.state_of(REGISTRY.model(plan))


def train_task(state: State, round_number: int = 1, **changes: Any) -> Train:
    usual = {
        "run": "run",
        "plan": PLAN,
        "round": round_number,
        "previous": round_number - 1 or None,
        "state": state,
        "fit": None,
        "durable": False,
    }
    return Train(**{**usual, **changes})


def equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
