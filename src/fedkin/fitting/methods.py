"""Fit models from rows, files or summaries, with either method."""

from __future__ import annotations

import hashlib
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
from scipy.special import ndtri

from fedkin._base import Array, Say, check_level, listed
from fedkin._storage import place_of
from fedkin.cluster import On, running_on
from fedkin.core import FileRows, Quadratics, RowData, Summaries, local_fit
from fedkin.data import Federation, Schema, files_of
from fedkin.errors import FedkinWarning, ParameterError, SolverError, argument
from fedkin.fitting.fused import fused_estimate, fused_from_sums, silent
from fedkin.fitting.inputs import in_order_of_appearance
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Data, Estimate, Prepared, prepare, weakest_promise
from fedkin.fitting.queries import Queries, RoundState, check_answers, make_queries, next_fused
from fedkin.graph import Graph
from fedkin.kin import QUICK, Covariates, Kin, Length, covariate_names, find_kin, hint_of
from fedkin.kin.sources import Source

#: Answers of all sites to the queries of a round.
Answer = Callable[[Queries], Summaries]


@dataclass(frozen=True)
class Method(ABC):
    """Interface of a method, which computes an `Estimate` from prepared data for `fit` and `compare`."""

    options: FitOptions

    @abstractmethod
    def fit(
        self, prepared: Prepared, graph: Graph | None, say: Say, start: FittedModel | None = None, quick: bool = False
    ) -> Estimate:
        """Return the estimate from rows, or from the sums of a quadratic loss."""

    @abstractmethod
    def advance(self, prepared: Prepared, graph: Graph | None, say: Say, queries: Queries | None) -> Estimate | Queries:
        """Return the estimate from the sites' answers to ``queries``, or the next queries."""

    @abstractmethod
    def from_sums(self, prepared: Prepared, model: FittedModel, rest: Quadratics) -> Array:
        """Return parameters ``(V, p)`` of a model like ``model`` from part of the sums."""


class KinMethod(Method):
    """Partial pooling with groups: `fedkin.find_kin`."""

    def fit(
        self, prepared: Prepared, graph: Graph | None, say: Say, start: FittedModel | None = None, quick: bool = False
    ) -> Estimate:
        say("finding kin")
        length: Length = QUICK if quick else {}
        found = find_kin(
            prepared.data,
            graph,
            loss=prepared.loss,
            seed=self.options.seed,
            fixed=prepared.fixed,
            start=None if start is None else _start(start, prepared),
            within=self.options.within,
            **length,
        )
        # resolved groups; if there are none, each site is its own group
        groups = in_order_of_appearance(found.groups) if found.resolved else np.arange(len(found.sites))
        used = Graph.empty(found.sites) if graph is None else graph.aligned(found.sites)
        return Estimate(found.theta, used, groups, kin=found)

    def advance(self, prepared: Prepared, graph: Graph | None, say: Say, queries: Queries | None) -> Estimate | Queries:
        number = 1 if queries is None else queries.round
        found = self.fit(prepared, graph, say)
        if number >= self.options.messages:
            return found
        # there is no penalty, so nothing to certify
        data, theta = prepared.summaries, found.theta
        pull = -data.sums.total().terms().gradients(theta)
        V, p = theta.shape
        state = RoundState(theta, 0.0, np.zeros((0, p)), np.zeros(p), np.zeros(V), 0.0)
        return make_queries(Graph.empty(data.sites), number + 1, theta, pull, state)

    def from_sums(self, prepared: Prepared, model: FittedModel, rest: Quadratics) -> Array:
        hint = model.graph if model.graph.n_edges else None
        part, seed = replace(prepared.summaries, sums=rest), self.options.seed
        return find_kin(part, hint, seed=seed, fixed=prepared.fixed, within=self.options.within, **QUICK).theta


class FusedMethod(Method):
    """The paper's estimator: it tests edges, chooses ``lam`` and minimises the objective with a certificate."""

    def fit(
        self, prepared: Prepared, graph: Graph | None, say: Say, start: FittedModel | None = None, quick: bool = False
    ) -> Estimate:
        return fused_estimate(prepared, graph, self.options, say)

    def advance(self, prepared: Prepared, graph: Graph | None, say: Say, queries: Queries | None) -> Estimate | Queries:
        return next_fused(prepared, graph, self.options, say, queries)

    def from_sums(self, prepared: Prepared, model: FittedModel, rest: Quadratics) -> Array:
        return fused_from_sums(prepared, model, self.options, rest)


def method_for(options: FitOptions) -> Method:
    """Return the method selected by the options."""
    return KinMethod(options) if options.method == "kin" else FusedMethod(options)


@overload
def fit(
    data: Federation | FileRows, graph: Graph | None = ..., options: FitOptions | None = ..., *args: Any, **how: Any
) -> FittedModel: ...
@overload
def fit(
    data: Summaries, graph: Graph | None = ..., options: FitOptions | None = ..., *args: Any, **how: Any
) -> FittedModel | Queries: ...
def fit(
    data: Data,
    graph: Graph | None = None,
    options: FitOptions | None = None,
    progress: Say | None = None,
    schema: Schema | None = None,
    start: FittedModel | None = None,
    *,
    covariates: Covariates | None = None,
    quick: bool = False,
    queries: Queries | None = None,
    answer: Answer | None = None,
    max_rounds: int = 30,
    on: On | None = None,
) -> FittedModel | Queries:
    """Fit a model for every site.

    Parameters
    ----------
    data : Federation, FileRows or Summaries
        Rows in memory; for kin also rows that stay in files (`fedkin.core.rows_in_files`); or the sites' summaries. For
        "logistic" and "multinomial" the targets of rows are class labels of any kind.
    graph : Graph, optional
        A graph over the sites of the data, in any order. Kin uses it as a hint, which may be wrong, about which sites
        are alike. The fused estimator uses its edges, or all pairs of sites without it (as candidates if
        ``options.select`` is on).
    options : FitOptions, optional
        Options of the fit. For files and summaries, loss, intercept, classes and folds are those of the data.
    progress : callable, optional
        Called with a line of text before each step.
    schema : Schema, optional
        The schema of `Federation.from_schema`, or the one by which sites prepared their summaries. It determines the
        scaling, whatever ``options.standardize`` says, and the model keeps it.
    start : FittedModel, optional
        An earlier model of the same columns, as a warm start for kin.
    covariates : mapping {site: value, row or {name: value}}, array (V, q) or pandas table, optional
        Covariates of the sites, instead of a graph (see `fedkin.kin.covariate_graph`). The model keeps their names in
        ``options["covariates"]``.
    quick : bool
        Whether kin samples a third as long: enough for predictions, but not for diagnostics and probabilities.
    queries : Queries, optional
        The last queries, where ``data`` are the sites' answers to them.
    answer : callable, optional
        Function that returns the sites' answers to `Queries`; `fit` calls it until it has a model.
    max_rounds : int
        Maximum number of rounds of messages with ``answer``, including the first.
    on : str or Engine, optional
        Where to run: "local", "ray", "ray://host:port", or an engine (docs/cluster.md); by default the engine of
        `fedkin.cluster.running_on`.

    Returns
    -------
    FittedModel or Queries
        Queries only for summaries of a loss that is not quadratic: ask the sites (`fedkin.core.site_answer`), stack
        their answers, and call `fit` again with them and with ``queries``.

    Notes
    -----
    *Groups of the fused estimator* are sites joined by edges with exactly equal estimates. With one site or without
    edges, ``lam`` is 0 unless it is given as a number.

    *No minimiser.* If the likelihood of a whole connected component has no maximum (separated classes, a missing class,
    no counts), or its features are collinear, a ridge worth 1/25 of a row is added at all sites. The model has a note
    on each site concerned. In the first case a `DegenerateSiteWarning` is issued.

    *Summaries of quadratic losses.* The result equals that from the rows up to rounding: coefficients agree to 1e-10 on
    ordinary designs. A Gram matrix squares the condition number of the features, so fewer digits agree for nearly
    collinear ones.

    *Summaries of other losses.* Kin expands them at the sites' own estimates and then at its own, ``options.messages``
    times in total. The fused estimator tests edges with the sites' own estimates, cross-validates ``lam`` on quadratic
    expansions in the first two rounds, and asks until the certified relative gap is at most ``options.tol``.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.fitting import FitOptions, fit
    >>> design = paper_design(n_sites=20, n_samples=60, n_features=10, n_clusters=2, seed=0)
    >>> fit(design.federation, design.graph)
    FittedModel(linear, kin, 20 sites, in 2 groups)
    >>> fit(design.federation, design.graph, FitOptions(method="fused")).n_groups
    2
    >>> fit(fedkin.summarise(design.federation.with_intercept()), design.graph).n_groups
    2
    """
    if on is not None:
        again: Callable[..., FittedModel | Queries] = fit
        with running_on(on):
            return again(
                data, graph, options, progress, schema, start, covariates=covariates, quick=quick, queries=queries,
                answer=answer, max_rounds=max_rounds,
            )  # fmt: skip
    options = FitOptions() if options is None else options
    say = progress or silent
    hint = hint_of(graph, covariates, data.sites)
    if data.has_rows:
        prepared = prepare(data, options, schema)
        estimate = method_for(options).fit(prepared, hint, say, start, quick)
        warn_of_rows(prepared, estimate)
        return with_covariates(prepared.model(estimate, options), covariates)
    for _ in range(max_rounds):
        found = _step(data, hint, options, say, schema, queries)
        if isinstance(found, FittedModel):
            return with_covariates(found, covariates)
        if answer is None:
            return found
        data, queries = answer(found), found
    gap = f"{np.inf if queries is None else queries.gap:.1e} after {max_rounds} rounds of messages"
    raise SolverError(f"the gap is {gap}, not {options.tol:.1e}: add {argument('ridge', 0.001)}")


def warn_of_rows(prepared: Prepared, found: Estimate) -> None:
    """Warn if columns are constant within sites, or if the variance of rows does not match the loss."""
    if found.kin is not None:
        _warn_of_constant(prepared, found.kin)
        noise = float(np.average(found.kin.noise, weights=found.kin.n_samples))
    elif prepared.loss.target == "count":
        rows, groups = RowData(prepared.rows, prepared.loss), np.unique(found.theta, axis=0)
        noise = Source(rows).dispersion(found.theta, float(groups.size))
    else:
        return
    text = prepared.loss.remark(noise)
    if text is not None:
        warnings.warn(text, FedkinWarning, stacklevel=3)


def _warn_of_constant(prepared: Prepared, kin: Kin) -> None:
    constant = [name for name in kin.fixed_columns if name not in prepared.fixed]
    if constant:
        what = "is constant" if len(constant) == 1 else "are constant"
        text = f"{listed(constant)} {what} within nearly all sites: one effect for all sites is estimated (fixed)"
        warnings.warn(text, FedkinWarning, stacklevel=4)


def _start(model: FittedModel, prepared: Prepared) -> Kin | None:
    """Return the kin of an earlier model in the units of prepared columns; None if its parameters differ."""
    columns, names = prepared.columns, prepared.columns.parameter_names
    if model.kin is None or model.kin.names != names or model.loss.name != prepared.loss.name:
        return None
    back: Array = np.asarray(np.linalg.inv(columns.A), dtype=np.float64)
    return model.kin.in_units(back, -back @ columns.shift, names)


def _step(
    data: Summaries, graph: Graph | None, options: FitOptions, say: Say, schema: Schema | None, queries: Queries | None
) -> FittedModel | Queries:
    """Return the model, or the next queries, from the messages of one round."""
    if options.solver != "exact":
        given = argument("solver", options.solver)
        raise ParameterError(f"{given} needs rows; summaries are solved directly: leave it out")
    if queries is not None:
        data = check_answers(queries, data)
    if options.method == "fused":  # in the folds of the sites
        options = replace(options, cv_folds=data.folds, seed=data.seed)
    method = method_for(options)
    prepared, rounds = prepare(data, method.options, schema), 1 if queries is None else queries.round
    step = method.fit(prepared, graph, say) if data.loss.quadratic else method.advance(prepared, graph, say, queries)
    if isinstance(step, Queries):
        return step
    if step.kin is not None:
        _warn_of_constant(prepared, step.kin)
    model = prepared.model(step, method.options)
    promised = [{"epsilon": one.epsilon, "delta": one.delta} for one in data.privacy or () if one is not None]
    return replace(model, origin={"from": "summaries", "rounds": rounds, **weakest_promise(promised)})


def with_covariates(model: FittedModel, covariates: Covariates | None) -> FittedModel:
    """Return the model with the names of its covariates in its ``options``."""
    if covariates is None:
        return model
    return replace(model, options={**model.options, "covariates": list(covariate_names(covariates))})


def data_record(path: str | os.PathLike[str], rows: int) -> dict[str, Any]:
    """Return the name of a table and the digest of its bytes; several files are read in the order of their names."""
    digest, place = hashlib.sha256(), place_of(path)
    inside = sorted(one for one in place.iterdir() if one.is_file()) if place.is_dir() else []
    files = inside or files_of(place)
    for one in files:
        if not place.is_file():
            digest.update(f"{one.name}\0".encode())
        with one.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return {"name": place.name, "sha256": digest.hexdigest(), "rows": rows}


# --- naive intervals --------------------------------------------------------------------------------------------


def naive_confint(model: FittedModel, federation: Federation, level: float = 0.95) -> Array:
    """Return intervals ``(V, p, 2)`` of each site's parameters from the pooled rows of its group, as if it were known.

    Parameters
    ----------
    model : FittedModel
        A fused model.
    federation : Federation
        The rows that it was fitted on.
    level : float in (0, 1)
        Nominal coverage if the groups were known. The intervals ignore that edges were selected with the same rows,
        that groups may be wrong, and the penalty's shrinkage, so they cover less. `Kin.confint` averages over groupings
        instead.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.fitting import FitOptions, fit, naive_confint
    >>> design = paper_design(n_sites=6, n_samples=60, n_features=2, n_clusters=2, signal=2, seed=0)
    >>> model = fit(design.federation, design.graph, FitOptions(method="fused"))
    >>> naive_confint(model, design.federation).shape
    (6, 3, 2)
    """
    check_level(level)
    options = FitOptions(model.loss, fit_intercept=model.fit_intercept)
    rows = prepare(federation.subset(model.sites), options, standardize=False).rows
    pooled = Federation.from_arrays(rows.X, rows.y, model.groups[rows.site_index], offset=rows.offset)
    found = local_fit(pooled, model.loss)
    place = np.array([found.sites.index(label) for label in model.groups.tolist()])
    half = ndtri(0.5 + level / 2) * np.sqrt(np.einsum("kjj->kj", found.covariance))
    return np.asarray(np.stack([found.theta - half, found.theta + half], axis=2)[place])
