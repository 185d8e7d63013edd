"""The learning rates that the demo and the README use, chosen on a validation split of the digits' training samples.

    python benchmarks/demo_rates.py --out benchmarks/results

A fifth of the training samples validates; the test split is not looked at. Best is the fewest rounds to the accuracy.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

import fedforget as ff

WANTED = 0.93
GRID = {
    "sgd": [{"lr": rate} for rate in (0.03, 0.1, 0.3, 1.0, 3.0)],
    "adam": [{"lr": rate} for rate in (0.003, 0.01, 0.03, 0.1, 0.3)],
    "muon": [{"lr": rate} for rate in (0.025, 0.05, 0.07, 0.1, 0.2, 0.4)],
    "diagonal-fisher": [
        *({"lr": rate, "eps": eps} for eps in (1e-8, 1e-3, 3e-3, 1e-2) for rate in (0.001, 0.003, 0.01, 0.03, 0.1)),
        *({"lr": 0.01, "eps": eps, "fisher_every": 4} for eps in (1e-8, 3e-3)),
        *({"lr": 0.01, "eps": eps, "fisher_share": 0.25} for eps in (1e-8, 3e-3)),
    ],
}


def main() -> None:
    """Train each point of the grid on three seeds, write them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    digits = ff.datasets.digits()
    assert digits.pool is not None
    order = torch.randperm(len(digits.pool), generator=torch.Generator().manual_seed(1)).tolist()
    cut = len(order) // 5
    dataset = replace(
        digits, pool=digits.pool.select(sorted(order[cut:])), test=digits.pool.select(sorted(order[:cut]))
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "demo_rates.jsonl").open("w") as file:
        print(f"{'optimizer':<36} rounds to {100 * WANTED:g} % on three seeds, and the last accuracy")
        for name, settings in ((name, settings) for name, points in GRID.items() for settings in points):
            reached, last = [], []
            for seed in (0, 1, 2):
                federation = ff.Federation.split_evenly(dataset, silos=10, model=ff.models.mlp)
                plan = ff.Plan(rounds=20, batch_size=32, optimizer=ff.Choice(name, settings), seed=seed)
                records = federation.train(plan).records
                accuracy = [record.accuracy for record in records]
                line = {
                    "dataset": "digits, validation split",
                    "model": "mlp",
                    "optimizer": name,
                    **settings,
                    "batch": 32,
                    "seed": seed,
                    "accuracy": accuracy,
                }
                file.write(json.dumps(line) + "\n")
                hits = [number for number, value in enumerate(accuracy, 1) if value >= WANTED]
                reached.append(str(hits[0]) if hits else f"> {len(accuracy)}")
                last.append(f"{100 * accuracy[-1]:.1f}")
            print(f"{ff.Choice(name, settings)!s:<36} {' / '.join(reached):<16} {' / '.join(last)}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
