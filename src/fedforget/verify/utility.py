"""How much utility unlearning costs and how much time it saves: SAPE and the speed-up v of Liu et al. 2022, section 6.

v = T_b / T_u is taken at equal accuracy: a is the lowest, over the runs compared, of the mean accuracy over the last
five rounds, and T(a) counts up to the first of two consecutive rounds at or above a. Training time only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from fedforget.types import RoundRecord

LAST_ROUNDS = 5
CHANCE_MARGIN = 0.05


def sape(baseline: float, unlearned: float) -> float:
    """The symmetric absolute percentage error |a - b| / (|a| + |b|) of two accuracies; 0 where both are 0."""
    total = abs(baseline) + abs(unlearned)
    return abs(unlearned - baseline) / total if total else 0.0


@dataclass(frozen=True)
class SpeedUp:
    """v in rounds and in training time at an accuracy that both runs reach; None, with a reason, if there is none."""

    accuracy: float | None
    rounds: float | None
    time: float | None
    reason: str | None = None


def final_accuracy(records: Sequence[RoundRecord]) -> float:
    """The mean accuracy over a run's last five rounds."""
    last = [record.accuracy for record in records[-LAST_ROUNDS:]]
    # Rounding can lift the mean of equal numbers above them; then no round would ever reach it.
    return min(sum(last) / len(last), max(last))


def rounds_to(records: Sequence[RoundRecord], accuracy: float) -> int | None:
    """The first of two consecutive rounds at or above the accuracy; None where a run has no such two."""
    for now, following in pairwise(records):
        if min(now.accuracy, following.accuracy) >= accuracy:
            return now.round
    return None


def speed_up(
    baseline: Sequence[RoundRecord],
    unlearned: Sequence[RoundRecord],
    classes: int,
    metrics: Mapping[str, float] = MappingProxyType({}),
) -> SpeedUp:
    """v of a run against the baseline's, at equal accuracy.

    The `metrics` of the run's release say what tries that diverged took before it; that counts as the method's.
    """
    for name, records in (("the baseline", baseline), ("the method", unlearned)):
        final = final_accuracy(records)
        if math.isnan(final) or final <= 1 / classes + CHANCE_MARGIN:
            return SpeedUp(None, None, None, f"{name} did not train")
    accuracy = min(final_accuracy(baseline), final_accuracy(unlearned))
    slow, fast = rounds_to(baseline, accuracy), rounds_to(unlearned, accuracy)
    if slow is None or fast is None:
        return SpeedUp(accuracy, None, None, "a run never held the accuracy for two rounds")
    rounds = fast + metrics.get("discarded_rounds", 0)
    seconds = _seconds(unlearned, fast) + metrics.get("discarded_seconds", 0)
    return SpeedUp(accuracy, slow / rounds, _seconds(baseline, slow) / seconds)


def _seconds(records: Sequence[RoundRecord], rounds: int) -> float:
    return sum(record.seconds for record in records[:rounds])
