"""What all estimators share: the site of each row, rows that come later, predictions that need the site."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils.metadata_routing import MetadataRequest
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from fedkin._base import Array, listed
from fedkin.core import RunningSums
from fedkin.data import Column, Federation, Schema, Spline, with_curves
from fedkin.errors import DataError, FedkinWarning, ParameterError
from fedkin.fitting.fused import silent
from fedkin.fitting.methods import method_for, warn_of_rows, with_covariates
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import AUTO, FitOptions, Unseen, with_exposure
from fedkin.fitting.parts import site_concordances, survival_target
from fedkin.fitting.preparation import Prepared, prepare, with_fixed_curves
from fedkin.fitting.scoring import AtSites, refuse_text, request_all, split_column
from fedkin.graph import Graph
from fedkin.kin import Covariates, hint_of
from fedkin.losses import LOSSES, Loss, loss_kind, loss_names

Sites = ArrayLike | Hashable | None

#: The site of all rows when none are named.
SINGLE_SITE = "all"
_NO_SITE = (
    "fit was not told the sites of the rows, so it made ONE model for all of them: pass site= with an id per row "
    "(cross_val_score, GridSearchCV and the like pass it on only with metadata routing; groups= never reaches a "
    "model), name a column of X with site_column=, or say site='all' if one model is what you want"
)
_SAY_SITE = (
    "the model has {n} sites, so it must be told which one each row belongs to: site= one of {some}, or a list "
    "with an id per row. Where scikit-learn calls it (scoring=, permutation_importance, CalibratedClassifierCV), use "
    "fedkin.SiteScorer with metadata routing, model.at(site), or ids in a column of X that site_column= names"
)


# --- rows so far, for partial_fit -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _SumsSoFar:
    """Sums of least squares over all rows so far, of features less ``shift (q,)``."""

    sums: RunningSums
    shift: Array
    names: tuple[str, ...]
    has_offset: bool

    def with_rows(self, more: Federation) -> _SumsSoFar:
        sums = deepcopy(self.sums)
        came = np.argsort(more.row_order)
        assert more.y is not None
        y = more.y if more.offset is None else more.y - more.offset
        ids: list[Hashable] = [more.sites[u] for u in more.site_index[came].tolist()]
        sums.add(ids, more.X[came] - self.shift, y[came], None if more.weight is None else more.weight[came])
        return replace(self, sums=sums)

    def prepared(self, options: FitOptions) -> Prepared:
        made = prepare(self.sums.summaries(self.names, intercept=options.fit_intercept, seed=options.seed), options)
        mean = made.columns.mean + np.append(np.zeros(int(made.columns.intercept)), self.shift)
        offset = "offset" if self.has_offset else None
        return replace(made, columns=replace(made.columns, mean=mean), offset_name=offset)


@dataclass(frozen=True, eq=False)
class _RowsSoFar:
    """All rows so far."""

    rows: Federation

    def with_rows(self, more: Federation) -> _RowsSoFar:
        """Return the rows of both, as if they had come in one table: the earlier ones first."""
        both = [(one, np.argsort(one.row_order)) for one in (self.rows, more)]
        parts: dict[str, Any] = {}
        for name in ("X", "y", "offset", "weight"):
            values = [getattr(one, name) for one, _ in both]
            if name == "weight" and any(value is not None for value in values):
                values = [np.ones(len(one.X)) if one.weight is None else one.weight for one, _ in both]
            together = [value[came] for value, (_, came) in zip(values, both, strict=True) if value is not None]
            parts[name] = np.concatenate(together) if together else None
        ids = [one.sites[u] for one, came in both for u in one.site_index[came].tolist()]
        features = parts.pop("X"), parts.pop("y")
        return _RowsSoFar(Federation.from_arrays(*features, ids, **parts, feature_names=self.rows.feature_names))

    def prepared(self, options: FitOptions) -> Prepared:
        return prepare(self.rows, options)

    def shortened(self, options: FitOptions, *, quadratic: bool) -> _RowsSoFar | _SumsSoFar:
        """Return sums where they tell everything and take less memory than the rows."""
        rows, folds = self.rows, options.cv_folds if options.chosen == "fused" else 1
        small = len(rows.X) <= rows.n_sites * folds * (rows.n_features + 2)
        if not quadratic or options.solver != "exact" or options.boost or small:
            return self
        # without an intercept a shift of the features would be another model
        shift = np.average(rows.X, axis=0, weights=rows.weight) if options.fit_intercept else 0 * rows.X[0]
        empty = RunningSums(rows.n_features, folds)
        return _SumsSoFar(empty, shift, rows.feature_names, rows.offset is not None).with_rows(rows)


def _weighted(federation: Federation, sample_weight: ArrayLike) -> Federation:
    """Return the federation with weights in the order in which rows came, and without rows of weight 0."""
    weight, n = np.asarray(sample_weight, dtype=np.float64), len(federation.X)
    if weight.shape != (n,):
        raise DataError(f"sample_weight has shape {weight.shape}, expected one number per row: ({n},)")
    wrong = np.flatnonzero(~(np.isfinite(weight) & (weight >= 0)))
    if wrong.size:
        raise DataError(f"row {wrong[0]}: the sample_weight is {weight[wrong[0]]:g}, expected a number of at least 0")
    weight = weight[federation.row_order]
    if not weight.any():
        raise DataError("sample_weight is zero in every row, so no row is left: give some of them a weight")
    if not weight.all():
        federation = federation.take(weight > 0, allow_empty=True)
        federation = federation.subset([u for u, n in zip(federation.sites, federation.n_samples, strict=True) if n])
        weight = weight[weight > 0]
    return federation.replaced(weight=weight)


def _curves(rows: Federation, spline: Spline) -> Schema:
    """Return the schema of arrays some of whose columns, by name or number, have curves."""
    names = rows.feature_names
    keys = {one: names[one] if isinstance(one, int) and -len(names) <= one < len(names) else one for one in spline}
    wanted = {keys[one]: n for one, n in spline.items()} if isinstance(spline, Mapping) else list(keys.values())
    cells = dict(zip(names, rows.X.T, strict=True))
    made = with_curves([Column(name) for name in names], wanted, lambda some: {name: cells[name] for name in some})
    return Schema(made, agreed=False)


# --- what all estimators share ----------------------------------------------------------------------------------


class PerSite:
    """Base of all estimators; before scikit-learn's mixins, whose scores know no sites."""

    loss: str | Loss
    site_column: str | int | None
    unseen: Unseen
    model_: FittedModel
    sites_: tuple[Hashable, ...]
    _metric: ClassVar[Callable[..., float]]
    _auto_loss: ClassVar[str]
    _so_far: _RowsSoFar | _SumsSoFar
    spline: Spline | None
    warm_start: bool
    random_state: int | np.random.RandomState | None
    _options: Callable[[], FitOptions]
    _keep: Callable[[FittedModel], None]
    _checked: Callable[..., tuple[Array, NDArray[Any]]]

    def get_metadata_routing(self) -> MetadataRequest:
        """Return what scikit-learn should pass on: by default all that methods can take."""
        return request_all(super().get_metadata_routing())  # type: ignore[misc]

    def _loss(self) -> str | Loss:
        return self._auto_loss if self.loss == AUTO else self.loss

    def _seed(self) -> int:
        state = self.random_state
        return state.randint(2**31) if isinstance(state, np.random.RandomState) else int(state or 0)

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        site: Sites = None,
        graph: Graph | None = None,
        offset: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        covariates: Covariates | None = None,
        exposure: ArrayLike | None = None,
    ) -> Self:
        """Fit a model for every site.

        Parameters
        ----------
        X : array (n, q)
            Rows of all sites, in any order.
        y : array (n,)
            Targets, or class labels.
        site : array (n,) of ids, or one id
            The site of each row, or of all rows. Without it, and without ``site_column``, all rows are one site,
            and a `FedkinWarning` is given.
        graph : Graph or networkx graph, optional
            Between the sites; all pairs without it.
        offset : array (n,), optional
            Known part of the linear predictor.
        sample_weight : array (n,), optional
            How many rows each row stands for; rows of weight 0 are left out.
        covariates : mapping {site: value, row or {name: value}} or pandas table, optional
            What is known about the sites besides their rows, such as size or region, instead of a graph; its index has
            the sites. See `fedkin.kin.covariate_graph`. An array is in the order of `sites_`.
        exposure : array (n,), optional
            Exposures of counts (person-years, area); their logarithms are added to the offset.
        """
        offset = with_exposure(offset, exposure)
        return self._fitted(None, X, y, site, offset, sample_weight, graph, covariates)

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        site: Sites = None,
        graph: Graph | None = None,
        offset: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        covariates: Covariates | None = None,
    ) -> Self:
        """Add rows to those of earlier fits: of sites that were there, or of new ones.

        Parameters
        ----------
        X, y, site, graph, offset, sample_weight, covariates
            As in `fit`; graph and covariates are about all sites, also those of earlier rows.

        Notes
        -----
        The result is that of `fit` on all rows. For least squares sums over rows add up, and the estimator keeps these
        as soon as they take less memory than the rows; results then agree up to rounding (kin: up to what its sampler
        makes of it), and folds that choose ``lam`` are dealt as rows come. For other losses it keeps the rows.
        """
        return self._fitted(getattr(self, "_so_far", None), X, y, site, offset, sample_weight, graph, covariates)

    def _apart(self, X: Any, site: Sites) -> tuple[Any, Sites]:
        """Return X without the column of sites, and the sites: those given, or those of the column."""
        if self.site_column is None:
            return X, site
        rest, ids = split_column(X, self.site_column)
        if ids is None and site is None:
            raise DataError(f"X has no column {self.site_column!r}, which site_column= names: add it, or pass site=")
        return rest, ids if site is None else site

    def _fitted(
        self,
        earlier: _RowsSoFar | _SumsSoFar | None,
        X: ArrayLike,
        y: ArrayLike,
        site: Sites,
        offset: ArrayLike | None,
        sample_weight: ArrayLike | None,
        graph: Any,
        covariates: Covariates | None,
    ) -> Self:
        """Fit these rows, and the ``earlier`` ones if any."""
        options = self._options()
        X, site = self._apart(X, site)
        matrix, target = self._checked(X, y, reset=earlier is None)
        if site is None:
            if earlier is None:
                warnings.warn(_NO_SITE, FedkinWarning, stacklevel=3)
            elif self.sites_ != (SINGLE_SITE,):
                raise DataError("partial_fit was not told the sites of the rows: pass site= with an id per row")
            site = SINGLE_SITE
        each = isinstance(site, Iterable) and not isinstance(site, str | bytes)
        ids: Any = site if each else [site] * len(matrix)
        names = getattr(self, "feature_names_in_", None)
        came = Federation.from_arrays(matrix, target, ids, offset=offset, feature_names=names)
        came = came if sample_weight is None else _weighted(came, sample_weight)
        if earlier is not None and (came.offset is None) != (self.model_.offset_name is None):
            raise DataError("rows of one model have an offset all or none: give offset= as before")
        schema = None if earlier is None else self.model_.schema
        if schema is None and self.spline:
            schema = _curves(came, self.spline)
        if schema is not None:
            table = dict(zip(came.feature_names, came.X.T, strict=True))
            came = came.replaced(X=schema.encoded(table), feature_names=schema.names)
            options = with_fixed_curves(options, schema)
        rows = _RowsSoFar(came) if earlier is None else earlier.with_rows(came)
        if graph is not None and not isinstance(graph, Graph):
            if not hasattr(graph, "is_directed"):
                kind = type(graph).__name__
                raise ParameterError(f"graph must be a fedkin.Graph or a networkx graph, got {kind}; see fedkin.Graph")
            graph = Graph.from_networkx(graph)
        prepared = rows.prepared(options)
        hint = hint_of(graph, covariates, prepared.data.sites)
        start = getattr(self, "model_", None) if self.warm_start else None
        estimate = method_for(options).fit(prepared, hint, silent, start)
        warn_of_rows(prepared, estimate)
        model = with_covariates(replace(prepared.model(estimate, options), schema=schema), covariates)
        self._keep(model)
        if isinstance(rows, _RowsSoFar):
            rows = rows.shortened(options, quadratic=prepared.loss.quadratic)
        blocks = 0 if model.coef.shape[1] == 1 else slice(None)
        self._so_far, self.model_ = rows, model
        self.coef_, self.intercept_ = model.coef[:, blocks], model.intercept[:, blocks]
        self.sites_, self.graph_, self.groups_ = model.sites, model.graph, model.groups
        return self

    def _html_repr(self) -> str:
        """Return scikit-learn's diagram before the fit, the model after it."""
        if hasattr(self, "model_"):
            return self.model_._repr_html_().replace("FittedModel", type(self).__name__, 1)
        return str(super()._html_repr())  # type: ignore[misc]

    def predict(
        self,
        X: ArrayLike,
        site: Sites = None,
        offset: ArrayLike | None = None,
        unseen: Unseen | None = None,
        exposure: ArrayLike | None = None,
    ) -> NDArray[Any]:
        """Predict mean responses, or class labels.

        Parameters
        ----------
        X : array (n, q)
            Rows to predict.
        site : array (n,) of ids, or one id
            The site of each row, or of all rows. It may be left out only when one site was fitted.
        offset : array (n,), optional
            Needed when the fit had one.
        unseen : "raise" or "population", optional
            What becomes of rows of sites that were not part of the fit; by default what the estimator was made with.
        exposure : array (n,), optional
            In place of an offset, or in addition to it: 1 for rates.

        Returns
        -------
        array (n,)
        """
        rows, site = self._rows(X, site)
        return self.model_.predict(rows, site, with_exposure(offset, exposure), unseen=unseen or self.unseen)

    def at(self, site: Sites, offset: ArrayLike | None = None) -> AtSites:
        """Return the fitted model bound to the sites of certain rows, which it predicts without ``site=``.

        Parameters
        ----------
        site : array (n,) of ids, or one id
            The sites of the rows that it will see, in their order.
        offset : array (n,), optional
            Their offsets.

        Examples
        --------
        >>> import numpy as np
        >>> from sklearn.inspection import permutation_importance
        >>> from fedkin import KinRegressor
        >>> rng = np.random.default_rng(0)
        >>> X, site = rng.normal(size=(120, 2)), np.repeat(["a", "b", "c"], 40)
        >>> y = X[:, 0] + 0.1 * rng.normal(size=120)
        >>> model = KinRegressor().fit(X, y, site=site)
        >>> found = permutation_importance(model.at(site), X, y, random_state=0).importances_mean
        >>> bool(found[0] > 1 > abs(found[1]))
        True
        """
        check_is_fitted(self)
        return AtSites(self, site, offset)

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        site: Sites = None,
        offset: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        exposure: ArrayLike | None = None,
    ) -> float:
        """Return R^2 of a regressor, accuracy of a classifier, over all rows.

        Parameters
        ----------
        X, site, offset, exposure
            As in `predict`.
        y : array (n,)
            True targets.
        sample_weight : array (n,), optional
            Weights of the rows.
        """
        shift = with_exposure(offset, exposure)
        return float(self._metric(y, self.predict(X, site, shift), sample_weight=sample_weight))

    def _rows(self, X: ArrayLike, site: Sites) -> tuple[Array, Sites]:
        check_is_fitted(self)
        X, site = self._apart(X, site)
        refuse_text(X, self.site_column)
        rows: Array = validate_data(self, X, reset=False, dtype=np.float64)
        if site is None and len(self.sites_) > 1:
            raise DataError(_SAY_SITE.format(n=len(self.sites_), some=listed(self.sites_)))
        if (schema := self.model_.schema) is not None:
            rows = schema.encoded({column.name: cells for column, cells in zip(schema.features, rows.T, strict=True)})
        return rows, site


class SiteRegressor(PerSite, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    _metric = staticmethod(r2_score)
    _auto_loss = loss_names("number")[0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = loss_kind(self._loss()).target in ("count", "positive")
        return tags

    def _checked(self, X: ArrayLike, y: ArrayLike, reset: bool = True) -> tuple[Array, NDArray[Any]]:
        kind = loss_kind(self._loss()).target
        if self.loss in LOSSES and kind in (None, "class", "survival"):
            other = type(self).__name__.replace("Regressor", "Classifier")
            hints = {"class": other, "survival": "KinSurvival", None: "fedkin.Problem, as it has no target"}
            hint = hints[kind]
            raise ParameterError(f"loss={self.loss!r} is not for regression; use it with {hint}")
        refuse_text(X, self.site_column)
        rows, target = validate_data(self, X, y, reset=reset, dtype=np.float64, y_numeric=True)
        return rows, target


class SiteClassifier(PerSite, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    classes_: NDArray[Any]
    _metric = staticmethod(accuracy_score)
    _auto_loss = loss_names("class")[0]

    def _checked(self, X: ArrayLike, y: ArrayLike, reset: bool = True) -> tuple[Array, NDArray[Any]]:
        if loss_kind(self._loss()).target != "class":
            known = " or ".join(map(repr, loss_names("class")))
            raise ParameterError(f"loss={self.loss!r} is not for classes; use {known}")
        refuse_text(X, self.site_column)
        rows, labels = validate_data(self, X, y, reset=reset, dtype=np.float64)
        check_classification_targets(labels)
        self.classes_ = np.unique(labels if reset else np.concatenate([self.classes_, labels]))
        return rows, labels

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        site: Sites = None,
        graph: Graph | None = None,
        offset: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        covariates: Covariates | None = None,
        *,
        classes: ArrayLike | None = None,
    ) -> Self:
        """Add rows as `PerSite.partial_fit` does; labels that are not among ``classes`` are refused if it is given."""
        unknown = [] if classes is None else np.setdiff1d(np.asarray(y), np.asarray(classes)).tolist()
        if unknown:
            raise DataError(f"class {unknown[0]!r} of y is not among classes=: add it there, or leave classes out")
        return super().partial_fit(X, y, site, graph, offset, sample_weight, covariates)

    def predict(
        self,
        X: ArrayLike,
        site: Sites = None,
        offset: ArrayLike | None = None,
        unseen: Unseen | None = None,
        exposure: ArrayLike | None = None,
    ) -> NDArray[Any]:
        """Predict class labels; arguments as in `PerSite.predict`."""
        shift = with_exposure(offset, exposure)
        chances = self.predict_proba(X, site, shift, unseen)  # first: it refuses when nothing was fitted
        return np.asarray(self.classes_[chances.argmax(axis=1)])

    def predict_proba(
        self, X: ArrayLike, site: Sites = None, offset: ArrayLike | None = None, unseen: Unseen | None = None
    ) -> Array:
        """Return probabilities ``(n, C)`` in the order of `classes_`; arguments as in `predict`."""
        rows, site = self._rows(X, site)
        return self.model_.predict_proba(rows, site, offset, unseen=unseen or self.unseen)

    def decision_function(
        self, X: ArrayLike, site: Sites = None, offset: ArrayLike | None = None, unseen: Unseen | None = None
    ) -> Array:
        """Return log odds ``(n,)`` of the second class, or ``(n, C)`` with 0 for the first; arguments as in `predict`.

        They are those of `predict_proba`, so with kin averaged; `model_.linear_predictor` has those at the estimates.
        """
        rows, site = self._rows(X, site)
        eta = self.model_.averaged_predictor(rows, site, offset, unseen=unseen or self.unseen)
        return np.asarray(eta[:, 0]) if len(self.classes_) == 2 else np.column_stack([np.zeros(len(eta)), eta])


class SiteSurvival(PerSite, BaseEstimator):  # type: ignore[misc]
    _auto_loss = loss_names("survival")[0]

    def _checked(self, X: ArrayLike, y: ArrayLike, reset: bool = True) -> tuple[Array, NDArray[Any]]:
        refuse_text(X, self.site_column)
        rows, target = validate_data(self, X, reset=reset, dtype=np.float64), survival_target(y)
        check_consistent_length(rows, target)
        return rows, target

    def predict(
        self,
        X: ArrayLike,
        site: Sites = None,
        offset: ArrayLike | None = None,
        unseen: Unseen | None = None,
        exposure: ArrayLike | None = None,
    ) -> Array:
        """Return risks ``(n,)``: log hazards relative to a row with average features.

        Arguments are as in `PerSite.predict`. Risks of one site can be compared, those of two sites cannot: each has
        its own baseline.
        """
        ratios = super().predict(X, site, offset, unseen, exposure)
        return np.asarray(np.log(np.maximum(ratios, np.finfo(float).tiny)))

    def predict_survival_function(
        self,
        X: ArrayLike,
        site: Sites = None,
        times: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        unseen: Unseen | None = None,
    ) -> Array:
        """Return the probability ``(n, T)`` that the event comes later than each time.

        Parameters
        ----------
        X, site, offset, unseen
            As in `predict`. Unseen sites have the pooled baseline of all sites.
        times : array (T,), optional
            By default `unique_times_`. Beyond the last time of a site its curve stays where it is.
        """
        rows, site = self._rows(X, site)
        moments = self.unique_times_ if times is None else times
        return self.model_.predict_survival(rows, site, moments, offset, unseen=unseen or self.unseen)

    def predict_cumulative_hazard_function(
        self,
        X: ArrayLike,
        site: Sites = None,
        times: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        unseen: Unseen | None = None,
    ) -> Array:
        """Return the cumulative hazard ``(n, T)`` up to each time; arguments as in `predict_survival_function`."""
        with np.errstate(divide="ignore"):
            return np.asarray(-np.log(self.predict_survival_function(X, site, times, offset, unseen)))

    @property
    def unique_times_(self) -> Array:
        """All times of events, and the last time of each site, ascending."""
        check_is_fitted(self)
        assert self.model_.baseline is not None
        return np.unique(np.concatenate(self.model_.baseline.times))

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        site: Sites = None,
        offset: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        exposure: ArrayLike | None = None,
    ) -> float:
        """Return Harrell's concordance: of pairs of rows of one site, over all sites.

        Parameters
        ----------
        X, site, offset, exposure
            As in `predict`.
        y : structured array (n,), or array (n, 2)
            As in `fit`.
        sample_weight : None
            Pairs have no weights.
        """
        if sample_weight is not None:
            raise ParameterError("concordance takes no weights of rows: leave sample_weight out")
        risk, target = self.predict(X, site, offset, exposure=exposure), survival_target(y)
        ids: Any = self._rows(X, site)[1]
        if ids is None or isinstance(ids, str | bytes | tuple) or not isinstance(ids, Iterable):
            ids = [ids] * len(risk)
        rows = Federation.from_arrays(np.column_stack([risk]), target, ids)
        return site_concordances(np.asarray(rows.y), rows.X[:, 0], rows.starts).pooled
