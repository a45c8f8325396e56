"""Simpler models from sums alone: the same as scikit-learn's ridge on rows, tuned by the folds that train."""

import numpy as np
import pytest
from sklearn.linear_model import Ridge

import fedkin
from fedkin.core import assign_folds
from fedkin.fitting import Comparison, FitOptions, compare, fit
from fedkin.fitting.baselines import FOLD_RIDGES as RIDGES
from fedkin.fitting.baselines import fold_baselines

V, K = 4, 3


def rows(n=12, seed=0):
    rng = np.random.default_rng(seed)
    X, site = rng.normal(size=(V * n, 3)), np.repeat(np.arange(V), n)
    y = X @ [1.0, 0.5, 0.0] + 2.0 * site + rng.normal(size=V * n)
    return fedkin.Federation.from_arrays(X, y, site)


def ridge_fit(X, y, ridge):
    return Ridge(alpha=ridge * len(y)).fit(X, y)


def site_dummies(X, site):
    return np.column_stack([X, 1e6 * np.eye(V)[site]])  # next to no penalty on the sites' levels


def errors(kind, fed, train, test, ridge):
    """Squared errors of the test rows, by scikit-learn, each divided by two."""
    X, y, site = fed.X, fed.y, fed.site_index
    out = np.empty(test.sum())
    if kind == "Local":
        for u in range(V):
            fit = ridge_fit(X[train & (site == u)], y[train & (site == u)], ridge[u])
            out[site[test] == u] = fit.predict(X[test & (site == u)])
    else:
        Z = X if kind == "Global" else site_dummies(X, site)
        out = Ridge(alpha=ridge[0] * train.sum(), tol=1e-12).fit(Z[train], y[train]).predict(Z[test])
    return 0.5 * (out - y[test]) ** 2


@pytest.mark.parametrize("kind", ["Local", "Global", "Site intercepts"])
def test_ridges_are_tuned_by_the_folds_that_train(kind):
    fed = rows()
    fold = assign_folds(fed.with_intercept(), K, 0)
    sums = fedkin.summarise(fed.with_intercept(), folds=K).sums
    ours = fold_baselines(sums, np.array([True, False, False, False]), 0)[kind]
    loss = np.zeros((len(RIDGES), V))
    for k in (1, 2):
        train, test = (fold != 0) & (fold != k), fold == k
        for m, ridge in enumerate(RIDGES):
            each = errors(kind, fed, train, test, np.full(V, ridge))
            loss[m] += np.bincount(fed.site_index[test], each, V)
    best = RIDGES[loss.argmin(axis=0)] if kind == "Local" else np.full(V, RIDGES[loss.sum(axis=1).argmin()])
    test = fold == 0
    Z = fed.with_intercept().X[test]
    mine = 0.5 * ((Z * ours[fed.site_index[test]]).sum(axis=1) - fed.y[test]) ** 2
    assert np.allclose(mine, errors(kind, fed, ~test, test, best), rtol=1e-5, atol=1e-7)


def test_the_comparison_has_four_methods_and_few_rows_do_no_harm():
    fed = rows(n=5)
    fed = fedkin.Federation.from_arrays(
        np.vstack([fed.X, [[0.1, 0.2, 0.3]]]), np.append(fed.y, 1.0), [*fed.site_index.tolist(), 99]
    )
    summaries = fedkin.summarise(fed.with_intercept(), folds=5)
    options = FitOptions(method="fused", select="none", fuse_intercept=False)
    model = fit(summaries, None, options)
    compared = compare(summaries, None, options, model=model)
    found = {name: compared.mean(name) for name in compared.errors}
    assert list(found) == ["Local", "Global", "Site intercepts", "Fedkin"]
    assert all(np.isfinite(error) and error < 20 for error in found.values())
    assert found["Fedkin"] < found["Global"]
    fold = assign_folds(fed.with_intercept(), 5, 0)
    sizes = np.bincount(fold[fold >= 0], minlength=5)
    for name, each in compared.errors.items():
        assert np.average(each, weights=sizes) == pytest.approx(found[name])
    apart = compared.errors["Local"] - compared.errors["Fedkin"]
    share = sizes.mean() / len(fed.X)  # one row always trains
    factor = (1 / 5 + share / (1 - share)) ** 0.5
    assert compared.difference_error("Local") == pytest.approx(np.std(apart, ddof=1) * factor)
    assert compared.site_means("Local").shape == (V + 1,)
    assert compared.difference("Local") == pytest.approx(found["Local"] - found["Fedkin"])


def test_folds_end_with_the_same_sentence_as_splits():
    def of(local, fedkin=(1.0, 1.1, 0.9)):
        folds = {"Local": np.array(local), "Fedkin": np.array(fedkin)}
        sites = {name: each[:, None] for name, each in folds.items()}
        held = np.full(len(local), 10.0)
        return Comparison("loss", "folds", ("a",), np.array([10 * max(len(local), 2)]), folds, sites, held)

    assert (
        of([1.5, 1.6, 1.4]).verdict
        == "Fedkin predicts best: its error is 33.3% smaller than that of the sites' own models, and 1 of 1 sites gain "
        "over their own models."
    )
    assert of([1.0, 1.1, 0.9]).verdict.startswith("Every site's own model does as well and is simpler; Fedkin's")
    assert of([0.5, 0.6, 0.4]).verdict == "Every site's own model predicts better than Fedkin here: use it."
    assert of([1.3, 0.8, 1.0]).verdict.startswith("These rows cannot tell Fedkin from the sites' own models")
    single = of([1.0], [1.1])
    assert single.verdict.endswith("(no standard error); Fedkin's model is kept.")
    assert single.plain()["methods"][0]["difference_error"] is None
