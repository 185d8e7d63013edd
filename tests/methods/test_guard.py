"""The guard of rapid retraining: a step that is too large is lowered, and the result stays exact."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedforget as ff
from fedforget.federation.coordinator import Watch
from fedforget.methods.guard import stuck, train_guarded, with_smaller_step
from fedforget.types import Plan, RoundRecord, TrainingResult
from tests import small
from tests.federation.parts import PLAN


def records(*losses: float) -> tuple[RoundRecord, ...]:
    return tuple(RoundRecord(number, ("a",), loss, 0.5, 2.0, 10) for number, loss in enumerate(losses, 1))


@pytest.mark.parametrize(
    "losses",
    [
        (2.0, 1.0, 0.5),
        (900.0, 400.0, 90.0, 40.0, 9.0, 4.0, 3.0, 2.5, 2.2, 2.1),  # starts far off, and falls
        (2.31, 2.31, 2.309, 2.309, 2.308, 2.308),  # too small a step, which a smaller one would not mend
        (2.2, 60.0, 2.4, 2.0, 1.0, 0.5),
        (900.0, 900.0, 900.0, 900.0),  # too early to say
        (54.5, 54.4, 54.3, 54.2, 54.1, 54.0, 53.9),  # starts far off, and falls slowly
    ],
)
def test_what_trains_or_may_yet_is_left_alone(losses: tuple[float, ...]) -> None:
    for rounds in range(1, len(losses) + 1):
        assert stuck(10, records(*losses[:rounds])) is None


@pytest.mark.parametrize(
    "losses",
    [
        (3.0, 50.0, 400.0, 1e4, 1e5),
        (9.0, 2.31, 2.31, 2.31, 2.31, 2.31),  # collapsed after a step that was too large
        (1.0, 0.5, 0.3, 7.0, 2.31, 2.4, 2.31, 2.31, 2.31),
        (900.0, 890.0, 900.0, 900.0, 900.0),
    ],
)
def test_what_ran_off_and_stands_still_is_stuck(losses: tuple[float, ...]) -> None:
    assert stuck(10, records(*losses[:-1])) is None
    assert f"after {len(losses)} rounds the loss is {losses[-1]:.3g}, where" in (stuck(10, records(*losses)) or "")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ff.Choice("sgd", {"lr": 0.8, "momentum": 0.9}), ff.Choice("sgd", {"lr": 0.2, "momentum": 0.9})),
        (ff.Choice("muon"), ff.Choice("muon", {"lr": 0.07 / 4})),
        (ff.Choice("muon", {"adam_lr": 0.4}), ff.Choice("muon", {"lr": 0.07 / 4, "adam_lr": 0.1})),
        (ff.Choice("torch.optim:SGD", {"lr": 4}), ff.Choice("torch.optim:SGD", {"lr": 1.0})),
        (
            ff.Choice("own", {"lr": 4.0, "min_lr": "auto", "by_lr": True}),
            ff.Choice("own", {"lr": 1.0, "min_lr": "auto", "by_lr": True}),
        ),
    ],
)
def test_a_smaller_step_is_a_quarter_of_every_rate(before: ff.Choice, after: ff.Choice) -> None:
    plan = with_smaller_step(replace(PLAN, optimizer=before))
    assert plan == replace(PLAN, optimizer=after)


def test_an_optimizer_whose_rate_is_unknown_cannot_be_lowered() -> None:
    assert with_smaller_step(replace(PLAN, optimizer=ff.Choice("torch.optim:SGD"))) is None


class Diverges:
    """Trains only with a rate that is small enough."""

    def __init__(self, largest: float) -> None:
        self.largest = largest
        self.rates: list[float] = []

    def train(self, plan: Plan, watch: Watch | None = None) -> TrainingResult:
        assert isinstance(plan.optimizer, ff.Choice)
        self.rates.append(float(plan.optimizer.settings["lr"]))
        if self.rates[-1] > self.largest:
            raise ff.DivergedError("round 2: too far", records(3.0, math.nan))
        return TrainingResult(plan, {}, None, records(1.0))


SGD = replace(PLAN, optimizer=ff.Choice("sgd", {"lr": 8.0}))


def test_a_run_that_diverges_starts_again_with_a_quarter_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Diverges(1.0)
    with caplog.at_level(logging.WARNING):
        result = train_guarded(trainer, SGD, "rapid")
    assert trainer.rates == [8.0, 2.0, 0.5]
    assert result.plan.optimizer == ff.Choice("sgd", {"lr": 0.5})
    assert len(result.discarded) == 4
    assert caplog.messages == [
        "rapid: sgd(lr=8.0) did not train (round 2: too far); it starts again with sgd(lr=2.0)",
        "rapid: sgd(lr=2.0) did not train (round 2: too far); it starts again with sgd(lr=0.5)",
    ]


def test_a_run_that_trains_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Diverges(9.0)
    result = train_guarded(trainer, SGD, "rapid")
    assert (trainer.rates, result.plan, result.discarded, caplog.messages) == ([8.0], SGD, (), [])


def test_the_last_try_may_fail() -> None:
    trainer = Diverges(0.0)
    with pytest.raises(ff.DivergedError, match="too far"):
        train_guarded(trainer, SGD, "rapid")
    assert trainer.rates == [8.0, 2.0, 0.5, 0.125]


def test_what_cannot_be_lowered_fails_as_it_is() -> None:
    plan = replace(PLAN, optimizer=ff.Choice("torch.optim:SGD", {"momentum": 0.9}))

    class Trainer:
        def train(self, plan: Plan, watch: Any = None) -> TrainingResult:
            raise ff.DivergedError("round 1: too far")

    with pytest.raises(ff.DivergedError):
        train_guarded(Trainer(), plan, "rapid")


class Poisons(torch.optim.SGD):
    """No rate is small enough for it."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.fill_(math.nan)


def test_a_release_whose_step_was_lowered_is_exact_and_tells_what_it_cost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = small.sources([20, 20])
    federation = small.federation(data, tmp_path / "run")
    federation.train(ff.Plan(rounds=8, batch_size=4, optimizer=ff.optim.SGD(0.1)))
    method = ff.RapidRetrain(ff.Choice("sgd", {"lr": 400.0}))
    release = federation.forget({"silo-1": [3, 4]}, method, baseline=True)
    assert release.plan.optimizer != method.optimizer
    assert "it starts again with" in caplog.text
    assert release.record.metrics["discarded_rounds"] >= 1
    assert release.record.metrics["discarded_seconds"] > 0
    assert federation.verify()
    never = small.federation(small.without(data, {"silo-1": [3, 4]}))
    assert never.train(release.plan).record.digest == release.record.digest


def test_a_method_that_never_trains_leaves_the_old_release_served(tmp_path: Path) -> None:
    federation = small.federation(small.sources([20, 20]), tmp_path / "run")
    federation.train(ff.Plan(rounds=2, batch_size=4))
    with pytest.raises(ff.SiloError, match=r"diverged.*the deletion is kept, and release 1 served"):
        federation.forget({"silo-1": [3, 4]}, ff.RapidRetrain(ff.Choice(f"{__name__}:Poisons", {"lr": 1.0})))
    assert federation.release.version == 1
    assert federation.forget(None, ff.RapidRetrain()).version == 2
