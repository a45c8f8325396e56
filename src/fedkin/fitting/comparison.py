"""Compare Fedkin with simpler models, all tuned, on held-out rows."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import (
    Array,
    Index,
    Mask,
    Say,
    check_whole,
    count,
    decimals_for,
    fixed,
    html_card,
    one_blas_thread,
    tracked,
)
from fedkin.cluster import On, running_engine, running_on
from fedkin.core import FileRows, Summaries
from fedkin.data import Federation, Schema
from fedkin.errors import DataError, FedkinWarning, ParameterError, argument
from fedkin.fitting.baselines import LOCAL, baseline_models, fold_baselines
from fedkin.fitting.decision import FEDKIN, NAMES, PLAIN, RELEVANT, Decision, decide
from fedkin.fitting.methods import fit, method_for
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Data, Prepared, prepare
from fedkin.fitting.scoring import HeldOut, held_out_errors, nan_mean, winsorised
from fedkin.graph import Graph

#: Additional scores that are better when lower.
LOWER_IS_BETTER = frozenset({"Brier score"})
#: Models that leave no larger share of the variance unexplained are level: the rest is due to ridges and rounding.
NOTHING = 1e-5
#: Splits of `compare` unless told otherwise.
REPEATS = 3


@dataclass(frozen=True, eq=False, repr=False)
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
        Random splits of rows, or folds that are each held out once.
    sites : tuple of V ids
    n_samples : int array (V,)
        Rows of each site, training and test together.
    errors : dict {name: array (R,)}
        Errors of "Local", "Global", "Site intercepts" and "Fedkin" in each of R splits or folds.
    site_errors : dict {name: array (R, V)}
        The same for each site; NaN where it had no held-out row.
    held_out : array (R,)
        Number of rows that each split or fold holds out.
    row_error : dict {frozenset of two names: float}
        Standard error of their Winsorised difference in one split, computed from single rows.
    more : dict {metric: {name: float}}
        Other metrics, as means over splits: explained variance, accuracy, AUC averaged over the sites with both
        classes, and concordance (higher is better); the integrated Brier score of survival (lower is better).
    models : tuple of R dicts {name: FittedModel}
        The models of every split.
    radius : float or None
        Radius of the ball that bounds Fedkin's parameters; the other methods are not constrained.
    constant : tuple of ids
        Sites whose rows all have the same target. Their own models predict it without error, so held-out rows cannot
        decide whether they gain.

    Notes
    -----
    Splits share rows, so the standard deviation over them is too small. Standard errors are corrected for this (Nadeau
    and Bengio 2003): the variance over splits times ``1/R + n_test/n_train``. The standard error of a difference is at
    least the one computed from single rows, since a few splits can agree by chance.

    The verdict uses Winsorised differences: in each split, the largest and the smallest 5% of the sites' differences
    (at least one of each with ten sites or more) are replaced by the next value, so that no single site decides.
    """

    metric: str
    kind: Literal["splits", "folds"]
    sites: tuple[Hashable, ...]
    n_samples: Index
    errors: Mapping[str, Array]
    site_errors: Mapping[str, Array]
    held_out: Array
    row_error: Mapping[frozenset[str], float] = field(default_factory=dict)
    more: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    models: tuple[Mapping[str, FittedModel], ...] = ()
    radius: float | None = None
    constant: tuple[Hashable, ...] = ()

    def __repr__(self) -> str:
        errors = ", ".join(f"{name} {self.mean(name):.4g}" for name in self.errors)
        return f"Comparison({self.metric} of {count(len(self.sites), 'site')}: {errors})"

    def _repr_html_(self) -> str:
        decimals = decimals_for([self.standard_error(name) for name in self.errors])
        lines = []
        for name in self.errors:
            cells = [fixed(self.mean(name), decimals), fixed(self.standard_error(name), decimals), "–", "–"]
            if name != FEDKIN:
                cells[2] = fixed(self.difference(name), decimals, sign=True)
                cells[3] = fixed(self.difference_error(name), decimals)
            lines.append([name, *cells])
        head = ("method", self.metric, "s.e.", f"difference from {FEDKIN}", "s.e.")
        return html_card("Comparison", {"decision": self.verdict}, head, lines)

    @property
    def repeats(self) -> int:
        """Number R of splits or folds."""
        return len(self.held_out)

    @property
    def test_size(self) -> float:
        """Share of the rows held out at a time."""
        return float(self.held_out.mean() / self.n_samples.sum())

    def mean(self, name: str) -> float:
        """Return the mean error of a method over all held-out rows."""
        return float(np.average(self.errors[name], weights=self.held_out))

    def standard_error(self, name: str) -> float:
        """Return the standard error of `mean`; NaN with one split."""
        return self._corrected(self.errors[name])

    def difference(self, name: str, other: str = FEDKIN) -> float:
        """Return how much larger the mean error of a method is than that of another one."""
        return self.mean(name) - self.mean(other)

    def difference_error(self, name: str, other: str = FEDKIN) -> float:
        """Return the standard error of `difference`; both methods use the same splits."""
        return 0.0 if name == other else self._error_of(name, self.errors[name] - self.errors[other], other)

    def _error_of(self, name: str, apart: Array, other: str = FEDKIN) -> float:
        """Return the standard error of the mean of differences ``(R,)``."""
        by_rows = self.row_error.get(frozenset({name, other}), np.nan) / np.sqrt(self.repeats)
        return float(np.fmax(self._corrected(apart), by_rows))

    def _corrected(self, values: Array) -> float:
        if len(values) < 2:
            return float("nan")
        return float(np.sqrt(values.var(ddof=1) * (1 / len(values) + self.test_size / (1 - self.test_size))))

    def site_means(self, name: str) -> Array:
        """Return the mean error of a method at each site, ``(V,)``; NaN for sites without held-out rows."""
        return nan_mean(self.site_errors[name])

    def gains(self) -> tuple[Array, Array]:
        """Return each site's gain over its own model, Local minus Fedkin ``(V,)``, and the standard errors.

        They are NaN at sites without held-out rows, and at those whose held-out rows cannot decide (`constant`).
        """
        each = np.where(self._decidable, self.site_errors[LOCAL] - self.site_errors[FEDKIN], np.nan)
        n, mean = (~np.isnan(each)).sum(axis=0), nan_mean(each)
        variance = np.nansum((each - mean) ** 2, axis=0) / np.where(n > 1, n - 1, np.nan)
        return mean, np.sqrt(variance * (1 / np.maximum(n, 1) + self.test_size / (1 - self.test_size)))

    @cached_property
    def _decidable(self) -> Mask:
        return np.array([site not in self.constant for site in self.sites], dtype=bool)

    def _apart(self, name: str) -> Array:
        """Return how much larger the mean error of a method is than Fedkin's at each site."""
        return self.site_means(name) - self.site_means(FEDKIN)

    def winsorised(self, name: str) -> Array:
        """Return the Winsorised difference from Fedkin in each split ``(R,)``."""
        found = self.errors[name] - self.errors[FEDKIN]
        for r, each in enumerate(self.site_errors[name] - self.site_errors[FEDKIN]):
            known = ~np.isnan(each)
            rows = self.n_samples[known]
            found[r] -= float(rows @ (each[known] - winsorised(each[known]))) / max(rows.sum(), 1)
        return found

    @cached_property
    def _robust(self) -> dict[str, Array]:
        return {name: self.winsorised(name) for name in self.errors if name != FEDKIN}

    @cached_property
    def _decision(self) -> Decision:
        apart = {name: float(np.average(each, weights=self.held_out)) for name, each in self._robust.items()}
        error = {name: self._error_of(name, each) for name, each in self._robust.items()}
        exact = [name for name, share in self.more.get("explained variance", {}).items() if share > 1 - NOTHING]
        if FEDKIN in exact:
            apart, error = ({name: 0.0 if name in exact else one[name] for name in one} for one in (apart, error))
        plain = {name: self.mean(name) - self.mean(FEDKIN) for name in apart}
        return decide(self.mean(FEDKIN), apart, error, self.metric, self._gains_over, plain)

    @property
    def verdict(self) -> str:
        """One sentence: the recommended model, by how much it is better, in which metric and for how many sites."""
        return self._decision.text

    def _gains_over(self, name: str, sign: int) -> str:
        """Describe at how many sites Fedkin has the lower error, or the higher one with sign -1."""
        apart = sign * self._apart(name)
        known = apart[np.isfinite(apart) & self._decidable]
        return f"; {int((known > 0).sum())} of {known.size} sites gain over it" if known.size > 1 else ""

    @property
    def remarks(self) -> list[str]:
        """Qualifications of the verdict, as sentences."""
        said, (_, use, other) = list[str](), self._decision
        if use == PLAIN:
            said.append(f"Leave out {argument('boost')}.")
        elif use != FEDKIN and self.kind == "splits":
            said.append(f"In Python, fedkin.fitting.baseline_models fits {NAMES[use]}.")
        said += self._outweighed(other)
        for metric, scores in self.more.items():
            best = max(scores, key=lambda name: -scores[name] if metric in LOWER_IS_BETTER else scores[name])
            if use == FEDKIN != best:
                shown = f"{scores[best]:.3f}, Fedkin {scores[FEDKIN]:.3f}"
                said.append(f"By {metric}, {NAMES[best]} would be best: {shown}.")
        for name in (one for one in NAMES if one in self.errors):
            robust = float(np.average(self._robust[name], weights=self.held_out))
            if abs(robust - self.difference(name)) > RELEVANT * abs(self.mean(FEDKIN)):
                site = self.sites[int(np.nanargmax(np.abs(self._apart(name)) * self.n_samples))]
                said.append(f"Site {site} counts for less: {NAMES[name]} and Fedkin are very far apart there.")
        if self.radius is not None:
            said.append(f"The other models are not constrained to the ball of radius {self.radius:g}.")
        return said

    def _outweighed(self, name: str) -> list[str]:
        """Describe whether the rows overall favour one method and most sites the other."""
        each = self._apart(name)
        known = np.flatnonzero(np.isfinite(each))
        better, worse = int((each[known] > 0).sum()), int((each[known] < 0).sum())
        # rows count alike, so a site counts by its rows
        part = each[known] * self.n_samples[known]
        most = better if part.sum() < 0 else worse
        if not part.size or (better > worse) == (part.sum() > 0) or 2 * most <= known.size:
            return []
        word = "better" if part.sum() < 0 else "worse"
        heavy = int(np.argmin(part) if part.sum() < 0 else np.argmax(part))
        why = "the others differ by more" if each[known].sum() * part.sum() > 0 else "the others have more rows"
        if (part.sum() - part[heavy]) * part.sum() <= 0:
            u = int(known[heavy])
            why = f"site {self.sites[u]} with its {count(int(self.n_samples[u]), 'row')} outweighs them"
        return [f"{most} of {known.size} sites do {word} with Fedkin than with {NAMES[name]}, but {why}."]

    def plain(self) -> dict[str, Any]:
        """Return the comparison as plain values, as stored in model directories and printed by ``--json``."""
        gain, gain_error = self.gains()
        sites = {name: self.site_means(name) for name in self.errors} | {"gain": gain, "gain_error": gain_error}
        others = [name for name in self.errors if name != FEDKIN]

        def apart(name: str, other: str = FEDKIN) -> dict[str, float | None]:
            error = _finite(self.difference_error(name, other))
            return {"difference": self.difference(name, other), "difference_error": error}

        return {
            "metric": self.metric,
            "lower_is_better": True,
            "kind": self.kind,
            "repeats": self.repeats,
            "test_size": self.test_size,
            "rows": int(self.n_samples.sum()),
            "verdict": self.verdict,
            "remarks": self.remarks,
            "methods": [
                {
                    "name": name,
                    "mean": self.mean(name),
                    "standard_error": _finite(self.standard_error(name)),
                    **apart(name),
                }
                for name in self.errors
            ],
            "pairs": [{"name": one, "other": other, **apart(one, other)} for one, other in combinations(others, 2)],
            "sites": [
                {"site": site, "rows": int(self.n_samples[u]), **{name: _finite(sites[name][u]) for name in sites}}
                for u, site in enumerate(self.sites)
            ],
            "constant": list(self.constant),
            "more": {metric: dict(values) for metric, values in self.more.items()},
        }


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
    on: On | None = None,
) -> Comparison:
    """Compare Fedkin on held-out rows with local models, one global model and site intercepts, all tuned.

    Parameters
    ----------
    data : Federation, FileRows or Summaries
        All rows, or the sites' summaries. Rows in memory are split at random. For files and summaries, each fold is
        held out in turn.
    graph, options, schema, on
        As in `fit`, with a task per split or fold.
    model : FittedModel, optional
        The model that `fit` returned for files or summaries (the last answers, for losses that are not quadratic);
        fitted here by default. Its edges and ``lam``, chosen with all rows, are used in every fold. Kin is refitted.
    repeats : int
        Number of splits, with the seeds ``options.seed``, ``options.seed + 1``, ... Rows in time order have one split.
    test_size : float
        Share of each site's rows that a split holds out.
    splits : sequence of bool arrays (N,), optional
        Which of the stacked rows to hold out, instead of splits by seed.
    keep_best : bool
        Whether Ctrl-C returns the comparison over the completed splits, if any, instead of raising.
    progress : callable, optional
        Called with a line of text before each step.

    Returns
    -------
    Comparison

    Notes
    -----
    The other models are those of `baseline_models`, tuned on the training rows, by leave-one-out or by folds. For files
    and summaries of quadratic losses the errors are exact. For other losses, training and held-out losses are quadratic
    expansions around the point of the summaries.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=20, n_samples=60, n_features=10, n_clusters=2, seed=0)
    >>> found = compare(design.federation, design.graph, FitOptions(method="fused", select="holm"))
    >>> found.mean("Fedkin") < found.mean("Local") < found.mean("Global")
    True
    >>> found.verdict.startswith("Use Fedkin"), found.difference("Local", "Global") < 0
    (True, True)
    """
    if on is not None:
        with running_on(on):
            return compare(
                data, graph, options, model=model, repeats=repeats, test_size=test_size, splits=splits,
                keep_best=keep_best, progress=progress, schema=schema,
            )  # fmt: skip
    options = FitOptions() if options is None else options
    if not data.in_memory:
        return _compared_by_folds(data, graph, options, model, schema)
    check_whole("repeats", repeats, least=1)
    if not 0 < test_size < 1:
        raise ParameterError(f"test_size must be between 0 and 1, got {test_size!r}")
    if splits is not None and not len(splits):
        raise ParameterError("splits is empty: give at least one, or leave it out")
    # of rows in time order the last ones are held out, whatever the seed
    cuts = range(1 if data.ordered else repeats) if splits is None else [np.asarray(one, dtype=bool) for one in splits]
    engine, parts = running_engine(), list[HeldOut]()
    say = progress if engine is None else None
    held_out = partial(_held_out_split, data, graph, options, schema, test_size, say)
    found = map(held_out, cuts) if engine is None else engine.map(held_out, cuts)
    try:
        for number in tracked(range(1, len(cuts) + 1), "comparing on held-out rows"):
            if progress is not None:
                progress(f"split {number} of {len(cuts)}")
            part = next(found)
            if part.models[FEDKIN].status == "interrupted":  # solvers raise this on Ctrl-C
                raise KeyboardInterrupt
            parts.append(part)
    except KeyboardInterrupt:
        if not parts or not keep_best:
            raise
    metric = parts[0].models[FEDKIN].loss.metric or "loss"
    made = _together(metric, "splits", data.sites, data.n_samples, parts, options.radius)
    return replace(made, constant=data.constant_sites())


def _held_out_split(
    data: Federation,
    graph: Graph | None,
    options: FitOptions,
    schema: Schema | None,
    test_size: float,
    say: Say | None,
    cut: int | Mask,
) -> HeldOut:
    """Return the errors of all models in one split: by a seed, or by which rows to hold out."""
    if isinstance(cut, int):
        train, test = data.split(test_size, options.seed + cut)
    else:
        train, test = data.take(~cut), data.take(cut, allow_empty=True)
    with one_blas_thread():
        models = baseline_models(train, options, schema)
    if options.boost:
        plain = replace(options, boost=False)
        with warnings.catch_warnings(action="ignore", category=FedkinWarning):
            models[PLAIN] = fit(train, graph, plain, say, schema, quick=True)
    models[FEDKIN] = fit(train, graph, options, say, schema, quick=True)
    return held_out_errors(models, train, test)


def _together(
    metric: str,
    kind: Literal["splits", "folds"],
    sites: tuple[Hashable, ...],
    n: Index,
    parts: list[HeldOut],
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
    sums = prepared.summaries.sums
    metric, factor = "expanded loss", 1.0
    if data.loss.quadratic and data.loss.metric is not None:
        metric, factor = data.loss.metric, 2.0  # such a loss is half a square
    folds, engine = np.flatnonzero(sums.count[:, :-1].any(axis=0)).tolist(), running_engine()
    held_out = partial(_held_out_fold, prepared, model, options, factor)
    parts = list((map if engine is None else engine.map)(held_out, folds))
    if not parts:
        raise DataError("the sites sent no summaries by fold, so no rows can be held out")
    return _together(metric, "folds", data.sites, np.rint(data.n_samples).astype(np.int64), parts, options.radius)


def _held_out_fold(prepared: Prepared, model: FittedModel, options: FitOptions, factor: float, fold: int) -> HeldOut:
    """Return the errors of all models in one fold."""
    sums = prepared.summaries.sums
    seen = np.flatnonzero(sums.count[:, fold])
    n, test = sums.count[seen, fold], sums.take(seen).terms(fold)
    part = HeldOut({}, {}, float(n.sum()))
    thetas = fold_baselines(sums, prepared.columns.intercepts, fold)
    thetas[FEDKIN] = method_for(options).from_sums(prepared, model, sums.total(without=fold))
    for name, theta in thetas.items():
        each = np.full(len(sums.at), np.nan)
        each[seen] = factor * test.values(theta[seen])
        part.errors[name], part.site_errors[name] = float(n @ each[seen] / n.sum()), each
    return part


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
