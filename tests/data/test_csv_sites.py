"""CSV sites: what is read, what is refused, and what a deletion leaves in the file."""

import math
import os
import stat

import pytest
import torch

from fedforget.data import csv_sites as csv_sites_module
from fedforget.data.datasets import CsvSource, ErasableCsvSource, csv_sites, heart_disease
from fedforget.errors import DataError
from fedforget.types import PhysicalDeletion, Preprocessing

NORTH = "patient,age,dose,outcome\np1,61,0.5,1\np2,?,-9,0\np3,47,,2\n"
SOUTH = "outcome,patient,dose,age\n1.0,s1,3,70\n0,s2,-9.0,55\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "north.csv").write_text(NORTH)
    (tmp_path / "south.csv").write_text(SOUTH)
    (tmp_path / ".hidden.csv").write_text("x")
    (tmp_path / "readme.txt").write_text("not a site")
    return tmp_path


def open_sites(folder, **options):
    return csv_sites(folder, "outcome", **{"id_column": "patient", "missing": ("?", "-9"), **options})


def rows(source):
    return [(sample_id, x.tolist(), y) for sample_id, x, y in source]


def same(left, right):
    return repr(left) == repr(right)  # as NaN is not equal to itself


def assert_refused(*parts, **options):
    with pytest.raises(DataError) as caught:
        open_sites(**options)
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert str(part) in text


def test_sites_features_ids_missing_values_and_classes(folder):
    dataset = open_sites(folder)
    nan = math.nan
    assert list(dataset.sites) == ["north", "south"]
    assert same(rows(dataset.sites["north"]), [("p1", [61.0, 0.5], 1), ("p2", [nan, nan], 0), ("p3", [47.0, nan], 2)])
    # The columns of another site may stand in another order, and numbers be written in another way.
    assert same(rows(dataset.sites["south"]), [("s1", [70.0, 3.0], 1), ("s2", [55.0, nan], 0)])
    assert dataset.classes == ("0", "1", "2")
    assert dataset.preprocessing == Preprocessing("standardize")
    assert dataset.pool is None
    assert dataset.test is None
    _, x, y = next(iter(dataset.sites["north"]))
    assert x.dtype == torch.float64
    assert type(y) is int


def test_without_an_id_column_the_id_is_the_row_number(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n\n1,yes\n2,no\n\n3,yes\n")
    dataset = csv_sites(tmp_path, "y")
    assert rows(dataset.sites["a"]) == [(0, [1.0], 1), (1, [2.0], 0), (2, [3.0], 1)]
    assert dataset.classes == ("no", "yes")


def test_a_threshold_makes_two_classes(folder):
    dataset = open_sites(folder, threshold=0)
    assert dataset.classes == ("outcome <= 0", "outcome > 0")
    assert [y for _, _, y in dataset.sites["north"]] == [1, 0, 1]
    assert open_sites(folder, threshold=1.5, classes=("few", "many")).classes == ("few", "many")


def test_given_classes_stay_when_a_deletion_takes_the_last_of_one(folder):
    dataset = open_sites(folder, classes=("2", "1", "0"), erase=True)
    assert [y for _, _, y in dataset.sites["north"]] == [1, 2, 0]
    dataset.sites["north"].delete(["p3"])
    again = open_sites(folder, classes=("2", "1", "0"), erase=True)
    assert again.classes == ("2", "1", "0")
    assert [y for _, _, y in again.sites["north"]] == [1, 2]


def test_labels_that_are_numbers_are_sorted_by_value(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,10\n1,9\n1,0.5\n")
    assert csv_sites(tmp_path, "y").classes == ("0.5", "9", "10")


def test_byte_order_mark_quotes_crlf_and_line_breaks_in_cells(tmp_path):
    (tmp_path / "a.csv").write_bytes(
        b'\xef\xbb\xbfid,x,y\r\n"a,b",1,no\r\n"two\r\nlines", 2 ,yes\r\nc,3,"n""o"\r\nd,bad,no\r\n'
    )
    with pytest.raises(DataError, match=r"a\.csv, line 6, column 'x': 'bad'"):
        csv_sites(tmp_path, "y", id_column="id")
    raw = (tmp_path / "a.csv").read_bytes()
    (tmp_path / "a.csv").write_bytes(raw.replace(b"bad", b"4"))
    source = csv_sites(tmp_path, "y", id_column="id").sites["a"]
    assert rows(source) == [("a,b", [1.0], 1), ("two\r\nlines", [2.0], 2), ("c", [3.0], 0), ("d", [4.0], 1)]


def test_only_an_erasing_source_says_that_it_can_delete(folder):
    assert not isinstance(open_sites(folder).sites["north"], PhysicalDeletion)
    assert isinstance(open_sites(folder).sites["north"], CsvSource)
    assert isinstance(open_sites(folder, erase=True).sites["north"], PhysicalDeletion)
    assert isinstance(open_sites(folder, erase=True).sites["north"], ErasableCsvSource)


def test_erasing_by_row_number_is_refused(folder):
    assert_refused("id_column", "row number", folder=folder, id_column=None, erase=True)


def test_a_deletion_leaves_all_other_bytes_and_the_mode(tmp_path):
    path = tmp_path / "a.csv"
    kept = [b"\xef\xbb\xbfid,x,y\r\n", b'"k1", 1.00,a\r\n', b"\n", b'k2,"2",b\n', b"7,3,b"]
    gone = [b'"g\n1",4,a\n', b" g2 ,5,b\r\n"]
    path.write_bytes(b"".join([kept[0], gone[0], kept[1], kept[2], gone[1], kept[3], kept[4]]))
    path.chmod(0o640)
    source = csv_sites(tmp_path, "y", id_column="id", erase=True).sites["a"]
    source.delete(["g\n1", "g2", "never there"])
    assert path.read_bytes() == b"".join(kept)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [sample_id for sample_id, _, _ in source] == ["k1", "k2", "7"]
    assert os.listdir(tmp_path) == ["a.csv"]  # noqa: PTH208 - hidden files count
    source.delete([7])
    assert path.read_bytes() == b"".join(kept[:-1])
    source.delete({"k1", "k2"})
    assert path.read_bytes() == kept[0] + kept[2]
    assert list(source) == []


def test_a_deletion_of_nothing_leaves_the_file_alone(folder):
    source = open_sites(folder, erase=True).sites["north"]
    before = (folder / "north.csv").stat()
    source.delete(["s1", "unknown"])
    assert (folder / "north.csv").stat() == before


def test_behind_a_link_the_file_itself_is_rewritten(folder, tmp_path_factory):
    real = tmp_path_factory.mktemp("real") / "data.csv"
    (folder / "north.csv").rename(real)
    (folder / "north.csv").symlink_to(real)
    open_sites(folder, erase=True).sites["north"].delete(["p2"])
    assert "p2" not in real.read_text()
    assert (folder / "north.csv").is_symlink()


def test_a_crash_while_deleting_leaves_the_file_and_the_next_deletion_cleans_up(folder, monkeypatch):
    source = open_sites(folder, erase=True).sites["north"]
    (folder / ".north.csv.abc.new").write_text("what a crash left: p1, p2")

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedforget.data.files.os.fsync", fail)
    with pytest.raises(DataError, match=r"north\.csv cannot be rewritten.*No space left"):
        source.delete(["p1"])
    assert (folder / "north.csv").read_text() == NORTH
    monkeypatch.undo()
    source.delete(["p1"])
    assert not list(folder.glob(".north.csv.*"))
    assert "p1" not in (folder / "north.csv").read_text()


def test_a_file_that_changes_meanwhile_is_not_overwritten(folder, monkeypatch):
    source = open_sites(folder, erase=True).sites["north"]
    read = csv_sites_module._rows

    def appended_to(path, id_column=None):
        for row in read(path, id_column):
            if row.id == "p3":
                with path.open("a") as file:
                    file.write("p4,1,1,1\n")
            yield row

    monkeypatch.setattr(csv_sites_module, "_rows", appended_to)
    with pytest.raises(DataError, match="was changed"):
        csv_sites_module.replace_file(
            folder / "north.csv", csv_sites_module._remaining(folder / "north.csv", "patient", {"p1"}), 0o600
        )
    monkeypatch.undo()
    assert (folder / "north.csv").read_text() == NORTH + "p4,1,1,1\n"
    assert not list(folder.glob(".north.csv.*"))
    source.delete(["p1"])
    assert [sample_id for sample_id, _, _ in source] == ["p2", "p3", "p4"]


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("61", "sixty", ("north.csv, line 2", "'age'", "'sixty'")),
        ("61", "inf", ("line 2", "'inf'")),
        ("61", "6_1", ("line 2", "'6_1'")),
        ("61,", "", ("line 2", "3 cells")),
        ("p2,", "p1,", ("line 3", "'p1'", "line 2")),
        ("p2,", ",", ("line 3", "id is empty")),
        (",0\n", ",\n", ("line 3", "label is missing")),
        (",0\n", ",-9\n", ("line 3", "label is missing")),
        ("dose", "age", ("line 1", "name of its own")),
        ("dose", "weight", ("south.csv", "same columns", "dose", "weight")),
        ("outcome", "result", ("north.csv", "'outcome'")),
        ("patient", "person", ("north.csv", "'patient'")),
        ("p1", '"p1', ("north.csv", "line 2")),
        (NORTH, "", ("north.csv", "empty")),
        (NORTH, "\n" + NORTH, ("line 1",)),
    ],
)
def test_bad_files_are_named_with_line_and_column(folder, old, new, parts):
    (folder / "north.csv").write_text(NORTH.replace(old, new, 1))
    assert_refused(*parts, folder=folder)


def test_other_refusals(folder, tmp_path):
    assert_refused("north.csv, line 2", "none of the classes", folder=folder, classes=("0", "2"))
    assert_refused("name two", folder=folder, threshold=0, classes=("a",))
    assert_refused("nowhere", "missing", folder=tmp_path / "nowhere")
    (folder / "south.csv").write_bytes(b"outcome,patient,dose,age\n1,s\xff,3,70\n")
    assert_refused("south.csv, line 2", "UTF-8", folder=folder)
    (folder / "south.csv").write_text("outcome,patient,age\n")
    assert_refused("south.csv", "dose", folder=folder)
    (tmp_path / "empty").mkdir()
    assert_refused("no CSV file", folder=tmp_path / "empty")
    (tmp_path / "empty" / "a.csv").write_text("patient,outcome\n")
    assert_refused("nothing to learn from", folder=tmp_path / "empty")
    (tmp_path / "empty" / "a.csv").write_text("patient,outcome,x\n")
    assert_refused("hold no sample", folder=tmp_path / "empty")


def test_a_label_that_is_no_number_is_refused_with_a_threshold(folder):
    (folder / "north.csv").write_text(NORTH.replace(",0\n", ",no\n"))
    assert_refused("line 3", "'outcome'", "'no'", folder=folder, threshold=0)
    (folder / "north.csv").write_text(NORTH.replace(",0\n", ",\n"))
    assert_refused("line 3", "label is missing", folder=folder, threshold=0)


def test_a_site_without_rows_is_empty(folder):
    (folder / "south.csv").write_text("outcome,patient,dose,age\n")
    assert list(open_sites(folder).sites["south"]) == []


def test_heart_disease(tmp_path):
    folder = tmp_path / "heart-disease"
    folder.mkdir()
    columns = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num"
    for site in ("cleveland", "hungarian", "switzerland", "va"):
        (folder / f"{site}.csv").write_text(
            f"{columns}\n63.0,1,1,145,233,1,2,150,0,2.3,3,0,6.0,0\n28,1,2,130,132,0,2,185,0,.7,-9,-9,-9,3\n"
        )
    dataset = heart_disease(tmp_path)
    assert dataset.name == "heart-disease"
    assert dataset.classes == ("no disease", "disease")
    assert dataset.preprocessing == Preprocessing("standardize")
    assert set(dataset.sites) == {"cleveland", "hungarian", "switzerland", "va"}
    assert dataset.test is None
    (_, _, healthy), (second, x, ill) = dataset.sites["va"]
    assert (healthy, ill, second) == (0, 1, 1)
    assert x.shape == (13,)
    assert torch.isnan(x).nonzero().flatten().tolist() == [10, 11, 12]
    assert not isinstance(dataset.sites["va"], PhysicalDeletion)


def test_a_file_of_any_case_is_a_site_and_none_counts_twice(tmp_path):
    for name in ("north.CSV", "south.csv"):
        (tmp_path / name).write_text("x,y\n1,0\n2,1\n")
    assert sorted(csv_sites(tmp_path, "y").sites) == ["north", "south"]
    (tmp_path / "north.csv").write_text("x,y\n1,0\n")
    with pytest.raises(DataError, match="holds two files of one site"):
        csv_sites(tmp_path, "y")
