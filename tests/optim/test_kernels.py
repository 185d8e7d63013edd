"""The GPU kernels against the slow and obvious, run by Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedforget.optim import convolution_kernel, convolutions, fisher_update, kernels, update_kernel
from fedforget.optim.convolution_kernel import sums_of_products
from fedforget.optim.fisher_update import Member, diagonal_fisher

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "plain": (nn.Conv2d(2, 3, 3), (5, 6)),
    "padded": (nn.Conv2d(3, 20, 5, padding=2), (8, 7)),
    "strided": (nn.Conv2d(2, 70, (3, 2), stride=(2, 1), padding=1), (9, 4)),
    "dilated": (nn.Conv2d(1, 3, 3, dilation=(2, 1), padding=(0, 1)), (7, 6)),
    "grouped": (nn.Conv2d(6, 4, 3, groups=2, padding=1), (5, 5)),
    "depthwise": (nn.Conv2d(5, 10, 3, groups=5), (4, 4)),
    "circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (5, 4)),
    "same": (nn.Conv2d(2, 3, (5, 3), padding="same"), (5, 4)),
    "many elements": (nn.Conv2d(9, 3, 5, padding=2), (4, 4)),
    "line": (nn.Conv1d(3, 5, 3, stride=2, padding=1), (11,)),
    "volume": (nn.Conv3d(2, 3, (2, 3, 2), padding=(1, 0, 1)), (3, 4, 3)),
    "point": (nn.Conv2d(1, 1, 1), (1, 1)),
}


def shares_one_by_one(layer: nn.Module, inputs: Tensor, owed: Tensor) -> Tensor:
    """Each sample's gradient by autograd in float64."""
    layer.double()
    shares = []
    for one, gradient in zip(inputs.double().split(1), owed.double().split(1), strict=True):
        (share,) = torch.autograd.grad(layer(one), [layer.weight], gradient)
        shares.append(share)
    layer.float()
    return torch.stack(shares)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((found.double() - expected).norm() <= tolerance * expected.norm())


@pytest.fixture(autouse=True)
def _single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("blocks", [1, 512])
def test_products_of_every_kind_of_convolution(name: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_kernel, "BLOCKS", blocks)
    layer, size = LAYERS[name]
    torch.manual_seed(0)
    inputs = torch.randn(5, layer.in_channels, *size)
    owed = torch.randn_like(layer(inputs))
    expected = shares_one_by_one(layer, inputs, owed)
    total, square = convolutions.products_in_registers(layer, layer.weight, inputs, owed)
    assert total.shape == square.shape == layer.weight.shape
    assert close(total, expected.sum(0))
    assert close(square, expected.square().sum(0))


@settings(max_examples=25, deadline=None)
@given(
    samples=st.integers(1, 9),
    channels=st.integers(1, 3),
    outputs=st.integers(1, 40),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    side=st.integers(3, 9),
)
def test_products_of_any_size(samples: int, channels: int, outputs: int, kernel: int, stride: int, side: int) -> None:
    torch.manual_seed(1)
    layer = nn.Conv2d(channels, outputs, kernel, stride)
    inputs = torch.randn(samples, channels, side, side)
    owed = torch.randn_like(layer(inputs))
    expected = shares_one_by_one(layer, inputs, owed)
    total, square = sums_of_products(inputs, owed, layer.kernel_size, layer.stride, layer.dilation, 1)
    assert close(total, expected.sum(0))
    assert close(square, expected.square().sum(0))


def test_memory_layouts_of_input_and_weight_do_not_matter() -> None:
    layer, size = LAYERS["padded"]
    striped = nn.Conv2d(3, 20, 5, padding=2).to(memory_format=torch.channels_last)
    inputs = torch.randn(4, 3, *size)
    owed = torch.randn_like(layer(inputs))
    plain = convolutions.products_in_registers(layer, layer.weight, inputs, owed)
    across = [tensor.to(memory_format=torch.channels_last) for tensor in (inputs, owed)]
    for found, expected in zip(
        convolutions.products_in_registers(striped, striped.weight, *across), plain, strict=True
    ):
        assert torch.equal(found, expected)
        assert found.stride() == striped.weight.stride()


def test_half_precision_is_summed_in_single() -> None:
    layer, size = LAYERS["grouped"]
    inputs = torch.randn(6, 6, *size)
    owed = torch.randn_like(layer(inputs))
    halves = [tensor.half() for tensor in (inputs, owed)]  # the interpreter cannot multiply bfloat16
    expected = shares_one_by_one(layer, *halves)
    total, square = convolutions.products_in_registers(layer, layer.weight, *halves)
    assert total.dtype == square.dtype == torch.float32
    assert close(total, expected.sum(0))
    assert close(square, expected.square().sum(0))


def members(shapes: list[tuple[int, ...]], refreshed: bool, dtype: torch.dtype) -> list[Member]:
    torch.manual_seed(2)
    made = []
    for number, shape in enumerate(shapes, 1):
        parameter, gradient, mean = (torch.randn(shape, dtype=torch.float64).to(dtype) for _ in range(3))
        fisher, square = (torch.rand(shape, dtype=torch.float64).to(dtype) for _ in range(2))
        made.append(Member(parameter, gradient, fisher if refreshed else None, mean, square, number + 2, number))
    return made


SHAPES: list[tuple[int, ...]] = [(1,), (7,), (4, 3, 3, 3), (1025,), (50, 41)]


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("refreshed", [True, False])
def test_the_update_is_that_of_torch(block_size: int, refreshed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rule: dict[str, Any] = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-3, "block_size": block_size}
    expected = members(SHAPES, refreshed, torch.float64)
    diagonal_fisher(expected, **rule)
    monkeypatch.setattr(kernels, "run_on", lambda device: True)
    found = members(SHAPES, refreshed, torch.float32)
    diagonal_fisher(found, **rule)
    for mine, other in zip(found, expected, strict=True):
        for name, tensor in mine.tensors().items():
            assert close(tensor, other.tensors()[name], 1e-6)


def test_the_kernel_takes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(kernels, "run_on", lambda device: True)
    monkeypatch.setattr(fisher_update, "_update_by_kernel", lambda member, *_: taken.append(member))
    singles, doubles = members([(3, 4), (0,)], True, torch.float32), members([(3, 4)], True, torch.float64)
    striped = [Member(*(value.T if isinstance(value, Tensor) else value for value in vars(singles[0]).values()))]
    diagonal_fisher(singles + doubles + striped, lr=0.1, beta1=0.9, beta2=0.9, eps=1.0, block_size=3)
    assert taken == singles[:1]


@pytest.mark.parametrize("start", [0, 1023, 1024, 2047])
def test_a_block_goes_on_across_the_borders_of_the_grid(start: int) -> None:
    fisher = functional.one_hot(torch.tensor(start), 2050).float()
    zeros, parameter, square = (torch.zeros(2050) for _ in range(3))
    rest = {"beta1": 0.9, "beta2": 0.5, "length": 1.0, "damping": 1.0, "block_size": 3}
    update_kernel.update(parameter, zeros, zeros.clone(), square, fisher, **rest)
    first = start // 3 * 3
    width = min(3, 2050 - first)
    expected = torch.zeros(2050)
    expected[first : first + width] = 0.5 / width**2
    assert torch.allclose(square, expected)


def test_without_a_gpu_no_kernel_is_asked_for() -> None:
    assert not kernels.run_on(torch.device("cpu"))


def test_where_triton_does_not_run_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels.run_on.cache_clear()
    monkeypatch.setattr(torch, "ones", lambda *_, **__: math.nan)
    assert not kernels.run_on(torch.device("cuda"))
    assert not kernels.run_on(torch.device("cuda"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Triton does not run" in caplog.text
    kernels.run_on.cache_clear()
