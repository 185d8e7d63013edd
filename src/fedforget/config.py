"""What `fedforget train` is asked for: options of the command line over a TOML file over defaults."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

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
    seed: int = 0

    @staticmethod
    def merged(config: Path | None, given: Mapping[str, Any]) -> TrainConfig:
        """The settings of a TOML file, if any, with what was given on the command line in place of its own."""
        known = {part.name for part in fields(TrainConfig)}
        from_file = _read(config) if config else {}
        unknown = sorted(set(from_file) - known)
        if unknown:
            raise PlanError(f"{config}: {unknown[0]!r} is no setting; the settings are {', '.join(sorted(known))}")
        return TrainConfig(**{**from_file, **{name: value for name, value in given.items() if value is not None}})

    def origin(self) -> Origin:
        """Where the data comes from and how it is shared out."""
        kind = self.partition or ("sites" if self.dataset in BY_SITE else "even")
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
        partition = Partition(kind, self.silos, self.alpha, self.shards, self.partition_seed)
        return Origin(self.dataset, partition, data_dir, options)

    def model_name(self) -> str:
        """The model that was asked for, or the one that suits the dataset."""
        return self.model or DEFAULT_MODELS.get(self.dataset, "mlp")

    def plan(self, silos: int) -> Plan:
        """The plan, for a federation of so many silos."""
        if not 0 < self.share <= 1:
            raise PlanError(f"share is {self.share}: the share of silos a round must lie in (0, 1]")
        per_round = self.silos_per_round
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
        )


def chosen(name: str, lr: float | None, settings: Mapping[str, Any]) -> Choice:
    """An optimizer with its settings."""
    return Choice(name, settings if lr is None else {**settings, "lr": lr})


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
        except tomllib.TOMLDecodeError:
            settings[name] = value
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is not valid TOML: {error}") from error
    for name in ("optimizer", "aggregation"):
        if isinstance(content.get(name), dict):
            table = dict(content.pop(name))
            content[name] = table.pop("name", TrainConfig.optimizer if name == "optimizer" else TrainConfig.aggregation)
            content[f"{name}_setting"] = table
    return content
