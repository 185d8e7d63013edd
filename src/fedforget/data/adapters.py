"""Datasets of other libraries as ours: torch datasets and Hugging Face datasets.

Samples are copied into memory; ids are the positions in the dataset given, so its order must stay the same.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from fedforget.data.images import BYTE_PIXELS
from fedforget.errors import DataError
from fedforget.types import Dataset, Preprocessing, Samples


def from_torch(
    dataset: TorchDataset[Any],
    *,
    name: str = "torch",
    classes: Sequence[str] | None = None,
    test: TorchDataset[Any] | None = None,
) -> Dataset:
    """A map-style torch dataset of (input, whole number) pairs; `test` is its public test split, if there is one.

    Without `classes` the distinct labels are the classes; with them label 0 is the first class, and so on.
    """
    pool = _torch_part(dataset, name)
    return _joined(name, classes, pool, None if test is None else _torch_part(test, f"{name} (test)"), Preprocessing())


def from_hub(
    dataset: Any,
    *,
    input_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    split: str = "train",
    test_split: str | None = "test",
) -> Dataset:
    """A Hugging Face dataset: an object of `datasets`, a folder of `save_to_disk`, or a name on the hub.

    Columns are guessed where not named; a list of input columns makes a table of numbers. Where there is no split
    called "test", or `test_split` is None, silos set samples aside themselves.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError("Hugging Face datasets need an extra: pip install 'fedforget[hub]'") from error
    name = "hub"
    if isinstance(dataset, str | Path):
        name, address = Path(dataset).name, str(dataset)
        saved = any((Path(address) / file).exists() for file in ("state.json", "dataset_dict.json"))
        try:
            dataset = datasets.load_from_disk(address) if saved else datasets.load_dataset(address)
        except Exception as error:  # whatever the library, its storage or the network raises
            raise DataError(f"{address} cannot be loaded: {' '.join(str(error).split())}") from error
    test = None
    if isinstance(dataset, datasets.DatasetDict):
        # A test split that was named must be there; the usual one may be missing.
        for wanted in (split, *(() if test_split in (None, "test") else (test_split,))):
            if wanted not in dataset:
                raise DataError(f"{name} has no split {wanted!r}: it has {', '.join(dataset)}")
        dataset, test = dataset[split], dataset.get(test_split)
    if not isinstance(dataset, datasets.Dataset):
        raise DataError(f"{name} is a {type(dataset).__name__}: give a Dataset or a DatasetDict, without streaming")
    features = dataset.features
    inputs = input_column
    if inputs is None:
        inputs = _guessed(features, datasets.Image, ("image", "img", "pixel_values"), "input_column", name)
    label = label_column
    if label is None:
        label = _guessed(features, datasets.ClassLabel, ("label", "labels", "target"), "label_column", name)
    pool = _hub_part(dataset, inputs, label, name)
    classes = features[label].names if isinstance(features[label], datasets.ClassLabel) else None
    return _joined(
        name,
        classes,
        pool,
        None if test is None else _hub_part(test, inputs, label, f"{name} ({test_split})"),
        Preprocessing() if isinstance(inputs, str) else Preprocessing("standardize"),
    )


@dataclass(frozen=True)
class _Part:
    """Inputs with their labels as the dataset gives them, not yet numbered by class."""

    name: str
    x: Tensor
    labels: list[int | str]


def _torch_part(dataset: Any, name: str) -> _Part:
    if isinstance(dataset, IterableDataset):
        raise DataError(f"{name} is an IterableDataset: its samples have no ids; give a map-style dataset")
    try:
        count = len(dataset)
    except TypeError as error:
        raise DataError(f"{name} has no length: give a map-style dataset with __len__ and __getitem__") from error

    def pairs() -> Iterator[tuple[Any, int]]:
        for position in range(count):
            item = dataset[position]
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise DataError(f"{name}, sample {position}: it is not a pair of input and label")
            yield item[0], _whole(item[1], f"{name}, sample {position}")

    return _part(name, count, pairs())


def _hub_part(dataset: Any, inputs: str | Sequence[str], label: str, name: str) -> _Part:
    columns = [inputs] if isinstance(inputs, str) else list(inputs)
    for column in (*columns, label):
        if column not in dataset.column_names:
            raise DataError(f"{name} has no column {column!r}: it has {', '.join(dataset.column_names)}")

    def pairs() -> Iterator[tuple[Any, int | str]]:
        for position, row in enumerate(dataset.select_columns([*columns, label])):
            where = f"{name}, row {position}"
            value = row[label]
            yield (
                row[inputs] if isinstance(inputs, str) else _numbers([row[column] for column in columns], where),
                value if isinstance(value, str) else _whole(value, where),
            )

    return _part(name, len(dataset), pairs())


def _guessed(features: Mapping[str, Any], kind: type, usual: tuple[str, ...], setting: str, name: str) -> str:
    """The only column of a kind, else one with a usual name."""
    of_kind = [column for column, feature in features.items() if isinstance(feature, kind)]
    if len(of_kind) == 1:
        return of_kind[0]
    for column in usual:
        if column in features:
            return column
    raise DataError(f"{name}: which column to use is not clear; name it as {setting}, of {', '.join(features)}")


def _part(name: str, count: int, pairs: Iterable[tuple[Any, int | str]]) -> _Part:
    x = torch.empty(0)
    labels: list[int | str] = []
    for position, (value, label) in enumerate(pairs):
        sample = _tensor(value, f"{name}, sample {position}")
        if not position:
            # Filled in place: a list of tensors that is stacked at the end would need the memory twice.
            x = torch.empty((count, *sample.shape), dtype=sample.dtype)
        if sample.shape != x.shape[1:]:
            raise DataError(
                f"{name}, sample {position}: its shape is {tuple(sample.shape)}, that of sample 0 is "
                f"{tuple(x.shape[1:])}; give every sample the same shape"
            )
        if sample.dtype != x.dtype:
            x = x.to(torch.promote_types(x.dtype, sample.dtype))
        x[position] = sample
        labels.append(label)
    if not labels:
        raise DataError(f"{name} holds no sample")
    return _Part(name, x, labels)


def _joined(
    name: str,
    classes: Sequence[str] | None,
    pool: _Part,
    test: _Part | None,
    preprocessing: Preprocessing,
) -> Dataset:
    parts = [pool] if test is None else [pool, test]
    if classes is None:
        labels = {label for part in parts for label in part.labels}
        distinct = sorted(labels, key=lambda label: (0, label, "") if isinstance(label, int) else (1, 0, label))
    else:
        distinct = list(range(len(classes)))
    numbers = {label: number for number, label in enumerate(distinct)}

    def samples(part: _Part) -> Samples:
        for position, label in enumerate(part.labels):
            if label not in numbers:
                raise DataError(
                    f"{part.name}, sample {position}: label {label!r}, but there are {len(numbers)} classes"
                )
        y = torch.tensor([numbers[label] for label in part.labels])
        return Samples(tuple(range(len(y))), part.x, y)

    # A constant of the format, where there is one: a statistic of the data would outlive a deleted sample.
    if pool.x.dtype == torch.uint8:
        preprocessing = BYTE_PIXELS
    return Dataset(
        name,
        tuple(classes or map(str, distinct)),
        preprocessing,
        pool=samples(pool),
        test=None if test is None else samples(test),
    )


def _whole(label: Any, where: str) -> int:
    try:
        value: Any = label.item() if isinstance(label, Tensor | np.ndarray | np.generic) else label
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: label {label!r} is not a whole number") from error


def _numbers(values: list[Any], where: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    try:
        return np.array(values, dtype=np.float64)  # None becomes NaN: missing
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {error}; name columns of numbers only") from error


def _tensor(value: Any, where: str) -> Tensor:
    """An input as a tensor; an image as bytes, channels first."""
    from PIL import Image

    try:
        if isinstance(value, Image.Image):
            grey = value.mode in ("1", "L", "LA")
            pixels = np.array(value.convert("L" if grey else "RGB"))
            tensor = torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)
        elif isinstance(value, Tensor):
            tensor = value.detach().cpu()
        elif isinstance(value, np.ndarray | list | tuple):
            tensor = torch.from_numpy(np.array(value))
        else:
            raise TypeError(f"it is a {type(value).__name__}")
    except (TypeError, ValueError, OSError) as error:
        raise DataError(f"{where}: its input is no tensor, array, image or list of numbers: {error}") from error
    if not tensor.ndim:
        raise DataError(f"{where}: its input is a single number; give a list of numbers, for a table a list of columns")
    return tensor
