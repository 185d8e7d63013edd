"""A federation's training against FedAvg written out by hand: plain loops, autograd, and nothing of the package."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedforget as ff
from fedforget.federation import training
from fedforget.federation.registry import Registry
from fedforget.optim import BUILT_IN
from fedforget.types import Samples
from tests import small

Step = Callable[[list[Tensor], Tensor, Tensor, float], None]


def hashed(*parts: int | str) -> bytes:
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def seed_of(*parts: int | str) -> int:
    return int.from_bytes(hashed(*parts)[:8], "big") >> 1


def loss_of(w: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(x @ w[0].T + w[1], y)


class Momentum:
    """Heavy-ball SGD as torch has it: the first moment is the first gradient itself."""

    def __init__(self) -> None:
        self.moments: list[Tensor] = []

    def __call__(self, w: list[Tensor], x: Tensor, y: Tensor, l2: float) -> None:
        gradients = [g + l2 * p.detach() for g, p in zip(torch.autograd.grad(loss_of(w, x, y), w), w, strict=True)]
        self.moments = (
            [0.9 * m + g for m, g in zip(self.moments, gradients, strict=True)] if self.moments else gradients
        )
        with torch.no_grad():
            for p, m in zip(w, self.moments, strict=True):
                p.sub_(0.1 * m)


class PapersRule:
    """Eq. 12 and 15, sample by sample; λ·ω is added to the gradient and never reaches Γ."""

    def __init__(self) -> None:
        self.t = 0
        self.m = [0.0, 0.0]
        self.v = [0.0, 0.0]

    def __call__(self, w: list[Tensor], x: Tensor, y: Tensor, l2: float) -> None:
        self.t += 1
        by_sample = [torch.autograd.grad(loss_of(w, x[i : i + 1], y[i : i + 1]), w) for i in range(len(y))]
        for k, p in enumerate(w):
            gradient = sum(gradients[k] for gradients in by_sample) / len(y) + l2 * p.detach()
            flat = (sum(gradients[k] ** 2 for gradients in by_sample) / len(y)).flatten()  # type: ignore[union-attr]
            for start in range(0, len(flat), 3):
                flat[start : start + 3] = flat[start : start + 3].mean()
            self.m[k] = 0.9 * self.m[k] + 0.1 * gradient
            self.v[k] = 0.999 * self.v[k] + 0.001 * flat.view_as(p) ** 2
            with torch.no_grad():
                p.sub_(0.01 * (self.m[k] / (1 - 0.9**self.t)) / ((self.v[k] / (1 - 0.999**self.t)) ** 0.5 + 1e-3))


OPTIMIZERS: dict[str, tuple[ff.Choice, Callable[[], Any]]] = {
    "momentum": (ff.optim.SGD(lr=0.1, momentum=0.9), Momentum),
    "papers-rule": (ff.Choice("diagonal-fisher", {"lr": 0.01, "eps": 1e-3}), PapersRule),
}


def trained_by_hand(data: dict[str, Samples], plan: ff.Plan, rule: Callable[[], Any]) -> list[list[Tensor]]:
    """The global weights after each round; `data` holds the samples sorted by id."""
    torch.manual_seed(seed_of("initialise", plan.seed))
    layer = nn.Linear(4, small.CLASSES).double()
    weights = [layer.weight.detach(), layer.bias.detach()]
    rules = {name: rule() for name in data}  # a silo keeps its moments from one of its rounds to the next
    history = []
    for number in range(1, plan.rounds + 1):
        by_hash = sorted(data, key=lambda name: hashed("participants", plan.seed, number, name))
        chosen = sorted(by_hash[: plan.silos_per_round])
        total = sum(len(data[name]) for name in chosen)
        following = [torch.zeros_like(part) for part in weights]
        for name in chosen:
            w = [part.clone().requires_grad_() for part in weights]
            x, y = data[name].x.double(), data[name].y
            for epoch in range(plan.local_epochs):
                generator = torch.Generator().manual_seed(seed_of(plan.seed, number, epoch, name))
                order = torch.randperm(len(y), generator=generator)
                for start in range(0, len(y), plan.batch_size):
                    batch = order[start : start + plan.batch_size]
                    rules[name](w, x[batch], y[batch], plan.l2)
            for part, mine in zip(following, w, strict=True):
                part.add_(len(y) / total * mine.detach())
        weights = following
        history.append(weights)
    return history


@pytest.mark.parametrize("silos_per_round", [None, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_fedavg_written_by_hand(name: str, silos_per_round: int | None) -> None:
    choice, rule = OPTIMIZERS[name]
    data = small.sources([11, 6, 9])
    plan = ff.Plan(
        rounds=5,
        optimizer=choice,
        seed=3,
        batch_size=4,
        local_epochs=2,
        silos_per_round=silos_per_round,
        l2=0.02,
        dtype="float64",
    )
    release = small.federation(data).train(plan)
    expected = trained_by_hand(data, plan, rule)[-1]
    found = list(release.state.values())
    assert found[0].dtype == torch.float64
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_the_order_of_a_source_does_not_matter() -> None:
    data = small.sources([11, 6])
    reversed_rows = {name: part.select(list(reversed(range(len(part))))) for name, part in data.items()}
    plan = ff.Plan(rounds=2, batch_size=4)
    assert small.federation(data).train(plan).record.digest == small.federation(reversed_rows).train(plan).record.digest


def test_each_epoch_and_round_visits_every_sample_once_in_a_new_order() -> None:
    plan = ff.Plan(batch_size=4, local_epochs=2)
    first = [batch.tolist() for batch in training.batches(10, plan, 1, "a", torch.device("cpu"))]
    assert [len(batch) for batch in first] == [4, 4, 2, 4, 4, 2]
    second = [batch.tolist() for batch in training.batches(10, plan, 2, "a", torch.device("cpu"))]
    orders = [list(chain(*epoch)) for epoch in (first[:3], first[3:], second[:3], second[3:])]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len(set(map(tuple, orders))) == 4


def test_l2_is_the_gradient_of_eq_1_and_frozen_parameters_stay() -> None:
    model = nn.Linear(4, small.CLASSES).double()
    model.bias.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    part = small.samples(8, 0)
    x, y = part.x.double(), part.y
    loss = functional.cross_entropy(model(x), y) + 0.5 / 2 * model.weight.square().sum()
    (gradient,) = torch.autograd.grad(loss, [model.weight])
    plan = ff.Plan(batch_size=8, l2=0.5)
    training.train(model, torch.optim.SGD([model.weight], lr=0.1), x, y, plan, 1, "a")
    torch.testing.assert_close(model.weight.detach(), before["weight"] - 0.1 * gradient)
    assert torch.equal(model.bias, before["bias"])


def test_the_loss_told_is_the_mean_a_sample() -> None:
    part = small.samples(10, 0)
    model = nn.Linear(4, small.CLASSES)
    expected = functional.cross_entropy(model(part.x), part.y).item()
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    assert training.train(model, frozen, part.x, part.y, ff.Plan(batch_size=4), 1, "a") == pytest.approx(expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon", "diagonal-fisher"])
def test_autocast_computes_in_half_precision_and_keeps_parameters_and_state_in_single(optimizer: str) -> None:
    seen: list[torch.dtype] = []
    model = nn.Linear(4, small.CLASSES)
    model.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    whole = copy.deepcopy(model)
    part = small.samples(64, 0)
    plan = ff.Plan(batch_size=16, autocast=True, optimizer=ff.Choice(optimizer, {"lr": 0.01}))
    registry = Registry({}, BUILT_IN)
    for number, each in ((1, model), (2, whole)):
        stepped = registry.optimizer(plan, each)
        training.train(each, stepped, part.x, part.y, replace(plan, autocast=number == 1), 1, "a")
        kept = [
            value for state in stepped.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        ]
        assert {tensor.dtype for tensor in (*each.parameters(), *kept)} == {torch.float32}
    assert set(seen[:4]) == {torch.bfloat16}
    assert not torch.equal(model.weight, whole.weight)
    torch.testing.assert_close(model.weight, whole.weight, rtol=0.05, atol=0.02)


def test_right_answers_are_counted_over_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    part = small.samples(23, 0)
    model = nn.Sequential(nn.Dropout(), nn.Linear(4, small.CLASSES))
    model.eval()
    expected = int((model(part.x).argmax(1) == part.y).sum())
    monkeypatch.setattr(training, "EVALUATION_BATCH", 5)
    model.train()
    assert training.correct_answers(model, part.x, part.y) == expected
    assert training.correct_answers(model, part.x[:0], part.y[:0]) == 0


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, small.CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def test_dropout_draws_the_same_whatever_was_drawn_before() -> None:
    digests = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        federation = small.federation(small.sources([11, 6]), model=Dropping)
        digests.add(federation.train(ff.Plan(rounds=2, batch_size=4)).record.digest)
    assert len(digests) == 1


class Normalising(nn.Module):
    """BatchNorm, with its running means and its counter of batches, and a mask that holds infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, small.CLASSES))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def test_buffers_travel_with_the_model() -> None:
    federation = small.federation(small.sources([12, 8]), model=Normalising)
    release = federation.train(ff.Plan(rounds=20, batch_size=4))
    assert release.accuracy > 0.6
    # Three batches a round at one silo and two at the other: of counters, the largest goes on.
    assert torch.equal(release.state["layers.1.num_batches_tracked"], torch.tensor(60))
    assert release.state["layers.1.running_mean"].abs().sum() > 0
    assert torch.equal(release.state["mask"], torch.tensor([0.0, -torch.inf]))
    assert federation.forget({"silo-1": [0, 1]}, ff.Retrain()).verify()


def test_a_model_whose_samples_are_coupled_cannot_be_forgotten_by_the_papers_rule_and_keeps_its_samples() -> None:
    federation = small.federation(small.sources([12, 8]), model=Normalising)
    federation.train(ff.Plan(rounds=1, batch_size=4))
    with pytest.raises(ff.PlanError, match="BatchNorm"):
        federation.forget({"silo-1": [0, 1]}, ff.RapidRetrain("diagonal-fisher"))
    assert len(federation.samples("silo-1")) == 8


def test_early_stop_after_the_first_round_at_the_target() -> None:
    plan = ff.Plan(rounds=12, batch_size=4, optimizer=ff.optim.SGD(lr=0.05))
    whole = small.federation(small.sources([20, 20])).train(plan)
    accuracies = [record.accuracy for record in whole.records]
    target = sorted(accuracies)[len(accuracies) // 2]
    reached = next(number for number, accuracy in enumerate(accuracies, 1) if accuracy >= target)
    assert 1 < reached < 12, "the target lies within the run"
    stopped = small.federation(small.sources([20, 20])).train(replace(plan, target_accuracy=target))
    assert [record.accuracy for record in stopped.records] == accuracies[:reached]


FREED_MEMORY = """
import resource
import torch
from fedforget.federation.training import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
print([faults() for _ in range(5)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
@pytest.mark.parametrize("of_the_user", [False, True])
def test_freed_memory_is_used_again_unless_the_user_says_otherwise(of_the_user: bool) -> None:
    environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "65536"} if of_the_user else {})}
    done = subprocess.run([sys.executable, "-c", FREED_MEMORY], env=environment, capture_output=True, check=True)
    # 64 MiB are 16,384 pages.
    assert (int(done.stdout) > 1000) == of_the_user
