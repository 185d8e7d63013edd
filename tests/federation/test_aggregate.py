from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedforget.errors import PlanError
from fedforget.federation.aggregate import BUILT_IN, fedavg, median, trimmed_mean
from fedforget.types import State


def states(values: list[list[float]]) -> list[State]:
    return [{"w": torch.tensor(row, dtype=torch.float64)} for row in values]


rows = st.integers(1, 6).flatmap(
    lambda size: st.lists(st.lists(st.floats(-100, 100), min_size=size, max_size=size), min_size=1, max_size=7)
)


@given(rows, st.data())
@settings(max_examples=50, deadline=None)
def test_fedavg_weighs_by_samples(values: list[list[float]], data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 1000), min_size=len(values), max_size=len(values)))
    for column, mean in zip(zip(*values, strict=True), fedavg(states(values), counts)["w"].tolist(), strict=True):
        by_hand = sum(count * value for count, value in zip(counts, column, strict=True)) / sum(counts)
        assert mean == pytest.approx(by_hand, rel=1e-12, abs=1e-10)


@given(rows)
@settings(max_examples=50, deadline=None)
def test_median_is_numpys_and_no_count_matters(values: list[list[float]]) -> None:
    found = median(states(values), list(range(1, len(values) + 1)))["w"]
    np.testing.assert_allclose(found.numpy(), np.median(np.array(values), axis=0), rtol=1e-12, atol=1e-12)


@given(rows, st.floats(0, 0.49))
@settings(max_examples=50, deadline=None)
def test_trimmed_mean_leaves_out_the_share_at_both_ends(values: list[list[float]], trim: float) -> None:
    found = trimmed_mean(states(values), [1] * len(values), trim)["w"].tolist()
    cut = math.floor(trim * len(values))
    for column, mean in zip(zip(*values, strict=True), found, strict=True):
        kept = sorted(column)[cut : len(column) - cut]
        assert mean == pytest.approx(sum(kept) / len(kept), rel=1e-12, abs=1e-10)


def test_weights_are_a_share_of_all_participants() -> None:
    assert fedavg(states([[4.0], [8.0]]), [3, 1])["w"].item() == 5.0
    assert median(states([[1.0], [2.0], [100.0]]), [1, 1, 1000])["w"].item() == 2.0
    assert trimmed_mean(states([[float(value)] for value in (*range(9), 1000)]), [1] * 10)["w"].item() == 4.5


@pytest.mark.parametrize("trim", [-0.1, 0.5, 2.0, math.nan])
def test_a_trim_that_leaves_nothing_is_refused(trim: float) -> None:
    with pytest.raises(PlanError, match="trim"):
        trimmed_mean(states([[1.0]]), [1], trim)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_types_counters_and_infinities_survive(name: str) -> None:
    def state(weight: float, batches: int) -> State:
        return {
            "w": torch.tensor([weight], dtype=torch.float32),
            "batches": torch.tensor(batches),
            "mask": torch.tensor([0.0, -math.inf]),
            "flag": torch.tensor([True]),
        }

    given_states = [state(1.0, 3), state(3.0, 7)]
    combined = BUILT_IN[name](given_states, [1, 1])
    assert combined["w"].dtype == torch.float32
    assert combined["w"].item() == 2.0
    assert torch.equal(combined["batches"], torch.tensor(7))
    assert torch.equal(combined["mask"], torch.tensor([0.0, -math.inf]))
    assert torch.equal(combined["flag"], torch.tensor([True]))
    assert given_states[0]["w"].item() == 1.0, "the silos' own states are left as they are"


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_one_silo_alone_is_kept_bit_for_bit(name: str) -> None:
    alone = {"w": torch.randn(7, generator=torch.Generator().manual_seed(0))}
    assert torch.equal(BUILT_IN[name]([alone], [13])["w"], alone["w"])
