"""The scikit-learn estimators: its own checks, sites as metadata or a column of X, later rows, and refusals."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import get_type_hints

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GroupKFold, cross_val_predict, cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from fedkin import (
    FedADMMClassifier,
    FedADMMRegressor,
    Graph,
    KinClassifier,
    KinRegressor,
    KinSurvival,
    SiteScorer,
    WithinSiteKFold,
)
from fedkin.errors import DataError, FedkinWarning, GraphError, GraphWarning, ParameterError, UnknownSiteError
from fedkin.fitting import FitOptions
from fedkin.fitting.options import DEFAULTS, KIN_ONLY, SHARED


# several checks fit classes that can be separated, of which a DegenerateSiteWarning rightly tells; all fit one site
@pytest.mark.filterwarnings("ignore::fedkin.errors.DegenerateSiteWarning")
@pytest.mark.filterwarnings("ignore:fit was not told the sites:fedkin.errors.FedkinWarning")
@pytest.mark.filterwarnings("ignore:counts vary:fedkin.errors.FedkinWarning")
@parametrize_with_checks(
    [
        FedADMMRegressor(),
        FedADMMClassifier(),
        FedADMMRegressor(loss="huber", select="holm", lam=0.1),
        FedADMMRegressor(loss="poisson"),
        KinRegressor(),
        KinClassifier(),
        KinRegressor(loss="poisson"),
        KinRegressor(loss="huber"),
        KinRegressor(loss="gamma"),
    ],
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def some_sites(names="abc", n=40, q=3, classes=None):
    """Sites that are alike, but for c, which is the opposite."""
    rng = np.random.default_rng(0)
    site = np.repeat(list(names), n)
    X = rng.normal(size=(len(site), q))
    eta = 2 * X[:, 0] * np.where(site == "c", -1.0, 1.0) + 1.0
    y = eta + 0.5 * rng.normal(size=len(site))
    if classes is not None:
        cuts = np.quantile(eta, np.arange(1, len(classes)) / len(classes))
        y = np.array(classes)[np.searchsorted(cuts, eta + rng.logistic(size=len(site)))]
    order = rng.permutation(len(site))
    return X[order], y[order], site[order]


# --- several sites ------------------------------------------------------------------------------------------


def test_graphs_of_several_kinds():
    import networkx

    X, y, site = some_sites()
    graph = Graph(["c", "a", "b"], [("a", "b")])
    one = FedADMMRegressor(lam=0.1).fit(X, y, site=site, graph=graph)
    other = FedADMMRegressor(lam=0.1).fit(X, y, site=site, graph=graph.to_networkx())
    np.testing.assert_array_equal(one.coef_, other.coef_)
    assert one.graph_.sites == one.sites_
    with pytest.raises(ParameterError, match=r"networkx graph, got list"):
        FedADMMRegressor(lam=0.1).fit(X, y, site=site, graph=[("a", "b")])
    with pytest.raises(GraphError, match="'z'"):
        FedADMMRegressor(lam=0.1).fit(X, y, site=site, graph=networkx.path_graph(["a", "b", "c", "z"]))
    with pytest.warns(GraphWarning, match="does not name site 'c'"):
        model = FedADMMRegressor(lam=0.1).fit(X, y, site=site, graph=networkx.path_graph(["a", "b"]))
    alone = model.sites_.index("c")
    assert model.graph_.degree.tolist() == [int(u != alone) for u in range(3)]
    own = LinearRegression().fit(X[site == "c"], y[site == "c"])
    np.testing.assert_allclose(model.coef_[alone], own.coef_, rtol=1e-4)


def test_random_state_reaches_the_folds():
    X, y, site = some_sites(n=12)

    def chosen(state):
        return FedADMMRegressor(random_state=state, cv_folds=2, select=None).fit(X, y, site=site).lam_

    assert len({chosen(seed) for seed in (0, 1, 2)}) > 1
    assert chosen(None) == chosen(0)
    assert chosen(np.random.RandomState(3)) == chosen(np.random.RandomState(3))


def test_folds_in_parallel_choose_the_same():
    X, y, site = some_sites(n=15)
    one, two = (FedADMMRegressor(n_jobs=jobs, cv_folds=2, select=None).fit(X, y, site=site) for jobs in (None, 2))
    assert one.lam_ == two.lam_
    np.testing.assert_array_equal(one.coef_, two.coef_)


# --- sites that were not part of the fit ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KinRegressor, KinClassifier, FedADMMRegressor, FedADMMClassifier])
def test_unseen_sites_are_predicted_by_the_population(kind, routing):
    classes = ["no", "yes"] if "Classifier" in kind.__name__ else None
    X, y, site = some_sites(classes=classes)
    how = {"lam": 0.1} if "ADMM" in kind.__name__ else {}
    model = kind(**how).fit(X, y, site=site)
    here = site == "a"
    with pytest.raises(UnknownSiteError, match="'new' was not part of the fit"):
        model.predict(X, site="new")
    found = model.predict(X, site=np.where(here, "a", "new"), unseen="population")
    np.testing.assert_array_equal(found[here], model.predict(X[here], site="a"))
    np.testing.assert_array_equal(found[~here], model.model_.population.predict(X[~here]))
    scores = cross_val_score(
        kind(unseen="population", **how), X, y, cv=GroupKFold(3), params={"site": site, "groups": site}
    )
    assert np.isfinite(scores).all()
    with pytest.raises(ParameterError, match="unseen"):
        model.predict(X, site="new", unseen="mean")


def test_a_site_is_found_by_its_text_and_an_unknown_name_is_told_with_a_suggestion():
    X, y, _ = some_sites()
    model = KinRegressor(unseen="population").fit(X, y, site=np.repeat([13, 2, 3], 40))
    np.testing.assert_array_equal(model.predict(X[:9], site="13"), model.predict(X[:9], site=13))
    fitted = model.model_
    assert fitted.summary(site="13") == fitted.summary(site=13)
    assert fitted.contrast("13", "2").estimate.tolist() == fitted.contrast(13, 2).estimate.tolist()
    assert fitted.part(["2", "13"]).sites == (2, 13)
    for ask in (fitted.kin.contrast, fitted.position, lambda site: fitted.summary(site=site)):
        with pytest.raises(UnknownSiteError, match=r"site '31' was not part of the fit.*did you mean '3'"):
            ask("31")
    both = KinRegressor().fit(X, y, site=np.repeat(np.array([1, "1", "one"], dtype=object), 40)).model_
    assert both.position(1) == 0 and both.position("1") == 1


def test_intervals_of_unseen_sites_cover():
    """Ninety per cent intervals of the mean, at sites whose slopes and intercepts are drawn like those of the fit."""
    inside, wide, narrow = [], [], []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        X, site = rng.normal(size=(1000, 1)), np.repeat(np.arange(50), 20)
        level, slope = rng.normal(0, 1.0, 50), rng.normal(1, 0.5, 50)
        truth = level[site] + slope[site] * X[:, 0]
        y, seen = truth + rng.normal(size=1000), site < 30
        model = KinRegressor(unseen="population").fit(X[seen], y[seen], site=site[seen])
        found = model.predict_interval(X, site=site, level=0.9)
        inside.append(((found.low < truth) & (truth < found.high))[~seen].mean())
        wide.append((found.high - found.low)[~seen].mean())
        narrow.append((found.high - found.low)[seen].mean())
    assert np.mean(inside) == pytest.approx(0.9, abs=0.05)
    assert np.mean(wide) > 2 * np.mean(narrow)


# --- what users get wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (FedADMMRegressor(loss="logistic"), "use it with FedADMMClassifier"),
        (FedADMMRegressor(loss="mean"), "fedkin.Problem"),
        (FedADMMRegressor(loss="cubic"), "unknown loss 'cubic'"),
        (FedADMMClassifier(loss="linear"), "not for classes"),
        (FedADMMRegressor(cv_folds=1), "at least 2"),
    ],
)
def test_parameters_out_of_range_are_told_at_fit(estimator, message):
    X, y, site = some_sites(classes=[0, 1])
    with pytest.raises(ParameterError, match=message):
        clone(estimator).fit(X, y, site=site)


def test_bad_rows_and_sites():
    X, y, site = some_sites()
    with pytest.raises(DataError, match="site= has 119"):
        FedADMMRegressor(lam=0.1).fit(X, y, site=site[1:])
    broken = X.copy()
    broken[3, 1] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        FedADMMRegressor(lam=0.1).fit(broken, y, site=site)
    with pytest.raises(DataError, match="all 120 rows have the class"):
        FedADMMClassifier().fit(X, np.ones(120), site=site)


# --- metadata routing -----------------------------------------------------------------------------------------


def test_offsets_travel_too(routing):
    X, y, site = some_sites(n=20)
    model = FedADMMRegressor(lam=0.01).set_fit_request(site=True, offset=True)
    model.set_score_request(site=True, offset=True)
    shift = np.where(site == "a", 30.0, 0.0)
    params = {"site": site, "groups": site, "offset": shift}
    scores = cross_val_score(model, X, y + shift, cv=WithinSiteKFold(3), params=params)
    assert scores.min() > 0.9


def test_cross_val_predict_raises_instead_of_guessing(routing):
    """scikit-learn hands metadata to fit and score there, but not to predict."""
    X, y, site = some_sites(n=20)
    model = FedADMMRegressor(lam=0.01).set_fit_request(site=True).set_predict_request(site=True)
    with pytest.raises(DataError, match="3 sites"):
        cross_val_predict(model, X, y, cv=WithinSiteKFold(3), params={"site": site, "groups": site})


def test_groups_without_routing_are_told_of():
    """cross_val_score hands groups to the splitter only: each fit is one model for all sites, and must say so."""
    X, y, site = some_sites(n=20)
    with pytest.warns(FedkinWarning, match=r"ONE model.*site=.*metadata routing.*groups= never reaches"):
        scores = cross_val_score(FedADMMRegressor(lam=0.01), X, y, groups=site, cv=WithinSiteKFold(3))
    assert scores.max() < 0.9  # a, b and c together make no good model


def test_options_are_those_of_fit_options():
    renamed = {"seed": "random_state"}
    for estimator in (FedADMMRegressor, FedADMMClassifier):
        expected = {renamed.get(item.name, item.name): item.default for item in fields(FitOptions)}
        for name in ("method", "messages", "fixed", "within"):  # theirs is the fused estimator
            del expected[name]
        expected |= {"warm_start": False, "site_column": None, "unseen": "raise", "spline": None}
        assert estimator().get_params() == expected
        parameters = inspect.signature(estimator).parameters
        assert {name: one.default for name, one in parameters.items()} == expected
        hints = get_type_hints(estimator.__init__)
        assert set(hints) == {*expected, "return"} and hints["refit"] is bool and hints["tol"] is float
        assert all(re.search(rf"^    (\w+, )*{name}\b", estimator.__doc__, re.MULTILINE) for name in expected)
        with pytest.raises(TypeError, match="lamda"):
            estimator(lamda=1.0)


FUSED = {"lam": 0.01, "select": None}


def framed(classes: bool):
    """The rows of four sites as a data frame with their site, targets, and sites."""
    X, y, site = some_sites("abcd", 60, 2, [0, 1] if classes else None)
    return pd.DataFrame(X, columns=["age", "dose"]).assign(site=site), y, site


# --- a column of X: nothing else has to know ------------------------------------------------------------------


def test_columns_by_number_and_what_is_wrong_with_them():
    frame, y, site = framed(classes=False)
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


def test_scores_that_are_not_told_the_site_are_loud(routing):
    frame, y, site = framed(classes=True)
    X = frame[["age", "dose"]]
    routed = {"cv": WithinSiteKFold(3), "params": {"site": site, "groups": site}, "error_score": "raise"}
    model = KinClassifier()
    with pytest.raises(DataError, match=r"4 sites.*fedkin.SiteScorer.*model.at\(site\).*site_column="):
        cross_val_score(model, X, y, scoring="roc_auc", **routed)
    assert cross_val_score(model, X, y, scoring=SiteScorer("roc_auc"), **routed).min() > 0.75


# --- rows that come later -------------------------------------------------------------------------------------


def test_later_rows_bring_their_offsets_and_weights():
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


@pytest.mark.filterwarnings("ignore:counts vary")
def test_later_rows_bring_their_exposures():
    rng = np.random.default_rng(0)
    X, site, years = rng.normal(size=(200, 1)), np.repeat(["a", "b"], 100), rng.uniform(1.0, 9.0, 200)
    y = rng.poisson(years * np.exp(0.3 * X[:, 0]))
    model = FedADMMRegressor(loss="poisson", lam=0.01, select=None, tol=1e-12)
    grown = clone(model).fit(X[:120], y[:120], site=site[:120], exposure=years[:120])
    grown.partial_fit(X[120:], y[120:], site=site[120:], exposure=years[120:])
    assert np.allclose(grown.coef_, clone(model).fit(X, y, site=site, exposure=years).coef_, rtol=1e-6)


@pytest.mark.parametrize("kind", [KinRegressor, KinClassifier, KinSurvival, FedADMMRegressor, FedADMMClassifier])
def test_later_rows_have_the_arguments_of_first_rows(kind):
    first, later = (inspect.signature(method).parameters for method in (kind.fit, kind.partial_fit))
    assert [name for name in later if name != "classes"] == list(first)


def test_estimators_have_every_option_of_their_method():
    of_kin = SHARED - {"method", "messages", "standardize", "n_jobs"}  # of summaries, or without effect on kin
    of_fused = set(DEFAULTS) - KIN_ONLY - {"method"}
    for options, kinds in ((of_kin, (KinRegressor, KinClassifier)), (of_fused, (FedADMMRegressor, FedADMMClassifier))):
        named = {"random_state" if name == "seed" else name for name in options}
        for kind in kinds:
            assert named <= set(kind().get_params())
    changed = {"fit_intercept": False, "fixed": ("x0",), "boost": True, "within": {"a": "d"}, "random_state": 3}
    assert set(changed) == {"random_state" if name == "seed" else name for name in of_kin - {"loss"}}
    told = KinRegressor(**changed)._options()
    assert {name: getattr(told, "seed" if name == "random_state" else name) for name in changed} == changed


def test_only_classifiers_are_told_classes():
    frame, y, site = framed(classes=True)
    X = frame[["age", "dose"]].to_numpy()
    for model in (KinRegressor(), FedADMMRegressor()):
        with pytest.raises(TypeError, match="classes"):
            model.partial_fit(X, y, site=site, classes=[0, 1])
    with pytest.raises(DataError, match="not among classes="):
        KinClassifier().partial_fit(X, y, site=site, classes=[0, 2])
    model = KinClassifier().partial_fit(X[:200], y[:200], site=site[:200], classes=[0, 1])
    assert model.classes_.tolist() == [0, 1]
    model.partial_fit(X[200:], np.where(X[200:, 1] > 1, 2, y[200:]), site=site[200:])  # a class that comes later
    assert model.classes_.tolist() == [0, 1, 2]
    assert model.predict_proba(X, site=site).shape == (240, 3)


@pytest.mark.filterwarnings("ignore:counts vary")  # they are rounded numbers
@pytest.mark.parametrize("model", [KinRegressor(), KinRegressor(loss="poisson"), KinClassifier()], ids=str)
def test_kin_begins_where_it_ended(model):
    frame, y, site = framed(classes=hasattr(model, "predict_proba"))
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
    frame, y, site = framed(classes=False)
    X = frame[["age", "dose"]].to_numpy()
    model = FedADMMRegressor(select=None, cv_folds=2, warm_start=True).fit(X[:150], y[:150], site=site[:150])
    first = model.lam_
    model.fit(X, y, site=site)
    assert model.lam_ == first
    assert clone(model).set_params(warm_start=False).fit(X, y, site=site).lam_ != first


# --- what users get wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [FedADMMRegressor(**FUSED), KinRegressor(), KinClassifier()], ids=str)
def test_a_column_of_text_is_named(model):
    frame, y, site = framed(classes=hasattr(model, "predict_proba"))
    with pytest.raises(DataError, match=r"column 'site' of X holds text, such as '[abcd]'.*site_column='site'"):
        clone(model).fit(frame, y, site=site)
    with pytest.raises(DataError, match=r"column 2 of X holds text.*site_column=2"):
        clone(model).fit(frame.to_numpy(), y)
    fitted = clone(model).fit(frame[["age", "dose"]], y, site=site)
    with pytest.raises(DataError, match="column 'dose' of X holds text"):
        fitted.predict(frame[["age"]].assign(dose="high"), site=site)


def test_folds_that_leave_out_a_site_say_what_to_use():
    frame, y, site = framed(classes=False)
    by_site = np.argsort(site, kind="stable")
    with pytest.raises(UnknownSiteError, match=r"GroupKFold.*cv=fedkin\.WithinSiteKFold"):
        cross_val_score(
            FedADMMRegressor(**FUSED, site_column="site"), frame.iloc[by_site], y[by_site], cv=4, error_score="raise"
        )
