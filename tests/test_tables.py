"""Columns from files and frames."""

import csv
import datetime
import gzip
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkin.core import summarise_files
from fedkin.data import Federation, columns_of, infer_column, read_columns, site_id, write_csv
from fedkin.data.columns import _read_large_csv as read_large_csv
from fedkin.errors import DataError, MissingDependencyError, TableWarning


def written(tmp_path, content, name="table.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def same_cells(column, expected):
    return [None if cell != cell else cell for cell in column.tolist()] == expected


@pytest.mark.parametrize(
    ("cells", "dtype", "expected"),
    [
        (["1", "2"], "float64", [1.0, 2.0]),
        (["1.5", "-2e3", "+.5", "3."], "float64", [1.5, -2000.0, 0.5, 3.0]),
        ([" 1 ", "2"], "float64", [1.0, 2.0]),
        (["1", "007"], "O", ["1", "007"]),
        (["1", "two"], "O", ["1", "two"]),
        (["1_000", "2"], "O", ["1_000", "2"]),
        (["٣", "2"], "O", ["٣", "2"]),
        (["1,5", "2"], "O", ["1,5", "2"]),
        (["0x1F", "2"], "O", ["0x1F", "2"]),
        (["a", ""], "O", ["a", None]),
        (["1", "", "NA", "nan", "NaN"], "float64", [1.0, None, None, None, None]),
        (["NA", "ZA"], "O", ["NA", "ZA"]),
        (["True", "False"], "bool", [True, False]),
        (["true", ""], "O", ["true", None]),
        (["9007199254740993", "1"], "O", [9007199254740993, 1]),
    ],
)
def test_inference(cells, dtype, expected):
    column = infer_column(cells)
    assert column.dtype == dtype
    assert same_cells(column, expected)


@given(st.lists(st.floats(allow_nan=False), min_size=1))
def test_floats_survive_their_text(values):
    column = infer_column([repr(value) for value in values])
    assert column.dtype == np.float64
    np.testing.assert_array_equal(column, values)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "byte order mark"])
def test_csv_with_everything(tmp_path, mark):
    text = 'città,x,note\r\n01,1,"a, ""b"""\r\n\r\n東京,,"two\nlines"\r\n'
    columns = read_columns(written(tmp_path, mark + text.encode()))
    assert list(columns) == ["città", "x", "note"]
    assert same_cells(columns["città"], ["01", "東京"])
    assert same_cells(columns["x"], [1.0, None])
    assert same_cells(columns["note"], ['a, "b"', "two\nlines"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: expected a header"),
        (b"\xef\xbb\xbf\n\n", "is empty: expected a header"),
        (b"a,b\n1,2\n3\n", "line 3: 1 cell, but the header has 2"),
        (b"a,b\n1,2\n\n3,4,5\n", "line 4: 3 cells, but the header has 2"),
        (b"a,b,a\n1,2,3\n", "line 1: several columns are called 'a'; rename or remove all but one"),
        (b"a,b\n1,2\n3,\xff\n", "line 3: the byte 0xff is not UTF-8; save the file as UTF-8"),
        ("a,b\n1,2\n".encode("utf-16"), "line 1: the byte 0xff is not UTF-8"),
        (b'a,b\n1,"2\n', "check the quotes"),
    ],
)
def test_bad_csv(tmp_path, content, message):
    path = written(tmp_path, content)
    with pytest.raises(DataError) as caught:
        read_columns(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["absent.csv", "absent.parquet", "folder.csv", "table.xlsx"])
def test_what_is_no_table_is_refused_by_name(tmp_path, name):
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match=name.removeprefix("table")):
        read_columns(tmp_path / name)


@pytest.mark.parametrize("size", [0, 3, 100])
def test_truncated_parquet(tmp_path, size):
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"x": np.arange(1000.0)}), path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"table\.parquet is not a complete Parquet file"):
        read_columns(path)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "table.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r"fedkin\[parquet\]"):
        read_columns(tmp_path / "table.parquet")


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        *((pd.Series([1, None, 3], dtype=kind), [1.0, None, 3.0]) for kind in ("Int64", object, "float32", "category")),
        *((pd.Series(["a", None, "b"], dtype=kind), ["a", None, "b"]) for kind in ("category", "string", object)),
        (pl.Series([1, None]), [1.0, None]),
        (pl.Series(["u", None], dtype=pl.Categorical), ["u", None]),
        (pl.Series(["1.5", "2.5"]).cast(pl.Decimal(10, 2)), [1.5, 2.5]),
        (pl.Series([datetime.date(2020, 1, 1), None]), [datetime.date(2020, 1, 1), None]),
        (pl.Series([1, 255], dtype=pl.UInt8), [1.0, 255.0]),
        (pa.array(["u", "v", None]).dictionary_encode(), ["u", "v", None]),
        (pa.array([1, None, 3]), [1.0, None, 3.0]),
        (pa.array([1, 2, 2**60]), [1, 2, 2**60]),
    ],
)
def test_columns_with_gaps_of_every_make(tmp_path, column, expected):
    make = {pd.Series: pd.DataFrame, pl.Series: pl.DataFrame}.get(type(column), pa.table)
    assert same_cells(columns_of(make({"x": column}))["x"], expected)
    if make is pa.table:
        pq.write_table(make({"x": column}), tmp_path / "table.parquet")
        assert same_cells(read_columns(tmp_path / "table.parquet")["x"], expected)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (np.zeros((3, 2)), "cannot read a table from ndarray"),
        ([1, 2], "cannot read a table from list"),
        ({"a": [1, 2], "b": [1]}, "must have one length"),
        ({"a": "text"}, "column 'a' is a single str"),
        ({"a": np.zeros((2, 2))}, "column 'a': a column must be one-dimensional"),
        ({1: [1.0], "1": [2.0]}, "two columns of the table are called '1'"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "rename one of them"),
        (pa.table([[1], [2]], names=["a", "a"]), "rename one of them"),
    ],
)
def test_bad_frames(frame, message):
    with pytest.raises(DataError, match=message):
        columns_of(frame)


@pytest.mark.parametrize("value", [None, float("nan"), np.float32("nan"), pd.NA, pd.NaT, np.datetime64("NaT")])
def test_missing_ids(value):
    with pytest.raises(DataError, match="a site id is missing"):
        site_id(value)


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Z"]), min_size=1).map(lambda s: "w" + s)


@settings(max_examples=50)
@given(rows=st.lists(st.tuples(WORDS, st.floats(allow_nan=False), WORDS), min_size=1))
def test_csv_round_trip(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    write_csv(path, ["a", "x", "b,;"], rows)
    columns = read_columns(path)
    assert list(zip(*(column.tolist() for column in columns.values()), strict=True)) == rows
    assert list(columns) == ["a", "x", "b,;"]


NASTY = {
    "id": ["007", "12", "", "3"],
    " padded ": [" 1", "2 ", "", "4.5"],
    "big": [str(2**60), str(2**60 + 1), "1", "2"],
    "flag": ["True", "false", "TRUE", "False"],
    "text": ['say "hi"', "a,b", "two\nlines", "NA"],
    "number": ["1e3", "-0.5", "NA", "inf"],
    "plain": ["1", "", "-2.5", "3e-2"],
    "plus": ["+1", "+2", "3", "4"],
    "mixed": ["1", "x", "2", "3"],
    "nothing": ["", "", "", ""],
}


@pytest.mark.parametrize("mark", [",", ";", "|"])
@pytest.mark.parametrize("name", ["table.csv", "table.csv.gz"])
def test_large_files_are_read_as_small_ones(tmp_path, mark, name):
    path = tmp_path / name
    opened = gzip.open if name.endswith(".gz") else open
    with opened(path, "wt", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=mark)
        writer.writerows([list(NASTY), *zip(*NASTY.values(), strict=True)])
    expected, found = read_columns(path), read_large_csv(path)
    assert list(found) == list(expected)
    for name, column in expected.items():
        assert found[name].dtype == column.dtype, name
        assert [repr(cell) for cell in found[name].tolist()] == [repr(cell) for cell in column.tolist()], name


@pytest.mark.parametrize("read", [read_columns, read_large_csv])
def test_decimal_commas(tmp_path, read):
    text = "x;y;z;note\n1,5;1.234,5;2;a,b\n-,25;17;;4.3.2021\n2e3;1.000;1,e2;007\n"
    columns = read(written(tmp_path, text), decimal=",")
    assert same_cells(columns["x"], [1.5, -0.25, 2000.0])
    assert same_cells(columns["y"], [1234.5, 17.0, 1000.0])
    assert same_cells(columns["z"], [2.0, None, 100.0])
    assert same_cells(columns["note"], ["a,b", "4.3.2021", "007"])


def test_a_compressed_file_that_was_cut_off_is_named(tmp_path):
    path = written(tmp_path, gzip.compress(b"x,y\n1,2\n" * 50)[:-12], "cut.csv.gz")
    with pytest.raises(DataError, match=r"cut\.csv\.gz is not a complete gzip file"):
        read_columns(path)
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"x,y\n1,2\n3,4\n"))
    assert Federation.read(tmp_path, target="y").sites == ("cut",)


def test_folders_of_partitions_are_columns(tmp_path):
    numbers = {"x": np.arange(40.0), "y": np.arange(40.0) % 7}
    rows = pa.table({**numbers, "clinic": ["n rd", "s"] * 20, "year": [2020, 2021, 2021, 2020] * 10})
    pq.write_to_dataset(rows, tmp_path / "rows", partition_cols=["clinic", "year"])
    for path in (tmp_path / "rows", tmp_path / "rows" / "**" / "*.parquet"):
        fed = Federation.read(path, site="clinic", target="y")
        assert fed.sites == ("n rd", "s") and fed.feature_names == ("x", "year")
        assert fed.X[np.argsort(fed.X[:, 0]), 1].tolist() == rows["year"].to_pylist()
        streamed = summarise_files(path, site="clinic", target="y")
        assert streamed.summaries.n_samples.tolist() == [20, 20] and streamed.schema.names == ("x", "year")
    pq.write_to_dataset(rows.drop_columns("year"), tmp_path / "sites", partition_cols=["clinic"])
    assert Federation.read(tmp_path / "sites", target="y").sites == ("n rd", "s")  # one key is the site
    (tmp_path / "sites" / "year=2020").mkdir()
    pq.write_table(rows, tmp_path / "sites" / "year=2020" / "a.parquet")
    with pytest.raises(DataError, match="its folders name 'year', but others name 'clinic'"):
        Federation.read(tmp_path / "sites", target="y")


# --- Excel ----------------------------------------------------------------------------------------------------


def sheets(monkeypatch, *tables):
    """Stand in for openpyxl, with these rows in the sheets of every file."""

    def load_workbook(path, *, read_only, data_only):
        assert read_only and data_only
        if not path.read(1):
            raise zipfile.BadZipFile("File is not a zip file")
        pages = [
            SimpleNamespace(title=f"Sheet{k}", iter_rows=lambda values_only, rows=rows: iter(rows))
            for k, rows in enumerate(tables, 1)
        ]
        return SimpleNamespace(worksheets=pages, close=lambda: None)

    monkeypatch.setitem(sys.modules, "openpyxl", SimpleNamespace(load_workbook=load_workbook))


def test_a_sheet_of_excel_is_a_table(tmp_path, monkeypatch):
    rows = [("site", " age ", "ward", None), ("a", 50, "A", None), ("b", None, "", None), (None, None, None, None)]
    sheets(monkeypatch, rows, [("notes",)])
    path = written(tmp_path, "PK", "table.xlsx")
    with pytest.warns(TableWarning, match=r"table\.xlsx has 2 sheets; only the first one, 'Sheet1', is read"):
        columns = read_columns(path)
    assert list(columns) == ["site", "age", "ward"]
    assert columns["age"].dtype == np.float64 and same_cells(columns["age"], [50.0, None])
    assert columns["ward"].tolist() == ["A", None]


@pytest.mark.parametrize(
    ("content", "rows", "message"),
    [
        ("", [], "is not a complete Excel file"),
        ("PK", [(None,)], "is empty: expected a row of names"),
        ("PK", [("a", "a"), (1, 2)], "several columns are called 'a'"),
    ],
)
def test_bad_sheets_are_refused_by_name(tmp_path, monkeypatch, content, rows, message):
    sheets(monkeypatch, rows)
    with pytest.raises(DataError, match=rf"table\.xlsx.*{message}"):
        read_columns(written(tmp_path, content, "table.xlsx"))


def test_cells_of_a_sheet_are_named_by_row(tmp_path, monkeypatch):
    rows = [("site", "x", "y"), *(("ab"[k % 2], k * 1.5, k * 2.0) for k in range(40))]
    rows[4] = ("a", "?", 3.0)
    sheets(monkeypatch, rows)
    with pytest.raises(DataError, match=r"table\.xlsx.*'\?' in row 5"):
        Federation.read(written(tmp_path, "PK", "table.xlsx"), site="site", target="y")


def test_excel_without_openpyxl(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fedkin\[excel\]'"):
        read_columns(written(tmp_path, "PK", "table.xlsx"))


def test_a_real_file_of_excel(tmp_path):
    pytest.importorskip("openpyxl")
    table = pd.DataFrame({"site": ["a", "b"], "x": [1.5, np.nan], "ok": [True, False]})
    table.to_excel(tmp_path / "table.xlsx", index=False)
    columns = read_columns(tmp_path / "table.xlsx")
    assert columns["site"].tolist() == ["a", "b"] and same_cells(columns["x"], [1.5, None])
    assert columns["ok"].tolist() == [True, False]
