"""The instances: the paper's design, block models, nearest neighbours, grids. All from ``default_rng(0)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from fedkin.core import FusedObjective, Problem, QuadraticTerms, make_penalty
from fedkin.datasets import paper_design
from fedkin.graph import Graph

Array = NDArray[np.float64]
SEED = 0
CLUSTER = 100


@dataclass(frozen=True, eq=False)
class Instance:
    """A problem to solve.

    ``objective`` is |V| times the public objective; ``problem`` is there where rows are needed (logistic).
    """

    objective: FusedObjective
    problem: Problem | None = None
    shape: tuple[int, int] | None = None

    def fresh(self) -> FusedObjective:
        """The objective without anything that an earlier solve has left behind."""
        terms = self.objective.terms
        if isinstance(terms, QuadraticTerms):
            terms = QuadraticTerms(terms.A, terms.b, terms.c)
        old = self.objective
        return FusedObjective(terms, old.graph, old.penalty, old.strength, old.sparsity, old.radius)


def paper(penalty: str, strength: float, loss: str = "linear", n_sites: int = 100, n_features: int = 20) -> Instance:
    """The design of the paper; ``strength`` is ``lam * |V|``."""
    design = paper_design(n_sites, 100, n_features, 5, loss=loss, seed=SEED)
    problem = Problem(design.federation, design.graph, loss=loss, penalty=penalty, lam=strength / n_sites)
    return Instance(problem.fused, problem)


def block_graph(n: int, rng: np.random.Generator, edges_per_site: float = 5.0) -> NDArray[np.int64]:
    """Edges ``(E, 2)``: clusters of 100, 90 % of the edges inside them, 10 % anywhere."""
    wanted = round(edges_per_site * n)
    drawn = int(1.3 * wanted) + 100
    i = rng.integers(0, n, drawn, dtype=np.int32)
    near = np.minimum(i // CLUSTER * CLUSTER + rng.integers(0, CLUSTER, drawn, dtype=np.int32), n - 1)
    j = np.where(rng.random(drawn) < 0.9, near, rng.integers(0, n, drawn, dtype=np.int32))
    keys = np.unique((np.maximum(i, j).astype(np.int64) * n + np.minimum(i, j))[i != j])
    keys = np.sort(rng.permutation(keys)[:wanted])
    return np.column_stack([keys // n, keys % n])


def neighbour_graph(n: int, rng: np.random.Generator, k: int = 8) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Edges of the k nearest neighbours of points in the square, and their clusters (nearest of n/100 centres)."""
    points = rng.random((n, 2))
    # numbered along a coarse grid, so that neighbours have numbers near each other
    cell = np.floor(points * max(int(np.sqrt(n / 10)), 1)).astype(int)
    points = points[np.lexsort((cell[:, 1], cell[:, 0]))]
    near = cKDTree(points).query(points, k + 1)[1][:, 1:]
    i, j = np.repeat(np.arange(n), k), near.ravel()
    keys = np.unique(np.maximum(i, j) * n + np.minimum(i, j))
    labels = cKDTree(rng.random((max(n // CLUSTER, 1), 2))).query(points)[1]
    return np.column_stack([keys // n, keys % n]), labels


def clustered(
    n: int,
    p: int,
    penalty: str,
    strength: float,
    *,
    loss: str = "linear",
    rows: int = 50,
    graph: str = "blocks",
    edges_per_site: float = 5.0,
    scrambled: bool = False,
) -> Instance:
    """Cluster parameters with noise; Gram statistics are drawn in blocks and no row is kept."""
    rng = np.random.default_rng(SEED)
    if graph == "blocks":
        edges, labels = block_graph(n, rng, edges_per_site), np.arange(n) // CLUSTER
    else:
        edges, labels = neighbour_graph(n, rng)
    centres = rng.normal(scale=p**-0.25, size=(int(labels.max()) + 1, p))
    if scrambled:
        number = rng.permutation(n)
        edges, labels = number[edges], labels[np.argsort(number)]
    terms = _mean_terms(centres[labels], rows, rng) if loss == "mean" else _linear_terms(centres, labels, rows, rng)
    objective = FusedObjective(terms, Graph.from_indices(range(n), edges), make_penalty(penalty), strength)
    return Instance(objective)


def _mean_terms(truth: Array, rows: int, rng: np.random.Generator) -> QuadraticTerms:
    b = truth + rng.normal(scale=rows**-0.5, size=truth.shape)
    return QuadraticTerms(np.ones(len(b)), b, 0.5 * (b**2).sum(axis=1) + 0.5 * truth.shape[1])


def _linear_terms(centres: Array, labels: NDArray[np.int64], rows: int, rng: np.random.Generator) -> QuadraticTerms:
    n, p = labels.size, centres.shape[1]
    A, b, c = np.empty((n, p, p)), np.empty((n, p)), np.empty(n)
    for start in range(0, n, 5_000):
        part = slice(start, min(start + 5_000, n))
        truth = centres[labels[part]]
        X = rng.normal(size=(len(truth), rows, p))
        y = (X @ truth[:, :, None])[:, :, 0] + rng.normal(size=(len(truth), rows))
        across = np.swapaxes(X, 1, 2)
        A[part] = across @ X / rows
        b[part] = (across @ y[:, :, None])[:, :, 0] / rows
        c[part] = 0.5 * (y**2).mean(axis=1)
    return QuadraticTerms(A, b, c)


def grid_image(side: int) -> Array:
    """12 random discs and rectangles, with noise of standard deviation 0.2."""
    rng = np.random.default_rng(SEED)
    image = np.zeros((side, side))
    y, x = np.mgrid[:side, :side] / side
    for k in range(12):
        cx, cy, size, level = *rng.random(2), rng.uniform(0.05, 0.25), rng.uniform(-1, 1)
        if k % 2:
            image[(x - cx) ** 2 + (y - cy) ** 2 < size**2] = level
        else:
            image[(abs(x - cx) < size) & (abs(y - cy) < size * rng.uniform(0.3, 1.0))] = level
    return image + rng.normal(scale=0.2, size=image.shape)


def grid(side: int, strength: float) -> Instance:
    """Total-variation denoising of an image: one site per pixel, p = 1, mean loss."""
    image = grid_image(side)
    number = np.arange(side * side).reshape(side, side)
    across = np.column_stack([number[:, 1:].ravel(), number[:, :-1].ravel()])
    down = np.column_stack([number[1:].ravel(), number[:-1].ravel()])
    graph = Graph.from_indices(range(side * side), np.concatenate([across, down]))
    b = image.reshape(-1, 1)
    terms = QuadraticTerms(np.ones(side * side), b, 0.5 * (b**2).sum(axis=1))
    return Instance(FusedObjective(terms, graph, make_penalty("l1"), strength), shape=(side, side))


_SMALL, _SMALLER = {"n_sites": 30, "n_features": 5}, {"n_sites": 20, "n_features": 4}
_LARGE = {"n": 10_000, "p": 10}
_MEANS = {"p": 1, "penalty": "l1", "strength": 0.06, "loss": "mean"}
#: Instances by name: how to build them, with what arguments, and what changes at quick size.
CATALOGUE: Mapping[str, tuple[Callable[..., Instance], dict[str, Any], dict[str, Any]]] = {
    "paper linear l1": (paper, {"penalty": "l1", "strength": 0.007}, _SMALL | {"strength": 0.02}),
    "paper linear l2": (paper, {"penalty": "l2", "strength": 0.03}, _SMALL | {"strength": 0.05}),
    "paper logistic l1": (
        paper, {"penalty": "l1", "strength": 0.002, "loss": "logistic"}, _SMALLER | {"strength": 0.005}
    ),
    "paper logistic l2": (
        paper, {"penalty": "l2", "strength": 0.006, "loss": "logistic"}, _SMALLER | {"strength": 0.01}
    ),
    "SBM 10^4 linear l2": (clustered, _LARGE | {"penalty": "l2", "strength": 0.1}, {"n": 500, "p": 4}),
    "SBM 10^4 linear l1": (clustered, _LARGE | {"penalty": "l1", "strength": 0.04}, {"n": 500, "p": 4}),
    "kNN 10^4 linear l2": (
        clustered, _LARGE | {"penalty": "l2", "strength": 0.1, "graph": "kNN"}, {"n": 500, "p": 4}
    ),
    "SBM 10^5 mean p=1": (clustered, _MEANS | {"n": 100_000}, {"n": 2_000}),
    **{f"grid TV {level}": (grid, {"side": 512, "strength": level}, {"side": 64}) for level in (0.1, 0.2, 0.4)},
}  # fmt: skip


def build(name: str, quick: bool) -> Instance:
    """Build an instance by name."""
    make, usual, small = CATALOGUE[name]
    return make(**usual | (small if quick else {}))
