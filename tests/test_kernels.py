"""The compiled backend against numpy, and the rule by which it is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from builders import random_graph
from fedkin.core import L1, FusedObjective, QuadraticTerms, make_penalty
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.solvers import compiled, solve_fused
from fedkin.solvers import pdhg_kernels as kernels
from fedkin.solvers.compiled import CompiledIteration
from fedkin.solvers.pdhg import Iteration, NumpyIteration


def gram_objective(
    penalty: str, p: int = 5, strength: float = 0.05, rows: int = 20, sparse: bool = False
) -> FusedObjective:
    """Least squares at 40 sites, of which the last two have no edges."""
    rng, n = np.random.default_rng(0), 40
    X = rng.normal(size=(n, rows, p))
    y = X @ rng.normal(size=p) + rng.normal(size=(n, rows))
    terms = QuadraticTerms(
        np.swapaxes(X, 1, 2) @ X / rows, np.einsum("vnp,vn->vp", X, y) / rows, 0.5 * (y**2).mean(axis=1)
    )
    linked = random_graph(n - 2, 0.18, weighted=True)
    graph = Graph.from_indices(range(n), linked.edges, linked.weights)
    box = rng.uniform(0, 0.3, size=(n, p)) if sparse else None
    return FusedObjective(terms, graph, make_penalty(penalty), strength, box)


def mean_objective(penalty: str, p: int) -> FusedObjective:
    rng, n = np.random.default_rng(0), 60
    b = rng.normal(size=(n, p))
    terms = QuadraticTerms(rng.uniform(0.5, 2.0, n), b, 0.5 * (b**2).sum(axis=1))
    return FusedObjective(terms, random_graph(n, 0.09, weighted=True), make_penalty(penalty), 0.3)


OBJECTIVES = {
    "linear l1": gram_objective("l1"),
    "linear l2": gram_objective("l2"),
    "linear linf": gram_objective("linf"),
    "linear l1, p=1": gram_objective("l1", p=1),
    "linear l2, p=11": gram_objective("l2", p=11, rows=40),
    "linear l1, p=7": gram_objective("l1", p=7, rows=40),
    "sparse l1": gram_objective("l1", sparse=True),
    "sparse l2": gram_objective("l2", sparse=True),
    "sparse linf": gram_objective("linf", sparse=True),
    "no penalty": gram_objective("l1", strength=0.0),
    "singular designs": gram_objective("l1", p=6, rows=4),
    "singular designs, l2": gram_objective("l2", p=6, rows=4),
    "mean, p=1": mean_objective("l1", 1),
    "mean l2, p=3": mean_objective("l2", 3),
    "mean l1, p=6": mean_objective("l1", 6),
    "ball l1": replace(gram_objective("l1"), radius=2.0),
    "ball, sparse linf": replace(gram_objective("linf", sparse=True), radius=1.5),
    "ball, no penalty": replace(gram_objective("l2", strength=0.0), radius=2.0),
    "ball, singular designs": replace(gram_objective("l2", p=6, rows=4), radius=1.0),
    "ball, mean, p=1": replace(mean_objective("l1", 1), radius=0.5),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_backends_agree(name: str) -> None:
    objective = OBJECTIVES[name]
    one = solve_fused(objective, 1e-7, backend="numpy")
    other = solve_fused(objective, 1e-7, backend="numba")
    assert one.status == other.status == "converged"
    assert one.n_iter == other.n_iter
    np.testing.assert_allclose(other.theta, one.theta, atol=1e-10, rtol=0)
    np.testing.assert_allclose(other.alpha, one.alpha, atol=1e-10, rtol=0)
    np.testing.assert_allclose(other.objective, one.objective, rtol=1e-12)
    # fused sites are bitwise equal in both
    edges = objective.graph.edges
    fused = [(solution.theta[edges[:, 0]] == solution.theta[edges[:, 1]]) for solution in (one, other)]
    np.testing.assert_array_equal(*fused)


@pytest.mark.parametrize("name", ["linear l1", "linear l2", "sparse l1", "mean l2, p=3", "singular designs", "ball l1"])
@pytest.mark.parametrize(("constant", "value"), [("SCRAMBLED_SITES", 10), ("THREADING_PAYS", 0.0)])
def test_numbering_sites_anew_and_sharing_the_work_change_nothing(name, constant, value, monkeypatch) -> None:
    expected = solve_fused(OBJECTIVES[name], 1e-8, backend="numba")
    monkeypatch.setattr(compiled, constant, value)
    monkeypatch.setattr(compiled, "available_threads", lambda: 3)
    other = solve_fused(OBJECTIVES[name], 1e-8, backend="numba")
    np.testing.assert_allclose(other.theta, expected.theta, atol=1e-10)
    np.testing.assert_allclose(other.alpha, expected.alpha, atol=1e-10)


@pytest.mark.parametrize("last", [1, 4])
@pytest.mark.parametrize(("backend", "kind"), [("numpy", NumpyIteration), ("numba", CompiledIteration)])
def test_interruption_leaves_a_certified_pair(
    backend: Any, kind: type[Iteration], last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, calls = OBJECTIVES["linear l2"], []
    original = kind.run

    def run(self: Iteration, *arguments: Any, **named: Any) -> Any:
        calls.append(1)
        moves = original(self, *arguments, **named)
        if len(calls) == last:
            raise KeyboardInterrupt
        return moves

    monkeypatch.setattr(kind, "run", run)
    solution = solve_fused(objective, 1e-12, backend=backend)
    monkeypatch.undo()
    assert solution.status == "interrupted"
    assert np.isfinite(solution.gap) and (last == 1 or solution.gap < 1e-2)
    assert (objective.penalty.dual_norm(solution.alpha) <= objective.edge_radius * (1 + 1e-12)).all()
    best = solve_fused(objective, 1e-10, backend="numpy")
    assert solution.objective - best.objective <= solution.gap * abs(solution.objective) * (1 + 1e-6)


def test_custom_penalty() -> None:
    class Own(L1):
        name = "own"

    objective = replace(OBJECTIVES["mean, p=1"], penalty=Own())
    expected = solve_fused(OBJECTIVES["mean, p=1"], 1e-8, backend="numpy")
    np.testing.assert_allclose(solve_fused(objective, 1e-8).theta, expected.theta, atol=1e-10)
    for backend, words in (("numba", "no kernels for the penalty 'own'"), ("cuda", "unknown backend 'cuda'")):
        with pytest.raises(ParameterError, match=words):
            solve_fused(objective, 1e-4, backend=backend)  # type: ignore[arg-type]


def test_projections_onto_the_l1_ball_end_when_coordinates_lie_at_the_threshold() -> None:
    """Rounding then lets a coordinate in and out of the active set; the projection must not follow it for ever."""
    rng = np.random.default_rng(0)
    v = rng.normal(size=(20_000, 3))
    largest = np.sort(np.abs(v), axis=1)[:, ::-1]
    active = rng.integers(1, 3, len(v))
    threshold = largest[np.arange(len(v)), active]
    radius = np.where(np.arange(3) < active[:, None], largest - threshold[:, None], 0.0).sum(axis=1)
    expected = make_penalty("linf").project(v, radius)
    ends, zeros = np.zeros(len(v), dtype=np.int32), np.zeros(3)
    found = v.copy()
    edges = kernels.EdgeArrays(ends, ends, radius, kernels.KINDS["linf"])
    kernels.edge_step(0, len(v), edges, zeros, np.zeros((1, 3)), found, np.zeros((1, 3)), 1.0)
    np.testing.assert_allclose(found, expected, atol=1e-14)


def test_kernels_are_compiled_for_the_types_that_solves_use() -> None:
    kernels.load_kernels()
    names = ("run", "edge_moves", "add_balance", "invert", "gap", "group_sums", "group_means")
    used = [getattr(kernels, name) for name in names]
    before = [len(one.signatures) for one in used]
    solve_fused(gram_objective("l2", sparse=True), 1e-4, backend="numba")
    solve_fused(mean_objective("l1", 2), 1e-4, backend="numba")
    assert [len(one.signatures) for one in used] == before
