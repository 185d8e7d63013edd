"""What the settings of several optimizers are held to."""

from __future__ import annotations

from typing import Any

from fedforget.types import is_number


def check_number(name: str, value: Any) -> None:
    """Refuse what is no number."""
    if not is_number(value):
        raise ValueError(f"{name} is {value!r}: it must be a number")
