"""The arithmetic of a round: Algorithm 1, and the same bits however sites are spread over shards."""

from __future__ import annotations

from fractions import Fraction

import cvxpy
import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithm1 import PROX, Algorithm1, prox_l1_exact
from fedkin.admm import (
    Availability,
    Gradients,
    LocalShards,
    RunPlan,
    Shard,
    SiteRows,
    StepRule,
    fed_admm,
    site_keys,
)
from fedkin.admm.gradients import SampleStream
from fedkin.admm.shard import averaging_weight, node_update
from fedkin.core import Problem, make_penalty
from fedkin.data import Federation, Rows
from fedkin.errors import DataError, SolverError
from fedkin.graph import Graph
from fedkin.losses import MeanLoss, UserLoss, make_loss


def rows_for(X, y, counts, loss, batch, ridge=0.0):
    counts = np.asarray(counts)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    losses = [loss] * counts.size if not isinstance(loss, list) else loss
    p = losses[0].n_params(X.shape[1])
    batch = np.broadcast_to(batch, counts.shape).astype(np.int64)
    return SiteRows(Rows(X, y), starts, counts, site_keys(range(counts.size)), losses, batch, np.full(p, ridge))


def plan_for(rows, edges, L, penalty, rho, steps, theta, **more):
    sites, radius = np.arange(len(theta)), np.asarray(L, dtype=float)
    edges = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
    return RunPlan(
        sites, theta, edges, radius, make_penalty(penalty), rho, steps, rows, **{"snapshot_every": 3, **more}
    )


@pytest.mark.parametrize("p", [1, 2, 3, 20])
@pytest.mark.parametrize("degree", [1, 7, 8, 9, 200])
def test_a_site_alone_sums_its_duals_edge_by_edge(p, degree):
    """As the sparse product of many sites does, to the last bit."""
    rng = np.random.default_rng(degree)
    here = degree // 2
    edges = np.array(sorted((max(here, v), min(here, v)) for v in range(degree + 1) if v != here))
    alpha = rng.normal(size=(degree, p)) * 10.0 ** rng.integers(-9, 9, size=(degree, p))
    steps = StepRule(np.ones(1), np.zeros(1), np.zeros(1))
    sites, theta, radius = np.array([here]), np.zeros((1, p)), np.full(degree, 1e10)
    shard = Shard(RunPlan(sites, theta, edges, radius, make_penalty("l1"), 1.0, steps, None, alpha=alpha))
    expected = np.zeros(p)
    for (i, _), dual in zip(edges, alpha, strict=True):
        expected = expected + dual if i == here else expected - dual
    assert shard.balance.tobytes() == expected.tobytes()


# --- Algorithm 1 ---


def random_instance(penalty, seed=0, V=12, p=3, n=8):
    rng = np.random.default_rng(seed)
    edges = np.array([(i, j) for i in range(V) for j in range(i) if rng.random() < 0.4])
    X, theta = rng.normal(size=(V * n, p)), rng.normal(size=(V, p))
    y = rng.normal(size=V * n)
    L = rng.uniform(0.05, 0.4, size=len(edges))
    return rows_for(X, y, [n] * V, make_loss("linear"), n), edges, L, theta


@pytest.mark.parametrize("form", ["proximal", "literal"])
@pytest.mark.parametrize("penalty", ["l1", "l2", "linf"])
def test_equals_algorithm_1_over_400_rounds(penalty, form):
    rows, edges, L, theta = random_instance(penalty)
    V, n, rho, kappa = theta.shape[0], 8, 0.7, 0.4
    degree = np.bincount(edges.ravel(), minlength=V)
    damping = rho * degree if form == "proximal" else np.zeros(V)
    steps = StepRule(np.zeros(V), np.full(V, 1 / kappa), damping)
    shards = LocalShards(plan_for(rows, edges, L, penalty, rho, steps, theta, average="paper"))

    def eta(i, t):
        e = kappa / t
        return e / (1 + rho * degree[i] * e) if form == "proximal" else e

    def gradient(i, at, t):
        X, y = rows.data.X[i * n : (i + 1) * n], rows.data.y[i * n : (i + 1) * n]
        return X.T @ (X @ at - y) / n

    literal = Algorithm1(theta, edges.tolist(), L, rho, eta, gradient, PROX[penalty])
    total = np.zeros_like(theta)
    for t in range(1, 401):
        total += literal.stacked()
        literal.round(t)
        shards.run(t, 1)
        assert np.abs(shards.gather("theta") - literal.stacked()).max() < 1e-12
    assert np.abs(shards.gather("average") - total / 400).max() < 1e-12
    ours = shards.gather("alpha")
    for e, (i, j) in enumerate(edges.tolist()):
        assert np.abs(ours[e] + literal.alpha[i, j]).max() < 1e-11
        assert np.abs(ours[e] - literal.alpha[j, i]).max() < 1e-11
    assert literal.vectors == 400 * 6 * len(edges)


def test_equals_algorithm_1_to_the_bit_where_floats_are_exact():
    # whole numbers, and steps and rho that are powers of two: no rounding for a dozen rounds, so the two forms of the
    # algorithm must agree in every bit. Algorithm 1 runs on fractions, which never round.
    rng = np.random.default_rng(3)
    V, p, rounds = 7, 2, 12
    edges = [(i, j) for i in range(V) for j in range(i) if rng.random() < 0.5]
    X = rng.integers(-8, 9, size=(V, p)).astype(float)
    rows = rows_for(X, None, [1] * V, MeanLoss(), 1)
    L = rng.integers(1, 5, size=len(edges)) / 4
    steps = StepRule(np.full(V, 4.0), np.zeros(V), np.zeros(V))
    shards = LocalShards(plan_for(rows, edges, L, "l1", 0.5, steps, np.zeros((V, p))))
    exact = Algorithm1(
        [np.array([Fraction(0)] * p, dtype=object) for _ in range(V)],
        edges,
        [Fraction(x) for x in L.tolist()],
        Fraction(1, 2),
        lambda i, t: Fraction(1, 4),
        lambda i, at, t: at - np.array([Fraction(x) for x in X[i]], dtype=object),
        prox_l1_exact,
    )
    for t in range(1, rounds + 1):
        exact.round(t)
        shards.run(t, 1)
        for u in range(V):
            assert [Fraction(x) for x in shards.gather("theta")[u]] == list(exact.theta[u]), t
        for e, (i, j) in enumerate(edges):
            assert [Fraction(x) for x in shards.gather("alpha")[e]] == list(exact.alpha[j, i])
            assert list(exact.alpha[i, j]) == [-x for x in exact.alpha[j, i]]


def test_proximal_step_is_ouyangs_argmin():
    rng = np.random.default_rng(1)
    V, p, rho, e = 5, 3, 0.8, 0.6
    edges = [(1, 0), (2, 0), (3, 0), (4, 3)]
    X = rng.normal(size=(V, p))
    rows = rows_for(X, None, [1] * V, MeanLoss(), 1)
    degree = np.bincount(np.ravel(edges), minlength=V)
    literal = Algorithm1(
        rng.normal(size=(V, p)), edges, [0.1] * 4, rho, lambda i, t: 0.3, lambda i, at, t: at - X[i], PROX["l1"]
    )
    for t in range(1, 4):
        literal.round(t)
    theta = literal.stacked()
    steps = StepRule(np.full(V, 1 / e), np.zeros(V), rho * degree)
    shard = Shard(plan_for(rows, edges, [0.1] * 4, "l1", rho, steps, theta))
    # hand over the literal duals: the sums around a site are all that the node step sees
    shard.balance = np.array([-sum(literal.alpha[i, j] for j in literal.neighbours[i]) for i in range(V)])
    pull = np.array(
        [
            sum(rho * (theta[i] - literal.beta[i, j]) - literal.alpha[i, j] for j in literal.neighbours[i])
            for i in range(V)
        ]
    )
    shard.balance_before = 2 * shard.balance - pull
    shard.node_step(1)
    for i in range(V):
        at = cvxpy.Variable(p)
        copies = sum(
            cvxpy.sum_squares(at - literal.beta[i, j] - literal.alpha[i, j] / rho) for j in literal.neighbours[i]
        )
        near = cvxpy.sum_squares(at - theta[i]) / (2 * e)
        cvxpy.Problem(cvxpy.Minimize((theta[i] - X[i]) @ at + rho / 2 * copies + near)).solve()
        assert np.abs(shard.theta[i] - at.value).max() < 1e-6


def test_proximal_and_literal_steps_are_equal_without_neighbours():
    rng = np.random.default_rng(0)
    fed = Federation({k: (rng.normal(size=(6, 2)), rng.normal(size=6)) for k in range(3)})
    problem = Problem(fed, Graph.empty(range(3)), lam=0.1)
    proximal = fed_admm(problem, 50, 2, step=0.5)
    literal = fed_admm(problem, 50, 2, step="literal", kappa=0.5)
    assert np.array_equal(proximal.theta, literal.theta)


def test_the_scale_of_lam():
    # SPEC: the objective with 1/|V| gives 0.2 and 1.8; the literal update with the same lam gives 0.1 and 1.9
    fed = Federation({"a": [[0.0]], "b": [[2.0]]})
    problem = Problem(fed, Graph.complete(["a", "b"]), loss="mean", lam=0.1)
    assert np.allclose(fed_admm(problem, 300).theta.ravel(), [0.2, 1.8], atol=1e-12)
    literal = Algorithm1(
        np.zeros((2, 1)), [(1, 0)], [0.1], 1.0, lambda i, t: 0.3, lambda i, at, t: at - [0.0, 2.0][i], PROX["l1"]
    )
    for t in range(1, 300):
        literal.round(t)
    assert np.allclose(literal.stacked().ravel(), [0.1, 1.9], atol=1e-12)


# --- node update ---


def test_node_update_is_the_prox_of_sparsity_and_ball():
    rng = np.random.default_rng(5)
    theta, direction = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    eta, sparsity, radius = rng.uniform(0.1, 1, 4), rng.uniform(0, 1, (4, 3)), 0.8
    moved = node_update(theta, direction, eta, sparsity, radius)
    for u in range(4):
        at = cvxpy.Variable(3)
        target = theta[u] - eta[u] * direction[u]
        value = cvxpy.sum_squares(at - target) / 2 + eta[u] * sparsity[u] @ cvxpy.abs(at)
        cvxpy.Problem(cvxpy.Minimize(value), [cvxpy.norm2(at) <= radius]).solve()
        assert np.abs(moved[u] - at.value).max() < 1e-5


@pytest.mark.parametrize("average", ["tail", "paper", "last"])
def test_running_averages(average):
    rng = np.random.default_rng(0)
    values = rng.normal(size=50)
    running = 0.0
    for t, value in enumerate(values, start=1):
        running += averaging_weight(average, t) * (value - running)
    # weights t (t+1) (t+2) make the recursion (k+1) / (t+k) with k = 3
    weights = {"paper": np.ones(50), "last": np.arange(1, 51) == 50}.get(
        average, np.arange(1, 51) * np.arange(2, 52) * np.arange(3, 53)
    )
    assert np.isclose(running, np.average(values, weights=weights))


# --- gradients ---


def mixed_sites(rng, counts, p=3):
    n = sum(counts)
    X, y = rng.normal(size=(n, p)), (rng.random(n) < 0.5).astype(float)

    def square(theta, X, y, offset):
        return float(((y - X @ theta) ** 2).mean())

    def slope(theta, X, y, offset):
        return -2 * X.T @ (y - X @ theta) / len(y)

    user = UserLoss(square, slope)
    kinds = [make_loss(name) for name in ("linear", "logistic", "huber", "poisson", "mean")] + [user]
    return X, y, [kinds[k % len(kinds)] for k in range(len(counts))]


@pytest.mark.parametrize("kind", ["plain", "saga", "svrg"])
def test_gradients_are_means_over_the_batch_and_unbiased(kind):
    rng = np.random.default_rng(0)
    counts = [9, 5, 7, 9, 6, 8]
    X, y, losses = mixed_sites(rng, counts)
    rows = rows_for(X, y, counts, losses, 4, ridge=0.3)
    gradients = Gradients(rows, 0, kind, snapshot_every=7)
    theta = 0.3 * rng.normal(size=(6, 3))
    rounds = 4000
    total, square = np.zeros_like(theta), np.zeros_like(theta)
    for t in range(1, rounds + 1):
        estimate = gradients(t, theta)
        total += estimate
        square += estimate**2
        if kind == "saga" and t == 5:
            # the table was started at 0 and its mean is kept up to date
            spread = gradients.table
            for u in range(6):
                mine = slice(rows.starts[u], rows.starts[u] + counts[u])
                scores = spread[mine, :1] * X[mine] if spread.shape[1] == 1 or u < 4 else spread[mine]
                assert np.allclose(gradients.anchor_gradient[u], scores.mean(axis=0))
    full = np.array(
        [
            loss.gradient(theta[u], X[s : s + n], y[s : s + n])
            for u, (loss, s, n) in enumerate(zip(losses, rows.starts, counts, strict=True))
        ]
    )
    full += 0.3 * theta
    error = np.sqrt(np.maximum(square / rounds - (total / rounds) ** 2, 0) / rounds)
    assert (np.abs(total / rounds - full) < 5 * error + 1e-12).all()
    if kind != "plain":
        assert np.abs(gradients(rounds + 1, theta) - full).max() < 1e-12  # nothing moves: no variance is left


def test_multinomial_batches():
    rng = np.random.default_rng(0)
    loss = make_loss("multinomial", np.array([0.0, 1.0, 2.0]))
    X, y = rng.normal(size=(12, 2)), rng.integers(0, 3, 12).astype(float)
    rows = rows_for(X, y, [12], loss, 12)
    theta = rng.normal(size=(1, 4))
    assert np.allclose(Gradients(rows, 0)(1, theta)[0], loss.gradient(theta[0], X, y))


def test_absent_sites_see_nothing():
    rng = np.random.default_rng(0)
    X, y, losses = mixed_sites(rng, [6] * 6)
    available = np.array([True, False, True, True, False, True])
    for kind in ("plain", "saga", "svrg"):
        gradients = Gradients(rows_for(X, y, [6] * 6, losses, 2, ridge=1.0), 0, kind, snapshot_every=2)
        for t in range(1, 6):
            estimate = gradients(t, np.ones((6, 3)), available)
        assert (estimate[~available] == 0).all() and (np.abs(estimate[available]).max(axis=1) > 0).all()
        assert (gradients.looked[~available] == 0).all()
        if kind == "svrg":
            assert gradients.stale[1] and (gradients.anchor_theta[1] == 0).all()


def test_streams_are_cut_into_batches_and_checked():
    blocks = iter([(np.arange(6.0).reshape(3, 2), [0, 1, 2]), ([9.0, 9.0], 3.0), (np.ones((4, 2)), np.arange(4))])
    stream = SampleStream("a", blocks, 2)
    X, y, _ = stream.batch(2, 1).arrays
    assert X.shape == (1, 2, 2) and y.tolist() == [[0, 1]]
    assert stream.batch(3, 2).y.tolist() == [[2, 3, 0]]
    with pytest.raises(SolverError, match="samples of site 'a' ended in round 3 after 5 rows"):
        stream.batch(4, 3)
    with pytest.raises(DataError, match=r"expected \(2,\)"):
        SampleStream("a", iter([[1.0, 2.0, 3.0]]), 2).batch(1, 1)
    with pytest.raises(DataError, match="not finite"):
        SampleStream("a", iter([([1.0, np.nan], 0.0)]), 2).batch(1, 1)
    with pytest.raises(DataError, match="1 row but 2 targets"):
        SampleStream("a", iter([([1.0, 2.0], [0.0, 1.0])]), 2).batch(1, 1)


# --- many shards are one ---


def a_graph(kind, V, seed):
    if kind == "random":
        g = networkx.gnp_random_graph(V, 0.4, seed=seed)
    elif kind == "disconnected":
        g = networkx.disjoint_union(
            networkx.path_graph(V - V // 2), networkx.cycle_graph(V // 2) if V > 5 else networkx.empty_graph(V // 2)
        )
    else:
        g = {"path": networkx.path_graph, "ring": networkx.cycle_graph, "star": lambda n: networkx.star_graph(n - 1)}[
            kind
        ](V)
    return Graph.from_indices(range(V), np.array([(max(e), min(e)) for e in g.edges], dtype=np.int64).reshape(-1, 2))


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["path", "ring", "star", "random", "disconnected"]),
    V=st.integers(3, 12),
    p=st.integers(1, 9),
    penalty=st.sampled_from(["l1", "l2", "linf"]),
    loss=st.sampled_from(["linear", "logistic", "huber", "mean", "mixed"]),
    gradient=st.sampled_from(["plain", "saga", "svrg"]),
    average=st.sampled_from(["tail", "paper", "last"]),
    absent=st.booleans(),
    extras=st.booleans(),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_shards_do_not_change_a_bit(kind, V, p, penalty, loss, gradient, average, absent, extras, seed, data):
    rng = np.random.default_rng(seed)
    counts = rng.integers(3, 9, size=V)
    X, y, losses = mixed_sites(rng, counts.tolist(), p)
    fed = Federation.from_arrays(X, y, np.repeat(np.arange(V), counts))
    problem = Problem(
        fed,
        a_graph(kind, V, seed),
        loss=dict(enumerate(losses)) if loss == "mixed" else loss,
        penalty=penalty,
        lam=0.05,
        sparsity=0.02 if extras else 0.0,
        ridge=0.1,
        radius=2.0 if extras else None,
    )
    batch = int(data.draw(st.integers(1, int(counts.min())))) if data.draw(st.booleans()) else None
    run = dict(
        rounds=9,
        batch_size=batch,
        gradient=gradient,
        average=average,
        seed=seed,
        backend="numpy",
        availability=Availability.bernoulli(0.6, weighting="estimated") if absent else None,
    )
    one = fed_admm(problem, **run)
    spread = data.draw(st.lists(st.integers(0, 4), min_size=V, max_size=V))
    for shards in (2, 7, V, spread):
        many = fed_admm(problem, **run, shards=shards)
        for name in ("theta", "alpha"):
            assert np.array_equal(getattr(one, name), getattr(many, name)), (name, shards)
        for name, column in one.trace.items():
            assert np.array_equal(column, many.trace[name]), (name, shards)


def test_replicas_of_an_edge_hold_the_same_bits_and_only_thetas_travel():
    rows, edges, L, theta = random_instance("l2")
    V = theta.shape[0]
    steps = StepRule(np.ones(V), np.full(V, 0.1), 0.7 * np.bincount(edges.ravel(), minlength=V))
    local = LocalShards(plan_for(rows, edges, L, "l2", 0.7, steps, theta), np.arange(V))
    local.run(1, 50)
    copies: dict[tuple[int, int], list[np.ndarray]] = {}
    for shard in local.shards:
        assert set(shard.boundary) <= {int(shard.sites[0])}
        for edge, dual in zip(shard.edges.tolist(), shard.alpha, strict=True):
            copies.setdefault(tuple(edge), []).append(dual)
    assert len(copies) == len(edges)
    for one, other in copies.values():
        assert np.array_equal(one, other)
    # a site sends its theta to each neighbour: two vectors per edge and round, where the paper sends six
    assert sum(shard.foreign.size for shard in local.shards) == 2 * len(edges)


def test_duals_stay_in_their_balls():
    rows, edges, L, theta = random_instance("linf")
    V = theta.shape[0]
    steps = StepRule(np.ones(V), np.zeros(V), 0.7 * np.bincount(edges.ravel(), minlength=V))
    for name in ("l1", "l2", "linf"):
        local = LocalShards(plan_for(rows, edges, L, name, 0.7, steps, theta))
        for t in range(1, 30):
            local.run(t, 1)
            assert (make_penalty(name).dual_norm(local.gather("alpha")) <= L * (1 + 1e-12)).all()


def test_a_lonely_shard_of_one_site_needs_no_neighbour():
    rows = rows_for(np.array([[1.0], [3.0]]), None, [2], MeanLoss(), 2)
    steps = StepRule(np.ones(1), np.zeros(1), np.zeros(1))
    shard = Shard(plan_for(rows, [], [], "l1", 1.0, steps, np.zeros((1, 1)), average="last"))
    shard.node_step(1)
    shard.edge_step()
    assert shard.theta.tolist() == [[2.0]] and shard.give() == {}
