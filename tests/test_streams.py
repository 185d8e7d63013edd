"""Output that cannot be written, or not in this encoding: one line or silence, never a traceback, never verify's 1."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from fedforget import cli
from tests.commands import TRAIN, contents, done, fedforget

COMMAND = str(Path(sys.executable).with_name("fedforget"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    done("train", *TRAIN, "--out", run)
    return run


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("arguments", ["releases {run}", "releases {run} --json", "--help"])
def test_a_full_disk_is_one_line(run: Path, arguments: str) -> None:
    ended = shell(f"{COMMAND} {arguments.format(run=run)} > /dev/full")
    wanted = "fedforget: standard output cannot be written: No space left on device; what was done before is kept\n"
    assert (ended.returncode, ended.stderr) == (2, wanted)


def test_a_reader_that_is_gone_is_one_line(run: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([COMMAND, "releases", run], stdout=writing, stderr=-1, text=True, check=False)
    os.close(writing)
    wanted = "fedforget: standard output cannot be written: Broken pipe; what was done before is kept\n"
    assert (ended.returncode, ended.stderr) == (2, wanted)


def test_a_closed_output_is_silence(run: Path) -> None:
    ended = shell(f"{COMMAND} releases {run} >&-")
    assert (ended.returncode, ended.stderr) == (0, "")
    # With nobody to tell, the exit code still says what was wrong, and nothing is done.
    before = contents(run)
    assert shell(f"{COMMAND} forget {run} --silo nowhere --ids 1 >&- 2>&-").returncode == 2
    assert shell(f"{COMMAND} forget {run} --silo nowhere --ids 1 2>/dev/full").returncode in (2, 120)
    assert contents(run) == before


def test_text_that_the_encoding_lacks_is_replaced(run: Path) -> None:
    ended = shell(f"{COMMAND} releases {run}; {COMMAND} verify nö-run", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert "  ?  " in ended.stdout, "the dash of what is not verified"
    assert ended.stderr.startswith("fedforget: n")
    assert ended.stderr.count("\n") == 1


def test_an_error_that_nobody_foresaw_is_not_verifys_word(run: Path) -> None:
    with mock.patch.object(cli.Federation, "verify", side_effect=ZeroDivisionError("unforeseen")):
        outcome = fedforget("verify", run)
    assert (outcome.code, outcome.out) == (70, "")
    assert outcome.err.startswith("Traceback")
    assert outcome.err.endswith("ZeroDivisionError: unforeseen\n")


def test_the_package_is_a_command_too() -> None:
    ended = subprocess.run([sys.executable, "-m", "fedforget", "methods"], capture_output=True, text=True, check=True)
    assert ended.stdout == done("methods").out


def test_the_streams_are_as_before_afterwards() -> None:
    out = io.StringIO()
    with mock.patch.object(sys, "stdout", out):
        with cli.guarded_streams():
            sys.stdout.write("told")
            assert sys.stdout is not out
        assert sys.stdout is out
    assert out.getvalue() == "told"
