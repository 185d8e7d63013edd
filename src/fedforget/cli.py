"""The commands: each one is a call of the library, a line or a table of what came of it, and an exit code."""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedforget import methods
from fedforget.config import TrainConfig, chosen, parsed_settings
from fedforget.data import datasets
from fedforget.demo import run_demo
from fedforget.engine import Progress as OnRound
from fedforget.errors import DataError, DeletionError, FedforgetError, PlanError, RunFolderError
from fedforget.integrity import check_releases
from fedforget.methods import Method
from fedforget.pipeline import Federation, served_release
from fedforget.release import Release
from fedforget.report import write_report
from fedforget.runs import RunFolder
from fedforget.streams import guarded_streams
from fedforget.types import Plan, RoundRecord
from fedforget.version import __version__
from fedforget.work import Deletions, Share

app = typer.Typer(
    help="Federated learning whose participants can take their data back.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
errors = Console(stderr=True)

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C stopped, by which a shell's loop knows to stop too."""
UNEXPECTED = 70
"""The exit code of an error that nobody foresaw (EX_SOFTWARE of sysexits.h): Python's own 1 is verify's word."""


def option(help_text: str, metavar: str | None = None, panel: str | None = None) -> Any:
    """An option whose default is written in its help, so that a TOML file can come between the two."""
    return typer.Option(help=help_text, metavar=metavar, show_default=False, rich_help_panel=panel)


def flag(name: str, help_text: str, panel: str | None = None) -> Any:
    """An option without a value."""
    return typer.Option(name, help=help_text, metavar="", show_default=False, rich_help_panel=panel)


RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)]
JsonOption = Annotated[bool, flag("--json", "Print one JSON object, and nothing else, on stdout.")]
LinkOption = Annotated[
    Literal["auto", "in-process", "batched"] | None,
    option("How silos are trained; default: as before, at first auto, which batches where that gains.", None),
]
DeviceOption = Annotated[str, option("Where to compute: cpu, cuda, cuda:1, …; default: cpu.", "NAME")]
DATA, LEARNING, SILOS = "Data", "Model and learning", "Silos and rounds"
WHAT, HOW = "What is deleted", "How the model is retrained"


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, flag("--version", "Print the version.")] = False,
) -> None:
    """Federated learning whose participants can take their data back."""
    if version:
        say(__version__)
    elif context.invoked_subcommand is None:
        say(context.get_help())


@app.command()
def demo(
    out: Annotated[Path | None, option("Where to keep the run; default: a new temporary folder.", "RUN")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show it all on handwritten digits, in seconds.

    Ten silos train one model, one of them deletes 2 % of all samples, all retrain,
    and a fresh process proves that nothing is left.
    """
    folder = out or Path(tempfile.mkdtemp(prefix="fedforget-demo-"))
    with progress(shown=not as_json) as on_round:
        shown = run_demo(folder, on_round)
    if as_json:
        print_json(shown.as_dict())
        return
    say(*shown.lines())


@app.command()
def train(
    out: Annotated[Path, option("The run's folder, made anew or gone on with.", "RUN")],
    config: Annotated[
        Path | None, option("A TOML file with settings by the names of these options; options override it.", "FILE")
    ] = None,
    dataset: Annotated[
        str | None,
        option(
            "A name of `fedforget datasets`, csv, hub:NAME or package.module:callable; default: digits.", "NAME", DATA
        ),
    ] = None,
    data_dir: Annotated[
        str | None, option("Where the dataset's files are; default: $FEDFORGET_DATA.", "FOLDER", DATA)
    ] = None,
    label_column: Annotated[str | None, option("For csv and hub: the column to predict.", "NAME", DATA)] = None,
    id_column: Annotated[
        str | None, option("For csv: the column of sample ids; default: row numbers.", "NAME", DATA)
    ] = None,
    label_threshold: Annotated[
        float | None, option("For csv: a label above it is class 1, others class 0.", None, DATA)
    ] = None,
    missing: Annotated[
        list[str] | None, option("For csv: a mark of a missing value, as -9; may be repeated.", "TEXT", DATA)
    ] = None,
    erase: Annotated[
        bool | None, flag("--erase", "For csv: deletion also removes the row from its file.", DATA)
    ] = None,
    input_column: Annotated[str | None, option("For hub: the column of inputs.", "NAME", DATA)] = None,
    silos: Annotated[int | None, option("How many silos share the data; default: 10.", None, SILOS)] = None,
    partition: Annotated[
        Literal["even", "dirichlet", "shards", "sites"] | None,
        option("How they share it; default: even, or sites where the data comes by site.", None, SILOS),
    ] = None,
    alpha: Annotated[
        float | None, option("For dirichlet: the smaller, the more uneven; default: 0.5.", None, SILOS)
    ] = None,
    shards: Annotated[int | None, option("For shards: label shards for each silo; default: 2.", None, SILOS)] = None,
    partition_seed: Annotated[int | None, option("Seed of the partition alone; default: 0.", None, SILOS)] = None,
    rounds: Annotated[int | None, option("Training rounds; default: 20.", None, SILOS)] = None,
    silos_per_round: Annotated[
        int | None, option("Silos that take part in a round; default: all.", None, SILOS)
    ] = None,
    share: Annotated[
        float | None, option("The same as a share of the silos, the paper's q; default: 1.", None, SILOS)
    ] = None,
    local_epochs: Annotated[
        int | None, option("Passes over a silo's samples each round; default: 1.", None, SILOS)
    ] = None,
    aggregation: Annotated[
        str | None, option("fedavg, median, trimmed-mean or package.module:callable; default: fedavg.", "NAME", SILOS)
    ] = None,
    aggregation_setting: Annotated[
        list[str] | None, option("A setting of the aggregation, as trim=0.2; may be repeated.", "NAME=VALUE", SILOS)
    ] = None,
    target_accuracy: Annotated[float | None, option("Stop once a round reaches it.", None, SILOS)] = None,
    holdout: Annotated[
        float | None,
        option("Share set aside at silos where there is no public test split; default: 0.2.", None, SILOS),
    ] = None,
    model: Annotated[
        str | None,
        option(
            "cnn, alexnet, resnet18, mlp, logistic or package.module:callable; default: by dataset.", "NAME", LEARNING
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        option("sgd, adam, muon, diagonal-fisher or package.module:callable; default: sgd.", "NAME", LEARNING),
    ] = None,
    lr: Annotated[float | None, option("Learning rate; default: the optimizer's own.", None, LEARNING)] = None,
    optimizer_setting: Annotated[
        list[str] | None,
        option("A further setting of the optimizer, as momentum=0.9; may be repeated.", "NAME=VALUE", LEARNING),
    ] = None,
    batch_size: Annotated[int | None, option("Samples a local step; default: 32.", None, LEARNING)] = None,
    l2: Annotated[float | None, option("Weight λ of the L2 term of Eq. 1; default: 0.", None, LEARNING)] = None,
    dtype: Annotated[
        Literal["float32", "float64"] | None, option("Arithmetic; default: float32.", None, LEARNING)
    ] = None,
    autocast: Annotated[
        bool | None, flag("--autocast", "Losses and gradients in bfloat16 where torch holds that safe.", LEARNING)
    ] = None,
    seed: Annotated[
        int | None, option("Of initialisation, order of samples and participation; default: 0.", None, LEARNING)
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Rounds between checkpoints; 0: none; default: 1.", min=0, show_default=False)
    ] = 1,
    device: DeviceOption = "cpu",
    link: LinkOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train one model over many silos, and release it.

    The same command goes on where a killed one stopped.
    """
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
            link=link,
            checkpoint_every=checkpoint_every,
            on_round=on_round,
        )
        plan = federation.completed(wanted.plan(len(federation.silos)))
        if wanted.holdout and not federation.folder.description()["holdout"]:
            raise PlanError(f"dataset {wanted.dataset} has a public test split: leave holdout out")
        trained = [record.plan for record in federation.releases if record.method is None]
        if trained and trained[-1] != plan:
            differing = ", ".join(name for name, value in vars(plan).items() if vars(trained[-1])[name] != value)
            raise RunFolderError(
                f"{out} is trained already by another plan (not the same: {differing}): choose another --out"
            )
        if trained:
            federation.check()
        unfinished = federation.folder.pending()
        # A training that was killed at its very end has its release, and only to be cleared away.
        release = federation.release if trained and not (unfinished and unfinished["plan"]) else federation.train(plan)
    report = write_report(federation.folder)
    if as_json:
        print_json(
            {
                **release_summary(release),
                "changed": not trained,
                "silos": len(federation.silos),
                "run": str(out),
                "report": str(report),
            }
        )
        return
    if trained:
        say(f"{out} is trained already by this plan; nothing was done.")
    say(
        f"Release {release.version}{' is served' if trained else ''}: accuracy {percent(release.accuracy)} after "
        f"{len(release.records)} rounds of {release.plan.optimizer} over {len(federation.silos)} silos.",
        f"Trained {release.record.trained}.",
        f"Report: {report}",
    )


@app.command()
def predict(
    run: RunArgument,
    input_file: Annotated[
        Path,
        typer.Option(
            "--input",
            metavar="FILE",
            help="A .npy file: one sample, or samples along the first axis.",
            show_default=False,
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Classify samples with the release that is served.

    Samples are given as the dataset has them: preprocessing is part of the release.
    """
    release = served_release(run)
    probabilities = release.predict(samples_of(input_file, release.plan.shape or ()))
    unknown = [number for number, row in enumerate(probabilities) if not bool(row.isfinite().all())]
    if unknown:
        raise DataError(f"{input_file}: sample {unknown[0]} holds values that are missing or not finite: replace them")
    answers = [(release.record.classes[int(row.argmax())], float(row.max())) for row in probabilities]
    if as_json:
        print_json(
            {
                "release": release.version,
                "classes": release.record.classes,
                "predictions": [{"class": name, "probability": probability} for name, probability in answers],
                "probabilities": probabilities.tolist(),
            }
        )
        return
    say(*(f"{name}  {percent(probability)}" for name, probability in answers))


@app.command()
def forget(
    run: RunArgument,
    silo: Annotated[
        list[str] | None, option("The silo whose samples are deleted; may be repeated.", "NAME", WHAT)
    ] = None,
    ids: Annotated[
        list[str] | None, option("Sample ids, separated by commas; may be repeated.", "ID,ID,…", WHAT)
    ] = None,
    ids_file: Annotated[
        list[Path] | None, option("A file with one sample id a line; may be repeated.", "FILE", WHAT)
    ] = None,
    fraction: Annotated[
        float | None, option("Delete this share of all training samples at each named silo.", None, WHAT)
    ] = None,
    whole_silo: Annotated[bool, flag("--whole-silo", "Delete all that each named silo holds.", WHAT)] = False,
    request: Annotated[
        list[Path] | None,
        option('Several silos at once: a JSON file like {"silo-1": [3, 17], "silo-2": "all"}.', "FILE", WHAT),
    ] = None,
    method: Annotated[str | None, option("A name of `fedforget methods`; default: rapid.", "NAME", HOW)] = None,
    optimizer: Annotated[
        str | None, option("Retrain by this optimizer; default: the method's own.", "NAME", HOW)
    ] = None,
    lr: Annotated[float | None, option("Its learning rate.", None, HOW)] = None,
    optimizer_setting: Annotated[
        list[str] | None, option("A further setting of it, as eps=0.001; may be repeated.", "NAME=VALUE", HOW)
    ] = None,
    rounds: Annotated[int | None, option("Rounds of the retraining; default: the plan's.", None, HOW)] = None,
    target_accuracy: Annotated[float | None, option("Stop the retraining once a round reaches it.", None, HOW)] = None,
    batch_size: Annotated[int | None, option("Samples a local step; default: the plan's.", None, HOW)] = None,
    baseline: Annotated[bool, flag("--baseline", "Also measure the retrained baseline, for the report.", HOW)] = False,
    device: DeviceOption = "cpu",
    link: LinkOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete samples for good, and retrain without them.

    What comes of it is released, and what was served is revoked.
    Where no sample is named, a deletion that was killed or failed is finished.
    """
    asked = deletions(silo, ids, ids_file, fraction, whole_silo, request)
    with progress(shown=not as_json) as on_round:
        federation = Federation.open(run, device=device, link=link, on_round=on_round)
        limits = {"rounds": rounds, "target_accuracy": target_accuracy, "batch_size": batch_size}
        way = chosen_method(federation, method, optimizer, lr, parsed_settings(optimizer_setting), limits)
        served = federation.releases[-1:]
        unfinished = federation.folder.pending()
        release = federation.forget(asked, way, baseline=baseline)
    report = write_report(federation.folder)
    # A deletion that was killed at its very end has its release already, and is told of as if made now.
    changed = release.record not in served or bool(unfinished and unfinished["method"])
    before = federation.releases[-2] if changed else release.record
    accuracy_before = before.records[-1].accuracy
    summary = {
        **release_summary(release),
        "changed": changed,
        "accuracy_before": number(accuracy_before),
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
        say(f"All of this was deleted before: release {release.version} stays served.")
        return
    parts = ", ".join(f"{count} at {name}" for name, count in release.deleted.items())
    say(
        f"Deleted for good: {parts}.",
        f"Release {release.version} by {release.record.method}: accuracy {percent(release.accuracy)} after "
        f"{len(release.records)} rounds (before: {percent(accuracy_before)}); release {before.version} is revoked.",
        f"Trained {release.record.trained}.",
    )
    if release.baseline is not None:
        say(f"Retrained baseline: {percent(release.baseline.accuracy)}; {compared(release)}.")
    say(f"Report: {report}", f"Prove it: fedforget verify {run}")


@app.command()
def verify(run: RunArgument, device: DeviceOption = "cpu", as_json: JsonOption = False) -> None:
    """Prove bit for bit that nothing of what was deleted is left.

    A fresh process, which never saw what was deleted, makes the model again.
    Exit code 0: identical; 1: not identical. What was killed is finished first.
    """
    with progress(shown=not as_json) as on_round:
        federation = Federation.open(run, device=device, on_round=on_round)
        verdict = federation.verify()
    write_report(federation.folder)
    if as_json:
        print_json(
            {
                "release": verdict.version,
                "bit_identical": verdict.identical,
                "samples_deleted": verdict.deleted,
                "digest": verdict.digest,
                "reference_digest": verdict.reference_digest,
            }
        )
    else:
        say(str(verdict)[0].upper() + str(verdict)[1:])
    if not verdict:
        raise typer.Exit(1)


@app.command()
def releases(run: RunArgument, as_json: JsonOption = False) -> None:
    """List a run's releases: which is served, which are revoked."""
    folder = RunFolder.open(run)
    check_releases(folder, folder.description()["silos"])
    records = folder.releases()
    rows: list[dict[str, Any]] = [
        {
            "release": record.version,
            "state": "served" if record is records[-1] else "revoked",
            "made_by": record.method or "train",
            "guarantee": record.guarantee,
            "accuracy": number(record.records[-1].accuracy),
            "rounds": len(record.records),
            "samples_deleted": sum(record.deleted.values()),
            "verified": (folder.verification(record.version) or {}).get("identical"),
            "created": record.created,
            "optimizer": str(record.plan.optimizer),
        }
        for record in records
    ]
    unfinished = folder.pending()
    if as_json:
        print_json({"releases": rows, "unfinished": unfinished is not None})
        return
    if rows:
        show(rows)
    if unfinished is not None and unfinished.get("failed"):
        say("The last training failed: train again by another plan, as with a smaller --lr.")
    elif unfinished is not None and unfinished["method"]:
        say(
            "A deletion is not finished here: `fedforget forget` without samples finishes it; should its training "
            "fail, by another --method, --optimizer or --lr."
        )
    elif unfinished is not None:
        say("Training is not finished here: run the same command again.")


@app.command("methods")
def list_methods(as_json: JsonOption = False) -> None:
    """List the ways to unlearn, and what each guarantees."""
    rows: list[dict[str, Any]] = [
        {"method": name, "guarantee": kind.guarantee, "what_it_does": kind.summary}
        for name, kind in methods.BUILT_IN.items()
    ]
    if as_json:
        print_json({"methods": rows})
    else:
        show(rows)


@app.command("datasets")
def list_datasets(
    data_dir: Annotated[Path | None, option("Where to look for files; default: $FEDFORGET_DATA.", "FOLDER")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the datasets, their files, and whether these are there."""
    present = datasets.available(data_dir)
    rows: list[dict[str, Any]] = [
        {"dataset": name, "there": present[name], "what_it_is": entry.description, "files": entry.files}
        for name, entry in datasets.BUILT_IN.items()
    ]
    if as_json:
        print_json({"datasets": rows})
        return
    show([{name: value for name, value in row.items() if name != "files"} for row in rows])
    say("", "Files, in the folder that --data-dir or FEDFORGET_DATA names:")
    for row in rows:
        if row["files"]:
            folder = Path(row["files"][0]).parent
            say(f"  {folder}/  {', '.join(Path(file).name for file in row['files'])}")
    say("", "Data of your own: csv (one file for each site), hub:NAME (Hugging Face), package.module:callable.")


def samples_of(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    """The samples of a .npy file, for a model that takes samples of this shape, along the first axis."""
    try:
        values = np.load(path, allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: name a .npy file with --input") from error
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as a .npy file of numbers: write it with numpy.save") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
        kind = values.dtype if isinstance(values, np.ndarray) else "several arrays"
        raise DataError(f"{path} holds {kind}, not one array of numbers: save it with numpy.save")
    # Grey images are often stored without their one channel.
    bare = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    if values.shape in (shape, bare):
        values = values[None]
    elif values.shape[1:] not in (shape, bare):
        raise DataError(
            f"{path} holds an array of shape {values.shape}; the model takes one sample of shape {shape}, "
            f"or n of them along the first axis: {('n', *shape)}".replace("'n'", "n")
            + ("; the one channel may be left out" if bare != shape else "")
        )
    # torch takes neither foreign byte orders nor all of numpy's widths; silos compute in single or double precision.
    return torch.from_numpy(values.astype(np.float64).reshape(len(values), *shape))


def deletions(
    silos: list[str] | None,
    ids: list[str] | None,
    ids_file: list[Path] | None,
    fraction: float | None,
    whole_silo: bool,
    request: list[Path] | None,
) -> Deletions | None:
    """What the options of `forget` ask to delete; None where they name nothing."""
    ways = [bool(ids), bool(ids_file), fraction is not None, whole_silo, bool(request)]
    if not silos and not any(ways):
        return None
    if sum(ways) != 1:
        raise DeletionError("say what to delete by one of --ids, --ids-file, --fraction, --whole-silo and --request")
    if request:
        if silos:
            raise DeletionError("--request names the silos itself: leave --silo out")
        if len(request) > 1:
            raise DeletionError("--request is given twice: put all into one file")
        return _request_file(request[0])
    if not silos:
        raise DeletionError("say where to delete by --silo")
    if fraction is not None:
        return {name: Share(fraction) for name in silos}
    if whole_silo:
        return dict.fromkeys(silos, "all")
    if len(silos) != 1:
        raise DeletionError("--ids and --ids-file are of one silo: for several, use --request")
    named = [_listed(text) for text in ids or ()] + [_lines(path) for path in ids_file or ()]
    return {silos[0]: list(itertools.chain.from_iterable(named))}


def _listed(ids: str) -> list[str]:
    named = [text.strip() for text in ids.split(",")]
    if "" in named and any(named):
        # A deletion cannot be undone: a gap in the list is more likely a slip than meant.
        raise DeletionError(f"--ids {ids} has nothing between two commas, or at an end: write it without the gap")
    return [text for text in named if text]


def _lines(path: Path) -> list[str]:
    try:
        # Spreadsheets and editors on Windows begin a text with a byte order mark.
        return [line.strip() for line in path.read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DeletionError(f"{path} cannot be read: {error}") from error


def _request_file(path: Path) -> Deletions:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DeletionError(f"{path} names silo {twice[0]!r} twice: give each silo one list")
        return dict(pairs)

    try:
        content = json.loads("\n".join(_lines(path)), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise DeletionError(f"{path} is not valid JSON: {error}") from error
    good = isinstance(content, dict) and all(
        part == "all" or (isinstance(part, list) and all(type(sample_id) in (int, str) for sample_id in part))
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
    limits: dict[str, Any],
) -> Method | None:
    """The way to unlearn that the options of `forget` describe; None where they say nothing."""
    if all(value is None for value in (name, optimizer, lr, settings, *limits.values())):
        return None
    name = name or "rapid"
    if name not in methods.BUILT_IN:
        raise PlanError(f"method {name!r} is unknown: use {', '.join(methods.BUILT_IN)}")
    kind = methods.BUILT_IN[name]
    plain = kind(**limits)
    if optimizer is None and lr is None and settings is None:
        return plain
    original = next((record.plan for record in reversed(federation.releases) if record.method is None), None)
    if original is None:
        raise RunFolderError("no model is released yet: train first")
    by_default = plain.plan(original).optimizer
    assert not isinstance(by_default, str), "a plan's optimizer is a Choice"
    same = optimizer in (None, by_default.name)
    picked = chosen(optimizer or by_default.name, lr, {**(by_default.settings if same else {}), **(settings or {})})
    return kind(optimizer=picked, **limits)


def release_summary(release: Release) -> dict[str, Any]:
    """What every command says of a release, as JSON data."""
    speed = release.speed_up
    return {
        "release": release.version,
        "method": release.record.method,
        "guarantee": release.record.guarantee,
        "accuracy": number(release.accuracy),
        "samples": sum(release.record.samples.values()),
        "trained": release.record.trained,
        **release.record.metrics,
        "accuracy_baseline": number(release.baseline.accuracy) if release.baseline else None,
        "sape": number(release.sape),
        "speedup_rounds": speed.rounds if speed else None,
        "speedup_time": speed.time if speed else None,
        "speedup_at_accuracy": speed.accuracy if speed else None,
        "digest": release.record.digest,
    }


def compared(release: Release) -> str:
    """How a release compares with its baseline."""
    speed = release.speed_up
    assert release.sape is not None
    assert speed is not None
    if speed.rounds is None or speed.time is None:
        return f"SAPE {release.sape:.1e}, no v: {speed.reason}"
    return (
        f"SAPE {release.sape:.1e}, v = {speed.rounds:.2f} in rounds and {speed.time:.2f} in time "
        f"(at {percent(speed.accuracy)})"
    )


def number(value: float | None) -> float | None:
    """A number as JSON knows it: one that does not exist is null."""
    return None if value is None or math.isnan(value) else value


def percent(value: float | None) -> str:
    """A share as people read it."""
    return "unknown" if value is None or math.isnan(value) else f"{100 * value:.2f} %"


def print_json(content: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(content, allow_nan=False) + "\n")


def say(*lines: str) -> None:
    """Lines for people, on stdout; a terminal may wrap them, but they are never cut."""
    for line in lines:
        sys.stdout.write(line + "\n")


def show(rows: list[dict[str, Any]]) -> None:
    """Rows as a table for people."""
    heads = [name.replace("_", " ") for name in rows[0]]
    table = [heads, *([_cell(name, value) for name, value in row.items()] for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(heads))]
    for line in table:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(name: str, value: Any) -> str:
    if name == "accuracy":
        return percent(value)
    if name == "created":
        return str(value)[:16].replace("T", " ")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)


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
    with guarded_streams():
        code = _ended()
    if code == INTERRUPTED:
        told("stopped; the same command goes on from here")
    sys.exit(code)


def _ended() -> int | None:
    """Run the command that was typed, and tell of its errors; its exit code."""
    usage_error = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        code: int | None = typer.main.get_command(app).main(prog_name="fedforget", standalone_mode=False)
        sys.stdout.flush()
    except FedforgetError as error:
        return told(str(error))
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, usage_error):
            return told(_usage(error))
        if isinstance(error, OSError):
            where = "" if error.filename is None else f": {error.filename}"
            return told(f"{error.strerror or error}{where}")
        traceback.print_exc()
        return UNEXPECTED
    return code


def _usage(error: Exception) -> str:
    """What was wrong with a command line, and where its options are listed."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "fedforget"
    return f"{error.format_message().rstrip('.')}; see {command} --help"  # type: ignore[attr-defined]  # found by name


def told(message: str) -> int:
    """Say what went wrong, in one line."""
    # Where nobody can be told, the exit code still says it.
    with suppress(OSError):
        sys.stderr.write(f"fedforget: {' '.join(message.split())}\n")
    return 2
