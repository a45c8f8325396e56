"""The scikit-learn face: its own checks, sites as metadata, and what users get wrong."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import fields
from typing import get_type_hints

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict, cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import fedkin
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


def test_one_site_is_ordinary_least_squares():
    X, y, _ = three_sites()
    model = FedADMMRegressor(tol=1e-12).fit(X, y, site="all")
    plain = LinearRegression().fit(X, y)
    np.testing.assert_allclose(model.coef_, [plain.coef_], rtol=1e-8)
    np.testing.assert_allclose(model.predict(X), plain.predict(X), rtol=1e-8)
    assert (model.sites_, model.lam_, model.groups_.tolist()) == (("all",), 0.0, [0])
    assert model.score(X, y) == pytest.approx(plain.score(X, y))


@pytest.mark.parametrize(
    "labels", [["no", "yes"], [0, 1], [-1, 1], [False, True], [1.0, 2.0], ["a", "b", "c"], [3, 5, 9]]
)
def test_one_site_is_logistic_regression_with_any_labels(labels):
    X, y, _ = three_sites(classes=labels)
    model = FedADMMClassifier(tol=1e-9).fit(X, y, site="all")
    plain = LogisticRegression(C=np.inf, tol=1e-10, max_iter=2000).fit(X, y)
    assert model.classes_.tolist() == plain.classes_.tolist()
    np.testing.assert_allclose(model.predict_proba(X), plain.predict_proba(X), atol=1e-4)
    decided = model.decision_function(X)
    if len(labels) == 2:
        np.testing.assert_allclose(decided, plain.decision_function(X), atol=1e-2)
        assert model.coef_.shape == (1, 3)
    else:
        assert (decided.shape, model.coef_.shape, model.intercept_.shape) == ((120, 3), (1, 2, 3), (1, 2))
        assert (model.classes_[decided.argmax(axis=1)] == model.predict(X)).all()
    assert model.predict(X).dtype == model.classes_.dtype
    assert model.score(X, y) == pytest.approx(plain.score(X, y))


# --- several sites ------------------------------------------------------------------------------------------


def test_each_site_has_its_row():
    X, y, site = three_sites()
    model = FedADMMRegressor(lam=0.0, tol=1e-12).fit(X, y, site=site)
    assert set(model.sites_) == {"a", "b", "c"}
    for u, name in enumerate(model.sites_):
        own = LinearRegression().fit(X[site == name], y[site == name])
        np.testing.assert_allclose(model.coef_[u], own.coef_, rtol=1e-8)
        np.testing.assert_allclose(model.intercept_[u], own.intercept_, rtol=1e-8)
        np.testing.assert_allclose(model.predict(X[:4], site=name), own.predict(X[:4]), rtol=1e-8)
    mixed = model.predict(X, site=site)
    np.testing.assert_allclose(mixed[site == "b"], model.predict(X[site == "b"], site="b"))


def test_selection_finds_the_kin():
    X, y, site = three_sites()
    model = FedADMMRegressor(select="bonferroni").fit(X, y, site=site)
    groups = {frozenset(group) for group in model.model_.members()}
    assert groups == {frozenset("ab"), frozenset("c")}
    assert list(model.graph_.edge_ids()) in ([("b", "a")], [("a", "b")])
    assert model.selection_["candidates"] == 3 and model.selection_["kept"] == 1
    for nothing in (None, "none"):
        assert not hasattr(FedADMMRegressor(lam=0.1, select=nothing).fit(X, y, site=site), "selection_")
        refitted = FedADMMRegressor().fit(X, y, site=site).set_params(select=nothing, lam=0.1).fit(X, y, site=site)
        assert not hasattr(refitted, "selection_")


def test_attributes_are_those_of_the_model():
    X, y, site = three_sites(classes=["x", "y", "z"])
    model = FedADMMClassifier(lam=0.01, select=None).fit(X, y, site=site)
    assert model.coef_.shape == (3, 2, 3) and model.intercept_.shape == (3, 2)
    assert model.gap_ <= 1e-6 and model.n_iter_ > 0 and model.lam_ == 0.01
    assert model.model_.classes == ("x", "y", "z")
    assert model.graph_.n_edges == 3


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


def test_offsets():
    rng = np.random.default_rng(0)
    X, site, exposure = rng.normal(size=(400, 1)), np.repeat([1, 2], 200), rng.uniform(1, 50, 400)
    y = rng.poisson(exposure * np.exp(0.3 * X[:, 0] - 1))
    model = FedADMMRegressor(loss="poisson", lam=1.0).fit(X, y, site=site, offset=np.log(exposure))
    np.testing.assert_allclose(np.append(model.coef_[0], model.intercept_[0]), [0.3, -1.0], atol=0.05)
    rates = model.predict(X, site=site, offset=np.zeros(400))
    np.testing.assert_allclose(model.predict(X, site=site, offset=np.log(exposure)), rates * exposure)
    with pytest.raises(DataError, match="fitted with an offset"):
        model.predict(X, site=site)
    assert model.score(X, y, site=site, offset=np.log(exposure)) > 0.5


def test_data_frames_keep_their_names(tmp_path):
    X, y, site = three_sites()
    frame = pd.DataFrame(X, columns=["age", "dose", "weight"])
    model = FedADMMRegressor(lam=0.1).fit(frame, pd.Series(y), site=pd.Series(site))
    assert model.feature_names_in_.tolist() == ["age", "dose", "weight"] == list(model.model_.feature_names)
    np.testing.assert_allclose(model.predict(frame, site=pd.Series(site)), model.model_.predict(X, site))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame.rename(columns={"age": "years"}), site=site)
    model.model_.save(tmp_path / "m")
    shuffled = frame[["weight", "age", "dose"]].assign(site=site)
    np.testing.assert_allclose(fedkin.load(tmp_path / "m").predict(shuffled, site), model.predict(frame, site=site))


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


def test_predicting_an_unknown_site():
    X, y, site = three_sites()
    model = FedADMMRegressor(lam=0.1).fit(X, y, site=site)
    with pytest.raises(UnknownSiteError, match=r"'d' was not part of the fit"):
        model.predict(X[:1], site="d")


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


def test_a_site_with_one_class():
    X, y, site = three_sites(classes=["no", "yes"], n=60)
    keep = (site != "a") | (y == "yes")
    model = FedADMMClassifier(lam=0.05).fit(X[keep], y[keep], site=site[keep])
    assert set(model.predict(X, site=site)) == {"no", "yes"}
    assert np.isfinite(model.coef_).all()


def test_loss_objects():
    X, y, site = three_sites()
    one = FedADMMRegressor(loss=HuberLoss(0.5), lam=0.01).fit(X, y, site=site)
    assert one.model_.loss.delta == 0.5
    assert clone(one).loss == HuberLoss(0.5)


# --- metadata routing -----------------------------------------------------------------------------------------


def test_cross_validation_with_sites(routing):
    X, y, site = three_sites()
    model = FedADMMRegressor(lam=0.01).set_fit_request(site=True).set_score_request(site=True)
    scores = cross_val_score(model, X, y, cv=WithinSiteKFold(4), params={"site": site, "groups": site})
    expected = []
    for train, test in WithinSiteKFold(4).split(X, groups=site):
        fitted = clone(model).fit(X[train], y[train], site=site[train])
        expected.append(fitted.score(X[test], y[test], site=site[test]))
    assert scores.tolist() == expected
    assert scores.min() > 0.9  # one model for all would not do: c is the opposite of a and b


def test_grid_search_in_a_pipeline(routing):
    X, y, site = three_sites(classes=["no", "yes"], n=60)
    classifier = FedADMMClassifier(select=None).set_fit_request(site=True, graph=True)
    classifier.set_score_request(site=True).set_predict_request(site=True)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), classifier),
        {"fedadmmclassifier__lam": [10.0, 0.001]},
        cv=WithinSiteKFold(3),
    )
    search.fit(X, y, site=site, graph=Graph.complete("abc"), groups=site)
    assert search.best_params_ == {"fedadmmclassifier__lam": 0.001}
    assert search.best_estimator_.predict(X, site=site).shape == y.shape
    assert search.score(X, y, site=site) > 0.7


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


def test_one_site_may_be_named_once():
    X, y, _ = three_sites(n=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = FedADMMRegressor().fit(X, y, site="here")
        assert model.sites_ == ("here",)
        assert FedADMMRegressor().fit(X, y, site=7).sites_ == (7,)
    with pytest.warns(FedkinWarning, match="ONE model"):
        np.testing.assert_array_equal(FedADMMRegressor().fit(X, y).coef_, model.coef_)


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


def test_within_site_folds():
    site = np.array(["a"] * 7 + ["b"] * 2 + ["c"])
    folds = list(WithinSiteKFold(3, seed=1).split(np.zeros((10, 2)), groups=site))
    assert len(folds) == WithinSiteKFold(3).get_n_splits() == 3
    tested = np.sort(np.concatenate([test for _, test in folds]))
    assert tested.tolist() == list(range(9))  # the single row of c always trains
    for train, test in folds:
        assert set(site[train]) == {"a", "b", "c"}
        assert not set(train) & set(test) and len(train) + len(test) == 10
        assert 2 <= (site[test] == "a").sum() <= 3
    with pytest.raises(DataError, match="groups=site"):
        next(WithinSiteKFold(3).split(np.zeros((10, 2))))


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


@pytest.mark.parametrize("batch", [{}, {"batch_size": 10, "rounds": 4000}])
def test_the_rounds_of_fed_admm_reach_the_exact_solution(batch):
    X, y, site = three_sites()
    graph = Graph.complete("abc")
    exact = FedADMMRegressor(lam=0.05, tol=1e-9).fit(X, y, site=site, graph=graph)
    rounds = FedADMMRegressor(lam=0.05, tol=1e-8, solver="fedadmm", **batch).fit(X, y, site=site, graph=graph)
    np.testing.assert_allclose(rounds.coef_, exact.coef_, atol=1e-3)
    assert rounds.gap_ <= 1e-8
    assert rounds.n_iter_ <= rounds.rounds


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
