"""Rounds and seconds of rapid retraining to a stated accuracy, against baselines each at the best rate of its grid.

    python benchmarks/rapid.py --dataset mnist --data-dir DATA --device cuda --out benchmarks/results
    python benchmarks/rapid.py --dataset mnist --table      # of the runs that are there, on whatever device

K = 10 silos, an even split, all of them in each round, one local epoch; one silo deleted 2 % of all samples, and what
is measured is the training after it, from a fresh model. First the default of `rapid` runs on all seeds: the most
rounds that it takes, N, set how many the others get. Then a grid of learning rates for each optimizer, at the first
batch size on seed 0, trained on nine tenths of the training samples and judged on the other tenth; it grows while the
best lies at its edge, and a rate that needs over twice the rounds of the best so far is given up. Then the default and
the best of each on all seeds and the test split, at other batch sizes on the first seed alone; what is compared with
one another, a seed's runs, is made in one go.
Each run is a line of OUT/rapid.jsonl; what is there already is not made again, so this program goes on where it ended.
With --beside, programs for different --optimizers may run beside one another on one device: their rounds count, and
their seconds are not shown.
"""

from __future__ import annotations

import argparse
import fcntl
import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import fedforget as ff
from baselines import AdaHessian, DecayingAdam, keeping_graphs
from fedforget import optim
from kronecker import KroneckerFisher, Soap

SETTINGS = {
    # dataset: model, accuracies of the table; the last one ends a run
    "mnist": ("cnn", (0.95, 0.98, 0.984)),
    "fashion-mnist": ("cnn", (0.85, 0.88, 0.90)),
    "cifar10": ("alexnet", (0.50, 0.60, 0.65, 0.673)),
    "digits": ("mlp", (0.90, 0.93, 0.95)),
}
SILOS, FORGETS, RATE = 10, "silo-3", 0.02
WIDENINGS = 3
GRID_ALLOWANCE = 3
PATIENCE = 6


@dataclass(frozen=True)
class Entry:
    """An optimizer of the table: its name in a plan, settings that stay, and the rates of its grid."""

    optimizer: str
    rates: tuple[float, ...]
    settings: tuple[tuple[str, float], ...] = ()
    allowance: int = 2
    """How many times N the rounds are that it gets."""
    seeds: int | None = None
    """On how many seeds it has final runs, at most; with none it only shows, by its grid, what a setting does."""


RULE_RATES = (0.001, 0.003, 0.01, 0.0003, 0.03)
ENTRIES = {
    "Adam": Entry("adam", (0.003, 0.005, 0.002, 0.01, 0.001, 0.0003, 0.03), allowance=4),
    "Adam, decaying over 2 N": Entry("adam-decay", (0.005, 0.01, 0.003, 0.03, 0.001), allowance=2),
    "Adam, decaying over 4 N": Entry("adam-decay", (0.005, 0.01, 0.003, 0.03, 0.001), allowance=4, seeds=0),
    "momentum": Entry("sgd", (0.05, 0.03, 0.1, 0.01, 0.003, 0.3), (("momentum", 0.9),)),
    "SGD": Entry("sgd", (0.1, 0.2, 0.3, 1.0, 0.03, 0.01), allowance=10),
    "paper's SGD": Entry("sgd", (0.001,), allowance=10, seeds=1),
    "paper's rule": Entry("diagonal-fisher", RULE_RATES),
    "paper's rule, Γ every 4th step": Entry("diagonal-fisher", RULE_RATES, (("fisher_every", 4),), seeds=0),
    "paper's rule, Γ from an eighth": Entry("diagonal-fisher", RULE_RATES, (("fisher_share", 0.125),), seeds=0),
    "paper's rule, undamped": Entry("diagonal-fisher", RULE_RATES, (("eps", 1e-8),), seeds=1),
    "paper's rule, undamped, Γ every 4th step": Entry(
        "diagonal-fisher", RULE_RATES, (("eps", 1e-8), ("fisher_every", 4)), seeds=0
    ),
    "Muon": Entry("muon", (0.07, 0.1, 0.05, 0.14, 0.035)),
    "AdaHessian": Entry("adahessian", (0.1, 0.3, 0.03, 0.01, 1.0)),
    "K-FAC": Entry("kronecker-fisher", (0.3, 1.0, 0.1, 0.03), seeds=1),
    "SOAP": Entry("soap", (0.003, 0.01, 0.001, 0.03), seeds=1),
}
"""A rate that is likely to be good comes first, so that others are given up early."""
DEFAULT = "rapid"
BESIDES = {"adam-decay": DecayingAdam, "adahessian": AdaHessian, "kronecker-fisher": KroneckerFisher, "soap": Soap}


class Behind(Exception):  # noqa: N818  # it is no error
    """A rate of a grid needs over twice the rounds of the best so far."""


def channels_last(model: str, device: str) -> Callable[[tuple[int, ...], int], torch.nn.Module]:
    """The model in the memory format in which this device trains it faster; the numbers are the same."""
    build = ff.models.BUILT_IN[model]
    if (model, "cuda" in device) not in {("cnn", False), ("alexnet", True)}:
        return build
    return lambda shape, classes: build(shape, classes).to(memory_format=torch.channels_last)


def validating(dataset: ff.Dataset) -> ff.Dataset:
    """The dataset with a tenth of its training samples in the place of the test split."""
    assert dataset.pool is not None
    order = torch.randperm(len(dataset.pool), generator=torch.Generator().manual_seed(1)).tolist()
    cut = len(order) // 10
    kept, judged = sorted(order[cut:]), sorted(order[:cut])
    return replace(dataset, pool=dataset.pool.select(kept), test=dataset.pool.select(judged))


class Bench:
    """One dataset on one device, and the lines so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        dataset = ff.datasets.load(arguments.dataset, arguments.data_dir)
        self.datasets = {"first": dataset, "grid": validating(dataset), "final": dataset}
        self.model, accuracies = SETTINGS[arguments.dataset]
        self.target = accuracies[-1] if arguments.until is None else arguments.until
        self.path: Path = arguments.out / "rapid.jsonl"
        self.lines = [line for line in lines_of(self.path) if self.mine(line)]

    @property
    def device(self) -> str:
        """The device as results name it."""
        given: str = self.arguments.device
        return torch.cuda.get_device_name(given) if "cuda" in given else given

    def mine(self, line: dict[str, Any]) -> bool:
        """Whether a run is of this dataset, device and arithmetic."""
        wanted = (self.arguments.dataset, self.device, self.arguments.autocast)
        return (line["dataset"], line["device"], line["autocast"]) == wanted

    def run(
        self,
        stage: str,
        name: str,
        rate: float | None,
        batch: int,
        seed: int,
        rounds: int,
        best: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A training to the target, or to the end of its rounds; made once."""
        choice = self.choice(name, rate, batch, rounds, len(self.datasets[stage].pool or ()))
        key = {"stage": stage, "entry": name, "learning_rate": rate, "batch": batch, "seed": seed}
        settings = whole_settings(choice)
        for line in self.lines:
            # A run that was given fewer rounds than are wanted now, and did not arrive, is made again.
            if line["settings"] == settings and all(line[part] == value for part, value in key.items()):
                if stage == "final" and not line["alone"] and not self.arguments.beside:
                    self.replace([line], [])
                    break
                ended = line["diverged"] or line["given_up"] or reached(line, self.target)
                if ended or len(line["accuracy"]) >= rounds:
                    return line
                self.replace([line], [])
                break
        records: list[Any] = []

        def on_round(title: str, _: Any, record: Any) -> None:
            if title == "train":
                return
            records.append(record)
            number = len(records)
            if best is not None and choice.name != "adam-decay" and number >= PATIENCE:
                # Where it arrived the best stopped; from there on, its last accuracy stands for it.
                there = best["accuracy"][: number // 2][-1]
                if record.accuracy < min(there, self.target):
                    raise Behind

        federation = ff.Federation.split_evenly(
            self.datasets[stage],
            silos=SILOS,
            model=channels_last(self.model, self.arguments.device),
            device=self.arguments.device,
            optimizers=BESIDES,
            on_round=on_round,
        )
        # The model before does not enter the one after, so one round of it is enough here; and whatever is compiled
        # for an optimizer once, is compiled in it.
        plan = ff.Plan(rounds=1, batch_size=batch, optimizer=choice, seed=seed, autocast=self.arguments.autocast)
        method = ff.Retrain(choice, rounds=rounds, target_accuracy=self.target)
        diverged = given_up = False
        with keeping_graphs() if choice.name == "adahessian" else nullcontext():
            try:
                federation.train(plan)
                federation.forget({FORGETS: ff.Share(RATE)}, method)
            except ff.SiloError as error:
                diverged = True
                print(f"{name}: {error}", file=sys.stderr)
            except Behind:
                given_up = True
        line = {
            "dataset": self.arguments.dataset,
            "model": self.model,
            "optimizer": choice.name,
            "settings": settings,
            **key,
            "judged_on": "validation" if stage == "grid" else "test",
            "device": self.device,
            "autocast": self.arguments.autocast,
            "alone": not self.arguments.beside,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "rounds": rounds,
            "diverged": diverged,
            "given_up": given_up,
            "accuracy": [record.accuracy for record in records],
            "seconds": list(accumulate(record.seconds for record in records)),
        }
        self.replace([], [line])
        rounds_made = first(line, self.target) or f"> {len(records)}"
        highest = max(line["accuracy"], default=math.nan)
        spent = line["seconds"][-1] if records else math.nan
        print(f"{stage} {name} {rate} B={batch} seed {seed}: {rounds_made}, best {highest:.4f}, {spent:.1f} s",
              file=sys.stderr, flush=True)  # fmt: skip
        return line

    def choice(self, name: str, rate: float | None, batch: int, rounds: int, samples: int) -> ff.Choice:
        """The optimizer of a run; the default is named alone, with no setting."""
        if name == DEFAULT:
            chosen = ff.RapidRetrain().optimizer
            return chosen if isinstance(chosen, ff.Choice) else ff.Choice(chosen)
        entry = ENTRIES[name]
        settings: dict[str, Any] = {"lr": rate, **dict(entry.settings)}
        if entry.optimizer == "adam-decay":
            settings["steps"] = rounds * math.ceil(samples / SILOS / batch)
        return ff.Choice(entry.optimizer, settings)

    def seeds(self, batch: int) -> list[int]:
        """All seeds at the first batch size, the first seed at others."""
        seeds: list[int] = self.arguments.seeds
        return seeds if batch == self.arguments.batches[0] else seeds[:1]

    def drop_unless_whole(self, batch: int, seed: int, names: list[str]) -> None:
        """Forget a seed's final runs where some are missing: they must be made in one go, on one machine."""
        group = [
            line
            for line in self.lines
            if (line["stage"], line["batch"], line["seed"]) == ("final", batch, seed) and line["entry"] in names
        ]
        if not {*names} <= {line["entry"] for line in group}:
            self.replace(group, [])

    def replace(self, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
        """Put lines in place of others, in the file too, which is written whole or not at all.

        Other processes may add theirs meanwhile: several grids fit on one GPU, where rounds count and seconds do not.
        """
        self.lines = [line for line in self.lines if line not in old] + new
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = [line for line in lines_of(self.path) if line not in old] + new
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
            partial.replace(self.path)

    def best_rate(self, name: str, batch: int, rounds: int) -> float:
        """The best rate of the grid, which grows while the best lies at its edge."""
        rates = list(ENTRIES[name].rates)
        if len(rates) == 1:
            return rates[0]
        for _ in range(WIDENINGS + 1):
            best: dict[str, Any] | None = None
            for rate in rates:
                line = self.run("grid", name, rate, batch, 0, rounds, best)
                if best is None or score(line, self.target) > score(best, self.target):
                    best = line
            assert best is not None
            found: float = best["learning_rate"]
            if min(rates) < found < max(rates):
                return found
            rates.append(below(found) if found == min(rates) else above(found))
        print(f"{name}: the best rate, {found:g}, is still at the edge of its grid", file=sys.stderr)
        return found


def whole_settings(choice: ff.Choice) -> dict[str, Any]:
    """All settings of an optimizer, the defaults too: a run is not taken for one that was made with others."""
    build: Callable[..., Any] = {**optim.BUILT_IN, **BESIDES}[choice.name]
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(build).parameters.items()
        if parameter.default is not parameter.empty
    }
    settings: dict[str, Any] = json.loads(json.dumps({**defaults, **choice.settings}))
    return settings


def above(rate: float) -> float:
    """The next of 1, 3, 10, 30, …"""
    exponent = math.floor(math.log10(rate) + 1e-9)
    return float(f"3e{exponent}") if rate < 2 * 10.0**exponent else float(f"1e{exponent + 1}")


def below(rate: float) -> float:
    """The one before of 1, 3, 10, 30, …"""
    exponent = math.floor(math.log10(rate) + 1e-9)
    return float(f"3e{exponent - 1}") if rate < 2 * 10.0**exponent else float(f"1e{exponent}")


def first(line: dict[str, Any], wanted: float) -> int | None:
    """The first round at or above the accuracy."""
    return next((number for number, value in enumerate(line["accuracy"], 1) if value >= wanted), None)


def reached(line: dict[str, Any], wanted: float) -> bool:
    """Whether the run arrived."""
    return first(line, wanted) is not None


def score(line: dict[str, Any], wanted: float) -> tuple[float, float]:
    """Fewer rounds to the target are better; where it is not reached, a higher accuracy."""
    number = first(line, wanted)
    return (-math.inf if number is None else -number, max(line["accuracy"], default=0.0))


def main() -> None:
    """Make the runs that are missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=sorted(SETTINGS), default="digits")
    parser.add_argument("--data-dir", help="the folder of the datasets; default: $FEDFORGET_DATA")
    parser.add_argument("--until", type=float, help="the accuracy that ends a run; default: the last of the table's")
    parser.add_argument("--optimizers", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("--grid-only", action="store_true", help="choose the rates, make no final runs")
    parser.add_argument("--batches", type=int, nargs="+", default=[2048, 256])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--most", type=int, default=200, help="rounds that the default may take")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--beside", action="store_true", help="other programs run on the device: do not show seconds")
    parser.add_argument("--autocast", action="store_true", help="forward and backward passes in bfloat16")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--table", action="store_true", help="make no run, print the table of those that are there")
    parser.add_argument("--plot", type=Path, help="draw error by round and by time into this file (matplotlib)")
    arguments = parser.parse_args()
    if arguments.table:
        present = [line for line in lines_of(arguments.out / "rapid.jsonl") if line["dataset"] == arguments.dataset]
        for device, autocast in sorted({(line["device"], line["autocast"]) for line in present}):
            print(f"{device}, bfloat16" if autocast else device)
            of_device = [line for line in present if (line["device"], line["autocast"]) == (device, autocast)]
            show(of_device, arguments)
        return
    # Matrix units for products of float32 where a GPU has them, for every optimizer alike.
    torch.set_float32_matmul_precision("high")

    bench = Bench(arguments)
    needed: dict[int, int] = {}
    for batch in arguments.batches:
        lines = [bench.run("first", DEFAULT, None, batch, seed, arguments.most) for seed in bench.seeds(batch)]
        needed[batch] = max(first(line, bench.target) or arguments.most for line in lines)
    grid = arguments.batches[0]
    rates: dict[str, float | None] = {}
    for name in arguments.optimizers:
        allowance = ENTRIES[name].allowance
        # Its schedule belongs to a rate that decays; the others are compared over fewer rounds than they get.
        allowed = allowance if ENTRIES[name].optimizer == "adam-decay" else min(allowance, GRID_ALLOWANCE)
        rates[name] = bench.best_rate(name, grid, allowed * needed[grid])
    rates[DEFAULT] = None
    if arguments.grid_only:
        return
    # Side by side: each seed's runs one after the other, so that whatever slows the machine slows all of them.
    for batch, (number, seed) in itertools.product(arguments.batches, enumerate(arguments.seeds)):
        if seed not in bench.seeds(batch):
            continue
        entries = {name: ENTRIES[name].seeds for name in arguments.optimizers}
        # Beside other programs, what the others are compared with would be measured for nothing.
        names = [] if arguments.beside else [DEFAULT]
        names += [name for name, most in entries.items() if most is None or number < most]
        bench.drop_unless_whole(batch, seed, names)
        for name in names:
            allowed = arguments.most if name == DEFAULT else ENTRIES[name].allowance * needed[batch]
            bench.run("final", name, rates[name], batch, seed, allowed)
    show(bench.lines, arguments)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The runs of a file; none where it is not there."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def show(lines: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the table of the final runs, and draw them where that was asked for."""
    finals = [line for line in lines if line["stage"] == "final"]
    wanted = SETTINGS[arguments.dataset][1]
    until = wanted[-1] if arguments.until is None else arguments.until
    table(finals, sorted({value for value in wanted if value <= until} | {until}))
    if arguments.plot:
        plot(finals, arguments)


def mean(values: list[float | None]) -> str:
    """The mean, or that a run did not arrive."""
    numbers = [value for value in values if value is not None]
    return f"{sum(numbers) / len(numbers):.4g}" if len(numbers) == len(values) else "–"


def table(lines: list[dict[str, Any]], accuracies: list[float]) -> None:
    """Print a row for each optimizer and batch size: rounds and seconds to each accuracy, means over the seeds."""
    heads = " ".join(f"{f'{100 * wanted:g} %':>16}" for wanted in accuracies)
    print(f"{'':<24} {'rate':>7} {'B':>5} {'seeds':>5} {heads}   rounds / seconds")
    groups = itertools.groupby(
        sorted(lines, key=lambda line: (-line["batch"], line["entry"], line["learning_rate"] or 0)),
        key=lambda line: (line["batch"], line["entry"], line["learning_rate"]),
    )
    for (batch, name, rate), group in groups:
        runs = list(group)
        cells = []
        for wanted in accuracies:
            rounds = [first(line, wanted) for line in runs]
            seconds = [None if at is None else line["seconds"][at - 1] for at, line in zip(rounds, runs, strict=True)]
            missed = max(
                (len(line["accuracy"]) for line, at in zip(runs, rounds, strict=True) if at is None), default=0
            )
            timed = f" / {mean(seconds)}" if all(line["alone"] for line in runs) else ""
            cells.append(f"> {missed}" if missed else f"{mean(list(rounds))}{timed}")
        shown = "default" if rate is None else f"{rate:g}"
        print(f"{name:<24} {shown:>7} {batch:>5} {len(runs):>5} " + " ".join(f"{cell:>16}" for cell in cells))


def plot(lines: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Test error by round and by seconds of training, the first seed's runs at the first batch size."""
    # Imported here: the benchmark itself runs on torch and numpy alone.
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    by_round, by_time = figure.subplots(1, 2, sharey=True)
    shown = [line for line in lines if (line["seed"], line["batch"]) == (arguments.seeds[0], arguments.batches[0])]
    for number, line in enumerate(shown):
        error = [100 * (1 - value) for value in line["accuracy"]]
        style = {"color": colormaps["tab20"](number), "linewidth": 3 if line["entry"] == DEFAULT else 1.3}
        by_round.plot(range(1, len(error) + 1), error, label=line["entry"], **style)
        if line["alone"]:
            by_time.plot(line["seconds"], error, **style)
    for axes, label in ((by_round, "round"), (by_time, "seconds of training")):
        axes.axhline(100 * (1 - SETTINGS[arguments.dataset][1][-1]), color="black", linestyle=":", linewidth=1)
        axes.set(xlabel=label, xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
    by_round.set_ylabel("test error (%)")
    figure.legend(loc="outside upper left", ncols=4, frameon=False)
    figure.savefig(arguments.plot, dpi=90)


if __name__ == "__main__":
    main()
