"""The errors that a user can cause or must act on: each message says what was wrong, where, and what to do."""

from __future__ import annotations

from typing import Any


class FedforgetError(Exception):
    """Base of every error that is the user's to mend; the commands print it as one line and exit with 2."""


class DataError(FedforgetError):
    """Data that is missing, corrupt, or not shaped as declared."""


class PlanError(FedforgetError):
    """A plan, or a part of it, that cannot be carried out."""


class DeletionError(FedforgetError):
    """A deletion that names an unknown silo or sample, names nothing, or would leave nothing to train on."""


class SiloError(FedforgetError):
    """A silo that did not carry out its task; the message names the silo."""


class DivergedError(SiloError):
    """A training run whose numbers ran away; `records` are those of its rounds so far."""

    def __init__(self, message: str, records: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.records = records


class RunFolderError(FedforgetError):
    """A run folder that cannot be read, written, or continued."""
