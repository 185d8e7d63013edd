"""What `fedforget train` is asked for: options over a TOML file over defaults."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from fedforget import cli
from fedforget.config import _KINDS, DEFAULT_MODELS, TrainConfig, chosen, parsed_settings
from fedforget.data import datasets
from fedforget.errors import PlanError
from fedforget.types import Choice

ADAM = '[optimizer]\nname = "adam"\nlr = 0.01\nbeta1 = 0.8\n'


def merged(folder: Path, text: str = "", **given: Any) -> TrainConfig:
    path = folder / "plan.toml"
    path.write_text(text)
    return TrainConfig.merged(path, given)


def test_every_setting_has_an_option_and_a_kind() -> None:
    settings = {field.name for field in dataclasses.fields(TrainConfig)}
    own = {"out", "config", "checkpoint_every", "device", "link", "as_json"}
    assert set(inspect.signature(cli.train).parameters) - own == settings
    assert set(_KINDS) == settings


def test_every_dataset_has_a_model_of_its_own() -> None:
    assert set(datasets.BUILT_IN) <= set(DEFAULT_MODELS)
    assert TrainConfig(dataset="mnist").model_name() == "cnn"
    assert TrainConfig(dataset="mnist", model="mlp").model_name() == "mlp"
    assert TrainConfig(dataset="own:data").model_name() == "mlp"


def test_options_over_file_over_defaults(tmp_path: Path) -> None:
    config = merged(tmp_path, "rounds = 7\nsilos = 4\n", rounds=9, seed=None)
    assert (config.rounds, config.silos, config.seed, config.batch_size) == (9, 4, 0, 32)
    assert TrainConfig.merged(None, {}) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "given", "wanted"),
    [
        ("", {}, Choice("sgd")),
        ('optimizer = "adam"', {}, Choice("adam")),
        (ADAM, {}, Choice("adam", {"lr": 0.01, "beta1": 0.8})),
        (ADAM, {"lr": 0.5}, Choice("adam", {"lr": 0.5, "beta1": 0.8})),
        (ADAM, {"optimizer": "adam"}, Choice("adam", {"lr": 0.01, "beta1": 0.8})),
        (ADAM, {"optimizer_setting": {"eps": 0.1}}, Choice("adam", {"lr": 0.01, "beta1": 0.8, "eps": 0.1})),
        (ADAM, {"optimizer": "sgd", "lr": 0.1}, Choice("sgd", {"lr": 0.1})),
        ("[optimizer]\nmomentum = 0.9", {}, Choice("sgd", {"momentum": 0.9})),
    ],
)
def test_an_optimizers_settings_stay_with_it(tmp_path: Path, text: str, given: dict[str, Any], wanted: Choice) -> None:
    assert merged(tmp_path, text, **given).plan(10).optimizer == wanted


def test_an_aggregations_settings_stay_with_it(tmp_path: Path) -> None:
    text = '[aggregation]\nname = "trimmed-mean"\ntrim = 0.3\n'
    assert merged(tmp_path, text).plan(10).aggregation == Choice("trimmed-mean", {"trim": 0.3})
    assert merged(tmp_path, text, aggregation="median").plan(10).aggregation == Choice("median")


@pytest.mark.parametrize(("share", "silos", "wanted"), [(0.5, 10, 5), (0.01, 10, 1), (1.0, 10, None), (0.3, 7, 2)])
def test_a_share_of_the_silos(share: float, silos: int, wanted: int | None) -> None:
    assert TrainConfig(share=share).plan(silos).silos_per_round == wanted


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (None, None),
        ([], {}),
        (
            ["a=1", "b=0.5", "c=true", "d=word", "e=x=y", 'f="1"'],
            {"a": 1, "b": 0.5, "c": True, "d": "word", "e": "x=y", "f": "1"},
        ),
    ],
)
def test_settings_as_text(texts: list[str] | None, wanted: dict[str, Any] | None) -> None:
    assert parsed_settings(texts) == wanted


@pytest.mark.parametrize("text", ["lr", "=1"])
def test_settings_that_are_none(text: str) -> None:
    with pytest.raises(PlanError, match="is not of the form NAME=VALUE"):
        parsed_settings([text])


def test_numbers_that_are_none() -> None:
    with pytest.raises(PlanError, match="momentum is nan: it must be a finite number"):
        chosen("sgd", 0.1, {"momentum": float("nan")})


def test_origins() -> None:
    assert TrainConfig().origin().partition.kind == "even"
    assert TrainConfig(dataset="heart-disease").origin().partition.kind == "sites"
    assert TrainConfig(dataset="heart-disease", partition="even", silos=3).origin().partition.silos == 3
    origin = TrainConfig(
        dataset="csv", data_dir="sites", label_column="y", id_column="id", missing=["-9"], label_threshold=0, erase=True
    ).origin()
    assert origin.data_dir == str(Path("sites").resolve())
    assert origin.options == {"label": "y", "id_column": "id", "missing": ["-9"], "threshold": 0, "erase": True}
    hub = TrainConfig(dataset="hub:some/images", input_column="image", label_column="label").origin()
    assert hub.options == {"input_column": "image", "label_column": "label"}


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ({"dataset": "digits", "alpha": 1.0}, False),
        ({"partition": "dirichlet", "alpha": 1.0}, True),
        ({"partition": "dirichlet", "shards": 3}, False),
        ({"partition": "shards", "shards": 3}, True),
        ({"dataset": "heart-disease", "silos": 10}, False),
        ({"dataset": "heart-disease", "partition": "even", "silos": 10}, True),
        ({"dataset": "heart-disease", "id_column": "id"}, False),
        ({"dataset": "csv", "label_column": "y", "id_column": "id", "erase": True}, True),
        ({"dataset": "csv", "label_column": "y", "input_column": "x"}, False),
        ({"dataset": "hub:some/images", "label_column": "y", "input_column": "x"}, True),
        ({"silos_per_round": 2, "share": 0.5}, False),
    ],
)
def test_no_setting_is_accepted_and_ignored(given: dict[str, Any], accepted: bool) -> None:
    if accepted:
        TrainConfig.merged(None, given)
    else:
        with pytest.raises(PlanError, match=r"has no effect with|say the same thing"):
            TrainConfig.merged(None, given)
