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

from fedforget.errors import RunFolderError, SiloError

OptimizerState = dict[str, Any]
KEPT_ROUNDS = 2


class LocalState:
    """Optimizer states by (run, round), in memory and, where asked for, durably in the silo's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[str, dict[int, OptimizerState]] = {}

    def after(self, run: str, round_number: int) -> OptimizerState:
        """A copy of the state after a round; one that is not kept is an error, for a fresh one would change bits."""
        # Optimizers update their state in place; the copy keeps the original for a second try.
        return copy.deepcopy(self.kept(run, round_number))

    def kept(self, run: str, round_number: int) -> OptimizerState:
        """The same, not copied: for who does not change it."""
        in_memory = self._states.get(run, {})
        if round_number in in_memory:
            return in_memory[round_number]
        path = self._path(run, round_number)
        if not path.exists():
            raise SiloError(f"the optimizer's state after round {round_number} is not kept any more")
        try:
            return torch.load(path, weights_only=True)  # type: ignore[no-any-return]
        except Exception as error:  # torch raises whatever its reader meets: pickle, zip and file errors alike
            raise RunFolderError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error

    def keep(self, run: str, round_number: int, state: OptimizerState, *, durable: bool) -> None:
        """Keep the state after a round; the caller gives it away.

        States of later rounds go: they are left from a try that was broken off, and will be made again.
        """
        in_memory = self._states.setdefault(run, {})
        in_memory[round_number] = state
        for other in _superseded(in_memory, round_number):
            del in_memory[other]
        if durable:
            try:
                self._write(self._path(run, round_number), state)
                for other in _superseded(self._stored(run), round_number):
                    self._path(run, other).unlink()
            except OSError as error:
                raise RunFolderError(f"{self._folder}: optimizer state cannot be kept: {error}") from error

    def wipe(self) -> None:
        """Forget every run."""
        self._states.clear()
        if self._folder.exists():
            try:
                shutil.rmtree(self._folder)
            except OSError as error:
                raise RunFolderError(f"{self._folder}: optimizer state cannot be wiped: {error}") from error

    def _path(self, run: str, round_number: int) -> Path:
        return self._folder / run / f"{round_number}.pt"

    def _stored(self, run: str) -> list[int]:
        return [int(path.stem) for path in (self._folder / run).glob("*.pt")]

    @staticmethod
    def _write(path: Path, state: OptimizerState) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def _superseded(kept: dict[int, OptimizerState] | list[int], newest: int) -> list[int]:
    """The rounds whose states are not needed once `newest` is kept."""
    earlier = sorted(number for number in kept if number < newest)
    return earlier[: len(earlier) - (KEPT_ROUNDS - 1)] + [number for number in kept if number > newest]
