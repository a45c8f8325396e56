"""Federations from frames and files."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from builders import TABLE
from fedkin.data import Federation
from fedkin.errors import DataError

# --- frames ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dict, pd.DataFrame, pl.DataFrame, pl.LazyFrame, pa.table])
def test_frames_of_every_make(make):
    fed = Federation.from_frame(make(TABLE), site="site", target="score", offset="log_time")
    assert fed.sites == ("n", "s")
    assert fed.feature_names == ("age", "smoker")
    assert fed.target_name == "score"
    assert fed.X.tolist() == [[40.0, 1.0], [60.0, 1.0], [50.0, 0.0]]
    assert fed.y.tolist() == [1.5, 3.5, 2.5]
    assert fed.offset.tolist() == [0.0, 0.2, 0.1]
    assert fed.row_order.tolist() == [0, 2, 1]


def test_chosen_features_come_in_the_order_asked_for():
    fed = Federation.from_frame(TABLE, site="age", target="site", features=["score", "smoker"])
    assert fed.feature_names == ("score", "smoker")
    assert fed.sites == (40, 50, 60)
    assert fed.y.tolist() == ["n", "s", "n"]
    assert Federation.from_frame(TABLE, site="site", target="score", features="age").feature_names == ("age",)
    assert Federation.from_frame(TABLE, site="site", target="score", features=[]).X.shape == (3, 0)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"site": "place"}, "there is no column 'place' for the site; the table has 'site', 'age'"),
        ({}, {"target": "grade"}, "there is no column 'grade' for the target"),
        ({}, {"features": ["height"]}, "there is no column 'height' for the feature"),
        ({}, {"offset": "time"}, "there is no column 'time' for the offset"),
        ({}, {"target": "site"}, "column 'site' cannot be both site and target"),
        ({}, {"features": ["age", "score"]}, "column 'score' cannot be both target and a feature"),
        ({}, {"features": ["age", "age"]}, "feature 'age' is given twice"),
        ({"": [0, 5, 2]}, {}, "a column has no name"),
        ({"site": ["n", None, "n"]}, {}, r"cells are missing: 'site' in 1 \(first in row 1 \(from 0\)\), of 3 rows"),
        ({"site": [1.0, 2.0, np.nan]}, {}, r"'site' in 1 \(first in row 2"),
        ({"age": [1, None, 2]}, {}, r"'age' in 1 \(first in row 1.*missing=\"mean\" fills in the mean"),
        ({"score": [1.0, 2.0, None]}, {}, r"'score' in 1 \(first in row 2.*with missing=\"drop\"$"),
        ({"score": ["u", "v", None]}, {}, r"'score' in 1 \(first in row 2"),
        ({"log_time": ["u", "v", "w"]}, {"offset": "log_time"}, r"log_time: 3 of 3 cells are not numbers.*the offset"),
    ],
)
def test_bad_frames(changes, options, message):
    with pytest.raises(DataError, match=message):
        Federation.from_frame({**TABLE, **changes}, **{"site": "site", "target": "score", **options})


def test_frames_without_features_or_rows():
    with pytest.raises(DataError, match="no column is left for the features besides 'a', 'b'"):
        Federation.from_frame({"a": [1], "b": [2]}, site="a", target="b")
    with pytest.raises(DataError, match="at least one row"):
        Federation.from_frame({"a": [], "b": []}, site="a")


# --- files ----------------------------------------------------------------------------------------------------


def test_directory_with_a_file_per_site(tmp_path):
    (tmp_path / "02.csv").write_text("x,y\n1,2\n3,4\n")
    (tmp_path / "01.csv").write_text("y,x\n6,5\n")  # another order of the columns
    pq.write_table(pa.table({"x": [7.0], "y": [8.0]}), tmp_path / "03.parquet")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden.csv").write_text("not data")
    fed = Federation.read(tmp_path, target="y")
    assert fed.sites == ("01", "02", "03")
    assert fed.feature_names == ("x",)
    assert fed["02"].X.tolist() == [[1.0], [3.0]]
    assert fed["01"].y.tolist() == [6.0]
    assert fed["03"].y.tolist() == [8.0]


def test_directory_with_a_site_column(tmp_path):
    (tmp_path / "monday.csv").write_text("site,x,y,note\nn,1,2,hello\ns,3,4,\n")
    (tmp_path / "tuesday.csv").write_text("site,x,y,note\nn,5,6,\n")
    fed = Federation.read(tmp_path, site="site", target="y", features="x")
    assert fed["n"].X.tolist() == [[1.0], [5.0]]
    assert fed.row_order.tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (
            {"a.csv": "x,y\n1,2\n", "b.csv": "x,z\n1,2\n"},
            {"target": "y"},
            r"b\.csv: there is no column 'y'\n.*there is a column 'z'",
        ),
        ({"a.csv": "x,y\n1,2\n", "b.csv": "x\n1\n"}, {"features": ["y"]}, r"b\.csv: there is no column 'y'"),
        (
            {"a.csv": "x,y\n1,2\n", "b.csv": "x,y\nu,2\n"},
            {"target": "y"},
            r"a\.csv: column 'x' is numeric, but text in b",
        ),
        ({"a.csv": "x,y\n1,2\n", "b.csv": "x,y\n"}, {"target": "y"}, r"b\.csv: site 'b' has no rows"),
        ({"a.csv": "x,y\n1,2\n", "a.tsv": "x,y\n1,2\n"}, {"target": "y"}, "also stands for site 'a'"),
        ({"a.csv": "x,y\n1,2\n", "b.csv": "x,y\n1\n"}, {"target": "y"}, r"b\.csv, line 2: 1 cell"),
        ({"a.json": ""}, {}, "has no file that ends in"),
    ],
)
def test_bad_directories(tmp_path, files, options, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        Federation.read(tmp_path, **options)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("site,x\na,1\n", {}, "say which column holds the sites, site=...; it has 'site', 'x'"),
        ("site,x\na,1\n", {"site": "place"}, "there is no column 'place'"),
        ("site,x\na,1\na,\n", {"site": "site"}, r"cells are missing: 'x' in 1 \(first in line 3\), of 2 rows"),
        ("site,x\n\n,1\n", {"site": "site"}, r"'site' in 1 \(first in line 3\), of 1 row\. Fill them in"),
        ("site,x\n", {"site": "site"}, "at least one row"),
        ("", {"site": "site"}, "is empty"),
    ],
)
def test_bad_files_are_named(tmp_path, content, options, message):
    path = tmp_path / "data.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        Federation.read(path, **options)
    assert str(path) in str(caught.value)


# --- numbers that are not -------------------------------------------------------------------------------------
