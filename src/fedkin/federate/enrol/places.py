"""Where sites listen: ``host:port`` from the organiser's list, checked."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Hashable, Sequence
from pathlib import Path

from fedkin.data import read_columns, site_ids
from fedkin.errors import DataError, ParameterError

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_LAST_PORT = 65535


def read_sites(path: Path) -> tuple[list[str | int], list[str | None]]:
    """Ids and places, ``host:port`` or None, from a table with the column site, and host and port where they listen.

    Parameters
    ----------
    path : path
        The table. Its order numbers the sites.
    """
    columns = read_columns(path)
    if "site" not in columns:
        raise DataError(f"{path} has no column 'site'; it needs site, and host and port for sites that run rounds")
    if ("host" in columns) != ("port" in columns):
        raise DataError(f"{path} has only one of the columns host and port; give both, or none")
    ids = checked_site_ids(path, site_ids(columns["site"]))
    if "host" not in columns:
        return ids, [None] * len(ids)
    parts = zip(ids, columns["host"].tolist(), columns["port"].tolist(), strict=True)
    places = [_place(f"{path}, site {one!r}", host, port) for one, host, port in parts]
    first: dict[str, str | int] = {}
    for one, place in zip(ids, places, strict=True):
        if place is not None and place in first:
            raise DataError(f"{path}: sites {first[place]!r} and {one!r} both have {place}; give each its own port")
        if place is not None:
            first[place] = one
    return ids, places


def checked_site_ids(path: Path, found: Sequence[Hashable]) -> list[str | int]:
    """Ids that are text or whole numbers, each once; raises `DataError` that names the file."""
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


def centre_endpoint(text: str) -> str:
    """``tls/host:port`` of the central machine, checked.

    Examples
    --------
    >>> from fedkin.federate.enrol.places import centre_endpoint
    >>> centre_endpoint("192.0.2.1:7447"), centre_endpoint("[2001:db8::1]:7447")
    ('tls/192.0.2.1:7447', 'tls/[2001:db8::1]:7447')
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or (":" in host and not host.startswith("[")):
        raise ParameterError(f"--centre must be HOST:PORT, such as 192.0.2.1:7447 or [2001:db8::1]:7447, got {text!r}")
    try:
        return f"tls/{_place('--centre', host, int(port))}"
    except DataError as error:
        raise ParameterError(str(error)) from None


def host_of(endpoint: str | None) -> list[str]:
    """The host of ``tls/host:port``, for a certificate; nothing where nobody listens."""
    return [] if endpoint is None else [endpoint.partition("/")[2].rpartition(":")[0].strip("[]")]


def _place(where: str, host: object, port: object) -> str | None:
    """``host:port``, or None where both are empty; raises `DataError` when either cannot be."""
    words = "" if host is None or host != host else str(host).strip()  # NaN where a whole column is empty
    if not words and (port is None or port != port or port == ""):
        return None
    words = _checked_host(where, words)
    try:
        number = float(str(port))
    except ValueError:
        number = -1.0
    if not (1 <= number <= _LAST_PORT and number.is_integer()):
        got = "nothing" if math.isnan(number) else f"{number:.15g}" if isinstance(port, float) else port
        raise DataError(f"{where}: the port must be a whole number from 1 to {_LAST_PORT}, got {got}")
    return f"{words}:{int(number)}"


def _checked_host(where: str, words: str) -> str:
    """A name or an address, that of IPv6 in brackets; raises `DataError` when it is neither."""
    bare = words[1:-1] if words.startswith("[") and words.endswith("]") else words
    labels = words.split(".")
    try:
        # a name does not end with a number: what does is an address, or a slip in one
        numeric = ":" in bare or labels[-1].isdigit()
        address = ipaddress.ip_address(bare) if numeric else None
    except ValueError:
        raise DataError(f"{where}: the host {words!r} is neither a name nor an address") from None
    if address is None:
        if not all(_LABEL.fullmatch(label) for label in labels):
            raise DataError(f"{where}: the host {words!r} is neither a name nor an address")
        return words
    if address.is_unspecified:
        raise DataError(f"{where}: nobody can connect to {words}; give the address under which neighbours reach it")
    return f"[{address}]" if address.version == 6 else words
