"""Section 6 of the paper: predict which ticket a county preferred in 2020, with a model per state.

What the paper leaves open is a parameter of `Protocol` with a stated default. What is chosen from data (ridge, lam) is
chosen by cross-validation within the training rows of a split; test rows are looked at once, for the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier

from fedkin._base import Array, Index, Mask
from fedkin.core import Problem, select_edges
from fedkin.data import INTERCEPT, Federation
from fedkin.datasets import Election, load_election, read_outlines
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.kin import find_kin
from fedkin.solvers import best_level, held_out_losses, lam_path, solve
from fedkin.studies.figures import ResultTable, Row, Sample, add_legend, distinct, paired_difference, summarize
from fedkin.studies.tasks import Replication, Task, settings_from


@dataclass(frozen=True)
class Protocol:
    """What the paper leaves open. Ridge and lam are chosen by the log-loss of held-out training counties."""

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
    """Columns of training rows ``(N, q)`` that are never negative and have a skewness above `SKEWED`."""
    centred = X - X.mean(axis=0)
    spread = np.maximum(centred.std(axis=0), np.finfo(float).tiny)
    return np.asarray((X.min(axis=0) >= 0) & ((centred**3).mean(axis=0) > SKEWED * spread**3))


def _with(rows: Federation, X: Array) -> Federation:
    """The same rows with other features."""
    site = [rows.sites[u] for u in rows.site_index]
    return Federation.from_arrays(X, rows.y, site, feature_names=rows.feature_names)


def standards(train: Federation, how: str) -> tuple[Array, Array]:
    """Means and scales ``(V, q)`` of the training rows."""
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
    """One split of the counties: rows are prepared, and fits are tuned, with training rows only."""

    election: Election
    protocol: Protocol
    seed: int

    @cached_property
    def raw(self) -> tuple[Federation, Federation]:
        """Training and test rows as they come."""
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
        """Fold of each training row, cut within states."""
        return self.train.folds(self.protocol.folds, self.seed)

    def probabilities(self, theta: Array) -> Array:
        """Of the test rows, from parameters ``theta (V, p)``."""
        return np.asarray(np.exp(-np.logaddexp(0.0, -_predictors(self.test, theta))))  # the logistic function

    def best(self, fits: Callable[[Federation], Iterable[Array]]) -> tuple[int, float]:
        """Number of the candidate with the smallest mean log-loss of held-out training rows, and that loss.

        ``fits(rows)`` gives the parameters ``(V, p)`` of each candidate.
        """

        def row_loss(rows: Federation, theta: Array) -> Array:
            predictor = _predictors(rows, theta)
            return np.asarray(np.logaddexp(0.0, np.where(np.asarray(rows.y) > 0.5, -predictor, predictor)))

        mean = held_out_losses(self.train, self.fold, fits, row_loss).mean(axis=1)
        return (chosen := best_level(mean)), float(mean[chosen])

    def penalised(self, graph: Graph) -> Found:
        """Fed-ADMM's objective along a graph, with ridge and lam by inner cross-validation."""
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
        """Fits without a graph, one per state or one in all, with the ridge by inner cross-validation."""

        def fit(rows: Federation, ridge: float) -> Array:
            own = _all_in_one(rows, rows.X) if pooled else rows
            problem = Problem(own, Graph.empty(own.sites), loss="logistic", ridge=self._ridge_vector(ridge))
            return np.broadcast_to(solve(problem, tol=1e-9).theta, (self.train.n_sites, rows.n_features))

        return self._tuned([(ridge,) for ridge in self.protocol.ridges], fit)

    def state_intercepts(self) -> Found:
        """One model for all states but for the intercept, with the ridges of both by inner cross-validation."""
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
        """Partial pooling that finds who is alike; nothing is tuned, and probabilities are averaged over what is open.

        A state's ``distance`` is the root mean square over all training rows of the difference between its linear
        predictor and that of the common mean.
        """
        found = find_kin(self.train, loss="logistic", seed=self.seed)
        away = self.train.X @ (found.theta - found.mean).T
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
    """Share of each site's coefficients that lie in the largest fused group of that coefficient, ``(V,)``."""
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
    """A row per method on one split: accuracy, balanced accuracy, log-loss, and what was chosen."""
    if replication.data is None:
        raise ParameterError("the election study needs the directory of its data (--data DIR)")
    protocol = settings_from(Protocol, {**replication.options, **replication.params})
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
    """Accuracy, balanced accuracy and log-loss (nats) of probabilities of the label 1."""
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
    """D_his: the states of each lean (red, blue, swing) are all joined."""
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
TASKS: Mapping[str, tuple[Task, Mapping[str, Sequence[str]]]] = {
    "election": (
        election,
        {**dict.fromkeys(["allow_incomplete", *Protocol.__dataclass_fields__], ()), "methods": tuple(LABELS)},
    )
}


# --- tables, claims, figure and maps ----------------------------------------------------------------------------------

#: Accuracies of the paper's table, mean and standard deviation.
PUBLISHED: Mapping[str, tuple[float, float]] = {
    "local": (0.741, 0.034),
    "global": (0.752, 0.012),
    "fed-loc": (0.793, 0.019),
    "fed-his": (0.742, 0.011),
}
PROTOCOLS: Mapping[str, str] = {
    "pooled": "pooled z-scores, intercept",
    "logs": "pooled z-scores of logarithms, intercept",
    "state": "z-scores within states, no intercept",
}
MAIN = "pooled"
MEASURES = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "log_loss": "log-loss (nats)"}
CHOSEN = {"inner_log_loss": "inner log-loss", "kept_edges": "edges kept", "lam": "lam", "ridge": "ridge"}


def accuracy_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> ResultTable:
    """Make the table of scores of every method, mean (standard deviation) over splits, as the paper prints them."""
    columns = {**MEASURES, **CHOSEN}
    tables = {name: summarize(rows, ["standardize", "method"], name) for name in columns}
    cells = [
        [PROTOCOLS.get(key[0], key[0]), LABELS[key[1]], _published(key[1]), *(tables[one].get(key) for one in columns)]
        for key in tables["accuracy"]
    ]
    caption = (
        "Mean (standard deviation) over the splits; edges, lam and ridge are means of what was chosen. The inner "
        "log-loss is that of held-out training rows: the only number that may choose between protocols."
    )
    head = ["protocol", "method", "published accuracy", *columns.values()]
    return ResultTable(spec["name"], head, cells, caption, brackets="sd")


def _published(method: str) -> str:
    return "{:.3f} ({:.3f})".format(*PUBLISHED[method]) if method in PUBLISHED else ""


#: Pairs of methods that are compared split by split.
PAIRS = (
    *((fed, other) for fed in ("fed-loc", "fed-his") for other in ("local", "global", "state-intercepts")),
    *(("kin", other) for other in ("local", "global", "state-intercepts", "fed-loc", "fed-his", "boosting")),
)


def difference_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> ResultTable:
    """Make the table of Fed-ADMM and kin minus the others, split by split."""
    cells = []
    for protocol in distinct(rows, "standardize"):
        chosen = [row for row in rows if row["standardize"] == protocol]
        known = set(distinct(chosen, "method"))
        for pair in (pair for pair in PAIRS if known.issuperset(pair)):
            name = f"{LABELS[pair[0]]} minus {LABELS[pair[1]]}"
            found = [paired_difference(chosen, "method", pair, measure) for measure in MEASURES]
            cells.append([PROTOCOLS.get(protocol, protocol), name, *found])
    caption = "Mean paired difference over the splits, with its standard error in brackets."
    return ResultTable(spec["name"], ["protocol", "difference", *MEASURES.values()], cells, caption)


def state_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> ResultTable:
    """Make the table of what is found about each state, and how stable it is over the splits."""
    found = groups(rows)
    cells = [
        [state, found.name(u) or "alone", f"{found.stability[u]:.2f}", Sample.from_values(found.measure[:, u])]
        for u, state in enumerate(found.states)
    ]
    caption = (
        "Group: states that are connected in the selected graph D_loc in more than half of the splits. Stability: mean "
        "over splits of the share of the other states on which a split agrees with that grouping. Last column: share "
        "of a state's coefficients that Fed-ADMM with D_loc gives the value which most states have, mean (standard "
        "deviation) over splits."
    )
    head = ["state", "group in D_loc", "stability", "coefficients shared with most states"]
    return ResultTable(spec["name"], head, cells, caption, brackets="sd")


@dataclass(frozen=True, eq=False)
class Groups:
    """The grouping of the states that most splits agree on: two of a group are so in more than half of the splits."""

    states: list[str]
    labels: Index  # (V,), the largest group is 0
    stability: Array  # (V,), share of (split, other state) pairs that agree with the grouping
    together: Array  # (V, V), share of splits in which two states are in one group
    measure: Array  # (splits, V), what else was found about each state
    note: str  # how often there were groups at all

    def name(self, u: int) -> str:
        """A letter, or "" for a state that is connected to no other."""
        label = int(self.labels[u])
        return chr(ord("A") + label) if int((self.labels == label).sum()) > 1 else ""


def groups(rows: Sequence[Row], method: str = "fed-loc", standardize: str = MAIN) -> Groups:
    """The grouping over all splits of one protocol.

    By D_loc, with the share of coefficients that a state has in common with most others; or by kin, with the states'
    distances from the common mean.
    """
    chosen = [row for row in rows if row["method"] == method and row["standardize"] == standardize]
    states = list(chosen[0]["states"])
    labels = np.array([row["group"] for row in chosen])
    same = labels[:, :, None] == labels[:, None, :]
    together = same.mean(axis=0)
    i, j = np.tril_indices(len(states), -1)
    often = together[i, j] > 0.5
    components = Graph.from_indices(range(len(states)), np.column_stack([i, j])[often]).components()
    by_size = np.argsort(-np.bincount(components), kind="stable")
    final = np.argsort(by_size)[components]
    agree = same == (final[:, None] == final[None, :])
    stability = (agree.sum(axis=2) - 1).mean(axis=0) / max(len(states) - 1, 1)
    if method == "kin":
        measure = np.array([row["distance"] for row in chosen])
        note = f"resolved in {sum(bool(row['resolved']) for row in chosen)} of {len(chosen)} splits"
    else:
        measure = np.array([row["common_share"] for row in chosen])
        full = sum(row["kept_edges"] == len(i) for row in chosen)
        note = f"in {full} of {len(chosen)} splits the test keeps all {len(i)} edges"
    return Groups(states, final, stability, together, measure, note)


MODELS = ("local", "global", "state-intercepts", "fed-loc", "fed-his", "kin")
_LINES: Mapping[str, Mapping[str, Any]] = {
    "always-republican": {"color": "#777777", "linestyle": (0, (1, 1.5))},
    "state-majority": {"color": "#777777", "linestyle": (0, (5, 2))},
    "boosting": {"color": "#000000", "linestyle": (0, (5, 1, 1, 1))},
}


def accuracy(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Accuracies with their spread over splits, between the floors and the ceiling, next to the published ones."""
    from matplotlib.figure import Figure

    protocols = distinct(rows, "standardize")
    figure = Figure(figsize=(4.3 * len(protocols) + 0.8, 3.4), layout="constrained")
    axes = figure.subplots(1, len(protocols), sharey=True, sharex=True, squeeze=False)[0]
    table = summarize(rows, ["standardize", "method"], "accuracy")
    for axis, protocol in zip(axes, protocols, strict=True):
        places = np.arange(len(MODELS))[::-1]
        for place, method in zip(places, MODELS, strict=True):
            if (found := table.get((protocol, method))) is None:
                continue
            spread = {"xerr": np.nan_to_num(found.sd), "label": "here: mean ± sd over splits", "color": "#D55E00"}
            axis.errorbar(found.mean, place + 0.12, **spread, marker="o", markersize=6, capsize=3, linestyle="none")
            if method in PUBLISHED:
                value, sd = PUBLISHED[method]
                spread = {"xerr": sd, "label": "published: mean ± sd", "color": "#0072B2", "markerfacecolor": "white"}
                axis.errorbar(value, place - 0.12, **spread, marker="D", markersize=5, capsize=3, linestyle="none")
        for method, style in _LINES.items():
            if (line := table.get((protocol, method))) is not None:
                axis.axvline(line.mean, linewidth=1.2, zorder=1, label=LABELS[method], **style)
        axis.set_yticks(places, [LABELS[method] for method in MODELS])
        axis.set_ylim(-0.6, len(MODELS) - 0.4)
        axis.set_title(PROTOCOLS.get(protocol, protocol), loc="left")
        axis.grid(axis="y", visible=False)
    figure.supxlabel("accuracy: share of held-out counties predicted right", fontsize=10)
    add_legend(figure, axes)
    return figure


# --- maps -------------------------------------------------------------------------------------------------------------


def state_map(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Draw how much each state has in common with most others, with its group in D_loc."""
    found = groups(rows)
    limits = (min(float(found.measure.mean(axis=0).min()), 0.9), 1.0)
    return _map(found, "Groups of D_loc", folder, limits, "share of coefficients in common with most states")


def kin_map(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Draw how far each state is from the common mean, with its group of kin."""
    found = groups(rows, "kin")
    limits = (0.0, float(found.measure.mean(axis=0).max()))
    return _map(found, "Groups of kin", folder, limits, "distance from the common mean (log-odds)")


def _map(found: Groups, title: str, folder: Path, limits: tuple[float, float], label: str) -> Any:
    """Colour states by the mean of the measure over splits; a letter is the group of a state that is not alone."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axis, scale = figure.subplots(), ScalarMappable(Normalize(*limits), "cividis")
    axis.set_aspect("equal")
    axis.set_axis_off()
    values = dict(zip(found.states, found.measure.mean(axis=0), strict=True))
    for state, rings in read_outlines(folder).items():
        outline = Outline.make_compound_path(*(Outline(_thinned(ring), closed=True) for ring in rings))
        if state not in values:
            axis.add_patch(PathPatch(outline, facecolor="white", edgecolor="#b5b5b5", linewidth=0.4))
            continue
        colour = scale.to_rgba(values[state])
        axis.add_patch(PathPatch(outline, facecolor=colour, edgecolor="#333333", linewidth=0.5))
        dark = float(np.dot(colour[:3], (0.3, 0.6, 0.1))) < 0.5
        text = f"{state} {found.name(found.states.index(state))}".strip() + f"\n{values[state]:.2f}"
        place = _centroid(max(rings, key=lambda ring: float(np.ptp(ring[:, 0]) * np.ptp(ring[:, 1]))))
        style: Any = {"ha": "center", "va": "center", "fontsize": 5.5, "linespacing": 0.95}
        axis.text(place[0], place[1], text, color="white" if dark else "black", **style)
    axis.autoscale_view()
    axis.set_title(f"{title}: {found.note}", loc="left")
    figure.colorbar(scale, ax=axis, shrink=0.6, label=label)
    return figure


def _thinned(ring: Array, step: float = 7e3) -> Array:
    """Return a ring of coordinates in metres with a point every ``step``: more would only make files large."""
    travelled = np.append(0.0, np.cumsum(np.hypot(*np.diff(ring, axis=0).T)))
    _, first = np.unique(np.floor(travelled / step), return_index=True)
    return ring if len(first) < 4 else ring[np.append(first, len(ring) - 1)]


def _centroid(ring: Array) -> Array:
    """Return the centre of mass ``(2,)`` of the area inside a closed ring."""
    x, y = (ring - ring[0]).T
    area = x[:-1] * y[1:] - x[1:] * y[:-1]
    middle = np.array([(one[:-1] + one[1:]) @ area for one in (x, y)]) / (3.0 * area.sum())
    return np.asarray(ring[0] + middle)
