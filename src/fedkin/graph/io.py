"""Read and write graph files, CSV edge lists and GraphML, and convert to networkx."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import ParseError

import numpy as np

from fedkin._base import Array, Index, in_file, listed, replacing
from fedkin.data import CSV_SUFFIXES, infer_column, read_cells, write_csv
from fedkin.errors import DataError, GraphError, missing_dependency
from fedkin.graph.edges import warn_of_unnamed

_WHOLE_NUMBER = re.compile(r"(0|-?[1-9][0-9]*)(?:\.0*)?")  # a table with gaps makes 7.0 of 7

_Listing = tuple[list[str], list[tuple[str, str]], "list[float] | None"]  # sites, edges, weights


def read_graph(path: Path, ids: tuple[Hashable, ...] | None) -> tuple[Iterable[Hashable], list[Any], Any]:
    """Read the sites, edges and weights of a file; ``ids`` are the sites that its names stand for, if known."""
    named, ends, weights = _reader(path)(path, ids)
    known = _named_in_file(named) if ids is None else _named_among(named, ids)
    nodes = tuple(dict.fromkeys(known.values())) if ids is None else ids
    seen = set(known.values())
    warn_of_unnamed([site for site in nodes if site not in seen])
    return nodes, [(known[u], known[v]) for u, v in ends], weights


def _reader(path: Path) -> Callable[[Path, tuple[Hashable, ...] | None], _Listing]:
    suffix = path.suffix.lower()
    if suffix == ".graphml":
        return _read_graphml
    if suffix in CSV_SUFFIXES:
        return _read_edge_list
    raise GraphError(
        f"cannot tell the format from the suffix {path.suffix!r}, "
        f"expected one of {', '.join((*CSV_SUFFIXES, '.graphml'))}"
    )


def _read_edge_list(path: Path, sites: tuple[Hashable, ...] | None) -> _Listing:
    header, columns = read_cells(path)
    if len(header) < 2:
        raise GraphError(f"an edge list needs two columns for the ends, got {listed(header)}")
    lower = [name.lower() for name in header]
    standard = "source" in lower and "target" in lower
    at = (lower.index("source"), lower.index("target")) if standard else (0, 1)
    sources, targets = ([cell.strip() for cell in columns[k]] for k in at)
    named = list(dict.fromkeys(name for pair in zip(sources, targets, strict=True) for name in pair if name))
    if not standard:
        likely = set(named) if sites is None else set(named) | {str(site) for site in sites}
        if all(header[k] in likely or _WHOLE_NUMBER.fullmatch(header[k]) for k in at):
            raise GraphError(
                f"line 1 looks like the edge ({header[at[0]]}, {header[at[1]]}), "
                "expected a header such as source,target"
            )
    weights = infer_column(columns[lower.index("weight")]) if "weight" in lower else None
    if weights is not None and weights.dtype.kind != "f":
        raise GraphError(f"the column weight must be numeric, got {next(w for w in weights if w is not None)!r}")
    ends, kept = [], []
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if not source:
            raise GraphError(f"row {row} after the header has no site in the column {header[at[0]]!r} (counted from 0)")
        if target:
            ends.append((source, target))
            kept.append(row)
    return named, ends, None if weights is None else weights[kept].tolist()


def _read_graphml(path: Path, sites: tuple[Hashable, ...] | None) -> _Listing:
    networkx = _require_networkx("reading GraphML")
    if not path.is_file():
        raise GraphError("there is no file of this name: check the path")
    try:
        g = networkx.read_graphml(path)
    except (ParseError, networkx.NetworkXError, KeyError, ValueError) as error:
        raise GraphError(f"not a whole GraphML file ({error}); write or copy it again") from None
    if g.is_directed():
        raise GraphError('the graph is directed, but edges here have no direction: set edgedefault="undirected"')
    triples = list(g.edges(data="weight", default=1.0))
    return [str(node) for node in g], [(str(u), str(v)) for u, v, _ in triples], [weight for _, _, weight in triples]


def write_graph(path: Path, sites: tuple[Hashable, ...], edges: Index, weights: Array) -> None:
    """Write sites, edges ``(E, 2)`` as pairs of their positions and weights ``(E,)``; `Graph.write` says how."""
    with in_file(path, GraphError):
        _reader(path)  # the same suffixes
    names = [str(site) for site in sites]
    _ids_by_text(sites)
    for site, name in zip(sites, names, strict=True):
        if not name or name != name.strip():
            raise GraphError(f"site {site!r} is empty or padded with blanks as text, which a file cannot keep")
    try:
        if path.suffix.lower() == ".graphml":
            g = networkx_graph(tuple(names), edges, weights, "writing GraphML")
            if not path.parent.is_dir():
                raise GraphError(f"cannot write {path}: there is no directory {path.parent}")
            with replacing(path) as temporary:
                _require_networkx("writing GraphML").write_graphml(g, temporary)
        else:
            write_csv(path, *_csv_rows(names, edges, weights))
    except DataError as error:
        raise GraphError(str(error)) from None


def _csv_rows(names: list[str], edges: Index, weights: Array) -> tuple[list[str], list[list[object]]]:
    ends = [(names[j], names[i]) for i, j in edges.tolist()]
    degree = np.bincount(edges.ravel(), minlength=len(names))
    alone = [names[u] for u in np.flatnonzero(degree == 0)]
    in_order = list(dict.fromkeys([*(name for pair in ends for name in pair), *alone])) == names
    weighted = not np.all(weights == 1)
    header = ["source", "target", "weight"] if weighted else ["source", "target"]
    each = zip(ends, weights.tolist(), strict=True)
    joined: list[list[object]] = [[*pair, weight] if weighted else [*pair] for pair, weight in each]
    named: list[list[object]] = [[name, *[""] * (len(header) - 1)] for name in (alone if in_order else names)]
    return header, joined + named if in_order else named + joined  # naming all sites first keeps their order


def networkx_graph(sites: tuple[Hashable, ...], edges: Index, weights: Array, purpose: str) -> Any:
    """Return a `networkx.Graph` with the edge attribute ``weight``; ``purpose`` is for the error without networkx."""
    g = _require_networkx(purpose).Graph()
    g.add_nodes_from(sites)
    ends = zip(edges.tolist(), weights.tolist(), strict=True)
    g.add_weighted_edges_from((sites[j], sites[i], weight) for (i, j), weight in ends)
    return g


def _ids_by_text(ids: Sequence[Hashable]) -> dict[str, Hashable]:
    known: dict[str, Hashable] = {}
    for site in ids:
        if str(site) in known:
            raise GraphError(f"sites {known[str(site)]!r} and {site!r} look the same in a file: rename one of them")
        known[str(site)] = site
    return known


def _named_in_file(named: list[str]) -> dict[str, Hashable]:
    """Return the sites that the names of a file stand for: ints if all of them are whole numbers, else text."""
    numbers = {name: int(match[1]) for name in named if (match := _WHOLE_NUMBER.fullmatch(name))}
    return {**numbers} if len(numbers) == len(named) else {name: name for name in named}


def _named_among(named: list[str], ids: tuple[Hashable, ...]) -> dict[str, Hashable]:
    """Return the sites among `ids` that the names of a file stand for."""
    by_text = _ids_by_text(ids)
    known: dict[str, Hashable] = {}
    for name in named:
        match = _WHOLE_NUMBER.fullmatch(name)
        text = match[1] if match and name not in by_text else name
        if text not in by_text:
            raise GraphError(f"it names site {name!r}, which is not among the {len(ids)} sites ({listed(ids)})")
        known[name] = by_text[text]
    return known


def _require_networkx(purpose: str) -> Any:
    try:
        import networkx
    except ImportError:
        raise missing_dependency("networkx", purpose, extra="graph") from None
    return networkx
