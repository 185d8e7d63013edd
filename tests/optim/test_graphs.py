"""CUDA graphs. Without a GPU only that nothing changes; the rest runs where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedforget.optim import graphs
from fedforget.optim.muon import directions


def doubled(inputs: list[Tensor], times: int) -> list[Tensor]:
    return [tensor * times for tensor in inputs]


def test_on_a_processor_the_function_is_called() -> None:
    given = [torch.ones(2), torch.arange(3.0)]
    assert [made.tolist() for made in graphs.call(doubled, given, 2)] == [[2, 2], [0, 2, 4]]
    assert not graphs._kept.graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_graph_gives_the_bits_of_the_function() -> None:
    shapes = [(64, 32, 5, 5), (10, 300)]
    for _ in range(3):
        gradients = [torch.randn(shape, device="cuda") for shape in shapes]
        for slice_size in (1024, 16):
            expected = directions(gradients, slice_size)
            assert all(map(torch.equal, graphs.call(directions, gradients, slice_size), expected))
    for times in range(2 * graphs.KEPT):
        assert graphs.call(doubled, [torch.ones(2, device="cuda")], times)[0].tolist() == [times, times]
    assert len(graphs._kept.graphs) == graphs.KEPT
