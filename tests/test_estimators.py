"""The scikit-learn face: its own checks, sites as metadata, and what users get wrong."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import get_type_hints

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.linear_model import LinearRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import KFold, cross_val_predict, cross_val_score, cross_validate
from sklearn.utils.estimator_checks import parametrize_with_checks

from fedkin import FedADMMClassifier, FedADMMRegressor, Graph, SiteScorer, WithinSiteKFold
from fedkin.errors import DataError, FedkinWarning, GraphError, GraphWarning, ParameterError, UnknownSiteError
from fedkin.fitting import FitOptions
from fedkin.losses import HuberLoss


# several checks fit classes that can be separated, of which a DegenerateSiteWarning rightly tells; all fit one site
@pytest.mark.filterwarnings("ignore::fedkin.errors.DegenerateSiteWarning")
@pytest.mark.filterwarnings("ignore:fit was not told the sites:fedkin.errors.FedkinWarning")
@parametrize_with_checks(
    [
        FedADMMRegressor(),
        FedADMMClassifier(),
        FedADMMRegressor(loss="huber", select="holm", lam=0.1),
        FedADMMRegressor(loss="poisson"),
    ],
    expected_failed_checks=lambda estimator: {
        "check_sample_weight_equivalence_on_dense_data": "it sets cv to splits of rows; tested with weights below"
    },
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def three_sites(n=40, classes=None, seed=0):
    """Sites a and b alike, c the opposite."""
    rng = np.random.default_rng(seed)
    X, site = rng.normal(size=(3 * n, 3)), np.repeat(["a", "b", "c"], n)
    eta = 2 * X[:, 0] * np.where(site == "c", -1.0, 1.0) + 1.0
    if classes is None:
        y = eta + 0.5 * rng.normal(size=3 * n)
    else:
        cuts = np.quantile(eta, np.arange(1, len(classes)) / len(classes))
        y = np.array(classes)[np.searchsorted(cuts, eta + rng.logistic(size=3 * n))]
    order = rng.permutation(3 * n)
    return X[order], y[order], site[order]


# --- one site: as any other estimator -----------------------------------------------------------------------


# --- several sites ------------------------------------------------------------------------------------------


def test_graphs_of_several_kinds():
    import networkx

    X, y, site = three_sites()
    graph = Graph(["c", "a", "b"], [("a", "b")])
    one = FedADMMRegressor(lam=0.1).fit(X, y, site=site, graph=graph)
    other = FedADMMRegressor(lam=0.1).fit(X, y, site=site, graph=graph.to_networkx())
    np.testing.assert_array_equal(one.coef_, other.coef_)
    assert one.graph_.sites == one.sites_
    with pytest.raises(ParameterError, match=r"networkx graph, got list"):
        FedADMMRegressor(lam=0.1).fit(X, y, site=site, graph=[("a", "b")])
    with pytest.raises(GraphError, match="'z'"):
        FedADMMRegressor(lam=0.1).fit(X, y, site=site, graph=networkx.path_graph(["a", "b", "c", "z"]))


def test_random_state_reaches_the_folds():
    X, y, site = three_sites(n=12)

    def chosen(state):
        return FedADMMRegressor(random_state=state, cv=2, select=None).fit(X, y, site=site).lam_

    assert len({chosen(seed) for seed in (0, 1, 2)}) > 1
    assert chosen(None) == chosen(0)
    assert chosen(np.random.RandomState(3)) == chosen(np.random.RandomState(3))


def test_folds_in_parallel_choose_the_same():
    X, y, site = three_sites(n=15)
    one, two = (FedADMMRegressor(n_jobs=jobs, cv=2, select=None).fit(X, y, site=site) for jobs in (None, 2))
    assert one.lam_ == two.lam_
    np.testing.assert_array_equal(one.coef_, two.coef_)


# --- what users get wrong -------------------------------------------------------------------------------------


def test_predicting_without_sites():
    X, y, site = three_sites()
    model = FedADMMRegressor(lam=0.1).fit(X, y, site=site)
    for call in (model.predict, lambda X: model.score(X, y)):
        with pytest.raises(DataError, match=r"3 sites.*site= one of"):
            call(X)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (FedADMMRegressor(loss="logistic"), "use it with FedADMMClassifier"),
        (FedADMMRegressor(loss="mean"), "fedkin.Problem"),
        (FedADMMRegressor(loss="cubic"), "unknown loss 'cubic'"),
        (FedADMMClassifier(loss="linear"), "not for classes"),
        (FedADMMRegressor(solver="magic"), "solver must be"),
        (FedADMMRegressor(lam="auto"), "lam must be"),
        (FedADMMRegressor(select="fdr"), "select must be"),
        (FedADMMRegressor(cv=1), "at least 2"),
    ],
)
def test_parameters_out_of_range_are_told_at_fit(estimator, message):
    X, y, site = three_sites(classes=[0, 1])
    with pytest.raises(ParameterError, match=message):
        clone(estimator).fit(X, y, site=site)


def test_bad_rows_and_sites():
    X, y, site = three_sites()
    with pytest.raises(DataError, match="site= has 119"):
        FedADMMRegressor(lam=0.1).fit(X, y, site=site[1:])
    broken = X.copy()
    broken[3, 1] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        FedADMMRegressor(lam=0.1).fit(broken, y, site=site)
    with pytest.raises(DataError, match="all 120 rows have the class"):
        FedADMMClassifier().fit(X, np.ones(120), site=site)


def test_loss_objects():
    X, y, site = three_sites()
    one = FedADMMRegressor(loss=HuberLoss(0.5), lam=0.01).fit(X, y, site=site)
    assert one.model_.loss.delta == 0.5
    assert clone(one).loss == HuberLoss(0.5)


# --- metadata routing -----------------------------------------------------------------------------------------


def test_offsets_travel_too(routing):
    X, y, site = three_sites(n=20)
    model = FedADMMRegressor(lam=0.01).set_fit_request(site=True, offset=True)
    model.set_score_request(site=True, offset=True)
    shift = np.where(site == "a", 30.0, 0.0)
    params = {"site": site, "groups": site, "offset": shift}
    scores = cross_val_score(model, X, y + shift, cv=WithinSiteKFold(3), params=params)
    assert scores.min() > 0.9


def test_cross_val_predict_raises_instead_of_guessing(routing):
    """scikit-learn hands metadata to fit and score there, but not to predict."""
    X, y, site = three_sites(n=20)
    model = FedADMMRegressor(lam=0.01).set_fit_request(site=True).set_predict_request(site=True)
    with pytest.raises(DataError, match="3 sites"):
        cross_val_predict(model, X, y, cv=WithinSiteKFold(3), params={"site": site, "groups": site})


def test_folds_that_drop_whole_sites_end_in_a_clear_error(routing):
    X, y, site = three_sites(n=20)
    order = np.argsort(site)
    model = FedADMMRegressor(lam=0.01).set_fit_request(site=True).set_score_request(site=True)
    with pytest.raises(UnknownSiteError, match="was not part of the fit"):
        cross_validate(model, X[order], y[order], cv=KFold(3), params={"site": site[order]}, error_score="raise")


def test_without_routing_scores_cannot_be_wrong_silently():
    X, y, site = three_sites(n=20)
    with pytest.raises(DataError, match="3 sites"):
        FedADMMRegressor(lam=0.01).fit(X, y, site=site).score(X, y)


def test_groups_without_routing_are_told_of():
    """cross_val_score hands groups to the splitter only: each fit is one model for all sites, and must say so."""
    X, y, site = three_sites(n=20)
    with pytest.warns(FedkinWarning, match=r"ONE model.*site=.*metadata routing.*groups= never reaches"):
        scores = cross_val_score(FedADMMRegressor(lam=0.01), X, y, groups=site, cv=WithinSiteKFold(3))
    assert scores.max() < 0.9  # a, b and c together make no good model


def test_options_are_those_of_fit_options():
    renamed = {"cv_folds": "cv", "seed": "random_state"}
    for estimator in (FedADMMRegressor, FedADMMClassifier):
        expected = {renamed.get(item.name, item.name): item.default for item in fields(FitOptions)}
        del expected["method"], expected["messages"]  # theirs is the fused estimator
        expected |= {"warm_start": False, "site_column": None}
        assert estimator().get_params() == expected
        parameters = inspect.signature(estimator).parameters
        assert {name: one.default for name, one in parameters.items()} == expected
        hints = get_type_hints(estimator.__init__)
        assert set(hints) == {*expected, "return"} and hints["refit"] is bool and hints["tol"] is float
        assert all(f"\n    {name} : " in estimator.__doc__ for name in expected)
        with pytest.raises(TypeError, match="lamda"):
            estimator(lamda=1.0)


def test_scores_of_scikit_learn_know_the_site():
    rng = np.random.default_rng(0)
    X, site = rng.normal(size=(240, 2)), np.repeat(["a", "b", "c"], 80)
    y = (X[:, 0] * np.where(site == "c", -2.0, 2.0) + rng.logistic(size=240) > 0).astype(int)
    routed = {"params": {"site": site, "groups": site}, "cv": WithinSiteKFold(3), "error_score": "raise"}
    with sklearn.config_context(enable_metadata_routing=True):
        model = FedADMMClassifier(lam=1e-3).set_fit_request(site=True)
        together = cross_val_score(model, X, y, scoring=SiteScorer("roc_auc"), **routed)
        each = cross_val_score(model, X, y, scoring=SiteScorer("roc_auc", per_site=True), **routed)
    assert together.min() > 0.75
    assert each.min() > 0.75
    fitted = FedADMMClassifier(lam=1e-3).fit(X, y, site=site)
    by_hand = [roc_auc_score(y[site == u], fitted.predict_proba(X[site == u], site=u)[:, 1]) for u in "abc"]
    found = SiteScorer("roc_auc", per_site=True)(fitted, X, y, site=site)
    assert found == pytest.approx(np.mean(by_hand), abs=1e-12)


def test_auto_loss_is_the_one_of_the_estimator():
    X, site = np.arange(12.0).reshape(-1, 1), np.repeat(["a", "b"], 6)
    counts = np.arange(12) % 3
    assert FedADMMRegressor(lam=0.1).fit(X, counts, site=site).model_.loss.name == "linear"
    assert FedADMMClassifier(lam=0.1).fit(X, counts % 2, site=site).model_.loss.name == "logistic"


def test_sites_that_a_graph_does_not_name_have_no_edges():
    networkx = pytest.importorskip("networkx")
    rng = np.random.default_rng(0)
    X, site = rng.normal(size=(60, 2)), np.repeat(["a", "b", "c"], 20)
    y = X[:, 0] + 0.1 * rng.normal(size=60)
    with pytest.warns(GraphWarning, match="does not name site 'c'"):
        model = FedADMMRegressor(lam=0.1).fit(X, y, site=site, graph=networkx.path_graph(["a", "b"]))
    assert model.graph_.degree.tolist() == [1, 1, 0]
    np.testing.assert_allclose(model.coef_[2], LinearRegression().fit(X[site == "c"], y[site == "c"]).coef_, rtol=1e-4)
