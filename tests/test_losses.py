"""Losses against finite differences, their conjugates' definition, and other libraries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import LOSS_NAMES, expectile
from builders import LOSSES as CASES
from fedkin import Federation, Graph, Problem, fed_admm, local_fit, solve
from fedkin.errors import DataError, FedkinError
from fedkin.losses import (
    HuberLoss,
    LinearLoss,
    LogisticLoss,
    Loss,
    MeanLoss,
    MultinomialLoss,
    NegativeBinomialLoss,
    PoissonLoss,
    RowLoss,
    UserLoss,
    by_loss,
    described_loss,
    make_loss,
)

LOSSES = {
    **{name: make_loss(name, np.arange(4)) for name in LOSS_NAMES},
    "narrow huber": HuberLoss(0.3),
    "scaled mean": MeanLoss(4.0),
    "two classes": MultinomialLoss(2),
    "user": expectile(True),
    "user without hessian": expectile(False),
}
ROW_LOSSES = {name: loss for name, loss in LOSSES.items() if isinstance(loss, RowLoss)}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
every_row_loss = pytest.mark.parametrize("loss", ROW_LOSSES.values(), ids=ROW_LOSSES.keys())


def target(loss: Loss, rng: np.random.Generator, size) -> np.ndarray:
    if loss.target == "class":
        return rng.integers(0, loss.n_outputs + 1, size).astype(float)
    if loss.target == "count":
        return rng.poisson(1.5, size).astype(float)
    return rng.gamma(2.0, 1.0, size) if loss.target == "positive" else 2.0 * rng.standard_normal(size)


def site(loss: Loss, seed: int = 0, n: int = 30, q: int = 3):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, q))
    theta = 0.7 * rng.standard_normal(loss.n_params(q))
    return theta, X, target(loss, rng, n), 0.3 * rng.standard_normal(n)


def difference_quotient(function, theta: np.ndarray, step: float = 1e-6) -> np.ndarray:
    columns = []
    for shift in step * np.eye(theta.size):
        columns.append((np.asarray(function(theta + shift)) - np.asarray(function(theta - shift))) / (2 * step))
    return np.stack(columns, axis=-1)


@every_loss
@pytest.mark.parametrize("with_offset", [True, False])
def test_gradient_and_hessian_are_derivatives(loss, with_offset):
    theta, X, y, offset = site(loss, seed=1)
    offset = offset if with_offset else None
    expected = difference_quotient(lambda t: loss.value(t, X, y, offset), theta)
    np.testing.assert_allclose(loss.gradient(theta, X, y, offset), expected, rtol=1e-6, atol=1e-8)
    hessian = loss.hessian(theta, X, y, offset)
    expected = difference_quotient(lambda t: loss.gradient(t, X, y, offset), theta)
    np.testing.assert_allclose(hessian, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(hessian, hessian.T, rtol=1e-13, atol=1e-15)


@every_loss
def test_scores_are_the_gradients_of_single_rows_also_of_batches_of_sites(loss):
    samples = [site(loss, seed=20 + u, n=6) for u in range(3)]
    for theta, X, y, offset in samples:
        rows = [loss.gradient(theta, X[k : k + 1], y[k : k + 1], offset[k : k + 1]) for k in range(6)]
        np.testing.assert_allclose(loss.scores(theta, X, y, offset), rows, atol=1e-13)
        np.testing.assert_allclose(np.mean(rows, axis=0), loss.gradient(theta, X, y, offset), atol=1e-13)
    theta, X, y, offset = (np.stack(parts) for parts in zip(*samples, strict=True))
    expected = [loss.gradient(*sample) for sample in samples]
    np.testing.assert_allclose(loss.mean_of_compact(loss.compact_scores(theta, X, y, offset), X), expected, atol=1e-13)
    np.testing.assert_allclose(loss.batch_gradients(theta, X, y, offset), expected, atol=1e-13)


@every_row_loss
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.floats(0.01, 30.0))
def test_curvature_stays_between_zero_and_its_bound(loss, seed, size):
    rng = np.random.default_rng(seed)
    eta = size * rng.standard_normal((5, loss.n_outputs))
    eigenvalues = np.linalg.eigvalsh(loss.curvature_at(eta, target(loss, rng, 5)))
    assert eigenvalues.min() >= -1e-12
    assert eigenvalues.max() <= loss.curvature_bound * (1 + 1e-12)


@every_row_loss
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.floats(0.01, 8.0))
def test_fenchel_young(loss, seed, size):
    rng = np.random.default_rng(seed)
    eta, other = size * rng.standard_normal((2, 4, loss.n_outputs))
    y = target(loss, rng, 4)
    a = loss.slope_at(eta, y)
    value, conjugate = loss.value_at(eta, y), loss.conjugate_at(a, y)
    scale = 1 + np.abs(value) + np.abs(conjugate)
    # equality where a is the slope, inequality elsewhere
    assert (np.abs(value + conjugate - (a * eta).sum(axis=-1)) <= 1e-11 * scale).all()
    gap = loss.value_at(other, y) + conjugate - (a * other).sum(axis=-1)
    assert (gap >= -1e-11 * (scale + np.abs(loss.value_at(other, y)))).all()


@pytest.mark.parametrize(
    ("loss", "y", "a", "expected"),
    [
        (LogisticLoss(), 0.0, [0.0], 0.0),
        (LogisticLoss(), 1.0, [-1.0], 0.0),
        (LogisticLoss(), 0.0, [-0.01], np.inf),
        (LogisticLoss(), 1.0, [0.01], np.inf),
        (LogisticLoss(), 0.0, [1.01], np.inf),
        (PoissonLoss(), 2.0, [-2.0], 0.0),
        (PoissonLoss(), 2.0, [-2.01], np.inf),
        (HuberLoss(1.0), 3.0, [1.0], 3.5),
        (HuberLoss(1.0), 3.0, [-1.001], np.inf),
        (MultinomialLoss(3), 0.0, [0.0, 0.0], 0.0),
        (MultinomialLoss(3), 0.0, [0.6, 0.5], np.inf),
        (MultinomialLoss(3), 2.0, [0.0, 0.01], np.inf),
        (MultinomialLoss(3), 2.0, [0.5, -1.0], 2 * 0.5 * np.log(0.5)),
    ],
)
def test_conjugate_on_and_beyond_the_edge_of_its_domain(loss, y, a, expected):
    assert loss.conjugate_at(np.array(a), np.array(y)) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.family])
def test_scores_hessian_and_prediction_agree_with_statsmodels(name):
    import statsmodels.api as sm

    loss = make_loss(name)
    theta, X, y, offset = site(loss, seed=8)
    link = {"identity": sm.families.links.Identity(), "log": sm.families.links.Log(), "logit": None}[loss.link]
    known = {"alpha": loss.parameter} if loss.parameter else {}
    family = getattr(sm.families, CASES[name].family)(*([link] if link else []), **known)
    model = sm.GLM(y, X, family=family, offset=offset)
    n = len(y)
    np.testing.assert_allclose(loss.scores(theta, X, y, offset), -model.score_obs(theta, scale=1.0), atol=1e-12)
    np.testing.assert_allclose(loss.hessian(theta, X, y, offset), -model.hessian(theta, scale=1.0) / n, atol=1e-12)
    np.testing.assert_allclose(loss.predict(theta, X, offset), model.predict(theta, offset=offset), atol=1e-12)


def test_dispersions():
    import statsmodels.api as sm

    rng = np.random.default_rng(11)
    X, y = rng.standard_normal((60, 4)), 3 * rng.standard_normal(60)
    ols = sm.OLS(y, X).fit()
    assert LinearLoss().estimates_scale and not LogisticLoss().estimates_scale
    assert LogisticLoss().dispersion(ols.params, X, y) == 1.0
    # the mean loss pools the variances of the coordinates
    assert MeanLoss().dispersion(X.mean(axis=0), X, None) == pytest.approx(X.var(axis=0, ddof=1).mean(), rel=1e-12)
    # a threshold that is never reached: Huber is least squares
    assert HuberLoss(1e3).dispersion(ols.params, X, y) == pytest.approx(ols.scale, rel=1e-12)


@pytest.mark.parametrize("n", [25, 400])
def test_huber_dispersion_gives_hubers_covariance(n):
    """Statsmodels' "H1", which puts the share of rows within the threshold times the Gram matrix for the Hessian."""
    import statsmodels.api as sm

    rng = np.random.default_rng(12)
    X, y = rng.standard_normal((n, 3)), rng.standard_t(3, n)
    fit = sm.RLM(y, X, M=sm.robust.norms.HuberT(1.345)).fit(scale_est="mad", tol=1e-12, maxiter=500)
    loss = HuberLoss(1.345 * fit.scale)  # RLM divides residuals by a scale, we move the threshold
    share = (np.abs(y - X @ fit.params) <= loss.delta).mean()
    covariance = loss.dispersion(fit.params, X, y) * np.linalg.inv(share * X.T @ X)
    np.testing.assert_allclose(covariance, fit.bcov_scaled, rtol=1e-9)
    assert loss.estimates_scale


@every_row_loss
def test_cautious_model_lies_above_the_loss_or_has_its_minimum(loss):
    rng = np.random.default_rng(15)
    eta, other = 3 * rng.standard_normal((2, 200, loss.n_outputs))
    y = target(loss, rng, 200)
    weight, slope = loss.cautious_at(eta, y), loss.slope_at(eta, y)
    assert weight.shape == (200, loss.n_outputs, loss.n_outputs)
    assert (np.linalg.eigvalsh(weight) > 0).all()
    if not np.isfinite(loss.curvature_bound):
        # no parabola lies above: where the model is more cautious than the Hessian, its minimum is that of the row
        wary = weight[:, 0, 0] > 1.001 * loss.curvature_at(eta, y)[:, 0, 0]
        minimum = eta[wary] - slope[wary] / weight[wary, 0]
        assert wary.any() or (weight >= loss.curvature_at(eta, y) - 1e-12).all()
        np.testing.assert_allclose(loss.slope_at(minimum, y[wary]), 0.0, atol=1e-9)
        return
    move = other - eta
    model = loss.value_at(eta, y) + (slope * move).sum(axis=1) + 0.5 * np.einsum("nk,nkl,nl->n", move, weight, move)
    assert (loss.value_at(other, y) <= model + 1e-10).all()


@pytest.mark.parametrize("eta", [-1e5, 1e5])
@every_row_loss
def test_extreme_predictors_give_no_nan_and_no_warning(loss, eta):
    predictors = np.full((1, loss.n_outputs), eta)
    y = np.ones(1)
    for out in (loss.value_at, loss.slope_at, loss.curvature_at):
        assert not np.isnan(out(predictors, y)).any()
    assert not np.isnan(loss.response(predictors)).any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_loss("hinge"), r"unknown loss 'hinge'.*linear"),
        (lambda: make_loss("multinomial", np.array(["a", "b"])), "multinomial"),
        (lambda: HuberLoss(0.0), "delta"),
        (lambda: HuberLoss(float("nan")), "delta"),
        (lambda: HuberLoss(np.inf), "delta"),
        (lambda: NegativeBinomialLoss(np.inf), "alpha"),
        (lambda: MultinomialLoss(1), "n_classes must be a whole number of at least 2"),
        (lambda: MultinomialLoss(2.5), "n_classes must be a whole number of at least 2"),
        (lambda: MeanLoss(0.0), "variance"),
        (lambda: UserLoss(lambda theta, X, y: 0.0, lambda theta, X, y, offset: theta), "theta, X, y, offset"),
        (lambda: described_loss({"name": "linear", "delta": 1.0}), "delta"),
        (lambda: described_loss({"name": "mean", "variance": 10**400}), "variance"),
        (lambda: described_loss({"name": ["a"]}), r"name of a loss must be text, got \['a'\]"),
    ],
)
def test_losses_that_do_not_exist_are_refused(make, words):
    with pytest.raises(FedkinError, match=words):
        make()


@pytest.mark.parametrize(
    ("loss", "y", "message"),
    [
        (LogisticLoss(), [0.0, 2.0], "0 and 1"),
        (LogisticLoss(), [0.0, np.nan], "0 and 1"),
        (PoissonLoss(), [1.0, -1.0], "at least 0"),
        (MultinomialLoss(3), [0.0, 3.0], r"0\.\.2"),
        (MultinomialLoss(3), [0.0, 0.5], r"0\.\.2"),
        (MultinomialLoss(3), [-1.0], r"0\.\.2"),
        (LinearLoss(), ["a"], "numeric"),
        (LinearLoss(), None, "no target"),
    ],
)
def test_bad_targets_are_refused_with_the_site_named(loss, y, message):
    with pytest.raises(DataError, match=message) as caught:
        loss.check_target(None if y is None else np.array(y), "Köln")
    assert "Köln" in str(caught.value)


@every_loss
def test_quadratic_terms_are_the_loss(loss):
    theta, X, y, offset = site(loss, seed=21)
    if not loss.quadratic:
        with pytest.raises(NotImplementedError, match="not quadratic"):
            loss.quadratic_terms(X[None], y[None], offset[None])
        return
    A, b, c = (part[0] for part in loss.quadratic_terms(X[None], y[None], offset[None]))
    curved = 0.5 * theta @ (A * theta if A.ndim == 0 else A @ theta)
    assert curved - b @ theta + c == pytest.approx(loss.value(theta, X, y, offset), rel=1e-12)


def test_equal_losses_count_as_one():
    losses = [HuberLoss(2.0), LinearLoss(), HuberLoss(2), LinearLoss(), MeanLoss(3.0), MeanLoss(3.0), MeanLoss()]
    assert [members.tolist() for members, _ in by_loss(losses)] == [[0, 2], [1, 3], [4, 5], [6]]
    assert LinearLoss() == LinearLoss() and LinearLoss() != LogisticLoss() and len({LinearLoss(), LinearLoss()}) == 1


def test_a_known_variance_divides_the_mean_loss():
    rng = np.random.default_rng(13)
    fed = Federation({u: rng.normal(u % 2, 2.0, size=(12, 2)) for u in range(4)})
    graph, known = Graph.complete(range(4)), MeanLoss(4.0)
    one, four = local_fit(fed, known), local_fit(fed, "mean")
    np.testing.assert_allclose(one.theta, four.theta)
    np.testing.assert_allclose(one.covariance, four.covariance)
    np.testing.assert_allclose(4.0 * one.dispersion, four.dispersion)
    expected = solve(Problem(fed, graph, "mean", lam=0.4, ridge=0.4), 1e-9)
    problem = Problem(fed, graph, known, lam=0.1, ridge=0.1)
    assert 4.0 * solve(problem, 1e-9).objective == pytest.approx(expected.objective, rel=1e-7)
    for gradient in ("plain", "saga", "svrg"):
        how = {"gradient": gradient, "batch_size": 3, "seed": 2}
        numpy, numba = (fed_admm(problem, 40, **how, backend=backend).theta for backend in ("numpy", "numba"))
        np.testing.assert_allclose(numpy, numba, atol=1e-10)
