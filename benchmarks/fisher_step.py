"""What a training step with the exact Γ costs, over a plain step of stochastic gradient descent.

    python benchmarks/fisher_step.py --device cuda --out benchmarks/results

Methods: `plain` (forward, backward, SGD), `ours` (DiagonalFisher), and the same update with Γ from others: `backpack`
(BackPACK's SumGradSquared, where it is installed) and `vmap` (torch.func.vmap of grad, in the fastest chunk that fits).
Before anything is timed, all must find the same Γ. Each method's time is the median of repetitions that take turns with
the other methods'; with `fisher_every` it is the mean over that many steps. Rows are appended to OUT/fisher_step.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedforget.federation.training import keep_freed_memory
from fedforget.models import BUILT_IN
from fedforget.optim import DiagonalFisher
from fedforget.optim.fisher_update import Member, diagonal_fisher

SHAPES = {"cnn": (1, 28, 28), "alexnet": (3, 32, 32), "resnet18": (3, 32, 32)}
CPU_BATCHES = {"cnn": 2048, "alexnet": 64, "resnet18": 64}
CUDA_BATCH = 2048
RULE = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "eps": 1e-3, "block_size": 3}
PER_SAMPLE_BYTES = 4 * 2**30  # The most that vmap's per-sample gradients may take on a processor.

Step = Callable[[], None]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Cell:
    """All that decides one measurement."""

    model: str
    device: str
    batch: int
    method: str
    dtype: str
    layout: str
    threads: int
    every: int = 1
    share: float = 1.0
    chunk: int | None = None


def build(cell: Cell) -> tuple[nn.Module, Batch]:
    """The model and one batch of noise, the same for every method."""
    torch.manual_seed(0)
    shape = SHAPES[cell.model]
    layout = torch.channels_last if cell.layout == "channels_last" else torch.contiguous_format
    model = BUILT_IN[cell.model](shape, 10).to(cell.device, memory_format=layout)
    x = torch.randn(cell.batch, *shape).to(cell.device, memory_format=layout)
    return model, (x, torch.randint(10, (cell.batch,)).to(cell.device))


def shortened(cell: Cell) -> contextlib.AbstractContextManager[Any]:
    """Autocast where the cell asks for it."""
    return torch.autocast(cell.device, dtype=torch.bfloat16, enabled=cell.dtype == "bfloat16")


# Γ, and the step with it, by each method


def plain(cell: Cell, model: nn.Module, batch: Batch) -> Step:
    """Without Γ."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RULE["lr"])
    return _training_step(cell, model, batch, optimizer)


def ours(cell: Cell, model: nn.Module, batch: Batch) -> Step:
    """By hooks."""
    betas = (RULE["beta1"], RULE["beta2"])
    optimizer = DiagonalFisher(model, RULE["lr"], betas, RULE["eps"], int(RULE["block_size"]), cell.every, cell.share)
    return _training_step(cell, model, batch, optimizer)


def _training_step(cell: Cell, model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        with shortened(cell):
            loss = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()

    return step


def with_backpack(cell: Cell, model: nn.Module, batch: Batch) -> Step:
    """By BackPACK, whose Σ over a mean loss is Γ/N."""
    from backpack import backpack, extend
    from backpack.extensions import SumGradSquared

    model, loss_function = extend(model), extend(nn.CrossEntropyLoss())

    def gather() -> dict[nn.Parameter, Tensor]:
        model.zero_grad()
        with shortened(cell):
            loss = loss_function(model(batch[0]), batch[1])
        with backpack(SumGradSquared()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of images that need no gradient, and of layers that are checked below.
            loss.backward()
        missing = {
            type(module).__name__
            for module in model.modules()
            for parameter in module.parameters(recurse=False)
            if not hasattr(parameter, "sum_grad_squared")
        }
        if missing:
            raise NotImplementedError(f"it has no rule for {', '.join(sorted(missing))}")
        return {parameter: parameter.sum_grad_squared.mul_(cell.batch) for parameter in model.parameters()}

    return _updating_step(model, gather)


def with_vmap(cell: Cell, model: nn.Module, batch: Batch) -> Step:
    """By vmap over the gradient of one sample's loss."""

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with shortened(cell):
            output = torch.func.functional_call(model, parameters, (x.unsqueeze(0),))
        return functional.cross_entropy(output, y.unsqueeze(0))

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")
    chunk = cell.chunk or cell.batch

    def gather() -> dict[nn.Parameter, Tensor]:
        named = dict(model.named_parameters())
        values = {name: parameter.detach() for name, parameter in named.items()}
        sums = {name: torch.zeros_like(value) for name, value in values.items()}
        squares = {name: torch.zeros_like(value) for name, value in values.items()}
        for x, y in zip(batch[0].split(chunk), batch[1].split(chunk), strict=True):
            for name, gradients in per_sample(values, x, y).items():
                sums[name] += gradients.sum(0)
                squares[name] += gradients.square_().sum(0)
        for name, parameter in named.items():
            parameter.grad = sums[name].div_(cell.batch)
        return {parameter: squares[name].div_(cell.batch) for name, parameter in named.items()}

    return _updating_step(model, gather)


def _updating_step(model: nn.Module, gather: Callable[[], dict[nn.Parameter, Tensor]]) -> Step:
    """The update of the rule with Γ from elsewhere."""
    means = {parameter: (torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in model.parameters()}
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        fishers = gather()
        with torch.no_grad():
            members = [
                Member(parameter, parameter.grad, fishers[parameter], *means[parameter], steps, steps)
                for parameter in fishers
            ]
            diagonal_fisher(members, **RULE)

    return step


METHODS: dict[str, Callable[[Cell, nn.Module, Batch], Step]] = {
    "plain": plain,
    "ours": ours,
    "backpack": with_backpack,
    "vmap": with_vmap,
}


def unavailable(cell: Cell) -> str | None:
    """Why the method cannot be measured on this cell's model."""
    if cell.method == "backpack" and importlib.util.find_spec("backpack") is None:
        return "it is not installed"
    small = Cell(**asdict(cell) | {"batch": 4, "chunk": None})
    try:
        METHODS[cell.method](small, *build(small))()
    except (NotImplementedError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return None


def check_agreement(cells: list[Cell]) -> None:
    """All methods must move the parameters by the same step, apart from what rounding does.

    In full single precision: with shortened factors the rounding of a deep model's gradients alone is a few hundredths.
    """
    moved: dict[str, Tensor] = {}
    for cell in cells:
        if cell.method == "plain" or cell.every > 1 or cell.share < 1:
            continue
        small = Cell(**asdict(cell) | {"batch": 8, "chunk": 3})
        model, batch = build(small)
        model.eval()  # Dropout draws other masks in each method.
        before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            METHODS[cell.method](small, model, batch)()
        moved[cell.method] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) - before
    for method, step in moved.items():
        difference = float((step - moved["ours"]).norm() / moved["ours"].norm())
        if difference > (0.05 if cells[0].dtype == "bfloat16" else 1e-2):
            raise SystemExit(f"{cells[0].model}: the step of {method} differs from ours by {difference:.1e} of it")


# Time and memory


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(cell: Cell, step: Step) -> float:
    """One step, or the mean of as many as Γ is refreshed after."""
    synchronize(cell.device)
    started = time.perf_counter()
    for _ in range(cell.every):
        step()
    synchronize(cell.device)
    return (time.perf_counter() - started) / cell.every


def tuned(cell: Cell) -> Cell:
    """The cell with the chunk in which it is fastest; each is a quarter of the one before."""
    model, batch = build(cell)
    chunk = cell.batch
    if cell.device == "cpu":
        chunk = min(chunk, PER_SAMPLE_BYTES // (4 * sum(parameter.numel() for parameter in model.parameters())))
    times: dict[int, float] = {}
    while chunk >= 1:
        candidate = Cell(**asdict(cell) | {"chunk": chunk})
        try:
            step = METHODS[cell.method](candidate, model, batch)
            step()
            times[chunk] = seconds(candidate, step)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
        if times and times[min(times)] > 1.2 * min(times.values()):
            break  # Smaller ones only get slower from here.
        chunk //= 4
    return Cell(**asdict(cell) | {"chunk": min(times, key=lambda chunk: times[chunk])})


def peak_of(cell: Cell) -> int:
    """The most memory that two steps in this process have needed."""
    model, batch = build(cell)
    if cell.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = METHODS[cell.method](cell, model, batch)
    step()
    step()
    if cell.device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # There, getrusage would count what the parent had needed before it started this process.
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_bytes(cell: Cell) -> int:
    """The same; on a processor of a process of its own, since a process never shows less than it once needed."""
    if cell.device == "cuda":
        return peak_of(cell)
    command = [sys.executable, __file__, "--peak-of", json.dumps(asdict(cell))]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cells_of(arguments: argparse.Namespace, model: str) -> Iterator[Cell]:
    """What is measured of one model."""
    batch = arguments.batch or (CUDA_BATCH if arguments.device == "cuda" else CPU_BATCHES[model])
    layout = "channels_last" if arguments.channels_last else "contiguous"
    for method in arguments.methods:
        cell = Cell(model, arguments.device, batch, method, arguments.dtype, layout, torch.get_num_threads())
        if (reason := unavailable(cell)) is not None:
            print(f"{model}: {method} is left out: {reason}", file=sys.stderr)
            continue
        yield cell
        if method == "ours":
            yield from (Cell(**asdict(cell) | {"every": every}) for every in arguments.every)
            yield from (Cell(**asdict(cell) | {"share": share}) for share in arguments.share)


def measure(arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """All rows of one model."""
    cells = list(cells_of(arguments, model))
    check_agreement(cells)
    cells = [tuned(cell) if cell.method == "vmap" else cell for cell in cells]
    peaks = [peak_bytes(cell) for cell in cells]
    steps = [METHODS[cell.method](cell, *build(cell)) for cell in cells]
    times: list[list[float]] = [[] for _ in cells]
    for repetition in range(arguments.repetitions + 1):
        for cell, step, collected in zip(cells, steps, times, strict=True):
            spent = seconds(cell, step)
            if repetition > 0:  # The first warms up.
                collected.append(spent)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    return [
        asdict(cell)
        | {"seconds": statistics.median(collected), "peak_bytes": peak, "torch": torch.__version__, "gpu": name}
        for cell, peak, collected in zip(cells, peaks, times, strict=True)
    ]


def main() -> None:
    """Measure every model, write its rows as they come, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--batch", type=int, help=f"default: {CUDA_BATCH} on cuda, on cpu {CPU_BATCHES}")
    parser.add_argument("--dtype", choices=["float32", "tf32", "bfloat16"], default="float32")
    parser.add_argument("--channels-last", action="store_true", help="the memory format of model and images")
    parser.add_argument("--every", type=int, nargs="*", default=[4], help="further rows of ours, with fisher_every")
    parser.add_argument("--share", type=float, nargs="*", default=[0.125], help="the same with fisher_share")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of the processor")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    keep_freed_memory()
    if arguments.peak_of:
        cell = Cell(**json.loads(arguments.peak_of))
        torch.set_num_threads(cell.threads)
        print(peak_of(cell))
        return
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.dtype == "tf32":
        torch.set_float32_matmul_precision("high")
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        rows += (measured := measure(arguments, model))
        with (arguments.out / "fisher_step.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in measured)
    table(rows)


def table(rows: list[dict[str, Any]]) -> None:
    """Print a line for each row, with its time over the plain step's."""
    base = {row["model"]: row["seconds"] for row in rows if row["method"] == "plain"}
    heads = f"{'method':9} {'every':>5} {'share':>6} {'chunk':>5} {'seconds':>9} {'ratio':>6} {'MiB':>7}"
    print(f"{'model':9} {'batch':>5} {heads}")
    for row in rows:
        ratio = f"{row['seconds'] / base[row['model']]:.2f}" if row["model"] in base else "–"
        print(
            f"{row['model']:9} {row['batch']:5} {row['method']:9} {row['every']:5} {row['share']:6.3f} "
            f"{row['chunk'] or '–':>5} {row['seconds']:9.5f} {ratio:>6} {row['peak_bytes'] / 2**20:7.0f}"
        )


if __name__ == "__main__":
    main()
