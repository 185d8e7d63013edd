"""The default damping, without which cheaper Γ and large rates do not train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedforget as ff
from fedforget.optim import DiagonalFisher


def test_no_step_of_the_defaults_is_longer_than_the_mean_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = DiagonalFisher(model)
    assert optimizer.defaults["lr"] == optimizer.defaults["eps"]
    x, y = 1e-3 * torch.randn(8, 3), torch.randint(2, (8,))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    nn.functional.cross_entropy(model(x), y).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step()
    for old, new, gradient in zip(before, model.parameters(), gradients, strict=True):
        assert bool(((new - old).abs() <= gradient.abs() * 1.001 + 1e-7).all())


@pytest.mark.parametrize("cheaper", [{}, {"fisher_every": 4}, {"fisher_share": 0.25}])
def test_cheaper_settings_train_the_digits(cheaper: dict[str, float]) -> None:
    # With eps=1e-8 the two cheaper ones stay at chance, or fall far behind.
    optimizer = ff.Choice("diagonal-fisher", {"lr": 0.01, **cheaper})
    federation = ff.Federation.split_evenly(ff.datasets.digits(), silos=10, model=ff.models.mlp)
    assert federation.train(ff.Plan(rounds=8, optimizer=optimizer)).accuracy > 0.9
