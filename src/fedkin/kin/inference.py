"""Inference from a `Kin`: intervals, contrasts, predictions, and summaries as text."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, overload

import numpy as np
from scipy.special import chdtrc, ndtr, ndtri, stdtr

from fedkin._base import TINY, Array, Index, check_choice, check_level, count, probability, some_of
from fedkin.data import INTERCEPT
from fedkin.errors import ParameterError
from fedkin.losses import describe_loss

if TYPE_CHECKING:
    from fedkin.kin.result import Kin

#: "average": posterior, with nominal coverage on average over sites; "site": from a site's own rows alone.
Kind = Literal["average", "site"]
#: Intervals of the mean response, or of a new observation.
Interval = Literal["mean", "observation"]
#: A site, or several sites for their mean.
Sites = Hashable | list[Hashable]
_WIDTH = 78
_GRAPHS = {
    "none": "no graph",
    "used": "used",
    "ignored": "ignored: it is unrelated to the groups",
    "inverted": "inverted: its edges join sites that differ",
}


@dataclass(frozen=True, eq=False, repr=False)
class Contrast:
    """A difference or another linear combination of sites' parameters, with its uncertainty.

    Attributes
    ----------
    label : str
        Description of the comparison.
    names : tuple of r str
        Names of the parameters, or of their combination.
    estimate, covariance : arrays (r,), (r, r)
    kind : "average" or "site"
    probability : float or None
        Probability that the two sites are alike, if two were compared.
    """

    label: str
    names: tuple[str, ...]
    estimate: Array
    covariance: Array
    kind: Kind
    probability: float | None = None

    @property
    def standard_error(self) -> Array:
        """Standard error of each estimate, ``(r,)``."""
        return np.asarray(np.sqrt(np.maximum(np.diag(self.covariance), 0.0)))

    @property
    def p_values(self) -> Array:
        """Two-sided p-value of each estimate against 0, ``(r,)``."""
        error = np.where(self.standard_error > 0, self.standard_error, TINY)
        return np.asarray(2 * ndtr(-np.abs(self.estimate) / error))

    @property
    def wald(self) -> tuple[float, int, float]:
        """Wald statistic of the hypothesis that all estimates are 0, its degrees of freedom, and its chi-square
        p-value."""
        if not np.isfinite(self.covariance).all():
            return 0.0, 0, 1.0
        values, vectors = np.linalg.eigh(self.covariance)
        seen = values > 1e-12 * max(float(values[-1]), 1e-300)
        turned = vectors[:, seen].T @ self.estimate
        statistic = float((turned**2 / values[seen]).sum())
        return statistic, int(seen.sum()), float(chdtrc(int(seen.sum()), statistic))

    def confint(self, level: float = 0.95) -> Array:
        """Return intervals ``(r, 2)``."""
        return interval(self.estimate, self.standard_error, level)

    def summary(self, level: float = 0.95) -> str:
        """Return the result as text, as statsmodels does."""
        statistic, degrees, tail = self.wald
        lines = [
            *_table(self, self.label, level),
            f"Wald test that all are 0: chi2({degrees}) = {statistic:.4g}, p = {tail:.3g}",
        ]
        if self.probability is not None:
            lines.append(f"Probability that the two are alike: {probability(self.probability)}")
        return "\n".join([*lines, *_ending(self.kind, level)])

    def __repr__(self) -> str:
        return self.summary()


def interval(estimate: Array, error: Array, level: float) -> Array:
    """Return normal intervals ``(..., 2)``."""
    check_level(level)
    half = ndtri(0.5 + level / 2) * error
    return np.stack([estimate - half, estimate + half], axis=-1)


def site_estimates(kin: Kin, kind: Kind) -> tuple[Array, Array]:
    """Return estimates ``(V, p)`` and covariances ``(V, p, p)`` of all sites."""
    check_choice("kind", kind, ("average", "site"))
    return (kin.theta, kin.covariance) if kind == "average" else kin.learned.own()


def positions(kin: Kin, sites: Sites) -> Index:
    chosen = sites if isinstance(sites, list) else [sites]
    if not chosen:
        raise ParameterError("a contrast needs at least one site on each side, got none")
    return np.array([kin.position(site) for site in chosen], dtype=np.int64)


def words(sites: Sites) -> str:
    if not isinstance(sites, list):
        return str(sites)
    return str(sites[0]) if len(sites) == 1 else f"mean of {len(sites)} sites ({sites[0]}, ...)"


@dataclass(frozen=True, eq=False)
class Predicted:
    """Predictions with intervals.

    Attributes
    ----------
    mean : array (n,)
        Mean responses; class probabilities are averaged over the uncertainty in the site's parameters.
    low, high : arrays (n,)
        Ends of the intervals.
    """

    mean: Array
    low: Array
    high: Array


def predicted(
    kin: Kin,
    X: Array,
    theta: Array,
    covariance: Array,
    noise: float,
    *,
    level: float,
    interval: Interval,
    offset: Array | None = None,
    posterior: Array | None = None,
) -> Predicted:
    """Return intervals for rows ``X (n, p)``, intercept included, of one site.

    Means are averaged over ``posterior (p, p)``, by default the ``covariance`` of the intervals.
    """
    loss, rowwise = kin.loss, kin.loss.rowwise
    if (rowwise is None and loss.link is None) or loss.n_outputs > 1 or X.shape[1] != len(kin.names):
        raise ParameterError(f"the {loss.name} loss has no single predictor, so no intervals for predictions")
    if rowwise is None and interval == "observation":
        raise ParameterError(f'the {loss.name} loss has no intervals for new observations: use interval="mean"')
    eta = X @ theta + (0.0 if offset is None else offset)
    each = np.stack([covariance, covariance if posterior is None else posterior])
    error, own = np.sqrt(np.maximum(np.einsum("np,kpq,nq->kn", X, each, X), 0.0))

    def response(values: Array) -> Array:
        return np.asarray(loss.predict(np.ones(1), values[:, None]))

    averaged = eta if rowwise is None else rowwise.averaged_predictor(eta[:, None], (own**2)[:, None, None])[:, 0]
    if rowwise is None or interval == "mean":
        low, high = (response(end) for end in _around(eta, error, averaged, level))
    else:
        low, high = rowwise.observation_interval(eta, error, noise, level)
    return Predicted(response(averaged), low, high)


def _around(eta: Array, error: Array, averaged: Array, level: float) -> tuple[Array, Array]:
    """Return the ends ``(n,)`` of an interval that normal predictors lie in with probability ``level``, ``averaged``
    inside.

    Its tails are equal, unless ``averaged`` lies in one of them. Then that end is ``averaged``, and the other one moves
    inwards to keep the probability.
    """
    low, high = np.moveaxis(interval(eta, error, level), 1, 0)
    away = np.abs(averaged - eta) / np.where(error > 0, error, np.inf)
    # the share of predictors on the near side of averaged is more than the level
    other = ndtri(np.maximum(ndtr(away) - level, (1 - level) / 2)) * error
    above, below = averaged > high, averaged < low
    return (
        np.where(above, eta + other, np.where(below, averaged, low)),
        np.where(below, eta - other, np.where(above, averaged, high)),
    )


def describe(kin: Kin, level: float, site: Hashable | None, group: int | None, kind: Kind) -> str:
    """Return the text of `Kin.summary`."""
    if site is not None:
        u = kin.position(site)
        head, more = f"Site {site}: {count(int(kin.n_samples[u]), 'row')}", _likely_kin(kin, u)
        found = kin.contrast(site, kind=kind)
    elif group is not None:
        sites = kin.members(group)
        head, more = f"Group {group + 1}: mean of {count(len(sites), 'site')}", f"Members: {some_of(sites)}"
        found = kin.contrast(sites, kind=kind)
    else:
        double, single = "=" * _WIDTH, "-" * _WIDTH
        head = "Kin: partial pooling with groups".center(_WIDTH)
        body = [*_population(kin, level), single, *_groups(kin), single, *_notes(kin, level)]
        return "\n".join([head, double, *_header(kin), double, *body, double])
    return "\n".join([*_table(found, head, level), more, *_ending(kind, level)])


def _table(found: Contrast, title: str, level: float) -> list[str]:
    low, high = f"[{(1 - level) / 2:.3f}", f"{(1 + level) / 2:.3f}]"
    heads = ("coef", "std err", "z", "P>|z|", low, high)
    head = f"{'':<18}" + "".join(f"{head:>10}" for head in heads)
    lines = [title.center(_WIDTH).rstrip(), "=" * _WIDTH, head, "-" * _WIDTH]
    error, tails, ends = found.standard_error, found.p_values, found.confint(level)
    for j, name in enumerate(found.names):
        z = found.estimate[j] / error[j] if error[j] > 0 else np.nan
        tested = f"{found.estimate[j]:>10.4g}{error[j]:>10.3g}{z:>10.3f}{tails[j]:>10.3f}"
        lines.append(f"{name[:17]:<18}{tested}{ends[j, 0]:>10.4g}{ends[j, 1]:>10.4g}")
    return [*lines, "-" * _WIDTH]


def _likely_kin(kin: Kin, u: int) -> str:
    if not kin.resolved:
        return "No groups resolved: the site is shrunk towards the overall mean, by the variance between sites."
    chance = np.array(kin.probability[np.full(len(kin.sites), u), np.arange(len(kin.sites))])
    chance[u] = -1.0
    likely = [v for v in np.argsort(-chance, kind="stable")[:5] if chance[v] >= 0.005]
    if not likely:
        return f"Group {int(kin.groups[u]) + 1}; no other site is likely to be its kin."
    named = ", ".join(f"{kin.sites[v]} ({chance[v]:.2f})" for v in likely)
    return f"Group {int(kin.groups[u]) + 1}; similar sites (probability): {named}"


def _ending(kind: Kind, level: float) -> tuple[str, str]:
    text = f"Intervals cover {level:.0%} on average over sites; less often for a site unlike all others."
    if kind == "site":
        text = f"From the rows of the site alone: intervals cover {level:.0%} at every single site."
    return text, "=" * _WIDTH


def _header(kin: Kin) -> list[str]:
    likely, n = int(np.argmax(kin.n_groups)), kin.n_samples
    facts = [
        ("Loss", kin.loss.name, "Likely groups", f"{likely} (P = {kin.n_groups[likely]:.2f})"),
        ("Sites", len(kin.sites), "Weight, no groups", f"{kin.weight_mixed:.2f}"),
        ("Rows", int(n.sum()), "Rows per site", f"{n.min()} to {n.max()}"),
    ]
    lines = [f"{a + ':':<16}{b:>20}    {c + ':':<20}{d:>18}" for a, b, c, d in facts]
    fixed = [f"{'Fixed:':<16}{some_of(kin.fixed)}"] if kin.fixed else []
    if kin.within is not None:
        fixed.append(f"{'Districts:':<16}{len(kin.districts)}")
    return [*lines, f"{'Graph:':<16}{_GRAPHS[kin.graph_use]}", *fixed]


def _population(kin: Kin, level: float) -> list[str]:
    """Return population effects as a table, followed by the variation between sites, in the manner of lme4."""
    error, ends, (t, tails) = np.sqrt(np.diag(kin.mean_covariance)), kin.population(level), population_tests(kin)
    low, high = f"[{(1 - level) / 2:.3f}", f"{(1 + level) / 2:.3f}]"
    heads = ("std err", "df", "t", "P>|t|", low, high)
    lines = [f"{'Population effects':<19}{'coef':>11}" + "".join(f"{head:>8}" for head in heads), "-" * _WIDTH]
    for j, name in enumerate(kin.names):
        tested = f"{error[j]:>7.3g} {kin.degrees[j]:>7.4g} {t[j]:>7.2f} {tails[j]:>7.3f}"
        lines.append(f"{name[:18]:<19}{kin.mean[j]:>11.4g} {tested} {ends[j, 1]:>7.3g} {ends[j, 2]:>7.3g}")
    if kin.loss.ratio:
        lines += [
            "-" * _WIDTH,
            f"{kin.loss.ratio.capitalize() + 's':<19}{'ratio':>11}{'':>32}{low:>8}{high:>8}",
            "-" * _WIDTH,
        ]
        with np.errstate(over="ignore"):
            ratios = np.exp(ends)
        for name, (ratio, least, most) in zip(kin.names, ratios.tolist(), strict=True):
            lines.append(f"{name[:18]:<19}{ratio:>11.4g}{'':>32} {least:>7.3g} {most:>7.3g}")
    lines += ["-" * _WIDTH, f"{'Between sites':<19}{'sd':>11}", "-" * _WIDTH]
    each, outer = population_sd(kin), population_sd(kin, "districts")
    if outer is not None:
        lines[-2] = f"{'Between sites':<19}{'sd':>11} {'between districts':>19}"
    for j, name in enumerate(kin.names):
        if name not in kin.fixed:
            lines.append(f"{name[:18]:<19}{each[j]:>11.4g}" + ("" if outer is None else f" {outer[j]:>19.4g}"))
    return [*lines, *(f"{name:<19}{value:>11}  {more}".rstrip() for name, value, more in variance_facts(kin))]


def variance_facts(kin: Kin) -> list[tuple[str, str, str]]:
    """Return names, values and remarks: residual sd, parameters of the loss, ICC, R2 and log-likelihood, if known."""
    told = describe_loss(kin.loss).items()
    found = [(name, f"{value:.4g}", "of the loss") for name, value in told if isinstance(value, float)]
    if kin.loss.quadratic:
        found.append(("Residual", f"{np.sqrt(residual_variance(kin)):.4g}", ""))
    if (share := intraclass_correlation(kin)) is not None:
        found.append(("ICC", f"{share:.4g}", "of the intercepts, at the means of the columns"))
    if (explained := r_squared(kin)) is not None:
        found.append(("R2", f"{explained[0]:.4g}", f"marginal, {explained[1]:.4g} conditional on the site"))
    if (likelihood := restricted_log_likelihood(kin)) is not None:
        found.append(("Log-likelihood", f"{likelihood:.6g}", "restricted, without groups"))
    return found


def population_tests(kin: Kin) -> tuple[Array, Array]:
    """Return t statistics ``(p,)`` of the population effects and their p values, with ``kin.degrees`` of freedom."""
    error = np.sqrt(np.diag(kin.mean_covariance))
    t = np.divide(kin.mean, error, out=np.full(len(error), np.nan), where=error > 0)
    return t, np.where(kin.degrees > 0, 2 * stdtr(np.maximum(kin.degrees, 1e-3), -np.abs(t)), 1.0)


@overload
def population_sd(kin: Kin) -> Array: ...
@overload
def population_sd(kin: Kin, level: Literal["sites", "districts"]) -> Array | None: ...
def population_sd(kin: Kin, level: Literal["sites", "districts"] = "sites") -> Array | None:
    """Return standard deviations ``(p,)`` between sites by restricted maximum likelihood, in the units of the columns.

    With districts, return those between districts, or None.
    """
    population = kin.learned.population
    variance = population.variance if level == "sites" else population.outer_variance
    return None if variance is None else np.sqrt(np.diag(kin.learned.units.covariance(np.diag(variance))))


def restricted_log_likelihood(kin: Kin) -> float | None:
    """Return the restricted log-likelihood of least squares as lme4 and statsmodels define it; None for other losses.

    It uses the noise variances of the fit, which may differ between sites.
    """
    units = kin.learned.units
    if not kin.loss.quadratic or kin.loss.location:
        return None
    scale = float(np.linalg.slogdet(units.A)[1] - kin.n_samples.sum() * np.log(units.target))
    return kin.learned.population.log_likelihood + scale


def residual_variance(kin: Kin) -> float:
    """Return the noise variance, averaged over rows."""
    return float(kin.n_samples @ kin.noise / kin.n_samples.sum())


def intraclass_correlation(kin: Kin) -> float | None:
    """Return the share of variance between sites (ICC), from intercepts at the columns' means; None for losses other
    than least squares and two classes.

    Two classes have the variance of the logistic distribution (Nakagawa, Johnson and Schielzeth 2017).
    """
    classes = kin.loss.target == "class" and kin.loss.n_outputs == 1
    if kin.names[0] != INTERCEPT or not (kin.loss.quadratic or classes):
        return None
    left = residual_variance(kin) / kin.learned.units.target**2 if kin.loss.quadratic else np.pi**2 / 3
    population = kin.learned.population
    own = float(population.variance[0] + (0.0 if population.outer_variance is None else population.outer_variance[0]))
    return own / (own + left)


def r_squared(kin: Kin) -> tuple[float, float] | None:
    """Return the shares of the target's variance explained by population effects, and by these plus the sites' effects.

    They follow Nakagawa and Schielzeth (2013) and Johnson (2014) for random slopes; None unless least squares was
    fitted with an intercept and all sites are present.
    """
    learned = kin.learned
    if kin.names[0] != INTERCEPT or not kin.loss.quadratic or not learned.whole:
        return None
    noise, n = kin.noise / learned.units.target**2, float(kin.n_samples.sum())
    squares = np.tensordot(noise, learned.precision, 1) / n  # of standardised columns, the first of ones
    effects, variance = learned.population.mean[1:], learned.population.variance
    if learned.population.outer_variance is not None:
        variance = variance + learned.population.outer_variance
    common, own = float(effects @ squares[1:, 1:] @ effects), float(variance @ np.diag(squares))
    total = common + own + residual_variance(kin) / learned.units.target**2
    return common / total, (common + own) / total


def _groups(kin: Kin) -> list[str]:
    if kin.within is not None:
        return ["Sites are within districts: no groups were looked for."]
    if not kin.resolved:
        return ["No groups resolved: use the sites' estimates, which average over all groupings."]
    members = [kin.members(k) for k in range(int(kin.groups.max()) + 1)]
    return [f"Group {k} ({count(len(sites), 'site')}): {some_of(sites)}" for k, sites in enumerate(members, 1)]


def _notes(kin: Kin, level: float) -> list[str]:
    lines = [
        f"Intervals of sites cover {level:.0%} on average over sites; confint(kind='site') has",
        "intervals for every single site. df: Satterthwaite's degrees of freedom.",
    ]
    found, apart = kin.diagnostics, kin.learned.unseen
    if apart is not None and (np.abs(kin.learned.units.A @ apart) > 2 * np.sqrt(np.diag(kin.mean_covariance))).any():
        lines.append("Effects within and between sites differ: unseen sites are predicted by those of all rows.")
    if found is None and kin.within is not None:
        return lines
    if found is None:
        return [*lines, "Nothing was sampled: too few sites, or nothing differs between them."]
    worst, least = found.rhat["parameters, worst"], found.size["parameters, worst"]
    return [
        *lines,
        f"{count(len(found.starts), 'chain')} of {found.draws} sweeps: R-hat of parameters "
        f"{'<= 1.01' if worst <= 1.01 else f'{worst:.2f} at worst'}, effective size {least:,.0f} or more;",
        f"effective size of the number of groups {found.size['number of groups']:.0f}.",
    ]
