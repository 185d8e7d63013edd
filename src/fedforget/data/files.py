"""Reading files that must be there, and replacing files so that a crash leaves the old one or the new one."""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fedforget.errors import DataError

WHERE = "name the folder of the datasets with --data-dir or FEDFORGET_DATA"


def needed(path: Path) -> Path:
    """The path, once it is known to exist."""
    if not path.exists():
        raise DataError(f"{path} is missing: {WHERE}")
    return path


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: without it a crash can undo the creation or renaming of a file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder, durably, with those above it."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def replace_file(path: Path, parts: Iterable[bytes], mode: int) -> None:
    """Put a file with these parts in the place of `path`, durably and at once; if a part raises, nothing changes."""
    # What a crash left behind may hold rows that have been deleted since.
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        stale.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".new")
    new = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
