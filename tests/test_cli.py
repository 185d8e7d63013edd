"""The commands, used as the README shows them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedforget import __version__, cli
from fedforget.demo import run_demo
from fedforget.runs import RunFolder
from tests.commands import TRAIN, contents, done, fedforget, refused

COMMAND = str(Path(sys.executable).with_name("fedforget"))
ORDER = ["demo", "train", "predict", "forget", "verify", "releases", "methods", "datasets"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    done("train", *TRAIN, "--out", run)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own", None)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_reads_like_a_table_of_contents(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = plain(done(*arguments).out)
    lines = [line.strip("│ ").rstrip() for line in text.splitlines() if line.startswith("│ ")]
    entries = [line for line in lines if line.split()[0] in ORDER]
    assert [line.split()[0] for line in entries] == ORDER
    # One line each, also on a narrow terminal.
    assert all(line.endswith(".") for line in entries), entries


@pytest.mark.parametrize("command", ORDER)
def test_every_command_explains_its_options(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = plain(done(command, "--help").out)
    assert "--json" in text
    # Defaults stand in the text: what is in brackets would be taken for markup, and vanish.
    assert not re.search(r" [.;](\s|$)", text)
    assert done(command, "-h").out == done(command, "--help").out


def test_defaults_in_the_help_are_those_of_the_settings() -> None:
    text = " ".join(plain(done("train", "--help").out).replace("│", " ").split())
    for name in ("silos", "rounds", "batch_size", "local_epochs", "alpha", "shards", "l2", "seed"):
        (default,) = re.findall(rf"--{name.replace('_', '-')} .*?default: ([\d.]+?)\.? ", text)[:1]
        assert float(default) == getattr(cli.TrainConfig(), name), name


def test_version() -> None:
    assert done("--version").out == f"{__version__}\n"


# --- one run, from training to proof ----------------------------------------------------------------------------------


def test_the_readmes_commands(here: Path) -> None:
    out = done("train", "--dataset", "digits", *TRAIN, "--optimizer", "sgd", "--seed", 0, "--out", "RUN").out
    assert re.fullmatch(
        r"Release 1: accuracy \d\d\.\d\d % after 2 rounds of sgd\(lr=0.2\) over 3 silos\.\n"
        r"Trained in-process: 3 silos in a round, and fewer than 4 gain little\.\n"
        r"Report: RUN/report\.html\n",
        out,
    )
    np.save("x.npy", load_digits().images[:2, None])
    out = done("predict", "RUN", "--input", "x.npy").out
    assert re.fullmatch(r"(\d  \d+\.\d\d %\n){2}", out)
    out = done("forget", "RUN", "--silo", "silo-1", "--ids", "3,17,99", "--method", "rapid", "--baseline").out
    assert out.startswith("Deleted for good: 3 at silo-1.\nRelease 2 by rapid: accuracy ")
    assert "release 1 is revoked" in out
    assert "Retrained baseline: " in out
    assert out.endswith("Prove it: fedforget verify RUN\n")
    out = done("verify", "RUN").out
    assert out.startswith(
        "Release 2 is bit for bit the model of a federation that never held the 3 deleted samples (SHA-256 "
    )
    head, first, second = (re.split(r"  +", line) for line in done("releases", "RUN").out.splitlines())
    assert head[:4] == ["release", "state", "made by", "guarantee"]
    assert (first[:3], second[:4]) == (["1", "revoked", "train"], ["2", "served", "rapid", "exact"])
    assert second[head.index("samples deleted")] == "3"
    assert (first[head.index("verified")], second[head.index("verified")]) == ("–", "yes")


def test_json_is_one_object_that_says_it_all(here: Path) -> None:
    trained = done("train", *TRAIN, "--out", "RUN", "--json").json
    assert (trained["release"], trained["method"], trained["changed"]) == (1, None, True)
    assert (trained["silos"], trained["samples"], trained["rounds"], trained["run"]) == (3, 1437, 2, "RUN")
    images = load_digits().images[:3, None]
    np.save("x.npy", images)
    predicted = done("predict", "RUN", "--input", "x.npy", "--json").json
    assert predicted["classes"] == [str(digit) for digit in range(10)]
    for prediction, row in zip(predicted["predictions"], predicted["probabilities"], strict=True):
        assert sum(row) == pytest.approx(1)
        assert prediction == {"class": str(int(np.argmax(row))), "probability": max(row)}
    forgot = done("forget", "RUN", "--silo", "silo-1", "--ids", "3,17", "--baseline", "--json").json
    assert (forgot["release"], forgot["method"], forgot["guarantee"]) == (2, "rapid", "exact")
    assert (forgot["deleted"], forgot["samples_deleted"], forgot["revoked"]) == ({"silo-1": 2}, 2, 1)
    assert (forgot["samples"], forgot["changed"], forgot["accuracy_before"]) == (1435, True, trained["accuracy"])
    a, b = forgot["accuracy_baseline"], forgot["accuracy"]
    assert forgot["sape"] == pytest.approx(abs(a - b) / (a + b))
    assert {"speedup_rounds", "speedup_time", "speedup_at_accuracy", "output_distance"} <= set(forgot)
    verified = done("verify", "RUN", "--json").json
    assert (verified["release"], verified["bit_identical"], verified["samples_deleted"]) == (2, True, 2)
    assert verified["digest"] == verified["reference_digest"] == forgot["digest"] != trained["digest"]
    listed = done("releases", "RUN", "--json").json
    assert listed["unfinished"] is False
    assert [(row["release"], row["state"], row["verified"]) for row in listed["releases"]] == [
        (1, "revoked", None),
        (2, "served", True),
    ]
    methods = done("methods", "--json").json["methods"]
    assert {row["method"]: row["guarantee"] for row in methods} == {"retrain": "exact", "rapid": "exact"}
    datasets = {row["dataset"]: row for row in done("datasets", "--json").json["datasets"]}
    assert (datasets["digits"]["there"], datasets["mnist"]["there"]) == (True, False)


def test_the_demo_proves_what_it_shows(here: Path) -> None:
    shown = done("demo", "--out", "RUN", "--json").json
    assert shown["bit_identical"] is True
    assert (shown["samples_deleted"], shown["samples_total"], shown["silos"]) == (29, 1437, 10)
    for name in ("accuracy_before", "accuracy_retrain", "accuracy_rapid", "accuracy_paper"):
        assert 0.9 < shown[name] <= 1, name
    for end in ("", "_paper"):
        a, b = shown["accuracy_retrain"], shown["accuracy" + (end or "_rapid")]
        assert shown["sape" + end] == pytest.approx(abs(a - b) / (a + b))
        assert shown["speedup_rounds" + end] > 0
        assert shown["speedup_time" + end] > 0
    assert (shown["optimizer_rapid"], shown["optimizer_paper"]) == ("muon", "diagonal-fisher(lr=0.03)")
    record = RunFolder.open(here / "RUN").release(2)
    assert (record.digest, record.deleted) == (shown["digest"], {"silo-3": 29})
    assert "RUN holds a run already" in refused(here / "RUN", "demo", "--out", "RUN")


def test_the_demo_goes_on_where_it_was_killed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class KilledError(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        raise KilledError

    # After the training; after the release, before its baseline and its proof; and at the very end.
    for target in ("fedforget.engine.Engine.delete", "fedforget.engine.Engine._measure_baseline", "WRITE"):
        with monkeypatch.context() as patched:
            patched.setattr("fedforget.demo.write_report" if target == "WRITE" else target, killed)
            with pytest.raises(KilledError):
                run_demo(here / "RUN")
    shown = done("demo", "--out", "RUN", "--json").json
    assert (shown["bit_identical"], shown["samples_deleted"]) == (True, 29)
    assert len(RunFolder.open(here / "RUN").versions()) == 2
    assert "RUN holds a run already" in refused(here / "RUN", "demo", "--out", "RUN")


def test_what_is_named_twice_is_deleted_once_and_whole(run: Path, here: Path) -> None:
    run.rename(here / "again")
    (here / "a.txt").write_text("20\n21\n")
    (here / "b.txt").write_text("21\n22\n")
    forgot = done("forget", "again", "--silo", "silo-2", "--ids", "8", "--ids", "9,10", "--json").json
    assert forgot["deleted"] == {"silo-2": 3}
    forgot = done("forget", "again", "--silo", "silo-2", "--ids-file", "a.txt", "--ids-file", "b.txt", "--json").json
    assert forgot["deleted"] == {"silo-2": 3}
    (here / "q.json").write_text("{}")
    assert "given twice" in refused(here / "again", "forget", "again", "--request", "q.json", "--request", "q.json")


def test_own_data_by_site_is_a_silo_for_each_site(here: Path) -> None:
    (here / "own.py").write_text(
        "import torch, fedforget as ff\n"
        "def data():\n"
        "    rows = {s: [(f'{s}{i}', torch.randn(4), i % 2) for i in range(20)] for s in 'st'}\n"
        "    return ff.Dataset('own', classes=('a', 'b'), sites=rows)\n"
    )
    done("train", "--dataset", "own:data", "--rounds", 1, "--out", "RUN")
    assert RunFolder.open(here / "RUN").description()["silos"] == ["s", "t"]


def test_tables_for_people(here: Path) -> None:
    rapid = next(line for line in done("methods").out.splitlines() if line.startswith("rapid"))
    assert "exact" in rapid
    (here / "mnist").mkdir()
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (here / "mnist" / f"{part}-ubyte.gz").touch()
    out = done("datasets", "--data-dir", here).out
    there = dict(re.findall(r"^(\S+) +(yes|no) ", out, re.MULTILINE))
    assert there["mnist"] == "yes"
    assert there["cifar10"] == "no"
    assert "mnist/  train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz" in out


# --- ways to ask ------------------------------------------------------------------------------------------------------


def test_a_config_file_with_options_over_it(here: Path) -> None:
    (here / "own.py").write_text(
        "from torch import nn\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self): super().__init__(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    (here / "plan.toml").write_text(
        'rounds = 9\nsilos = 4\nmodel = "own:Net"\n[optimizer]\nname = "adam"\nlr = 0.01\nbeta1 = 0.8\n'
    )
    trained = done("train", "--config", "plan.toml", "--rounds", 2, "--out", "RUN", "--json").json
    plan = RunFolder.open(here / "RUN").release(1).plan
    assert (plan.rounds, plan.model, str(plan.optimizer)) == (2, "own:Net", "adam(beta1=0.8, lr=0.01)")
    assert trained["silos"] == 4
    # The model is found again by the other commands, and by verify's fresh process.
    done("forget", "RUN", "--silo", "silo-0", "--ids", "1")
    assert done("verify", "RUN", "--json").json["bit_identical"] is True


def test_csv_sites_with_erasure(here: Path) -> None:
    (here / "sites").mkdir()
    for site, first in (("north", 0), ("south", 100)):
        rows = [f"p{number},{number % 7},{'' if number % 9 == 0 else number % 5},{number % 2}" for number in range(60)]
        (here / f"sites/{site}.csv").write_text("\n".join(["who,a,b,outcome", *rows[first % 7 :]]) + "\n")
    options = ("--dataset", "csv", "--data-dir", "sites", "--label-column", "outcome", "--id-column", "who", "--erase")
    trained = done("train", *options, "--rounds", 2, "--out", "RUN", "--json").json
    assert trained["silos"] == 2
    forgot = done("forget", "RUN", "--silo", "north", "--ids", "p3, p17", "--json").json
    assert forgot["deleted"] == {"north": 2}
    text = (here / "sites/north.csv").read_text()
    assert "p3," not in text
    assert "p17," not in text
    assert "p4," in text
    assert done("verify", "RUN", "--json").json["bit_identical"] is True
    # The folder was named relative to where it was made; the run is found from anywhere.
    os.chdir("/")
    assert done("forget", here / "RUN", "--silo", "north", "--ids", "p3", "--json").json["changed"] is False
    os.chdir(here)


def test_a_class_whose_last_sample_was_erased_stays_a_class(here: Path) -> None:
    (here / "sites").mkdir()
    for site in ("north", "south"):
        rows = [f"{number},{number % 7},{number % 2}" for number in range(40)]
        (here / f"sites/{site}.csv").write_text("\n".join(["id,x,y", *rows, *(["40,3,9"] * (site == "south"))]) + "\n")
    options = ("--dataset", "csv", "--data-dir", "sites", "--label-column", "y", "--id-column", "id", "--erase")
    train = ("train", *options, "--rounds", 2, "--out", "RUN")
    done(*train)
    done("forget", "RUN", "--silo", "south", "--ids", "40")
    assert done(*train, "--json").json["changed"] is False
    assert RunFolder.open(here / "RUN").release(2).classes == ("0", "1", "9")
    # Whoever reads the files in another way is told so, and not held to the classes of this one.
    for other in (("--missing", "6"), ("--label-threshold", 0)):
        assert "not the same: classes, origin" in refused(here / "RUN", *train, *other)


def test_a_site_that_left_keeps_its_file(here: Path) -> None:
    (here / "sites").mkdir()
    for site in ("north", "south"):
        rows = [f"{number},{number % 7},{number % 2}" for number in range(40)]
        (here / f"sites/{site}.csv").write_text("\n".join(["id,x,y", *rows]) + "\n")
    options = ("--dataset", "csv", "--data-dir", "sites", "--label-column", "y", "--id-column", "id", "--erase")
    done("train", *options, "--rounds", 1, "--out", "RUN")
    done("forget", "RUN", "--silo", "north", "--whole-silo")
    assert (here / "sites/north.csv").read_text() == "id,x,y\n"
    assert done("verify", "RUN", "--json").json["bit_identical"] is True


def test_the_one_channel_of_an_image_may_be_left_out(run: Path, here: Path) -> None:
    images = load_digits().images[:3]
    answers = []
    for values in (images[:, None], images, images[0][None], images[0]):
        np.save("x.npy", values)
        answers.append(done("predict", run, "--input", "x.npy", "--json").json["probabilities"])
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    assert len(answers[2]) == 1
    assert answers[2][0] == pytest.approx(answers[0][0])


def test_sets_of_samples(run: Path, here: Path) -> None:
    (here / "ids.txt").write_text("3\n17\n\n99\n")
    forgot = done("forget", run, "--silo", "silo-0", "--ids-file", "ids.txt", "--method", "retrain", "--json").json
    assert (forgot["deleted"], forgot["method"]) == ({"silo-0": 3}, "retrain")
    forgot = done("forget", run, "--silo", "silo-0", "--silo", "silo-1", "--fraction", 0.01, "--json").json
    assert forgot["deleted"] == {"silo-0": 14, "silo-1": 14}
    (here / "request.json").write_text('{"silo-1": [1, "2"], "silo-2": "all"}')
    forgot = done("forget", run, "--request", "request.json", "--rounds", 1, "--json").json
    assert forgot["deleted"]["silo-2"] == 479
    assert 1 <= forgot["deleted"]["silo-1"] <= 2
    assert forgot["rounds"] == 1
    assert refused(run, "forget", run, "--silo", "silo-2", "--ids", "9999")


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ((), "muon"),
        (("--lr", 0.01), "muon(lr=0.01)"),
        (("--optimizer", "diagonal-fisher"), "diagonal-fisher"),
        (("--optimizer", "diagonal-fisher", "--optimizer-setting", "block_size=1"), "diagonal-fisher(block_size=1)"),
        (("--optimizer-setting", "slice_size=16"), "muon(slice_size=16)"),
        (("--optimizer", "adam"), "adam"),
        (("--method", "retrain"), "sgd(lr=0.2)"),
        (("--method", "retrain", "--lr", 0.1), "sgd(lr=0.1)"),
        (("--method", "retrain", "--optimizer", "adam", "--lr", 0.01), "adam(lr=0.01)"),
    ],
)
def test_how_to_retrain(run: Path, options: tuple[object, ...], optimizer: str) -> None:
    done("forget", run, "--silo", "silo-1", "--ids", "1", "--rounds", 1, *options)
    assert str(RunFolder.open(run).release(2).plan.optimizer) == optimizer


def test_training_again(run: Path) -> None:
    outcome = done("train", *TRAIN, "--out", run)
    before = contents(run)
    assert outcome.out.startswith(f"{run} is trained already by this plan; nothing was done.\nRelease 1 is served: ")
    assert done("train", *TRAIN, "--out", run, "--json").json["changed"] is False
    assert contents(run) == before
    assert "by another plan (not the same: rounds, seed)" in refused(
        run, "train", *TRAIN, "--rounds", 3, "--seed", 1, "--out", run
    )


def test_verify_fails_where_the_model_is_another(run: Path) -> None:
    record = run / "releases/1/release.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "digest": "0" * 64}))
    outcome = fedforget("verify", run)
    assert (outcome.code, outcome.err) == (1, "")
    assert outcome.out.startswith("Release 1 is NOT the model of a second training")
    assert fedforget("verify", run, "--json").json["bit_identical"] is False


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_second_process_is_told_of_the_first(run: Path) -> None:
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (("forget", run, "--silo", "silo-1", "--ids", "1"), ("verify", run)):
            assert refused(run, *command) == f"another process is working on {run}: wait for it to end"
        # Reading is not working.
        done("releases", run)
    done("forget", run, "--silo", "silo-1", "--ids", "1")


def test_ctrl_c_is_a_pause(here: Path) -> None:
    options = ["train", "--silos", "3", "--rounds", "4000", "--model", "logistic", "--target-accuracy", "1"]
    process = subprocess.Popen([COMMAND, *options, "--out", "RUN", "--json"], stdout=-1, stderr=-1, text=True)
    try:
        deadline = time.monotonic() + 60
        while not list(here.glob("RUN/checkpoints/*.pt")) and time.monotonic() < deadline:
            time.sleep(0.02)
        # Meanwhile another process is turned away, in one line and in time.
        second = fedforget(*options, "--out", "RUN")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (second.code, second.out) == (2, "")
    assert second.err == "fedforget: another process is working on RUN: wait for it to end\n"
    assert (process.returncode, out) == (130, "")
    assert err == "fedforget: stopped; the same command goes on from here\n"
    listed = done("releases", "RUN", "--json").json
    assert listed == {"releases": [], "unfinished": True}
    assert done("releases", "RUN").out == "Training is not finished here: run the same command again.\n"
    assert "a training by another plan" in refused(here / "RUN", "train", *TRAIN, "--out", "RUN")


def test_a_stopped_training_goes_on_to_the_same_bits(here: Path) -> None:
    options = ("train", *TRAIN, "--rounds", 4)
    whole = done(*options, "--out", "whole", "--json").json
    rounds: list[int] = []

    def stop(title: str, plan: object, record: object) -> None:
        rounds.append(record.round)  # type: ignore[attr-defined]
        if len(rounds) == 2:
            raise KeyboardInterrupt

    with mock.patch.object(cli, "progress") as progress:
        progress.return_value.__enter__.return_value = stop
        progress.return_value.__exit__.return_value = False
        stopped = fedforget(*options, "--out", "RUN")
        assert (stopped.code, stopped.out) == (130, "")
        assert stopped.err == "fedforget: stopped; the same command goes on from here\n"
        resumed = done(*options, "--out", "RUN", "--json").json
    assert rounds == [1, 2, 3, 4]
    assert resumed["digest"] == whole["digest"]


def test_the_installed_command_keeps_stdout_clean(here: Path) -> None:
    ended = subprocess.run(
        [COMMAND, "train", *map(str, TRAIN), "--out", "RUN", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(ended.stdout)["release"] == 1
    assert (ended.stdout.count("\n"), ended.stderr) == (1, "")


def test_what_was_killed_at_its_very_end_is_told_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train = ("train", "--model", "logistic", "--rounds", 1, "--silos", 3, "--out", "run", "--json")
    forget = ("forget", "run", "--silo", "silo-1", "--ids", 4, "--baseline", "--json")
    for command in (train, forget):
        with monkeypatch.context() as killed:
            killed.setattr(RunFolder, "clear_pending", stop)
            assert fedforget(*command).code == 130
        assert (tmp_path / "run/pending.json").exists()
        outcome = done(*command).json
        assert outcome["release"] == (1 if command is train else 2)
        assert not (tmp_path / "run/pending.json").exists()
    assert (outcome["changed"], outcome["samples_deleted"], outcome["revoked"]) == (True, 1, 1)
    assert outcome["accuracy_baseline"] is not None


def stop(_: RunFolder) -> None:
    raise KeyboardInterrupt


def test_rows_of_a_pool_are_not_shifted_by_changes_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()
    file = tmp_path / "sites/a.csv"
    file.write_text("id,x,y\n" + "".join(f"{number},{number % 7},{number % 2}\n" for number in range(40)))
    train = ("train", "--dataset", "csv", "--data-dir", "sites", "--label-column", "y", "--rounds", 1, "--out", "run")
    even = ("--partition", "even", "--silos", 2)
    for option in (("--erase",), ("--id-column", "id")):
        assert "has no effect with partition even, but with sites" in fedforget(*train, *even, *option).err
    done(*train, *even)
    file.write_text(file.read_text() + "40,1,1\n")
    assert "41 samples now, and had 40" in fedforget("forget", "run", "--silo", "silo-0", "--ids", 3).err
