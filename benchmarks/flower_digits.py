"""A round of Flower's simulation on the digits, for round_time.py to compare with: never a dependency of the project.

    python -m venv .flower && .flower/bin/pip install torch "flwr[simulation]" scikit-learn
    .flower/bin/python benchmarks/flower_digits.py --out benchmarks/results

The same task as `round_time.py --set flower`: scikit-learn's digits, shared out evenly among K silos, each of which
trains an mlp for one epoch of SGD from the global model; FedAvg over all. Nothing is evaluated. It trains through
Flower's message API; the data stay in each of its workers' memory between rounds.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import flwr
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

TRAINING = 1437
"""Samples of the digits that are trained on, as in this project's split."""


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """All samples, in one random order."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(data.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return x[order], torch.tensor(data.target)[order]


def model() -> nn.Module:
    """The project's mlp."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch at one silo."""
    torch.set_num_threads(1)  # Each worker has one core.
    number, silos = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    x, y = (part[:TRAINING].tensor_split(silos)[number] for part in digits())
    net = model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    total = 0.0
    for batch in torch.randperm(len(y)).split(32):
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(batch)
    content = RecordDict(
        {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"train_loss": total / len(y), "num-examples": len(y)}),
        }
    )
    return Message(content=content, reply_to=message)


def main() -> None:
    """Run the simulation, and note the time of a round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    for silos in arguments.silos:
        line = measured(silos, arguments.rounds)
        with (arguments.out / "round_time.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{silos} silos: {1000 * line['seconds']:.1f} ms a round")


def measured(silos: int, rounds: int) -> dict[str, Any]:
    """The median time of a round, the first one left out."""
    ends: list[float] = []
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, _: Context) -> None:
        strategy = FedAvg(min_train_nodes=silos, fraction_evaluate=0.0, min_available_nodes=silos)
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(model().state_dict()),
            num_rounds=rounds,
            # Called after each round with the new global model.
            evaluate_fn=lambda *_: ends.append(time.perf_counter()),
        )

    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=silos,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    seconds = [after - before for before, after in itertools.pairwise(ends[1:])]
    return {
        "link": f"flower {flwr.__version__}",
        "model": "mlp",
        "optimizer": "sgd",
        "silos": silos,
        "batch": 32,
        "samples": TRAINING,
        "device": "cpu",
        "dtype": "float32",
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "floor_seconds": None,
        "peak_bytes": None,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    # Ray's workers find what a module holds, not what a program does.
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    importlib.import_module("flower_digits").main()
