from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedforget.errors import RunFolderError, SiloError
from fedforget.federation.local_state import LocalState


def state(value: float) -> dict[str, Any]:
    return {"state": {0: {"moment": torch.tensor([value])}}, "param_groups": [{"lr": 0.1}]}


def value(found: dict[str, Any]) -> float:
    return float(found["state"][0]["moment"])


def rounds(local: LocalState, run: str = "run") -> list[int]:
    """The rounds up to 9 whose states are kept."""
    kept = []
    for number in range(1, 10):
        try:
            local.after(run, number)
        except SiloError:
            continue
        kept.append(number)
    return kept


@pytest.mark.parametrize("durable", [True, False])
def test_the_last_two_rounds_are_kept_for_each_run(tmp_path: Path, durable: bool) -> None:
    local = LocalState(tmp_path / "state")
    for number in (1, 2, 5, 7):
        local.keep("run", number, state(number), durable=durable)
    local.keep("other", 1, state(100), durable=durable)
    assert rounds(local) == [5, 7]
    assert rounds(local, "other") == [1]
    assert value(local.after("run", 5)) == 5
    reopened = LocalState(tmp_path / "state")
    assert rounds(reopened) == ([5, 7] if durable else [])
    assert len(list((tmp_path / "state").rglob("*.pt"))) == (3 if durable else 0)


@pytest.mark.parametrize("durable", [True, False])
def test_a_run_that_starts_over_keeps_its_new_rounds(tmp_path: Path, durable: bool) -> None:
    local = LocalState(tmp_path / "state")
    for number in (1, 2, 3, 4, 5, 1):
        local.keep("run", number, state(number), durable=durable)
    assert rounds(local) == [1]
    local.keep("run", 2, state(2), durable=durable)
    assert rounds(local) == [1, 2]
    assert rounds(LocalState(tmp_path / "state")) == ([1, 2] if durable else [])


def test_a_state_that_is_not_kept_is_an_error_and_never_a_fresh_one(tmp_path: Path) -> None:
    local = LocalState(tmp_path / "state")
    with pytest.raises(SiloError, match="after round 3"):
        local.after("run", 3)


def test_what_is_given_out_is_a_copy(tmp_path: Path) -> None:
    local = LocalState(tmp_path / "state")
    local.keep("run", 1, state(1), durable=False)
    local.after("run", 1)["state"][0]["moment"].zero_()
    assert value(local.after("run", 1)) == 1


def test_wiping_leaves_nothing(tmp_path: Path) -> None:
    local = LocalState(tmp_path / "state")
    local.wipe()
    local.keep("run", 1, state(1), durable=True)
    local.keep("other", 1, state(1), durable=False)
    local.wipe()
    assert not (tmp_path / "state").exists()
    assert rounds(local) == rounds(local, "other") == []


def test_a_damaged_file_is_told_by_its_name(tmp_path: Path) -> None:
    LocalState(tmp_path / "state").keep("run", 1, state(1), durable=True)
    (tmp_path / "state/run/1.pt").write_bytes(b"not a state")
    with pytest.raises(RunFolderError, match=r"1\.pt cannot be read"):
        LocalState(tmp_path / "state").after("run", 1)


def test_a_folder_that_cannot_be_written_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in its place")
    with pytest.raises(RunFolderError, match="state: optimizer state cannot be kept"):
        LocalState(tmp_path / "state").keep("run", 1, state(1), durable=True)
