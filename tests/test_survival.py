"""Cox proportional hazards: against a plain Efron likelihood, statsmodels' PHReg, and simulations."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.model_selection import KFold, cross_val_score

import fedkin
import heart
from fedkin import Federation, Graph, KinRegressor, KinSurvival, Problem, Summaries, solve
from fedkin.cli import main
from fedkin.core import site_answer
from fedkin.errors import DataError, ParameterError
from fedkin.federate import Contract, ContractError, Site, sharing
from fedkin.fitting import FitOptions, FittedModel, Queries, compare, fit
from fedkin.fitting.survival import Baselines, integrated_brier, site_concordances
from fedkin.losses import CoxLoss
from fedkin.report import report_payload

LOSS = CoxLoss()


def trial(
    n_sites: int = 4, n: int = 80, ties: bool = True, spread: float = 0.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, signed times and sites of a trial whose centres have baselines of their own."""
    rng = np.random.default_rng(seed)
    site, X = np.repeat(np.arange(n_sites), n), rng.normal(size=(n_sites * n, 2))
    b = np.array([0.7, -0.4]) + spread * rng.normal(size=(n_sites, 2))
    time = rng.exponential(5.0 / (1 + site) * np.exp(-(X * b[site]).sum(axis=1)))
    end = rng.exponential(6.0 / (1 + site))
    time, died = np.minimum(time, end), time <= end
    time = np.ceil(4 * time) / 4 if ties else time
    return X, np.where(died, time, -time), site


def plain_efron(theta: np.ndarray, X: np.ndarray, y: np.ndarray) -> float:
    """Minus the partial log-likelihood, written as in textbooks."""
    eta, time, total = X @ theta, np.abs(y), 0.0
    for t in np.unique(time[y > 0]):
        dead, risk = (time == t) & (y > 0), time >= t
        total -= eta[dead].sum()
        for k in range(int(dead.sum())):
            total += np.log(np.exp(eta[risk]).sum() - k / dead.sum() * np.exp(eta[dead]).sum())
    return total


@pytest.mark.parametrize("ties", [True, False])
def test_value_gradient_and_hessian_are_those_of_the_plain_likelihood(ties: bool) -> None:
    X, y, _ = trial(1, 60, ties)
    theta, step = np.array([0.3, 0.5]), 1e-5 * np.eye(2)
    assert LOSS.value(theta, X, y) == pytest.approx(plain_efron(theta, X, y) / 60, rel=1e-12)
    slope = [(plain_efron(theta + e, X, y) - plain_efron(theta - e, X, y)) / 2e-5 / 60 for e in step]
    np.testing.assert_allclose(LOSS.gradient(theta, X, y), slope, atol=1e-8)
    bend = [(LOSS.gradient(theta + e, X, y) - LOSS.gradient(theta - e, X, y)) / 2e-5 for e in step]
    np.testing.assert_allclose(LOSS.hessian(theta, X, y), bend, atol=1e-8)
    shift = np.random.default_rng(1).normal(size=60)
    both = np.column_stack([X, shift])
    assert LOSS.value(theta, X, y, shift) == pytest.approx(LOSS.value(np.append(theta, 1.0), both, y), rel=1e-12)


def phreg(X: np.ndarray, y: np.ndarray, strata: np.ndarray | None = None) -> np.ndarray:
    from statsmodels.duration.hazard_regression import PHReg

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = PHReg(np.abs(y), X, status=(y > 0).astype(int), ties="efron", strata=strata)
        return np.asarray(found.fit(gtol=1e-12, method="newton", maxiter=100, disp=False).params)


def federation(X: np.ndarray, y: np.ndarray, site: np.ndarray) -> Federation:
    return Federation({int(s): (X[site == s], y[site == s]) for s in np.unique(site)})


def test_each_site_alone_is_phreg_and_the_best_of_the_plain_likelihood() -> None:
    X, y, site = trial()
    own = fedkin.local_fit(federation(X, y, site), LOSS)
    for s in range(4):
        rows = X[site == s], y[site == s]
        best = minimize(plain_efron, np.zeros(2), args=rows, method="BFGS", options={"gtol": 1e-7})
        np.testing.assert_allclose(own.theta[s], best.x, atol=1e-5)
        np.testing.assert_allclose(own.theta[s], phreg(*rows), atol=1e-6)


def test_one_model_for_all_sites_is_stratified_phreg() -> None:
    X, y, site = trial()
    pooled = fedkin.global_fit(federation(X, y, site), LOSS)
    np.testing.assert_allclose(pooled, phreg(X, y, site), atol=1e-6)


# --- held-out scores --------------------------------------------------------------------------------------------------


def test_parts_of_events_add_up_to_the_partial_likelihood() -> None:
    X, y, _ = trial(1, 60)
    theta = np.array([0.3, 0.5])
    each = LOSS.row_errors(y, LOSS.predict(theta, X))
    assert each.sum() == pytest.approx(plain_efron(theta, X, y), rel=1e-12)
    assert not each[y < 0].any()


@pytest.mark.parametrize("ties", [True, False])
def test_baseline_hazards_are_those_of_statsmodels(ties: bool) -> None:
    from statsmodels.duration.hazard_regression import PHReg

    X, y, _ = trial(1, 60, ties)
    theta = phreg(X, y)
    times, hazard = LOSS.cumulative_hazard(theta, X, y)
    hazard = hazard[:, 0]
    if (
        ties
    ):  # statsmodels has Breslow's estimate only: with Efron's ties, hazards of a time are the sum over its events
        weight, time = np.exp(X @ theta), np.abs(y)
        steps = []
        for t in times:
            dead = (time == t) & (y > 0)
            gone = np.arange(dead.sum()) / max(dead.sum(), 1) * weight[dead].sum()
            steps.append((1.0 / (weight[time >= t].sum() - gone)).sum())
        np.testing.assert_allclose(hazard, np.cumsum(steps), rtol=1e-10)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = PHReg(np.abs(y), X, status=(y > 0).astype(int)).fit(disp=False)
        at, expected, _ = fit.baseline_cumulative_hazard[0]
    known = np.searchsorted(times, at, side="left")  # the hazard before each time
    np.testing.assert_allclose(np.append(0.0, hazard)[known], expected, rtol=1e-4)


def test_concordance_is_the_share_of_ordered_pairs() -> None:
    rng = np.random.default_rng(0)
    y, risk = np.where(rng.random(40) < 0.6, 1, -1) * np.ceil(10 * rng.random(40)), np.round(rng.normal(size=40), 1)
    good = pairs = 0.0
    for i in range(40):
        for j in range(40):
            if y[i] > 0 and (abs(y[j]) > y[i] or (abs(y[j]) == y[i] and y[j] < 0)):
                pairs += 1
                good += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    found = site_concordances(y, risk, np.array([0, 40]))
    assert found.pairs.tolist() == [pairs]
    assert found.pooled == pytest.approx(good / pairs, rel=1e-12)


def test_brier_score_without_censoring_is_the_mean_square_and_does_not_move_with_censoring() -> None:
    rng = np.random.default_rng(1)
    time, ends, times = rng.exponential(size=4000), rng.exponential(2.0, size=4000), np.linspace(0.1, 1.0, 10)
    curves, starts = np.tile(np.exp(-times), (4000, 1)), (np.array([0, 4000]), np.array([0, 4000]))
    whole = integrated_brier(time, time, curves, times, starts)
    plain = ((time[:, None] > times) - curves) ** 2
    assert whole == pytest.approx(np.trapezoid(plain.mean(axis=0), times) / 0.9, rel=1e-12)
    y = np.where(time <= ends, time, -ends)
    assert integrated_brier(y, y, curves, times, starts) == pytest.approx(whole, abs=0.005)


def test_comparison_scores_events_and_names_the_simpler_model() -> None:
    X, y, site = trial(6, 60)
    found = compare(federation(X, y, site), None, FitOptions(loss="cox"), repeats=2)
    assert found.metric == "partial log-loss"
    assert set(found.errors) == {"Local", "Global", "Fedkin"}
    assert found.mean("Global") < found.mean("Local")
    assert {"concordance", "C per site", "Brier score"} == set(found.more)
    assert 0.6 < found.more["concordance"]["Global"] < 0.8
    assert 0.05 < found.more["Brier score"]["Global"] < 0.25
    model = found.models[0]["Global"]
    np.testing.assert_allclose(model.coef, np.tile(model.coef[:1], (6, 1, 1)), rtol=1e-12)


def test_without_events_there_is_nothing_to_compare() -> None:
    X, y, site = trial(3, 30)
    fed = federation(X, y, site)
    held = np.zeros(len(y), dtype=bool)
    held[fed.y < 0] = True
    with pytest.raises(DataError, match="no events among the held-out rows"):
        compare(fed, None, FitOptions(loss="cox"), splits=[held])


# --- models -----------------------------------------------------------------------------------------------------------


def test_survival_curves_of_sites_and_of_a_new_site(tmp_path: Path) -> None:
    X, y, site = trial(5, 80)
    model = fit(federation(X, y, site), None, FitOptions(loss="cox"))
    times = np.array([0.5, 1.0, 3.0])
    curves = model.predict_survival(X, site, times)
    assert (np.diff(curves, axis=1) <= 0).all() and curves.min() >= 0 and curves.max() <= 1
    # at the average row, the curve is that of the site's hazard
    u, rows = 2, site == 2
    moments, hazard = LOSS.cumulative_hazard(model.coef[u, 0], X[rows] - X.mean(axis=0), y[rows])
    hazard = hazard[:, 0]
    expected = np.exp(-np.append(0.0, hazard)[np.searchsorted(moments, times, side="right")])
    np.testing.assert_allclose(model.predict_survival(X.mean(axis=0)[None], 2, times)[0], expected, rtol=1e-10)
    assert model.predict(X.mean(axis=0)[None], 2) == pytest.approx(1.0)
    new = model.predict_survival(X.mean(axis=0)[None], "new", times, unseen="population")[0]
    each = model.predict_survival(np.tile(X.mean(axis=0), (5, 1)), list(range(5)), times)
    # sites all observe these times, so hazards average
    assert model.baseline is not None
    assert min(one[-1] for one in model.baseline.times) > 1
    np.testing.assert_allclose(np.log(new)[:2], np.log(each).mean(axis=0)[:2], rtol=1e-10)
    model.save(tmp_path / "m")
    back = fedkin.load(tmp_path / "m")
    np.testing.assert_array_equal(back.predict_survival(X, site, times), curves)
    assert back.part([3]).baseline.times[0].tolist() == model.baseline.times[3].tolist()  # type: ignore[union-attr]


def test_intervals_of_relative_hazards_hold_the_coefficients() -> None:
    X, y, site = trial(5, 80)
    model = fit(federation(X, y, site), None, FitOptions(loss="cox"))
    row = X.mean(axis=0) + np.array([1.0, 0.0])
    found = model.predict_interval(row[None], 1)
    np.testing.assert_allclose([found.low[0], found.high[0]], np.exp(model.confint()[1, 0]), rtol=1e-8)
    with pytest.raises(ParameterError, match="new observations"):
        model.predict_interval(row[None], 1, interval="observation")


def test_new_sites_join_with_their_own_baseline() -> None:
    X, y, site = trial(5, 80)
    model = fit(federation(X[site < 4], y[site < 4], site[site < 4]), None, FitOptions(loss="cox"))
    rows = site == 4
    target = np.array(list(zip(y[rows] > 0, np.abs(y[rows]), strict=True)), dtype=[("event", "?"), ("time", "f8")])
    joined = model.join((X[rows], target), name="e").model
    assert joined.baseline is not None
    assert joined.baseline.times[0][-1] == np.abs(y[rows]).max()
    np.testing.assert_allclose(joined.coef[0, 0], model.coef[0, 0], atol=0.5)


# --- tables -----------------------------------------------------------------------------------------------------------


def table(n_sites: int = 4, n: int = 60, **more: Any) -> dict[str, Any]:
    X, y, site = trial(n_sites, n, **more)
    return {"hospital": site, "x0": X[:, 0], "x1": X[:, 1], "months": np.abs(y), "died": (y > 0).astype(int)}


def test_tables_have_times_and_events() -> None:
    columns = table()
    fed = Federation.from_frame(columns, site="hospital", target="months", event="died")
    _, y, _ = trial(4, 60)
    np.testing.assert_array_equal(fed.y[np.argsort(fed.row_order)], y)
    truth = Federation.from_frame(columns | {"died": y > 0}, site="hospital", target="months", event="died")
    np.testing.assert_array_equal(truth.y, fed.y)
    assert fed.schema is not None and fed.schema.event == "died" and fed.feature_names == ("x0", "x1")


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"died": [2] + [1] * 239}, "died: unknown level '2'"),
        ({"months": [0.0] + [1.0] * 239}, "a time must be above 0, but is 0 in row 0"),
        ({"died": [None] + [1] * 239}, "died"),
    ],
)
def test_wrong_times_and_events_are_named(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        Federation.from_frame(table() | changed, site="hospital", target="months", event="died")
    with pytest.raises(ParameterError, match="needs the column of times"):
        Federation.from_frame(table(), site="hospital", event="died")


# --- the estimator ----------------------------------------------------------------------------------------------------


def structured(y: np.ndarray) -> np.ndarray:
    return np.array(list(zip(y > 0, np.abs(y), strict=True)), dtype=[("status", "?"), ("months", "f8")])


def test_estimator_takes_targets_of_scikit_survival() -> None:
    X, y, site = trial(4, 60)
    model = KinSurvival().fit(X, structured(y), site=site)
    other = KinSurvival().fit(X, np.column_stack([y > 0, np.abs(y)]), site=site)
    np.testing.assert_array_equal(model.coef_, other.coef_)
    risk = model.predict(X, site)
    order = np.array([site_concordances(y, risk, np.arange(0, 241, 60)).pooled])
    assert model.score(X, structured(y), site) == pytest.approx(order[0], rel=1e-12)
    shuffled = np.random.default_rng(0).permutation(240)
    assert model.score(X[shuffled], structured(y)[shuffled], site[shuffled]) == pytest.approx(order[0], rel=1e-12)
    hazard = model.predict_cumulative_hazard_function(X[:5], site[:5])
    assert hazard.shape == (5, len(model.unique_times_))
    np.testing.assert_allclose(np.exp(-hazard), model.predict_survival_function(X[:5], site[:5]), rtol=1e-12)
    # twice the hazard for a row whose risk is log 2 higher
    np.testing.assert_allclose(hazard[1] / hazard[0], np.exp(risk[1] - risk[0]), rtol=1e-10)
    assert model.predict(X[:2], "new", unseen="population").shape == (2,)
    text = model.summary()
    estimate = np.exp(model.kin_.population()[0])
    assert "Hazard ratios" in text and all(f"{one:.3g}" in text for one in estimate.tolist())


def test_estimator_follows_the_conventions_of_scikit_learn() -> None:
    X, y, site = trial(3, 100)
    model = KinSurvival(unseen="population", site_column=2)
    assert model.get_params() == {"random_state": 0, "warm_start": False, "site_column": 2, "unseen": "population"}
    again = clone(model).set_params(random_state=1)
    assert again.random_state == 1 and again.unseen == "population"
    rows = np.column_stack([X, site])
    scores = cross_val_score(model, rows, structured(y), cv=KFold(3, shuffle=True, random_state=0))
    assert 0.6 < scores.mean() < 0.8  # at the true coefficients 0.70


@pytest.mark.parametrize(
    ("y", "match"),
    [
        (np.array([1.0, 2.0]), "structured array"),
        (np.array([[2, 1.0], [1, 3.0]]), "1 for an event and 0"),
        (np.array([(True, -1.0), (True, 1.0)], dtype=[("e", "?"), ("t", "f8")]), "row 0: the time is -1"),
        (np.array([(1.0, 1.0)], dtype=[("e", "f8"), ("t", "f8")]), "boolean field"),
    ],
)
def test_other_targets_are_refused(y: np.ndarray, match: str) -> None:
    with pytest.raises(DataError, match=match):
        KinSurvival().fit(np.zeros((len(y), 1)), y, site=["a"] * len(y))
    with pytest.raises(ParameterError, match="KinSurvival"):
        KinRegressor(loss="cox").fit(np.zeros((2, 1)), [1.0, 2.0], site=["a", "b"])


# --- federations ------------------------------------------------------------------------------------------------------

CONTRACT = """
name = "trial"
loss = "cox"
intercept = false
[features]
x0 = {low = -5, high = 5}
x1 = {low = -5, high = 5}
[target]
name = "months"
event = "died"
low = 0
high = 500
"""


def test_contracts_have_events() -> None:
    contract = Contract.from_toml(CONTRACT)
    assert Contract.from_bytes(contract.to_bytes()) == contract
    columns = table()
    _, y, _ = trial(4, 60)
    np.testing.assert_array_equal(contract.prepare(columns).y, y)
    assert not [one for one in contract.check(columns) if one.refuses]
    with pytest.raises(ContractError, match="set intercept = false"):
        Contract.from_toml(CONTRACT.replace("intercept = false\n", ""))
    with pytest.raises(ContractError, match="needs a column of events"):
        Contract.from_toml(CONTRACT.replace('event = "died"\n', ""))
    with pytest.raises(ContractError, match="is for cox"):
        Contract.from_toml(CONTRACT.replace('"cox"', '"linear"'))
    with pytest.raises(ContractError, match="use all rows"):
        Contract.from_toml(CONTRACT + "[rounds]\nbatch_size = 30\n")


def test_rows_summaries_and_rounds_have_the_same_coefficients() -> None:
    X, y, site = trial(3, 100)
    fed, graph = federation(X, y, site), Graph.from_indices(range(3), [[1, 0], [2, 1], [2, 0]])
    one = phreg(X, y, site)
    for lam, close in ((1.0, True), (0.004, False)):
        exact = solve(Problem(fed, graph, LOSS, "l2", lam), 1e-13).theta
        options = FitOptions("cox", "fused", lam=lam, select="none", penalty="l2", standardize=False, tol=1e-13)
        rows = fit(fed, graph, options).coef[:, 0]

        def answer(asked: Queries) -> Summaries:
            said = [site_answer(asked[u], fed[u], LOSS, feature_names=fed.feature_names) for u in (0, 1, 2)]
            return Summaries.stack(said)

        told = fedkin.summarise(fed, LOSS)
        assert not told.sums.count[:, :-1].any()  # parts of risk sets would tell less
        # the certificate of a loss without a modulus is linear in what is left, so this is less than 1e-7 of theta
        summaries = fit(told, graph, replace(options, tol=1e-6), answer=answer).coef[:, 0]
        rounds = fedkin.fed_admm(Problem(fed, graph, LOSS, "l2", lam), rounds=4000).theta
        for found in (rows, summaries):
            np.testing.assert_allclose(found, exact, atol=1e-6)
        np.testing.assert_allclose(rounds, exact, atol=1e-6)
        assert np.allclose(exact, one, atol=1e-6) == close  # all alike: the stratified model


def test_one_message_and_a_query_give_the_fit_of_rows() -> None:
    X, y, site = trial(6, 100, spread=0.3)
    fed = federation(X, y, site)

    def answer(asked: Queries) -> Summaries:
        said = [site_answer(asked[u], fed[u], LOSS, feature_names=fed.feature_names) for u in range(6)]
        return Summaries.stack(said)

    rows, found = fit(fed, None, FitOptions("cox")), fit(fedkin.summarise(fed, LOSS), None, answer=answer)
    assert rows.kin is not None and found.kin is not None
    error = np.sqrt(np.einsum("vpp->vp", rows.kin.covariance))
    assert (np.abs(rows.coef - found.coef)[:, 0] < 0.02 * error).all()
    assert found.baseline is None
    with pytest.raises(ParameterError, match="with_baseline"):
        found.predict_survival(X[:1], 0, [1.0])
    alone = found.part([2]).with_baseline(fed.subset([2]))
    expected = rows.predict_survival(X[site == 2], 2, [0.5, 1.0])
    np.testing.assert_allclose(alone.predict_survival(X[site == 2], 2, [0.5, 1.0]), expected, atol=0.01)


def test_between_hospitals_one_summary_then_one_answer(tmp_path: Path) -> None:
    names = ("north", "south", "east")
    made = heart.organiser(tmp_path, CONTRACT, names)
    places = {}
    for u, name in enumerate(names):
        columns = table(1, 100, seed=u)
        path = tmp_path / f"{name}.csv"
        rows = zip(*(columns[one] for one in ("x0", "x1", "months", "died")), strict=True)
        path.write_text("x0,x1,months,died\n" + "\n".join(",".join(map(repr, map(float, row))) for row in rows) + "\n")
        joined, _ = Site.join(heart.invite_of(made, name), path, tmp_path / name)
        joined.accept(made.admit(joined.request).path)
        places[name] = joined.directory
        shared = sharing.share(joined.directory)
        assert shared.path is not None and not shared.summary.count[:-1].any()
        (made.directory / "summaries" / shared.path.name).write_bytes(shared.path.read_bytes())
    runner = ["fit", str(made.directory), "--out", str(tmp_path / "model")]
    assert main(runner) == 0 and not (tmp_path / "model").exists()
    for name in names:
        said = sharing.answer(places[name], made.directory / "asks" / f"{name}@2.ask")
        assert said.path is not None
        (made.directory / "summaries" / said.path.name).write_bytes(said.path.read_bytes())
    assert main(runner) == 0
    model = fedkin.load(tmp_path / "model")
    assert model.baseline is None and model.sites == names
    whole = {"hospital": [n for n in names for _ in range(100)]}
    each = [table(1, 100, seed=u) for u in range(3)]
    whole |= {one: np.concatenate([part[one] for part in each]) for one in ("x0", "x1", "months", "died")}
    contract = Contract.from_toml(CONTRACT)
    fed = Federation.from_schema(whole, contract.schema, site="hospital")
    rows = fit(fed, None, FitOptions("cox"), schema=contract.schema)
    assert rows.kin is not None
    error = np.sqrt(np.einsum("vpp->vp", rows.kin.covariance))
    assert (np.abs(model.coef - rows.coef)[:, 0] < 0.05 * error).all()


# --- curves -----------------------------------------------------------------------------------------------------------


def _known(model: FittedModel, theta: np.ndarray, fed: Federation, variance: float = 0.0) -> FittedModel:
    """The model with given coefficients, baselines that follow from them, and a covariance."""
    assert model.kin is not None
    V, p = theta.shape
    kin = replace(model.kin, covariance=np.tile(variance * np.eye(p), (V, 1, 1)))
    return replace(model, coef=theta[:, None], kin=kin).with_baseline(fed)


def test_curves_are_those_of_lifelines_at_both_ends() -> None:
    lifelines = pytest.importorskip("lifelines")
    X, y, site = trial(3, 100, ties=False)
    fed, table = federation(X, y, site), pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "t": np.abs(y), "e": y > 0})
    model, rows = fit(fed, None, FitOptions("cox"), quick=True), X[:2]
    columns = pd.DataFrame({"a": rows[:, 0], "b": rows[:, 1]})
    pooled = _known(model, np.tile(fedkin.global_fit(fed, LOSS), (3, 1)), fed)
    alone = _known(model, fedkin.local_fit(fed, LOSS).theta, fed)
    for s in range(3):
        times = np.sort(y[(site == s) & (y > 0)])[::7]  # between events lifelines interpolates
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alike = lifelines.CoxPHFitter().fit(table.assign(site=site), "t", "e", strata=["site"])
            own = lifelines.CoxPHFitter().fit(table[site == s], "t", "e")
            stratum = alike.predict_survival_function(columns.assign(site=s), times)
            single = own.predict_survival_function(columns, times)
        np.testing.assert_allclose(pooled.predict_survival(rows, s, times), stratum.T, atol=1e-5)
        np.testing.assert_allclose(alone.predict_survival(rows, s, times), single.T, atol=1e-5)


def test_intervals_of_a_baseline_are_those_of_nelson_and_aalen() -> None:
    """Without effects and without ties the variance is the sum of 1 / n^2 over events."""
    X, y, site = trial(2, 60, ties=False)
    fed, times = federation(X, y, site), np.array([0.01, 0.2, 0.5, 1.0])
    model = _known(fit(fed, None, FitOptions("cox"), quick=True), np.zeros((2, 2)), fed)
    found = model.predict_survival(X[:1], 1, times, level=0.9)[:, 0]
    own = y[site == 1]
    for k, t in enumerate(times):
        size = np.array([(np.abs(own) >= one).sum() for one in own[(own > 0) & (own <= t)]], dtype=float)
        hazard, half = (1 / size).sum(), 1.6448536 * np.sqrt((1 / size**2).sum()) / max((1 / size).sum(), 1e-9)
        expected = np.exp(-hazard * np.exp([0.0, half, -half]))
        np.testing.assert_allclose(found[:, k], expected, rtol=1e-6)


def test_the_gradient_of_a_baseline_is_that_of_differences() -> None:
    X, y, _ = trial(1, 60)
    theta, step = np.array([0.3, 0.5]), 1e-6 * np.eye(2)
    _, found = LOSS.cumulative_hazard(theta, X, y)
    slopes = [
        (LOSS.cumulative_hazard(theta + e, X, y)[1][:, 0] - LOSS.cumulative_hazard(theta - e, X, y)[1][:, 0]) / 2e-6
        for e in step
    ]
    np.testing.assert_allclose(found[:, 2:], np.transpose(slopes), rtol=1e-6, atol=1e-8)


def test_intervals_of_a_new_site_are_as_wide_as_sites_differ(tmp_path: Path) -> None:
    rng, times = np.random.default_rng(3), np.array([0.2, 0.5, 1.0])
    inside, widths = [], []
    for frailty in (0.0, 0.5):
        for _ in range(60):
            hazard = np.exp(frailty * rng.normal(size=16))
            y = rng.exponential(1.0 / hazard[:, None], size=(16, 50))
            y = np.where(y <= 3, y, -3.0)
            fed = Federation({u: (np.zeros((50, 1)), y[u]) for u in range(15)})
            new = Baselines.from_rows(LOSS, np.zeros((15, 1)), fed).pooled()
            _, low, high = new.survival(0, times, np.ones(1), np.zeros((1, 1)), np.zeros((1, 1)))[:, 0]
            if frailty:
                inside.append((low <= np.exp(-hazard[15] * times)) & (np.exp(-hazard[15] * times) <= high))
            widths.append(high - low)
    assert 0.85 < np.mean(inside) < 0.99
    assert np.mean(widths[60:]) > 2 * np.mean(widths[:60])


def test_pages_and_files_have_curves_with_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, site = trial(5, 60)
    model = fit(federation(X, y, site), None, FitOptions("cox"), quick=True)
    model.save(tmp_path / "model")
    again = fedkin.load(tmp_path / "model")
    found = report_payload(again)["survival"]
    assert found["times"][0] == 0 and [one["site"] for one in found["curves"]] == [0, 1, 2, 3, 4, None]
    for one in found["curves"]:
        name, mean, low, high = one["site"], one["mean"], one["low"], one["high"]
        name = "new" if name is None else name
        np.testing.assert_array_less(low[1:], np.add(mean[1:], 1e-4))
        expected = model.predict_survival(X.mean(axis=0)[None], name, found["times"], level=0.95, unseen="population")
        np.testing.assert_allclose([mean, low, high], expected[:, 0], atol=1e-5)
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"x0": X[:2, 0], "x1": X[:2, 1], "site": [0, 1]}).to_csv("new.csv", index=False)
    ask = ["predict", "model", "new.csv", "--site", "site", "--survival", "0.5,1", "--level", "0.9", "--out", "out.csv"]
    assert main(ask) == 0
    told = pd.read_csv("out.csv")
    expected = model.predict_survival(X[:2], [0, 1], [0.5, 1.0], level=0.9)
    for k, end in enumerate(("", ":low", ":high")):
        np.testing.assert_allclose(told[[f"survival:0.5{end}", f"survival:1{end}"]], expected[k], rtol=1e-9)


def test_lung_by_institution_is_the_same_from_rows_summaries_and_sites() -> None:
    """Three institutions of lifelines' ``lung``: one model for all is statsmodels'."""
    datasets = pytest.importorskip("lifelines.datasets")
    lung = datasets.load_lung()[["inst", "time", "status", "age", "sex", "ph.ecog"]].dropna()
    lung = lung[lung["inst"].isin(lung["inst"].value_counts().index[:3])]
    X = lung[["age", "sex", "ph.ecog"]].to_numpy(float)
    X, site = (X - X.mean(axis=0)) / X.std(axis=0), lung["inst"].to_numpy(int)
    y = np.where(lung["status"] == 1, 1, -1) * lung["time"].to_numpy(float)
    fed = federation(X, y, site)
    np.testing.assert_allclose(fedkin.global_fit(fed, LOSS), phreg(X, y, site), atol=1e-9)

    def answer(asked: Queries) -> Summaries:
        said = [site_answer(asked[u], fed[u], LOSS, feature_names=fed.feature_names) for u in fed.sites]
        return Summaries.stack(said)

    graph = Graph.complete(fed.sites)
    for lam in (1.0, 0.01):
        problem = Problem(fed, graph, LOSS, "l2", lam)
        options = FitOptions("cox", "fused", lam=lam, select="none", penalty="l2", standardize=False, tol=1e-7)
        exact, rounds = solve(problem, 1e-13).theta, fedkin.fed_admm(problem, rounds=4000).theta
        rows, told = fit(fed, graph, options), fit(fedkin.summarise(fed, LOSS), graph, options, answer=answer)
        for found in (rows.coef[:, 0], told.coef[:, 0], rounds):
            np.testing.assert_allclose(found, exact, atol=1e-6)
        assert np.allclose(exact, exact[0], atol=1e-9) == (lam == 1.0)
