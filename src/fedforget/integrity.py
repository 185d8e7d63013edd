"""What a run's folder must not have lost: tombstones, with which deleted samples would come back, and releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedforget.data.tombstones import Tombstones
from fedforget.errors import RunFolderError
from fedforget.runs import ReleaseRecord, RunFolder, missing, whole
from fedforget.work import Work


def check_nothing_lost(folder: RunFolder, silos: Sequence[str]) -> None:
    """Refuse to work where something is lost; the caller holds the folder's lock."""
    counts = {name: Tombstones(folder.silo(name)).count() for name in silos}
    records = folder.releases()
    for name, count in counts.items():
        accounted = accounted_for(records, name)
        if count < accounted:
            raise RunFolderError(
                f"silo {name} has lost tombstones ({count} are left of {accounted}), so that deleted samples would "
                f"come back: restore {folder.silo(name)} from a backup"
            )
    check_releases(folder, silos)


def check_releases(folder: RunFolder, silos: Sequence[str]) -> None:
    """Refuse to serve where the newest releases are lost: what is left then holds samples that were deleted since.

    Another process may be deleting meanwhile, so what it writes first is read first.
    """
    counts = {name: Tombstones(folder.silo(name)).count() for name in silos}
    pending = folder.pending()
    # An older one that is lost stands in nobody's way, as long as the numbers agree.
    present = [number for number in folder.versions() if (folder.path / f"releases/{number}/release.json").exists()]
    records = [folder.release(number) for number in present]
    newest = max(present, default=0)
    under_way: Mapping[str, int] = {}
    if pending is not None:
        with whole(folder.path / "pending.json"):
            work = Work.from_dict(pending)
            if work.version > newest + 1:
                raise missing(folder.path / "releases" / str(newest + 1))
            # Of a deletion that is not finished, some tombstones may be there, and some not yet.
            if work.version > newest:
                under_way = {name: int(count) for name, count in work.deleted.items()}
    for name, count in counts.items():
        accounted = accounted_for(records, name)
        if count > accounted + under_way.get(name, 0):
            raise RunFolderError(
                f"silo {name} has {count} tombstones, the releases account for {accounted} deletions: "
                f"{folder.path / 'releases'} has lost something: restore it from a backup"
            )


def accounted_for(records: Sequence[ReleaseRecord], silo: str) -> int:
    """How many samples of a silo were deleted for these releases."""
    return sum(record.deleted.get(silo, 0) for record in records)
