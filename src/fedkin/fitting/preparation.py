"""Prepare rows, files or summaries for the solver, and convert estimates back to the user's units."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, Index, count, listed
from fedkin.core import Columns, FileRows, Summaries
from fedkin.data import INTERCEPT, Federation, Schema
from fedkin.errors import DataError, ParameterError, argument
from fedkin.fitting.boosting import BOOSTING, fit_boosting
from fedkin.fitting.inputs import class_numbers, columns_for, schema_columns
from fedkin.fitting.model import FittedModel, FusedFit
from fedkin.fitting.options import AUTO, FitOptions
from fedkin.fitting.survival import Baselines
from fedkin.graph import Graph
from fedkin.kin import Kin
from fedkin.losses import Loss, loss_for, loss_kind, make_loss

#: Data of a fit: rows in memory, rows that stay in files, or the summaries of sites.
Data = Federation | FileRows | Summaries

#: Largest difference, in scaled units, at which neighbours count as equal after rounds.
SAME = 1e-4


@dataclass(frozen=True, eq=False)
class Estimate:
    """The result of a method, in the units of prepared columns; ``graph`` has the edges that were used."""

    theta: Array
    graph: Graph
    groups: Index | None = None
    kin: Kin | None = None
    fused: FusedFit | None = None
    notes: Mapping[Hashable, tuple[str, ...]] = field(default_factory=dict)
    history: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Prepared:
    """Data for the solver (`data`), the user's data (`original`), and the map between their columns."""

    data: Data
    original: Data
    loss: Loss
    columns: Columns
    about: Mapping[str, Any] = field(default_factory=dict)  # attributes of the model that describe the data
    fixed: tuple[str, ...] = ()  # columns whose coefficients are the same at all sites

    @property
    def rows(self) -> Federation:
        """The rows, if they are in memory."""
        assert self.data.in_memory
        return self.data

    @property
    def summaries(self) -> Summaries:
        """The summaries, if there are no rows."""
        assert not self.data.has_rows
        return self.data

    @property
    def solvable(self) -> Federation | Summaries:
        """The data of a `Problem`."""
        if self.data.has_rows and not self.data.in_memory:
            raise ParameterError(
                f"the fused estimator needs the rows of the {self.loss.name} loss in memory: leave its options out, or "
                "read the whole table"
            )
        return self.data

    def model(self, found: Estimate, options: FitOptions) -> FittedModel:
        """Return the model of an estimate, in the user's units."""
        columns = self.columns
        kin = None if found.kin is None else found.kin.in_units(columns.A, columns.shift, columns.parameter_names)
        n = np.rint(self.original.n_samples).astype(np.int64)
        how = {**self.about, "kin": kin, "options": options.plain()}
        how |= {name: getattr(found, name) for name in ("fused", "notes", "history")}
        model = build_model(found.theta, columns, self.loss, found.graph, n, found.groups, **how)
        if self.original.in_memory and not self.loss.additive:
            model = replace(model, baseline=Baselines.from_rows(self.loss, model.coef[:, 0], self.original))
        return model


def build_model(
    theta: Array, columns: Columns, loss: Loss, graph: Graph, n_samples: Index, groups: Index | None = None, **more: Any
) -> FittedModel:
    """Return the model with parameters ``theta (V, p)`` of prepared columns, for the sites of ``graph``.

    ``more`` holds other attributes of `FittedModel`. Without ``groups``, sites form a group if they are joined by edges
    along which their parameters are exactly equal.
    """
    first = int(columns.intercept)
    blocks, mean, scale = theta.reshape(len(theta), columns.outputs, -1), columns.mean[first:], columns.scale[first:]
    # feature by feature, so that equal parameters stay equal and 0 stays 0
    coef = blocks * scale + mean if columns.location else blocks[:, :, first:] / scale
    intercept = np.zeros(blocks.shape[:2])
    if first:
        intercept = blocks[:, :, 0] / columns.scale[0] - np.einsum("vkq,q->vk", coef, mean)
    labels = graph.equal_groups(theta) if groups is None else groups
    names = columns.names[first:]
    return FittedModel(graph.sites, coef, intercept, names, labels, n_samples, loss, graph, bool(first), **more)


# --- preparing --------------------------------------------------------------------------------------------------


def prepare(
    data: Data, options: FitOptions, schema: Schema | None = None, *, standardize: bool | None = None
) -> Prepared:
    """Return the data prepared according to ``options``.

    Classes become numbers, an intercept column is added, and features are standardised if the method needs it
    (``standardize`` overrides that), or scaled as in a schema. With a ``schema``, the federation comes from
    `Federation.from_schema`, or the summaries are of rows that the schema prepared; classes, centre and scale are then
    those of the schema. Otherwise the means that fill missing cells are computed from these rows.
    """
    if options.boost and (schema is not None or not data.in_memory):
        raise ParameterError(f"{argument('boost')} needs all rows in memory, and no contract: leave it out")
    scaled = options.standardize and options.method == "fused" if standardize is None else standardize
    if not data.has_rows:
        made = _prepared_summaries(data, options, schema, scaled)
    elif not data.in_memory:
        names = data.schema.names
        columns = columns_for(data.loss, names, np.zeros(len(names)), np.ones(len(names)), data.intercept, data.classes)
        about = {"classes": data.classes, "target_name": data.roles.target, "offset_name": data.schema.offset}
        made = Prepared(data, data, data.loss, columns, about | {"schema": data.schema})
    else:
        made = _prepared_rows(data, options, schema, scaled)
    found: Schema | None = made.about.get("schema")
    several = {} if found is None else {column.name: column.encoded for column in found.features}
    curves = () if found is None else (name for one in found.features if one.knots for name in one.encoded)
    columns_of_rows = [name for name in made.columns.names if name != INTERCEPT]
    for name in options.fixed:  # a category has several columns
        if name not in columns_of_rows and name not in several:
            near = listed([*several, *(column for column in columns_of_rows if column not in several)], 12)
            raise ParameterError(f"{argument('fixed')} names {name!r}, which is not a column: there are {near}")
    named = (one for name in options.fixed for one in ((name,) if name in columns_of_rows else several[name]))
    return replace(made, fixed=tuple(dict.fromkeys([*curves, *named])))


def about_schema(schema: Schema) -> dict[str, Any]:
    """Return the attributes of a model that a schema determines."""
    target = None if schema.target is None else schema.target.name
    return {"classes": schema.classes, "target_name": target, "offset_name": schema.offset, "schema": schema}


def weakest_promise(promises: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the weakest of the sites' differential privacy for the origin of a model; {} without promises."""
    if not promises:
        return {}
    worst = {name: max(one[name] for one in promises) for name in ("epsilon", "delta")}
    return {"privacy": {**worst, "sites": len(promises)}}


def with_fixed_curves(options: FitOptions, schema: Schema) -> FitOptions:
    """Return the options of kin with spline columns as fixed ones, for data without a schema."""
    if options.method != "kin":
        return options
    curves = {column.name: column.encoded for column in schema.features if column.knots}
    named = [name for name in options.fixed if name not in curves]
    return replace(options, fixed=(*named, *(name for names in curves.values() for name in names)))


def _prepared_rows(federation: Federation, options: FitOptions, schema: Schema | None, scaled: bool) -> Prepared:
    if not federation.n_samples.all():
        empty = federation.sites[int(np.flatnonzero(federation.n_samples == 0)[0])]
        raise DataError(f"site {empty!r} has no rows to fit: leave it out or give it data")
    learned = None
    if federation.schema is not None:
        learned = federation.schema.trained(federation.X, federation.weight)
        filled = learned.filled(federation.X)
        federation = federation if filled is federation.X else federation.replaced(X=filled)
    loss, classes, encoded = _encoded(federation, options.loss, schema)
    intercept = options.fit_intercept and loss.takes_intercept and not loss.location
    boosting, codes = None, None
    if options.boost:
        boosting, column, codes = fit_boosting(encoded, loss, options.seed)
        X, names = np.column_stack([encoded.X, column]), (*encoded.feature_names, BOOSTING)
        federation, encoded = (one.replaced(X=X, feature_names=names) for one in (federation, encoded))
    about: dict[str, Any] = {"classes": classes, "target_name": federation.target_name, "schema": learned}
    about |= {"boosting": boosting, "site_codes": None if codes is None else tuple(map(tuple, codes.tolist()))}
    if schema is not None:
        columns = schema_columns(schema, loss, intercept)
        encoded = encoded.replaced(X=schema.scaled(encoded.X, intercept))
        about |= {"offset_name": schema.offset, "schema": schema}
    else:
        mean, scale = np.zeros(federation.n_features), np.ones(federation.n_features)
        if scaled:
            centred, mean, scale = encoded.standardized()
            if intercept or loss.location:
                encoded = centred
            else:  # without an intercept a shift of the features would be another model
                encoded, mean = encoded.replaced(X=encoded.X / scale), np.zeros_like(mean)
        columns = columns_for(loss, federation.feature_names, mean, scale, intercept, classes)
        if federation.offset is not None:
            about["offset_name"] = "offset" if learned is None or learned.offset is None else learned.offset
    if intercept:
        encoded = encoded.with_intercept()
    if loss.n_params(encoded.n_features) != columns.n_params:
        raise ParameterError(
            f"the {loss.name} loss has {loss.n_params(encoded.n_features)} parameters for {encoded.n_features} columns "
            "(including the intercept); a model has one for each column: use Problem and solve for other losses"
        )
    return Prepared(encoded, federation, loss, columns, about)


def _prepared_summaries(summaries: Summaries, options: FitOptions, schema: Schema | None, scaled: bool) -> Prepared:
    """Prepare summaries, whose classes are encoded and which have an intercept: only scale them."""
    loss, wanted = summaries.loss, options.loss
    if wanted != AUTO and (wanted if isinstance(wanted, str) else wanted.name) != loss.name:
        out = f"leave {argument('loss')} out, or ask for other summaries"
        raise ParameterError(f"the summaries are of the {loss.name} loss, not of {wanted!r}: {out}")
    intercept, summaries = summaries.has_intercept, summaries.repaired()
    if schema is not None:
        return Prepared(summaries, summaries, loss, schema_columns(schema, loss, intercept), about_schema(schema))
    mean, scale, prepared, first = np.zeros(summaries.n_features), np.ones(summaries.n_features), summaries, intercept
    if scaled:
        prepared, mean, scale = summaries.standardized()
    names = tuple(name for name in summaries.feature_names if name != INTERCEPT)
    return Prepared(prepared, summaries, loss, columns_for(loss, names, mean[first:], scale[first:], intercept))


def _encoded(
    federation: Federation, loss: str | Loss, schema: Schema | None
) -> tuple[Loss, tuple[Any, ...] | None, Federation]:
    """Return the loss, the classes (None for regression), and the federation with targets 0, 1, ... for classes."""
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
    labels, codes = np.unique(y, return_inverse=True)
    if labels.dtype.kind == "f":
        fractions = labels[labels != np.floor(labels)]
        if fractions.size:
            target = "" if federation.target_name is None else f" {federation.target_name!r}"
            raise DataError(
                f"the target{target} has numbers such as {fractions[0]:g}, but the {kind.name} loss needs classes: "
                f"use {argument('loss', 'linear')}, or a column of labels"
            )
        labels = labels.astype(np.int64)
    classes = tuple(labels.tolist())
    if len(classes) < 2:
        raise DataError(
            f"all {len(codes)} rows have the class {classes[0]!r}; a classifier needs at least two classes in the "
            "federation (a single site may have one class only)"
        )
    made = kind.from_classes(len(classes)) if named else make_loss(loss)
    if len(classes) > made.n_params(1) + 1:
        raise DataError(f"the target has {len(classes)} classes, more than the given {kind.name} loss has")
    return made, classes, federation.replaced(y=codes.astype(np.float64))


# --- models of rounds -------------------------------------------------------------------------------------------


def model_from_theta(
    theta: Mapping[Hashable, ArrayLike],
    graph: Graph,
    *,
    schema: Schema,
    loss: Loss,
    intercept: bool,
    n_samples: Mapping[Hashable, int],
    **more: Any,
) -> FittedModel:
    """Return a model from parameters of sites estimated from rows prepared by `Schema.rows`."""
    columns = schema_columns(schema, loss, intercept)
    absent = [site for site in graph.sites if site not in theta]
    if absent:
        raise ParameterError(f"there are no parameters for {absent[0]!r}, one of the sites of the graph")
    stacked = np.array([np.asarray(theta[site], dtype=np.float64) for site in graph.sites])
    if stacked.shape != (graph.n_sites, columns.n_params):
        expected = count(columns.n_params, "parameter")
        raise ParameterError(f"each theta must have {expected}, got arrays of shape {stacked.shape[1:]}")
    rows = np.array([n_samples.get(site, 0) for site in graph.sites], dtype=np.int64)
    return build_model(stacked, columns, loss, graph, rows, **about_schema(schema) | more)


def join_parts(parts: Sequence[FittedModel], graph: Graph) -> FittedModel:
    """Join models fitted in the same rounds into one model of all their sites."""
    if not parts:
        raise ParameterError("there are no models to join")
    first = parts[0]
    for part in parts:
        for name in ("feature_names", "fit_intercept", "classes", "schema", "penalty", "lam"):
            mine, theirs = (getattr(one if hasattr(one, name) else one.fused, name, None) for one in (first, part))
            if mine != theirs:
                raise DataError(
                    f"the models of {first.sites[0]!r} and {part.sites[0]!r} differ in {name.replace('_', ' ')}: "
                    "they are not from the same rounds"
                )
    sites = tuple(site for part in parts for site in part.sites)
    if len(set(sites)) < len(sites) or set(sites) != set(graph.sites):
        both = f"{count(len(sites), 'site')}, and the graph {graph.n_sites}"
        raise DataError(f"the parts have {both}: give each site of the graph once")
    order, names = [sites.index(site) for site in graph.sites], ("coef", "intercept", "n_samples")
    coef, intercept, n = (np.concatenate([getattr(part, name) for part in parts])[order] for name in names)
    scale, mean = np.ones(first.n_features), np.zeros(first.n_features)
    if first.schema is not None:
        scale, mean = first.schema.scale, first.schema.mean if first.fit_intercept else mean
    scaled = coef / scale if first.loss.location else coef * scale
    theta = np.concatenate([scaled, (intercept + coef @ mean)[:, :, None]], axis=2).reshape(len(coef), -1)
    apart = np.abs(theta[graph.edges[:, 0]] - theta[graph.edges[:, 1]]).max(axis=1, initial=0.0)
    origin = {name: value for name, value in (first.origin or {}).items() if name not in ("privacy", "sums")}
    origin |= weakest_promise([part.origin["privacy"] for part in parts if part.origin and "privacy" in part.origin])
    return replace(
        first,
        origin=origin or None,
        sites=graph.sites,
        coef=coef,
        intercept=intercept,
        groups=graph.keep(apart <= SAME).components(),
        n_samples=n,
        graph=graph,
        notes={site: lines for part in parts for site, lines in part.notes.items()},
    )
