"""A boosting model of all rows whose cross-fitted prediction is one more column: where effects are not linear.

The sites are no feature of it. Its five parts are fitted to four of five folds of rows each, and every row gets the
prediction, on the scale of the linear predictor, of the part that has not seen it; new rows get the mean of the five.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.data import Federation
from fedkin.errors import DataError, ModelFileError, ParameterError, argument, missing_dependency
from fedkin.losses import LOSSES, Loss

#: The name of the column.
BOOSTING = "(boosting)"
#: Parts, and so folds of the rows.
PARTS = 5
_LEAST_ROWS = 100
#: Trees are added until the mean error of the folds has not fallen for so many.
_MOST_TREES, _PATIENCE = 400, 20
_TREES = {"learning_rate": 0.1, "num_leaves": 15, "min_data_in_leaf": 20, "max_bin": 63}
_TREES |= {"num_threads": 1, "deterministic": True, "force_col_wise": True, "verbosity": -1}


#: What a tree has for each split, and for each leaf; LightGBM's parser reads them without looking.
_CHILDREN = ("split_feature", "split_gain", "threshold", "decision_type", "left_child", "right_child")
_PER_SPLIT = (*_CHILDREN, "internal_value", "internal_weight", "internal_count")
_PER_LEAF = ("leaf_value", "leaf_weight", "leaf_count")
_SINGLE = ("Tree", "num_leaves", "num_cat", "is_linear", "shrinkage")
_MOST_LEAVES = 1_000


def check_boosting(text: str, n_features: int) -> None:
    """Raise `ValueError` unless a text is that of trees: LightGBM's parser crashes on others, and may read anywhere."""
    head, _, rest = text.partition("\n\n")
    about = dict(line.partition("=")[::2] for line in head.splitlines()[1:])
    if [about.get(key) for key in ("num_class", "num_tree_per_iteration")] != ["1", "1"]:
        raise ValueError("it is not a model of one number")
    if about.get("max_feature_idx") != str(n_features - 1):
        raise ValueError(f"it is not of {n_features} columns")
    at, sizes = 0, [int(size) for size in about.get("tree_sizes", "").split()]
    for k, size in enumerate(sizes):
        if size <= 0 or not rest.startswith(f"Tree={k}\n", at):
            raise ValueError(f"tree {k} is not where it should be")
        _check_tree(dict(line.partition("=")[::2] for line in rest[at : at + size].split("\n") if line), n_features)
        at += size
    if not sizes or not text.isascii() or not rest.startswith("end of trees\n", at):
        raise ValueError("its trees do not end where they should")


def _check_tree(entries: dict[str, str], n_features: int) -> None:
    if set(entries) - {*_PER_SPLIT, *_PER_LEAF, *_SINGLE}:
        raise ValueError("a tree has unknown entries")
    leaves = int(entries.get("num_leaves", ""))
    if not 1 <= leaves <= _MOST_LEAVES or [entries.get(key) for key in ("num_cat", "is_linear")] != ["0", "0"]:
        raise ValueError("a tree has another form than Fedkin's")
    numbers = {key: np.array(entries.get(key, "").split(), dtype=np.float64) for key in (*_PER_SPLIT, *_PER_LEAF)}
    sizes = {key: leaves - 1 if key in _PER_SPLIT else leaves for key in numbers}
    if leaves == 1:
        sizes = {"leaf_value": 1}
    if any(numbers[key].size != size or np.isnan(numbers[key]).any() for key, size in sizes.items()):
        raise ValueError("a tree has too few or too many numbers")
    split, left, right = (numbers[key] for key in ("split_feature", "left_child", "right_child"))
    children = np.sort(np.concatenate([left, right]))
    if leaves > 1 and not (
        np.array_equal(children, np.delete(np.arange(-leaves, leaves - 1), leaves))  # every node but the first once
        and np.isin(split, np.arange(n_features)).all()
        and np.isin(numbers["decision_type"], np.arange(0, 16, 2)).all()
        and all((child[child >= 0] > np.flatnonzero(child >= 0)).all() for child in (left, right))
    ):
        raise ValueError("the splits of a tree do not make one")


@dataclass(frozen=True)
class Boosting:
    """A boosting model in LightGBM's text format, a text for each part; LightGBM reads them when it is to predict."""

    texts: tuple[str, ...]

    @cached_property
    def _parts(self) -> list[Any]:
        lightgbm = _lightgbm("predicting by this model")
        try:
            return [lightgbm.Booster(model_str=text) for text in self.texts]
        except lightgbm.basic.LightGBMError as error:
            raise ModelFileError(f"LightGBM cannot read the boosting model ({error}); fit it again") from None

    def predict(self, X: Array) -> Array:
        """Return the mean prediction of the parts ``(n,)``, on the scale of the linear predictor."""
        if not len(X):
            return np.zeros(0)
        return np.asarray(np.mean([part.predict(X, raw_score=True) for part in self._parts], axis=0))


def fit_boosting(rows: Federation, loss: Loss, seed: int) -> tuple[Boosting, Array]:
    """Fit a boosting model to all rows, and return it with the prediction for every row ``(N,)`` without that row."""
    if loss.boosting is None:
        known = " or ".join(one.name for one in LOSSES.values() if one.boosting is not None)
        raise ParameterError(f"{argument('boost')} is for the loss {known}, not for {loss.name}: leave it out")
    if len(rows.X) < _LEAST_ROWS:
        raise DataError(f"{argument('boost')} needs {_LEAST_ROWS} rows, got {len(rows.X)}: leave it out")
    lightgbm, fold = _lightgbm(f"{argument('boost')}"), rows.folds(PARTS, seed)
    assert rows.y is not None
    y, start = rows.y.astype(np.float64), rows.offset
    if start is not None and loss.quadratic:
        y, start = y - start, None
    elif start is not None:
        start = start + np.log(max(y.sum(), 0.5) / np.exp(start).sum()) if loss.link == "log" else start
    folds = [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(PARTS) if (fold == k).any()]
    about = {"objective": loss.boosting, "seed": seed, **_TREES}
    data = lightgbm.Dataset(rows.X, y, weight=rows.weight, init_score=start, free_raw_data=False)
    stop = lightgbm.early_stopping(_PATIENCE, verbose=False)
    found = lightgbm.cv(about, data, _MOST_TREES, folds=folds, return_cvbooster=True, callbacks=[stop])["cvbooster"]
    made = Boosting(tuple(part.model_to_string(num_iteration=found.best_iteration) for part in found.boosters))
    column = np.empty(len(rows.X))
    for part, (_, out) in zip(made._parts, folds, strict=True):
        column[out] = part.predict(rows.X[out], raw_score=True)
    return made, column


def _lightgbm(purpose: str) -> Any:
    try:
        import lightgbm
    except ImportError:
        raise missing_dependency("lightgbm", purpose, extra="boost") from None
    return lightgbm
