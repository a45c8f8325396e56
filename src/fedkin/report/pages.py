"""HTML pages that need no network, from ``templates/``, the page that follows a run, and figures with Matplotlib.

Pages with a script embed the bundle that ``web/`` is built into (``static/``, by ``make web``).
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
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import ArrayLike

from fedkin._base import Array, Index, Mask, some_of
from fedkin.errors import FedkinError, ParameterError, missing_dependency
from fedkin.fitting import FittedModel
from fedkin.graph import Graph
from fedkin.report.payload import LEVEL, display_order, report_payload, shares_of
from fedkin.report.text import comparison_table, group_labels, members

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Groups, and members of each, that are named in the page's own text; the script shows all.
_MOST_GROUPS, _MOST_NAMED = 20, 12


def report_page(model: FittedModel, places: Mapping[str, Any] | None = None) -> str:
    """Return the report of a model as one HTML page, which opens without a network.

    Parameters
    ----------
    model : FittedModel
        As fitted, or as `fedkin.load` reads it.
    places : mapping, optional
        Where the sites are: what `read_coordinates` gives.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit
    >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
    >>> model = fit(fed, None, FitOptions(loss="mean", lam=0.02, select="none"))
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
    """Fill in the template of a kind of page, with the bundle and its values embedded."""
    return render(
        f"{kind}.html",
        title=title,
        style=Markup(bundle("fedkin.css")),
        script=Markup(bundle("fedkin.js").replace("</script", "<\\/script").replace("<!--", "<\\!--")),
        payload=Markup(embedded(payload)),
        **values,
    )


def embedded(values: Mapping[str, Any]) -> str:
    """Return JSON that can stand in a ``<script>``: nothing in it, whatever sites are called, ends the element."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


@cache
def bundle(name: str) -> str:
    """Return a file of the bundle that ``web/`` was built into."""
    return files("fedkin.report").joinpath("static", name).read_text("utf-8").strip()


def render(template: str, **values: Any) -> str:
    """Fill in a file of ``templates/``; every value is escaped, and a missing one is an error."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    how: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=PackageLoader("fedkin.report"), autoescape=True, **how)


def demo_picture(errors: Mapping[str, float], strong: str, given: Graph, found: Graph, labels: Index) -> str:
    """Draw two graphs of sites with true groups ``labels`` and the errors of methods side by side, as one ``<svg>``."""
    low = math.floor(math.log10(min(errors.values())) + 1e-9)
    high = max(math.ceil(math.log10(max(errors.values())) - 1e-9), low + 1)

    def share(value: float) -> float:
        return (math.log10(value) - low) / (high - low)

    matrices = [_matrix(given, labels, "The graph as given"), _matrix(found, labels, "Sites that Fedkin takes for kin")]
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
        """Return the page, with what is known now."""
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
        """Return the state with the news and the curves up to now."""
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
    """Return what to say about a site whose kind has changed; ``started`` if it was there at some time."""
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


# --- figures with Matplotlib, imported when a figure is asked for ---------------------------------------------------

#: Colours of groups, as on the page; beyond ten they come again.
COLOURS = (
    *("#0f766e", "#c2571a", "#5b5bd6", "#b0256b", "#8a6d00"),
    *("#1d6fb8", "#6b7a10", "#8b46b5", "#a3422f", "#44616f"),
)
_PLAIN, _RAMP = "#5f6b76", ["#f3f1ec", "#0b4f49"]


def plot_kin(model: FittedModel, ax: Axes | None = None) -> Axes:
    """Draw the ordered matrix of a model: how probable it is that two sites are kin.

    Of a fused model, the share of coefficients that two sites have in common.

    Parameters
    ----------
    model : FittedModel
        As fitted or loaded.
    ax : matplotlib axes, optional
        Where to draw; a new figure by default.

    Returns
    -------
    matplotlib axes

    Examples
    --------
    >>> import matplotlib
    >>> matplotlib.use("Agg")
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit
    >>> from fedkin.report import plot_kin
    >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
    >>> model = fit(fed, None, FitOptions(loss="mean", lam=0.02, select="none"))
    >>> plot_kin(model).get_title()
    'Coefficients in common'
    """
    ax = _axes(ax, (5.0, 5.0))
    from matplotlib.colors import LinearSegmentedColormap

    groups, resolved = group_labels(model)
    shares, ramp = shares_of(model, np.arange(model.n_sites)), LinearSegmentedColormap.from_list("kin", _RAMP)
    order = display_order(shares, groups)
    picture = ax.imshow(shares[np.ix_(order, order)], cmap=ramp, vmin=0, vmax=1, interpolation="nearest")
    ax.figure.colorbar(picture, ax=ax, shrink=0.8)
    if resolved:
        for edge in np.flatnonzero(np.diff(groups[order])) + 0.5:
            ax.axhline(edge, color="white", linewidth=1)
            ax.axvline(edge, color="white", linewidth=1)
    if model.n_sites <= 40:
        names = [str(model.sites[u]) for u in order]
        ax.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        ax.set_yticks(range(len(names)), names, fontsize=7)
        for ticks in (ax.get_xticklabels(), ax.get_yticklabels()):
            for tick, site in zip(ticks, order.tolist(), strict=True):
                tick.set_color(_colour(int(groups[site]), resolved))
    ax.set_title("Coefficients in common" if model.kin is None else "Probability of being kin")
    return ax


def plot_coefficients(
    model: FittedModel, feature: str | int = 0, ax: Axes | None = None, *, level: float = LEVEL, most: int = 60
) -> Axes:
    """Draw one coefficient at every site, with intervals where the model has them, sites sorted by group and size.

    Parameters
    ----------
    model, ax
        As in `plot_kin`.
    feature : str or int
        Name or number of a feature.
    level : float in (0, 1)
        Of the intervals.
    most : int
        Sites that are drawn; of more, evenly spread ones.
    """
    number = _feature(model, feature)
    (groups, resolved), values = group_labels(model), model.coef[:, 0, number]
    order = np.lexsort((values, -groups))
    if order.size > most:
        order = order[np.unique(np.linspace(0, order.size - 1, most).astype(np.int64))]
    ax = _axes(ax, (6.0, max(2.0, 0.22 * order.size)))
    places, values = np.arange(order.size), values[order]
    colours = [_colour(int(groups[u]), resolved) for u in order.tolist()]
    if model.kin is not None and model.coef.shape[1] == 1:
        half = np.ptp(model.kin.confint(level), axis=2)[order, number + int(model.fit_intercept)] / 2
        ax.hlines(places, values - half, values + half, colors=colours, linewidth=1.5)
    ax.scatter(values, places, c=colours, s=22, zorder=3)
    ax.axvline(0, color="0.6", linewidth=0.8, linestyle=":")
    ax.set_yticks(places, [str(model.sites[u]) for u in order.tolist()], fontsize=7)
    ax.set_xlabel(model.feature_names[number])
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return ax


def plot_path(model: FittedModel, ax: Axes | None = None) -> Axes:
    """Draw how sites fuse as ``lam`` grows: a line per site; lines meet where parameters are equal.

    Parameters
    ----------
    model : FittedModel
        With the path in its ``history``, as ``fedkin fit`` and `with_history` keep it.
    ax : matplotlib axes, optional
        Where to draw.
    """
    path: Mapping[str, Any] | None = (model.history or {}).get("path")
    if path is None:
        raise ParameterError("the model has no path in its history: fit with lam='cv', then fitting.with_history(...)")
    ax = _axes(ax, (6.0, 4.0))
    groups, resolved = group_labels(model)
    lams, labels = np.asarray(path["lams"]), np.asarray(path["labels"])
    rank = np.argsort(np.argsort(groups, kind="stable"))
    heights = np.array([(np.bincount(line, weights=rank) / np.maximum(np.bincount(line), 1))[line] for line in labels])
    for u in range(model.n_sites):
        ax.plot(lams, heights[:, u], color=_colour(int(groups[u]), resolved), linewidth=1, alpha=0.7)
    if model.fused is not None:
        lam = model.fused.lam
        ax.axvline(lam, color="0.2", linewidth=1.2)
        ax.annotate(f"lam = {lam:.3g}", (lam, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=8)
    ax.set_xscale("log")
    ax.set_yticks([])
    ax.set_xlabel("lam")
    ax.set_ylabel("sites")
    return ax


def plot_graph(
    graph: Graph, groups: ArrayLike | None = None, coordinates: ArrayLike | None = None, ax: Axes | None = None
) -> Axes:
    """Draw a graph of sites: at their coordinates, or on a circle, sorted by group.

    Parameters
    ----------
    graph : Graph
        The sites and their edges.
    groups : sequence of V ints, optional
        Colours the sites; by default the connected components.
    coordinates : array (V, 2), optional
        Where the sites are.
    ax : matplotlib axes, optional
        Where to draw.

    Examples
    --------
    >>> import matplotlib
    >>> matplotlib.use("Agg")
    >>> import fedkin
    >>> from fedkin.report import plot_graph
    >>> axes = plot_graph(fedkin.Graph.clusters([0, 0, 1, 1, 1]))
    >>> len(axes.collections[0].get_segments())
    4
    """
    from matplotlib.collections import LineCollection

    labels = np.asarray(graph.components() if groups is None else groups, dtype=np.int64)
    places = _places(labels, coordinates)
    for name, size in (("groups", labels.size), ("coordinates", len(places))):
        if size != graph.n_sites:
            raise ParameterError(f"{name} has {size} lines, expected {graph.n_sites}: one for each site")
    ax = _axes(ax, (5.0, 5.0))
    ax.add_collection(LineCollection(list(places[graph.edges]), colors="0.6", linewidths=0.7, alpha=0.6))
    colours = [_colour(int(label)) for label in labels]
    ax.scatter(places[:, 0], places[:, 1], c=colours, s=40, zorder=3, edgecolors="white")
    if graph.n_sites <= 40:
        for (x, y), site in zip(places, graph.sites, strict=True):
            ax.annotate(str(site), (x, y), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=7)
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


def _places(labels: Index, coordinates: ArrayLike | None) -> Array:
    if coordinates is not None:
        return np.asarray(coordinates, dtype=np.float64).reshape(-1, 2)
    angle = 2 * np.pi / labels.size * np.argsort(np.argsort(labels, kind="stable"))
    return np.column_stack([np.cos(angle), np.sin(angle)])


def _feature(model: FittedModel, feature: str | int) -> int:
    if isinstance(feature, str):
        if feature in model.feature_names:
            return model.feature_names.index(feature)
        raise ParameterError(f"the model has no feature {feature!r}; it has {', '.join(model.feature_names[:8])}")
    if not 0 <= feature < model.n_features:
        raise ParameterError(f"feature must be from 0 to {model.n_features - 1}, got {feature!r}")
    return feature


def _colour(group: int, resolved: bool = True) -> str:
    return COLOURS[group % len(COLOURS)] if resolved else _PLAIN


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise missing_dependency("matplotlib", "a figure", "report") from None
    return plt.subplots(figsize=size, layout="constrained")[1]
