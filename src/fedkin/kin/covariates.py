"""Graphs of sites with similar covariates."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial import cKDTree

from fedkin._base import Array, Index, count, listed
from fedkin.data import is_missing, is_missing_text, near_name, read_columns, row_places, site_id, site_ids
from fedkin.errors import DataError, ParameterError
from fedkin.graph import Graph

#: Covariates of sites: for each site a number, a label, a row of these or {name: value}; an array in the order of the
#: sites; or a pandas table indexed by site.
Covariates = Mapping[Hashable, Any] | Sequence[Any] | Array
#: Default names of the site column.
_SITE_COLUMNS = ("site", "device")


def covariate_graph(covariates: Covariates, sites: Sequence[Hashable]) -> Graph:
    """Return edges between sites with similar covariates.

    Parameters
    ----------
    covariates : mapping {site: value, row or {name: value}}, array (V, q) or pandas table
        Numbers, and labels as text. An array is in the order of ``sites``; a table is indexed by site. Sites that are
        not among ``sites`` are ignored.
    sites : sequence of V ids
        The sites of the graph.

    Returns
    -------
    Graph
        A column of labels joins all sites with the same label. Numeric columns are standardised together, and each site
        is joined to its nearest neighbours (the square root of the number of sites, and ties). With several such
        sources, the weight of an edge is the share of sources that join its ends.

    Raises
    ------
    DataError
        For a site without covariates, a missing value, and columns that do not distinguish sites.

    Examples
    --------
    >>> from fedkin.kin import covariate_graph
    >>> covariate_graph({"a": "north", "b": "south", "c": "north"}, ("a", "b", "c")).n_edges
    1
    >>> covariate_graph([[0.0, 1.0], [0.1, 1.0], [5.0, 7.0], [5.0, 7.1]], range(4)).n_edges
    5
    >>> rows = {"a": {"region": "north", "beds": 80}, "b": {"region": "north", "beds": 90}}
    >>> covariate_graph({**rows, "c": {"region": "south", "beds": 85}}, "abc").weights.tolist()
    [1.0, 0.5, 0.5]
    """
    sites = tuple(sites)
    columns = _columns(covariates, sites)
    labels = [values.tolist() for values in columns.values() if values.dtype.kind != "f"]
    hints = [Graph.clusters(each, sites) for each in labels if 1 < len(set(each)) < len(sites)]
    table = np.column_stack([np.zeros(len(sites)), *(one for one in columns.values() if one.dtype.kind == "f")])
    scale = table.std(axis=0)
    used = scale > 1e-12 * np.abs(table).max(axis=0, initial=0.0)
    if used.any():
        hints.append(Graph.from_indices(sites, _nearest(table[:, used] / scale[used])))
    if not hints:
        useless = "covariates are the same for all sites, or labels that no two sites share"
        raise DataError(f"{useless}: they do not show which sites are alike")
    if len(hints) == 1:
        return hints[0]
    every = np.concatenate([np.sort(hint.edges, axis=1) for hint in hints])
    edges, number = np.unique(every, axis=0, return_counts=True)
    return Graph.from_indices(sites, edges, number / len(hints))


def covariate_names(covariates: Covariates) -> tuple[str, ...]:
    """Return the names of the covariates: ``covariate 1`` and so on if they have none."""
    given = _as_mapping(covariates)
    row = next(iter(given.values() if isinstance(given, Mapping) else given), ())
    return tuple(_row(row))


def covariate_remarks(covariates: Mapping[Hashable, Mapping[str, Any]]) -> list[str]:
    """Return notes on columns that are numbers but for a few words, and so are read as labels."""
    remarks = []
    for name in covariate_names(covariates):
        cells = {site: row[name] for site, row in covariates.items() if name in row}
        words = [site for site, cell in cells.items() if not _is_number(cell) and not _reads_as_number(str(cell))]
        if 0 < 2 * len(words) < len(cells):
            wrong = f"{cells[words[0]]!r} (site {words[0]!r}) is no number"
            remarks.append(f"{name!r} is read as labels, since {wrong}: correct it to compare sites by number")
    return remarks


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def hint_of(graph: Graph | None, covariates: Covariates | None, sites: Sequence[Hashable]) -> Graph | None:
    """Return the given graph, or one built from the covariates."""
    if covariates is None:
        return graph
    if graph is not None:
        raise ParameterError("give a graph or covariates, not both: covariates become a graph")
    return covariate_graph(covariates, sites)


def read_covariates(
    path: str | os.PathLike[str], sites: Iterable[Hashable], site_column: str | None = None
) -> dict[Hashable, dict[str, Any]]:
    """Read covariates from a CSV or Parquet file with one line per site.

    Parameters
    ----------
    path : path
        One column names the sites; all others are covariates. Text is a label.
    sites : iterable of ids
        The sites that need a line; lines of other sites are left out.
    site_column : str, optional
        The column that names the sites, by default ``site`` or ``device``.

    Returns
    -------
    dict {site: {name: value}}

    Raises
    ------
    DataError
        For a site without a line or with two, and for missing cells; it names the file.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from fedkin.kin import read_covariates
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "sites.csv")
    ...     _ = file.write_text("site,region,beds\\na,north,80\\nb,south,90\\n")
    ...     read_covariates(file, ["a", "b"])["b"]
    {'region': 'south', 'beds': 90.0}
    """
    columns = {str(name): values for name, values in read_columns(Path(path)).items()}
    place = row_places(Path(path), columns)
    known = (site_column,) if site_column is not None else _SITE_COLUMNS
    column = next((name for name in known if name in columns), None)
    if column is None:
        near = "" if site_column is None else near_name(site_column, columns)
        raise DataError(
            f"{path}: there is no column {' or '.join(map(repr, known))} for the site{near}; it has "
            f"{listed(columns, 20)}: give the site column the same name as in the data"
        )
    names = [name for name in columns if name != column]
    if not names:
        raise DataError(f"{path} has only the column {column!r}: add columns with covariates of the sites")
    lines: dict[str, int] = {}
    for number, site in enumerate(site_ids(columns[column])):
        if str(site) in lines:
            both = f"{place(lines[str(site)])} and {place(number)}"
            raise DataError(f"{path} has site {site!r} twice, in {both}: keep one of them")
        lines[str(site)] = number
    found: dict[Hashable, dict[str, Any]] = {}
    for site in sites:
        if str(site) not in lines:
            missing = f"{path} has no line for site {site!r}{near_name(str(site), lines)}"
            raise DataError(f"{missing}: add one, since every site with rows needs it")
        cells = {name: columns[name][lines[str(site)]] for name in names}
        absent = [name for name, cell in cells.items() if is_missing(cell) or is_missing_text(str(cell))]
        if absent:
            where = f"{path}, {place(lines[str(site)])}"
            raise DataError(f"{where}: {absent[0]!r} of site {site!r} is missing: fill it, or leave the column out")
        found[site] = {name: float(cell) if _is_number(cell) else str(cell) for name, cell in cells.items()}
    return found


def _columns(covariates: Covariates, sites: tuple[Hashable, ...]) -> dict[str, Any]:
    """Return columns in the order of the sites: numbers as floats, labels as objects."""
    given = _as_mapping(covariates)
    if isinstance(given, Mapping):
        missing = [site for site in sites if site not in given]
        if missing:
            near = near_name(str(missing[0]), [str(one) for one in given])
            raise DataError(f"there are no covariates of site {missing[0]!r}{near}: add them")
        rows = [_row(given[site]) for site in sites]
    else:
        if len(given) != len(sites):
            raise DataError(
                f"covariates have {count(len(given), 'row')}, but there are {count(len(sites), 'site')}: give one "
                "row per site in the order of the sites, or a mapping {site: row}"
            )
        rows = [_row(one) for one in given]
    names = tuple(rows[0]) if rows else ()
    for site, row in zip(sites, rows, strict=True):
        if tuple(row) != names:
            raise DataError(
                f"the covariates of site {site!r} are {listed(row, 20)}, but those of {sites[0]!r} are "
                f"{listed(names, 20)}: give every site the same ones"
            )
        absent = [name for name, value in row.items() if is_missing(value) or value in (np.inf, -np.inf)]
        if absent:
            raise DataError(f"{absent[0]} of site {site!r} is missing: leave the covariate out, or fill it")
    columns = {}
    for name in names:
        cells = [row[name] for row in rows]
        numeric = all(map(_is_number, cells))
        columns[name] = np.array(cells, float) if numeric else np.array(list(map(str, cells)), object)
    return columns


def _as_mapping(covariates: Any) -> Mapping[Hashable, Any] | Sequence[Any] | Array:
    """Return the covariates, with a pandas table converted to {site: row}."""
    if isinstance(covariates, Mapping):
        return covariates
    if hasattr(covariates, "to_dict") and hasattr(covariates, "index"):
        if not covariates.index.is_unique:
            twice = covariates.index[covariates.index.duplicated()][0]
            raise DataError(f"the covariates have two rows of site {twice!r}: keep one of them")
        table = covariates.to_dict("index") if hasattr(covariates, "columns") else covariates.to_dict()
        return {site_id(site): row for site, row in table.items()}
    return covariates if isinstance(covariates, Sequence) else np.asarray(covariates)


def _row(value: Any) -> dict[str, Any]:
    """Return the covariates of one site, by name."""
    if isinstance(value, Mapping):
        return {str(name): one for name, one in value.items()}
    if isinstance(value, str) or not isinstance(value, Iterable):
        value = [value]
    return {f"covariate {k + 1}": one for k, one in enumerate(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | Decimal | np.bool_)


def _nearest(points: Array) -> Index:
    """Return pairs ``(E, 2)`` of points, one of which is among the nearest of the other."""
    V = len(points)
    near = min(V - 1, max(2, round(V**0.5)))
    tree = cKDTree(points)
    far = np.asarray(tree.query(points, k=near + 1)[0])[:, -1]
    found = tree.query_ball_point(points, far * (1 + 1e-12))
    pairs = {(min(u, v), max(u, v)) for u, others in enumerate(found) for v in others if u != v}
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
