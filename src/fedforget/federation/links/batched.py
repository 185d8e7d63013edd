"""All silos in this process, trained together: one program takes a step of every silo that has a batch left.

Where many small steps cost more to launch than to compute, that is many times faster than one silo after the other.
Whatever is no training goes to the silos one by one, and so does training that cannot be batched, or would not gain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedforget.errors import FedforgetError
from fedforget.federation import training
from fedforget.federation.link import Failure, Forget, Reply, Task, Train, Trained, Wipe
from fedforget.federation.links.in_process import InProcessLink
from fedforget.federation.program import Program, Turn, Turned, program_for
from fedforget.federation.registry import Registry
from fedforget.federation.silo import Silo
from fedforget.types import Plan

LEAST_SILOS = 4
MOST_MULTIPLICATIONS = 2**22
"""Of a silo's forward pass of one batch, on a processor. Below, a step costs more to launch than to compute."""


@dataclass(frozen=True)
class Choice:
    """How a plan's silos are trained, and why."""

    link: Literal["in-process", "batched"]
    reason: str

    def __str__(self) -> str:
        return f"{self.link}: {self.reason}"


@dataclass(frozen=True)
class _Held:
    """The samples of all silos in one piece on the device, for one run."""

    run: str
    plan: Plan
    x: Tensor
    y: Tensor
    """The last row of each is padding: zeros."""
    first: Mapping[str, int]
    parts: Mapping[str, Tensor]
    """Each silo's part of x, as the silo holds it too; a silo that lost samples since holds another."""


@dataclass(frozen=True)
class _Work:
    """What was decided for one run."""

    run: str
    plan: Plan
    program: Program | str
    choice: Choice


class BatchedLink:
    """Trains silos as one program: wherever a plan allows it or, if `auto`, where a stated rule says that it gains.

    `timeout` has no effect here: a call in one's own process always ends.
    """

    def __init__(self, silos: Iterable[Silo], registry: Registry, device: torch.device, *, auto: bool = False) -> None:
        self._silos = {silo.name: silo for silo in sorted(silos, key=lambda silo: silo.name)}
        self._alone = InProcessLink(self._silos.values())
        self._registry = registry
        self._device = device
        self._auto = auto
        self._work: _Work | None = None
        self._held: _Held | None = None

    @property
    def name(self) -> str:
        """As a run's settings name it."""
        return "auto" if self._auto else "batched"

    @property
    def silos(self) -> tuple[str, ...]:
        """The names of all silos, in name order."""
        return tuple(self._silos)

    def choice(self, plan: Plan, silos: int, samples: int) -> Choice:
        """How so many silos, of so many samples at the most, would be trained by this plan.

        Nothing but the plan and these numbers enter: the same work is always done in the same way.
        """
        return self._chosen(self._program(plan), plan, silos, samples)

    def _chosen(self, program: Program | str, plan: Plan, silos: int, samples: int) -> Choice:
        if isinstance(program, str):
            return Choice("in-process", program if self._auto else f"batched was asked for, but {program}")
        if not self._auto:
            return Choice("batched", "as asked for")
        if self._device.type != "cpu":
            return Choice("in-process", f"where batching gains is not known on {self._device.type} yet; ask for it")
        batch = min(plan.batch_size, samples)
        work = batch * program.multiplications
        most = MOST_MULTIPLICATIONS
        if silos < LEAST_SILOS:
            return Choice("in-process", f"{silos} silos in a round, and fewer than {LEAST_SILOS} gain little")
        if work > most:
            return Choice(
                "in-process",
                f"a batch of {batch} takes {work:,} multiplications, and over {most:,} a step computes longer than "
                "it takes to launch",
            )
        return Choice("batched", f"{silos} silos in a round, and a batch of {batch} takes {work:,} multiplications")

    def how(self, plan: Plan, silos: int, samples: int) -> str:
        """In words, how a round is trained, and why."""
        return str(self.choice(plan, silos, samples))

    def call(self, tasks: Mapping[str, Task], timeout: float | None = None) -> dict[str, Reply | Failure]:
        """Carry out each task; what a silo refuses is its failure, and the others go on."""
        if any(isinstance(task, Wipe) or (isinstance(task, Forget) and task.commit) for task in tasks.values()):
            self._let_go()
        groups: list[dict[str, Train]] = []
        for name, task in sorted(tasks.items()):
            if not isinstance(task, Train) or name not in self._silos:
                continue
            group = next((group for group in groups if _are_one_round(task, next(iter(group.values())))), None)
            if group is None:
                groups.append({name: task})
            else:
                group[name] = task
        trained = {name for group in groups for name in group}
        # First what else is asked, a deletion among it: training then holds nothing of what goes.
        replies = self._alone.call({name: task for name, task in tasks.items() if name not in trained}, timeout)
        for group in groups:
            replies |= self._train(group)
        return replies

    def _train(self, tasks: Mapping[str, Train]) -> dict[str, Reply | Failure]:
        """One round of these silos; whoever cannot be trained says so alone."""
        task = next(iter(tasks.values()))
        work = self._work_of(task)
        if work.choice.link == "in-process":
            return self._alone.call(tasks)
        assert isinstance(work.program, Program)
        replies: dict[str, Reply | Failure] = {}
        samples: dict[str, tuple[Tensor, Tensor]] = {}
        states: dict[str, dict[str, Any] | None] = {}
        for name in tasks:
            try:
                silo = self._silos[name]
                x, y = silo.training_tensors(tasks[name])
                if len(y):
                    states[name] = silo.optimizer_state(tasks[name])
                    samples[name] = x, y
            except FedforgetError as error:
                replies[name] = Failure.of(name, error)
        if samples:
            held = self._hold(task, samples)
            turns = [Turn(name, held.first[name], len(samples[name][1]), states[name]) for name in samples]
            state = {name: tensor.to(self._device) for name, tensor in task.state.items()}
            try:
                with training.reproducible():
                    made = work.program.round(task.round, state, held.x, held.y, turns)
            except Exception as error:  # the model may be the user's; its text could tell of one silo to another
                told = f"round {task.round}: {type(error).__name__} in the batched program; --link in-process says more"
                return replies | {name: Failure(f"silo {name}, {told}") for name in samples}
            replies |= {
                turn.silo: self._ended(tasks[turn.silo], turn, one) for turn, one in zip(turns, made, strict=True)
            }
        # A silo that has nothing to train on says so itself.
        return replies | self._alone.call({name: tasks[name] for name in tasks if name not in replies})

    def _ended(self, task: Train, turn: Turn, turned: Turned) -> Trained | Failure:
        silo = self._silos[turn.silo]
        if not turned.finite:
            return Failure.of(turn.silo, silo.diverged(task, turned.loss))
        try:
            silo.keep_optimizer_state(task, turned.optimizer_state)
        except FedforgetError as error:
            return Failure.of(turn.silo, error)
        return Trained(turned.state, turn.count, turned.loss)

    def _program(self, plan: Plan) -> Program | str:
        """Made for each run: a model of the user's could carry something over from one to the next."""
        return program_for(self._registry, plan, self._device)

    def _work_of(self, task: Train) -> _Work:
        """Decided once a run, whoever takes part in a round: the two ways keep different optimizer states."""
        if self._work is None or (self._work.run, self._work.plan) != (task.run, task.plan):
            counts = [count for silo in self._silos.values() if (count := silo.training_count(task.plan))]
            silos, samples = min(task.plan.silos_per_round or len(counts), len(counts)), max(counts, default=1)
            program = self._program(task.plan)
            self._work = _Work(task.run, task.plan, program, self._chosen(program, task.plan, silos, samples))
        return self._work

    def _hold(self, task: Train, samples: Mapping[str, tuple[Tensor, Tensor]]) -> _Held:
        """All silos' samples in one piece, put together once a run and anew where a silo lost some."""
        held = self._held
        if (
            held is not None
            and (held.run, held.plan) == (task.run, task.plan)
            and all(x is held.parts.get(name) for name, (x, _) in samples.items())
        ):
            return held
        self._held = held = None
        found = {**self._others(task, samples), **samples}
        x, y = next(iter(found.values()))
        total = sum(len(labels) for _, labels in found.values())
        all_x, all_y = x.new_zeros(total + 1, *x.shape[1:]), y.new_zeros(total + 1)
        first: dict[str, int] = {}
        parts: dict[str, Tensor] = {}
        at = 0
        for name, (x, y) in sorted(found.items()):
            of_x, of_y = all_x[at : at + len(y)], all_y[at : at + len(y)]
            of_x.copy_(x)
            of_y.copy_(y)
            self._silos[name].hold(task, of_x, of_y)
            first[name], parts[name] = at, of_x
            at += len(y)
        self._held = _Held(task.run, task.plan, all_x, all_y, first, parts)
        return self._held

    def _others(self, task: Train, asked: Collection[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """The samples of the silos that are not asked now; one that refuses will say so when it is."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name in self._silos.keys() - set(asked):
            with suppress(FedforgetError):
                x, y = self._silos[name].training_tensors(task)
                if len(y):
                    found[name] = x, y
        return found

    def _let_go(self) -> None:
        """Drop what is held in one piece, of which every silo holds a part: rows that are deleted now are in it."""
        self._held = self._work = None
        for silo in self._silos.values():
            silo.let_go()


def _are_one_round(first: Train, second: Train) -> bool:
    return (first.run, first.plan, first.round) == (second.run, second.plan, second.round) and (
        first.state is second.state and first.fit is second.fit
    )
