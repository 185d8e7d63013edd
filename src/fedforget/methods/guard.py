"""A guard against steps that are too large: a run that diverges is begun anew, from a fresh model, with smaller ones.

It looks at the rounds' losses alone, and so at nothing but the remaining samples: where the reference of an exact
method diverges, it does so in the same round, and goes on with the same smaller step.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import logging
import math

from fedforget import optim
from fedforget.errors import DivergedError
from fedforget.methods.method import Trainer
from fedforget.types import Choice, Plan, RoundRecord, TrainingResult, is_number

logger = logging.getLogger(__name__)

LOWERINGS = 3
FACTOR = 4
PATIENCE = 5
FAR_OFF = 1.5
STANDSTILL = 0.9


def train_guarded(coordinator: Trainer, plan: Plan, name: str) -> TrainingResult:
    """Train by the plan; should that diverge, up to three times more with steps of a quarter, and say so."""
    assert plan.classes is not None, "the coordinator's plans are complete"
    watch = functools.partial(stuck, plan.classes)
    discarded: tuple[RoundRecord, ...] = ()
    for _ in range(LOWERINGS):
        try:
            return dataclasses.replace(coordinator.train(plan, watch), discarded=discarded)
        except DivergedError as error:
            smaller = with_smaller_step(plan)
            if smaller is None:
                raise
            logger.warning(
                "%s: %s did not train (%s); it starts again with %s", name, plan.optimizer, error, smaller.optimizer
            )
            discarded += error.records
            plan = smaller
    # The last try goes to its end, if its numbers stay finite: a deletion must not wait for a better one.
    return dataclasses.replace(coordinator.train(plan), discarded=discarded)


def stuck(classes: int, records: tuple[RoundRecord, ...]) -> str | None:
    """Whether the loss ran off and has come to a stand at or above that of guessing, as a reason.

    A loss that starts far off and falls from round to round is training, however slowly; one that never was far off and
    hardly falls has too small a step.
    """
    guessing = math.log(classes)
    losses = [record.loss for record in records]
    last = losses[-PATIENCE:]
    ran_off = max(losses) > FAR_OFF * guessing
    falling = all(later < earlier for earlier, later in itertools.pairwise(last))
    if ran_off and not falling and len(last) == PATIENCE and min(last) >= guessing and last[-1] > STANDSTILL * last[0]:
        return f"after {len(records)} rounds the loss is {last[-1]:.3g}, where guessing has {guessing:.3g}"
    return None


def with_smaller_step(plan: Plan) -> Plan | None:
    """The plan with a quarter of its learning rates; None where its optimizer names none."""
    chosen = plan.optimizer
    assert isinstance(chosen, Choice), "a plan's optimizer is a Choice"
    named = {name: value for name, value in chosen.settings.items() if name == "lr" or name.endswith("_lr")}
    rates = {name: value for name, value in named.items() if is_number(value)}
    if "lr" not in rates:
        if chosen.name not in optim.BUILT_IN:
            return None
        rates["lr"] = inspect.signature(optim.BUILT_IN[chosen.name]).parameters["lr"].default
    lowered = {name: float(value) / FACTOR for name, value in rates.items()}
    return dataclasses.replace(plan, optimizer=Choice(chosen.name, {**chosen.settings, **lowered}))
