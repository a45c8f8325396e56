"""Federations from arrays and mappings: grouping and checks."""

import pickle

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import of_sizes
from fedkin.data import Federation
from fedkin.errors import DataError, UnknownSiteError

IDS = st.one_of(st.integers(-5, 5), st.sampled_from(["a", "b", "東京"]), st.tuples(st.integers(0, 2)))


# --- from arrays and mappings ---------------------------------------------------------------------------------


@given(st.lists(IDS, min_size=1, max_size=30))
def test_rows_are_grouped_stably_by_first_appearance(site):
    n = len(site)
    X = np.arange(2.0 * n).reshape(n, 2)
    fed = Federation.from_arrays(X, np.arange(n), site, offset=-np.arange(n))
    assert fed.sites == tuple(dict.fromkeys(site))
    assert fed.n_sites == len(fed) == len(set(site))
    for u, name in enumerate(fed.sites):
        rows = [k for k in range(n) if site[k] == name]
        assert fed.y[fed.starts[u] : fed.starts[u + 1]].tolist() == rows
        assert fed[name].y.tolist() == rows
        np.testing.assert_array_equal(fed[name].X, X[rows])
        np.testing.assert_array_equal(fed[name].offset, -np.array(rows))
        assert fed[name].n_samples == fed.n_samples[u] == len(rows)
        assert fed.index[name] == u
    np.testing.assert_array_equal(X[fed.row_order], fed.X)
    assert [fed.sites[u] for u in fed.site_index] == [site[k] for k in fed.row_order]
    # the mapping way gives the same federation
    again = Federation({name: (fed[name].X, fed[name].y, fed[name].offset) for name in fed})
    assert again.sites == fed.sites
    for name in ("starts", "X", "y", "offset", "n_samples", "site_index"):
        np.testing.assert_array_equal(getattr(again, name), getattr(fed, name))


@pytest.mark.parametrize(
    "site",
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
    ids=lambda site: type(site).__name__,
)
def test_integer_ids_of_any_kind_become_ints(site):
    fed = Federation.from_arrays([[0.0], [1.0], [2.0]], None, site)
    assert fed.sites == (3, 1)
    assert [type(name) for name in fed.sites] == [int, int]
    assert fed.row_order.tolist() == [0, 2, 1]


def test_dtypes_and_shapes():
    fed = Federation.from_arrays(np.ones((3, 2), dtype=np.float32), [1, 2, 3], [0, 0, 1], feature_names=["a", "b"])
    assert fed.X.dtype == fed.y.dtype == np.float64
    assert fed.starts.dtype == fed.row_order.dtype == fed.site_index.dtype == fed.n_samples.dtype == np.int64
    assert fed.starts.tolist() == [0, 2, 3]
    assert fed.feature_names == ("a", "b")
    assert (fed.n_features, fed.target_name, fed.offset) == (2, None, None)
    assert of_sizes(1, 1).feature_names == ("x0", "x1")


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
        Federation.from_frame({"d": [0, 1], "x": X[:, 0], "y": flags}, site="d", target="y"),
    ):
        X[0] = y[0] = offset[0] = 5.0  # must still be possible, and do nothing to the federation
        flags[0] = False
        assert fed.X[0] == 1.0
        assert fed.y[0] == 1.0
        X[0] = y[0] = offset[0] = 1.0
        flags[0] = True
        arrays = [fed.X, fed.y, fed.starts, fed.row_order, fed.n_samples, fed.site_index, fed[0].X, fed[0].y]
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
    assert repr(fed) == "Federation(2 sites, 3 rows, 2 features)"
    assert repr(of_sizes(1, q=1)) == "Federation(1 site, 1 row, 1 feature)"
    for name in ("x", ["d0"], 0):
        with pytest.raises(UnknownSiteError, match=r"is not among the 2 sites of the federation \('d0', 'd1'\)"):
            fed[name]
    with pytest.raises(KeyError):
        fed["x"]
    assert pickle.loads(pickle.dumps(fed))["d1"].y.tolist() == [2.0]


GOOD = ([[1.0, 2.0], [3.0, 4.0]], [0.0, 1.0])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "at least one site"),
        ([GOOD], r"takes a mapping \{site: \(X, y\)\}, got list"),
        ({"a": (np.array([1.0, 2.0]), [0, 1])}, r"site 'a': X has shape \(2,\), .*; for one feature use X\.reshape"),
        ({"a": np.zeros((2, 2, 2))}, r"site 'a': X has shape \(2, 2, 2\), expected two dimensions"),
        ({"a": 3.0}, r"site 'a': X has shape \(\)"),
        ({"a": GOOD, "b": (np.empty((0, 2)), [])}, "site 'b' has no rows"),
        ({"a": GOOD, "b": ([[1.0]], [0.0])}, "site 'b' has 1 feature, but site 'a' has 2"),
        ({"a": ([[1.0], [2.0, 3.0]], [0, 1])}, "site 'a': the rows of X have different lengths"),
        ({"a": GOOD, "b": ([[1.0, np.nan]], [0])}, "site 'b', row 0, feature 'x1' is nan"),
        ({"a": GOOD, "b": ([[1.0, 2.0], [np.inf, 1.0]], [0, 1])}, "site 'b', row 1, feature 'x0' is inf"),
        ({"a": ([[1j, 1.0]], [0])}, "site 'a': X is complex"),
        ({"a": ([["1", "2"]], [0])}, "X is not numeric: row 0, column 0 is '1'; encode"),
        ({"a": ([[1.0, "u"]], [0])}, "X is not numeric"),
        ({"a": (np.array([[1.0, "u"]], dtype=object), [0])}, "row 0, column 1 is 'u'"),
        ({"a": (np.array([[1.0, None]], dtype=object), [0])}, "feature 'x1' is nan"),
        ({"a": (pd.DataFrame({"u": [1.0], "v": ["w"]}), [0])}, "row 0, column 1 is 'w'"),
        ({"a": (np.array([["2020-01-01"]], dtype="datetime64[D]"), [0])}, "X is not numeric"),
        ({"a": (GOOD[0], [0.0])}, "site 'a': y has 1 value, but X has 2 rows"),
        ({"a": (GOOD[0], [[0.0], [1.0]])}, r"site 'a': y has shape \(2, 1\), expected \(2,\)"),
        ({"a": (GOOD[0], [0.0, np.nan])}, "site 'a', row 1: the target is nan"),
        ({"a": (GOOD[0], [0.0, np.inf])}, "site 'a', row 1: the target is inf"),
        ({"a": (GOOD[0], ["u", None])}, "site 'a', row 1: the target is None"),
        ({"a": (GOOD[0], ["u", 1])}, "site 'a': y mixes int and str"),
        ({"a": (GOOD[0], [1j, 0])}, "site 'a': y is complex"),
        ({"a": (GOOD[0], [[1], [2, 3]])}, "different lengths"),
        (
            {"a": GOOD, "b": (GOOD[0], ["u", "v"])},
            "y of site 'b' is made of labels, but that of site 'a' of numbers",
        ),
        ({"a": GOOD, "b": (GOOD[0], [True, False])}, "site 'b' is made of truth values"),
        ({"a": GOOD, "b": GOOD[0]}, "came without y"),
        ({"a": GOOD, "b": (np.ones((2, 2)), None)}, "'b' came without y, other sites with one"),
        ({"a": (*GOOD, [0.0, 0.0]), "b": GOOD}, "'b' came without offset"),
        ({"a": (*GOOD, [0.0])}, "offset has 1 value"),
        ({"a": (*GOOD, ["u", "v"])}, "offset is not numeric"),
        ({"a": (*GOOD, [0.0, np.nan])}, "site 'a', row 1: the offset is nan"),
        ({"a": ()}, "got a tuple of 0"),
        ({"a": (*GOOD, [0, 0], 1)}, "got a tuple of 4"),
        ({None: GOOD}, "a site id is missing"),
        ({np.nan: GOOD}, "a site id is missing"),
    ],
)
def test_bad_mappings(data, message):
    with pytest.raises(DataError, match=message):
        Federation(data)


X3 = np.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X3, None, ["a", "b"]), {}, "X has 3 rows, but site= has 2"),
        ((X3, [1, 2], ["a", "b", "a"]), {}, "y has 2 values, but X has 3 rows"),
        ((X3, None, ["a", None, "a"]), {}, "a site id is missing"),
        ((X3, None, np.array([1.0, np.nan, 1.0])), {}, "a site id is missing"),
        ((X3, None, ["a", ["b"], "a"]), {}, "cannot be hashed"),
        ((X3, None, "abc"), {}, "one id per row, got 'abc'"),
        ((X3, None, 7), {}, "one id per row, got 7"),
        ((X3, None, np.zeros((3, 1))), {}, r"site has shape \(3, 1\)"),
        ((np.empty((0, 2)), None, []), {}, "at least one row"),
        ((X3[:, 0], None, ["a"] * 3), {}, r"X has shape \(3,\)"),
        ((np.where(X3 == 4, np.nan, X3), None, ["a", "b", "c"]), {}, r"row 2 \(site 'c'\), feature 'x0' is nan"),
        ((X3, [1.0, np.nan, 2.0], ["a", "b", "c"]), {}, r"row 1 \(site 'b'\): the target is nan"),
        ((X3, None, ["a"] * 3), {"offset": [0, 0, np.inf]}, r"row 2 \(site 'a'\): the offset is inf"),
        ((X3, None, ["a"] * 3), {"feature_names": ["u"]}, "1 feature names for 2 features"),
        ((X3, None, ["a"] * 3), {"feature_names": ["u", "u"]}, "feature name 'u' is given twice"),
    ],
)
def test_bad_arrays(arguments, options, message):
    with pytest.raises(DataError, match=message):
        Federation.from_arrays(*arguments, **options)
