"""Rounds between sites: the documented steps, convergence to the exact minimiser, absences, and resumed runs."""

from __future__ import annotations

import numpy as np
import pytest

from fedkin import Availability, Problem, fed_admm, solve
from fedkin.datasets import paper_design

V, P = 8, 3


def a_problem(penalty="l1", lam=0.01, loss="linear", **more):
    made = paper_design(n_sites=V, n_samples=40, n_features=P, n_clusters=2, varrho=0.1, loss=loss, seed=0)
    return Problem(made.federation, made.graph, loss=loss, penalty=penalty, lam=lam, **more)


def distance(found, exact):
    return float(((found.theta - exact.theta) ** 2).sum() / V)


def same_bits(one, other):
    return (
        np.array_equal(one.theta, other.theta)
        and np.array_equal(one.alpha, other.alpha)
        and one.objective == other.objective
        and all(np.array_equal(one.trace[name], other.trace[name]) for name in one.trace)
    )


@pytest.fixture(scope="module")
def exact():
    return solve(a_problem(), tol=1e-12)


# --- the steps ------------------------------------------------------------------------------------------------


def project(y, radius, penalty):
    """Onto the ball of the dual norm."""
    if penalty == "l1":
        return np.clip(y, -radius, radius)
    return y * min(1.0, radius / max(np.linalg.norm(y), 1e-300))


def by_hand(problem, rounds, kappa, rho, penalty, present):
    """The rounds of docs/fused.md with all rows, step=kappa and estimated shares of presence, one site at a time."""
    fed, graph = problem.federation, problem.graph
    theta, y = np.zeros((V, P)), np.zeros((graph.n_edges, P))
    pull = before = np.zeros((V, P))
    radius, D = problem.lam * V, graph.incidence().toarray()
    for t in range(1, rounds + 1):
        new = theta.copy()
        for i in range(V):
            X, target = fed[fed.sites[i]].X, fed[fed.sites[i]].y
            share = (1 + present[: t - 1, i].sum()) / t
            gradient = X.T @ (X @ theta[i] - target) / len(X) / share if present[t - 1, i] else 0.0
            e = kappa / t
            eta = e / (1 + rho * graph.degree[i] * e)
            new[i] = theta[i] - eta * (gradient + 2 * pull[i] - before[i])
        theta = new
        for e, (i, j) in enumerate(graph.edges):
            y[e] = project(y[e] + rho / 2 * (theta[i] - theta[j]), radius * graph.weights[e], penalty)
        before, pull = pull, D.T @ y
    return theta


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_rounds_are_the_documented_steps(penalty):
    problem = a_problem(penalty)
    found = fed_admm(problem, 25, step=0.8, rho=0.5, average="last", backend="numpy")
    expected = by_hand(problem, 25, 0.8, 0.5, penalty, np.ones((25, V), dtype=bool))
    assert found.theta == pytest.approx(expected, abs=1e-10)


def test_absent_sites_take_the_penaltys_part_of_the_step_only():
    problem = a_problem()
    present = np.random.default_rng(0).random((25, V)) < 0.6
    present[0] = True
    found = fed_admm(
        problem,
        25,
        step=0.8,
        rho=0.5,
        average="last",
        availability=Availability.recorded(present, weighting="estimated"),
        record_every=1,
        backend="numpy",
    )
    assert found.theta == pytest.approx(by_hand(problem, 25, 0.8, 0.5, "l1", present), abs=1e-10)
    assert found.trace["available"] == pytest.approx(present.mean(axis=1))


# --- convergence ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", ["l1", "l2", "linf"])
@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_all_rows_converge_to_the_exact_minimiser(penalty, loss):
    problem = a_problem(penalty, 0.01, loss, ridge=0.0 if loss == "linear" else 0.05)
    target = solve(problem, tol=1e-12)
    found = fed_admm(problem, 3000)
    assert distance(found, target) < 1e-8
    assert found.objective >= target.objective * (1 - 1e-9)
    assert -1e-9 <= (found.objective - target.objective) / found.objective <= found.gap + 1e-9


@pytest.mark.parametrize("gradient", ["saga", "svrg"])
def test_batches_without_variance_converge_linearly(gradient, exact):
    found = fed_admm(a_problem(), 1500, batch_size=5, gradient=gradient, reference=exact)
    assert distance(found, exact) < 1e-10
    assert found.trace["distance"][-1] == pytest.approx(distance(found, exact), rel=1e-6, abs=1e-20)


def test_plain_batches_come_closer_like_one_over_the_rounds(exact):
    few, many = (
        np.mean([distance(fed_admm(a_problem(), rounds, batch_size=5, seed=seed), exact) for seed in range(6)])
        for rounds in (200, 3200)
    )
    assert many < few / 6  # 16 times as many rounds
    assert many < 1e-3


def test_a_tolerance_ends_the_run_with_a_certified_gap(exact):
    found = fed_admm(a_problem(), 5000, tol=1e-7)
    assert found.status == "converged"
    assert found.gap <= 1e-7
    assert found.n_iter < 5000
    assert (found.objective - exact.objective) / found.objective <= found.gap + 1e-12
    assert found.trace["gap"][-1] <= 1e-7 < found.trace["gap"][0]


def test_a_warm_start_at_the_minimum_stays_there(exact):
    assert distance(fed_admm(a_problem(), 20, warm_start=exact), exact) < 1e-12


# --- sites that come and go -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "availability",
    [
        Availability.bernoulli(np.linspace(0.3, 1.0, V)),
        Availability.bernoulli(0.5, blocks=[0, 0, 0, 0, 1, 1, 1, 1]),
        Availability.bernoulli(0.5, weighting="estimated"),
        Availability.adversarial(0.5, period=6),
        Availability.recorded(np.random.default_rng(0).random((50, V)) < 0.7, repeat=True),
    ],
    ids=["unequal", "blocks", "estimated", "adversarial", "recorded"],
)
def test_absences_do_not_change_the_limit(availability, exact):
    found = fed_admm(a_problem(), 4000, batch_size=20, availability=availability, reference=exact)
    trace = found.trace
    assert trace["distance"][-1] < 3e-3 * (exact.theta**2).sum() / V
    assert trace["distance"][-1] < 0.2 * trace["distance"][trace["n_iter"] >= 100][0]


def test_presence_has_the_shares_that_were_asked_for():
    names = [f"s{i}" for i in range(6)]
    shares = {name: 0.3 + 0.1 * i for i, name in enumerate(names)}
    there, known = Availability.bernoulli(shares).bind(names, seed=1).rounds(1, 4001)
    assert there.mean(axis=0) == pytest.approx(list(shares.values()), abs=0.03)
    assert known[0] == pytest.approx(list(shares.values()))
    again, _ = Availability.bernoulli(shares).bind(names, seed=1).rounds(1, 4001)
    assert np.array_equal(there, again)
    blocks, _ = Availability.bernoulli(0.5, blocks=[0, 0, 0, 1, 1, 1]).bind(names, seed=1).rounds(1, 200)
    assert (blocks[:, :3] == blocks[:, :1]).all()
    assert (blocks[:, 0] != blocks[:, 3]).any()


# --- the same bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", ["plain", "saga"])
def test_a_seed_fixes_every_bit(gradient):
    run = {"rounds": 60, "batch_size": 4, "gradient": gradient, "availability": Availability.bernoulli(0.7)}
    one, again, other = (fed_admm(a_problem(), **run, seed=seed) for seed in (3, 3, 4))
    assert same_bits(one, again)
    assert not np.array_equal(one.theta, other.theta)


def test_a_run_stopped_by_a_callback_can_be_resumed(tmp_path):
    path = tmp_path / "run.db"
    whole = fed_admm(a_problem(), 40, 4, record_every=1)
    part = fed_admm(a_problem(), 40, 4, record_every=1, checkpoint=path, callbacks=[lambda now: now.n_iter >= 11])
    assert part.status == "interrupted"
    assert part.n_iter == 11
    assert same_bits(whole, fed_admm(a_problem(), 40, 4, record_every=1, checkpoint=path, resume=True))
