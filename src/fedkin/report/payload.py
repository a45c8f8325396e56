"""Build the data of the report page as one mapping of plain JSON values, which ``web/src/data.ts`` reads."""

from __future__ import annotations

import base64
import os
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform
from scipy.special import ndtri

from fedkin._base import Array, Index, listed
from fedkin.errors import DataError
from fedkin.fitting import FittedModel
from fedkin.kin import Kin, population_sd, read_covariates
from fedkin.report.text import group_labels, headline, number, reproduction, statements

LEVEL = 0.95  # of the intervals
#: Largest number of estimates in a page; beyond it, coefficients that differ least between sites are left out.
MOST_ESTIMATES = 100_000
#: Up to this many sites the page has every pair; above it, this many blocks of neighbouring sites per side.
MOST_PAIRED_SITES, BLOCKS = 1000, 300
#: Up to this many sites all pairs are used; above it, those of a subset of sites.
MOST_DENSE_SITES, SAMPLED_SITES = 6_000, 3_000
#: Largest number of errors of differences in a page (pairs of sites times coefficients), and the largest ratio of such
#: an error to that of independent sites.
MOST_DIFFERENCES, MOST_RATIO = 400_000, 4.0
#: Largest number of edges in a page, and of sites with groups along the path.
MOST_EDGES, MOST_PATH_SITES = 20_000, 400
#: Survival curves in a page, and their times, which are evenly spaced, since steps reveal times of single events.
MOST_CURVES, CURVE_TIMES = 400, 61
METHODS = ("Local", "Global", "Site intercepts", "Fedkin")
_MEASURES = ("mean", "standard_error", "difference", "difference_error")


def report_payload(model: FittedModel, places: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the data of the report of a model."""
    groups, resolved = group_labels(model)
    title, lead = headline(model)
    within = {} if model.kin is None else dict(model.kin.within or ())
    return {
        "headline": title,
        "lead": lead,
        "method": "fused" if model.kin is None else "kin",
        "resolved": resolved,
        "about": {
            "sites": model.n_sites,
            "rows": int(model.n_samples.sum()),
            "features": model.n_features,
            "groups": int(groups.max()) + 1 if resolved else 0,
            "target": model.target_name,
            "loss": model.loss.name,
            "link": model.loss.link,
            "classes": None if model.classes is None else [str(label) for label in model.classes],
        },
        "sites": {
            "names": [str(site) for site in model.sites],
            "rows": model.n_samples.tolist(),
            "groups": groups.tolist(),
            "districts": None if not within else [str(within[site]) for site in model.sites],
            "notes": {str(model.index[site]): list(lines) for site, lines in model.notes.items()},
        },
        **_pairs(model, groups),
        "places": dict(places) if places is not None else state_tiles(model.sites),
        "coefficients": _coefficients(model, groups, resolved),
        "comparison": _comparison(model),
        "survival": _survival(model),
        "path": _path(model),
        "trust": [{"tone": one.tone, "title": one.title, "words": one.whole} for one in statements(model)],
        "reproduction": reproduction(model),
    }


def _pairs(model: FittedModel, groups: Index) -> dict[str, Any]:
    """Return the order and the cells of the matrix of pairs, the nearest sites of each site, and the edges to draw."""
    V = model.n_sites
    if V <= MOST_DENSE_SITES:
        shares = shares_of(model, np.arange(V))
        order = display_order(shares, groups)
        matrix = pair_matrix(shares, order)
        nearest = nearest_kin(shares) if V > MOST_PAIRED_SITES else None
    else:  # means of blocks from a sample of sites in each
        shares, nearest, order = None, None, np.argsort(groups, kind="stable")
        some = np.unique(np.linspace(0, V - 1, SAMPLED_SITES).astype(np.int64))
        matrix = pair_matrix(shares_of(model, order[some]), np.arange(some.size))
        matrix["starts"] = [*some[matrix["starts"][:-1]].tolist(), V]
    return {"order": order.tolist(), "matrix": matrix, "nearest": nearest, "edges": _edges(model, shares)}


def shares_of(model: FittedModel, sites: Index) -> Array:
    """Return the probability that each pair of some sites is alike; for fused models, the share of coefficients that
    are equal, among those that differ somewhere.
    """
    if model.kin is not None:
        probability = model.kin.probability
        if hasattr(probability, "block"):
            return np.asarray(probability.block(sites, sites))
        return np.asarray(probability, dtype=np.float64)[np.ix_(sites, sites)]
    whole = np.concatenate([model.intercept, model.coef.reshape(model.n_sites, -1)], axis=1)
    used = whole[:, np.ptp(whole, axis=0) > 0]
    if not used.shape[1]:
        return np.ones((sites.size, sites.size))
    equal = np.zeros((sites.size, sites.size), dtype=np.float32)
    for level in np.rint(used[sites] / (1e-9 * np.abs(used).max(axis=0))).T:
        equal += level[:, None] == level
    return np.asarray(equal / used.shape[1], dtype=np.float64)


def _edges(model: FittedModel, shares: Array | None) -> dict[str, Any]:
    """Return the edges to draw; for kin these are pairs with probability above one half."""
    kept = model.graph.edges
    if model.kin is not None:
        kept = np.argwhere(np.tril(np.zeros((0, 0)) if shares is None else shares, -1) >= 0.5)
    dropped = (model.history or {}).get("dropped", {}).get("edges", [])
    selection = None if model.fused is None else model.fused.selection
    candidates, complete = None if selection is None else selection.get("candidates"), len(kept) <= MOST_EDGES
    return {
        "what": "kept" if model.kin is None else "likely",
        "n_kept": len(kept),
        "n_candidates": candidates,
        "kept": base64_of(kept if complete else [], "i4"),
        "dropped": base64_of(dropped, "i4") if 0 < len(dropped) <= MOST_EDGES else None,
        "n_dropped": None if candidates is None else candidates - len(kept),
        "complete": complete,
    }


def _coefficients(model: FittedModel, groups: Index, resolved: bool) -> dict[str, Any]:
    """Return estimates and half widths of intervals ``(V, p)``, in the units of the columns, intercepts first.

    With kin, ``population`` has the intervals of the population means. ``first`` is the coefficient that differs most
    between groups, or between sites without groups, and ``unlike`` the distance of sites from the mean, from 0 to 1.
    """
    V, k, _ = model.coef.shape
    marks = [""] if k == 1 or model.classes is None else [f" [{label}]" for label in model.classes[1:]]
    known = {} if model.schema is None else {column.name: column.unit or "" for column in model.schema.features}
    columns, blocks = list(model.feature_names), model.coef
    units = [known.get(name, "") for name in columns]
    if model.fit_intercept:
        columns, units = ["(intercept)", *columns], ["", *units]
        blocks = np.concatenate([model.intercept[:, :, None], blocks], axis=2)
    names, units = [f"{name}{mark}" for mark in marks for name in columns], units * len(marks)
    deviations = (model.history or {}).get("deviations")
    if deviations is not None:
        deviations = [None, *deviations] * len(marks) if model.fit_intercept else deviations * len(marks)
    theta = blocks[:, : len(marks)].reshape(V, -1)  # without class names, those of the first class
    mean, sd, halves, differences, population = theta.mean(axis=0), theta.std(axis=0), None, None, None
    most = max(MOST_ESTIMATES // max(V, 1), 1)
    varied = np.ptp(theta, axis=0) / np.maximum(np.abs(theta).max(axis=0), 1e-300)
    chosen = np.sort(np.argsort(-varied, kind="stable")[:most])
    kin, half = model.kin, None
    if kin is not None and kin.theta.shape == theta.shape:
        half, mean, sd = np.ptp(kin.confint(LEVEL), axis=2) / 2, kin.mean, kin.sd
        halves, differences = base64_of(half[:, chosen], "f4"), _differences(kin, half, chosen)
        ends = kin.population(LEVEL)[chosen]
        parts = {"low": ends[:, 1], "high": ends[:, 2], "sd": population_sd(kin)[chosen]}
        population = {name: numbers(values) for name, values in parts.items()}
    spread = _between(theta, groups) if resolved else sd
    size = np.abs(mean) if half is None else np.nan_to_num(half, posinf=0.0).mean(axis=0)
    varying = (spread / np.maximum(size, 1e-12))[chosen]
    first = np.where([names[j].startswith("(intercept)") for j in chosen], -1.0, varying)
    return {
        "first": int(first.argmax()),
        "unlike": None if resolved else _unlike(theta[:, sd > 0], mean[sd > 0], sd[sd > 0]),
        "names": [names[j] for j in chosen],
        "units": [units[j] for j in chosen],
        "target": model.target_name,
        "level": LEVEL,
        "estimates": base64_of(theta[:, chosen], "f4"),
        "halves": halves,
        "differences": differences,
        "mean": numbers(mean[chosen]),
        "sd": numbers(sd[chosen]),
        "population": population,
        "left_out": theta.shape[1] - chosen.size,
        "deviations": None if deviations is None else [deviations[j] for j in chosen],
    }


def _between(theta: Array, groups: Index) -> Array:
    """Return standard deviations of the groups' means ``(p,)``, sites counting equally."""
    inside = groups[:, None] == np.arange(groups.max() + 1)
    means = inside.T @ theta / inside.sum(axis=0)[:, None]
    return np.asarray(means[groups].std(axis=0))


def _unlike(theta: Array, mean: Array, sd: Array) -> list[float]:
    """Return distances of sites from the mean, from 0 for the nearest to 1; outlying sites do not set the scale."""
    away = np.sqrt((((theta - mean) / sd) ** 2).mean(axis=1)) if sd.size else np.zeros(len(theta))
    low, high = away.min(), np.quantile(away, 0.97, method="lower")
    return [float(one) for one in np.clip((away - low) / max(high - low, 1e-300), 0, 1).round(3)]


def _differences(kin: Kin, half: Array, chosen: Index) -> str | None:
    """Return widths of intervals of differences, a byte per pair of sites and coefficient; None if there are too many.

    A byte is 255 times the root of a quarter of the ratio to the width for independent sites.
    """
    V = len(half)
    if V * (V - 1) // 2 * chosen.size > MOST_DIFFERENCES:
        return None
    error = kin.difference_errors()[:, :, chosen] * float(ndtri(0.5 + LEVEL / 2))
    i, j = np.tril_indices(V, -1)
    apart = np.hypot(half[i][:, chosen], half[j][:, chosen])
    ratio = np.divide(error[i, j], apart, out=np.ones_like(apart), where=(apart > 0) & np.isfinite(apart))
    return base64_of(np.rint(255 * np.sqrt(np.minimum(ratio / MOST_RATIO, 1.0))), "u1")


def _comparison(model: FittedModel) -> dict[str, Any] | None:
    """Return the content of ``comparison.json``, with the sites' scores in the order of the model's sites."""
    found = model.comparison
    if not found:
        return None
    lines = {str(line.get("site")): line for line in found.get("sites", ())}
    keys = (*METHODS, "gain", "gain_error")
    columns = {one: [number(lines.get(str(site), {}).get(one)) for site in model.sites] for one in keys}
    each = {one: column for one, column in columns.items() if any(value is not None for value in column)}
    return {
        "metric": str(found["metric"]),
        "repeats": found.get("repeats"),
        "test_size": found.get("test_size"),
        "verdict": str(found.get("verdict", "")),
        "methods": [
            {"name": str(one["name"]), **{key: number(one.get(key)) for key in _MEASURES}} for one in found["methods"]
        ],
        "sites": {one: column for one, column in each.items() if one in METHODS},
        "gains": each.get("gain"),
        "gain_errors": each.get("gain_error"),
        "constant": [u for u, site in enumerate(model.sites) if str(site) in set(map(str, found.get("constant", ())))],
        "more": {
            str(metric): {str(name): number(value) for name, value in values.items()}
            for metric, values in (found.get("more") or {}).items()
        },
    }


def _survival(model: FittedModel) -> dict[str, Any] | None:
    """Return survival curves of a row with average features at the sites and at a new site, with intervals for kin."""
    if model.baseline is None:
        return None
    times = np.linspace(0.0, max(float(one[-1]) for one in model.baseline.times), CURVE_TIMES)
    places = np.unique(np.linspace(0, model.n_sites - 1, min(model.n_sites, MOST_CURVES)).astype(np.int64)).tolist()
    level = None if model.kin is None else LEVEL
    curves: list[dict[str, Any]] = []
    for site in (*places, None):
        name = object() if site is None else model.sites[site]
        row = model.baseline.at[None]
        found = np.atleast_3d(model.predict_survival(row, name, times, level=level, unseen="population"))
        ends = found.reshape(-1, times.size).round(5).tolist()
        low, high = ends[1:] if level else (None, None)
        curves.append({"site": site, "mean": ends[0], "low": low, "high": high})
    left = model.n_sites - len(places)
    about = {"time": model.target_name or "time", "level": LEVEL, "times": numbers(times), "left_out": left}
    return {**about, "curves": curves}


def _path(model: FittedModel) -> dict[str, Any] | None:
    """Return the cross-validation curve and the groups along ``lam``, if the fit stored them."""
    history = model.history or {}
    choice, path = history.get("choice"), history.get("path")
    if not choice and not path:
        return None
    curves, groups = None, None
    if choice:
        curves = {**{name: numbers(choice[name]) for name in ("lams", "mean", "error")}, "rule": choice["rule"]}
    if path:
        labels = path["labels"] if model.n_sites <= MOST_PATH_SITES else None
        counts = [len(set(line)) for line in path["labels"]]
        groups = {"lams": numbers(path["lams"]), "counts": counts, "labels": labels}
    return {"lam": None if model.fused is None else number(model.fused.lam), "choice": curves, "groups": groups}


# --- arrays -----------------------------------------------------------------------------------------------------


def base64_of(values: ArrayLike, kind: str) -> str:
    """Encode an array in base64: ``kind`` is "f4", "i4" or "u1", little endian."""
    return base64.b64encode(np.ascontiguousarray(values, dtype=np.dtype(kind).newbyteorder("<")).tobytes()).decode()


def numbers(values: ArrayLike) -> list[float | None]:
    """Return a list of `number`."""
    return [number(value) for value in np.asarray(values, dtype=np.float64).ravel().tolist()]


def pair_matrix(values: Array, order: Index) -> dict[str, Any]:
    """Encode shares between 0 and 1 of all pairs of sites ``(V, V)``, or of blocks of ``order`` if there are many
    sites.

    Each pair takes one byte. Only pairs below the diagonal are stored, row by row, with sites in their own order.
    """
    n = len(order)
    if n <= MOST_PAIRED_SITES:
        i, j = np.tril_indices(n, -1)
        return {"kind": "pairs", "values": base64_of(np.rint(255 * values[i, j]), "u1")}
    starts = np.linspace(0, n, BLOCKS + 1).astype(np.int64)
    sums = np.add.reduceat(np.add.reduceat(values[order], starts[:-1], axis=0)[:, order], starts[:-1], axis=1)
    means = sums / np.outer(np.diff(starts), np.diff(starts))
    return {"kind": "blocks", "starts": starts.tolist(), "values": base64_of(np.rint(255 * np.clip(means, 0, 1)), "u1")}


def nearest_kin(values: Array) -> dict[str, Any]:
    """Return the dozen sites with the largest share for each site, for pages without all pairs."""
    own = values.copy()
    np.fill_diagonal(own, -1.0)
    most = min(12, len(own) - 1)
    chosen = np.argpartition(-own, most - 1, axis=1)[:, :most]
    shares = np.take_along_axis(own, chosen, axis=1)
    rank = np.argsort(-shares, axis=1, kind="stable")
    return {
        "each": most,
        "sites": base64_of(np.take_along_axis(chosen, rank, axis=1), "i4"),
        "values": base64_of(np.rint(255 * np.take_along_axis(shares, rank, axis=1)), "u1"),
    }


def display_order(values: Array, groups: Index) -> Index:
    """Return sites in the order of the matrix: by group, with similar sites next to each other within groups."""
    n = len(groups)
    if n < 3:
        return np.argsort(groups, kind="stable")
    apart = 1.0 - (values + values.T) / 2
    np.fill_diagonal(apart, 0.0)
    leaves = leaves_list(linkage(squareform(np.maximum(apart, 0.0), checks=False), "average"))
    place = np.empty(n, dtype=np.int64)
    place[leaves] = np.arange(n)
    return np.lexsort((place, groups))


# --- places -----------------------------------------------------------------------------------------------------

#: Code, column and row in the tile grid, and name of each state.
_STATES = """
AK 0 0 Alaska, ME 10 0 Maine, VT 9 1 Vermont, NH 10 1 New Hampshire, WA 0 2 Washington, ID 1 2 Idaho, MT 2 2 Montana,
ND 3 2 North Dakota, MN 4 2 Minnesota, IL 5 2 Illinois, WI 6 2 Wisconsin, MI 7 2 Michigan, NY 8 2 New York,
RI 9 2 Rhode Island, MA 10 2 Massachusetts, OR 0 3 Oregon, NV 1 3 Nevada, WY 2 3 Wyoming, SD 3 3 South Dakota,
IA 4 3 Iowa, IN 5 3 Indiana, OH 6 3 Ohio, PA 7 3 Pennsylvania, NJ 8 3 New Jersey, CT 9 3 Connecticut,
CA 0 4 California, UT 1 4 Utah, CO 2 4 Colorado, NE 3 4 Nebraska, MO 4 4 Missouri, KY 5 4 Kentucky,
WV 6 4 West Virginia, VA 7 4 Virginia, MD 8 4 Maryland, DE 9 4 Delaware, AZ 1 5 Arizona, NM 2 5 New Mexico,
KS 3 5 Kansas, AR 4 5 Arkansas, TN 5 5 Tennessee, NC 6 5 North Carolina, SC 7 5 South Carolina,
DC 8 5 District of Columbia, OK 3 6 Oklahoma, LA 4 6 Louisiana, MS 5 6 Mississippi, AL 6 6 Alabama, GA 7 6 Georgia,
HI 0 7 Hawaii, TX 3 7 Texas, FL 8 7 Florida
"""
_ENTRIES = [entry.split(maxsplit=3) for entry in _STATES.split(",")]
TILES = {code: (int(x), int(y)) for code, x, y, _ in _ENTRIES}
_CODES = {name.strip().casefold(): code for code, _, _, name in _ENTRIES}
_HEADS = ({"x", "lon", "longitude", "easting"}, {"y", "lat", "latitude", "northing"})


def state_tiles(sites: Sequence[Hashable]) -> dict[str, Any] | None:
    """Return a tile map if all sites are states of the USA, by code or by name; None otherwise."""
    codes = [_code(site) for site in sites]
    if len(codes) < 3 or None in codes or len(set(codes)) < len(codes):
        return None
    return {"kind": "tiles", "codes": codes, "tiles": [[code, x, y] for code, (x, y) in TILES.items()]}


def _code(site: Hashable) -> str | None:
    words = str(site).strip().replace("_", " ")
    return words.upper() if words.upper() in TILES else _CODES.get(words.casefold())


def read_coordinates(path: str | os.PathLike[str], sites: Sequence[Hashable]) -> dict[str, Any]:
    """Read the map from a CSV file with a column ``site`` and two of coordinates: ``x,y`` or ``lon,lat``.

    Raises `DataError` for missing columns, and for sites without a line.
    """
    lines = list(read_covariates(path, sites).values())
    across, up = (next((name for name in lines[0] if name.casefold() in heads), None) for heads in _HEADS)
    if across is None or up is None:
        raise DataError(f"{path} has {listed(lines[0])}, expected site and x, y (or lon, lat): rename its columns")
    try:
        x, y = ([number(float(line[name])) for line in lines] for name in (across, up))
    except ValueError as error:
        raise DataError(f"{path}: a coordinate is not a number: {error}") from None
    return {"kind": "points", "globe": across.casefold().startswith("lon"), "x": x, "y": y}
