"""Global and oracle fits."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize

from builders import separated, sites
from fedkin.core import global_fit, oracle_fit
from fedkin.data import Federation
from fedkin.errors import DataError, DegenerateSiteWarning, ParameterError, UnknownSiteError
from fedkin.losses import HuberLoss, make_loss

# ---------------------------------------------------------------- pooled fits


@pytest.mark.parametrize("kind", ["linear", "logistic", "poisson", "huber", "multinomial"])
@pytest.mark.parametrize("weights", ["samples", "sites"])
def test_global_fit_minimises_the_stated_sum(kind, weights):
    fed = sites(kind, sizes=(30, 60, 200), offset=True)
    loss = make_loss(kind, fed.y)

    def total(theta):
        out, slope = 0.0, 0.0
        for site in fed.sites:
            data = fed[site]
            factor = data.n_samples / len(fed.X) if weights == "samples" else 1 / 3
            out = out + factor * loss.value(theta, data.X, data.y, data.offset)
            slope = slope + factor * loss.gradient(theta, data.X, data.y, data.offset)
        return out, slope

    theta = global_fit(fed, kind, weights)
    assert theta.shape == (loss.n_params(3),)
    np.testing.assert_allclose(total(theta)[1], 0.0, atol=1e-12)
    best = optimize.minimize(total, np.zeros(theta.size), jac=True, method="BFGS", tol=1e-10)
    assert total(theta)[0] <= best.fun + 1e-12


def test_global_fit_of_different_losses():
    fed = sites("poisson", sizes=(50, 70, 40))
    losses = dict(zip(fed.sites, ("poisson", "linear", HuberLoss(0.5)), strict=True))
    for weights in ("samples", "sites"):
        theta = global_fit(fed, losses, weights)
        slope = 0.0
        for site, loss in losses.items():
            data = fed[site]
            factor = data.n_samples if weights == "samples" else 1.0
            slope = slope + factor * make_loss(loss).gradient(theta, data.X, data.y)
        np.testing.assert_allclose(slope, 0.0, atol=1e-8)


def test_oracle_refuses_wrong_labels_and_weights():
    fed = sites("linear")
    with pytest.raises(DataError, match="2 labels for 3 sites"):
        oracle_fit(fed, [0, 1])
    with pytest.raises(UnknownSiteError, match="site 2"):
        oracle_fit(fed, {"site 0": 0, "site 1": 0})
    with pytest.raises(ParameterError, match="rows"):
        oracle_fit(fed, [0, 0, 0], weights="rows")
    with pytest.raises(ParameterError, match="rows"):
        global_fit(fed, weights="rows")


def test_pooled_fits_without_a_minimum_warn_and_stay_finite():
    X, y = separated()
    fed = Federation({"a": (X, y), "b": (X, y)})
    with pytest.warns(DegenerateSiteWarning, match="no minimum"):
        assert np.isfinite(global_fit(fed, "logistic")).all()
    flat = Federation({"a": (np.ones((5, 2)), np.arange(5.0))})
    with pytest.warns(DegenerateSiteWarning, match="rank 1 for 2 features"):
        theta = global_fit(flat)
    assert theta[0] == pytest.approx(theta[1])
    assert theta.sum() == pytest.approx(2.0, rel=0.1)
