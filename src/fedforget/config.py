"""What `fedforget train` is asked for: options of the command line over a TOML file over defaults."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from fedforget.data import datasets
from fedforget.errors import PlanError
from fedforget.sources import Origin, Partition, PartitionKind
from fedforget.types import Choice, Plan

DEFAULT_MODELS = {
    "digits": "mlp",
    "mnist": "cnn",
    "fashion-mnist": "cnn",
    "cifar10": "alexnet",
    "celeba": "resnet18",
    "heart-disease": "logistic",
    "csv": "logistic",
}
BY_SITE = ("heart-disease", "csv")


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a training, by the name that its option has on the command line and in a TOML file."""

    dataset: str = "digits"
    data_dir: str | None = None
    partition: PartitionKind | None = None
    silos: int = 10
    alpha: float = 0.5
    shards: int = 2
    partition_seed: int = 0
    label_column: str | None = None
    id_column: str | None = None
    input_column: str | None = None
    label_threshold: float | None = None
    missing: list[str] = field(default_factory=list)
    erase: bool = False
    model: str | None = None
    rounds: int = 20
    optimizer: str = "sgd"
    lr: float | None = None
    optimizer_setting: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "fedavg"
    aggregation_setting: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    local_epochs: int = 1
    silos_per_round: int | None = None
    share: float = 1.0
    l2: float = 0.0
    target_accuracy: float | None = None
    holdout: float | None = None
    dtype: Literal["float32", "float64"] = "float32"
    autocast: bool = False
    seed: int = 0

    @staticmethod
    def merged(config: Path | None, given: Mapping[str, Any]) -> TrainConfig:
        """The settings of a TOML file, if any, with what was given on the command line in place of its own."""
        from_file = _read(config) if config else {}
        settings = {**from_file, **{name: value for name, value in given.items() if value is not None}}
        for part in ("optimizer", "aggregation"):
            # A table's settings are of the optimizer that it names: they do not go to another one.
            same = settings.get(part) == from_file.get(part)
            kept = from_file.get(f"{part}_setting", {}) if same else {}
            settings[f"{part}_setting"] = {**kept, **(given.get(f"{part}_setting") or {})}
        made = TrainConfig(**settings)
        for name in settings:
            made._check_use(name)
        return made

    def __post_init__(self) -> None:
        for name, (wanted, fits) in _KINDS.items():
            value = getattr(self, name)
            if not fits(value):
                raise PlanError(f"{name} is {value!r}: it must be {wanted}")

    def _check_use(self, name: str) -> None:
        """Refuse a setting that would have no effect: whoever gives it expects one."""
        for names, part, value, wanted in (
            (("alpha",), "partition", self.partition_kind, ("dirichlet",)),
            (("shards",), "partition", self.partition_kind, ("shards",)),
            (("silos", "partition_seed"), "partition", self.partition_kind, ("even", "dirichlet", "shards")),
            (("id_column", "label_threshold", "missing", "erase"), "dataset", self.dataset.split(":")[0], ("csv",)),
            (("id_column", "erase"), "partition", self.partition_kind, ("sites",)),
            (("input_column",), "dataset", self.dataset.split(":")[0], ("hub",)),
            (("label_column",), "dataset", self.dataset.split(":")[0], ("csv", "hub")),
        ):
            if name in names and value not in wanted:
                raise PlanError(
                    f"{name} has no effect with {part} {value}, but with {' or '.join(wanted)}: leave it out"
                )
        if name == "silos_per_round" and self.share < 1:
            raise PlanError("silos_per_round and share say the same thing: give one of them")

    @property
    def partition_kind(self) -> PartitionKind:
        """The partition that was asked for, or the one that suits the dataset."""
        return self.partition or ("sites" if self.dataset in BY_SITE else "even")

    def origin(self) -> Origin:
        """Where the data comes from and how it is shared out."""
        options: dict[str, Any] = {}
        if self.dataset == "csv":
            if self.label_column is None:
                raise PlanError("dataset csv needs --label-column: the column that is to be predicted")
            options = {
                "label": self.label_column,
                "id_column": self.id_column,
                "missing": list(self.missing),
                "threshold": self.label_threshold,
                "erase": self.erase,
            }
        elif self.dataset.startswith("hub:"):
            options = {"input_column": self.input_column, "label_column": self.label_column}
        data_dir = None if self.data_dir is None else str(Path(self.data_dir).resolve())
        kind = self.partition_kind
        own = ":" in self.dataset and not self.dataset.startswith("hub:")
        if self.partition is None and own and datasets.load(self.dataset).sites:
            kind = "sites"
        partition = Partition(kind, self.silos, self.alpha, self.shards, self.partition_seed)
        return Origin(self.dataset, partition, data_dir, options)

    def model_name(self) -> str:
        """The model that was asked for, or the one that suits the dataset."""
        return self.model or DEFAULT_MODELS.get(self.dataset, "mlp")

    def plan(self, silos: int) -> Plan:
        """The plan, for a federation of so many silos."""
        per_round = self.silos_per_round
        if per_round is not None and per_round > silos:
            raise PlanError(f"silos_per_round is {per_round}: there are {silos} silos")
        if per_round is None and self.share < 1:
            per_round = max(1, round(self.share * silos))
        return Plan(
            rounds=self.rounds,
            optimizer=chosen(self.optimizer, self.lr, self.optimizer_setting),
            seed=self.seed,
            batch_size=self.batch_size,
            local_epochs=self.local_epochs,
            silos_per_round=per_round,
            aggregation=Choice(self.aggregation, self.aggregation_setting),
            l2=self.l2,
            target_accuracy=self.target_accuracy,
            holdout=self.holdout,
            dtype=self.dtype,
            autocast=self.autocast,
        )


def chosen(name: str, lr: float | None, settings: Mapping[str, Any]) -> Choice:
    """An optimizer with its settings."""
    given = settings if lr is None else {**settings, "lr": lr}
    for setting, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise PlanError(f"{setting} is {value}: it must be a finite number")
    return Choice(name, given)


def parsed_settings(texts: list[str] | None) -> dict[str, Any] | None:
    """Settings given as NAME=VALUE: numbers and true or false are read as such."""
    if texts is None:
        return None
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise PlanError(f"setting {text!r} is not of the form NAME=VALUE")
        try:
            settings[name] = tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):
            settings[name] = value
    return settings


def _of(*kinds: type) -> Callable[[Any], bool]:
    # By type, not isinstance: to Python true and false are numbers, and to nobody else.
    return lambda value: type(value) in kinds


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _maybe(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _settings(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_of(int, float, bool, str)(part) for part in value.values())


_TEXT, _WHOLE, _NUMBER = "a text", "a whole number", "a finite number"
# What may come from a TOML file, where anything can stand; the command line has seen to its own.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "dataset": (_TEXT, _of(str)),
    "data_dir": (_TEXT, _maybe(_of(str))),
    "partition": (", ".join(get_args(PartitionKind)), lambda value: value in (None, *get_args(PartitionKind))),
    "silos": (_WHOLE, _of(int)),
    "alpha": (_NUMBER, _number),
    "shards": (_WHOLE, _of(int)),
    "partition_seed": (_WHOLE, _of(int)),
    "label_column": (_TEXT, _maybe(_of(str))),
    "id_column": (_TEXT, _maybe(_of(str))),
    "input_column": (_TEXT, _maybe(_of(str))),
    "label_threshold": (_NUMBER, _maybe(_number)),
    "missing": ("a list of texts", lambda value: type(value) is list and all(map(_of(str), value))),
    "erase": ("true or false", _of(bool)),
    "model": (_TEXT, _maybe(_of(str))),
    "rounds": (_WHOLE, _of(int)),
    "optimizer": ("a name, or a table with one", _of(str)),
    "lr": (_NUMBER, _maybe(_number)),
    "optimizer_setting": ("a table of numbers, texts, true and false", _settings),
    "aggregation": ("a name, or a table with one", _of(str)),
    "aggregation_setting": ("a table of numbers, texts, true and false", _settings),
    "batch_size": (_WHOLE, _of(int)),
    "local_epochs": (_WHOLE, _of(int)),
    "silos_per_round": (_WHOLE, _maybe(_of(int))),
    "share": ("a number in (0, 1]", lambda value: _number(value) and 0 < value <= 1),
    "l2": (_NUMBER, _number),
    "target_accuracy": (_NUMBER, _maybe(_number)),
    "holdout": (_NUMBER, _maybe(_number)),
    "dtype": ("float32 or float64", lambda value: value in ("float32", "float64")),
    "autocast": ("true or false", lambda value: isinstance(value, bool)),
    "seed": (_WHOLE, _of(int)),
}


def _read(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not valid TOML: {error}") from error
    known = sorted(_KINDS)
    for name in content:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.75)
            hint = f"is it {near[0]}?" if near else f"the settings are {', '.join(known)}"
            raise PlanError(f"{path}: {name!r} is no setting; {hint}")
    for name in ("optimizer", "aggregation"):
        if isinstance(content.get(name), dict):
            table = dict(content.pop(name))
            content[name] = table.pop("name", TrainConfig.optimizer if name == "optimizer" else TrainConfig.aggregation)
            content[f"{name}_setting"] = {**table, **content.get(f"{name}_setting", {})}
    try:
        TrainConfig(**content)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return content
