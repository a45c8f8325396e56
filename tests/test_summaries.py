"""Summaries in the place of rows: the same folds, local fits, tests, choice of lam and models."""

from __future__ import annotations

import numpy as np
import pytest

import fedkin
from builders import federation
from fedkin.data import Federation
from fedkin.datasets import paper_design
from fedkin.fitting import FitOptions, FittedModel, fit_federation, fit_summaries
from fedkin.graph import Graph
from fedkin.objective import Summaries
from fedkin.stats import site_summary

SIZES = (30, 45, 60, 33, 52, 41)


def grouped(loss: str = "linear", offset: bool = False, seed: int = 0, centre: float = 0.0) -> Federation:
    """Two groups of sites with unequal numbers of rows."""
    fed = federation(loss, SIZES, q=3, seed=seed, offset=offset, groups=2)
    rows = {f"site {u}": (fed[u].X * [1.0, 4.0, 0.3] + centre, fed[u].y, fed[u].offset) for u in fed.devices}
    if loss == "mean":
        return Federation({name: X + 2.0 * (u % 2) for u, (name, (X, _, _)) in enumerate(rows.items())})
    return Federation(rows)


def assert_same_model(ours: FittedModel, theirs: FittedModel, tol: float = 1e-10) -> None:
    scale = max(np.abs(theirs.coef).max(), np.abs(theirs.intercept).max())
    np.testing.assert_allclose(ours.coef, theirs.coef, atol=tol * scale, rtol=0)
    np.testing.assert_allclose(ours.intercept, theirs.intercept, atol=tol * scale, rtol=0)
    assert ours.lam == pytest.approx(theirs.lam, rel=tol, abs=0)
    assert list(ours.graph.edge_ids()) == list(theirs.graph.edge_ids())
    assert ours.groups() == theirs.groups()
    assert ours.feature_names == theirs.feature_names
    assert ours.n_samples.tolist() == theirs.n_samples.tolist()
    assert dict(ours.notes) == dict(theirs.notes)


def from_sums(fed: Federation, graph: Graph | None, options: FitOptions, loss: str) -> FittedModel:
    """What the organiser fits: every site has summed up its rows without seeing another's."""
    rows = fed.with_intercept() if options.fit_intercept and loss != "mean" else fed
    made = fedkin.losses.make_loss(loss)
    parts = [
        site_summary(
            site, rows[site], made, feature_names=rows.feature_names, folds=options.cv_folds, seed=options.seed
        )
        for site in rows.devices
    ]
    return fit_summaries(Summaries.stack(parts), graph, options)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("standardize", [False, True])
def test_least_squares_from_sums_is_least_squares_from_rows(offset: bool, intercept: bool, standardize: bool) -> None:
    fed = grouped(offset=offset, centre=1.5)
    for lam, select, penalty in (("cv", "bonferroni", "l1"), (0.05, "none", "l2"), ("cv", "holm", "linf")):
        options = FitOptions(
            "linear",
            penalty=penalty,
            lam=lam,
            select=select,
            fit_intercept=intercept,
            standardize=standardize,
            cv_folds=4,
            seed=3,
        )
        theirs = fit_federation(fed, None, options)
        assert_same_model(from_sums(fed, None, options, "linear"), theirs)


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("lam", ["cv", 0.02])
def test_means_from_sums_are_means_from_rows(standardize: bool, lam: float | str) -> None:
    fed = grouped("mean", centre=2.0)
    options = FitOptions("mean", lam=lam, standardize=standardize)
    assert_same_model(from_sums(fed, None, options, "mean"), fit_federation(fed, None, options))


@pytest.mark.parametrize(
    "options",
    [
        FitOptions(refit=True),
        FitOptions(ridge=0.1),
        FitOptions(sparsity=0.05),
        FitOptions(lam=0.0, select=None),
        FitOptions(variance="bartlett", cv_rule="1se"),
    ],
    ids=["refit", "ridge", "sparsity", "alone", "bartlett"],
)
def test_options_mean_the_same_from_sums(options: FitOptions) -> None:
    design = paper_design(n_devices=12, n_samples=40, n_features=5, n_clusters=3, seed=1)
    theirs = fit_federation(design.federation, design.graph, options)
    assert_same_model(from_sums(design.federation, design.graph, options, "linear"), theirs)
