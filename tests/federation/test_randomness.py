from __future__ import annotations

import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedforget.federation.randomness import digest, held_out, participants, seed_from, seeded, shuffled

names = st.sets(st.text("abc-0123456789", min_size=1, max_size=8), min_size=1, max_size=8)


@given(names, st.integers(1, 9), st.integers(-5, 5), st.integers(1, 100))
@settings(max_examples=50, deadline=None)
def test_participants_are_the_silos_with_the_smallest_hashes(
    silos: set[str], count: int, seed: int, number: int
) -> None:
    def hashed(name: str) -> str:
        return hashlib.sha256(json.dumps(["participants", seed, number, name]).encode()).hexdigest()

    drawn = participants(silos, count, seed, number)
    assert list(drawn) == sorted(drawn)
    assert len(drawn) == min(count, len(silos))
    assert max(map(hashed, drawn)) < min(map(hashed, silos - set(drawn)), default="g")
    assert participants(sorted(silos, reverse=True), count, seed, number) == drawn


@given(names, st.integers(1, 5), st.integers(1, 100))
@settings(max_examples=50, deadline=None)
def test_a_silo_that_was_not_drawn_can_leave_without_moving_another(silos: set[str], count: int, number: int) -> None:
    drawn = participants(silos, count, 0, number)
    assert participants(set(drawn), count, 0, number) == drawn


def test_every_silo_takes_part_where_no_number_is_given() -> None:
    assert participants(["b", "a"], None, 0, 1) == ("a", "b")


def test_rounds_and_seeds_draw_different_silos() -> None:
    silos = [f"silo-{number}" for number in range(20)]
    drawn = {participants(silos, 5, seed, number) for seed in range(3) for number in range(1, 11)}
    assert len(drawn) > 25


def test_parts_of_a_digest_are_kept_apart() -> None:
    assert (
        len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest(1, 23), digest(12, 3), digest("1", 23)}) == 6
    )
    assert 0 <= seed_from("x") < 2**63


def test_a_shuffle_is_a_permutation_decided_by_its_parts() -> None:
    assert sorted(shuffled(50, 0, 1, 0, "a").tolist()) == list(range(50))
    assert torch.equal(shuffled(50, 0, 1, 0, "a"), shuffled(50, 0, 1, 0, "a"))
    others = [(1, 1, 0, "a"), (0, 2, 0, "a"), (0, 1, 1, "a"), (0, 1, 0, "b")]  # seed, round, epoch, silo
    assert not any(torch.equal(shuffled(50, 0, 1, 0, "a"), shuffled(50, *parts)) for parts in others)


def test_a_shuffle_neither_reads_nor_moves_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = shuffled(20, "x")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(shuffled(20, "x"), first)


def test_seeded_decides_what_is_drawn_inside_and_leaves_the_outside_as_it_was() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with seeded(torch.device("cpu"), "train", 0):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeded(torch.device("cpu"), "train", 0):
        assert torch.equal(torch.rand(3), inside)
    with seeded(torch.device("cpu"), "train", 1):
        assert not torch.equal(torch.rand(3), inside)


def test_an_error_inside_leaves_the_outside_as_it_was() -> None:
    def fails() -> None:
        torch.rand(3)
        raise KeyError

    before = torch.get_rng_state()
    with pytest.raises(KeyError), seeded(torch.device("cpu"), "x"):
        fails()
    assert torch.equal(torch.get_rng_state(), before)


def test_about_the_share_is_held_out_and_only_the_id_decides() -> None:
    held = [number for number in range(2000) if held_out("silo-0", number, 0.2)]
    assert 320 < len(held) < 480
    assert [number for number in range(2000) if held_out("silo-0", str(number), 0.2)] == held
    assert [number for number in range(2000) if held_out("silo-1", number, 0.2)] != held
    assert not any(held_out("silo-0", number, 0.0) for number in range(2000))
    # A larger share only adds to a smaller one.
    assert all(held_out("silo-0", number, 0.3) for number in held)
