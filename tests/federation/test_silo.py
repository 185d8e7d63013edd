from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedforget as ff
from fedforget.errors import DataError, DeletionError, FedforgetError, SiloError
from fedforget.federation.link import Count, Counted, Evaluate, Forget, Forgotten, Trained, Wipe
from fedforget.federation.randomness import held_out
from fedforget.federation.registry import Registry
from fedforget.federation.silo import Silo, plain_id, read_source
from fedforget.types import SampleId, Samples
from tests import small
from tests.federation.parts import PLAN, REGISTRY, equal, fresh, silo, train_task


class Rows:
    """A source that yields plain rows and deletes them where they are."""

    def __init__(self, part: Samples, fails: bool = False) -> None:
        self.rows = {sample_id: (x, y) for sample_id, x, y in part}
        self.fails = fails
        self.asked: list[set[SampleId]] = []

    def __iter__(self) -> Iterator[tuple[SampleId, Any, Any]]:
        return iter([(sample_id, x, y) for sample_id, (x, y) in self.rows.items()])

    def delete(self, ids: Collection[SampleId]) -> None:
        self.asked.append(set(ids))
        if self.fails:
            raise OSError("the disk is read-only")
        for sample_id in ids:
            self.rows.pop(sample_id, None)


def forget(of: Silo, ids: list[SampleId] | None, *, commit: bool = True, plan: ff.Plan = PLAN) -> Forgotten:
    reply = of.carry_out(Forget(plan, None if ids is None else tuple(ids), commit))
    assert isinstance(reply, Forgotten)
    return reply


def trained(of: Silo, *arguments: Any, **changes: Any) -> Trained:
    reply = of.carry_out(train_task(*arguments, **changes))
    assert isinstance(reply, Trained)
    return reply


# Reading a source


def test_rows_of_any_kind_become_samples_in_the_order_of_their_ids() -> None:
    rows: list[tuple[Any, Any, Any]] = [
        ("b", [1.0, 2.0], 1),
        (np.int64(10), np.array([3.0, 4.0]), np.int64(0)),
        (9, torch.tensor([5.0, 6.0]), torch.tensor(2)),
    ]
    found = read_source(rows)  # type: ignore[arg-type]  # a list yields (id, x, y) like any source
    assert found.ids == (9, 10, "b")
    assert [type(sample_id) for sample_id in found.ids] == [int, int, str]
    assert found.y.tolist() == [2, 0, 1]
    assert found.x.tolist() == [[5.0, 6.0], [3.0, 4.0], [1.0, 2.0]]


def test_an_empty_source_has_no_samples() -> None:
    assert len(read_source([])) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, [1.0], 0), (1, [1.0, 2.0], 0)], "cannot be stacked"),
        ([(0, [1.0], "cat")], "cannot be stacked"),
        ([(0, [1.0], 0.5)], "whole numbers"),
        ([(0, [1.0], [0, 1])], "one for each sample"),
        ([(0, [1.0], 0), ("0", [1.0], 0)], "not unique"),
        ([(1.5, [1.0], 0)], "neither a whole number nor a text"),
        ([(True, [1.0], 0)], "neither a whole number nor a text"),
        ([(None, [1.0], 0)], "neither a whole number nor a text"),
    ],
)
def test_rows_that_are_no_samples_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_source(rows)


def test_samples_are_checked_and_brought_into_the_same_form() -> None:
    part = Samples((np.int64(1), np.int64(0)), torch.zeros(2, 4), torch.tensor([1, 2], dtype=torch.int32))  # type: ignore[arg-type]
    found = read_source(part)
    assert found.ids == (0, 1)
    assert found.y.dtype == torch.long
    with pytest.raises(DataError, match="whole numbers"):
        read_source(Samples((0,), torch.zeros(1, 4), torch.tensor([0.5])))


def test_a_plain_id_is_pythons_own() -> None:
    assert type(plain_id(np.str_("a"))) is str
    assert type(plain_id(torch.tensor(3))) is int


# Counting, evaluating


def test_count_tells_a_number_and_sums_only_where_the_plan_fits_something(tmp_path: Path) -> None:
    of = silo(tmp_path, "silo-0", small.samples(9, 0))
    assert of.carry_out(Count(PLAN)) == Counted(9, None)
    fitted = of.carry_out(Count(replace(PLAN, preprocessing=ff.Preprocessing("standardize"))))
    assert isinstance(fitted, Counted)
    assert fitted.sums is not None
    assert fitted.sums.count.tolist() == [9.0] * 4


def test_samples_of_another_shape_are_told(tmp_path: Path) -> None:
    of = silo(tmp_path, "silo-0", Samples((0,), torch.zeros(1, 2), torch.tensor([0])))
    with pytest.raises(DataError, match=r"silo silo-0: samples have shape \(2,\), the plan says \(4,\)"):
        of.carry_out(Count(PLAN))


def test_a_share_is_set_aside_by_the_hash_of_the_id_and_deletion_covers_it(tmp_path: Path) -> None:
    plan = replace(PLAN, holdout=0.3)
    of = silo(tmp_path, "silo-0", small.samples(60, 0))
    aside = [sample_id for sample_id in range(60) if held_out("silo-0", sample_id, 0.3)]
    assert of.carry_out(Count(plan)).samples == 60 - len(aside)  # type: ignore[union-attr]
    assert of.carry_out(Evaluate(plan, fresh(), None)).samples == len(aside)  # type: ignore[union-attr]
    assert forget(of, aside[:2], plan=plan) == Forgotten(2, 0, 60 - len(aside))
    assert of.carry_out(Evaluate(plan, fresh(), None)).samples == len(aside) - 2  # type: ignore[union-attr]
    assert not set(aside) & set(of.draw(plan, 60 - len(aside))), "a share to delete is one of the training samples"


def test_samples_are_drawn_always_alike_and_never_more_than_there_are(tmp_path: Path) -> None:
    of = silo(tmp_path, "silo-0", small.samples(20, 0))
    assert of.draw(PLAN, 5) == of.draw(PLAN, 5)
    assert of.draw(PLAN, 5) == of.draw(PLAN, 8)[:5]
    with pytest.raises(DeletionError, match="silo silo-0 holds 20 training samples: 21 cannot be deleted"):
        of.draw(PLAN, 21)


# Training


def test_the_same_task_again_gives_the_same_bits_also_a_round_later(tmp_path: Path) -> None:
    for choice in (ff.optim.SGD(momentum=0.9), ff.Choice("diagonal-fisher", {"lr": 0.01, "eps": 1e-3})):
        plan = replace(PLAN, optimizer=choice)
        of = silo(tmp_path / choice.name, "silo-0", small.samples(9, 0))
        first = trained(of, fresh(), 1, plan=plan)
        second = trained(of, first.state, 2, plan=plan)
        third = trained(of, second.state, 3, plan=plan)
        assert equal(trained(of, second.state, 3, plan=plan).state, third.state)
        fourth = trained(of, third.state, 4, plan=plan)
        assert equal(trained(of, third.state, 4, plan=plan).state, fourth.state)
        without_moments = trained(of, third.state, 4, plan=plan, previous=None)
        assert not equal(without_moments.state, fourth.state)


def test_training_goes_on_from_disk(tmp_path: Path) -> None:
    of = silo(tmp_path, "silo-0", small.samples(9, 0))
    first = trained(of, fresh(), 1, durable=True)
    second = trained(of, first.state, 2)
    reopened = silo(tmp_path, "silo-0", small.samples(9, 0))
    assert equal(trained(reopened, first.state, 2).state, second.state)
    with pytest.raises(SiloError, match="round 2 is not kept"):
        trained(silo(tmp_path, "silo-0", small.samples(9, 0)), second.state, 3)


def test_runs_share_no_optimizer_state(tmp_path: Path) -> None:
    of = silo(tmp_path, "silo-0", small.samples(9, 0))
    trained(of, fresh(), 1)
    with pytest.raises(SiloError, match="round 1 is not kept"):
        trained(of, fresh(), 2, run="another")
    of.carry_out(Wipe())
    with pytest.raises(SiloError, match="round 1 is not kept"):
        trained(of, fresh(), 2)


def test_the_coordinators_state_is_left_as_it_is(tmp_path: Path) -> None:
    state = fresh()
    trained(silo(tmp_path, "silo-0", small.samples(9, 0)), state)
    assert equal(state, fresh())


def test_labels_beyond_the_plans_classes_are_told_when_training_and_can_be_deleted(tmp_path: Path) -> None:
    part = small.samples(9, 0)
    part.y[4] = 7
    of = silo(tmp_path, "silo-0", part)
    with pytest.raises(DataError, match="silo silo-0: labels run from 0 to 7, the plan has 3 classes"):
        trained(of, fresh())
    forget(of, [4])
    trained(of, fresh())


def test_divergence_names_silo_and_round(tmp_path: Path) -> None:
    part = small.samples(9, 0)
    part.x[3] = torch.nan
    with pytest.raises(SiloError, match="silo silo-0, round 1: training diverged"):
        trained(silo(tmp_path, "silo-0", part), fresh())


class Broken(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("head")


def test_whatever_a_users_model_raises_is_told_with_the_silos_name(tmp_path: Path) -> None:
    registry = Registry({"logistic": lambda: Broken(4, 3)}, REGISTRY.optimizers)
    plan = replace(PLAN, holdout=0.5)
    of = silo(tmp_path, "silo-0", small.samples(20, 0), registry)
    state = {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}
    with pytest.raises(SiloError, match="silo silo-0, round 1: KeyError: 'head'"):
        trained(of, state, plan=plan)
    with pytest.raises(SiloError, match="silo silo-0, evaluation: KeyError: 'head'"):
        of.carry_out(Evaluate(plan, state, None))
    with pytest.raises(SiloError, match="silo silo-0: RuntimeError"):
        of.carry_out(Evaluate(plan, {"weight": torch.zeros(1)}, None))


def test_a_silo_without_samples_cannot_train(tmp_path: Path) -> None:
    with pytest.raises(SiloError, match="silo silo-0 has no training sample left"):
        trained(silo(tmp_path, "silo-0", small.samples(0, 0)), fresh())


# Forgetting


def test_without_commit_nothing_changes(tmp_path: Path) -> None:
    rows = Rows(small.samples(9, 0))
    of = silo(tmp_path, "silo-0", rows)
    assert forget(of, [1, 2], commit=False) == Forgotten(2, 0, 7)
    assert len(of.samples) == 9
    assert not rows.asked
    assert not list((tmp_path / "silo-0").iterdir())


def test_forgetting_is_durable_idempotent_and_survives_a_restored_source(tmp_path: Path) -> None:
    of = silo(tmp_path, "silo-0", small.samples(9, 0))
    assert forget(of, [1, 2]) == Forgotten(2, 0, 7)
    assert forget(of, [1, 2]) == Forgotten(0, 2, 7)
    assert forget(of, [2, 3]) == Forgotten(1, 1, 6)
    reopened = silo(tmp_path, "silo-0", small.samples(9, 0))
    assert reopened.samples.ids == (0, 4, 5, 6, 7, 8)
    assert forget(reopened, [1]) == Forgotten(0, 1, 6)


def test_an_id_is_the_same_as_number_and_as_text(tmp_path: Path) -> None:
    of = silo(tmp_path, "silo-0", small.samples(9, 0))
    assert forget(of, ["1", 1, 2]) == Forgotten(2, 0, 7)
    assert forget(of, [1, "2"]) == Forgotten(0, 2, 7)


def test_an_unknown_id_refuses_the_whole(tmp_path: Path) -> None:
    of = silo(tmp_path, "silo-0", small.samples(9, 0))
    with pytest.raises(DeletionError, match="silo silo-0 holds no sample with id 98, 99: nothing was deleted"):
        forget(of, [1, 99, 98])
    assert len(of.samples) == 9


def test_all_that_a_silo_holds(tmp_path: Path) -> None:
    of = silo(tmp_path, "silo-0", small.samples(9, 0))
    forget(of, [3])
    assert forget(of, None) == Forgotten(8, 0, 0)
    assert forget(of, None) == Forgotten(0, 0, 0)
    assert of.samples.ids == ()


def test_forgetting_wipes_optimizer_state_and_training_leaves_the_sample_out(tmp_path: Path) -> None:
    of = silo(tmp_path, "silo-0", small.samples(9, 0))
    trained(of, fresh(), 1, durable=True)
    forget(of, [3])
    assert not list(tmp_path.rglob("*.pt"))
    never = silo(tmp_path / "never", "silo-0", small.without({"a": small.samples(9, 0)}, {"a": [3]})["a"])
    assert equal(trained(of, fresh(), 1).state, trained(never, fresh(), 1).state)


def test_another_silo_object_on_the_folder_sees_the_deletion(tmp_path: Path) -> None:
    first, second = (silo(tmp_path, "silo-0", small.samples(9, 0)) for _ in range(2))
    trained(first, fresh(), 1)
    forget(second, [3])
    assert 3 not in first.samples.ids
    assert 3 not in first.draw(PLAN, 8)
    assert trained(first, fresh(), 1).samples == 8


def test_no_plain_id_is_kept(tmp_path: Path) -> None:
    part = small.samples(3, 0, ids=["patient-alice", "patient-bob", "patient-carol"])
    of = silo(tmp_path, "silo-0", part)
    forget(of, ["patient-bob"])
    assert all(b"patient" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_source_that_can_is_told_to_delete(tmp_path: Path) -> None:
    rows = Rows(small.samples(9, 0))
    of = silo(tmp_path, "silo-0", rows)
    forget(of, [1, 2])
    assert set(rows.rows) == set(range(9)) - {1, 2}
    forget(of, [1, 2])
    assert rows.asked == [{1, 2}], "there is nothing more to delete"


def test_a_source_that_fails_to_delete_is_told_of_and_tried_again(tmp_path: Path) -> None:
    rows = Rows(small.samples(9, 0), fails=True)
    of = silo(tmp_path, "silo-0", rows)
    with pytest.raises(SiloError, match=r"silo silo-0: .* its source still holds it: the disk is read-only"):
        forget(of, [1, 2])
    assert of.samples.ids == (0, 3, 4, 5, 6, 7, 8)
    rows.fails = False
    assert forget(of, [1, 2]) == Forgotten(0, 2, 7)
    assert set(rows.rows) == set(range(9)) - {1, 2}


def test_a_damaged_memory_of_deletions_stops_the_silo(tmp_path: Path) -> None:
    of = silo(tmp_path, "silo-0", small.samples(9, 0))
    forget(of, [1])
    (tmp_path / "silo-0/tombstones.sqlite").unlink()
    with pytest.raises(FedforgetError, match="silo-0"):
        of.carry_out(Count(PLAN))
