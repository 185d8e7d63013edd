"""Trains a plan on sources that a file holds, in a process of its own, and prints the SHA-256 of the weights."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedforget import Federation, Plan, Samples


def reference_digest(folder: Path, data: Mapping[str, Samples], plan: Plan, **options: Any) -> str:
    """The digest that a fresh process, in an empty folder, finds."""
    folder.mkdir()
    job = folder / "job.pickle"
    job.write_bytes(pickle.dumps((dict(data), plan, options)))
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.fresh_process", str(job)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    given, wanted, extra = pickle.loads(Path(sys.argv[1]).read_bytes())
    sys.stdout.write(Federation(given, **extra).train(wanted).record.digest)
