"""The built-in image datasets, read from the files in which they are distributed.

Pixels stay bytes: nothing is normalised here. How they are scaled is a constant of the format, never a statistic of
the data, in which a deleted sample would live on.
"""

from __future__ import annotations

import gzip
import math
import os
import pickle
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedforget.data.files import needed
from fedforget.errors import DataError
from fedforget.types import Dataset, Preprocessing, Samples

Bytes = npt.NDArray[np.uint8]

BYTE_PIXELS = Preprocessing("scale", shift=127.5, scale=127.5)
# Round constants for two kinds of pictures, the same whatever is deleted: bright strokes on a black ground, which comes
# to lie just below zero, and photographs, whose pixels spread about a quarter of the range around its middle.
STROKES = Preprocessing("scale", shift=32, scale=80)
PHOTOGRAPHS = Preprocessing("scale", shift=127.5, scale=64)
_DIGITS = tuple("0123456789")
_FASHION = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def digits() -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn; every fifth row is the test split."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = bunch.images.astype(np.uint8)[:, None], bunch.target
    test = np.arange(len(y)) % 5 == 0
    scale = Preprocessing("scale", shift=8, scale=8)
    return Dataset("digits", _DIGITS, scale, pool=_samples(x[~test], y[~test]), test=_samples(x[test], y[test]))


def mnist(data_dir: Path | str) -> Dataset:
    """60,000 and 10,000 handwritten digits, from the four IDX files in data_dir/mnist."""
    return _idx_dataset("mnist", Path(data_dir), _DIGITS)


def fashion_mnist(data_dir: Path | str) -> Dataset:
    """60,000 and 10,000 pieces of clothing, from the four IDX files in data_dir/fashion-mnist."""
    return _idx_dataset("fashion-mnist", Path(data_dir), _FASHION)


def cifar10(data_dir: Path | str) -> Dataset:
    """50,000 and 10,000 colour photographs, from the six pickled batches in data_dir/cifar-10-batches-py."""
    folder = Path(data_dir) / "cifar-10-batches-py"
    parts = [_cifar_batch(folder / f"data_batch_{number}") for number in range(1, 6)]
    pool = _samples(np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]))
    return Dataset("cifar10", _CIFAR10, PHOTOGRAPHS, pool=pool, test=_samples(*_cifar_batch(folder / "test_batch")))


def celeba(data_dir: Path | str, size: int = 28, grey: bool = True) -> Dataset:
    """202,599 faces, female or male, from data_dir/celeba; each the centre square, resized.

    The pool is the standard training part (162,770), the test split the validation and test parts together (39,829):
    no person is in both, and it is what comes closest to the paper's 160,000 and 40,000.
    """
    folder = Path(data_dir) / "celeba"
    images = needed(folder / "img_align_celeba")
    male = _celeba_attribute(folder / "list_attr_celeba.txt", "Male")
    part = _celeba_partition(folder / "list_eval_partition.txt")
    if part.keys() != male.keys():
        name = min(part.keys() ^ male.keys())
        raise DataError(f"{folder}: {name} is in only one of list_attr_celeba.txt and list_eval_partition.txt")
    names = sorted(male)
    x = np.empty((len(names), 1 if grey else 3, size, size), np.uint8)

    def fill(position: int) -> None:
        x[position] = _face(images / names[position], size, grey)

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # decoding leaves the interpreter lock
        for _ in threads.map(fill, range(len(names))):
            pass
    y = np.array([male[name] for name in names], np.int64)
    test = np.array([part[name] != 0 for name in names])
    if test.all() or not test.any():
        raise DataError(f"{folder / 'list_eval_partition.txt'}: one of training and test part is empty")
    split = _samples(x[~test], y[~test]), _samples(x[test], y[test])
    return Dataset("celeba", ("female", "male"), PHOTOGRAPHS, pool=split[0], test=split[1])


def _samples(x: Bytes, y: npt.NDArray[np.integer]) -> Samples:
    return Samples(
        tuple(range(len(y))), torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y.astype(np.int64))
    )


def _check(path: Path, x: Bytes, y: npt.NDArray[np.integer], classes: int) -> None:
    if len(x) != len(y) or not len(y):
        raise DataError(f"{path} holds {len(y)} labels for {len(x)} images")
    if y.min() < 0 or y.max() >= classes:
        raise DataError(f"{path} holds labels from {y.min()} to {y.max()}: there are {classes} classes")


def _idx_dataset(name: str, data_dir: Path, classes: tuple[str, ...]) -> Dataset:
    pool, test = (_idx_split(data_dir / name, split, len(classes)) for split in ("train", "t10k"))
    return Dataset(name, classes, STROKES, pool=pool, test=test)


def _idx_split(folder: Path, split: str, classes: int) -> Samples:
    _, x = _idx(folder / f"{split}-images-idx3-ubyte.gz", dimensions=3)
    path, y = _idx(folder / f"{split}-labels-idx1-ubyte.gz", dimensions=1)
    _check(path, x, y, classes)
    return _samples(x[:, None], y)


def _idx(path: Path, dimensions: int) -> tuple[Path, Bytes]:
    """An IDX file of bytes: 0, 0, 8 (for bytes), number of dimensions, their sizes (32 bit, big end first), data."""
    path = path.with_suffix("") if path.with_suffix("").exists() else needed(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is corrupt or cut short: {error}") from error
    start = 4 + 4 * dimensions
    if raw[:4] != bytes([0, 0, 8, dimensions]) or len(raw) < start:
        raise DataError(f"{path} is no IDX file with {dimensions} dimensions of bytes: it starts with {raw[:4].hex()}")
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", dimensions, offset=4))
    if math.prod(shape) != len(raw) - start:
        raise DataError(f"{path} is corrupt or cut short: {len(raw) - start} bytes of data, not {math.prod(shape)}")
    # torch wants memory that it may write to.
    return path, np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()


class _ArrayUnpickler(pickle.Unpickler):
    """Admits arrays of bytes besides plain containers: an ordinary unpickler would run whatever code a file names."""

    def find_class(self, module: str, name: str) -> Any:
        sample = np.empty(1, np.uint8)
        admitted: dict[str, Any] = {
            "ndarray": np.ndarray,
            "dtype": _byte_type,
            # Found by pickling an array, as the modules that hold them moved from one numpy to the next.
            "_reconstruct": sample.__reduce__()[0],
            "_frombuffer": sample.__reduce_ex__(5)[0],
        }
        if f"{module}.".startswith("numpy.") and name in admitted:
            return admitted[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is neither an array nor a list")


def _byte_type(name: str | bytes, *_: object) -> np.dtype[Any]:
    if name not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"it holds an array of {name!r}, not of bytes")
    return np.dtype(np.uint8)


def _cifar_batch(path: Path) -> tuple[Bytes, npt.NDArray[np.int64]]:
    try:
        with needed(path).open("rb") as file:
            batch = _ArrayUnpickler(file, encoding="bytes").load()  # the originals were pickled by Python 2
        x, y = batch[b"data"], np.array(batch[b"labels"], np.int64)
    except DataError:
        raise
    except Exception as error:  # a corrupt pickle can raise nearly anything
        raise DataError(f"{path} is no CIFAR-10 batch, or corrupt: {type(error).__name__}: {error}") from error
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != 3072 or y.ndim != 1:
        raise DataError(f"{path} is no CIFAR-10 batch: it does not hold rows of 3,072 bytes with a label each")
    _check(path, x, y, len(_CIFAR10))
    return x.reshape(-1, 3, 32, 32), y


def _celeba_lines(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in needed(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _celeba_attribute(path: Path, attribute: str) -> dict[str, int]:
    """0 or 1 by image name: the file's first line is the number of images, its second names the attributes."""
    lines = _celeba_lines(path)
    if len(lines) < 2 or len(lines[0]) != 1 or attribute not in lines[1]:
        raise DataError(f"{path} is no CelebA attribute list: line 1 must be a count, line 2 name {attribute}")
    if lines[0][0] != str(len(lines) - 2):
        raise DataError(f"{path} is corrupt or cut short: line 1 says {lines[0][0]} images, {len(lines) - 2} follow")
    column = 1 + lines[1].index(attribute)
    return _celeba_values(path, lines[2:], 3, 1 + len(lines[1]), lambda cells: {"-1": 0, "1": 1}[cells[column]])


def _celeba_partition(path: Path) -> dict[str, int]:
    """0 (training), 1 (validation) or 2 (test) by image name."""
    return _celeba_values(path, _celeba_lines(path), 1, 2, lambda cells: {"0": 0, "1": 1, "2": 2}[cells[1]])


def _celeba_values(
    path: Path, lines: list[list[str]], first: int, cells_a_line: int, value: Callable[[list[str]], int]
) -> dict[str, int]:
    values: dict[str, int] = {}
    for number, cells in enumerate(lines, first):
        try:
            if len(cells) != cells_a_line or cells[0] in values:
                raise ValueError
            values[cells[0]] = value(cells)
        except (ValueError, KeyError):
            raise DataError(f"{path}, line {number}: {' '.join(cells)[:80]!r} is not what is expected here") from None
    return values


def _face(path: Path, size: int, grey: bool) -> Bytes:
    from PIL import Image

    mode = "L" if grey else "RGB"
    try:
        with Image.open(needed(path)) as image:
            image.draft(mode, (2 * size, 2 * size))  # JPEG can be decoded at half the size, several times faster
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            face = image.convert(mode).resize(
                (size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side)
            )
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} is no image, or corrupt: {error}") from error
    return np.asarray(face).reshape(size, size, -1).transpose(2, 0, 1)
