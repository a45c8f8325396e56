"""Predictions of classes by kin: averaged over what is open about each site."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import expit, softmax

import fedkin
from fedkin import KinClassifier
from fedkin.datasets import paper_design
from fedkin.fitting import FitOptions, fit
from fedkin.losses import LogisticLoss, MultinomialLoss


def integral(eta, variance):
    """The mean of ``expit`` over a normal, by adaptive quadrature."""
    width = np.sqrt(variance)

    def density(z):
        return expit(eta + width * z) * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)

    return quad(density, -12, 12, epsabs=1e-12, epsrel=1e-12, points=[max(min(-eta / width, 11.9), -11.9)], limit=200)[
        0
    ]


def averaged(eta, variance):
    loss = LogisticLoss()
    return loss.response(loss.averaged_predictor(np.array([[eta]]), np.array([[[variance]]])))[0]


@pytest.mark.parametrize("variance", [1e-6, 0.3, 4.0, 100.0, 1e4])
def test_two_classes_are_averaged_exactly(variance):
    for eta in (-9.0, -3.0, -0.2, 0.0, 0.5, 2.0, 6.0):
        assert averaged(eta, variance) == pytest.approx(integral(eta, variance), abs=5e-8)


def test_averages_far_out_are_finite_ordered_and_symmetric():
    eta = np.linspace(-700.0, 700.0, 2001)[:, None]
    for variance in (0.0, 1e-9, 1.0, 1e6):
        found = LogisticLoss().averaged_predictor(eta, np.full((len(eta), 1, 1), variance))[:, 0]
        assert np.isfinite(found).all()
        assert (np.diff(found) > 0).all()
        assert found == pytest.approx(-found[::-1])
        assert (np.abs(found) <= np.abs(eta[:, 0]) * (1 + 1e-9) + 1e-12).all()
    assert np.array_equal(LogisticLoss().averaged_predictor(eta, np.zeros((len(eta), 1, 1))), eta)


def test_more_classes_are_averaged_nearly():
    rng = np.random.default_rng(0)
    loss, worst, plain = MultinomialLoss(4), 0.0, 0.0
    for _ in range(12):
        eta, root = rng.normal(size=3) * 2, rng.normal(size=(3, 3))
        drawn = eta + rng.normal(size=(200_000, 3)) @ root.T
        exact = softmax(np.column_stack([np.zeros(len(drawn)), drawn]), axis=1).mean(axis=0)
        found = loss.response(loss.averaged_predictor(eta[None], (root @ root.T)[None]))[0]
        assert found.sum() == pytest.approx(1.0)
        worst, plain = max(worst, np.abs(found - exact).max()), max(plain, np.abs(loss.response(eta) - exact).max())
    assert worst < 0.02 < 0.1 < plain
    two, one = MultinomialLoss(2), LogisticLoss()
    eta, covariance = np.array([[1.3], [-20.0]]), np.array([[[2.0]], [[0.0]]])
    assert two.averaged_predictor(eta, covariance) == pytest.approx(one.averaged_predictor(eta, covariance), rel=0.03)
    far = loss.averaged_predictor(np.full((1, 3), 900.0), np.eye(3)[None])
    assert np.isfinite(far).all()


@pytest.fixture(scope="module")
def made():
    return paper_design(n_sites=15, n_samples=15, n_features=3, n_clusters=2, signal=3, seed=0, loss="logistic")


@pytest.fixture(scope="module")
def model(made):
    return fit(made.federation, None, FitOptions(loss="logistic"))


def test_probabilities_of_a_model_are_means_over_draws(made, model):
    rng = np.random.default_rng(1)
    for site in (0, 7):
        rows = np.column_stack([np.ones(15), made.federation[site].X])
        drawn = rng.multivariate_normal(model.kin.theta[site], model.kin.covariance[site], 40_000)
        exact = expit(rows @ drawn.T)
        found = model.predict_proba(made.federation[site].X, site)[:, 1]
        assert np.abs(found - exact.mean(axis=1)).max() < 5 * (exact.std(axis=1) / 200).max()
        assert np.abs(found - expit(model.linear_predictor(made.federation[site].X, site)[:, 0])).max() > 0.005


def test_every_face_gives_the_same_probabilities(made, model, tmp_path):
    fed = made.federation
    site = [fed.sites[u] for u in fed.site_index]
    chances = model.predict_proba(fed.X, site)
    assert np.array_equal(model.predict(fed.X, site), np.array(model.classes)[chances.argmax(axis=1)])
    model.save(tmp_path / "model")
    assert np.array_equal(fedkin.load(tmp_path / "model").predict_proba(fed.X, site), chances)
    assert np.array_equal(model.part([3]).predict_proba(fed[3].X), model.predict_proba(fed[3].X, 3))
    assert model.predict_interval(fed.X, site).mean == pytest.approx(chances[:, 1])
    assert model.kin.predict(np.column_stack([np.ones(15), fed[3].X]), 3).mean == pytest.approx(
        model.predict_proba(fed[3].X, 3)[:, 1]
    )
    estimator = KinClassifier().fit(fed.X, fed.y, site=site)
    assert estimator.predict_proba(fed.X, site=site) == pytest.approx(chances)
    odds = estimator.decision_function(fed.X, site=site)
    assert expit(odds) == pytest.approx(chances[:, 1])
    assert np.array_equal(odds > 0, model.linear_predictor(fed.X, site)[:, 0] > 0)


def test_a_new_site_is_less_sure_than_one_with_rows(made, model):
    rows = made.federation[0]
    empty, known = model.join(name="empty").model, model.join(rows, name="known").model
    # how much of the log odds is left after averaging over what is open
    left = [(one.averaged_predictor(rows.X) / one.linear_predictor(rows.X)).mean() for one in (empty, known)]
    assert left[0] < left[1] < 1
    eta = empty.linear_predictor(rows.X)
    assert (np.abs(empty.averaged_predictor(rows.X)) < np.abs(eta)).all()


def test_fused_models_predict_at_their_estimates(made):
    fused = fit(made.federation, None, FitOptions(loss="logistic", lam=0.02))
    eta = fused.linear_predictor(made.federation[2].X, 2)
    assert np.array_equal(fused.averaged_predictor(made.federation[2].X, 2), eta)
    assert fused.predict_proba(made.federation[2].X, 2)[:, 1] == pytest.approx(expit(eta[:, 0]))
