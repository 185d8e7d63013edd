"""Tombstones: a silo's durable memory of what was deleted, which holds no plain id.

A deleted sample's id is kept as HMAC-SHA-256 under a key that never leaves the silo's folder, so that the file tells
nobody who was deleted, and a sample that a source still holds, or holds again, is recognised.
"""

from __future__ import annotations

import hmac
import secrets
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Literal, final

from fedforget.data.files import make_folder, replace_file, sync_folder
from fedforget.errors import DeletionError, RunFolderError
from fedforget.types import SampleId

DATABASE = "tombstones.sqlite"
KEY = "key"
_KEY_BYTES = 32
_TABLES = (
    "CREATE TABLE tombstones (hash BLOB PRIMARY KEY) WITHOUT ROWID",
    "CREATE TABLE key_proof (hash BLOB NOT NULL)",
)
_SECONDS_TO_WAIT = 30.0
_QUERY_SIZE = 500


@final
@dataclass(frozen=True)
class Tombstones:
    """The tombstones in a silo's folder. Every call opens and closes the database: nothing is held in between."""

    folder: Path

    def add(self, ids: Collection[SampleId]) -> int:
        """Keep these ids' tombstones, all or none; durable when it returns. How many were new."""
        _check(ids)
        if not ids:
            return 0
        with self._reported():
            self._exists()
            make_folder(self.folder)
            with self._open("rwc") as connection:
                self._create_tables(connection)
                connection.execute("BEGIN IMMEDIATE")
                key = self._key(connection) or self._new_key()
                # The proof tells, without telling the key, whether a key belongs to these tombstones.
                connection.execute(
                    "INSERT INTO key_proof SELECT ? WHERE NOT EXISTS (SELECT 1 FROM key_proof)", (_proof(key),)
                )
                hashes = [(_hash(key, sample_id),) for sample_id in ids]
                new = connection.executemany("INSERT OR IGNORE INTO tombstones VALUES (?)", hashes).rowcount
                connection.execute("COMMIT")
        return new

    def contains(self, sample_id: SampleId) -> bool:
        """Whether this id has a tombstone."""
        return bool(self.held([sample_id]))

    def held(self, ids: Collection[SampleId]) -> set[SampleId]:
        """Which of these ids have a tombstone."""
        _check(ids)
        with self._reported():
            if not self._exists():
                return set()
            with self._open() as connection:
                connection.execute("BEGIN")
                key = self._key(connection)
                if key is None:
                    return set()
                by_hash: dict[bytes, list[SampleId]] = {}
                for sample_id in ids:
                    by_hash.setdefault(_hash(key, sample_id), []).append(sample_id)
                wanted = iter(by_hash)
                found: set[SampleId] = set()
                while part := list(islice(wanted, _QUERY_SIZE)):
                    query = f"SELECT hash FROM tombstones WHERE hash IN ({', '.join('?' * len(part))})"
                    for (value,) in connection.execute(query, part):
                        found.update(by_hash[value])
                return found

    def count(self) -> int:
        """How many tombstones there are."""
        with self._reported():
            if not self._exists():
                return 0
            with self._open() as connection:
                connection.execute("BEGIN")
                if self._key(connection) is None:
                    return 0
                return int(connection.execute("SELECT count(*) FROM tombstones").fetchone()[0])

    @property
    def _database(self) -> Path:
        return self.folder / DATABASE

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise RunFolderError(f"{self._database}: tombstones cannot be read or kept: {error}") from error

    def _exists(self) -> bool:
        if self._database.exists():
            return True
        if (self.folder / KEY).exists():
            raise RunFolderError(
                f"{self._database} is missing while its key is there: restore it, "
                "else deleted samples could come back unseen"
            )
        return False

    def _create_tables(self, connection: sqlite3.Connection) -> None:
        """Create the tables in a transaction of their own, before the key: a key without them means a loss."""
        connection.execute("BEGIN IMMEDIATE")
        self._key(connection)
        if not _has_tables(connection):
            for statement in _TABLES:
                connection.execute(statement)
        connection.execute("COMMIT")
        sync_folder(self.folder)

    @contextmanager
    def _open(self, mode: Literal["rw", "rwc"] = "rw") -> Iterator[sqlite3.Connection]:
        # "rw" for reading too: after a crash SQLite must be able to roll an unfinished transaction back.
        address = f"{self._database.absolute().as_uri()}?mode={mode}"
        with closing(sqlite3.connect(address, uri=True, timeout=_SECONDS_TO_WAIT, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("PRAGMA secure_delete = ON")
            # A damaged tree can answer "not there" without an error: then a deleted sample would come back.
            (health,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if health != "ok":
                raise RunFolderError(
                    f"{self._database} is damaged ({' '.join(health.split())}): restore it from a backup"
                )
            yield connection

    def _key(self, connection: sqlite3.Connection) -> bytes | None:
        """The key that the tombstones were made with; None before the first one."""
        path = self.folder / KEY
        tables = _has_tables(connection)
        proof = connection.execute("SELECT hash FROM key_proof").fetchone() if tables else None
        # Read last: another process's first `add` makes tables, key and tombstones in this order.
        key = path.read_bytes() if path.exists() else None
        if key is not None and len(key) != _KEY_BYTES:
            raise RunFolderError(f"{path} has {len(key)} bytes, not {_KEY_BYTES}: restore the key from a backup")
        if key is not None and not tables:
            raise RunFolderError(f"{self._database} is empty while its key is there: restore it from a backup")
        if proof is None:
            return key  # with tables, after a crash between writing the key and the first commit: used as if new
        if key is None:
            raise RunFolderError(
                f"{path} is missing while there are tombstones: restore it, else deleted samples could come back unseen"
            )
        if not hmac.compare_digest(proof[0], _proof(key)):
            raise RunFolderError(
                f"{path} is not the key of these tombstones: restore the right one, "
                "else deleted samples could come back unseen"
            )
        return key

    def _new_key(self) -> bytes:
        """Make the key; durable before the first tombstone, as without it tombstones recognise nothing."""
        key = secrets.token_bytes(_KEY_BYTES)
        replace_file(self.folder / KEY, [key], 0o600)
        return key


def _has_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'key_proof'").fetchone() is not None


def _hash(key: bytes, sample_id: SampleId) -> bytes:
    return hmac.digest(key, str(sample_id).encode("utf-8", "surrogatepass"), "sha256")


def _proof(key: bytes) -> bytes:
    return hmac.digest(key, b"the key of these tombstones", "sha512")


def _check(ids: Collection[SampleId]) -> None:
    """Refuse what would be hashed, but never match a sample: a tombstone that recognises nothing."""
    if isinstance(ids, str | bytes):
        raise DeletionError(f"{ids!r} is one id: give a list of ids")
    for sample_id in ids:
        if isinstance(sample_id, bool) or not isinstance(sample_id, str | Integral):
            raise DeletionError(f"sample id {sample_id!r} is neither a whole number nor a text")
