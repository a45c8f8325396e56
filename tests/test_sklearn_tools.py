"""scikit-learn's tools with sites: routed as metadata, bound to a model, or in a column of X."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone
from sklearn.model_selection import cross_val_score

from fedkin import (
    FedADMMClassifier,
    FedADMMRegressor,
    KinClassifier,
    KinRegressor,
    SiteScorer,
    WithinSiteKFold,
)
from fedkin.data import Federation
from fedkin.errors import DataError, UnknownSiteError

FUSED = {"lam": 0.01, "select": None}
CLASSIFIERS = [FedADMMClassifier(**FUSED), KinClassifier()]
REGRESSORS = [FedADMMRegressor(**FUSED), KinRegressor()]


def sites(classes: bool, n: int = 60):
    """Sites a, b, d alike, c the opposite."""
    rng = np.random.default_rng(0)
    site = np.repeat(["a", "b", "c", "d"], n)
    X = rng.normal(size=(4 * n, 2))
    eta = 2 * X[:, 0] * np.where(site == "c", -1.0, 1.0)
    y = (eta + rng.logistic(size=4 * n) > 0).astype(int) if classes else eta + 0.5 * rng.normal(size=4 * n)
    order = rng.permutation(4 * n)
    frame = pd.DataFrame(X, columns=["age", "dose"]).assign(site=site)
    return frame.iloc[order].reset_index(drop=True), y[order], site[order]


def with_column(model):
    return clone(model).set_params(site_column="site")


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


# --- a column of X: nothing else has to know ------------------------------------------------------------------


def test_columns_by_number_and_what_is_wrong_with_them():
    frame, y, site = sites(classes=False)
    codes = np.column_stack([frame[["age", "dose"]], np.searchsorted(["a", "b", "c", "d"], site)])
    model = KinRegressor(site_column=2).fit(codes, y)
    assert sorted(model.sites_) == [0, 1, 2, 3]
    assert model.coef_.shape == (4, 2)
    assert model.predict(codes[:2]).shape == (2,)
    assert model.predict(codes[:2, :2], site=[0, 1]).shape == (2,)
    with pytest.raises(DataError, match="no column 2, which site_column= names"):
        model.predict(codes[:2, :2])
    with pytest.raises(DataError, match="'site' is a name, but X is an array"):
        KinRegressor(site_column="site").fit(codes, y)
    with pytest.raises(DataError, match="no column 'ward', which site_column= names"):
        KinRegressor(site_column="ward").fit(frame, y)


# --- routed as metadata ---------------------------------------------------------------------------------------


def test_scores_that_are_not_told_the_site_are_loud(routing):
    frame, y, site = sites(classes=True)
    X = frame[["age", "dose"]]
    routed = {"cv": WithinSiteKFold(3), "params": {"site": site, "groups": site}, "error_score": "raise"}
    model = KinClassifier()
    with pytest.raises(DataError, match=r"4 sites.*fedkin.SiteScorer.*model.at\(site\).*site_column="):
        cross_val_score(model, X, y, scoring="roc_auc", **routed)
    assert cross_val_score(model, X, y, scoring=SiteScorer("roc_auc"), **routed).min() > 0.75


# --- bound to a model -----------------------------------------------------------------------------------------


# --- rows that come later -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [*REGRESSORS, *CLASSIFIERS])
def test_rows_that_come_later_give_the_fit_of_all_rows(model):
    frame, y, site = sites(classes=hasattr(model, "predict_proba"))
    X = frame[["age", "dose"]].to_numpy()
    early = site != "d"
    early[200:] = False  # new rows of sites that are there, and a new site
    grown = clone(model).fit(X[early], y[early], site=site[early])
    assert len(grown.sites_) == 3
    grown.partial_fit(X[~early], y[~early], site=site[~early])
    order = np.concatenate([np.flatnonzero(early), np.flatnonzero(~early)])
    whole = clone(model).fit(X[order], y[order], site=site[order])
    assert grown.sites_ == whole.sites_
    if hasattr(model, "predict_proba"):  # the rows are kept
        assert np.array_equal(grown.coef_, whole.coef_)
        assert np.array_equal(grown.intercept_, whole.intercept_)
    else:
        assert not any(isinstance(part, Federation) for part in vars(grown._so_far).values())
        assert np.allclose(grown.coef_, whole.coef_, atol=1e-6)
        assert np.allclose(grown.intercept_, whole.intercept_, atol=1e-6)
        assert grown._so_far.sums.size < X.size
    first = clone(model).partial_fit(X, y, site=site)
    assert np.array_equal(first.coef_, clone(model).fit(X, y, site=site).coef_)
    with pytest.raises(DataError, match="not told the sites"):
        grown.partial_fit(X, y)
    with pytest.raises(DataError, match="all or none"):
        grown.partial_fit(X, y, site=site, offset=np.zeros(len(y)))


def test_sums_that_are_kept_lose_no_digits_far_from_zero():
    rng = np.random.default_rng(0)
    X, site = rng.normal(size=(400, 2)) + np.array([1e5, -3e4]), np.repeat(["a", "b"], 200)
    y = X @ [1.0, 2.0] + rng.normal(size=400)
    weight = rng.integers(1, 4, 400)
    for more in ({}, {"offset": X[:, 0]}, {"sample_weight": weight}):
        model = FedADMMRegressor(lam=0.01, select=None, tol=1e-12)
        parts = [{name: values[part] for name, values in more.items()} for part in (slice(250), slice(250, None))]
        grown = clone(model).fit(X[:250], y[:250], site=site[:250], **parts[0])
        grown.partial_fit(X[250:], y[250:], site=site[250:], **parts[1])
        whole = clone(model).fit(X, y, site=site, **more)
        assert np.allclose(grown.coef_, whole.coef_, rtol=1e-6)
        at = more.get("offset", np.zeros(400)) if "offset" in more else None
        assert np.allclose(grown.predict(X, site, at), whole.predict(X, site, at), rtol=1e-8)


def test_few_rows_are_kept_as_they_are():
    frame, y, site = sites(classes=False)
    X = frame[["age", "dose"]].to_numpy()
    grown = KinRegressor().fit(X[:12], y[:12], site=site[:12])
    assert isinstance(grown._so_far.rows, Federation)
    grown.partial_fit(X[12:], y[12:], site=site[12:])
    assert not hasattr(grown._so_far, "rows")


def test_a_class_that_comes_later():
    frame, y, site = sites(classes=True)
    X = frame[["age", "dose"]].to_numpy()
    model = KinClassifier().fit(X[:200], y[:200], site=site[:200])
    model.partial_fit(X[200:], np.where(X[200:, 1] > 1, 2, y[200:]), site=site[200:])
    assert model.classes_.tolist() == [0, 1, 2]
    assert model.predict_proba(X, site=site).shape == (240, 3)


@pytest.mark.parametrize("model", [KinRegressor(), KinRegressor(loss="poisson"), KinClassifier()], ids=str)
def test_kin_begins_where_it_ended(model):
    frame, y, site = sites(classes=hasattr(model, "predict_proba"))
    X = frame[["age", "dose"]].to_numpy()
    y = np.round(np.abs(y)) if model.loss == "poisson" else y
    warm = clone(model).set_params(warm_start=True).fit(X[:200], y[:200], site=site[:200])
    warm.fit(X, y, site=site)
    cold = clone(model).fit(X, y, site=site)
    spread = np.sqrt(np.stack([np.diag(part) for part in cold.kin_.covariance]))
    assert (np.abs(warm.kin_.theta - cold.kin_.theta) < 0.1 * spread).all()
    again = clone(model).set_params(warm_start=True).fit(X, y, site=site)
    assert np.array_equal(again.coef_, cold.coef_)  # the first fit has nothing to begin with


def test_warm_start_keeps_lam():
    frame, y, site = sites(classes=False)
    X = frame[["age", "dose"]].to_numpy()
    model = FedADMMRegressor(select=None, cv=2, warm_start=True).fit(X[:150], y[:150], site=site[:150])
    first = model.lam_
    model.fit(X, y, site=site)
    assert model.lam_ == first
    assert clone(model).set_params(warm_start=False).fit(X, y, site=site).lam_ != first


# --- what users get wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [FedADMMRegressor(**FUSED), KinRegressor(), KinClassifier()], ids=str)
def test_a_column_of_text_is_named(model):
    frame, y, site = sites(classes=hasattr(model, "predict_proba"))
    with pytest.raises(DataError, match=r"column 'site' of X holds text, such as '[abcd]'.*site_column='site'"):
        clone(model).fit(frame, y, site=site)
    with pytest.raises(DataError, match=r"column 2 of X holds text.*site_column=2"):
        clone(model).fit(frame.to_numpy(), y)
    fitted = clone(model).fit(frame[["age", "dose"]], y, site=site)
    with pytest.raises(DataError, match="column 'dose' of X holds text"):
        fitted.predict(frame[["age"]].assign(dose="high"), site=site)
    ward = frame.assign(ward=np.where(site == "a", "w1", "w2"))
    with pytest.raises(DataError, match=r"column 'ward' of X holds text, such as 'w[12]'.*OneHotEncoder"):
        clone(model).set_params(site_column="site").fit(ward, y)


def test_folds_that_leave_out_a_site_say_what_to_use():
    frame, y, site = sites(classes=False)
    by_site = np.argsort(site, kind="stable")
    with pytest.raises(UnknownSiteError, match=r"In cross-validation use cv=fedkin\.WithinSiteKFold"):
        cross_val_score(
            with_column(FedADMMRegressor(**FUSED)), frame.iloc[by_site], y[by_site], cv=4, error_score="raise"
        )
