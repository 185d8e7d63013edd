"""A guard against steps that are too large: a run that diverges is begun anew, from a fresh model, with smaller ones.

It looks at the rounds' losses alone, and so at nothing but the remaining samples: where the reference of an exact
method diverges, it does so in the same round, and goes on with the same smaller step.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math

from fedforget import optim
from fedforget.errors import DivergedError
from fedforget.methods.method import Trainer
from fedforget.types import Choice, Plan, RoundRecord, TrainingResult

logger = logging.getLogger(__name__)

LOWERINGS = 3
FACTOR = 4
FAR_OFF = 10.0
PATIENCE = 5


def train_guarded(coordinator: Trainer, plan: Plan, name: str) -> TrainingResult:
    """Train by the plan; should that diverge, up to three times more with steps of a quarter, and say so."""
    assert plan.classes is not None, "the coordinator's plans are complete"
    discarded: tuple[RoundRecord, ...] = ()
    for _ in range(LOWERINGS):
        try:
            result = coordinator.train(plan, functools.partial(not_training, plan.classes))
            return dataclasses.replace(result, discarded=discarded)
        except DivergedError as error:
            smaller = with_smaller_step(plan)
            if smaller is None:
                raise
            logger.warning(
                "%s: %s did not train (%s); it starts again with %s", name, plan.optimizer, error, smaller.optimizer
            )
            discarded += error.records
            plan = smaller
    assert plan.classes is not None
    # The last try is not asked to beat guessing: labels may be such that nothing does.
    result = coordinator.train(plan, functools.partial(far_off, plan.classes))
    return dataclasses.replace(result, discarded=discarded)


def far_off(classes: int, records: tuple[RoundRecord, ...]) -> str | None:
    """Whether the loss ran away, as a reason; the first round may begin far off, from weights drawn at random."""
    guessing = math.log(classes)
    if len(records) > 1 and records[-1].loss > FAR_OFF * guessing:
        return f"training diverged: the loss is {records[-1].loss:.3g}, where guessing has {guessing:.3g}"
    return None


def not_training(classes: int, records: tuple[RoundRecord, ...]) -> str | None:
    """Whether the loss ran away or, after some rounds, was never below guessing's, as a reason."""
    guessing = math.log(classes)
    if len(records) >= PATIENCE and min(record.loss for record in records) >= guessing:
        return f"no round had a loss below guessing's, {guessing:.3g}"
    return far_off(classes, records)


def with_smaller_step(plan: Plan) -> Plan | None:
    """The plan with a quarter of its learning rates; None where its optimizer names none."""
    chosen = plan.optimizer
    assert isinstance(chosen, Choice), "a plan's optimizer is a Choice"
    rates = {name: value for name, value in chosen.settings.items() if name == "lr" or name.endswith("_lr")}
    if "lr" not in rates:
        if chosen.name not in optim.BUILT_IN:
            return None
        rates["lr"] = inspect.signature(optim.BUILT_IN[chosen.name]).parameters["lr"].default
    lowered = {name: float(value) / FACTOR for name, value in rates.items()}
    return dataclasses.replace(plan, optimizer=Choice(chosen.name, {**chosen.settings, **lowered}))
