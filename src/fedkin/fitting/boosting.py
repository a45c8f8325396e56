"""A column for nonlinear effects: the cross-fitted prediction of a boosting model (LightGBM) of all rows.

Each of its five parts is fitted to four of five folds. A row gets the prediction, on the scale of the linear predictor,
of the part fitted without it; new rows get the mean of the five. Kin models how sites differ. Only where trees that
know the sites clearly predict a fold better than kin with this column do they get random codes of sites as features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numba import njit

from fedkin._base import Array, Index
from fedkin._compiling import load
from fedkin.data import Federation
from fedkin.errors import DataError, ParameterError, argument, missing_dependency
from fedkin.kin import QUICK, find_kin
from fedkin.losses import LOSSES, Loss

#: The name of the column.
BOOSTING = "(boosting)"
#: Number of parts, one per fold of the rows.
PARTS = 5
_LEAST_ROWS = 100
#: Trees are added until the mean error of the folds has not fallen for this many trees.
_MOST_TREES, _PATIENCE = 2_000, 20
#: Leaves of a tree that are tried on the first fold: few for curves, more for interactions.
_LEAVES = (7, 31)
#: Random codes of a site, by which trees that know the sites tell them apart; draws for a site that they do not know.
CODES, _DRAWS = 4, 16
#: Standard errors by which they must predict a fold better.
_CLEAR = 2.0
_TREES = {"learning_rate": 0.1, "min_data_in_leaf": 20, "max_bin": 63}
_TREES |= {"num_threads": 1, "deterministic": True, "force_col_wise": True, "verbosity": -1}


@dataclass(frozen=True, eq=False)
class Boosting:
    """A boosting model: the nodes of all trees, each after its parent.

    A row goes ``left`` if its ``feature`` is at most the ``value``, or else ``right``. In a leaf, where ``feature`` is
    -1, ``value`` is added to the prediction.
    """

    feature: Index  # (N,)
    value: Array  # (N,)
    left: Index  # (N,)
    right: Index  # (N,)
    roots: Index  # (T,), the first node of each tree, part by part
    parts: Index  # (PARTS + 1,), the first tree of each part, and the number of trees

    def __post_init__(self) -> None:
        n, inner = len(self.value), np.flatnonzero(self.feature >= 0)
        numbers = self.feature, self.left, self.right, self.roots, self.parts
        if not (
            all(one.ndim == 1 and one.dtype == np.int64 for one in numbers)
            and self.value.shape == self.feature.shape == self.left.shape == self.right.shape
            and self.value.dtype == np.float64
            and np.isfinite(self.value[self.feature < 0]).all()
            and all(((child[inner] > inner) & (child[inner] < n)).all() for child in (self.left, self.right))
            and ((self.roots >= 0) & (self.roots < n)).all()
            and self.parts.size > 1
            and (np.diff(self.parts) > 0).all()
            and (self.parts[0], self.parts[-1]) == (0, len(self.roots))
        ):
            raise ValueError("the trees of the boosting model are inconsistent")

    @classmethod
    def from_boosters(cls, boosters: Sequence[Any], n_trees: int) -> Boosting:
        """Read the first trees of LightGBM's boosters."""
        nodes: list[list[float]] = []

        def add(tree: dict[str, Any]) -> int:
            place = len(nodes)
            if "leaf_value" in tree:
                nodes.append([-1, tree["leaf_value"], 0, 0])
                return place
            nodes.append([tree["split_feature"], tree["threshold"]])
            nodes[place] += [add(tree["left_child"]), add(tree["right_child"])]
            return place

        each = [one.dump_model(num_iteration=n_trees)["tree_info"] for one in boosters]
        roots = [add(tree["tree_structure"]) for tree in chain(*each)]
        feature, value, left, right = (np.array(column) for column in zip(*nodes, strict=True))
        whole = (np.asarray(one, dtype=np.int64) for one in (left, right, roots, np.cumsum([0, *map(len, each)])))
        return cls(feature.astype(np.int64), value.astype(np.float64), *whole)

    def predict_part(self, k: int, X: Array) -> Array:
        """Return the predictions ``(n,)`` of one part, on the scale of the linear predictor."""
        if self.feature.max() >= X.shape[1]:
            raise ValueError(f"the boosting model has more columns than {X.shape[1]}")
        trees = self.roots[self.parts[k] : self.parts[k + 1]]
        given = np.ascontiguousarray(X), trees, self.feature, self.value, self.left, self.right
        load(_leaf_sums, *given)
        return np.asarray(_leaf_sums(*given))

    def predict(self, X: Array, codes: Array | None = None) -> Array:
        """Return the mean prediction of the parts ``(n,)``.

        ``codes (n, CODES)`` are those of the rows' sites; NaN at unseen ones, which get the mean over random codes.
        """
        if codes is None:
            return np.asarray(np.mean([self.predict_part(k, X) for k in range(len(self.parts) - 1)], axis=0))
        known, out = ~np.isnan(codes[:, 0]), np.empty(len(X))
        out[known] = self.predict(np.column_stack([X, codes])[known])
        draws = np.random.default_rng(0).random((_DRAWS, CODES))
        several = [np.column_stack([X[~known], np.tile(draw, (int((~known).sum()), 1))]) for draw in draws]
        out[~known] = np.mean([self.predict(each) for each in several], axis=0)
        return out


@njit(cache=True, nogil=True)
def _leaf_sums(X, roots, feature, value, left, right):  # type: ignore[no-untyped-def]
    out = np.zeros(len(X))
    for row in range(len(X)):
        for root in roots:
            node = root
            while feature[node] >= 0:
                node = left[node] if X[row, feature[node]] <= value[node] else right[node]
            out[row] += value[node]
    return out


def fit_boosting(rows: Federation, loss: Loss, seed: int) -> tuple[Boosting, Array, Array | None]:
    """Fit a boosting model to all rows.

    Return it with the cross-fitted predictions ``(N,)``, and the codes ``(V, CODES)`` of the sites if trees know them.
    """
    if loss.boosting is None:
        served = " or ".join(one.name for one in LOSSES.values() if one.boosting is not None)
        raise ParameterError(f"{argument('boost')} is for the loss {served}, not for {loss.name}: leave it out")
    if len(rows.X) < _LEAST_ROWS:
        raise DataError(f"{argument('boost')} needs {_LEAST_ROWS} rows, got {len(rows.X)}: leave it out")
    try:
        import lightgbm
    except ImportError:
        raise missing_dependency("lightgbm", f"{argument('boost')}", extra="boost") from None
    fold = rows.folds(PARTS, seed)
    assert rows.y is not None
    y, start = rows.y.astype(np.float64), rows.offset
    if start is not None and loss.quadratic:
        y, start = y - start, None
    elif start is not None and loss.link == "log":
        start = start + np.log(max(y.sum(), 0.5) / np.exp(start).sum())
    folds = [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(PARTS) if (fold == k).any()]
    about = {"objective": loss.boosting, "seed": seed, **_TREES}
    stop = lightgbm.early_stopping(_PATIENCE, verbose=False)

    def tried(leaves: int, some: list[tuple[Index, Index]], X: Array) -> dict[str, Any]:
        data = lightgbm.Dataset(X, y, weight=rows.weight, init_score=start, free_raw_data=False)
        how: Any = {"folds": some, "return_cvbooster": True, "callbacks": [stop]}
        found: dict[str, Any] = lightgbm.cv(about | {"num_leaves": leaves}, data, _MOST_TREES, **how)
        return found

    def cross_fitted(leaves: int, X: Array) -> tuple[Boosting, Array]:
        found = tried(leaves, folds, X)["cvbooster"]
        made, column = Boosting.from_boosters(found.boosters, found.best_iteration), np.empty(len(X))
        for k, (_, out) in enumerate(folds):
            column[out] = made.predict_part(k, X[out])
        return made, column

    # the first entry has the mean error after each tree
    leaves = min(_LEAVES, key=lambda number: min(next(iter(tried(number, folds[:1], rows.X).values()))))
    made, column = cross_fitted(leaves, rows.X)
    if rows.n_sites == 1:
        return made, column, None
    codes = np.random.default_rng(seed).random((rows.n_sites, CODES))
    known = np.column_stack([rows.X, codes[rows.site_index]])
    [trees] = tried(max(_LEAVES), folds[:1], known)["cvbooster"].boosters
    names = (*rows.feature_names, BOOSTING)
    whole = rows.replaced(X=np.column_stack([rows.X, column]), y=y, offset=start, feature_names=names)
    out, theirs = _kin_predictors(whole, loss, folds[0][1], seed)
    own = trees.predict(known[out], raw_score=True) + (0.0 if start is None else start[out])
    gain = _errors(loss, y[out], theirs) - _errors(loss, y[out], own)
    if gain.mean() <= _CLEAR * gain.std() / np.sqrt(len(gain)):
        return made, column, None
    return *cross_fitted(max(_LEAVES), known), codes


def _errors(loss: Loss, y: Array, eta: Array) -> Array:
    assert loss.rowwise is not None
    mean = loss.rowwise.response(eta[:, None])
    return loss.row_errors(y, mean if loss.target != "class" else np.column_stack([1.0 - mean, mean]))


def _kin_predictors(rows: Federation, loss: Loss, out: Index, seed: int) -> tuple[Index, Array]:
    """Return the held-out rows whose sites have other rows, and kin's linear predictors of them, fitted to the rest."""
    kept = ~np.isin(np.arange(len(rows.X)), out)
    known = np.bincount(rows.site_index[kept], minlength=rows.n_sites) > 0
    others = rows.take(kept, allow_empty=True).subset([rows.sites[u] for u in np.flatnonzero(known)])
    theta = find_kin(others.with_intercept(), loss=loss, seed=seed, **QUICK).theta
    out = out[known[rows.site_index[out]]]
    own = theta[(np.cumsum(known) - 1)[rows.site_index[out]]]
    eta = own[:, 0] + np.einsum("nq,nq->n", rows.X[out], own[:, 1:])
    return out, eta if rows.offset is None else eta + rows.offset[out]
