"""Rounds that rapid retraining by the paper's rule needs, after one silo deleted 2 % of all samples.

    python benchmarks/paper_rule.py --dataset mnist --data-dir DATA --device cuda --out benchmarks/results

The setting is the paper's: K = 10 silos, an even split, all of them in each round, one local epoch, B = 2048. Each
combination of rate, damping, block size, cheaper Γ and seed is a run, and a line of OUT/paper_rule_DATASET.jsonl; runs
that the file has already are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import fedforget as ff

SETTINGS = {
    # dataset: model, accuracies that the table asks for
    "mnist": ("cnn", (0.95, 0.97, 0.98)),
    "digits": ("mlp", (0.85, 0.90, 0.95)),
}
BATCH = 2048
CELL = ("learning_rate", "eps", "block_size", "fisher_every", "fisher_share", "seed")
FORGETS, RATE = "silo-3", 0.02


def first_reached(accuracy: list[float], wanted: float) -> str:
    """The first round at or above the accuracy, or that there is none."""
    return next((str(number) for number, value in enumerate(accuracy, 1) if value >= wanted), f"> {len(accuracy)}")


def channels_last(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """The cnn in the memory format in which a CPU convolves a quarter faster; the same numbers."""
    model: torch.nn.Module = ff.models.cnn(shape, classes).to(memory_format=torch.channels_last)
    return model


def run(
    arguments: argparse.Namespace, rate: float, eps: float, block: int, every: int, share: float, seed: int
) -> dict[str, Any]:
    """Train a round, delete, retrain by the paper's rule: what is measured is the retraining."""
    model, _ = SETTINGS[arguments.dataset]
    federation = ff.Federation.split_evenly(
        ff.datasets.load(arguments.dataset, arguments.data_dir),
        silos=10,
        model=channels_last if model == "cnn" else ff.models.BUILT_IN[model],
        device=arguments.device,
        on_round=lambda title, _, record: print(title, record, file=sys.stderr, flush=True),
    )
    # The model before does not enter the one after, so one round of it is enough here.
    federation.train(ff.Plan(rounds=1, batch_size=BATCH, optimizer=ff.optim.SGD(lr=0.001), seed=seed))
    settings = {"lr": rate, "eps": eps, "block_size": block, "fisher_every": every, "fisher_share": share}
    optimizer = ff.Choice("diagonal-fisher", settings)
    method = ff.RapidRetrain(optimizer, rounds=arguments.rounds, target_accuracy=arguments.until)
    release = federation.forget({FORGETS: ff.Share(RATE)}, method)
    return {
        "dataset": arguments.dataset,
        "model": model,
        "method": "rapid",
        "optimizer": "diagonal-fisher",
        "learning_rate": rate,
        "eps": eps,
        "block_size": block,
        "fisher_every": every,
        "fisher_share": share,
        "batch": BATCH,
        "silos": 10,
        "deleted": sum(release.deleted.values()),
        "seed": seed,
        "device": torch.cuda.get_device_name(arguments.device) if "cuda" in arguments.device else arguments.device,
        "torch": torch.__version__,
        "accuracy": [record.accuracy for record in release.records],
        "seconds": list(accumulate(record.seconds for record in release.records)),
    }


def main() -> None:
    """Run all settings, write each as it ends, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=sorted(SETTINGS), default="digits")
    parser.add_argument("--data-dir", help="the folder of the datasets; default: $FEDFORGET_DATA")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--until", type=float, help="stop a run at the first round that reaches this accuracy")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.001, 0.003, 0.01])
    parser.add_argument("--eps", type=float, nargs="+", default=[3e-3, 1e-8], help="ε of the rule")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--every", type=int, nargs="*", default=[], help="further runs, with Γ every so many steps")
    parser.add_argument("--shares", type=float, nargs="*", default=[], help="further runs, with Γ from such a share")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()

    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"paper_rule_{arguments.dataset}.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    # A line that is marked as interrupted holds the rounds of a run that was cut short: it is made again.
    lines = [line for line in lines if not line.get("interrupted")]
    made = {tuple(line[name] for name in CELL) for line in lines}
    gammas = [(1, 1.0), *((every, 1.0) for every in arguments.every), *((1, share) for share in arguments.shares)]
    for rate, eps, block, gamma, seed in itertools.product(
        arguments.rates, arguments.eps, arguments.blocks, gammas, arguments.seeds
    ):
        cell = (rate, eps, block, *gamma, seed)
        if cell not in made:
            lines.append(run(arguments, *cell))
            with path.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    table(lines, SETTINGS[arguments.dataset][1])


def table(lines: list[dict[str, Any]], accuracies: tuple[float, ...]) -> None:
    """Print a row for each run."""
    heads = " ".join(f"{f'to {100 * wanted:g} %':>10}" for wanted in accuracies)
    settings = f"{'lr':>6} {'eps':>6} {'b':>2} {'every':>5} {'share':>6} {'seed':>4}"
    print(f"{settings} {heads} {'last':>8} {'s/round':>8}  device")
    for line in sorted(lines, key=lambda line: tuple(line[name] for name in CELL)):
        accuracy, seconds = line["accuracy"], line["seconds"]
        cells = " ".join(f"{first_reached(accuracy, wanted):>10}" for wanted in accuracies)
        name = f"{line['learning_rate']:>6} {line['eps']:>6g} {line['block_size']:>2} {line['fisher_every']:>5}"
        name += f" {line['fisher_share']:>6g} {line['seed']:>4}"
        pace = seconds[-1] / len(seconds)
        print(f"{name} {cells} {100 * accuracy[-1]:>6.2f} % {pace:>8.3f}  {line['device']}")


if __name__ == "__main__":
    main()
