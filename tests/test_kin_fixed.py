"""Fixed columns: one effect at all sites, profiled out of the mixed model."""

import warnings

import numpy as np
import pytest
from statsmodels.regression.mixed_linear_model import MixedLM

from fedkin import Federation, KinClassifier, KinRegressor, find_kin, load, summarise
from fedkin.cli.reading import contract_options
from fedkin.errors import FedkinWarning, ParameterError
from fedkin.federate import Contract
from fedkin.fitting import FitOptions, fit
from fedkin.kin import QuadraticLikelihoods, fit_mixed
from fedkin.kin.mixed import fit_population

NAMES = ["(intercept)", "x0", "x1", "w"]


def rows(seed=0, V=30, n=12):
    """Rows whose intercept and first slope vary, with a fixed column and one that is constant within sites."""
    rng = np.random.default_rng(seed)
    site, w = np.repeat(np.arange(V), n), np.repeat(rng.normal(size=V), n)
    x = rng.normal(size=(V * n, 2))
    x -= x.mean(axis=0)
    own = rng.normal(size=(V, 2)) * [1.0, 0.5]
    eta = 1.0 + x @ [0.5, -0.3] + 0.7 * w + own[site, 0] + own[site, 1] * x[:, 0]
    return np.column_stack([np.ones(V * n), x, w]), eta, site, rng


def linear(**how):
    X, eta, site, rng = rows(**how)
    return X, eta + rng.normal(size=len(X)), site


def sums_of(X, y, site, fixed):
    each, target = ([part[site == u] for u in np.unique(site)] for part in (X, y))
    return QuadraticLikelihoods.from_products(
        np.stack([A.T @ A for A in each]),
        np.stack([A.T @ b for A, b in zip(each, target, strict=True)]),
        np.array([b @ b for b in target]),
        np.array([float(len(b)) for b in target]),
        fixed=fixed,
    )


def test_population_effects_are_those_of_statsmodels():
    X, y, site = linear()
    slopes = {"slope": {u: X[site == u, 1:2] for u in np.unique(site)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = MixedLM(y, X, site, exog_re=np.ones((len(X), 1)), exog_vc=slopes).fit(reml=True)
    sums = sums_of(X, y, site, fixed=np.array([False, False, True, True]))
    ours = fit_population(sums, np.full(sums.n_sites, theirs.scale), np.array([1.0, 0.3, 0.0, 0.0]), learned=True)
    np.testing.assert_allclose(ours.mean, theirs.fe_params, rtol=5e-4)
    # theirs are of the Hessian of all parameters, variances included
    np.testing.assert_allclose(np.sqrt(np.diag(ours.covariance)), theirs.bse_fe, rtol=1e-2)
    np.testing.assert_allclose(
        ours.variance[:2], [theirs.cov_re[0, 0], theirs.vcomp[0]], rtol=1e-2
    )  # of a flat likelihood
    np.testing.assert_allclose(ours.log_likelihood, theirs.llf, rtol=1e-6)
    kin = find_kin(Federation.from_arrays(X, y, site, feature_names=NAMES), fixed=["x1"])
    assert kin.fixed == ("x1", "w")  # w is constant within sites
    # where noise may differ between sites
    np.testing.assert_allclose(kin.mean, theirs.fe_params, atol=0.05 * theirs.bse_fe.max())


def test_the_normal_equations_are_those_of_dense_generalised_least_squares():
    X, y, site = linear(V=8, n=6)
    fixed, V = np.array([False, False, True, True]), 8
    each, target = [X[site == u] for u in range(V)], [y[site == u] for u in range(V)]
    sums = sums_of(X, y, site, fixed)
    found = fit_population(sums, np.full(V, 1.0), np.array([1.0, 0.3, 0.0, 0.0]), learned=False)
    varies = found.variance[:2]
    assert not found.variance[2:].any()
    left = [np.linalg.inv(np.eye(6) + A[:, :2] * varies @ A[:, :2].T) for A in each]
    H = sum(A.T @ W @ A for A, W in zip(each, left, strict=True)) + np.diag([1e-8, 1e-8, 0.0, 0.0])
    c = sum(A.T @ W @ b for A, W, b in zip(each, left, target, strict=True))
    np.testing.assert_allclose(found.covariance, np.linalg.inv(H), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.mean, np.linalg.solve(H, c), rtol=1e-9)
    # and the estimates of sites are those of the normal posterior with all coefficients
    model = fit_mixed(sums, np.array([True, False, False, False]), dispersion=1.0)
    prior = np.array([1e-8, np.exp(-model.parameters[2]), 0.0, 0.0])
    wide = np.zeros((4 + 2 * V, 4 + 2 * V))
    right = np.zeros(len(wide))
    wide[:4, :4] = np.diag(prior)
    wide[range(4, len(wide)), range(4, len(wide))] = np.tile(1 / model.variance[:2], V)
    for u, (A, b) in enumerate(zip(each, target, strict=True)):
        Z = np.zeros((6, len(wide)))
        Z[:, :4], Z[:, 4 + 2 * u : 6 + 2 * u] = A, A[:, :2]
        wide, right = wide + Z.T @ Z, right + Z.T @ b
    whole, covariance = np.linalg.solve(wide, right), np.linalg.inv(wide)
    for u in range(V):
        T = np.zeros((4, len(wide)))
        T[:, :4] = np.eye(4)
        T[[0, 1], [4 + 2 * u, 5 + 2 * u]] = 1.0
        np.testing.assert_allclose(model.theta[u], T @ whole, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(model.covariance[u], T @ covariance @ T.T, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(model.mean_covariance, covariance[:4, :4], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["linear", "logistic"])
def test_a_fixed_column_has_the_coefficient_of_the_population_at_all_sites(kind, tmp_path):
    X, eta, site, rng = rows(V=12)
    y = eta + rng.normal(size=len(X)) if kind == "linear" else (eta + rng.logistic(size=len(X)) > 0).astype(int)
    model = (KinRegressor if kind == "linear" else KinClassifier)(fixed=["x1"], unseen="population")
    with pytest.warns(FedkinWarning, match="'x2' is constant within nearly all sites"):
        model.fit(X[:, 1:], y, site=site)
    assert not np.ptp(model.coef_[:, 1:], axis=0).any() and np.ptp(model.coef_[:, 0]) > 0
    np.testing.assert_allclose(model.coef_[0, 1:], model.kin_.mean[2:])
    for errors in (model.kin_.covariance[:, 2:, 2:], model.model_.population.kin.covariance[:, 2:, 2:]):
        np.testing.assert_allclose(errors, np.broadcast_to(model.kin_.mean_covariance[2:, 2:], errors.shape), rtol=1e-9)
    np.testing.assert_allclose(model.model_.population.coef[0, 0, 1:], model.coef_[0, 1:])
    assert not model.kin_.contrast(0, 1).standard_error[2:].any()
    assert "Fixed:          x1, x2" in model.summary()
    model.model_.save(tmp_path / "model")
    assert load(tmp_path / "model").kin.fixed == ("x1", "x2")


def test_summaries_say_as_much_as_rows():
    X, y, site = linear()
    federation = Federation.from_arrays(X[:, 1:], y, site, feature_names=NAMES[1:])
    with pytest.warns(FedkinWarning, match="'w' is constant"):
        ours = fit(federation, None, FitOptions(fixed=("x1",)))
        theirs = fit(summarise(federation.with_intercept()), None, FitOptions(fixed=("x1",)))
    np.testing.assert_allclose(ours.coef, theirs.coef, atol=1e-10)
    assert theirs.kin.fixed == ("x1", "w")


def test_what_can_be_fixed():
    X, y, site = linear(V=5)
    federation = Federation.from_arrays(X, y, site, feature_names=NAMES)
    for wrong, message in ((["x7"], "not a column"), (["(intercept)"], "not a column")):
        with pytest.raises(ParameterError, match=message):
            find_kin(federation, fixed=wrong)
    with pytest.raises(ParameterError, match="all columns are fixed"):
        find_kin(Federation.from_arrays(X[:, 1:3], y, site), fixed=["x0", "x1"])
    with pytest.raises(ParameterError, match="fixed= is for kin"):
        FitOptions(method="fused", fixed=("x0",), lam=0.1)
    with pytest.raises(ParameterError, match="list of column names"):
        FitOptions(fixed="x0")


def test_a_contract_fixes_columns():
    text = 'name = "a"\nloss = "linear"\nfixed = ["age"]\n[features]\nage = {low = 0, high = 9}\n[target]\nname = "y"\n'
    assert contract_options({}, Contract.from_toml(text)).fixed == ("age",)
    with pytest.raises(ParameterError, match="the contract is binding"):
        contract_options({"fixed": ("sex",)}, Contract.from_toml(text))
    with pytest.raises(Exception, match="fixed names 'sex'"):
        Contract.from_toml(text.replace('["age"]', '["sex"]'))
