"""Whether this project's own GPU kernels run here."""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

logger = logging.getLogger(__name__)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, kernels are launched on this device: Triton asks for the current one, not for where its tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def run_on(device: torch.device) -> bool:
    """Whether Triton is there, which comes with torch's builds for GPUs alone, and the C compiler that it needs."""
    if device.type != "cuda":
        return False
    try:
        from fedforget.optim.update_kernel import update

        ones = [torch.ones(1, device=device) for _ in range(5)]
        update(*ones, beta1=0.9, beta2=0.999, length=0.0, damping=1.0, block_size=1)
    except Exception as error:  # whatever is missing or does not fit, there is another way
        reason = (str(error) or type(error).__name__).splitlines()[0]
        logger.warning("DiagonalFisher takes several times as long here, for Triton does not run: %s", reason)
        return False
    return True
