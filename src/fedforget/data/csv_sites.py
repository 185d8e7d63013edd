"""A folder with one CSV file per site, each a silo's data source.

A source reads its file each time it is iterated and keeps nothing of it in memory, so that it never holds a sample
that the file does not hold any more.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from fedforget.data.files import needed, replace_file
from fedforget.errors import DataError
from fedforget.types import Dataset, Preprocessing, SampleId


def csv_sites(
    folder: Path | str,
    label: str,
    *,
    id_column: str | None = None,
    missing: Collection[str] = (),
    threshold: float | None = None,
    classes: Sequence[str] | None = None,
    erase: bool = False,
) -> Dataset:
    """Every CSV file of a folder as a site with the file's name; all columns but label and id are features.

    `missing`: cells that mean "not known", besides empty ones. `threshold`: the label is a number, and the second of
    two classes where it lies above. `classes`: their names in order, else the distinct labels over all sites; give
    them wherever a deletion may remove the last sample of a class. `erase`: a deletion also rewrites the file.
    """
    folder = needed(Path(folder))
    found = (path for path in folder.glob("*.[cC][sS][vV]") if not path.name.startswith("."))
    paths = sorted(found, key=lambda path: (path.stem, path.name))
    if not paths:
        raise DataError(f"{folder} holds no CSV file: put one file per site there")
    if twice := [later.name for earlier, later in itertools.pairwise(paths) if earlier.stem == later.stem]:
        raise DataError(f"{folder} holds two files of one site, as {twice[0]}: put all of its rows into one")
    if erase and id_column is None:
        raise DataError(
            "erase=True needs id_column: without one a sample's id is its row number, "
            "and deleting a row would give every later sample another id"
        )
    header = next(_rows(paths[0])).cells
    for column in (label, id_column):
        if column is not None and column not in header:
            raise DataError(f"{paths[0]} has no column {column!r}: it has {', '.join(header)}")
    if threshold is not None:
        classes = classes or (f"{label} <= {threshold:g}", f"{label} > {threshold:g}")
        if len(classes) != 2:
            raise DataError(f"{len(classes)} classes with a threshold: name two, the one below first")
    reading = Reading(
        features=tuple(column for column in header if column not in (label, id_column)),
        label=label,
        id_column=id_column,
        missing=_markers([missing] if isinstance(missing, str) else missing),
        threshold=threshold,
        classes=tuple(classes or ()),
    )
    if not reading.features:
        raise DataError(f"{paths[0]} has no column besides label and id: there is nothing to learn from")
    if not reading.classes:
        reading = replace(reading, classes=_distinct_labels(paths, reading))
    source = ErasableCsvSource if erase else CsvSource
    sites = {path.stem: source(path, reading) for path in paths}
    # Every row is read once here, so that a bad cell is reported now and not from inside a silo.
    if not sum(1 for site in sites.values() for _ in site):
        raise DataError(f"the CSV files in {folder} hold no sample")
    return Dataset(folder.name, reading.classes, Preprocessing("standardize"), sites=sites)


@dataclass(frozen=True)
class Reading:
    """How the rows of all sites are read."""

    features: tuple[str, ...]
    label: str
    id_column: str | None
    missing: frozenset[str | float]
    threshold: float | None
    classes: tuple[str, ...]


@final
@dataclass(frozen=True)
class CsvSource:
    """A site's CSV file. Without an id column a sample's id is its row number; the row after the header is 0."""

    path: Path
    reading: Reading

    def __iter__(self) -> Iterator[tuple[SampleId, Tensor, int]]:
        return _samples(self.path, self.reading)


@final
@dataclass(frozen=True)
class ErasableCsvSource:
    """A site's CSV file with an id column, which is rewritten without the samples that are deleted."""

    path: Path
    reading: Reading

    def __iter__(self) -> Iterator[tuple[SampleId, Tensor, int]]:
        return _samples(self.path, self.reading)

    def delete(self, ids: Collection[SampleId]) -> None:
        """Rewrite the file without these ids' rows; the header and all other lines stay byte for byte."""
        # Behind a symbolic link, replacing the link would leave the samples where they are.
        path = self.path.resolve()
        gone = {str(sample_id) for sample_id in ids}
        assert self.reading.id_column is not None, "csv_sites asks for it"
        if not any(row.id in gone for row in _rows(path, self.reading.id_column)):
            return
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            replace_file(path, _remaining(path, self.reading.id_column, gone), mode)
        except OSError as error:
            raise DataError(f"{path} cannot be rewritten, nothing was deleted from it: {error}") from error


@dataclass(frozen=True)
class _Row:
    """A row as parsed, and the bytes it was parsed from; no cells for a blank line."""

    line: int
    raw: bytes
    cells: list[str]
    id: str | None


def _rows(path: Path, id_column: str | None = None) -> Iterator[_Row]:
    """The header and then every row, blank lines included."""
    raw_lines: list[bytes] = []

    def decoded(lines: Iterable[bytes]) -> Iterator[str]:
        for raw in lines:
            raw_lines.append(raw)
            # Only a file's first line may start with a byte order mark.
            yield raw.decode("utf-8-sig" if reader.line_num == 0 else "utf-8")

    line = 1
    header: list[str] = []
    try:
        # Read at once: an iteration that is given up halfway must not leave the file open.
        lines = io.BytesIO(path.read_bytes())
        reader = csv.reader(decoded(lines), strict=True)
        for cells in reader:
            if not header:
                header = [cell.strip() for cell in cells]
                if not header or len(set(header)) != len(header):
                    raise DataError(f"{path}, line 1: give every column a name of its own")
                if id_column is not None and id_column not in header:
                    raise DataError(f"{path} has no column {id_column!r}: it has {', '.join(header)}")
                yield _Row(line, b"".join(raw_lines), header, None)
            elif cells and len(cells) != len(header):
                raise DataError(f"{path}, line {line}: {len(cells)} cells where the header has {len(header)}")
            else:
                row_id = cells[header.index(id_column)].strip() if id_column is not None and cells else None
                yield _Row(line, b"".join(raw_lines), cells, row_id)
            raw_lines.clear()
            line = reader.line_num + 1
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}, line {line}: cannot be read as CSV in UTF-8: {error}") from error
    if not header:
        raise DataError(f"{path} is empty: its first line must name the columns")


def _samples(path: Path, reading: Reading) -> Iterator[tuple[SampleId, Tensor, int]]:
    rows = _rows(path, reading.id_column)
    header = next(rows).cells
    wanted = {*reading.features, reading.label} | ({reading.id_column} if reading.id_column else set())
    if set(header) != wanted:
        differing = ", ".join(sorted(wanted ^ set(header)))
        raise DataError(f"{path}: all sites need the same columns; it differs from the first site in {differing}")
    feature_cells = [(header.index(column), column) for column in reading.features]
    label_cell = header.index(reading.label)
    class_numbers = {_canonical(name): number for number, name in enumerate(reading.classes)}
    seen: dict[str, int] = {}
    for number, row in enumerate(row for row in rows if row.cells):
        where = f"{path}, line {row.line}"
        if row.id is not None:
            if not row.id:
                raise DataError(f"{where}, column {reading.id_column!r}: the id is empty")
            if row.id in seen:
                raise DataError(f"{where}: id {row.id!r} was already used in line {seen[row.id]}")
            seen[row.id] = row.line
        x = [_value(row.cells[cell], reading, f"{where}, column {column!r}") for cell, column in feature_cells]
        label_where = f"{where}, column {reading.label!r}"
        if reading.threshold is not None:
            value = _value(row.cells[label_cell], reading, label_where)
            if math.isnan(value):
                raise DataError(f"{label_where}: the label is missing")
            y = int(value > reading.threshold)
        else:
            label = _label(row.cells[label_cell], reading, label_where)
            if label not in class_numbers:
                raise DataError(f"{label_where}: {label!r} is none of the classes {', '.join(reading.classes)}")
            y = class_numbers[label]
        yield row.id if row.id is not None else number, torch.tensor(x, dtype=torch.float64), y


def _remaining(path: Path, id_column: str, gone: set[str]) -> Iterator[bytes]:
    """The bytes of the file without the rows of these ids."""
    before = path.stat()
    for row in _rows(path, id_column):
        if row.id not in gone:
            yield row.raw
    after = path.stat()
    if (before.st_ino, before.st_size, before.st_mtime_ns) != (after.st_ino, after.st_size, after.st_mtime_ns):
        raise DataError(f"{path} was changed while rows were being deleted from it: nothing was deleted, ask again")


def _distinct_labels(paths: list[Path], reading: Reading) -> tuple[str, ...]:
    labels: set[str] = set()
    for path in paths:
        rows = _rows(path)
        header = next(rows).cells
        if reading.label not in header:
            raise DataError(f"{path} has no column {reading.label!r}: all sites need the same columns")
        cell = header.index(reading.label)
        where = f"column {reading.label!r}"
        labels.update(
            _label(row.cells[cell], reading, f"{path}, line {row.line}, {where}") for row in rows if row.cells
        )
    numbers = [_number(label) for label in labels]
    return tuple(sorted(labels, key=str if None in numbers else float))


def _value(cell: str, reading: Reading, where: str) -> float:
    """A feature; NaN where it is missing."""
    cell = cell.strip()
    if not cell or cell in reading.missing:
        return math.nan
    value = _number(cell)
    if value is None:
        raise DataError(f"{where}: {cell!r} is not a number; list it under missing if it means 'not known'")
    return math.nan if value in reading.missing else value


def _label(cell: str, reading: Reading, where: str) -> str:
    label = _canonical(cell)
    if not label or label in reading.missing or _number(label) in reading.missing:
        raise DataError(f"{where}: the label is missing")
    return label


def _canonical(label: str) -> str:
    """A label as text, the same for 1 and 1.0: sites write numbers in their own ways."""
    label = label.strip()
    number = _number(label)
    if number is None:
        return label
    return str(int(number)) if number.is_integer() else repr(number)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    # Python also reads "1_0", "inf" and "nan": in a CSV file these are more likely slips than numbers.
    return number if math.isfinite(number) and "_" not in text else None


def _markers(missing: Iterable[str]) -> frozenset[str | float]:
    """Missing markers as text and, where they are numbers, by value: -9 also means -9.0."""
    texts = {marker.strip() for marker in missing}
    numbers = {number for text in texts if (number := _number(text)) is not None}
    return frozenset(texts | numbers)


def heart_disease(data_dir: Path | str) -> Dataset:
    """UCI heart disease: four hospitals, each a site; any degree of disease (num > 0) against none."""
    folder = Path(data_dir) / "heart-disease"
    for site in ("cleveland", "hungarian", "switzerland", "va"):
        needed(folder / f"{site}.csv")
    return csv_sites(folder, "num", missing=("-9",), threshold=0, classes=("no disease", "disease"))
