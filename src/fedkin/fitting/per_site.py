"""Base classes of the estimators: the site of each row, partial fits, and predictions by site."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils.metadata_routing import MetadataRequest
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from fedkin._base import TINY, Array, listed
from fedkin.data import Column, Federation, Schema, Spline, with_curves
from fedkin.errors import DataError, FedkinWarning, ParameterError
from fedkin.fitting.inputs import Unseen, is_each, survival_target, with_exposure
from fedkin.fitting.methods import fit
from fedkin.fitting.model import Each, FittedModel
from fedkin.fitting.options import AUTO, FitOptions
from fedkin.fitting.preparation import with_fixed_curves
from fedkin.fitting.scoring import AtSites, refuse_text, request_all, split_column
from fedkin.fitting.survival import site_concordances
from fedkin.graph import Graph
from fedkin.kin import Covariates
from fedkin.losses import LOSSES, Loss, loss_kind, loss_names

Sites = ArrayLike | Hashable | None

#: The site of all rows if no sites are given.
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


def _curves(rows: Federation, spline: Spline) -> Schema:
    """Return the schema of arrays with spline columns, given by name or number."""
    names = rows.feature_names
    keys = {one: names[one] if isinstance(one, int) and -len(names) <= one < len(names) else one for one in spline}
    wanted = {keys[one]: n for one, n in spline.items()} if isinstance(spline, Mapping) else list(keys.values())
    cells = dict(zip(names, rows.X.T, strict=True))
    made = with_curves([Column(name) for name in names], wanted, lambda some: {name: cells[name] for name in some})
    return Schema(made, agreed=False)


def with_rows(earlier: Federation, more: Federation) -> Federation:
    """Return the rows of both, the earlier ones first, as if they were in one table."""
    both = [(one, np.argsort(one.row_order)) for one in (earlier, more)]
    parts: dict[str, Any] = {}
    for name in ("X", "y", "offset", "weight"):
        values = [getattr(one, name) for one, _ in both]
        if name == "weight" and any(value is not None for value in values):
            values = [np.ones(len(one.X)) if one.weight is None else one.weight for one, _ in both]
        together = [value[came] for value, (_, came) in zip(values, both, strict=True) if value is not None]
        parts[name] = np.concatenate(together) if together else None
    ids = [one.sites[u] for one, came in both for u in one.site_index[came].tolist()]
    features = parts.pop("X"), parts.pop("y")
    return Federation.from_arrays(*features, ids, **parts, feature_names=earlier.feature_names)


def weighted_rows(federation: Federation, sample_weight: ArrayLike) -> Federation:
    """Return the federation with weights, given in the order of the input, without rows of weight 0."""
    weight, n = np.asarray(sample_weight, dtype=np.float64), len(federation.X)
    if weight.shape != (n,):
        raise DataError(f"sample_weight has shape {weight.shape}, expected one number per row: ({n},)")
    wrong = np.flatnonzero(~(np.isfinite(weight) & (weight >= 0)))
    if wrong.size:
        raise DataError(f"row {wrong[0]}: the sample_weight is {weight[wrong[0]]:g}, expected a number of at least 0")
    weight = weight[federation.row_order]
    if not weight.any():
        raise DataError("sample_weight is zero in every row, so no row is left: give some rows a weight")
    if not weight.all():
        federation = federation.take(weight > 0, allow_empty=True)
        federation = federation.subset([u for u, n in zip(federation.sites, federation.n_samples, strict=True) if n])
        weight = weight[weight > 0]
    return federation.replaced(weight=weight)


# --- what all estimators share ----------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class PerSite:
    """Base class of all estimators; it precedes scikit-learn's mixins, whose scores ignore sites."""

    loss: str | Loss = AUTO
    _: KW_ONLY
    random_state: int | np.random.RandomState | None = 0
    warm_start: bool = False
    site_column: str | int | None = None
    unseen: Unseen = "raise"
    spline: Spline | None = None

    _metric: ClassVar[Callable[..., float]]
    _auto_loss: ClassVar[str]
    _options: ClassVar[Callable[..., FitOptions]]
    _keep: ClassVar[Callable[..., None]]
    _checked: ClassVar[Callable[..., tuple[Array, NDArray[Any]]]]

    def get_metadata_routing(self) -> MetadataRequest:
        """Return scikit-learn's metadata request: by default everything that methods accept."""
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
        offset: Each = None,
        sample_weight: Each = None,
        covariates: Covariates | None = None,
        exposure: Each = None,
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
            Covariates of the sites, such as size or region, instead of a graph, with the sites as keys or index. An
            array is in the order of `sites_`. See `fedkin.kin.covariate_graph`.
        exposure : array (n,), optional
            Exposures of counts (person-years, area); their logarithms are added to the offset.
        """
        came = self._came(None, X, y, site, with_exposure(offset, exposure), sample_weight)
        return self._fitted(None, came, graph, covariates)

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        site: Sites = None,
        graph: Graph | None = None,
        offset: Each = None,
        sample_weight: Each = None,
        covariates: Covariates | None = None,
        exposure: Each = None,
    ) -> Self:
        """Add rows of known or new sites to those of earlier fits; the result equals that of `fit` on all rows.

        Arguments as in `fit`; graph and covariates are about all sites, also those of earlier rows.
        """
        earlier = getattr(self, "_rows_so_far", None)
        came = self._came(earlier, X, y, site, with_exposure(offset, exposure), sample_weight)
        return self._fitted(earlier, came, graph, covariates)

    def _apart(self, X: Any, site: Sites) -> tuple[Any, Sites]:
        """Return X without the column of sites, and the sites: those given, or those of the column."""
        if self.site_column is None:
            return X, site
        rest, ids = split_column(X, self.site_column)
        if ids is None and site is None:
            raise DataError(f"X has no column {self.site_column!r}, which site_column= names: add it, or pass site=")
        return rest, ids if site is None else site

    def _came(self, earlier: Federation | None, X: Any, y: Any, site: Sites, offset: Each, weight: Each) -> Federation:
        """Return the new rows, checked; ``earlier`` are those of earlier fits."""
        X, site = self._apart(X, site)
        matrix, target = self._checked(X, y, reset=earlier is None)
        if site is None:
            if earlier is None:
                warnings.warn(_NO_SITE, FedkinWarning, stacklevel=3)
            elif self.sites_ != (SINGLE_SITE,):
                raise DataError("partial_fit needs the sites of the rows: pass site= with an id per row")
            site = SINGLE_SITE
        each = isinstance(site, Iterable) and not isinstance(site, str | bytes)
        ids: Any = site if each else [site] * len(matrix)
        names = getattr(self, "feature_names_in_", None)
        came = Federation.from_arrays(matrix, target, ids, offset=offset, feature_names=names)
        if earlier is not None and (came.offset is None) != (earlier.offset is None):
            raise DataError("either all rows of a model have an offset or none does: give offset= as before")
        return came if weight is None else weighted_rows(came, weight)

    def _fitted(self, earlier: Federation | None, rows: Federation, graph: Any, covariates: Covariates | None) -> Self:
        """Fit the new rows together with any ``earlier`` ones."""
        options = self._options()
        schema = None if earlier is None else self.model_.schema
        if schema is None and self.spline:
            schema = _curves(rows, self.spline)
        if schema is not None:
            table = dict(zip(rows.feature_names, rows.X.T, strict=True))
            rows = rows.replaced(X=schema.encoded(table), feature_names=schema.names)
            options = with_fixed_curves(options, schema)
        rows = rows if earlier is None else with_rows(earlier, rows)
        if graph is not None and not isinstance(graph, Graph):
            if not hasattr(graph, "is_directed"):
                kind = type(graph).__name__
                raise ParameterError(f"graph must be a fedkin.Graph or a networkx graph, got {kind}; see fedkin.Graph")
            graph = Graph.from_networkx(graph)
        start = getattr(self, "model_", None) if self.warm_start else None
        model = replace(fit(rows, graph, options, start=start, covariates=covariates), schema=schema)
        self._keep(model)
        blocks = 0 if model.coef.shape[1] == 1 else slice(None)
        self._rows_so_far: Federation = rows
        self.model_: FittedModel = model
        self.coef_, self.intercept_ = model.coef[:, blocks], model.intercept[:, blocks]
        self.sites_, self.graph_, self.groups_ = model.sites, model.graph, model.groups
        return self

    def _html_repr(self) -> str:
        """Return scikit-learn's diagram before the fit, the model after it."""
        if hasattr(self, "model_"):
            return self.model_._repr_html_().replace("FittedModel", type(self).__name__, 1)
        return str(super()._html_repr())  # type: ignore[misc]

    def predict(
        self, X: ArrayLike, site: Sites = None, offset: Each = None, unseen: Unseen | None = None, exposure: Each = None
    ) -> NDArray[Any]:
        """Predict mean responses, class labels, or risks: log hazards relative to a row with average features.

        Risks can be compared within a site, but not between sites, since each site has its own baseline.

        Parameters
        ----------
        X : array (n, q)
            Rows to predict.
        site : array (n,) of ids, or one id
            The site of each row, or of all rows. It may be left out only when one site was fitted.
        offset : array (n,), optional
            Needed when the fit had one.
        unseen : "raise" or "population", optional
            How to treat rows of sites that were not part of the fit; by default the estimator's setting.
        exposure : array (n,), optional
            Exposures, instead of an offset or in addition to it: 1 for rates.

        Returns
        -------
        array (n,)
        """
        rows, site = self._rows(X, site)
        return self._predicted(rows, site, with_exposure(offset, exposure), unseen=unseen or self.unseen)

    def _predicted(self, rows: Array, *how: Any, unseen: Unseen) -> NDArray[Any]:
        return self.model_.predict(rows, *how, unseen=unseen)

    def at(self, site: Sites, offset: Each = None) -> AtSites:
        """Return the fitted model bound to the sites of some rows, so it predicts them without ``site=``.

        Parameters
        ----------
        site : array (n,) of ids, or one id
            The sites of the rows to predict, in their order.
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
        offset: Each = None,
        sample_weight: Each = None,
        exposure: Each = None,
    ) -> float:
        """Return R^2 for regression, accuracy for classification, or Harrell's concordance within sites for survival.

        Arguments as in `predict` and `fit`; concordance takes no weights.
        """
        values = self.predict(X, site, offset, exposure=exposure)
        return self._scored(y, values, self._apart(X, site)[1], sample_weight)

    def _scored(self, y: Any, values: Array, site: Sites, weight: Each) -> float:
        return float(self._metric(y, values, sample_weight=weight))

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
        offset: Each = None,
        sample_weight: Each = None,
        covariates: Covariates | None = None,
        exposure: Each = None,
        *,
        classes: ArrayLike | None = None,
    ) -> Self:
        """Add rows as in `PerSite.partial_fit`; labels outside ``classes``, if given, are refused."""
        unknown = [] if classes is None else np.setdiff1d(np.asarray(y), np.asarray(classes)).tolist()
        if unknown:
            raise DataError(f"class {unknown[0]!r} of y is not among classes=: add it there, or leave classes out")
        return super().partial_fit(X, y, site, graph, offset, sample_weight, covariates, exposure)

    def _predicted(self, rows: Array, *how: Any, unseen: Unseen) -> NDArray[Any]:
        chances = self.model_.predict_proba(rows, *how, unseen=unseen)
        return np.asarray(self.classes_[chances.argmax(axis=1)])

    def predict_proba(
        self, X: ArrayLike, site: Sites = None, offset: Each = None, unseen: Unseen | None = None
    ) -> Array:
        """Return probabilities ``(n, C)`` in the order of `classes_`; arguments as in `predict`."""
        rows, site = self._rows(X, site)
        return self.model_.predict_proba(rows, site, offset, unseen=unseen or self.unseen)

    def decision_function(
        self, X: ArrayLike, site: Sites = None, offset: Each = None, unseen: Unseen | None = None
    ) -> Array:
        """Return log odds ``(n,)`` of the second class, or ``(n, C)`` with 0 for the first; arguments as in `predict`.

        They match `predict_proba`, so with kin they are averaged; `model_.linear_predictor` has those at the estimates.
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

    def _predicted(self, rows: Array, *how: Any, unseen: Unseen) -> Array:
        return np.asarray(np.log(np.maximum(super()._predicted(rows, *how, unseen=unseen), TINY)))

    def predict_survival_function(
        self, X: ArrayLike, site: Sites = None, times: Each = None, offset: Each = None, unseen: Unseen | None = None
    ) -> Array:
        """Return survival probabilities ``(n, T)`` at each time, by default `unique_times_`.

        Each site's curve is constant after its last time; unseen sites have the pooled baseline of all sites.
        """
        rows, site = self._rows(X, site)
        moments = self.unique_times_ if times is None else times
        return self.model_.predict_survival(rows, site, moments, offset, unseen=unseen or self.unseen)

    def predict_cumulative_hazard_function(
        self, X: ArrayLike, site: Sites = None, times: Each = None, offset: Each = None, unseen: Unseen | None = None
    ) -> Array:
        """Return the cumulative hazard ``(n, T)`` up to each time; arguments as in `predict_survival_function`."""
        with np.errstate(divide="ignore"):
            return np.asarray(-np.log(self.predict_survival_function(X, site, times, offset, unseen)))

    @property
    def unique_times_(self) -> Array:
        """All event times, and the last time of each site, in ascending order."""
        check_is_fitted(self)
        assert self.model_.baseline is not None
        return np.unique(np.concatenate(self.model_.baseline.times))

    def _scored(self, y: Any, values: Array, site: Sites, weight: Each) -> float:
        if weight is not None:
            raise ParameterError("concordance does not use row weights: leave sample_weight out")
        ids: Any = site if is_each(site) else [site] * len(values)
        rows = Federation.from_arrays(np.column_stack([values]), survival_target(y), ids)
        return site_concordances(np.asarray(rows.y), rows.X[:, 0], rows.starts).pooled
