"""Datasets of torch and of Hugging Face as ours."""

import sys

import datasets as hub
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from fedforget.data.datasets import from_hub, from_torch
from fedforget.errors import DataError
from fedforget.types import Preprocessing


class Pairs(TorchDataset):
    def __init__(self, *pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, position):
        return self.pairs[position]


def assert_refused(call, *parts):
    with pytest.raises(DataError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_tensors():
    x, y = torch.randn(6, 2, 3), torch.tensor([0, 1, 2, 2, 1, 0])
    dataset = from_torch(TensorDataset(x, y), name="mine", test=TensorDataset(x[:2], y[:2]))
    assert dataset.name == "mine"
    assert dataset.pool.ids == tuple(range(6))
    assert torch.equal(dataset.pool.x, x)
    assert dataset.pool.x.dtype == torch.float32
    assert dataset.pool.y.tolist() == y.tolist()
    assert dataset.test.y.tolist() == [0, 1]
    assert dataset.classes == ("0", "1", "2")
    assert dataset.preprocessing == Preprocessing()
    dataset.pool.x.zero_()
    assert x.abs().sum() > 0  # a copy


@pytest.mark.parametrize("label", [1, True, np.int64(1), np.array(1), torch.tensor(1), torch.tensor([1])])
def test_whole_numbers_of_any_library_are_labels(label):
    assert from_torch(Pairs(([1.0], 0), ([2.0], label))).pool.y.tolist() == [0, 1]


def test_arrays_lists_and_images():
    grey = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    colour = Image.fromarray(np.arange(36, dtype=np.uint8).reshape(3, 4, 3))
    read_only = np.arange(3, dtype=np.int16)
    read_only.flags.writeable = False
    assert from_torch(Pairs((read_only, 0))).pool.x.tolist() == [[0, 1, 2]]
    mixed = from_torch(Pairs(([1, 2], 0), ((0.5, 2), 1))).pool.x
    assert mixed.tolist() == [[1.0, 2.0], [0.5, 2.0]]
    dataset = from_torch(Pairs((grey, 0)))
    assert dataset.pool.x.shape == (1, 1, 3, 4)
    assert dataset.pool.x.flatten().tolist() == list(range(12))
    assert dataset.preprocessing == Preprocessing("scale", shift=127.5, scale=127.5)
    colours = from_torch(Pairs((colour, 0))).pool.x
    assert colours.shape == (1, 3, 3, 4)
    assert colours[0, 1, 2, 3] == 34
    palette = from_torch(Pairs((colour.convert("P"), 0))).pool.x
    assert palette.shape == (1, 3, 3, 4)


def test_classes_are_the_labels_present_or_those_given():
    pairs = Pairs(([1.0], 7), ([2.0], -3), ([3.0], 7))
    dataset = from_torch(pairs)
    assert dataset.classes == ("-3", "7")
    assert dataset.pool.y.tolist() == [1, 0, 1]
    given = from_torch(Pairs(([1.0], 2), ([1.0], 0)), classes=["a", "b", "c"])
    assert given.classes == ("a", "b", "c")
    assert given.pool.y.tolist() == [2, 0]
    assert from_torch(pairs, test=Pairs(([1.0], 9))).classes == ("-3", "7", "9")


class Stream(IterableDataset):
    def __iter__(self):
        yield [1.0], 0


class NoLength(TorchDataset):
    def __getitem__(self, position):
        return [1.0], 0


@pytest.mark.parametrize(
    ("dataset", "parts"),
    [
        (Stream(), ("IterableDataset",)),
        (NoLength(), ("__len__",)),
        (Pairs(), ("no sample",)),
        (Pairs(([1.0], 0), ([1.0, 2.0], 0)), ("sample 1", "(2,)", "(1,)")),
        (Pairs(([1.0], 0.5)), ("sample 0", "0.5", "whole number")),
        (Pairs(([1.0], torch.tensor(1.0))), ("whole number",)),
        (Pairs(([1.0], torch.tensor([1, 2]))), ("whole number",)),
        (Pairs(([1.0], "cat")), ("'cat'",)),
        (Pairs(([1.0], None)), ("None",)),
        (Pairs([1.0]), ("not a pair",)),
        (Pairs({"x": 1}), ("not a pair",)),
        (Pairs(("text", 0)), ("no tensor",)),
        (Pairs((["text"], 0)), ("no tensor",)),
        (Pairs(([[1], [1, 2]], 0)), ("no tensor",)),
        (Pairs((3.5, 0)), ("no tensor",)),
        (Pairs((np.float64(3.5), 0)), ("no tensor",)),
        (Pairs((torch.tensor(3.5), 0)), ("single number",)),
    ],
)
def test_torch_datasets_that_cannot_be_used(dataset, parts):
    assert_refused(lambda: from_torch(dataset, name="mine"), "mine", *parts)


def test_a_label_outside_the_given_classes():
    assert_refused(lambda: from_torch(Pairs(([1.0], 2)), classes=["a", "b"]), "sample 0", "label 2", "2 classes")


def images(count, name="image"):
    pixels = [np.full((4, 5), number, np.uint8) for number in range(count)]
    features = hub.Features(
        {name: hub.Image(), "label": hub.ClassLabel(names=["cat", "dog"]), "note": hub.Value("string")}
    )
    rows = {name: [Image.fromarray(array) for array in pixels], "label": [1, 0] * (count // 2), "note": ["x"] * count}
    return hub.Dataset.from_dict(rows, features=features)


def table(count=4):
    return hub.Dataset.from_dict(
        {"age": [30, 40, None, 60][:count], "dose": [0.5] * count, "outcome": ["ill", "well", "ill", "ill"][:count]}
    )


def test_hub_images_with_guessed_columns():
    dataset = from_hub(images(4))
    assert dataset.pool.x.shape == (4, 1, 4, 5)
    assert dataset.pool.x.dtype == torch.uint8
    assert dataset.pool.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert dataset.pool.y.tolist() == [1, 0, 1, 0]
    assert dataset.classes == ("cat", "dog")
    assert dataset.preprocessing.kind == "scale"
    assert dataset.test is None
    assert from_hub(images(2, "picture")).pool.x.shape == (2, 1, 4, 5)


def test_hub_splits():
    splits = hub.DatasetDict({"train": images(4), "test": images(2), "validation": images(2)})
    assert [len(part) for part in (from_hub(splits).pool, from_hub(splits).test)] == [4, 2]
    assert from_hub(splits, test_split=None).test is None
    other = from_hub(splits, split="test", test_split="validation")
    assert [len(part) for part in (other.pool, other.test)] == [2, 2]
    assert from_hub(hub.DatasetDict({"train": images(2)})).test is None
    assert_refused(lambda: from_hub(splits, split="training"), "'training'", "train, test, validation")
    assert_refused(lambda: from_hub(splits, test_split="holdout"), "'holdout'")
    assert_refused(lambda: from_hub(hub.DatasetDict({"a": images(2)})), "'train'")


def test_hub_folders(tmp_path):
    hub.DatasetDict({"train": images(4), "test": images(2)}).save_to_disk(tmp_path / "pets")
    dataset = from_hub(tmp_path / "pets")
    assert dataset.name == "pets"
    assert len(dataset.pool) == 4
    assert len(dataset.test) == 2
    images(2).save_to_disk(tmp_path / "one")
    assert len(from_hub(str(tmp_path / "one")).pool) == 2
    (tmp_path / "one" / "state.json").write_text("{")
    assert_refused(lambda: from_hub(tmp_path / "one"), str(tmp_path / "one"), "cannot be loaded")


def test_hub_tables():
    dataset = from_hub(table(), input_column=["age", "dose"], label_column="outcome")
    assert dataset.pool.x.shape == (4, 2)
    assert torch.isnan(dataset.pool.x).nonzero().tolist() == [[2, 0]]
    assert dataset.classes == ("ill", "well")
    assert dataset.pool.y.tolist() == [0, 1, 0, 0]
    assert dataset.preprocessing == Preprocessing("standardize")


def test_hub_vectors_and_formats():
    vectors = hub.Dataset.from_dict({"input": [[1.0, 2.0], [3.0, 4.0]], "labels": [0, 5]})
    for dataset in (vectors, vectors.with_format("torch"), vectors.with_format("numpy")):
        ours = from_hub(dataset, input_column="input")
        assert ours.pool.x.tolist() == [[1.0, 2.0], [3.0, 4.0]]
        assert ours.classes == ("0", "5")
        assert ours.preprocessing == Preprocessing()


def test_hub_datasets_that_cannot_be_used():
    assert_refused(lambda: from_hub(table()), "input_column", "age, dose, outcome")
    assert_refused(lambda: from_hub(table(), input_column=["age"]), "label_column")
    assert_refused(lambda: from_hub(table(), input_column=["agee"], label_column="outcome"), "'agee'", "age, dose")
    assert_refused(lambda: from_hub(images(2), label_column="labell"), "'labell'")
    assert_refused(lambda: from_hub(table(), input_column="dose", label_column="outcome"), "sample 0", "no tensor")
    assert_refused(lambda: from_hub(table(), input_column=["outcome"], label_column="age"), "row 0", "numbers only")
    assert_refused(lambda: from_hub(table(), input_column=["dose"], label_column="age"), "row 2", "None")
    assert_refused(lambda: from_hub(images(2).to_iterable_dataset()), "IterableDataset", "streaming")
    unlabelled = images(2).remove_columns("label").add_column("label", [-1, -1]).cast(images(2).features)
    assert_refused(lambda: from_hub(hub.DatasetDict({"train": images(2), "test": unlabelled})), "hub (test)", "-1")


def test_without_the_extra_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert_refused(lambda: from_hub("name"), "pip install 'fedforget[hub]'")
