"""The weight's gradient and Γ from the same products; the layer itself runs without asking for a gradient."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from fedforget.optim import chunks
from fedforget.optim import convolutions as module_under_test
from fedforget.optim.squared_grads import SquaredGrads

from .oracles import loop_over_samples
from .test_squared_grads import TOLERANCE, N, Scaled, _in_float64, assert_same, convolutions, curved  # noqa: F401

WAYS = {"by sample": (0, 2), "in groups": (0, 2**20), "in chunks": (2**60, 2**20)}
every_way = pytest.mark.parametrize("way", WAYS)


def take(patch: pytest.MonkeyPatch, way: str) -> None:
    """Have all products on the processor taken this way."""
    for name, value in zip(("SMALL", "SHARE"), WAYS[way], strict=True):
        patch.setattr(module_under_test, name, value)


def gather(model: nn.Module, *batch: Tensor, share: float = 1.0) -> dict[str, Tensor]:
    """Γ, after a check that the gradients are those of a model without hooks."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(curved(model, batch), trainable)
    model.zero_grad()
    squared_grads = SquaredGrads(model)
    squared_grads.share = share
    curved(model, batch).backward()
    assert_same(
        {names[parameter]: parameter.grad for parameter in trainable},
        {names[parameter]: gradient for parameter, gradient in zip(trainable, expected, strict=True)},
    )
    found = {names[parameter]: value for parameter, value in squared_grads.take().items()}
    squared_grads.close()
    return found


def check(model: nn.Module, *batch: Tensor) -> None:
    assert_same(gather(model, *batch), loop_over_samples(model, curved, batch, (0,) * len(batch)))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@every_way
@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=convolutions())
def test_gradient_and_squares(way, case):
    with pytest.MonkeyPatch.context() as patch:
        take(patch, way)
        check(*case)


@pytest.mark.parametrize(("positions", "weights", "way"), [(4, 9, "chunks"), (4096, 9, "groups"), (4, 2**18, "sample")])
def test_the_way_follows_the_layers_size(positions, weights, way):
    layer = nn.Conv2d(1, weights // 9, 3) if weights < 2**18 else nn.Conv2d(256, 128, 3)
    gradient = torch.zeros(1, layer.out_channels, positions, 64)
    assert module_under_test._fastest(layer, gradient).__name__.endswith(way)


@every_way
@pytest.mark.parametrize("padding", [1, "same"])
def test_in_the_memory_format_of_channels_last(monkeypatch, way, padding):
    take(monkeypatch, way)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=padding), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3, stride=2))
    check(model.to(memory_format=torch.channels_last), torch.randn(N, 3, 7, 6).to(memory_format=torch.channels_last))
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_large_weights_come_by_output_channels(monkeypatch):
    take(monkeypatch, "by sample")
    monkeypatch.setattr(module_under_test, "SHARE", 40)
    check(nn.Conv2d(2, 5, 3), torch.randn(N, 2, 5, 5))
    check(nn.Conv2d(2, 6, 3, groups=2), torch.randn(N, 2, 5, 5))


def test_chunks_are_small_on_a_processor_and_large_elsewhere():
    assert chunks.limit(torch.device("cpu")) < chunks.limit(torch.device("cuda"))


@every_way
@pytest.mark.parametrize(("share", "samples"), [(1e-6, 1), (0.25, 1), (0.5, 2), (0.7, 3), (1.0, 4)])
def test_a_share_of_the_batch(monkeypatch, way, share, samples):
    take(monkeypatch, way)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(2), nn.GroupNorm(1, 3), nn.Linear(9, 2), Scaled(2))
    inputs = torch.randn(N, 2, 5, 5)
    expected = loop_over_samples(model, curved, (inputs[:samples],), (0,))
    assert_same(gather(model, inputs, share=share), expected)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 2, 3, padding=1), nn.Conv1d(2, 2, 3, padding=1, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))


class TiedToOwn(nn.Module):
    """A convolution whose weight is also used by a module that is replayed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(3, 3, 1)
        self.own = Scaled(3)
        self.own.inner.weight = nn.Parameter(torch.randn(3, 3))
        self.own.inner.bias = self.layer.bias

    def forward(self, x):
        return self.own(self.layer(x).transpose(1, 2))


@pytest.mark.parametrize("model", [Tied, TiedToOwn])
def test_weights_in_several_places(model):
    model = model()
    check(model, torch.randn(N, 3 if isinstance(model, TiedToOwn) else 2, 5))


class Borrowing(nn.Module):
    """Calls a convolution that lives in a replayed module, which calls it too."""

    def __init__(self, looped: bool):
        super().__init__()
        self.layer = nn.Conv1d(2, 2, 3, padding=1)
        self.own = Own(self.layer, looped)

    def forward(self, x):
        return self.own(torch.tanh(self.layer(x)))


class Own(nn.Module):
    def __init__(self, layer: nn.Module, looped: bool):
        super().__init__()
        self.layer, self.looped = layer, looped
        self.scale = nn.Parameter(torch.randn(2, 1))

    def forward(self, x):
        # What vmap cannot run is replayed sample by sample, with the parameters in their places.
        factor = 1.0 if not self.looped or float(x.detach().sum()) == 0 else 2.0
        return self.layer(x * self.scale) * factor


@pytest.mark.parametrize("looped", [False, True])
def test_a_layer_inside_and_outside_of_a_replayed_module(looped):
    check(Borrowing(looped), torch.randn(N, 2, 5))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters(frozen):
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 2, 3))
    for layer in (model[0], model[2]):
        getattr(layer, frozen).requires_grad_(False)
    check(model, torch.randn(N, 2, 8))
    assert [parameter.requires_grad for parameter in model.parameters()] == [frozen != "weight", frozen != "bias"] * 2


def test_a_parameter_frozen_after_the_hooks():
    model = nn.Conv1d(2, 3, 3)
    squared_grads = SquaredGrads(model)
    model.weight.requires_grad_(False)
    curved(model, (torch.randn(N, 2, 5),)).backward()
    assert squared_grads.take().keys() == {model.bias}
    assert not model.weight.requires_grad
    assert model.weight.grad is None


def test_a_penalty_reaches_the_gradient():
    model, inputs = nn.Conv1d(2, 3, 3), torch.randn(N, 2, 5)
    squared_grads = SquaredGrads(model)
    (curved(model, (inputs,)) + model.weight.square().sum()).backward()
    found = squared_grads.take()
    assert_same(
        {squared_grads.names[parameter]: value for parameter, value in found.items()},
        loop_over_samples(model, curved, (inputs,), (0,)),
    )
    squared_grads.close()
    found_gradient = model.weight.grad
    expected = torch.autograd.grad(curved(model, (inputs,)) + model.weight.square().sum(), model.weight)[0]
    torch.testing.assert_close(found_gradient, expected, rtol=TOLERANCE, atol=0)


def test_the_gradient_is_right_when_the_owner_is_gone():
    model, inputs = nn.Conv1d(2, 3, 3), torch.randn(N, 2, 5)
    squared_grads = SquaredGrads(model)
    loss = curved(model, (inputs,))
    del squared_grads
    loss.backward(retain_graph=True)
    loss.backward()
    expected = torch.autograd.grad(curved(model, (inputs,)), model.weight)[0]
    torch.testing.assert_close(model.weight.grad, 2 * expected)


def test_a_second_derivative_is_refused_when_the_owner_is_gone_too():
    model = nn.Conv1d(2, 3, 3)
    squared_grads = SquaredGrads(model)
    loss = curved(model, (torch.randn(N, 2, 5),))
    del squared_grads
    (gradient,) = torch.autograd.grad(loss, model.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_another_hook_that_changes_the_output():
    model, inputs = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh()), torch.randn(N, 2, 5)
    model[0].register_forward_hook(lambda _, __, output: 2 * output)
    check(model, inputs)


def test_two_owners():
    model, inputs = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh()), torch.randn(N, 2, 5)
    owners = [SquaredGrads(model), SquaredGrads(model)]
    curved(model, (inputs,)).backward()
    expected = loop_over_samples(model, curved, (inputs,), (0,))
    for owner in owners:
        found = owner.take()
        assert_same({owner.names[parameter]: value for parameter, value in found.items()}, expected)
        owner.close()


# The parameters always come back


class Interrupted(BaseException):
    """As a key pressed while the layer runs: no `except Exception` sees it."""


@pytest.mark.parametrize("after", ["clear", "call"])
@pytest.mark.parametrize("error", [ValueError, Interrupted])
def test_an_error_in_the_layer(error, after):
    model, inputs = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Conv1d(3, 2, 1)), torch.randn(N, 2, 5)
    squared_grads = SquaredGrads(model)

    def fail(*_: object) -> None:
        raise error

    handle = model[1].register_forward_pre_hook(fail)
    with pytest.raises(error):
        model(inputs)
    handle.remove()
    if after == "clear":
        squared_grads.clear()
    else:
        model(inputs)
    assert all(parameter.requires_grad for parameter in model.parameters())
    check(model, inputs)


def test_what_was_lent_is_back_before_the_layer_returns():
    model = nn.Sequential(nn.Conv1d(2, 3, 3))
    squared_grads = SquaredGrads(model)
    during, after = [], []
    model[0].register_forward_pre_hook(lambda *_: during.append(model[0].weight.requires_grad))
    model[0].register_forward_hook(lambda *_: after.append(model[0].weight.requires_grad))
    model(torch.randn(N, 2, 5))
    with torch.no_grad():
        model(torch.randn(N, 2, 5))
    squared_grads.needed = set()
    model(torch.randn(N, 2, 5))
    assert (during, after) == ([False, True, True], [True, True, True])
    squared_grads.close()


def test_weights_put_in_from_outside():
    model, inputs = nn.Conv1d(2, 3, 3), torch.randn(N, 2, 5)
    squared_grads = SquaredGrads(model)
    weights = {name: (2 * parameter).detach().requires_grad_() for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, weights, (inputs,)).sum().backward()
    assert all(value.grad is not None for value in weights.values())
    assert all(parameter.grad is None for parameter in model.parameters())
    squared_grads.close()


# What is refused stays refused


def test_refusals():
    model, inputs = nn.Sequential(nn.Conv1d(2, 3, 3)), torch.randn(N, 2, 5, requires_grad=True)
    squared_grads = SquaredGrads(model)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(curved(model, (inputs,)), list(model.parameters()), create_graph=True)
    loss = curved(model, (inputs,))
    loss.backward(retain_graph=True)
    squared_grads.clear()
    with pytest.raises(RuntimeError, match=r"layer '0' \(Conv1d\) a second time: call the model again"):
        loss.backward()
    for _ in range(2):
        curved(model, (inputs,)).backward()
    with pytest.raises(RuntimeError, match="two backward passes"):
        squared_grads.take()
    squared_grads.close()


def test_a_pass_that_reaches_no_parameter():
    model, inputs = nn.Sequential(nn.Conv1d(2, 3, 3)), torch.randn(N, 2, 5, requires_grad=True)
    squared_grads = SquaredGrads(model)
    loss = curved(model, (inputs,))
    (found,) = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert found.norm() > 0
    assert squared_grads.take() == {}
    assert model[0].weight.grad is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
    assert len(squared_grads.take()) == 2
    squared_grads.close()


class Outside(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(2, 2, 1)

    def forward(self, x):
        return nn.functional.conv1d(self.layer(x), self.layer.weight)


def test_a_weight_used_behind_the_back_of_its_layer():
    model = Outside()
    squared_grads = SquaredGrads(model)
    with pytest.raises(RuntimeError, match=r"parameter 'layer.weight' is used outside the forward of a module"):
        model(torch.randn(N, 2, 5))
    squared_grads.close()


def test_no_false_alarm_while_only_some_are_needed():
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Conv1d(3, 2, 1), nn.Flatten(), nn.Linear(6, 2))
    squared_grads = SquaredGrads(model)
    squared_grads.needed = {model[1].weight}
    curved(model, (torch.randn(N, 2, 5),)).backward()
    assert squared_grads.take().keys() == {model[1].weight}
    squared_grads.close()
