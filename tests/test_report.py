"""The page about a run: whole, readable without a network, and true to what the folder holds."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedforget.report import DRAWN, write_report
from fedforget.runs import RunFolder, records_from_data
from fedforget.verify.utility import sape, speed_up
from tests.commands import TRAIN, done

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Reads the page strictly: every element is closed, in order; keeps tables, and whatever leads elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attributes if name.split(":")[-1] in ("href", "src", "data")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag == "br" and "th" in self.open:
            self.tables[-1][-1][-1] += " "
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and ("td" in self.open or "th" in self.open):
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a training, a deletion with its baseline, and a verdict."""
    run = tmp_path_factory.mktemp("reported") / "run <1>"
    done("train", *TRAIN, "--rounds", 6, "--out", run)
    done("forget", run, "--silo", "silo-1", "--silo", "silo-2", "--fraction", 0.02, "--baseline")
    done("verify", run)
    return run


@pytest.fixture
def run(reported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reported, tmp_path / reported.name))


def text_of(run: Path) -> str:
    return (run / "report.html").read_text()


def drawing(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + len("</svg>")])


def test_it_is_whole_and_needs_no_network(reported: Path) -> None:
    text = text_of(reported)
    page = Page(text)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert all(reference.startswith("#") for reference in page.references)
    assert "url(" not in text.replace("url(#", "")
    assert "@import" not in text
    # Names of XML namespaces look like addresses, but nothing is fetched from there.
    assert set(re.findall(r'(\S+)="https?://', text)) <= {"xmlns", "xmlns:xlink"}
    assert re.findall(r"https?:(?!//www\.w3\.org/)", text) == []


def test_names_are_escaped(run: Path) -> None:
    assert "<h1>run &lt;1&gt;</h1>" in text_of(run)
    record = run / "releases/2/release.json"
    record.write_text(record.read_text().replace('"muon"', '"own:<1>"'))
    write_report(RunFolder.open(run))
    assert "own:&lt;1&gt;" in text_of(run)
    assert "<1>" not in text_of(run)


def test_the_figure_has_a_curve_for_each_run(reported: Path) -> None:
    svg = drawing(text_of(reported))
    labels = {"".join(element.itertext()).strip() for element in svg.iter() if element.tag.endswith("}text")}
    assert {"original (release 1)", "rapid (release 2)", "retrain (baseline of release 2)"} <= labels
    assert {"round", "seconds of training", "accuracy (%)"} <= labels
    paths = [element.get("d", "") for element in svg.iter() if element.tag.endswith("}path")]
    # A curve of six rounds moves once and then draws five lines; three of them by round, and three by time.
    assert sum((d.count("M"), d.count("L")) == (1, 5) for d in paths) == 6


def test_runs_compared(reported: Path) -> None:
    folder = RunFolder.open(reported)
    baseline = records_from_data(json.loads((reported / "releases/2/baseline.json").read_text())["records"])
    rapid, speed = folder.release(2), speed_up(baseline, folder.release(2).records, 10)
    assert speed.accuracy is not None
    head, *rows = Page(text_of(reported)).tables[0]
    table = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert list(table) == ["original (release 1)", "rapid (release 2)", "retrain (baseline of release 2)"]
    row = table["rapid (release 2)"]
    assert row["optimizer"] == "muon"
    assert row["accuracy"] == f"{100 * rapid.records[-1].accuracy:.2f} %"
    assert row["SAPE"] == f"{sape(baseline[-1].accuracy, rapid.records[-1].accuracy):.2e}"
    assert row["v in rounds"] == f"{speed.rounds:.2f} ×"
    assert row["v in time"] == f"{speed.time:.2f} ×"
    assert row["at accuracy"] == f"{100 * speed.accuracy:.2f} %"
    assert row["rounds"] == "6"
    assert row["du"] == f"{rapid.metrics['output_distance']:.3f}"
    assert row["MB a round"] == f"{rapid.metrics['bytes_per_round'] / 1e6:.3g}"
    assert row["ms a round"] == f"{1000 * rapid.metrics['seconds_per_round']:.1f}"
    row = table["retrain (baseline of release 2)"]
    assert (row["optimizer"], row["SAPE"], row["v in rounds"]) == ("sgd(lr=0.2)", "–", "–")
    assert row["accuracy"] == f"{100 * baseline[-1].accuracy:.2f} %"


def test_deletions_and_releases(reported: Path) -> None:
    record = RunFolder.open(reported).release(2)
    _, deletions, releases = Page(text_of(reported)).tables
    assert deletions[1:] == [["2", name, "29", str(record.samples[name])] for name in ("silo-1", "silo-2")]
    assert [row[:4] for row in releases[1:]] == [
        ["1", "revoked, weights destroyed", "train", "–"],
        ["2", "served", "rapid", "exact"],
    ]
    assert releases[2][5] == record.digest[:16] + "…"


def test_verdicts(run: Path) -> None:
    digest = RunFolder.open(run).release(2).digest
    assert (
        'class="verdict good">Verified: release 2 is bit for bit the model of a federation that never held the 58 '
        in (text_of(run))
    )
    assert digest in text_of(run)
    verdict = run / "releases/2/verification.json"
    verdict.write_text(json.dumps({**json.loads(verdict.read_text()), "identical": False}))
    write_report(RunFolder.open(run))
    assert 'class="verdict bad">Release 2 is NOT the model of a federation that never held the 58 ' in text_of(run)
    verdict.unlink()
    write_report(RunFolder.open(run))
    assert 'class="verdict">Release 2 is not verified yet: fedforget verify ' in text_of(run)
    assert "Verified" not in text_of(run)


def test_a_comparison_that_cannot_be_made_says_why(run: Path) -> None:
    baseline = run / "releases/2/baseline.json"
    content = json.loads(baseline.read_text())
    for record in content["records"]:
        record["accuracy"] = 0.1
    baseline.write_text(json.dumps(content))
    write_report(RunFolder.open(run))
    assert "rapid (release 2): no v, for the baseline did not train." in text_of(run)
    content["records"][-1]["accuracy"] = None
    baseline.write_text(json.dumps(content))
    write_report(RunFolder.open(run))
    head, *rows = Page(text_of(run)).tables[0]
    assert rows[2][head.index("accuracy")] == "–"


def test_a_training_alone(run: Path) -> None:
    shutil.rmtree(run / "releases/2")
    write_report(RunFolder.open(run))
    assert "No sample was deleted." in text_of(run)
    comparison, releases = Page(text_of(run)).tables
    assert (len(comparison), len(releases)) == (2, 2)


def test_of_many_releases_the_newest_are_drawn(run: Path) -> None:
    for version in range(3, 13):
        shutil.copytree(run / "releases/2", run / f"releases/{version}")
        record = run / f"releases/{version}/release.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "version": version}))
        (run / f"releases/{version}/baseline.json").unlink()
    write_report(RunFolder.open(run))
    text = text_of(run)
    labels = ["".join(element.itertext()).strip() for element in drawing(text).iter() if element.tag.endswith("}text")]
    drawn = [label for label in labels if "release" in label]
    assert len(drawn) == DRAWN
    assert "original (release 1)" in drawn
    assert "rapid (release 12)" in drawn
    assert "rapid (release 3)" not in drawn
    assert f"Drawn are the first run and the newest {DRAWN - 1}." in text
    assert len(Page(text).tables[0]) == 1 + 13
