"""The way back from parameters of prepared rows to a model in the user's units: the only one, whoever found them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, Index, Mask, count
from fedkin.core import Columns
from fedkin.data import INTERCEPT, Schema
from fedkin.errors import ParameterError
from fedkin.fitting.model.model import FittedModel
from fedkin.graph import Graph
from fedkin.losses import Loss


@dataclass(frozen=True, eq=False)
class ColumnUnits:
    """What the columns of prepared rows are: ``(x - mean) / scale`` of q features, after an intercept if there is one.

    ``classes`` are the labels of the target's codes 0, 1, ...; ``schema`` is what was learned of a table or
    agreed on, where there is one.
    """

    loss: Loss
    fit_intercept: bool
    feature_names: tuple[str, ...]
    mean: Array
    scale: Array
    classes: tuple[Any, ...] | None = None
    target_name: str | None = None
    offset_name: str | None = None
    schema: Schema | None = None

    @classmethod
    def of_schema(cls, schema: Schema, loss: Loss, intercept: bool) -> ColumnUnits:
        """The units of rows that `Schema.rows` prepared."""
        return cls(
            loss,
            intercept,
            schema.names,
            schema.mean if intercept else np.zeros_like(schema.mean),
            schema.scale,
            schema.classes,
            None if schema.target is None else schema.target.name,
            schema.offset,
            schema,
        )

    @property
    def n_outputs(self) -> int:
        """Blocks of coefficients in a theta."""
        return max(self.loss.n_outputs, 1)

    def per_feature(self, value: float) -> Array:
        """A penalty level for each parameter ``(p,)``, 0 for the intercept."""
        levels = np.full((self.n_outputs, len(self.feature_names) + self.fit_intercept), value)
        if self.fit_intercept:
            levels[:, 0] = 0.0
        return levels.reshape(-1)

    @property
    def intercepts(self) -> Mask:
        """Which of the p parameters are intercepts."""
        return np.asarray(self.per_feature(1.0) == 0.0)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the p parameters, with the label of the class where there are more than two."""
        names = (INTERCEPT, *self.feature_names) if self.fit_intercept else self.feature_names
        if self.n_outputs == 1:
            return names
        labels = range(1, self.n_outputs + 1) if self.classes is None else self.classes[1:]
        return tuple(f"{name} [{label}]" for label in labels for name in names)

    def affine(self) -> tuple[Array, Array]:
        """``A (p, p)`` and ``shift (p,)``: parameters theta of prepared columns are ``A theta + shift`` to the user."""
        return self.columns.A, self.columns.shift

    @property
    def columns(self) -> Columns:
        """The map between prepared columns and the user's."""
        return Columns.from_features(
            self.feature_names,
            self.mean,
            self.scale,
            intercept=self.fit_intercept,
            outputs=self.n_outputs,
            location=self.loss.location,
        )

    def model(self, theta: Array, graph: Graph, n_samples: Index, penalty: str, **more: Any) -> FittedModel:
        """A model with the parameters ``theta (V, p)`` of the sites of ``graph``.

        ``more`` are other attributes of `FittedModel`. Unless it has ``clusters``, sites are of one group when edges
        join them along which their parameters are equal to the bit.
        """
        blocks = theta.reshape(len(theta), self.n_outputs, -1)
        coef, intercept = blocks, np.zeros(blocks.shape[:2])
        if self.fit_intercept:
            coef, intercept = blocks[:, :, 1:] / self.scale, blocks[:, :, 0]
            # sorted out feature by feature, as 0 * mean must stay exactly 0
            intercept = intercept - np.einsum("vkq,q->vk", coef, self.mean)
        elif self.loss.location:
            coef = blocks * self.scale + self.mean
        else:
            coef = blocks / self.scale
        if "clusters" not in more:
            more["clusters"] = graph.equal_groups(theta)
        made = FittedModel(
            sites=graph.sites,
            coef=coef,
            intercept=intercept,
            feature_names=self.feature_names,
            clusters=more.pop("clusters"),
            n_samples=n_samples,
            loss=self.loss,
            penalty=penalty,
            lam=0.0,
            gap=0.0,
            n_iter=0,
            status="converged",
            graph=graph,
            fit_intercept=self.fit_intercept,
            classes=self.classes,
            target_name=self.target_name,
            offset_name=self.offset_name,
            schema=self.schema,
        )
        return replace(made, **more)


def model_from_theta(
    theta: Mapping[Hashable, ArrayLike],
    graph: Graph,
    *,
    schema: Schema,
    loss: Loss,
    intercept: bool,
    n_samples: Mapping[Hashable, int],
    penalty: str = "l1",
    **more: Any,
) -> FittedModel:
    """The model of sites whose parameters were found on rows that `Schema.rows` prepared.

    Parameters
    ----------
    theta : mapping of site to array (p,)
        Parameters in prepared units, for every site of ``graph``.
    graph : Graph
        The sites of the model and the edges that were used; ``Graph.empty([site])`` for a site's own model.
    schema, loss, intercept, penalty
        As the contract has them.
    n_samples : mapping of site to int
        Rows of each site; 0 where it is not known.
    **more
        Other attributes of `FittedModel`: ``lam``, ``gap`` (NaN where nothing is certified), ``n_iter``, ``status``,
        ``clusters``, ``options``, ``selection``, ``notes``. By default, sites are of one group when edges join them
        along which their parameters are equal to the bit.

    Returns
    -------
    FittedModel
        With coefficients in the units of the schema's columns.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.data import Column, Schema
    >>> from fedkin.losses import make_loss
    >>> schema = Schema((Column("age", unit="years", low=20, high=100),), Column("days"))
    >>> model = model_from_theta(
    ...     {"north": [5.0, 2.0]}, fedkin.Graph.empty(["north"]), schema=schema, loss=make_loss("linear"),
    ...     intercept=True, n_samples={"north": 80}, lam=0.1,
    ... )
    >>> model.predict({"age": [60, 100]})
    array([5., 7.])
    """
    units = ColumnUnits.of_schema(schema, loss, intercept)
    absent = [site for site in graph.sites if site not in theta]
    if absent:
        raise ParameterError(f"there are no parameters for {absent[0]!r}, one of the sites of the graph")
    p = units.per_feature(0.0).size
    stacked = np.array([np.asarray(theta[site], dtype=np.float64) for site in graph.sites])
    if stacked.shape != (graph.n_sites, p):
        raise ParameterError(f"each theta must have {count(p, 'parameter')}, got arrays of shape {stacked.shape[1:]}")
    rows = np.array([n_samples.get(site, 0) for site in graph.sites], dtype=np.int64)
    return units.model(stacked, graph, rows, penalty, **more)
