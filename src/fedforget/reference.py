"""The reference of an exact method: the same work in a fresh process, on sources built without the deleted rows.

Nothing of the run's folder is given to that process: no tombstones, no optimizer state, no weights, and of the samples
only those that remain.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fedforget.data.tombstones import Tombstones
from fedforget.errors import FedforgetError
from fedforget.federation.coordinator import Coordinator
from fedforget.federation.links.in_process import InProcessLink
from fedforget.federation.registry import Registry
from fedforget.federation.silo import Silo
from fedforget.methods import Method
from fedforget.types import Deletion, History, Plan, Samples, State


@dataclass(frozen=True)
class ReferenceJob:
    """All that decides the reference: a plan to train, or a method to apply to it, and the samples that remain."""

    plan: Plan
    method: Method | None
    remaining: Mapping[str, Samples]
    test: Samples | None
    registry: Registry
    device: str
    threads: int


@dataclass(frozen=True)
class Reference:
    """What the fresh process made."""

    state: State
    samples: Mapping[str, int]


def in_fresh_process(job: ReferenceJob) -> Reference:
    """Carry the job out in a new interpreter and an empty folder."""
    # Imported here, for only this needs it: models and methods defined in a script or notebook are sent by value.
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="fedforget-reference-") as name:
        folder = Path(name)
        (folder / "job.pickle").write_bytes(cloudpickle.dumps(job))
        path = os.pathsep.join(entry for entry in sys.path if entry)
        command = [sys.executable, "-c", "from fedforget.reference import main; main()", str(folder)]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise FedforgetError(f"the reference could not be trained in a fresh process: {reason}")
        state = torch.load(folder / "state.pt", weights_only=True)
        return Reference(state, json.loads((folder / "samples.json").read_text()))


def carry_out(job: ReferenceJob, folder: Path) -> Reference:
    """Carry the job out here, with silos that know nothing of the past."""
    device = torch.device(job.device)
    silos = []
    for name, samples in job.remaining.items():
        own = folder / "silos" / name
        own.mkdir(parents=True)
        silos.append(Silo(name, samples, Tombstones(own), job.registry, own, device))
    coordinator = Coordinator(InProcessLink(silos), job.registry, "reference", device, job.test)
    samples_by_silo, _ = coordinator.count(job.plan)
    if job.method is None:
        result = coordinator.train(job.plan)
    else:
        result = job.method.unlearn(History(job.plan), Deletion({}), coordinator)
    return Reference(result.state, samples_by_silo)


def main() -> None:
    """Carry out the job in the folder that the command line names, and leave what it made there."""
    folder = Path(sys.argv[1])
    job = pickle.loads((folder / "job.pickle").read_bytes())
    torch.set_num_threads(job.threads)
    try:
        made = carry_out(job, folder)
    except FedforgetError as error:
        sys.exit(str(error))
    torch.save(made.state, folder / "state.pt")
    (folder / "samples.json").write_text(json.dumps(dict(made.samples)))
