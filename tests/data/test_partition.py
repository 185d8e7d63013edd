"""Partitions: every row in exactly one silo, none empty, the same for the same seed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedforget.data import partition
from fedforget.errors import DataError, PlanError

SEEDS = st.integers(0, 2**32)
LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=200).map(np.array)


def assert_covers(parts, count, silos):
    assert list(parts) == [f"silo-{number}" for number in range(silos)]
    for rows in parts.values():
        assert rows.dtype == np.int64
        assert len(rows) >= 1
        assert np.all(np.diff(rows) > 0)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(count))


def assert_same(left, right):
    assert {name: rows.tolist() for name, rows in left.items()} == {name: rows.tolist() for name, rows in right.items()}


@given(st.data(), st.integers(1, 300), SEEDS)
def test_even_covers_and_sizes_differ_by_at_most_one(data, count, seed):
    silos = data.draw(st.integers(1, count))
    parts = partition.even(count, silos, seed)
    assert_covers(parts, count, silos)
    sizes = [len(rows) for rows in parts.values()]
    assert max(sizes) - min(sizes) <= 1
    assert_same(parts, partition.even(count, silos, seed))


@settings(deadline=None)
@given(st.data(), LABELS, st.sampled_from([1e-320, 1e-6, 0.1, 1.0, 100.0, 1e9]), SEEDS)
def test_dirichlet_covers_and_leaves_no_silo_empty(data, labels, alpha, seed):
    silos = data.draw(st.integers(1, len(labels)))
    parts = partition.dirichlet(labels, silos, alpha, seed)
    assert_covers(parts, len(labels), silos)
    assert_same(parts, partition.dirichlet(labels, silos, alpha, seed))


@given(st.data(), LABELS, SEEDS)
def test_label_shards_cover_and_differ_by_at_most_one_a_shard(data, labels, seed):
    silos = data.draw(st.integers(1, len(labels)))
    shards = data.draw(st.integers(1, len(labels) // silos))
    parts = partition.label_shards(labels, silos, shards, seed)
    assert_covers(parts, len(labels), silos)
    sizes = [len(rows) for rows in parts.values()]
    assert max(sizes) - min(sizes) <= shards
    assert_same(parts, partition.label_shards(labels, silos, shards, seed))


def test_another_seed_gives_another_partition():
    labels = np.arange(1000) % 10
    for split in (
        lambda seed: partition.even(1000, 10, seed),
        lambda seed: partition.dirichlet(labels, 10, 1.0, seed),
        lambda seed: partition.label_shards(labels, 10, 2, seed),
    ):
        assert split(0)["silo-0"].tolist() != split(1)["silo-0"].tolist()


def test_a_partition_stays_the_same_from_one_version_to_the_next():
    # Runs keep their seed, not only their rows: these numbers must not change.
    assert partition.even(10, 3, 7)["silo-1"].tolist() == [2, 3, 6]
    assert partition.dirichlet([0, 1] * 6, 3, 0.5, 7)["silo-1"].tolist() == [0, 2, 4, 8, 10]
    assert partition.label_shards([0, 1] * 6, 3, 2, 7)["silo-1"].tolist() == [0, 2, 5, 7]


def test_even_shuffles():
    assert partition.even(1000, 2, 0)["silo-0"].tolist() != list(range(500))


def test_a_small_alpha_makes_silos_differ_and_a_large_one_does_not():
    labels = np.arange(10_000) % 10

    def largest_share(alpha):
        parts = partition.dirichlet(labels, 10, alpha, 3)
        return np.mean([np.bincount(labels[rows]).max() / len(rows) for rows in parts.values()])

    assert largest_share(0.05) > 0.5
    assert largest_share(1e6) < 0.12


def test_two_shards_hold_two_classes_where_classes_fill_whole_shards():
    labels = np.random.default_rng(0).permutation(np.arange(2000) % 10)
    parts = partition.label_shards(torch.from_numpy(labels), 10, 2, 0)
    assert all(len(set(labels[rows])) <= 2 for rows in parts.values())


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: partition.even(10, 0, 0), PlanError),
        (lambda: partition.even(10, 2, -1), PlanError),
        (lambda: partition.even(3, 4, 0), DataError),
        (lambda: partition.dirichlet([0, 1], 2, 0.0, 0), PlanError),
        (lambda: partition.dirichlet([0, 1], 2, float("nan"), 0), PlanError),
        (lambda: partition.dirichlet([0, 1], 2, 1e308, 0), PlanError),
        (lambda: partition.dirichlet([0, 1], 3, 1.0, 0), DataError),
        (lambda: partition.dirichlet([[0], [1]], 1, 1.0, 0), DataError),
        (lambda: partition.dirichlet([0.0, float("nan")], 1, 1.0, 0), DataError),
        (lambda: partition.label_shards([0, 1], 2, 0, 0), PlanError),
        (lambda: partition.label_shards([0, 1, 1], 2, 2, 0), DataError),
    ],
)
def test_bad_arguments(call, error):
    with pytest.raises(error):
        call()
