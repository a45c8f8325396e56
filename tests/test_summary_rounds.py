"""Losses that one message does not tell: rounds of questions and answers until the gap is certified."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import cvxpy as cp
import numpy as np
import pytest

import fedkin
from builders import LOSS_NAMES, federation, separated
from fedkin.core import OwnEstimate, Problem, Summaries, Summary, site_answer
from fedkin.data import Federation
from fedkin.errors import DataError, ParameterError, SolverError
from fedkin.fitting import FitOptions, FittedModel, Queries, fit
from fedkin.graph import Graph
from fedkin.losses import LOSSES, Loss, make_loss

SMOOTH = [name for name in LOSS_NAMES if not LOSSES[name].quadratic]
#: Sites agree on the parameters of a loss beforehand, while fits from rows learn them: they are stated here.
STATED = {name: make_loss(name, np.arange(3)) for name in SMOOTH}


def named(loss: str, sizes: tuple[int, ...], q: int = 3, **how: Any) -> Federation:
    fed = federation(loss, sizes, q, groups=2, **how)
    return Federation({f"site {u}": tuple(fed[u].arrays) for u in fed.sites})


class Sites:
    """Sites that keep their rows: they read questions and write answers, as JSON."""

    def __init__(self, rows: Federation, loss: str | Loss) -> None:
        self.rows, self.loss = rows, make_loss(loss, rows.y)
        self.rounds = 1

    def summaries(self) -> Summaries:
        return fedkin.summarise(self.rows, self.loss)

    def answer(self, asks: Queries) -> Summaries:
        self.rounds += 1
        made = []
        for site in self.rows.sites:
            rows = self.rows[site]
            said = site_answer(asks[site], rows, self.loss, feature_names=self.rows.feature_names)
            made.append(Summary.from_plain(json.loads(json.dumps(said.to_plain())), self.loss))
        return Summaries.stack(made)


def fitted(fed: Federation, loss: str | Loss, options: FitOptions, graph: Graph | None = None) -> FittedModel:
    sites = Sites(fed.with_intercept() if options.fit_intercept else fed, loss)
    model = fit(sites.summaries(), graph, options, answer=sites.answer)
    assert model.origin == {"from": "summaries", "rounds": sites.rounds}
    return model


def assert_certified(model: FittedModel, fed: Federation, options: FitOptions) -> None:
    """The model is as close to the minimum as its gap says, and close to what rows give."""
    exact = fit(fed, model.graph, replace(options, lam=model.fused.lam, select=None, tol=1e-10))
    assert model.fused.gap <= options.tol
    # the gap bounds the distance in curvature, which is of the order of 1 here
    np.testing.assert_allclose(model.coef, exact.coef, atol=0.01)
    np.testing.assert_allclose(model.intercept, exact.intercept, atol=0.01)


@pytest.mark.parametrize("loss", SMOOTH)
@pytest.mark.parametrize("standardize", [False, True])
def test_few_rounds_give_the_fit_from_rows(loss: str, standardize: bool) -> None:
    fed = named(loss, (60, 80, 70, 90, 65, 75), offset=loss == "poisson")
    for options in (
        FitOptions(STATED[loss], "fused", standardize=standardize),
        FitOptions(STATED[loss], method="fused", lam=0.02, select="none", penalty="l2", standardize=standardize),
    ):
        model = fitted(fed, loss, options)
        assert model.origin is not None
        assert model.origin["rounds"] <= 6
        assert_certified(model, fed, options)


def test_logistic_against_cvxpy() -> None:
    fed = named("logistic", (40, 50, 60), q=2)
    lam = 0.01
    model = fitted(
        fed, "logistic", FitOptions("logistic", method="fused", lam=lam, select="none", standardize=False, tol=1e-9)
    )
    rows = fed.with_intercept()
    theta = cp.Variable((3, 3))
    total = 0.0
    for u, site in enumerate(rows.sites):
        eta = rows[site].X @ theta[u]
        total += cp.sum(cp.logistic(eta) - cp.multiply(rows[site].y, eta)) / len(rows[site].y)
    fused = sum(cp.norm1(theta[i] - theta[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    cp.Problem(cp.Minimize(total / 3 + lam * fused)).solve(solver=cp.CLARABEL)
    ours = np.column_stack([model.intercept[:, 0], model.coef[:, 0]])
    np.testing.assert_allclose(ours, theta.value, atol=2e-4)


@pytest.mark.parametrize("extra", [{"ridge": 0.1}, {"sparsity": 0.05}, {"lam": 0.0}, {"penalty": "linf"}])
@pytest.mark.parametrize("loss", ["logistic", "poisson"])
def test_options_of_the_fit(loss: str, extra: dict[str, Any]) -> None:
    fed = named(loss, (60, 80, 4, 5, 65, 75))
    options = FitOptions(loss, "fused", **extra)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedkin.errors.DegenerateSiteWarning)
        assert_certified(fitted(fed, loss, options), fed, options)


def test_separated_classes_get_a_light_ridge() -> None:
    X, y = separated(30)
    fed = Federation({site: (X[:, 1:], y) for site in "abc"})
    with pytest.warns(fedkin.errors.DegenerateSiteWarning, match="not determined by the data"):
        model = fitted(fed, "logistic", FitOptions("logistic", method="fused", lam=0.05))
    assert "ridge of 1/25" in model.notes["a"][-1]
    assert model.fused.gap <= 1e-6
    # one site whose classes overlap holds the others back: no ridge is needed
    overlap = Federation({**{site: (X[:, 1:], y) for site in "ab"}, "c": (X[:, 1:], np.arange(30) % 2)})
    assert not any(
        "1/25" in line
        for lines in fitted(overlap, "logistic", FitOptions("logistic", method="fused", lam=0.05)).notes.values()
        for line in lines
    )


def test_the_gap_is_certified_from_answers_alone() -> None:
    """The gap of the asked point, from rows with the duals of the questions, is what the answers add up to."""
    fed = named("logistic", (60, 80, 70))
    sites = Sites(fed, "logistic")
    options = FitOptions("logistic", method="fused", lam=0.05, select="none", standardize=False)
    asks = fit(sites.summaries(), None, options)
    assert isinstance(asks, Queries)
    following = fit(sites.answer(asks), None, options, queries=asks)
    assert isinstance(following, Queries)
    problem = Problem(fed, asks.graph, "logistic", lam=0.05)
    balance = np.asarray(asks.graph.incidence().T @ asks.state.alpha)
    gap, _ = problem.fused.gap(asks.state.theta, asks.state.alpha, None, balance)
    told = following.gap / (gap / problem.fused.value(asks.state.theta))
    assert 1.0 <= told * (1 + 1e-9) < 1.01  # sites round up
    assert following.gap > 0


def test_a_bad_start_is_damped() -> None:
    """Far below the rates the curvature of counts is next to nothing, so that the first step goes much too far."""
    fed = named("poisson", (60, 80, 70, 90)).with_intercept()
    sites = Sites(fed, "poisson")
    far = fedkin.summarise(fed, "poisson", at=np.tile([-3.0, 0.0, 0.0, 0.0], (4, 1)))
    far = replace(far, own=(OwnEstimate(np.zeros(4)),) * 4)
    told: list[str] = []
    options = FitOptions("poisson", method="fused", lam=0.02, select="none")
    model = fit(far, None, options, told.append, answer=sites.answer)
    assert any("rose" in line for line in told)
    assert_certified(model, Federation({site: (fed[site].X[:, 1:], fed[site].y) for site in fed}), options)


def test_answers_that_do_not_belong_to_the_questions_are_refused() -> None:
    sites = Sites(named("logistic", (60, 80, 70)), "logistic")
    options = FitOptions("logistic", "fused", standardize=False)
    first = sites.summaries()
    asks = fit(first, None, options)
    assert isinstance(asks, Queries)
    answers = sites.answer(asks)
    with pytest.raises(DataError, match="first messages, but round 2 needs"):
        fit(first, None, options, queries=asks)
    with pytest.raises(DataError, match="the answer of site 'site 2' is missing"):
        fit(answers.subset(["site 1", "site 0"]), None, options, queries=asks)
    moved = replace(answers, sums=replace(answers.sums, at=answers.sums.at + 1e-9))
    with pytest.raises(DataError, match="the answer of site 'site 0' does not belong to the query"):
        fit(moved, None, options, queries=asks)
    # the order of the answers does not matter
    one, other = (fit(answers.subset(order), None, options, queries=asks) for order in ([*first], [*first][::-1]))
    assert isinstance(one, Queries | FittedModel)
    assert type(one) is type(other)
    with pytest.raises(SolverError, match="after 2 rounds"):
        fit(first, None, options, answer=sites.answer, max_rounds=2)
    with pytest.raises(ParameterError, match="refit"):
        fit(first, None, FitOptions("logistic", method="fused", refit=True), answer=sites.answer)
