"""All silos in this process, trained together: one program takes a step of every silo that has a batch left.

Where many small steps cost more to launch than to compute, that is many times faster than one silo after the other.
Whatever is no training goes to the silos one by one, and so does training that cannot be batched, or would not gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
MOST_MULTIPLICATIONS = {"cpu": 2**24, "cuda": 2**31}
"""Of a silo's forward pass of one batch. Below, a step costs more to launch than to compute."""


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
        self._programs: dict[str, Program | str] = {}
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
        program = self._program(plan)
        if isinstance(program, str):
            return Choice("in-process", program)
        if not self._auto:
            return Choice("batched", "as asked for")
        batch = min(plan.batch_size, samples)
        work = batch * program.multiplications
        most = MOST_MULTIPLICATIONS[self._device.type]
        if silos < LEAST_SILOS:
            return Choice("in-process", f"{silos} silos in a round, and fewer than {LEAST_SILOS} gain little")
        if work > most:
            return Choice(
                "in-process",
                f"a batch of {batch} takes {work:.1e} multiplications, and over {most:.1e} a step computes longer than "
                "it takes to launch",
            )
        return Choice("batched", f"{silos} silos in a round, and a batch of {batch} takes {work:.1e} multiplications")

    def how(self, plan: Plan, silos: int, samples: int) -> str:
        """In words, how a round is trained, and why."""
        return str(self.choice(plan, silos, samples))

    def call(self, tasks: Mapping[str, Task], timeout: float | None = None) -> dict[str, Reply | Failure]:
        """Carry out each task; what a silo refuses is its failure, and the others go on."""
        groups: list[dict[str, Train]] = []
        for name, task in sorted(tasks.items()):
            if not isinstance(task, Train) or name not in self._silos:
                continue
            group = next((group for group in groups if _are_one_round(task, next(iter(group.values())))), None)
            if group is None:
                groups.append({name: task})
            else:
                group[name] = task
        if not groups:
            if any(isinstance(task, Forget | Wipe) for task in tasks.values()):
                self._let_go()
            return self._alone.call(tasks, timeout)
        replies: dict[str, Reply | Failure] = {}
        for group in groups:
            replies |= self._train(group)
        return replies | self._alone.call({name: tasks[name] for name in tasks if name not in replies}, timeout)

    def _train(self, tasks: Mapping[str, Train]) -> dict[str, Reply | Failure]:
        """One round of these silos; those that cannot be trained are left out or failures."""
        task = next(iter(tasks.values()))
        replies: dict[str, Reply | Failure] = {}
        sizes: dict[str, int] = {}
        for name in tasks:
            try:
                sizes[name] = len(self._silos[name].training_tensors(tasks[name])[1])
            except FedforgetError as error:
                replies[name] = Failure.of(name, error)
        # A silo that has nothing to train on says so itself.
        present = [name for name, size in sizes.items() if size]
        if not present or self.choice(task.plan, len(present), max(sizes.values())).link == "in-process":
            return replies | self._alone.call({name: tasks[name] for name in sizes})
        program = self._program(task.plan)
        assert isinstance(program, Program)
        try:
            held = self._hold(task, present)
            turns = [
                Turn(name, held.first[name], sizes[name], self._silos[name].optimizer_state(tasks[name]))
                for name in present
            ]
            state = {name: tensor.to(self._device) for name, tensor in task.state.items()}
            with training.reproducible():
                made = program.round(task.round, state, held.x, held.y, turns)
        except FedforgetError as error:
            return replies | {name: Failure.of(name, error) for name in present}
        except Exception as error:  # the model may be the user's: whatever it raises is told
            told = f", round {task.round}: {type(error).__name__}: {error}"
            return replies | {name: Failure(f"silo {name}{told}") for name in present}
        for name, turned, turn in zip(present, made, turns, strict=True):
            replies[name] = self._ended(tasks[name], turn, turned)
        return replies | self._alone.call({name: tasks[name] for name in sizes if name not in replies})

    def _ended(self, task: Train, turn: Turn, turned: Turned) -> Trained | Failure:
        silo = self._silos[turn.silo]
        if not turned.finite:
            return Failure.of(turn.silo, silo.diverged(task, turned.loss))
        kept = turned.optimizer_state
        if task.durable:
            # Written to disk a row would bring along what it is a row of: all other silos' states.
            kept = {name: value.clone() if isinstance(value, Tensor) else value for name, value in kept.items()}
        try:
            silo.keep_optimizer_state(task, kept)
        except FedforgetError as error:
            return Failure.of(turn.silo, error)
        return Trained(turned.state, turn.count, turned.loss)

    def _program(self, plan: Plan) -> Program | str:
        key = plan.digest()
        if key not in self._programs:
            # One plan at a time is trained; a try that diverged is followed by another.
            self._programs = {key: program_for(self._registry, plan, self._device)}
        return self._programs[key]

    def _hold(self, task: Train, names: Sequence[str]) -> _Held:
        """All silos' samples in one piece, put together once a run and anew where a silo lost some."""
        held = self._held
        if (
            held is not None
            and (held.run, held.plan) == (task.run, task.plan)
            and all(self._silos[name].training_tensors(task)[0] is held.parts.get(name) for name in names)
        ):
            return held
        self._held = None
        sizes = {name: self._size(name, task) for name in self._silos}
        x, y = self._silos[names[0]].training_tensors(task)
        total = sum(sizes.values())
        all_x, all_y = x.new_zeros(total + 1, *x.shape[1:]), y.new_zeros(total + 1)
        first: dict[str, int] = {}
        parts: dict[str, Tensor] = {}
        at = 0
        for name, size in sizes.items():
            if not size:
                continue
            of_x, of_y = all_x[at : at + size], all_y[at : at + size]
            x, y = self._silos[name].training_tensors(task)
            of_x.copy_(x)
            of_y.copy_(y)
            self._silos[name].hold(task, of_x, of_y)
            first[name], parts[name] = at, of_x
            at += size
        self._held = _Held(task.run, task.plan, all_x, all_y, first, parts)
        return self._held

    def _let_go(self) -> None:
        """Drop what is held in one piece, of which every silo holds a part: rows that are deleted now are in it."""
        self._held = None
        for silo in self._silos.values():
            silo.let_go()

    def _size(self, name: str, task: Train) -> int:
        """How many samples a silo trains on; none where it refuses, which it will say when it is asked."""
        try:
            return len(self._silos[name].training_tensors(task)[1])
        except FedforgetError:
            return 0


def _are_one_round(first: Train, second: Train) -> bool:
    return (first.run, first.plan, first.round) == (second.run, second.plan, second.round) and (
        first.state is second.state and first.fit is second.fit
    )
