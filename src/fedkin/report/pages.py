"""Render self-contained HTML pages from ``templates/``, and serve the page that follows a run.

Pages with a script embed the bundle in ``static/``, which ``make web`` builds from ``web/``.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedkin._base import Index, Mask, some_of
from fedkin.errors import FedkinError
from fedkin.fitting import FittedModel
from fedkin.graph import Graph
from fedkin.report.payload import report_payload
from fedkin.report.text import comparison_table, members

#: Largest number of groups, and of members of each, in the page's text; the script shows all.
_MOST_GROUPS, _MOST_NAMED = 20, 12


def report_page(model: FittedModel, places: Mapping[str, Any] | None = None) -> str:
    """Return the report of a model as one self-contained HTML page.

    Parameters
    ----------
    model : FittedModel
        The fitted model, or one that `fedkin.load` returns.
    places : mapping, optional
        Locations of the sites, from `read_coordinates`.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit
    >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
    >>> model = fit(fed, None, FitOptions(method="fused", loss="mean", lam=0.02, select="none"))
    >>> page = report_page(model)
    >>> "4 sites form 2 groups." in page, "https://" in page.split("<script")[0]
    (True, False)
    """
    payload = report_payload(model, places)
    return page_with_script(
        "report",
        payload["headline"],
        payload,
        **{name: payload[name] for name in ("lead", "about", "trust", "reproduction")},
        comparison=None if not model.comparison else comparison_table(model.comparison),
        groups=[(len(sites), some_of(sites, _MOST_NAMED)) for sites in members(model)[:_MOST_GROUPS]],
    )


def page_with_script(kind: str, title: str, payload: Mapping[str, Any], **values: Any) -> str:
    """Fill in a page template, with the bundle and the values embedded."""
    return render(
        f"{kind}.html",
        title=title,
        style=Markup(bundle("fedkin.css")),
        script=Markup(bundle("fedkin.js").replace("</script", "<\\/script").replace("<!--", "<\\!--")),
        payload=Markup(embedded(payload)),
        **values,
    )


def embedded(values: Mapping[str, Any]) -> str:
    """Return JSON that is safe within ``<script>``: no site name can end the element."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


@cache
def bundle(name: str) -> str:
    """Return a file of the bundle built from ``web/``."""
    return files("fedkin.report").joinpath("static", name).read_text("utf-8").strip()


def render(template: str, **values: Any) -> str:
    """Fill in a file of ``templates/``; every value is escaped, and a missing one is an error."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("fedkin.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def demo_picture(errors: Mapping[str, float], strong: str, given: Graph, found: Graph, labels: Index) -> str:
    """Draw two graphs of sites with true groups ``labels``, and the errors of methods, as one ``<svg>``."""
    low = math.floor(math.log10(min(errors.values())) + 1e-9)
    high = max(math.ceil(math.log10(max(errors.values())) - 1e-9), low + 1)

    def share(value: float) -> float:
        return (math.log10(value) - low) / (high - low)

    matrices = [_matrix(given, labels, "The graph as given"), _matrix(found, labels, "Sites found to be alike")]
    ticks = [(share(10.0**power), f"{10.0**power:g}") for power in range(low, high + 1)]
    dots = [
        {"name": name, "share": share(value), "label": f"{value:.3g}", "strong": name == strong}
        for name, value in errors.items()
    ]
    return render("demo.svg", matrices=matrices, longest=max(map(len, errors)), ticks=ticks, dots=dots).strip()


def _matrix(graph: Graph, labels: Index, title: str) -> dict[str, Any]:
    """Return the matrix of a graph, sites sorted by group: a square for each edge, within groups and across them."""
    rank = np.argsort(np.argsort(labels, kind="stable"))
    within = labels[graph.edges[:, 0]] == labels[graph.edges[:, 1]]

    def squares(chosen: Mask) -> str:
        i, j = rank[graph.edges[chosen]].T
        return "".join(f"M{x} {y}h1v1h-1z" for x, y in zip(np.r_[i, j].tolist(), np.r_[j, i].tolist(), strict=True))

    note = f"{graph.n_edges} edges, {int((~within).sum())} of them wrong"
    return {"title": title, "note": note, "size": graph.n_sites, "within": squares(within), "across": squares(~within)}


#: Seconds between two updates, and between two keep-alive messages to a browser.
LOOK_SECONDS, ALIVE_SECONDS = 1.0, 15.0
#: Number of updates in the curves of the page; older ones are thinned out.
_MOST_POINTS = 600
_MOST_NEWS = 200
_HOST = "127.0.0.1"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Look = Callable[[], dict[str, Any]]


class LiveServer:
    """A server for a page on the loopback address; every second it sends the result of ``look`` as plain values.

    One thread calls ``look`` for all browsers.
    """

    def __init__(self, title: str, look: Look, port: int = 0) -> None:
        self.title, self._look, self.history = title, look, History()
        self.token, self._changed = secrets.token_urlsafe(24), threading.Condition()
        self._event, self._number, self._ended = b"", 0, False
        self._server = _Server((_HOST, port), _Handler)
        self._server.live = self
        self.port = int(self._server.server_address[1])
        self._threads = [
            threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True),
            threading.Thread(target=self._follow, daemon=True),
        ]

    @property
    def url(self) -> str:
        """Address of the page, with the token that grants access."""
        return f"http://{_HOST}:{self.port}/?token={self.token}"

    def __enter__(self) -> LiveServer:
        self._take()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()

    def _follow(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._ended, LOOK_SECONDS):
                    return
            with suppress(FedkinError, OSError):  # a directory is being moved or removed: the next update shows it
                self._take()

    def _take(self) -> None:
        event = embedded(self.history.add(self._look(), time.time())).encode()
        with self._changed:
            self._event, self._number = event, self._number + 1
            self._changed.notify_all()

    def page(self) -> str:
        """Return the page with the current state."""
        with self._changed:
            told = json.loads(self._event)
        return page_with_script("watch", self.title, told)

    def next_event(self, seen: int) -> tuple[int, bytes | None]:
        """Return the first state newer than number ``seen``; None for a keep-alive message, or at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._number > seen, ALIVE_SECONDS)
            fresh = self._number > seen and not self._ended
            return self._number, self._event if fresh else None


class History:
    """The history of a watched run: curves, and events as sentences."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._started: set[str] = set()
        self._news: list[dict[str, Any]] = []
        self._points: list[tuple[float, Any, Any, Any]] = []

    def add(self, state: Mapping[str, Any], now: float) -> dict[str, Any]:
        """Return the state with events and curves so far."""
        for site in state.get("sites", ()):
            name, kind = str(site["name"]), str(site["kind"])
            words = _news(self._kinds.get(name), kind, name in self._started)
            self._kinds[name] = kind
            if kind in _THERE:
                self._started.add(name)
            if words is not None:
                self._news.insert(0, {"time": now, "words": f"{name} {words}"})
        del self._news[_MOST_NEWS:]
        self._points.append((now, state.get("round"), state.get("change"), state.get("bytes")))
        if len(self._points) > _MOST_POINTS:
            self._points = self._points[:-1:2] + self._points[-1:]
        names = ("time", "round", "change", "bytes")
        series = {name: list(column) for name, column in zip(names, zip(*self._points, strict=True), strict=True)}
        return {**state, "time": now, "news": list(self._news), "series": series}


_THERE = ("running", "waiting", "elsewhere")


def _news(before: str | None, kind: str, started: bool) -> str | None:
    """Return a sentence about a site whose state has changed; ``started`` if it ever ran."""
    if before in (None, kind) or (kind in _THERE and before in _THERE):
        return None
    if kind in _THERE:
        return "is back" if started else "has started"
    return {"absent": "is absent", "trouble": "needs help", "done": "is done", "left": "has left permanently"}.get(kind)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    live: LiveServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a browser that closes its page."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        live, asked = self.server.live, urlsplit(self.path)
        given = parse_qs(asked.query).get("token", [""])[0]
        # protects against DNS rebinding, where the host differs
        if self.headers.get("Host") not in (f"{_HOST}:{live.port}", f"localhost:{live.port}"):
            self._answer(421, "this page is for 127.0.0.1 only")
        elif not secrets.compare_digest(given.encode(), live.token.encode()):
            self._answer(403, "the address lacks the token that fedkin watch printed")
        elif asked.path == "/":
            self._answer(200, live.page(), "text/html")
        elif asked.path == "/events":
            self._stream(live)
        else:
            self._answer(404, "page not found")

    def _answer(self, code: int, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self._head(code, f"{kind}; charset=utf-8", "Content-Length", str(len(body)))
        self.wfile.write(body)

    def _head(self, code: int, kind: str, *last: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        for name, value in (*_HEADERS.items(), last):
            self.send_header(name, value)
        self.end_headers()

    def _stream(self, live: LiveServer) -> None:
        self._head(200, "text/event-stream", "Connection", "close")
        self.close_connection = True
        number = 0
        while not live._ended:
            number, event = live.next_event(number)
            self.wfile.write(b": alive\n\n" if event is None else b"data: " + event + b"\n\n")
            self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, since requests contain the token."""
