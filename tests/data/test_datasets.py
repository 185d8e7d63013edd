"""Built-in datasets from small files in their layouts, and what their corrupt versions lead to."""

import gzip
import pickle
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from fedforget.data import datasets
from fedforget.data.datasets import BUILT_IN, available, celeba, cifar10, digits, fashion_mnist, load, mnist
from fedforget.errors import DataError
from fedforget.types import Dataset, Preprocessing, Samples

RANDOM = np.random.default_rng(0)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def packed(raw):
    return gzip.compress(raw, mtime=0)


def write_mnist(folder, *, pack=True):
    folder.mkdir(parents=True)
    arrays = {}
    for split, count in (("train", 30), ("t10k", 10)):
        arrays[split] = RANDOM.integers(0, 256, (count, 28, 28), dtype=np.uint8), np.arange(count, dtype=np.uint8) % 10
        for part, array in zip(("images-idx3", "labels-idx1"), arrays[split], strict=True):
            path = folder / f"{split}-{part}-ubyte"
            if pack:
                path.with_suffix(".gz").write_bytes(packed(idx(array)))
            else:
                path.write_bytes(idx(array))
    return arrays


def assert_one_line(caught, *parts):
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert str(part) in text


def test_digits_hold_out_every_fifth_row():
    from sklearn.datasets import load_digits

    dataset = digits()
    bunch = load_digits()
    assert dataset.pool.x.shape == (1437, 1, 8, 8)
    assert dataset.test.x.shape == (360, 1, 8, 8)
    assert dataset.pool.x.dtype == torch.uint8
    assert int(dataset.pool.x.max()) == 16
    assert dataset.test.x[:, 0].tolist() == bunch.images[::5].tolist()
    assert dataset.test.y.tolist() == bunch.target[::5].tolist()
    assert dataset.pool.x[3, 0].tolist() == bunch.images[4].tolist()
    assert dataset.pool.ids == tuple(range(1437))
    assert dataset.preprocessing == Preprocessing("scale", shift=8, scale=8)
    assert len(dataset.classes) == 10


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(("function", "folder"), [(mnist, "mnist"), (fashion_mnist, "fashion-mnist")])
def test_idx_files(tmp_path, function, folder, pack):
    arrays = write_mnist(tmp_path / folder, pack=pack)
    dataset = function(tmp_path)
    assert dataset.name == folder
    for samples, split in ((dataset.pool, "train"), (dataset.test, "t10k")):
        assert samples.x.dtype == torch.uint8
        assert torch.equal(samples.x[:, 0], torch.from_numpy(arrays[split][0]))
        assert samples.y.tolist() == arrays[split][1].tolist()
        assert samples.y.dtype == torch.int64
    assert dataset.preprocessing == Preprocessing("scale", shift=32, scale=80)
    assert len(dataset.classes) == 10
    dataset.pool.x.zero_()  # in memory of its own


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train-images-idx3-ubyte.gz", b"not gzip"),
        ("train-images-idx3-ubyte.gz", packed(idx(np.zeros((30, 28, 28), np.uint8)))[:-12]),
        ("train-images-idx3-ubyte.gz", packed(idx(np.zeros((30, 28, 28), np.uint8)))[:10] + b"\xff" * 40),
        ("train-images-idx3-ubyte.gz", packed(idx(np.zeros((30, 28, 28), np.uint8))[:-1])),
        ("train-images-idx3-ubyte.gz", packed(idx(np.zeros((30, 28), np.uint8)))),
        ("train-images-idx3-ubyte.gz", packed(b"\0\0\x08\x03\0")),
        ("train-images-idx3-ubyte.gz", packed(b"")),
        ("train-images-idx3-ubyte.gz", packed(b"\0\0\x0d" + idx(np.zeros((30, 28, 28), np.uint8))[3:])),
        ("train-labels-idx1-ubyte.gz", packed(idx(np.zeros(29, np.uint8)))),
        ("train-labels-idx1-ubyte.gz", packed(idx(np.full(30, 10, np.uint8)))),
        ("t10k-labels-idx1-ubyte.gz", packed(idx(np.zeros(11, np.uint8)))),
    ],
    ids=range(11),
)
def test_corrupt_idx_files_are_named(tmp_path, name, content):
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load("mnist", tmp_path)
    assert_one_line(caught, tmp_path / "mnist" / name)


def python_2_pickle(pixels, labels):
    """A batch as the original files have it: protocol 2, byte strings, numpy's modules of that time."""

    def text(raw):
        return b"T" + struct.pack("<I", len(raw)) + raw

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85"
        + text(b"b")
        + b"tR(K\x01"
        + b"J"
        + struct.pack("<i", pixels.shape[0])
        + b"J"
        + struct.pack("<i", pixels.shape[1])
        + b"\x86cnumpy\ndtype\n("
        + text(b"u1")
        + b"K\x00K\x01tR(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + text(pixels.tobytes())
        + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def protocol(number):
    return lambda pixels, labels: pickle.dumps({b"data": pixels, b"labels": labels, b"batch_label": b"x"}, number)


def write_cifar10(folder, pickled):
    folder.mkdir()
    batches = []
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        pixels = RANDOM.integers(0, 256, (4, 3072), dtype=np.uint8)
        labels = RANDOM.integers(0, 10, 4).tolist()
        batches.append((pixels, labels))
        (folder / name).write_bytes(pickled(pixels, labels))
    return batches


@pytest.mark.parametrize("pickled", [python_2_pickle, protocol(3), protocol(4), protocol(5)])
def test_cifar10_batches_of_any_age(tmp_path, pickled):
    batches = write_cifar10(tmp_path / "cifar-10-batches-py", pickled)
    dataset = cifar10(tmp_path)
    assert dataset.pool.x.shape == (20, 3, 32, 32)
    assert dataset.pool.x.dtype == torch.uint8
    assert dataset.test.x.flatten(1).tolist() == batches[5][0].tolist()
    assert dataset.pool.x[4:8].flatten(1).tolist() == batches[1][0].tolist()
    assert dataset.pool.y.tolist() == [label for _, labels in batches[:5] for label in labels]
    assert dataset.classes[9] == "truck"


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_cannot_run_code(tmp_path):
    write_cifar10(tmp_path / "cifar-10-batches-py", protocol(4))
    for payload in (
        pickle.dumps(Touch(tmp_path / "ran")),
        b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.",
        b"cnumpy.f2py.crackfortran\nmyeval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
    ):
        (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(payload)
        with pytest.raises(DataError, match="neither an array nor a list") as caught:
            cifar10(tmp_path)
        assert_one_line(caught, "data_batch_3")
    assert not (tmp_path / "ran").exists()


GOOD = np.zeros((4, 3072), np.uint8)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        protocol(4)(GOOD, [0] * 4)[:-2000],
        protocol(4)(GOOD, [0] * 3),
        protocol(4)(GOOD, [0, 1, 2, 10]),
        protocol(4)(GOOD, [0, 1, 2, -1]),
        protocol(4)(GOOD, ["a"] * 4),
        protocol(4)(GOOD[:, :3000], [0] * 4),
        protocol(4)(GOOD.astype(np.float32), [0] * 4),
        protocol(4)(GOOD[:0], []),
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": GOOD}),
        pickle.dumps({b"data": b"bytes", b"labels": [0] * 4}),
    ],
    ids=range(13),
)
def test_corrupt_cifar10_batches_are_named(tmp_path, content):
    write_cifar10(tmp_path / "cifar-10-batches-py", protocol(4))
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(content)
    with pytest.raises(DataError) as caught:
        cifar10(tmp_path)
    assert_one_line(caught, tmp_path / "cifar-10-batches-py" / "test_batch")


PARTITION = (0, 1, 2, 0, 0, 2)
MALE = (1, -1, 1, -1, 1, -1)


@pytest.fixture
def faces(tmp_path):
    folder = tmp_path / "celeba"
    (folder / "img_align_celeba").mkdir(parents=True)
    names = [f"{number:06}.jpg" for number in range(1, 7)]
    for number, name in enumerate(names):
        pixels = np.full((218, 178, 3), 40 * number, np.uint8)
        pixels[:15] = pixels[-15:] = 255  # outside the centre square
        Image.fromarray(pixels).save(folder / "img_align_celeba" / name, quality=95)
    rows = "".join(f"{name}  1 {male:2}\n" for name, male in zip(names, MALE, strict=True))
    (folder / "list_attr_celeba.txt").write_text(f"6\nYoung Male \n{rows}")
    (folder / "list_eval_partition.txt").write_text(
        "".join(f"{name} {part}\n" for name, part in zip(names, PARTITION, strict=True))
    )
    return folder


@pytest.mark.parametrize(("size", "grey", "channels"), [(28, True, 1), (64, False, 3)])
def test_celeba_faces(faces, size, grey, channels):
    dataset = celeba(faces.parent, size, grey)
    assert dataset.pool.x.shape == (3, channels, size, size)
    assert dataset.test.x.shape == (3, channels, size, size)
    assert dataset.pool.y.tolist() == [1, 0, 1]
    assert dataset.test.y.tolist() == [0, 1, 0]
    assert dataset.classes == ("female", "male")
    for samples, numbers in ((dataset.pool, (0, 3, 4)), (dataset.test, (1, 2, 5))):
        for x, number in zip(samples.x, numbers, strict=True):
            assert (x.int() - 40 * number).abs().max() <= 4


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("list_attr_celeba.txt", "6\n", "7\n", "line 1"),
        ("list_attr_celeba.txt", "Male", "Female", "Male"),
        ("list_attr_celeba.txt", "000002.jpg  1 -1", "000002.jpg  1  0", "line 4"),
        ("list_attr_celeba.txt", "000002.jpg  1 -1", "000002.jpg -1", "line 4"),
        ("list_attr_celeba.txt", "000002", "000001", "line 4"),
        ("list_eval_partition.txt", "000003.jpg 2", "000003.jpg 3", "line 3"),
        ("list_eval_partition.txt", "000003.jpg", "000009.jpg", "000003.jpg"),
        ("list_eval_partition.txt", "2", "0", "only one"),
    ],
)
def test_corrupt_celeba_lists_are_named(faces, file, old, new, said):
    text = (faces / file).read_text()
    assert old in text
    (faces / file).write_text(text.replace(old, new))
    with pytest.raises(DataError) as caught:
        load("celeba", faces.parent)
    assert_one_line(caught, file, said)


def test_celeba_with_only_training_images(faces):
    text = (faces / "list_eval_partition.txt").read_text()
    (faces / "list_eval_partition.txt").write_text(re.sub(r" \d\n", " 0\n", text))
    with pytest.raises(DataError, match=r"list_eval_partition\.txt: one of training and test part is empty"):
        celeba(faces.parent)


@pytest.mark.parametrize("content", [None, b"", b"no image", b"cut"])
def test_corrupt_celeba_images_are_named(faces, content):
    path = faces / "img_align_celeba" / "000004.jpg"
    raw = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(raw[: len(raw) // 2] if content == b"cut" else content)
    with pytest.raises(DataError) as caught:
        celeba(faces.parent)
    assert_one_line(caught, path)


def test_load_and_available_look_in_the_named_folder_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDFORGET_DATA", raising=False)
    assert available() == {name: name == "digits" for name in BUILT_IN}
    assert load("digits").name == "digits"
    write_mnist(tmp_path / "mnist")
    assert available(tmp_path)["mnist"]
    assert not available(tmp_path)["fashion-mnist"]
    monkeypatch.setenv("FEDFORGET_DATA", str(tmp_path))
    assert available()["mnist"]
    assert len(load("mnist").pool) == 30
    write_mnist(tmp_path / "elsewhere" / "mnist", pack=False)
    assert available(tmp_path / "elsewhere")["mnist"]
    monkeypatch.setenv("FEDFORGET_DATA", str(tmp_path / "nowhere"))
    assert available(tmp_path)["mnist"]  # a named folder goes before the environment
    assert not available()["mnist"]


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "digits"])
def test_missing_files_are_said_with_the_way_to_name_them(tmp_path, monkeypatch, name):
    monkeypatch.delenv("FEDFORGET_DATA", raising=False)
    for data_dir in (None, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError) as caught:
            load(name, data_dir)
        assert_one_line(caught, name, BUILT_IN[name].files[0], "--data-dir", "FEDFORGET_DATA", data_dir or "")
    with pytest.raises(DataError) as caught:
        BUILT_IN[name].make(tmp_path)
    assert_one_line(caught, tmp_path, "--data-dir")


def test_one_missing_file_of_many_is_named(tmp_path):
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert not available(tmp_path)["mnist"]
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte"):
        load("mnist", tmp_path)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(DataError, match=r"'minst'.*mnist, fashion-mnist.*package\.module:callable"):
        load("minst")


def own_dataset():
    return Dataset("own", ("a", "b"), pool=Samples((5, 6), torch.zeros(2, 3), torch.tensor([0, 1])))


def own_torch_dataset():
    return TensorDataset(torch.zeros(4, 3), torch.tensor([0, 1, 1, 0]))


def not_a_dataset():
    return [1, 2]


def test_a_users_own_function():
    assert load(f"{__name__}:own_dataset").pool.ids == (5, 6)
    dataset = load(f"{__name__}:own_torch_dataset")
    assert dataset.name == f"{__name__}:own_torch_dataset"
    assert dataset.pool.y.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:function", "no_such_module"),
        (":function", "cannot be imported"),
        (f"{__name__}:no_such_function", "no function 'no_such_function'"),
        (f"{__name__}:RANDOM", "no function 'RANDOM'"),
        (f"{__name__}:not_a_dataset", "returned a list"),
    ],
)
def test_a_users_function_that_does_not_work(name, said):
    with pytest.raises(DataError) as caught:
        load(name)
    assert_one_line(caught, said)


def test_every_public_name_is_there():
    assert all(getattr(datasets, name) is not None for name in datasets.__all__)


def test_the_manual_has_a_heading_for_every_dataset():
    manual = Path(__file__).parents[2] / "docs" / "data.md"
    headings = re.findall(r"^#+ `?([\w-]+)`?$", manual.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for name, built_in in BUILT_IN.items():
        assert name in headings
        assert built_in.description
        assert all(file in built_in.layout for file in built_in.files)
