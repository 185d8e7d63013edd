import os

import pytest
import torch

# One thread: small tensors gain nothing from more, and tests that run side by side would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# GPU kernels run without a GPU: Triton's interpreter stands in for it.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _no_datasets_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDFORGET_DATA", raising=False)
