"""All silos in this process, one after the other in name order: the link that reads like Algorithm 1.

On an accelerator, which is told of work before it has done the work before, all silos' turns are begun before the first
reply is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fedforget.errors import FedforgetError
from fedforget.federation.link import Failure, Reply, Task
from fedforget.federation.silo import Silo
from fedforget.types import Plan


class InProcessLink:
    """Hands tasks to silos by calling them. `timeout` has no effect here: a call in one's own process always ends."""

    def __init__(self, silos: Iterable[Silo]) -> None:
        self._silos = {silo.name: silo for silo in sorted(silos, key=lambda silo: silo.name)}

    @property
    def name(self) -> str:
        """As a run's settings name it."""
        return "in-process"

    @property
    def silos(self) -> tuple[str, ...]:
        """The names of all silos, in name order."""
        return tuple(self._silos)

    def how(self, plan: Plan, silos: int, samples: int) -> str:  # noqa: ARG002  # always alike
        """In words, how a round is trained."""
        return "in-process: one silo after the other"

    def call(self, tasks: Mapping[str, Task], timeout: float | None = None) -> dict[str, Reply | Failure]:  # noqa: ARG002
        """Carry out each task; what a silo refuses is its failure, and the others go on."""
        replies: dict[str, Reply | Failure] = {}
        begun: dict[str, Callable[[], Reply]] = {}
        for name in sorted(tasks):
            if name not in self._silos:
                replies[name] = Failure(f"silo {name} is unknown to this link")
                continue
            try:
                begun[name] = self._silos[name].begin(tasks[name])
            except FedforgetError as error:
                replies[name] = Failure.of(name, error)
        for name, end in begun.items():
            try:
                replies[name] = end()
            except FedforgetError as error:
                replies[name] = Failure.of(name, error)
        return replies
