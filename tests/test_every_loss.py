"""Every loss in everything that fits: what holds for one holds for all, and a new loss is one parameter more."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import fedkin
from builders import LOSS_NAMES, LOSSES, drawn
from fedkin import Federation, Graph, KinClassifier, KinRegressor, Problem, fed_admm, find_kin, solve
from fedkin.cli import main
from fedkin.errors import FedkinError
from fedkin.federate import Contract
from fedkin.losses import LOSSES as KINDS
from fedkin.losses import HuberLoss, Loss, ScalarLoss, make_loss

WITH_TARGET = [name for name in LOSS_NAMES if KINDS[name].target is not None]
FAMILIES = [name for name, case in LOSSES.items() if case.family]


def test_every_sum_over_rows_has_a_case() -> None:
    assert set(LOSSES) == {name for name, kind in KINDS.items() if kind.additive}


def rows(loss: str, n_sites: int = 6, n: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two features, targets that fit the loss and the number of the site, of two groups of sites."""
    rng = np.random.default_rng(seed)
    site = np.repeat(np.arange(n_sites), n)
    X = rng.normal(size=(site.size, 2))
    eta = 0.6 + np.where(site % 2, 1.0, -0.5) * X[:, 0] + 0.4 * X[:, 1]
    return X, drawn(loss, eta, np.zeros(site.size), rng), site


def table(loss: str, path: Path) -> None:
    X, y, site = rows(loss)
    labels = KINDS[loss].target == "class"
    lines = [
        f"{'abcdef'[s]},{x[0]:.6f},{x[1]:.6f},{'xyz'[int(t)] if labels else f'{t:.6f}'}"
        for x, t, s in zip(X, y, site, strict=True)
    ]
    path.write_text("\n".join(["site,dose,age,outcome", *lines]) + "\n")


@pytest.mark.parametrize("loss", WITH_TARGET)
def test_estimators_fit_and_predict(loss: str) -> None:
    X, y, site = rows(loss)
    classes = KINDS[loss].target == "class"
    model = (KinClassifier if classes else KinRegressor)(loss=loss).fit(X, y, site=site)
    predicted = model.predict_proba(X, site=site) if classes else model.predict(X, site=site)
    assert np.isfinite(predicted).all()
    # the means of the response are what a constant and a slope reproduce on their own rows
    mean = predicted.mean(axis=0) if classes else predicted.mean()
    expected = np.bincount(y.astype(int)) / y.size if classes else y.mean()
    if KINDS[loss].metric != "mean absolute error":  # robust losses fit no means
        np.testing.assert_allclose(mean, expected, rtol=0.05)


@pytest.mark.parametrize("loss", FAMILIES)
def test_coefficients_are_those_of_statsmodels(loss: str) -> None:
    import statsmodels.api as sm

    X, y, site = rows(loss)
    kind = KINDS[loss]
    link = {"identity": sm.families.links.Identity, "log": sm.families.links.Log, "logit": sm.families.links.Logit}
    known = {"alpha": make_loss(loss).parameter} if kind.target == "count" and make_loss(loss).parameter else {}
    family = getattr(sm.families, str(LOSSES[loss].family))(link[str(kind.link)](), **known)
    design = np.column_stack([np.ones(len(X)), X])
    fed = Federation({s: (design[site == s], y[site == s]) for s in range(6)})
    local, pooled = fedkin.local_fit(fed, loss), fedkin.global_fit(fed, loss)
    for s in range(6):
        glm = sm.GLM(y[site == s], design[site == s], family=family).fit(tol=1e-12)
        np.testing.assert_allclose(local.theta[s], glm.params, rtol=1e-5, atol=1e-6)
        if make_loss(loss).estimates_scale:
            found = make_loss(loss).dispersion(glm.params, design[site == s], y[site == s])
            assert found == pytest.approx(glm.scale, rel=1e-6)
    np.testing.assert_allclose(pooled, sm.GLM(y, design, family=family).fit(tol=1e-12).params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSS_NAMES)
@pytest.mark.parametrize("gradient", ["plain", "saga", "svrg"])
def test_rounds_are_the_same_compiled_and_approach_the_minimiser(loss: str, gradient: str) -> None:
    X, y, site = rows(loss, n=20)
    data = {s: X[site == s] if loss == "mean" else (X[site == s], y[site == s]) for s in range(6)}
    problem = Problem(Federation(data), Graph.complete(range(6)), loss, lam=0.002, ridge=0.05)
    one = fed_admm(problem, 60, gradient=gradient, batch_size=5, seed=1, backend="numpy")
    if loss != "multinomial":
        other = fed_admm(problem, 60, gradient=gradient, batch_size=5, seed=1, backend="numba")
        np.testing.assert_allclose(one.theta, other.theta, atol=1e-9)
    best, start = solve(problem, 1e-9), problem.objective(np.zeros_like(one.theta))
    assert best.objective <= problem.objective(one.theta) + 1e-9 < start


@pytest.mark.parametrize("loss", WITH_TARGET)
@pytest.mark.parametrize("method", ["kin", "fused"])
def test_a_table_becomes_a_model_with_a_comparison_and_a_page(
    loss: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(loss, tmp_path / "table.csv")
    options = ["--site", "site", "--target", "outcome", "--loss", loss, "--method", method, "--json"]
    files = ["--out", str(tmp_path / "model"), "--report", str(tmp_path / "page.html")]
    assert main(["fit", str(tmp_path / "table.csv"), *options, *files]) == 0
    document = json.loads(capsys.readouterr().out)
    model = fedkin.load(tmp_path / "model")
    assert model.loss.name == loss
    assert document["comparison"]["metric"] == KINDS[loss].metric
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert str(KINDS[loss].metric) in page
    assert main(["predict", str(tmp_path / "model"), str(tmp_path / "table.csv")]) == 0


@pytest.mark.parametrize("loss", WITH_TARGET)
def test_contracts_name_the_loss_and_refuse_other_targets(loss: str) -> None:
    kind = KINDS[loss]
    n = 3 if kind.link == "softmax" else 2
    levels = json.dumps(["x", "y", "z"][:n])
    of_kind = {"class": f"levels = {levels}", "count": 'kind = "count"'}.get(str(kind.target), "")
    contract = 'name = "h"\nloss = "{}"\n[features.dose]\n[target]\nname = "outcome"\n{}\n'
    read = Contract.from_toml(contract.format(loss, of_kind))
    assert read.loss_object().name == loss
    wrong = "" if kind.target == "class" else f"levels = {levels}"
    with pytest.raises(FedkinError, match=f"the {loss} loss"):
        Contract.from_toml(contract.format(loss, wrong))


# --- kin: for every loss of the registry, and one that is not there -------------------------------------------------


@dataclass(frozen=True)
class PseudoHuberLoss(ScalarLoss):
    """Smooth, and in units of the target: no registered loss is both."""

    delta: float = 1.345
    name, link, metric, estimates_scale = "pseudo-huber", "identity", "mean absolute error", True
    curvature_bound, strictly_convex, minimiser = 1.0, True, "always"

    @classmethod
    def from_rows(cls, X, y, site, offset=None, weight=None):
        return cls(HuberLoss.from_rows(X, y, site, offset, weight).delta)

    @property
    def parameter(self):
        return self.delta

    def loss(self, eta, y):
        return self.delta**2 * (np.sqrt(1.0 + ((eta - y) / self.delta) ** 2) - 1.0)

    @staticmethod
    def slope(eta, y, parameter):
        return (eta - y) / np.sqrt(1.0 + ((eta - y) / parameter) ** 2)

    def curvature(self, eta, y):
        return (1.0 + ((eta - y) / self.delta) ** 2) ** -1.5

    def conjugate(self, a, y):
        return a * y + self.delta**2 * (1.0 - np.sqrt(np.maximum(1.0 - (a / self.delta) ** 2, 0.0)))


KIN_KINDS = {**KINDS, "pseudo-huber": PseudoHuberLoss}


def far_apart(name: str, n: int) -> tuple[Loss, dict[int, tuple[np.ndarray, np.ndarray]]]:
    """Four sites whose parameters differ far more than their standard errors, and the loss for their rows."""
    rng = np.random.default_rng(5)
    kind, slopes = KIN_KINDS[name], np.array([[-1.2, 0.4], [0.2, 0.8], [1.0, -0.8], [0.6, -0.1]])
    X = rng.normal(size=(4, n, 2))
    eta = np.einsum("unq,uq->un", X, slopes) + np.array([[0.5], [-0.4], [1.0], [0.0]])
    if kind.target is None:
        y = np.zeros((4, n))
        X = X + slopes[:, None]
    elif kind.link == "softmax":
        y = np.digitize(eta + rng.logistic(size=eta.shape), [-1.0, 1.0]).astype(float)
    else:
        y = drawn(name if name in KINDS else "huber", eta.ravel(), np.zeros(4 * n), rng).reshape(4, n)
    loss = kind.from_rows(X.reshape(-1, 2), y.ravel(), np.repeat(np.arange(4), n))
    if loss.takes_intercept and kind.target is not None:
        X = np.concatenate([np.ones((4, n, 1)), X], axis=2)
    return loss, {u: (X[u], y[u]) for u in range(4)}


def as_federation(data: dict[int, tuple[np.ndarray, np.ndarray]]) -> Federation:
    rows = {u: X if not y.any() else (X, y) for u, (X, y) in data.items()}
    first = data[0][0]
    names = ["(intercept)"] * bool((first[:, 0] == 1).all()) + ["a", "b"]
    return Federation(rows, feature_names=names)


def local_errors(name: str, loss: Loss, X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Estimates of one site and their standard errors, by statsmodels or by the sandwich of differences."""
    import statsmodels.api as sm
    from scipy.optimize import approx_fprime, minimize

    if name == "mean":
        return X.mean(axis=0), X.std(axis=0) / np.sqrt(len(X))
    if name == "cox":
        found = sm.PHReg(np.abs(y), X, status=(y > 0).astype(int), ties="efron").fit()
        return found.params, found.bse
    if name == "multinomial":
        found = sm.MNLogit(y, X).fit(disp=0)
        return found.params.T.ravel(), np.asarray(found.bse).T.ravel()
    if name in FAMILIES:
        link = {"identity": sm.families.links.Identity, "log": sm.families.links.Log, "logit": sm.families.links.Logit}
        known = {"alpha": loss.parameter} if name == "negbinomial" else {}
        family = getattr(sm.families, str(LOSSES[name].family))(link[str(loss.link)](), **known)
        found = sm.GLM(y, X, family=family).fit()
        return found.params, found.bse
    own = minimize(loss.value, np.zeros(X.shape[1]), (X, y), "BFGS", options={"gtol": 1e-9})
    hessian = approx_fprime(own.x, lambda theta: approx_fprime(theta, loss.value, 1e-3, X, y), 1e-2)
    scores = np.stack([approx_fprime(own.x, loss.value, 1e-6, X[k : k + 1], y[k : k + 1]) for k in range(len(X))])
    half = np.linalg.solve(hessian, scores.T)
    return own.x, np.sqrt(np.diag(half @ half.T)) / len(X)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KIN_KINDS)
def test_with_many_rows_kin_has_the_estimates_and_standard_errors_of_each_site_alone(name: str) -> None:
    loss, data = far_apart(name, 6000)
    kin = find_kin(as_federation(data), loss=loss)
    for u, (X, y) in data.items():
        theta, error = local_errors(name, loss, X, y)
        found = np.sqrt(np.diag(kin.covariance[u]))
        # sites share a dispersion, and a dispersion of one site is known to about 1 / sqrt(n)
        np.testing.assert_allclose(found, error, rtol=0.08)
        assert (np.abs(kin.theta[u] - theta) < 0.5 * error).all()


@pytest.mark.parametrize("name", KIN_KINDS)
def test_kin_does_not_depend_on_units(name: str) -> None:
    """A power of 2, so that numbers keep their digits."""
    loss, data = far_apart(name, 60)
    unit = 2.0**10
    first = find_kin(as_federation(data), loss=loss)
    scaled, times = {}, np.ones(first.theta.shape[1])
    for u, (X, y) in data.items():
        if loss.location:
            scaled[u] = X * unit, y
        elif loss.link == "identity":
            scaled[u] = X, y * unit
        else:
            scaled[u] = X * np.where(np.arange(X.shape[1]) == X.shape[1] - 1, unit, 1.0), y
    if loss.location or loss.link == "identity":
        times *= unit
    else:
        times = np.tile(np.where(np.arange(X.shape[1]) == X.shape[1] - 1, 1 / unit, 1.0), times.size // X.shape[1])
    rows = [np.concatenate(part) for part in zip(*scaled.values(), strict=True)]
    features = rows[0][:, -2:]
    same = type(loss).from_rows(features, rows[1], np.repeat(np.arange(4), 60))
    second = find_kin(as_federation(scaled), loss=same)
    np.testing.assert_allclose(second.theta, first.theta * times, rtol=1e-6)
    np.testing.assert_allclose(second.covariance, first.covariance * np.outer(times, times), rtol=1e-5)
