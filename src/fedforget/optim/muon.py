"""Muon: orthogonalised momentum (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.adam import adam

from fedforget.optim import graphs
from fedforget.optim.settings import check_number, check_rate

# The odd quintics a·σ + b·σ³ + c·σ⁵ of three iterations, each the one that is nearest to 1 over the singular values
# that the one before can leave: the greedy composition of Amsel et al. 2025, "The Polar Express" (arXiv:2505.16932),
# from [0.01, 1] on. Together they take that range into 1 ± 0.27, and what is smaller grows 78-fold.
QUINTICS = ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))


class Muon(torch.optim.Optimizer):
    r"""Steps each weight matrix by its orthogonalised momentum, and everything else by Adam.

    With Δ_t the gradient of a matrix of r rows and c columns (a convolution's weight is flattened to one),

        M_t = μ M_{t-1} + (1 - μ) Δ_t
        ω_{t+1} = ω_t - η sqrt(max(1, r/c)) · polar((1 - μ) Δ_t + μ M_t)

    where polar(U S Vᵀ) = U Vᵀ, near enough, by three matrix polynomials. All directions that the gradients point to are
    stepped alike, which is what the inverse of a Kronecker-factored curvature would do to them; a diagonal cannot.

    A matrix with more than `slice_size` rows and columns is cut into slices of at most so many rows, each made
    orthogonal by itself: the work on a square one falls by the square of the number of slices, nearly.

    Args:
        model: the model to train; the parameters that are trainable now are stepped.
        lr: η, of the matrices.
        momentum: μ.
        adam_lr: the learning rate of biases, of norms' weights and of embeddings; None: a twentieth of `lr`.
        slice_size: the most rows that are made orthogonal to one another.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.07,
        momentum: float = 0.9,
        adam_lr: float | None = None,
        slice_size: int = 1024,
    ) -> None:
        check_settings(lr=lr, momentum=momentum, adam_lr=adam_lr, slice_size=slice_size)
        matrices, others = sorted_parameters(model)
        if not matrices and not others:
            raise ValueError("the model has no trainable parameter: set requires_grad before building the optimizer")
        groups: list[dict[str, Any]] = [
            {"params": matrices, "orthogonal": True, "lr": lr},
            {"params": others, "orthogonal": False, "lr": lr / 20 if adam_lr is None else adam_lr},
        ]
        super().__init__(
            [group for group in groups if group["params"]], {"momentum": momentum, "slice_size": slice_size}
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters that are not the model's, whose kind nothing tells."""
        if "orthogonal" not in param_group:
            raise ValueError(
                "Muon steps the parameters that its model had, trainable, when it was built: build a new one for others"
            )
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                given = {parameter: parameter.grad for parameter in group["params"] if parameter.grad is not None}
                if not given:
                    continue
                if group["orthogonal"]:
                    self._step_matrices(group, given)
                else:
                    self._step_others(group, given)
        return loss

    def _step_matrices(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        for parameter in gradients:
            if not self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        muon(
            list(gradients),
            list(gradients.values()),
            [self.state[parameter]["momentum"] for parameter in gradients],
            lr=group["lr"],
            momentum=group["momentum"],
            slice_size=group["slice_size"],
        )

    def _step_others(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        for parameter in gradients:
            if not self.state[parameter]:
                # On the processor, as torch's own optimizers keep it: reading it never waits for a device.
                self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in gradients]
        adam(
            list(gradients),
            list(gradients.values()),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=group["lr"],
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )


def check_settings(*, lr: float, momentum: float, adam_lr: float | None, slice_size: int) -> None:
    """Refuse settings with which the rule makes no sense."""
    check_rate("lr", lr)
    if adam_lr is not None:
        check_rate("adam_lr", adam_lr)
    check_number("momentum", momentum)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum!r}: it must lie in [0, 1)")
    if isinstance(slice_size, bool) or not isinstance(slice_size, int) or slice_size < 1:
        raise ValueError(f"slice_size is {slice_size!r}: it must be a whole number of at least 1")


def sorted_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters that are matrices, and all others; a row of an embedding is a vector of its own."""
    embedded = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters()
    }
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [
        parameter for parameter in trainable if parameter.ndim >= 2 and parameter.numel() and parameter not in embedded
    ]
    among = set(matrices)
    return matrices, [parameter for parameter in trainable if parameter not in among]


def muon(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    lr: float,
    momentum: float,
    slice_size: int,
) -> None:
    """One step, in place on the parameters and their momenta."""
    torch._foreach_lerp_(list(momenta), list(gradients), 1 - momentum)
    ahead = torch._foreach_lerp(list(gradients), list(momenta), momentum)
    steps = graphs.call(directions, ahead, slice_size)
    torch._foreach_add_(list(parameters), steps, alpha=-lr)


def directions(gradients: Sequence[Tensor], slice_size: int) -> list[Tensor]:
    """Where each parameter goes at a learning rate of 1, uphill."""
    matrices = [gradient.flatten(1) for gradient in gradients]
    made = orthogonal(matrices, slice_size)
    torch._foreach_mul_(made, [math.sqrt(max(1, len(matrix) / matrix[0].numel())) for matrix in matrices])
    # In the memory layout of the gradients, without which all could not be added at once.
    return [
        one.view(to.shape) if to.is_contiguous() else torch.empty_like(to).copy_(one.view(to.shape))
        for one, to in zip(made, gradients, strict=True)
    ]


def orthogonal(matrices: Sequence[Tensor], slice_size: int) -> list[Tensor]:
    """Of each U S Vᵀ a matrix near U Vᵀ; in slices where both of its sides are longer than `slice_size`."""
    results: list[Tensor] = list(matrices)
    alike: dict[tuple[int, int, torch.dtype, torch.device], list[int]] = {}
    for index, matrix in enumerate(matrices):
        short, long = sorted(matrix.shape)
        alike.setdefault((short, long, matrix.dtype, matrix.device), []).append(index)
    for indices in alike.values():
        # Matrices of one shape are worked on together: a GPU is faster at that than each is launched.
        made = orthogonal_stack(torch.stack([_lying(matrices[index]) for index in indices]), slice_size)
        for index, one in zip(indices, made.unbind(), strict=True):
            results[index] = one if one.shape == matrices[index].shape else one.T
    return [result.contiguous() for result in results]


def orthogonal_stack(matrices: Tensor, slice_size: int) -> Tensor:
    """The same of a stack of matrices of one shape."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonal_stack(matrices.mT, slice_size).mT
    count, short, long = matrices.shape
    slices = -(-short // slice_size)
    # A GPU multiplies half-precision matrices many times faster, and the polynomials forgive the rounding.
    half = matrices.device.type == "cuda" and matrices.dtype == torch.float32
    batch = matrices.to(torch.bfloat16 if half else matrices.dtype)
    rows = -(-short // slices)
    if missing := slices * rows - short:
        # Rows of zeros fill the last slice: they stay zeros, and leave the others as they are.
        batch = functional.pad(batch, (0, 0, 0, missing))
    made = _polar(batch.reshape(-1, rows, long)).view(count, -1, long)
    return made[:, :short].to(matrices.dtype)


def _lying(matrix: Tensor) -> Tensor:
    """The matrix or its transpose, whichever has no more rows than columns."""
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _polar(matrices: Tensor) -> Tensor:
    # Divided by their largest number first: the squares of tiny ones would vanish, those of huge ones overflow. Then by
    # the Frobenius norm, which bounds the largest singular value; a gradient of zeros stays zeros.
    tiny = torch.finfo(matrices.dtype).tiny
    matrices = matrices / matrices.abs().amax((1, 2), keepdim=True).clamp(min=tiny)
    matrices = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=tiny)
    for a, b, c in QUINTICS:
        gram = matrices @ matrices.mT
        matrices = torch.baddbmm(matrices, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), matrices, beta=a)
    return matrices
