"""Γ of Eq. 12 (arXiv:2203.07320): the exact diagonal of the empirical Fisher, gathered by hooks as a model trains.

Γ = (1/N) Σ_i (∂l_i/∂ω)², the mean over the batch of squared per-sample gradients, from one ordinary forward and
backward pass of the batch-mean loss (1/N) Σ_i l_i. A layer's input is kept when it is called, the gradient of its
output when the backward pass comes by, and both are dropped as soon as the parameter's own gradient has arrived: by
then every use of the parameter in that pass has been seen, so a parameter used twice has its per-sample gradients
summed before they are squared. Only modules without a closed form keep what they were given until `take`.

A layer whose rule gives its parameters' gradients as well, a convolution, has them lent while it is called: it runs as
if they needed none, and what it returns is passed on through a function whose backward pass finds both (`uses.attach`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _BatchNorm

from fedforget.optim import chunks
from fedforget.optim.replay import (
    Arguments,
    Opening,
    arguments,
    batch_dimension,
    batch_message,
    check_plain,
    map_tensors,
    nodes,
    opening,
    output_dimension,
    tensors_in,
    versions,
)
from fedforget.optim.units import Unit, called, refuse_embeddings, units
from fedforget.optim.uses import Use, attach, summed_squares

REPLAYING = ContextVar("REPLAYING", default=False)
"""A module is being run again: no hook may take that for a call, nor may those of another optimizer on the model."""


class _Hook:
    """Calls a method of an object that may be gone; copied or pickled along with its module, it does nothing."""

    def __init__(self, method: Callable[..., Any] | None = None, *arguments: Any) -> None:
        self.method = None if method is None else weakref.WeakMethod(method)
        self.arguments = arguments

    # torch.compile shall run hooks as they are and compile what lies between; torch's own decorator, unlike the public
    # one, does not load the compiler for programs that never compile.
    @_disable_dynamo
    def __call__(self, *arguments: Any) -> Any:
        method = None if self.method is None else self.method()
        return None if method is None else method(*self.arguments, *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


class SquaredGrads:
    """Gathers Γ of a model's trainable parameters from the backward passes that reach them."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        refuse_embeddings(model)
        self._units = list(units(model))
        self._replayed = {
            parameter for unit in self._units if unit.rule is None for parameter in unit.parameters.values()
        }
        self.needed = set(self.names)
        """The parameters whose Γ the passes from now on are to gather; the others cost what they cost anyway."""
        self.share = 1.0
        """The part of each batch, from its front, that Γ is taken from."""
        self._lent: dict[str, nn.Parameter] = {}
        self._sizes: list[int | None] = []  # Batch sizes of the calls of the model that are under way.
        self._open: list[Opening] = []  # Replayed units whose forward is under way.
        self._unchecked = True
        self._paths: dict[Any, list[Any]] = {}
        self._pending: dict[nn.Parameter, list[Use]] = {}
        self._uses: dict[nn.Parameter, list[Use]] = {}
        self._gathered: dict[nn.Parameter, Tensor] = {}
        self._visited: set[nn.Parameter] = set()
        self._repeated = False
        handles: list[Any] = [
            model.register_forward_pre_hook(_Hook(self._model_called, batch_dimension(model)), with_kwargs=True)
        ]
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                handles.append(module.register_forward_pre_hook(_Hook(self._refuse_coupling, name)))
        for unit in self._units:
            if unit.rule is None:
                handles.append(unit.module.register_forward_pre_hook(_Hook(self._unit_called, unit), with_kwargs=True))
            elif unit.rule.gradients is not None:
                handles.append(unit.module.register_forward_pre_hook(_Hook(self._lend, unit), prepend=True))
            # Before the hooks of others, which may put another output in the place of the layer's own.
            handles.append(
                unit.module.register_forward_hook(
                    _Hook(self._record, unit), prepend=True, with_kwargs=True, always_call=True
                )
            )
        handles.append(model.register_forward_hook(_Hook(self._model_returned), always_call=True))
        for parameter in self.names:
            handles.append(parameter.register_post_accumulate_grad_hook(_Hook(self._accumulated)))  # type: ignore[no-untyped-call]
        self._finalizer = weakref.finalize(self, _remove, handles)

    def close(self) -> None:
        """Remove every hook from the model."""
        self._finalizer()

    def clear(self) -> None:
        """Forget what was gathered."""
        self._take_back()
        self._pending, self._uses, self._gathered, self._visited = {}, {}, {}, set()
        self._repeated = False

    @torch.no_grad()
    def take(self) -> dict[nn.Parameter, Tensor]:
        """Γ of every parameter that the backward pass reached; the next pass starts afresh."""
        try:
            if self._repeated:
                raise RuntimeError(
                    "two backward passes went through the model before this step, and the scale of their sum is "
                    "unknown: call the optimizer's zero_grad() before each backward pass and step() after it"
                )
            if self._uses:
                # Called inside autocast, a replay would compute Γ itself in half precision.
                with torch.autocast(next(iter(self._uses)).device.type, enabled=False):
                    self._replay()
            for parameter, name in self.names.items():
                if parameter in self.needed and parameter.grad is not None and parameter not in self._gathered:
                    raise RuntimeError(
                        f"parameter {name!r} has a gradient but its per-sample gradients were not seen: use it in the "
                        "forward of the module that owns it, call the model itself, and build the optimizer first"
                    )
            return self._gathered
        finally:
            self.clear()

    # In the forward pass.

    def _model_called(self, dimension: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if REPLAYING.get():
            return
        first = next(tensors_in((args, kwargs)), None)
        self._sizes.append(first.shape[dimension] if first is not None and first.dim() > dimension else None)

    def _model_returned(self, _: nn.Module, __: Any, output: Any) -> None:
        if REPLAYING.get() or not self._sizes:
            return
        self._sizes.pop()
        paths, self._paths = self._paths, {}
        if self._unchecked and paths and output is not None and len(self.needed) == len(self.names):
            self._refuse_hidden_uses(output, paths)
            self._unchecked = False

    def _refuse_coupling(self, name: str, module: _BatchNorm, _: Any) -> None:
        if torch.is_grad_enabled() and (module.training or module.running_mean is None):
            raise RuntimeError(
                f"{called(name, module)} normalises over the batch, so no sample has a gradient of its own: "
                "use nn.GroupNorm, or call .eval() on it"
            )

    def _unit_called(self, unit: Unit, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not REPLAYING.get() and self._needs(unit):
            self._open.append(opening((args, kwargs)))

    def _needs(self, unit: Unit) -> bool:
        return not self.needed.isdisjoint(unit.parameters.values())

    def _lend(self, unit: Unit, module: nn.Module, _: tuple[Any, ...]) -> None:
        """Let the layer run without asking for the gradients that the products for Γ will give as well."""
        self._take_back()  # What an interrupted call has left.
        if REPLAYING.get() or self._open or not torch.is_grad_enabled() or not self._needs(unit):
            return
        own = {name: parameter for name, parameter in unit.parameters.items() if parameter.requires_grad}
        # torch.func.functional_call may have put others in their places.
        as_built = all(getattr(module, name) is parameter for name, parameter in own.items())
        if "weight" in own and as_built:
            self._lent = own
            for parameter in own.values():
                parameter.requires_grad_(False)

    def _take_back(self) -> dict[str, nn.Parameter]:
        lent, self._lent = self._lent, {}
        for parameter in lent.values():
            parameter.requires_grad_(True)
        return lent

    def _record(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Keep what the unit was given, and ask for the gradient of what it gave."""
        lent = self._take_back()
        if REPLAYING.get() or not self._needs(unit):
            return None
        opened = self._open.pop() if unit.rule is None and self._open else None
        # Whatever happens inside a module that is replayed belongs to that module.
        if self._open or not torch.is_grad_enabled():
            return None
        check_plain(output, f"the output of {unit.name}")
        if not any(tensor.requires_grad or lent for tensor in tensors_in(output)):
            return None
        size = self._sizes[-1] if self._sizes else None
        if size is None:
            raise RuntimeError(
                f"{unit.name} was called while the size of the batch is unknown: "
                "call the model itself, with a tensor whose first dimension is the batch, not its parts or its .forward"
            )
        if opened is None:
            call, before = _layer_arguments(unit, args, kwargs, size), nodes((args, kwargs))
        else:
            opened.check((args, kwargs), unit.name)
            call, before = arguments(module, args, kwargs, size, unit.name), opened.nodes
            if len(list(tensors_in(output))) > 1:
                # One output may be computed from another; the hook must see what is owed to each alone.
                output = map_tensors(lambda tensor: tensor.clone() if tensor.requires_grad else tensor, output)
        samples = max(1, round(self.share * size))
        use = Use(unit, size, samples, call, self.needed.intersection(unit.parameters.values()))
        if lent:
            output = attach(use, call.args[0], output, lent)
        for index, tensor in enumerate(tensors_in(output)):
            if tensor.requires_grad:
                _check_output(unit, tensor, output_dimension(module, index), size)
                tensor.register_hook(_Hook(self._owed, use, index))  # type: ignore[no-untyped-call]
                if self._unchecked:
                    self._paths[tensor.grad_fn] = before
        return output

    def _refuse_hidden_uses(self, output: Any, paths: dict[Any, list[Any]]) -> None:
        """Follow the graph from the model's output around every recorded call; no parameter may be met on the way."""
        waiting: list[Any] = [tensor.grad_fn for tensor in tensors_in(output)]
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            parameter = getattr(node, "variable", None)  # Only the node that fills a leaf's .grad has one.
            if parameter is not None and parameter in self.names:
                raise RuntimeError(
                    f"parameter {self.names[parameter]!r} is used outside the forward of a module that owns it, where "
                    "its per-sample gradients are not seen: assign it to the module that uses it as well"
                )
            waiting += paths[node] if node in paths else [following for following, _ in node.next_functions]

    # In the backward pass.

    def _owed(self, use: Use, index: int, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("per-sample gradients of a backward pass with create_graph=True are not supported")
        # The engine's number of a pass tells this one from a torch.autograd.grad that never reached the parameters.
        task = torch._C._current_graph_task_id()
        if use.counted and use.task != task:
            raise RuntimeError(
                f"a backward pass went through {use.unit.name} a second time: call the model again before each"
            )
        if use.task != task:
            use.task, use.gradients = task, {}
            for parameter in use.waiting:
                others = [
                    other for other in self._pending.get(parameter, []) if other.task == task and other is not use
                ]
                self._pending[parameter] = [*others, use]
        use.gradients[index] = gradient

    def _accumulated(self, parameter: nn.Parameter) -> None:
        """The parameter's gradient is complete, so all its uses in this pass are known."""
        uses = [use for use in self._pending.pop(parameter, []) if use.task == torch._C._current_graph_task_id()]
        self._repeated = self._repeated or parameter in self._visited
        self._visited.add(parameter)
        if len({use.size for use in uses}) > 1:
            raise RuntimeError(
                f"parameter {self.names[parameter]!r} was used with batches of different sizes in one loss: "
                "use one size"
            )
        for use in uses:
            use.counted = True
        if uses and not self._repeated:
            if parameter in self._replayed:
                self._uses[parameter] = uses
                return
            # Called inside autocast, the backward pass would compute Γ itself in half precision.
            with torch.autocast(parameter.device.type, enabled=False):
                self._gathered[parameter] = summed_squares(parameter, uses).mul_(_scale(uses[0]))
        for use in uses:
            use.settle(parameter)

    def _replay(self) -> None:
        """The same for the parameters of replayed modules, all together so that each module runs once a chunk."""
        uses = list(dict.fromkeys(use for uses in self._uses.values() for use in uses))
        sizes = {use.size for use in uses}
        parameters = list(self._uses)
        self._gathered |= {parameter: torch.zeros_like(parameter) for parameter in parameters}
        token = REPLAYING.set(True)
        try:
            for size in sizes:
                alike = [use for use in uses if use.size == size]
                elements = sum(parameter.numel() for parameter in parameters)
                # Running a module again costs most for each time it is done.
                for samples in chunks.chunks(alike[0].samples, elements, chunks.ELEMENTS):
                    sums: dict[nn.Parameter, Tensor] = {}
                    for use in alike:
                        names = [name for name, own in use.unit.parameters.items() if use in self._uses.get(own, [])]
                        for name, share in use.shares(names, samples).items():
                            parameter = use.unit.parameters[name]
                            sums[parameter] = sums[parameter] + share if parameter in sums else share
                    for parameter, shares in sums.items():
                        self._gathered[parameter].add_(shares.square().sum(0), alpha=_scale(alike[0]))
        finally:
            REPLAYING.reset(token)
        for use in uses:
            use.call, use.gradients = None, {}


def _layer_arguments(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> Arguments:
    inputs = next(tensors_in((args, kwargs)))
    assert unit.rule is not None
    if inputs.dim() < unit.rule.dimensions(unit.module) or len(inputs) != size:
        raise ValueError(batch_message(unit.name, 0, inputs, size))
    return Arguments((inputs.detach(),), {}, (0,), versions((inputs,)))


def _check_output(unit: Unit, tensor: Tensor, dimension: int, size: int) -> None:
    if tensor.dim() <= dimension or tensor.shape[dimension] != size:
        raise ValueError(
            f"{unit.name} returned a tensor of shape {tuple(tensor.shape)}, but its dimension {dimension} "
            f"must be the model's batch of {size}: return one entry a sample"
        )


def _scale(use: Use) -> float:
    """From Σ share² to the mean of the squared gradients of the samples' own losses."""
    return use.size * use.size / use.samples


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
