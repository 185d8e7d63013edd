"""The whole pipeline on scikit-learn's digits, in seconds: what `fedforget demo` shows."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedforget.engine import Progress
from fedforget.errors import RunFolderError
from fedforget.methods import RapidRetrain
from fedforget.pipeline import Federation, Options
from fedforget.release import Release
from fedforget.report import write_report
from fedforget.sources import Origin, Partition
from fedforget.types import Choice, Plan
from fedforget.verify.utility import sape, speed_up
from fedforget.work import Share

SILOS = 10
FORGETS = "silo-3"
RATE = 0.02
# Each the best rate of its grid on a validation split: benchmarks/demo_rates.py. Rapid's own default stays as it is.
BASELINE = Choice("sgd", {"lr": 1.0})
PAPERS_RULE = Choice("diagonal-fisher", {"lr": 0.03})


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured; `sape` and the speed-ups compare with the retrained baseline.

    What ends in `_paper` is rapid retraining by the paper's rule, what does not by rapid's default.
    """

    accuracy_before: float
    accuracy_retrain: float
    accuracy_rapid: float
    accuracy_paper: float
    sape: float
    sape_paper: float
    speedup_rounds: float | None
    speedup_time: float | None
    speedup_at_accuracy: float | None
    speedup_rounds_paper: float | None
    speedup_time_paper: float | None
    speedup_at_accuracy_paper: float | None
    bit_identical: bool
    samples_deleted: int
    samples_total: int
    silos: int
    rounds: int
    optimizer_retrain: str
    optimizer_rapid: str
    optimizer_paper: str
    digest: str
    run: str
    report: str

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)

    def lines(self) -> list[str]:
        """As people read it."""
        gain = _told(self.sape, self.speedup_rounds, self.speedup_time)
        gain_paper = _told(self.sape_paper, self.speedup_rounds_paper, self.speedup_time_paper)
        proof = "bit for bit" if self.bit_identical else "NOT bit for bit"
        return [
            f"{self.silos} silos trained one model on {self.samples_total} digits: {100 * self.accuracy_before:.2f} %",
            f"{FORGETS} deleted {self.samples_deleted} samples (2 % of all), and every silo retrained a fresh model:",
            f"  retrain  {self.optimizer_retrain}: {100 * self.accuracy_retrain:.2f} %",
            f"  rapid    by the paper's rule, {self.optimizer_paper}: {100 * self.accuracy_paper:.2f} % ({gain_paper})",
            f"  rapid    by default, {self.optimizer_rapid}: {100 * self.accuracy_rapid:.2f} % ({gain})",
            f"A fresh process that never saw the deleted samples made, {proof}, the model that is served now:",
            f"  SHA-256 {self.digest}",
            f"The page about it: {self.report}",
            f"Try: fedforget releases {self.run} · fedforget forget {self.run} --silo silo-5 --ids 3,17,99",
        ]


def _told(sape: float, rounds: float | None, time: float | None) -> str:
    if rounds is None or time is None:
        return f"SAPE {sape:.1e}; no speed-up at equal accuracy"
    return f"SAPE {sape:.1e}; v = {rounds:.2f} in rounds, {time:.2f} in time"


def run_demo(folder: Path, on_round: Progress | None = None) -> DemoResult:
    """Train, forget, retrain, prove; the run stays in the folder. Where it was killed, the same call goes on."""
    origin = Origin("digits", Partition("even", SILOS))
    progress: Options = {} if on_round is None else {"on_round": on_round}
    kept: Options = {**progress, "folder": folder}
    federation = Federation.from_origin(origin, "mlp", **kept)
    plan = federation.completed(Plan(rounds=20, batch_size=32, optimizer=BASELINE, seed=0))
    made = federation.releases
    if made and (made[0].plan != plan or len(made) > 2 or (folder / "report.html").exists()):
        raise RunFolderError(f"{folder} holds a run already: choose another folder")
    before = made[0] if made else federation.train(plan).record
    # Not by the share once more: that would be of what is left, and so other samples.
    if made and federation.folder.pending() is not None:
        after = federation.forget(baseline=True)
    elif len(made) == 2:
        after = federation.release
    else:
        after = federation.forget({FORGETS: Share(RATE)}, RapidRetrain(), baseline=True)
    verdict = after.verify()
    assert after.baseline is not None
    assert after.sape is not None
    assert after.speed_up is not None
    by_paper = _by_papers_rule(origin, before.plan, progress)
    speed_by_paper = speed_up(after.baseline.records, by_paper.records, len(by_paper.record.classes))
    return DemoResult(
        accuracy_before=before.records[-1].accuracy,
        accuracy_retrain=after.baseline.accuracy,
        accuracy_rapid=after.accuracy,
        accuracy_paper=by_paper.accuracy,
        sape=after.sape,
        sape_paper=sape(after.baseline.accuracy, by_paper.accuracy),
        speedup_rounds=after.speed_up.rounds,
        speedup_time=after.speed_up.time,
        speedup_at_accuracy=after.speed_up.accuracy,
        speedup_rounds_paper=speed_by_paper.rounds,
        speedup_time_paper=speed_by_paper.time,
        speedup_at_accuracy_paper=speed_by_paper.accuracy,
        bit_identical=verdict.identical,
        samples_deleted=sum(after.deleted.values()),
        samples_total=sum(before.samples.values()),
        silos=len(federation.silos),
        rounds=len(after.records),
        optimizer_retrain=str(before.plan.optimizer),
        optimizer_rapid=str(after.plan.optimizer),
        optimizer_paper=str(by_paper.plan.optimizer),
        digest=verdict.digest,
        run=str(folder),
        report=str(write_report(federation.folder)),
    )


def _by_papers_rule(origin: Origin, plan: Plan, progress: Options) -> Release:
    """The same deletion and rapid retraining by the paper's rule, in a federation that is thrown away."""
    federation = Federation.from_origin(origin, "mlp", **progress)
    # The model before does not enter the one after, so one round of it is enough here.
    federation.train(dataclasses.replace(plan, rounds=1))
    method = RapidRetrain(PAPERS_RULE, rounds=plan.rounds)
    return federation.forget({FORGETS: Share(RATE)}, method)
