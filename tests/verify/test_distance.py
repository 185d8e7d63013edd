from __future__ import annotations

import math

import pytest
import torch

from fedforget.types import State
from fedforget.verify.distance import output_distance, parameter_distance, state_digest


def state() -> State:
    return {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "n": torch.tensor(3), "empty": torch.empty(0)}


def test_equal_bits_have_equal_digests_in_any_order_and_layout() -> None:
    again = {name: tensor.clone() for name, tensor in reversed(state().items())}
    again["w"] = again["w"].T.contiguous().T
    again["w"].requires_grad_()
    assert state_digest(again) == state_digest(state())


@pytest.mark.parametrize(
    "change",
    [
        {"w": torch.tensor([[1.0, 2.0], [3.0, math.nextafter(4.0, 5.0)]], dtype=torch.float64)},
        {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0000005]])},
        {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)},
        {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])},
        {"n": torch.tensor(4)},
        {"n": torch.tensor(3, dtype=torch.int32)},
        {"more": torch.tensor(0.0)},
    ],
    ids=str,
)
def test_one_bit_one_type_or_one_shape_changes_the_digest(change: State) -> None:
    assert state_digest({**state(), **change}) != state_digest(state())


def test_names_types_and_signs_of_zero_count() -> None:
    assert state_digest({"a": torch.zeros(1)}) != state_digest({"b": torch.zeros(1)})
    assert state_digest({"a": torch.zeros(1)}) != state_digest({"a": torch.zeros(1, dtype=torch.int32)})
    assert state_digest({"a": torch.tensor([0.0])}) != state_digest({"a": torch.tensor([-0.0])})


def test_digests_of_every_type() -> None:
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.complex64):
        assert state_digest({"a": torch.zeros(3, dtype=dtype)}) != state_digest({"a": torch.ones(3, dtype=dtype)})


def test_the_distance_of_parameters_is_euclidean() -> None:
    other = {**state(), "w": state()["w"] + torch.tensor([[3.0, 0.0], [0.0, 0.0]]), "n": torch.tensor(7)}
    assert parameter_distance(state(), other) == pytest.approx(5.0)
    assert parameter_distance(state(), state()) == 0


def test_the_distance_of_outputs_is_a_mean_over_samples() -> None:
    first = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    second = torch.tensor([[0.4, 0.8], [0.5, 0.5]])
    assert output_distance(first, second) == pytest.approx(0.5)
    assert output_distance(first, first) == 0
