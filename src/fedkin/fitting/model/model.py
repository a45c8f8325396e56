"""A fitted model: parameters for every site, predictions, and a directory of open files that keeps them."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkin import __version__
from fedkin._base import Array, Index, count, html_card, some_of
from fedkin.data import HasSites, Schema, columns_of, raise_findings
from fedkin.errors import ParameterError, SolverError
from fedkin.fitting.model.files import (
    COEFFICIENTS_FILE,
    EDGES_FILE,
    OPTIONAL_FILES,
    CoefficientTable,
    Content,
    coefficients_csv,
    column_name,
    edges_csv,
    json_text,
    write_directory,
)
from fedkin.fitting.model.kin_answers import KinAnswers
from fedkin.fitting.model.kin_files import KinField, kin_files
from fedkin.fitting.model.new_rows import feature_matrix, is_table, offset_column, position_of, site_positions
from fedkin.graph import Graph
from fedkin.losses import Loss, describe_loss


@dataclass(frozen=True, eq=False, repr=False)
class FittedModel(KinAnswers, HasSites):
    """What a fit found: a model for every site, and the groups of sites that turned out to be alike.

    Attributes
    ----------
    sites : tuple of V ids
    coef : array (V, k, q)
        Coefficients in the units of the features. k is 1, or the number of classes less one for more than two classes
        (the first class is the reference). For the mean loss, the means.
    intercept : array (V, k)
        Zeros when the fit had none.
    feature_names : tuple of q str
    clusters : int array (V,)
        Group of each site, numbered by first appearance. With kin: the groups that are resolved; where none are,
        every site is on its own. Fused, with edge selection: sites joined by kept edges. Without it: sites joined
        by edges along which their parameters came out exactly equal.
    n_samples : int array (V,)
        Rows that each site was fitted on.
    loss : Loss
    penalty : str
        "none" with kin, where ``lam`` is 0.
    lam : float
        On the scale of the objective; with ``standardize`` it refers to standardised features.
    gap : float
        Relative duality gap: how far the objective can be from its minimum. NaN with kin, which minimises nothing.
    n_iter : int
    status : "converged" | "iteration_limit" | "interrupted"
    graph : Graph
        The graph that was used, after edge selection if there was one. With kin: the graph that was given, or no edges.
    fit_intercept : bool
    classes : tuple or None
        Class labels in the order of the columns of `predict_proba`; None for regression.
    target_name, offset_name : str or None
        `offset_name` is None when the fit had no offset.
    options : mapping
        The options of the fit, in plain values.
    selection : mapping or None
        Summary of the edge selection.
    notes : mapping {site: tuple of str}
        What had to be done about single sites.
    fedkin_version : str
    origin : mapping or None
        Where the model comes from, if not from rows: ``{"from": "summaries", "rounds": 3}`` and what was promised.
    schema : Schema or None
        What the columns of a table must be: what a fit has inferred from its table, or what sites have
        agreed on in a contract; None for rows that came as arrays. With one, tables to predict hold the columns of
        the schema (``ward``), while `feature_names` and `coef` are of the encoded ones (``ward=B``).
    kin : Kin or None
        What was found about the sites, with parameters in the units of `coef`, where the method was kin. Of a model
        that was loaded it is read when it is asked for.
    comparison : mapping or None
        How Local, Global, site intercepts and this method did on held-out rows, in plain values.
    history : mapping or None
        How the fit came about, in plain values, for its report: the curve of the cross-validation (``choice``), groups
        along the path (``path``), edges that were dropped, the digest of the data, the command.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit_federation
    >>> X = [[0.0], [1.0], [2.0]]
    >>> fed = fedkin.Federation({"a": (X, [1.0, 3.0, 5.0]), "b": (X, [0.0, 2.0, 4.0])})
    >>> model = fit_federation(fed, None, FitOptions(lam=0.0))
    >>> model.predict([[10.0]], "a").round(6)
    array([21.])
    """

    sites: tuple[Hashable, ...]
    coef: Array
    intercept: Array
    feature_names: tuple[str, ...]
    clusters: Index
    n_samples: Index
    loss: Loss
    penalty: str
    lam: float
    gap: float
    n_iter: int
    status: str
    graph: Graph
    fit_intercept: bool = True
    classes: tuple[Any, ...] | None = None
    target_name: str | None = None
    offset_name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    selection: Mapping[str, Any] | None = None
    notes: Mapping[Hashable, tuple[str, ...]] = field(default_factory=dict)
    fedkin_version: str = __version__
    schema: Schema | None = None
    origin: Mapping[str, Any] | None = None
    kin: KinField = KinField()  # noqa: RUF009
    comparison: Mapping[str, Any] | None = None
    history: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        wrong = ~(np.isfinite(self.coef).all(axis=(1, 2)) & np.isfinite(self.intercept).all(axis=1))
        if wrong.any():
            raise SolverError(
                f"the parameters of site {self.sites[int(np.argmax(wrong))]!r} are not finite, so there is no model: "
                "look for columns or targets of extreme size, or take another loss"
            )

    # --- looking at it ----------------------------------------------------------------------------------------

    @property
    def n_features(self) -> int:
        """Number of features q."""
        return len(self.feature_names)

    @property
    def n_clusters(self) -> int:
        """Number of groups of sites."""
        return int(self.clusters.max()) + 1

    def groups(self) -> tuple[tuple[Hashable, ...], ...]:
        """The sites of each group, in the order of the group numbers.

        Examples
        --------
        >>> import fedkin
        >>> from fedkin.fitting import FitOptions, fit_federation
        >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
        >>> fit_federation(fed, None, FitOptions(loss="mean", lam=0.02, select="none")).groups()
        ((0, 1), (2, 3))
        """
        members: list[list[Hashable]] = [[] for _ in range(self.n_clusters)]
        for site, label in zip(self.sites, self.clusters.tolist(), strict=True):
            members[label].append(site)
        return tuple(tuple(group) for group in members)

    def part(self, sites: Iterable[Hashable]) -> FittedModel:
        """The model of some of the sites: what a site keeps for itself, or what several have agreed to show.

        It predicts, and can be saved, on its own. Nothing in it is about the other sites, except ``lam``, the number
        of edges in `selection`, and that groups were found together with them.

        Parameters
        ----------
        sites : iterable of ids
            In the order that they shall have; `UnknownSiteError` for one that the model does not have.

        Examples
        --------
        >>> import fedkin
        >>> from fedkin.fitting import FitOptions, fit_federation
        >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
        >>> model = fit_federation(fed, None, FitOptions(loss="mean", lam=0.02, select="none"))
        >>> bool(model.part([3]).predict([[0.0]]) == model.predict([[0.0]], 3))
        True
        """
        chosen = [position_of(site, self.index) for site in sites]
        if not chosen:
            raise ParameterError("a model needs at least one site, got none")
        kept = tuple(self.sites[u] for u in chosen)
        if len(set(kept)) < len(kept):
            raise ParameterError("a site is named twice")
        labels = {label: k for k, label in enumerate(dict.fromkeys(self.clusters[chosen].tolist()))}
        return replace(
            self,
            sites=kept,
            coef=self.coef[chosen],
            intercept=self.intercept[chosen],
            clusters=np.array([labels[label] for label in self.clusters[chosen].tolist()], dtype=np.int64),
            n_samples=self.n_samples[chosen],
            graph=self.graph.subset(kept),
            notes={site: lines for site, lines in self.notes.items() if site in kept},
            kin=None if self.kin is None else self.kin.part(np.array(chosen)),
            comparison=None,
            history=None,
        )

    def coefficients(self) -> dict[str, list[Any]]:
        """The coefficients as columns: site, cluster, class (with more than two), intercept, one column per feature.

        ``pandas.DataFrame(model.coefficients())`` makes a table of it. A feature that is called like one of the
        leading columns gets the prefix ``feature:``.
        """
        k = self.coef.shape[1]
        columns: dict[str, list[Any]] = {
            "site": [site for site in self.sites for _ in range(k)],
            "cluster": np.repeat(self.clusters, k).tolist(),
        }
        if k > 1:
            assert self.classes is not None
            columns["class"] = list(self.classes[1:]) * self.n_sites
        if self.fit_intercept:
            columns["intercept"] = self.intercept.reshape(-1).tolist()
        for number, name in enumerate(self.feature_names):
            columns[column_name(name)] = self.coef[:, :, number].reshape(-1).tolist()
        return columns

    def __repr__(self) -> str:
        groups, sites = count(self.n_clusters, "group"), count(self.n_sites, "site")
        if self.kin is not None:
            found = f"in {groups}" if self.kin.resolved else "no groups resolved"
            return f"FittedModel({self.loss.name}, kin, {sites}, {found})"
        return f"FittedModel({self.loss.name}, {sites} in {groups}, lam={self.lam:.4g}, gap={self.gap:.1e})"

    def _repr_html_(self) -> str:
        facts = {
            "loss": self.loss.name + (f", target {self.target_name}" if self.target_name else ""),
            "sites": f"{self.n_sites}, {int(self.n_samples.sum())} rows",
            "features": f"{self.n_features}: {some_of(self.feature_names)}",
        }
        if self.kin is None:
            facts |= {"lam": f"{self.lam:.4g}", "relative gap": f"{self.gap:.1e} ({self.status})"}
        if self.comparison:
            facts["comparison"] = str(self.comparison.get("verdict", ""))
        few = 1 < self.n_clusters < self.n_sites
        members = sorted(self.groups(), key=len, reverse=True) if few else []
        lines = [(k + 1, len(group), some_of(group)) for k, group in enumerate(members)]
        if not few:
            facts["groups"] = "one" if self.n_clusters == 1 else "none resolved"
        return html_card("FittedModel", facts, ("group", "sites", "members"), lines)

    # --- predictions ------------------------------------------------------------------------------------------

    def predict(self, X: object, site: object = None, offset: ArrayLike | None = None) -> NDArray[Any]:
        """Predictions for rows of known sites.

        Parameters
        ----------
        X : array (n, q), or a table with the features among its columns
            Rows to predict. With a `schema`, a table holds its columns: levels as they are, an offset if it has one.
        site : id, or list or array of n ids
            The site of all rows, or of each row. It may be left out when the model has one site only.
        offset : array (n,), optional
            Needed when, and only when, the fit had an offset.

        Returns
        -------
        array (n,)
            Mean responses, or the likeliest classes. For the mean loss, the means ``(n, q)``.

        Raises
        ------
        UnknownSiteError
            For a site that was not part of the fit.
        """
        if self.classes is not None:
            chosen = self.predict_proba(X, site, offset).argmax(axis=1)
            return np.asarray(_label_array(self.classes)[chosen])
        return self._responses(X, site, offset)

    def predict_proba(self, X: object, site: object = None, offset: ArrayLike | None = None) -> Array:
        """Probabilities ``(n, C)`` of the classes, columns in the order of `classes`; arguments as in `predict`.

        With kin they are averaged over what is open about the parameters of the row's site: nearer to equal than those
        at the estimates, the more so the less is known. With two classes that is exact for normal parameters, with more
        it is an approximation.
        """
        if self.classes is None:
            raise ParameterError(
                f"a model with the {self.loss.name} loss has no classes and so no probabilities: use predict"
            )
        mean = self._responses(X, site, offset)
        return np.column_stack([1.0 - mean, mean]) if mean.ndim == 1 else mean

    def linear_predictor(self, X: object, site: object = None, offset: ArrayLike | None = None) -> Array:
        """``X theta + offset`` at the sites' estimates, shape ``(n, k)``; arguments as in `predict`."""
        return self._predictor(*self._checked_rows(X, site, offset))

    def averaged_predictor(self, X: object, site: object = None, offset: ArrayLike | None = None) -> Array:
        """Predictors ``(n, k)`` whose response is what `predict_proba` gives: log odds against the first class.

        Those of `linear_predictor`, but for classes with kin. Arguments as in `predict`.
        """
        if self.loss.rowwise is None:
            raise ParameterError(f"the {self.loss.name} loss has no predictors: use predict")
        rows, position, shift = self._checked_rows(X, site, offset)
        eta = self._predictor(rows, position, shift)
        if self.kin is None:
            return eta
        return self.loss.rowwise.averaged_predictor(eta, self._open_predictor(rows, position))

    def _predictor(self, rows: Array, position: Index, shift: Array | None) -> Array:
        eta = np.einsum("nq,nkq->nk", rows, self.coef[position]) + self.intercept[position]
        return np.asarray(eta if shift is None else eta + shift[:, None])

    def _responses(self, X: object, site: object, offset: ArrayLike | None) -> Array:
        if self.loss.rowwise is not None:
            return self.loss.rowwise.response(self.averaged_predictor(X, site, offset))
        rows, position, shift = self._checked_rows(X, site, offset)
        if self.fit_intercept:
            rows = np.column_stack([np.ones(len(rows)), rows])
        out = np.empty((len(rows), self.n_features) if self.loss.location else len(rows))
        for u in np.unique(position):
            own = position == u
            out[own] = self.loss.predict(self._theta(u), rows[own], None if shift is None else shift[own])
        return out

    def _theta(self, u: int) -> Array:
        """The parameter of site number u of a loss with one block of coefficients, intercept first."""
        return np.concatenate([self.intercept[u], self.coef[u, 0]]) if self.fit_intercept else self.coef[u, 0]

    def _checked_rows(self, X: object, site: object, offset: ArrayLike | None) -> tuple[Array, Index, Array | None]:
        if offset is None and self.schema is not None and is_table(X):
            raise_findings(self.schema.check(columns := columns_of(X), target=False))
            offset = self.schema.offset_of(columns)
        rows = feature_matrix(X, self.feature_names, self.schema)
        position = site_positions(site, len(rows), self.index)
        return rows, position, offset_column(offset, len(rows), needed=self.offset_name is not None)

    # --- files ------------------------------------------------------------------------------------------------

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the model to a directory in open formats (JSON, CSV, NumPy); `load` reads it back to the bit.

        Parameters
        ----------
        directory : path
            Made if need be. A model that is there already is kept until the new one is whole (`load` finds the older
            one if a crash comes between the two renames); a directory that holds anything else is refused.

        Raises
        ------
        ModelFileError
            If the place is taken by something that is not a model, or cannot be written.

        Notes
        -----
        A custom loss is saved by name only: see `load`.
        """
        table = CoefficientTable(self.sites, self.clusters, self.n_samples, self.intercept, self.coef)
        others: dict[str, Content] = {
            COEFFICIENTS_FILE: coefficients_csv(table, self.feature_names, self.classes),
            EDGES_FILE: edges_csv(self.sites, self.graph),
        }
        if self.kin is not None:
            others |= kin_files(self.kin)
        more = {name: getattr(self, attribute) for attribute, name in OPTIONAL_FILES.items()}
        others |= {name: json_text(values) for name, values in more.items() if values is not None}
        write_directory(Path(directory), self._description(), others)

    def _description(self) -> dict[str, Any]:
        """What `save` keeps beside the tables, and `load` reads back."""
        return {
            **{name: getattr(self, name) for name in STORED},
            "loss": describe_loss(self.loss),
            "n_sites": self.n_sites,
            "n_clusters": self.n_clusters,
            "target": self.target_name,
            "offset": self.offset_name,
            "features": list(self.feature_names),
            "classes": None if self.classes is None else list(self.classes),
            "options": dict(self.options),
            "selection": None if self.selection is None else dict(self.selection),
            "origin": None if self.origin is None else dict(self.origin),
            "schema": None if self.schema is None else self.schema.plain(),
            "notes": [[self.index[site], list(lines)] for site, lines in self.notes.items()],
        }


#: Entries of a model's file that have the name of an attribute, and their types.
STORED = {
    "fedkin_version": str,
    "penalty": str,
    "lam": float,
    "gap": float,
    "n_iter": int,
    "status": str,
    "fit_intercept": bool,
}


def _label_array(classes: tuple[Any, ...]) -> NDArray[Any]:
    made = np.array(classes)
    return made if made.dtype.kind in "biuf" else np.fromiter(classes, dtype=object, count=len(classes))
