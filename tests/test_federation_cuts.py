"""Federations cut into parts, split, dealt into folds and standardised."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from builders import TABLE, of_sizes
from fedkin.data import Federation, deal_folds
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from processes import PATIENCE

# --- take and subset ------------------------------------------------------------------------------------------


def test_take_keeps_all_sites():
    fed = of_sizes(3, 2, 1)
    for rows in ([True, False, True, True, False, True], [0, 2, 3, 5], [5, 3, 0, 2], np.array([5, 0, 3, 2])):
        taken = fed.take(rows)
        assert taken.sites == fed.sites
        assert sorted(taken.y.tolist()) == [0.0, 2.0, 3.0, 5.0]
        assert taken.n_samples.tolist() == [2, 1, 1]
        np.testing.assert_array_equal(taken.X, fed.X[taken.row_order])
    assert fed.take([2, 0, 3, 5]).y.tolist() == [2.0, 0.0, 3.0, 5.0]
    assert fed.take([0, 0, 3, 5]).y.tolist() == [0.0, 0.0, 3.0, 5.0]


def test_take_tells_of_sites_left_without_rows():
    fed = of_sizes(3, 2, 1)
    with pytest.raises(DataError, match="no rows would be left for 'd1', 'd2'"):
        fed.take([0, 1])
    sparse = fed.take([0, 1], allow_empty=True)
    assert sparse.n_samples.tolist() == [2, 0, 0]
    assert sparse["d2"].X.shape == (0, 2)
    assert fed.take([], allow_empty=True).n_samples.tolist() == [0, 0, 0]
    for rows, message in (
        ([True], "the mask has 1 value, but the federation has 6 rows"),
        ([6], r"row 6 is outside 0\.\.5"),
        ([-1], "row -1 is outside"),
        ([0.5], "bool array of shape"),
        ([[0]], "bool array of shape"),
    ):
        with pytest.raises(DataError, match=message):
            fed.take(rows)


def test_row_order_leads_back_to_the_caller_after_every_cut():
    site = np.random.default_rng(1).integers(0, 4, 40)
    fed = Federation.from_arrays(np.arange(40.0)[:, None], np.arange(40), site)
    train, test = fed.split(0.3, seed=2)
    for part in (fed, train, test, train.subset([2, 0]), test.take([3, 1, 0], allow_empty=True)):
        np.testing.assert_array_equal(part.row_order, part.y)


def test_subset():
    fed = of_sizes(3, 2, 1)
    sub = fed.subset(["d2", "d0"])
    assert sub.sites == ("d2", "d0")
    assert sub.y.tolist() == [5.0, 0.0, 1.0, 2.0]
    assert sub.subset(fed.subset(["d0"])).y.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(UnknownSiteError, match="'x'"):
        fed.subset(["d0", "x"])
    with pytest.raises(DataError, match="given twice"):
        fed.subset(["d0", "d0"])
    with pytest.raises(DataError, match="at least one site"):
        fed.subset([])


# --- split and folds ------------------------------------------------------------------------------------------


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


def test_the_split_is_the_same_in_every_process():
    code = (
        "import numpy as np; from fedkin.data.federation import Federation\n"
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
            timeout=PATIENCE,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        )
        answers.add(done.stdout)
    assert len(answers) == 1


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


def test_folds_are_shuffled_by_the_seed():
    fed = of_sizes(30, 30)
    assert not np.array_equal(fed.folds(5, 0), fed.folds(5, 1))
    assert not np.array_equal(fed.folds(5, 0)[:30], fed.folds(5, 0)[30:])
    assert not np.array_equal(fed.folds(5, 0)[:30], np.arange(30) % 5)


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


def test_cuts_keep_names_targets_and_offsets():
    fed = Federation.from_frame(TABLE, site="site", target="score", offset="log_time")
    train, test = fed.split(0.5)
    for part in (train, test, fed.subset(["n"]), fed.take([0, 2]), fed.standardized()[0]):
        assert part.feature_names == ("age", "smoker")
        assert part.target_name == "score"
        np.testing.assert_array_equal(part.offset, np.array(TABLE["log_time"])[part.row_order])
        np.testing.assert_array_equal(part.y, np.array(TABLE["score"])[part.row_order])


# --- in the order of time -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("days", [["2021-03-04", "2020-01-01", "2021-03-05"], [3.0, 1.0, 4.0]])
def test_times_are_numbers_or_days(days):
    assert Federation.from_arrays(np.eye(3), None, list("aaa"), time=days).row_order.tolist() == [1, 0, 2]
    with pytest.raises(DataError, match="the time '4 March' is neither a number nor a day such as 2021-03-04"):
        Federation.from_arrays(np.eye(2), None, list("aa"), time=["2021-03-04", "4 March"])


def test_the_split_of_a_site_does_not_depend_on_the_others():
    fed = of_sizes(10, 15, 20)
    _, test = fed.split(0.4, seed=7)
    for sites in (["d1"], ["d2", "d1"], ["d1", "d0"]):
        _, alone = fed.subset(sites).split(0.4, seed=7)
        np.testing.assert_array_equal(alone["d1"].y, test["d1"].y)
        np.testing.assert_array_equal(alone.subset(["d1"]).row_order, test.subset(["d1"]).row_order)
    _, other = fed.split(0.4, seed=8)
    assert not np.array_equal(other.y, test.y)
