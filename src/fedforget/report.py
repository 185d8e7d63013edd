"""RUN/report.html: one page about a run, readable without a network."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from fedforget.errors import RunFolderError
from fedforget.runs import ReleaseRecord, RunFolder
from fedforget.types import RoundRecord
from fedforget.verify.utility import sape, speed_up

Found = TypeVar("Found")
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a;
  background: #fff; }
h1 { margin-bottom: 0; line-height: 1.2; } h2 { margin: 2.5rem 0 .5rem; font-size: 1.25rem; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .5rem; vertical-align: top; border-bottom: 1px solid #ddd; }
th { vertical-align: bottom; color: #555; font-weight: 600; } .number { text-align: right; white-space: nowrap; }
.note { font-size: .875rem; color: #555; } code { overflow-wrap: anywhere; }
.verdict { padding: .8rem 1rem; border-left: .4rem solid #888; background: #f5f5f5; }
.good { border-color: #1b7f3b; background: #eef8f0; } .bad { border-color: #b3261e; background: #fbeeed; }
svg { width: 100%; height: auto; } .scroll { overflow-x: auto; }
"""

DRAWN = 8
"""How many runs the figure shows at most: with more, none can be told from another."""


@dataclass(frozen=True)
class Curve:
    """A training run as the page draws and compares it."""

    title: str
    optimizer: str
    records: tuple[RoundRecord, ...]
    baseline: tuple[RoundRecord, ...] | None
    """What it is compared with; None for a run that is compared with nothing."""
    metrics: dict[str, float]
    is_baseline: bool = False


def write_report(folder: RunFolder) -> Path:
    """Write the page anew from what the run's folder holds."""
    records = folder.releases()
    folder.write_text("report.html", page(folder, records))
    return folder.path / "report.html"


def page(folder: RunFolder, records: Sequence[ReleaseRecord]) -> str:
    """The page's HTML."""
    curves: list[Curve] = []
    optimizer = ""
    for record in records:
        if record.method is None:
            optimizer = str(record.plan.optimizer)
        curves += _curves(folder, record, optimizer)
    drawn = curves if len(curves) <= DRAWN else [curves[0], *curves[1 - DRAWN :]]
    classes = len(records[-1].classes)
    description = folder.description()
    origin = description["origin"]
    name = escape(folder.path.resolve().name)
    sections = [
        f"<h1>{name}</h1>",
        f"<p>{escape(origin['dataset'] if origin else 'data given in Python')}, model {escape(description['model'])}, "
        f"{len(description['silos'])} silos; release {records[-1].version} is served.</p>",
        _verdict(folder, records[-1]),
        "<h2>Accuracy by round and by training time</h2>",
        _figure(drawn),
        *([f'<p class="note">Drawn are the first run and the newest {DRAWN - 1}.</p>'] if drawn != curves else []),
        "<h2>Runs compared</h2>",
        _comparison(curves, classes),
        '<p class="note">SAPE and the speed-up v compare with the retrained baseline on the same remaining samples; v '
        "is taken at equal accuracy: the lowest, over the two runs, of the mean accuracy over the last five rounds. "
        "Times are of training alone, on the machine that made the run. d<sub>u</sub> is the mean distance between the "
        "outputs of a release and of the one that it replaced.</p>",
        "<h2>Deletions</h2>",
        _deletions(records),
        "<h2>Releases</h2>",
        _releases(records),
        f'<p class="note">Silos of release {records[-1].version} were trained {escape(records[-1].trained)}.</p>',
    ]
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}: fedforget report</title>"
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _curves(folder: RunFolder, record: ReleaseRecord, original: str) -> list[Curve]:
    baseline = _readable(folder.baseline, record.version)
    title = f"{record.method or 'original'} (release {record.version})"
    curves = [Curve(title, str(record.plan.optimizer), record.records, baseline, record.metrics)]
    if baseline is not None:
        curves.append(Curve(f"retrain (baseline of release {record.version})", original, baseline, None, {}, True))
    return curves


def _readable(read: Callable[[int], Found | None], version: int) -> Found | None:
    """What lies beside a release; a damaged document is left out, for the page must not stop a deletion."""
    try:
        return read(version)
    except RunFolderError:
        return None


def _verdict(folder: RunFolder, record: ReleaseRecord) -> str:
    found = _readable(folder.verification, record.version)
    if found is None:
        text = f"Release {record.version} is not verified yet: fedforget verify {folder.path}"
        return f'<p class="verdict">{escape(text)}</p>'
    without = (
        f"a federation that never held the {found['deleted']} deleted samples"
        if found["deleted"]
        else "a second training"
    )
    if found["identical"]:
        return (
            f'<p class="verdict good">Verified: release {record.version} is bit for bit the model of {without}.<br>'
            f"SHA-256 of the weights: <code>{escape(found['digest'])}</code></p>"
        )
    text = f"Release {record.version} is NOT the model of {without}."
    return f'<p class="verdict bad">{text}</p>'


def _figure(curves: Sequence[Curve]) -> str:
    # Imported here: the core runs where matplotlib is not installed.
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context({"svg.hashsalt": "fedforget", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        by_round, by_time = figure.subplots(1, 2, sharey=True)
        for curve in curves:
            accuracy = [100 * record.accuracy for record in curve.records]
            seconds = list(accumulate(record.seconds for record in curve.records))
            # One round alone makes no line: its mark shows where it is.
            style = {"linestyle": "--" if curve.is_baseline else "-", "marker": "o", "markersize": 2.5}
            by_round.plot([record.round for record in curve.records], accuracy, label=curve.title, **style)
            by_time.plot(seconds, accuracy, **style)
        by_round.set(xlabel="round", ylabel="accuracy (%)")
        by_round.xaxis.set_major_locator(MaxNLocator(integer=True))
        by_time.set(xlabel="seconds of training")
        for axes in (by_round, by_time):
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    drawing = picture.getvalue()[picture.getvalue().index("<svg") :]
    label = '<svg role="img" aria-label="Accuracy of each run by round and by seconds of training"'
    return re.sub(r"\s*<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL).replace("<svg", label, 1)


def _comparison(curves: Sequence[Curve], classes: int) -> str:
    rows, notes = [], []
    for curve in curves:
        baseline = curve.baseline
        speed = speed_up(baseline, curve.records, classes, curve.metrics) if baseline else None
        if discarded := curve.metrics.get("discarded_rounds"):
            notes.append(
                f'<p class="note">{escape(curve.title)}: {discarded:g} rounds of tries with larger steps diverged '
                "before it; they count in v.</p>"
            )
        if speed is not None and speed.reason is not None:
            notes.append(f'<p class="note">{escape(curve.title)}: no v, for {escape(speed.reason)}.</p>')
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
            f"{1000 * seconds:.1f}",
            f"{sum(record.bytes for record in curve.records) / len(curve.records) / 1e6:.3g}",
            f"{curve.metrics['output_distance']:.3f}" if "output_distance" in curve.metrics else "–",
        ])  # fmt: skip
    heads = ["run", "optimizer", "accuracy", "SAPE", "v<br>in rounds", "v<br>in time", "at<br>accuracy", "rounds",
             "ms<br>a round", "MB<br>a round", "d<sub>u</sub>"]  # fmt: skip
    return "\n".join([_table(heads, rows, texts=2), *notes])


def _deletions(records: Sequence[ReleaseRecord]) -> str:
    rows = [
        [str(record.version), name, str(count), str(record.samples.get(name, 0))]
        for record in records
        for name, count in record.deleted.items()
    ]
    if not rows:
        return "<p>No sample was deleted.</p>"
    return _table(["release", "silo", "samples deleted", "training samples left there"], rows, texts=2)


def _releases(records: Sequence[ReleaseRecord]) -> str:
    rows = [
        [
            str(record.version),
            "served" if record is records[-1] else "revoked, weights destroyed",
            record.method or "train",
            record.guarantee or "–",
            record.created[:19].replace("T", " "),
            record.digest[:16] + "…",
        ]
        for record in records
    ]
    return _table(
        ["release", "state", "made by", "guarantee", "made at (UTC)", "SHA-256 of the weights"], rows, texts=6
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int) -> str:
    """A table whose first `texts` columns are text, and the others numbers."""

    def line(kind: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{kind}>{cell}</{kind}>" if column < texts else f'<{kind} class="number">{cell}</{kind}>'
            for column, cell in enumerate(cells)
        )

    body = "\n".join(f"<tr>{line('td', [escape(cell) for cell in row])}</tr>" for row in rows)
    head = f"<thead><tr>{line('th', heads)}</tr></thead>"
    return f'<div class="scroll"><table>{head}\n<tbody>\n{body}\n</tbody></table></div>'


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.2f} %"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} ×"
