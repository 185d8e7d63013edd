"""The paper's pipeline: train, predict, forget, verify. Only here are ways to unlearn joined with checks of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import nn
from torch.utils.data import Dataset as TorchDataset

from fedforget import models, optim
from fedforget.data import datasets
from fedforget.data.tombstones import Tombstones
from fedforget.engine import Engine, Progress, method_name, named_method
from fedforget.errors import DataError, DeletionError, FedforgetError, PlanError, RunFolderError, SiloError
from fedforget.federation.links.in_process import InProcessLink
from fedforget.federation.links.local import local_link
from fedforget.federation.registry import Registry
from fedforget.federation.silo import Silo, plain_id, read_source
from fedforget.integrity import accounted_for, check_nothing_lost, check_releases
from fedforget.methods import Method, RapidRetrain
from fedforget.methods.method import settings_of
from fedforget.reference import ReferenceJob, in_fresh_process
from fedforget.release import Release, Verification
from fedforget.runs import ReleaseRecord, RunFolder, whole
from fedforget.sources import Origin, Partition, by_site, open_origin, pooled, share_out
from fedforget.types import Dataset, DataSource, Plan, Preprocessing, SampleId, Samples, State
from fedforget.verify.distance import state_digest
from fedforget.work import Deletions, Share, Work, request_digest

DEFAULT_HOLDOUT = 0.2
AnyDataset = Dataset | TorchDataset[Any]
ModelLike = str | Callable[..., nn.Module]


class Options(TypedDict, total=False):
    """What every way to make a federation takes besides its data and model."""

    folder: Path | str | None
    """Where the run is kept; None: in a temporary folder that goes with the federation."""
    device: str
    link: Literal["auto", "in-process", "batched"] | None
    """How tasks reach the silos, all of them in this process; None: as for the release before, or else auto."""
    checkpoint_every: int
    """Rounds between checkpoints; 0: none. Default: each round in a folder of yours, none in a temporary one."""
    optimizers: Mapping[str, Callable[..., torch.optim.Optimizer]]
    aggregations: Mapping[str, Callable[..., State]]
    on_round: Progress
    """Called after each round with what is being trained, its plan, and the round's record."""


class Federation:
    """Silos and a coordinator in one process, and the releases that they make."""

    def __init__(
        self,
        sources: Mapping[str, DataSource],
        *,
        model: ModelLike,
        classes: Sequence[str] | int | None = None,
        test: Samples | None = None,
        preprocessing: Preprocessing | None = None,
        origin: Origin | None = None,
        **options: Unpack[Options],
    ) -> None:
        """One silo for each data source, by name.

        Without a public `test` split, each silo sets a share of its samples aside for evaluation. `origin` says where
        the data came from, so that a command can open the run's folder again.
        """
        _check_names(sources)
        unknown = sorted(set(options) - Options.__annotations__.keys())
        if unknown:
            raise TypeError(f"{unknown[0]!r} is no option of a federation: use {', '.join(Options.__annotations__)}")
        given = options.get("folder")
        path = Path(tempfile.mkdtemp(prefix="fedforget-") if given is None else given)
        if given is None:
            self._cleanup = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        known = RunFolder.open(path).description() if (path / "run.json").exists() else {}
        contents = {name: read_source(source) for name, source in sources.items()}
        shape = next((samples.shape for samples in contents.values() if len(samples)), known.get("shape"))
        if shape is None:
            raise DataError("no silo has a sample: there is nothing to train on")
        model_name, factory = _named(model)
        folder = RunFolder.create_or_open(
            path,
            {
                "model": model_name,
                "shape": list(shape),
                # A constant from the first opening on: a class list drawn from the data would follow deletions.
                "classes": known["classes"] if classes is None and known else _class_names(classes, contents, test),
                "preprocessing": dataclasses.asdict(preprocessing or Preprocessing()),
                "holdout": 0.0 if test is not None else DEFAULT_HOLDOUT,
                "silos": sorted(sources),
                "origin": origin.as_dict() if origin else None,
            },
        )
        registry = Registry(
            models={**models.BUILT_IN, **({model_name: factory} if factory else {})},
            optimizers={**optim.BUILT_IN, **options.get("optimizers", {})},
            # An optimizer of yours is not the one that goes by its name here.
            batched={name: rule for name, rule in optim.BATCHED.items() if name not in options.get("optimizers", {})},
        )
        registry = dataclasses.replace(
            registry, aggregations={**registry.aggregations, **options.get("aggregations", {})}
        )
        device = _device(options.get("device", "cpu"))
        self._sources = dict(sources)
        # A new folder has no tombstones that another process could be adding to.
        with folder.locked() if known else nullcontext():
            self._silos = {
                name: Silo(name, source, Tombstones(folder.silo(name)), registry, folder.silo(name), device)
                for name, source in sorted(sources.items())
            }
        self._engine = Engine(
            folder=folder,
            link=local_link(options.get("link") or _link_before(folder), self._silos.values(), registry, device),
            registry=registry,
            test=test,
            device=device,
            checkpoint_every=options.get("checkpoint_every", 0 if given is None else 1),
            on_round=options.get("on_round"),
            check=self._check,
        )

    @classmethod
    def split(
        cls, dataset: AnyDataset, partition: Partition, *, model: ModelLike, **options: Unpack[Options]
    ) -> Federation:
        """Share a dataset out among silos as the partition says."""
        known = dataset if isinstance(dataset, Dataset) else datasets.from_torch(dataset)
        if partition.kind == "sites":
            return cls._of(known, by_site(known), model, None, options)
        pool = pooled(known)
        return cls._of(known, share_out(pool, partition.rows(pool.y)), model, None, options)

    @classmethod
    def split_evenly(
        cls, dataset: AnyDataset, silos: int = 10, *, model: ModelLike, seed: int = 0, **options: Unpack[Options]
    ) -> Federation:
        """Share a dataset out evenly and at random, as the paper does; silos are called silo-0, silo-1, …"""
        return cls.split(dataset, Partition("even", silos, seed=seed), model=model, **options)

    @classmethod
    def from_origin(cls, origin: Origin, model: str, **options: Unpack[Options]) -> Federation:
        """A federation over a named dataset, whose folder a command can open again."""
        drawn, dataset, sources = open_origin(_with_noted_classes(origin, options.get("folder")))
        return cls._of(dataset, sources, model, drawn, options)

    @classmethod
    def open(cls, run: Path | str, **options: Unpack[Options]) -> Federation:
        """The federation of a run folder that `fedforget train` or `from_origin` made."""
        description = RunFolder.open(Path(run)).description()
        if description.get("origin") is None:
            raise RunFolderError(f"the data of {run} was given in Python: open it there, with Federation(…, folder=…)")
        options["folder"] = run
        with whole(Path(run) / "run.json"):
            origin = Origin.from_dict(description["origin"])
        return cls.from_origin(origin, description["model"], **options)

    @classmethod
    def _of(
        cls,
        dataset: Dataset,
        sources: Mapping[str, DataSource],
        model: ModelLike,
        origin: Origin | None,
        options: Options,
    ) -> Federation:
        return cls(
            sources,
            model=model,
            classes=dataset.classes,
            test=dataset.test,
            preprocessing=dataset.preprocessing,
            origin=origin,
            **options,
        )

    @property
    def silos(self) -> tuple[str, ...]:
        """The names of all silos."""
        return self._engine.link.silos

    @property
    def folder(self) -> RunFolder:
        """Where the run is kept."""
        return self._engine.folder

    @property
    def releases(self) -> tuple[ReleaseRecord, ...]:
        """The records of all releases, oldest first; the last one is served, all others are revoked."""
        return self.folder.releases()

    @property
    def release(self) -> Release:
        """The release that is served."""
        return self._engine.served()

    def samples(self, silo: str) -> Samples:
        """The samples that remain at a silo."""
        return self._known(silo).samples

    def completed(self, plan: Plan) -> Plan:
        """The plan with what the federation knows, where the plan leaves it open."""
        constants = self.folder.description()
        known = {
            "model": constants["model"],
            "shape": tuple(constants["shape"]),
            "classes": len(constants["classes"]),
            "preprocessing": Preprocessing(**constants["preprocessing"]),
            "holdout": constants["holdout"],
        }
        complete = dataclasses.replace(
            plan, **{name: value for name, value in known.items() if vars(plan)[name] is None}
        )
        if complete.classes != known["classes"]:
            raise PlanError(f"classes is {complete.classes}: this federation has {known['classes']}; leave it out")
        if self._engine.test is None and not complete.holdout:
            raise PlanError("there is no public test split and holdout is 0: there would be nothing to evaluate on")
        return complete

    def train(self, plan: Plan) -> Release:
        """Train and release a model; the same call goes on where a killed one stopped."""
        plan = self.completed(plan)
        with self.folder.locked():
            check_nothing_lost(self.folder, self.silos)
            work, ended = self._unfinished()
            if ended is not None and ended.plan == plan:
                return self._engine.release(ended.version)
            if work is None or (work.failed and work.plan != plan):
                coordinator = self._engine.coordinator("check", plan)
                coordinator.check(plan)
                coordinator.count(plan)
                if work is not None:
                    self._engine.drop(work)
                work = Work(version=len(self.folder.versions()) + 1, plan=plan)
                self._engine.begin(work)
            elif work.plan is None:
                raise RunFolderError("a deletion is not finished here: finish it with `forget` first")
            elif work.plan != plan:
                differing = ", ".join(name for name, value in vars(plan).items() if vars(work.plan)[name] != value)
                raise RunFolderError(
                    f"a training by another plan ({differing} differ) is not finished in {self.folder.path}: "
                    "go on with that plan, or choose another folder"
                )
            return self._engine.finish(work)

    def forget(
        self, request: Deletions | None = None, method: Method | None = None, *, baseline: bool = False
    ) -> Release:
        """Delete samples for good, retrain by the method, release what it makes and revoke what was served.

        With `baseline`, the retrained baseline is measured beside it, after the release. A call that follows one that
        was killed or failed finishes its work; without a request it does only that, by another method if one is given.
        """
        request = None if request is None else {name: _plain(name, part) for name, part in request.items()}
        if method is not None and named_method(method_name(method), settings_of(method)) != method:
            raise PlanError(f"method {method_name(method)!r} is not found again by its name: define it in a module")
        with self.folder.locked():
            check_nothing_lost(self.folder, self.silos)
            work, ended = self._unfinished(baseline=baseline)
            if work is not None and work.failed:
                # Its note is replaced, and what it left is wiped, once a deletion is begun and done.
                work = None
            if work is None and not self.releases:
                raise RunFolderError("no model is released yet: train first")
            if work is not None and work.plan is not None:
                raise RunFolderError("training is not finished here: run `train` again with the same plan first")
            # Without its key no request was ever noted.
            key = self.folder.request_key()
            asked = None if request is None or key is None else request_digest(request, key)
            if ended is not None and ended.method is not None and (request is None or asked in ended.requests):
                return self._engine.release(ended.version)
            if work is None and request is None:
                raise DeletionError("no sample to delete was named, and no deletion waits to be finished")
            repeated = work is not None and (request is None or asked in work.requests)
            if work is not None and repeated and (method is None or _same(work, method)):
                return self._engine.finish(work, method)
            return self._delete_and_retrain(work, None if repeated else request, method, baseline=baseline)

    def _unfinished(self, *, baseline: bool = False) -> tuple[Work | None, Work | None]:
        """Work that waits to be done, and work that had only to be cleared away, which is done here."""
        work = self._engine.pending()
        if work is not None and work.method is not None and baseline:
            work = dataclasses.replace(work, baseline=True)
            self._engine.begin(work)
        if work is None or work.version not in self.folder.versions():
            return work, None
        self._engine.finish(work)
        return None, work

    def _delete_and_retrain(
        self, work: Work | None, request: Deletions | None, method: Method | None, *, baseline: bool
    ) -> Release:
        """Begin a deletion; unfinished work is taken up in it: one retraining answers all requests."""
        served, original = self.releases[-1], self._engine.history().plan
        if method is None:
            method = RapidRetrain() if work is None else named_method(work.method or "", work.settings)
        coordinator = self._engine.coordinator("check", original)
        # What can be refused of the new request is refused before any of it is deleted.
        coordinator.check(method.plan(original))
        if work is not None:
            try:
                self._engine.delete(work, original)
            except FedforgetError as error:
                if request is None:
                    raise
                raise SiloError(
                    f"an earlier deletion is not done yet: {error}; of the new request nothing was noted or deleted: "
                    "give it again afterwards"
                ) from error
        ids = {} if request is None else self._ids(request, original)
        replies = coordinator.forget(original, ids, commit=False)
        new = {name: reply.deleted for name, reply in replies.items() if reply.deleted}
        if work is None and not new:
            if baseline and served.method is not None:
                again = Work(served.version, method=served.source, settings=served.settings, baseline=True)
                self._engine.begin(again)
                return self._engine.finish(again)
            return self.release
        left = {**coordinator.count(original)[0], **{name: reply.remaining for name, reply in replies.items()}}
        if not any(left.values()):
            raise DeletionError(
                "this would delete every training sample of every silo: nothing would be left to train on"
            )
        before = work or Work(version=served.version + 1)
        key = self.folder.request_key() or self.folder.new_request_key()
        work = Work(
            version=before.version,
            attempt=before.attempt + 1,
            method=method_name(method),
            settings=settings_of(method),
            baseline=baseline or before.baseline,
            requests=before.requests if request is None else (*before.requests, request_digest(request, key)),
            ids=ids,
            deleted={name: before.deleted.get(name, 0) + new.get(name, 0) for name in sorted({*before.deleted, *new})},
        )
        self._engine.begin(work)
        return self._engine.finish(work, method)

    def verify(self) -> Verification:
        """Train the served release's reference in a fresh process, on what remains, and compare bit for bit.

        Work that was begun is finished first.
        """
        with self.folder.locked():
            check_nothing_lost(self.folder, self.silos)
            work = self._engine.pending()
            if work is not None and not work.failed:
                self._engine.finish(work)
            return self._verify(self.release)

    def check(self) -> None:
        """Refuse a folder that has lost a release or tombstones, as everything that works in it does at its start."""
        with self.folder.locked():
            check_nothing_lost(self.folder, self.silos)

    def _check(self, release: Release) -> Verification:
        with self.folder.locked():
            check_nothing_lost(self.folder, self.silos)
            return self._verify(release)

    def _verify(self, release: Release) -> Verification:
        record = release.record
        if record.version != self.folder.versions()[-1]:
            raise RunFolderError(f"release {record.version} was revoked: only the one that is served can be verified")
        if record.guarantee == "approximate":
            raise FedforgetError(f"release {record.version} was made by {record.method}, which promises no equality")
        _check_environment(record, self._engine.device)
        method = None if record.source is None else named_method(record.source, record.settings)
        made = in_fresh_process(
            ReferenceJob(
                plan=record.plan if method is None else self._engine.history().plan,
                method=method,
                remaining=self._remaining(),
                test=self._engine.test,
                registry=self._engine.registry,
                device=str(self._engine.device),
                environment=record.environment,
                link=record.link,
            )
        )
        if dict(made.samples) != record.samples:
            raise DataError(
                f"the silos hold {sum(made.samples.values())} training samples, release {record.version} was made from "
                f"{sum(record.samples.values())}: the data changed since, so its reference cannot be built"
            )
        # What is served is what lies in the folder: the release in hand must be that.
        digest, reference_digest = (
            state_digest(*self.folder.weights(record.version)),
            state_digest(made.state, made.fit),
        )
        in_hand = state_digest(release.state, release.fit)
        verdict = Verification(
            identical=digest == in_hand == reference_digest == record.digest and made.plan == record.plan,
            version=record.version,
            deleted=sum(sum(made_before.deleted.values()) for made_before in self.releases),
            digest=digest,
            reference_digest=reference_digest,
        )
        self.folder.attach(record.version, "verification", vars(verdict))
        return verdict

    def _remaining(self) -> dict[str, Samples]:
        """What is left at each silo, read anew from its source, and counted against what the releases account for."""
        remaining: dict[str, Samples] = {}
        for name, source in self._sources.items():
            tombstones = Tombstones(self.folder.silo(name))
            if tombstones.count() != accounted_for(self.releases, name):
                raise RunFolderError("a deletion is not finished here: finish it with `forget` first")
            samples = read_source(source)
            gone = tombstones.held(samples.ids)
            remaining[name] = samples.select([i for i, sample_id in enumerate(samples.ids) if sample_id not in gone])
        return remaining

    def _known(self, name: str) -> Silo:
        if name not in self._silos:
            shown = ", ".join(self.silos[:12]) + (", …" if len(self.silos) > 12 else "")
            raise DeletionError(f"silo {name!r} is unknown: this federation has {shown}")
        return self._silos[name]

    def _ids(self, request: Deletions, plan: Plan) -> dict[str, list[SampleId]]:
        """The request as sample ids, each silo known and no list empty."""
        if not request:
            raise DeletionError("no sample to delete was named")
        total = sum(self._engine.coordinator("count", plan).count(plan)[0].values())
        return {name: _ids_of(self._known(name), part, plan, total) for name, part in request.items()}


def _plain(name: str, part: Any) -> Sequence[SampleId] | Share | Literal["all"]:
    """What to delete at a silo, its ids as Python's own numbers and texts, so that they can be noted durably."""
    if isinstance(part, Share):
        return part
    if isinstance(part, str):
        if part != "all":
            raise DeletionError(f"silo {name}: give a list of sample ids, a share, or 'all', not {part!r}")
        return "all"
    try:
        return [plain_id(value) for value in part]
    except (TypeError, DataError) as error:
        raise DeletionError(f"silo {name}: {error}; give a list of sample ids, a share, or 'all'") from error


def _ids_of(silo: Silo, part: Sequence[SampleId] | Share | str, plan: Plan, total: int) -> list[SampleId]:
    if isinstance(part, Share):
        if not 0 < part.rate <= 1:
            raise DeletionError(f"the share to delete is {part.rate}: it must lie in (0, 1]")
        count = round(part.rate * total)
        if not count:
            raise DeletionError(f"a share of {part.rate} of {total} training samples is less than one sample")
        return list(silo.draw(plan, count))
    if isinstance(part, str):
        # By their ids: should the deletion be cut off, rows that arrive before it is finished are no part of it.
        return list(silo.samples.ids)
    if not part:
        raise DeletionError(f"silo {silo.name}: the list of sample ids is empty")
    return list(part)


def _check_environment(record: ReleaseRecord, device: torch.device) -> None:
    """Bits can only be compared where the same arithmetic runs."""
    here = {"torch": torch.__version__, "device": device.type}
    for part, value in here.items():
        made_with = record.environment[part]
        if made_with != value:
            raise FedforgetError(
                f"release {record.version} was made with {part} {made_with}, not {value}: verify it where it was made"
            )


def _link_before(folder: RunFolder) -> str:
    """The link of the newest release, so that all of a run's can be compared; auto where there is none."""
    releases = folder.releases()
    return releases[-1].link if releases else "auto"


def served_release(folder: Path | str) -> Release:
    """The release that a run folder serves, without reading the silos' data."""
    path = Path(folder)

    def check(_: Release) -> Verification:
        return Federation.open(path).verify()

    registry = Registry(models.BUILT_IN, optim.BUILT_IN)
    run = RunFolder.open(path)
    check_releases(run, run.description()["silos"])
    engine = Engine(run, InProcessLink([]), registry, None, torch.device("cpu"), 0, None, check)
    release = engine.served()
    if state_digest(release.state, release.fit) != release.record.digest:
        raise RunFolderError(
            f"{path}/releases/{release.version}/weights.pt does not hold the weights that were released: "
            "restore it from a backup"
        )
    return release


def _same(work: Work, method: Method) -> bool:
    return (work.method, dict(work.settings)) == (method_name(method), settings_of(method))


def _check_names(sources: Mapping[str, DataSource]) -> None:
    if not sources:
        raise DataError("a federation needs at least one silo")
    for name in sources:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise DataError(
                f"silo name {name!r} cannot name a folder: use letters a to z or A to Z, digits, '.', '_' and '-', "
                "at most 100, the first a letter or digit"
            )


def _with_noted_classes(origin: Origin, folder: Path | str | None) -> Origin:
    """The origin with the classes that a run of the same CSV files noted: a deletion may have erased one's last row."""
    if origin.dataset != "csv" or folder is None or not (Path(folder) / "run.json").exists():
        return origin
    noted = RunFolder.open(Path(folder)).description()["origin"]
    if noted is None:
        return origin
    with whole(Path(folder) / "run.json"):
        options = Origin.from_dict(noted).options
        same = {**options, "classes": None} == {"classes": None, **origin.options}
        return dataclasses.replace(origin, options=options) if same else origin


def _named(model: ModelLike) -> tuple[str, Callable[..., nn.Module] | None]:
    """A model's name in plans and, unless the name alone leads to it, its factory."""
    if isinstance(model, str):
        return model, None
    if isinstance(model, nn.Module):
        raise PlanError("give the model's class, or a function that builds it: every run starts from a fresh model")
    if not callable(model):
        raise PlanError(f"{model!r} is no model: give a class, a function that builds one, or a name")
    built_in = [name for name, factory in models.BUILT_IN.items() if factory is model]
    if built_in:
        return built_in[0], None
    if isinstance(model, functools.partial):
        name, _ = _named(model.func)
        settings = [*map(repr, model.args), *(f"{key}={value!r}" for key, value in sorted(model.keywords.items()))]
        return f"{name}({', '.join(settings)})", model
    named = model if isinstance(model, type) or inspect.isroutine(model) else type(model)
    return f"{named.__module__}:{named.__qualname__}", model


def _class_names(
    classes: Sequence[str] | int | None, contents: Mapping[str, Samples], test: Samples | None
) -> list[str]:
    if classes is None:
        labelled = [samples for samples in (*contents.values(), *([test] if test else [])) if len(samples)]
        classes = max(int(samples.y.max()) for samples in labelled) + 1
    return [str(number) for number in range(classes)] if isinstance(classes, int) else list(classes)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" makes tensors, but keeps no numbers
    except (RuntimeError, AssertionError) as error:
        raise PlanError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
