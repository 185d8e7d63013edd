"""Standard output and error as the commands need them: what cannot be written is one line, and no traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from fedforget.errors import FedforgetError


class Output:
    """Standard output, whose errors are the user's to mend: a full disk, a reader that is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        with self._told():
            return self._stream.write(text)

    def flush(self) -> None:
        """Have the system take all that was written."""
        with self._told():
            self._stream.flush()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What is still in its buffer would fail once more, and be told once more, at the interpreter's end.
            with _nowhere() as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            raise FedforgetError(
                f"standard output cannot be written: {error.strerror}; what was done before is kept"
            ) from error


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Inside, text that a stream's encoding lacks is replaced, and an output that cannot be written is told of."""
    # A stream that was closed is None; what is said is then said to nobody.
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    output: Any = Output(sys.stdout)
    with redirect_stdout(output):
        yield


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w")
