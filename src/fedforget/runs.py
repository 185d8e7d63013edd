"""A run's folder: what a federation leaves on disk, written so that no crash shows half of anything.

    RUN/run.json            format version, where the data comes from, the federation's constants
    RUN/pending.json        work that was begun and is not finished; absent otherwise
    RUN/releases/N/         release.json, weights.pt, and later baseline.json and verification.json
    RUN/checkpoints/        the coordinator's last finished round of work that is under way
    RUN/silos/NAME/         the silo's own: its key, its tombstones, its optimizer state while a run lasts
    RUN/report.html         the page for people

Only the newest release holds weights: publishing one destroys those of every older release.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fedforget.errors import FedforgetError, RunFolderError
from fedforget.federation.coordinator import Checkpoint
from fedforget.types import Fit, Plan, RoundRecord, State

FORMAT = 1
DESCRIBED = frozenset({"model", "shape", "classes", "preprocessing", "holdout", "silos", "origin"})
"""What run.json says besides its format."""
ENVIRONMENT = frozenset({"torch", "device", "threads", "matmul_precision", "convolution_tf32", "default_dtype"})
"""What a release says of the process that made it."""
BEFORE_ANY_WORK = ("lock", "run.partial")
"""What a folder may hold before it is a run's."""


def records_as_data(records: tuple[RoundRecord, ...]) -> list[dict[str, Any]]:
    """Round records as JSON data; an accuracy that does not exist is null."""
    rows = [asdict(record) for record in records]
    return [{**row, "accuracy": None if math.isnan(row["accuracy"]) else row["accuracy"]} for row in rows]


def records_from_data(rows: list[dict[str, Any]]) -> tuple[RoundRecord, ...]:
    """The round records that `records_as_data` wrote."""
    changes = [
        {
            "participants": tuple(row["participants"]),
            "accuracy": math.nan if row["accuracy"] is None else row["accuracy"],
        }
        for row in rows
    ]
    return tuple(RoundRecord(**{**row, **change}) for row, change in zip(rows, changes, strict=True))


@dataclass(frozen=True)
class ReleaseRecord:
    """What is kept of a release besides its weights: no sample, no id, no update, no optimizer state."""

    version: int
    method: str | None
    """The way to unlearn that made it; None for a release that training made."""
    source: str | None
    """The method's name in the registry, or its `package.module:class`."""
    settings: dict[str, Any]
    guarantee: str | None
    plan: Plan
    classes: tuple[str, ...]
    records: tuple[RoundRecord, ...]
    samples: dict[str, int]
    """Training samples of each silo that has any."""
    deleted: dict[str, int]
    """Samples that each silo deleted before this release and after the one before."""
    metrics: dict[str, float]
    digest: str
    environment: dict[str, Any]
    """The torch version, device, number of threads and link: bits can be compared where these are the same."""

    @property
    def trained(self) -> str:
        """How its silos were trained, and why so."""
        return str(self.environment.get("trained", "in-process: one silo after the other"))

    @property
    def link(self) -> str:
        """The name of the link over which it was made."""
        return str(self.environment.get("link", "in-process"))

    created: str

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {**vars(self), "plan": self.plan.as_dict(), "records": records_as_data(self.records)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ReleaseRecord:
        """The record that `as_dict` wrote."""
        changes = {
            "plan": Plan.from_dict(data["plan"]),
            "records": records_from_data(data["records"]),
            "classes": tuple(data["classes"]),
        }
        return ReleaseRecord(**{**data, **changes})


class RunFolder:
    """Reads and writes a run's folder; a new one appears on disk with the first work that is begun in it."""

    def __init__(self, path: Path, planned: dict[str, Any] | None = None) -> None:
        self.path = path
        self._planned = planned

    @staticmethod
    def open(path: Path) -> RunFolder:
        """The run folder at this path, which must be one."""
        folder = RunFolder(path)
        if not (path / "run.json").is_file():
            raise RunFolderError(
                f"{path} is not a run folder: it has no run.json; make one with `fedforget train --out {path}`"
            )
        found = folder.description().get("format")
        if found != FORMAT:
            raise RunFolderError(
                f"{path} was written in format {found}, this fedforget reads format {FORMAT}: use the one that made it"
            )
        lacking = sorted(DESCRIBED - set(folder.description()))
        if lacking:
            raise damaged(path / "run.json", f"it does not say {lacking[0]!r}")
        return folder

    @staticmethod
    def create_or_open(path: Path, description: dict[str, Any]) -> RunFolder:
        """The run folder at this path; an existing one must describe the same federation.

        A new one is not written before work is begun: what is refused leaves nothing behind.
        """
        folder = RunFolder(path, json.loads(json.dumps({"format": FORMAT, **description})))
        with _told(path):
            present = list(path.iterdir()) if path.exists() else []
        foreign = [entry.name for entry in present if entry.name not in BEFORE_ANY_WORK]
        if (path / "run.json").exists():
            folder._check_same()
        elif foreign:
            raise RunFolderError(f"{path} is not empty and not a run folder (it holds {min(foreign)}): choose another")
        return folder

    def _check_same(self) -> None:
        present, wanted = RunFolder.open(self.path).description(), self._planned or {}
        differing = sorted(name for name in wanted if present.get(name) != wanted[name])
        if differing:
            silos = _silos_that_differ(present["silos"], wanted["silos"])
            raise RunFolderError(
                f"{self.path} holds another federation (not the same: {', '.join(differing)}{silos}): "
                "give it the data that it was made with, or choose another folder"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process changes the run; a new folder in which no work was begun is left as it was found."""
        path = self.path / "lock"
        with _told(self.path):
            made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            if self._planned is not None:
                self.path.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        with file:
            busy = f"another process is working on {self.path}: wait for it to end"
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunFolderError(busy) from error
            # One that was removed meanwhile keeps nobody out.
            if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())):
                raise RunFolderError(busy)
            try:
                yield
            finally:
                if self._planned is not None and not (self.path / "run.json").exists():
                    self._leave(made)

    def _leave(self, made: list[Path]) -> None:
        """Remove what was only there to begin work, and the folders that were made for it, the innermost first."""
        with suppress(OSError):
            for name in BEFORE_ANY_WORK:
                (self.path / name).unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()

    def silo(self, name: str) -> Path:
        """The folder of one silo's own, which the silo makes once it has something to keep."""
        return self.path / "silos" / name

    def description(self) -> dict[str, Any]:
        """What run.json says, or will say."""
        if self._planned is not None and not (self.path / "run.json").exists():
            return self._planned
        return self._object("run.json")

    def pending(self) -> dict[str, Any] | None:
        """Work that was begun and is not finished."""
        return self._object("pending.json") if (self.path / "pending.json").exists() else None

    def set_pending(self, work: dict[str, Any]) -> None:
        """Note work durably before it is begun, or what is left of it."""
        if self._planned is not None:
            if (self.path / "run.json").exists():
                self._check_same()
            else:
                self.write_json("run.json", self._planned)
        self.write_json("pending.json", work)

    def request_key(self) -> bytes | None:
        """The key of the hashes by which requests are recognised; None before the first."""
        path = self.path / "request-key"
        with _told(self.path), whole(path):
            return bytes.fromhex(path.read_text()) if path.exists() else None

    def new_request_key(self) -> bytes:
        """Make that key; durable when it returns."""
        key = secrets.token_bytes(32)
        self.write_text("request-key", key.hex())
        return key

    def clear_pending(self) -> None:
        """The work is done: nothing of it is left but its release."""
        with _told(self.path):
            shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
            (self.path / "pending.json").unlink(missing_ok=True)

    def versions(self) -> list[int]:
        """All releases, oldest first; the last one is the one that is served."""
        names = [entry.name for entry in (self.path / "releases").glob("*") if entry.name.isdigit()]
        return sorted(int(name) for name in names)

    def releases(self) -> tuple[ReleaseRecord, ...]:
        """The records of all releases, oldest first; one that is missing among them was lost."""
        versions = self.versions()
        lost = sorted(set(range(1, max(versions, default=0))) - set(versions))
        if lost:
            raise missing(self.path / "releases" / str(lost[0]))
        return tuple(self.release(version) for version in versions)

    def release(self, version: int) -> ReleaseRecord:
        """The record of a release."""
        name = f"releases/{version}/release.json"
        with whole(self.path / name):
            record = ReleaseRecord.from_dict(self._object(name))
            parts = (record.settings, record.samples, record.deleted, record.metrics, record.environment)
            if (
                record.version != version
                or not record.records
                or len(record.classes) != record.plan.classes
                or not all(isinstance(part, dict) for part in parts)
                or not set(record.environment) >= ENVIRONMENT
            ):
                raise ValueError("its parts do not fit together")
        return record

    def weights(self, version: int) -> tuple[State, Fit | None]:
        """A release's weights and the constants of its preprocessing."""
        path = self.path / "releases" / str(version) / "weights.pt"
        if not path.exists() and version == self.versions()[-1]:
            raise missing(path)
        if not path.exists():
            raise RunFolderError(
                f"release {version} was revoked and its weights were destroyed: use the one that is served"
            )
        stored = self._load(path)
        with whole(path):
            state, fitted = dict(stored["state"]), stored["fit"]
            return state, Fit(**fitted) if fitted else None

    def publish(self, record: ReleaseRecord, state: State, fit: Fit | None) -> None:
        """Make a release appear whole, then destroy the weights of all that came before."""
        final = self.path / "releases" / str(record.version)
        partial = final.with_name(f"{record.version}.partial")
        with _told(self.path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _write(partial / "weights.pt", _packed({"state": state, "fit": vars(fit) if fit else None}))
            _write(partial / "release.json", _json(record.as_dict()))
            partial.replace(final)
            _flush_folder(final.parent)
        self.destroy_old_weights()

    def destroy_old_weights(self) -> None:
        """Only the newest release keeps its weights: older ones may hold what was erased since."""
        with _told(self.path):
            for version in self.versions()[:-1]:
                (self.path / "releases" / str(version) / "weights.pt").unlink(missing_ok=True)

    def attach(self, version: int, name: str, data: dict[str, Any]) -> None:
        """Put a document beside a release: its baseline or its verification."""
        self.write_json(f"releases/{version}/{name}.json", data)

    def attached(self, version: int, name: str) -> dict[str, Any] | None:
        """The document of that name beside a release."""
        path = f"releases/{version}/{name}.json"
        return self._object(path) if (self.path / path).exists() else None

    def baseline(self, version: int) -> tuple[RoundRecord, ...] | None:
        """The rounds of the retrained baseline beside a release, where one was run."""
        found = self.attached(version, "baseline")
        if found is None:
            return None
        with whole(self.path / f"releases/{version}/baseline.json"):
            return records_from_data(found["records"])

    def verification(self, version: int) -> dict[str, Any] | None:
        """The verdict beside a release, where it was verified."""
        found = self.attached(version, "verification")
        if found is not None:
            with whole(self.path / f"releases/{version}/verification.json"):
                return {name: found[name] for name in ("identical", "deleted", "digest", "reference_digest")}
        return None

    def load(self, run: str) -> Checkpoint | None:
        """The newest checkpoint of work that is under way."""
        path = self.path / "checkpoints" / f"{run}.pt"
        if not path.exists():
            return None
        stored = self._load(path)
        with whole(path):
            plan = Plan.from_dict(json.loads(stored["plan"]))
            records = records_from_data(json.loads(stored["records"]))
            return Checkpoint(plan, stored["state"], records, json.loads(stored["environment"]))

    def save(self, run: str, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint of the run; durable when it returns."""
        content = {
            "plan": json.dumps(checkpoint.plan.as_dict()),
            "state": checkpoint.state,
            "records": json.dumps(records_as_data(checkpoint.records)),
            "environment": json.dumps(dict(checkpoint.environment)),
        }
        with _told(self.path):
            (self.path / "checkpoints").mkdir(exist_ok=True)
            _write(self.path / "checkpoints" / f"{run}.pt", _packed(content))

    def write_json(self, name: str, data: dict[str, Any]) -> None:
        """Replace a JSON document; durable when it returns."""
        with _told(self.path):
            _write(self.path / name, _json(data))

    def write_text(self, name: str, text: str) -> None:
        """Replace a text; durable when it returns."""
        with _told(self.path):
            _write(self.path / name, text.encode())

    def _object(self, name: str) -> dict[str, Any]:
        with _told(self.path), whole(self.path / name):
            try:
                data = json.loads((self.path / name).read_text())
            except FileNotFoundError as error:
                raise missing(self.path / name) from error
        if not isinstance(data, dict):
            raise damaged(self.path / name, "it holds no JSON object")
        return data

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            return torch.load(path, weights_only=True, map_location="cpu")  # type: ignore[no-any-return]
        except Exception as error:  # torch raises whatever its reader meets: pickle, zip and file errors alike
            # Its first sentence says what is wrong; the others are advice to programmers.
            raise damaged(path, (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]) from error


def _silos_that_differ(present: list[str], wanted: list[str]) -> str:
    """Which silos are missing, and which are new, as a part of a message."""
    parts = (("missing", set(present) - set(wanted)), ("new", set(wanted) - set(present)))
    return "".join(
        f"; {what}: {', '.join(sorted(names)[:3])}{', …' if len(names) > 3 else ''}" for what, names in parts if names
    )


def _json(data: dict[str, Any]) -> bytes:
    return json.dumps(data, indent=1, allow_nan=False).encode()


def _packed(content: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> None:
    """Replace a file so that, whenever a crash comes, either the old or the new content is there."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _flush_folder(path.parent)


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """An error of the file system, told as one of the run folder."""
    try:
        yield
    except OSError as error:
        place = Path(error.filename or path)
        where = f" ({place.relative_to(path)})" if path in place.parents else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "make room" if full else "see that you may read and write there"
        raise RunFolderError(
            f"run folder {path}: {error.strerror or error}{where}: {advice}, or choose another folder"
        ) from error


@contextmanager
def whole(path: Path) -> Iterator[None]:
    """Whatever goes wrong in making sense of what a file holds is the file's damage."""
    try:
        yield
    except RunFolderError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, FedforgetError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise damaged(path, reason) from error


def missing(path: Path) -> RunFolderError:
    """The error of a file or folder that was there and is lost."""
    return RunFolderError(f"{path} is missing: restore it from a backup")


def damaged(path: Path, reason: str) -> RunFolderError:
    """The error of a file that does not hold what was written to it."""
    return RunFolderError(f"{path} is damaged: {reason}; restore it from a backup")
