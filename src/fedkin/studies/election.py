"""Reproduce section 6 of the paper: predict which ticket a county preferred in 2020, with a model per state.

Details that the paper does not specify are parameters of `ElectionProtocol` with stated defaults. Ridge and lam are
chosen by cross-validation within the training rows of a split; test rows are used only for the final scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from time import process_time
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier

from fedkin._base import TINY, Array, Index, Mask
from fedkin.core import Problem, select_edges
from fedkin.data import INTERCEPT, Federation
from fedkin.datasets import Election, load_election
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.kin import find_kin
from fedkin.solvers import best_level, held_out_losses, lam_path, solve
from fedkin.studies.replications import Replication, StudyTask
from fedkin.studies.tasks import settings_from


@dataclass(frozen=True)
class ElectionProtocol:
    """Settings not specified in the paper. Ridge and lam are chosen by the log-loss of held-out training counties."""

    more_than: int = 50  # states with more counties than this are sites
    test_size: float = 1 / 3  # share of each state's counties that is held out
    # means and sds of the training rows, of all states together ("pooled") or of each ("state"), or "none"; "logs" is
    # "pooled" after log(1 + x) of the predictors that are never negative and very skewed in the training rows
    standardize: str = "pooled"
    intercept: bool = True  # a column of ones, fused like the others
    ridges: Sequence[float] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)  # candidates for Local and Global
    fed_ridges: Sequence[float] = (1e-3, 3e-3, 1e-2, 3e-2)  # candidates for Fed-ADMM
    intercept_ridge: float = 1e-3  # of all methods: almost none, but finite in states with one kind of label
    state_ridges: Sequence[float] = (1e-4, 1e-3, 1e-2)  # candidates for the states' own parts of the intercept
    lams: Sequence[float] = (1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4, 3.2e-4, 6.4e-4, 1.28e-3)  # candidates for Fed-ADMM
    folds: int = 5  # of the inner cross-validation, cut within states
    penalty: str = "l1"
    level: float = 0.05  # of the edge test that makes D_loc; its variance "bartlett" is the paper's
    variance: Any = "bartlett"
    path_tol: float = 1e-3  # relative duality gaps: in the folds, and of the final fits
    tol: float = 1e-4


#: Columns with a larger skewness than this are the ones that logarithms are for.
SKEWED = 2.0


def skewed(X: Array) -> Mask:
    """Return the columns of training rows ``(N, q)`` that are never negative and have a skewness above `SKEWED`."""
    centred = X - X.mean(axis=0)
    sd = np.maximum(centred.std(axis=0), TINY)
    return np.asarray((X.min(axis=0) >= 0) & ((centred**3).mean(axis=0) > SKEWED * sd**3))


def standards(train: Federation, how: str) -> tuple[Array, Array]:
    """Return means and scales of the training rows, ``(V, q)`` or broadcastable to it."""
    if how == "none":
        return np.zeros((1, 1)), np.ones((1, 1))
    if how in ("pooled", "logs"):
        return train.standardized()[1:]
    if how != "state":
        raise ParameterError(f'standardize must be "pooled", "logs", "state" or "none", got {how!r}')
    mean, scale = (np.stack([how(train[state].X, axis=0) for state in train.sites]) for how in (np.mean, np.std))
    return mean, np.where(scale > 0, scale, 1.0)


#: What a method says about the test rows: the ``probability (N_test,)`` of the label 1; and columns about the fit.
Found = tuple[Array, dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Split:
    """Split of the counties; preparation and tuning use training rows only."""

    election: Election
    protocol: ElectionProtocol
    seed: int

    @cached_property
    def raw(self) -> tuple[Federation, Federation]:
        """Raw training and test rows."""
        return self.election.federation.split(self.protocol.test_size, self.seed)

    @cached_property
    def _prepared(self) -> tuple[Federation, Federation]:
        columns = skewed(self.raw[0].X) if self.protocol.standardize == "logs" else False

        def logs(rows: Federation) -> Array:
            # a test row may be below all others
            return np.where(columns, np.log1p(np.maximum(rows.X, 0.0)), rows.X)

        train, test = (rows.replaced(X=logs(rows)) for rows in self.raw)
        mean, scale = (
            np.broadcast_to(one, (train.n_sites, train.n_features))
            for one in standards(train, self.protocol.standardize)
        )
        train, test = (one.replaced(X=(one.X - mean[one.site_index]) / scale[one.site_index]) for one in (train, test))
        return (train.with_intercept(), test.with_intercept()) if self.protocol.intercept else (train, test)

    @property
    def train(self) -> Federation:
        """Training rows, standardised."""
        return self._prepared[0]

    @property
    def test(self) -> Federation:
        """Test rows, standardised with the training rows' means and deviations."""
        return self._prepared[1]

    @cached_property
    def fold(self) -> Index:
        """Fold of each training row, assigned within states."""
        return self.train.folds(self.protocol.folds, self.seed)

    def probabilities(self, theta: Array) -> Array:
        """Return probabilities of the test rows, from parameters ``theta (V, p)``."""
        return np.asarray(np.exp(-np.logaddexp(0.0, -_predictors(self.test, theta))))  # the logistic function

    def best(self, fits: Callable[[Federation], Iterable[Array]]) -> tuple[int, float]:
        """Return the number of the candidate with the smallest mean log-loss of held-out training rows, and that loss.

        ``fits(rows)`` gives the parameters ``(V, p)`` of each candidate.
        """

        def row_loss(rows: Federation, theta: Array) -> Array:
            predictor = _predictors(rows, theta)
            return np.asarray(np.logaddexp(0.0, np.where(np.asarray(rows.y) > 0.5, -predictor, predictor)))

        mean = held_out_losses(self.train, self.fold, fits, row_loss).mean(axis=1)
        return (chosen := best_level(mean)), float(mean[chosen])

    def ridge_vector(self, ridge: float) -> Array:
        """Return the ridge of every coefficient."""
        vector = np.full(self.train.n_features, ridge)
        if self.train.feature_names[0] == INTERCEPT:
            vector[0] = self.protocol.intercept_ridge
        return vector


# --- methods ----------------------------------------------------------------------------------------------------------


def _always_republican(split: Split) -> Found:
    share = float(np.asarray(split.train.y).mean())
    return np.full(len(split.test.X), min(share, 0.5)), {}


def _state_majority(split: Split) -> Found:
    # one county of each kind is added, so that a state of one kind is not certain
    train = split.train
    ahead = np.bincount(train.site_index, weights=train.y, minlength=train.n_sites)
    return ((ahead + 1) / (train.n_samples + 2))[split.test.site_index], {}


def _tuned(split: Split, candidates: Sequence[tuple[float, ...]], fit: Callable[..., Array]) -> Found:
    """Fit with the candidate that inner cross-validation chooses."""
    chosen, loss = split.best(lambda rows: (fit(rows, *one) for one in candidates))
    theta = fit(split.train, *candidates[chosen])
    return split.probabilities(theta), {"ridge": candidates[chosen][0], "inner_log_loss": loss}


def _ridge(rows: Federation, ridge: Array) -> Array:
    """Return the ridge fit of every site."""
    return solve(Problem(rows, Graph.empty(rows.sites), loss="logistic", ridge=ridge), tol=1e-9).theta


def _local(split: Split) -> Found:
    ridges = [(ridge,) for ridge in split.protocol.ridges]
    return _tuned(split, ridges, lambda rows, ridge: _ridge(rows, split.ridge_vector(ridge)))


def _global(split: Split) -> Found:
    def fit(rows: Federation, ridge: float) -> Array:
        return np.tile(_ridge(_all_in_one(rows, rows.X), split.ridge_vector(ridge)), (rows.n_sites, 1))

    return _tuned(split, [(ridge,) for ridge in split.protocol.ridges], fit)


def state_intercepts(split: Split) -> Found:
    """Fit one model with state intercepts, with both ridges chosen by inner cross-validation."""
    if split.train.feature_names[0] != INTERCEPT:
        return state_intercepts(replace(split, protocol=replace(split.protocol, intercept=True)))
    protocol, (V, p) = split.protocol, (split.train.n_sites, split.train.n_features)

    def fit(rows: Federation, ridge: float, own: float) -> Array:
        # each state's own part of the intercept
        every = _all_in_one(rows, np.column_stack([rows.X, np.eye(V)[rows.site_index]]))
        theta = _ridge(every, np.concatenate([split.ridge_vector(ridge), np.full(V, own)]))[0]
        return np.column_stack([theta[0] + theta[p:], np.tile(theta[1:p], (V, 1))])

    return _tuned(split, list(product(protocol.ridges, protocol.state_ridges)), fit)


def _all_in_one(rows: Federation, X: Array) -> Federation:
    return Federation.from_arrays(X, rows.y, ["all"] * len(X))


def penalised(split: Split, graph: Graph) -> Found:
    """Minimise Fed-ADMM's objective along a graph, with ridge and lam by inner cross-validation."""
    protocol, lams = split.protocol, sorted(split.protocol.lams, reverse=True)

    def problem(rows: Federation, ridge: float, lam: float = 0.0) -> Problem:
        vector = split.ridge_vector(ridge)
        return Problem(rows, graph, loss="logistic", penalty=protocol.penalty, lam=lam, ridge=vector)

    def fits(rows: Federation) -> Iterator[Array]:
        for ridge in protocol.fed_ridges:
            path = lam_path(problem(rows, ridge), lams, tol=protocol.path_tol)
            yield from (solution.theta for solution in path.solutions)

    chosen, loss = split.best(fits)
    ridge, lam = list(product(protocol.fed_ridges, lams))[chosen]
    theta = solve(problem(split.train, ridge, lam), tol=protocol.tol).theta
    graph = graph.aligned(split.train.sites)
    return split.probabilities(theta), {
        "ridge": ridge,
        "lam": lam,
        "inner_log_loss": loss,  # mean over held-out training rows in the cross-validation that chose them
        "kept_edges": graph.n_edges,
        "components": graph.n_components,
        "group": graph.components().tolist(),
        "common_share": common_share(theta, graph).tolist(),
    }


def _along_selected(split: Split) -> Found:
    """Fit along the pairs that the edge test keeps: D_loc."""
    level, variance = split.protocol.level, split.protocol.variance
    return penalised(split, select_edges(split.train, None, "logistic", level, variance=variance).graph)


def _along_historical(split: Split) -> Found:
    """Fit along the graph that joins the states of each lean (red, blue, swing): D_his."""
    sites = split.train.sites
    return penalised(split, Graph.clusters([split.election.lean[str(state)] for state in sites], sites=sites))


def _kin(split: Split) -> Found:
    """Fit kin without tuning, and average probabilities over the posterior.

    A state's ``distance`` is the root mean square over all training rows of the difference between its linear
    predictor and that of the mean over states.
    """
    found, test = find_kin(split.train, loss="logistic", seed=split.seed), split.test
    away = split.train.X @ (found.theta - found.theta.mean(axis=0)).T
    distance = np.sqrt((away**2).mean(axis=0)).tolist()
    chance = np.empty(len(test.X))
    for u, state in enumerate(test.sites):
        own = test.site_index == u
        chance[own] = found.predict(test.X[own], state).mean
    return chance, {"group": found.groups.tolist(), "resolved": float(found.resolved), "distance": distance}


def _boosting(split: Split) -> Found:
    train, test = split.raw
    model = HistGradientBoostingClassifier(random_state=split.seed).fit(train.X, train.y)
    return np.asarray(model.predict_proba(test.X)[:, 1]), {}


def common_share(theta: Array, graph: Graph) -> Array:
    """Return the share ``(V,)`` of a site's coefficients that lie in the largest fused group of the coefficient."""
    share = np.zeros(theta.shape[0])
    for column in theta.T:
        equal = column[graph.edges[:, 0]] == column[graph.edges[:, 1]]
        labels = graph.keep(equal).components()
        sizes = np.bincount(labels)
        if sizes.max() > 1:
            share += labels == sizes.argmax()
    return np.asarray(share / theta.shape[1])


def _predictors(rows: Federation, theta: Array) -> Array:
    return np.asarray(np.einsum("np,np->n", rows.X, theta[rows.site_index]))


#: Methods by their names in rows, with the names that tables show.
METHODS: Mapping[str, tuple[str, Callable[[Split], Found]]] = {
    "always-republican": ("Always Republican (floor)", _always_republican),
    "state-majority": ("Majority of the state (floor)", _state_majority),
    "local": ("Local, ridge validated", _local),
    "global": ("Global, ridge validated", _global),
    "state-intercepts": ("One model, state intercepts", state_intercepts),
    "fed-loc": ("Fed-ADMM, D_loc", _along_selected),
    "fed-his": ("Fed-ADMM, D_his", _along_historical),
    "kin": ("kin", _kin),
    "boosting": ("Gradient boosting, pooled (ceiling)", _boosting),
}
_loaded = lru_cache(maxsize=2)(load_election)
#: Columns about a fit, None where a method has no such thing.
_ABOUT = ("ridge", "lam", "inner_log_loss", "kept_edges", "components", "group", "common_share", "resolved", "distance")


def election(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield a row per method on one split: accuracy, balanced accuracy, log-loss and chosen settings."""
    if replication.data is None:
        raise ParameterError("the election study needs the directory of its data (--data DIR)")
    protocol = settings_from(ElectionProtocol, {**replication.options, **replication.params})
    split = Split(_loaded(replication.data, protocol.more_than), protocol, replication.seed % 2**31)
    for name in replication.options.get("methods", list(METHODS)):
        started = process_time()
        probability, about = METHODS[name][1](split)
        row = {"method": name, **scores(split.test.y, probability), "states": list(split.train.sites)}
        yield {**row, **dict.fromkeys(_ABOUT), **about, "cpu_seconds": process_time() - started}


def scores(y: Any, probability: Array) -> dict[str, float]:
    """Return accuracy, balanced accuracy and log-loss (nats) of probabilities of the label 1."""
    label, says = np.asarray(y) > 0.5, probability > 0.5
    right = says == label
    each = [float(right[label == side].mean()) for side in (False, True) if (label == side).any()]
    clipped = np.clip(probability, 1e-12, 1 - 1e-12)
    return {
        "accuracy": float(right.mean()),
        "balanced_accuracy": float(np.mean(each)),
        "log_loss": float(-np.log(np.where(label, clipped, 1 - clipped)).mean()),
    }


#: The task of this module with its options, as in `fedkin.studies.tasks`.
TASKS: Mapping[str, tuple[StudyTask, Mapping[str, Sequence[str]]]] = {
    "election": (
        election,
        {**dict.fromkeys(["allow_incomplete", *ElectionProtocol.__dataclass_fields__], ()), "methods": tuple(METHODS)},
    )
}
