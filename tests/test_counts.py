"""Counts: overdispersion, what is learned about it, intervals of new counts, and exposure."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import fedkin
from fedkin import FedADMMRegressor, Federation, KinRegressor
from fedkin.cli import main
from fedkin.errors import DataError, FedkinError, FedkinWarning
from fedkin.federate import Contract
from fedkin.fitting import FitOptions, fit
from fedkin.losses import NegativeBinomialLoss, PoissonLoss
from fedkin.report.text import statements


def counts(
    n_sites: int = 20, n: int = 100, alpha: float = 0.7, spread: float = 0.3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Negative binomial counts (Poisson ones for alpha 0) whose coefficients vary between sites."""
    rng = np.random.default_rng(seed)
    site, X = np.repeat(np.arange(n_sites), n), rng.normal(size=(n_sites * n, 2))
    b = np.array([1.0, 0.4, -0.3]) + spread * rng.normal(size=(n_sites, 3))
    mean = np.exp((np.column_stack([np.ones(len(X)), X]) * b[site]).sum(axis=1))
    factor = rng.gamma(1 / alpha, alpha, size=len(mean)) if alpha else 1.0
    return X, rng.poisson(mean * factor).astype(float), site


def test_the_loss_is_the_density_of_scipy_up_to_a_constant() -> None:
    loss, y = NegativeBinomialLoss(0.4), np.arange(12.0)
    eta = np.linspace(-2, 3, 50)[:, None]
    density = -stats.nbinom(2.5, 2.5 / (2.5 + np.exp(eta))).logpmf(y)
    found = loss.loss(eta, y)
    np.testing.assert_allclose(found - found[0], density - density[0], atol=1e-10)
    chance = loss.cdf(y, np.exp(eta), 1.0)
    np.testing.assert_allclose(chance, stats.nbinom(2.5, 2.5 / (2.5 + np.exp(eta))).cdf(y), atol=1e-12)


def test_almost_no_alpha_is_poisson() -> None:
    y, eta = np.arange(9.0), np.linspace(-2, 3, 9)
    one, other = NegativeBinomialLoss(1e-9), PoissonLoss()
    np.testing.assert_allclose(one.loss(eta, y), other.loss(eta, y), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one.curvature(eta, y), other.curvature(eta, y), rtol=1e-5)
    np.testing.assert_allclose(one.row_errors(y, np.exp(eta)), other.row_errors(y, np.exp(eta)), rtol=1e-5, atol=1e-5)


def test_alpha_of_one_site_is_that_of_statsmodels() -> None:
    import statsmodels.api as sm

    X, y, site = counts(1, 4000, spread=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sm.NegativeBinomial(y, sm.add_constant(X)).fit(disp=0, maxiter=200)
    # Cox and Reid's correction is of the order of p / n
    assert NegativeBinomialLoss.from_rows(X, y, site).alpha == pytest.approx(found.params[-1], rel=0.005)


@pytest.mark.parametrize(("n_sites", "n", "spread"), [(20, 100, 0.0), (20, 100, 0.4), (150, 12, 0.4)])
def test_alpha_is_learned_whether_sites_differ_or_not(n_sites: int, n: int, spread: float) -> None:
    found = [
        np.log(NegativeBinomialLoss.from_rows(*counts(n_sites, n, 0.7, spread, seed)).alpha / 0.7) for seed in range(12)
    ]
    # the standard error of the mean is about 0.02
    assert abs(np.mean(found)) < 0.08


def test_poisson_counts_have_hardly_any_alpha() -> None:
    assert NegativeBinomialLoss.from_rows(*counts(alpha=0.0)).alpha < 0.02


def coverage(loss: str, alpha: float, seed: int) -> tuple[float, float]:
    """Share of 2000 new counts in 90% intervals, and two binomial standard errors of it."""
    X, y, site = counts(20, 200, alpha=alpha, seed=seed)
    train = np.arange(len(y)) % 2 == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedkinWarning)
        model = KinRegressor(loss=loss).fit(X[train], y[train], site=site[train]).model_
    found = model.predict_interval(X[~train], site[~train], level=0.9, interval="observation")
    covered = ((y[~train] >= found.low) & (y[~train] <= found.high)).mean()
    return float(covered), 2 * float(np.sqrt(0.09 / (~train).sum()))


@pytest.mark.parametrize(
    ("loss", "alpha", "most"),
    [("negbinomial", 0.3, 0.93), ("negbinomial", 0.7, 0.93), ("negbinomial", 1.5, 0.93), ("poisson", 0.7, 1)],
)
def test_intervals_of_new_overdispersed_counts_cover(loss: str, alpha: float, most: float) -> None:
    covered, error = coverage(loss, alpha, seed=3)
    assert 0.87 - error <= covered <= most + error


@pytest.mark.parametrize("estimator", [KinRegressor, FedADMMRegressor])
def test_a_poisson_fit_of_overdispersed_rows_names_the_cure(estimator: type) -> None:
    X, y, site = counts(6, 60)
    with pytest.warns(FedkinWarning, match=r'overdispersion.*loss="negbinomial"'):
        estimator(loss="poisson").fit(X, y, site=site)
    X, y, site = counts(6, 60, alpha=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator(loss="poisson").fit(X, y, site=site)
        estimator(loss="negbinomial").fit(X, y, site=site)


def test_the_report_tells_of_overdispersion_and_the_model_keeps_alpha(tmp_path: Path) -> None:
    X, y, site = counts(6, 60)
    with pytest.warns(FedkinWarning, match="overdispersion"):
        model = fit(Federation.from_arrays(X, y, site), options=FitOptions(loss="poisson"))
    assert any("negbinomial" in str(one) for one in statements(model))
    model = KinRegressor(loss="negbinomial").fit(X, y, site=site).model_
    assert isinstance(model.loss, NegativeBinomialLoss)
    assert 0.3 < model.loss.alpha < 1.5
    model.save(tmp_path / "model")
    assert fedkin.load(tmp_path / "model").loss == model.loss


# --- exposure -----------------------------------------------------------------------------------------------------


def exposed(seed: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    X, _, site = counts(5, 60, alpha=0.0, seed=seed)
    rng = np.random.default_rng(seed)
    years = rng.uniform(0.5, 20.0, len(X))
    return X, rng.poisson(years * np.exp(0.3 * X[:, 0] - 1.0)).astype(float), site, years


@pytest.mark.parametrize("loss", ["poisson", "negbinomial"])
def test_exposure_is_an_offset_of_its_logarithm(loss: str) -> None:
    X, y, site, years = exposed()
    one = KinRegressor(loss=loss).fit(X, y, site=site, exposure=years)
    other = KinRegressor(loss=loss).fit(X, y, site=site, offset=np.log(years))
    np.testing.assert_array_equal(one.coef_, other.coef_)
    rates = one.predict(X, site=site, exposure=np.ones(len(X)))
    np.testing.assert_allclose(one.predict(X, site=site, exposure=years), rates * years)
    assert one.score(X, y, site=site, exposure=years) == other.score(X, y, site=site, offset=np.log(years))
    with pytest.raises(DataError, match="exposures must be positive, but one is 0"):
        one.fit(X, y, site=site, exposure=np.where(np.arange(len(X)) == 3, 0.0, years))
    with pytest.raises(DataError, match="offset"):
        one.predict(X, site=site)


def test_exposure_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    X, y, site, years = exposed()
    lines = [f"s{s},{a},{b},{n:g},{t}" for s, (a, b), n, t in zip(site, X.tolist(), y, years.tolist(), strict=True)]
    place = tmp_path / "table.csv"
    place.write_text("\n".join(["site,a,b,events,years", *lines]) + "\n")
    how = ["fit", str(place), "--site", "site", "--target", "events", "--loss", "poisson", "--test-size", "0"]
    assert main([*how, "--exposure", "years", "--out", str(tmp_path / "model")]) == 0
    model = fedkin.load(tmp_path / "model")
    expected = KinRegressor(loss="poisson").fit(X, y, site=[f"s{s}" for s in site], exposure=years)
    np.testing.assert_allclose(model.coef[:, 0], expected.coef_, rtol=1e-6)
    # a table to predict has the exposure, and its logarithm is taken
    table = {"a": X[:, 0], "b": X[:, 1], "years": years}
    found = model.predict(table, site=[f"s{s}" for s in site])
    np.testing.assert_allclose(found, expected.predict(X, site=[f"s{s}" for s in site], exposure=years), rtol=1e-6)
    assert main([*how, "--exposure", "years", "--offset", "a", "--out", str(tmp_path / "both")]) != 0
    place.write_text(place.read_text().replace(lines[4], lines[4].rsplit(",", 1)[0] + ",0"))
    capsys.readouterr()
    assert main([*how, "--exposure", "years", "--out", str(tmp_path / "zero")]) != 0
    assert "an exposure must be above 0, but is 0 in line 6" in capsys.readouterr().err.replace("\n", " ")


def test_contracts_know_exposures() -> None:
    text = (
        'name = "h"\nloss = "negbinomial"\nexposure = "years"\n[features.dose]\n'
        '[target]\nname = "events"\nkind = "count"\n'
    )
    contract = Contract.from_toml(text)
    assert Contract.from_bytes(contract.to_bytes()) == contract
    rows = contract.schema.rows({"dose": [0.0, 1.0], "events": [1, 2], "years": [1.0, 10.0]}, intercept=True)
    np.testing.assert_allclose(rows.offset, [0.0, np.log(10.0)])
    with pytest.raises(FedkinError, match="above 0"):
        contract.schema.rows({"dose": [0.0, 1.0], "events": [1, 2], "years": [0.0, 10.0]}, intercept=True)
    with pytest.raises(FedkinError, match="offset or exposure"):
        Contract.from_toml(text.replace('exposure = "years"', 'exposure = "years"\noffset = "log_years"'))
