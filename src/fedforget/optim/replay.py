"""Per-sample gradients of any module, by running it again on one sample at a time.

`torch.func.vmap` runs all samples at once where it can, a loop does where it cannot. Like the closed forms these are
shares of a batch-mean loss: N times smaller than the gradient of the sample's own loss.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

IN_PLACE = (
    "changes its input in place, from which its per-sample gradients are computed: "
    "use the operation that returns a new tensor"
)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with every tensor in its tuples, lists and dicts replaced by `function` of it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [map_tensors(function, item) for item in value]
        return type(value)(items) if type(value) in (tuple, torch.Size) else type(value)(*items)
    if isinstance(value, list):
        return [map_tensors(function, item) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`, in the order of `map_tensors`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def versions(value: Any) -> tuple[int, ...]:
    """How often each tensor in `value` was changed in place."""
    return tuple(tensor._version for tensor in tensors_in(value))


def nodes(value: Any) -> list[Any]:
    """Where the tensors in `value` come from in the autograd graph."""
    return [tensor.grad_fn for tensor in tensors_in(value) if tensor.grad_fn is not None]


def check_plain(value: Any, what: str) -> None:
    """Refuse what could hide a tensor, since a gradient that is not seen would be missing from Γ without a word."""
    if isinstance(value, PackedSequence):
        raise TypeError(f"{what} is a PackedSequence, which has no batch dimension: pass padded sequences")
    if isinstance(value, tuple | list):
        for item in value:
            check_plain(item, what)
    elif isinstance(value, dict):
        for item in value.values():
            check_plain(item, what)
    elif value is not None and not isinstance(value, Tensor | bool | int | float | str):
        raise TypeError(
            f"{what} holds a {type(value).__name__}: only tensors and plain values in tuples, lists and dicts "
            "can be taken apart by sample"
        )


def batch_dimension(module: nn.Module) -> int:
    """Where a module's inputs and outputs carry the batch."""
    return 1 if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first else 0


def output_dimension(module: nn.Module, index: int) -> int:
    """Where the output tensor of this index carries the batch."""
    if isinstance(module, nn.RNNBase):
        return batch_dimension(module) if index == 0 else 1
    if isinstance(module, nn.MultiheadAttention):
        return batch_dimension(module) if index == 0 else 0
    return 0


@dataclass(frozen=True)
class Opening:
    """How things stood when a module was called that may have to be replayed."""

    versions: tuple[int, ...]
    nodes: list[Any]
    random_states: list[Tensor]

    def check(self, given: Any, name: str) -> None:
        """Refuse a call that running the module again would not repeat."""
        if self.versions != versions(given):
            raise RuntimeError(f"{name} {IN_PLACE}")
        if not all(map(torch.equal, self.random_states, _random_states())):
            raise RuntimeError(
                f"{name} drew random numbers, and its per-sample gradients would be computed with others: "
                "set its dropout to 0, call .eval() on it, or move the dropout to a module of its own outside of it"
            )


def opening(given: Any) -> Opening:
    """How things stand now, for a module called with `given`."""
    return Opening(versions(given), nodes(given), _random_states() if torch.is_grad_enabled() else [])


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return states


@dataclass(frozen=True)
class Arguments:
    """What a module was called with, taken apart by sample."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dimensions: tuple[int | None, ...]
    """For each tensor of (args, kwargs): where it carries the batch; None: every sample shares it."""

    versions: tuple[int, ...]

    def check_unchanged(self, culprit: str) -> None:
        """Refuse to compute with tensors that are not any more what the module was called with."""
        if self.versions != versions((self.args, self.kwargs)):
            raise RuntimeError(f"{culprit} {IN_PLACE}")

    def filled(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with these tensors in place of the old."""
        remaining = iter(tensors)
        args, kwargs = map_tensors(lambda _: next(remaining), (self.args, self.kwargs))
        return args, kwargs


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, name: str) -> Arguments:
    """Find the batch of `size` samples in what the module `name` was called with."""
    check_plain((args, kwargs), f"the input of {name}")
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        kwargs, args = inspect.signature(module.forward).bind(*args, **kwargs).arguments, ()
    detached_args, detached_kwargs = map_tensors(Tensor.detach, (args, kwargs))
    dimensions: list[int | None] = []
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        others: dict[str, int | None] = {"hx": 1, "key_padding_mask": 0, "attn_mask": None}
        for key, value in kwargs.items():
            for tensor in tensors_in(value):
                if key not in others and tensor.dim() != 3:
                    raise ValueError(f"{name} was given a {key} without a batch dimension: give it three dimensions")
                if key == "attn_mask" and tensor.dim() != 2:
                    raise ValueError(
                        f"{name} was given an attn_mask for every sample and head: "
                        "use a mask of two dimensions, or key_padding_mask"
                    )
                dimensions.append(others.get(key, batch_dimension(module)))
    else:
        tensors = tensors_in((args, kwargs))
        dimensions = [0 if tensor.dim() and len(tensor) == size else None for tensor in tensors]
    for tensor, dimension in zip(tensors_in((args, kwargs)), dimensions, strict=True):
        if dimension is not None and tensor.shape[dimension] != size:
            raise ValueError(batch_message(name, dimension, tensor, size))
    if not dimensions or dimensions[0] is None:
        raise ValueError(batch_message(name, 0, next(tensors_in((args, kwargs)), None), size))
    return Arguments(detached_args, detached_kwargs, tuple(dimensions), versions((args, kwargs)))


def batch_message(name: str, dimension: int, tensor: Tensor | None, size: int) -> str:
    """Why the batch cannot be found, in one sentence."""
    given = "no tensor" if tensor is None else f"an input of shape {tuple(tensor.shape)}"
    return (
        f"{name} was given {given}, but dimension {dimension} of it must be the model's batch of {size}: "
        "give the layer one entry a sample (expand what all samples share)"
    )


def replayed_shares(
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    call: Arguments,
    gradients: dict[int, Tensor],
    samples: slice,
) -> dict[str, Tensor]:
    """Shares of these samples by running the module again on each, all at once; RuntimeError where vmap cannot."""
    wanted = sorted(gradients)
    values = {name: parameter.detach() for name, parameter in parameters.items()}

    def sample_shares(inputs: list[Tensor], owed: list[Tensor]) -> dict[str, Tensor]:
        inputs = [
            tensor if dimension is None else tensor.unsqueeze(dimension)
            for tensor, dimension in zip(inputs, call.dimensions, strict=True)
        ]
        args, kwargs = call.filled(inputs)

        def outputs(weights: dict[str, Tensor]) -> tuple[Tensor, ...]:
            results = list(tensors_in(torch.func.functional_call(module, weights, args, kwargs)))
            return tuple(results[index] for index in wanted)

        pulled = torch.func.vjp(outputs, values)
        results, pull_back = pulled[0], pulled[1]
        owed = [
            gradient.unsqueeze(output_dimension(module, index)).to(result.dtype)
            for index, gradient, result in zip(wanted, owed, results, strict=True)
        ]
        shares: dict[str, Tensor] = pull_back(tuple(owed))[0]
        return shares

    owed_dimensions = [output_dimension(module, index) for index in wanted]
    owed = [_cut(gradients[index], output_dimension(module, index), samples) for index in wanted]
    inputs = _inputs(call, parameters, samples)
    with warnings.catch_warnings():
        # Operations without a batching rule are still exact under vmap, only slower.
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        mapped = torch.func.vmap(sample_shares, in_dims=(list(call.dimensions), owed_dimensions))
        shares: dict[str, Tensor] = mapped(inputs, owed)
    return shares


def looped_shares(
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    call: Arguments,
    gradients: dict[int, Tensor],
    samples: slice,
) -> dict[str, Tensor]:
    """The same shares, one sample after the other: for modules that vmap cannot run, such as nn.LSTM."""
    wanted = sorted(gradients)
    collected: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for sample in range(samples.start, samples.stop):
        one = slice(sample, sample + 1)
        args, kwargs = call.filled(_inputs(call, parameters, one))
        # The replay must not move the module's own buffers.
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with torch.enable_grad():
            results = list(tensors_in(torch.func.functional_call(module, buffers, args, kwargs)))
        shares = torch.autograd.grad(
            [results[index] for index in wanted],
            list(parameters.values()),
            [_cut(gradients[index], output_dimension(module, index), one).to(results[index].dtype) for index in wanted],
            materialize_grads=True,
        )
        for name, share in zip(parameters, shares, strict=True):
            collected[name].append(share)
    return {name: torch.stack(shares) for name, shares in collected.items()}


def _inputs(call: Arguments, parameters: dict[str, nn.Parameter], samples: slice) -> list[Tensor]:
    """What the module was given of these samples; what autocast had shortened, in the parameters' type again."""
    dtype = next(iter(parameters.values())).dtype
    tensors = zip(tensors_in((call.args, call.kwargs)), call.dimensions, strict=True)
    cut = (_cut(tensor, dimension, samples) for tensor, dimension in tensors)
    return [tensor.to(dtype) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor for tensor in cut]


def _cut(tensor: Tensor, dimension: int | None, samples: slice) -> Tensor:
    return tensor if dimension is None else tensor.narrow(dimension, samples.start, samples.stop - samples.start)
