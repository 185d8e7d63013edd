"""Exact methods leave nothing of a deleted sample: bit for bit, for random federations, deletions and plans."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedforget as ff
from fedforget import methods, optim
from fedforget.types import Samples
from tests import leaky, small
from tests.fresh_process import reference_digest

OPTIMIZERS = {
    "sgd": {"lr": 0.1, "momentum": 0.9},
    "adam": {"lr": 0.05},
    "diagonal-fisher": {"lr": 0.01, "block_size": 2, "eps": 1e-3},
    "muon": {"lr": 0.05, "slice_size": 2},
}
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
slow = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_every_optimizer_and_method_is_covered() -> None:
    assert set(OPTIMIZERS) == set(optim.BUILT_IN)
    assert {kind.guarantee for kind in methods.BUILT_IN.values()} == {"exact"}


@dataclass(frozen=True)
class Case:
    data: dict[str, Samples]
    options: dict[str, Any]
    plan: ff.Plan
    method: Any
    deletions: list[dict[str, list[int]]]

    @property
    def gone(self) -> dict[str, list[int]]:
        return {name: [i for part in self.deletions for i in part.get(name, [])] for name in self.data}

    def federation(self, folder: Path | None = None, **changes: Any) -> ff.Federation:
        return ff.Federation(**{"sources": self.data, "folder": folder, **self.options, **changes})


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.integers(1, 12), min_size=2, max_size=4))
    data = small.sources(sizes, seed=draw(st.integers(0, 5)))
    optimizers = st.sampled_from(sorted(OPTIMIZERS)).map(lambda name: ff.Choice(name, OPTIMIZERS[name]))
    plan = ff.Plan(
        rounds=draw(st.integers(1, 3)),
        optimizer=draw(optimizers),
        seed=draw(st.integers(0, 3)),
        batch_size=draw(st.integers(1, 5)),
        local_epochs=draw(st.integers(1, 2)),
        silos_per_round=draw(st.none() | st.integers(1, len(sizes))),
        aggregation=draw(st.sampled_from(["fedavg", "median", "trimmed-mean"])),
        l2=draw(st.sampled_from([0.0, 0.01])),
    )
    held_out = draw(st.booleans())
    options = {
        "model": draw(st.sampled_from([ff.models.logistic, ff.models.mlp])),
        "classes": small.CLASSES,
        "preprocessing": draw(st.sampled_from([ff.Preprocessing(), ff.Preprocessing("standardize")])),
        "test": None if held_out else small.TEST,
        "link": draw(st.sampled_from(["in-process", "batched"])),
    }
    method = draw(st.sampled_from(sorted(methods.BUILT_IN)).map(methods.BUILT_IN.get))
    method = method(optimizer=draw(optimizers))
    deletions = [
        {
            name: draw(st.lists(st.sampled_from(part.ids), min_size=1, unique=True))
            for name, part in data.items()
            if draw(st.booleans())
        }
        for _ in range(draw(st.integers(1, 3)))
    ]
    return Case(data, options, plan, method, [part for part in deletions if part])


@contextmanager
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def forget_all(federation: ff.Federation, case: Case) -> ff.Release | None:
    """The last release of the case's deletions; None where they leave nothing to train on."""
    try:
        for part in case.deletions:
            federation.forget(part, case.method)
    except ff.DeletionError as error:
        if "every training sample" not in str(error):
            raise
        return None
    return federation.release


def trained(federation: ff.Federation, plan: ff.Plan) -> bool:
    try:
        federation.train(plan)
    except ff.DataError as error:
        if "no silo has a training sample" not in str(error):
            raise
        return False
    return True


@quick
@given(cases())
def test_forgetting_equals_never_having_had(case: Case) -> None:
    federation = case.federation()
    if not (case.deletions and trained(federation, case.plan)):
        return
    release = forget_all(federation, case)
    if release is None or release.version == 1:
        return
    never = case.federation(sources=small.without(case.data, case.gone))
    assert release.record.digest == never.train(case.method.plan(case.plan)).record.digest


@slow
@given(cases())
def test_forgetting_equals_never_having_had_in_a_fresh_process(case: Case) -> None:
    with temporary() as folder:
        federation = case.federation(folder / "run")
        if not (case.deletions and trained(federation, case.plan)):
            return
        release = forget_all(federation, case)
        if release is None or release.version == 1:
            return
        remaining = small.without(case.data, case.gone)
        digest = reference_digest(folder / "fresh", remaining, case.method.plan(case.plan), **case.options)
        assert release.record.digest == digest


@quick
@given(cases())
def test_garbage_over_deleted_samples_changes_no_bit(case: Case) -> None:
    with temporary() as folder:
        federation = case.federation(folder / "clean")
        if not (case.deletions and trained(federation, case.plan)):
            return
        shutil.copytree(folder / "clean", folder / "spoiled")
        release = forget_all(federation, case)
        if release is None:
            return
        spoiled = {}
        for name, part in case.data.items():
            x, y = part.x.clone(), part.y.clone()
            for position, sample_id in enumerate(part.ids):
                if sample_id in case.gone[name]:
                    x[position], y[position] = torch.nan, -7
            spoiled[name] = Samples(part.ids, x, y)
        again = forget_all(case.federation(folder / "spoiled", sources=spoiled), merged(case))
        assert again is not None
        assert again.record.digest == release.record.digest


@quick
@given(cases())
def test_one_after_the_other_equals_all_at_once(case: Case) -> None:
    with temporary() as folder:
        federation = case.federation(folder / "one-by-one")
        if not (case.deletions and trained(federation, case.plan)):
            return
        shutil.copytree(folder / "one-by-one", folder / "at-once")
        release = forget_all(federation, case)
        if release is None:
            return
        at_once = forget_all(case.federation(folder / "at-once"), merged(case))
        assert at_once is not None
        assert at_once.record.digest == release.record.digest


def merged(case: Case) -> Case:
    return replace(case, deletions=[{name: sorted(set(ids)) for name, ids in case.gone.items() if ids}])


def test_the_same_seed_twice_gives_the_same_bits_and_another_does_not() -> None:
    def digest(seed: int) -> str:
        federation = small.federation(small.sources([20, 20]))
        return federation.train(ff.Plan(rounds=2, batch_size=4, seed=seed)).record.digest

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


PLAN = ff.Plan(rounds=2, batch_size=4)


@pytest.mark.parametrize("method", [ff.Retrain(), ff.RapidRetrain()])
def test_verify_passes_an_exact_method(method: Any) -> None:
    federation = small.federation(small.sources([20, 20]))
    federation.train(PLAN)
    verdict = federation.forget({"silo-1": [3, 4]}, method).verify()
    assert verdict
    assert verdict.deleted == 2


LEAKY = [
    leaky.LeakyMoment(),
    leaky.LeakyNormalisation(),
    leaky.LeakyConstants(),
    leaky.LeakyPlan(),
    leaky.WarmStart(),
]


@pytest.mark.parametrize("method", LEAKY, ids=lambda method: method.name)
def test_verify_catches_a_leaky_method(method: Any) -> None:
    leaky.KeepsMoment.moment.clear()
    leaky.served.clear()
    leaky.kept.clear()
    federation = small.federation(small.sources([20, 20]), preprocessing=ff.Preprocessing("standardize"))
    first = federation.train(replace(PLAN, optimizer=ff.Choice("tests.leaky:keeps_moment")))
    leaky.served.update(first.state)
    leaky.kept.update(fit=first.fit, shift=0.5)
    verdict = federation.forget({"silo-1": [3, 4]}, method).verify()
    assert not verdict


def test_verify_catches_weights_that_were_changed_after_the_release(tmp_path: Path) -> None:
    federation = small.federation(small.sources([20, 20]), tmp_path / "run")
    federation.train(PLAN)
    path = tmp_path / "run/releases/1/weights.pt"
    stored = torch.load(path, weights_only=True)
    stored["state"]["1.bias"][0] += 1e-6
    torch.save(stored, path)
    assert not federation.verify()
