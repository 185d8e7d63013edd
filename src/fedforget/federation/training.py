"""Local training: what a silo does with a model between receiving and returning it (LocalTraining of Algorithm 1)."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedforget.federation.randomness import shuffled
from fedforget.types import Plan, State

EVALUATION_BATCH = 4096


def batches(count: int, plan: Plan, round_number: int, silo: str, device: torch.device) -> Iterator[Tensor]:
    """The round's batches as positions among the samples sorted by id, a new order in each local epoch."""
    for epoch in range(plan.local_epochs):
        order = shuffled(count, plan.seed, round_number, epoch, silo)
        if device.type == "cuda":
            # From pinned memory, for any other copy to a GPU waits for all that it has been given to do.
            order = order.pin_memory().to(device, non_blocking=True)
        yield from torch.split(order, plan.batch_size)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    plan: Plan,
    round_number: int,
    silo: str,
) -> Tensor:
    """Train the model in place on all batches of a round; the mean loss a sample, which a GPU may still work on."""
    if x.device.type == "cpu":
        keep_freed_memory()
    model.train()
    # Summed on the device: reading it would make an accelerator wait.
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    seen = 0
    for positions in batches(len(y), plan, round_number, silo, x.device):
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=plan.autocast):
            loss = functional.cross_entropy(model(x.index_select(0, positions)), y.index_select(0, positions))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
        if plan.l2:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach(), alpha=plan.l2)
        optimizer.step()
        total += loss.detach() * len(positions)
        seen += len(positions)
    return total / seen


@functools.cache
def keep_freed_memory() -> None:
    """Have glibc keep the memory of large tensors that were freed, for the next ones; elsewhere, do nothing.

    By default it goes back to the system at once, and every page of it must be mapped and zeroed anew in each step.
    """
    if os.environ.keys() & {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}:
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
    # Older ones refuse more than 32 MiB. Where both are refused nothing may be set: it would end their own growth.
    if mallopt(m_mmap_threshold, 2**30) or mallopt(m_mmap_threshold, 2**25):
        mallopt(m_trim_threshold, -1)


def environment(device: torch.device) -> dict[str, str | int]:
    """What decides the bits besides the plan and the samples."""
    return {
        "torch": torch.__version__,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "convolution_tf32": torch.backends.cudnn.allow_tf32,
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def adopt(environment: Mapping[str, str | int]) -> None:
    """Have this process compute as the one did whose environment this is, on the same device and torch."""
    torch.set_num_threads(int(environment["threads"]))
    torch.set_float32_matmul_precision(str(environment["matmul_precision"]))
    torch.backends.cudnn.allow_tf32 = bool(environment["convolution_tf32"])
    torch.set_default_dtype(getattr(torch, str(environment["default_dtype"])))


@contextmanager
def reproducible() -> Iterator[None]:
    """Inside, an accelerator's convolutions take the algorithms that give the same bits each time."""
    rounding = torch.backends.cudnn.allow_tf32  # `flags` would switch it on
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=rounding):
        yield


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether every number is finite: a truth value that an accelerator may still work on."""
    answers = [torch.isfinite(tensor).all() for tensor in tensors]
    return torch.stack(answers).all() if answers else torch.tensor(True)


@torch.no_grad()
def correct_answers(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """How many samples the model classifies rightly."""
    model.eval()
    parts = zip(torch.split(x, EVALUATION_BATCH), torch.split(y, EVALUATION_BATCH), strict=True)
    counts = [(model(inputs).argmax(1) == labels).sum() for inputs, labels in parts]
    return int(torch.stack(counts).sum()) if counts else 0


def state_of(model: nn.Module) -> State:
    """The model's parameters and buffers, detached from it."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
