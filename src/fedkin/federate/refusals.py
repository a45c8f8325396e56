"""Who was refused what: read from zenoh's own log, since zenoh tells nobody else.

A message that the access list forbids, and a link whose certificate is not of this federation, end inside zenoh. All it
does is write a line to standard output. In a device process that output is a pipe, read here a few times per second;
the lines about refusals become `Refusal`, other lines go where standard output went before.

A refused link has no name that could be trusted, and zenoh's line does not have its address. The kernel knows it: of
the connections to the port of this device that have just ended, those that never became a link were refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: What zenoh is asked to log. Its access list logs refusals at no level but the one where it logs everything.
LOG_FILTER = (
    "error,zenoh::net::routing::interceptor::access_control=trace,"
    "zenoh_link_tls=warn,zenoh::net::runtime::orchestrator=debug"
)
_PAUSE_SECONDS = 0.2  # lines are read in portions: waking up for each of them would cost more than the lines
_PIPE_BYTES = 1 << 20
_KEPT_NAMES, _KEPT_ADDRESSES, _KEPT_SECONDS = 1000, 100, 5.0
_ADDRESS_SECONDS = 1.0  # zenoh ends a refused connection a little after its line about it

_OURS = (b" zenoh::net::routing::interceptor::access_control: ", b" zenoh_link_tls", b" zenoh::net::runtime::orchestr")
_THREAD = re.compile(rb"(ThreadId\(\d+\))")
_CACHING = re.compile(rb"caching permissions for `([^`]*)`")
_DENIED = re.compile(
    rb"(Using cached result: )?([0-9a-f]+)(?: on (\S+))? is unauthorized to ([A-Za-z/ ]+) \(ingress\) on (\S+)"
)
_NAME = re.compile(rb"CertCommonName\(([^)]*)\)")
_NO_LINK = re.compile(rb"WARN .*zenoh_link_tls\S*: (.*?)(?:\. Hint: .*)?$")
_SOURCE = re.compile(r"\s+at \S*\.rs:\d+\.?(?!\d)")
_NOT_CONNECTED = re.compile(rb"Unable to connect to \S* ?peer (\S+?)! (.*certificate.*?)\. Retry")


def without_source(text: str) -> str:
    """What zenoh says, without the places in its source code.

    Examples
    --------
    >>> from fedkin.federate.refusals import without_source
    >>> without_source("[1.2.3.4:5: Address already in use at /build/zenoh/src/tcp.rs:61.] at /build/unicast.rs:338.")
    '[1.2.3.4:5: Address already in use]'
    """
    return _SOURCE.sub("", text)


@dataclass(frozen=True)
class Refusal:
    """Something that zenoh refused.

    Attributes
    ----------
    peer : str or None
        Common name of the certificate at the other end of the link; for a link that was refused, the host.
    what : str
        "Put", "Declare Subscriber", ..., or "link".
    key : str or None
        The key of a message.
    address : str or None
        Of a link, as far as known.
    why : str
        In zenoh's words.
    """

    peer: str | None
    what: str
    key: str | None = None
    address: str | None = None
    why: str = "not on the access list"


class LogReader:
    """Finds refusals in lines of zenoh's log.

    Parameters
    ----------
    names : mapping {zenoh id: common name}
        Of links; it may grow meanwhile.

    Examples
    --------
    >>> from fedkin.federate.refusals import LogReader
    >>> reader = LogReader({"ab12": "d3"})
    >>> line = b"T TRACE rx-1 ThreadId(27) zenoh::net::routing::interceptor::access_control: "
    >>> line += b"Using cached result: ab12 is unauthorized to Put (ingress) on run/theta/d5"
    >>> reader.read(line)
    [Refusal(peer='d3', what='Put', key='run/theta/d5', address=None, why='not on the access list')]
    """

    def __init__(self, names: Mapping[str, str | None]) -> None:
        self.names = names
        self._caching: dict[bytes, bytes] = {}
        #: Times and reasons of refused links, until somebody finds their addresses.
        self.links: list[tuple[float, str]] = []

    def read(self, text: bytes) -> list[Refusal]:
        """The refusals in whole lines; refused links of others are left in ``links``."""
        found = []
        for line in text.splitlines():
            if b"caching permissions" in line or b" is unauthorized to " in line:
                refusal = self._denied(line)
                if refusal is not None:
                    found.append(refusal)
            elif (away := _NOT_CONNECTED.search(line)) is not None:
                address = away[1].decode(errors="replace")
                why = without_source(away[2].decode(errors="replace"))
                found.append(Refusal(_host(address), "link", None, address, why))
            elif (refused := _NO_LINK.search(line)) is not None:
                self.links.append((time.monotonic(), without_source(refused[1].decode(errors="replace"))))
        return found

    def _denied(self, line: bytes) -> Refusal | None:
        where = _THREAD.search(line)
        thread = where[1] if where is not None else b""
        caching = _CACHING.search(line)
        if caching is not None:
            self._caching[thread] = caching[1]
            return None
        denied = _DENIED.search(line)
        if denied is None:
            return None
        cached, number, subject, what, key = denied.groups()
        # zenoh works out in advance, in the same words, what would be refused; nobody has tried that yet
        if cached is None and self._caching.get(thread) == key:
            return None
        name = _NAME.search(subject) if subject is not None else None
        peer = name[1].decode(errors="replace") if name is not None else self.names.get(number.decode())
        return Refusal(peer, what.decode(), key.decode(errors="replace"))


class RefusalWatch:
    """Takes the place of standard output, and reports what zenoh writes there about refusals.

    Parameters
    ----------
    on_refusal : callable
        Called in a thread of its own.
    port : int or None
        Where this device listens.

    Notes
    -----
    One per process, made before the zenoh session.
    """

    def __init__(self, on_refusal: Callable[[Refusal], None], port: int | None) -> None:
        self.on_refusal = on_refusal
        self._names: dict[str, str | None] = {}
        self._linked: dict[str, None] = {}
        self._reader = LogReader(self._names)
        self._ended = EndedConnections(port)
        self._strangers: list[tuple[float, str]] = []
        os.environ["RUST_LOG"] = ",".join(filter(None, [LOG_FILTER, os.environ.get("RUST_LOG")]))
        os.environ.setdefault("NO_COLOR", "1")
        self._source, sink = os.pipe()
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._before = os.dup(1)
        os.dup2(sink, 1)
        os.close(sink)
        self._thread = threading.Thread(target=self._watch, name="refusals", daemon=True)
        self._thread.start()

    def on_link(self, zenoh_id: str, name: str | None, address: str) -> None:
        """To be told about every link that opens."""
        self._names[zenoh_id] = name
        self._linked[_plain(address)] = None
        for known, most in ((self._names, _KEPT_NAMES), (self._linked, _KEPT_NAMES)):
            while len(known) > most:
                del known[next(iter(known))]

    def close(self) -> None:
        """Give standard output back, after what was written has been read."""
        os.dup2(self._before, 1)  # the last writing end of the pipe: the thread comes to its end
        self._thread.join(5.0)
        os.close(self._before)
        self._ended.close()

    def _watch(self) -> None:
        rest = b""
        with os.fdopen(self._source, "rb", buffering=0) as source:
            while True:
                some, _, _ = select.select([source], [], [], _PAUSE_SECONDS if self._reader.links else _KEPT_SECONDS)
                if not some:
                    self._report_links()
                    continue
                portion = source.read(_PIPE_BYTES)
                if not portion:
                    self._report_links(wait=0.0)
                    return
                text, newline, rest = (rest + portion).rpartition(b"\n")
                rest = rest[-_PIPE_BYTES:]
                self._report(text + newline)
                self._report_links()
                if len(portion) < _PIPE_BYTES // 4:
                    time.sleep(_PAUSE_SECONDS)

    def _report(self, text: bytes) -> None:
        others = [line for line in text.splitlines(keepends=True) if not any(target in line for target in _OURS)]
        if others:
            with contextlib.suppress(OSError):
                os.write(self._before, b"".join(others))
        if not (b" is unauthorized to " in text or b"caching" in text or b"WARN" in text or b"certificate" in text):
            return
        for refusal in self._reader.read(text):
            self.on_refusal(refusal)

    def _report_links(self, wait: float = _ADDRESS_SECONDS) -> None:
        """Report refused links with the addresses of connections that have ended without having become a link."""
        now = time.monotonic()
        new = [(now, address) for address in self._ended.read() if address not in self._linked]
        recent = [one for one in self._strangers if one[0] > now - _KEPT_SECONDS]
        self._strangers = [*recent, *new][-_KEPT_ADDRESSES:]
        waiting, self._reader.links = self._reader.links, []
        for since, why in waiting:
            if self._strangers:
                _, address = self._strangers.pop(0)
                self.on_refusal(Refusal(_host(address), "link", None, address, why))
            elif now >= since + wait:
                self.on_refusal(Refusal(None, "link", None, None, why))
            else:
                self._reader.links.append((since, why))


class EndedConnections:
    """Addresses of connections to a port of this machine that have ended; Linux tells whoever listens.

    Parameters
    ----------
    port : int or None
    """

    _SOCK_DIAG, _TCP_ENDED, _TCP6_ENDED = 4, 1, 1 << 2

    def __init__(self, port: int | None) -> None:
        self.port = port
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, self._SOCK_DIAG)
            self._socket.bind((0, self._TCP_ENDED | self._TCP6_ENDED))

    def read(self) -> list[str]:
        """Addresses of the last connections to the port that ended since the last call, as ``host:port``."""
        found: list[str] = []
        while self._socket is not None:
            try:
                portion = self._socket.recv(_PIPE_BYTES)
            except BlockingIOError:
                break
            except OSError:  # some were lost, for want of room
                continue
            found = [*found, *self._addresses(portion)][-_KEPT_ADDRESSES:]
        return found

    def _addresses(self, portion: bytes) -> list[str]:
        found, at = [], 0
        while at + 16 + 40 <= len(portion):
            (length,) = struct.unpack_from("=I", portion, at)
            family = portion[at + 16]
            here, there = struct.unpack_from(">HH", portion, at + 20)
            if here == self.port and family in (socket.AF_INET, socket.AF_INET6):
                raw = portion[at + 40 : at + (44 if family == socket.AF_INET else 56)]
                host = socket.inet_ntop(family, raw)
                found.append(f"{host}:{there}" if family == socket.AF_INET else f"[{host}]:{there}")
            at += max((length + 3) & ~3, 16)
        return found

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _plain(address: str) -> str:
    return address.rpartition("/")[2]


def _host(address: str) -> str:
    return _plain(address).rpartition(":")[0]
