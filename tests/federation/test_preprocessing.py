from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedforget as ff
from fedforget.federation.preprocessing import feature_sums, fit, prepare
from fedforget.types import Preprocessing
from tests import small


def table(rows: int, seed: int, missing: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = 5 + 3 * torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    x[torch.rand(rows, 4, generator=generator) < missing] = torch.nan
    return x


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(0, 99), st.sampled_from([0.0, 0.3]))
@settings(max_examples=30, deadline=None)
def test_silos_sums_give_mean_and_deviation_of_all_rows(sizes: list[int], seed: int, missing: float) -> None:
    parts = [table(size, seed + number, missing) for number, size in enumerate(sizes)]
    fitted = fit(feature_sums(part) for part in parts)
    for feature, column in enumerate(torch.cat(parts).T):
        present = column[~column.isnan()]
        if len(present) < 2:
            continue
        assert fitted.mean[feature].item() == pytest.approx(present.mean().item(), rel=1e-9)
        assert fitted.deviation[feature].item() == pytest.approx(present.std(correction=0).item(), rel=1e-6, abs=1e-6)


def test_a_missing_value_becomes_the_mean() -> None:
    x = torch.tensor([[1.0, torch.nan], [3.0, 4.0]])
    fitted = fit([feature_sums(x)])
    prepared = prepare(x, Preprocessing("standardize"), fitted, torch.float64)
    assert prepared.tolist() == [[-1.0, 0.0], [1.0, 0.0]]


def test_a_constant_or_absent_feature_is_left_unscaled() -> None:
    x = torch.tensor([[1e6 + 0.1, torch.nan]] * 5, dtype=torch.float64)
    fitted = fit([feature_sums(x)])
    assert fitted.deviation.tolist() == [1.0, 1.0]
    assert prepare(x, Preprocessing("standardize"), fitted, torch.float64).abs().max() < 1e-6


def test_whole_numbers_are_summed_without_overflow() -> None:
    fitted = fit([feature_sums(torch.full((1000, 1), 250, dtype=torch.uint8))] * 3)
    assert fitted.mean.item() == 250


def test_scale_and_none() -> None:
    x = torch.tensor([[0, 255]], dtype=torch.uint8)
    scaled = prepare(x, Preprocessing("scale", shift=127.5, scale=127.5), None, torch.float32)
    assert scaled.dtype == torch.float32
    assert scaled.tolist() == [[-1.0, 1.0]]
    assert prepare(x, Preprocessing(), None, torch.float64).tolist() == [[0.0, 255.0]]


def test_a_federation_standardizes_by_what_remains() -> None:
    data = small.sources([10, 8])
    federation = small.federation(data, preprocessing=ff.Preprocessing("standardize"))
    federation.train(ff.Plan(rounds=1))
    federation.forget({"silo-0": [0, 1, 2]}, ff.Retrain())
    fitted = federation.release.fit
    assert fitted is not None
    remaining = torch.cat([part.x for part in small.without(data, {"silo-0": [0, 1, 2]}).values()]).double()
    torch.testing.assert_close(fitted.mean, remaining.mean(0))
    torch.testing.assert_close(fitted.deviation, remaining.std(0, correction=0))
