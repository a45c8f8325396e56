"""Small graphs, federations, losses and problems: built here once for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from hypothesis import strategies as st

from fedkin.core import Problem
from fedkin.data import Federation
from fedkin.datasets import paper_design
from fedkin.graph import Graph
from fedkin.losses import LOSSES as KINDS
from fedkin.losses import UserLoss

#: The public data sets.
DATA = Path(os.environ.get("FEDKIN_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


class LossCase(NamedTuple):
    """How others write a loss: ``row(cp, eta, y, loss)`` in cvxpy, and the family of statsmodels with this link."""

    row: Callable[[Any, Any, np.ndarray, Any], Any] | None = None
    family: str | None = None


#: The losses that tests run through everything. A new one is a line here.
LOSSES = {
    "mean": LossCase(),
    "linear": LossCase(lambda cp, eta, y, loss: 0.5 * cp.square(eta - y), "Gaussian"),
    "logistic": LossCase(lambda cp, eta, y, loss: cp.logistic(eta) - cp.multiply(y, eta), "Binomial"),
    "poisson": LossCase(lambda cp, eta, y, loss: cp.exp(eta) - cp.multiply(y, eta), "Poisson"),
    "negbinomial": LossCase(
        lambda cp, eta, y, loss: (
            cp.multiply(y + 1 / loss.alpha, cp.logistic(eta + np.log(loss.alpha))) - cp.multiply(y, eta)
        ),
        "NegativeBinomial",
    ),
    "huber": LossCase(lambda cp, eta, y, loss: 0.5 * cp.huber(eta - y, loss.delta)),
    "multinomial": LossCase(),
    "gamma": LossCase(lambda cp, eta, y, loss: eta + cp.multiply(y, cp.exp(-eta)), "Gamma"),
}
LOSS_NAMES = tuple(LOSSES)
PENALTY_NAMES = ("l1", "l2", "linf")

# --- graphs -----------------------------------------------------------------------------------------------------------


def path(n: int, weights: np.ndarray | None = None) -> Graph:
    return Graph.from_indices(range(n), np.column_stack([np.arange(1, n), np.arange(n - 1)]), weights)


def ring(n: int) -> Graph:
    return Graph.from_indices(range(n), [[u, (u + 1) % n] for u in range(n)])


def star(n: int) -> Graph:
    """Site 0 in the centre."""
    return Graph.from_indices(range(n), [[0, u] for u in range(1, n)])


def grid(rows: int, columns: int, by_column: bool = False) -> Graph:
    """Sites numbered row by row, or column by column."""
    number = np.arange(rows * columns).reshape(rows, columns)
    if by_column:
        number = np.arange(rows * columns).reshape(columns, rows).T
    across = np.column_stack([number[:, 1:].ravel(), number[:, :-1].ravel()])
    down = np.column_stack([number[1:].ravel(), number[:-1].ravel()])
    return Graph.from_indices(range(rows * columns), np.concatenate([across, down]))


def random_graph(n_sites: int, share: float, seed: int = 0, weighted: bool = False) -> Graph:
    """Each pair is an edge with that probability."""
    rng = np.random.default_rng(seed)
    pairs = np.column_stack(np.triu_indices(n_sites, 1))
    pairs = pairs[rng.random(len(pairs)) < share]
    return Graph.from_indices(range(n_sites), pairs, rng.uniform(0.3, 3.0, len(pairs)) if weighted else None)


@st.composite
def random_graphs(draw, most=12, weighted=True):
    """Sites with arbitrary ids, edges in arbitrary orientation and order, positive weights."""
    names = st.one_of(st.integers(-50, 50), st.text(min_size=1, max_size=3), st.tuples(st.integers(0, 5)))
    sites = draw(st.lists(names, min_size=1, max_size=most, unique=True))
    pairs = [(i, j) for i in range(len(sites)) for j in range(i)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    turned = [(sites[j], sites[i]) if draw(st.booleans()) else (sites[i], sites[j]) for i, j in chosen]
    weights = [draw(st.floats(0.01, 100)) for _ in turned] if weighted else None
    return sites, turned, weights


def edge_weights(graph: Graph) -> dict[frozenset[Any], float]:
    """The weight of each edge, keyed by the set of its two ends."""
    return {frozenset(pair): w for pair, w in zip(graph.edge_ids(), graph.weights.tolist(), strict=True)}


def unit_weights(g: nx.Graph) -> nx.Graph:
    """The same networkx graph with weight 1 on every edge."""
    nx.set_edge_attributes(g, 1.0, "weight")
    return g


# --- rows -------------------------------------------------------------------------------------------------------------

TABLE = {
    "site": ["n", "s", "n"],
    "age": [40, 50, 60],
    "smoker": [True, False, True],
    "score": [1.5, 2.5, 3.5],
    "log_time": [0.0, 0.1, 0.2],
}


def of_sizes(*sizes: int, q: int = 2) -> Federation:
    """Sites d0, d1, ... with that many rows; y is the row's number."""
    n = sum(sizes)
    X = np.random.default_rng(0).standard_normal((n, q))
    return Federation.from_arrays(X, np.arange(n), np.repeat([f"d{u}" for u in range(len(sizes))], sizes))


def federation(
    loss: str, sizes: tuple[int, ...], q: int = 2, seed: int = 0, offset: bool = False, groups: int | None = None
) -> Federation:
    """Random sites with a target that fits the loss; sites share the parameters of their group."""
    rng = np.random.default_rng(seed)
    data = {}
    centres = rng.normal(size=(groups or len(sizes), q))
    for u, n in enumerate(sizes):
        X = rng.normal(size=(n, q))
        shift = rng.normal(size=n) if offset else np.zeros(n)
        eta = X @ centres[u % len(centres)]
        y = eta if loss == "mean" else drawn(loss, eta, shift, rng)
        data[u] = (X, y, shift) if offset and loss != "mean" else (X, y)
    return Federation(data)


def drawn(loss: str, eta: np.ndarray, shift: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Targets that fit the loss, for the linear predictor ``eta`` and an offset."""
    kind, n = KINDS[loss], eta.size
    if kind.target == "class":
        two = (rng.random(n) < 1 / (1 + np.exp(-0.5 * eta))).astype(float)
        return two if kind.link == "logit" else rng.integers(0, 3, size=n).astype(float)
    if kind.target == "number":
        return eta + shift + (rng.normal(size=n) if kind.quadratic else rng.standard_t(1.5, size=n))
    mean = np.exp(np.clip(0.5 * eta + shift, -3, 3))
    if kind.target == "survival":
        time, until = rng.exponential(1 / mean), rng.exponential(2 / mean.mean(), n)
        return np.where(time < until, time, -until)
    return rng.poisson(mean).astype(float) if kind.target == "count" else rng.gamma(3.0, mean / 3.0)


def sites(kind: str, sizes=(80, 120, 120), q: int = 3, seed: int = 0, offset: bool = False) -> Federation:
    """Sites "site 0", "site 1", ... of moderate size, whose first column is 1."""
    rng = np.random.default_rng(seed)
    data = {}
    for u, n in enumerate(sizes):
        X = np.column_stack([np.ones(n), rng.standard_normal((n, q - 1))])
        shift = 0.5 * rng.standard_normal(n) if offset else np.zeros(n)
        y = drawn(kind, X @ (0.4 * rng.standard_normal(q)), shift, rng)
        data[f"site {u}"] = (X, y, shift) if offset else (X, y)
    return Federation(data)


def separated(n: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose second column separates the two classes, so that no finite logistic fit exists."""
    X = np.column_stack([np.ones(n), np.linspace(-1, 1, n)])
    return X, (X[:, 1] > 0.1).astype(float)


# --- losses that are not in the library -------------------------------------------------------------------------------


def log_cosh(hessian: bool = True) -> UserLoss:
    """Mean of ``log 2 cosh`` of the residuals: smooth and convex."""

    def value(theta, X, y, offset):
        return float(np.mean(np.logaddexp(y - X @ theta, X @ theta - y)))

    def gradient(theta, X, y, offset):
        return X.T @ np.tanh(X @ theta - y) / len(y)

    def second(theta, X, y, offset):
        return (X.T * (1 - np.tanh(X @ theta - y) ** 2)) @ X / len(y)

    return UserLoss(value, gradient, second if hessian else None, name="log cosh")


def expectile(hessian: bool = True) -> UserLoss:
    """Mean of squared residuals, those above zero with weight 0.8 and the others with 0.2."""

    def residuals(theta, X, y, offset):
        return y - X @ theta - (0.0 if offset is None else offset)

    def weights(r):
        return np.where(r > 0, 0.8, 0.2)

    def value(theta, X, y, offset):
        r = residuals(theta, X, y, offset)
        return float(np.mean(weights(r) * r**2))

    def gradient(theta, X, y, offset):
        r = residuals(theta, X, y, offset)
        return -2 * X.T @ (weights(r) * r) / len(y)

    def second(theta, X, y, offset):
        return 2 * (X.T * weights(residuals(theta, X, y, offset))) @ X / len(y)

    return UserLoss(value, gradient, second if hessian else None, name="expectile")


# --- problems ---------------------------------------------------------------------------------------------------------


def design_problem(
    loss: str = "linear",
    penalty: str = "l1",
    lam: float = 0.002,
    *,
    V: int = 12,
    n: int = 40,
    p: int = 4,
    groups: int = 3,
    **more: Any,
) -> Problem:
    """The paper's design with ``groups`` groups, on its graph with some false edges."""
    design = paper_design(n_sites=V, n_samples=n, n_features=p, n_clusters=groups, loss=loss, seed=1)
    return Problem(design.federation, design.graph, loss=loss, penalty=penalty, lam=lam, **more)


def small_problem(
    n_sites: int = 5, p: int = 3, n: int = 12, seed: int = 0, penalty: str = "l1", lam: float = 0.02
) -> Problem:
    """Linear regression in two groups, on a ring with some chords; sites d0, d1, ..."""
    rng = np.random.default_rng(seed)
    names = [f"d{u}" for u in range(n_sites)]
    truth = np.where(np.arange(n_sites)[:, None] < n_sites / 2, 1.0, -1.0) * np.ones(p)
    data = {}
    for name, theta in zip(names, truth, strict=True):
        X = rng.normal(size=(n, p))
        data[name] = (X, X @ theta + 0.3 * rng.normal(size=n))
    pairs = {(max(u, (u + step) % n_sites), min(u, (u + step) % n_sites)) for u in range(n_sites) for step in (1, 3)}
    pairs = {(i, j) for i, j in pairs if i != j}
    graph = Graph(names, [(names[i], names[j]) for i, j in sorted(pairs)])
    return Problem(Federation(data), graph, loss="linear", penalty=penalty, lam=lam)
