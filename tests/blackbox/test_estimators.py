"""The scikit-learn estimators: against plain fits, with scikit-learn's tools, and saved and loaded again."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.inspection import permutation_importance
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import accuracy_score, r2_score, roc_auc_score
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import fedkin
from fedkin import (
    FedADMMClassifier,
    FedADMMRegressor,
    Graph,
    KinClassifier,
    KinRegressor,
    SiteScorer,
    WithinSiteKFold,
)
from fedkin.errors import FedkinWarning

FUSED = {"lam": 0.01, "select": None}
REGRESSORS = [KinRegressor(), FedADMMRegressor(**FUSED)]
CLASSIFIERS = [KinClassifier(), FedADMMClassifier(**FUSED)]
EVERY = [*REGRESSORS, *CLASSIFIERS]
NAMES = ["a", "b", "c", "d", "e", "f"]


def name_of(model):
    return type(model).__name__


def groups_of(model):
    return np.asarray(model.groups_)


def is_classifier(model):
    return hasattr(model, "predict_proba")


def table(classes=False, n=50, seed=0):
    """Six sites; c and f are the opposite of the others. Features, targets, and the site of each row."""
    rng = np.random.default_rng(seed)
    where = np.repeat(NAMES, n)
    X = rng.normal(size=(6 * n, 2))
    eta = 1.0 + 2 * X[:, 0] * np.where(np.isin(where, ["c", "f"]), -1.0, 1.0)
    labels = np.where(eta + rng.logistic(size=6 * n) > 0, "yes", "no")
    y = labels if classes else eta + 0.5 * rng.normal(size=6 * n)
    order = rng.permutation(6 * n)
    return X[order], y[order], where[order]


def fitted(model, **more):
    X, y, where = table(is_classifier(model))
    return clone(model).fit(X, y, site=where, **more)


def frame(classes=False):
    X, y, where = table(classes)
    return pd.DataFrame({"age": X[:, 0], "dose": X[:, 1], "place": where}), y


def with_column(model):
    return clone(model).set_params(site_column="place")


# --- against plain fits ---------------------------------------------------------------------------------------


def test_edge_tests_and_a_refit_pool_each_group():
    X, y, where = table()
    model = FedADMMRegressor(refit=True).fit(X, y, site=where)
    labels = groups_of(model)
    assert [labels[model.sites_.index(name)] == labels[model.sites_.index("c")] for name in NAMES] == [
        name in "cf" for name in NAMES
    ]
    for members in (["a", "b", "d", "e"], ["c", "f"]):
        mine = np.isin(where, members)
        pooled = LinearRegression().fit(X[mine], y[mine])
        for name in members:
            u = model.sites_.index(name)
            assert model.coef_[u] == pytest.approx(pooled.coef_, abs=1e-5)
            assert model.intercept_[u] == pytest.approx(pooled.intercept_, abs=1e-5)


@pytest.mark.parametrize("debias", ["mcp", "adaptive"])
def test_debiasing_takes_back_the_pull_between_groups(debias):
    X, y, where = table()
    given = {"lam": 0.03, "select": None, "penalty": "l2", "fit_intercept": True}
    pulled, free = (FedADMMRegressor(**given, debias=how).fit(X, y, site=where) for how in ("none", debias))
    truth = np.array([-2.0 if name in "cf" else 2.0 for name in pulled.sites_])
    errors = [np.abs(model.coef_[:, 0] - truth).mean() for model in (pulled, free)]
    assert errors[0] > 0.1
    assert errors[1] < 0.5 * errors[0]


def test_kin_finds_the_groups_and_pools_them():
    X, y, where = table()
    model = KinRegressor().fit(X, y, site=where)
    labels = dict(zip(model.sites_, groups_of(model), strict=True))
    assert {name for name in NAMES if labels[name] == labels["c"]} == {"c", "f"}
    mine = np.isin(where, ["c", "f"])
    pooled = LinearRegression().fit(X[mine], y[mine])
    assert model.coef_[model.sites_.index("c")] == pytest.approx(pooled.coef_, abs=0.05)
    assert model.kin_.theta == pytest.approx(np.column_stack([model.intercept_, model.coef_]), abs=1e-8)


def test_probabilities_of_kin_are_averaged_over_what_is_not_known():
    X, y, where = table(classes=True, n=20)
    model = KinClassifier().fit(X, y, site=where)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    for u, name in enumerate(model.sites_[:3]):
        Z = np.column_stack([np.ones(10), X[:10]])
        eta = Z @ model.kin_.theta[u]
        error = np.sqrt(np.einsum("np,pq,nq->n", Z, model.kin_.posterior_covariance(u), Z))
        averaged = (weights / (1 + np.exp(-(eta[:, None] + error[:, None] * nodes)))).sum(axis=1) / weights.sum()
        assert model.predict_proba(X[:10], site=name)[:, 1] == pytest.approx(averaged, abs=1e-5)


def test_rounds_reach_the_exact_solution():
    X, y, where = table()
    exact = FedADMMRegressor(**FUSED, tol=1e-9).fit(X, y, site=where)
    rounds = FedADMMRegressor(**FUSED, solver="fedadmm", rounds=3000, tol=1e-7).fit(X, y, site=where)
    assert rounds.coef_ == pytest.approx(exact.coef_, abs=1e-3)
    assert exact.gap_ <= 1e-9
    assert rounds.gap_ <= 1e-7


# --- every estimator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", EVERY, ids=name_of)
def test_parameters_are_cloned_and_set(model):
    for name, value in model.get_params().items():
        assert clone(model).get_params()[name] == value or value is None
    changed = clone(model).set_params(fit_intercept=False, random_state=3)
    assert changed.get_params()["random_state"] == 3
    X, y, where = table(is_classifier(model))
    changed.fit(X, y, site=where)
    assert np.abs(changed.intercept_).max() == 0.0
    assert changed.n_features_in_ == 2


@pytest.mark.parametrize("model", EVERY, ids=name_of)
def test_a_saved_model_predicts_the_same(model, tmp_path):
    X, _, where = table(is_classifier(model))
    one = fitted(model)
    one.model_.save(tmp_path / "model")
    again = fedkin.load(tmp_path / "model")
    for name in ("a", "c"):
        mine = where == name
        assert np.array_equal(again.predict(X[mine], name), one.predict(X[mine], site=name))
    copied = pickle.loads(pickle.dumps(one))
    assert np.array_equal(copied.predict(X, site=where), one.predict(X, site=where))
    if is_classifier(model):
        assert np.array_equal(copied.predict_proba(X, site=where), one.predict_proba(X, site=where))


@pytest.mark.parametrize("model", EVERY, ids=name_of)
def test_rows_that_come_later_give_the_fit_of_all_rows(model):
    X, y, where = table(is_classifier(model))
    early = (where != "f") & (np.arange(len(y)) < 200)  # later: more rows of five sites, and a new site
    order = np.concatenate([np.flatnonzero(early), np.flatnonzero(~early)])
    grown = clone(model).fit(X[early], y[early], site=where[early])
    assert len(grown.sites_) == 5
    grown.partial_fit(X[~early], y[~early], site=where[~early])
    whole = clone(model).fit(X[order], y[order], site=where[order])
    assert grown.sites_ == whole.sites_
    assert grown.coef_ == pytest.approx(whole.coef_, abs=1e-6)
    assert grown.intercept_ == pytest.approx(whole.intercept_, abs=1e-6)


@pytest.mark.parametrize("model", EVERY, ids=name_of)
def test_sample_weights_count_rows(model):
    X, y, where = table(is_classifier(model))
    copies = np.random.default_rng(1).integers(0, 4, size=len(y))
    weighted = clone(model).fit(X, y, site=where, sample_weight=copies.astype(float))
    repeated = clone(model).fit(X.repeat(copies, axis=0), y.repeat(copies), site=where.repeat(copies))
    at = [repeated.sites_.index(name) for name in weighted.sites_]
    assert weighted.coef_ == pytest.approx(repeated.coef_[at], abs=2e-3)
    assert weighted.intercept_ == pytest.approx(repeated.intercept_[at], abs=2e-3)


@pytest.mark.parametrize("model", EVERY, ids=name_of)
def test_scores_are_those_of_scikit_learn(model):
    X, y, where = table(is_classifier(model))
    one = fitted(model)
    score = accuracy_score if is_classifier(model) else r2_score
    assert one.score(X, y, site=where) == pytest.approx(score(y, one.predict(X, site=where)))
    if is_classifier(model):
        shares = one.predict_proba(X, site=where)
        assert shares.sum(axis=1) == pytest.approx(np.ones(len(y)))
        assert np.array_equal(one.classes_[shares.argmax(axis=1)], one.predict(X, site=where))


@pytest.mark.parametrize("model", EVERY, ids=name_of)
def test_sites_of_two_kinds_are_served_better_than_by_one_model(model):
    X, y, _ = table(is_classifier(model), seed=0)
    new, truth, there = table(is_classifier(model), seed=1)
    pooled = (LogisticRegression() if is_classifier(model) else LinearRegression()).fit(X, y).score(new, truth)
    assert fitted(model).score(new, truth, site=there) > pooled


@pytest.mark.parametrize("model", EVERY, ids=name_of)
def test_rows_without_sites_are_one_site_with_a_warning(model):
    X, y, where = table(is_classifier(model))
    with pytest.warns(FedkinWarning):
        one = clone(model).fit(X[where == "a"], y[where == "a"])
    assert len(one.sites_) == 1
    assert one.predict(X[:3]).shape == (3,)


@pytest.mark.parametrize("model", EVERY, ids=name_of)
def test_a_graph_and_covariates_are_hints_for_every_estimator(model):
    graph = Graph(NAMES, [("a", "b"), ("b", "d"), ("d", "e"), ("c", "f")])
    used = fitted(model, graph=graph)
    assert {frozenset(pair) for pair in used.graph_.edge_ids()} == {frozenset(pair) for pair in graph.edge_ids()}
    told = fitted(model, covariates={name: {"kind": "x" if name in "cf" else "y"} for name in NAMES})
    assert {frozenset(pair) for pair in told.graph_.edge_ids()} == {
        frozenset((i, j)) for i in NAMES for j in NAMES if i < j and (i in "cf") == (j in "cf")
    }


def test_three_classes_are_multinomial():
    rng = np.random.default_rng(0)
    X, where = rng.normal(size=(450, 2)), np.repeat(["a", "b", "c"], 150)
    y = np.array(["low", "mid", "top"])[np.digitize(2 * X[:, 0] + rng.logistic(size=450), [-1, 1])]
    fused = FedADMMClassifier(lam=0.0, select=None, tol=1e-12).fit(X, y, site=where)
    own = LogisticRegression(C=1e10, tol=1e-10, max_iter=1000).fit(X[:150], y[:150])
    assert fused.predict_proba(X[:20], site="a") == pytest.approx(own.predict_proba(X[:20]), abs=2e-3)
    kin = KinClassifier().fit(X, y, site=where)
    assert kin.classes_.tolist() == ["low", "mid", "top"]
    shares = kin.predict_proba(X, site=where)
    assert shares.shape == (450, 3)
    assert shares.sum(axis=1) == pytest.approx(np.ones(450))
    assert kin.score(X, y, site=where) > 0.55


# --- with scikit-learn's tools --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", EVERY, ids=name_of)
def test_cross_validation_with_sites_in_a_column(model):
    X, y = frame(is_classifier(model))
    cv = WithinSiteKFold(3, site_column="place")
    scores = cross_val_score(with_column(model), X, y, cv=cv)
    expected = []
    for train, test in cv.split(X):
        assert set(X["place"].iloc[train]) == set(X["place"].iloc[test]) == set(NAMES)
        one = clone(model).fit(X[["age", "dose"]].iloc[train], y[train], site=X["place"].iloc[train])
        expected.append(one.score(X[["age", "dose"]].iloc[test], y[test], site=X["place"].iloc[test]))
    assert scores == pytest.approx(expected, abs=1e-9)
    assert cross_val_predict(with_column(model), X, y, cv=cv).shape == (300,)


@pytest.mark.parametrize("model", [REGRESSORS[0], CLASSIFIERS[0]], ids=name_of)
def test_a_pipeline_in_front(model):
    X, y = frame(is_classifier(model))
    X["dose"] = 50 * X["dose"]
    scale = ColumnTransformer([("scale", StandardScaler(), ["age", "dose"])], remainder="passthrough")
    pipe = make_pipeline(scale.set_output(transform="pandas"), clone(model).set_params(site_column="remainder__place"))
    plain = with_column(model).fit(X, y)
    pipe.fit(X, y)
    how = "predict_proba" if is_classifier(model) else "predict"
    assert getattr(pipe, how)(X) == pytest.approx(getattr(plain, how)(X), abs=1e-4)


def test_grid_search_over_lam():
    X, y = frame()
    search = GridSearchCV(
        FedADMMRegressor(select=None, site_column="place"),
        {"lam": [10.0, 0.001], "penalty": ["l1", "l2"]},
        cv=WithinSiteKFold(3, site_column="place"),
    ).fit(X, y)
    assert search.best_params_["lam"] == 0.001
    assert search.best_score_ > 0.9
    assert search.score(X, y) > 0.9


def test_sites_as_routed_metadata():
    X, y, where = table(classes=True)
    with sklearn.config_context(enable_metadata_routing=True):
        scores = cross_val_score(
            KinClassifier(),
            X,
            y,
            scoring=SiteScorer("roc_auc"),
            cv=WithinSiteKFold(3),
            params={"site": where, "groups": where},
        )
    expected = []
    for train, test in WithinSiteKFold(3).split(X, y, groups=where):
        one = KinClassifier().fit(X[train], y[train], site=where[train])
        shares = one.predict_proba(X[test], site=where[test])[:, 1]
        expected.append(roc_auc_score(y[test] == "yes", shares))
    assert scores == pytest.approx(expected, abs=1e-9)


def test_folds_are_cut_within_sites_and_fixed_by_the_seed():
    X, y, where = table(n=31)
    splits = list(WithinSiteKFold(4, seed=2).split(X, y, groups=where))
    assert np.array_equal(np.sort(np.concatenate([test for _, test in splits])), np.arange(len(y)))
    for train, test in splits:
        assert not set(train) & set(test)
        counts = [int((where[test] == name).sum()) for name in NAMES]
        assert min(counts) >= 7
        assert max(counts) <= 8
    again = WithinSiteKFold(4, seed=2).split(X, y, groups=where)
    assert all(np.array_equal(one[1], two[1]) for one, two in zip(splits, again, strict=True))


@pytest.mark.parametrize("model", REGRESSORS, ids=name_of)
def test_a_bound_model_serves_permutation_importance(model):
    X, y, where = table()
    one = fitted(model)
    bound = one.at(where)
    assert np.array_equal(bound.predict(X), one.predict(X, site=where))
    importance = permutation_importance(bound, X, y, n_repeats=3, random_state=0).importances_mean
    assert importance[0] > 10 * abs(importance[1])


def test_data_frames_give_their_names_and_rows_their_order():
    X, y = frame()
    model = KinRegressor(site_column="place").fit(X, y)
    assert list(model.feature_names_in_)[:2] == ["age", "dose"]
    shuffled = X.sample(frac=1.0, random_state=0)
    assert model.predict(shuffled) == pytest.approx(model.predict(X)[shuffled.index.to_numpy()])
    by_number = KinRegressor(site_column=2).fit(X.to_numpy(dtype=object), y)
    assert by_number.coef_ == pytest.approx(model.coef_, abs=1e-8)
