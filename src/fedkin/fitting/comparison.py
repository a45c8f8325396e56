"""`compare`: Fedkin and simpler models, all tuned, on rows that none of them has seen; and the verdict."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, Index, Say, check_whole, count, one_blas_thread, tracked
from fedkin.core import FileRows, Summaries
from fedkin.data import Federation, Schema
from fedkin.errors import DataError, FedkinWarning, ParameterError, argument
from fedkin.fitting.baselines import GLOBAL, INTERCEPTS, LOCAL, baseline_models, fold_baselines
from fedkin.fitting.methods import fit, method_for
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions, class_numbers
from fedkin.fitting.parts import brier_times, integrated_brier, nan_mean, site_areas, site_concordances, winsorised
from fedkin.fitting.preparation import Data, prepare
from fedkin.graph import Graph

FEDKIN = "Fedkin"
#: Splits of `compare` unless told otherwise.
REPEATS = 3
#: A difference is clear from so many standard errors on, and its interval has so many on both sides.
CLEAR = 2.0
#: A simpler model is recommended only where its interval excludes that its error is larger by more than this share of
#: Fedkin's. As its difference is within one standard error, the estimated loss is a third of this at most.
RELEVANT = 0.05
#: Smaller shares round to 0.0%.
_SHOWN = 0.0005
#: Fedkin without the column of the boosting model, where the options ask for it.
PLAIN = "Without boosting"
_NAMES = {
    GLOBAL: "one model for all",
    INTERCEPTS: "site intercepts",
    LOCAL: "the sites' own models",
    PLAIN: "the model without boosting",
}
_SIMPLER = {
    GLOBAL: "One model for all sites",
    INTERCEPTS: "One model with site intercepts",
    LOCAL: "Every site's own model",
    PLAIN: "Fedkin without boosting",
}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Errors on held-out rows of the same sites; lower is better.

    Attributes
    ----------
    metric : str
        Mean over the held-out rows of the squared error (linear), absolute error (Huber), deviance (Poisson), log-loss
        (classes), squared distance (mean), partial log-loss (Cox: minus the log partial likelihood per event, among the
        held-out rows of a site), or the loss itself. For summaries of losses that are not quadratic, the loss expanded
        around the fit.
    kind : "splits" or "folds"
        Random splits of rows, or folds of which each is held out once.
    sites : tuple of V ids
    n_samples : int array (V,)
        Rows of each site, training and test together.
    errors : dict {name: array (R,)}
        The error in each of R splits or folds of "Local", "Global", "Site intercepts" and "Fedkin".
    site_errors : dict {name: array (R, V)}
        The same for each site; NaN where it had no held-out row.
    held_out : array (R,)
        Rows that each split or fold holds out.
    row_error : dict {name: float}
        Standard error of the Winsorised difference to Fedkin in one split, from the differences of single rows.
    more : dict {metric: {name: float}}
        Other metrics, means over splits, higher is better: explained variance, accuracy, AUC averaged over the sites
        with both classes, concordance; but lower for the integrated Brier score of survival.
    models : tuple of R dicts {name: FittedModel}
        The models of every split.
    radius : float or None
        Of the ball in which Fedkin's parameters are; those of the other methods are not held in it.

    Notes
    -----
    Splits share rows, so the standard deviation over them is too small. Standard errors are corrected for that (Nadeau
    and Bengio 2003): the variance over splits times ``1/R + n_test/n_train``. The error of a difference is never taken
    to be less than what single rows tell, since a few splits can agree by luck.

    The verdict takes Winsorised differences: in every split, the largest and the smallest 5% of the sites' differences
    (at least one of each from ten sites on) count as the next ones, so that no single site decides.
    """

    metric: str
    kind: Literal["splits", "folds"]
    sites: tuple[Hashable, ...]
    n_samples: Index
    errors: Mapping[str, Array]
    site_errors: Mapping[str, Array]
    held_out: Array
    row_error: Mapping[str, float] = field(default_factory=dict)
    more: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    models: tuple[Mapping[str, FittedModel], ...] = ()
    radius: float | None = None

    @property
    def repeats(self) -> int:
        """Number R of splits or folds."""
        return len(self.held_out)

    @property
    def test_size(self) -> float:
        """Share of the rows that were held out at a time."""
        return float(self.held_out.mean() / self.n_samples.sum())

    def mean(self, name: str) -> float:
        """Return the mean error of a method over all rows that were held out."""
        return float(np.average(self.errors[name], weights=self.held_out))

    def standard_error(self, name: str) -> float:
        """Return the standard error of `mean`; NaN with one split."""
        return self._corrected(self.errors[name])

    def difference(self, name: str) -> float:
        """Return how much larger the mean error of a method is than Fedkin's."""
        return self.mean(name) - self.mean(FEDKIN)

    def difference_error(self, name: str) -> float:
        """Return the standard error of `difference`: the splits are the same for both."""
        if name == FEDKIN:
            return 0.0
        return self._error_of(name, self.errors[name] - self.errors[FEDKIN])

    def _error_of(self, name: str, apart: Array) -> float:
        """Return the standard error of the mean of differences ``(R,)`` to Fedkin."""
        return float(np.fmax(self._corrected(apart), self.row_error.get(name, np.nan) / np.sqrt(self.repeats)))

    def _corrected(self, values: Array) -> float:
        if len(values) < 2:
            return float("nan")
        return float(np.sqrt(values.var(ddof=1) * (1 / len(values) + self.test_size / (1 - self.test_size))))

    def site_means(self, name: str) -> Array:
        """Return the mean errors of a method at each site, ``(V,)``; NaN where no row was ever held out."""
        return nan_mean(self.site_errors[name])

    def gains(self) -> tuple[Array, Array]:
        """Return what each site gains over its own model, Local less Fedkin ``(V,)``, and the standard errors."""
        each = self.site_errors[LOCAL] - self.site_errors[FEDKIN]
        n, mean = (~np.isnan(each)).sum(axis=0), nan_mean(each)
        variance = np.nansum((each - mean) ** 2, axis=0) / np.where(n > 1, n - 1, np.nan)
        return mean, np.sqrt(variance * (1 / np.maximum(n, 1) + self.test_size / (1 - self.test_size)))

    @property
    def verdict(self) -> str:
        """What to do with it, in one sentence."""
        robust = {name: self.winsorised(name) for name in self.errors if name != FEDKIN}
        gains, _ = self.gains()
        known = ~np.isnan(gains)
        said = verdict(
            self.mean(FEDKIN),
            {name: float(np.average(each, weights=self.held_out)) for name, each in robust.items()},
            {name: self._error_of(name, each) for name, each in robust.items()},
            how=_how if self.kind == "splits" else lambda name: "",
            gains=f", and {int((gains[known] > 0).sum())} of {int(known.sum())} sites gain over their own models",
            remark=self._outweighed,
        )
        for name, each in robust.items():
            if abs(np.average(each, weights=self.held_out) - self.difference(name)) > RELEVANT * abs(self.mean(FEDKIN)):
                apart = self.site_means(name) - self.site_means(FEDKIN)
                u = int(np.nanargmax(np.abs(apart) * self.n_samples))
                said += f" Site {self.sites[u]}, where {_NAMES[name]} and Fedkin are very far apart, counts for less."
        ball = "" if self.radius is None else f" The other models are not held in the ball of radius {self.radius:g}."
        return said + ball

    def winsorised(self, name: str) -> Array:
        """Return the difference to Fedkin in each split ``(R,)``, the most extreme sites brought in."""
        found = self.errors[name] - self.errors[FEDKIN]
        for r, each in enumerate(self.site_errors[name] - self.site_errors[FEDKIN]):
            known = ~np.isnan(each)
            rows = self.n_samples[known]
            found[r] -= float(rows @ (each[known] - winsorised(each[known]))) / max(rows.sum(), 1)
        return found

    def _outweighed(self, name: str) -> str:
        """Return a clause for where all rows favour one method and most sites the other; "" elsewhere."""
        if name not in self.errors:
            return ""
        each = self.site_means(name) - self.site_means(FEDKIN)
        known = np.flatnonzero(np.isfinite(each))
        better, worse = int((each[known] > 0).sum()), int((each[known] < 0).sum())
        # rows count alike, so a site counts by its rows
        part = each[known] * self.n_samples[known]
        most = better if part.sum() < 0 else worse
        if not part.size or (better > worse) == (part.sum() > 0) or 2 * most <= known.size:
            return ""
        word = "better" if part.sum() < 0 else "worse"
        heavy = int(np.argmin(part) if part.sum() < 0 else np.argmax(part))
        why = "the others have more rows, or larger differences"
        if (part.sum() - part[heavy]) * part.sum() <= 0:
            u = int(known[heavy])
            why = f"site {self.sites[u]} with its {count(int(self.n_samples[u]), 'row')} outweighs them"
        return f" ({most} of {known.size} sites do {word} with Fedkin than with {_NAMES[name]}, but {why})"

    def plain(self) -> dict[str, Any]:
        """Return the comparison in plain values, as a model directory and ``--json`` have it."""
        gain, gain_error = self.gains()
        sites = {name: self.site_means(name) for name in self.errors} | {"gain": gain, "gain_error": gain_error}
        return {
            "metric": self.metric,
            "lower_is_better": True,
            "kind": self.kind,
            "repeats": self.repeats,
            "test_size": self.test_size,
            "rows": int(self.n_samples.sum()),
            "verdict": self.verdict,
            "methods": [
                {
                    "name": name,
                    "mean": self.mean(name),
                    "standard_error": _finite(self.standard_error(name)),
                    "difference": self.difference(name),
                    "difference_error": _finite(self.difference_error(name)),
                }
                for name in self.errors
            ],
            "sites": [
                {"site": site, "rows": int(self.n_samples[u]), **{name: _finite(sites[name][u]) for name in sites}}
                for u, site in enumerate(self.sites)
            ],
            "more": {metric: dict(values) for metric, values in self.more.items()},
        }


class _HeldOut(NamedTuple):
    """A split or a fold: errors by method, of all rows and of each site."""

    errors: dict[str, float]
    site_errors: dict[str, Array]
    held_out: float
    row_error: Mapping[str, float] = {}
    more: Mapping[str, Mapping[str, float]] = {}
    models: Mapping[str, FittedModel] = {}


def compare(
    data: Data,
    graph: Graph | None = None,
    options: FitOptions | None = None,
    *,
    model: FittedModel | None = None,
    repeats: int = REPEATS,
    test_size: float = 0.25,
    splits: Sequence[ArrayLike] | None = None,
    keep_best: bool = False,
    progress: Say | None = None,
    schema: Schema | None = None,
) -> Comparison:
    """Compare Fedkin on held-out rows with every site alone, one model for all, and site intercepts, all tuned.

    Parameters
    ----------
    data : Federation, FileRows or Summaries
        All rows, or what sites have summed up of them. Rows in memory are split at random; of files and summaries,
        every fold is held out in turn.
    graph, options, schema
        As in `fit`; the graph of covariates is `fedkin.kin.covariate_graph`.
    model : FittedModel, optional
        What `fit` made of files or summaries (the last answers, for losses that are not quadratic); fitted here by
        default. Its edges and its ``lam`` are used in every fold; they were chosen with all rows. Kin is found anew.
    repeats : int
        Splits, with the seeds ``options.seed``, ``options.seed + 1``, ... Rows in time order have one split only.
    test_size : float
        Share of each site's rows that a split holds out.
    splits : sequence of bool arrays (N,), optional
        Which of the stacked rows to hold out, instead of splits by seed.
    keep_best : bool
        Ctrl-C ends the comparison with the splits that are done, if there is one, instead of raising.
    progress : callable, optional
        Called with a line of text before each step.

    Returns
    -------
    Comparison

    Raises
    ------
    DataError
        Where sites gave no sums by fold, or there are no held-out rows.

    Notes
    -----
    Local is a ridge fit at every site, tuned there; Global a ridge fit of all rows; Site intercepts the same with an
    intercept for every site. All are tuned on the training rows, by leaving out one at a time, or fold by fold.

    For files and summaries of quadratic losses the errors are exact. For other losses they are expanded around the
    point of the summaries, in the rows that train as in those held out.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=20, n_samples=60, n_features=10, n_clusters=2, seed=0)
    >>> found = compare(design.federation, design.graph, FitOptions(select="holm"))
    >>> found.mean("Fedkin") < found.mean("Local") < found.mean("Global")
    True
    >>> found.verdict.startswith("Fedkin predicts best")
    True
    """
    options = FitOptions() if options is None else options
    if not data.in_memory:
        return _compared_by_folds(data, graph, options, model, schema)
    check_whole("repeats", repeats, least=1)
    if not 0 < test_size < 1:
        raise ParameterError(f"test_size must be between 0 and 1, got {test_size!r}")
    if splits is not None:
        if not len(splits):
            raise ParameterError("splits is empty: give at least one, or leave it out")
        held = [np.asarray(one, dtype=bool) for one in splits]
        cuts = [(data.take(~one), data.take(one, allow_empty=True)) for one in held]
    else:  # of rows in time order the last ones are held out, whatever the seed
        cuts = [data.split(test_size, options.seed + k) for k in range(1 if data.ordered else repeats)]
    parts, metric = list[_HeldOut](), "loss"
    try:
        for number, (train, test) in enumerate(tracked(cuts, "comparing on held-out rows"), 1):
            if progress is not None:
                progress(f"split {number} of {len(cuts)}")
            with one_blas_thread():
                models = baseline_models(train, options, schema)
            if options.boost:
                plain = replace(options, boost=False)
                with warnings.catch_warnings(action="ignore", category=FedkinWarning):
                    models[PLAIN] = fit(train, graph, plain, progress, schema, quick=True)
            models[FEDKIN] = fit(train, graph, options, progress, schema, quick=True)
            if models[FEDKIN].status == "interrupted":  # solvers end so on Ctrl-C
                raise KeyboardInterrupt
            metric = models[FEDKIN].loss.metric or "loss"
            parts.append(_held_out_errors(models, train, test))
    except KeyboardInterrupt:
        if not parts or not keep_best:
            raise
    return _together(metric, "splits", data.sites, data.n_samples, parts, options.radius)


def _together(
    metric: str,
    kind: Literal["splits", "folds"],
    sites: tuple[Hashable, ...],
    n: Index,
    parts: list[_HeldOut],
    radius: float | None,
) -> Comparison:
    names = list(parts[0].errors)
    shared = [score for score in parts[0].more if all(score in part.more for part in parts)]
    return Comparison(
        metric,
        kind,
        sites,
        n,
        {name: np.array([part.errors[name] for part in parts]) for name in names},
        {name: np.array([part.site_errors[name] for part in parts]) for name in names},
        np.array([part.held_out for part in parts], dtype=np.float64),
        {name: float(np.mean([part.row_error[name] for part in parts])) for name in parts[0].row_error},
        {one: {name: float(np.mean([part.more[one][name] for part in parts])) for name in names} for one in shared},
        tuple(part.models for part in parts),
        radius,
    )


# --- splits of rows ---------------------------------------------------------------------------------------------


def _held_out_errors(models: dict[str, FittedModel], train: Federation, test: Federation) -> _HeldOut:
    check_held_out(models[FEDKIN], test)
    model = models[FEDKIN]
    weight = np.ones(len(test.X)) if test.weight is None else test.weight
    if test.y is not None and not model.loss.additive:
        weight = weight * model.loss.scored(test.y.astype(np.float64))
        if not weight.any():
            raise DataError("there are no events among the held-out rows to compare on")
    mass = np.bincount(test.site_index, weights=weight, minlength=test.n_sites)
    rows, more, row_error = dict[str, Array](), dict[str, dict[str, float]](), dict[str, float]()
    for name, model in models.items():
        response = responses(model, test)
        rows[name] = row_errors(model, test, response)
        found = more_scores(model, test, response, weight) | survival_scores(model, train, test)
        for metric, value in found.items():
            more.setdefault(metric, {})[name] = value
    part = _HeldOut({}, {}, len(test.X), row_error, more, models)
    for name, each in rows.items():
        total = np.bincount(test.site_index, weights=weight * each, minlength=test.n_sites)
        part.errors[name] = float(weight @ each / weight.sum())
        part.site_errors[name] = total / np.where(mass > 0, mass, np.nan)
        # a site that is brought in brings its rows in: their spread shrinks as its mean does, and never grows
        apart, seen = each - rows[FEDKIN], mass > 0
        own = np.bincount(test.site_index, weights=weight * apart, minlength=test.n_sites)[seen] / mass[seen]
        share, shift, kept = np.ones(test.n_sites), np.zeros(test.n_sites), winsorised(own)
        share[seen] = np.clip(np.divide(kept, own, out=np.ones_like(own), where=own != 0), 0.0, 1.0)
        shift[seen] = kept - share[seen] * own
        apart = apart * share[test.site_index] + shift[test.site_index]
        apart = (apart - weight @ apart / weight.sum()) * weight
        row_error[name] = float(np.sqrt((apart**2).sum()) / weight.sum())
    return part


def check_held_out(model: FittedModel, test: Federation) -> None:
    """Raise `DataError` where rows cannot be held-out rows of a model."""
    if len(test.X) == 0:
        raise DataError("there are no held-out rows to compare on")
    if test.y is None and model.loss.target is not None:
        raise DataError("the held-out rows have no target to compare with")
    unknown = [site for site in test.sites if site not in model.index]
    if unknown:
        raise DataError(
            f"site {unknown[0]!r} of the test is not among the training sites: cut both from one federation"
        )


def responses(model: FittedModel, test: Federation) -> Array:
    """Return mean responses, or probabilities ``(n, C)`` of the classes."""
    predict = model.predict if model.classes is None else model.predict_proba
    return np.asarray(predict(test.X, [test.sites[u] for u in test.site_index.tolist()], test.offset), dtype=np.float64)


def row_errors(model: FittedModel, test: Federation, response: Array) -> Array:
    """Return the error ``(n,)`` of every row; of a loss without a metric, the mean loss of the row's site."""
    if model.loss.metric is not None:
        target = test.X if test.y is None else test.y
        if model.classes is not None:
            target = class_numbers(target, model.classes)
        y = target.astype(np.float64)
        if model.loss.additive:
            return model.loss.row_errors(y, response)
        ends = pairwise(test.starts.tolist())
        return np.concatenate([model.loss.row_errors(y[first:last], response[first:last]) for first, last in ends])
    out = np.empty(len(test.X))
    for u in np.unique(test.site_index).tolist():
        rows, theta = test[test.sites[u]], model.theta(model.index[test.sites[u]])
        X = np.column_stack([np.ones(len(rows.X)), rows.X]) if model.fit_intercept else rows.X
        out[test.site_index == u] = model.loss.value(theta, X, rows.y, rows.offset)
    return out


def more_scores(model: FittedModel, test: Federation, response: Array, weight: Array) -> dict[str, float]:
    """Return scores of all rows where higher is better; none for losses that have none."""
    if test.y is None or model.baseline is not None:
        return {}
    if model.classes is None:
        y = test.y.astype(np.float64)
        if model.loss.link != "identity" or np.ptp(y) == 0:
            return {}
        total = weight @ (y - weight @ y / weight.sum()) ** 2
        return {"explained variance": 1.0 - float(weight @ (y - response) ** 2 / total)}
    codes = class_numbers(test.y, model.classes)
    scores = {"accuracy": float(weight @ (response.argmax(axis=1) == codes) / weight.sum())}
    if len(model.classes) == 2:
        areas = site_areas(codes, response[:, 1], test.starts)
        if not np.isnan(areas).all():
            scores["AUC per site"] = float(np.nanmean(areas))
    return scores


def survival_scores(model: FittedModel, train: Federation, test: Federation) -> dict[str, float]:
    """Return concordance within sites, and the integrated Brier score; nothing for models without hazards."""
    if model.baseline is None or test.y is None or train.y is None:
        return {}
    sites = [test.sites[u] for u in test.site_index.tolist()]
    y, risk = test.y.astype(np.float64), model.predict(test.X, sites, test.offset)
    own = site_concordances(y, risk, test.starts)
    scores = {}
    if own.pairs.any():
        scores["concordance"] = own.pooled
        if own.pairs.astype(bool).sum() > 1:
            scores["C per site"] = float(np.nanmean(own.each))
    times = brier_times(train.y.astype(np.float64), y)
    if times.size > 1:
        survival = model.predict_survival(test.X, sites, times, test.offset)
        starts = train.starts, test.starts
        scores["Brier score"] = integrated_brier(train.y.astype(np.float64), y, survival, times, starts)
    return scores


# --- folds of sums ----------------------------------------------------------------------------------------------


def _compared_by_folds(
    data: FileRows | Summaries,
    graph: Graph | None,
    options: FitOptions,
    model: FittedModel | None,
    schema: Schema | None,
) -> Comparison:
    """Compare with every fold held out in turn."""
    if model is None:
        found = fit(data, graph, options, schema=schema)
        if not isinstance(found, FittedModel):
            raise ParameterError(f"the {data.loss.name} loss needs the answers of the sites: give model=")
        model = found
    if data.has_rows:
        assert model.kin is not None
        data = data.summaries(model.kin.theta, options.cv_folds, options.seed)
    prepared = prepare(data, options, schema, standardize=options.standardize)
    sums, free = prepared.summaries.sums, prepared.columns.intercepts
    metric, factor = "loss, expanded around the fit", 1.0
    if data.loss.quadratic and data.loss.metric is not None:
        metric, factor = data.loss.metric, 2.0  # such a loss is half a square
    parts = []
    for fold in np.flatnonzero(sums.count[:, :-1].any(axis=0)).tolist():
        seen = np.flatnonzero(sums.count[:, fold])
        n, test = sums.count[seen, fold], sums.take(seen).terms(fold)
        part = _HeldOut({}, {}, float(n.sum()))
        thetas = fold_baselines(sums, free, fold)
        thetas[FEDKIN] = method_for(options).from_sums(prepared, model, sums.total(without=fold))
        for name, theta in thetas.items():
            each = np.full(len(sums.at), np.nan)
            each[seen] = factor * test.values(theta[seen])
            part.errors[name], part.site_errors[name] = float(n @ each[seen] / n.sum()), each
        parts.append(part)
    if not parts:
        raise DataError("the sites gave no sums by fold, so no rows can be held out")
    return _together(metric, "folds", data.sites, np.rint(data.n_samples).astype(np.int64), parts, options.radius)


# --- the verdict ------------------------------------------------------------------------------------------------


def verdict(
    scale: float,
    apart: Mapping[str, float],
    error: Mapping[str, float],
    *,
    how: Callable[[str], str] = lambda name: "",
    gains: str = "",
    remark: Callable[[str], str] = lambda name: "",
) -> str:
    """Return what to do with a comparison, from differences to Fedkin and their standard errors.

    Differences that round to 0.0% of Fedkin's error, ``scale``, are none.
    """
    level = _SHOWN * abs(scale)
    better = [name for name in apart if apart[name] < -max(CLEAR * error[name], level)]
    if better:
        best = min(better, key=lambda name: apart[name])
        return f"{_SIMPLER[best]} predicts better than Fedkin here: use it{_clause(how(best))}{remark(best)}."
    best = min(apart, key=lambda name: apart[name])
    open_ones = [name for name in _NAMES if name in apart and not apart[name] > max(CLEAR * error[name], level)]
    if not open_ones:
        smaller = apart[best] / abs(scale + apart[best] or 1.0)
        said = f"its error is {smaller:.1%} smaller than that of {_NAMES[best]}"
        return f"Fedkin predicts best: {said}{gains}{remark(LOCAL)}."
    near = [name for name in open_ones if apart[name] <= max(error[name], level)]
    ties = [name for name in near if apart[name] + CLEAR * error[name] <= RELEVANT * abs(scale)]
    if not ties:
        unknown = _unknown(scale, open_ones, apart, error)
        return f"These rows cannot tell Fedkin from {unknown}; Fedkin's model is kept."
    # the simplest of them, or the one with the smallest error if that is clearly smaller
    name, best = ties[0], min(ties, key=lambda one: apart[one])
    if apart[name] - apart[best] > float(np.hypot(error[name], error[best])):
        name = best
    if apart[name] - CLEAR * error[name] < -RELEVANT * abs(scale):
        return f"{_SIMPLER[name]} does as well or better, and is simpler: use it{_clause(how(name))}{remark(name)}."
    said = f"{_SIMPLER[name]} does as well and is simpler{_clause(how(name))}"
    return f"{said}; Fedkin's model loses next to nothing{remark(name)}."


def _how(name: str) -> str:
    """Return how a simpler model is made."""
    return f"leave out {argument('boost')}" if name == PLAIN else "in Python with fedkin.fitting.baseline_models"


def _clause(text: str) -> str:
    return text and f" ({text})"


def _unknown(scale: float, names: list[str], apart: Mapping[str, float], error: Mapping[str, float]) -> str:
    """Return which models the rows cannot tell from Fedkin, and how far the best of them may be from it."""
    best = min(names, key=lambda name: apart[name])
    low, high = ((apart[best] + side * error[best]) / abs(scale or 1.0) for side in (-CLEAR, CLEAR))
    whose = "its error" if len(names) == 1 and best != LOCAL else f"the error of {_NAMES[best]}"
    if not np.isfinite(high):
        told = "no standard error"
    elif low <= -1:  # no error can shrink by more than all of it
        told = "the difference cannot be told: rows differ too much"
    elif max(-low, high) < _SHOWN:
        told = "equal to the digits shown"
    else:
        told = f"{whose} could be {_percent(-low)} smaller or {_percent(high)} larger"
    return f"{' or '.join(_NAMES[name] for name in names)} ({told})"


def _percent(share: float) -> str:
    if share < _SHOWN:
        return f"less than {2 * _SHOWN:.1%}"
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
