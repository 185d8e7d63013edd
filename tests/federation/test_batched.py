"""The batched link beyond the contract of all links: what it batches, what it leaves alone, and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedforget as ff
from fedforget import models, optim
from fedforget.data.tombstones import Tombstones
from fedforget.federation import program
from fedforget.federation.link import Failure, Forget, Trained
from fedforget.federation.links.batched import LEAST_SILOS, BatchedLink
from fedforget.federation.registry import Registry
from fedforget.types import Samples
from tests import small
from tests.federation.parts import CPU, PLAN, REGISTRY, batched, coordinator, equal, fresh, in_process, silo, train_task

DATA = small.sources([9, 6, 11, 1, 23])


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


class Counting(nn.Module):
    """It changes a buffer while it trains."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x)
        return self.layer(x)  # type: ignore[no-any-return]


class Mixing(nn.Module):
    """It looks at the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))  # type: ignore[no-any-return]


class Idle(nn.Module):
    """It has a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Deciding(nn.Module):
    """It decides by its input's values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > -1e9 else x  # type: ignore[no-any-return]


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Remembering(nn.Module):
    """What it does depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return self.layer(x) * (2 if self.calls[0] > 50 else 1)  # type: ignore[no-any-return]


class Drawing(nn.Module):
    """Dropout without a layer of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), 0.5, self.training)


class Odd(nn.Module):
    """A scalar parameter, two parameters with one gradient, and attributes with the names of layers' settings."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 3, bias=False), nn.Dropout(0.0)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.p, self.q = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.layer(x * (self.p + self.q))) * self.temperature  # type: ignore[no-any-return]


class Lonely(nn.Module):
    """It treats a batch of one sample otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (0.5 if len(x) == 1 else 1.0)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Two names for one weight, a frozen layer and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.scale  # type: ignore[assignment]
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x) * scale))))  # type: ignore[no-any-return]


def registry(**others: Any) -> Registry:
    return Registry({**models.BUILT_IN, **others}, optim.BUILT_IN, batched=optim.BATCHED)


def choice(plan: ff.Plan, names: Registry, *, auto: bool = False, silos: int = 10, samples: int = 30) -> str:
    return str(BatchedLink([], names, CPU, auto=auto).choice(plan, silos, samples))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Dropping, "its layer 2 draws random numbers (Dropout)"),
        (Counting, "changes its buffers while it trains"),
        (Mixing, "mixes the samples of a batch"),
        (Idle, "parameter other.weight has no gradient"),
        (Lonely, "mixes the samples of a batch"),
        (Deciding, "does not go through torch.func"),
        (Remembering, "changes its attributes while it trains"),
        (Drawing, "model 'own' draws random numbers"),
    ],
)
def test_a_model_that_cannot_be_batched_is_trained_alone_and_the_reason_told(
    model: Any, reason: str, tmp_path: Path
) -> None:
    names = registry(own=model)
    plan = replace(PLAN, model="own")
    told = choice(plan, names)
    assert told.startswith("in-process: ")
    assert reason in told
    yardstick = coordinator(in_process(tmp_path / "alone", DATA, names), registry=names).train(plan)
    result = coordinator(batched(tmp_path / "batched", DATA, names), registry=names).train(plan)
    assert equal(result.state, yardstick.state)


def test_what_else_cannot_be_batched_is_told() -> None:
    normed = choice(replace(PLAN, model="own"), registry(own=Normed))
    assert normed == "in-process: batched was asked for, but its layer 1 mixes the samples of a batch (BatchNorm1d)"
    large = replace(PLAN, model="alexnet", shape=(3, 16, 16))
    assert "draws random numbers (Dropout)" in choice(large, registry())
    assert choice(replace(PLAN, autocast=True), registry()) == "in-process: batched was asked for, but autocast is on"
    own = Registry(models.BUILT_IN, {"mine": optim.build_sgd})
    mine = replace(PLAN, optimizer=ff.Choice("mine", {"lr": 0.2}))
    assert choice(mine, own, auto=True) == "in-process: the optimizer mine(lr=0.2) has no step for many silos at once"


def test_tied_and_frozen_parameters_and_constant_buffers_are_kept(tmp_path: Path) -> None:
    names = registry(own=Tied)
    plan = replace(PLAN, model="own", dtype="float64", optimizer=ff.Choice("muon"))
    assert choice(plan, names).startswith("batched: ")
    yardstick = coordinator(in_process(tmp_path / "alone", DATA, names), registry=names).train(plan)
    result = coordinator(batched(tmp_path / "batched", DATA, names), registry=names).train(plan)
    assert list(result.state) == list(yardstick.state)
    for name, tensor in yardstick.state.items():
        torch.testing.assert_close(result.state[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon", "diagonal-fisher"])
def test_scalars_and_shared_gradients_are_stepped_right(optimizer: str, tmp_path: Path) -> None:
    names = registry(own=Odd)
    plan = replace(PLAN, model="own", dtype="float64", optimizer=ff.Choice(optimizer), l2=0.1)
    assert choice(plan, names).startswith("batched: ")
    yardstick = coordinator(in_process(tmp_path / "alone", DATA, names), registry=names).train(plan)
    result = coordinator(batched(tmp_path / "batched", DATA, names), registry=names).train(plan)
    for name, tensor in yardstick.state.items():
        torch.testing.assert_close(result.state[name], tensor, rtol=1e-9, atol=1e-12)


def test_the_choice_holds_for_all_rounds_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of silos of very different sizes, some rounds would be batched alone and others not."""
    data = small.sources([2, 3, 2, 3, 2, 40])
    monkeypatch.setattr("fedforget.federation.links.batched.MOST_MULTIPLICATIONS", 100)
    for batch_size, way in ((40, "in-process"), (4, "batched")):
        plan = ff.Plan(rounds=6, batch_size=batch_size, silos_per_round=4, optimizer=ff.optim.Adam())
        release = small.federation(data, tmp_path / way).train(plan)
        assert release.record.trained.startswith(way)
        alone = small.federation(data, link="in-process").train(plan)
        assert release.record.digest == alone.record.digest or way == "batched"


def test_another_processs_tombstones_between_two_looks_change_no_row(tmp_path: Path) -> None:
    silos = [silo(tmp_path, name, source) for name, source in DATA.items()]
    link, task = BatchedLink(silos, REGISTRY, CPU), train_task(fresh())
    first = silos[0].training_tensors

    def buried(task: Any) -> Any:
        found = first(task)
        Tombstones(tmp_path / "silo-0").add([0, 1])
        return found

    silos[0].training_tensors = buried  # type: ignore[method-assign]
    reply = link.call(dict.fromkeys(DATA, task))["silo-0"]
    silos[0].training_tensors = first  # type: ignore[method-assign]
    assert isinstance(reply, Trained)
    alone = in_process(tmp_path / "alone", DATA).call({"silo-0": task})["silo-0"]
    assert isinstance(alone, Trained)
    assert reply.samples == alone.samples == 9
    torch.testing.assert_close(reply.state["1.weight"], alone.state["1.weight"])
    after = link.call(dict.fromkeys(DATA, task))["silo-0"]
    assert isinstance(after, Trained)
    assert after.samples == 7


def test_a_deletion_beside_training_leaves_no_row(tmp_path: Path) -> None:
    link = batched(tmp_path, DATA)
    task = train_task(fresh())
    link.call(dict.fromkeys(DATA, task))
    link.call({"silo-0": Forget(PLAN, (0,), commit=True), "silo-1": task})
    assert link._held is not None
    assert not (link._held.x == DATA["silo-0"].x[0]).all(1).any()


@pytest.mark.parametrize("name", ["cnn", "resnet18"])
def test_convolutions_and_norms_agree(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    data = {
        f"silo-{number}": Samples(
            tuple(range(count)), torch.rand(count, 1, 8, 8, generator=generator), torch.arange(count) % 3
        )
        for number, count in enumerate((5, 3))
    }
    plan = replace(PLAN, model=name, shape=(1, 8, 8), rounds=2, dtype="float64", optimizer=ff.Choice("diagonal-fisher"))
    assert choice(plan, registry()).startswith("batched: ")
    test = next(iter(data.values()))
    yardstick = coordinator(in_process(tmp_path / "alone", data), public_test=test).train(plan)
    result = coordinator(batched(tmp_path / "batched", data), public_test=test).train(plan)
    for part, tensor in yardstick.state.items():
        torch.testing.assert_close(result.state[part], tensor, rtol=1e-8, atol=1e-10)


def test_auto_batches_many_small_steps_only() -> None:
    small_steps = replace(PLAN, model="mlp", shape=(1, 8, 8))
    told = choice(small_steps, registry(), auto=True)
    assert told.startswith("batched: 10 silos in a round, and a batch of 4 takes ")
    assert choice(small_steps, registry(), auto=True, silos=LEAST_SILOS - 1).startswith(
        "in-process: 3 silos in a round"
    )
    large = replace(PLAN, model="cnn", shape=(1, 8, 8), batch_size=512)
    assert "longer than it takes to launch" in choice(large, registry(), auto=True, samples=512)
    assert choice(large, registry(), auto=True, samples=1).startswith("batched: ")


@pytest.mark.parametrize("at_once", [1, 40, 10**9])
def test_however_many_silos_and_samples_are_worked_on_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = replace(PLAN, dtype="float64", optimizer=ff.Choice("diagonal-fisher", {"fisher_share": 0.6}))
    yardstick = coordinator(in_process(tmp_path / "alone", DATA)).train(plan)
    monkeypatch.setattr(program, "HELD", at_once)
    monkeypatch.setattr(program, "PER_SAMPLE", at_once)
    result = coordinator(batched(tmp_path / "batched", DATA)).train(plan)
    for name, tensor in yardstick.state.items():
        torch.testing.assert_close(result.state[name], tensor, rtol=1e-10, atol=1e-12)


def test_a_silo_that_diverges_fails_alone(tmp_path: Path) -> None:
    wild = replace(DATA["silo-1"], x=torch.full_like(DATA["silo-1"].x, float("nan")))
    replies = batched(tmp_path, {**DATA, "silo-1": wild}).call(dict.fromkeys(DATA, train_task(fresh())))
    failed = replies.pop("silo-1")
    assert isinstance(failed, Failure)
    assert failed.diverged
    assert failed.reason.startswith("silo silo-1, round 1: training diverged (loss nan)")
    assert all(isinstance(reply, Trained) for reply in replies.values())


def test_a_silo_whose_samples_do_not_fit_fails_alone(tmp_path: Path) -> None:
    wrong = replace(DATA["silo-2"], y=torch.full_like(DATA["silo-2"].y, 7))
    replies = batched(tmp_path, {**DATA, "silo-2": wrong}).call(dict.fromkeys(DATA, train_task(fresh())))
    failed = replies.pop("silo-2")
    assert isinstance(failed, Failure)
    assert failed.reason == "silo silo-2: labels run from 7 to 7, the plan has 3 classes"
    assert all(isinstance(reply, Trained) for reply in replies.values())


def test_silos_hold_their_samples_once_and_nothing_of_deleted_ones(tmp_path: Path) -> None:
    silos = [silo(tmp_path, name, source) for name, source in DATA.items()]
    link = BatchedLink(silos, REGISTRY, CPU)
    task = train_task(fresh())
    link.call(dict.fromkeys(DATA, task))
    held = {one.name: one.training_tensors(task)[0] for one in silos}
    assert len({tensor.untyped_storage().data_ptr() for tensor in held.values()}) == 1
    last = link._held
    assert last is not None
    assert not last.x[-1].any()
    link.call({"silo-0": Forget(PLAN, (0, 1), commit=True)})
    assert link._held is None
    link.call(dict.fromkeys(DATA, task))
    assert all(one.training_tensors(task)[0] is not held[one.name] for one in silos)
    gone = DATA["silo-0"].x[:2]
    assert link._held is not None
    assert not (link._held.x[:, None] == gone).all(2).any()


def test_a_durable_state_brings_no_other_silos_along(tmp_path: Path) -> None:
    link = batched(tmp_path, DATA)
    link.call(dict.fromkeys(DATA, train_task(fresh(), durable=True)))
    sizes = {path.stat().st_size for path in tmp_path.rglob("*.pt")}
    assert len(list(tmp_path.rglob("*.pt"))) == len(DATA)
    assert max(sizes) < 4096


def test_rounds_of_different_runs_are_not_mixed(tmp_path: Path) -> None:
    tasks = {name: train_task(fresh(seed=number % 2)) for number, name in enumerate(DATA)}
    for name, reply in batched(tmp_path / "batched", DATA).call(tasks).items():
        alone = batched(tmp_path / "alone" / name, {name: DATA[name]}).call({name: tasks[name]})[name]
        assert isinstance(reply, Trained)
        assert isinstance(alone, Trained)
        for part, tensor in alone.state.items():
            torch.testing.assert_close(reply.state[part], tensor)


def federation(link: Any, data: Mapping[str, Samples], folder: Path | None = None, **options: Any) -> ff.Federation:
    return small.federation(data, folder, link=link, **options)


@pytest.mark.parametrize("method", [ff.Retrain(), ff.RapidRetrain(), ff.RapidRetrain("diagonal-fisher")], ids=str)
def test_forgetting_equals_never_having_had_over_the_batched_link(method: Any) -> None:
    plan = ff.Plan(rounds=3, batch_size=4, silos_per_round=3)
    made = federation("batched", DATA)
    made.train(plan)
    release = made.forget({"silo-0": [0, 4], "silo-3": "all", "silo-4": list(range(5))}, method)
    gone = {"silo-0": [0, 4], "silo-3": [0], "silo-4": list(range(5))}
    never = federation("batched", small.without(DATA, gone))
    expected = never.train(method.plan(release.plan) if method.optimizer else plan)
    assert release.record.digest == expected.record.digest
    assert release.verify()


def test_a_killed_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    plan = ff.Plan(rounds=5, batch_size=4, silos_per_round=3, optimizer=ff.optim.Adam(lr=0.01))
    expected = federation("batched", DATA).train(plan).record.digest

    def stop(_: str, __: ff.Plan, record: Any) -> None:
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation("batched", DATA, tmp_path / "run", on_round=stop).train(plan)
    rounds: list[int] = []
    resumed = federation("batched", DATA, tmp_path / "run", on_round=lambda _, __, record: rounds.append(record.round))
    release = resumed.train(plan)
    assert rounds == [4, 5]
    assert release.record.digest == expected
    # What comes later goes the same way without being told.
    assert federation(None, DATA, tmp_path / "run").forget({"silo-0": [1]}).record.link == "batched"


def test_a_run_of_another_link_is_begun_anew(tmp_path: Path) -> None:
    plan = ff.Plan(rounds=3, batch_size=4)

    def stop(_: str, __: ff.Plan, record: Any) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation("in-process", DATA, tmp_path / "run", on_round=stop).train(plan)
    rounds: list[int] = []
    federation("batched", DATA, tmp_path / "run", on_round=lambda _, __, record: rounds.append(record.round)).train(
        plan
    )
    assert rounds == [1, 2, 3]


def test_a_release_says_how_its_silos_were_trained() -> None:
    plan = ff.Plan(rounds=1, batch_size=4)
    assert federation("in-process", DATA).train(plan).record.trained == "in-process: one silo after the other"
    assert federation("batched", DATA).train(plan).record.trained == "batched: as asked for"
    assert federation(None, DATA).train(plan).record.trained.startswith("batched: 5 silos in a round, and a batch of 4")
    with pytest.raises(ff.PlanError, match="link 'radio' is unknown: use auto, in-process, batched"):
        federation("radio", DATA)


def test_an_optimizer_of_the_users_own_by_a_known_name_is_not_batched() -> None:
    made = small.federation(DATA, link="batched", optimizers={"sgd": optim.build_sgd})
    assert "has no step for many silos at once" in made.train(ff.Plan(rounds=1)).record.trained
