"""Time and memory of a round of each link, against the floor: one model's pass over the same samples in large batches.

    python benchmarks/round_time.py --set small                      # digits, many silos, small steps
    python benchmarks/round_time.py --set large --device cuda        # MNIST's and CIFAR-10's sizes, large batches
    python benchmarks/round_time.py --table                          # of the lines that are there

A cell runs in a process of its own, alone; its rounds are timed as the records of a run are: training and aggregation,
evaluation left out. The median of its rounds but the first counts. Samples are noise of the dataset's shape, for a
round's time does not depend on what they show. The floor is forward and backward passes of as many samples in batches
of at most 20,480 (2,048 on a processor), in channels_last and the same arithmetic, without optimizer. Each is a line of
OUT/round_time.jsonl; one that is there is not made again. flower_digits.py adds the lines of Flower's simulation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import fedforget as ff

SHAPES = {"mlp": (1, 8, 8), "logistic": (1, 8, 8), "cnn": (1, 28, 28), "alexnet": (3, 32, 32), "resnet18": (3, 32, 32)}
OPTIMIZERS = ("sgd", "adam", "muon", "diagonal-fisher")
DIGITS, MNIST, CIFAR = 1437, 60_000, 50_000
FLOOR_BATCH = 20_480

Cell = dict[str, Any]


def cells(name: str, device: str, arithmetics: list[str]) -> Iterator[Cell]:
    """The cells of a set: `samples` is how many all silos hold together."""
    if name in ("small", "flower"):
        silos = (10, 100) if name == "flower" else (1, 4, 10, 100, 1000)
        optimizers = ("sgd",) if name == "flower" else OPTIMIZERS
        for count, optimizer, link in itertools.product(silos, optimizers, ("in-process", "batched")):
            # Once shared out among the silos, and once a whole dataset at each.
            for samples in sorted({DIGITS, DIGITS * count} if name == "small" else {DIGITS}):
                if samples < count or (link == "in-process" and count > 100):
                    continue
                yield {"link": link, "model": "mlp", "optimizer": optimizer, "silos": count, "batch": 32,
                       "samples": samples, "device": device, "dtype": "float32"}  # fmt: skip
    elif name == "batches":
        for batch, model, link in itertools.product((32, 256, 2048), ("mlp", "cnn"), ("in-process", "batched")):
            for count in (1, 10, 100):
                samples = count * max(batch, 64)
                if device == "cpu" and (count == 100 if model == "cnn" else count == 1):
                    continue
                yield {"link": link, "model": model, "optimizer": "sgd", "silos": count, "batch": batch,
                       "samples": samples, "device": device, "dtype": "float32"}  # fmt: skip
    else:
        for (model, samples), batch, optimizer, dtype in itertools.product(
            (("cnn", MNIST), ("alexnet", CIFAR)), (2048, 256), OPTIMIZERS, arithmetics
        ):
            yield {"link": "in-process", "model": model, "optimizer": optimizer, "silos": 10, "batch": batch,
                   "samples": samples, "device": device, "dtype": dtype}  # fmt: skip


def noise(count: int, shape: tuple[int, ...], seed: int) -> ff.Samples:
    """Samples that show nothing."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, *shape, generator=generator)
    return ff.Samples(tuple(range(count)), x, torch.randint(10, (count,), generator=generator))


def measured(cell: Cell, rounds: int) -> Cell:
    """The line of a cell."""
    shape = SHAPES[cell["model"]]
    on_gpu = "cuda" in cell["device"]
    if cell["dtype"] != "float32":
        torch.set_float32_matmul_precision("high")
    build = ff.models.BUILT_IN[cell["model"]]

    def model(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        made = build(shape, classes)
        return made.to(memory_format=torch.channels_last) if on_gpu and cell["model"] != "mlp" else made

    each, more = divmod(cell["samples"], cell["silos"])
    # With a whole dataset at each silo they are the same samples, and nothing is shared in memory.
    data = {f"silo-{number:04}": noise(each + (number < more), shape, number) for number in range(cell["silos"])}
    federation = ff.Federation(
        data,
        model=model if on_gpu else cell["model"],
        classes=10,
        test=noise(32, shape, -1),
        device=cell["device"],
        link=cell["link"],
    )
    del data
    plan = ff.Plan(
        rounds=rounds, batch_size=cell["batch"], optimizer=cell["optimizer"], autocast=cell["dtype"] == "bfloat16"
    )
    release = federation.train(plan)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = [record.seconds for record in release.records[1:]]
    return {
        **cell,
        "device": torch.cuda.get_device_name() if on_gpu else cell["device"],
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "floor_seconds": floor(build, shape, cell),
        "peak_bytes": peak,
        "trained": release.record.trained,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def floor(build: Any, shape: tuple[int, ...], cell: Cell) -> float:
    """Forward and backward passes of one model over as many samples as a round's."""
    device, on_gpu = torch.device(cell["device"]), "cuda" in cell["device"]
    model = build(shape, 10).to(device, memory_format=torch.channels_last)
    # A processor is no faster with more samples than this at once, and runs out of memory.
    size = min(cell["samples"], FLOOR_BATCH if on_gpu else 2048)
    x = torch.rand(size, *shape, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (size,), device=device)

    def once() -> None:
        with torch.autocast(device.type, torch.bfloat16) if cell["dtype"] == "bfloat16" else nullcontext():
            loss = functional.cross_entropy(model(x), y)
        loss.backward()

    times: list[float] = []
    for _ in range(7):
        started = time.perf_counter()
        once()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:]) * cell["samples"] / size


def main() -> None:
    """Measure the cells that are missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("small", "batches", "large", "flower"), default="small", dest="chosen")
    parser.add_argument("--arithmetics", nargs="+", default=["tf32", "bfloat16"], help="of the large set, on a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, help="default: 40 where they are short, else 6")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(measured(json.loads(arguments.cell), arguments.rounds)))
        return
    path = arguments.out / "round_time.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    if not arguments.table:
        arguments.out.mkdir(parents=True, exist_ok=True)
        device = torch.cuda.get_device_name() if "cuda" in arguments.device else arguments.device
        for cell in cells(arguments.chosen, arguments.device, arguments.arithmetics):
            if any({**cell, "device": device}.items() <= line.items() for line in lines):
                continue
            command = [sys.executable, __file__, "--cell", json.dumps(cell), "--rounds"]
            command.append(str(arguments.rounds or (40 if cell["samples"] <= 10 * DIGITS else 6)))
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            lines.append(json.loads(done.stdout.splitlines()[-1]))
            with path.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            show(lines[-1:])
    print()
    show(sorted(lines, key=lambda line: [str(line[part]) for part in ("device", "model", "batch", "samples", "silos")]))


def show(lines: list[Cell]) -> None:
    """A row for each line."""
    for line in lines:
        parts = "{model:>8} {optimizer:<16} K={silos:<5} B={batch:<5} n={samples:<8} {link:<14} {dtype:<9}".format(
            **line
        )
        above = f" {line['seconds'] / line['floor_seconds']:6.2f} × floor" if line["floor_seconds"] else ""
        memory = f" {line['peak_bytes'] / 2**20:7.0f} MiB" if line["peak_bytes"] else ""
        print(f"{line['device']:<12} {parts} {1000 * line['seconds']:9.2f} ms{above}{memory}", flush=True)


if __name__ == "__main__":
    main()
