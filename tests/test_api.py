from __future__ import annotations

import json
import subprocess
import sys

import fedforget as ff

PUBLIC = """
Choice DataError Dataset DeletionError DivergedError Federation FedforgetError Origin Partition Plan PlanError
Preprocessing RapidRetrain Release Retrain RunFolderError Samples Share SiloError Verification __version__ datasets
models optim
"""
HEAVY = ("typer", "rich", "matplotlib", "sklearn", "PIL", "datasets", "cloudpickle")


def test_the_public_names_are_these() -> None:
    assert ff.__all__ == PUBLIC.split()
    assert all(hasattr(ff, name) for name in ff.__all__)
    from_outside = {name for name in vars(ff) if not name.startswith("_")} - set(ff.__all__)
    assert all(type(getattr(ff, name)).__name__ == "module" for name in from_outside), "nothing else looks public"


def test_errors_of_one_base_can_be_caught_together() -> None:
    errors = [getattr(ff, name) for name in ff.__all__ if name.endswith("Error")]
    assert all(issubclass(error, ff.FedforgetError) for error in errors)


def test_importing_the_package_pulls_in_nothing_heavy() -> None:
    script = "import fedforget, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & set(HEAVY)
    assert "torch" in loaded
    assert not done.stderr
