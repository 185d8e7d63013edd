from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedforget as ff
from fedforget.errors import PlanError
from fedforget.federation.registry import Registry, imported
from fedforget.types import Choice, State
from tests.federation.parts import PLAN, REGISTRY


class Takes(nn.Linear):
    def __init__(self, classes: int, shape: tuple[int, ...], bias: bool = True) -> None:
        super().__init__(shape[0], classes, bias)


def takes_nothing() -> nn.Module:
    return nn.Linear(4, 3)


def takes_anything(**known: Any) -> nn.Module:
    return nn.Linear(known["shape"][0], known["classes"])


def wants_the_model(model: nn.Module, **settings: float) -> torch.optim.Optimizer:
    assert isinstance(model, nn.Module)
    return torch.optim.SGD(model.parameters(), **settings)


def no_optimizer(model: nn.Module) -> str:
    return "nothing of the kind"


def first(states: Sequence[State], counts: Sequence[int], scale: float = 1.0) -> State:
    return {name: tensor * scale for name, tensor in states[0].items()}


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Uncopied:
        raise TypeError("not to be copied")


def uncopied() -> nn.Module:
    return Uncopied(4, 3)


not_callable = 3


def model(name: str) -> nn.Module:
    return REGISTRY.model(replace(PLAN, model=name))


def optimizer(name: str, **settings: Any) -> torch.optim.Optimizer:
    return REGISTRY.optimizer(replace(PLAN, optimizer=Choice(name, settings)), takes_nothing())


@pytest.mark.parametrize("name", ["Takes", "takes_nothing", "takes_anything"])
def test_a_factory_is_given_what_it_asks_for(name: str) -> None:
    assert model(f"{__name__}:{name}")(torch.zeros(2, 4)).shape == (2, 3)


def test_a_partial_is_a_factory_too() -> None:
    registry = Registry({"small": functools.partial(ff.models.mlp, hidden=5)}, {})
    assert registry.model(replace(PLAN, model="small"))[1].out_features == 5  # type: ignore[index]


def test_the_plans_type_of_numbers_is_the_models() -> None:
    made = REGISTRY.model(replace(PLAN, dtype="float64"))
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("perceptron", "model 'perceptron' is unknown: use alexnet, cnn, logistic, mlp, resnet18"),
        ("no_such_package:model", "cannot be imported here"),
        (f"{__name__}:no_such_name", "cannot be imported here"),
        (f"{__name__}:", "cannot be imported here"),
        (":model", "cannot be imported here"),
        (".relative:model", "cannot be imported here"),
        (f"{__name__}:not_callable", "is not callable"),
        ("random:random", "made a float, not a torch.nn.Module"),
        ("cnn", "cannot be built for samples of shape"),
    ],
)
def test_a_model_that_cannot_be_built_is_told_by_its_name(name: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        model(name)


def test_dotted_names_lead_into_classes() -> None:
    assert imported("random:Random.random", "model") is random.Random.random


def test_torchs_optimizers_are_given_parameters_and_others_the_model() -> None:
    assert isinstance(optimizer("torch.optim:AdamW", lr=0.1), torch.optim.AdamW)
    assert isinstance(optimizer("fedforget.optim:DiagonalFisher", lr=0.1), ff.optim.DiagonalFisher)
    assert optimizer(f"{__name__}:wants_the_model", lr=0.25).defaults["lr"] == 0.25


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("newton", {}, "optimizer 'newton' is unknown: use adam, diagonal-fisher, muon, sgd"),
        ("sgd", {"learning_rate": 0.1}, "learning_rate"),
        ("sgd", {"lr": -1.0}, r"sgd\(lr=-1.0\)"),
        ("adam", {"beta1": 2.0}, "beta1"),
        (f"{__name__}:no_optimizer", {}, "is a str, not a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_built_is_told_by_its_name(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        optimizer(name, **settings)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    for name in ("sgd", "diagonal-fisher"):
        with pytest.raises(PlanError, match=name):
            REGISTRY.optimizer(replace(PLAN, optimizer=name), nn.Linear(2, 2).requires_grad_(False))


def test_an_aggregation_of_ones_own_with_settings() -> None:
    choice = Choice(f"{__name__}:first", {"scale": 3.0})
    aggregate = REGISTRY.aggregation(replace(PLAN, aggregation=choice))
    assert aggregate([{"w": torch.ones(1)}, {"w": torch.zeros(1)}], [1, 1])["w"].item() == 3.0


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice("average"), "aggregation 'average' is unknown: use fedavg, median, trimmed-mean"),
        (Choice("trimmed-mean", {"trim": 0.5}), "trim is 0.5"),
        (Choice("trimmed-mean", {"cut": 1}), "cut"),
        (Choice("fedavg", {"weights": 1}), "weights"),
    ],
)
def test_an_aggregation_that_cannot_be_used_is_told_before_any_training(choice: Choice, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        REGISTRY.aggregation(replace(PLAN, aggregation=choice))


class Closes(nn.Module):
    """Its forward pass goes by a function that a copy would share with the original."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.head = lambda x: 2 * self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)  # type: ignore[no-any-return]


def patched() -> nn.Module:
    model = nn.Linear(4, 3)
    model.forward = lambda x: nn.functional.linear(x, model.weight)  # type: ignore[method-assign]
    return model


def hooked() -> nn.Module:
    model = nn.Linear(4, 3)
    model.register_forward_hook(lambda *_: model.weight.sum() * torch.ones(1, 3))
    return model


@pytest.mark.parametrize("name", ["takes_nothing", "uncopied", "Closes", "patched", "hooked"])
def test_blank_models_share_nothing(name: str) -> None:
    plan = replace(PLAN, model=f"{__name__}:{name}")
    first, second = (REGISTRY.blank(plan, torch.device("cpu")) for _ in range(2))
    first(torch.ones(1, 4)).sum().backward()
    assert any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in first.parameters())
    assert all(parameter.grad is None for parameter in second.parameters())
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.fill_(7)
    assert not any((parameter == 7).any() for parameter in second.parameters())
    assert not any((parameter == 7).any() for parameter in REGISTRY.blank(plan, torch.device("cpu")).parameters())


def test_another_plan_has_another_blank_model() -> None:
    cpu = torch.device("cpu")
    assert isinstance(REGISTRY.blank(replace(PLAN, model=f"{__name__}:uncopied"), cpu), Uncopied)
    assert not isinstance(REGISTRY.blank(replace(PLAN, model=f"{__name__}:takes_nothing"), cpu), Uncopied)


def test_a_registry_is_pickled_without_its_blank_model() -> None:
    registry = Registry({"linear": takes_nothing}, {})
    before = len(pickle.dumps(registry))
    registry.blank(replace(PLAN, model="linear"), torch.device("cpu"))
    assert len(pickle.dumps(registry)) == before
