"""The fused estimator after kin: its groups as edges, its spreads as units."""

import numpy as np
import pytest

import fedkin
from fedkin import Graph, find_kin
from fedkin.datasets import paper_design
from fedkin.fitting import FitOptions, fit, fit_after_kin, prepare
from fedkin.fitting.preparation import Estimate


def levels_apart(v=15, n=8, seed=0):
    """Sites with one slope, nearly, and levels that differ much; and as many rows again."""
    rng = np.random.default_rng(seed)
    site = np.repeat(np.arange(v), 2 * n)
    X = rng.normal(size=(site.size, 3))
    slope, level = 1.0 + 0.05 * rng.normal(size=(v, 3)), 3.0 * rng.normal(size=v)
    y = (X * slope[site]).sum(axis=1) + level[site] + rng.normal(size=site.size)
    late = np.tile(np.arange(2 * n) >= n, v)
    return [fedkin.Federation.from_arrays(X[rows], y[rows], site[rows]) for rows in (~late, late)]


def test_coefficients_that_differ_much_are_pulled_less():
    train, test = levels_apart()
    errors = {}
    for name, model in (
        ("after", fit_after_kin(train)),
        ("plain", fit(train, None, FitOptions(method="fused", select="none"))),
    ):
        found = model.predict(test.X, test.site_index)
        errors[name] = float(np.mean((found - test.y) ** 2))
        assert model.fused.gap <= 1e-6
    assert errors["after"] < 0.95 * errors["plain"]


def test_a_power_of_the_spread_is_a_change_of_units():
    train, _ = levels_apart(v=6)
    options = FitOptions(lam=0.02, tol=1e-9)
    model = fit_after_kin(train, options)
    assert model.options["sd_power"] == 1.0
    prepared = prepare(train, options)
    spread = find_kin(prepared.rows).sd
    stretch = spread / np.exp(np.log(spread).mean())
    rows = prepared.rows.replaced(X=prepared.rows.X * stretch)
    solution = fedkin.solve(fedkin.Problem(rows, Graph.complete(train.sites), lam=0.02), 1e-9)
    again = prepared.model(Estimate(solution.theta * stretch, Graph.complete(train.sites)), options)
    assert np.allclose(model.coef, again.coef, atol=1e-4)


@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_groups_are_cliques(loss):
    design = paper_design(
        n_sites=10, n_samples=80, n_features=3, n_clusters=2, signal=3, seed=0, loss=loss, noise=0.5
    )
    said = []
    model = fit_after_kin(design.federation, FitOptions(loss=loss, cv_folds=3), said.append)
    # kin resolves the groups of least squares; where it resolves none, all pairs are edges
    assert (model.graph.n_edges, model.graph.n_components) in [(20, 2)] + [(45, 1)] * (loss == "logistic")
    assert model.fused.gap <= 1e-6
    assert model.options["sd_power"] in (0.0, 0.5, 1.0)
    assert said[:2] == ["finding kin", "choosing the power of the standard deviation between sites"]


def test_several_classes_share_columns():
    rng = np.random.default_rng(0)
    X, site = rng.normal(size=(240, 2)), np.repeat(np.arange(4), 60)
    y = np.argmax(np.column_stack([0 * X[:, 0], X]) + rng.gumbel(size=(240, 3)), axis=1)
    model = fit_after_kin(fedkin.Federation.from_arrays(X, y, site), FitOptions(loss="multinomial", lam=0.01))
    assert model.coef.shape == (4, 2, 2) and model.fused.gap <= 1e-6
    assert (model.predict(X, site) == y).mean() > 0.5
