import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedforget.optim import fisher_update as module_under_test
from fedforget.optim.fisher_update import Member, block_average, diagonal_fisher

from .oracles import blocks


def one_by_one(members: list[Member], *, lr: float, beta1: float, beta2: float, eps: float, block_size: int) -> None:
    """The readable version: one parameter after the other, as Eq. 15 is written."""
    for member in members:
        member.mean_gradient.copy_(beta1 * member.mean_gradient + (1 - beta1) * member.gradient)
        if member.fisher is not None:
            values = blocks(member.fisher.flatten().tolist(), block_size)
            gamma = torch.tensor(values, dtype=member.fisher.dtype).reshape(member.fisher.shape)
            member.mean_squared_fisher.copy_(beta2 * member.mean_squared_fisher + (1 - beta2) * gamma * gamma)
        m = member.mean_gradient / (1 - beta1**member.steps)
        v = (member.mean_squared_fisher / (1 - beta2**member.refreshes)).sqrt()
        member.parameter.sub_(lr * m / (v + eps))


def random_member(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool, refreshed: bool) -> Member:
    def tensor() -> Tensor:
        value = torch.rand(shape, dtype=dtype)
        return value.to(memory_format=torch.channels_last) if channels_last and len(shape) == 4 else value

    return Member(tensor(), tensor(), tensor() if refreshed else None, tensor(), tensor(), steps=5, refreshes=3)


@st.composite
def lists_of_members(draw):
    shapes = st.sampled_from([(), (0,), (1,), (7,), (30,), (4, 5), (2, 3, 2, 2), (5, 2, 3, 3)])
    dtypes = st.sampled_from([torch.float32, torch.float64])
    made = st.builds(random_member, shapes, dtypes, st.booleans(), st.booleans())
    return draw(st.lists(made, max_size=5))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    members=lists_of_members(),
    block_size=st.sampled_from([1, 3, 4, 100]),
    piece=st.sampled_from([1, 8, 2**30]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.5)]),
)
def test_as_the_readable_version(members, block_size, piece, betas):
    expected = copy.deepcopy(members)
    given = copy.deepcopy(members)
    hyperparameters = {"lr": 0.01, "beta1": betas[0], "beta2": betas[1], "eps": 1e-3, "block_size": block_size}
    one_by_one(expected, **hyperparameters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_under_test, "PIECE", piece)
        diagonal_fisher(members, **hyperparameters)
    for found, wanted, before in zip(members, expected, given, strict=True):
        for name, value in found.tensors().items():
            torch.testing.assert_close(value, getattr(wanted, name))
        assert torch.equal(found.gradient, before.gradient)
        assert found.fisher is None or torch.equal(found.fisher, before.fisher)


def test_pieces_change_nothing(monkeypatch):
    whole = [random_member((4, 25), torch.float32, channels_last=False, refreshed=True)]
    cut = copy.deepcopy(whole)
    hyperparameters = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "block_size": 3}
    diagonal_fisher(whole, **hyperparameters)
    monkeypatch.setattr(module_under_test, "PIECE", 10)
    assert [len(group) for group in module_under_test._groups(cut, 3)] == [1] * 12
    diagonal_fisher(cut, **hyperparameters)
    torch.testing.assert_close(cut[0].parameter, whole[0].parameter)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (4, 5), (0,)])
@pytest.mark.parametrize("block_size", [1, 3, 4, 100])
def test_block_average(shape, block_size):
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).square().reshape(shape)
    expected = torch.tensor(blocks(values.flatten().tolist(), block_size), dtype=torch.float64).reshape(shape)
    torch.testing.assert_close(block_average(values, block_size), expected)


def test_block_average_in_another_memory_layout():
    values = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(block_average(values.to(memory_format=torch.channels_last), 3), block_average(values, 3))
