import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedforget.optim import BUILT_IN, SGD, Adam, DiagonalFisher
from fedforget.types import Choice, Plan

from .oracles import equation_15, loop_over_samples


def build_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(2 * 9, 5), nn.Tanh(), nn.Linear(5, 3)
    ).to(dtype)


def build_batches(count: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(6, 1, 5, 5, generator=generator, dtype=dtype),
            torch.randint(3, (6,), generator=generator),
        )
        for _ in range(count)
    ]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()


@pytest.mark.parametrize("block_size", [1, 3, 10_000])
@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-8), ((0.0, 0.5), 1e-2)])
def test_steps_follow_equation_15(block_size, betas, eps):
    model = build_model()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = DiagonalFisher(model, lr=1e-4, betas=betas, eps=eps, block_size=block_size)
    slow = build_model()
    deltas: dict[str, list[Tensor]] = {name: [] for name in start}
    gammas: dict[str, list[Tensor]] = {name: [] for name in start}
    for batch in build_batches(4):
        # The oracle's Δ and Γ are taken where the parameters are now.
        slow.load_state_dict(model.state_dict())
        slow.zero_grad()
        cross_entropy(slow, batch).backward()
        for name, parameter in slow.named_parameters():
            deltas[name].append(parameter.grad.clone())
        for name, gamma in loop_over_samples(slow, cross_entropy, batch, (0, 0)).items():
            gammas[name].append(gamma)
        train(model, optimizer, [batch])
    for name, parameter in model.named_parameters():
        expected = equation_15(
            start[name], deltas[name], gammas[name], lr=1e-4, betas=betas, eps=eps, block_size=block_size
        )
        moved = (expected - start[name]).norm()
        assert moved > 0
        assert (parameter - expected).norm() <= 1e-7 * moved, name


def test_it_learns_in_float32():
    model, batches = build_model(torch.float32), build_batches(1, torch.float32)
    optimizer = DiagonalFisher(model, lr=1e-3, eps=1e-4)
    before = float(cross_entropy(model, batches[0]).detach())
    train(model, optimizer, batches * 60)
    assert float(cross_entropy(model, batches[0]).detach()) < before / 2
    assert {state["mean_squared_fisher"].dtype for state in optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stored_state_continues_bit_for_bit(dtype):
    batches = build_batches(5, dtype)
    model = build_model(dtype)
    optimizer = DiagonalFisher(model, lr=1e-3)
    train(model, optimizer, batches[:2])
    stored = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stored)
    stored.seek(0)
    shapes = [{key: torch.as_tensor(value).shape for key, value in state.items()} for state in optimizer.state.values()]
    train(model, optimizer, batches[2:])
    assert shapes == [
        {key: torch.as_tensor(value).shape for key, value in state.items()} for state in optimizer.state.values()
    ]

    loaded = torch.load(stored, weights_only=True)
    second = build_model(dtype)
    second.load_state_dict(loaded["model"])
    continued = DiagonalFisher(second, lr=0.5, block_size=1)
    continued.load_state_dict(loaded["optimizer"])
    train(second, continued, batches[2:])
    for found, expected in zip(second.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(continued.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(expected[key])) for key in expected)


def test_a_closure_and_a_schedule():
    models = [build_model(), build_model()]
    batches = build_batches(2)
    optimizers = [DiagonalFisher(model, lr=1e-3) for model in models]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)
    losses = []
    for batch in batches:

        def closure(batch: tuple[Tensor, Tensor] = batch) -> float:
            optimizers[0].zero_grad()
            loss = cross_entropy(models[0], batch)
            loss.backward()
            return float(loss.detach())

        losses.append(optimizers[0].step(closure))
        schedule.step()
    assert losses[0] == float(cross_entropy(build_model(), batches[0]).detach())
    for batch, lr in zip(batches, (1e-3, 5e-4), strict=True):
        optimizers[1].param_groups[0]["lr"] = lr
        train(models[1], optimizers[1], [batch])
    for found, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(found, expected)


def test_gradients_may_be_reset_by_the_model():
    models = [build_model(), build_model()]
    optimizers = [DiagonalFisher(model) for model in models]
    for batch in build_batches(3):
        train(models[0], optimizers[0], [batch])
        models[1].zero_grad()
        cross_entropy(models[1], batch).backward()
        optimizers[1].step()
    for found, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(found, expected)


def test_frozen_and_unused_parameters_stay():
    model = build_model()
    model[0].weight.requires_grad_(False)
    model.add_module("6", nn.Identity())
    model[6].add_module("unused", nn.Linear(2, 2).double())
    before = copy.deepcopy(model.state_dict())
    optimizer = DiagonalFisher(model)
    train(model, optimizer, build_batches(1))
    still = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert still == {"0.weight", "6.unused.weight", "6.unused.bias"}
    optimizer.zero_grad()
    optimizer.step()
    assert {name for name, value in model.state_dict().items() if torch.equal(value, before[name])} == still


def test_zero_grad_forgets_what_was_gathered():
    models = [build_model(), build_model()]
    batches = build_batches(2)
    optimizers = [DiagonalFisher(model) for model in models]
    cross_entropy(models[0], batches[0]).backward()
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, batches[1:])
    for found, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(found, expected)


def test_gradient_accumulation_is_refused():
    model = build_model()
    optimizer = DiagonalFisher(model)
    before = copy.deepcopy(model.state_dict())
    for batch in build_batches(2):
        cross_entropy(model, batch).backward()
    with pytest.raises(RuntimeError, match=r"two backward passes .* call the optimizer's zero_grad\(\) before each"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(model, optimizer, build_batches(1))


def test_foreign_parameters_are_refused():
    model = build_model()
    optimizer = DiagonalFisher(model)
    for foreign in (nn.Parameter(torch.zeros(2)), [nn.Parameter(torch.zeros(2))]):
        with pytest.raises(ValueError, match="parameters that its model had, trainable, when it was built"):
            optimizer.add_param_group({"params": foreign})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": model[0].weight})


def test_copies_are_refused():
    optimizer = DiagonalFisher(build_model())
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled: .* state_dict\(\)"):
            attempt(optimizer)


def test_a_dropped_optimizer_leaves_no_hooks():
    model = build_model()
    optimizer = DiagonalFisher(model)
    train(model, optimizer, build_batches(1))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for batch in build_batches(2):  # Accumulates, which is nobody's business any more.
        cross_entropy(model, batch).backward()
    closed = DiagonalFisher(model)
    closed.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_trainable_parameters():
    with pytest.raises(ValueError, match="no trainable parameter: set requires_grad"):
        DiagonalFisher(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, r"lr is 0\.0: it must be greater than 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": float("inf")}, "lr is inf"),
        ({"betas": (1.0, 0.5)}, r"beta1 is 1\.0: it must lie in \[0, 1\)"),
        ({"betas": (0.5, -0.1)}, r"beta2 is -0\.1"),
        ({"betas": (0.5,)}, "it must be a pair"),
        ({"eps": 0.0}, r"eps is 0\.0: it must be greater than 0, since Γ"),
        ({"block_size": 0}, "block_size is 0: it must be a whole number of at least 1"),
        ({"block_size": 2.5}, r"block_size is 2\.5"),
        ({"block_size": True}, "block_size is True"),
        ({"fisher_every": 0}, "fisher_every is 0: it must be a whole number of at least 1"),
        ({"fisher_every": 1.5}, r"fisher_every is 1\.5"),
        ({"fisher_share": 0.0}, r"fisher_share is 0\.0: it must be greater than 0 and at most 1"),
        ({"fisher_share": 1.5}, r"fisher_share is 1\.5"),
        ({"fisher_share": float("nan")}, "fisher_share is nan"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        DiagonalFisher(nn.Linear(2, 2), **settings)


# By name, for plans


def test_built_in_optimizers():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    sgd = BUILT_IN["sgd"](model, lr=0.2, momentum=0.9, nesterov=True)
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["lr"], sgd.defaults["momentum"]) == (0.2, 0.9)
    assert sgd.defaults["nesterov"] is True
    adam = BUILT_IN["adam"](model, lr=0.2, beta1=0.8, beta2=0.9, eps=1e-3)
    assert isinstance(adam, torch.optim.Adam)
    assert (adam.defaults["lr"], adam.defaults["betas"], adam.defaults["eps"]) == (0.2, (0.8, 0.9), 1e-3)
    fisher = BUILT_IN["diagonal-fisher"](
        model, lr=0.2, beta1=0.8, beta2=0.9, eps=1e-3, block_size=2, fisher_every=4, fisher_share=0.5
    )
    assert isinstance(fisher, DiagonalFisher)
    assert fisher.defaults == {
        "lr": 0.2, "betas": (0.8, 0.9), "eps": 1e-3, "block_size": 2, "fisher_every": 4, "fisher_share": 0.5,
    }  # fmt: skip
    for optimizer in (sgd, adam, fisher):
        assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def test_shorthands_for_plans():
    assert SGD(lr=0.1) == Choice("sgd", {"lr": 0.1})
    assert SGD(0.1, momentum=0.9, nesterov=True) == Choice("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True})
    assert Adam() == Choice("adam", {"lr": 0.001})
    assert Adam(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6) == Choice(
        "adam", {"lr": 0.01, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
    )
    assert Plan(optimizer=SGD(lr=0.1)).digest() == Plan().digest()
    for choice in (SGD(), SGD(momentum=0.9, nesterov=True), Adam(), Adam(beta1=0.5, eps=1e-4)):
        BUILT_IN[choice.name](nn.Linear(2, 2), **choice.settings)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sgd", {"lr": 0}, "lr is 0: it must be greater than 0"),
        ("sgd", {"lr": 0.1, "momentum": 1.0}, r"momentum is 1\.0: it must lie in \[0, 1\)"),
        ("sgd", {"lr": 0.1, "nesterov": True}, "nesterov needs a momentum"),
        ("adam", {"lr": -1.0}, r"lr is -1\.0"),
        ("adam", {"beta1": 1.0}, r"beta1 is 1\.0"),
        ("adam", {"beta2": -0.5}, r"beta2 is -0\.5"),
        ("adam", {"eps": -1.0}, r"eps is -1\.0: it must be 0 or more"),
        ("diagonal-fisher", {"beta2": 1.0}, r"beta2 is 1\.0"),
        ("diagonal-fisher", {"fisher_every": 0}, "fisher_every is 0"),
        ("diagonal-fisher", {"fisher_share": 2.0}, r"fisher_share is 2\.0"),
    ],
)
def test_bad_settings_by_name(name, settings, message):
    with pytest.raises(ValueError, match=message):
        BUILT_IN[name](nn.Linear(2, 2), **settings)
    if name in ("sgd", "adam"):
        with pytest.raises(ValueError, match=message):
            {"sgd": SGD, "adam": Adam}[name](**settings)
