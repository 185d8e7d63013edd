"""The whole pipeline on scikit-learn's digits, in seconds: what `fedforget demo` shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedforget.engine import Progress
from fedforget.errors import RunFolderError
from fedforget.methods import RapidRetrain
from fedforget.pipeline import Federation
from fedforget.report import write_report
from fedforget.sources import Origin, Partition
from fedforget.types import Choice, Plan
from fedforget.work import Share

SILOS = 10
FORGETS = "silo-3"
RATE = 0.02
# Each the best rate of its grid on a validation split: benchmarks/demo_rates.py.
BASELINE = Choice("sgd", {"lr": 1.0})
RAPID = Choice("diagonal-fisher", {"lr": 0.01})


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured; `sape` and the speed-ups compare `rapid` with the retrained baseline."""

    accuracy_before: float
    accuracy_retrain: float
    accuracy_rapid: float
    sape: float
    speedup_rounds: float | None
    speedup_time: float | None
    speedup_at_accuracy: float | None
    bit_identical: bool
    samples_deleted: int
    samples_total: int
    silos: int
    rounds: int
    optimizer_retrain: str
    optimizer_rapid: str
    digest: str
    run: str
    report: str

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)

    def lines(self) -> list[str]:
        """As people read it."""
        v = "no speed-up at equal accuracy"
        if self.speedup_rounds is not None and self.speedup_time is not None:
            v = f"v = {self.speedup_rounds:.2f} in rounds, {self.speedup_time:.2f} in time"
        proof = "bit for bit" if self.bit_identical else "NOT bit for bit"
        return [
            f"{self.silos} silos trained one model on {self.samples_total} digits: {100 * self.accuracy_before:.2f} %",
            f"{FORGETS} deleted {self.samples_deleted} samples (2 % of all), and every silo retrained a fresh model:",
            f"  retrain  {self.optimizer_retrain}: {100 * self.accuracy_retrain:.2f} %",
            f"  rapid    {self.optimizer_rapid}: {100 * self.accuracy_rapid:.2f} % (SAPE {self.sape:.1e}; {v})",
            f"A fresh process that never saw the deleted samples made, {proof}, the model that is served now:",
            f"  SHA-256 {self.digest}",
            f"The page about it: {self.report}",
            f"Try: fedforget releases {self.run} · fedforget forget {self.run} --silo silo-5 --ids 3,17,99",
        ]


def run_demo(folder: Path, on_round: Progress | None = None) -> DemoResult:
    """Train, forget, retrain, prove; the run stays in the folder."""
    origin = Origin("digits", Partition("even", SILOS))
    if on_round is None:
        federation = Federation.from_origin(origin, "mlp", folder=folder)
    else:
        federation = Federation.from_origin(origin, "mlp", folder=folder, on_round=on_round)
    if federation.releases:
        raise RunFolderError(f"{folder} holds a run already: choose another folder")
    before = federation.train(Plan(rounds=20, batch_size=32, optimizer=BASELINE, seed=0))
    after = federation.forget({FORGETS: Share(RATE)}, RapidRetrain(RAPID), baseline=True)
    verdict = after.verify()
    assert after.baseline is not None
    assert after.sape is not None
    assert after.speed_up is not None
    return DemoResult(
        accuracy_before=before.accuracy,
        accuracy_retrain=after.baseline.accuracy,
        accuracy_rapid=after.accuracy,
        sape=after.sape,
        speedup_rounds=after.speed_up.rounds,
        speedup_time=after.speed_up.time,
        speedup_at_accuracy=after.speed_up.accuracy,
        bit_identical=verdict.identical,
        samples_deleted=sum(after.deleted.values()),
        samples_total=sum(before.record.samples.values()),
        silos=len(federation.silos),
        rounds=len(after.records),
        optimizer_retrain=str(before.plan.optimizer),
        optimizer_rapid=str(after.plan.optimizer),
        digest=verdict.digest,
        run=str(folder),
        report=str(write_report(federation.folder)),
    )
