"""Γ at every k-th step only, and from a share of the batch."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedforget.optim import DiagonalFisher

from .oracles import equation_15, loop_over_samples
from .test_diagonal_fisher import build_batches, build_model, cross_entropy, train

LR = 1e-4


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    every=st.integers(1, 4),
    share=st.sampled_from([0.01, 0.25, 0.5, 0.8, 1.0]),
    block_size=st.sampled_from([1, 3]),
    steps=st.integers(1, 6),
)
def test_steps_follow_the_oracle(every, share, block_size, steps):
    """m over all steps, v over the Γ of each k-th step, each from the front of its batch."""
    model, slow = build_model(), build_model()
    optimizer = DiagonalFisher(
        model, lr=LR, betas=(0.9, 0.99), eps=1e-4, block_size=block_size, fisher_every=every, fisher_share=share
    )
    means = {name: torch.zeros_like(parameter) for name, parameter in slow.named_parameters()}
    fishers: dict[str, list[Tensor]] = {name: [] for name in means}
    for number, batch in enumerate(build_batches(steps)):
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        slow.load_state_dict(model.state_dict())
        slow.zero_grad()
        cross_entropy(slow, batch).backward()
        if number % every == 0:
            front = max(1, round(share * len(batch[0])))
            for name, gamma in loop_over_samples(slow, cross_entropy, tuple(t[:front] for t in batch), (0, 0)).items():
                fishers[name].append(gamma)
        train(model, optimizer, [batch])
        for name, parameter in slow.named_parameters():
            means[name] = 0.9 * means[name] + 0.1 * parameter.grad
            # With beta1 = 0 the oracle's last step is m / v with this m, and v from all the Γ given to it.
            m = means[name] / (1 - 0.9 ** (number + 1))
            still = [torch.zeros_like(m)] * (len(fishers[name]) - 1)
            expected = equation_15(
                start[name], [*still, m], fishers[name], lr=LR, betas=(0.0, 0.99), eps=1e-4, block_size=block_size
            )
            moved = (expected - start[name]).norm()
            assert (model.get_parameter(name) - expected).norm() <= 1e-7 * moved, (name, number)
    assert {int(state["refreshes"]) for state in optimizer.state.values()} == {-(-steps // every)}


def test_once_and_all_is_the_default():
    models = [build_model(torch.float32), build_model(torch.float32)]
    optimizers = [DiagonalFisher(models[0]), DiagonalFisher(models[1], fisher_every=1, fisher_share=1.0)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, build_batches(3, torch.float32))
    for found, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_stored_state_continues_bit_for_bit(stop):
    batches, model = build_batches(6, torch.float32), build_model(torch.float32)
    optimizer = DiagonalFisher(model, lr=1e-3, fisher_every=3, fisher_share=0.5)
    train(model, optimizer, batches[:stop])
    stored = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stored)
    stored.seek(0)
    train(model, optimizer, batches[stop:])
    loaded = torch.load(stored, weights_only=True)
    second = build_model(torch.float32)
    second.load_state_dict(loaded["model"])
    continued = DiagonalFisher(second)
    continued.load_state_dict(loaded["optimizer"])
    train(second, continued, batches[stop:])
    for found, expected in zip(second.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(continued.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(expected[key])) for key in expected)


def test_steps_between_compute_nothing_per_sample(monkeypatch):
    def unexpected(*_: object) -> None:
        raise AssertionError("nothing was to be computed per sample")

    model = build_model()
    optimizer = DiagonalFisher(model, fisher_every=3)
    batches = build_batches(4)
    train(model, optimizer, batches[:1])
    with monkeypatch.context() as patch:
        for name in ("summed_squares", "attach", "Use"):
            patch.setattr(f"fedforget.optim.squared_grads.{name}", unexpected)
        train(model, optimizer, batches[1:3])
        with pytest.raises(AssertionError, match="per sample"):
            train(model, optimizer, batches[3:])


def test_the_steps_between_refuse_as_before():
    model = build_model()
    optimizer = DiagonalFisher(model, fisher_every=2)
    train(model, optimizer, build_batches(1))
    for batch in build_batches(2):
        cross_entropy(model, batch).backward()
    with pytest.raises(RuntimeError, match="two backward passes"):
        optimizer.step()


class Late(nn.Module):
    """Its second layer is not used in the first step."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.late = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if self.late else x


def test_a_parameter_that_has_no_fisher_yet_gets_its_own():
    torch.manual_seed(0)
    model = Late()
    optimizer = DiagonalFisher(model, lr=1e-6, fisher_every=3)
    counts = []
    for step in range(5):
        model.late = step >= 1
        optimizer.zero_grad()
        functional.mse_loss(model(torch.randn(6, 4)), torch.randn(6, 4)).backward()
        optimizer.step()
        counts.append([int(optimizer.state[p].get("refreshes", -1)) for p in (model.first.weight, model.second.weight)])
    # Each counts from its own first step.
    assert counts == [[1, -1], [1, 1], [1, 1], [2, 1], [2, 2]]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
