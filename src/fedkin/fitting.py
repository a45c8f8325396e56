"""One fit from rows to a model, for the scikit-learn face and for the command line alike.

Classes are encoded, an intercept column is added, features are standardised if asked for; edges are selected,
``lam`` is chosen, the problem is solved; and what comes out is a `FittedModel` in the units of the user's columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import ConvergenceWarning, DataError, DegenerateDeviceWarning, ParameterError, SolverError
from fedkin.federation import Federation
from fedkin.graph import Graph
from fedkin.local import Variance, global_fit, local_fit, oracle_fit
from fedkin.losses import Loss, MeanLoss, RowLoss, make_loss
from fedkin.model import FittedModel
from fedkin.named_losses import describe_loss
from fedkin.penalties import make_penalty
from fedkin.problem import Problem, Solution, check_nonnegative
from fedkin.selection import Method, select_edges
from fedkin.solvers.exact import solve
from fedkin.tuning import cross_validate_lam

Array = NDArray[np.float64]
Progress = Callable[[str], None]
CvRule = Literal["min", "1se"]
_Rescue = dict[Hashable, str]  # device: why its parameters had to be held back

#: Losses whose targets are classes.
CLASS_LOSSES = ("logistic", "multinomial")
_MOST_PAIRS = 5_000_000  # beyond this many edges nobody means "all pairs"
_MOST_NUMERIC_CLASSES = 20  # beyond this many different fractions nobody means classes
_SEPARATED = "separated classes, a class that is missing, or no counts"
_COLLINEAR = "collinear features"
_LEAST_SQUARES = ("linear", "huber")
_LOGIT_SIZE = 25.0  # as in `LocalFit`: the mean square that a logit or log rate may plausibly have


@dataclass(frozen=True)
class FitOptions:
    """How to fit.

    Parameters
    ----------
    loss : str or Loss
        "linear", "logistic" (more than two classes make it multinomial), "poisson", "huber", "multinomial", "mean",
        or an object.
    penalty : "l1" | "l2" | "linf"
        Of the difference of two neighbours: l1 fuses coefficient by coefficient, l2 and linf whole devices.
    lam : float or "cv"
        Strength of the penalty on the scale of the objective, or its choice by cross-validation within devices.
    select : None | "bonferroni" | "holm" | "bh" | "by"
        Test the edges first and keep those whose ends look alike; see `fedkin.select_edges`.
    level : float
        Of that test.
    variance : "model" | "sandwich" | "bartlett"
        Of that test.
    refit : bool
        Replace the estimate of each group of devices (`FittedModel.clusters`) by its pooled fit without any penalty.
        A chain of kept edges makes one group, even when its ends differ: for groups that stand well apart only.
    fit_intercept : bool
        Add a constant column; its coefficient is fused like the others, but neither shrunk nor made sparse.
    standardize : bool
        Fit on features of pooled mean 0 and standard deviation 1. ``lam``, ``ridge`` and ``sparsity`` then refer to
        these; coefficients are still reported in the units of the features.
    ridge : float
        The extra ``(1/|V|) sum_u ridge ||theta_u||^2 / 2``.
    sparsity : float
        The extra ``(1/|V|) sum_u sparsity ||theta_u||_1``.
    cv_folds : int
    cv_rule : "min" | "1se"
        The best ``lam``, or the largest within one standard error of it.
    tol : float
        Relative duality gap to reach.
    seed : int
        Of the folds.
    n_jobs : int, optional
        Folds at the same time.
    solver : "exact" | "fedadmm"
        Solve by `fedkin.solve`, or by the rounds that devices between themselves would do (`fedkin.fed_admm`, until
        ``tol`` or ``rounds`` are reached). ``lam`` is chosen with exact solutions in both cases.
    rounds, batch_size : int
        Of "fedadmm"; all rows of a device in every round when ``batch_size`` is None, else SAGA on batches.

    Examples
    --------
    >>> FitOptions(loss="logistic", select="holm").penalty
    'l1'
    """

    loss: str | Loss = "linear"
    penalty: str = "l1"
    lam: float | Literal["cv"] = "cv"
    select: Method | None = None
    level: float = 0.05
    variance: Variance = "model"
    refit: bool = False
    fit_intercept: bool = True
    standardize: bool = False
    ridge: float = 0.0
    sparsity: float = 0.0
    cv_folds: int = 5
    cv_rule: CvRule = "min"
    tol: float = 1e-6
    seed: int = 0
    n_jobs: int | None = None
    solver: Literal["exact", "fedadmm"] = "exact"
    rounds: int = 1000
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.lam, str):
            if self.lam != "cv":
                raise ParameterError(f"lam must be a number of at least 0 or 'cv', got {self.lam!r}")
        else:
            check_nonnegative("lam", self.lam)
        check_nonnegative("ridge", self.ridge)
        check_nonnegative("sparsity", self.sparsity)
        make_penalty(self.penalty)
        _check_choice("select", self.select, (None, *get_args(Method)))
        _check_choice("variance", self.variance, get_args(Variance))
        _check_choice("cv_rule", self.cv_rule, get_args(CvRule))
        _check_choice("solver", self.solver, ("exact", "fedadmm"))
        if not 0 < self.level < 1:
            raise ParameterError(f"level must lie between 0 and 1, got {self.level!r}")
        if not self.tol > 0:
            raise ParameterError(f"tol must be positive, got {self.tol!r}")
        if self.cv_folds < 2:
            raise ParameterError(f"cv_folds must be at least 2, got {self.cv_folds!r}")

    def plain(self) -> dict[str, Any]:
        """The options in plain values, as a model file keeps them."""
        made = {item.name: getattr(self, item.name) for item in fields(self)}
        made["loss"] = self.loss if isinstance(self.loss, str) else describe_loss(self.loss)
        return made


def fit_federation(
    federation: Federation,
    graph: Graph | None = None,
    options: FitOptions | None = None,
    progress: Progress | None = None,
) -> FittedModel:
    """Fit a model for every device.

    Parameters
    ----------
    federation : Federation
        For "logistic" and "multinomial" the targets are class labels of any kind.
    graph : Graph, optional
        Over the devices of the federation, in any order. Without it all pairs of devices are edges (candidates for
        edges, if ``options.select`` is on).
    options : FitOptions, optional
        How to fit.
    progress : callable, optional
        Called with a line of text before each step.

    Returns
    -------
    FittedModel

    Notes
    -----
    *Groups.* With edge selection the groups are the connected components of the kept edges; without it they are the
    devices that came out exactly fused along edges.

    *No minimiser.* Where the likelihood of a whole connected component has no maximum (classes separated, a class
    missing, no counts), or its features are collinear, a ridge of a 25th of one row's worth is added for all devices.
    The devices concerned have a note in the model; in the first case a `DegenerateDeviceWarning` is given.

    *One device, or no edges.* There is nothing to choose: ``lam`` is 0 unless it is given as a number.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_devices=20, n_samples=60, n_features=10, n_clusters=2, seed=0)
    >>> fit_federation(design.federation, design.graph, FitOptions(select="bonferroni")).n_clusters
    2
    """
    options = FitOptions() if options is None else options
    say = progress or _silent
    prepared = _prepare(federation, options)
    used, selection, notes = _used_graph(prepared, graph, options, say)
    problem, reasons = _problem(prepared, used, options)
    try:
        solution, lam = _solved(problem, options, say)
    except SolverError:
        if reasons:
            raise
        # rows held out by a fold can take away the last overlap of two classes
        reasons = dict.fromkeys(federation.devices, "without the rows of one fold, classes are separated")
        problem = _with_light_ridge(problem, used, list(federation.devices))
        solution, lam = _solved(problem, options, say)
    runaways = [device for device, reason in reasons.items() if reason != _COLLINEAR]
    if runaways:
        warnings.warn(_rescue_warning(runaways, reasons), DegenerateDeviceWarning, stacklevel=2)
    for device, reason in reasons.items():
        notes[device] = (*notes.get(device, ()), f"{reason}; a ridge of 1/25 of a row was added")
    clusters = used.components() if options.select is not None else solution.clusters(used)
    theta = solution.theta
    if options.refit:
        say(f"refitting {int(clusters.max()) + 1} groups without penalty")
        theta = oracle_fit(prepared.federation, clusters.tolist(), prepared.loss)
    model = prepared.model(theta, used, options)
    return replace(
        model,
        clusters=clusters,
        lam=lam,
        gap=solution.gap,
        n_iter=solution.n_iter,
        status=solution.status,
        selection=selection,
        notes=notes,
    )


@dataclass(frozen=True, eq=False)
class Comparison:
    """Errors on held-out rows of the same devices.

    Attributes
    ----------
    metric : str
        Mean over all held-out rows of the squared error (linear), absolute error (Huber), deviance (Poisson), log-loss
        (classes), squared distance (mean), or the loss itself.
    higher_is_better : bool
        False for all of these.
    errors : dict {"Local" | "Global" | "Fedkin": float}
    devices : tuple of ids
    per_device : dict {name: array (V,)}
        The same by device, NaN for devices without held-out rows.
    more : dict {metric: dict {name: float}}
        Metrics where more is better: explained variance, accuracy, AUC averaged over the devices with both classes.
    models : dict {name: FittedModel}
    """

    metric: str
    higher_is_better: bool
    errors: dict[str, float]
    devices: tuple[Hashable, ...] = ()
    per_device: dict[str, Array] = field(default_factory=dict)
    more: dict[str, dict[str, float]] = field(default_factory=dict)
    models: dict[str, FittedModel] = field(default_factory=dict)


def compare(
    train: Federation,
    test: Federation,
    graph: Graph | None = None,
    options: FitOptions | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Held-out error of Fedkin beside its two extremes: every device alone, and one model for all.

    Parameters
    ----------
    train, test : Federation
        Rows of the same devices, as `Federation.split` cuts them; devices of the test may lack rows.
    graph, options, progress
        As in `fit_federation`.

    Returns
    -------
    Comparison

    Notes
    -----
    Local and Global have the same intercept, standardisation and ridge. Devices without a local estimate of their own
    get one by the rule of `fedkin.local_fit`. Global gives every row the same weight.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_devices=20, n_samples=60, n_features=10, n_clusters=2, seed=0)
    >>> errors = compare(*design.federation.split(seed=0), design.graph, FitOptions(select="holm")).errors
    >>> errors["Fedkin"] < errors["Local"] < errors["Global"]
    True
    """
    options = FitOptions() if options is None else options
    model = fit_federation(train, graph, options, progress)
    prepared = _prepare(train, options)
    alone = Graph.empty(train.devices)
    (progress or _silent)("fitting Local and Global for comparison")
    models = {
        "Local": replace(prepared.model(_local_theta(prepared, options), alone, options), clusters=alone.components()),
        "Global": prepared.model(_global_theta(prepared, options), alone, options),
        "Fedkin": model,
    }
    return _scored(models, test)


# --- from the user's rows to the problem's --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Rows as the solver sees them, and the way back."""

    federation: Federation
    original: Federation
    loss: Loss
    classes: tuple[Any, ...] | None
    fit_intercept: bool
    mean: Array
    scale: Array

    @property
    def n_outputs(self) -> int:
        return self.loss.n_outputs if isinstance(self.loss, RowLoss) else 1

    def per_feature(self, value: float) -> Array:
        """A penalty level for each parameter ``(p,)``, 0 for the intercept."""
        levels = np.full((self.n_outputs, self.federation.n_features), value)
        if self.fit_intercept:
            levels[:, 0] = 0.0
        return levels.reshape(-1)

    def model(self, theta: Array, graph: Graph, options: FitOptions) -> FittedModel:
        """A model with these parameters ``(V, p)``, in the user's units."""
        blocks = theta.reshape(len(theta), self.n_outputs, -1)
        coef, intercept = blocks, np.zeros(blocks.shape[:2])
        if self.fit_intercept:
            coef, intercept = blocks[:, :, 1:] / self.scale, blocks[:, :, 0]
            # sorted out feature by feature, as 0 * mean must stay exactly 0
            intercept = intercept - np.einsum("vkq,q->vk", coef, self.mean)
        elif isinstance(self.loss, MeanLoss):
            coef = blocks * self.scale + self.mean
        else:
            coef = blocks / self.scale
        return FittedModel(
            devices=self.original.devices,
            coef=coef,
            intercept=intercept,
            feature_names=self.original.feature_names,
            clusters=np.zeros(len(theta), dtype=np.int64),
            n_samples=self.original.n_samples,
            loss=self.loss,
            penalty=options.penalty,
            lam=0.0,
            gap=0.0,
            n_iter=0,
            status="converged",
            graph=graph,
            fit_intercept=self.fit_intercept,
            classes=self.classes,
            target_name=self.original.target_name,
            offset_name=None if self.original.offset is None else "offset",
            options=options.plain(),
        )


def _prepare(federation: Federation, options: FitOptions) -> _Prepared:
    if not federation.n_samples.all():
        empty = federation.devices[int(np.flatnonzero(federation.n_samples == 0)[0])]
        raise DataError(f"device {empty!r} has no rows to fit: leave it out or give it data")
    loss, classes, encoded = _encoded(federation, options.loss)
    has_intercept = options.fit_intercept and not isinstance(loss, MeanLoss)
    mean, scale = np.zeros(federation.n_features), np.ones(federation.n_features)
    if options.standardize:
        centred, mean, scale = encoded.standardized()
        if has_intercept or isinstance(loss, MeanLoss):
            encoded = centred
        else:
            # without an intercept a shift of the features would be another model
            mean = np.zeros_like(mean)
            encoded = _with_features(encoded, encoded.X / scale)
    if has_intercept:
        encoded = encoded.with_intercept()
    if not isinstance(loss, RowLoss) and loss.n_params(encoded.n_features) != encoded.n_features:
        raise ParameterError(
            f"the {loss.name} loss has {loss.n_params(encoded.n_features)} parameters for {encoded.n_features} columns "
            "(the intercept among them); a model has one for each column: use Problem and solve for other losses"
        )
    return _Prepared(encoded, federation, loss, classes, has_intercept, mean, scale)


def _encoded(federation: Federation, loss: str | Loss) -> tuple[Loss, tuple[Any, ...] | None, Federation]:
    """The loss, the classes (None for regression), and the federation with targets 0, 1, ... for classes."""
    name = loss if isinstance(loss, str) else loss.name
    if name not in CLASS_LOSSES:
        return make_loss(loss, federation.y), None, federation
    if federation.y is None:
        raise DataError(f"the federation has no target, but the {name} loss needs classes")
    labels, codes = np.unique(federation.y, return_inverse=True)
    if labels.size < 2:
        raise DataError(
            f"all {len(codes)} rows have the class {plain_classes(labels)[0]!r}; a classifier needs at least two "
            "classes in the federation (a single device may have one class only)"
        )
    if labels.dtype.kind == "f" and labels.size > _MOST_NUMERIC_CLASSES and (labels != np.floor(labels)).any():
        raise DataError(
            f"the target has {labels.size} different numbers such as {labels[0]:g} and {labels[1]:g}, which are not "
            "classes; use a regression loss (linear, huber), or encode the classes"
        )
    wanted = loss
    if isinstance(loss, str):
        wanted = "multinomial" if labels.size > 2 or name == "multinomial" else "logistic"
    elif labels.size > (2 if name == "logistic" else loss.n_params(1) + 1):
        raise DataError(f"the target has {labels.size} classes, more than the given {name} loss has")
    encoded = _with_target(federation, codes.astype(np.float64))
    return make_loss(wanted, encoded.y), plain_classes(labels), encoded


def plain_classes(labels: NDArray[Any]) -> tuple[Any, ...]:
    """Class labels as Python values; whole numbers as ints."""
    if labels.dtype.kind == "f" and (labels == np.floor(labels)).all():
        return tuple(int(label) for label in labels)
    return tuple(labels.tolist())


def _with_target(federation: Federation, y: Array) -> Federation:
    return Federation._of(
        federation.devices,
        federation.n_samples,
        federation.X,
        y,
        federation.offset,
        federation.row_order,
        federation.feature_names,
        federation.target_name,
    )


def _with_features(federation: Federation, X: Array) -> Federation:
    return federation._with_features(X, federation.feature_names)


# --- graph, lam, solution -------------------------------------------------------------------------------------


def _used_graph(
    prepared: _Prepared, graph: Graph | None, options: FitOptions, say: Progress
) -> tuple[Graph, dict[str, Any] | None, dict[Hashable, tuple[str, ...]]]:
    """The graph of the problem, a summary of the edge selection, and what it noted about devices."""
    devices = prepared.federation.devices
    n_pairs = len(devices) * (len(devices) - 1) // 2
    if graph is None and n_pairs > _MOST_PAIRS:
        raise ParameterError(
            f"{len(devices)} devices have {n_pairs} pairs, too many to take all of them as edges: give a graph, for "
            "example Graph.knn(coordinates, k)"
        )
    candidates = Graph.complete(devices) if graph is None else graph.aligned(devices)
    if options.select is None:
        return candidates, None, {}
    if candidates.n_edges == 0:
        return candidates, {"method": options.select, "candidates": 0, "kept": 0}, {}
    say(f"testing {candidates.n_edges} candidate edges")
    chosen = select_edges(
        prepared.federation,
        candidates,
        loss=prepared.loss,
        level=options.level,
        method=options.select,
        variance=options.variance,
    )
    summary = {
        "method": options.select,
        "level": options.level,
        "variance": options.variance,
        "candidates": candidates.n_edges,
        "kept": chosen.graph.n_edges,
    }
    say(f"kept {chosen.graph.n_edges} of {candidates.n_edges} edges")
    return chosen.graph, summary, {device: (str(line),) for device, line in chosen.notes.items()}


def _problem(prepared: _Prepared, graph: Graph, options: FitOptions) -> tuple[Problem, _Rescue]:
    """The problem, with a light ridge where it would have no minimiser, and what to say about that."""
    shape = (graph.n_devices, prepared.per_feature(0.0).size)
    problem = Problem(
        prepared.federation,
        graph,
        prepared.loss,
        options.penalty,
        sparsity=np.broadcast_to(prepared.per_feature(options.sparsity), shape),
        ridge=prepared.per_feature(options.ridge),
    )
    # edges with a penalty leave only common directions free: a component has a minimiser when its pooled loss has one
    groups = graph if options.lam != 0 else Graph.empty(graph.devices)
    reasons = _without_minimiser(prepared, groups.components(), options)
    if not reasons:
        return problem, {}
    # least squares along a collinear direction is only as steep as one device's ridge makes it
    alone = Graph.empty(graph.devices) if prepared.loss.name in _LEAST_SQUARES else groups
    return _with_light_ridge(problem, alone, list(reasons)), reasons


def _without_minimiser(prepared: _Prepared, labels: NDArray[np.int64], options: FitOptions) -> _Rescue:
    """Devices in groups whose pooled loss has no unique minimiser, and why."""
    fed, loss = prepared.federation, prepared.loss
    if not isinstance(loss, RowLoss) or loss.name not in (*CLASS_LOSSES, "poisson", *_LEAST_SQUARES):
        return {}
    assert fed.y is not None
    if loss.name in _LEAST_SQUARES:
        return {} if options.ridge > 0 or options.sparsity > 0 else _with_collinear_features(fed, labels)
    group = labels[fed.device_index]
    if options.ridge > 0 or options.sparsity > 0:
        # only the intercept is free: it has nowhere to stop when a class, or every count, is missing
        bad: dict[Hashable, str] = _without_some_class(group, fed.y, loss) if prepared.fit_intercept else {}
    else:
        fit = local_fit(Federation.from_arrays(fed.X, fed.y, group, offset=fed.offset), loss)
        bad = {
            label: _COLLINEAR if "design of rank" in fit.notes[label] else _SEPARATED
            for label in (fit.devices[u] for u in np.flatnonzero(fit.rescued))
        }
    return {device: bad[label] for device, label in zip(fed.devices, labels.tolist(), strict=True) if label in bad}


def _with_collinear_features(federation: Federation, labels: NDArray[np.int64]) -> _Rescue:
    """Devices in groups of several whose pooled features are collinear; a device alone has its shortest solution."""
    several = np.flatnonzero(np.bincount(labels) > 1)
    bad = {
        int(label)
        for label in several
        if np.linalg.matrix_rank(_pooled_gram(federation, labels == label), hermitian=True) < federation.n_features
    }
    return {
        device: _COLLINEAR for device, label in zip(federation.devices, labels.tolist(), strict=True) if label in bad
    }


def _pooled_gram(federation: Federation, members: NDArray[np.bool_]) -> Array:
    rows = federation.X[members[federation.device_index]]
    size = np.sqrt((rows**2).mean(axis=0))
    rows = rows / np.where(size > 0, size, 1.0)
    return np.asarray(rows.T @ rows)


def _without_some_class(group: NDArray[np.int64], y: NDArray[Any], loss: RowLoss) -> dict[Hashable, str]:
    if loss.name == "poisson":
        missing = np.bincount(group, weights=y) == 0
    else:
        seen = np.zeros((int(group.max()) + 1, loss.n_outputs + 1), dtype=bool)
        seen[group, y.astype(np.int64)] = True
        missing = ~seen.all(axis=1)
    return dict.fromkeys(np.flatnonzero(missing).tolist(), _SEPARATED)


def _with_light_ridge(problem: Problem, groups: Graph, devices: list[Hashable]) -> Problem:
    """A 25th of one row's worth of ridge for all devices, intercept included; the rule of `LocalFit`."""
    fed = problem.federation
    rows = np.bincount(groups.components(), weights=fed.n_samples)[groups.components()]
    fewest = min(rows[fed.index[device]] for device in devices)
    scale = (fed.X**2).mean(axis=0)
    scale[scale == 0] = 1.0
    light = np.tile(scale, problem.n_params // fed.n_features) / (_LOGIT_SIZE * fewest)
    return replace(problem, ridge=np.asarray(problem.ridge) + light)


def _rescue_warning(devices: list[Hashable], reasons: _Rescue) -> str:
    shown = ", ".join(repr(device) for device in devices[:5])
    more = f" and {len(devices) - 5} more" if len(devices) > 5 else ""
    return (
        f"nothing holds the parameters of device {shown}{more} back ({reasons[devices[0]]}): a ridge of 1/25 of a row "
        "was added. Join such devices to others, or give ridge= yourself"
    )


def _solved(problem: Problem, options: FitOptions, say: Progress) -> tuple[Solution, float]:
    lam = _chosen_lam(problem, options, say)
    say(f"solving at lam = {lam:.4g}")
    if options.solver == "exact":
        return solve(problem.with_lam(lam), options.tol), lam
    from fedkin.solvers.fedadmm import fed_admm

    solution = fed_admm(
        problem.with_lam(lam),
        options.rounds,
        options.batch_size,
        gradient="plain" if options.batch_size is None else "saga",
        seed=options.seed,
        tol=options.tol,
        fuse=True,
    )
    return solution, lam


def _chosen_lam(problem: Problem, options: FitOptions, say: Progress) -> float:
    if options.lam != "cv":
        return float(options.lam)
    joined = np.flatnonzero(problem.graph.degree > 0)
    if joined.size == 0:
        return 0.0
    say(f"choosing lam by {options.cv_folds}-fold cross-validation within devices")
    part, share = problem, joined.size / problem.n_devices
    if share < 1:
        # devices without edges do not depend on lam; with V' of V devices left, V' lam' = V lam
        part = _restricted(problem, joined)
    with warnings.catch_warnings():
        # candidates that are hard to solve are far from the best, whose solution gets a certificate of its own
        warnings.simplefilter("ignore", ConvergenceWarning)
        choice = cross_validate_lam(
            part,
            folds=options.cv_folds,
            rule=options.cv_rule,
            seed=options.seed,
            n_jobs=options.n_jobs,
        )
    return choice.lam * share


def _restricted(problem: Problem, members: NDArray[np.int64]) -> Problem:
    """The problem of some devices that no edge joins to the others."""
    devices = [problem.federation.devices[u] for u in members]
    place = np.full(problem.n_devices, -1)
    place[members] = np.arange(members.size)
    return replace(
        problem,
        federation=problem.federation.subset(devices),
        graph=Graph.from_indices(devices, place[problem.graph.edges], problem.graph.weights),
        sparsity=np.asarray(problem.sparsity)[members],
    )


# --- the two extremes -----------------------------------------------------------------------------------------


def _local_theta(prepared: _Prepared, options: FitOptions) -> Array:
    if options.ridge > 0:
        alone = replace(options, lam=0.0, sparsity=0.0)
        problem, _ = _problem(prepared, Graph.empty(prepared.federation.devices), alone)
        return solve(problem, options.tol).theta
    return local_fit(prepared.federation, prepared.loss).theta


def _global_theta(prepared: _Prepared, options: FitOptions) -> Array:
    fed = prepared.federation
    if options.ridge > 0:
        pooled = Federation.from_arrays(fed.X, fed.y, np.zeros(len(fed.X), dtype=np.int64), offset=fed.offset)
        alone = replace(options, lam=0.0, sparsity=0.0)
        problem, _ = _problem(replace(prepared, federation=pooled), Graph.empty(pooled.devices), alone)
        theta = solve(problem, options.tol).theta[0]
    else:
        with warnings.catch_warnings():
            # its rescue is as good as Local's, which is silent
            warnings.simplefilter("ignore", DegenerateDeviceWarning)
            theta = global_fit(fed, prepared.loss)
    return np.tile(theta, (fed.n_devices, 1))


# --- scores ---------------------------------------------------------------------------------------------------


def _scored(models: Mapping[str, FittedModel], test: Federation) -> Comparison:
    if len(test.X) == 0:
        raise DataError("there are no held-out rows to compare on")
    some = next(iter(models.values()))
    position = np.array([some.index.get(device, -1) for device in test.devices])
    if (position < 0).any():
        unknown = test.devices[int(position.argmin())]
        raise DataError(
            f"device {unknown!r} of the test is not among the training devices: cut both from one federation"
        )
    ids = [device for device, n in zip(test.devices, test.n_samples.tolist(), strict=True) for _ in range(n)]
    target = _encoded_target(some, test)
    metric = _METRICS.get(some.loss.name, "loss")
    errors, per_device = {}, {}
    more: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        response = model._responses(test.X, ids, test.offset)
        rows = _row_errors(model, test, target, response)
        errors[name] = float(rows.mean())
        sums = np.bincount(test.device_index, weights=rows, minlength=test.n_devices)
        per_device[name] = np.divide(
            sums, test.n_samples, out=np.full(test.n_devices, np.nan), where=test.n_samples > 0
        )
        for extra, value in _more_scores(model, test, target, response).items():
            more.setdefault(extra, {})[name] = value
    return Comparison(metric, False, errors, test.devices, per_device, more, dict(models))


_METRICS = {
    "linear": "mean squared error",
    "huber": "mean absolute error",
    "poisson": "mean Poisson deviance",
    "logistic": "log-loss",
    "multinomial": "log-loss",
    "mean": "mean squared distance",
}


def _encoded_target(model: FittedModel, test: Federation) -> Array | None:
    if test.y is None:
        if model.loss.needs_target:
            raise DataError("the held-out rows have no target to compare with")
        return None
    if model.classes is None:
        return test.y.astype(np.float64)
    code = {label: number for number, label in enumerate(model.classes)}
    unknown = [label for label in np.unique(test.y).tolist() if label not in code]
    if unknown:
        raise DataError(f"class {unknown[0]!r} is in the held-out rows, but not in the training rows")
    return np.array([code[label] for label in test.y.tolist()], dtype=np.float64)


def _row_errors(model: FittedModel, test: Federation, target: Array | None, response: Array) -> Array:
    name = model.loss.name
    if name == "mean":
        return np.asarray(((test.X - response) ** 2).sum(axis=1))
    if target is None or name not in _METRICS:
        return _own_losses(model, test)
    if name == "linear":
        return np.asarray((target - response) ** 2)
    if name == "huber":
        return np.abs(target - response)
    if name == "poisson":
        mu = np.maximum(response, np.finfo(float).tiny)
        ratio = np.where(target > 0, target, mu) / mu
        return np.asarray(2.0 * (target * np.log(ratio) - target + mu))
    chances = np.column_stack([1.0 - response, response]) if response.ndim == 1 else response
    own = chances[np.arange(target.size), target.astype(np.int64)]
    return -np.log(np.maximum(own, 1e-15))


def _own_losses(model: FittedModel, test: Federation) -> Array:
    """Each held-out row's loss by a loss of one's own."""
    X = np.column_stack([np.ones(len(test.X)), test.X]) if model.fit_intercept else test.X
    out = np.empty(len(X))
    for row, u in enumerate(test.device_index.tolist()):
        one = slice(row, row + 1)
        theta = model._theta(model.index[test.devices[u]])
        y = None if test.y is None else test.y[one]
        out[row] = model.loss.value(theta, X[one], y, None if test.offset is None else test.offset[one])
    return out


def _more_scores(model: FittedModel, test: Federation, target: Array | None, response: Array) -> dict[str, float]:
    if target is None:
        return {}
    if model.classes is not None:
        chances = np.column_stack([1.0 - response, response]) if response.ndim == 1 else response
        scores = {"accuracy": float((chances.argmax(axis=1) == target).mean())}
        if response.ndim == 1:
            areas = [
                auc(target[test.device_index == u], response[test.device_index == u]) for u in range(test.n_devices)
            ]
            if not np.isnan(areas).all():
                scores["AUC per device"] = float(np.nanmean(areas))
        return scores
    if model.loss.name in ("linear", "huber") and np.ptp(target) > 0:
        return {"explained variance": float(1.0 - ((target - response) ** 2).mean() / target.var())}
    return {}


def auc(truth: Array, score: Array) -> float:
    """Area under the ROC curve: the chance that a 1 has a higher score than a 0, ties counting half; NaN without both.

    Examples
    --------
    >>> import numpy as np
    >>> auc(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.35, 0.8]))
    0.75
    """
    ones, zeros = score[truth == 1], np.sort(score[truth == 0])
    if ones.size == 0 or zeros.size == 0:
        return float("nan")
    below = np.searchsorted(zeros, ones, side="left") + np.searchsorted(zeros, ones, side="right")
    return float(below.mean() / (2 * zeros.size))


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ParameterError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _silent(line: str) -> None:
    pass
