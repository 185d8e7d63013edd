"""Datasets by name: the built-in ones, and those that a user's own function returns."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from torch.utils.data import Dataset as TorchDataset

from fedforget.data.adapters import from_hub, from_torch
from fedforget.data.csv_sites import CsvSource, ErasableCsvSource, csv_sites, heart_disease
from fedforget.data.files import WHERE
from fedforget.data.images import celeba, cifar10, digits, fashion_mnist, mnist
from fedforget.errors import DataError
from fedforget.types import Dataset

__all__ = [
    "BUILT_IN",
    "BuiltIn",
    "CsvSource",
    "ErasableCsvSource",
    "available",
    "celeba",
    "cifar10",
    "csv_sites",
    "digits",
    "fashion_mnist",
    "from_hub",
    "from_torch",
    "heart_disease",
    "load",
    "mnist",
]


@dataclass(frozen=True)
class BuiltIn:
    """A dataset that is known by its name."""

    make: Callable[[Path], Dataset]
    """Called with the folder of the datasets."""
    description: str
    files: tuple[str, ...]
    """What it needs, relative to the folder of the datasets; a .gz file may also lie there unpacked."""

    @property
    def layout(self) -> str:
        """The files as one text."""
        return ", ".join(self.files) or "none"


_IDX = tuple(
    f"{part}-ubyte.gz" for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
)
BUILT_IN: Mapping[str, BuiltIn] = MappingProxyType(
    {
        "digits": BuiltIn(lambda _: digits(), "1,797 handwritten digits, 8 x 8; comes with scikit-learn", ()),
        "mnist": BuiltIn(mnist, "70,000 handwritten digits, 28 x 28", tuple(f"mnist/{file}" for file in _IDX)),
        "fashion-mnist": BuiltIn(
            fashion_mnist, "70,000 pieces of clothing, 28 x 28", tuple(f"fashion-mnist/{file}" for file in _IDX)
        ),
        "cifar10": BuiltIn(
            cifar10,
            "60,000 colour photographs of ten kinds of things, 32 x 32",
            tuple(f"cifar-10-batches-py/{file}" for file in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")),
        ),
        "celeba": BuiltIn(
            celeba,
            "202,599 faces, female or male, 28 x 28",
            ("celeba/img_align_celeba", "celeba/list_attr_celeba.txt", "celeba/list_eval_partition.txt"),
        ),
        "heart-disease": BuiltIn(
            heart_disease,
            "920 patients of four hospitals, each a site; with or without heart disease",
            tuple(f"heart-disease/{site}.csv" for site in ("cleveland", "hungarian", "switzerland", "va")),
        ),
    }
)


def load(name: str, data_dir: Path | str | None = None) -> Dataset:
    """A built-in dataset, or what the function `package.module:callable` returns.

    `data_dir` is the folder of the datasets; without it the environment variable FEDFORGET_DATA names it.
    """
    if ":" in name:
        return _own(name)
    if name not in BUILT_IN:
        raise DataError(
            f"no dataset is called {name!r}: use {', '.join(BUILT_IN)}, or your own package.module:callable"
        )
    built_in = BUILT_IN[name]
    if not built_in.files:
        return built_in.make(Path())
    folder = _folder(data_dir)
    if folder is None:
        raise DataError(f"dataset {name} needs files ({built_in.files[0]}, ...): {WHERE}")
    for file in built_in.files:
        if not _present(folder / file):
            raise DataError(f"dataset {name} needs {file}, which is not in {folder}: {WHERE}")
    return built_in.make(folder)


def available(data_dir: Path | str | None = None) -> dict[str, bool]:
    """Which built-in datasets have all their files there."""
    folder = _folder(data_dir)
    return {
        name: not built_in.files or (folder is not None and all(_present(folder / file) for file in built_in.files))
        for name, built_in in BUILT_IN.items()
    }


def _folder(data_dir: Path | str | None) -> Path | None:
    chosen = data_dir or os.environ.get("FEDFORGET_DATA")
    return Path(chosen) if chosen else None


def _present(path: Path) -> bool:
    return path.exists() or (path.suffix == ".gz" and path.with_suffix("").exists())


def _own(name: str) -> Dataset:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise DataError(f"dataset {name!r}: {module_name!r} cannot be imported: {error}; is it installed?") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise DataError(f"dataset {name!r}: module {module_name} has no function {function_name!r}")
    try:
        result = function()
    except Exception as error:  # the function is the user's: whatever it raises is told with its name
        raise DataError(f"dataset {name!r}: {type(error).__name__}: {error}") from error
    if isinstance(result, Dataset):
        return result
    if isinstance(result, TorchDataset):
        return from_torch(result, name=name)
    raise DataError(f"dataset {name!r}: it returned a {type(result).__name__}, not a Dataset of fedforget or torch")
