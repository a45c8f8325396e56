"""Fedkin beside what is simpler, each tuned, on rows that none of them has seen; over repeated splits."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, Index, Say, check_whole, count, one_blas_thread, tracked
from fedkin.data import Federation, Schema
from fedkin.errors import ParameterError
from fedkin.fitting.comparison.baselines import LOCAL, baseline_models
from fedkin.fitting.comparison.metrics import check_held_out, metric_name, more_scores, responses, row_errors
from fedkin.fitting.comparison.verdict import FEDKIN, NAMES, corrected_error, finite, verdict
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.ways import fit_federation
from fedkin.graph import Graph

#: Splits of `compare` unless told otherwise.
REPEATS = 3


@dataclass(frozen=True, eq=False)
class Comparison:
    """Errors on held-out rows of the same sites; lower is better.

    Attributes
    ----------
    metric : str
        Mean over the held-out rows of the squared error (linear), absolute error (Huber), deviance (Poisson), log-loss
        (classes), squared distance (mean), or the loss itself.
    sites : tuple of V ids
    n_samples : int array (V,)
        Rows of each site, training and test together.
    errors : dict {name: array (R,)}
        The error in each of R splits of "Local", "Global", "Site intercepts" and "Fedkin".
    site_errors : dict {name: array (R, V)}
        The same for each site; NaN where it had no held-out row.
    row_error : dict {name: float}
        Standard error of the difference to Fedkin in one split, from the differences of single rows.
    test_size : float
        Share of the rows that were held out.
    more : dict {metric: {name: float}}
        Metrics where higher is better, means over splits: explained variance, accuracy, AUC averaged over the sites
        with both classes.
    models : tuple of R dicts {name: FittedModel}
        The models of every split.

    Notes
    -----
    Splits share rows, so the standard deviation over them is too small. Standard errors are corrected for that (Nadeau
    and Bengio 2003): the variance over splits times ``1/R + n_test/n_train``. The error of a difference is never taken
    to be less than what single rows tell, since a few splits can agree by luck.
    """

    metric: str
    sites: tuple[Hashable, ...]
    n_samples: Index
    errors: Mapping[str, Array]
    site_errors: Mapping[str, Array]
    row_error: Mapping[str, float]
    test_size: float
    more: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    models: tuple[Mapping[str, FittedModel], ...] = ()

    @property
    def repeats(self) -> int:
        """Number R of splits."""
        return len(self.errors[FEDKIN])

    def mean(self, name: str) -> float:
        """Mean error of a method over the splits."""
        return float(self.errors[name].mean())

    def standard_error(self, name: str) -> float:
        """Of `mean`; NaN with one split."""
        return corrected_error(self.errors[name], self.test_size)

    def difference(self, name: str) -> float:
        """How much larger the mean error of a method is than Fedkin's."""
        return float((self.errors[name] - self.errors[FEDKIN]).mean())

    def difference_error(self, name: str) -> float:
        """Standard error of `difference`: the splits are the same for both."""
        if name == FEDKIN:
            return 0.0
        over_splits = corrected_error(self.errors[name] - self.errors[FEDKIN], self.test_size)
        return float(np.fmax(over_splits, self.row_error[name] / np.sqrt(self.repeats)))

    def site_means(self, name: str) -> Array:
        """Mean errors of a method at each site, ``(V,)``; NaN where no row was ever held out."""
        return _nanmean(self.site_errors[name])

    def gains(self) -> tuple[Array, Array]:
        """What each site gains over its own model, Local less Fedkin ``(V,)``, and the standard errors."""
        each = self.site_errors[LOCAL] - self.site_errors[FEDKIN]
        count = (~np.isnan(each)).sum(axis=0)
        mean = _nanmean(each)
        squares = np.nansum((each - mean) ** 2, axis=0)
        factor = 1 / np.maximum(count, 1) + self.test_size / (1 - self.test_size)
        error = np.sqrt(np.divide(squares, count - 1, out=np.full(len(mean), np.nan), where=count > 1) * factor)
        return mean, error

    @property
    def verdict(self) -> str:
        """What to do with it, in one sentence."""
        others = [name for name in self.errors if name != FEDKIN]
        gains, _ = self.gains()
        known = ~np.isnan(gains)
        return verdict(
            self.mean(FEDKIN),
            {name: self.difference(name) for name in others},
            {name: self.difference_error(name) for name in others},
            how="in Python with fedkin.fitting.baseline_models",
            gains=f", and {int((gains[known] > 0).sum())} of {int(known.sum())} sites gain over their own models",
            remark=self._outweighed,
        )

    def _outweighed(self, name: str) -> str:
        """A clause for where all rows say one thing about a method and Fedkin, and most sites another; "" elsewhere."""
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
        if (part.sum() - part[heavy]) * part.sum() <= 0:
            u = int(known[heavy])
            why = f"site {self.sites[u]} with its {count(int(self.n_samples[u]), 'row')} outweighs them"
        else:
            why = "the others have more rows, or larger differences"
        return f" ({most} of {known.size} sites do {word} with Fedkin than with {NAMES[name]}, but {why})"

    def plain(self) -> dict[str, Any]:
        """The comparison in plain values, as a model directory and ``--json`` have it."""
        gain, gain_error = self.gains()
        sites = {name: self.site_means(name) for name in self.errors}
        return {
            "metric": self.metric,
            "lower_is_better": True,
            "repeats": self.repeats,
            "test_size": self.test_size,
            "verdict": self.verdict,
            "methods": [
                {
                    "name": name,
                    "mean": self.mean(name),
                    "standard_error": finite(self.standard_error(name)),
                    "difference": self.difference(name),
                    "difference_error": finite(self.difference_error(name)),
                }
                for name in self.errors
            ],
            "sites": [
                {
                    "site": site,
                    "rows": int(self.n_samples[u]),
                    **{name: finite(sites[name][u]) for name in self.errors},
                    "gain": finite(gain[u]),
                    "gain_error": finite(gain_error[u]),
                }
                for u, site in enumerate(self.sites)
            ],
            "more": {metric: dict(values) for metric, values in self.more.items()},
        }


def compare(
    federation: Federation,
    graph: Graph | None = None,
    options: FitOptions | None = None,
    *,
    repeats: int = REPEATS,
    test_size: float = 0.25,
    splits: Sequence[ArrayLike] | None = None,
    keep_best: bool = False,
    progress: Say | None = None,
    schema: Schema | None = None,
) -> Comparison:
    """Held-out errors of Fedkin beside every site alone, one model for all, and site intercepts, all tuned.

    Parameters
    ----------
    federation : Federation
        All rows.
    graph, options, schema
        As in `fit_federation`; the graph of covariates is `fedkin.kin.covariate_graph`.
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

    Notes
    -----
    Local is a ridge fit at every site, tuned there; Global a ridge fit of all rows; Site intercepts the same with an
    intercept for every site. All are tuned on the training rows, by leaving out one at a time.

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
    check_whole("repeats", repeats, least=1)
    if not 0 < test_size < 1:
        raise ParameterError(f"test_size must be between 0 and 1, got {test_size!r}")
    cuts = _cuts(federation, options.seed, repeats, test_size, splits)
    parts: list[_Split] = []
    try:
        for number, (train, test) in enumerate(tracked(cuts, "comparing on held-out rows"), 1):
            if progress is not None:
                progress(f"split {number} of {len(cuts)}")
            with one_blas_thread():
                models = baseline_models(train, options, schema)
            models[FEDKIN] = fit_federation(train, graph, options, progress, schema, quick=True)
            if models[FEDKIN].status == "interrupted":  # solvers end so on Ctrl-C
                raise KeyboardInterrupt
            parts.append(_scored(models, test))
    except KeyboardInterrupt:
        if not parts or not keep_best:
            raise
    return _together(federation, parts)


def _cuts(
    federation: Federation, seed: int, repeats: int, test_size: float, splits: Sequence[ArrayLike] | None
) -> list[tuple[Federation, Federation]]:
    if splits is not None:
        held = [np.asarray(one, dtype=bool) for one in splits]
        if not held:
            raise ParameterError("splits is empty: give at least one, or leave it out")
        return [(federation.take(~one), federation.take(one, allow_empty=True)) for one in held]
    if getattr(federation, "ordered", False):
        repeats = 1  # the last rows of each site are held out, whatever the seed
    return [federation.split(test_size, seed + k) for k in range(repeats)]


@dataclass(frozen=True)
class _Split:
    metric: str
    models: dict[str, FittedModel]
    errors: dict[str, float]
    site_errors: dict[str, Array]
    row_error: dict[str, float]
    more: dict[str, dict[str, float]]
    held_out: int


def _scored(models: dict[str, FittedModel], test: Federation) -> _Split:
    check_held_out(models[FEDKIN], test)
    weight = getattr(test, "weight", None)
    weight = np.ones(len(test.X)) if weight is None else weight
    mass = np.bincount(test.site_index, weights=weight, minlength=test.n_sites)
    rows: dict[str, Array] = {}
    more: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        response = responses(model, test)
        rows[name] = row_errors(model, test, response)
        for metric, value in more_scores(model, test, response, weight).items():
            more.setdefault(metric, {})[name] = value
    errors = {name: float(weight @ each / weight.sum()) for name, each in rows.items()}
    sums = {
        name: np.bincount(test.site_index, weights=weight * each, minlength=test.n_sites)
        for name, each in rows.items()
    }
    site_errors = {
        name: np.divide(total, mass, out=np.full(len(mass), np.nan), where=mass > 0) for name, total in sums.items()
    }
    row_error = {}
    for name, each in rows.items():
        apart = each - rows[FEDKIN]
        apart = (apart - weight @ apart / weight.sum()) * weight
        row_error[name] = float(np.sqrt((apart**2).sum()) / weight.sum())
    return _Split(metric_name(models[FEDKIN]), models, errors, site_errors, row_error, more, len(test.X))


def _together(federation: Federation, parts: list[_Split]) -> Comparison:
    names = list(parts[0].errors)
    return Comparison(
        parts[0].metric,
        federation.sites,
        federation.n_samples,
        {name: np.array([part.errors[name] for part in parts]) for name in names},
        {name: np.array([part.site_errors[name] for part in parts]) for name in names},
        {name: float(np.mean([part.row_error[name] for part in parts])) for name in names},
        float(np.mean([part.held_out for part in parts])) / len(federation.X),
        dict(_means_of_more(parts)),
        tuple(part.models for part in parts),
    )


def _means_of_more(parts: list[_Split]) -> Iterator[tuple[str, dict[str, float]]]:
    """Scores that every split has."""
    for metric in parts[0].more:
        if all(metric in part.more for part in parts):
            names = parts[0].more[metric]
            yield metric, {name: float(np.mean([part.more[metric][name] for part in parts])) for name in names}


def _nanmean(values: Array) -> Array:
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    total = np.where(known, values, 0.0).sum(axis=0)
    return np.asarray(np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0))
