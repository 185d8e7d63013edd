from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedforget.types import RoundRecord
from fedforget.verify.utility import SpeedUp, final_accuracy, rounds_to, sape, speed_up


def run(accuracies: Sequence[float], seconds: float = 1.0) -> list[RoundRecord]:
    return [RoundRecord(number, ("a",), 1.0, value, seconds, 10) for number, value in enumerate(accuracies, 1)]


accuracies = st.lists(st.integers(0, 360).map(lambda right: right / 360), min_size=1, max_size=12)


@given(st.floats(0, 1), st.floats(0, 1))
def test_sape_is_symmetric_and_lies_between_0_and_1(first: float, second: float) -> None:
    assert sape(first, second) == sape(second, first)
    assert 0 <= sape(first, second) <= 1
    assert sape(first, first) == 0


def test_sape_by_hand() -> None:
    assert sape(0.9, 0.6) == pytest.approx(0.2)
    assert sape(0.0, 0.0) == 0
    assert sape(0.5, 0.0) == 1


def test_the_final_accuracy_is_the_mean_of_the_last_five_rounds() -> None:
    assert final_accuracy(run([0.0, 0.0, 0.5, 0.6, 0.7, 0.8, 0.9])) == pytest.approx(0.7)
    assert final_accuracy(run([0.5, 0.7])) == pytest.approx(0.6)


@given(st.integers(0, 10_000), st.integers(1, 10_000), st.integers(1, 9))
@settings(max_examples=200)
def test_a_run_that_stands_still_reaches_its_own_accuracy(right: int, samples: int, rounds: int) -> None:
    records = run([right / samples] * rounds)
    assert final_accuracy(records) <= records[0].accuracy
    assert rounds_to(records, final_accuracy(records)) == (1 if rounds > 1 else None)


def test_t_is_the_first_of_two_consecutive_rounds_at_or_above() -> None:
    assert rounds_to(run([0.9, 0.2, 0.5, 0.6, 0.1]), 0.5) == 3
    assert rounds_to(run([0.9, 0.2, 0.5]), 0.5) is None
    assert rounds_to(run([0.9]), 0.5) is None


@given(accuracies, st.floats(0, 1))
@settings(max_examples=100)
def test_t_is_what_a_plain_search_finds(values: list[float], accuracy: float) -> None:
    held = [n for n in range(1, len(values)) if values[n - 1] >= accuracy and values[n] >= accuracy]
    assert rounds_to(run(values), accuracy) == (held[0] if held else None)


def test_v_is_taken_at_the_lower_of_the_two_final_accuracies() -> None:
    baseline = run([0.1, 0.3, 0.5, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8], seconds=2.0)
    fast = run([0.6, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], seconds=4.0)
    assert speed_up(baseline, fast, 10) == SpeedUp(0.8, 5 / 2, (5 * 2.0) / (2 * 4.0))
    # The baseline is better in the end: both are measured where the other one ends.
    assert speed_up(fast, baseline, 10) == SpeedUp(0.8, 2 / 5, (2 * 4.0) / (5 * 2.0))


def test_tries_that_diverged_count_as_the_methods_rounds_and_time() -> None:
    baseline = run([0.1, 0.3, 0.5, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8], seconds=2.0)
    fast = run([0.6, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], seconds=4.0)
    discarded = {"discarded_rounds": 3, "discarded_seconds": 12.0, "rounds": 7}
    assert speed_up(baseline, fast, 10, discarded) == SpeedUp(0.8, 5 / 5, 10.0 / 20.0)


def test_v_of_a_run_against_itself_is_one() -> None:
    records = run([0.2, 0.5, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8])
    assert speed_up(records, records, 10) == SpeedUp(final_accuracy(records), 1.0, 1.0)


@pytest.mark.parametrize("near_chance", [0.5, 0.549, 0.55, math.nan])
def test_there_is_no_v_where_a_run_ends_near_chance(near_chance: float) -> None:
    good, bad = run([0.9] * 6), run([0.9, *[near_chance] * 5])
    assert speed_up(bad, good, 2) == SpeedUp(None, None, None, "the baseline did not train")
    assert speed_up(good, bad, 2) == SpeedUp(None, None, None, "the method did not train")
    assert speed_up(good, run([0.56] * 6), 2).reason is None


def test_there_is_no_v_where_a_run_never_held_the_accuracy() -> None:
    found = speed_up(run([0.8] * 6), run([0.2, 0.95, 0.2, 0.95, 0.2, 0.95]), 10)
    assert (found.rounds, found.time) == (None, None)
    assert found.accuracy == pytest.approx((2 * 0.2 + 3 * 0.95) / 5)
    assert found.reason == "a run never held the accuracy for two rounds"
