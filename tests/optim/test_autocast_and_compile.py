import copy
import os
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedforget.optim import DiagonalFisher
from fedforget.optim.squared_grads import SquaredGrads

from .test_squared_grads import Scaled


class Mixed(nn.Module):
    """Convolutions both large enough to go sample by sample and small, a norm, and modules that are replayed."""

    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(inplace=True), nn.GroupNorm(2, 8),
            nn.Conv2d(8, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(2),
        )  # fmt: skip
        self.attention = nn.MultiheadAttention(49, 1, batch_first=True)
        self.recurrent = nn.LSTM(49, 8, batch_first=True)
        self.head = nn.Sequential(Scaled(8), nn.Linear(8, 3))

    def forward(self, x):
        x = self.images(x)
        x, _ = self.attention(x, x, x)
        return self.head(self.recurrent(x)[0][:, -1])


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 1, 14, 14, generator=generator), torch.randint(3, (6,), generator=generator)


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return Mixed()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def distances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {name: float((found[name] - value).norm() / value.norm()) for name, value in expected.items()}


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward and step inside"])
def test_autocast_to_bfloat16(inputs, inside):
    def gather(enabled: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = mixed()
        squared_grads = SquaredGrads(model)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = functional.cross_entropy(model(inputs[0]), inputs[1])
            if inside:
                loss.backward()
                found = squared_grads.take()
        if not inside:
            loss.backward()
            found = squared_grads.take()
        squares = {squared_grads.names[parameter]: value for parameter, value in found.items()}
        return squares, gradients_of(model)

    plain = mixed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(plain(inputs[0]), inputs[1])
    loss.backward()
    (squares, gradients), (exact_squares, exact_gradients) = gather(True), gather(False)
    assert {value.dtype for value in squares.values()} == {torch.float32}
    # The hooks add nothing to what autocast itself takes from the gradient.
    ordinary = distances(gradients_of(plain), exact_gradients)
    for name, distance in distances(gradients, exact_gradients).items():
        assert distance <= 1.2 * ordinary[name] + 2**-8, name
    for name, distance in distances(squares, exact_squares).items():
        assert distance <= 3 * ordinary[name] + 2**-6, name


@pytest.mark.parametrize("model", [nn.Conv1d(4, 3, 3), nn.Linear(5, 3), Scaled(5)])
def test_a_backward_pass_inside_autocast_shortens_no_product(model):
    def gather(enabled: bool) -> dict[str, Tensor]:
        squared_grads = SquaredGrads(model)
        model.zero_grad()
        loss = model(torch.linspace(-1, 1, 120).reshape(6, 4, 5)).square().sum((1, 2)).mean()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss.backward()
            found = squared_grads.take()
        squared_grads.close()
        return {squared_grads.names[parameter]: value for parameter, value in found.items()}

    assert max(distances(gather(True), gather(False)).values()) < 1e-5


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler on a processor"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_models(inputs):
    """Whichever of the two is built first, and in the steps without Γ too."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 49, 3)
    )

    def gathered(order: str) -> list[dict[str, Tensor]]:
        own = copy.deepcopy(model)
        called = own
        if order == "compiled first":
            called = torch.compile(own)
            optimizer = DiagonalFisher(called, lr=1e-6, fisher_every=2)
        else:
            optimizer = DiagonalFisher(own, lr=1e-6, fisher_every=2)
            if order == "hooks first":
                called = torch.compile(own)
        states = []
        for _ in range(3):
            optimizer.zero_grad()
            functional.cross_entropy(called(inputs[0]), inputs[1]).backward()
            optimizer.step()
            names = {parameter: name for name, parameter in own.named_parameters()}
            states.append(
                {names[parameter]: state["mean_squared_fisher"].clone() for parameter, state in optimizer.state.items()}
            )
        return states

    expected = gathered("eager")
    for order in ("compiled first", "hooks first"):
        torch.compiler.reset()
        for found, wanted in zip(gathered(order), expected, strict=True):
            assert max(distances(found, wanted).values()) < 1e-5, order
    torch.compiler.reset()
