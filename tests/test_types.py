from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedforget.errors import DataError, PlanError
from fedforget.types import Choice, PhysicalDeletion, Plan, Preprocessing, Samples, choice, id_order
from tests import small

values = st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans() | st.text(max_size=5)
choices = st.builds(Choice, st.text(min_size=1, max_size=5), st.dictionaries(st.text(max_size=5), values, max_size=3))
plans = st.builds(
    lambda autocast, **fields: Plan(autocast=autocast and fields["dtype"] == "float32", **fields),
    autocast=st.booleans(),
    rounds=st.integers(1, 99),
    optimizer=choices,
    seed=st.integers(),
    batch_size=st.integers(1, 99),
    local_epochs=st.integers(1, 9),
    silos_per_round=st.none() | st.integers(1, 9),
    aggregation=choices,
    l2=st.floats(0, 1),
    target_accuracy=st.none() | st.floats(0.01, 1),
    dtype=st.sampled_from(["float32", "float64"]),
    model=st.none() | st.text(),
    shape=st.none() | st.lists(st.integers(1, 9)).map(tuple),
    classes=st.none() | st.integers(1, 9),
    preprocessing=st.none() | st.builds(Preprocessing, st.just("scale"), st.floats(0, 1), st.floats(1, 2)),
    holdout=st.none() | st.floats(0, 0.99),
)


@given(plans)
@settings(max_examples=50, deadline=None)
def test_a_plan_is_plain_data(plan: Plan) -> None:
    again = Plan.from_dict(json.loads(json.dumps(plan.as_dict())))
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.digest() == plan.digest()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_every_field_enters_the_digest() -> None:
    plan = Plan()
    changes: dict[str, Any] = {
        "rounds": 3,
        "optimizer": "adam",
        "seed": 7,
        "batch_size": 5,
        "local_epochs": 2,
        "silos_per_round": 2,
        "aggregation": "median",
        "l2": 0.1,
        "target_accuracy": 0.5,
        "dtype": "float64",
        "autocast": True,
        "model": "mlp",
        "shape": (4,),
        "classes": 3,
        "preprocessing": Preprocessing(),
        "holdout": 0.1,
    }
    assert set(changes) == set(vars(plan))
    digests = {replace(plan, **{name: value}).digest() for name, value in changes.items()}
    assert len(digests | {plan.digest()}) == len(changes) + 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (field, value)
            for field in ("rounds", "batch_size", "local_epochs", "silos_per_round")
            for value in (0, 1.5)
        ],
        ("seed", 0.5),
        ("l2", -0.1),
        ("l2", math.nan),
        ("target_accuracy", 0.0),
        ("target_accuracy", 1.1),
        ("holdout", 1.0),
        ("holdout", -0.1),
        ("dtype", "float16"),
        ("autocast", "yes"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_by_the_fields_name(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=field):
        Plan(**{field: value})


def test_a_bare_name_is_a_choice_with_default_settings() -> None:
    assert Plan(optimizer="adam", aggregation="median") == Plan(optimizer=Choice("adam"), aggregation=Choice("median"))
    assert choice("adam") == choice(Choice("adam")) == Choice("adam")


def test_a_choice_cannot_be_changed_from_outside() -> None:
    settings_given = {"lr": 0.1}
    made = Choice("sgd", settings_given)
    settings_given["lr"] = 5.0
    assert made.settings["lr"] == 0.1
    with pytest.raises(TypeError):
        made.settings["lr"] = 5.0  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        made.name = "adam"  # type: ignore[misc]
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
    assert {Choice("a", {"x": 1, "y": 2}), Choice("a", {"y": 2, "x": 1})} == {Choice("a", {"x": 1, "y": 2})}
    assert str(Choice("a", {"y": 2, "x": 1})) == "a(x=1, y=2)"
    assert str(Choice("a")) == "a"


@pytest.mark.parametrize("arguments", [("whiten",), ("scale", 0.0, 0.0)])
def test_preprocessing_that_makes_no_sense_is_refused(arguments: Any) -> None:
    with pytest.raises(PlanError, match="preprocessing"):
        Preprocessing(*arguments)


def test_ids_are_ordered_numbers_first_by_value_then_texts() -> None:
    assert sorted(["b", 10, 9, "10", -1, "a"], key=id_order) == [-1, 9, 10, "10", "a", "b"]


def test_samples_need_one_id_one_input_and_one_label_each() -> None:
    with pytest.raises(DataError, match="2 ids, 1 inputs and 1 labels"):
        Samples((1, 2), torch.zeros(1, 4), torch.zeros(1))
    with pytest.raises(DataError, match="not unique"):
        Samples((1, "1"), torch.zeros(2, 4), torch.zeros(2))


def test_selected_samples_have_memory_of_their_own() -> None:
    part = small.samples(5, 0, ids=["e", 3, "a", 1, 2])
    chosen = part.select([4, 0])
    assert chosen.ids == (2, "e")
    assert torch.equal(chosen.x[1], part.x[0])
    part.x.zero_()
    assert chosen.x.abs().sum() > 0
    assert chosen.shape == (4,)
    assert len(part.select([])) == 0
    assert part.ordered().ids == (1, 2, 3, "a", "e")


def test_samples_are_a_source_that_cannot_delete() -> None:
    part = small.samples(3, 0)
    assert [sample_id for sample_id, *_ in part] == [0, 1, 2]
    assert not isinstance(part, PhysicalDeletion)
