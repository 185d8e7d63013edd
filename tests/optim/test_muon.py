"""Muon against a slow and obvious version of it, and what it refuses."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedforget.optim.muon import QUINTICS, Muon, orthogonal, sorted_parameters


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.ReLU(), nn.Linear(5, 3)
    ).double()


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (8,), generator=generator)


def trained(model: nn.Module, optimizer: Any, numbers: range) -> nn.Module:
    for number in numbers:
        x, y = batch(number)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def polynomial(sigma: Tensor) -> Tensor:
    for a, b, c in QUINTICS:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


class ObviousMuon:
    """Matrices by their singular values, each through the polynomials; everything else by torch's Adam."""

    def __init__(self, model: nn.Module, lr: float, momentum: float) -> None:
        self.model, self.lr, self.momentum = model, lr, momentum
        self.matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        self.means = [torch.zeros_like(parameter) for parameter in self.matrices]
        self.adam = torch.optim.Adam([p for p in model.parameters() if p.ndim < 2], lr=lr / 20)

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def step(self) -> None:
        self.adam.step()
        for parameter, mean in zip(self.matrices, self.means, strict=True):
            assert parameter.grad is not None
            mean.copy_(self.momentum * mean + (1 - self.momentum) * parameter.grad)
            ahead = (1 - self.momentum) * parameter.grad + self.momentum * mean
            u, s, v = torch.linalg.svd(ahead.flatten(1), full_matrices=False)
            direction = u @ torch.diag(polynomial(s / s.norm())) @ v
            rows, columns = direction.shape
            scale = math.sqrt(rows / columns) if rows > columns else 1.0
            with torch.no_grad():
                parameter.sub_(self.lr * scale * direction.view_as(parameter))


def test_it_is_the_obvious_version() -> None:
    model = network()
    slow = copy.deepcopy(model)
    trained(model, Muon(model, lr=0.05, momentum=0.8), range(6))
    trained(slow, ObviousMuon(slow, lr=0.05, momentum=0.8), range(6))
    for fast, expected in zip(model.parameters(), slow.parameters(), strict=True):
        assert (fast - expected).norm() <= 1e-9 * expected.norm()


def test_the_polynomials_bring_singular_values_near_one() -> None:
    assert (polynomial(torch.linspace(0.01, 1, 10_000, dtype=torch.float64)) - 1).abs().max() < 0.28
    assert polynomial(torch.tensor(0.0)) == 0


shapes = st.tuples(st.integers(1, 12), st.integers(1, 12))


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(0, 1000))
def test_a_matrix_becomes_nearly_orthogonal_whatever_its_shape(shape: tuple[int, int], seed: int) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    expected = u @ torch.diag(polynomial(s / s.norm())) @ v
    assert torch.allclose(orthogonal([matrix], 1024)[0], expected, atol=1e-9)
    assert torch.allclose(orthogonal([7 * matrix], 1024)[0], expected, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 7))
def test_what_is_longer_than_a_slice_on_both_sides_is_cut_along_the_shorter(rows: int, columns: int, size: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    flat = matrix if rows <= columns else matrix.T
    parts = [orthogonal([part], 1024)[0] for part in flat.chunk(math.ceil(len(flat) / size))]
    assert all(len(part) <= size for part in parts)
    expected = torch.cat(parts) if rows <= columns else torch.cat(parts).T
    assert torch.allclose(orthogonal([matrix], size)[0], expected, atol=1e-12)


def test_matrices_are_worked_on_together_as_each_alone() -> None:
    shapes = [(3, 5), (5, 3), (4, 4), (3, 5), (9, 7), (7, 9), (1, 1)]
    matrices = [torch.randn(shape, dtype=torch.float64) for shape in shapes] + [torch.randn(3, 5)]
    for together, matrix in zip(orthogonal(matrices, 4), matrices, strict=True):
        (alone,) = orthogonal([matrix], 4)
        assert together.dtype == matrix.dtype
        assert torch.allclose(together, alone, atol=1e-12 if matrix.dtype == torch.float64 else 1e-5)


def test_a_gradient_of_zeros_moves_nothing() -> None:
    assert torch.equal(orthogonal([torch.zeros(3, 4)], 1024)[0], torch.zeros(3, 4))
    assert torch.isfinite(orthogonal([torch.full((3, 4), 1e-42)], 1024)[0]).all()


def test_embeddings_biases_and_norms_are_not_matrices() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(7, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)})
    matrices, others = sorted_parameters(model)
    assert [tuple(parameter.shape) for parameter in matrices] == [(2, 4)]
    assert len(others) == 4


def test_frozen_parameters_and_those_without_a_gradient_stay() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    model[4].forward = lambda x: functional.linear(x, model[4].weight.detach(), model[4].bias)  # type: ignore[method-assign]
    before = [model[0].weight.clone(), model[4].weight.clone(), model[6].weight.clone()]
    trained(model, Muon(model), range(2))
    assert torch.equal(model[0].weight, before[0])
    assert torch.equal(model[4].weight, before[1])
    assert not torch.equal(model[6].weight, before[2])


def test_its_state_goes_on_with_the_same_bits() -> None:
    whole, half = network(), network()
    trained(whole, Muon(whole), range(6))
    first = Muon(half)
    trained(half, first, range(3))
    saved = copy.deepcopy(first.state_dict())
    second = Muon(half)
    second.load_state_dict(saved)
    trained(half, second, range(3, 6))
    for mine, expected in zip(half.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_channels_last_weights_take_the_same_step() -> None:
    plain = network()
    striped = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    trained(plain, Muon(plain), range(3))
    trained(striped, Muon(striped), range(3))
    for mine, expected in zip(striped.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, expected, atol=1e-9)


def test_a_closure_gives_its_loss() -> None:
    model = network()
    optimizer = Muon(model)
    x, y = batch(0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return float(loss.detach())

    first = optimizer.step(closure)
    assert first is not None
    assert optimizer.step(closure) < first


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": math.inf}, "lr is inf"),
        ({"lr": "0.1"}, "lr is '0.1': it must be a number"),
        ({"lr": True}, "lr is True: it must be a number"),
        ({"momentum": False}, "momentum is False: it must be a number"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"adam_lr": -1.0}, "adam_lr is -1.0"),
        ({"slice_size": 0}, "slice_size is 0"),
        ({"slice_size": 1.5}, "slice_size is 1.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(network(), **setting)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        Muon(nn.ReLU())


def test_other_parameters_are_refused() -> None:
    optimizer = Muon(network())
    with pytest.raises(ValueError, match="build a new one for others"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


def test_a_matrix_without_numbers_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    model.register_parameter("empty", nn.Parameter(torch.ones(3, 0)))
    optimizer = Muon(model)
    (model(torch.ones(1, 4)).sum() + model.empty.sum()).backward()
    optimizer.step()


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-23, 1e-10, 1.0, 1e19, 1e37])
def test_a_step_is_as_long_however_large_the_gradient_is(size: float) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(30, 40, bias=False)
    optimizer = Muon(layer, momentum=0.0)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(40, 30) * size
    optimizer.step()
    length = float((layer.weight.detach() - before).norm())
    assert 0 < length < 1.3 * 0.07 * math.sqrt(40 / 30) * math.sqrt(30)
    if size > 1e-40:  # smaller numbers are no more than a few steps of the smallest
        assert length > 0.7 * 0.07 * math.sqrt(40 / 30) * math.sqrt(30)
