"""Where the devices of ``fedkin peer init`` listen: read from a table or counted up from a port, and checked."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Hashable, Sequence
from pathlib import Path

from fedkin.data import device_ids, read_columns
from fedkin.errors import DataError, ParameterError

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_LAST_PORT = 65535


def local_endpoints(n_devices: int, first_port: int) -> tuple[list[str], str]:
    """``host:port`` of all devices and of a central machine, on this machine."""
    if not 1 <= first_port <= _LAST_PORT:
        raise ParameterError(f"--port must be a whole number from 1 to {_LAST_PORT}, got {first_port}")
    last = first_port + n_devices
    if last > _LAST_PORT:
        most = _LAST_PORT - n_devices
        raise ParameterError(
            f"--port {first_port} leaves no room for {n_devices} devices and a central machine below "
            f"{_LAST_PORT + 1}: use at most {most}"
        )
    return [f"127.0.0.1:{first_port + u}" for u in range(n_devices)], f"127.0.0.1:{last}"


def read_endpoints(path: Path, devices: Sequence[Hashable], *, distinct: bool = True) -> list[str]:
    """``host:port`` of each device, from a table with the columns device, host and port.

    Parameters
    ----------
    path : path
        The table.
    devices : sequence of ids
        The devices of the federation; each must have one line, and nobody else.
    distinct : bool
        Whether two devices must not have the same host and port: all that listen.
    """
    columns = read_columns(path)
    for name in ("device", "host", "port"):
        if name not in columns:
            raise DataError(f"{path} has no column {name!r}; it needs device, host and port")
    names = [str(one) for one in device_ids(columns["device"])]
    known: dict[str, str] = {}
    for name, host, port in zip(names, columns["host"].tolist(), columns["port"].tolist(), strict=True):
        if name in known:
            raise DataError(f"{path} has two lines for device {name!r}")
        known[name] = _joined(f"{path}, device {name!r}", host, port)
    missing = [device for device in devices if str(device) not in known]
    if missing:
        raise DataError(f"{path} has no line for device {missing[0]!r}")
    unknown = [name for name in known if name not in {str(device) for device in devices}]
    if unknown:
        raise DataError(f"{path} has a line for {unknown[0]!r}, which is no device of the data: correct or remove it")
    places = [known[str(device)] for device in devices]
    first: dict[str, Hashable] = {}
    for device, place in zip(devices, places, strict=True):
        if distinct and place in first:
            raise DataError(
                f"{path}: devices {first[place]!r} and {device!r} both have {place}; give each its own port"
            )
        first[place] = device
    return places


def centre_endpoint(text: str) -> str:
    """``host:port`` of the central machine, checked.

    Examples
    --------
    >>> from fedkin.federate.setup.endpoints import centre_endpoint
    >>> centre_endpoint("192.0.2.1:7447"), centre_endpoint("[2001:db8::1]:7447")
    ('192.0.2.1:7447', '[2001:db8::1]:7447')
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or (":" in host and not host.startswith("[")):
        raise ParameterError(f"--centre must be HOST:PORT, such as 192.0.2.1:7447 or [2001:db8::1]:7447, got {text!r}")
    try:
        return _joined("--centre", host, int(port))
    except DataError as error:
        raise ParameterError(str(error)) from None


def _joined(where: str, host: object, port: object) -> str:
    """``host:port``; raises `DataError` when either cannot be."""
    words = _checked_host(where, "" if host is None else str(host).strip())
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
        raise DataError(
            f"{where}: nobody can connect to {words}; give the address under which neighbours reach the device, and "
            "let it listen on all addresses by its zenoh.json5 (docs/peer.md, 'Behind NAT and in containers')"
        )
    return f"[{address}]" if address.version == 6 else words
