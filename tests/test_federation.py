"""Federations: grouping of rows, frames and files, cuts, and what is refused."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from builders import TABLE, of_sizes
from fedkin.data import Federation, deal_folds
from fedkin.errors import DataError, ParameterError

IDS = st.one_of(st.integers(-5, 5), st.sampled_from(["a", "b", "東京"]), st.tuples(st.integers(0, 2)))


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
        np.array([3.0, 1.0, 3.0]),
        np.array([3, 1, 3], dtype=object),
        pd.Series([3, 1, 3], dtype="Int64"),
        pd.Series([3, 1, 3], dtype="category"),
        pl.Series([3, 1, 3]),
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


@pytest.mark.parametrize(
    ("y", "kind"),
    [
        ([1, 0], "f"),
        (np.array([1, 0], dtype=np.uint8), "f"),
        (np.array([1, 0], dtype=object), "f"),
        ([True, False], "b"),
        (np.array(["yes", "no"]), "O"),
        (pd.Series(["yes", "no"], dtype="category"), "O"),
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
    made = (
        Federation.from_arrays(X, y, [0, 1], offset=offset),
        Federation({0: (X, y, offset)}),
        Federation.from_frame({"d": [0, 1], "x": X[:, 0], "y": y}, site="d", target="y"),
    )
    X[0] = y[0] = offset[0] = 5.0  # must still be possible, and do nothing to the federations
    for fed in made:
        assert fed.X[0] == fed.y[0] == 1.0
        for array in (fed.X, fed.y, fed.starts, fed.row_order, fed.n_samples, fed.site_index, fed[0].X, fed[0].y):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0


GOOD, TWO = ([[1.0, 2.0], [3.0, 4.0]], [0.0, 1.0]), [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "at least one site"),
        ([GOOD], "mapping"),
        ({"a": (np.array([1.0, 2.0]), [0, 1])}, r"site 'a': X has shape \(2,\)"),
        ({"a": GOOD, "b": (np.empty((0, 2)), [])}, "site 'b' has no rows"),
        ({"a": GOOD, "b": ([[1.0]], [0.0])}, "site 'b' has 1 feature, but site 'a' has 2"),
        ({"a": ([[1.0], [2.0, 3.0]], [0, 1])}, "site 'a'.*different lengths"),
        ({"a": GOOD, "b": ([[1.0, np.nan]], [0])}, "site 'b', row 0, feature 'x1' is nan"),
        ({"a": GOOD, "b": ([[1.0, 2.0], [np.inf, 1.0]], [0, 1])}, "site 'b', row 1, feature 'x0' is inf"),
        ({"a": ([[1j, 1.0]], [0])}, "site 'a': X is complex"),
        ({"a": (pd.DataFrame({"u": [1.0], "v": ["w"]}), [0])}, "row 0, column 1 is 'w'"),
        ({"a": (TWO, [0.0])}, "site 'a': y has 1 value, but X has 2 rows"),
        ({"a": (TWO, [[0.0], [1.0]])}, r"site 'a': y has shape \(2, 1\)"),
        ({"a": (TWO, [0.0, np.nan])}, "site 'a', row 1: the target is nan"),
        ({"a": (TWO, ["u", 1])}, "site 'a': y mixes int and str"),
        ({"a": GOOD, "b": (TWO, ["u", "v"])}, "y of site 'b' has the type labels"),
        ({"a": GOOD, "b": TWO}, "no y at 'b'"),
        ({"a": (*GOOD, [0.0, 0.0]), "b": GOOD}, "no offset at 'b'"),
        ({"a": (*GOOD, [0.0, np.nan])}, "site 'a', row 1: the offset is nan"),
        ({None: GOOD}, "a site id is missing"),
        ((TWO, None, ["a"]), "X has 2 rows, but site= has 1"),
        ((TWO, None, ["a", None]), "a site id is missing"),
        ((TWO, None, ["a", ["b"]]), "cannot be hashed"),
        ((TWO, None, "ab"), "one id per row, got 'ab'"),
        (([[0.0], [np.nan]], None, ["a", "b"]), r"row 1 \(site 'b'\), feature 'x0' is nan"),
        ({"features": ["height"]}, "no column 'height' for the feature"),
        ({"offset": "time"}, "no column 'time' for the offset"),
        ({"target": "site"}, "column 'site' cannot be both site and target"),
        ({"features": ["age", "score"]}, "column 'score' cannot be both target and a feature"),
        ({"features": ["age", "age"]}, "feature 'age' is given twice"),
        ({"offset": "site"}, "'site'"),
    ],
)
def test_what_makes_no_federation_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        if isinstance(data, tuple):
            Federation.from_arrays(*data)
        elif isinstance(data, dict) and {"features", "offset", "target"} & data.keys():
            Federation.from_frame(TABLE, **{"site": "site", "target": "score", **data})
        else:
            Federation(data)


ONE = {"a.csv": "x,y\n1,2\n"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({**ONE, "b.csv": "x,z\n1,2\n"}, r"b\.csv: there is no column 'y'"),
        ({**ONE, "b.csv": "x,y\nu,2\n"}, r"a\.csv: column 'x' is numeric, but text in b"),
        ({**ONE, "b.csv": "x,y\n"}, r"b\.csv: site 'b' has no rows"),
        ({**ONE, "a.tsv": "x,y\n1,2\n"}, "also stands for site 'a'"),
        ({"a.json": ""}, "has no file that ends in"),
    ],
)
def test_bad_directories(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        Federation.read(tmp_path, target="y")


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


def test_take_tells_of_sites_left_without_rows():
    fed = of_sizes(3, 2, 1)
    with pytest.raises(DataError, match="no rows would be left for 'd1', 'd2'"):
        fed.take([0, 1])
    sparse = fed.take([0, 1], allow_empty=True)
    assert sparse.n_samples.tolist() == [2, 0, 0]
    for rows in ([True], [6], [-1], [0.5], [[0]]):
        with pytest.raises(DataError, match=r"mask|outside|shape"):
            fed.take(rows)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.floats(0.01, 0.99),
    st.integers(0, 2**32),
)
def test_split_within_sites(sizes, test_size, seed):
    fed = of_sizes(*sizes)
    train, test = fed.split(test_size, seed)
    assert train.sites == test.sites == fed.sites
    assert sorted(train.y.tolist() + test.y.tolist()) == fed.y.tolist()
    for u, n in enumerate(sizes):
        expected = 0 if n == 1 else min(max(round(test_size * n), 1), n - 1)
        assert (train.n_samples[u], test.n_samples[u]) == (n - expected, expected)
        assert sorted(train[f"d{u}"].y) == train[f"d{u}"].y.tolist()  # rows keep their order


def test_the_split_is_the_same_in_every_process_and_version():
    fed = Federation.from_arrays(np.zeros((12, 1)), np.arange(12), ["a", "b", "c"] * 4)
    assert fed.split(0.4, seed=1)[1].y.tolist() == [0, 3, 1, 4, 5, 11]
    assert fed.folds(4, seed=1).tolist() == [1, 3, 2, 0, 3, 2, 1, 0, 0, 3, 2, 1]


@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.integers(2, 6), st.integers(0, 99))
def test_folds_within_sites(sizes, k, seed):
    fed = of_sizes(*sizes)
    if k > sum(sizes):
        with pytest.raises(ParameterError, match="number of folds"):
            fed.folds(k, seed)
        return
    folds = fed.folds(k, seed)
    assert folds.shape == (sum(sizes),)
    assert folds.dtype == np.int64
    assert len(np.bincount(folds, minlength=k)) == k
    for u, n in enumerate(sizes):
        mine = folds[fed.starts[u] : fed.starts[u + 1]]
        assert len(set(mine.tolist())) == min(n, k)
        assert np.ptp(np.bincount(mine, minlength=k)) <= 1
        # a site that is alone with its rows deals them in the same way
        np.testing.assert_array_equal(mine, deal_folds(fed.sites[u], n, k, seed))
    np.testing.assert_array_equal(folds, fed.folds(k, seed))


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


def test_cuts_keep_names_targets_and_offsets():
    fed = Federation.from_frame(TABLE, site="site", target="score", offset="log_time")
    train, test = fed.split(0.5)
    for part in (train, test, fed.subset(["n"]), fed.take([0, 2]), fed.standardized()[0]):
        assert part.feature_names == ("age", "smoker")
        assert part.target_name == "score"
        np.testing.assert_array_equal(part.offset, np.array(TABLE["log_time"])[part.row_order])
        np.testing.assert_array_equal(part.y, np.array(TABLE["score"])[part.row_order])


def test_rows_are_put_in_order_and_cuts_hold_out_later_ones():
    rng = np.random.default_rng(0)
    time = rng.permutation(24).astype(float)
    fed = Federation.from_arrays(time[:, None], time, ["a", "b", "b"] * 8, time=time)
    assert fed.ordered
    for site in fed.sites:
        assert (np.diff(fed[site].X[:, 0]) > 0).all()
    assert time[fed.row_order].tolist() == fed.X[:, 0].tolist()
    for seed in (0, 1):
        train, test = fed.split(0.25, seed)
        assert train.ordered
        for site in fed.sites:
            assert train[site].X.max() < test[site].X.min()
    assert fed.folds(3)[:8].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_the_split_of_a_site_does_not_depend_on_the_others():
    fed = of_sizes(10, 15, 20)
    _, test = fed.split(0.4, seed=7)
    for sites in (["d1"], ["d2", "d1"], ["d1", "d0"]):
        _, alone = fed.subset(sites).split(0.4, seed=7)
        np.testing.assert_array_equal(alone["d1"].y, test["d1"].y)
        np.testing.assert_array_equal(alone.subset(["d1"]).row_order, test.subset(["d1"]).row_order)
    _, other = fed.split(0.4, seed=8)
    assert not np.array_equal(other.y, test.y)
