"""Who takes part and where they listen: the organiser's list of sites, checked."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

from fedkin.data import read_columns, site_ids, write_csv
from fedkin.errors import DataError, ParameterError
from fedkin.federate.messages import CENTRE, PLAIN_NAME, Member
from fedkin.graph import Graph

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_LAST_PORT = 65535


def read_members(sites: Path | None, graph: Path | None) -> tuple[Member, ...]:
    """Read the sites from a table with the column site, and host and port where they listen; or from a graph."""
    if sites is not None:
        ids, places = _read_sites(sites)
    elif graph is not None:
        ids, places = _checked_ids(graph, Graph.read(graph).sites), None
    else:
        raise ParameterError("say who takes part: --sites FILE.csv with a column site, or --graph FILE.csv")
    parts = enumerate(zip(ids, plain_names(ids), places or [None] * len(ids), strict=True))
    return tuple(Member(one, name, k, None if place is None else f"tls/{place}") for k, (one, name, place) in parts)


def write_members(path: Path, members: Iterable[Member]) -> None:
    """Write the table that `read_members` reads."""
    rows = [[one.id, *(one.endpoint or "/:").partition("/")[2].rpartition(":")[::2]] for one in members]
    write_csv(path, ["site", "host", "port"], rows)


def plain_names(ids: Sequence[Hashable]) -> list[str]:
    """Return a name for each id that can stand in file names, certificates and keys.

    Examples
    --------
    >>> from fedkin.federate.addresses import plain_names
    >>> plain_names(["north", 7, "a b/c"])
    ['north', '7', 'site-2']
    """
    names = [str(one) if re.match(PLAIN_NAME, str(one)) else f"site-{k}" for k, one in enumerate(ids)]
    taken = {name.lower() for name in names}
    if len(taken) < len(names) or CENTRE in taken:  # also where file systems do not tell cases apart
        names = [f"site-{k}" for k in range(len(ids))]
    return names


def centre_endpoint(text: str) -> str:
    """Return ``tls/host:port`` of the central machine, checked.

    Examples
    --------
    >>> from fedkin.federate.addresses import centre_endpoint
    >>> centre_endpoint("192.0.2.1:7447"), centre_endpoint("[2001:db8::1]:7447")
    ('tls/192.0.2.1:7447', 'tls/[2001:db8::1]:7447')
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or (":" in host and not host.startswith("[")):
        raise ParameterError(f"--centre must be HOST:PORT, such as 192.0.2.1:7447 or [2001:db8::1]:7447, got {text!r}")
    try:
        return f"tls/{_place('--centre', host, port)}"
    except DataError as error:
        raise ParameterError(str(error)) from None


def hosts_of(endpoint: str | None) -> list[str]:
    """Return the host of ``tls/host:port``, for a certificate; nothing where nobody listens."""
    return [] if endpoint is None else [endpoint.partition("/")[2].rpartition(":")[0].strip("[]")]


def _read_sites(path: Path) -> tuple[list[str | int], list[str | None] | None]:
    columns = read_columns(path)
    if "site" not in columns:
        raise DataError(f"{path} has no column 'site'; it needs site, and host and port for sites that run rounds")
    if ("host" in columns) != ("port" in columns):
        raise DataError(f"{path} has only one of the columns host and port; give both, or none")
    ids = _checked_ids(path, site_ids(columns["site"]))
    if "host" not in columns:
        return ids, None
    parts = zip(ids, columns["host"].tolist(), columns["port"].tolist(), strict=True)
    places = [_place(f"{path}, site {one!r}", host, port) for one, host, port in parts]
    first: dict[str, str | int] = {}
    for one, place in zip(ids, places, strict=True):
        if place is not None and first.setdefault(place, one) != one:
            raise DataError(f"{path}: sites {first[place]!r} and {one!r} both have {place}; give each its own port")
    return ids, places


def _checked_ids(path: Path, found: Sequence[Hashable]) -> list[str | int]:
    """Return ids that are text or whole numbers, each once; raises `DataError` that names the file."""
    ids: dict[str, str | int] = {}
    for one in found:
        if isinstance(one, bool) or not isinstance(one, str | int):
            raise DataError(f"{path}: a site is named by text or a whole number, got {one!r}")
        if str(one) in ids:
            raise DataError(f"{path} has two lines for site {one!r}")
        ids[str(one)] = one
    if not ids:
        raise DataError(f"{path} names no sites")
    return list(ids.values())


def _place(where: str, host: object, port: object) -> str | None:
    """Return ``host:port``, or None where both are empty; raises `DataError` when either cannot be."""
    name, number = ("" if one is None or one != one else str(one).strip() for one in (host, port))  # NaN is empty, too
    if not name and not number:
        return None
    bare, number = name[1:-1] if name.startswith("[") and name.endswith("]") else name, number.removesuffix(".0")
    try:
        # a name does not end with a number: what does is an address, or a slip in one
        numeric = ":" in bare or name.split(".")[-1].isdigit()
        address = ipaddress.ip_address(bare) if numeric else None
        if address is None and not all(map(_LABEL.fullmatch, name.split("."))):
            raise ValueError
    except ValueError:
        raise DataError(f"{where}: the host {name!r} is neither a name nor an address") from None
    if address is not None and address.is_unspecified:
        raise DataError(f"{where}: nobody can connect to {name}; give the address under which neighbours reach it")
    if not number.isdecimal() or not 1 <= int(number) <= _LAST_PORT:
        raise DataError(f"{where}: the port must be a whole number from 1 to {_LAST_PORT}, got {number or 'nothing'}")
    return f"{f'[{address}]' if address is not None and address.version == 6 else name}:{int(number)}"
