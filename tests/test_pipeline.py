"""A federation in Python, from its data to a verified release."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import gc
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedforget as ff
from fedforget.data.tombstones import Tombstones
from fedforget.engine import Engine
from fedforget.federation import training
from fedforget.federation.randomness import held_out
from fedforget.types import SampleId, Samples, State
from tests import small

PLAN = ff.Plan(rounds=2, batch_size=4)
FISHER = ff.RapidRetrain(ff.Choice("diagonal-fisher", {"lr": 0.01, "eps": 1e-3}))
SIZES = [12, 9, 10]
DATA = small.sources(SIZES)


def trained(folder: Path | None = None, **changes: Any) -> ff.Federation:
    federation = small.federation(small.sources(SIZES), folder, **changes)
    federation.train(PLAN)
    return federation


def assert_unchanged(federation: ff.Federation, before: Sequence[int] = SIZES) -> None:
    """Nothing was deleted, released or begun."""
    assert [len(federation.samples(silo)) for silo in federation.silos] == list(before)
    assert len(federation.releases) == 1
    assert federation.folder.pending() is None
    assert all(Tombstones(federation.folder.silo(silo)).count() == 0 for silo in federation.silos)


# Making a federation


def pool(test: Samples | None = small.TEST) -> ff.Dataset:
    return ff.Dataset("points", ("a", "b", "c"), pool=small.samples(31, 0), test=test)


def test_our_dataset_is_split_evenly() -> None:
    federation = ff.Federation.split_evenly(pool(), silos=3, model=ff.models.logistic)
    assert federation.silos == ("silo-0", "silo-1", "silo-2")
    assert sorted(len(federation.samples(silo)) for silo in federation.silos) == [10, 10, 11]
    assert all(federation.samples(silo).ids == tuple(range(len(federation.samples(silo)))) for silo in federation.silos)
    held = sorted(tuple(x.tolist()) for silo in federation.silos for x in federation.samples(silo).x)
    assert held == sorted(tuple(x.tolist()) for x in small.samples(31, 0).x)
    release = federation.train(PLAN)
    assert release.record.classes == ("a", "b", "c")
    assert release.record.samples == {silo: len(federation.samples(silo)) for silo in federation.silos}


def test_a_torch_dataset_is_split_evenly_and_silos_set_a_share_aside() -> None:
    part = small.samples(60, 0)
    federation = ff.Federation.split_evenly(TensorDataset(part.x, part.y), silos=2, model=ff.models.mlp, seed=4)
    release = federation.train(PLAN)
    assert release.plan.holdout == 0.2
    aside = {silo: sum(held_out(silo, sample_id, 0.2) for sample_id in range(30)) for silo in federation.silos}
    assert release.record.samples == {silo: 30 - count for silo, count in aside.items()}
    correct = release.accuracy * sum(aside.values())
    assert correct == pytest.approx(round(correct))


def test_other_partitions_and_sites() -> None:
    skewed = ff.Federation.split(pool(), ff.Partition("shards", silos=3, shards=1), model="logistic")
    assert sum(len(skewed.samples(silo)) for silo in skewed.silos) == 31
    sites = ff.Dataset("sites", ("a", "b", "c"), sites={"north": DATA["silo-0"], "south": DATA["silo-1"]})
    federation = ff.Federation.split(sites, ff.Partition("sites"), model="logistic")
    assert federation.silos == ("north", "south")
    with pytest.raises(ff.DataError, match="has no sites"):
        ff.Federation.split(pool(), ff.Partition("sites"), model="logistic")


class Mine(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def built(shape: tuple[int, ...]) -> nn.Module:
    return nn.Linear(shape[0], small.CLASSES)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Mine, f"{__name__}:Mine"),
        (built, f"{__name__}:built"),
        (f"{__name__}:built", f"{__name__}:built"),
        (ff.models.logistic, "logistic"),
        ("logistic", "logistic"),
        (functools.partial(ff.models.mlp, hidden=5), "mlp(hidden=5)"),
    ],
)
def test_models_of_ones_own(model: Any, name: str) -> None:
    release = trained(model=model).release
    assert release.plan.model == name
    assert release.model()(torch.zeros(2, 4)).shape == (2, small.CLASSES)
    assert release.predict(small.TEST.x).sum(1).allclose(torch.ones(40))


def test_a_model_that_only_this_process_knows_is_verified() -> None:
    width = 6
    federation = trained(model=lambda: nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3)))
    assert federation.forget({"silo-0": [1]}, ff.Retrain()).verify()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": Mine(3)}, ff.PlanError, "give the model's class, or a function"),
        ({"model": 7}, ff.PlanError, "7 is no model"),
        ({"device": "abacus"}, ff.PlanError, "device 'abacus' cannot be used here"),
        ({"sources": {}}, ff.DataError, "at least one silo"),
        ({"sources": {"../up": DATA["silo-0"]}}, ff.DataError, "cannot name a folder"),
        ({"sources": small.sources([0, 0])}, ff.DataError, "no silo has a sample"),
    ],
)
def test_a_federation_that_cannot_be_made(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ff.Federation(**{"sources": DATA, "model": "logistic", "test": small.TEST, **changes})


@pytest.mark.parametrize("model", ["cnn", "nobody", f"{__name__}:DATA"])
def test_a_model_that_does_not_fit_the_data_is_told_before_anything_is_begun(model: str) -> None:
    federation = small.federation(DATA, model=model)
    with pytest.raises(ff.PlanError, match=model):
        federation.train(PLAN)
    assert federation.folder.pending() is None


def slow_sgd(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def first_of(states: Sequence[State], counts: Sequence[int]) -> State:
    return states[0]


def test_optimizers_and_aggregations_of_ones_own() -> None:
    federation = small.federation(DATA, optimizers={"slow": slow_sgd}, aggregations={"first": first_of})
    own = federation.train(replace(PLAN, optimizer="slow", aggregation="first"))
    named = small.federation(DATA).train(
        replace(PLAN, optimizer=f"{__name__}:slow_sgd", aggregation=f"{__name__}:first_of")
    )
    assert own.record.digest == named.record.digest
    assert federation.forget({"silo-0": [1]}, ff.Retrain()).verify()


def test_a_temporary_folder_goes_with_its_federation() -> None:
    federation = trained()
    path = federation.folder.path
    assert path.is_dir()
    del federation
    gc.collect()
    assert not path.exists()


# Training


def test_rounds_are_told_as_they_end() -> None:
    told: list[tuple[str, int]] = []
    federation = small.federation(DATA, on_round=lambda title, plan, record: told.append((title, record.round)))
    federation.train(PLAN)
    federation.forget({"silo-0": [1]}, FISHER, baseline=True)
    assert told == [(title, number) for title in ("train", "rapid", "baseline") for number in (1, 2)]


class StopError(Exception):
    pass


def stopping(after: int) -> Any:
    def on_round(title: str, plan: ff.Plan, record: Any) -> None:
        if record.round == after:
            raise StopError

    return on_round


@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("reopened", [True, False])
@pytest.mark.parametrize("optimizer", [ff.optim.SGD(lr=0.1, momentum=0.9), FISHER.optimizer], ids=str)
def test_training_that_broke_off_goes_on_to_the_same_bits(
    tmp_path: Path, optimizer: ff.Choice, reopened: bool, every: int
) -> None:
    plan = replace(PLAN, rounds=6, optimizer=optimizer, silos_per_round=2)
    wanted = small.federation(DATA).train(plan).record
    again: list[int] = []

    def on_round(title: str, plan: ff.Plan, record: Any) -> None:
        again.append(record.round)
        if again == [1, 2, 3, 4, 5]:
            raise StopError

    federation = small.federation(DATA, tmp_path / "run", on_round=on_round, checkpoint_every=every)
    with pytest.raises(StopError):
        federation.train(plan)
    assert not federation.releases
    if reopened:
        federation = small.federation(DATA, tmp_path / "run", on_round=on_round, checkpoint_every=every)
    record = federation.train(plan).record
    assert record.digest == wanted.digest
    assert [made.participants for made in record.records] == [made.participants for made in wanted.records]
    first = {0: 1, 1: 6, 3: 4}[every]
    assert again[5:] == list(range(first, 7)), "it went on after the last checkpoint"
    assert not list((tmp_path / "run").rglob("optimizer-state"))
    assert not (tmp_path / "run/checkpoints").exists()


def test_training_that_broke_off_refuses_another_plan_and_a_deletion(tmp_path: Path) -> None:
    federation = small.federation(DATA, tmp_path / "run", on_round=stopping(1))
    with pytest.raises(StopError):
        federation.train(PLAN)
    federation = small.federation(DATA, tmp_path / "run")
    with pytest.raises(ff.RunFolderError, match=r"another plan \(seed, batch_size differ\) is not finished"):
        federation.train(replace(PLAN, seed=1, batch_size=5))
    with pytest.raises(ff.RunFolderError, match="training is not finished here"):
        federation.forget({"silo-0": [1]})
    assert federation.train(PLAN).version == 1


DIVERGING = replace(PLAN, optimizer=ff.Choice("sgd", {"lr": 1e38}), rounds=3)


def test_training_that_failed_stands_in_the_way_of_nothing(tmp_path: Path) -> None:
    federation = small.federation(DATA, tmp_path / "run")
    with pytest.raises(ff.SiloError, match=r"silo silo-\d, round \d: training diverged"):
        federation.train(DIVERGING)
    wanted = small.federation(DATA).train(PLAN).record.digest
    assert federation.train(PLAN).record.digest == wanted
    with pytest.raises(ff.SiloError, match="training diverged"):
        federation.train(DIVERGING)
    with pytest.raises(ff.SiloError, match="training diverged"):
        federation.train(DIVERGING)
    assert federation.release.version == 1
    assert small.federation(DATA, tmp_path / "run").forget({"silo-0": [1]}, FISHER).version == 2
    assert federation.folder.pending() is None


def test_a_release_can_be_followed_by_another_training_also_of_another_model() -> None:
    federation = trained()
    second = federation.train(replace(PLAN, model="mlp"))
    assert second.version == 2
    assert "parameter_distance" not in second.record.metrics
    assert second.record.metrics["output_distance"] > 0
    assert federation.forget({"silo-1": [2]}, ff.Retrain()).plan.model == "mlp"


def test_a_folder_of_another_federation_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    with pytest.raises(ff.RunFolderError, match=r"holds another federation .*model, silos"):
        small.federation(small.sources([12, 9]), tmp_path / "run", model="mlp")


# Forgetting


@pytest.mark.parametrize(
    "request_",
    [
        {"silo-1": [3, 5]},
        {"silo-0": [0, 1], "silo-1": [3], "silo-2": [9]},
        {"silo-1": "all"},
        {"silo-0": list(range(12)), "silo-2": [0]},
    ],
    ids=["one", "several", "whole", "all-by-id"],
)
def test_forgetting_leaves_the_model_of_a_federation_that_never_held_them(request_: Any) -> None:
    federation = trained()
    release = federation.forget(request_, FISHER)
    gone = {silo: DATA[silo].ids if part == "all" else part for silo, part in request_.items()}
    never = small.federation(small.without(DATA, gone))
    assert release.record.digest == never.train(FISHER.plan(PLAN)).record.digest
    assert dict(release.deleted) == {silo: len(part) for silo, part in gone.items()}
    left = {silo: len(part) - len(gone.get(silo, ())) for silo, part in DATA.items()}
    assert release.record.samples == {silo: count for silo, count in left.items() if count}
    assert release.record.method == "rapid"
    assert release.record.guarantee == "exact"


def test_a_second_deletion_after_a_first_one_is_verified_with_its_baseline(tmp_path: Path) -> None:
    federation = trained(tmp_path / "run")
    federation.forget({"silo-0": [0, 1]}, FISHER)
    release = federation.forget({"silo-1": [3], "silo-0": [2]}, ff.Retrain(rounds=3), baseline=True)
    verdict = release.verify()
    assert verdict
    assert (verdict.version, verdict.deleted) == (3, 4)
    assert "never held the 4 deleted samples" in str(verdict)
    assert len(release.records) == 3
    assert release.baseline is not None
    assert len(release.baseline.records) == 2
    assert release.sape is not None
    assert release.speed_up is not None
    assert [record.deleted for record in federation.releases] == [{}, {"silo-0": 2}, {"silo-0": 1, "silo-1": 1}]


def test_verifying_a_release_that_was_revoked_is_refused_and_its_weights_are_gone(tmp_path: Path) -> None:
    federation = trained(tmp_path / "run")
    first = federation.release
    federation.forget({"silo-0": [0]}, FISHER)
    with pytest.raises(ff.RunFolderError, match="release 1 was revoked"):
        first.verify()
    assert [path.parent.name for path in (tmp_path / "run").rglob("weights.pt")] == ["2"]
    with pytest.raises(ff.RunFolderError, match="release 1 was revoked and its weights were destroyed"):
        federation.folder.weights(1)


def test_a_silo_that_gave_everything_back_drops_out() -> None:
    federation = trained()
    release = federation.forget({"silo-1": "all"}, FISHER)
    assert {record.participants for record in release.records} == {("silo-0", "silo-2")}
    assert len(federation.samples("silo-1")) == 0
    assert federation.forget({"silo-1": "all"}, FISHER).version == release.version
    assert federation.forget({"silo-0": [4]}, FISHER).version == release.version + 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "no sample to delete was named"),
        (None, "no sample to delete was named, and no deletion waits"),
        ({"silo-0": []}, "silo silo-0: the list of sample ids is empty"),
        ({"silo-9": [1]}, "silo 'silo-9' is unknown: this federation has silo-0, silo-1, silo-2"),
        ({"silo-0": [1], "silo-1": [2, 77]}, "silo silo-1 holds no sample with id 77: nothing was deleted"),
        ({"silo-0": [1.5]}, "silo silo-0: .*1.5 is neither a whole number nor a text"),
        ({"silo-0": 3}, "silo silo-0: .*give a list of sample ids"),
        ({"silo-0": "3,17"}, "give a list of sample ids, a share, or 'all', not '3,17'"),
        (dict.fromkeys(DATA, "all"), "would delete every training sample of every silo"),
        ({silo: list(part.ids) for silo, part in DATA.items()}, "would delete every training sample of every silo"),
        ({"silo-0": ff.Share(0.0)}, r"the share to delete is 0.0: it must lie in \(0, 1\]"),
        ({"silo-0": ff.Share(0.01)}, "less than one sample"),
        ({"silo-1": ff.Share(0.5)}, "silo silo-1 holds 9 training samples: 16 cannot be deleted there"),
    ],
)
def test_a_deletion_that_cannot_be_carried_out_changes_nothing(request_: Any, message: str) -> None:
    federation = trained()
    with pytest.raises(ff.DeletionError, match=message):
        federation.forget(request_, FISHER)
    assert_unchanged(federation)


def test_nothing_can_be_forgotten_before_there_is_a_release() -> None:
    federation = small.federation(DATA)
    with pytest.raises(ff.RunFolderError, match="train first"):
        federation.forget({"silo-0": [1]})
    assert len(federation.samples("silo-0")) == 12


def test_ids_of_any_library_and_kind() -> None:
    federation = trained()
    federation.forget({"silo-0": np.array([1, 2]), "silo-1": torch.tensor([3]), "silo-2": {"4", 5}}, FISHER)  # type: ignore[dict-item]
    assert dict(federation.release.deleted) == {"silo-0": 2, "silo-1": 1, "silo-2": 2}


def test_a_share_is_one_of_all_training_samples() -> None:
    federation = trained()
    release = federation.forget({"silo-2": ff.Share(0.1)}, FISHER)
    assert dict(release.deleted) == {"silo-2": 3}  # of 31


def test_forgetting_twice_has_no_effect_and_makes_no_release() -> None:
    federation = trained()
    first = federation.forget({"silo-0": [1, 2]}, FISHER)
    again = federation.forget({"silo-0": ["2", 1]}, ff.Retrain())
    assert again.version == first.version == 2
    assert len(federation.releases) == 2
    third = federation.forget({"silo-0": [2, 3]}, FISHER)
    assert dict(third.deleted) == {"silo-0": 1}


def test_deletion_covers_the_share_that_silos_set_aside() -> None:
    federation = small.federation(small.sources([40, 40]), test=None)
    federation.train(PLAN)
    aside = [sample_id for sample_id in range(40) if held_out("silo-0", sample_id, 0.2)]
    release = federation.forget({"silo-0": aside}, ff.Retrain())
    assert not set(aside) & set(federation.samples("silo-0").ids)
    assert release.record.digest == federation.releases[0].digest, "they were never trained on"
    assert dict(release.deleted) == {"silo-0": len(aside)}


def test_a_retraining_that_failed_keeps_the_deletion_and_is_finished_by_another_method(tmp_path: Path) -> None:
    federation = trained(tmp_path / "run")
    with pytest.raises(ff.SiloError, match=r"diverged.*the deletion is kept, and release 1 served"):
        federation.forget({"silo-0": [1, 2]}, ff.Retrain(ff.Choice("sgd", {"lr": 1e38}), rounds=3))
    assert not {1, 2} & set(federation.samples("silo-0").ids)
    assert federation.release.version == 1
    pending = federation.folder.pending()
    assert pending is not None
    assert pending["ids"] is None, "once acknowledged, no plain id is kept"
    with pytest.raises(ff.SiloError, match="diverged"):
        federation.forget()
    release = small.federation(DATA, tmp_path / "run").forget(method=FISHER)
    never = small.federation(small.without(DATA, {"silo-0": [1, 2]}))
    assert release.record.digest == never.train(FISHER.plan(PLAN)).record.digest
    assert dict(release.deleted) == {"silo-0": 2}
    assert federation.folder.pending() is None


def test_a_deletion_through_a_second_federation_is_seen_by_the_first(tmp_path: Path) -> None:
    first = trained(tmp_path / "run")
    second = small.federation(DATA, tmp_path / "run")
    second.forget({"silo-0": [1, 2]}, FISHER)
    assert not {1, 2} & set(first.samples("silo-0").ids)
    assert first.release.version == 2
    assert first.forget({"silo-0": [1]}, FISHER).version == 2
    release = first.forget({"silo-1": [0]}, FISHER)
    never = small.federation(small.without(DATA, {"silo-0": [1, 2], "silo-1": [0]}))
    assert release.record.digest == never.train(FISHER.plan(PLAN)).record.digest


def test_a_lock_that_was_removed_by_its_holder_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small.federation(DATA, tmp_path / "run")
    flock = fcntl.flock

    def late(file: Any, how: int) -> None:
        # Between opening and locking, the process that held it was refused, and left the folder as it had found it.
        (tmp_path / "run/lock").unlink()
        flock(file, how)

    with monkeypatch.context() as raced:
        raced.setattr(fcntl, "flock", late)
        with pytest.raises(ff.RunFolderError, match="another process is working"):
            federation.train(PLAN)
    assert federation.train(PLAN).version == 1


def test_two_at_once_are_kept_apart(tmp_path: Path) -> None:
    federation = trained(tmp_path / "run")
    with federation.folder.locked(), pytest.raises(ff.RunFolderError, match="another process is working"):
        federation.forget({"silo-0": [1]}, FISHER)
    assert_unchanged(federation)


class KilledError(Exception):
    pass


def killed_before_deleting(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    def stop(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as killed:
        killed.setattr(Engine, "delete", stop)
        with pytest.raises(KilledError):
            action()


def test_rows_that_arrive_while_a_whole_silo_waits_to_be_deleted_are_new_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = stored()
    federation = small.federation(data, tmp_path / "run")
    federation.train(PLAN)
    killed_before_deleting(monkeypatch, lambda: federation.forget({"silo-1": "all"}, FISHER))
    data["silo-1"].rows[99] = (torch.zeros(4), torch.tensor(0))
    again = small.federation(data, tmp_path / "run")
    assert dict(again.forget().deleted) == {"silo-1": 9}
    assert again.samples("silo-1").ids == (99,)
    assert again.verify()
    assert again.forget({"silo-1": [99]}).version == 3


def test_a_release_is_not_verified_while_a_deletion_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = trained()
    release = federation.release
    with pytest.raises(ff.SiloError, match="diverged"):
        federation.forget({"silo-0": [1]}, ff.Retrain(ff.Choice("sgd", {"lr": 1e38}), rounds=3))
    with pytest.raises(ff.RunFolderError, match="a deletion is not finished here"):
        release.verify()
    assert federation.forget(method=FISHER).verify()


@pytest.mark.parametrize("lost", ["1", "2"])
def test_releases_that_are_lost_while_a_deletion_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    federation = trained(tmp_path / "run")
    federation.forget({"silo-0": [1]}, FISHER)
    killed_before_deleting(monkeypatch, lambda: federation.forget({"silo-1": [1]}, FISHER))
    shutil.rmtree(tmp_path / "run/releases" / lost)
    for action in (federation.forget, federation.verify, lambda: federation.forget({"silo-2": [1]})):
        with pytest.raises(ff.RunFolderError, match=f"releases/{lost} is missing: restore it from a backup"):
            action()


# Verifying


class Stored:
    """A source whose rows can be changed and deleted where they are."""

    def __init__(self, part: Samples) -> None:
        self.rows: dict[SampleId, tuple[Tensor, Tensor]] = {sample_id: (x, y) for sample_id, x, y in part}
        self.failures = 0

    def __iter__(self) -> Iterator[tuple[SampleId, Tensor, Tensor]]:
        return iter([(sample_id, x, y) for sample_id, (x, y) in self.rows.items()])

    def delete(self, ids: Collection[SampleId]) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the archive is offline")
        for sample_id in ids:
            self.rows.pop(sample_id, None)


def stored() -> dict[str, Any]:
    return {silo: Stored(part) for silo, part in small.sources(SIZES).items()}


def test_a_source_that_can_deletes_physically(tmp_path: Path) -> None:
    data = stored()
    federation = small.federation(data, tmp_path / "run")
    federation.train(PLAN)
    release = federation.forget({"silo-0": [1, 2], "silo-2": "all"}, FISHER)
    assert set(data["silo-0"].rows) == set(range(12)) - {1, 2}
    assert not data["silo-2"].rows
    assert release.verify()
    # A restored copy stays without effect.
    again = small.federation(DATA, tmp_path / "run")
    assert again.samples("silo-2").ids == ()
    assert again.forget({"silo-0": [1]}, FISHER).version == release.version


def test_a_source_that_fails_to_delete_blocks_the_release_until_it_does() -> None:
    data = stored()
    federation = small.federation(data)
    federation.train(PLAN)
    data["silo-0"].failures = 1
    with pytest.raises(ff.DeletionError, match=r"silo silo-0: .*its source still holds it: the archive is offline"):
        federation.forget({"silo-0": [1, 2], "silo-1": [3]}, FISHER)
    assert federation.release.version == 1
    assert not {1, 2} & set(federation.samples("silo-0").ids)
    assert {1, 2} <= set(data["silo-0"].rows)
    release = federation.forget()
    assert not {1, 2} & set(data["silo-0"].rows)
    assert dict(release.deleted) == {"silo-0": 2, "silo-1": 1}
    never = small.federation(small.without(DATA, {"silo-0": [1, 2], "silo-1": [3]}))
    assert release.record.digest == never.train(FISHER.plan(PLAN)).record.digest


def test_data_that_changed_since_is_told() -> None:
    data = stored()
    federation = small.federation(data)
    federation.train(PLAN)
    kept = data["silo-1"].rows.pop(4)
    with pytest.raises(ff.DataError, match=r"the silos hold 30 training samples, release 1 was made from 31.*changed"):
        federation.verify()
    data["silo-1"].rows[4] = (kept[0] + 1, kept[1])
    assert not federation.verify()


def test_tombstones_that_the_releases_do_not_account_for_are_told() -> None:
    federation = trained()
    Tombstones(federation.folder.silo("silo-1")).add([7])
    actions = (federation.verify, federation.release.verify, lambda: federation.train(PLAN), federation.check)
    for action in (*actions, lambda: federation.forget({"silo-0": [1]})):
        with pytest.raises(
            ff.RunFolderError, match=r"silo-1 has 1 tombstones, the releases account for 0 .*releases has"
        ):
            action()
    assert len(federation.releases) == 1


@pytest.mark.parametrize(
    ("setting", "other"), [(torch.set_float32_matmul_precision, "medium"), (torch.set_default_dtype, torch.float64)]
)
def test_a_program_that_computes_in_another_way_is_verified_in_that_way(setting: Any, other: Any) -> None:
    before = (torch.get_float32_matmul_precision(), torch.get_default_dtype())
    try:
        setting(other)
        federation = trained()
        release = federation.forget({"silo-0": [1]}, FISHER)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.set_default_dtype(before[1])
    assert release.verify()


def test_a_release_of_another_environment_or_without_a_promise_is_not_verified() -> None:
    federation = trained()
    release = federation.release
    elsewhere = replace(release.record, environment={**release.record.environment, "torch": "1.0"})
    with pytest.raises(ff.FedforgetError, match=r"release 1 was made with torch 1\.0"):
        replace(release, record=elsewhere).verify()
    approximate = replace(release.record, guarantee="approximate", method="mine")
    with pytest.raises(ff.FedforgetError, match="mine, which promises no equality"):
        replace(release, record=approximate).verify()


def test_samples_of_another_shape_are_not_predicted() -> None:
    release = trained().release
    assert release.predict(small.TEST.x[0]).shape == (1, small.CLASSES)
    with pytest.raises(ff.DataError, match=r"takes samples of shape \(4,\), these have shape \(5,\)"):
        release.predict(torch.zeros(2, 5))


class Stubborn(torch.optim.SGD):
    """Trains while it is told to."""

    willing = True

    def step(self, closure: Any = None) -> None:
        if not Stubborn.willing:
            raise RuntimeError("no")
        super().step(closure)


def test_lost_tombstones_are_refused(tmp_path: Path) -> None:
    federation = small.federation(DATA, tmp_path / "run")
    federation.train(PLAN)
    federation.forget({"silo-0": [1, 2]})
    shutil.rmtree(tmp_path / "run/silos/silo-0")
    again = small.federation(DATA, tmp_path / "run")
    for action in (lambda: again.forget({"silo-1": [1]}), lambda: again.train(PLAN), again.verify):
        with pytest.raises(ff.RunFolderError, match=r"silo-0 has lost tombstones \(0 are left of 2\).*backup"):
            action()
    assert len(again.releases) == 2


def test_a_baseline_that_fails_stands_in_nothings_way(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small.federation(DATA, optimizers={"stubborn": lambda model, lr: Stubborn(model.parameters(), lr)})
    federation.train(dataclasses.replace(PLAN, optimizer=ff.Choice("stubborn", {"lr": 0.1})))
    monkeypatch.setattr(Stubborn, "willing", False)
    with pytest.raises(ff.FedforgetError, match="release 2 is served, but its baseline could not be trained"):
        federation.forget({"silo-0": [1]}, ff.RapidRetrain(), baseline=True)
    assert federation.forget({"silo-0": [2]}, ff.RapidRetrain()).version == 3
    assert federation.verify()


def test_a_baseline_can_be_measured_afterwards() -> None:
    federation = small.federation(DATA)
    federation.train(PLAN)
    assert federation.forget({"silo-0": [1]}).baseline is None
    release = federation.forget({"silo-0": [1]}, baseline=True)
    assert (release.version, release.baseline is None) == (2, False)


def test_a_checkpoint_of_other_arithmetic_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    seen: list[int] = []

    def stop(_: str, __: ff.Plan, record: Any) -> None:
        seen.append(record.round)
        if seen == [1, 2]:
            raise KeyboardInterrupt

    federation = small.federation(DATA, folder, on_round=stop)
    with pytest.raises(KeyboardInterrupt):
        federation.train(PLAN)
    here = training.environment(torch.device("cpu"))
    monkeypatch.setattr(training, "environment", lambda _: {**here, "torch": "another"})
    federation.train(PLAN)
    assert seen[:4] == [1, 2, 1, 2]


def test_verify_looks_at_what_lies_in_the_folder(tmp_path: Path) -> None:
    release = small.federation(DATA, tmp_path / "run").train(PLAN)
    path = tmp_path / "run/releases/1/weights.pt"
    stored = torch.load(path, weights_only=True)
    stored["state"]["1.bias"] += 1
    torch.save(stored, path)
    assert not release.verify()


def test_a_method_that_cannot_be_found_again_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Local(ff.Retrain):
        pass

    federation = small.federation(DATA)
    federation.train(PLAN)
    with pytest.raises(ff.PlanError, match="Local"):
        federation.forget({"silo-0": [1]}, Local())
    assert len(federation.releases) == 1


def test_a_retraining_may_choose_another_batch_size() -> None:
    federation = small.federation(DATA)
    federation.train(PLAN)
    assert federation.forget({"silo-0": [1]}, ff.Retrain(batch_size=3)).plan.batch_size == 3


# Sources and requests that are not what they seem


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((row for row in small.samples(5, 1)), "can be read only once"),
        (map(tuple, small.samples(5, 1)), "can be read only once"),
        ([(1, torch.zeros(4))], r"yields what is not \(id, x, y\)"),
        (5, "cannot be read: TypeError"),
    ],
)
def test_sources_that_cannot_be_read_again_or_at_all_are_refused(source: Any, message: str) -> None:
    with pytest.raises(ff.DataError, match=message):
        small.federation({"silo-0": source, "silo-1": small.samples(5, 2)})


def test_what_is_no_option_or_another_number_of_classes_is_refused() -> None:
    with pytest.raises(TypeError, match="'foldr' is no option of a federation: use folder, device"):
        small.federation(DATA, foldr="run")
    with pytest.raises(ff.PlanError, match="classes is 20: this federation has 3; leave it out"):
        small.federation(DATA).train(replace(PLAN, classes=20))


def test_a_request_that_comes_while_a_source_cannot_delete_is_told_that_nothing_of_it_was_done(tmp_path: Path) -> None:
    data = stored()
    federation = small.federation(data, tmp_path / "run")
    federation.train(PLAN)
    data["silo-0"].failures = 2
    with pytest.raises(ff.DeletionError, match="its source still holds it"):
        federation.forget({"silo-0": [1]}, FISHER)
    with pytest.raises(ff.SiloError, match="of the new request nothing was noted or deleted: give it again"):
        federation.forget({"silo-1": [2]}, FISHER)
    assert 2 in federation.samples("silo-1").ids
    assert dict(federation.forget({"silo-1": [2]}, FISHER).deleted) == {"silo-0": 1, "silo-1": 1}


def test_the_note_of_a_deletion_tells_no_id_to_whoever_tries_them_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = []
    for name in ("one", "two"):
        federation = trained(tmp_path / name)
        with pytest.raises(ff.SiloError, match="diverged"):
            federation.forget({"silo-0": [1]}, ff.Retrain(ff.Choice("sgd", {"lr": 1e38}), rounds=3))
        notes.append(federation.folder.pending())
        # A repeated one is recognised all the same.
        assert federation.forget({"silo-0": [1]}, FISHER).version == 2
    assert notes[0]["requests"] != notes[1]["requests"]
