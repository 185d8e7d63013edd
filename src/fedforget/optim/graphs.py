"""Many small kernels of a GPU launched as one: CUDA graphs of functions from tensors to tensors."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

Function = Callable[..., list[Tensor]]

KEPT = 4
"""Graphs that are kept: one for each set of shapes in use, which is one for each model that is being trained."""


class _Graph:
    """One function's kernels, recorded for inputs of these shapes."""

    def __init__(self, function: Function, inputs: Sequence[Tensor], settings: tuple[Hashable, ...]) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it without types
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # The libraries below torch set themselves up in their first call, which a recording must not hold.
            function(self._inputs, *settings)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = function(self._inputs, *settings)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        torch._foreach_copy_(self._inputs, list(inputs))
        self._graph.replay()
        return self._outputs


class _Kept(threading.local):
    """A thread's graphs, the one used last at the end: the memory of one serves one call at a time."""

    def __init__(self) -> None:
        self.graphs: OrderedDict[Hashable, _Graph] = OrderedDict()


_kept = _Kept()


def call(function: Function, inputs: Sequence[Tensor], *settings: Hashable) -> list[Tensor]:
    """What the function makes of the inputs, on a GPU from a graph: valid until it is called the next time.

    The function must draw no random numbers, and neither write to its inputs nor read anything else that changes.
    """
    if inputs[0].device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return function(inputs, *settings)
    with torch.cuda.device(inputs[0].device):
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in inputs)
        # What decides which kernels are recorded.
        arithmetic = (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())
        key = (function, shapes, settings, torch.cuda.current_stream().cuda_stream, arithmetic)
        graphs = _kept.graphs
        if key not in graphs:
            graphs[key] = _Graph(function, inputs, settings)
            while len(graphs) > KEPT:
                graphs.popitem(last=False)
        graphs.move_to_end(key)
        return graphs[key](inputs)
