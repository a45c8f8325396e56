"""Store edges as arrays or cliques, check ids and edges, and read and write graph files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import ParseError

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from fedkin._base import Array, Index, count, frozen, in_file, listed, repeated, replacing
from fedkin.data import CSV_SUFFIXES, infer_column, read_cells, site_ids, write_csv
from fedkin.errors import DataError, GraphError, GraphWarning, missing_dependency

#: More edges than this are not listed.
MOST_LISTED = 50_000_000
_WHOLE_NUMBER = re.compile(r"(0|-?[1-9][0-9]*)(?:\.0*)?")  # tables with missing cells turn 7 into 7.0
_Listing = tuple[list[str], list[tuple[str, str]], "list[float] | None"]  # sites, edges, weights


@dataclass(frozen=True, eq=False)
class Cliques:
    """Disjoint cliques: ``labels (V,)`` numbered from 0 by first appearance, and ``weights (V,)`` of the sites."""

    labels: Index
    weights: Array

    @classmethod
    def from_labels(cls, labels: Iterable[Hashable], weights: Array | None = None) -> Cliques:
        """Make one clique per label."""
        number: dict[Hashable, int] = {}
        numbered = np.array([number.setdefault(label, len(number)) for label in labels], dtype=np.int64)
        return cls(frozen(numbered), frozen(np.ones(numbered.size) if weights is None else weights))

    @classmethod
    def from_components(cls, labels: Index, edges: Index, weights: Array) -> Cliques | None:
        """Return the components ``labels (V,)`` as cliques; None if edges are missing or their weights differ."""
        weight = np.ones(int(labels.max()) + 1)
        weight[labels[edges[:, 0]]] = weights
        found = cls(labels, frozen(np.sqrt(weight)[labels]))
        whole = found.n_edges == len(edges) and (weight[labels[edges[:, 0]]] == weights).all()
        return found if whole else None

    @property
    def n_sites(self) -> int:
        return self.labels.size

    @cached_property
    def sizes(self) -> Index:
        """Sites of each clique."""
        return np.bincount(self.labels)

    @cached_property
    def n_edges(self) -> int:
        return int((self.sizes * (self.sizes - 1) // 2).sum())

    @cached_property
    def followers(self) -> Index:
        """Pairs ``(n, 2)`` of consecutive sites in the `order` of a clique; these edges connect it."""
        joined = np.flatnonzero(self.labels[self.order[1:]] == self.labels[self.order[:-1]])
        return np.column_stack([self.order[joined + 1], self.order[joined]])

    @cached_property
    def order(self) -> Index:
        """Sites ordered by clique."""
        return np.argsort(self.labels, kind="stable")

    @cached_property
    def starts(self) -> Index:
        """Start of each clique in `order`, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @cached_property
    def totals(self) -> Array:
        """Total site weight of each clique."""
        return np.bincount(self.labels, self.weights).astype(np.float64)

    @cached_property
    def lightest(self) -> float:
        """Smallest edge weight; infinite without edges."""
        order, first = self._sorted(self.weights)[0], self.starts[:-1][self.sizes > 1]
        return float((self.weights[order[first]] * self.weights[order[first + 1]]).min(initial=np.inf))

    def listed(self) -> tuple[Index, Array]:
        """Return edges ``(E, 2)`` in the order of `Graph.edges`, and their weights ``(E,)``."""
        if self.n_edges > MOST_LISTED:
            raise GraphError(
                f"{count(self.n_edges, 'edge')} are too many to list, and only the exact solver with the l1 penalty "
                "works without a list; use a graph with fewer edges, for example Graph.knn(coordinates, k)"
            )
        groups = np.split(self.order, self.starts[1:-1])
        pairs = [group[np.column_stack(np.tril_indices(group.size, -1))] for group in groups if group.size > 1]
        edges = np.concatenate([np.empty((0, 2), dtype=np.int64), *pairs])
        if len(groups) > 1:
            edges = edges[np.lexsort((edges[:, 1], edges[:, 0]))]
        return edges, self.weights[edges[:, 0]] * self.weights[edges[:, 1]]

    def moved(self, position: Index, n_sites: int) -> Cliques:
        """Return the cliques if site u is at ``position[u]`` of ``n_sites``; other sites are isolated."""
        labels, weights = np.arange(self.sizes.size, self.sizes.size + n_sites), np.ones(n_sites)
        labels[position], weights[position] = self.labels, self.weights
        return Cliques.from_labels(labels.tolist(), weights)

    def equal_groups(self, theta: Array) -> Index:
        """Return labels ``(V,)``, by first appearance, of sites of one clique with equal rows of ``theta (V, p)``."""
        rows = np.column_stack([self.labels, theta + 0.0])  # -0.0 equals 0.0
        codes = np.unique(rows, axis=0, return_inverse=True)[1]
        return Cliques.from_labels(codes.ravel().tolist()).labels

    def variation(self, theta: Array) -> Array:
        """Return ``sum_e w_e |theta_i - theta_j|_1`` of each clique."""
        total = np.zeros(self.sizes.size)
        for values in theta.T:
            order, before = self._sorted(values)
            counts = 2.0 * before - self.totals[self.labels[order]] - self.weights[order]
            total += np.bincount(self.labels[order], counts * self.weights[order] * values[order])
        return total

    def congestion(self, flow: Array) -> Array:
        """Return the largest ``|flow(S)| / w(edges that leave S)`` for each clique and column of ``flow (V, p)``.

        The result has shape ``(C, p)``. Edge duals within ``L w_e`` exist for exactly those balances whose congestion
        is at most L and that sum to 0.
        """
        out = np.zeros((self.sizes.size, flow.shape[1]))
        for c, values in enumerate(flow.T):
            # the extreme sets are the first sites by flow per weight
            order, before = self._sorted(values / self.weights)
            labels = self.labels[order]
            carried = np.cumsum(values[order])
            carried -= np.concatenate([[0.0], carried])[self.starts[labels]]
            leaving = before * (self.totals[labels] - before)
            inner = np.ones(order.size, dtype=bool)
            inner[self.starts[1:] - 1] = False
            np.maximum.at(out[:, c], labels[inner], np.abs(carried[inner]) / leaving[inner])
        return out

    def _sorted(self, values: Array) -> tuple[Index, Array]:
        """Sort sites by clique and ``values (V,)``; return also the weight in the clique up to each of them."""
        order = np.argsort(values) if self.sizes.size == 1 else np.lexsort((values, self.labels))
        weight = np.cumsum(self.weights[order])
        return order, weight - np.concatenate([[0.0], weight])[self.starts[self.labels[order]]]


# --- ids and edges ----------------------------------------------------------------------------------------------


def plain_ids(values: Iterable[object], what: str) -> list[Hashable]:
    """Return ids as plain Python values."""
    if isinstance(values, int):
        raise GraphError(f"{what} must be an iterable of ids, got {values!r}: use range({values})")
    try:
        return site_ids(values)
    except DataError as error:
        raise GraphError(f"{what}: {error}") from None


def distinct_sites(sites: Iterable[object]) -> tuple[Hashable, ...]:
    """Return the ids of sites, each named once."""
    ids = tuple(plain_ids(sites, "sites"))
    if not ids:
        raise GraphError("a graph needs at least one site, got none")
    if twice := repeated(ids):
        raise GraphError(f"site {twice[0]!r} is given twice: every site must be named once")
    return ids


def ids_for(sites: Iterable[object] | None, size: int, what: str) -> tuple[Hashable, ...]:
    """Return site ids for ``size`` values, one per site; 0..size-1 by default."""
    ids = distinct_sites(range(size) if sites is None else sites)
    if len(ids) != size:
        raise GraphError(f"{count(size, what)} for {count(len(ids), 'site')}: give one {what} per site")
    return ids


def positions_of(edges: Iterable[Any], index: Mapping[Hashable, int]) -> Index:
    """Return edges given as pairs of ids as positions ``(E, 2)``; raise an error that names an unknown site."""
    flat: list[int] = []
    for pair in edges.tolist() if isinstance(edges, np.ndarray) else edges:
        if not isinstance(pair, (tuple, list, np.ndarray)) or len(pair) != 2:
            raise GraphError(f"an edge is a pair of site ids, got {pair!r}; weights have their own argument")
        for end in pair:
            try:
                flat.append(index[end])
            except KeyError:
                raise GraphError(
                    f"edge {tuple(pair)!r} names site {end!r}, which is not among the {count(len(index), 'site')} of "
                    "the graph; add the site or remove the edge"
                ) from None
            except TypeError:
                raise GraphError(f"edge {tuple(pair)!r}: {end!r} cannot be a site id") from None
    return np.array(flat, dtype=np.int64).reshape(-1, 2)


def sorted_edges(index: Index, weights: Array | None) -> tuple[Index, Array]:
    """Return pairs with the larger position first, in lexicographic order, and their weights, 1 by default."""
    i, j = index.max(axis=1), index.min(axis=1)
    order = np.argsort(i * (i.max(initial=0) + 1) + j, kind="stable")
    return np.column_stack([i[order], j[order]]), np.ones(len(index)) if weights is None else weights[order]


def component_labels(size: int, edges: Index) -> Index:
    """Number the connected components of the positions by first appearance, as scipy does."""
    adjacency = sparse.coo_array((np.ones(len(edges)), edges.T), shape=(size, size))
    return connected_components(adjacency, directed=False)[1].astype(np.int64)


def checked_edges(ids: tuple[Hashable, ...], index: Index, weights: npt.ArrayLike | None) -> tuple[Index, Array]:
    """Return oriented and sorted edges with their weights; raise an error that names an invalid edge."""
    for i in index[index[:, 0] == index[:, 1], 0][:1]:
        raise GraphError(f"edge {(ids[i], ids[i])!r} is a self-loop: remove it")
    edges, ordered = sorted_edges(index, None if weights is None else checked_weights(ids, index, weights))
    again = np.flatnonzero((edges[1:] == edges[:-1]).all(axis=1))
    for at in again[ordered[again + 1] != ordered[again]][:1]:
        raise GraphError(
            f"edge {(ids[edges[at, 1]], ids[edges[at, 0]])!r} is given twice, with the weights {ordered[at]:g} and "
            f"{ordered[at + 1]:g}: give every pair once"
        )
    if not again.size:
        return edges, ordered
    i, j = edges[again[0]]
    more = f" (and {again.size - 1} more)" if again.size > 1 else ""
    text = f"edge {(ids[j], ids[i])!r} is given twice{more}, perhaps once in each direction: it counts once"
    warnings.warn(text, GraphWarning, stacklevel=4)
    return np.delete(edges, again + 1, axis=0), np.delete(ordered, again + 1)


def checked_weights(ids: tuple[Hashable, ...], index: Index, weights: npt.ArrayLike) -> Array:
    """Return positive weights ``(E,)`` of edges ``(E, 2)``."""
    try:
        values = np.array(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise GraphError("weights must be numbers, one per edge") from None
    if values.shape != (len(index),):
        raise GraphError(f"weights have the shape {values.shape}, expected ({len(index)},), one per edge")
    for at in np.flatnonzero(~(np.isfinite(values) & (values > 0)))[:1]:
        u, v = (ids[end] for end in index[at])
        raise GraphError(
            f"edge {(u, v)!r} has the weight {values[at]}, expected a positive number: "
            "remove edges that should not count"
        )
    return values


def warn_of_unnamed(sites: Sequence[Hashable]) -> None:
    """Warn about sites that have no edges because they are missing from the graph."""
    if sites:
        have = "has" if len(sites) == 1 else "have"
        warnings.warn(f"the graph does not name {named(sites)}, which {have} no edges", GraphWarning, stacklevel=3)


def named(sites: Sequence[Hashable]) -> str:
    """Format sites in a message: site 'a', or 2 sites 'a', 'b'."""
    return f"site {sites[0]!r}" if len(sites) == 1 else f"{len(sites)} sites {listed(sites)}"


# --- files: CSV edge lists and GraphML --------------------------------------------------------------------------------


def read_graph(path: Path, ids: tuple[Hashable, ...] | None) -> tuple[Iterable[Hashable], list[Any], Any]:
    """Read the sites, edges and weights of a file; names are matched to the sites ``ids``, if given."""
    named, ends, weights = _reader(path, ids)(path)
    known = _sites_of_names(named, ids)
    seen = dict.fromkeys(known.values())
    nodes = tuple(seen) if ids is None else ids
    warn_of_unnamed([site for site in nodes if site not in seen])
    return nodes, [(known[u], known[v]) for u, v in ends], weights


def _reader(path: Path, ids: tuple[Hashable, ...] | None = None) -> Callable[[Path], _Listing]:
    suffix = path.suffix.lower()
    if suffix == ".graphml":
        return _read_graphml
    if suffix in CSV_SUFFIXES:
        return lambda file: _read_edge_list(file, ids)
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


def _read_graphml(path: Path) -> _Listing:
    networkx = _require_networkx("reading GraphML")
    if not path.is_file():
        raise GraphError("there is no file of this name: check the path")
    try:
        g = networkx.read_graphml(path)
    except (ParseError, networkx.NetworkXError, KeyError, ValueError) as error:
        raise GraphError(f"not a complete GraphML file ({error}); write or copy it again") from None
    ends, weights = edges_of_networkx(g)
    return [str(node) for node in g], [(str(u), str(v)) for u, v in ends], weights


def edges_of_networkx(g: Any) -> tuple[list[tuple[Any, Any]], list[float]]:
    """Return the edges of an undirected networkx graph, and their weights."""
    if g.is_directed():
        raise GraphError("the graph is directed, but edges here have no direction: make it undirected")
    triples = list(g.edges(data="weight", default=1.0))
    return [(u, v) for u, v, _ in triples], [weight for *_, weight in triples]


def write_graph(path: Path, sites: tuple[Hashable, ...], edges: Index, weights: Array) -> None:
    """Write sites, edges ``(E, 2)`` as pairs of their positions, and weights ``(E,)``; see `Graph.write`."""
    with in_file(path, GraphError):
        _reader(path)  # the same suffixes
    names = [str(site) for site in sites]
    _ids_by_text(sites)
    for site, name in zip(sites, names, strict=True):
        if not name or name != name.strip():
            raise GraphError(
                f"site {site!r} is empty or has leading or trailing blanks, which a file cannot store: rename it"
            )
    try:
        if path.suffix.lower() == ".graphml":
            g = networkx_graph(tuple(names), edges, weights, "writing GraphML")
            if not path.parent.is_dir():
                raise GraphError(f"cannot write {path}: there is no directory {path.parent}")
            with replacing(path) as temporary:
                _require_networkx("writing GraphML").write_graphml(g, temporary)
        else:
            write_csv(path, *_edge_rows(names, edges, weights))
    except DataError as error:
        raise GraphError(str(error)) from None


def _edge_rows(names: list[str], edges: Index, weights: Array) -> tuple[list[str], list[list[object]]]:
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
    """Return a `networkx.Graph` with the edge attribute ``weight``; without networkx, name the ``purpose``."""
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


def _sites_of_names(named: list[str], ids: tuple[Hashable, ...] | None) -> dict[str, Hashable]:
    """Match the names in a file to the sites ``ids``; without these, to ints if all are whole numbers, else to text."""
    numbers = {name: match[1] for name in named if (match := _WHOLE_NUMBER.fullmatch(name))}
    if ids is None:
        return {name: int(numbers[name]) if len(numbers) == len(named) else name for name in named}
    by_text = _ids_by_text(ids)
    texts = {name: name if name in by_text else numbers.get(name, name) for name in named}
    for name in (name for name, text in texts.items() if text not in by_text):
        known = f"the {len(ids)} sites ({listed(ids)})"
        raise GraphError(f"it names site {name!r}, which is not among {known}: correct or remove its edges")
    return {name: by_text[text] for name, text in texts.items()}


def _require_networkx(purpose: str) -> Any:
    try:
        import networkx
    except ImportError:
        raise missing_dependency("networkx", purpose, extra="graph") from None
    return networkx
