"""`Kin.summary`: the result as text, in the manner of statsmodels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtri

from fedkin._base import count, some_of

if TYPE_CHECKING:
    from fedkin.kin.result import Kin

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


def _header(kin: Kin) -> list[str]:
    likely = int(np.argmax(kin.n_groups))
    left = [
        ("Loss", kin.loss.name),
        ("Sites", str(len(kin.devices))),
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
        members = [kin.devices[u] for u in np.flatnonzero(kin.groups == k)]
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
