"""The commands as a user types them, in this process: what they print, how they end, and what they change on disk."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fedforget import cli

TRAIN = ("--silos", 3, "--rounds", 2, "--model", "logistic", "--lr", 0.2)
"""A small training of digits; with `--out RUN` it is the one that made the run of the `run` fixtures."""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        assert self.out.count("\n") == 1, self.out
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def fedforget(*arguments: object) -> Outcome:
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["fedforget", *map(str, arguments)]),
        mock.patch.object(sys, "path", list(sys.path)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as end:
            return Outcome(int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("main always exits")


def done(*arguments: object) -> Outcome:
    """Run a command that must succeed, and say nothing on stderr."""
    outcome = fedforget(*arguments)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    return outcome


def contents(folder: Path) -> dict[str, str]:
    """Every file of a folder with its digest, and every folder; the lock may come and go."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
        if path.name != "lock"
    }


def refused(folder: Path, *arguments: object) -> str:
    """Run a command that must be refused: one line on stderr, exit code 2, and nothing changed in the folder."""
    before = contents(folder)
    outcome = fedforget(*arguments)
    assert (outcome.code, outcome.out) == (2, ""), outcome
    assert outcome.err.startswith("fedforget: "), outcome.err
    assert outcome.err.endswith("\n"), outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    assert contents(folder) == before
    return outcome.err.removeprefix("fedforget: ").strip()
