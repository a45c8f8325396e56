"""`Kin.summary`: the result as text, in the manner of statsmodels."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from fedkin._base import count, some_of
from fedkin.kin.result.inference import Contrast, Kind, contrast

if TYPE_CHECKING:
    from fedkin.kin.result.kin import Kin


_WIDTH = 78
_GRAPHS = {
    "none": "no graph",
    "used": "used",
    "ignored": "ignored: it does not tell who is kin",
    "inverted": "inverted: its edges join sites that differ",
}


def summary_of(kin: Kin, level: float) -> str:
    """Header, coefficients, groups and what to know about the sampler."""
    double, single = "=" * _WIDTH, "-" * _WIDTH
    head = ["Kin: partial pooling with groups".center(_WIDTH), double, *_header(kin)]
    body = [double, *_coefficients(kin, level), single, *_groups(kin), single, *_notes(kin, level), double]
    return "\n".join(head + body)


def site_text(kin: Kin, site: Hashable, level: float, kind: Kind) -> str:
    """One site: its parameters, and its likely kin."""
    u = kin.position(site)
    found = contrast(kin, site, None, None, kind)
    lines = [f"Site {site}: {count(int(kin.n_samples[u]), 'row')}".center(_WIDTH).rstrip(), *_table(found, level)]
    return "\n".join([*lines, *_kin_lines(kin, u), *_kind_lines(kind, level), "=" * _WIDTH])


def group_text(kin: Kin, group: int, level: float, kind: Kind) -> str:
    """One group: the mean of its members' parameters."""
    sites = kin.members(group)
    found = contrast(kin, sites, None, None, kind)
    head = f"Group {group + 1}: mean of {count(len(sites), 'site')}"
    lines = [head.center(_WIDTH).rstrip(), *_table(found, level), f"Members: {some_of(sites)}"]
    return "\n".join([*lines, *_kind_lines(kind, level), "=" * _WIDTH])


def contrast_text(found: Contrast, level: float) -> str:
    """A difference, parameter by parameter, and the test that there is none."""
    lines = [found.label.center(_WIDTH).rstrip(), *_table(found, level)]
    statistic, degrees, tail = found.wald
    lines.append(f"Wald test that all are 0: chi2({degrees}) = {statistic:.4g}, p = {tail:.3g}")
    if found.probability is not None:
        lines.append(f"Probability that the two are kin: {found.probability:.2f}")
    return "\n".join([*lines, *_kind_lines(found.kind, level), "=" * _WIDTH])


def _table(found: Contrast, level: float) -> list[str]:
    low, high = f"[{(1 - level) / 2:.3f}", f"{(1 + level) / 2:.3f}]"
    heads = ("coef", "std err", "z", "P>|z|", low, high)
    lines = ["=" * _WIDTH, f"{'':<18}" + "".join(f"{head:>10}" for head in heads), "-" * _WIDTH]
    error, tails, ends = found.standard_error, found.p_values, found.confint(level)
    for j, name in enumerate(found.names):
        z = found.estimate[j] / error[j] if error[j] > 0 else np.nan
        cells = (
            f"{found.estimate[j]:.4g}",
            f"{error[j]:.3g}",
            f"{z:.3f}",
            f"{tails[j]:.3f}",
            *(f"{end:.4g}" for end in ends[j]),
        )
        lines.append(f"{name[:17]:<18}" + "".join(f"{cell:>10}" for cell in cells))
    return [*lines, "-" * _WIDTH]


def _kin_lines(kin: Kin, u: int) -> list[str]:
    if not kin.resolved:
        return ["No groups resolved: the site leans on the mean of all, as far as the spread allows."]
    chance = np.array(kin.probability[np.full(len(kin.sites), u), np.arange(len(kin.sites))])
    chance[u] = -1.0
    likely = [v for v in np.argsort(-chance, kind="stable")[:5] if chance[v] >= 0.005]
    if not likely:
        return [f"Group {int(kin.groups[u]) + 1}; no other site is likely to be its kin."]
    named = ", ".join(f"{kin.sites[v]} ({chance[v]:.2f})" for v in likely)
    return [f"Group {int(kin.groups[u]) + 1}; likely kin (probability): {named}"]


def _kind_lines(kind: Kind, level: float) -> list[str]:
    if kind == "site":
        return [f"From the rows of the site alone: intervals cover {level:.0%} at every single site."]
    return [f"Intervals cover {level:.0%} on average over sites; a site unlike all others less often."]


def _header(kin: Kin) -> list[str]:
    likely = int(np.argmax(kin.n_groups))
    left = [
        ("Loss", kin.loss.name),
        ("Sites", str(len(kin.sites))),
        ("Rows", str(int(kin.n_samples.sum()))),
        ("Rows per site", f"{kin.n_samples.min()} to {kin.n_samples.max()}"),
    ]
    right = [
        ("Likely groups", f"{likely} (P = {kin.n_groups[likely]:.2f})"),
        ("Weight, no groups", f"{kin.weight_mixed:.2f}"),
        ("SURE kin", f"{kin.sure['kin']:.1f}"),
        ("SURE Local, Global", f"{kin.sure['Local']:.1f}, {kin.sure['Global']:.1f}"),
    ]
    lines = [f"{a + ':':<16}{b:>20}    {c + ':':<20}{d:>18}" for (a, b), (c, d) in zip(left, right, strict=True)]
    return [*lines, f"{'Graph:':<16}{_GRAPHS[kin.graph_use]}"]


def _coefficients(kin: Kin, level: float) -> list[str]:
    from scipy.special import ndtri  # slow to load

    error = np.sqrt(np.diag(kin.mean_covariance))
    reach = ndtri(0.5 + level / 2) * error
    low, high = f"[{(1 - level) / 2:.3f}", f"{(1 + level) / 2:.3f}]"
    lines = [f"{'':<24}{'mean':>11}{'std err':>10}{low:>11}{high:>11}{'spread':>11}", "-" * _WIDTH]
    for j, name in enumerate(kin.names):
        numbers = (kin.mean[j], error[j], kin.mean[j] - reach[j], kin.mean[j] + reach[j], kin.spread[j])
        cells = "".join(f"{value:>{width}.4g}" for value, width in zip(numbers, (11, 10, 11, 11, 11), strict=True))
        lines.append(f"{name[:23]:<24}{cells}")
    return lines


def _groups(kin: Kin) -> list[str]:
    if not kin.resolved:
        return ["No groups resolved: use the sites' estimates, which average over all groupings."]
    lines = []
    for k in range(int(kin.groups.max()) + 1):
        members = [kin.sites[u] for u in np.flatnonzero(kin.groups == k)]
        lines.append(f"Group {k + 1} ({count(len(members), 'site')}): {some_of(members)}")
    return lines


def _notes(kin: Kin, level: float) -> list[str]:
    lines = [
        f"Intervals of sites cover {level:.0%} on average over sites; confint(kind='site') has",
        "intervals for every single site. The spread is a standard deviation between sites.",
    ]
    found = kin.diagnostics
    if found is None:
        return [*lines, "Nothing was sampled: too few sites, or nothing differs between them."]
    worst, typical = found.rhat["parameters, worst"], found.rhat["parameters, median"]
    size = found.size["number of groups"]
    lines.append(
        f"{count(len(found.starts), 'chain')} of {found.draws} sweeps: R-hat of parameters {typical:.2f} (median), "
        f"{worst:.2f} (worst);"
    )
    lines.append(f"effective size of the number of groups {size:.0f}.")
    return lines
