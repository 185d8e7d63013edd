"""kill -9 at every durable write of `train` and `forget`: the next call ends as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import fedforget as ff
from fedforget.data.tombstones import Tombstones
from fedforget.types import Samples
from tests import small

PLAN = ff.Plan(rounds=3, batch_size=4, silos_per_round=2, optimizer=ff.optim.SGD(lr=0.1, momentum=0.9))
DATA = small.sources([12, 9, 10])
REQUEST = {"silo-0": [1, 2], "silo-2": [5]}
METHOD = ff.RapidRetrain(ff.Choice("diagonal-fisher", {"lr": 0.01, "eps": 1e-3}))


def opened(folder: Path, data: dict[str, Samples] = DATA, **options: int) -> ff.Federation:
    return small.federation(data, folder, **options)


def killed_at(call: int, action: Callable[[], object]) -> bool:
    """Carry the action out in a child that is killed at its n-th durable write; whether it was."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the action failed by itself"
            return False
        return os.WTERMSIG(status) == signal.SIGKILL
    calls = 0

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def call_or_die(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return call_or_die

    # Every way in which the package changes a folder goes through one of these.
    for module, name in ((os, "fsync"), (os, "replace"), (os, "rename"), (os, "unlink"), (os, "rmdir")):
        setattr(module, name, counted(getattr(module, name)))
    Tombstones.add = counted(Tombstones.add)  # type: ignore[method-assign]
    try:
        action()
    except BaseException:
        os._exit(1)
    os._exit(0)


def digests(folder: Path) -> list[str]:
    """The digests of all releases that show; each must be whole."""
    federation = opened(folder)
    assert federation.release.record.digest
    assert [path.parent.name for path in folder.glob("releases/*/weights.pt")] == [str(federation.release.version)]
    return [record.digest for record in federation.releases]


@pytest.mark.parametrize("checkpoint_every", [1, 2])
def test_training_resumes_wherever_it_is_killed(tmp_path: Path, checkpoint_every: int) -> None:
    wanted = opened(tmp_path / "whole").train(PLAN).record.digest
    call = 0
    while True:
        call += 1
        folder = tmp_path / f"killed-{call}"
        if not killed_at(call, lambda folder=folder: opened(folder, checkpoint_every=checkpoint_every).train(PLAN)):
            break
        federation = opened(folder, checkpoint_every=checkpoint_every)
        assert len(federation.releases) <= 1
        assert federation.train(PLAN).record.digest == wanted
        assert federation.folder.pending() is None
        assert not list(folder.rglob("optimizer-state"))
    assert call > 10, "there are more durable writes than this"


@pytest.mark.parametrize("finish", ["forget", "forget-nothing", "verify", "another"])
def test_forgetting_is_finished_wherever_it_is_killed(tmp_path: Path, finish: str) -> None:
    base = tmp_path / "base"
    opened(base).train(PLAN)
    remaining = small.without(DATA, {**REQUEST, **({"silo-1": [0]} if finish == "another" else {})})
    wanted = opened(tmp_path / "never", remaining).train(METHOD.plan(PLAN)).record.digest
    call, baseline = 0, finish == "forget"
    while True:
        # Each verification is a fresh process: every fourth moment is enough for the way that it takes.
        call += 4 if finish == "verify" else 1
        folder = tmp_path / f"killed-{call}"
        shutil.copytree(base, folder)
        if not killed_at(call, lambda folder=folder: opened(folder).forget(REQUEST, METHOD, baseline=baseline)):
            break
        begun = opened(folder).folder.pending() is not None or len(digests(folder)) == 2
        federation = opened(folder)
        if finish == "another":
            federation.forget({"silo-1": [0], **REQUEST}, METHOD)
        elif finish == "forget" or not begun:
            federation.forget(REQUEST, METHOD, baseline=baseline)
        elif finish == "verify":
            assert federation.verify()
        elif federation.folder.pending() is not None:
            federation.forget()
        assert digests(folder)[-1] == wanted
        assert opened(folder).folder.pending() is None
        deleted = sum(sum(record.deleted.values()) for record in opened(folder).releases)
        assert deleted == (4 if finish == "another" else 3)
        if baseline and begun:
            assert federation.release.baseline is not None
        assert not list(folder.rglob("optimizer-state"))
        shutil.rmtree(folder)
    assert call > 10, "there are more durable writes than this"


def test_a_tombstone_outlives_the_crash_and_a_restored_source(tmp_path: Path) -> None:
    opened(tmp_path / "run").train(PLAN)
    # The first durable write of a silo's deletion, and everything after it, is cut off.
    call = 1
    while Tombstones(tmp_path / "run/silos/silo-0").count() == 0:
        assert killed_at(call, lambda: opened(tmp_path / "run").forget(REQUEST, METHOD))
        call += 1
    assert not {1, 2} & set(opened(tmp_path / "run").samples("silo-0").ids)
