"""Kin with the Huber loss: any unit of the target, any threshold, and no fit that went astray."""

from __future__ import annotations

import numpy as np
import pytest

import fedkin
from fedkin import Federation, find_kin
from fedkin.core import RowData
from fedkin.errors import DataError, SolverError
from fedkin.fitting import FitOptions, FittedModel, fit
from fedkin.graph import Graph
from fedkin.kin import smooth
from fedkin.kin.sources import Source
from fedkin.losses import HuberLoss, LinearLoss


def table(V=8, n=30, q=3, spread=0.4, seed=1, unit=1.0, outliers=0.0, tails=3):
    """Sites with slopes and levels of their own, noise with heavy tails, and their parameters, intercept first."""
    rng = np.random.default_rng(seed)
    truth = np.array([5.0, 1.0, -1.0, 0.5])[: q + 1] + spread * rng.normal(size=(V, q + 1))
    data = {}
    for u in range(V):
        X = rng.normal(size=(n, q))
        y = truth[u, 0] + X @ truth[u, 1:] + rng.standard_t(tails, size=n)
        y[rng.random(n) < outliers] += 1e4
        data[u] = (X, unit * y)
    return Federation(data), unit * truth


def parameters(model):
    return np.concatenate([model.intercept, model.coef[:, 0]], axis=1)


@pytest.mark.parametrize("unit", [1e-3, 100.0, 1e4])
def test_predictions_do_not_depend_on_the_unit_of_the_target(unit):
    one, other = (fit(table(unit=each)[0], None, FitOptions(loss="huber")) for each in (1.0, unit))
    assert other.loss.delta == pytest.approx(unit * one.loss.delta, rel=1e-9)
    assert parameters(other) / unit == pytest.approx(parameters(one), abs=1e-6)
    assert other.kin.covariance / unit**2 == pytest.approx(one.kin.covariance, abs=1e-6)
    assert other.kin.noise / unit**2 == pytest.approx(one.kin.noise, rel=1e-6)


@pytest.mark.parametrize("delta", [1e-4, 0.05, 1.345, 1e6])
def test_any_corner_beats_the_sites_own_fits(delta):
    """With the smallest it is least absolute deviations, with the largest least squares."""
    fed, truth = table(V=20, n=15, spread=0.3)
    fed = fed.with_intercept()
    kin = find_kin(fed, loss=HuberLoss(delta))
    own = fedkin.local_fit(fed, HuberLoss(delta)).theta
    assert ((kin.theta - truth) ** 2).sum() < 0.7 * ((own - truth) ** 2).sum()
    low, high = np.moveaxis(kin.confint(0.95), 2, 0)
    assert ((low < truth) & (truth < high)).mean() > 0.85


def test_a_corner_that_no_residual_reaches_is_least_squares():
    fed = table(V=10, n=40, tails=1000)[
        0
    ].with_intercept()  # least squares has a noise for every site, where they differ
    far, squares = find_kin(fed, loss=HuberLoss(1e6)), find_kin(fed)
    assert np.abs(far.theta - squares.theta).max() < 0.25 * np.sqrt(squares.covariance.max())


def test_intervals_cover_as_promised():
    covered = []
    for seed in range(6):
        fed, truth = table(V=12, n=40, q=2, seed=seed)
        low, high = np.moveaxis(fit(fed, None, FitOptions(loss="huber")).kin.confint(0.95), 2, 0)
        covered.append(((low < truth) & (truth < high)).mean())
    assert 0.9 < np.mean(covered) < 0.99


def test_outliers_move_nothing():
    clean, truth = table(V=10, n=40)
    model = fit(table(V=10, n=40, outliers=0.05)[0], None, FitOptions(loss="huber"))
    plain = fit(clean, None, FitOptions(loss="huber"))
    assert ((parameters(model) - truth) ** 2).mean() < 2 * ((parameters(plain) - truth) ** 2).mean()


def test_summaries_with_a_corner_that_is_too_small_are_refused():
    made = fedkin.summarise(table(unit=100.0)[0].with_intercept(), HuberLoss())
    with pytest.raises(DataError, match=r"of the rows are within delta=1\.345 .* agree on a larger delta"):
        find_kin(made)


# --- the scale -------------------------------------------------------------------------------------------------


def test_scale_is_that_of_the_noise():
    import statsmodels.api as sm

    rng = np.random.default_rng(2)
    X, site = rng.normal(size=(900, 3)), np.repeat(np.arange(3), 300)
    y = X @ [1.0, -2.0, 3.0] + 50.0 * site + 7.0 * rng.standard_t(4, size=900)
    design = np.column_stack([X, np.eye(3)[site]])
    rlm = sm.RLM(y, design, M=sm.robust.norms.HuberT(1.345)).fit(scale_est="mad")
    assert HuberLoss.from_rows(X, y, site).delta == pytest.approx(1.345 * rlm.scale, rel=0.02)
    shifted = HuberLoss.from_rows(X, y + 5.0 * site, site, offset=5.0 * site)
    assert shifted.delta == pytest.approx(HuberLoss.from_rows(X, y, site).delta, rel=1e-12)  # y is rounded twice
    twice = [np.concatenate([part, part[:100]]) for part in (X, y, site)]
    heavy = HuberLoss.from_rows(X, y, site, weight=np.where(np.arange(900) < 100, 2.0, 1.0)).delta
    assert heavy == pytest.approx(HuberLoss.from_rows(*twice).delta, rel=0.01)


def test_scale_where_residuals_tell_nothing():
    X, site = np.eye(4), np.array([0, 0, 1, 1])
    assert 0 < HuberLoss.from_rows(X, np.array([0.0, 2.0, 0.0, 3.0]), site).delta < 10  # as many columns as rows
    y = np.array([3.0, 3.0, 3.0, 3.0, 3.0, 9.0])
    mean_size = 1.0
    assert HuberLoss.from_rows(np.zeros((6, 0)), y, np.repeat([0, 1], 3)).delta == pytest.approx(1.345 * mean_size)
    assert HuberLoss.from_rows(np.zeros((6, 0)), np.full(6, 3.0), np.repeat([0, 1], 3)) == HuberLoss()
    assert HuberLoss.from_rows(np.zeros((3, 0)), np.array([1.0, 2.0, 4.0]), np.arange(3)).delta > 0  # a row per site


# --- fits that went astray ----------------------------------------------------------------------------------------


def test_a_fit_that_ends_worse_than_it_began_is_refused():
    fed = table()[0].with_intercept()
    source = Source(RowData(fed, HuberLoss(1.5)))
    start = source.start()
    smooth.refuse_worse(source.values, start, start, 1.0)
    with pytest.raises(SolverError, match="of one model for all"):
        smooth.refuse_worse(source.values, start + 100.0, start, 1.0)
    with pytest.raises(SolverError, match="ended at a loss of inf"):
        smooth.refuse_worse(source.values, start * np.nan, start, 1.0)


@pytest.mark.parametrize("part", ["coef", "intercept"])
def test_no_model_has_parameters_that_are_not_finite(part):
    numbers = {"coef": np.zeros((2, 1, 1)), "intercept": np.zeros((2, 1))}
    numbers[part][1] = np.nan
    about = {"groups": np.zeros(2, dtype=np.int64), "n_samples": np.ones(2, dtype=np.int64), "loss": LinearLoss()}
    with pytest.raises(SolverError, match="the parameters of site 'b' are not finite"):
        FittedModel(sites=("a", "b"), feature_names=("x",), graph=Graph.empty(["a", "b"]), **numbers, **about)
