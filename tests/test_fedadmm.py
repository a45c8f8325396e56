"""Rounds: Algorithm 1, the same bits on any shards and compiled, the exact minimiser, rates, streams and errors."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithm1 import PROX, Algorithm1, prox_l1_exact
from builders import LOSS_NAMES, design_problem, expectile, federation, log_cosh, path, ring, star
from federations import side_by_side, split
from fedkin import admm
from fedkin.admm import Availability, DirectLink, Gradients, RunPlan, Shard, SiteRows, StepRule, run_rounds
from fedkin.admm.algorithm import fed_admm
from fedkin.admm.round_kernels import CompiledRounds
from fedkin.core import Problem, make_penalty
from fedkin.data import Federation, Rows
from fedkin.datasets import paper_design
from fedkin.errors import ConvergenceWarning, ParameterError, SolverError
from fedkin.graph import Graph
from fedkin.losses import MeanLoss, make_loss
from fedkin.solvers import solve


def rows_for(X, y, counts, loss, batch, ridge=0.0):
    counts = np.asarray(counts)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    losses = [loss] * counts.size if not isinstance(loss, list) else loss
    p = losses[0].n_params(X.shape[1])
    batch = np.broadcast_to(batch, counts.shape).astype(np.int64)
    return SiteRows(Rows(X, y), starts, counts, admm.site_keys(range(counts.size)), losses, batch, np.full(p, ridge))


def plan_for(rows, edges, L, penalty, rho, steps, theta, **more):
    sites, radius = np.arange(len(theta)), np.asarray(L, dtype=float)
    edges = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
    return RunPlan(
        sites, theta, edges, radius, make_penalty(penalty), rho, steps, rows, **{"snapshot_every": 3, **more}
    )


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
    shard = Shard(plan_for(rows, edges, L, penalty, rho, steps, theta, average="paper"))

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
        if form == "proximal":
            # Ouyang et al.: argmin <g, at> + rho/2 sum_j |at - beta_ij - alpha_ij/rho|^2 + |at - theta_i|^2 / (2 e)
            copies = sum(literal.beta[0, j] + literal.alpha[0, j] / rho for j in literal.neighbours[0])
            near = literal.theta[0] * t / kappa - gradient(0, literal.theta[0], t)
            argmin = (near + rho * copies) / (t / kappa + rho * degree[0])
        literal.round(t)
        assert form == "literal" or np.abs(literal.theta[0] - argmin).max() < 1e-12
        run_rounds(shard, DirectLink(t, t - 1))
        assert np.abs(shard.theta - literal.stacked()).max() < 1e-12
    assert np.abs(shard.average - total / 400).max() < 1e-12
    ours = shard.alpha
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
    shard = Shard(plan_for(rows, edges, L, "l1", 0.5, steps, np.zeros((V, p))))
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
        run_rounds(shard, DirectLink(t, t - 1))
        for u in range(V):
            assert [Fraction(x) for x in shard.theta[u]] == list(exact.theta[u]), t
        for e, (i, j) in enumerate(edges):
            assert [Fraction(x) for x in shard.alpha[e]] == list(exact.alpha[j, i])
            assert list(exact.alpha[i, j]) == [-x for x in exact.alpha[j, i]]


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


def mixed_sites(rng, counts, p=3):
    n = sum(counts)
    X, y = rng.normal(size=(n, p)), (rng.random(n) < 0.5).astype(float)
    kinds = [make_loss(name) for name in ("linear", "logistic", "huber", "poisson", "mean")] + [log_cosh(False)]
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
    parts = [slice(start, start + n) for start, n in zip(rows.starts, counts, strict=True)]
    full = np.array([losses[u].gradient(theta[u], X[part], y[part]) for u, part in enumerate(parts)]) + 0.3 * theta
    error = np.sqrt(np.maximum(square / rounds - (total / rounds) ** 2, 0) / rounds)
    assert (np.abs(total / rounds - full) < 5 * error + 1e-12).all()
    if kind != "plain":
        assert np.abs(gradients(rounds + 1, theta) - full).max() < 1e-12  # nothing moves: no variance is left


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


def a_graph(kind, V, seed):
    if kind == "random":
        i, j = np.tril_indices(V, -1)
        return Graph.from_indices(range(V), np.column_stack([i, j])[np.random.default_rng(seed).random(len(i)) < 0.4])
    if kind == "disconnected":
        return Graph.clusters([u % 2 for u in range(V)])
    return {"path": path, "ring": ring, "star": star}[kind](V)


@pytest.mark.exhaustive
@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["path", "ring", "star", "random", "disconnected"]),
    V=st.integers(3, 12),
    p=st.integers(1, 9),
    penalty=st.sampled_from(["l1", "l2", "linf"]),
    loss=st.sampled_from(["linear", "logistic", "poisson", "huber", "mean", "mixed"]),
    gradient=st.sampled_from(["plain", "saga", "svrg"]),
    average=st.sampled_from(["tail", "paper", "last"]),
    absent=st.booleans(),
    extras=st.booleans(),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_shards_do_not_change_a_bit_and_compiled_rounds_agree(
    kind, V, p, penalty, loss, gradient, average, absent, extras, seed, data
):
    rng = np.random.default_rng(seed)
    counts = rng.integers(3, 9, size=V)
    X, y, losses = mixed_sites(rng, counts.tolist(), p)
    fed = Federation.from_arrays(X, y, np.repeat(np.arange(V), counts))
    more = {"sparsity": 0.02, "radius": 2.0} if extras else {}
    kinds = dict(enumerate(losses)) if loss == "mixed" else loss
    problem = Problem(fed, a_graph(kind, V, seed), loss=kinds, penalty=penalty, lam=0.05, ridge=0.1, **more)
    batch = int(data.draw(st.integers(1, int(counts.min())))) if data.draw(st.booleans()) else None
    there = Availability.bernoulli(0.6, weighting="estimated") if absent else None
    run = dict(rounds=9, batch_size=batch, gradient=gradient, average=average, seed=seed, availability=there)
    one = fed_admm(problem, **run, backend="numpy")
    spread = data.draw(st.lists(st.integers(0, 4), min_size=V, max_size=V))
    here = () if there is None else there.bind(fed.sites, seed).rounds(1, 9)
    plan = admm.plan_run(problem, **run)
    whole = Shard(plan)
    run_rounds(whole, DirectLink(9, 0, *here))
    if "restarts" not in one.message:
        assert np.array_equal(one.theta, whole.average) and np.array_equal(one.alpha, whole.alpha)
    for hosts in (np.arange(V) * 2 // V, np.arange(V), np.array(spread)):
        shards = split(plan, hosts)
        side_by_side(shards, 1, 9, *here)
        for shard in shards:
            edges = np.isin(plan.edges, shard.sites).any(axis=1)
            assert np.array_equal(whole.average[shard.sites], shard.average), hosts
            assert np.array_equal(whole.theta[shard.sites], shard.theta), hosts
            assert np.array_equal(whole.alpha[edges], shard.alpha), hosts
    if loss != "mixed":
        compiled = fed_admm(problem, **run, backend="numba")
        for name in ("theta", "alpha"):
            assert np.abs(getattr(one, name) - getattr(compiled, name)).max(initial=0) < 1e-10
        for name, column in one.trace.items():
            assert np.allclose(column, compiled.trace[name], rtol=1e-9, atol=1e-9), name


def test_replicas_of_an_edge_hold_the_same_bits_and_only_thetas_travel():
    rows, edges, L, theta = random_instance("l2")
    V = theta.shape[0]
    steps = StepRule(np.ones(V), np.full(V, 0.1), 0.7 * np.bincount(edges.ravel(), minlength=V))
    shards = split(plan_for(rows, edges, L, "l2", 0.7, steps, theta), np.arange(V))
    side_by_side(shards, 1, 50)
    copies: dict[tuple[int, int], list[np.ndarray]] = {}
    for shard in shards:
        for edge, dual in zip(shard.edges.tolist(), shard.alpha, strict=True):
            copies.setdefault(tuple(edge), []).append(dual)
    assert len(copies) == len(edges)
    for one, other in copies.values():
        assert np.array_equal(one, other)
    # a site sends its theta to each neighbour: two vectors per edge and round, where the paper sends six
    assert sum(shard.foreign.size for shard in shards) == 2 * len(edges)


# --- runs


def test_absence_costs_what_corollary_1_says():
    problem = design_problem(V=20, n=60, p=6)
    run = dict(rounds=2000, batch_size=10, reference=solve(problem, 1e-10), backend="numba")

    def error(availability):
        runs = [fed_admm(problem, **run, seed=seed, availability=availability) for seed in range(6)]
        return np.mean([one.trace["distance"][-1] for one in runs])

    always = error(None)
    for weighting in ("known", "estimated"):
        assert 0.5 / 0.7 < error(Availability.bernoulli(0.7, weighting=weighting)) / always < 2 / 0.7, weighting


THREE_GROUPS = Graph.clusters([u % 3 for u in range(9)]).corrupt(0.1, seed=0)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("loss", [*LOSS_NAMES, "user", "mixed"])
def test_automatic_steps_serve_every_loss(loss, ragged):
    own = expectile(hessian=False)
    kinds = {"user": own, "mixed": {u: ("linear", "huber", own)[u % 3] for u in range(9)}}
    sizes = tuple(np.random.default_rng(0).integers(2, 25, size=9).tolist()) if ragged else (25,) * 9
    fed = federation("linear" if loss in kinds else loss, sizes, q=3, groups=3)
    problem = Problem(fed, THREE_GROUPS, loss=kinds.get(loss, loss), lam=0.004, ridge=0.05)
    exact = solve(problem, 1e-8)
    start = problem.objective(np.zeros_like(exact.theta))
    for run in ({"batch_size": 2}, {"batch_size": 2, "gradient": "saga"}, {}):
        found = fed_admm(problem, 600, **run)
        assert found.objective - exact.objective < 0.05 * (start - exact.objective), run
        # the certificate is honest
        assert found.objective - exact.objective <= found.gap * max(abs(found.objective), 1e-6 * abs(start)) + 1e-12


def test_sparsity_and_ball():
    problem = design_problem(sparsity=0.2)
    exact = solve(problem, 1e-10)
    found = fed_admm(problem, 1500, 5, gradient="saga", reference=exact)
    assert found.trace["distance"][-1] < 1e-10 and found.gap < 1e-10
    assert (exact.theta == 0).any() and np.array_equal(found.theta == 0, np.abs(exact.theta) < 1e-9)
    longest = np.sqrt((exact.theta**2).sum(axis=1)).max()
    roomy = fed_admm(design_problem(sparsity=0.2, radius=1.01 * longest), 1500, 5, gradient="saga", reference=exact)
    assert roomy.trace["distance"][-1] < 1e-10
    tight = fed_admm(design_problem(sparsity=0.2, radius=0.5 * longest), 100, 5)
    assert np.sqrt((tight.theta**2).sum(axis=1)).max() <= 0.5 * longest * (1 + 1e-12)


def test_residuals_vanish_at_the_solution_only():
    problem = design_problem(sparsity=0.05)
    exact = solve(problem, 1e-13)
    at = fed_admm(problem, 1, warm_start=exact)
    off = fed_admm(problem, 1)
    assert at.trace["primal_residual"][0] < 1e-6 < 1e-3 < off.trace["primal_residual"][0]
    assert at.trace["dual_residual"][0] < 1e-5 < 1e-3 < off.trace["dual_residual"][0]


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_fused_sites_are_equal_to_the_bit_on_request(penalty):
    problem = design_problem(penalty=penalty, lam={"l1": 0.004, "l2": 0.01}[penalty], sparsity=0.01)
    exact = solve(problem, 1e-12)
    plain = fed_admm(problem, 3000)
    fused = fed_admm(problem, 3000, fuse=True)
    assert fused.gap <= plain.gap < 1e-9
    groups = exact.clusters(problem.graph)
    assert 1 < groups.max() + 1 < 12
    assert np.array_equal(fused.clusters(problem.graph), groups)


def test_a_run_that_explodes_is_an_error():
    design = paper_design(n_sites=20, n_samples=30, seed=0)
    problem = Problem(design.federation, design.graph, lam=0.001)
    with pytest.raises(SolverError, match=r"became infinite .* with the literal step kappa/t; .* a ball: .* a radius"):
        fed_admm(problem, 500, 10, step="literal", kappa=500.0, rho=100.0)
    with pytest.raises(SolverError, match=r"worse than .* with step=1000.0"):
        fed_admm(problem, 5, 10, step=1000.0, average="paper")


def test_the_literal_step_is_not_stopped_while_it_can_converge():
    design = paper_design(n_sites=20, n_samples=50, seed=0)
    problem = Problem(design.federation, design.graph, lam=0.001)
    literal = dict(step="literal", kappa=10.0, rho=1.0, reference=solve(problem, 1e-10))
    found = fed_admm(problem, 1000, average="last", **literal)
    assert found.trace["objective"].max() > 1e12 and found.trace["distance"][-1] < 1e-8
    # with batches, the plain average carries the first rounds for ever: it is returned as it is, with a warning
    with pytest.warns(ConvergenceWarning, match=r"worse than .* a ball: give the problem a radius"):
        averaged = fed_admm(problem, 1000, 10, average="paper", **literal)
    assert averaged.trace["distance"][-1] > 1e3
    ball = Problem(design.federation, design.graph, lam=0.001, radius=20.0)
    assert fed_admm(ball, 1000, 10, average="paper", **literal).trace["distance"][-1] < 0.1


def test_too_long_automatic_steps_are_shortened(monkeypatch):
    from fedkin.admm.run_plan import Curvature

    honest = Curvature.of_batches
    monkeypatch.setattr(Curvature, "of_batches", lambda *given, **more: honest(*given, **more) / 40)
    problem = design_problem()
    found = fed_admm(problem, 500, rho=0.01)
    assert "restarts with shorter steps" in found.message
    assert found.gap < 1e-5
    monkeypatch.setattr(Curvature, "of_batches", lambda *given, **more: honest(*given, **more) / 1e9)
    with pytest.raises(SolverError, match="times shorter steps: the objective may have no finite minimiser"):
        fed_admm(problem, 500, rho=0.01)


def test_a_perfect_warm_start_is_not_a_divergence():
    rng = np.random.default_rng(0)
    X, truth = rng.normal(size=(2, 20, 3)), np.ones(3)
    federation = Federation({u: (X[u], X[u] @ truth) for u in range(2)})
    problem = Problem(federation, Graph.complete(range(2)), lam=0.01)
    exact = solve(problem, 1e-10)
    found = fed_admm(problem, 50, 5, warm_start=exact)
    assert np.abs(found.theta - 1).max() < 1e-4


def test_bad_arguments():
    problem = design_problem()
    for name, value, message in [
        ("rounds", 0, "rounds must be a whole number of at least 1, got 0"),
        ("batch_size", 41, "batch_size is 41, but site 0 has only 40 rows"),
        ("batch_size", [3, 4], "one for each of the 12 sites"),
        ("rho", float("nan"), "rho must be a positive number"),
        ("step", -1.0, "step must be a positive number, got -1.0"),
        ("step", "fast", "step must be a positive number, got 'fast'"),
        ("kappa", 1.0, "kappa belongs to step='literal'"),
        ("average", "mean", "average must be one of"),
        ("gradient", "adam", "gradient must be one of"),
        ("seed", -1, "seed must be a whole number"),
        ("tol", 0.0, "tol must be a positive number"),
        ("backend", "cuda", "backend must be"),
        ("record_every", 0, "record_every must be"),
        ("resume", True, "resume needs checkpoint"),
        ("reference", np.zeros((3, 3)), r"reference has shape \(3, 3\), expected \(12, 4\)"),
    ]:
        with pytest.raises(ParameterError, match=message):
            fed_admm(problem, **{"rounds": 5, name: value})
    with pytest.raises(ParameterError, match="warm starts must come from the same graph"):
        fed_admm(problem, 5, warm_start=solve(design_problem(V=9)))


def test_threads_agree():
    problem = design_problem(penalty="l2")
    states = []
    for threads in (1, 3):
        shard = Shard(admm.plan_run(problem, 30, 5))
        rounds = CompiledRounds(shard, threads)
        rounds(1, 20)
        rounds(21, 10)
        states.append(shard.state())
    for name, values in states[0].items():
        assert np.allclose(values, states[1][name], rtol=0, atol=1e-12), name


def test_numba_says_what_it_cannot_do():
    fed, graph = federation("linear", (25,) * 9, q=3, groups=3), THREE_GROUPS
    for problem, run, reason in [
        (Problem(fed, graph, loss=expectile(hessian=False)), {}, "it has no expectile loss"),
        (Problem(fed, graph, loss={u: "linear" if u else "huber" for u in range(9)}), {}, "same loss"),
        (Problem(fed, graph), {"streams": {0: iter([])}}, "streams"),
    ]:
        with pytest.raises(ParameterError, match=f"backend='numba' cannot do this run: .*{reason}"):
            fed_admm(problem, 5, 2, backend="numba", **run)
