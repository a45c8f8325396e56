"""A fitted model: parameters for every site, predictions with their uncertainty, and models for new sites."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkin import __version__
from fedkin._base import Array, Index, check_choice, check_level, count, html_card, some_of
from fedkin.data import Federation, HasSites, Schema, columns_of, raise_findings
from fedkin.errors import ParameterError, SolverError
from fedkin.fitting.boosting import CODES, Boosting
from fedkin.fitting.inputs import (
    Unseen,
    feature_matrix,
    in_order_of_appearance,
    is_table,
    offset_column,
)
from fedkin.fitting.newsite import NewSite, about_new, join_site
from fedkin.fitting.siterows import SiteRows, site_positions
from fedkin.fitting.survival import Baselines
from fedkin.graph import Graph
from fedkin.kin import Contrast, Kin, Kind, Predicted, Sites
from fedkin.kin.inference import Interval
from fedkin.losses import Loss

Each = ArrayLike | None  # a number per row
SiteCodes = tuple[tuple[float, ...], ...] | None
#: Leading columns of tables of coefficients.
_LEADING = ("site", "site_type", "group", "n_samples", "class", "intercept")


def column_name(feature: str) -> str:
    """Return the name of a feature in tables of coefficients, where those of leading columns get a prefix."""
    return f"feature:{feature}" if feature in _LEADING else feature


@dataclass(frozen=True)
class FusedFit:
    """How the fused estimator was fitted.

    Attributes
    ----------
    penalty : str
    lam : float
        On the scale of the objective; with ``standardize`` it refers to standardised features.
    gap : float
        Relative duality gap: an upper bound on the distance of the objective from its minimum. NaN if not certified.
    n_iter : int
        Iterations, or rounds.
    status : "converged" | "iteration_limit" | "interrupted"
    selection : mapping or None
        Summary of the edge selection.
    """

    penalty: str
    lam: float
    gap: float = float("nan")
    n_iter: int = 0
    status: str = "converged"
    selection: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class FittedModel(HasSites):
    """A fitted model: parameters for each site, and groups of similar sites.

    Attributes
    ----------
    sites : tuple of V ids
    coef : array (V, k, q)
        In the units of the features. k is 1, or the number of classes less one for more than two classes (the first
        class is the reference). For the mean loss, the means.
    intercept : array (V, k)
        Zeros when the fit had none.
    feature_names : tuple of q str
    groups : int array (V,)
        Groups numbered by first appearance. Kin: the resolved ones; if there are none, each site is its own group.
        Fused: sites joined by edges along which their estimates are exactly equal.
    n_samples : int array (V,)
        Rows that each site was fitted on.
    loss : Loss
    graph : Graph
        The graph used, after any edge selection. With kin: the given graph, or no edges.
    fit_intercept : bool
    classes : tuple or None
        Class labels in the order of the columns of `predict_proba`; None for regression.
    target_name, offset_name : str or None
        `offset_name` is None when the fit had no offset.
    kin, fused : Kin or None, FusedFit or None
        The result of the method, with parameters in the units of `coef`.
    options : mapping
        In plain values.
    notes : mapping {site: tuple of str}
        Notes on single sites, such as an added ridge.
    fedkin_version : str
    schema : Schema or None
        Columns of tables, inferred or agreed on in a contract; None for rows that came as arrays. Tables to predict
        have its columns (``ward``), `feature_names` are those of the encoded ones (``ward=B``).
    origin : mapping or None
        Origin of the model if not from rows: ``{"from": "summaries", "rounds": 3}``, and any guarantees.
    comparison : mapping or None
        Errors of Local, Global, site intercepts and this method on held-out rows, in plain values.
    baseline : Baselines or None
        For losses with hazards: each site's baseline, if rows were available; see `with_baseline`.
    history : mapping or None
        Records for the report, in plain values: cross-validation, path, dropped edges, digest of the data, command.
    boosting : Boosting or None
        The boosting model whose prediction is the last of the features.
    site_codes : tuple of V tuples of numbers, or None
        Codes by which the boosting model tells sites apart, if it knows them; empty for a site that it does not know.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit
    >>> X = [[0.0], [1.0], [2.0]]
    >>> fed = fedkin.Federation({"a": (X, [1.0, 3.0, 5.0]), "b": (X, [0.0, 2.0, 4.0])})
    >>> model = fit(fed, None, FitOptions(method="fused", lam=0.0))
    >>> model.predict([[10.0]], "a").round(6)
    array([21.])
    """

    sites: tuple[Hashable, ...]
    coef: Array
    intercept: Array
    feature_names: tuple[str, ...]
    groups: Index
    n_samples: Index
    loss: Loss
    graph: Graph
    fit_intercept: bool = True
    classes: tuple[Any, ...] | None = None
    target_name: str | None = None
    offset_name: str | None = None
    kin: Kin | None = None
    fused: FusedFit | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[Hashable, tuple[str, ...]] = field(default_factory=dict)
    fedkin_version: str = __version__
    schema: Schema | None = None
    origin: Mapping[str, Any] | None = None
    comparison: Mapping[str, Any] | None = None
    history: Mapping[str, Any] | None = None
    baseline: Baselines | None = None
    boosting: Boosting | None = None
    site_codes: SiteCodes = None
    _lacks: ClassVar[str] = "was not part of the fit, so it has no model"
    _remedy: ClassVar[str] = (
        '. Fit again with rows of this site, or predict it from the population of sites: unseen="population" in Python '
        "(also for GroupKFold), --new-site of fedkin predict. cv=fedkin.WithinSiteKFold() tests on rows of known sites"
    )

    def __post_init__(self) -> None:
        wrong = ~(np.isfinite(self.coef).all(axis=(1, 2)) & np.isfinite(self.intercept).all(axis=1))
        if wrong.any():
            named = f"the parameters of site {self.sites[int(np.argmax(wrong))]!r} are not finite"
            raise SolverError(f"{named}: look for columns or targets of extreme size, or choose another loss")

    @property
    def n_features(self) -> int:
        """Number of features q."""
        return len(self.feature_names)

    @property
    def n_groups(self) -> int:
        """Number of groups of sites."""
        return int(self.groups.max()) + 1

    @property
    def status(self) -> str:
        """How the solver ended: "converged", "iteration_limit" or "interrupted"."""
        return "converged" if self.fused is None else self.fused.status

    def members(self) -> tuple[tuple[Hashable, ...], ...]:
        """Return the sites of each group, in the order of the group numbers."""
        return tuple(tuple(self.sites[u] for u in np.flatnonzero(self.groups == k)) for k in range(self.n_groups))

    def part(self, sites: Iterable[Hashable]) -> FittedModel:
        """Return the model of some of the sites, in this order, without anything about the other sites.

        Examples
        --------
        >>> import fedkin
        >>> from fedkin.fitting import FitOptions, fit
        >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
        >>> model = fit(fed, None, FitOptions(method="fused", loss="mean", lam=0.02, select="none"))
        >>> model.members(), model.part([3]).sites
        (((0, 1), (2, 3)), (3,))
        """
        chosen = [self.position(site) for site in sites]
        if not chosen or len(set(chosen)) < len(chosen):
            raise ParameterError("name at least one site, and each site once")
        kept = tuple(self.sites[u] for u in chosen)
        return replace(
            self,
            sites=kept,
            coef=self.coef[chosen],
            intercept=self.intercept[chosen],
            groups=in_order_of_appearance(self.groups[chosen]),
            n_samples=self.n_samples[chosen],
            graph=self.graph.subset(kept),
            notes={site: lines for site, lines in self.notes.items() if site in kept},
            kin=None if self.kin is None else self.kin.part(np.array(chosen)),
            baseline=None if self.baseline is None else self.baseline.take(chosen),
            comparison=None,
            history=None,
            site_codes=None if self.site_codes is None else tuple(self.site_codes[u] for u in chosen),
        )

    def coefficients(self) -> dict[str, list[Any]]:
        """Return the coefficients as columns: site, group, class (with more than two), intercept, then the features.

        ``pandas.DataFrame(model.coefficients())`` is a table. A feature with the name of another column, or of one in
        ``coefficients.csv``, gets the prefix ``feature:``.
        """
        k = self.coef.shape[1]
        columns: dict[str, list[Any]] = {
            "site": [site for site in self.sites for _ in range(k)],
            "group": np.repeat(self.groups, k).tolist(),
        }
        if k > 1:
            assert self.classes is not None
            columns["class"] = list(self.classes[1:]) * self.n_sites
        if self.fit_intercept:
            columns["intercept"] = self.intercept.reshape(-1).tolist()
        values = self.coef.reshape(-1, self.n_features).T.tolist()
        return columns | dict(zip(map(column_name, self.feature_names), values, strict=True))

    def __repr__(self) -> str:
        groups, sites = count(self.n_groups, "group"), count(self.n_sites, "site")
        if self.kin is not None:
            found = f"in {groups}" if self.kin.resolved else "no groups resolved"
            return f"FittedModel({self.loss.name}, kin, {sites}, {found})"
        how = "" if self.fused is None else f", lam={self.fused.lam:.4g}, gap={self.fused.gap:.1e}"
        return f"FittedModel({self.loss.name}, {sites} in {groups}{how})"

    def _repr_html_(self) -> str:
        verdict = (self.comparison or {}).get("verdict")
        facts: dict[str, object] = {"decision": str(verdict)} if verdict else {}
        facts |= {
            "loss": self.loss.name + (f", target {self.target_name}" if self.target_name else ""),
            "data": f"{count(self.n_sites, 'site')}, {count(int(self.n_samples.sum()), 'row')}",
            "features": f"{self.n_features}: {some_of(self.feature_names)}",
        }
        if self.fused is not None:
            facts |= {"lam": f"{self.fused.lam:.4g}", "relative gap": f"{self.fused.gap:.1e} ({self.status})"}
        members = []
        if 1 < self.n_groups < self.n_sites:
            members = sorted(self.members(), key=len, reverse=True)
        elif self.kin is not None and self.kin.within is not None:
            facts["districts"] = len(self.kin.districts)
        else:
            facts["groups"] = "one" if self.n_groups == 1 else "none resolved"
        lines = [(k, len(group), some_of(group)) for k, group in enumerate(members, 1)]
        return html_card("FittedModel", facts, ("group", "sites", "members"), lines)

    # --- predictions ------------------------------------------------------------------------------------------

    def predict(self, X: object, site: object = None, offset: Each = None, *, unseen: Unseen = "raise") -> NDArray[Any]:
        """Predict rows.

        Parameters
        ----------
        X : array (n, q), or a table with the features among its columns
            With a `schema`, a table with its columns: unencoded levels, and the offset if any.
        site : id, or list or array of n ids
            The site of all rows, or of each row. It may be left out when the model has one site only.
        offset : array (n,), optional
            Needed when, and only when, the fit had an offset.
        unseen : "raise" or "population"
            Whether to refuse rows of sites that were not part of the fit, or to predict them by the `population`.

        Returns
        -------
        array (n,)
            Mean responses, or the likeliest classes. For the mean loss, the means ``(n, q)``; for the Cox loss, hazards
            relative to a row with the features ``baseline.at``.
        """
        if self.classes is None:
            return self.at(X, site, offset, unseen).responses()
        labels = np.array(self.classes)
        if labels.dtype.kind not in "biuf":
            labels = np.fromiter(self.classes, dtype=object, count=len(self.classes))
        return np.asarray(labels[self.predict_proba(X, site, offset, unseen=unseen).argmax(axis=1)])

    def predict_proba(self, X: object, site: object = None, offset: Each = None, *, unseen: Unseen = "raise") -> Array:
        """Return probabilities ``(n, C)`` in the order of `classes`; arguments as in `predict`.

        With kin they are averaged over the uncertainty in each site's parameters, so they are less extreme than those
        at the estimates, in particular for sites with few rows. The average is approximate for more than two classes.
        """
        if self.classes is None:
            named = f"a model with the {self.loss.name} loss"
            raise ParameterError(f"{named} has no classes, so it has no probabilities: use predict")
        return self.at(X, site, offset, unseen).probabilities()

    def predict_survival(
        self,
        X: object,
        site: object = None,
        times: ArrayLike = (),
        offset: Each = None,
        *,
        level: float | None = None,
        unseen: Unseen = "raise",
    ) -> Array:
        """Return survival probabilities at T times: ``(n, T)``, or ``(3, n, T)`` with the ends of intervals.

        Arguments as in `predict`. Each site's curve is constant after its last time; unseen sites have the pooled
        baseline (`Baselines.pooled`). Kin has intervals at a ``level``; for unseen sites they include the variance
        between sites.
        """
        check_level(0.95 if level is None else level)
        if self.baseline is None:
            hint = "with_baseline(rows) computes them from rows (survival curves are for the cox loss)"
            raise ParameterError(f"the model has no baseline hazards: {hint}")
        return self.at(X, site, offset, unseen).survival(np.atleast_1d(np.asarray(times, dtype=np.float64)), level)

    def with_baseline(self, rows: Federation) -> FittedModel:
        """Return the model of the sites of these rows, with baseline hazards, which summaries and rounds lack."""
        part = self.part(rows.sites)
        return replace(part, baseline=Baselines.from_rows(self.loss, part.coef[:, 0], rows))

    def linear_predictor(self, X: object, site: object = None, offset: Each = None) -> Array:
        """Return ``X theta + offset`` at the sites' estimates, shape ``(n, k)``; arguments as in `predict`."""
        return self.at(X, site, offset).predictors()

    def averaged_predictor(
        self, X: object, site: object = None, offset: Each = None, *, unseen: Unseen = "raise"
    ) -> Array:
        """Return predictors ``(n, k)`` whose response is `predict_proba`: log odds against the first class.

        They equal `linear_predictor`, except for classes with kin. Arguments as in `predict`.
        """
        return self.at(X, site, offset, unseen).averaged_predictors()

    def predict_interval(
        self,
        X: object,
        site: object = None,
        offset: Each = None,
        *,
        level: float = 0.95,
        interval: Interval = "mean",
        unseen: Unseen = "raise",
    ) -> Predicted:
        """Predict with intervals, for the mean response or for new observations.

        Parameters
        ----------
        X, site, offset, unseen
            As in `predict`. Intervals for unseen sites include the differences between sites.
        level : float in (0, 1)
            Nominal coverage of the intervals, on average over sites.
        interval : "mean" or "observation"
            Intervals for observations include their noise (linear and Poisson losses). For classes, the mean is the
            probability of the second class, as in `predict_proba`; if it is in a tail of its posterior distribution,
            the interval ends at the mean.

        Examples
        --------
        >>> from fedkin.datasets import paper_design
        >>> from fedkin.fitting import fit
        >>> design = paper_design(n_sites=8, n_samples=30, n_features=2, n_clusters=2, seed=0)
        >>> found = fit(design.federation).predict_interval([[1.0, 0.0]], 3)
        >>> bool(found.low < found.mean < found.high)
        True
        """
        check_choice("interval", interval, ("mean", "observation"))
        self.the_kin("intervals")
        return self.at(X, site, offset, unseen).intervals(level, interval)

    def features_of(self, X: object, site: object = None, unseen: Unseen | None = None) -> tuple[Array, Index]:
        """Return the features ``(n, q)``, including the prediction of any boosting model, and the sites' positions.

        Without ``unseen`` the rows are those of a site that the boosting model does not know.
        """
        own = self.feature_names if self.boosting is None else self.feature_names[:-1]
        rows = feature_matrix(X, own, self.schema)
        position = np.full(len(rows), self.n_sites) if unseen is None else site_positions(self, site, len(rows), unseen)
        if self.boosting is not None:
            unknown, codes = [np.nan] * CODES, None
            if self.site_codes is not None:
                codes = np.array([*(one or unknown for one in self.site_codes), unknown])
                codes = codes[np.minimum(position, self.n_sites)]
            rows = np.column_stack([rows, self.boosting.predict(rows, codes)])
        return rows, position

    def with_ones(self, rows: Array) -> Array:
        """Return the columns ``(n, p)`` of the parameters."""
        rows = rows if self.baseline is None else rows - self.baseline.at  # hazards are relative to this row
        return np.column_stack([np.ones(len(rows)), rows]) if self.fit_intercept else rows

    @cached_property
    def population(self) -> FittedModel:
        """The model of a site without rows, used to predict unseen sites.

        With kin it is the result of `join`. A fused model uses the unweighted mean of the sites' parameters.
        """
        if self.kin is not None:
            return self.join().model
        mean: dict[str, Any] = {name: getattr(self, name).mean(axis=0, keepdims=True) for name in ("coef", "intercept")}
        baseline = None if self.baseline is None else self.baseline.pooled()
        return replace(self.part(self.sites[:1]), **mean, **about_new(self, "new site", 0), baseline=baseline)

    @cached_property
    def unseen_models(self) -> tuple[FittedModel, ...]:
        """Models of a site without rows: for new districts, and for each district of the fit by number."""
        known = {} if self.kin is None else self.kin.districts
        return (self.population, *(self.join(within=one).model for one in sorted(known, key=known.__getitem__)))

    def theta(self, u: int) -> Array:
        """Return the parameters of site number u, intercept first, for a loss with one block of coefficients."""
        return np.concatenate([self.intercept[u], self.coef[u, 0]]) if self.fit_intercept else self.coef[u, 0]

    def at(self, X: object, site: object = None, offset: Each = None, unseen: Unseen = "raise") -> SiteRows:
        """Return rows with the positions of their sites, checked; arguments as in `predict`."""
        if offset is None and self.schema is not None and is_table(X):
            raise_findings(self.schema.check(columns := columns_of(X), target=False))
            offset = self.schema.offset_of(columns)
        rows, position = self.features_of(X, site, unseen)
        return SiteRows(self, rows, position, offset_column(offset, len(rows), needed=self.offset_name is not None))

    # --- inference, with kin ------------------------------------------------------------------------------------

    def the_kin(self, what: str) -> Kin:
        """Return `kin`, or refuse ``what``, which needs it."""
        if self.kin is not None:
            return self.kin
        raise ParameterError(
            f'a fused model has no {what}: fit with method="kin" (or see fedkin.fitting.naive_confint)'
        )

    def confint(self, level: float = 0.95, kind: Kind = "average") -> Array:
        """Return intervals ``(V, p, 2)`` of the sites' parameters, intercept first; see `Kin.confint`."""
        return self.the_kin("intervals").confint(level, kind)

    def summary(
        self, level: float = 0.95, *, site: Hashable | None = None, group: int | None = None, kind: Kind = "average"
    ) -> str:
        """Return a summary of the result, a site or a group as text; see `Kin.summary`."""
        return self.the_kin("summary").summary(level, site=site, group=group, kind=kind)

    def contrast(
        self,
        one: Sites,
        other: Sites | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        kind: Kind = "average",
    ) -> Contrast:
        """Compare sites or groups; see `Kin.contrast`."""
        return self.the_kin("contrasts").contrast(one, other, weights=weights, kind=kind)

    def join(self, site: object = None, *, name: Hashable = "new site", within: Hashable = None) -> NewSite:
        """Return a model for a site that was not part of the fit.

        Parameters
        ----------
        site : Rows, (X, y), table, Summary or None
            Its labelled rows, with the features of the model (in a table also the target and any offset); its summary,
            made like those of the fit; or None if it has no rows. Then its model is the unweighted mean of the others,
            and its intervals reflect how much sites differ.
        name : id
            Name of the site.
        within : id, optional
            Its district, where the sites of the fit are within districts.

        Examples
        --------
        >>> from fedkin.datasets import paper_design
        >>> from fedkin.fitting import fit
        >>> design = paper_design(n_sites=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
        >>> model = fit(design.federation.subset(range(1, 12)))
        >>> new = model.join(design.federation[0], name="zero")
        >>> new.model.sites, bool(new.groups.max() > 0.9)
        (('zero',), True)
        """
        self.the_kin("models for new sites")
        return join_site(self, site, name, within)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the model to a directory in open formats (JSON, NumPy, CSV); `load` restores it exactly.

        The directory is created if needed. An existing model is kept until the new one is complete (after a crash
        between the two renames, `load` finds the older one). `ModelFileError` is raised if the directory holds anything
        else or cannot be written. A custom loss is saved by name only: see `load`.
        """
        from fedkin.fitting.store import save

        save(self, directory)
