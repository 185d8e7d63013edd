"""The coordinator: rounds, aggregation and the global model. It never sees a sample of a silo."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from fedforget.errors import DataError, DeletionError, DivergedError, FedforgetError, PlanError, SiloError
from fedforget.federation import training
from fedforget.federation.aggregate import Aggregation
from fedforget.federation.link import (
    Count,
    Counted,
    Evaluate,
    Evaluated,
    Failure,
    Forget,
    Forgotten,
    Link,
    Reply,
    Task,
    Train,
    Trained,
    Wipe,
    Wiped,
    tensor_bytes,
)
from fedforget.federation.preprocessing import fit, prepare
from fedforget.federation.randomness import participants, seeded
from fedforget.federation.registry import Registry
from fedforget.types import Fit, Plan, RoundRecord, SampleId, Samples, State, TrainingResult

R = TypeVar("R")
Watch = Callable[[tuple[RoundRecord, ...]], str | None]
"""Looks at the rounds so far; a text that it gives back says why the run has diverged, and ends it."""

SHOWN_FAILURES = 2


@dataclass(frozen=True)
class Checkpoint:
    """A run after a finished round: all that the coordinator needs to go on."""

    plan: Plan
    state: State
    records: tuple[RoundRecord, ...]
    environment: Mapping[str, str | int]


class CheckpointStore(Protocol):
    """Where a run's last checkpoint is kept."""

    def load(self, run: str) -> Checkpoint | None:
        """The newest checkpoint of the run."""
        ...

    def save(self, run: str, checkpoint: Checkpoint) -> None:
        """Replace the run's checkpoint; durable when it returns."""
        ...


@dataclass(frozen=True)
class Coordinator:
    """Trains over a link; `run` names the work at the silos, and never enters a random number."""

    link: Link
    registry: Registry
    run: str
    device: torch.device
    public_test: Samples | None = None
    checkpoints: CheckpointStore | None = None
    checkpoint_every: int = 1
    on_round: Callable[[RoundRecord], None] | None = None

    def train(self, plan: Plan, watch: Watch | None = None) -> TrainingResult:
        """Train from a fresh model, or go on from the plan's last checkpoint, until the plan's end.

        A DivergedError ends a run whose numbers run away, or of which `watch` says so.
        """
        model, aggregate = self.check(plan)
        counts, constants = self.count(plan)
        # One piece of work may train by several plans, each a run of its own.
        run = f"{self.run}-{plan.digest()[:16]}"
        state, records = training.state_of(model), ()  # type: tuple[State, tuple[RoundRecord, ...]]
        saved = None if self.checkpoints is None else self.checkpoints.load(run)
        # With another torch, device or number of threads it is begun anew: a mixture could never be verified.
        if saved is not None and saved.environment == self.environment():
            state = {name: tensor.to(self.device) for name, tensor in saved.state.items()}
            records = saved.records

        judge = self._judge(model, plan, constants)
        while _goes_on(plan, records, watch):
            number = len(records) + 1
            chosen = participants(counts, plan.silos_per_round, plan.seed, number)
            started = time.perf_counter()
            tasks = {
                name: Train(
                    run=run,
                    plan=plan,
                    round=number,
                    previous=_last_turn(records, name),
                    state=state,
                    fit=constants,
                    durable=self._durable(plan, counts, name, number),
                )
                for name in chosen
            }
            try:
                replies = expect(self.link.call(tasks), Trained)
            except DivergedError as error:
                seconds = time.perf_counter() - started
                failed = RoundRecord(number, chosen, math.nan, math.nan, seconds, len(chosen) * tensor_bytes(state))
                raise DivergedError(str(error), (*records, failed)) from error
            samples = [reply.samples for reply in replies.values()]
            moved = len(chosen) * tensor_bytes(state) + sum(tensor_bytes(reply.state) for reply in replies.values())
            loss = sum(reply.loss * reply.samples for reply in replies.values()) / sum(samples)
            state = _aggregated(aggregate, model, plan, [reply.state for reply in replies.values()], samples)
            _synchronize(self.device)
            seconds = time.perf_counter() - started
            accuracy = judge(state)
            record = RoundRecord(number, chosen, loss, accuracy, seconds, moved)
            records = (*records, record)
            if self._checkpointed(number) and self.checkpoints is not None:
                self.checkpoints.save(run, Checkpoint(plan, state, records, self.environment()))
            if self.on_round is not None:
                self.on_round(record)
        return TrainingResult(plan, {name: tensor.cpu() for name, tensor in state.items()}, constants, records)

    def environment(self) -> dict[str, str | int]:
        """What decides the bits besides the plan and the samples."""
        return {**training.environment(self.device), "link": self.link.name}

    def check(self, plan: Plan) -> tuple[torch.nn.Module, Aggregation]:
        """The plan's fresh model and its aggregation; whatever of the plan cannot be carried out is told now."""
        with seeded(self.device, "initialise", plan.seed):
            model = self.registry.model(plan)
        self._check_shapes(model, plan)
        aggregate = self.registry.aggregation(plan)
        self._check_step(plan)
        return model.to(self.device), aggregate

    def forget(self, plan: Plan, ids: Mapping[str, Sequence[SampleId] | None], *, commit: bool) -> dict[str, Forgotten]:
        """Have silos delete samples (None: all that a silo holds); each reply is the silo's acknowledgement."""
        tasks: dict[str, Task] = {
            name: Forget(plan, None if of_silo is None else tuple(of_silo), commit) for name, of_silo in ids.items()
        }
        return expect(self.link.call(tasks), Forgotten, DeletionError)

    def wipe(self) -> None:
        """Have every silo drop the side state of all runs."""
        expect(self.link.call({name: Wipe() for name in self.link.silos}), Wiped)

    def count(self, plan: Plan) -> tuple[dict[str, int], Fit | None]:
        """The silos that have data, with their numbers of samples, and the preprocessing's constants for this run."""
        replies = expect(self.link.call({name: Count(plan) for name in self.link.silos}), Counted, DataError)
        present = {name: reply for name, reply in replies.items() if reply.samples}
        if not present:
            raise DataError("no silo has a training sample left: there is nothing to train on")
        sums = [reply.sums for reply in present.values() if reply.sums is not None]
        return {name: reply.samples for name, reply in present.items()}, fit(sums) if sums else None

    def _check_shapes(self, model: torch.nn.Module, plan: Plan) -> None:
        """Show the model one batch of zeros, so that shapes that do not fit are told before any silo starts to work."""
        assert plan.shape is not None
        assert plan.classes is not None
        if self.public_test is not None and not len(self.public_test):
            raise DataError("the test split is empty: leave it out, and silos set a share aside for evaluation")
        if self.public_test is not None and self.public_test.shape != plan.shape:
            raise DataError(f"the test split has samples of shape {self.public_test.shape}, the plan says {plan.shape}")
        model.eval()
        try:
            with torch.no_grad():
                output = model(torch.zeros(2, *plan.shape, dtype=getattr(torch, plan.dtype)))
            shape = tuple(output.shape)
        except Exception as error:  # the model may be the user's: whatever it raises is told with its name
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PlanError(f"model {plan.model!r} does not take samples of shape {plan.shape}: {reason}") from error
        if shape != (2, plan.classes):
            raise PlanError(
                f"model {plan.model!r} answers two samples with shape {shape}; it must be (2, {plan.classes}), "
                "a score for each class"
            )

    def _check_step(self, plan: Plan) -> None:
        """Take one step on zeros with a model that is thrown away, so that an optimizer that cannot is told now."""
        assert plan.shape is not None
        with seeded(self.device, "discarded"):
            model = self.registry.model(plan).to(self.device)
            optimizer = self.registry.optimizer(plan, model)
            x = torch.zeros(2, *plan.shape, dtype=getattr(torch, plan.dtype), device=self.device)
            y = torch.zeros(2, dtype=torch.long, device=self.device)
            try:
                training.train(model, optimizer, x, y, dataclasses.replace(plan, local_epochs=1), 1, "")
            except Exception as error:  # both may be the user's: whatever they raise is told with their names
                raise PlanError(f"model {plan.model!r} cannot be trained by {plan.optimizer}: {error}") from error

    def _judge(self, model: torch.nn.Module, plan: Plan, constants: Fit | None) -> Callable[[State], float]:
        """The accuracy of a state: on the public test split, or on what the silos set aside; NaN where nothing is."""
        if self.public_test is None:

            def at_silos(state: State) -> float:
                tasks = {name: Evaluate(plan, state, constants) for name in self.link.silos}
                replies = expect(self.link.call(tasks), Evaluated).values()
                total = sum(reply.samples for reply in replies)
                return sum(reply.correct for reply in replies) / total if total else math.nan

            return at_silos
        assert plan.preprocessing is not None
        # Held on the device while the run lasts: to move it there takes longer than to evaluate.
        x = prepare(self.public_test.x.to(self.device), plan.preprocessing, constants, getattr(torch, plan.dtype))
        y = self.public_test.y.to(self.device)

        def here(state: State) -> float:
            model.load_state_dict(state)
            return training.correct_answers(model, x, y) / len(y)

        return here

    def _checkpointed(self, number: int) -> bool:
        return self.checkpoint_every > 0 and number % self.checkpoint_every == 0

    def _durable(self, plan: Plan, counts: Mapping[str, int], name: str, number: int) -> bool:
        """Whether a checkpoint comes before the silo's next turn, so that its optimizer state must outlive a crash."""
        if self.checkpoints is None or self.checkpoint_every == 0:
            return False
        checkpoint = math.ceil(number / self.checkpoint_every) * self.checkpoint_every
        later = range(number + 1, min(checkpoint, plan.rounds) + 1)
        return not any(name in participants(counts, plan.silos_per_round, plan.seed, turn) for turn in later)


def expect(
    replies: Mapping[str, Reply | Failure],
    kind: type[R],
    error: type[SiloError | DataError | DeletionError] = SiloError,
) -> dict[str, R]:
    """The replies in silo-name order; any failure ends the work, for a part of the silos is not a success."""
    failures = [reply for _, reply in sorted(replies.items()) if isinstance(reply, Failure)]
    if failures:
        others = f" (and {len(failures) - SHOWN_FAILURES} more silos)" if len(failures) > SHOWN_FAILURES else ""
        reasons = "; ".join(failure.reason for failure in failures[:SHOWN_FAILURES]) + others
        raise DivergedError(reasons) if all(failure.diverged for failure in failures) else error(reasons)
    expected: dict[str, R] = {name: reply for name, reply in sorted(replies.items()) if isinstance(reply, kind)}
    if len(expected) < len(replies):
        raise SiloError(f"silo {min(set(replies) - set(expected))} answered another task than it was given")
    return expected


def _last_turn(records: Sequence[RoundRecord], silo: str) -> int | None:
    """The last round in which a silo took part."""
    return next((record.round for record in reversed(records) if silo in record.participants), None)


def _aggregated(
    aggregate: Aggregation, model: torch.nn.Module, plan: Plan, states: Sequence[State], samples: Sequence[int]
) -> State:
    """The next global state; an aggregation that makes none is told of with its name."""
    wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in states[0].items()}
    try:
        state = aggregate(states, samples)
        made = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    except FedforgetError:
        raise
    except Exception as error:  # the aggregation may be the user's
        raise PlanError(f"aggregation {plan.aggregation}: {type(error).__name__}: {error}") from error
    if made != wanted:
        raise PlanError(f"aggregation {plan.aggregation} changed the names, shapes or types of the model's tensors")
    if not training.all_finite(state[name] for name, _ in model.named_parameters()):
        raise PlanError(f"aggregation {plan.aggregation} made parameters that are not finite")
    return state


def _goes_on(plan: Plan, records: tuple[RoundRecord, ...], watch: Watch | None) -> bool:
    """Whether another round is due."""
    if plan.target_accuracy is not None and records and records[-1].accuracy >= plan.target_accuracy:
        return False
    if watch is not None and records and (reason := watch(records)) is not None:
        raise DivergedError(f"round {len(records)}: {reason}", records)
    return len(records) < plan.rounds


def _synchronize(device: torch.device) -> None:
    """Wait for an accelerator, so that a round's time holds its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
