"""Federated learning whose participants can take their data back.

The public API: everything else may change without notice.
"""

import os

# Before torch is imported: its threads would spin while they wait for each other, and on a machine that has other
# work small models would crawl. Which thread computes what, and so every bit, stays the same.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    # GNU's OpenMP may wait for microseconds first: a thread that sleeps takes as long to wake as a small step takes.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from fedforget import models, optim
from fedforget.data import datasets
from fedforget.errors import (
    DataError,
    DeletionError,
    DivergedError,
    FedforgetError,
    PlanError,
    RunFolderError,
    SiloError,
)
from fedforget.methods import RapidRetrain, Retrain
from fedforget.pipeline import Federation
from fedforget.release import Release, Verification
from fedforget.sources import Origin, Partition
from fedforget.types import Choice, Dataset, Plan, Preprocessing, Samples
from fedforget.version import __version__
from fedforget.work import Share

__all__ = [
    "Choice",
    "DataError",
    "Dataset",
    "DeletionError",
    "DivergedError",
    "Federation",
    "FedforgetError",
    "Origin",
    "Partition",
    "Plan",
    "PlanError",
    "Preprocessing",
    "RapidRetrain",
    "Release",
    "Retrain",
    "RunFolderError",
    "Samples",
    "Share",
    "SiloError",
    "Verification",
    "__version__",
    "datasets",
    "models",
    "optim",
]
