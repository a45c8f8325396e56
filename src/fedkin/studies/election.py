"""Reproduce section 6 of the paper: predict which ticket a county preferred in 2020, with a model per state.

Details that the paper does not specify are parameters of `ElectionProtocol` with stated defaults. Ridge and lam are
chosen by cross-validation within the training rows of a split; test rows are used only for the final scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
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


def _with(rows: Federation, X: Array) -> Federation:
    """Return the same rows with other features."""
    site = [rows.sites[u] for u in rows.site_index]
    return Federation.from_arrays(X, rows.y, site, feature_names=rows.feature_names)


def standards(train: Federation, how: str) -> tuple[Array, Array]:
    """Return means and scales ``(V, q)`` of the training rows."""
    shape = (train.n_sites, train.n_features)
    if how == "none":
        return np.zeros(shape), np.ones(shape)
    if how in ("pooled", "logs"):
        _, mean, scale = train.standardized()
        return np.broadcast_to(mean, shape), np.broadcast_to(scale, shape)
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
        train, test = self.raw
        if self.protocol.standardize == "logs":
            columns = skewed(train.X)
            logs = (np.log1p(np.maximum(one.X, 0.0)) for one in (train, test))  # a test row may be below all others
            train, test = (
                _with(one, np.where(columns, log, one.X)) for one, log in zip((train, test), logs, strict=True)
            )
        mean, scale = standards(train, self.protocol.standardize)
        train, test = (_with(one, (one.X - mean[one.site_index]) / scale[one.site_index]) for one in (train, test))
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

    def penalised(self, graph: Graph) -> Found:
        """Minimise Fed-ADMM's objective along a graph, with ridge and lam by inner cross-validation."""
        protocol = self.protocol
        lams = sorted(protocol.lams, reverse=True)
        candidates = [(ridge, lam) for ridge in protocol.fed_ridges for lam in lams]

        def problem(rows: Federation, ridge: float, lam: float = 0.0) -> Problem:
            vector = self._ridge_vector(ridge)
            return Problem(rows, graph, loss="logistic", penalty=protocol.penalty, lam=lam, ridge=vector)

        def fits(rows: Federation) -> Iterator[Array]:
            for ridge in protocol.fed_ridges:
                path = lam_path(problem(rows, ridge), lams, tol=protocol.path_tol)
                yield from (solution.theta for solution in path.solutions)

        chosen, loss = self.best(fits)
        ridge, lam = candidates[chosen]
        solution = solve(problem(self.train, ridge, lam), tol=protocol.tol)
        graph = graph.aligned(self.train.sites)
        return self.probabilities(solution.theta), {
            "ridge": ridge,
            "lam": lam,
            "inner_log_loss": loss,  # mean over held-out training rows in the cross-validation that chose them
            "kept_edges": graph.n_edges,
            "components": graph.n_components,
            "group": graph.components().tolist(),
            "common_share": common_share(solution.theta, graph).tolist(),
        }

    def ridged(self, *, pooled: bool = False) -> Found:
        """Fit one model per state or one for all, with the ridge chosen by inner cross-validation."""

        def fit(rows: Federation, ridge: float) -> Array:
            own = _all_in_one(rows, rows.X) if pooled else rows
            problem = Problem(own, Graph.empty(own.sites), loss="logistic", ridge=self._ridge_vector(ridge))
            return np.broadcast_to(solve(problem, tol=1e-9).theta, (self.train.n_sites, rows.n_features))

        return self._tuned([(ridge,) for ridge in self.protocol.ridges], fit)

    def state_intercepts(self) -> Found:
        """Fit one model with state intercepts, with both ridges chosen by inner cross-validation."""
        if self.train.feature_names[0] != INTERCEPT:
            return replace(self, protocol=replace(self.protocol, intercept=True)).state_intercepts()
        protocol, (V, p) = self.protocol, (self.train.n_sites, self.train.n_features)
        candidates = [(ridge, own) for ridge in protocol.ridges for own in protocol.state_ridges]

        def fit(rows: Federation, ridge: float, own: float) -> Array:
            # each state's own part of the intercept
            every = _all_in_one(rows, np.column_stack([rows.X, np.eye(V)[rows.site_index]]))
            vector = np.concatenate([self._ridge_vector(ridge), np.full(V, own)])
            theta = solve(Problem(every, Graph.empty(["all"]), loss="logistic", ridge=vector), tol=1e-9).theta[0]
            return np.column_stack([theta[0] + theta[p:], np.tile(theta[1:p], (V, 1))])

        return self._tuned(candidates, fit)

    def _tuned(self, candidates: Sequence[tuple[float, ...]], fit: Callable[..., Array]) -> Found:
        chosen, loss = self.best(lambda rows: (fit(rows, *one) for one in candidates))
        theta = fit(self.train, *candidates[chosen])
        return self.probabilities(theta), {"ridge": candidates[chosen][0], "inner_log_loss": loss}

    def kin(self) -> Found:
        """Fit kin without tuning, and average probabilities over the posterior.

        A state's ``distance`` is the root mean square over all training rows of the difference between its linear
        predictor and that of the mean over states.
        """
        found = find_kin(self.train, loss="logistic", seed=self.seed)
        away = self.train.X @ (found.theta - found.theta.mean(axis=0)).T
        distance = np.sqrt((away**2).mean(axis=0)).tolist()
        chance = np.empty(len(self.test.X))
        for u, state in enumerate(self.test.sites):
            own = self.test.site_index == u
            chance[own] = found.predict(self.test.X[own], state).mean
        return chance, {"group": found.groups.tolist(), "resolved": float(found.resolved), "distance": distance}

    def _ridge_vector(self, ridge: float) -> Array:
        vector = np.full(self.train.n_features, ridge)
        if self.train.feature_names[0] == INTERCEPT:
            vector[0] = self.protocol.intercept_ridge
        return vector


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
LABELS: Mapping[str, str] = {
    "always-republican": "Always Republican (floor)",
    "state-majority": "Majority of the state (floor)",
    "local": "Local, ridge validated",
    "global": "Global, ridge validated",
    "state-intercepts": "One model, state intercepts",
    "fed-loc": "Fed-ADMM, D_loc",
    "fed-his": "Fed-ADMM, D_his",
    "kin": "kin",
    "boosting": "Gradient boosting, pooled (ceiling)",
}


def election(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield a row per method on one split: accuracy, balanced accuracy, log-loss and chosen settings."""
    if replication.data is None:
        raise ParameterError("the election study needs the directory of its data (--data DIR)")
    protocol = settings_from(ElectionProtocol, {**replication.options, **replication.params})
    loaded = _loaded(replication.data, protocol.more_than)
    split = Split(loaded, protocol, replication.seed % 2**31)
    for name in replication.options.get("methods", list(LABELS)):
        started = process_time()
        probability, about = METHODS[name](split)
        row = {"method": name, **scores(split.test.y, probability), "states": list(split.train.sites)}
        yield {**row, **dict.fromkeys(_ABOUT), **about, "cpu_seconds": process_time() - started}


_loaded = lru_cache(maxsize=2)(load_election)
#: Columns about a fit, None where a method has no such thing.
_ABOUT = ("ridge", "lam", "inner_log_loss", "kept_edges", "components", "group", "common_share", "resolved", "distance")


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


def historical_graph(election: Election, sites: Sequence[Any]) -> Graph:
    """Join the states of each lean (red, blue, swing): D_his."""
    return Graph.clusters([election.lean[state] for state in sites], sites=sites)


def _all_in_one(rows: Federation, X: Array) -> Federation:
    return Federation.from_arrays(X, rows.y, ["all"] * len(X))


def _always_republican(split: Split) -> Found:
    share = float(np.asarray(split.train.y).mean())
    return np.full(len(split.test.X), min(share, 0.5)), {}


def _state_majority(split: Split) -> Found:
    # one county of each kind is added, so that a state of one kind is not certain
    train = split.train
    ahead = np.bincount(train.site_index, weights=train.y, minlength=train.n_sites)
    return ((ahead + 1) / (train.n_samples + 2))[split.test.site_index], {}


def _selected(split: Split) -> Found:
    protocol = split.protocol
    chosen = select_edges(split.train, None, "logistic", protocol.level, variance=protocol.variance)
    return split.penalised(chosen.graph)


def _boosting(split: Split) -> Found:
    train, test = split.raw
    model = HistGradientBoostingClassifier(random_state=split.seed).fit(train.X, train.y)
    return np.asarray(model.predict_proba(test.X)[:, 1]), {}


METHODS: Mapping[str, Callable[[Split], Found]] = {
    "always-republican": _always_republican,
    "state-majority": _state_majority,
    "local": lambda split: split.ridged(),
    "global": lambda split: split.ridged(pooled=True),
    "state-intercepts": lambda split: split.state_intercepts(),
    "fed-loc": _selected,
    "fed-his": lambda split: split.penalised(historical_graph(split.election, split.train.sites)),
    "kin": lambda split: split.kin(),
    "boosting": _boosting,
}

#: The task of this module with its options, as in `fedkin.studies.tasks`.
TASKS: Mapping[str, tuple[StudyTask, Mapping[str, Sequence[str]]]] = {
    "election": (
        election,
        {**dict.fromkeys(["allow_incomplete", *ElectionProtocol.__dataclass_fields__], ()), "methods": tuple(LABELS)},
    )
}
