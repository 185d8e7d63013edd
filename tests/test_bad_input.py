"""Bad input: one clear line on stderr that says what was wrong and where, exit code 2, and nothing changed."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedforget import runs
from fedforget.runs import RunFolder
from tests.commands import TRAIN, contents, done, fedforget, refused

OWN = """
from torch import nn

def narrow(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(7, classes))

def few_classes(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

def broken():
    raise KeyError("no weights here")

def batch_norm(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))

def three():
    return 3

number = 3
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    done("train", *TRAIN, "--out", run)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a trained run, below a current folder of its own."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, with models of the user's own in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    yield tmp_path
    sys.modules.pop("own", None)


def named(value: object) -> str | None:
    """A case's name: its options."""
    return " ".join(map(str, value))[:50] if isinstance(value, tuple) else ""


# --- deleting ---------------------------------------------------------------------------------------------------------

ONE = ("--silo", "silo-1", "--ids", "1")
DELETIONS: list[tuple[tuple[object, ...], str]] = [
    (("--silo", "silo-9", "--ids", "1"), "silo 'silo-9' is unknown: this federation has silo-0, silo-1, silo-2"),
    (("--silo", "silo-1", "--ids", "1,9999"), "silo silo-1 holds no sample with id 9999: nothing was deleted"),
    (("--silo", "silo-1", "--ids", ""), "silo silo-1: the list of sample ids is empty"),
    (("--silo", "silo-1", "--ids", " , "), "silo silo-1: the list of sample ids is empty"),
    (("--silo", "silo-1", "--ids", "1,,2"), "--ids 1,,2 has nothing between two commas"),
    (("--silo", "silo-1", "--ids-file", "nowhere.txt"), "nowhere.txt cannot be read"),
    (("--silo", "silo-1", "--ids-file", "."), ". cannot be read"),
    (("--silo", "silo-1"), "say what to delete by one of --ids, --ids-file, --fraction, --whole-silo and --request"),
    ((*ONE, "--whole-silo"), "say what to delete by one of"),
    (("--ids", "1"), "say where to delete by --silo"),
    (("--silo", "silo-0", "--silo", "silo-1", "--ids", "1"), "for several, use --request"),
    (("--silo", "silo-1", "--fraction", 0), "it must lie in (0, 1]"),
    (("--silo", "silo-1", "--fraction", "nan"), "it must lie in (0, 1]"),
    (("--silo", "silo-1", "--fraction", 0.5), "silo silo-1 holds 479 training samples: 718 cannot be deleted there"),
    (("--silo", "silo-1", "--fraction", 1e-7), "less than one sample"),
    (("--silo", "silo-1", "--fraction", "many"), "Invalid value for '--fraction'"),
    (
        ("--silo", "silo-0", "--silo", "silo-1", "--silo", "silo-2", "--whole-silo"),
        "this would delete every training sample of every silo: nothing would be left to train on",
    ),
    ((), "no sample to delete was named, and no deletion waits to be finished"),
    ((*ONE, "--request", "request.json"), "say what to delete by one of"),
    (("--silo", "silo-1", "--request", "request.json"), "--request names the silos itself: leave --silo out"),
    ((*ONE, "--method", "magic"), "method 'magic' is unknown: use retrain, rapid"),
    ((*ONE, "--optimizer", "magic"), "optimizer 'magic' is unknown: use adam, diagonal-fisher, muon, sgd"),
    ((*ONE, "--lr", -1), "lr is -1.0: it must be greater than 0"),
    ((*ONE, "--lr", "nan"), "lr is nan: it must be a finite number"),
    ((*ONE, "--optimizer-setting", "eps=inf"), "eps is inf: it must be a finite number"),
    ((*ONE, "--optimizer-setting", "speed=9"), "'speed'"),
    ((*ONE, "--optimizer-setting", "speed"), "setting 'speed' is not of the form NAME=VALUE"),
    ((*ONE, "--rounds", 0), "rounds is 0: it must be a whole number of at least 1"),
    ((*ONE, "--target-accuracy", 95), "target_accuracy is 95.0: it must lie in (0, 1]"),
    ((*ONE, "--target-accuracy", "nan"), "target_accuracy is nan: it must be a finite number"),
    ((*ONE, "--device", "abacus"), "device 'abacus' cannot be used here"),
    ((*ONE, "--device", "meta"), "device 'meta' cannot be used here"),
    (("--silo", "silo-1", "--ids", "a-1.b_2, 5 b"), "holds no sample with id '5 b', a-1.b_2: nothing was deleted"),
    ((*ONE, "--quickly"), "No such option: --quickly; see fedforget forget --help"),
]


@pytest.mark.parametrize(("options", "reason"), DELETIONS, ids=named)
def test_deletions(run: Path, options: tuple[object, ...], reason: str) -> None:
    assert reason in refused(run, "forget", run, *options)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold an object like"),
        ("{}", "no sample to delete was named"),
        ('{"silo-1": []}', "silo silo-1: the list of sample ids is empty"),
        ('{"silo-1": "some"}', "must hold an object like"),
        ('{"silo-1": 3}', "must hold an object like"),
        ('{"silo-1": [1.5]}', "must hold an object like"),
        ('{"silo-1": [true]}', "must hold an object like"),
        ('{"silo-1": [1], "silo-9": [1]}', "silo 'silo-9' is unknown"),
        ('{"silo-1": [1], "silo-2": [9999]}', "silo silo-2 holds no sample with id 9999"),
        ('{"silo-1": [1], "silo-1": [2]}', "names silo 'silo-1' twice: give each silo one list"),
    ],
)
def test_requests(run: Path, text: str, reason: str) -> None:
    Path("request.json").write_text(text)
    assert reason in refused(run, "forget", run, "--request", "request.json")


def test_an_empty_or_binary_file_of_ids(run: Path) -> None:
    Path("ids.txt").write_text("\n \n")
    assert "the list of sample ids is empty" in refused(run, "forget", run, "--silo", "silo-1", "--ids-file", "ids.txt")
    Path("ids.txt").write_bytes(b"\xff\xfe\x00")
    assert "ids.txt cannot be read" in refused(run, "forget", run, "--silo", "silo-1", "--ids-file", "ids.txt")


def test_a_byte_order_mark_is_no_part_of_an_id_or_a_request(run: Path) -> None:
    mark = b"\xef\xbb\xbf"
    Path("ids.txt").write_bytes(mark + b"9999\n")
    Path("request.json").write_bytes(mark + b'{"silo-1": [9999]}')
    for options in (("--silo", "silo-1", "--ids-file", "ids.txt"), ("--request", "request.json")):
        assert "silo silo-1 holds no sample with id 9999: nothing" in refused(run, "forget", run, *options)


def test_what_was_deleted_before_has_no_effect(run: Path) -> None:
    done("forget", run, "--silo", "silo-1", "--ids", "3,17")
    before = contents(run)
    outcome = done("forget", run, "--silo", "silo-1", "--ids", "17")
    assert outcome.out == "All of this was deleted before: release 2 stays served.\n"
    assert contents(run) == before
    assert done("forget", run, "--silo", "silo-1", "--ids", "17", "--json").json["changed"] is False


def test_a_silo_without_samples_drops_out(run: Path) -> None:
    done("forget", run, "--silo", "silo-0", "--silo", "silo-1", "--whole-silo")
    record = RunFolder.open(run).release(2)
    assert record.samples == {"silo-2": 479}
    assert {record.participants for record in record.records} == {("silo-2",)}
    assert "nothing would be left to train on" in refused(run, "forget", run, "--silo", "silo-2", "--whole-silo")


def test_a_retraining_that_diverges_keeps_the_deletion_and_what_is_served(run: Path) -> None:
    outcome = fedforget("forget", run, *ONE, "--method", "retrain", "--lr", 3e38)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "silo silo-0, round 1: training diverged" in outcome.err
    assert "the deletion is kept, and release 1 served" in outcome.err
    assert "mend the cause and forget again without naming samples" in outcome.err
    assert done("releases", run, "--json").json["unfinished"] is True
    assert done("forget", run, "--method", "retrain", "--lr", 0.1, "--json").json["deleted"] == {"silo-1": 1}


# --- training ---------------------------------------------------------------------------------------------------------

NUMBERS = "it must be a whole number of at least 1"
TRAININGS: list[tuple[tuple[object, ...], str]] = [
    (("--dataset", "nothing"), "no dataset is called 'nothing': use digits, mnist"),
    (("--dataset", "mnist"), "name the folder of the datasets with --data-dir or FEDFORGET_DATA"),
    (("--dataset", "mnist", "--data-dir", "nowhere"), "mnist/train-images-idx3-ubyte.gz, which is not in"),
    (("--dataset", "csv"), "dataset csv needs --label-column"),
    (("--dataset", "csv", "--label-column", "y"), "dataset csv needs --data-dir"),
    (("--dataset", "csv", "--label-column", "y", "--data-dir", "nowhere"), "nowhere is missing"),
    (("--dataset", "own:three"), "'own:three': it returned a int"),
    (("--dataset", "own:nothing"), "module own has no function 'nothing'"),
    (("--dataset", "nowhere:nothing"), "'nowhere' cannot be imported"),
    (("--model", "magic"), "model 'magic' is unknown: use alexnet, cnn, logistic, mlp, resnet18"),
    (("--model", "own:narrow"), "model 'own:narrow' does not take samples of shape (1, 8, 8)"),
    (("--model", "own:few_classes"), "answers two samples with shape (2, 3); it must be (2, 10)"),
    (("--model", "own:broken"), "model 'own:broken' cannot be built for samples of shape (1, 8, 8)"),
    (("--model", "own:nothing"), "model 'own:nothing' cannot be imported here"),
    (("--model", "own:number"), "model 'own:number' is not callable"),
    (("--model", "nowhere:nothing"), "model 'nowhere:nothing' cannot be imported here"),
    (("--model", "alexnet"), "model 'alexnet' cannot be built for samples of shape (1, 8, 8)"),
    (("--model", "own:batch_norm", "--optimizer", "diagonal-fisher"), "BatchNorm1d"),
    (("--optimizer", "magic"), "optimizer 'magic' is unknown: use adam, diagonal-fisher, muon, sgd"),
    (("--optimizer", "own:three"), "optimizer own:three"),
    (("--optimizer-setting", "speed=9"), "'speed'"),
    (("--optimizer-setting", "momentum=2"), "momentum is 2: it must lie in [0, 1)"),
    (("--optimizer-setting", "momentum=high"), "momentum is 'high': it must be a number"),
    (("--optimizer-setting", "lr=fast"), "lr is 'fast': it must be a number"),
    (("--optimizer", "adam", "--optimizer-setting", "beta1=[1]"), "{'beta1': [1]}: it must be a table of numbers"),
    (("--optimizer", "adam", "--optimizer-setting", "eps=true"), "eps is True: it must be a number"),
    (("--optimizer", "diagonal-fisher", "--optimizer-setting", "beta1=high"), "beta1 is 'high': it must be a number"),
    (("--optimizer", "diagonal-fisher", "--optimizer-setting", "lr=fast"), "lr is 'fast': it must be a number"),
    (("--optimizer", "diagonal-fisher", "--optimizer-setting", "block_size=1.5"), "block_size is 1.5"),
    (("--lr", -1), "lr is -1.0: it must be greater than 0"),
    (("--lr", "inf"), "lr is inf: it must be a finite number"),
    (("--lr", "fast"), "Invalid value for '--lr'"),
    (("--aggregation", "magic"), "aggregation 'magic' is unknown: use fedavg, median, trimmed-mean"),
    (("--aggregation", "trimmed-mean", "--aggregation-setting", "trim=0.9"), "trim is 0.9, it must be a number in"),
    (("--aggregation", "trimmed-mean", "--aggregation-setting", "trim=much"), "trim is 'much', it must be a number"),
    (("--aggregation-setting", "trim=0.1"), "'trim'"),
    (("--partition", "magic"), "'magic' is not one of 'even', 'dirichlet', 'shards', 'sites'"),
    (("--partition", "sites"), "digits has no sites"),
    (("--partition", "dirichlet", "--alpha", 0), "alpha is 0.0: it must be above 0"),
    (("--partition", "shards", "--shards", 0), "it must be at least 1"),
    (("--silos", 0), "0 silos: there must be at least 1"),
    (("--silos", 99999), "1437 samples cannot be split over 99999 silos"),
    (("--silos", "some"), "Invalid value for '--silos'"),
    (("--rounds", 0), f"rounds is 0: {NUMBERS}"),
    (("--batch-size", 0), f"batch_size is 0: {NUMBERS}"),
    (("--local-epochs", 0), f"local_epochs is 0: {NUMBERS}"),
    (("--silos-per-round", 0), f"silos_per_round is 0: {NUMBERS}"),
    (("--silos-per-round", 99), "silos_per_round is 99: there are 10 silos"),
    (("--share", 0), "share is 0.0: it must be a number in (0, 1]"),
    (("--share", 0.5, "--silos-per-round", 2), "silos_per_round and share say the same thing"),
    (("--l2", -1), "l2 is -1.0: it must be"),
    (("--l2", "inf"), "l2 is inf: it must be a finite number"),
    (("--target-accuracy", 95), "target_accuracy is 95.0: it must lie in (0, 1]"),
    (("--holdout", 1), "holdout is 1.0: it must lie in [0, 1)"),
    (("--holdout", 0.1), "dataset digits has a public test split: leave holdout out"),
    (("--dtype", "float64", "--autocast"), "autocast computes in bfloat16 for parameters of float32"),
    (("--dtype", "int8"), "'int8' is not one of 'float32', 'float64'"),
    (("--checkpoint-every", -1), "Invalid value for '--checkpoint-every'"),
    (("--device", "abacus"), "device 'abacus' cannot be used here"),
    (("--alpha", 0.1), "alpha has no effect with partition even, but with dirichlet: leave it out"),
    (("--shards", 3), "shards has no effect with partition even"),
    (("--erase",), "erase has no effect with dataset digits, but with csv"),
    (("--label-column", "y"), "label_column has no effect with dataset digits, but with csv or hub"),
    (("--input-column", "x"), "input_column has no effect with dataset digits"),
    (("--config", "nowhere.toml"), "nowhere.toml cannot be read: No such file or directory"),
    (("--config", "."), ". cannot be read: Is a directory"),
]


@pytest.mark.parametrize(("options", "reason"), TRAININGS, ids=named)
def test_trainings(here: Path, options: tuple[object, ...], reason: str) -> None:
    (here / "run").mkdir()
    assert reason in refused(here / "run", "train", "--rounds", 1, "--out", "run", *options)
    # What was mistyped does not stand in the way of what was meant: the folder is as it was found.
    assert list((here / "run").iterdir()) == []
    refused(here / "new", "train", "--rounds", 1, "--out", "new/run", *options)
    assert not (here / "new").exists()


def test_a_refused_training_does_not_fix_the_federation(here: Path) -> None:
    refused(here / "run", "train", "--out", "run", "--model", "magic", "--silos", 7)
    assert done("train", "--out", "run", *TRAIN, "--json").json["silos"] == 3


TABLES: list[tuple[str, str]] = [
    ("rounds = ", "bad.toml is not valid TOML"),
    ("\xff", "bad.toml is not valid TOML"),
    ("round = 3", "bad.toml: 'round' is no setting; is it rounds?"),
    ("colour = 'red'", "bad.toml: 'colour' is no setting; the settings are aggregation,"),
    ("out = 'run'", "bad.toml: 'out' is no setting"),
    ("rounds = 'many'", "bad.toml: rounds is 'many': it must be a whole number"),
    ("rounds = true", "bad.toml: rounds is True: it must be a whole number"),
    ("silos = 2.5", "silos is 2.5: it must be a whole number"),
    ("lr = 'fast'", "lr is 'fast': it must be a finite number"),
    ("[optimizer]\nlr = '0.1'", "lr is '0.1': it must be a number"),
    ("l2 = nan", "l2 is nan: it must be a finite number"),
    ("missing = 3", "missing is 3: it must be a list of texts"),
    ("erase = 'yes'", "erase is 'yes': it must be true or false"),
    ("model = 4", "model is 4: it must be a text"),
    ("optimizer = 3", "optimizer is 3: it must be a name, or a table with one"),
    ("[optimizer]\nlr = [1]", "it must be a table of numbers, texts, true and false"),
    ("[aggregation]\nname = 3", "aggregation is 3: it must be a name, or a table with one"),
    ("partition = 'magic'", "partition is 'magic': it must be even, dirichlet, shards, sites"),
    ("autocast = 1", "autocast is 1: it must be true or false"),
    ("dtype = 'int8'", "dtype is 'int8': it must be float32 or float64"),
    ("alpha = 0.1", "alpha has no effect with partition even"),
]


@pytest.mark.parametrize(("text", "reason"), TABLES)
def test_config_files(here: Path, text: str, reason: str) -> None:
    (here / "bad.toml").write_bytes(text.encode("latin-1"))
    assert reason in refused(here, "train", "--config", "bad.toml", "--out", "run")


def test_a_loss_that_is_no_number_names_silo_and_round(here: Path) -> None:
    outcome = fedforget("train", *TRAIN[:-1], 3e38, "--out", "run")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert outcome.err.startswith("fedforget: silo silo-0, round 1: training diverged")
    assert "lower the learning rate" in outcome.err
    assert RunFolder(here / "run").versions() == []
    told = "The last training failed: train again by another plan, as with a smaller --lr.\n"
    assert done("releases", "run").out == told
    # What is refused there changes nothing.
    for options in ((), ("--lr", 0.1)):
        assert "no model is released yet: train first" in refused(here / "run", "forget", "run", *ONE, *options)
    assert "lr is -1.0" in refused(here / "run", "train", *TRAIN[:-1], -1, "--out", "run")
    assert done("releases", "run").out == told
    # A better plan goes on in the same folder.
    assert done("train", *TRAIN, "--out", "run", "--json").json["release"] == 1


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.csv", "id,x,y\n1,2,0\n2,oops,1\n", "a.csv, line 3, column 'x': 'oops' is not a number"),
        ("a.csv", "id,x,y\n1,2,0\n1,3,1\n", "a.csv, line 3: id '1' was already used in line 2"),
        ("a.csv", "id,x,y\n1,2\n", "a.csv, line 2: 2 cells where the header has 3"),
        ("a.csv", "", "a.csv is empty"),
        ("a.csv", "id,x,z\n1,2,0\n", "a.csv has no column 'y': it has id, x, z"),
        ("a.txt", "id,x,y\n1,2,0\n", "holds no CSV file"),
    ],
)
def test_csv_files(here: Path, name: str, content: str, reason: str) -> None:
    (here / "sites").mkdir()
    (here / "sites" / name).write_text(content)
    options = ("--dataset", "csv", "--data-dir", "sites", "--label-column", "y", "--id-column", "id")
    assert reason in refused(here, "train", *options, "--out", "run")


def test_names_that_file_systems_write_in_different_ways(here: Path) -> None:
    (here / "sites").mkdir()
    (here / "sites/Zürich.csv").write_text("x,y\n1,0\n2,1\n")
    options = ("--dataset", "csv", "--data-dir", "sites", "--label-column", "y")
    assert "use letters a to z or A to Z, digits" in refused(here, "train", *options, "--out", "run")


def test_corrupt_data_files(here: Path) -> None:
    (here / "mnist").mkdir()
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (here / "mnist" / f"{part}-ubyte.gz").write_bytes(b"no images")
    reason = refused(here, "train", "--dataset", "mnist", "--data-dir", ".", "--out", "run")
    assert "train-images-idx3-ubyte.gz is corrupt or cut short" in reason


def test_data_that_went_away_after_training(here: Path) -> None:
    (here / "sites").mkdir()
    rows = "".join(f"{number},{number % 3},{number % 2}\n" for number in range(30))
    (here / "sites/a.csv").write_text("id,x,y\n" + rows)
    options = ("--dataset", "csv", "--data-dir", "sites", "--label-column", "y", "--id-column", "id", "--rounds", 1)
    done("train", *options, "--out", "run")
    shutil.move(here / "sites", here / "elsewhere")
    for command in (("forget", "run", "--silo", "a", "--ids", "1"), ("verify", "run")):
        assert "sites is missing" in refused(here / "run", *command)
    (here / "sites").mkdir()
    (here / "sites/b.csv").write_text("id,x,y\n" + rows)
    reason = refused(here / "run", "verify", "run")
    assert "(not the same: silos; missing: a; new: b): give it the data that it was made with, or choose" in reason


# --- predicting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros((3, 8, 9)), "shape (3, 8, 9); the model takes one sample of shape (1, 8, 8), or n of them"),
        (np.zeros((2, 3, 8, 8)), "(n, 1, 8, 8); the one channel may be left out"),
        (np.float64(3), "holds an array of shape ()"),
        (np.zeros((2, 1, 8, 9)), "holds an array of shape (2, 1, 8, 9)"),
        (np.array(["a"]), "holds <U1, not one array of numbers"),
        (np.zeros((1, 8, 8), dtype=complex), "holds complex128, not one array of numbers"),
        (np.full((1, 8, 8), np.nan), "sample 0 holds values that are missing or not finite"),
    ],
    ids=["another-shape", "channels", "a-number", "too-wide", "text", "complex", "nan"],
)
def test_arrays(run: Path, values: Any, reason: str) -> None:
    np.save("x.npy", values)
    assert reason in refused(run, "predict", run, "--input", "x.npy")
    assert reason in refused(run, "predict", run, "--input", "x.npy", "--json")


def test_files_that_are_no_arrays(run: Path) -> None:
    np.save("whole.npy", np.zeros((1, 8, 8)))
    Path("cut.npy").write_bytes(Path("whole.npy").read_bytes()[:200])
    Path("text.npy").write_text("1 2 3")
    np.savez("several.npz", a=np.zeros(3))
    np.save("objects.npy", np.array([{}], dtype=object))
    assert "nowhere.npy does not exist" in refused(run, "predict", run, "--input", "nowhere.npy")
    assert "several.npz holds several arrays" in refused(run, "predict", run, "--input", "several.npz")
    for name in ("cut.npy", "text.npy", "objects.npy", "."):
        assert f"{name} cannot be read as a .npy file" in refused(run, "predict", run, "--input", name)


# --- run folders ------------------------------------------------------------------------------------------------------

FORGET, VERIFY, RELEASES = ("forget", "run", *ONE), ("verify", "run"), ("releases", "run")
PREDICT = ("predict", "run", "--input", "x.npy")
ALL = (FORGET, VERIFY, RELEASES, PREDICT, ("train", *TRAIN, "--out", "run"))


@pytest.mark.parametrize("command", [*ALL[:4], ("demo", "--out", "run")], ids=lambda command: command[0])
def test_a_folder_that_is_no_run(here: Path, command: tuple[object, ...]) -> None:
    if command[0] != "demo":
        assert "run is not a run folder: it has no run.json" in refused(here, *command)
        assert not (here / "run").exists()
    (here / "run").mkdir()
    (here / "run/thesis.tex").write_text("years of work")
    assert "run is not" in refused(here, *command)


def test_training_into_a_folder_of_other_things(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run/thesis.tex").write_text("years of work")
    assert "it holds thesis.tex" in refused(here, "train", *TRAIN, "--out", "run")


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/run"])
def test_a_folder_that_cannot_be_written(here: Path, folder: str) -> None:
    # Root may write everywhere, but not below a file, nor into what the kernel makes up.
    (here / "file").write_text("a file")
    for command in (("train", *TRAIN), ("demo",)):
        reason = refused(here, *command, "--out", folder)
        assert f"run folder {folder}: " in reason
        assert "see that you may read and write there, or choose another folder" in reason
        assert reason.count(folder) == 1


def test_a_full_disk_is_told_with_the_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path, __: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "run/run.partial")

    monkeypatch.setattr(runs, "_write", full)
    reason = refused(here, "train", *TRAIN, "--out", "run")
    assert reason == "run folder run: No space left on device (run.partial): make room, or choose another folder"


@pytest.mark.parametrize("command", ALL, ids=lambda command: command[0])
def test_a_run_of_another_version(run: Path, command: tuple[object, ...]) -> None:
    np.save("x.npy", np.zeros((1, 8, 8)))
    changed(run / "run.json", format=99)
    assert "was written in format 99, this fedforget reads format 1" in refused(run, *command)


def test_another_federation_or_plan(run: Path) -> None:
    del run
    folder = Path("run")
    assert "by another plan (not the same: optimizer)" in refused(folder, "train", *TRAIN[:-1], 0.3, "--out", "run")
    assert "not the same: model" in refused(folder, "train", *TRAIN, "--model", "mlp", "--out", "run")
    reason = refused(folder, "train", *TRAIN, "--silos", 4, "--out", "run")
    assert "not the same: origin, silos; new: silo-3" in reason
    assert "demo" not in contents(folder)
    assert "another federation" in refused(folder, "demo", "--out", "run")


def changed(path: Path, **parts: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))


def without(path: Path, part: str) -> None:
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != part}))


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def pending(**parts: object) -> Callable[[Path], object]:
    work = {"version": 2, "attempt": 1, "plan": None, "method": "rapid", "settings": {}, "requests": [], "ids": None}
    return lambda path: path.write_text(json.dumps({**work, **parts}))


RECORD, WEIGHTS = "releases/1/release.json", "releases/1/weights.pt"
DAMAGES: list[tuple[str, Callable[[Path], object], tuple[tuple[object, ...], ...]]] = [
    ("run.json", lambda path: path.write_text("{"), ALL),
    ("run.json", lambda path: path.write_text("[]"), ALL),
    ("run.json", lambda path: path.write_bytes(b"\xff"), ALL),
    ("run.json", lambda path: without(path, "classes"), ALL),
    ("run.json", lambda path: without(path, "origin"), ALL),
    ("run.json", lambda path: changed(path, origin={"dataset": "digits"}), (FORGET, VERIFY)),
    (RECORD, lambda path: path.write_text(path.read_text()[:200]), ALL),
    (RECORD, lambda path: path.write_text("{}"), ALL),
    (RECORD, lambda path: changed(path, records=[]), ALL),
    (RECORD, lambda path: changed(path, records=3), ALL),
    (RECORD, lambda path: changed(path, plan=3), ALL),
    (RECORD, lambda path: changed(path, samples=None), ALL),
    (RECORD, lambda path: changed(path, classes=["one"]), ALL),
    (RECORD, lambda path: changed(path, environment={}), ALL),
    (RECORD, lambda path: changed(path, version=7), ALL),
    (WEIGHTS, lambda path: path.write_bytes(path.read_bytes()[:100]), (VERIFY, PREDICT)),
    (WEIGHTS, lambda path: path.write_bytes(b""), (VERIFY, PREDICT)),
    (WEIGHTS, lambda path: torch.save([1], path), (VERIFY, PREDICT)),
    (WEIGHTS, lambda path: torch.save({"state": 3, "fit": None}, path), (VERIFY, PREDICT)),
    ("pending.json", lambda path: path.write_text("{"), (FORGET, VERIFY, RELEASES)),
    ("pending.json", lambda path: path.write_text("{}"), (FORGET, VERIFY)),
    ("pending.json", pending(requests=3), (FORGET, VERIFY)),
    ("pending.json", pending(method=None), (FORGET, VERIFY)),
    ("pending.json", pending(plan={"rounds": 2}), (FORGET, VERIFY)),
    ("pending.json", pending(ids={"silo-9": [1]}), (FORGET, VERIFY)),
    ("pending.json", pending(unheard_of=1), (FORGET, VERIFY)),
    ("releases/1/verification.json", lambda path: path.write_text("{}"), (RELEASES,)),
    ("releases/1/baseline.json", lambda path: path.write_text("{}"), (VERIFY, PREDICT)),
]


@pytest.mark.parametrize(("name", "damage", "commands"), DAMAGES)
def test_damaged_files_are_named(
    run: Path, name: str, damage: Callable[[Path], object], commands: tuple[tuple[object, ...], ...]
) -> None:
    np.save("x.npy", np.zeros((1, 8, 8)))
    damage(run / name)
    for command in commands:
        reason = refused(run, *command)
        assert f"{name} is damaged: " in reason, command
        assert "restore it from a backup" in reason, command


def test_a_torn_archive_is_told_in_one_sentence(run: Path) -> None:
    np.save("x.npy", np.zeros((1, 8, 8)))
    path = run / WEIGHTS
    path.write_bytes(path.read_bytes()[:-50])
    reason = refused(run, *PREDICT)
    assert reason.count(". ") == 0
    assert reason.startswith(f"run/{WEIGHTS} is damaged: ")


@pytest.mark.parametrize("lost", ["releases/1", "releases/1/release.json", "releases/2", "releases"])
def test_lost_releases(run: Path, lost: str) -> None:
    np.save("x.npy", np.zeros((1, 8, 8)))
    done(*FORGET)
    path = run / lost
    path.unlink() if path.suffix else shutil.rmtree(path)
    wanted = f"run/{lost} is missing: " if lost.startswith("releases/1") else "run/releases has lost something: "
    for command in (FORGET, ("forget", "run", "--silo", "silo-0", "--ids", "1"), VERIFY, ALL[-1]):
        reason = refused(run, *command)
        assert wanted in reason, command
        assert reason.endswith("restore it from a backup"), command
    if lost.startswith("releases/1"):
        assert wanted in refused(run, *RELEASES)
        # What is served is whole.
        done(*PREDICT)
    else:
        # What is left holds samples that were deleted since: it is neither served, nor listed as if it were.
        for command in (PREDICT, RELEASES):
            assert "has lost something: restore it" in refused(run, *command)


def test_a_revoked_release_is_not_served_again(run: Path, tmp_path: Path) -> None:
    np.save("x.npy", np.zeros((1, 8, 8)))
    shutil.copy(run / "releases/1/weights.pt", tmp_path / "kept.pt")
    done(*FORGET)
    shutil.rmtree(run / "releases/2")
    shutil.copy(tmp_path / "kept.pt", run / "releases/1/weights.pt")
    assert "has lost something" in refused(run, *PREDICT)


def test_unfinished_work_by_a_method_that_is_not_there(run: Path) -> None:
    pending(method="magic")(run / "pending.json")
    assert "method 'magic' cannot be imported here" in refused(run, *VERIFY)
    pending(settings={"speed": 9})(run / "pending.json")
    assert "method 'rapid' cannot be made of the settings that are noted for it" in refused(run, *VERIFY)


@pytest.mark.parametrize(
    "damage",
    [flipped, lambda path: torch.save({"state": {"a": torch.zeros(3)}, "fit": None}, path)],
    ids=["one-bit", "another-model"],
)
def test_weights_that_are_not_those_that_were_released(run: Path, damage: Callable[[Path], None]) -> None:
    np.save("x.npy", np.zeros((1, 8, 8)))
    damage(run / WEIGHTS)
    assert "weights.pt does not hold the weights that were released" in refused(run, *PREDICT)
    assert fedforget(*VERIFY).code == 1
    # The holder's right does not wait for the operator's backup.
    assert done(*FORGET, "--json").json["deleted"] == {"silo-1": 1}
    assert done(*VERIFY, "--json").json["bit_identical"] is True


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b""), Path.unlink], ids=["empty", "missing"])
def test_a_deletion_does_not_wait_for_the_weights_that_it_replaces(run: Path, damage: Callable[[Path], object]) -> None:
    damage(run / WEIGHTS)
    assert "restore it from a backup" in refused(run, *VERIFY)
    assert done(*FORGET, "--json").json["deleted"] == {"silo-1": 1}


@pytest.mark.parametrize(
    ("name", "content"), [("tombstones.sqlite", b"no database" * 100), ("key", b"short"), ("key", None)]
)
def test_damaged_tombstones(run: Path, name: str, content: bytes | None) -> None:
    done(*FORGET)
    path = run / "silos/silo-1" / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    for command in (("forget", run, "--silo", "silo-0", "--ids", "1"), VERIFY):
        assert f"silos/silo-1/{name}" in refused(run, *command)


# --- usage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("train",), "Missing option '--out'; see fedforget train --help"),
        (("predict", "run"), "Missing option '--input'; see fedforget predict --help"),
        (("predict",), "Missing argument 'RUN'; see fedforget predict --help"),
        (("verify",), "Missing argument 'RUN'; see fedforget verify --help"),
        (("forge", "run"), "No such command 'forge'"),
        (("--fast",), "No such option: --fast; see fedforget --help"),
        (("methods", "rapid"), "Got unexpected extra argument"),
        (("verify", "run", "--device", "abacus"), "device 'abacus' cannot be used here"),
    ],
)
def test_usage(run: Path, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in refused(run, *arguments)


def test_the_installed_command_says_the_same(run: Path) -> None:
    command = [str(Path(sys.executable).with_name("fedforget")), "forget", "run", "--silo", "silo-9", "--ids", "1"]
    before = contents(run)
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    wanted = "fedforget: silo 'silo-9' is unknown: this federation has silo-0, silo-1, silo-2\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", wanted)
    assert contents(run) == before
