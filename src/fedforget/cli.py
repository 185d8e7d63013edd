"""The commands: each one is a call of the library, a line or a table of what came of it, and an exit code."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedforget import methods
from fedforget.config import TrainConfig, chosen, parsed_settings
from fedforget.data import datasets
from fedforget.demo import run_demo
from fedforget.engine import Progress as OnRound
from fedforget.errors import DataError, DeletionError, FedforgetError, PlanError, RunFolderError
from fedforget.methods import Method
from fedforget.pipeline import Federation, served_release
from fedforget.release import Release
from fedforget.report import write_report
from fedforget.runs import RunFolder
from fedforget.types import Plan, RoundRecord
from fedforget.version import __version__
from fedforget.work import Deletions, Share

app = typer.Typer(
    help="Federated learning whose participants can take their data back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
errors = Console(stderr=True)
page = Console()

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")]
DeviceOption = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, …")]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="A further setting of the optimizer; may be repeated.", show_default=False),
]


def option(help_text: str, metavar: str | None = None) -> Any:
    """An option whose default is written in its help, so that a TOML file can come between the two."""
    return typer.Option(help=help_text, metavar=metavar, show_default=False)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Federated learning whose participants can take their data back."""
    if version:
        page.print(__version__, soft_wrap=True, highlight=False)
        raise typer.Exit


@app.command()
def demo(
    out: Annotated[Path | None, option("Where to keep the run; default: a new temporary folder.", "RUN")] = None,
    as_json: JsonOption = False,
) -> None:
    """Ten silos train, one deletes 2 % of all samples, all retrain, and the proof that nothing is left."""
    folder = out or Path(tempfile.mkdtemp(prefix="fedforget-demo-"))
    with progress(shown=not as_json) as on_round:
        shown = run_demo(folder, on_round)
    if as_json:
        print_json(shown.as_dict())
        return
    for line in shown.lines():
        page.print(line, soft_wrap=True, highlight=False)


@app.command()
def train(
    out: Annotated[Path, typer.Option(metavar="RUN", help="The run's folder, made anew or gone on with.")],
    config: Annotated[Path | None, option("A TOML file with these settings, by the same names.", "FILE")] = None,
    dataset: Annotated[
        str | None, option("A name of `fedforget datasets`, csv, hub:NAME or package.module:callable [digits].")
    ] = None,
    data_dir: Annotated[str | None, option("Where the dataset's files are [$FEDFORGET_DATA].", "FOLDER")] = None,
    partition: Annotated[
        Literal["even", "dirichlet", "shards", "sites"] | None,
        option("How samples are shared out [even; sites where the data comes by site]."),
    ] = None,
    silos: Annotated[int | None, option("Number of silos [10].")] = None,
    alpha: Annotated[float | None, option("Of the Dirichlet partition: smaller is more uneven [0.5].")] = None,
    shards: Annotated[int | None, option("Label shards for each silo [2].")] = None,
    partition_seed: Annotated[int | None, option("Seed of the partition, apart from the plan's [0].")] = None,
    label_column: Annotated[str | None, option("For csv and hub: the column to predict.")] = None,
    id_column: Annotated[str | None, option("For csv: the column of sample ids [row numbers].")] = None,
    input_column: Annotated[str | None, option("For hub: the column of inputs.")] = None,
    label_threshold: Annotated[float | None, option("For csv: a label above it is class 1, others class 0.")] = None,
    missing: Annotated[list[str] | None, option("For csv: a mark of a missing value; may be repeated.")] = None,
    erase: Annotated[
        bool | None, typer.Option("--erase", help="For csv: deletion also removes the row from its file.")
    ] = None,
    model: Annotated[
        str | None, option("cnn, alexnet, resnet18, mlp, logistic or package.module:callable [by dataset].")
    ] = None,
    rounds: Annotated[int | None, option("Training rounds [20].")] = None,
    optimizer: Annotated[str | None, option("sgd, adam, diagonal-fisher or package.module:callable [sgd].")] = None,
    lr: Annotated[float | None, option("Learning rate [the optimizer's own].")] = None,
    optimizer_setting: SettingOption = None,
    aggregation: Annotated[
        str | None, option("fedavg, median, trimmed-mean or package.module:callable [fedavg].")
    ] = None,
    aggregation_setting: Annotated[
        list[str] | None, option("A setting of the aggregation, as trim=0.2; may be repeated.", "NAME=VALUE")
    ] = None,
    batch_size: Annotated[int | None, option("Samples a local step [32].")] = None,
    local_epochs: Annotated[int | None, option("Passes over a silo's samples each round [1].")] = None,
    silos_per_round: Annotated[int | None, option("Silos that take part in a round [all].")] = None,
    share: Annotated[float | None, option("The same as a share of the silos, the paper's q [1].")] = None,
    l2: Annotated[float | None, option("Weight λ of the L2 term of Eq. 1 [0].")] = None,
    target_accuracy: Annotated[float | None, option("Stop once a round reaches it.")] = None,
    holdout: Annotated[
        float | None, option("Share that silos set aside for evaluation where there is no public test split [0.2].")
    ] = None,
    dtype: Annotated[Literal["float32", "float64"] | None, option("Arithmetic [float32].")] = None,
    seed: Annotated[int | None, option("Of initialisation, order of samples and participation [0].")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Rounds between checkpoints; 0: none.")] = 1,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Train a model over silos and release it; the same command goes on where a killed one stopped."""
    given = {name: value for name, value in locals().items() if name in TrainConfig.__dataclass_fields__}
    given["optimizer_setting"] = parsed_settings(optimizer_setting)
    given["aggregation_setting"] = parsed_settings(aggregation_setting)
    wanted = TrainConfig.merged(config, given)
    with progress(shown=not as_json) as on_round:
        federation = Federation.from_origin(
            wanted.origin(),
            wanted.model_name(),
            folder=out,
            device=device,
            checkpoint_every=checkpoint_every,
            on_round=on_round,
        )
        plan = federation.completed(wanted.plan(len(federation.silos)))
        trained = [record for record in federation.releases if record.method is None]
        if trained and trained[-1].plan != plan:
            raise RunFolderError(f"{out} is trained already, by another plan: choose another --out")
        release = federation.release if trained else federation.train(plan)
    report = write_report(federation.folder)
    summary = {**release_summary(release), "silos": len(federation.silos), "run": str(out), "report": str(report)}
    if as_json:
        print_json(summary)
        return
    if trained:
        page.print(
            f"{out} is trained already by this plan: release {release.version} is served.",
            soft_wrap=True,
            highlight=False,
        )
    page.print(
        f"Release {release.version}: accuracy {percent(release.accuracy)} after {len(release.records)} rounds "
        f"of {release.plan.optimizer} over {len(federation.silos)} silos. Report: {report}",
        soft_wrap=True,
        highlight=False,
    )


@app.command()
def predict(
    run: RunArgument,
    input_file: Annotated[
        Path, typer.Option("--input", metavar="FILE", help="A .npy file: one sample, or samples along the first axis.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Classify samples, given as the dataset has them, with the release that is served."""
    release = served_release(run)
    try:
        x = torch.from_numpy(np.load(input_file, allow_pickle=False))
    except (OSError, ValueError, EOFError, TypeError) as error:
        raise DataError(f"{input_file} cannot be read as a .npy file of numbers: {error}") from error
    probabilities = release.predict(x)
    answers = [
        {"class": release.record.classes[int(row.argmax())], "probability": float(row.max())} for row in probabilities
    ]
    if as_json:
        print_json({"release": release.version, "classes": release.record.classes, "predictions": answers,
                    "probabilities": probabilities.tolist()})  # fmt: skip
        return
    for answer in answers:
        page.print(f"{answer['class']}  {percent(answer['probability'])}", soft_wrap=True, highlight=False)


@app.command()
def forget(
    run: RunArgument,
    silo: Annotated[list[str] | None, option("The silo whose samples are deleted; may be repeated.")] = None,
    ids: Annotated[str | None, option("Sample ids, separated by commas.", "ID,ID,…")] = None,
    ids_file: Annotated[Path | None, option("A file with one sample id a line.", "FILE")] = None,
    fraction: Annotated[float | None, option("Delete this share of all training samples at each named silo.")] = None,
    whole_silo: Annotated[bool, typer.Option("--whole-silo", help="Delete all that each named silo holds.")] = False,
    request: Annotated[
        Path | None, option('Several silos at once: a JSON file like {"silo-1": [3, 17], "silo-2": "all"}.', "FILE")
    ] = None,
    method: Annotated[str | None, option("How to unlearn: a name of `fedforget methods` [rapid].")] = None,
    optimizer: Annotated[str | None, option("Retrain by this optimizer [the method's own].")] = None,
    lr: Annotated[float | None, option("Its learning rate.")] = None,
    optimizer_setting: SettingOption = None,
    rounds: Annotated[int | None, option("Rounds of the retraining [the plan's].")] = None,
    target_accuracy: Annotated[float | None, option("Stop the retraining once a round reaches it.")] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also measure the retrained baseline, for the report.")
    ] = False,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Delete samples for good, retrain without them, and release the result.

    Without a silo it finishes a deletion that was killed or failed.
    """
    asked = deletions(silo, ids, ids_file, fraction, whole_silo, request)
    with progress(shown=not as_json) as on_round:
        federation = Federation.open(run, device=device, on_round=on_round)
        way = chosen_method(
            federation, method, optimizer, lr, parsed_settings(optimizer_setting), rounds, target_accuracy
        )
        before = federation.release
        release = federation.forget(asked, way, baseline=baseline)
    report = write_report(federation.folder)
    changed = release.version != before.version
    summary = {
        **release_summary(release),
        "changed": changed,
        "accuracy_before": number(before.accuracy),
        "deleted": dict(release.deleted) if changed else {},
        "samples_deleted": sum(release.deleted.values()) if changed else 0,
        "revoked": before.version if changed else None,
        "run": str(run),
        "report": str(report),
    }
    if as_json:
        print_json(summary)
        return
    if not changed:
        page.print(
            f"All of this was deleted before: release {release.version} stays served.", soft_wrap=True, highlight=False
        )
        return
    parts = ", ".join(f"{count} at {name}" for name, count in release.deleted.items())
    page.print(
        f"Deleted {parts}. Release {release.version} by {release.record.method}: accuracy "
        f"{percent(release.accuracy)} (before: {percent(before.accuracy)}) after {len(release.records)} rounds; "
        f"release {before.version} is revoked. Prove it: fedforget verify {run}. Report: {report}",
        soft_wrap=True,
        highlight=False,
    )


@app.command()
def verify(run: RunArgument, device: DeviceOption = "cpu", as_json: JsonOption = False) -> None:
    """Train the reference in a fresh process, without what was deleted, and compare bit for bit.

    Exit code 0: identical; 1: not identical. A deletion that was killed is finished first.
    """
    with progress(shown=not as_json) as on_round:
        federation = Federation.open(run, device=device, on_round=on_round)
        verdict = federation.verify()
    write_report(federation.folder)
    if as_json:
        print_json({
            "release": verdict.version,
            "bit_identical": verdict.identical,
            "samples_deleted": verdict.deleted,
            "digest": verdict.digest,
            "reference_digest": verdict.reference_digest,
        })  # fmt: skip
    else:
        page.print(str(verdict), soft_wrap=True, highlight=False)
    if not verdict:
        raise typer.Exit(1)


@app.command()
def releases(run: RunArgument, as_json: JsonOption = False) -> None:
    """List the releases of a run: the newest is served, all others are revoked."""
    folder = RunFolder.open(run)
    records = [folder.release(version) for version in folder.versions()]
    rows: list[dict[str, Any]] = [
        {
            "release": record.version,
            "state": "served" if record is records[-1] else "revoked",
            "made_by": record.method or "train",
            "guarantee": record.guarantee,
            "optimizer": str(record.plan.optimizer),
            "accuracy": number(record.records[-1].accuracy),
            "rounds": len(record.records),
            "samples_deleted": sum(record.deleted.values()),
            "verified": (folder.attached(record.version, "verification") or {}).get("identical"),
            "created": record.created,
        }
        for record in records
    ]
    show(rows, {"releases": rows, "unfinished": folder.pending() is not None}, as_json=as_json)
    if folder.pending() is not None and not as_json:
        page.print("Work is not finished here: run the same command again.", soft_wrap=True, highlight=False)


@app.command("methods")
def list_methods(as_json: JsonOption = False) -> None:
    """List the ways to unlearn, with what each guarantees."""
    rows: list[dict[str, Any]] = [
        {"method": name, "guarantee": kind.guarantee, "what_it_does": kind.summary}
        for name, kind in methods.BUILT_IN.items()
    ]
    show(rows, {"methods": rows}, as_json=as_json)


@app.command("datasets")
def list_datasets(
    data_dir: Annotated[Path | None, option("Where to look for files [$FEDFORGET_DATA].", "FOLDER")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the datasets, the files that each needs, and whether they are there."""
    present = datasets.available(data_dir)
    rows: list[dict[str, Any]] = [
        {"dataset": name, "there": present[name], "what_it_is": entry.description, "files": entry.files}
        for name, entry in datasets.BUILT_IN.items()
    ]
    show(rows, {"datasets": rows}, as_json=as_json)


def deletions(
    silos: list[str] | None,
    ids: str | None,
    ids_file: Path | None,
    fraction: float | None,
    whole_silo: bool,
    request: Path | None,
) -> Deletions | None:
    """What the options of `forget` ask to delete; None where they name nothing."""
    ways = [ids is not None, ids_file is not None, fraction is not None, whole_silo, request is not None]
    if not silos and not any(ways):
        return None
    if sum(ways) != 1:
        raise DeletionError("say what to delete by one of --ids, --ids-file, --fraction, --whole-silo and --request")
    if request is not None:
        if silos:
            raise DeletionError("--request names the silos itself: leave --silo out")
        return _request_file(request)
    if not silos:
        raise DeletionError("say where to delete by --silo")
    if fraction is not None:
        return {name: Share(fraction) for name in silos}
    if whole_silo:
        return dict.fromkeys(silos, "all")
    if len(silos) != 1:
        raise DeletionError("--ids and --ids-file are of one silo: for several, use --request")
    texts = ids.split(",") if ids is not None else _lines(ids_file)
    return {silos[0]: [text.strip() for text in texts if text.strip()]}


def _lines(path: Path | None) -> list[str]:
    assert path is not None
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DeletionError(f"{path} cannot be read: {error}") from error


def _request_file(path: Path) -> Deletions:
    try:
        content = json.loads("\n".join(_lines(path)))
    except ValueError as error:
        raise DeletionError(f"{path} is not valid JSON: {error}") from error
    good = isinstance(content, dict) and all(
        part == "all" or (isinstance(part, list) and all(isinstance(sample_id, int | str) for sample_id in part))
        for part in content.values()
    )
    if not good:
        raise DeletionError(f'{path} must hold an object like {{"silo-1": [3, 17], "silo-2": "all"}}')
    return dict(content)


def chosen_method(
    federation: Federation,
    name: str | None,
    optimizer: str | None,
    lr: float | None,
    settings: dict[str, Any] | None,
    rounds: int | None,
    target_accuracy: float | None,
) -> Method | None:
    """The way to unlearn that the options of `forget` describe; None where they say nothing."""
    if all(value is None for value in (name, optimizer, lr, settings, rounds, target_accuracy)):
        return None
    name = name or "rapid"
    if name not in methods.BUILT_IN:
        raise PlanError(f"method {name!r} is unknown: use {', '.join(methods.BUILT_IN)}")
    kind = methods.BUILT_IN[name]
    plain = kind(rounds=rounds, target_accuracy=target_accuracy)
    if optimizer is None and lr is None and settings is None:
        return plain
    original = next(record.plan for record in reversed(federation.releases) if record.method is None)
    by_default = plain.plan(original).optimizer
    assert not isinstance(by_default, str), "a plan's optimizer is a Choice"
    same = optimizer in (None, by_default.name)
    picked = chosen(optimizer or by_default.name, lr, {**(by_default.settings if same else {}), **(settings or {})})
    return kind(optimizer=picked, rounds=rounds, target_accuracy=target_accuracy)


def release_summary(release: Release) -> dict[str, Any]:
    """What every command says of a release, as JSON data."""
    speed = release.speed_up
    return {
        "release": release.version,
        "method": release.record.method,
        "guarantee": release.record.guarantee,
        "accuracy": number(release.accuracy),
        "samples": sum(release.record.samples.values()),
        **release.record.metrics,
        "accuracy_baseline": number(release.baseline.accuracy) if release.baseline else None,
        "sape": number(release.sape),
        "speedup_rounds": speed.rounds if speed else None,
        "speedup_time": speed.time if speed else None,
        "speedup_at_accuracy": speed.accuracy if speed else None,
        "digest": release.record.digest,
    }


def number(value: float | None) -> float | None:
    """A number as JSON knows it: one that does not exist is null."""
    return None if value is None or math.isnan(value) else value


def percent(value: float | None) -> str:
    """A share as people read it."""
    return "unknown" if value is None or math.isnan(value) else f"{100 * value:.2f} %"


def print_json(content: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(content, allow_nan=False) + "\n")


def show(rows: list[dict[str, Any]], content: dict[str, Any], *, as_json: bool) -> None:
    """Rows as a table for people, or the content as JSON."""
    if as_json:
        print_json(content)
        return
    table = Table(box=None, pad_edge=False)
    for name in rows[0] if rows else []:
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    page.print(table)


def _cell(name: str, value: Any) -> str:
    if name == "accuracy":
        return percent(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "\n".join(value)
    return "" if value is None else str(value)


@contextmanager
def progress(*, shown: bool) -> Iterator[OnRound]:
    """A bar on stderr for each thing that is being trained."""
    bars = Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeRemainingColumn(),
        console=errors,
        disable=not (shown and errors.is_terminal),
    )
    tasks: dict[str, TaskID] = {}

    def on_round(title: str, plan: Plan, record: RoundRecord) -> None:
        if title not in tasks:
            tasks[title] = bars.add_task(title, total=plan.rounds, accuracy="")
        bars.update(tasks[title], completed=record.round, accuracy=f"accuracy {percent(record.accuracy)}")

    with bars:
        yield on_round


def main() -> None:
    """Run a command; an error that is the user's to mend is one line on stderr and exit code 2."""
    # Own models are found beside the user, as `python -m` would find them.
    sys.path.insert(0, str(Path.cwd()))
    usage_error = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        code = typer.main.get_command(app).main(prog_name="fedforget", standalone_mode=False)
    except FedforgetError as error:
        code = told(str(error))
    except (typer.Abort, KeyboardInterrupt):
        code = told("stopped; the same command goes on from here")
    except Exception as error:
        if not isinstance(error, usage_error):
            raise
        code = told(error.format_message())  # type: ignore[attr-defined]  # found by name above
    sys.exit(code)


def told(message: str) -> int:
    """Say what went wrong, in one line."""
    sys.stderr.write(f"fedforget: {' '.join(message.split())}\n")
    return 2
