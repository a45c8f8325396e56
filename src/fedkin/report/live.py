"""A page that follows something while it runs: served to this machine only, told by server-sent events."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedkin.errors import FedkinError
from fedkin.report.pages import embedded, page_with_script

#: Seconds between two looks, and between two signs of life to a browser.
LOOK_SECONDS, ALIVE_SECONDS = 1.0, 15.0
#: Looks that the curves of the page go back; older ones are thinned out.
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
    """Serves a page on the loopback address, and tells it every second what ``look`` sees, in plain values.

    One thread looks, however many look on.
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
        """Where to look; the token is what lets one in."""
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
            with suppress(FedkinError, OSError):  # a directory that is being moved or removed: the next look tells
                self._take()

    def _take(self) -> None:
        event = embedded(self.history.add(self._look(), time.time())).encode()
        with self._changed:
            self._event, self._number = event, self._number + 1
            self._changed.notify_all()

    def page(self) -> str:
        """The page, with what is known now."""
        with self._changed:
            told = json.loads(self._event)
        return page_with_script("watch", self.title, told)

    def next_event(self, seen: int) -> tuple[int, bytes | None]:
        """The newest state once it is newer than number ``seen``; None when it is time for a sign of life, or over."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._number > seen, ALIVE_SECONDS)
            fresh = self._number > seen and not self._ended
            return self._number, self._event if fresh else None


class History:
    """What happened while somebody watched: curves, and news in sentences."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._started: set[str] = set()
        self._news: list[dict[str, Any]] = []
        self._points: list[tuple[float, Any, Any, Any]] = []

    def add(self, state: Mapping[str, Any], now: float) -> dict[str, Any]:
        """The state with the news and the curves up to now."""
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
    """What to say about a site whose kind has changed; ``started`` if it was there at some time."""
    if before in (None, kind) or (kind in _THERE and before in _THERE):
        return None
    if kind in _THERE:
        return "is back" if started else "has started"
    return {"absent": "is absent", "trouble": "needs help", "done": "is done", "left": "has left for good"}.get(kind)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    live: LiveServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes its page is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        live, asked = self.server.live, urlsplit(self.path)
        given = parse_qs(asked.query).get("token", [""])[0]
        # a page elsewhere that makes its name point here has another host
        if self.headers.get("Host") not in (f"{_HOST}:{live.port}", f"localhost:{live.port}"):
            self._answer(421, "this page is for 127.0.0.1 only")
        elif not secrets.compare_digest(given.encode(), live.token.encode()):
            self._answer(403, "the address lacks the token that fedkin watch printed")
        elif asked.path == "/":
            self._answer(200, live.page(), "text/html")
        elif asked.path == "/events":
            self._stream(live)
        else:
            self._answer(404, "there is nothing here")

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
        """Requests have the token in them: they are not written down."""
