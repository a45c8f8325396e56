"""Every loss in everything that fits: what holds for one holds for all, and a new loss is one parameter more."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fedkin
from builders import LOSS_NAMES, LOSSES, drawn
from fedkin import Federation, Graph, KinClassifier, KinRegressor, Problem, fed_admm, solve
from fedkin.cli import main
from fedkin.errors import FedkinError
from fedkin.federate import Contract
from fedkin.losses import LOSSES as KINDS
from fedkin.losses import make_loss

WITH_TARGET = [name for name in LOSS_NAMES if KINDS[name].target is not None]
FAMILIES = [name for name, case in LOSSES.items() if case.family]


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
    if loss != "huber":
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
