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
