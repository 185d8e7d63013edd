"""What every way to unlearn must do. A new one joins by being in `fedforget.methods.BUILT_IN`, with examples here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, get_args

import pytest

import fedforget as ff
from fedforget import methods, optim
from fedforget.engine import method_name, named_method
from fedforget.methods import Guarantee, Method
from fedforget.methods.method import from_settings, settings_of
from fedforget.types import Deletion, History, Plan, TrainingResult
from tests import small
from tests.federation.parts import PLAN

EXAMPLES: dict[str, list[Any]] = {
    "retrain": [ff.Retrain(), ff.Retrain("adam", rounds=3, target_accuracy=0.9)],
    "rapid": [ff.RapidRetrain(), ff.RapidRetrain(ff.Choice("diagonal-fisher", {"lr": 1 / 3, "block_size": 1}), 7)],
}
ALL = [method for examples in EXAMPLES.values() for method in examples]
every_method = pytest.mark.parametrize("method", ALL, ids=str)


class OnlyTrains:
    """All that a method may ask of its coordinator."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def train(self, plan: Plan, watch: Any = None) -> TrainingResult:
        self.plans.append(plan)
        return TrainingResult(plan, {}, None, ())


def test_every_method_is_covered() -> None:
    assert {name: {type(method) for method in examples} for name, examples in EXAMPLES.items()} == {
        name: {kind} for name, kind in methods.BUILT_IN.items()
    }


@every_method
def test_it_is_a_frozen_dataclass_that_says_what_it_is(method: Any) -> None:
    assert isinstance(method, Method)
    assert method.guarantee in get_args(Guarantee)
    assert methods.BUILT_IN[method.name] is type(method)
    assert type(method).summary
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.rounds = 3
    assert hash(method) == hash(replace(method))


@every_method
def test_its_settings_are_plain_data_that_make_it_again(method: Any) -> None:
    written = json.loads(json.dumps(settings_of(method)))
    assert from_settings(type(method), written) == method
    assert named_method(method_name(method), written) == method


@every_method
def test_it_trains_by_the_plan_that_it_declares_and_asks_for_nothing_else(method: Any) -> None:
    trainer = OnlyTrains()
    result = method.unlearn(History(PLAN), Deletion({"silo-0": 2}), trainer)
    assert trainer.plans == [method.plan(PLAN)]
    assert result.plan == method.plan(PLAN)


@every_method
def test_an_exact_method_looks_at_nothing_but_the_original_plan(method: Any) -> None:
    if method.guarantee != "exact":
        pytest.skip("it promises no equality")
    first, second = OnlyTrains(), OnlyTrains()
    method.unlearn(
        History(PLAN, small.federation(small.sources([9])).train(ff.Plan(rounds=1)).records), Deletion({}), first
    )
    method.unlearn(History(PLAN), Deletion({"silo-0": 5}), second)
    assert first.plans == second.plans


@every_method
def test_all_that_it_does_not_set_is_the_original_plans(method: Any) -> None:
    changed = {name for name, value in vars(method.plan(PLAN)).items() if value != vars(PLAN)[name]}
    assert changed <= {"optimizer", "rounds", "target_accuracy"}
    for name in changed:
        assert vars(method.plan(PLAN))[name] == vars(Plan(**{name: getattr(method, name)}))[name]


def test_retraining_is_the_original_plan_and_rapid_another_step() -> None:
    assert ff.Retrain().plan(PLAN) == PLAN
    assert ff.RapidRetrain().plan(PLAN) == replace(PLAN, optimizer="muon")
    assert ff.RapidRetrain("diagonal-fisher").plan(PLAN) == replace(PLAN, optimizer="diagonal-fisher")
    assert {"muon", "diagonal-fisher"} <= set(optim.BUILT_IN)


# What is no method


def _plain(self: Any, original: Plan) -> Plan:
    return original


def _unlearn(self: Any, history: History, deletion: Deletion, coordinator: Any) -> TrainingResult:
    return coordinator.train(history.plan)  # type: ignore[no-any-return]


def made(decorator: Callable[[type], type], **fields: Any) -> type:
    body = {"name": "mine", "guarantee": "exact", "plan": _plain, "unlearn": _unlearn, **fields}
    annotations = {"name": ClassVar[str], "guarantee": ClassVar[str], **dict.fromkeys(fields, Any)}
    return decorator(type("Mine", (), {**body, "__annotations__": annotations}))


frozen = dataclass(frozen=True)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (ff.Retrain, "is not a method: give one with its settings, such as RapidRetrain()"),
        ("rapid", "is not a method"),
        (made(lambda kind: kind)(), "must be a frozen dataclass"),
        (made(dataclass)(), "must be a frozen dataclass"),
        (made(frozen, path=field(default=object()))(), "not plain data"),
        (made(frozen, share=field(default=float("nan")))(), "share is nan: it must be a finite number"),
        (made(frozen, steps=field(default=(1, 2)))(), "not the same once written and read again"),
    ],
)
def test_what_is_no_method_is_refused_before_anything_is_deleted(method: Any, message: str) -> None:
    federation = small.federation(small.sources([9, 9]))
    federation.train(ff.Plan(rounds=1))
    with pytest.raises(ff.PlanError, match=message.replace("(", r"\(").replace(")", r"\)")):
        federation.forget({"silo-0": [1]}, method)
    assert federation.folder.pending() is None
    assert len(federation.samples("silo-0")) == 9


@pytest.mark.parametrize(
    "method",
    [
        ff.Retrain(optimizer="no-such-optimizer"),
        ff.RapidRetrain(ff.Choice("diagonal-fisher", {"lr": -1.0})),
        ff.RapidRetrain(rounds=0),
        ff.Retrain(target_accuracy=7.0),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_before_anything_is_deleted(method: Any) -> None:
    federation = small.federation(small.sources([9, 9]))
    federation.train(ff.Plan(rounds=1))
    with pytest.raises(ff.PlanError):
        federation.forget({"silo-0": [1]}, method)
    assert federation.folder.pending() is None
    assert len(federation.samples("silo-0")) == 9


def test_settings_that_are_mappings_of_another_kind_survive() -> None:
    kind = made(frozen, by_silo=None)
    method = kind({"silo-0": 1})
    assert from_settings(kind, settings_of(method)) == method
