from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import fedforget as ff
from fedforget.models import BUILT_IN, alexnet, cnn, logistic, mlp, resnet18

SHAPES = {
    "cnn": [(1, 28, 28), (3, 32, 32), (1, 8, 8), (1, 4, 4), (2, 9, 13)],
    "alexnet": [(3, 32, 32), (1, 16, 16), (1, 17, 40)],
    "resnet18": [(3, 32, 32), (1, 8, 8), (1, 9, 20)],
    "mlp": [(4,), (1, 8, 8), (2, 3, 4, 5)],
    "logistic": [(4,), (1, 8, 8)],
}
CASES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


def weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def kinds(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def test_every_model_is_covered() -> None:
    assert set(SHAPES) == set(BUILT_IN)


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_a_score_for_each_class(name: str, shape: tuple[int, ...]) -> None:
    model = BUILT_IN[name](shape=shape, classes=7).eval()
    x = torch.randn(2, *shape)
    with torch.no_grad():
        scores = model(x)
        alone = model(x[1:])
    assert scores.shape == (2, 7)
    torch.testing.assert_close(scores[1:], alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_no_layer_couples_the_samples_of_a_batch(name: str) -> None:
    model = BUILT_IN[name](shape=SHAPES[name][0], classes=2)
    assert not any(isinstance(module, _BatchNorm) for module in model.modules())
    assert not list(model.buffers())


def test_the_papers_cnn() -> None:
    model = cnn((1, 28, 28), 10)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert [(layer.out_channels, layer.kernel_size, layer.padding) for layer in convolutions] == [
        (32, (5, 5), (2, 2)),
        (64, (5, 5), (2, 2)),
    ]
    assert (kinds(model, nn.MaxPool2d), kinds(model, nn.Linear)) == (2, 1)
    assert weights(model) == (25 * 32 + 32) + (25 * 32 * 64 + 64) + (64 * 7 * 7 * 10 + 10)


def test_alexnet_and_resnet18_are_of_the_usual_size() -> None:
    large = alexnet((3, 32, 32), 10)
    assert (kinds(large, nn.Conv2d), kinds(large, nn.Linear), kinds(large, nn.Dropout)) == (5, 3, 2)
    assert weights(large) > 20_000_000
    small = resnet18((3, 32, 32), 10)
    # A stem, two convolutions in each of eight blocks, and three shortcuts that widen.
    assert (kinds(small, nn.Conv2d), kinds(small, nn.Linear)) == (1 + 16 + 3, 1)
    assert weights(small) == 11_173_962  # as published for 32×32 images


def test_the_small_ones() -> None:
    assert weights(logistic((2, 3), 4)) == 6 * 4 + 4
    assert weights(mlp((6,), 4, hidden=5)) == (6 * 5 + 5) + (5 * 4 + 4)


@pytest.mark.parametrize(
    ("name", "shape"), [("cnn", (4,)), ("cnn", (1, 3, 28)), ("alexnet", (3, 15, 32)), ("resnet18", (3, 7, 7))]
)
def test_a_shape_that_does_not_fit_is_refused_with_what_would(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"{name} needs images of shape .* at least .* pixels a side"):
        BUILT_IN[name](shape=shape, classes=2)


def test_each_model_is_fresh_and_decided_by_the_generator() -> None:
    def made(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([parameter.detach().flatten() for parameter in ff.models.mlp((4,), 3).parameters()])

    drawn = [made(seed) for seed in (1, 1, 2)]
    assert [torch.equal(first, second) for first, second in pairwise(drawn)] == [True, False]
