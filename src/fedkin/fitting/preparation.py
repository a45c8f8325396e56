"""From the user's rows to a problem that has a solution; the way back is that of `fedkin.fitting.model.units`.

Classes become numbers, an intercept column is added, features are standardised, or scaled as a schema has it; a light
ridge goes where the problem would have no minimiser.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array
from fedkin.core import RANK_TOLERANCE, Problem, Summaries, least_eigenvalue, local_fit
from fedkin.data import INTERCEPT, Federation, Schema
from fedkin.errors import DataError, DegenerateSiteWarning, ParameterError
from fedkin.fitting.model import ColumnUnits, FittedModel, class_numbers
from fedkin.fitting.options import AUTO, FitOptions
from fedkin.graph import Graph
from fedkin.losses import LOGIT_SIZE, Loss, loss_for, loss_kind, make_loss

Reasons = dict[Hashable, str]  # site: why its parameters had to be held back

COLLINEAR = "collinear features"
_SEPARATED = "separated classes, a class that is missing, or no counts"


@dataclass(frozen=True, eq=False)
class Prepared:
    """Rows as the solver sees them, the user's, and the way back."""

    federation: Federation | Summaries
    original: Federation | Summaries
    units: ColumnUnits
    #: The columns of `federation` are those of `units` times this ``(q,)``; None where they are the same.
    stretch: Array | None = None

    @property
    def rows(self) -> Federation:
        """The rows, where they are known."""
        assert isinstance(self.federation, Federation)
        return self.federation

    @property
    def loss(self) -> Loss:
        return self.units.loss

    @property
    def fit_intercept(self) -> bool:
        return self.units.fit_intercept

    def site_parameters(self) -> Array:
        """The matrix ``(p, p)`` that turns parameters of prepared columns into those of the columns before."""
        columns = self.units.columns
        return np.eye(columns.n_params) if self.federation is self.original else columns.A

    def model(self, theta: Array, graph: Graph, options: FitOptions, **more: Any) -> FittedModel:
        """A model with these parameters ``(V, p)``, in the user's units; ``more`` as in `ColumnUnits.model`."""
        if self.stretch is not None:
            theta = theta * np.tile(self.stretch, theta.shape[1] // self.stretch.size)
        rows = self.original.n_samples
        return self.units.model(theta, graph, rows, options.penalty, options=options.plain(), **more)


def prepare(federation: Federation | Summaries, options: FitOptions, schema: Schema | None = None) -> Prepared:
    """The rows of a federation, or what is known of them, as ``options`` want them fitted.

    With a ``schema`` the federation is `Schema.federation`'s, or the sites have summed up rows that it prepared; then
    classes, centre and scale are what was agreed on. Otherwise what a table needs to be encoded is learned from these
    rows: the means that stand in for missing cells.
    """
    if isinstance(federation, Summaries):
        return _prepared_sums(federation, options, schema)
    if not federation.n_samples.all():
        empty = federation.sites[int(np.flatnonzero(federation.n_samples == 0)[0])]
        raise DataError(f"site {empty!r} has no rows to fit: leave it out or give it data")
    federation, learned = _filled(federation)
    loss, classes, encoded = _encoded(federation, options.loss, schema)
    has_intercept = options.fit_intercept and not loss.location
    if schema is not None:
        units = ColumnUnits.of_schema(schema, loss, has_intercept)
        encoded = encoded.replaced(X=schema.scaled(encoded.X, has_intercept))
    else:
        encoded, mean, scale = _standardized(encoded, options, centre=has_intercept or loss.location)
        names = (federation.feature_names, mean, scale, classes, federation.target_name)
        offset = "offset" if learned is None or learned.offset is None else learned.offset
        units = ColumnUnits(loss, has_intercept, *names, None if federation.offset is None else offset, learned)
    if has_intercept:
        encoded = encoded.with_intercept()
    if loss.n_params(encoded.n_features) != units.per_feature(0.0).size:
        raise ParameterError(
            f"the {loss.name} loss has {loss.n_params(encoded.n_features)} parameters for {encoded.n_features} columns "
            "(the intercept among them); a model has one for each column: use Problem and solve for other losses"
        )
    return Prepared(encoded, federation, units)


def prepare_fit(data: Federation | Summaries, options: FitOptions, schema: Schema | None = None) -> Prepared:
    """As `prepare`, for the chosen method: kin keeps the user's units, since it has scales of its own."""
    return prepare(data, replace(options, standardize=False) if options.chosen == "kin" else options, schema)


def _filled(federation: Federation) -> tuple[Federation, Schema | None]:
    """The federation without gaps, and its schema with what these rows have taught it."""
    if federation.schema is None:
        return federation, None
    learned = federation.schema.trained(federation.X, federation.weight)
    filled = learned.filled(federation.X)
    return federation if filled is federation.X else federation.replaced(X=filled), learned


def _prepared_sums(summaries: Summaries, options: FitOptions, schema: Schema | None) -> Prepared:
    """Sites have encoded classes and added the intercept themselves; what is left are the scales."""
    loss, wanted = summaries.loss, options.loss
    if wanted != AUTO and (wanted if isinstance(wanted, str) else wanted.name) != loss.name:
        raise ParameterError(
            f"the summaries are of the {loss.name} loss, not of {wanted!r}: leave loss= out, or ask for other summaries"
        )
    intercept, summaries = summaries.has_intercept, summaries.repaired()
    if schema is not None:
        return Prepared(summaries, summaries, ColumnUnits.of_schema(schema, loss, intercept))
    mean, scale, prepared = np.zeros(summaries.n_features), np.ones(summaries.n_features), summaries
    if options.standardize:
        prepared, mean, scale = summaries.standardized()
    first = int(intercept)
    names = tuple(name for name in summaries.feature_names if name != INTERCEPT)
    return Prepared(prepared, summaries, ColumnUnits(loss, intercept, names, mean[first:], scale[first:]))


def _standardized(federation: Federation, options: FitOptions, centre: bool) -> tuple[Federation, Array, Array]:
    """The federation, standardised if the options say so, and by which means and scales."""
    mean, scale = np.zeros(federation.n_features), np.ones(federation.n_features)
    if not options.standardize:
        return federation, mean, scale
    centred, mean, scale = federation.standardized()
    if centre:
        return centred, mean, scale
    # without an intercept a shift of the features would be another model
    return federation.replaced(X=federation.X / scale), np.zeros_like(mean), scale


def _encoded(
    federation: Federation, loss: str | Loss, schema: Schema | None
) -> tuple[Loss, tuple[Any, ...] | None, Federation]:
    """The loss, the classes (None for regression), and the federation with targets 0, 1, ... for classes."""
    y = federation.y
    if loss == AUTO:
        loss = loss_for("number" if y is None or y.dtype.kind == "f" else "class").name
    kind, named = loss_kind(loss), isinstance(loss, str)
    if kind.target != "class":
        if named and schema is None:
            rows = (federation.X, y, federation.site_index, federation.offset, federation.weight)
            return kind.from_rows(*rows), None, federation
        return make_loss(loss, y), None, federation
    if y is None:
        raise DataError(f"the federation has no target, but the {kind.name} loss needs classes")
    if schema is not None and schema.classes is not None:
        made = kind.from_classes(len(schema.classes)) if named else make_loss(loss)
        return made, schema.classes, federation.replaced(y=class_numbers(y, schema.classes))
    classes, codes = _encoded_classes(y, kind.name, federation.target_name)
    made = kind.from_classes(len(classes)) if named else make_loss(loss)
    if len(classes) > made.n_params(1) + 1:
        raise DataError(f"the target has {len(classes)} classes, more than the given {kind.name} loss has")
    return made, classes, federation.replaced(y=codes)


def _encoded_classes(y: NDArray[Any], loss: str, target: str | None = None) -> tuple[tuple[Any, ...], Array]:
    """The classes of a target in order, whole numbers as ints, and the number of each row's class.

    ``loss`` and ``target`` are names to use in errors.
    """
    labels, codes = np.unique(y, return_inverse=True)
    if labels.dtype.kind == "f":
        fractions = labels[labels != np.floor(labels)]
        if fractions.size:
            named = "" if target is None else f" {target!r}"
            raise DataError(
                f"the target{named} has numbers such as {fractions[0]:g}, but the {loss} loss needs classes: "
                'use loss="linear", or a column of labels'
            )
        labels = labels.astype(np.int64)
    classes = tuple(labels.tolist())
    if len(classes) < 2:
        raise DataError(
            f"all {len(codes)} rows have the class {classes[0]!r}; a classifier needs at least two classes in the "
            "federation (a single site may have one class only)"
        )
    return classes, codes.astype(np.float64)


# --- a problem with a minimiser --------------------------------------------------------------------------------


def well_posed_problem(prepared: Prepared, graph: Graph, options: FitOptions) -> tuple[Problem, Reasons]:
    """The problem, with a light ridge where it would have no minimiser, and what to say about that."""
    shape = (graph.n_sites, prepared.units.per_feature(0.0).size)
    problem = Problem(
        prepared.federation,
        graph,
        prepared.loss,
        options.penalty,
        sparsity=np.broadcast_to(prepared.units.per_feature(options.sparsity), shape),
        ridge=prepared.units.per_feature(options.least_ridge),
    )
    # edges with a penalty leave only common directions free: a component has a minimiser when its pooled loss has one
    groups = graph if options.lam != 0 else Graph.empty(graph.sites)
    reasons = _without_minimiser(prepared, groups.components(), options)
    if not reasons:
        return problem, {}
    # least squares along a collinear direction is only as steep as one site's ridge makes it
    rowwise = prepared.loss.rowwise
    alone = Graph.empty(graph.sites) if rowwise is not None and rowwise.minimiser == "always" else groups
    return with_light_ridge(problem, alone, list(reasons)), reasons


def with_light_ridge(problem: Problem, groups: Graph, sites: list[Hashable]) -> Problem:
    """A 25th of one row's worth of ridge for all sites, intercept included; the rule of `LocalFit`."""
    fed = problem.federation
    own = fed.n_samples if isinstance(fed, Summaries) else fed.weight_sums
    rows = np.bincount(groups.components(), weights=own)[groups.components()]
    fewest = min(rows[fed.index[site]] for site in sites)
    if isinstance(fed, Summaries):
        scale = fed.column_scale
    else:
        scale = np.average(fed.X**2, axis=0, weights=fed.weight)
        scale[scale == 0] = 1.0
    light = np.tile(scale, problem.n_params // fed.n_features) / (LOGIT_SIZE * fewest)
    return replace(problem, ridge=np.asarray(problem.ridge) + light)


def note_light_ridge(notes: dict[Hashable, tuple[str, ...]], reasons: Reasons, stacklevel: int) -> None:
    """Note why sites have a light ridge, and warn of those whose parameters the data do not determine."""
    sites = [site for site, reason in reasons.items() if reason != COLLINEAR]
    if sites:
        shown = ", ".join(repr(site) for site in sites[:5])
        more = f" and {len(sites) - 5} more" if len(sites) > 5 else ""
        warnings.warn(
            f"the parameters of site {shown}{more} are not determined by the data ({reasons[sites[0]]}): a ridge "
            "of 1/25 of a row was added. Join such sites to others, or give ridge= yourself",
            DegenerateSiteWarning,
            stacklevel=stacklevel,
        )
    for site, reason in reasons.items():
        notes[site] = (*notes.get(site, ()), f"{reason}; a ridge of 1/25 of a row was added (or give ridge=)")


def _without_minimiser(prepared: Prepared, labels: NDArray[np.int64], options: FitOptions) -> Reasons:
    """Sites in groups whose pooled loss has no unique minimiser, and why."""
    fed, loss = prepared.federation, prepared.loss.rowwise
    if loss is None or loss.minimiser == "unknown":
        return {}
    if loss.minimiser == "always":
        return {} if options.least_ridge > 0 or options.sparsity > 0 else _with_collinear_features(fed, labels)
    if isinstance(fed, Summaries):
        return _without_estimates(fed, labels)
    assert fed.y is not None
    group = labels[fed.site_index]
    if options.least_ridge > 0 or options.sparsity > 0:
        # only the intercept is free: it has nowhere to stop when a class, or every count, is missing
        diverges = np.flatnonzero(loss.constant_diverges(fed.y, group)) if prepared.fit_intercept else ()
        bad: dict[Hashable, str] = {int(label): _SEPARATED for label in diverges}
    else:
        fit = local_fit(Federation.from_arrays(fed.X, fed.y, group, offset=fed.offset, weight=fed.weight), loss)
        bad = {
            label: COLLINEAR if _collinear(fed, labels == label) else _SEPARATED
            for label in (fit.sites[u] for u in np.flatnonzero(fit.rescued))
        }
    return {site: bad[label] for site, label in zip(fed.sites, labels.tolist(), strict=True) if label in bad}


def _without_estimates(summaries: Summaries, labels: NDArray[np.int64]) -> Reasons:
    """Sites in groups of which none has an estimate of its own.

    A group has a minimiser when one of its sites has an estimate: a sum of losses that are bounded below grows in every
    direction in which one of them does.
    """
    assert summaries.own is not None
    poor = np.array([one.ridge.any() for one in summaries.own])
    lost = [label for label in np.unique(labels).tolist() if poor[labels == label].all()]
    reasons = {}
    for u in np.flatnonzero(np.isin(labels, lost)).tolist():
        alone = np.arange(summaries.n_sites) == u
        reasons[summaries.sites[u]] = COLLINEAR if _collinear(summaries, alone) else _SEPARATED
    return reasons


def _with_collinear_features(data: Federation | Summaries, labels: NDArray[np.int64]) -> Reasons:
    """Sites in groups of several whose pooled features are collinear; a site alone has its shortest solution."""
    several = np.flatnonzero(np.bincount(labels) > 1)
    bad = {int(label) for label in several if _collinear(data, labels == label)}
    return {site: COLLINEAR for site, label in zip(data.sites, labels.tolist(), strict=True) if label in bad}


def _collinear(data: Federation | Summaries, members: NDArray[np.bool_]) -> bool:
    """Whether the pooled features of some sites are collinear."""
    return bool(least_eigenvalue(_pooled_gram(data, members)) <= RANK_TOLERANCE)


def _pooled_gram(data: Federation | Summaries, members: NDArray[np.bool_]) -> Array:
    if isinstance(data, Summaries):
        return np.asarray(data.sums.total().hessian[members, 0].sum(axis=0))
    rows = data.X[members[data.site_index]]
    size = np.sqrt((rows**2).mean(axis=0))
    rows = rows / np.where(size > 0, size, 1.0)
    return np.asarray(rows.T @ rows)
