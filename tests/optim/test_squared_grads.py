import copy
import gc
import io
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from fedforget.optim import chunks, uses
from fedforget.optim.squared_grads import SquaredGrads

from .oracles import Loss, loop_over_samples

N = 4
TOLERANCE = 1e-9


@pytest.fixture(autouse=True)
def _in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def curved(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """A mean loss that gives every output number another gradient."""
    return mean_over_batch(model(*batch), 0)


def mean_over_batch(output: Tensor, dimension: int) -> Tensor:
    rows = output.movedim(dimension, 0).flatten(1)
    weights = torch.linspace(-1, 2, rows.shape[1])
    return (weights * rows + rows**2).sum(1).mean()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.norm() > 0, f"the test cannot tell anything of {name}"
        assert (found[name] - value).norm() <= TOLERANCE * value.norm(), name


def gather(model: nn.Module, loss: Loss, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    model.zero_grad()
    squared_grads = SquaredGrads(model)
    loss(model, batch).backward()
    found = {squared_grads.names[parameter]: value for parameter, value in squared_grads.take().items()}
    squared_grads.close()
    return found


def check(
    model: nn.Module, *batch: Tensor, loss: Loss = curved, dimensions: tuple[int, ...] | None = None
) -> dict[str, Tensor]:
    expected = loop_over_samples(model, loss, batch, dimensions or (0,) * len(batch))
    assert_same(gather(model, loss, batch), expected)
    return expected


def tokens(*shape: int, vocabulary: int = 5) -> Tensor:
    return torch.randint(vocabulary, shape)


# Layers with a rule


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("extra", [(), (3,), (2, 3)])
def test_linear(extra, bias):
    check(nn.Linear(5, 4, bias=bias), torch.randn(N, *extra, 5))


@st.composite
def convolutions(draw):
    spatial = draw(st.integers(1, 3))
    triple = st.tuples(*[st.integers(1, 3)] * spatial)
    groups = draw(st.integers(1, 2))
    kernel, stride, dilation = draw(triple), draw(triple), draw(triple)
    padding = draw(st.one_of(st.tuples(*[st.integers(0, 2)] * spatial), st.sampled_from(["same", "valid"])))
    if padding == "same":
        stride = (1,) * spatial
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    size = [d * (k - 1) + 1 + draw(st.integers(3, 5)) for k, d in zip(kernel, dilation, strict=True)]
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[spatial - 1]
    bias = draw(st.booleans())
    return (
        layer(2 * groups, 3 * groups, kernel, stride, padding, dilation, groups, bias, mode),
        torch.randn(3, 2 * groups, *size),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(convolutions())
def test_convolution(case):
    check(*case)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_convolution_with_one_side_padded_more(mode):
    check(nn.Conv2d(2, 3, (2, 4), padding="same", padding_mode=mode), torch.randn(N, 2, 5, 6))


def test_convolution_in_several_chunks(monkeypatch):
    layer, inputs = nn.Conv2d(2, 4, 3, padding=1, groups=2), torch.randn(5, 2, 6, 5)
    monkeypatch.setattr(chunks, "ELEMENTS", 1500)
    check(layer, inputs)
    monkeypatch.setattr(chunks, "ELEMENTS", 1)
    check(layer, inputs)


def test_chunks_hold_a_bounded_number_of_samples():
    assert [chunk.stop - chunk.start for chunk in chunks.chunks(10, 2**22, 2**24)] == [4, 4, 2]
    assert [chunk.stop - chunk.start for chunk in chunks.chunks(2, 2**30, 2**24)] == [1, 1]


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("shape", [(N,), (N, 6), (N, 2, 3)])
def test_embedding(shape, padding_idx):
    inputs = tokens(*shape) if len(shape) > 1 else torch.arange(N)
    check(nn.Embedding(5, 3, padding_idx=padding_idx), inputs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "extra"), [((5,), ()), ((5,), (3,)), ((2, 5), (3,))])
def test_layer_norm(shape, extra, bias):
    check(nn.LayerNorm(shape, bias=bias), torch.randn(N, *extra, *shape))


@pytest.mark.parametrize("extra", [(), (3,), (3, 2)])
def test_group_norm(extra):
    check(nn.GroupNorm(2, 6), torch.randn(N, 6, *extra))


def test_group_norm_without_bias():
    layer = nn.GroupNorm(2, 6)
    layer.bias.requires_grad_(False)
    assert check(layer, torch.randn(N, 6, 3)).keys() == {"weight"}


def test_activations_in_place():
    check(
        nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.GroupNorm(3, 3), nn.ReLU(inplace=True), nn.Flatten(),
            nn.Linear(3 * 16, 4), nn.ReLU(inplace=True), nn.Linear(4, 2),
        ),
        torch.randn(N, 1, 6, 6),
    )  # fmt: skip


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    assert check(model, torch.randn(N, 5)).keys() == {"0.bias", "1.weight"}


def test_dropout_in_a_module_of_its_own():
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    inputs = torch.randn(N, 5)
    torch.manual_seed(3)
    kept = 2.0 * (functional.dropout(torch.ones(N, 4), 0.5) > 0)
    torch.manual_seed(3)
    found = gather(model, curved, (inputs,))

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return mean_over_batch(model[2](model[0](batch[0]) * batch[1]), 0)

    assert_same(found, loop_over_samples(model, loss, (inputs, kept), (0, 0)))


def test_a_penalty_enters_the_gradient_and_not_the_squares():
    model = nn.Linear(5, 4)

    def penalised(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return curved(model, batch) + sum(parameter.square().sum() for parameter in model.parameters())

    inputs = torch.randn(N, 5)
    assert_same(gather(model, penalised, (inputs,)), loop_over_samples(model, curved, (inputs,), (0,)))


# Shared weights


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


def test_a_layer_called_twice():
    check(Twice(), torch.randn(N, 4))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3, padding_idx=1)
        self.inner = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.inner(self.embedding(x))))


def test_embedding_tied_to_the_head():
    check(Tied(), tokens(N, 6))


def test_siamese_model():
    def distance(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return (model(batch[0]) - model(batch[1])).square().sum(1).mean()

    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3, bias=False))
    # A last bias would cancel in the difference.
    check(model, torch.randn(N, 5), torch.randn(N, 5), loss=distance)


class TiedToOwn(nn.Module):
    """One parameter in a layer with a rule and in a module that is replayed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scaled = Scaled(4)
        self.scaled.inner.weight = self.layer.weight

    def forward(self, x):
        return self.scaled(torch.tanh(self.layer(x)))


def test_a_weight_tied_between_a_layer_and_a_replayed_module():
    check(TiedToOwn(), torch.randn(N, 4))


# Modules that are replayed


class Scaled(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(features))
        self.inner = nn.Linear(features, features)
        self.frozen = nn.Parameter(torch.randn(features), requires_grad=False)

    def forward(self, x, *, sign: float = 1.0):
        return torch.sin(self.inner(x) * self.scale) * sign + self.frozen


def refuse_the_loop(monkeypatch):
    def unexpected(*_):
        raise AssertionError("vmap was expected to do")

    monkeypatch.setattr(uses, "looped_shares", unexpected)


@pytest.mark.parametrize("chunk", [2**24, 1])
def test_a_module_with_a_parameter_of_its_own(monkeypatch, chunk):
    refuse_the_loop(monkeypatch)
    monkeypatch.setattr(chunks, "ELEMENTS", chunk)
    check(nn.Sequential(nn.Linear(5, 4), Scaled(4), nn.Linear(4, 3)), torch.randn(N, 5))


def test_a_replayed_module_called_twice():
    scaled = Scaled(4)
    check(nn.Sequential(scaled, nn.Tanh(), scaled), torch.randn(N, 4))


class Borrowing(nn.Module):
    """Calls a layer that lives in a replayed module, which calls it too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scaled = Scaled(4)
        self.scaled.inner = self.layer

    def forward(self, x):
        return self.scaled(torch.tanh(self.layer(x)))


def test_a_layer_called_inside_and_outside_of_a_replayed_module():
    check(Borrowing(), torch.randn(N, 4))


class Branches(nn.Module):
    """The second output is computed from the first, and the third is the input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        hidden = torch.tanh(x @ self.weight)
        return {"hidden": hidden, "more": [hidden @ self.weight, x], "none": None}


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.branches = Branches()

    def forward(self, x):
        out = self.branches(self.first(x))
        return torch.relu(out["hidden"]) * out["more"][0] + out["more"][1].sin()


def test_outputs_that_depend_on_each_other():
    check(Joined(), torch.randn(N, 4))


@pytest.mark.parametrize("name", ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"])
def test_batch_norm_in_evaluation(name):
    spatial = int(name[-2])
    norm = getattr(nn, name)(3)
    shape = (N, 3) if spatial == 1 else (N, 3, *[2] * spatial)
    norm(torch.randn(shape))
    check(nn.Sequential(norm).eval(), torch.randn(shape))


class Counting(nn.Module):
    """Changes a buffer when it is called, which vmap refuses and a replay must not repeat."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean += x.detach().mean(0)
        return (x * self.weight).sin()


def test_a_replay_moves_no_buffer():
    model = Counting()
    inputs = torch.randn(N, 4)
    expected = loop_over_samples(model, curved, (inputs,), (0,))
    model.mean.zero_()
    assert_same(gather(model, curved, (inputs,)), expected)
    torch.testing.assert_close(model.mean, inputs.mean(0))


def test_weights_computed_from_other_parameters():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2))
    check(model, torch.randn(N, 4))
    check(parametrizations.weight_norm(nn.Linear(4, 3, bias=False)), torch.randn(N, 4))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_weights_computed_by_an_older_hook():
    check(nn.Sequential(nn.Linear(4, 4), nn.utils.weight_norm(nn.Linear(4, 3))), torch.randn(N, 4))


class Attention(nn.Module):
    def __init__(self, batch_first: bool, weights: bool):
        super().__init__()
        self.batch_first, self.weights = batch_first, weights
        self.first = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x, padding):
        x = self.first(x)
        if not self.batch_first:
            x = x.transpose(0, 1)
        length = x.shape[1 if self.batch_first else 0]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        out, weights = self.attention(x, x, x, padding, self.weights, attn_mask=mask)
        if not self.batch_first:
            out = out.transpose(0, 1)
        return out if weights is None else torch.cat([out, weights], dim=2)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("length", [3, N])
def test_attention(monkeypatch, batch_first, weights, length):
    refuse_the_loop(monkeypatch)
    model = Attention(batch_first, weights)
    padding = torch.zeros(N, length, dtype=torch.bool)
    padding[1, -1] = True
    inputs = (torch.randn(N, length, 4), padding)
    check(model, *inputs, dimensions=(0, 0))


def test_transformer_layer():
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    check(nn.Sequential(layer, nn.Linear(4, 2)), torch.randn(N, 3, 4))


class Recurrent(nn.Module):
    def __init__(self, kind: str, batch_first: bool, state: bool):
        super().__init__()
        self.batch_first, self.state = batch_first, state
        self.rnn = getattr(nn, kind)(3, 4, num_layers=2, batch_first=batch_first, bidirectional=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x, start):
        if not self.batch_first:
            x = x.transpose(0, 1)
        hx = start.transpose(0, 1).contiguous()
        hx = (hx, hx.sin()) if isinstance(self.rnn, nn.LSTM) else hx
        out, last = self.rnn(x, hx) if self.state else self.rnn(x)
        if not self.batch_first:
            out = out.transpose(0, 1)
        last = last[1] if isinstance(last, tuple) else last
        return torch.cat([self.head(out).flatten(1), last.transpose(0, 1).flatten(1)], dim=1)


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(kind, batch_first, state):
    model = Recurrent(kind, batch_first, state)
    check(model, torch.randn(N, 3, 3), torch.randn(N, 4, 4))
    assert all(isinstance(weight, nn.Parameter) for weight in model.rnn._flat_weights)


def test_a_recurrent_layer_as_the_model():
    def first_output(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return mean_over_batch(model(batch[0])[0], 1)

    check(nn.LSTM(3, 4), torch.randn(6, N, 3), loss=first_output, dimensions=(1,))


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x):
        hidden = None
        for step in range(x.shape[1]):
            hidden = self.cell(x[:, step], hidden)
        return hidden


def test_a_cell_called_step_by_step():
    check(Steps(), torch.randn(N, 3, 3))


# Models of the package


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "alexnet", "resnet18"])
def test_models_of_the_package(name):
    models = pytest.importorskip("fedforget.models")
    shape = (3, 32, 32) if name in ("alexnet", "resnet18") else (1, 28, 28)
    model = getattr(models, name)(shape=shape, classes=10)
    # Dropout draws for the whole batch at once, which a loop over samples cannot repeat.
    model.train(name != "alexnet")

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    check(model, torch.randn(2, *shape), torch.tensor([3, 7]), loss=loss)


# What is refused


def backward(model: nn.Module, *batch: Tensor) -> None:
    curved(model, batch).backward()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False).eval()])
def test_batch_norm_that_couples_samples(norm):
    model = nn.Sequential(nn.Linear(5, 4), norm.double())
    squared_grads = SquaredGrads(model)
    with pytest.raises(
        RuntimeError, match=r"layer '1' \(BatchNorm1d\) normalises over the batch.*GroupNorm.*\.eval\(\)"
    ):
        model(torch.randn(N, 5))
    with torch.no_grad():
        model(torch.randn(N, 5))
    squared_grads.close()


class Outside(nn.Module):
    """Uses a weight without calling the layer it belongs to."""

    def __init__(self, inside: bool):
        super().__init__()
        self.inside = inside
        self.embedding = nn.Embedding(5, 3)

    def forward(self, x):
        hidden = self.embedding(x) if self.inside else torch.ones(*x.shape, 3)
        return functional.linear(hidden, self.embedding.weight)


def test_a_parameter_used_behind_the_back_of_its_layer():
    model = Outside(inside=True)
    squared_grads = SquaredGrads(model)
    with pytest.raises(RuntimeError, match=r"parameter 'embedding.weight' is used outside the forward of a module"):
        model(tokens(N, 6))
    squared_grads.close()


def test_a_gradient_without_squares():
    model = Outside(inside=False)
    squared_grads = SquaredGrads(model)
    backward(model, tokens(N, 6))
    with pytest.raises(RuntimeError, match=r"parameter 'embedding.weight' has a gradient but its per-sample"):
        squared_grads.take()


def test_gradients_from_before_the_hooks():
    model = nn.Linear(5, 4)
    loss = curved(model, (torch.randn(N, 5),))
    squared_grads = SquaredGrads(model)
    loss.backward()
    with pytest.raises(RuntimeError, match="build the optimizer first"):
        squared_grads.take()


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Embedding(6, 3)

    def forward(self, x):
        return x + self.position(torch.arange(x.shape[1]))


@pytest.mark.parametrize(
    ("model", "shape", "name"),
    [
        (Positions(), (N, 6, 3), r"layer 'position' \(Embedding\) was given an input of shape \(6,\)"),
        (nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 2)), (N, 6, 3), r"layer '1' \(Linear\) .* \(24, 3\)"),
        (nn.Sequential(nn.Flatten(0, 1), Scaled(3)), (N, 6, 3), r"layer '1' \(Scaled\) .* \(24, 3\)"),
        (nn.Conv1d(3, 2, 1), (3, 6), r"the model \(Conv1d\) .* \(3, 6\)"),
        (nn.Sequential(nn.Flatten(0, 1), nn.LSTM(3, 2)), (N, 6, 3), r"layer '1' \(LSTM\) .* three dimensions"),
        (nn.Sequential(nn.LSTM(3, 2)), (N, 6, 3), r"layer '0' \(LSTM\) was given an input of shape \(4, 6, 3\)"),
    ],
)
def test_a_layer_that_does_not_see_the_batch(model, shape, name):
    model = model.double()
    squared_grads = SquaredGrads(model)
    with pytest.raises(ValueError, match=name):
        model(torch.randn(shape))
    squared_grads.close()


class Summed(Scaled):
    def forward(self, x, *, sign: float = 1.0):
        return super().forward(x).sum()


def test_an_output_without_the_batch():
    model = nn.Sequential(Summed(4))
    squared_grads = SquaredGrads(model)
    with pytest.raises(ValueError, match=r"layer '0' \(Summed\) returned a tensor of shape \(\)"):
        model(torch.randn(N, 4))
    squared_grads.close()


def test_parts_called_on_their_own():
    model = nn.Sequential(nn.Linear(5, 4))
    squared_grads = SquaredGrads(model)
    with pytest.raises(RuntimeError, match=r"layer '0' \(Linear\) was called while the size of the batch is unknown"):
        model[0](torch.randn(N, 5))
    squared_grads.close()


@pytest.mark.parametrize(
    "layer",
    [
        nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True),
        nn.GRU(4, 4, num_layers=2, dropout=0.5, batch_first=True),
    ],
)
def test_dropout_inside_a_replayed_module(layer):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return (self.layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else self.layer(x))[0]

    model = Model().double()
    squared_grads = SquaredGrads(model)
    with pytest.raises(RuntimeError, match=r"layer 'layer' \(\w+\) drew random numbers.*dropout to 0.*\.eval\(\)"):
        model(torch.randn(N, 3, 4))
    squared_grads.close()
    check(model.eval(), torch.randn(N, 3, 4))


def test_sparse_and_rescaled_gradients():
    with pytest.raises(ValueError, match=r"layer '0' \(Embedding\) has sparse gradients.*sparse=False"):
        SquaredGrads(nn.Sequential(nn.Embedding(5, 3, sparse=True)))
    inside = Scaled(3)
    inside.embedding = nn.Embedding(5, 3, scale_grad_by_freq=True)
    with pytest.raises(ValueError, match=r"layer 'embedding' .* scale_grad_by_freq=False"):
        SquaredGrads(inside)


def test_packed_sequences_and_other_containers():
    class Packing(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 2, batch_first=True)

        def forward(self, x):
            return self.rnn(nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), 3), batch_first=True))

    class Hiding(Scaled):
        def forward(self, x, *, sign: float = 1.0):
            return iter([super().forward(x)])

    for model, message in ((Packing(), "PackedSequence.*pass padded"), (Hiding(3), "the output of .* list_iterator")):
        squared_grads = SquaredGrads(model)
        with pytest.raises(TypeError, match=message):
            model(torch.randn(N, 3, 3))
        squared_grads.close()


def test_a_mask_for_every_sample_and_head():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    squared_grads = SquaredGrads(attention)
    x = torch.randn(N, 3, 4)
    with pytest.raises(ValueError, match="use a mask of two dimensions, or key_padding_mask"):
        attention(x, x, x, attn_mask=torch.zeros(2 * N, 3, 3))
    squared_grads.close()


class Spoiling(Scaled):
    def forward(self, x, *, sign: float = 1.0):
        return (x.add_(self.scale)).sin()


class Spoiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled = Scaled(4)
        self.scaled.inner.weight.requires_grad_(False)

    def forward(self, x):
        x = 1.0 * x
        output = self.scaled(x)
        return output + x.add_(1)


def test_an_input_changed_in_place():
    model = nn.Sequential(nn.Tanhshrink(), Spoiling(4))
    squared_grads = SquaredGrads(model)
    with pytest.raises(RuntimeError, match=r"^layer '1' \(Spoiling\) changes its input in place"):
        backward(model, torch.randn(N, 4))
    model = Spoiled()
    squared_grads = SquaredGrads(model)
    backward(model, torch.randn(N, 4))
    with pytest.raises(RuntimeError, match=r"what comes after layer 'scaled' \(Scaled\) changes its input in place"):
        squared_grads.take()


def test_different_batches_in_one_loss():
    model = nn.Linear(4, 3)
    squared_grads = SquaredGrads(model)
    loss = curved(model, (torch.randn(N, 4),)) + curved(model, (torch.randn(2, 4),))
    with pytest.raises(RuntimeError, match="was used with batches of different sizes"):
        loss.backward()
    squared_grads.close()


def test_two_backward_passes():
    model = nn.Linear(4, 3)
    squared_grads = SquaredGrads(model)
    for order in ("one by one", "together"):
        if order == "one by one":
            backward(model, torch.randn(N, 4))
            backward(model, torch.randn(N, 4))
        else:
            first, second = curved(model, (torch.randn(N, 4),)), curved(model, (torch.randn(N, 4),))
            first.backward()
            second.backward()
        with pytest.raises(RuntimeError, match="two backward passes"):
            squared_grads.take()
    backward(model, torch.randn(N, 4))
    assert len(squared_grads.take()) == 2


def test_a_graph_used_twice():
    model = nn.Linear(4, 3)
    squared_grads = SquaredGrads(model)
    loss = curved(model, (torch.randn(N, 4),))
    loss.backward(retain_graph=True)
    squared_grads.clear()
    with pytest.raises(RuntimeError, match=r"the model \(Linear\) a second time: call the model again"):
        loss.backward()
    squared_grads.close()
    model = nn.Linear(4, 3)
    squared_grads = SquaredGrads(model)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(curved(model, (torch.randn(N, 4),)), list(model.parameters()), create_graph=True)
    squared_grads.close()


# What must not disturb


def test_a_second_pass_that_reaches_no_parameter():
    model = nn.Sequential(Scaled(4))
    squared_grads = SquaredGrads(model)
    inputs = torch.randn(N, 4, requires_grad=True)
    loss = curved(model, (inputs,))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"layer '0' \(Scaled\) a second time"):
        torch.autograd.grad(loss, inputs)
    squared_grads.close()


def test_two_owners_on_one_model():
    model, inputs = nn.Sequential(nn.Linear(4, 3), Scaled(3)), torch.randn(N, 4)
    owners = [SquaredGrads(model), SquaredGrads(model)]
    backward(model, inputs)
    expected = loop_over_samples(model, curved, (inputs,), (0,))
    backward(model, inputs)
    for owner in owners:
        with pytest.raises(RuntimeError, match="two backward passes"):
            owner.take()
    backward(model, inputs)
    for owner in owners:
        found = owner.take()
        assert_same({owner.names[parameter]: value for parameter, value in found.items()}, expected)


def test_passes_that_train_nothing():
    model = nn.Sequential(nn.Linear(4, 3), Scaled(3), nn.Linear(3, 2))
    inputs = torch.randn(N, 4)
    expected = loop_over_samples(model, curved, (inputs,), (0,))
    squared_grads = SquaredGrads(model)
    kept = model(torch.randn(7, 4))  # A forward pass of another size without a backward pass.
    wanted = torch.randn(5, 4, requires_grad=True)
    torch.autograd.grad(curved(model, (wanted,)), wanted)
    with torch.no_grad():
        model(torch.randn(3, 4))
    wanted = inputs.clone().requires_grad_()
    loss = curved(model, (wanted,))
    torch.autograd.grad(model(wanted).sum() + 3 * loss, wanted, retain_graph=True)
    loss.backward()
    found = squared_grads.take()
    assert_same({squared_grads.names[parameter]: value for parameter, value in found.items()}, expected)
    assert kept.requires_grad


def test_a_penalty_alone_does_not_find_what_another_pass_left():
    model, wanted = nn.Linear(4, 3), torch.randn(N, 4, requires_grad=True)
    squared_grads = SquaredGrads(model)
    torch.autograd.grad(curved(model, (wanted,)), wanted)
    model.weight.square().sum().backward()
    with pytest.raises(RuntimeError, match="'weight' has a gradient but its per-sample gradients were not seen"):
        squared_grads.take()


def test_a_forward_pass_alone_keeps_nothing():
    model = nn.Sequential(nn.Linear(4, 3), Scaled(3))
    squared_grads = SquaredGrads(model)
    inputs = torch.randn(N, 4)
    middle: list[weakref.ref[Tensor]] = []
    model[1].register_forward_pre_hook(lambda _, args: middle.append(weakref.ref(args[0])))
    alive = weakref.ref(inputs)
    output = model(inputs)
    del inputs, output
    assert alive() is None
    assert middle[0]() is None
    squared_grads.close()


def test_the_backward_pass_lets_go_of_activations():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    squared_grads = SquaredGrads(model)
    pointers = []
    model[2].register_forward_pre_hook(lambda _, args: pointers.append(weakref.ref(args[0].untyped_storage())))
    loss = curved(model, (torch.randn(N, 4),))
    loss.backward()
    assert pointers[0]() is None
    squared_grads.take()


def test_hooks_go_with_their_owner():
    model = nn.Sequential(nn.Linear(4, 3), Scaled(3), nn.BatchNorm1d(3).eval())

    def hooks() -> int:
        own = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        return sum(own) + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())

    squared_grads = SquaredGrads(model)
    assert hooks() > 0
    gone = weakref.ref(squared_grads)
    gc.disable()
    try:
        del squared_grads
        assert gone() is None
    finally:
        gc.enable()
    assert hooks() == 0
    squared_grads = SquaredGrads(model)
    squared_grads.close()
    squared_grads.close()
    assert hooks() == 0


def test_copies_of_the_model_are_on_their_own():
    model = nn.Sequential(nn.Linear(4, 3), Scaled(3), nn.Linear(3, 2))
    squared_grads = SquaredGrads(model)
    duplicate = copy.deepcopy(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    inputs = torch.randn(N, 4)
    for other in (duplicate, loaded):
        backward(other, inputs)
        assert squared_grads.take() == {}
    assert_same(gather(duplicate, curved, (inputs,)), loop_over_samples(model, curved, (inputs,), (0,)))
    squared_grads.close()
