"""What the settings of several optimizers are held to."""

from __future__ import annotations

import math
from typing import Any

from fedforget.types import is_number


def check_rate(name: str, value: Any) -> None:
    """Refuse what is no learning rate."""
    check_number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}: it must be greater than 0")


def check_number(name: str, value: Any) -> None:
    """Refuse what is no number."""
    if not is_number(value):
        raise ValueError(f"{name} is {value!r}: it must be a number")


def check_sgd(lr: float, momentum: float, nesterov: bool) -> None:
    """Refuse settings with which stochastic gradient descent makes no sense."""
    check_rate("lr", lr)
    _check_share("momentum", momentum)
    if nesterov and momentum == 0:
        raise ValueError("nesterov needs a momentum greater than 0")


def check_adam(lr: float, beta1: float, beta2: float, eps: float) -> None:
    """Refuse settings with which Adam makes no sense."""
    check_rate("lr", lr)
    _check_share("beta1", beta1)
    _check_share("beta2", beta2)
    check_number("eps", eps)
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps is {eps!r}: it must be 0 or more")


def _check_share(name: str, value: float) -> None:
    check_number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value!r}: it must lie in [0, 1)")
