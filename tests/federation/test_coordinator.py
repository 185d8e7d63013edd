from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedforget as ff
from fedforget.errors import DataError, DeletionError, DivergedError, PlanError, SiloError
from fedforget.federation import training
from fedforget.federation.coordinator import Checkpoint, Coordinator, expect
from fedforget.federation.link import Counted, Evaluate, Evaluated, Failure, Link, Reply, Task, Train, Trained, Wiped
from fedforget.federation.randomness import seeded
from fedforget.federation.registry import Registry
from fedforget.types import RoundRecord, Samples, State, TrainingResult
from tests import small
from tests.federation.parts import PLAN, REGISTRY, coordinator, equal, in_process, train_task

DATA = small.sources([9, 6, 11, 7])
FISHER = ff.Choice("diagonal-fisher", {"lr": 0.01, "eps": 1e-3})


class Memory:
    """Checkpoints as a folder would keep them."""

    def __init__(self) -> None:
        self.kept: dict[str, Checkpoint] = {}

    def load(self, run: str) -> Checkpoint | None:
        return self.kept.get(run)

    def save(self, run: str, checkpoint: Checkpoint) -> None:
        state = {name: tensor.clone() for name, tensor in checkpoint.state.items()}
        self.kept[run] = replace(checkpoint, state=state)


@dataclass
class Breaks:
    """A link that breaks off before its n-th round of training."""

    link: Link
    rounds: int

    @property
    def name(self) -> str:
        return self.link.name

    @property
    def silos(self) -> tuple[str, ...]:
        return self.link.silos

    def how(self, plan: ff.Plan, silos: int, samples: int) -> str:
        return self.link.how(plan, silos, samples)

    def call(self, tasks: Mapping[str, Task], timeout: float | None = None) -> dict[str, Reply | Failure]:
        if any(isinstance(task, Train) for task in tasks.values()):
            self.rounds -= 1
            if self.rounds < 0:
                raise ConnectionError
        return self.link.call(tasks, timeout)


def test_records_tell_what_each_round_did(tmp_path: Path) -> None:
    told: list[RoundRecord] = []
    result = coordinator(in_process(tmp_path, DATA), on_round=told.append).train(replace(PLAN, silos_per_round=3))
    assert tuple(told) == result.records
    assert [record.round for record in result.records] == [1, 2, 3, 4]
    for record in result.records:
        assert len(record.participants) == 3
        # 4 × 3 weights and 3 biases of 4 bytes, to each participant and back.
        assert record.bytes == 3 * 2 * 15 * 4
        assert record.seconds > 0
        assert 0 <= record.accuracy <= 1
        assert record.loss > 0


def test_the_loss_of_a_round_is_weighted_by_samples(tmp_path: Path) -> None:
    replies = expect(in_process(tmp_path / "by-hand", DATA).call(dict.fromkeys(DATA, train_task(initial()))), Trained)
    by_hand = sum(reply.loss * len(DATA[name]) for name, reply in replies.items()) / 33
    result = coordinator(in_process(tmp_path / "run", DATA)).train(replace(PLAN, rounds=1))
    assert result.records[0].loss == pytest.approx(by_hand, rel=1e-12)


def initial() -> State:
    """The plan's fresh model."""
    with seeded(torch.device("cpu"), "initialise", PLAN.seed):
        return training.state_of(REGISTRY.model(PLAN))


@pytest.mark.parametrize("optimizer", [ff.optim.SGD(momentum=0.9), FISHER], ids=str)
@pytest.mark.parametrize("restart", [True, False], ids=["restarted-silos", "same-silos"])
@pytest.mark.parametrize("every", [0, 1, 3])
def test_a_run_that_broke_off_ends_with_the_same_bits(
    tmp_path: Path, every: int, restart: bool, optimizer: ff.Choice
) -> None:
    plan = replace(PLAN, rounds=7, optimizer=optimizer, silos_per_round=2)
    wanted = coordinator(in_process(tmp_path / "whole", DATA)).train(plan)
    for rounds in range(1, 7):
        link = in_process(tmp_path / f"broken-{rounds}", DATA)
        options: dict[str, Any] = {"checkpoints": Memory() if every else None, "checkpoint_every": every}
        with pytest.raises(ConnectionError):
            coordinator(Breaks(link, rounds), **options).train(plan)
        if restart:
            link = in_process(tmp_path / f"broken-{rounds}", DATA)
        resumed = coordinator(link, **options).train(plan)
        assert equal(resumed.state, wanted.state)
        assert [(record.round, record.participants, record.loss) for record in resumed.records] == [
            (record.round, record.participants, record.loss) for record in wanted.records
        ]


def test_a_piece_of_work_may_train_by_several_plans(tmp_path: Path) -> None:
    checkpoints = Memory()
    link = in_process(tmp_path, DATA)
    other = replace(PLAN, seed=1)
    coordinator(link, checkpoints=checkpoints).train(PLAN)
    second = coordinator(link, checkpoints=checkpoints).train(other)
    assert equal(second.state, coordinator(in_process(tmp_path / "alone", DATA)).train(other).state)
    assert len(checkpoints.kept) == 2


@pytest.mark.parametrize("every", [0, 1])
def test_a_watch_ends_a_run_as_diverged_also_one_that_is_resumed(tmp_path: Path, every: int) -> None:
    link, checkpoints = in_process(tmp_path, DATA), Memory()

    def train() -> TrainingResult:
        options: dict[str, Any] = {"checkpoints": checkpoints, "checkpoint_every": every}
        return coordinator(link, **options).train(
            replace(PLAN, rounds=5), lambda records: "too far" if len(records) == 3 else None
        )

    for _ in range(2):
        with pytest.raises(DivergedError, match="round 3: too far") as caught:
            train()
        assert [record.round for record in caught.value.records] == [1, 2, 3]


def test_numbers_that_run_away_end_a_run_with_the_rounds_so_far(tmp_path: Path) -> None:
    plan = replace(PLAN, rounds=9, optimizer=ff.Choice("sgd", {"lr": 1e38}))
    with pytest.raises(DivergedError, match=r"silo silo-\d, round \d: training diverged") as caught:
        coordinator(in_process(tmp_path, DATA)).train(plan)
    last = caught.value.records[-1]
    assert math.isnan(last.loss)
    assert last.round == len(caught.value.records)
    assert last.seconds > 0


def test_runs_names_never_enter_a_random_number(tmp_path: Path) -> None:
    states = [coordinator(in_process(tmp_path / run, DATA), run).train(PLAN).state for run in ("a", "b")]
    assert equal(*states)


def test_without_a_public_test_split_silos_counts_make_the_accuracy(tmp_path: Path) -> None:
    plan = replace(PLAN, holdout=0.3, rounds=1)
    link = in_process(tmp_path, DATA)
    result = coordinator(link, public_test=None).train(plan)
    replies = expect(link.call(dict.fromkeys(DATA, Evaluate(plan, result.state, None))), Evaluated).values()
    correct, samples = sum(reply.correct for reply in replies), sum(reply.samples for reply in replies)
    assert 0 < samples < 33
    assert result.records[0].accuracy == correct / samples


def test_without_any_sample_to_evaluate_on_there_is_no_accuracy(tmp_path: Path) -> None:
    result = coordinator(in_process(tmp_path, DATA), public_test=None).train(PLAN)
    assert all(math.isnan(record.accuracy) for record in result.records)


def test_failures_end_the_work_and_each_is_told() -> None:
    replies = {"b": Failure("silo b is down"), "a": Counted(1, None), "c": Failure("silo c too")}
    with pytest.raises(SiloError, match=r"^silo b is down; silo c too$"):
        expect(replies, Counted)
    with pytest.raises(DeletionError, match="silo b is down"):
        expect(replies, Counted, DeletionError)
    with pytest.raises(SiloError, match="silo b answered another task"):
        expect({"a": Counted(1, None), "b": Wiped()}, Counted)
    assert list(expect({"b": Wiped(), "a": Wiped()}, Wiped)) == ["a", "b"]


def test_one_silo_that_fails_ends_the_round(tmp_path: Path) -> None:
    spoiled = Samples(DATA["silo-1"].ids, torch.full_like(DATA["silo-1"].x, torch.inf), DATA["silo-1"].y)
    with pytest.raises(SiloError, match="silo silo-1, round 1: training diverged"):
        coordinator(in_process(tmp_path, {**DATA, "silo-1": spoiled})).train(PLAN)


def test_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no silo has a training sample left"):
        coordinator(in_process(tmp_path, small.sources([0, 0]))).train(PLAN)


class Wide(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 7)


class Narrow(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)


class Coupled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(4), nn.Linear(4, 3))


def checked(plan: ff.Plan = PLAN, **options: Any) -> None:
    no_link: Any = None
    Coordinator(no_link, REGISTRY, "run", torch.device("cpu"), **options).check(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": f"{__name__}:Narrow"}, "does not take samples of shape"),
        ({"model": f"{__name__}:Wide"}, r"answers two samples with shape \(2, 7\); it must be \(2, 3\)"),
        ({"model": f"{__name__}:Coupled", "optimizer": FISHER}, "cannot be trained by diagonal-fisher"),
        ({"optimizer": "torch.optim:LBFGS"}, "cannot be trained by torch.optim:LBFGS"),
        ({"optimizer": "unknown"}, "optimizer 'unknown' is unknown"),
        ({"aggregation": ff.Choice("trimmed-mean", {"trim": 0.7})}, "trim is 0.7"),
    ],
)
def test_what_cannot_be_carried_out_is_told_before_any_silo_works(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        checked(replace(PLAN, **changes))


def test_a_test_split_that_does_not_fit_is_told_before_any_silo_works() -> None:
    with pytest.raises(DataError, match="the test split is empty"):
        checked(public_test=small.samples(0, 0))
    with pytest.raises(DataError, match=r"the test split has samples of shape \(2,\)"):
        checked(public_test=Samples((0,), torch.zeros(1, 2), torch.tensor([0])))


def test_checking_draws_nothing_and_leaves_the_model_fresh() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    no_link: Any = None
    made = [Coordinator(no_link, REGISTRY, "run", torch.device("cpu")).check(PLAN)[0] for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(made[0].state_dict(), made[1].state_dict())


@pytest.mark.parametrize(
    ("aggregation", "message"),
    [
        (lambda states, counts: states[7], "IndexError"),
        (lambda states, counts: {}, "changed the names, shapes or types"),
        (lambda states, counts: {name: part.double() for name, part in states[0].items()}, "changed the names"),
        (lambda states, counts: {name: part / 0 for name, part in states[0].items()}, "not finite"),
        (lambda states, counts: None, "AttributeError"),
    ],
)
def test_an_aggregation_that_makes_no_state_is_told_by_its_name(tmp_path: Path, aggregation: Any, message: str) -> None:
    registry = Registry(REGISTRY.models, REGISTRY.optimizers, {"mine": aggregation})
    link = in_process(tmp_path, DATA, registry)
    with pytest.raises(PlanError, match=rf"aggregation mine.*{message}"):
        coordinator(link, registry=registry).train(replace(PLAN, aggregation="mine"))


def test_aggregations_see_states_in_name_order_with_their_counts(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    def spying(states: Any, counts: Any) -> Any:
        seen.append(list(counts))
        return states[0]

    registry = Registry(REGISTRY.models, REGISTRY.optimizers, {"spying": spying})
    link = in_process(tmp_path, dict(reversed(DATA.items())), registry)
    coordinator(link, registry=registry).train(replace(PLAN, aggregation="spying", rounds=1))
    assert seen == [[9, 6, 11, 7]]


@pytest.mark.parametrize("rounds", [4, 7])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_only_the_last_turn_before_a_checkpoint_is_kept_on_disk(tmp_path: Path, every: int, rounds: int) -> None:
    plan = replace(PLAN, rounds=rounds, silos_per_round=2)
    durable: dict[str, list[int]] = {name: [] for name in DATA}
    turns: dict[str, list[int]] = {name: [] for name in DATA}

    class Spying(Breaks):
        def call(self, tasks: Mapping[str, Task], timeout: float | None = None) -> dict[str, Reply | Failure]:
            for name, task in tasks.items():
                if isinstance(task, Train):
                    assert task.previous == (turns[name][-1] if turns[name] else None)
                    turns[name].append(task.round)
                    durable[name] += [task.round] if task.durable else []
            return super().call(tasks, timeout)

    link = Spying(in_process(tmp_path, DATA), rounds)
    coordinator(link, checkpoints=Memory(), checkpoint_every=every).train(plan)
    for name, taken in turns.items():
        for checkpoint in range(every, rounds + 1, every):
            before = [turn for turn in taken if turn <= checkpoint]
            assert not before or before[-1] in durable[name]
        spans = [math.ceil(turn / every) for turn in durable[name]]
        assert len(spans) == len(set(spans)), "one state for each checkpoint is enough"
