"""What the report page shows, as one mapping of plain values that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkin._base import Array, Index
from fedkin.kin.display import by_size
from fedkin.report.arrays import (
    MOST_PAIRED_SITES,
    display_order,
    nearest_kin,
    number,
    numbers,
    packed,
    pair_matrix,
)
from fedkin.report.places import state_tiles
from fedkin.report.words import headline, reproduction, trust

if TYPE_CHECKING:  # loads what fits models
    from fedkin.fitting import FittedModel
    from fedkin.kin import Kin

#: Of what the page and this module agree on.
PAYLOAD_VERSION = 1
#: Probability that the intervals promise.
LEVEL = 0.95
#: Estimates that a page holds; where there are more, the coefficients that differ least between sites are left out.
MOST_ESTIMATES = 100_000
#: Up to this many sites all pairs are looked at; above it, those of some sites.
MOST_DENSE_SITES, SAMPLED_SITES = 6_000, 3_000
#: Errors of differences (pairs of sites times coefficients) that a page holds; where there are more, it has none.
MOST_DIFFERENCES = 400_000
#: The largest ratio of such an error to that of independent sites that a page can tell.
MOST_RATIO = 4.0
#: Edges that a page holds.
MOST_EDGES = 20_000
#: Sites whose groups along the path a page holds.
MOST_PATH_SITES = 400
METHODS = ("Local", "Global", "Site intercepts", "Fedkin")


def report_payload(model: FittedModel, places: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything that the report of a model shows.

    Parameters
    ----------
    model : FittedModel
        With ``kin``, ``comparison`` and ``history`` where it has them.
    places : mapping, optional
        Where the sites are, as `fedkin.report.read_coordinates` gives it. States of the USA are recognised without.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit_federation
    >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
    >>> model = fit_federation(fed, None, FitOptions(loss="mean", lam=0.02, select="none"))
    >>> report_payload(model)["headline"]
    '4 sites form 2 groups.'
    """
    kin = model.kin
    groups, resolved = group_labels(model)
    pairs = _pairs(model, kin, groups)
    comparison = _comparison(model)
    title, lead = headline(model, groups, resolved, comparison)
    return {
        "version": PAYLOAD_VERSION,
        "headline": title,
        "lead": lead,
        "method": "fused" if kin is None else "kin",
        "resolved": resolved,
        "about": {
            "sites": model.n_sites,
            "rows": int(model.n_samples.sum()),
            "features": model.n_features,
            "groups": int(groups.max()) + 1 if resolved else 0,
            "target": model.target_name,
            "loss": model.loss.name,
            "link": model.loss.link,
        },
        "sites": {
            "names": [str(site) for site in model.sites],
            "rows": model.n_samples.tolist(),
            "groups": groups.tolist(),
            "notes": {str(model.index[site]): list(lines) for site, lines in model.notes.items()},
        },
        **pairs,
        "places": dict(places) if places is not None else state_tiles(model.sites),
        "coefficients": _coefficients(model, kin),
        "comparison": comparison,
        "path": _path(model),
        "trust": trust(model),
        "reproduction": reproduction(model),
    }


def group_labels(model: FittedModel) -> tuple[Index, bool]:
    """Group of each site, 0 for the largest, and whether there are groups to believe in."""
    kin = model.kin
    if kin is not None:
        return np.asarray(kin.groups, dtype=np.int64), bool(kin.resolved)
    resolved = 1 < model.n_clusters < model.n_sites
    return by_size(model.clusters if resolved else np.zeros(model.n_sites, dtype=np.int64)), resolved


def _pairs(model: FittedModel, kin: Kin | None, groups: Index) -> dict[str, Any]:
    """What is known of pairs of sites: the order of the matrix, its cells, the nearest of each site, edges to draw."""
    V = model.n_sites
    if V <= MOST_DENSE_SITES:
        shares = shares_of(model, np.arange(V))
        order = display_order(shares, groups)
        matrix = pair_matrix(shares, order)
        nearest = nearest_kin(shares) if V > MOST_PAIRED_SITES else None
    else:  # means of blocks from some sites of each
        shares, nearest, order = None, None, np.argsort(groups, kind="stable")
        some = np.unique(np.linspace(0, V - 1, SAMPLED_SITES).astype(np.int64))
        matrix = pair_matrix(shares_of(model, order[some]), np.arange(some.size))
        matrix["starts"] = [*some[matrix["starts"][:-1]].tolist(), V]
    edges = _edges(model, kin, shares)
    return {"order": order.tolist(), "matrix": matrix, "nearest": nearest, "edges": edges}


def shares_of(model: FittedModel, sites: Index) -> Array:
    """Shares of all pairs of some sites: the probability of being kin, or of fused models what they have in common.

    In common are the coefficients that are equal, among those that are not equal everywhere.
    """
    kin = model.kin
    if kin is not None:
        if hasattr(kin.probability, "block"):
            return np.asarray(kin.probability.block(sites, sites))
        return np.asarray(kin.probability, dtype=np.float64)[np.ix_(sites, sites)]
    whole = np.concatenate([model.intercept, model.coef.reshape(model.n_sites, -1)], axis=1)
    used = whole[:, np.ptp(whole, axis=0) > 0]
    if not used.shape[1]:
        return np.ones((sites.size, sites.size))
    equal = np.zeros((sites.size, sites.size), dtype=np.float32)
    scale = 1e-9 * np.abs(used).max(axis=0)
    for j in range(used.shape[1]):
        level = np.rint(used[sites, j] / scale[j])
        equal += level[:, None] == level
    return np.asarray(equal / used.shape[1], dtype=np.float64)


def _edges(model: FittedModel, kin: Kin | None, shares: Array | None) -> dict[str, Any]:
    """Edges to draw. Those of a kin fit are pairs that are kin rather than not."""
    history = model.history or {}
    if kin is None:
        kept, what = model.graph.edges, "kept"
    elif shares is None:
        kept, what = np.empty((0, 2), dtype=np.int64), "likely"
    else:
        i, j = np.nonzero(np.tril(shares, -1) >= 0.5)
        kept, what = np.column_stack([i, j]), "likely"
    dropped = history.get("dropped", {}).get("edges", [])
    candidates = None if model.selection is None else model.selection.get("candidates")
    return {
        "what": what,
        "n_kept": len(kept),
        "n_candidates": candidates,
        "kept": packed(kept if len(kept) <= MOST_EDGES else [], "i4"),
        "dropped": packed(dropped, "i4") if dropped and len(dropped) <= MOST_EDGES else None,
        "n_dropped": None if candidates is None else candidates - len(kept),
        "complete": len(kept) <= MOST_EDGES,
    }


def _coefficients(model: FittedModel, kin: Kin | None) -> dict[str, Any]:
    """Estimates and half widths of intervals ``(V, p)``, in the units of the columns, intercepts first."""
    V, k, _ = model.coef.shape
    units = {} if model.schema is None else {column.name: column.unit for column in model.schema.features}
    classes = [None] if k == 1 or model.classes is None else list(model.classes[1:])
    names, blocks, of = [], [], []
    for j, label in enumerate(classes):
        mark = "" if label is None else f" [{label}]"
        if model.fit_intercept:
            names.append(f"(intercept){mark}")
            blocks.append(model.intercept[:, j])
            of.append("")
        for q, name in enumerate(model.feature_names):
            names.append(f"{name}{mark}")
            blocks.append(model.coef[:, j, q])
            of.append(units.get(name) or "")
    theta = np.column_stack(blocks)
    half = None if kin is None else np.ptp(kin.confint(LEVEL), axis=2) / 2
    if half is not None and half.shape != theta.shape:
        half = None  # of other parameters than the model's
    chosen, left_out = np.arange(theta.shape[1]), 0
    most = max(MOST_ESTIMATES // max(V, 1), 1)
    if theta.shape[1] > most:
        varied = np.ptp(theta, axis=0) / np.maximum(np.abs(theta).max(axis=0), 1e-300)
        chosen = np.sort(np.argsort(-varied, kind="stable")[:most])
        left_out = theta.shape[1] - most
    spread = theta.std(axis=0) if kin is None or half is None else kin.sd
    mean = theta.mean(axis=0) if kin is None or half is None else kin.mean
    return {
        "names": [names[j] for j in chosen],
        "units": [of[j] for j in chosen],
        "target": model.target_name,
        "level": LEVEL,
        "estimates": packed(theta[:, chosen], "f4"),
        "halves": None if half is None else packed(half[:, chosen], "f4"),
        "differences": None if kin is None or half is None else _differences(kin, half, chosen),
        "mean": numbers(mean[chosen]),
        "spread": numbers(spread[chosen]),
        "left_out": left_out,
    }


def _differences(kin: Kin, half: Array, chosen: Index) -> str | None:
    """How wide intervals of differences are, a byte for each pair of sites and coefficient; None where there are many.

    A byte is 255 times the root of a quarter of the ratio to the width that independent sites would have.
    """
    from scipy.special import ndtri  # slow to load

    V = len(half)
    if V * (V - 1) // 2 * chosen.size > MOST_DIFFERENCES:
        return None
    error = kin.difference_errors()[:, :, chosen] * float(ndtri(0.5 + LEVEL / 2))
    i, j = np.tril_indices(V, -1)
    apart = np.hypot(half[i][:, chosen], half[j][:, chosen])
    ratio = np.divide(error[i, j], apart, out=np.ones_like(apart), where=(apart > 0) & np.isfinite(apart))
    return packed(np.rint(255 * np.sqrt(np.minimum(ratio / MOST_RATIO, 1.0))), "u1")


def _comparison(model: FittedModel) -> dict[str, Any] | None:
    """What ``comparison.json`` says, with the sites' scores in the order of the model's sites."""
    found = model.comparison
    if not found:
        return None
    place = {str(site): u for u, site in enumerate(model.sites)}
    lines = [line for line in found.get("sites", ()) if str(line.get("site")) in place]
    each: dict[str, list[float | None]] = {}
    for method in METHODS:
        column: list[float | None] = [None] * model.n_sites
        for line in lines:
            column[place[str(line["site"])]] = number(line.get(method))
        if any(value is not None for value in column):
            each[method] = column
    return {
        "metric": str(found["metric"]),
        "lower_is_better": bool(found.get("lower_is_better", True)),
        "repeats": found.get("repeats"),
        "test_size": found.get("test_size"),
        "verdict": str(found.get("verdict", "")),
        "methods": [
            {"name": str(one["name"]), **{key: number(one.get(key)) for key in _MEASURES}} for one in found["methods"]
        ],
        "sites": each,
        "more": {
            str(metric): {str(name): number(value) for name, value in values.items()}
            for metric, values in (found.get("more") or {}).items()
        },
    }


_MEASURES = ("mean", "standard_error", "difference", "difference_error")


def _path(model: FittedModel) -> dict[str, Any] | None:
    """The cross-validation curve and the groups along ``lam``, where the fit kept them."""
    history = model.history or {}
    choice, path = history.get("choice"), history.get("path")
    if not choice and not path:
        return None
    labels = None if not path else path["labels"]
    return {
        "lam": number(model.lam),
        "choice": None
        if not choice
        else {
            "lams": numbers(choice["lams"]),
            "mean": numbers(choice["mean"]),
            "error": numbers(choice["error"]),
            "rule": choice["rule"],
        },
        "groups": None
        if labels is None or not path
        else {
            "lams": numbers(path["lams"]),
            "counts": [len(set(line)) for line in labels],
            "labels": labels if model.n_sites <= MOST_PATH_SITES else None,
        },
    }
