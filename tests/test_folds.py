"""Folds whose Gram statistics are sums of parts, and cross-validation on threads."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

import fedkin
from fedkin.core import Problem, QuadraticTerms
from fedkin.data import Federation
from fedkin.datasets import paper_design
from fedkin.graph import Graph
from fedkin.solvers import cross_validate_lam, cross_validate_ridge
from fedkin.solvers.crossvalidation import _fold_of_rows, cut_folds


def uneven(loss: str, ridge: float | list[float] = 0.0) -> Problem:
    rng = np.random.default_rng(0)
    sizes = [1, 2, 5, 9, 14]
    site = np.repeat(np.arange(5), sizes)
    X = rng.normal(size=(site.size, 3))
    y = None if loss == "mean" else X @ [1.0, -1.0, 0.5] + rng.normal(size=site.size)
    offset = None if loss == "mean" else rng.normal(size=site.size)
    federation = Federation.from_arrays(X, y, site, offset=offset)
    return Problem(federation, Graph.complete(federation.sites), loss=loss, ridge=ridge, lam=0.1)


@pytest.mark.parametrize("ridge", [0.0, 0.3, [0.1, 0.0, 0.7]])
@pytest.mark.parametrize("loss", ["linear", "mean"])
def test_sums_of_parts_are_the_terms_of_the_rows(loss: str, ridge: float | list[float]) -> None:
    problem = uneven(loss, ridge)
    rows = problem.rows_for("this test")
    fold_of = rows.folds(3, 0)
    fold_of[(rows.n_samples < 2)[rows.site_index]] = -1
    for fold, found in zip(range(3), cut_folds(problem, 3, 0), strict=True):
        expected = _fold_of_rows(problem, rows, fold_of == fold, fold_of != fold)
        ours, theirs = found.objective.terms, expected.objective.terms
        assert isinstance(ours, QuadraticTerms)
        assert isinstance(theirs, QuadraticTerms)
        theta = np.random.default_rng(fold).normal(size=ours.b.shape)
        np.testing.assert_allclose(ours.values(theta), theirs.values(theta), rtol=1e-12)
        np.testing.assert_allclose(ours.gradients(theta), theirs.gradients(theta), rtol=1e-10, atol=1e-12)
        np.testing.assert_array_equal(found.seen, expected.seen)
        np.testing.assert_allclose(
            found.held_out(theta[found.seen]), expected.held_out(theta[found.seen]), rtol=1e-12
        )


def test_cores_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    design = paper_design(30, 40, 4, 3)
    problem = Problem(design.federation, design.graph)
    lams = 1e-3 * np.geomspace(1, 1e-2, 12)
    results = []
    for cores in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        path = fedkin.lam_path(problem, lams, backend="numba")
        choice = fedkin.cross_validate_lam(problem, lams, folds=3, backend="numba")
        results.append((np.stack([solution.theta for solution in path.solutions]), choice.scores))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_jobs_limit_threads() -> None:
    design = paper_design(20, 40, 3, 2)
    problem = Problem(design.federation, design.graph)
    lams = [1e-3, 1e-4]
    one, other = (fedkin.cross_validate_lam(problem, lams, n_jobs=n, backend="numba") for n in (1, 2))
    np.testing.assert_array_equal(one.scores, other.scores)


@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_folds_in_time_train_on_earlier_rows_only(loss):
    rng = np.random.default_rng(0)
    X, time = rng.normal(size=(60, 2)), rng.permutation(60)
    y = (X[:, 0] + rng.normal(size=60) > 0).astype(float)
    fed = fedkin.Federation.from_arrays(X, y, np.arange(60) % 3, time=time)
    problem = fedkin.Problem(fed, fedkin.Graph.complete(fed.sites), loss, lam=0.1)
    cut = cut_folds(problem, 4, 0)
    assert len(cut) == 3  # the earliest rows are never held out
    theta = rng.normal(size=(3, 2))
    for k, fold in enumerate(cut, start=1):
        blocks = fed.folds(4)
        train = replace(problem, federation=fed.take(blocks < k))
        test = replace(problem, federation=fed.take(blocks == k))
        assert np.allclose(fold.objective.terms.values(theta), train.terms.values(theta))
        assert np.allclose(fold.held_out(theta), test.terms.values(theta))
    assert np.isfinite(fedkin.cross_validate_lam(problem, folds=2, n_lams=3).error).all()


# --- levels that nobody will choose, and ridges -----------------------------------------------------------------------


def test_levels_that_are_clearly_worse_are_not_looked_at() -> None:
    """Small ones where all sites are alike, large ones where all differ; what is tried scores as it always does."""
    design = paper_design(n_sites=20, n_samples=12, n_features=6, n_clusters=1, seed=0)
    apart = Federation({u: [[float(10 * u)], [10.0 * u + 1], [10.0 * u + 2], [10.0 * u + 3]] for u in range(8)})
    problems = Problem(design.federation, design.truth), Problem(apart, Graph.complete(range(8)), "mean")
    for problem, end in zip(problems, (0, -1), strict=True):
        grid = fedkin.solvers.lam_grid(problem)
        choice, every = cross_validate_lam(problem), cross_validate_lam(problem, grid)
        assert choice.lams.size == choice.scores.shape[1] < 20 == every.lams.size
        assert choice.lams[end] == grid[end] and choice.lam == every.lam
        first = int(np.flatnonzero(grid == choice.lams[0])[0])
        tried = slice(first, first + choice.lams.size)
        np.testing.assert_array_equal(choice.lams, grid[tried])
        np.testing.assert_array_equal(choice.scores, every.scores[:, tried])


def test_large_levels_are_looked_at_where_all_fused_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that rise from the middle on prove nothing about the top while one model for all is no worse."""
    apart = Federation({u: [[float(10 * u)], [10.0 * u + 1], [10.0 * u + 2], [10.0 * u + 3]] for u in range(8)})
    problem = Problem(apart, Graph.complete(range(8)), "mean")
    top = fedkin.lam_max(problem, 0.01)
    assert cross_validate_lam(problem).lams[0] < 0.5 * top
    monkeypatch.setattr("fedkin.solvers.crossvalidation.fused_solution", lambda fold: fold.terms.minimizers())
    assert cross_validate_lam(problem).lams[0] == pytest.approx(top)


def test_a_ridge_is_chosen_together_with_lam() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(6, 14, 10))
    beta = 0.2 * rng.normal(size=(6, 10))  # every site on its own, and weak
    y = np.einsum("vnp,vp->vn", X, beta) + rng.normal(size=(6, 14))
    fed = Federation.from_arrays(X.reshape(-1, 10), y.ravel(), np.repeat(np.arange(6), 14))
    problem = Problem(fed, Graph.complete(range(6)))
    ridges = [0.0, 0.1, 1.0, 10.0]
    chosen, choice = cross_validate_ridge(problem, ridges)
    assert chosen.ridge in ridges[1:]
    assert choice.mean.min() < cross_validate_lam(problem).mean.min()
    with pytest.raises(fedkin.errors.ParameterError, match="at least one"):
        cross_validate_ridge(problem, [])
