"""A silo: a data holder's samples, its tombstones and its local training. No sample ever leaves it."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedforget.errors import DataError, DeletionError, DivergedError, FedforgetError, SiloError
from fedforget.federation import training
from fedforget.federation.link import (
    Count,
    Counted,
    Evaluate,
    Evaluated,
    Forget,
    Forgotten,
    Reply,
    Task,
    Train,
    Trained,
    Wipe,
    Wiped,
)
from fedforget.federation.local_state import LocalState
from fedforget.federation.preprocessing import feature_sums, prepare
from fedforget.federation.randomness import digest, held_out, seeded
from fedforget.federation.registry import Registry
from fedforget.types import DataSource, Fit, PhysicalDeletion, Plan, SampleId, Samples, TombstoneStore


def read_source(source: DataSource) -> Samples:
    """All samples of a source, in the order of their ids."""
    if isinstance(source, Samples):
        return Samples(tuple(plain_id(value) for value in source.ids), source.x, _labels(source.y)).ordered()
    try:
        once = iter(source) is source
        rows = [] if once else list(source)
    except FedforgetError:
        raise
    except Exception as error:  # the source may be the user's
        raise DataError(f"a data source cannot be read: {type(error).__name__}: {error}") from error
    if once:
        raise DataError("a data source can be read only once: give a list, or an object with __iter__")
    if not rows:
        return Samples((), torch.empty(0), torch.empty(0, dtype=torch.long))
    try:
        ids, inputs, labels = zip(*rows, strict=True)
    except (TypeError, ValueError) as error:
        raise DataError(f"a data source yields what is not (id, x, y): {error}") from error
    try:
        x = torch.stack([torch.as_tensor(value) for value in inputs])
        y = torch.as_tensor(labels)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"samples cannot be stacked: {error}; give each the same shape and a whole number as label"
        ) from error
    return Samples(tuple(plain_id(value) for value in ids), x, _labels(y)).ordered()


def plain_id(value: Any) -> SampleId:
    """A sample's id as Python's own text or whole number, whatever library's it came as."""
    if isinstance(value, str):
        return str(value)
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError as error:
        raise DataError(f"sample id {value!r} is neither a whole number nor a text") from error


def _labels(y: Tensor) -> Tensor:
    whole = y.to(torch.long)
    if y.ndim != 1 or not torch.equal(whole.to(y.dtype), y):
        raise DataError("labels must be whole numbers, one for each sample")
    return whole


@dataclass(frozen=True)
class _Prepared:
    """Training samples as the model sees them, held on the device while a run lasts."""

    run: str
    plan: Plan
    x: Tensor
    y: Tensor


class Silo:
    """Carries out the coordinator's tasks on the samples that remain."""

    def __init__(
        self,
        name: str,
        source: DataSource,
        tombstones: TombstoneStore,
        registry: Registry,
        folder: Path,
        device: torch.device,
    ) -> None:
        self.name = name
        self.source = source
        self._tombstones = tombstones
        self._registry = registry
        self._device = device
        self._state = LocalState(folder / "optimizer-state")
        self._samples = read_source(source)
        self._buried = 0
        self._prepared: _Prepared | None = None
        self._leave_out_deleted()

    def carry_out(self, task: Task) -> Reply:
        """Carry out a task; an error that the operator must see is a FedforgetError."""
        return self.begin(task)()

    def begin(self, task: Task) -> Callable[[], Reply]:
        """Begin a task, and give back what ends it with a reply; either may raise a FedforgetError.

        An accelerator trains on meanwhile: only the end waits for it, so that other silos' tasks are begun before.
        """
        self._leave_out_deleted()
        match task:
            case Count():
                reply: Reply = self._count(task)
            case Train():
                return self._train(task)
            case Evaluate():
                reply = self._evaluate(task)
            case Forget():
                reply = self._forget(task)
            case Wipe():
                reply = self._wipe()
        return lambda: reply

    def _leave_out_deleted(self) -> None:
        """Leave out every sample that has a tombstone, whoever wrote it: also another process on the same folder.

        A tombstone outlives its sample: what the source still holds, or holds again, stays out for good.
        """
        buried = self._tombstones.count()
        if buried != self._buried:
            self._samples = _without(self._samples, self._tombstones.held(self._samples.ids))
            self._buried = buried
            self._prepared = None

    @property
    def samples(self) -> Samples:
        """All samples that remain, in the order of their ids, the share set aside for evaluation included."""
        self._leave_out_deleted()
        return self._samples

    def draw(self, plan: Plan, count: int) -> tuple[SampleId, ...]:
        """Ids of `count` training samples, drawn at random but always alike: for the holder, not the coordinator."""
        ids = self._split(self.samples, plan, evaluation=False).ids
        if count > len(ids):
            raise DeletionError(f"silo {self.name} holds {len(ids)} training samples: {count} cannot be deleted there")
        return tuple(sorted(ids, key=lambda sample_id: digest("draw", self.name, str(sample_id)))[:count])

    def _count(self, task: Count) -> Counted:
        samples = self._split(self._samples, task.plan, evaluation=False)
        if len(samples) and samples.shape != task.plan.shape:
            raise DataError(f"silo {self.name}: samples have shape {samples.shape}, the plan says {task.plan.shape}")
        fits = task.plan.preprocessing is not None and task.plan.preprocessing.kind == "standardize"
        return Counted(len(samples), feature_sums(samples.x) if fits and len(samples) else None)

    # For a link that trains many silos as one program.

    def training_tensors(self, task: Train) -> tuple[Tensor, Tensor]:
        """What remains to be trained on, as the model sees it."""
        self._leave_out_deleted()
        return self._training_tensors(task)

    def training_count(self, plan: Plan) -> int:
        """How many samples remain to be trained on."""
        self._leave_out_deleted()
        return len(self._split(self._samples, plan, evaluation=False))

    def hold(self, task: Train, x: Tensor, y: Tensor) -> None:
        """Keep these equal tensors in the place of those that `training_tensors` made."""
        self._prepared = _Prepared(task.run, task.plan, x, y)

    def let_go(self) -> None:
        """Drop the tensors that are held for training: they are made anew when they are needed."""
        self._prepared = None

    def optimizer_state(self, task: Train) -> dict[str, Any] | None:
        """The optimizer's state after the silo's last turn; None before its first."""
        return None if task.previous is None else self._state.kept(task.run, task.previous)

    def keep_optimizer_state(self, task: Train, state: dict[str, Any]) -> None:
        """Keep the optimizer's state after this turn."""
        self._state.keep(task.run, task.round, state, durable=task.durable)

    def diverged(self, task: Train, loss: float) -> DivergedError:
        """What is told of a turn whose numbers ran away."""
        return DivergedError(
            f"silo {self.name}, round {task.round}: training diverged (loss {loss}); "
            "lower the learning rate, or look for missing values in the samples"
        )

    # Alone.

    def _train(self, task: Train) -> Callable[[], Trained]:
        x, y = self._training_tensors(task)
        if not len(y):
            raise SiloError(f"silo {self.name} has no training sample left")
        model = self._model(task.plan, task)
        with self._told(f", round {task.round}"):
            optimizer = self._registry.optimizer(task.plan, model)
            if task.previous is not None:
                optimizer.load_state_dict(self._state.after(task.run, task.previous))
            with seeded(self._device, "train", task.plan.seed, task.round, self.name), training.reproducible():
                loss = training.train(model, optimizer, x, y, task.plan, task.round, self.name)
        # Buffers may hold infinities on purpose, as a mask does.
        finite = torch.isfinite(loss) & training.all_finite(model.parameters()).to(loss.device)
        trained, state, count = training.state_of(model), optimizer.state_dict(), len(y)

        def end() -> Trained:
            # Whatever the device meets is told no sooner than here.
            with self._told(f", round {task.round}"):
                whole, mean = bool(finite), float(loss)
            if not whole:
                raise self.diverged(task, mean)
            self._state.keep(task.run, task.round, state, durable=task.durable)
            return Trained(trained, count, mean)

        return end

    def _evaluate(self, task: Evaluate) -> Evaluated:
        samples = self._split(self._samples, task.plan, evaluation=True)
        if not len(samples):
            return Evaluated(0, 0)
        x, y = self._to_device(samples, task.plan, task.fit)
        model = self._model(task.plan, task)
        with self._told(", evaluation"):
            return Evaluated(training.correct_answers(model, x, y), len(samples))

    def _forget(self, task: Forget) -> Forgotten:
        held = {str(sample_id): sample_id for sample_id in self._samples.ids}
        asked = {str(sample_id): sample_id for sample_id in (self._samples.ids if task.ids is None else task.ids)}
        absent = {text: sample_id for text, sample_id in asked.items() if text not in held}
        unknown = sorted(set(absent) - {str(sample_id) for sample_id in self._tombstones.held(absent.values())})
        if unknown:
            shown = ", ".join(map(_shown, unknown[:3])) + (", …" if len(unknown) > 3 else "")
            raise DeletionError(f"silo {self.name} holds no sample with id {shown}: nothing was deleted")
        gone = {held[text] for text in asked if text in held}
        left = _without(self._samples, gone)
        if task.commit:
            # Durable first: after this line no crash and no restored source can bring a deleted sample back.
            self._tombstones.add(gone)
            self._samples = left
            self._wipe()
            self._delete_physically()
        return Forgotten(len(gone), len(absent), len(self._split(left, task.plan, evaluation=False)))

    def _delete_physically(self) -> None:
        """Have the source, where it can, delete what has a tombstone.

        All of it, not only what was asked: an earlier call may have been cut off, or have failed, right here.
        """
        if not isinstance(self.source, PhysicalDeletion):
            return
        try:
            stored = [plain_id(sample_id) for sample_id, *_ in self.source]
            if gone := self._tombstones.held(stored):
                self.source.delete(gone)
        except Exception as error:  # the source may be the user's: whatever it raises is told with the silo's name
            raise SiloError(
                f"silo {self.name}: what was deleted is left out of all training from now on, "
                f"but its source still holds it: {error}; mend that and forget again"
            ) from error

    def _wipe(self) -> Wiped:
        self._state.wipe()
        self.let_go()
        return Wiped()

    def _split(self, samples: Samples, plan: Plan, *, evaluation: bool) -> Samples:
        """Those of the samples that are trained on, or those set aside for evaluation."""
        share = plan.holdout or 0.0
        if not share:
            return samples.select([]) if evaluation else samples
        wanted = [held_out(self.name, sample_id, share) == evaluation for sample_id in samples.ids]
        return samples.select([position for position, keep in enumerate(wanted) if keep])

    def _training_tensors(self, task: Train) -> tuple[Tensor, Tensor]:
        # Kept for one run only: in the next, a deletion at another silo may have moved the means of all.
        if self._prepared is None or (self._prepared.run, self._prepared.plan) != (task.run, task.plan):
            samples = self._split(self._samples, task.plan, evaluation=False)
            self._check_labels(samples, task.plan)
            x, y = self._to_device(samples, task.plan, task.fit)
            self._prepared = _Prepared(task.run, task.plan, x, y)
        return self._prepared.x, self._prepared.y

    def _check_labels(self, samples: Samples, plan: Plan) -> None:
        # Not when samples are counted: one with a wrong label can still be deleted.
        if len(samples) and plan.classes is not None:
            lowest, highest = int(samples.y.min()), int(samples.y.max())
            if lowest < 0 or highest >= plan.classes:
                raise DataError(
                    f"silo {self.name}: labels run from {lowest} to {highest}, the plan has {plan.classes} classes"
                )

    def _to_device(self, samples: Samples, plan: Plan, fit: Fit | None) -> tuple[Tensor, Tensor]:
        assert plan.preprocessing is not None, "the coordinator sends complete plans"
        x = samples.x.to(self._device)
        return prepare(x, plan.preprocessing, fit, getattr(torch, plan.dtype)), samples.y.to(self._device)

    def _model(self, plan: Plan, task: Train | Evaluate) -> nn.Module:
        with seeded(self._device, "discarded"):  # initialisation draws numbers; the state overwrites what they gave
            model = self._registry.blank(plan, self._device)
        with self._told(""):
            model.load_state_dict(task.state)
        return model

    @contextmanager
    def _told(self, where: str) -> Iterator[None]:
        """Whatever the model or the optimizer raises, which may be the user's, is told with the silo's name."""
        try:
            yield
        except FedforgetError:
            raise
        except Exception as error:
            raise SiloError(f"silo {self.name}{where}: {type(error).__name__}: {error}") from error


def _shown(sample_id: str) -> str:
    """An id as a message shows it: one that could be misread, as with a space at its end, in quotes."""
    return sample_id if re.fullmatch(r"[A-Za-z0-9._-]+", sample_id) else repr(sample_id)


def _without(samples: Samples, gone: set[SampleId]) -> Samples:
    return samples.select([position for position, sample_id in enumerate(samples.ids) if sample_id not in gone])
