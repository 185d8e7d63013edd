"""RUN/report.html: one page about a run, readable without a network."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path

from fedforget.runs import ReleaseRecord, RunFolder, records_from_data
from fedforget.types import RoundRecord
from fedforget.verify.utility import sape, speed_up

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top; }
.verdict { padding: .8rem 1rem; border-left: .4rem solid #888; background: #f5f5f5; }
.good { border-color: #1b7f3b; background: #eef8f0; } .bad { border-color: #b3261e; background: #fbeeed; }
svg { width: 100%; height: auto; } .scroll { overflow-x: auto; }
"""


@dataclass(frozen=True)
class Curve:
    """A training run as the page draws and compares it."""

    title: str
    optimizer: str
    records: tuple[RoundRecord, ...]
    baseline: tuple[RoundRecord, ...] | None
    """What it is compared with; None for a run that is compared with nothing."""
    metrics: dict[str, float]


def write_report(folder: RunFolder) -> Path:
    """Write the page anew from what the run's folder holds."""
    records = [folder.release(version) for version in folder.versions()]
    folder.write_text("report.html", page(folder, records))
    return folder.path / "report.html"


def page(folder: RunFolder, records: Sequence[ReleaseRecord]) -> str:
    """The page's HTML."""
    curves = [curve for record in records for curve in _curves(folder, record)]
    classes = len(records[-1].classes)
    description = folder.description()
    origin = description["origin"]
    sections = [
        f"<h1>{escape(str(folder.path.resolve().name))}</h1>",
        f"<p>{escape(origin['dataset'] if origin else 'data given in Python')}, model {escape(description['model'])}, "
        f"{len(description['silos'])} silos; release {records[-1].version} is served.</p>",
        _verdict(folder, records[-1]),
        "<h2>Accuracy by round and by training time</h2>",
        _figure(curves),
        "<h2>Runs compared</h2>",
        _comparison(curves, classes),
        "<p>SAPE and the speed-up v compare with the retrained baseline on the same remaining samples; v is taken at "
        "equal accuracy: the lowest, over the two runs, of the mean accuracy over the last five rounds. Times are of "
        "training alone, on the machine that made the run. d<sub>u</sub> is the mean distance between the outputs of a "
        "release and of the one that it replaced.</p>",
        "<h2>Deletions</h2>",
        _deletions(records),
        "<h2>Releases</h2>",
        _releases(records),
    ]
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>fedforget report</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _curves(folder: RunFolder, record: ReleaseRecord) -> list[Curve]:
    beside = folder.attached(record.version, "baseline")
    baseline = records_from_data(beside["records"]) if beside else None
    title = f"{record.method or 'train'} (release {record.version})"
    curves = [Curve(title, str(record.plan.optimizer), record.records, baseline, record.metrics)]
    if baseline is not None:
        curves.append(
            Curve(f"retrained baseline of release {record.version}", "the original plan's", baseline, None, {})
        )
    return curves


def _verdict(folder: RunFolder, record: ReleaseRecord) -> str:
    found = folder.attached(record.version, "verification")
    if found is None:
        text = f"Release {record.version} is not verified yet: fedforget verify {folder.path}"
        return f'<p class="verdict">{escape(text)}</p>'
    if found["identical"]:
        return (
            f'<p class="verdict good">Verified: release {record.version} is bit for bit the model of a federation '
            f"that never held the {found['deleted']} deleted samples.<br>"
            f"SHA-256 of the weights: {escape(found['digest'])}</p>"
        )
    text = f"Release {record.version} is NOT the model of a federation that never held what was deleted."
    return f'<p class="verdict bad">{text}</p>'


def _figure(curves: Sequence[Curve]) -> str:
    # Imported here: the core runs where matplotlib is not installed.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "fedforget", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        by_round, by_time = figure.subplots(1, 2, sharey=True)
        for curve in curves:
            accuracy = [100 * record.accuracy for record in curve.records]
            seconds = list(accumulate(record.seconds for record in curve.records))
            dashes = "--" if curve.title.startswith("retrained") else "-"
            by_round.plot([record.round for record in curve.records], accuracy, dashes, label=curve.title)
            by_time.plot(seconds, accuracy, dashes)
        by_round.set(xlabel="round", ylabel="accuracy (%)")
        by_time.set(xlabel="seconds of training")
        for axes in (by_round, by_time):
            axes.grid(alpha=0.3)
        by_round.legend(loc="lower right")
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()[picture.getvalue().index("<svg") :]


def _comparison(curves: Sequence[Curve], classes: int) -> str:
    rows = []
    for curve in curves:
        baseline = curve.baseline
        speed = speed_up(baseline, curve.records, classes) if baseline else None
        seconds = sum(record.seconds for record in curve.records) / len(curve.records)
        rows.append([
            curve.title,
            curve.optimizer,
            _percent(curve.records[-1].accuracy),
            f"{sape(baseline[-1].accuracy, curve.records[-1].accuracy):.2e}" if baseline else "–",
            _times(speed.rounds if speed else None),
            _times(speed.time if speed else None),
            _percent(speed.accuracy) if speed and speed.accuracy is not None else "–",
            str(len(curve.records)),
            f"{1000 * seconds:.1f} ms",
            f"{sum(record.bytes for record in curve.records) / len(curve.records) / 1e6:.2f} MB",
            f"{curve.metrics['output_distance']:.3f}" if "output_distance" in curve.metrics else "–",
        ])  # fmt: skip
    heads = ["run", "optimizer", "accuracy", "SAPE", "v in rounds", "v in time", "at accuracy", "rounds",
             "time a round", "bytes a round", "d<sub>u</sub>"]  # fmt: skip
    return _table(heads, rows)


def _deletions(records: Sequence[ReleaseRecord]) -> str:
    rows = [
        [str(record.version), name, str(count), str(record.samples.get(name, 0))]
        for record in records
        for name, count in record.deleted.items()
    ]
    if not rows:
        return "<p>No sample was deleted.</p>"
    return _table(["release", "silo", "samples deleted", "training samples left there"], rows)


def _releases(records: Sequence[ReleaseRecord]) -> str:
    rows = [
        [
            str(record.version),
            "served" if record is records[-1] else "revoked, weights destroyed",
            record.method or "train",
            record.guarantee or "–",
            record.created,
            record.digest[:16] + "…",
        ]
        for record in records
    ]
    return _table(["release", "state", "made by", "guarantee", "made at (UTC)", "SHA-256 of the weights"], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.2f} %"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} ×"
