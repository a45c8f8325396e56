"""Summaries in the place of rows: the same folds, local fits, tests, choice of lam and models."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

import fedkin
from builders import LOSS_NAMES, federation
from fedkin.core import Problem, Query, Summaries, site_answer, site_summary
from fedkin.data import Federation, Rows
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from fedkin.federate import describe_summary
from fedkin.fitting import FitOptions, FittedModel, fit
from fedkin.graph import Graph
from fedkin.losses import LogisticLoss

SIZES = (30, 45, 60, 33, 52, 41)


def grouped(loss: str = "linear", offset: bool = False, seed: int = 0, centre: float = 0.0) -> Federation:
    """Two groups of sites with unequal numbers of rows."""
    fed = federation(loss, SIZES, q=3, seed=seed, offset=offset, groups=2)
    rows = {f"site {u}": (fed[u].X * [1.0, 4.0, 0.3] + centre, fed[u].y, fed[u].offset) for u in fed.sites}
    if loss == "mean":
        return Federation({name: X + 2.0 * (u % 2) for u, (name, (X, _, _)) in enumerate(rows.items())})
    return Federation(rows)


def assert_same_model(ours: FittedModel, theirs: FittedModel, tol: float = 1e-10) -> None:
    scale = max(np.abs(theirs.coef).max(), np.abs(theirs.intercept).max())
    np.testing.assert_allclose(ours.coef, theirs.coef, atol=tol * scale, rtol=0)
    np.testing.assert_allclose(ours.intercept, theirs.intercept, atol=tol * scale, rtol=0)
    assert (ours.fused is None) == (theirs.fused is None)
    if ours.fused is not None:
        assert ours.fused.lam == pytest.approx(theirs.fused.lam, rel=tol, abs=0)
    assert list(ours.graph.edge_ids()) == list(theirs.graph.edge_ids())
    assert ours.members() == theirs.members()
    assert ours.feature_names == theirs.feature_names
    assert ours.n_samples.tolist() == theirs.n_samples.tolist()
    assert dict(ours.notes) == dict(theirs.notes)


def from_sums(fed: Federation, graph: Graph | None, options: FitOptions, loss: str) -> FittedModel:
    """What the organiser fits: every site has summed up its rows without seeing another's."""
    rows = fed.with_intercept() if options.fit_intercept and loss != "mean" else fed
    how = {"feature_names": rows.feature_names, "folds": options.cv_folds, "seed": options.seed}
    made = fedkin.losses.make_loss(loss)
    return fit(Summaries.stack(site_summary(site, rows[site], made, **how) for site in rows.sites), graph, options)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("standardize", [False, True])
def test_least_squares_from_sums_is_least_squares_from_rows(offset: bool, intercept: bool, standardize: bool) -> None:
    fed = grouped(offset=offset, centre=1.5)
    how = {"fit_intercept": intercept, "standardize": standardize, "cv_folds": 4, "seed": 3}
    for lam, select, penalty in (("cv", "bonferroni", "l1"), (0.05, "none", "l2"), ("cv", "holm", "linf")):
        options = FitOptions("linear", method="fused", penalty=penalty, lam=lam, select=select, **how)
        assert_same_model(from_sums(fed, None, options, "linear"), fit(fed, None, options))


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("lam", ["cv", 0.02])
def test_means_from_sums_are_means_from_rows(standardize: bool, lam: float | str) -> None:
    fed = grouped("mean", centre=2.0)
    options = FitOptions("mean", method="fused", lam=lam, standardize=standardize)
    assert_same_model(from_sums(fed, None, options, "mean"), fit(fed, None, options))


@pytest.mark.parametrize("loss", ["linear", "mean"])
@pytest.mark.parametrize("variance", ["model", "bartlett"])
def test_local_fits_and_edge_tests_from_sums(loss: str, variance: Any) -> None:
    fed = grouped(loss, centre=0.7)
    summaries = fedkin.summarise(fed, loss)
    ours, theirs = fedkin.local_fit(summaries, variance=variance), fedkin.local_fit(fed, loss, variance)
    for name in ("theta", "hessian", "covariance", "dispersion", "residual_dof", "prior_precision"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-9, atol=1e-11, err_msg=name)
    p_values = [fedkin.select_edges(data, loss=loss, variance=variance).p_value for data in (summaries, fed)]
    np.testing.assert_allclose(*p_values, rtol=1e-7)


def test_the_sandwich_needs_rows_except_for_means() -> None:
    with pytest.raises(ParameterError, match="needs the score of every row"):
        fedkin.local_fit(fedkin.summarise(grouped()), variance="sandwich")
    fed = grouped("mean")
    ours = fedkin.local_fit(fedkin.summarise(fed, "mean"), variance="sandwich")
    np.testing.assert_allclose(ours.covariance, fedkin.local_fit(fed, "mean", "sandwich").covariance, rtol=1e-9)


def test_a_problem_of_summaries_refuses_what_needs_rows() -> None:
    summaries = fedkin.summarise(grouped())
    problem = Problem(summaries, Graph.complete(summaries.sites), lam=0.1)
    with pytest.raises(DataError, match="Fed-ADMM needs rows"):
        fedkin.fed_admm(problem, 3)
    with pytest.raises(ParameterError, match="5 folds with seed 0"):
        fedkin.cross_validate_lam(problem, folds=4)
    with pytest.raises(ParameterError, match="linear loss, not of 'poisson'"):
        fit(summaries, None, FitOptions(loss="poisson"))
    with pytest.raises(ParameterError, match="fedadmm"):
        fit(summaries, None, FitOptions(method="fused", solver="fedadmm"))


def test_summaries_of_different_contracts_are_not_stacked() -> None:
    fed = grouped()
    first = fedkin.summarise(fed)["site 0"]
    others = {
        "folds": fedkin.summarise(fed, folds=4)["site 1"],
        "seed": fedkin.summarise(fed, seed=4)["site 1"],
        "loss": fedkin.summarise(fed, "huber")["site 1"],
        "columns": fedkin.summarise(fed.with_intercept())["site 1"],
    }
    for what, other in others.items():
        with pytest.raises(DataError, match=f"'site 0' and 'site 1' differ in the .*{what}"):
            Summaries.stack([first, other])
    with pytest.raises(DataError, match="'site 0' has two summaries"):
        Summaries.stack([first, first])
    with pytest.raises(UnknownSiteError, match="no summary of site 'east'"):
        fedkin.summarise(fed)["east"]


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_a_summary_comes_back_from_json_to_the_bit(loss: str) -> None:
    fed = federation(loss, (30, 25), q=2)
    named = Federation({f"site {u}": fed[u].X if loss == "mean" else (fed[u].X, fed[u].y) for u in fed})
    summary = fedkin.summarise(named, loss, folds=3)["site 1"]
    back = fedkin.Summary.from_plain(json.loads(json.dumps(summary.to_plain(), allow_nan=False)))
    for name in ("at", "count", "value", "gradient", "hessian", "column_sums", "column_squares", "scores"):
        np.testing.assert_array_equal(getattr(back, name), getattr(summary, name), err_msg=name)
    assert back.to_plain() == summary.to_plain()
    assert Summaries.stack([back])["site 1"].to_plain() == summary.to_plain()


def damaged(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    plain = fedkin.summarise(grouped(), folds=2)["site 0"].to_plain()
    change(plain)
    return plain


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plain: plain.pop("seed"), "missing required field `seed`"),
        (lambda plain: plain.update(extra=1), "unknown field `extra`"),
        (lambda plain: plain.update(at=[1.0]), "'at' of shape .1,., expected .3,."),
        (lambda plain: plain.update(loss={"name": "tricky"}), "which is not available here"),
        (lambda plain: plain["folds"][1].update(rows=-1), "folds.1..rows"),
        (lambda plain: plain["folds"][0].update(value=float("nan")), "'value' that is not finite"),
        (lambda plain: plain["folds"][0]["gradient"].__setitem__(0, "7"), "folds.0..gradient"),
        (lambda plain: plain["folds"][0]["hessian"].pop(), "fold 1, needs 3 lists for 'hessian'"),
        (lambda plain: plain["folds"][0]["hessian"][1].__setitem__(1, 1e6), "that no rows can produce"),
        (lambda plain: plain.update(column_squares=[0.0, 0.0, 0.0]), "too small for its 'column_sums'"),
        (lambda plain: plain["folds"].pop(), "sums for 2 folds"),
        (lambda plain: plain.update(columns=["a", "a", "b"]), "a name twice"),
    ],
)
def test_a_damaged_summary_is_refused_in_words(change: Callable[[dict[str, Any]], Any], words: str) -> None:
    with pytest.raises(DataError, match=f"the summary of site 'site 0'.*{words}"):
        fedkin.Summary.from_plain(damaged(change))


@pytest.mark.parametrize("loss", ["linear", "logistic", "mean"])
def test_every_number_of_a_message_is_described(loss: str) -> None:
    fed = federation(loss, (30,), q=2)
    rows = fed[0].X if loss == "mean" else (fed[0].X, fed[0].y)
    summary = fedkin.summarise(Federation({"north": rows}), loss)["north"]
    plain, described = summary.to_plain(), {one.name: one for one in describe_summary(summary)}
    names = set(plain) - {"site", "loss", "columns", "seed", "folds", "n_folds"} | set(plain["folds"][0])
    assert set(described) == names - (set() if any(plain["at"]) else {"at"})
    for name in plain["folds"][0]:  # the numbers of the file, fold by fold
        assert described[name].numbers == [part[name] for part in plain["folds"]]
    assert all(one.what and one.tells for one in described.values())


@pytest.mark.parametrize("loss", ["logistic", "poisson", "huber", "multinomial"])
def test_answers_tell_the_loss_at_the_point_and_its_young_gap(loss: str) -> None:
    fed = federation(loss, (60,), q=2)
    made = fedkin.losses.make_loss(loss, fed.y)
    p = made.n_params(2)
    rng = np.random.default_rng(1)
    theta = fedkin.local_fit(fed, loss).theta[0] + 0.015 * rng.normal(size=p)
    balance = 0.005 * rng.normal(size=p)
    ask = Query.from_plain(Query("north", 3, theta, balance, 20.0).to_plain())
    answer = site_answer(ask, fed[0], made, feature_names=fed.feature_names)
    rows = fed[0].arrays
    np.testing.assert_allclose(answer.value.sum() / 60, made.value(theta, *rows), rtol=1e-12)
    np.testing.assert_allclose(answer.gradient.sum(axis=0) / 60, made.gradient(theta, *rows), atol=1e-12)
    np.testing.assert_allclose(answer.hessian.sum(axis=0) / 60, made.hessian(theta, *rows), atol=1e-12)
    # the gap bounds how far theta is from minimising the loss and the pull together
    low = minimize(lambda v: made.value(v, *rows) + balance @ v, theta, tol=1e-12).fun
    excess = made.value(theta, *rows) + balance @ theta - low
    assert answer.gap is not None
    assert 0 < excess <= answer.gap * (1 + 1e-6) < (100 if loss == "huber" else 3) * excess
    assert fedkin.Summary.from_plain(answer.to_plain()).gap == answer.gap


def test_a_gap_does_not_tell_whether_a_row_is_beyond_a_value_that_the_organiser_chooses() -> None:
    """It was infinite for a force that moves one row's predictor by more than 2, and finite otherwise."""
    rng = np.random.default_rng(0)
    X, loss = np.column_stack([np.ones(60), rng.uniform(-1, 1, 60)]), LogisticLoss()
    rows, theta = Rows(X, (rng.random(60) < 0.5).astype(float)), np.zeros(2)
    gradient, hessian = loss.gradient(theta, *rows.arrays), loss.hessian(theta, *rows.arrays)
    oldest, found = np.sort(X[:, 1])[-2:], []
    for value in (oldest.mean(), oldest[1] + 0.01):  # below and above the largest
        step = np.array([2.0 - value, 1.0])
        ask = Query("north", 2, theta, hessian @ step - gradient)
        found.append(site_answer(ask, rows, loss, feature_names=("(intercept)", "age")).gap)
    assert found == [np.inf, np.inf]


def test_a_question_of_another_contract_is_refused() -> None:
    fed = federation("logistic", (60,), q=2)
    with pytest.raises(DataError, match="queried about 5 parameters, but its rows have 2"):
        site_answer(Query("a", 2, np.zeros(5), np.zeros(5)), fed[0], LogisticLoss(), feature_names=fed.feature_names)
    changes = ({"round": 1}, ">= 2.*round"), ({"radius": 0.0}, "> 0.*radius"), ({"balance": []}, "'balance'")
    for change, words in changes:
        with pytest.raises(DataError, match=words):
            Query.from_plain(Query("a", 2, np.zeros(1), np.zeros(1)).to_plain() | change)


# --- short messages of many coefficients: second derivatives as diagonal plus low rank


def one_site(n: int, p: int, seed: int = 0) -> Federation:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p)) * rng.uniform(0.1, 10.0, size=p)
    return Federation({"a": (X, X @ rng.normal(size=p) / 10 + rng.normal(size=n))})


@pytest.mark.parametrize(("n", "p"), [(6, 15), (40, 8)])
def test_a_rank_as_large_as_rows_or_coefficients_is_exact(n, p):
    whole = fedkin.summarise(one_site(n, p))["a"]
    short = whole.short(min(n, p))
    size = np.abs(whole.hessian.sum(axis=0)).max()
    assert short.curvature.exact and short.curvature.factor.shape == (p, min(n, p))
    np.testing.assert_allclose(short.hessian[-1], whole.hessian.sum(axis=0), atol=1e-12 * size)
    assert not short.hessian[:-1].any() and short.n_samples == n
    assert short.gradient.sum(axis=0).tolist() == whole.gradient.sum(axis=0).tolist()
    # and more than that is no longer
    assert whole.short(50).curvature.rank == min(n, p)


def test_what_is_left_out_of_few_rows_are_rows_of_a_rotated_table():
    """Five of nine rows, after a rotation: their products with each other and with the target, and nothing else."""
    fed = one_site(9, 20)
    X, y = fed["a"].X, fed["a"].y
    size = np.sqrt((X**2).sum(axis=0))
    U, _, _ = np.linalg.svd(X / size, full_matrices=False)
    turned, target = U[:, :5].T @ X, U[:, :5].T @ y
    short = fedkin.summarise(fed, rank=5)["a"]
    np.testing.assert_allclose(short.hessian[-1], turned.T @ turned, atol=1e-9)
    np.testing.assert_allclose(-short.gradient[-1], turned.T @ target, atol=1e-9)
    assert 2 * short.value[-1] == pytest.approx(target @ target)
    assert short.curvature.left_out == 4 and not short.curvature.diagonal.any()


def test_a_short_message_is_short_and_comes_back_to_the_bit():
    whole = fedkin.summarise(one_site(30, 60))["a"]
    short = whole.short(5)
    plain = short.to_plain()
    assert len(json.dumps(plain)) < 0.1 * len(json.dumps(whole.to_plain()))
    back = fedkin.Summary.from_plain(json.loads(json.dumps(plain)))
    for name in ("count", "value", "gradient", "hessian", "at"):
        assert np.array_equal(getattr(back, name), getattr(short, name))
    assert np.array_equal(back.curvature.factor, short.curvature.factor) and back.curvature.left_out == 25
    told = {one.name: one for one in describe_summary(short)}
    assert "rows follow from it up to a rotation" in told["curvature"].tells
    # a long one and a short one of two sites go together
    other = fedkin.summarise(Federation({"b": one_site(30, 60, seed=1)["a"]}))["b"]
    assert Summaries.stack([short, other]).curvature == (short.curvature, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one["curvature"]["diagonal"].__setitem__(0, -1.0), "negative"),
        (lambda one: [line.pop() for line in one["curvature"]["factor"]], "'factor' of shape"),
        (lambda one: one["curvature"].update(left_out=-1), "left_out"),
        (lambda one: one["folds"].append(one["folds"][0]), "over all rows only"),
    ],
)
def test_damaged_short_messages_are_refused(change, words):
    plain = fedkin.summarise(one_site(20, 4), rank=2)["a"].to_plain()
    change(plain)
    with pytest.raises(DataError, match=words):
        fedkin.Summary.from_plain(plain)


def test_what_cannot_be_shortened_is_said():
    summary = fedkin.summarise(one_site(20, 4))["a"]
    with pytest.raises(ParameterError, match="rank must be"):
        summary.short(0)
    with pytest.raises(ParameterError, match="already short"):
        summary.short(2).short(1)
    with pytest.raises(ParameterError, match="mean loss"):
        fedkin.summarise(Federation({"a": np.ones((5, 3))}), "mean", rank=1)
