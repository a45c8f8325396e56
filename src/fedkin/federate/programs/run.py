"""The rounds of one site, or of the central machine: what ``fedkin site run`` and ``fedkin federation run`` become."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import Array, write_arrays
from fedkin.federate.links import Transport
from fedkin.federate.manifest import Manifest
from fedkin.federate.peer import Peer
from fedkin.federate.programs.files import PRESENCE, RECORD, STATE, read_selection
from fedkin.federate.programs.program import Program, SiteParser, run_program
from fedkin.federate.site import Site
from fedkin.federate.waiting import Patience


@dataclass(frozen=True, eq=False)
class Result:
    """What a site has at the end: the averaged parameters ``theta (p,)``, in the units of its prepared rows."""

    site: Site
    manifest: Manifest
    theta: Array
    n_rows: int


#: What is done with a site's result; `fedkin.cli` makes a model of it.
Finish = Callable[[Result], None]


def run(program: Program, patience: Patience, finish: Finish) -> None:
    """Do all rounds that are left, and hand over the result."""
    manifest = program.manifest
    program.status.rounds = manifest.rounds
    roles: dict[str, Callable[[Program, Transport, Patience, Finish], None]]
    roles = {"peer": _peer, "replicas": _replica, "central": _worker}
    role = _centre if manifest.here == manifest.n_sites else roles[manifest.placement]
    with program.linked() as transport:
        role(program, transport, patience, finish)
        program.status.end("done")


def _peer(program: Program, transport: Transport, patience: Patience, finish: Finish) -> None:
    manifest = program.manifest
    rows = program.site.rows()

    def tick(peer: Peer) -> None:
        program.tick()
        if program.out:
            peer.drop(program.out)

    peer = Peer(
        manifest,
        rows,
        transport,
        program.journal,
        checkpoint=program.place / STATE,
        patience=patience,
        left=program.out | read_selection(program.place, manifest),
        tick=tick,
    )
    program.status.begin(peer.status, manifest.rounds, peer.settle)
    theta = peer.run()
    finish(Result(program.site, manifest, theta, rows.n_samples))
    program.status.write()
    peer.linger()


def _replica(program: Program, transport: Transport, patience: Patience, finish: Finish) -> None:
    from fedkin.federate.replicas import Replica

    place, manifest, rows = program.place, program.manifest, program.site.rows()
    peer = Replica(
        manifest,
        rows,
        transport,
        program.journal,
        checkpoint=place / STATE,
        record=place / RECORD,
        patience=patience,
        tick=program.tick,
    )
    program.status.begin(peer.status, manifest.rounds)
    theta = peer.run()
    finish(Result(program.site, manifest, theta, rows.n_samples))
    if peer.leads:
        write_presence(place, peer.component.presence, [manifest.name(u) for u in peer.component.members])
    program.status.write()
    peer.linger()


def _worker(program: Program, transport: Transport, patience: Patience, finish: Finish) -> None:
    from fedkin.federate.central import Worker

    manifest, rows = program.manifest, program.site.rows()
    worker = Worker(manifest, rows, transport, program.journal, patience=patience, tick=program.tick)
    program.status.begin(worker.status, manifest.rounds)
    theta = worker.run()
    finish(Result(program.site, manifest, theta, rows.n_samples))


def _centre(program: Program, transport: Transport, patience: Patience, finish: Finish) -> None:
    from fedkin.federate.central import Centre

    place, manifest = program.place, program.manifest
    centre = Centre(
        manifest, transport, program.journal, checkpoint=place / STATE, patience=patience, tick=program.tick
    )
    program.status.begin(centre.status, manifest.rounds)
    centre.run()
    write_presence(place, centre.hub.presence, [manifest.name(u) for u in centre.hub.members])
    program.status.write()
    centre.linger()


def write_presence(place: Path, presence: Sequence[Any], names: Sequence[str]) -> None:
    """Write who was there in which round."""
    parts = {"available": np.array(presence), "sites": np.array(names)}
    write_arrays(place / PRESENCE, parts, compressed=True, private=True)


def main(finish: Finish, arguments: Sequence[str] | None = None, *, centre: bool = False) -> int:
    """Parse arguments and run one site, or the central machine."""
    parser = SiteParser("federation run" if centre else "site run", "Do all rounds.", Patience())
    parser.add_argument("--echo", action="store_true", help="log to standard error, too")
    place, patience, given = parser.parsed(arguments)
    options = {"echo": given["echo"], "listen": given["listen"], "lease": patience.lease}
    return run_program(place, lambda program: run(program, patience, finish), centre=centre, **options)


def forget(result: Result) -> None:
    """Do nothing with a result."""


if __name__ == "__main__":
    sys.exit(main(forget))
