"""Curves: the basis beside patsy's, knots, and the same curve from rows, files, contracts and arrays."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from patsy import dmatrix
from scipy.interpolate import CubicSpline

import fedkin
from fedkin import KinRegressor
from fedkin.data import Column, Federation
from fedkin.data.cells import basis_range, natural_basis, quantile_knots
from fedkin.errors import DataError, ParameterError
from fedkin.federate import Contract
from fedkin.federate.received import data_bounds
from fedkin.fitting import FitOptions, fit

KNOTS = (2.0, 3.0, 7.0, 8.5, 20.0)


def table(n=400, sites=8, seed=0):
    rng = np.random.default_rng(seed)
    age, site = rng.uniform(20, 80, n), rng.integers(0, sites, n)
    days = np.sin(age / 10) + rng.normal(0, 0.4, sites)[site] + rng.normal(0, 0.3, n)
    return {"site": [f"s{u}" for u in site], "age": age, "x": rng.normal(size=n), "days": days}


def test_the_basis_is_patsys_also_beyond_the_knots():
    values = np.random.default_rng(0).uniform(-10, 40, 200)
    inner = {"knots": KNOTS[1:-1], "lower_bound": KNOTS[0], "upper_bound": KNOTS[-1]}
    formula = "cr(x, knots=knots, lower_bound=lower_bound, upper_bound=upper_bound) - 1"
    theirs = np.asarray(dmatrix(formula, inner | {"x": values}))
    np.testing.assert_allclose(natural_basis(values, KNOTS), theirs[:, 1:], atol=1e-12)


def test_between_the_knots_it_is_scipys_natural_spline():
    values = np.linspace(KNOTS[0], KNOTS[-1], 101)
    height = np.array([0.3, -1.0, 2.0, 0.5, 1.0])
    ours = height[0] + natural_basis(values, KNOTS) @ (height[1:] - height[0])
    np.testing.assert_allclose(ours, CubicSpline(KNOTS, height, bc_type="natural")(values), atol=1e-12)
    assert np.isnan(natural_basis(np.array([np.nan]), KNOTS)).all()


def test_ranges_hold_and_are_tight():
    low, high = basis_range(KNOTS, 0.0, 30.0)
    found = natural_basis(np.linspace(0, 30, 20_001), KNOTS)
    assert (low <= found.min(axis=0)).all() and (found.max(axis=0) <= high).all()
    np.testing.assert_allclose(low, found.min(axis=0), atol=0.05)
    np.testing.assert_allclose(high, found.max(axis=0), atol=0.05)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.arange(101.0), (5.0, 27.0, 50.0, 72.0, 95.0)),
        ([1.0, 2.0, 3.0] * 9, (1.0, 2.0, 3.0)),  # a knot at each value
        ([0.0] * 90 + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (0.3, 1.65, 3.0, 4.35, 5.7)),  # most are alike
        ([0.0, 1.0] * 9, ()),
        ([np.nan, 0.0, 1.0], ()),
    ],
)
def test_knots(values, expected):
    assert quantile_knots(np.array(values)) == pytest.approx(expected)


def test_one_site_without_a_penalty_is_statsmodels_with_patsys_basis():
    rows = pd.DataFrame(table()).assign(site="one")
    federation = Federation.from_frame(rows, site="site", target="days", spline=["age"])
    knots = federation.schema.features[0].knots
    model = fit(federation, None, FitOptions(method="fused", lam=0.0, select="none"))
    inner = {"k": knots[1:-1], "low": knots[0], "high": knots[-1], "age": rows["age"], "x": rows["x"]}
    design = np.asarray(dmatrix("cr(age, knots=k, lower_bound=low, upper_bound=high) + x - 1", inner))
    theirs = sm.OLS(rows["days"], design).fit().fittedvalues
    np.testing.assert_allclose(model.predict(rows), theirs, rtol=1e-6, atol=1e-6)


def test_a_saved_model_draws_the_same_curve(tmp_path):
    federation = Federation.from_frame(table(), site="site", target="days", spline={"age": 4})
    assert federation.feature_names == (*(f"age at {one:.12g}" for one in federation.schema.features[0].knots[1:]), "x")
    model = fit(federation)
    model.save(tmp_path / "model")
    new = {"age": [10.0, 50.0, 99.0], "x": [0.0, 0.0, 1.0]}
    np.testing.assert_array_equal(fedkin.load(tmp_path / "model").predict(new, "s1"), model.predict(new, "s1"))
    curve = model.predict({"age": np.linspace(25, 75, 30), "x": np.zeros(30)}, "s1")
    truth = np.sin(np.linspace(2.5, 7.5, 30))
    assert np.corrcoef(curve, truth)[0, 1] > 0.98


def test_files_have_the_knots_of_rows(tmp_path):
    rows = pd.DataFrame(table())
    rows.to_parquet(tmp_path / "rows.parquet", row_group_size=50)
    memory = Federation.from_frame(rows, site="site", target="days", spline=["age"])
    streamed = fedkin.summarise_files(tmp_path / "rows.parquet", site="site", target="days", spline=["age"])
    assert streamed.schema.features == memory.schema.features
    curve = streamed.schema.features[0].encoded
    ours, theirs = fit(streamed.summaries, None, FitOptions(fixed=curve)), fit(memory)
    assert theirs.kin.fixed == curve  # by default, where the schema is known
    np.testing.assert_allclose(ours.coef, theirs.coef, atol=0.1)  # up to what the sampler makes of rounding


CONTRACT = """
name = "stay"
loss = "linear"
[features.age]
low = 18
high = 90
knots = [25, 40, 55, 70]
[target]
name = "days"
low = -5
high = 5
"""


def test_a_contract_names_the_knots():
    contract = Contract.from_toml(CONTRACT, "stay.toml")
    assert contract.schema.names == ("age at 40", "age at 55", "age at 70")
    assert Contract.from_bytes(contract.to_bytes()) == contract
    rows = contract.prepare({name: np.array(values) for name, values in table().items() if name != "site"})
    np.testing.assert_array_equal(rows.X[:, 1:], natural_basis(np.array(table()["age"]), (25, 40, 55, 70)))
    bounds, _ = data_bounds(contract)
    grid = np.abs(natural_basis(np.linspace(18, 90, 5001), (25, 40, 55, 70))).max(axis=0)
    assert (bounds[1:] >= grid).all()
    with pytest.raises(ParameterError, match="at least 3 ascending"):
        Column("age", knots=(1.0, 1.0, 2.0))
    with pytest.raises(ParameterError, match="no mean and no scale"):
        Column("age", knots=(1.0, 2.0, 3.0), mean=1.0)


@pytest.mark.parametrize(
    ("spline", "words"),
    [
        (["ages"], "no column 'ages' for the curves"),
        (["ward"], "is not a column of numbers"),
        (["two"], "fewer than three distinct values"),
        (["days"], "cannot be both the target and a curve"),
    ],
)
def test_what_is_no_curve_is_refused(spline, words):
    rows = table() | {"ward": ["A", "B"] * 200, "two": [0.0, 1.0] * 200}
    with pytest.raises(DataError, match=words):
        Federation.from_frame(rows, site="site", target="days", spline=spline)


def test_estimators_take_columns_by_name_or_number():
    rows = pd.DataFrame(table())
    model = KinRegressor(spline=[0]).fit(rows[["age", "x"]].to_numpy(), rows["days"], site=rows["site"])
    named = KinRegressor(spline={"age": 5}).fit(rows[["age", "x"]], rows["days"], site=rows["site"])
    frame = Federation.from_frame(rows, site="site", target="days", spline=["age"])
    expected = fit(frame).predict(rows, rows["site"])
    for one, X in ((model, rows[["age", "x"]].to_numpy()), (named, rows[["age", "x"]])):
        np.testing.assert_allclose(one.predict(X, site=rows["site"]), expected, rtol=1e-10)
    assert named.model_.feature_names == frame.feature_names
    found = named.predict(rows[["age", "x"]], rows["site"])
    np.testing.assert_array_equal(named.model_.predict(rows, rows["site"]), found)
    half = np.arange(len(rows)) % 2 == 0
    X = rows[["age", "x"]].to_numpy()
    grown = KinRegressor(spline=[0]).fit(X[half], rows["days"][half], site=rows["site"][half])
    knots = grown.model_.schema.features[0].knots
    grown.partial_fit(X[~half], rows["days"][~half], site=rows["site"][~half])
    assert grown.model_.schema.features[0].knots == knots
    again = KinRegressor(spline={0: knots}).fit(X, rows["days"], site=rows["site"])
    np.testing.assert_allclose(grown.predict(X, site=rows["site"]), again.predict(X, site=rows["site"]), atol=0.05)
    with pytest.raises(DataError, match="is not a column of numbers"):
        KinRegressor(spline=["size"]).fit(rows[["age", "x"]], rows["days"], site=rows["site"])
