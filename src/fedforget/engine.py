"""Carries work out: from a plan or a deletion to a release, in steps that can all be done twice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from fedforget import methods
from fedforget.errors import FedforgetError, PlanError, RunFolderError, SiloError
from fedforget.federation.coordinator import Coordinator
from fedforget.federation.link import Link
from fedforget.federation.registry import Registry, imported
from fedforget.methods import Method, Retrain
from fedforget.methods.method import from_settings, settings_of
from fedforget.release import Baseline, Release, Verification, probabilities
from fedforget.runs import ReleaseRecord, RunFolder, records_as_data, whole
from fedforget.types import Deletion, History, Plan, RoundRecord, Samples, State, TrainingResult
from fedforget.verify.distance import output_distance, parameter_distance, state_digest
from fedforget.work import Work

Progress = Callable[[str, Plan, RoundRecord], None]


def method_name(method: Method) -> str:
    """The name by which a method can be found again: built in, or `package.module:class`."""
    built_in = [name for name, kind in methods.BUILT_IN.items() if type(method) is kind]
    return built_in[0] if built_in else f"{type(method).__module__}:{type(method).__qualname__}"


def named_method(name: str, settings: Mapping[str, Any]) -> Method:
    """The method that `method_name` and `settings_of` described."""
    try:
        return from_settings(methods.BUILT_IN.get(name) or imported(name, "method"), settings)
    except TypeError as error:
        raise PlanError(f"method {name!r} cannot be made of the settings that are noted for it: {error}") from error


@dataclass(frozen=True)
class Engine:
    """A run's folder and the link to its silos, with what training needs besides."""

    folder: RunFolder
    link: Link
    registry: Registry
    test: Samples | None
    device: torch.device
    checkpoint_every: int
    on_round: Progress | None
    check: Callable[[Release], Verification]

    def coordinator(self, run: str, plan: Plan, title: str = "") -> Coordinator:
        """A coordinator for one run; `title` is what progress calls it."""

        def told(record: RoundRecord) -> None:
            if self.on_round is not None:
                self.on_round(title, plan, record)

        return Coordinator(
            link=self.link,
            registry=self.registry,
            run=run,
            device=self.device,
            public_test=self.test,
            checkpoints=self.folder if self.checkpoint_every else None,
            checkpoint_every=self.checkpoint_every,
            on_round=told,
        )

    def pending(self) -> Work | None:
        """Work that was begun and is not finished."""
        data = self.folder.pending()
        if data is None:
            return None
        with whole(self.folder.path / "pending.json"):
            work = Work.from_dict(data)
            unknown = sorted(set(work.ids or {}) - set(self.link.silos))
            if unknown:
                raise ValueError(f"silo {unknown[0]!r} is unknown")
            if (work.plan is None) == (work.method is None):
                raise ValueError("it names no work")
        return work

    def begin(self, work: Work) -> None:
        """Note the work durably, before its first effect."""
        self.folder.set_pending(work.as_dict())

    def history(self) -> History:
        """The original training: the newest release that no way to unlearn made."""
        original = [record for record in self.folder.releases() if record.method is None][-1]
        return History(original.plan, original.records)

    def release(self, version: int) -> Release:
        """A release with its weights."""
        record = self.folder.release(version)
        state, fit = self.folder.weights(version)
        beside = self.folder.baseline(version)
        baseline = Baseline(beside) if beside else None
        return Release(record, state, fit, baseline, self.registry, self.check)

    def served(self) -> Release:
        """The release that is served: the newest."""
        versions = self.folder.versions()
        if not versions:
            raise RunFolderError("no model is released yet: train first")
        return self.release(versions[-1])

    def finish(self, work: Work, method: Method | None = None) -> Release:
        """Do what is left of the work."""
        history = History(work.plan) if work.plan else self.history()
        if work.version not in self.folder.versions():
            if work.plan is not None:
                self._publish(work, None, self._trained(work, work.plan))
            else:
                assert work.method is not None, "a deletion's work names its method"
                method = method or named_method(work.method, work.settings)
                self.delete(work, history.plan)
                self._publish(work, method, self._unlearned(work, method, history))
        self.folder.destroy_old_weights()
        failure = self._measure_baseline(work, history) if work.baseline else None
        self.coordinator(work.run, history.plan).wipe()
        self.folder.clear_pending()
        if failure is not None:
            raise FedforgetError(f"release {work.version} is served, but its baseline could not be trained: {failure}")
        return self.release(work.version)

    def _measure_baseline(self, work: Work, history: History) -> FedforgetError | None:
        """Train the yardstick beside the release; why it cannot be trained, which must stand in nothing's way."""
        if self.folder.attached(work.version, "baseline") is None:
            yardstick = Retrain()
            coordinator = self.coordinator(f"{work.run}-baseline", yardstick.plan(history.plan), "baseline")
            try:
                result = yardstick.unlearn(history, Deletion(work.deleted), coordinator)
            except FedforgetError as error:
                return error
            self.folder.attach(work.version, "baseline", {"records": records_as_data(result.records)})
        return None

    def drop(self, work: Work) -> None:
        """Give up a training: nothing of it is left."""
        if work.plan is not None:
            self.coordinator(work.run, work.plan).wipe()
            self.folder.clear_pending()

    def delete(self, work: Work, plan: Plan) -> None:
        """Have every silo acknowledge the work's deletions; from then on no plain id is kept."""
        if work.ids is not None:
            self.coordinator(work.run, plan).forget(plan, work.ids, commit=True)
            self.begin(dataclasses.replace(work, ids=None))

    def _trained(self, work: Work, plan: Plan) -> TrainingResult:
        try:
            return self.coordinator(work.run, plan, "train").train(plan)
        except FedforgetError:
            # Noted, so that it stands in nobody's way: another plan, a deletion.
            self.begin(dataclasses.replace(work, failed=True))
            raise

    def _unlearned(self, work: Work, method: Method, history: History) -> TrainingResult:
        coordinator = self.coordinator(work.run, method.plan(history.plan), method.name)
        try:
            return method.unlearn(history, Deletion(work.deleted), coordinator)
        except SiloError as error:
            raise SiloError(
                f"{error}; the deletion is kept, and release {work.version - 1} served, until a retraining succeeds: "
                "mend the cause and forget again without naming samples, or do that by another method, optimizer, "
                "learning rate or batch size"
            ) from error

    def _publish(self, work: Work, method: Method | None, result: TrainingResult) -> None:
        coordinator = self.coordinator(work.run, result.plan)
        counts, _ = coordinator.count(result.plan)
        record = ReleaseRecord(
            version=work.version,
            method=method.name if method else None,
            source=method_name(method) if method else None,
            settings=settings_of(method) if method else {},
            guarantee=method.guarantee if method else None,
            plan=result.plan,
            classes=tuple(self.folder.description()["classes"]),
            records=result.records,
            samples=counts,
            deleted=dict(work.deleted),
            metrics=self._metrics(result),
            digest=state_digest(result.state, result.fit),
            environment={**coordinator.environment(), "trained": self._how(result.plan, counts)},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self.folder.publish(record, result.state, result.fit)

    def _how(self, plan: Plan, counts: Mapping[str, int]) -> str:
        silos = min(plan.silos_per_round or len(counts), len(counts))
        return self.link.how(plan, silos, max(counts.values()))

    def _replaced(self) -> Release | None:
        """The release that is about to be replaced; None where there is none, or its weights are damaged.

        A deletion must go through in that case above all.
        """
        try:
            before = self.served() if self.folder.versions() else None
        except RunFolderError:
            return None
        return before if before and state_digest(before.state, before.fit) == before.record.digest else None

    def _metrics(self, result: TrainingResult) -> dict[str, float]:
        """Costs of the run, and its distance from the release that it replaces, whose weights are about to go."""
        rounds = len(result.records)
        metrics: dict[str, float] = {
            "rounds": rounds,
            "seconds_per_round": sum(record.seconds for record in result.records) / rounds,
            "bytes_per_round": sum(record.bytes for record in result.records) / rounds,
        }
        if result.discarded:
            metrics["discarded_rounds"] = len(result.discarded)
            metrics["discarded_seconds"] = sum(record.seconds for record in result.discarded)
        before = self._replaced()
        if before is not None:
            if _shapes(before.state) == _shapes(result.state):
                metrics["parameter_distance"] = parameter_distance(before.state, result.state)
            if self.test is not None:
                answers = [
                    probabilities(self.registry, trained, self.test.x, self.device)
                    for trained in (before.result, result)
                ]
                metrics["output_distance"] = output_distance(*answers)
        # Weights that are finite, but huge, can be infinitely far away: such a distance is left out.
        return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _shapes(state: State) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}
