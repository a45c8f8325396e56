"""``fedkin site select DIR``: edge selection between sites.

Each device fits its own rows and sends its neighbours the estimate, its covariance and what the test needs to know
about them (``p^2 + 2 p + 5`` numbers). Both ends of an edge can then test it; the end with the smaller position decides
and tells the other, so that rounding cannot make them disagree. The Bonferroni threshold ``level / |E|`` needs no one
else.

What differs from `fedkin.select_edges`, which sees all devices at once: noise variances are steadied across the two
ends only, and a device without an estimate of its own takes the scale of its prior from its own rows.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.data import Federation, Rows
from fedkin.errors import DegenerateDeviceWarning, ParameterError
from fedkin.federate.contract.manifest import Manifest, presence_key, selection_keys
from fedkin.federate.contract.reading import loss_of
from fedkin.federate.frames import Expected, Kind, encode
from fedkin.federate.journal import Journal
from fedkin.federate.links import Transport
from fedkin.federate.programs.files import SELECTION
from fedkin.federate.programs.program import Program, SiteParser, run_program
from fedkin.federate.records import write_record
from fedkin.federate.waiting import Inbox, Patience, PeerError
from fedkin.stats import LocalFit, bonferroni, local_fit, wald_tests

_LOOK_SECONDS = 0.4


class Exchange:
    """Vectors to and from all neighbours outside the rounds, each kind once, pulled until they are there.

    ``lengths`` says how many numbers a message of each kind has. ``tick`` is called several times a second while
    waiting; it may raise `Stopped`.
    """

    def __init__(
        self,
        manifest: Manifest,
        transport: Transport,
        journal: Journal,
        lengths: Mapping[Kind, int],
        patience: Patience | None = None,
        tick: Callable[[], None] | None = None,
    ) -> None:
        self.manifest, self.position, self.transport, self.journal = manifest, manifest.here, transport, journal
        self.patience, self.tick = patience or Patience(), tick or (lambda: None)
        position = self.position
        self.neighbours = [int(v) for v in manifest.neighbours(position)]
        self.names = {v: manifest.name(v) for v in self.neighbours}
        self.inbox = Inbox(self.names, journal)
        self.up: set[str] = set()
        self._frames: dict[str, bytes] = {}
        self._slots: dict[tuple[Kind, int], Callable[[bytes], bool]] = {}
        transport.announce(presence_key(manifest, position))
        for v in self.neighbours:
            transport.watch(presence_key(manifest, v), partial(self._on_presence, self.names[v]))
            for kind, key in selection_keys(manifest, v, position).items():
                slot = self.inbox.expect(Expected(manifest.run_bytes, kind, v, lengths.get(kind, 0), 0, 0))
                self._slots[kind, v] = slot
                transport.subscribe(key, slot)
            for key in selection_keys(manifest, position, v).values():
                if key not in self._frames:
                    self._frames[key] = b""
                    transport.answer(key, self._answer(key))

    def _on_presence(self, name: str, here: bool) -> None:
        (self.up.add if here else self.up.discard)(name)

    def _answer(self, key: str) -> Callable[[int], bytes | None]:
        def on_pull(t: int) -> bytes | None:
            return self._frames[key] or None

        return on_pull

    def send(self, kind: Kind, values: Array, receiver: int | None = None) -> None:
        """Tell one neighbour, or all of them."""
        for v in self.neighbours if receiver is None else [receiver]:
            key = selection_keys(self.manifest, self.position, v)[kind]
            frame = encode(self.manifest.run_bytes, kind, self.position, 0, values)
            if self._frames[key] != frame:
                self._frames[key] = frame
                self.transport.publish(key, frame)

    def receive(self, kind: Kind, senders: list[int], seconds: float | None = None) -> dict[int, Array]:
        """Wait for the vectors of these neighbours; raises `PeerError` after ``seconds`` (or ``give_up``)."""
        began = time.monotonic()
        complaint = began + self.patience.complain
        limit = self.patience.give_up if seconds is None else seconds
        missing = self.inbox.missing(kind, senders, 0)
        while missing:
            for v in missing:
                self.transport.pull(selection_keys(self.manifest, v, self.position)[kind], 0, self._slots[kind, v])
            missing = self.inbox.wait(kind, senders, 0, _LOOK_SECONDS)
            self.tick()
            now = time.monotonic()
            names = [self.names[v] for v in missing]
            if missing and now - began > limit:
                raise PeerError(f"no {kind.name} for {now - began:.0f} s from {self.inbox.in_words(missing, self.up)}")
            if missing and now > complaint:
                self.journal.write("warning", "waiting", kind=kind.name, peers=names, seconds=round(now - began, 1))
                complaint = now + max(now - began, self.patience.complain)
        return {v: self.inbox.values(kind, v, 0) for v in senders}

    def finish(self) -> None:
        """Say that this device has all it needs, and stay until all neighbours say so, or the time is over."""
        if not self.neighbours:
            return
        self.send(Kind.DONE, np.zeros(0))
        try:
            self.receive(Kind.DONE, self.neighbours, self.patience.linger)
        except PeerError as error:
            self.journal.write("warning", "left before all neighbours had finished", why=str(error))
            return
        time.sleep(2.5 * _LOOK_SECONDS)  # somebody may ask once more


def summary(manifest: Manifest, rows: Rows) -> Array:
    """What a device tells about its own fit: theta, covariance, prior precision, and five facts."""
    assert manifest.select is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDeviceWarning)  # `rescued` travels, and the log says so
        fit = local_fit(Federation({0: rows}), loss_of(manifest), manifest.select.variance)
    dof = fit.residual_dof[0] if np.isfinite(fit.residual_dof[0]) else -1.0
    facts = [fit.n_samples[0], fit.dispersion[0], dof, fit.matrix_estimated[0], fit.rescued[0]]
    return np.concatenate(
        [fit.theta[0], fit.covariance[0].ravel(), fit.prior_precision[0], np.array(facts, dtype=float)]
    )


def _pair(manifest: Manifest, first: Array, second: Array) -> LocalFit:
    """A `LocalFit` of two devices from their summaries."""
    assert manifest.select is not None
    p = manifest.n_params
    both = np.stack([first, second])
    samples, dispersion, dof, whole, rescued = both[:, -5:].T
    return LocalFit(
        devices=(0, 1),
        theta=both[:, :p],
        hessian=np.zeros((2, p, p)),
        covariance=both[:, p : p + p * p].reshape(2, p, p),
        n_samples=samples.astype(np.int64),
        dispersion=dispersion,
        residual_dof=np.where(dof < 0, np.inf, dof),
        matrix_estimated=whole > 0.5,
        prior_precision=both[:, p + p * p : 2 * p + p * p],
        rescued=rescued > 0.5,
        notes={},
        variance=manifest.select.variance,
        losses=(str(manifest.loss["name"]),) * 2,
    )


def select(
    manifest: Manifest,
    rows: Rows,
    transport: Transport,
    journal: Journal,
    patience: Patience,
    *,
    tick: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Exchange summaries and verdicts; returns p-values and the names of neighbours whose edge is dropped.

    ``tick`` is called several times a second while waiting.
    """
    if manifest.select is None:
        raise ParameterError("this federation tests no edges: its contract has no [rounds.select]")
    position, own = manifest.here, summary(manifest, rows)
    if own[-1]:
        journal.write("warning", "no estimate of its own: a ridge fit stands in")
    lengths = {Kind.SUMMARY: own.size, Kind.VERDICT: 1}
    exchange = Exchange(manifest, transport, journal, lengths, patience, tick)
    exchange.send(Kind.SUMMARY, own)
    others = exchange.receive(Kind.SUMMARY, exchange.neighbours)
    p_values = {}
    for v, other in others.items():
        lower, upper = (own, other) if position < v else (other, own)
        p_values[v] = float(wald_tests(_pair(manifest, lower, upper), np.array([[1, 0]]))[1][0])
        if position < v:
            exchange.send(Kind.VERDICT, np.array([p_values[v]]), v)
    # the smaller end decides
    p_values |= {
        v: float(one[0]) for v, one in exchange.receive(Kind.VERDICT, [v for v in others if v < position]).items()
    }
    exchange.finish()
    threshold = bonferroni(manifest.select.level, manifest.n_edges)
    dropped = [v for v, p_value in p_values.items() if p_value < threshold]
    journal.write("info", "edges selected", kept=len(p_values) - len(dropped), of=len(p_values))
    return {
        "run": manifest.run,
        "revision": manifest.revision,
        "threshold": threshold,
        "p_values": {manifest.name(v): p_value for v, p_value in sorted(p_values.items())},
        "dropped": [manifest.name(v) for v in sorted(dropped)],
    }


def run(program: Program, patience: Patience) -> None:
    """Test the edges of a site and write its ``selection.json``."""
    program.status.status.state = "testing edges"
    with program.linked() as transport:
        parts = (program.manifest, program.site.rows(), transport, program.journal, patience)
        chosen = select(*parts, tick=program.tick)
        write_record(program.place / SELECTION, chosen)
        program.status.end("selected")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments and test the edges of one site."""
    parser = SiteParser("site select", "Test the edges of one site.", Patience(linger=60.0))
    place, patience, given = parser.parsed(arguments)
    return run_program(place, lambda program: run(program, patience), listen=given["listen"], lease=patience.lease)


if __name__ == "__main__":
    sys.exit(main())
