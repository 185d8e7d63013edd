"""The reference of an exact method: the same work in a fresh process, on sources built without the deleted rows.

Nothing of the run's folder is given to that process: no tombstones, no optimizer state, no weights, and of the samples
only those that remain.
"""

from __future__ import annotations

import io
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
from fedforget.federation.links.local import local_link
from fedforget.federation.registry import Registry
from fedforget.federation.silo import Silo
from fedforget.federation.training import adopt
from fedforget.methods import Method
from fedforget.types import Deletion, Fit, History, Plan, Samples, State


@dataclass(frozen=True)
class ReferenceJob:
    """All that decides the reference: a plan to train, or a method to apply to it, and the samples that remain."""

    plan: Plan
    method: Method | None
    remaining: Mapping[str, Samples]
    test: Samples | None
    registry: Registry
    device: str
    environment: Mapping[str, str | int]
    link: str


@dataclass(frozen=True)
class Reference:
    """What the fresh process made."""

    plan: Plan
    state: State
    fit: Fit | None
    samples: Mapping[str, int]


def in_fresh_process(job: ReferenceJob) -> Reference:
    """Carry the job out in a new interpreter and an empty folder."""
    # Imported here, for only this needs it: models and methods defined in a script or notebook are sent by value.
    import cloudpickle

    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", "from fedforget.reference import main; main()"]
    # Samples and weights go by pipes: files of them would outlive a killed process.
    done = subprocess.run(
        command,
        input=cloudpickle.dumps(job),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise FedforgetError(f"the reference could not be trained in a fresh process: {reason}")
    made = torch.load(io.BytesIO(done.stdout), weights_only=True)
    plan = Plan.from_dict(json.loads(made["plan"]))
    return Reference(plan, made["state"], Fit(**made["fit"]) if made["fit"] else None, made["samples"])


def carry_out(job: ReferenceJob, folder: Path) -> Reference:
    """Carry the job out here, with silos that know nothing of the past."""
    device = torch.device(job.device)
    silos = []
    for name, samples in job.remaining.items():
        own = folder / "silos" / name
        own.mkdir(parents=True)
        silos.append(Silo(name, samples, Tombstones(own), job.registry, own, device))
    coordinator = Coordinator(
        local_link(job.link, silos, job.registry, device),
        job.registry,
        "reference",
        device,
        job.test,
    )
    samples_by_silo, _ = coordinator.count(job.plan)
    if job.method is None:
        result = coordinator.train(job.plan)
    else:
        result = job.method.unlearn(History(job.plan), Deletion({}), coordinator)
    return Reference(result.plan, result.state, result.fit, samples_by_silo)


def main() -> None:
    """Carry out the job that comes by standard input, and answer on standard output with what it made."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What a model of the user's prints is no part of the answer.
    job = pickle.load(sys.stdin.buffer)
    adopt(job.environment)
    try:
        with tempfile.TemporaryDirectory(prefix="fedforget-reference-") as name:
            made = carry_out(job, Path(name))
    except FedforgetError as error:
        sys.exit(str(error))
    content = {
        "plan": json.dumps(made.plan.as_dict()),
        "state": made.state,
        "fit": vars(made.fit) if made.fit else None,
        "samples": dict(made.samples),
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with answer:
        answer.write(buffer.getbuffer())
