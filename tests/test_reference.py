"""The fresh process of `verify`: what it makes goes to who asked for it, and is left nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedforget as ff
from fedforget import reference
from tests import small


class AskedError(Exception):
    pass


def job_of(federation: ff.Federation, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], bytes, dict[str, str]]:
    asked: list[Any] = []

    def run(command: list[str], **options: Any) -> None:
        asked.append((command, options["input"], options["env"]))
        raise AskedError

    with monkeypatch.context() as patched:
        patched.setattr(reference.subprocess, "run", run)
        with pytest.raises(AskedError):
            federation.verify()
    ((command, job, environment),) = asked
    return command, job, environment


def test_one_whose_asker_is_gone_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small.federation(small.sources([9, 9]))
    federation.train(ff.Plan(rounds=2, batch_size=4))
    command, job, environment = job_of(federation, monkeypatch)
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        command, input=job, env={**environment, "TMPDIR": str(tmp_path)}, stdout=writing, stderr=-1, check=False
    )
    os.close(writing)
    assert ended.returncode != 0
    assert b"BrokenPipe" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_a_model_prints_is_no_part_of_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talkative.py").write_text(
        "import torch\n"
        "def model(shape, classes):\n"
        "    print('hello from the model', flush=True)\n"
        "    return torch.nn.Linear(shape[0], classes)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    federation = small.federation(small.sources([9, 9]), model="talkative:model")
    assert federation.train(ff.Plan(rounds=1)).verify()
    sys.modules.pop("talkative")
