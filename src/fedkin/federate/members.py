"""The organiser's list of sites: their ids, the names of their files and certificates, and where they listen."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import hidden_text
from fedkin.data import read_columns, site_ids
from fedkin.errors import DataError, ParameterError
from fedkin.federate.messages import CENTRE, PLAIN_NAME, Member
from fedkin.graph import Graph

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_LAST_PORT = 65535


def read_members(sites: Path | None, graph: Path | None) -> tuple[Member, ...]:
    """Read the sites from a table with the column site, and host and port where they listen; or from a graph."""
    if sites is not None:
        columns = read_columns(sites)
        if "site" not in columns:
            raise DataError(f"{sites} has no column 'site'; it needs site, and host and port for sites that run rounds")
        if ("host" in columns) != ("port" in columns):
            raise DataError(f"{sites} has only one of the columns host and port; give both, or none")
        ids = _checked_ids(sites, site_ids(columns["site"]))
        parts = zip(ids, *(columns.get(one, np.full(len(ids), None)) for one in ("host", "port")), strict=True)
        endpoints = [_endpoint(f"{sites}, site {one!r}", host, port) for one, host, port in parts]
    elif graph is not None:
        ids = _checked_ids(graph, Graph.read(graph).sites)
        endpoints = [None] * len(ids)
    else:
        raise ParameterError("no sites given: pass --sites FILE.csv with a column site, or --graph FILE.csv")
    first: dict[str, str | int] = {}
    for one, place in zip(ids, endpoints, strict=True):
        if place is not None and first.setdefault(place, one) != one:
            both = f"sites {first[place]!r} and {one!r} both have {place.removeprefix('tls/')}"
            raise DataError(f"{sites}: {both}; give each its own port")
    named = enumerate(zip(ids, _plain_names(ids), endpoints, strict=True))
    return tuple(Member(one, name, k, endpoint) for k, (one, name, endpoint) in named)


def components_of(members: Sequence[Member], graph: Graph) -> dict[int, dict[str, Any]]:
    """Return the members and edges of each site's component, by number."""
    labels, edges, known = graph.components(), graph.edges, dict[int, dict[str, Any]]()
    for label in np.unique(labels).tolist():
        inside, numbers = np.flatnonzero(labels[edges[:, 0]] == label), np.flatnonzero(labels == label).tolist()
        pairs = zip(edges[inside].tolist(), graph.weights[inside].tolist(), strict=True)
        component = tuple(members[u] for u in numbers)
        given = {"component": component, "edges": tuple((i, j, weight) for (i, j), weight in pairs)}
        known |= dict.fromkeys(numbers, given)
    return known


def _plain_names(ids: Sequence[Hashable]) -> list[str]:
    """Return a name for each id that is valid in file names, certificates and keys: the id itself, or ``site-3``."""
    names = [str(one) if re.match(PLAIN_NAME, str(one)) else f"site-{k}" for k, one in enumerate(ids)]
    taken = {name.lower() for name in names}
    if len(taken) < len(names) or CENTRE in taken:  # also where file systems do not tell cases apart
        names = [f"site-{k}" for k in range(len(ids))]
    return names


def _checked_ids(path: Path, found: Sequence[Hashable]) -> list[str | int]:
    """Check that ids are text or whole numbers without duplicates; raise `DataError` that names the file."""
    ids: dict[str, str | int] = {}
    for one in found:
        if isinstance(one, bool) or not isinstance(one, str | int):
            raise DataError(f"{path}: a site is named by text or a whole number, got {one!r}")
        if str(one) in ids:
            raise DataError(f"{path} has two lines for site {one!r}")
        if hidden_text(str(one)) is not None:
            raise DataError(f"{path}: the name {one!r} has characters that change what a terminal shows: remove them")
        ids[str(one)] = one
    if not ids:
        raise DataError(f"{path} names no sites")
    return list(ids.values())


def centre_endpoint(text: str) -> str | None:
    """Return ``tls/host:port`` of the central machine, checked."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or (":" in host and not host.startswith("[")):
        raise ParameterError(f"--centre must be HOST:PORT, such as 192.0.2.1:7447 or [2001:db8::1]:7447, got {text!r}")
    try:
        return _endpoint("--centre", host, port)
    except DataError as error:
        raise ParameterError(str(error)) from None


def _endpoint(where: str, host: object, port: object) -> str | None:
    """Return ``tls/host:port``, or None if both are empty; raise `DataError` if either is not valid."""
    name, number = ("" if one is None or one != one else str(one).strip() for one in (host, port))  # NaN is empty, too
    if not name and not number:
        return None
    bare, number = name[1:-1] if name.startswith("[") and name.endswith("]") else name, number.removesuffix(".0")
    try:
        # a name does not end with a number: if it does, it is an address, perhaps mistyped
        numeric = ":" in bare or name.split(".")[-1].isdigit()
        address = ipaddress.ip_address(bare) if numeric else None
        if address is None and not all(map(_LABEL.fullmatch, name.split("."))):
            raise ValueError
    except ValueError:
        raise DataError(f"{where}: the host {name!r} is neither a name nor an address") from None
    if address is not None and address.is_unspecified:
        raise DataError(f"{where}: {name} is not an address to connect to; give one that neighbours can reach")
    if not number.isdecimal() or not 1 <= int(number) <= _LAST_PORT:
        raise DataError(f"{where}: the port must be a whole number from 1 to {_LAST_PORT}, got {number or 'nothing'}")
    return f"tls/{f'[{address}]' if address is not None and address.version == 6 else name}:{int(number)}"


def hosts(endpoint: str | None) -> list[str]:
    """Return the host of ``tls/host:port``, for a certificate; nothing without an endpoint."""
    return [] if endpoint is None else [endpoint.partition("/")[2].rpartition(":")[0].strip("[]")]
