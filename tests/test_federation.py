"""Federations: grouping, checks, cuts and files."""

import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from fedkin.errors import DataError, ParameterError, UnknownDeviceError
from fedkin.federation import DeviceData, Federation

IDS = st.one_of(st.integers(-5, 5), st.sampled_from(["a", "b", "東京"]), st.tuples(st.integers(0, 2)))


def of_sizes(*sizes, q=2):
    """Devices d0, d1, ... with that many rows; y is the row's number."""
    n = sum(sizes)
    X = np.random.default_rng(0).standard_normal((n, q))
    return Federation.from_arrays(X, np.arange(n), np.repeat([f"d{u}" for u in range(len(sizes))], sizes))


# --- from arrays and mappings ---------------------------------------------------------------------------------


@given(st.lists(IDS, min_size=1, max_size=30))
def test_rows_are_grouped_stably_by_first_appearance(device):
    n = len(device)
    X = np.arange(2.0 * n).reshape(n, 2)
    fed = Federation.from_arrays(X, np.arange(n), device, offset=-np.arange(n))
    assert fed.devices == tuple(dict.fromkeys(device))
    assert fed.n_devices == len(fed) == len(set(device))
    for u, name in enumerate(fed.devices):
        rows = [k for k in range(n) if device[k] == name]
        assert fed.y[fed.starts[u] : fed.starts[u + 1]].tolist() == rows
        assert fed[name].y.tolist() == rows
        np.testing.assert_array_equal(fed[name].X, X[rows])
        np.testing.assert_array_equal(fed[name].offset, -np.array(rows))
        assert fed[name].n_samples == fed.n_samples[u] == len(rows)
        assert fed.index[name] == u
    np.testing.assert_array_equal(X[fed.row_order], fed.X)
    assert [fed.devices[u] for u in fed.device_index] == [device[k] for k in fed.row_order]
    # the mapping way gives the same federation
    again = Federation({name: (fed[name].X, fed[name].y, fed[name].offset) for name in fed})
    assert again.devices == fed.devices
    for name in ("starts", "X", "y", "offset", "n_samples", "device_index"):
        np.testing.assert_array_equal(getattr(again, name), getattr(fed, name))


@pytest.mark.parametrize(
    "device",
    [
        [3, 1, 3],
        np.array([3, 1, 3]),
        np.array([3.0, 1.0, 3.0]),
        np.array([3, 1, 3], dtype=object),
        pd.Series([3, 1, 3]),
        pd.Series([3, 1, 3], dtype="Int64"),
        pd.Series([3, 1, 3], dtype="category"),
        pl.Series([3, 1, 3]),
        pa.array([3, 1, 3]),
        pa.chunked_array([[3, 1], [3]]),
        (k for k in [np.int32(3), 1, 3.0]),
    ],
    ids=lambda device: type(device).__name__,
)
def test_integer_ids_of_any_kind_become_ints(device):
    fed = Federation.from_arrays([[0.0], [1.0], [2.0]], None, device)
    assert fed.devices == (3, 1)
    assert [type(name) for name in fed.devices] == [int, int]
    assert fed.row_order.tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    "device",
    [np.array(["b", "a", "b"]), pd.Series(["b", "a", "b"]), pl.Series(["b", "a", "b"]), pa.array(["b", "a", "b"])],
    ids=lambda device: type(device).__module__,
)
def test_text_ids_of_any_kind_become_str(device):
    fed = Federation.from_arrays([[0.0], [1.0], [2.0]], None, device)
    assert fed.devices == ("b", "a")
    assert [type(name) for name in fed.devices] == [str, str]


def test_truth_values_and_numpy_keys():
    assert Federation.from_arrays([[0.0], [1.0]], None, np.array([True, False])).devices == (True, False)
    fed = Federation({np.int64(4): [[1.0]], np.str_("x"): [[2.0]]})
    assert [type(name) for name in fed.devices] == [int, str]
    assert fed[np.int64(4)].X.tolist() == [[1.0]]


def test_dtypes_and_shapes():
    fed = Federation.from_arrays(np.ones((3, 2), dtype=np.float32), [1, 2, 3], [0, 0, 1], feature_names=["a", "b"])
    assert fed.X.dtype == fed.y.dtype == np.float64
    assert fed.starts.dtype == fed.row_order.dtype == fed.device_index.dtype == fed.n_samples.dtype == np.int64
    assert fed.starts.tolist() == [0, 2, 3]
    assert fed.feature_names == ("a", "b")
    assert (fed.n_features, fed.target_name, fed.offset) == (2, None, None)
    assert of_sizes(1, 1).feature_names == ("x0", "x1")


def test_the_mean_loss_needs_no_target():
    fed = Federation({"a": np.ones((2, 3)), "b": DeviceData(np.zeros((1, 3))), "c": (np.zeros((1, 3)), None)})
    assert fed.y is None
    assert fed["a"].y is None
    assert fed.n_samples.tolist() == [2, 1, 1]


@pytest.mark.parametrize(
    ("y", "kind"),
    [
        ([1, 0], "f"),
        (np.array([1, 0], dtype=np.uint8), "f"),
        ([1.5, 0.0], "f"),
        (np.array([1, 0], dtype=object), "f"),
        ([True, False], "b"),
        (np.array([True, False]), "b"),
        (["yes", "no"], "O"),
        (np.array(["yes", "no"]), "O"),
        (pd.Series(["yes", "no"], dtype="category"), "O"),
        (pl.Series(["yes", "no"]), "O"),
        ([2**60, 1], "f"),
    ],
)
def test_numbers_become_floats_and_labels_stay(y, kind):
    for fed in (Federation.from_arrays([[0.0], [1.0]], y, ["a", "b"]), Federation({0: ([[0.0], [1.0]], y)})):
        assert fed.y.dtype.kind == kind
        assert fed.y.tolist() == list(y)
        assert {type(label) for label in fed.y.tolist()} == {{"f": float, "b": bool, "O": str}[kind]}


def test_immutable_and_not_shared_with_the_caller():
    X, y, offset = np.ones((2, 1)), np.ones(2), np.ones(2)
    flags = np.array([True, False])
    for fed in (
        Federation.from_arrays(X, y, [0, 1], offset=offset),
        Federation({0: (X, y, offset)}),
        Federation({0: (X, flags)}),
        Federation.from_frame({"d": [0, 1], "x": X[:, 0], "y": flags}, device="d", target="y"),
    ):
        X[0] = y[0] = offset[0] = 5.0  # must still be possible, and do nothing to the federation
        flags[0] = False
        assert fed.X[0] == 1.0
        assert fed.y[0] == 1.0
        X[0] = y[0] = offset[0] = 1.0
        flags[0] = True
        arrays = [fed.X, fed.y, fed.starts, fed.row_order, fed.n_samples, fed.device_index, fed[0].X, fed[0].y]
        for array in arrays:
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
        with pytest.raises(AttributeError):
            fed.X = X


def test_access():
    fed = of_sizes(2, 1)
    assert list(fed) == ["d0", "d1"]
    assert "d0" in fed
    assert "x" not in fed
    assert ["d0"] not in fed
    assert repr(fed) == "Federation(2 devices, 3 rows, 2 features)"
    assert repr(of_sizes(1, q=1)) == "Federation(1 device, 1 row, 1 feature)"
    for name in ("x", ["d0"], 0):
        with pytest.raises(UnknownDeviceError, match=r"is not among the 2 devices of the federation \('d0', 'd1'\)"):
            fed[name]
    with pytest.raises(KeyError):
        fed["x"]
    assert pickle.loads(pickle.dumps(fed))["d1"].y.tolist() == [2.0]


GOOD = ([[1.0, 2.0], [3.0, 4.0]], [0.0, 1.0])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "at least one device"),
        ([GOOD], r"takes a mapping \{device: \(X, y\)\}, got list"),
        ({"a": (np.array([1.0, 2.0]), [0, 1])}, r"device 'a': X has shape \(2,\), .*; for one feature use X\.reshape"),
        ({"a": np.zeros((2, 2, 2))}, r"device 'a': X has shape \(2, 2, 2\), expected two dimensions"),
        ({"a": 3.0}, r"device 'a': X has shape \(\)"),
        ({"a": GOOD, "b": (np.empty((0, 2)), [])}, "device 'b' has no rows"),
        ({"a": GOOD, "b": ([[1.0]], [0.0])}, "device 'b' has 1 features, but device 'a' has 2"),
        ({"a": ([[1.0], [2.0, 3.0]], [0, 1])}, "device 'a': the rows of X have different lengths"),
        ({"a": GOOD, "b": ([[1.0, np.nan]], [0])}, "device 'b', row 0, feature 'x1' is nan"),
        ({"a": GOOD, "b": ([[1.0, 2.0], [np.inf, 1.0]], [0, 1])}, "device 'b', row 1, feature 'x0' is inf"),
        ({"a": ([[1j, 1.0]], [0])}, "device 'a': X is complex"),
        ({"a": ([["1", "2"]], [0])}, "X is not numeric: row 0, column 0 is '1'; encode"),
        ({"a": ([[1.0, "u"]], [0])}, "X is not numeric"),
        ({"a": (np.array([[1.0, "u"]], dtype=object), [0])}, "row 0, column 1 is 'u'"),
        ({"a": (np.array([[1.0, None]], dtype=object), [0])}, "feature 'x1' is nan"),
        ({"a": (pd.DataFrame({"u": [1.0], "v": ["w"]}), [0])}, "row 0, column 1 is 'w'"),
        ({"a": (np.array([["2020-01-01"]], dtype="datetime64[D]"), [0])}, "X is not numeric"),
        ({"a": (GOOD[0], [0.0])}, "device 'a': y has 1 values, but X has 2 rows"),
        ({"a": (GOOD[0], [[0.0], [1.0]])}, r"device 'a': y has shape \(2, 1\), expected \(2,\)"),
        ({"a": (GOOD[0], [0.0, np.nan])}, "device 'a', row 1: the target is nan"),
        ({"a": (GOOD[0], [0.0, np.inf])}, "device 'a', row 1: the target is inf"),
        ({"a": (GOOD[0], ["u", None])}, "device 'a', row 1: the target is None"),
        ({"a": (GOOD[0], ["u", 1])}, "device 'a': y mixes int and str"),
        ({"a": (GOOD[0], [1j, 0])}, "device 'a': y is complex"),
        ({"a": (GOOD[0], [[1], [2, 3]])}, "different lengths"),
        (
            {"a": GOOD, "b": (GOOD[0], ["u", "v"])},
            "y of device 'b' is made of labels, but that of device 'a' of numbers",
        ),
        ({"a": GOOD, "b": (GOOD[0], [True, False])}, "device 'b' is made of truth values"),
        ({"a": GOOD, "b": GOOD[0]}, "came without y"),
        ({"a": GOOD, "b": (np.ones((2, 2)), None)}, "'b' came without y, other devices with one"),
        ({"a": (*GOOD, [0.0, 0.0]), "b": GOOD}, "'b' came without offset"),
        ({"a": (*GOOD, [0.0])}, "offset has 1 values"),
        ({"a": (*GOOD, ["u", "v"])}, "offset is not numeric"),
        ({"a": (*GOOD, [0.0, np.nan])}, "device 'a', row 1: the offset is nan"),
        ({"a": ()}, "got a tuple of 0"),
        ({"a": (*GOOD, [0, 0], 1)}, "got a tuple of 4"),
        ({None: GOOD}, "a device id is missing"),
        ({np.nan: GOOD}, "a device id is missing"),
    ],
)
def test_bad_mappings(data, message):
    with pytest.raises(DataError, match=message):
        Federation(data)


X3 = np.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X3, None, ["a", "b"]), {}, "X has 3 rows, but device has 2"),
        ((X3, [1, 2], ["a", "b", "a"]), {}, "y has 2 values, but X has 3 rows"),
        ((X3, None, ["a", None, "a"]), {}, "a device id is missing"),
        ((X3, None, np.array([1.0, np.nan, 1.0])), {}, "a device id is missing"),
        ((X3, None, ["a", ["b"], "a"]), {}, "cannot be hashed"),
        ((X3, None, "abc"), {}, "one id per row, got 'abc'"),
        ((X3, None, 7), {}, "one id per row, got 7"),
        ((X3, None, np.zeros((3, 1))), {}, r"device has shape \(3, 1\)"),
        ((np.empty((0, 2)), None, []), {}, "at least one row"),
        ((X3[:, 0], None, ["a"] * 3), {}, r"X has shape \(3,\)"),
        ((np.where(X3 == 4, np.nan, X3), None, ["a", "b", "c"]), {}, r"row 2 \(device 'c'\), feature 'x0' is nan"),
        ((X3, [1.0, np.nan, 2.0], ["a", "b", "c"]), {}, r"row 1 \(device 'b'\): the target is nan"),
        ((X3, None, ["a"] * 3), {"offset": [0, 0, np.inf]}, r"row 2 \(device 'a'\): the offset is inf"),
        ((X3, None, ["a"] * 3), {"feature_names": ["u"]}, "1 feature names for 2 features"),
        ((X3, None, ["a"] * 3), {"feature_names": ["u", "u"]}, "feature name 'u' is given twice"),
    ],
)
def test_bad_arrays(arguments, options, message):
    with pytest.raises(DataError, match=message):
        Federation.from_arrays(*arguments, **options)


def test_a_sparse_matrix_says_what_to_do():
    import scipy.sparse

    with pytest.raises(DataError, match=r"X\.toarray\(\)"):
        Federation.from_arrays(scipy.sparse.eye_array(3).tocsr(), None, ["a"] * 3)


# --- frames ---------------------------------------------------------------------------------------------------

TABLE = {
    "site": ["n", "s", "n"],
    "age": [40, 50, 60],
    "smoker": [True, False, True],
    "score": [1.5, 2.5, 3.5],
    "log_time": [0.0, 0.1, 0.2],
}


@pytest.mark.parametrize("make", [dict, pd.DataFrame, pl.DataFrame, pl.LazyFrame, pa.table])
def test_frames_of_every_make(make):
    fed = Federation.from_frame(make(TABLE), device="site", target="score", offset="log_time")
    assert fed.devices == ("n", "s")
    assert fed.feature_names == ("age", "smoker")
    assert fed.target_name == "score"
    assert fed.X.tolist() == [[40.0, 1.0], [60.0, 1.0], [50.0, 0.0]]
    assert fed.y.tolist() == [1.5, 3.5, 2.5]
    assert fed.offset.tolist() == [0.0, 0.2, 0.1]
    assert fed.row_order.tolist() == [0, 2, 1]


def test_chosen_features_come_in_the_order_asked_for():
    fed = Federation.from_frame(TABLE, device="age", target="site", features=["score", "smoker"])
    assert fed.feature_names == ("score", "smoker")
    assert fed.devices == (40, 50, 60)
    assert fed.y.tolist() == ["n", "s", "n"]
    assert Federation.from_frame(TABLE, device="site", target="score", features="age").feature_names == ("age",)
    assert Federation.from_frame(TABLE, device="site", target="score", features=[]).X.shape == (3, 0)


def test_large_ids_of_frames_are_exact():
    ids = [2**60, 2**60 + 1]
    assert Federation.from_frame(pd.DataFrame({"id": ids, "x": [1.0, 2.0]}), device="id").devices == tuple(ids)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"device": "place"}, "there is no column 'place' for the device; the table has 'site', 'age'"),
        ({}, {"target": "grade"}, "there is no column 'grade' for the target"),
        ({}, {"features": ["height"]}, "there is no column 'height' for the feature"),
        ({}, {"offset": "time"}, "there is no column 'time' for the offset"),
        ({}, {"target": "site"}, "column 'site' cannot be both device and target"),
        ({}, {"features": ["age", "score"]}, "column 'score' cannot be both target and a feature"),
        ({}, {"features": ["age", "age"]}, "feature 'age' is given twice"),
        ({"town": ["u", "v", "w"]}, {}, "not numeric: 'town'; say which columns to use with features=, or encode"),
        ({"town": ["u", "v", "w"]}, {"features": ["town"]}, "feature 'town' is not numeric .*'u'.*: encode it"),
        ({"": [0, 1, 2]}, {}, "a column has no name"),
        ({"site": ["n", None, "n"]}, {}, "row 1: column 'site' is empty"),
        ({"site": [1.0, 2.0, np.nan]}, {}, "row 2: column 'site' is empty"),
        ({"age": [1, None, 2]}, {}, r"row 1 \(device 's'\), feature 'age' is nan"),
        ({"score": [1.0, 2.0, None]}, {}, r"row 2 \(device 'n'\): the target is nan"),
        ({"score": ["u", "v", None]}, {}, r"row 2 \(device 'n'\): the target is None"),
        ({"log_time": ["u", "v", "w"]}, {"offset": "log_time"}, "offset is not numeric"),
    ],
)
def test_bad_frames(changes, options, message):
    with pytest.raises(DataError, match=message):
        Federation.from_frame({**TABLE, **changes}, **{"device": "site", "target": "score", **options})


def test_frames_without_features_or_rows():
    with pytest.raises(DataError, match="no column is left for the features beside 'a', 'b'"):
        Federation.from_frame({"a": [1], "b": [2]}, device="a", target="b")
    with pytest.raises(DataError, match="at least one row"):
        Federation.from_frame({"a": [], "b": []}, device="a")


# --- files ----------------------------------------------------------------------------------------------------


def test_one_csv_file(tmp_path):
    path = tmp_path / "sites.csv"
    path.write_text("site,x,y\n01,1,2\n02,3,4\n01,5,6\n")
    fed = Federation.read(path, device="site", target="y")
    assert fed.devices == ("01", "02")
    assert fed["01"].X.tolist() == [[1.0], [5.0]]
    path.write_text("site,x,y\n7,1,2\n8,3,4\n")
    assert Federation.read(str(path), device="site", target="y").devices == (7, 8)


def test_one_parquet_file(tmp_path):
    pq.write_table(pa.table(TABLE), tmp_path / "table.parquet")
    fed = Federation.read(tmp_path / "table.parquet", device="site", target="score", features=["age"])
    assert fed["n"].X.tolist() == [[40.0], [60.0]]


def test_directory_with_a_file_per_device(tmp_path):
    (tmp_path / "02.csv").write_text("x,y\n1,2\n3,4\n")
    (tmp_path / "01.csv").write_text("y,x\n6,5\n")  # another order of the columns
    pq.write_table(pa.table({"x": [7.0], "y": [8.0]}), tmp_path / "03.parquet")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden.csv").write_text("not data")
    fed = Federation.read(tmp_path, target="y")
    assert fed.devices == ("01", "02", "03")
    assert fed.feature_names == ("x",)
    assert fed["02"].X.tolist() == [[1.0], [3.0]]
    assert fed["01"].y.tolist() == [6.0]
    assert fed["03"].y.tolist() == [8.0]


def test_directory_with_a_device_column(tmp_path):
    (tmp_path / "monday.csv").write_text("site,x,y,note\nn,1,2,hello\ns,3,4,\n")
    (tmp_path / "tuesday.csv").write_text("site,x,y,note\nn,5,6,\n")
    fed = Federation.read(tmp_path, device="site", target="y", features="x")
    assert fed["n"].X.tolist() == [[1.0], [5.0]]
    assert fed.row_order.tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (
            {"a.csv": "x,y\n1,2\n", "b.csv": "x,z\n1,2\n"},
            {"target": "y"},
            r"b\.csv: there is no column 'y'; there is a",
        ),
        ({"a.csv": "x,y\n1,2\n", "b.csv": "x\n1\n"}, {"features": ["y"]}, r"b\.csv: there is no column 'y'"),
        (
            {"a.csv": "x,y\n1,2\n", "b.csv": "x,y\nu,2\n"},
            {"target": "y"},
            r"a\.csv: column 'x' is numeric, but text in b",
        ),
        ({"a.csv": "x,y\n1,2\n", "b.csv": "x,y\n"}, {"target": "y"}, r"b\.csv: device 'b' has no rows"),
        ({"a.csv": "x,y\n1,2\n", "a.tsv": "x,y\n1,2\n"}, {"target": "y"}, "also stands for device 'a'"),
        ({"a.csv": "x,y\n1,2\n", "b.csv": "x,y\n1\n"}, {"target": "y"}, r"b\.csv, line 2: 1 cells"),
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
        ("site,x\na,1\n", {}, "say which column holds the devices, device=...; it has 'site', 'x'"),
        ("site,x\na,1\n", {"device": "place"}, "there is no column 'place'"),
        ("site,x\na,1\na,\n", {"device": "site"}, r"row 1 \(device 'a'\), feature 'x' is nan"),
        ("site,x\n,1\n", {"device": "site"}, "row 0: column 'site' is empty"),
        ("site,x\n", {"device": "site"}, "at least one row"),
        ("", {"device": "site"}, "is empty"),
    ],
)
def test_bad_files_are_named(tmp_path, content, options, message):
    path = tmp_path / "data.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        Federation.read(path, **options)
    assert str(path) in str(caught.value)


def test_absent_file(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        Federation.read(tmp_path / "absent.csv", device="site")


# --- take and subset ------------------------------------------------------------------------------------------


def test_take_keeps_all_devices():
    fed = of_sizes(3, 2, 1)
    for rows in ([True, False, True, True, False, True], [0, 2, 3, 5], [5, 3, 0, 2], np.array([5, 0, 3, 2])):
        taken = fed.take(rows)
        assert taken.devices == fed.devices
        assert sorted(taken.y.tolist()) == [0.0, 2.0, 3.0, 5.0]
        assert taken.n_samples.tolist() == [2, 1, 1]
        np.testing.assert_array_equal(taken.X, fed.X[taken.row_order])
    assert fed.take([2, 0, 3, 5]).y.tolist() == [2.0, 0.0, 3.0, 5.0]
    assert fed.take([0, 0, 3, 5]).y.tolist() == [0.0, 0.0, 3.0, 5.0]


def test_take_tells_of_devices_left_without_rows():
    fed = of_sizes(3, 2, 1)
    with pytest.raises(DataError, match="no rows would be left for 'd1', 'd2'"):
        fed.take([0, 1])
    sparse = fed.take([0, 1], allow_empty=True)
    assert sparse.n_samples.tolist() == [2, 0, 0]
    assert sparse["d2"].X.shape == (0, 2)
    assert fed.take([], allow_empty=True).n_samples.tolist() == [0, 0, 0]
    for rows, message in (
        ([True], "the mask has 1 values, but the federation has 6 rows"),
        ([6], r"row 6 is outside 0\.\.5"),
        ([-1], "row -1 is outside"),
        ([0.5], "bool array of shape"),
        ([[0]], "bool array of shape"),
    ):
        with pytest.raises(DataError, match=message):
            fed.take(rows)


def test_row_order_leads_back_to_the_caller_after_every_cut():
    device = np.random.default_rng(1).integers(0, 4, 40)
    fed = Federation.from_arrays(np.arange(40.0)[:, None], np.arange(40), device)
    train, test = fed.split(0.3, seed=2)
    for part in (fed, train, test, train.subset([2, 0]), test.take([3, 1, 0], allow_empty=True)):
        np.testing.assert_array_equal(part.row_order, part.y)


def test_subset():
    fed = of_sizes(3, 2, 1)
    sub = fed.subset(["d2", "d0"])
    assert sub.devices == ("d2", "d0")
    assert sub.y.tolist() == [5.0, 0.0, 1.0, 2.0]
    assert sub.subset(fed.subset(["d0"])).y.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(UnknownDeviceError, match="'x'"):
        fed.subset(["d0", "x"])
    with pytest.raises(DataError, match="given twice"):
        fed.subset(["d0", "d0"])
    with pytest.raises(DataError, match="at least one device"):
        fed.subset([])


# --- split and folds ------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.floats(0.01, 0.99),
    st.integers(0, 2**32),
)
def test_split_within_devices(sizes, test_size, seed):
    fed = of_sizes(*sizes)
    train, test = fed.split(test_size, seed)
    assert train.devices == test.devices == fed.devices
    assert sorted(train.y.tolist() + test.y.tolist()) == fed.y.tolist()
    for u, n in enumerate(sizes):
        expected = 0 if n == 1 else min(max(round(test_size * n), 1), n - 1)
        assert (train.n_samples[u], test.n_samples[u]) == (n - expected, expected)
        assert sorted(train[f"d{u}"].y) == train[f"d{u}"].y.tolist()  # rows keep their order


def test_the_split_of_a_device_does_not_depend_on_the_others():
    fed = of_sizes(10, 15, 20)
    _, test = fed.split(0.4, seed=7)
    for devices in (["d1"], ["d2", "d1"], ["d1", "d0"]):
        _, alone = fed.subset(devices).split(0.4, seed=7)
        np.testing.assert_array_equal(alone["d1"].y, test["d1"].y)
        np.testing.assert_array_equal(alone.subset(["d1"]).row_order, test.subset(["d1"]).row_order)
    _, other = fed.split(0.4, seed=8)
    assert not np.array_equal(other.y, test.y)


def test_devices_are_cut_differently():
    fed = of_sizes(*[12] * 30)
    _, test = fed.split(0.5, seed=0)
    cuts = {tuple((test[name].y % 12).tolist()) for name in fed}
    assert len(cuts) > 25


def test_the_split_is_the_same_in_every_process():
    code = (
        "import numpy as np; from fedkin.federation import Federation\n"
        "fed = Federation.from_arrays(np.zeros((30, 1)), np.arange(30), ['a', 'b', 'c'] * 10)\n"
        "print(fed.split(0.4, seed=1)[1].y.tolist(), fed.folds(4, seed=1).tolist())"
    )
    answers = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        )
        answers.add(done.stdout)
    assert len(answers) == 1


def test_every_row_is_held_out_equally_often():
    fed = of_sizes(8)
    counts = np.zeros(8)
    for seed in range(400):
        counts[fed.split(0.25, seed)[1].row_order] += 1
    assert abs(counts - 100).max() < 4.5 * np.sqrt(400 * 0.25 * 0.75)


@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.integers(2, 6), st.integers(0, 99))
def test_folds_within_devices(sizes, k, seed):
    fed = of_sizes(*sizes)
    if k > sum(sizes):
        with pytest.raises(ParameterError, match="number of folds"):
            fed.folds(k, seed)
        return
    folds = fed.folds(k, seed)
    assert folds.shape == (sum(sizes),)
    assert folds.dtype == np.int64
    assert np.ptp(np.bincount(folds, minlength=k)) <= 1
    assert len(np.bincount(folds, minlength=k)) == k
    for u, n in enumerate(sizes):
        mine = folds[fed.starts[u] : fed.starts[u + 1]]
        assert len(set(mine.tolist())) == min(n, k)
        assert np.ptp(np.bincount(mine, minlength=k)) <= 1
    np.testing.assert_array_equal(folds, fed.folds(k, seed))


def test_folds_are_shuffled_by_the_seed():
    fed = of_sizes(30, 30)
    assert not np.array_equal(fed.folds(5, 0), fed.folds(5, 1))
    assert not np.array_equal(fed.folds(5, 0)[:30], fed.folds(5, 0)[30:])
    assert not np.array_equal(fed.folds(5, 0)[:30], np.arange(30) % 5)


@pytest.mark.parametrize("test_size", [0.0, 1.0, -0.5, 2, float("nan")])
def test_bad_test_sizes(test_size):
    with pytest.raises(ParameterError, match="test_size must be between 0 and 1"):
        of_sizes(4).split(test_size)


@pytest.mark.parametrize("k", [0, 1, 7])
def test_bad_numbers_of_folds(k):
    with pytest.raises(ParameterError, match="from 2 to the 6 rows"):
        of_sizes(3, 3).folds(k)


# --- features -------------------------------------------------------------------------------------------------


def test_intercept():
    fed = of_sizes(2, 1)
    wide = fed.with_intercept()
    assert wide.feature_names == ("(intercept)", "x0", "x1")
    np.testing.assert_array_equal(wide.X, np.column_stack([np.ones(3), fed.X]))
    np.testing.assert_array_equal(wide.y, fed.y)
    assert wide.X.flags.c_contiguous
    with pytest.raises(DataError, match="already"):
        wide.with_intercept()


@given(st.integers(0, 1000), st.sampled_from([1e-8, 1.0, 1e8]))
def test_standardized_as_scikit_learn_does(seed, size):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((20, 3)) * size + rng.standard_normal(3)
    X[:, 1] = rng.standard_normal()  # constant, of any value
    fed = Federation.from_arrays(X, None, rng.integers(0, 3, 20))
    standard, mean, scale = fed.standardized()
    peer = StandardScaler().fit(fed.X)
    np.testing.assert_allclose(mean, peer.mean_, rtol=1e-9)
    np.testing.assert_allclose(scale, peer.scale_, rtol=1e-6)
    np.testing.assert_allclose(standard.X, peer.transform(fed.X), atol=1e-6)
    assert scale[1] == 1.0
    assert (standard.X[:, 1] == 0).all()
    np.testing.assert_allclose(standard.X * scale + mean, fed.X, rtol=1e-12, atol=1e-12 * size)


@settings(max_examples=20)
@given(st.data())
def test_constant_columns_of_large_values_have_scale_one(data):
    value = data.draw(st.floats(-1e15, 1e15))
    _, mean, scale = Federation({0: np.full((7, 1), value), 1: np.full((3, 1), value)}).standardized()
    assert (mean[0], scale[0]) == (value, 1.0)


def test_standardizing_no_rows():
    with pytest.raises(DataError, match="no rows"):
        of_sizes(2).take([], allow_empty=True).standardized()


def test_cuts_keep_names_targets_and_offsets():
    fed = Federation.from_frame(TABLE, device="site", target="score", offset="log_time")
    train, test = fed.split(0.5)
    for part in (train, test, fed.subset(["n"]), fed.take([0, 2]), fed.standardized()[0]):
        assert part.feature_names == ("age", "smoker")
        assert part.target_name == "score"
        np.testing.assert_array_equal(part.offset, np.array(TABLE["log_time"])[part.row_order])
        np.testing.assert_array_equal(part.y, np.array(TABLE["score"])[part.row_order])
