"""A silo's optimizer state: kept between the rounds of one run, never between runs.

The last two rounds are kept, so that a coordinator that lost a round and asks for it again gets the same bits.
"""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch

OptimizerState = dict[str, Any]
KEPT_ROUNDS = 2


class LocalState:
    """Optimizer states by (run, round), in memory and, where asked for, durably in the silo's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[tuple[str, int], OptimizerState] = {}

    def before(self, run: str, round_number: int) -> OptimizerState | None:
        """A copy of the newest state of the run that is older than the round; None in a run's first."""
        rounds = {kept for of_run, kept in self._states if of_run == run} | set(self._stored(run))
        older = [kept for kept in rounds if kept < round_number]
        if not older:
            return None
        newest = max(older)
        if (run, newest) in self._states:
            # Optimizers update their state in place; the copy keeps the original for a second try.
            return copy.deepcopy(self._states[run, newest])
        return torch.load(self._path(run, newest), weights_only=True)  # type: ignore[no-any-return]

    def keep(self, run: str, round_number: int, state: OptimizerState, *, durable: bool) -> None:
        """Keep the state after a round; the caller gives it away."""
        self._states[run, round_number] = state
        for key in sorted(key for key in self._states if key[0] == run)[:-KEPT_ROUNDS]:
            del self._states[key]
        if durable:
            path = self._path(run, round_number)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            for stored in sorted(self._stored(run))[:-KEPT_ROUNDS]:
                self._path(run, stored).unlink()

    def wipe(self) -> None:
        """Forget every run."""
        self._states.clear()
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def _path(self, run: str, round_number: int) -> Path:
        return self._folder / run / f"{round_number}.pt"

    def _stored(self, run: str) -> list[int]:
        return [int(path.stem) for path in (self._folder / run).glob("*.pt")]
