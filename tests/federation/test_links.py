"""What every link must do. A new one joins by its line in `LINKS`: a function from a folder and sources to a link."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedforget as ff
from fedforget.federation.link import (
    Count,
    Counted,
    Evaluate,
    Evaluated,
    Failure,
    Forget,
    Forgotten,
    Link,
    Trained,
    Wipe,
    Wiped,
)
from fedforget.types import DataSource, Samples
from tests import small
from tests.federation.parts import PLAN, batched, coordinator, equal, fresh, in_process, train_task

LINKS: dict[str, Callable[[Path, Mapping[str, DataSource]], Link]] = {
    "in-process": in_process,
    "batched": batched,
}
DATA = small.sources([9, 6, 11])
NAMES = tuple(DATA)
OPTIMIZERS = [
    ff.optim.SGD(),
    ff.optim.SGD(momentum=0.9),
    ff.optim.SGD(momentum=0.9, nesterov=True),
    ff.optim.Adam(lr=0.01),
    ff.Choice("muon"),
    ff.Choice("muon", {"slice_size": 2}),
    ff.Choice("diagonal-fisher", {"lr": 0.01}),
    ff.Choice("diagonal-fisher", {"lr": 0.01, "block_size": 1, "fisher_every": 3, "fisher_share": 0.4}),
]


@pytest.fixture(params=sorted(LINKS))
def linked(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Link]:
    """Makes links over a folder of their own, or the one that is named."""
    made = 0

    def make(data: Mapping[str, DataSource] = DATA, folder: str | None = None) -> Link:
        nonlocal made
        made += 1
        return LINKS[request.param](tmp_path / (folder or str(made)), data)

    return make


def ask(link: Link, task: Any, names: Collection[str] = NAMES) -> dict[str, Any]:
    return link.call(dict.fromkeys(names, task))


def failures(replies: Mapping[str, Any]) -> list[str]:
    return [name for name, reply in replies.items() if isinstance(reply, Failure)]


def test_silos_are_named_in_order(linked: Callable[..., Link]) -> None:
    assert linked(dict(reversed(DATA.items()))).silos == NAMES


def test_each_silo_that_is_named_answers_and_no_other(linked: Callable[..., Link]) -> None:
    replies = ask(linked(), Count(PLAN), ["silo-2", "silo-0"])
    assert replies == {"silo-0": Counted(9, None), "silo-2": Counted(11, None)}
    assert linked().call({}) == {}


def test_every_task_has_its_reply(linked: Callable[..., Link]) -> None:
    link = linked()
    expected = [
        (Count(PLAN), Counted),
        (train_task(fresh()), Trained),
        (Evaluate(PLAN, fresh(), None), Evaluated),
        (Forget(PLAN, (1,), commit=True), Forgotten),
        (Wipe(), Wiped),
    ]
    for task, kind in expected:
        assert all(type(reply) is kind for reply in ask(link, task).values())


ROUNDING: dict[str, dict[str, float]] = {
    "in-process": {"float32": 0.0, "float64": 0.0},
    "batched": {"float32": 1e-5, "float64": 1e-8},
}
"""How far parameters may be from the in-process link's after five rounds, of a tensor's norm."""


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"silos_per_round": 2, "l2": 0.01}, {"local_epochs": 2, "seed": 5, "aggregation": "median", "model": "mlp"}],
    ids=str,
)
def test_a_plan_gives_the_same_model_over_every_link(
    linked: Callable[..., Link], tmp_path: Path, optimizer: ff.Choice, dtype: Any, changes: dict[str, Any]
) -> None:
    """The in-process link is the yardstick: same participants, same order, same model."""
    plan = replace(PLAN, rounds=5, optimizer=optimizer, dtype=dtype, **changes)
    yardstick = coordinator(in_process(tmp_path / "yardstick", DATA)).train(plan)
    link = linked()
    result = coordinator(link).train(plan)
    assert [record.participants for record in result.records] == [record.participants for record in yardstick.records]
    rounding = ROUNDING[link.name][dtype]
    if rounding and dtype == "float32" and optimizer.name == "muon":
        rounding = 1e-3  # Its polynomials are steep where singular values are small: there rounding grows.
    for mine, theirs in zip(result.records, yardstick.records, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=rounding, abs=0)
    for name, expected in yardstick.state.items():
        assert (result.state[name] - expected).norm() <= rounding * expected.norm(), name


def test_a_task_that_is_sent_again_has_the_same_reply(linked: Callable[..., Link]) -> None:
    link = linked()
    state = fresh()
    for number in (1, 2, 3):
        replies = ask(link, train_task(state, number))
        again = ask(link, train_task(state, number))
        for name in NAMES:
            assert equal(replies[name].state, again[name].state)
            assert (replies[name].samples, replies[name].loss) == (again[name].samples, again[name].loss)
        state = replies["silo-0"].state
    for task in (Count(PLAN), Evaluate(PLAN, state, None), Forget(PLAN, (1, 2), commit=False), Wipe()):
        assert ask(link, task) == ask(link, task)


def test_a_round_does_not_depend_on_which_silos_are_asked_together(linked: Callable[..., Link]) -> None:
    task = train_task(fresh())
    together = ask(linked(), task)
    link = linked()
    for name in reversed(NAMES):
        assert equal(ask(link, task, [name])[name].state, together[name].state)


def test_replies_hold_states_of_their_own(linked: Callable[..., Link]) -> None:
    link = linked()
    state = fresh()
    first = ask(link, train_task(state))["silo-0"].state
    kept = {name: tensor.clone() for name, tensor in first.items()}
    ask(link, train_task(first, 2))
    assert equal(first, kept)
    assert equal(state, fresh())


def test_optimizer_state_that_a_plan_counts_on_is_never_made_up(linked: Callable[..., Link]) -> None:
    link = linked()
    replies = ask(link, train_task(fresh(), 3))
    assert failures(replies) == list(NAMES)
    assert "round 2 is not kept" in replies["silo-1"].reason


def test_a_durable_round_outlives_the_link(linked: Callable[..., Link]) -> None:
    link = linked(folder="same")
    first = ask(link, train_task(fresh(), 1, durable=True))["silo-0"].state
    second = ask(link, train_task(first, 2))
    again = ask(linked(folder="same"), train_task(first, 2))
    assert all(equal(second[name].state, again[name].state) for name in NAMES)


def test_wiping_leaves_no_side_state(linked: Callable[..., Link], tmp_path: Path) -> None:
    link = linked()
    first = ask(link, train_task(fresh(), 1, durable=True))["silo-0"].state
    ask(link, Wipe())
    assert not list(tmp_path.rglob("*.pt"))
    assert failures(ask(link, train_task(first, 2))) == list(NAMES)


def test_a_failure_is_one_silos_and_names_it(linked: Callable[..., Link]) -> None:
    spoiled = Samples(DATA["silo-1"].ids, torch.full_like(DATA["silo-1"].x, torch.nan), DATA["silo-1"].y)
    link = linked({**DATA, "silo-1": spoiled})
    replies = ask(link, train_task(fresh()))
    assert failures(replies) == ["silo-1"]
    assert replies["silo-1"].reason.startswith("silo silo-1, round 1: training diverged")
    clean = ask(linked(), train_task(fresh()))
    assert all(equal(replies[name].state, clean[name].state) for name in ("silo-0", "silo-2"))


def test_every_reason_names_its_silo(linked: Callable[..., Link]) -> None:
    link = linked()
    for task in (
        Count(replace(PLAN, shape=(5,))),
        train_task(fresh(), plan=replace(PLAN, optimizer="no-such-optimizer")),
        train_task({"0.weight": torch.zeros(1)}),
        train_task(fresh(replace(PLAN, classes=1)), plan=replace(PLAN, classes=1)),
        Forget(PLAN, ("nobody",), commit=True),
    ):
        replies = ask(link, task)
        assert failures(replies) == list(NAMES)
        for name, reply in replies.items():
            assert reply.reason.startswith(f"silo {name}")


def test_a_silo_that_the_link_does_not_know_is_a_failure(linked: Callable[..., Link]) -> None:
    replies = ask(linked(), Count(PLAN), ["nobody", "silo-0"])
    assert failures(replies) == ["nobody"]
    assert "silo nobody" in replies["nobody"].reason


def test_forgetting_is_idempotent(linked: Callable[..., Link]) -> None:
    link = linked(folder="same")
    task = Forget(PLAN, (1, 2), commit=True)
    assert ask(link, task, ["silo-0"])["silo-0"] == Forgotten(2, 0, 7)
    assert ask(link, task, ["silo-0"])["silo-0"] == Forgotten(0, 2, 7)
    assert ask(linked(folder="same"), task, ["silo-0"])["silo-0"] == Forgotten(0, 2, 7)
    assert ask(link, Count(PLAN)) == {
        "silo-0": Counted(7, None),
        "silo-1": Counted(6, None),
        "silo-2": Counted(11, None),
    }


def test_forgetting_without_commit_changes_nothing(linked: Callable[..., Link], tmp_path: Path) -> None:
    link = linked(folder="same")
    for ids, expected in (((1, 2), Forgotten(2, 0, 7)), (None, Forgotten(9, 0, 0))):
        assert ask(link, Forget(PLAN, ids, commit=False), ["silo-0"])["silo-0"] == expected
    assert ask(link, Count(PLAN), ["silo-0"])["silo-0"] == Counted(9, None)
    assert ask(linked(folder="same"), Count(PLAN), ["silo-0"])["silo-0"] == Counted(9, None)


def test_an_unknown_id_refuses_a_silos_deletion_whole(linked: Callable[..., Link]) -> None:
    link = linked()
    reply = ask(link, Forget(PLAN, (1, 2, 77), commit=True), ["silo-0"])["silo-0"]
    assert isinstance(reply, Failure)
    assert "77" in reply.reason
    assert ask(link, Count(PLAN), ["silo-0"])["silo-0"] == Counted(9, None)


def test_what_was_deleted_is_trained_on_no_more(linked: Callable[..., Link]) -> None:
    gone = {"silo-0": [0, 5], "silo-2": [3]}
    link = linked()
    coordinator(link, "before").train(PLAN)
    coordinator(link).forget(PLAN, gone, commit=True)
    never = coordinator(linked(small.without(DATA, gone))).train(PLAN)
    assert equal(coordinator(link).train(PLAN).state, never.state)


def test_a_silo_that_holds_nothing_any_more_drops_out(linked: Callable[..., Link]) -> None:
    link = linked()
    coordinator(link).forget(PLAN, {"silo-1": None}, commit=True)
    result = coordinator(link).train(replace(PLAN, silos_per_round=3))
    assert {record.participants for record in result.records} == {("silo-0", "silo-2")}


def test_evaluation_answers_with_counts_only(linked: Callable[..., Link]) -> None:
    plan = replace(PLAN, holdout=0.4)
    for reply in ask(linked(), Evaluate(plan, fresh(), None)).values():
        assert vars(reply).keys() == {"correct", "samples"}
        assert all(type(value) is int for value in vars(reply).values())
        assert 0 <= reply.correct <= reply.samples
    assert all(reply == Evaluated(0, 0) for reply in ask(linked(), Evaluate(PLAN, fresh(), None)).values())


def test_a_reason_holds_nothing_of_a_sample(linked: Callable[..., Link]) -> None:
    data = small.samples(9, 0, ids=[f"patient-{number}" for number in range(9)])
    data.x[3, 0] = torch.nan
    link = linked({"silo-0": data})
    for task in (train_task(fresh()), Count(replace(PLAN, shape=(5,)))):
        reply = ask(link, task, ["silo-0"])["silo-0"]
        assert isinstance(reply, Failure)
        assert "patient" not in reply.reason


def test_a_call_with_time_enough_answers(linked: Callable[..., Link]) -> None:
    assert linked().call({"silo-0": Count(PLAN)}, timeout=60.0) == {"silo-0": Counted(9, None)}


def test_every_link_says_what_a_timeout_does(linked: Callable[..., Link]) -> None:
    assert "timeout" in (type(linked()).__doc__ or "")
