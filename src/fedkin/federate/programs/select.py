"""``fedkin site select DIR``: edge selection between sites.

Each site fits its own rows and sends its neighbours the estimate, its covariance and what the test needs to know
about them (``p^2 + 2 p + 5`` numbers). Both ends of an edge can then test it; the end with the smaller position decides
and tells the other, so that rounding cannot make them disagree. The Bonferroni threshold ``level / |E|`` needs no one
else.

What differs from `fedkin.select_edges`, which sees all sites at once: noise variances are steadied across the two
ends only, and a site without an estimate of its own takes the scale of its prior from its own rows.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.core import LocalFit, bonferroni, local_fit, wald_tests
from fedkin.data import Federation, Rows
from fedkin.errors import DegenerateSiteWarning, ParameterError
from fedkin.federate.frames import Expected, Kind
from fedkin.federate.journal import Journal
from fedkin.federate.links import Transport
from fedkin.federate.links.neighbours import NeighbourLink
from fedkin.federate.manifest import Manifest, presence_key, selection_keys
from fedkin.federate.programs.files import SELECTION
from fedkin.federate.programs.program import Program, SiteParser, run_program
from fedkin.federate.reading import loss_of
from fedkin.federate.records import write_record
from fedkin.federate.waiting import Patience


class Exchange(NeighbourLink):
    """Vectors to and from all neighbours outside the rounds, each kind once, pulled until they are there.

    ``lengths`` says how many numbers a message of each kind has.
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
        neighbours = [int(v) for v in manifest.neighbours(manifest.here)]
        super().__init__(manifest, neighbours, transport, journal, patience=patience, tick=tick)
        self._own_keys = selection_keys(manifest, self.position, self.position)
        self._lengths, self._frames = lengths, dict[str, bytes]()
        self.open()

    def open(self) -> None:
        for v in self.neighbours:
            self.transport.watch(presence_key(self.manifest, v), partial(self._on_presence, v))
            for kind, key in selection_keys(self.manifest, v, self.position).items():
                expected = Expected(self.run_bytes, kind, v, self._lengths.get(kind, 0), 0, 0)
                self._slots[kind, v] = self.inbox.expect(expected)
                self.transport.subscribe(key, self._slots[kind, v])
        keys = {key for v in self.neighbours for key in selection_keys(self.manifest, self.position, v).values()}
        for key in sorted(keys):
            self.transport.answer(key, lambda t, key=key: self._frames.get(key))  # type: ignore[misc]
        self.transport.announce(presence_key(self.manifest, self.position))

    def tell(self, kind: Kind, values: Array, receivers: Sequence[int]) -> None:
        """Send a vector, and keep it for those who ask."""
        for key in {selection_keys(self.manifest, self.position, v)[kind] for v in receivers}:
            self._frames[key] = self.frame(kind, 0, values)
            self.transport.publish(key, self._frames[key])

    def pull(self, kind: Kind, sender: int, t: int) -> None:
        self.transport.pull(selection_keys(self.manifest, sender, self.position)[kind], t, self._slots[kind, sender])

    def receive(self, kind: Kind, senders: list[int]) -> dict[int, Array]:
        """Wait for the vectors of these neighbours; raises `PeerError` when they do not come."""
        self.wait_for(kind, senders, 0)
        return {v: self.inbox.values(kind, v, 0) for v in senders}

    def finish(self) -> None:
        """Say that this site has all it needs, and stay until all neighbours say so, or the time is over."""
        self.tell(Kind.DONE, np.zeros(0), self.neighbours)
        self.linger()


def summary(manifest: Manifest, rows: Rows) -> Array:
    """What a site tells about its own fit: theta, covariance, prior precision, and five facts."""
    assert manifest.select is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateSiteWarning)  # `rescued` travels, and the log says so
        fit = local_fit(Federation({0: rows}), loss_of(manifest), manifest.select.variance)
    dof = fit.residual_dof[0] if np.isfinite(fit.residual_dof[0]) else -1.0
    facts = [fit.n_samples[0], fit.dispersion[0], dof, fit.matrix_estimated[0], fit.rescued[0]]
    return np.concatenate(
        [fit.theta[0], fit.covariance[0].ravel(), fit.prior_precision[0], np.array(facts, dtype=float)]
    )


def _pair(manifest: Manifest, first: Array, second: Array) -> LocalFit:
    """A `LocalFit` of two sites from their summaries."""
    assert manifest.select is not None
    p = manifest.n_params
    both = np.stack([first, second])
    samples, dispersion, dof, whole, rescued = both[:, -5:].T
    return LocalFit(
        sites=(0, 1),
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
    exchange.tell(Kind.SUMMARY, own, exchange.neighbours)
    others = exchange.receive(Kind.SUMMARY, exchange.neighbours)
    p_values = {}
    for v, other in others.items():
        lower, upper = (own, other) if position < v else (other, own)
        p_values[v] = float(wald_tests(_pair(manifest, lower, upper), np.array([[1, 0]]))[1][0])
        if position < v:
            exchange.tell(Kind.VERDICT, np.array([p_values[v]]), [v])
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
