"""The process of a site, or of the central machine: its directory, lock, log, status, signals, transport, exit code.

``fedkin site run`` and ``fedkin federation run`` do all rounds (`run`); ``fedkin site select`` tests edges before them
(`fedkin.federate.selection`). Exit codes: 0 finished, 3 stopped on request, 4 cannot go on now (start again later), 2
wrong directory or input.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import Array, lock, write_arrays
from fedkin.errors import DataError, FedkinError
from fedkin.federate import records
from fedkin.federate.inbox import Patience, PeerError, Status, Stopped
from fedkin.federate.journal import Journal
from fedkin.federate.links import CentralLink, ReplicatedLink
from fedkin.federate.messages import ADMIT, CENTRE, FEDERATION, INVITE, KEY, NEXT_KEY, NOTICES
from fedkin.federate.organiser import Organiser
from fedkin.federate.participant import Participant
from fedkin.federate.plan import SitePlan, centre_plan, site_plan
from fedkin.federate.site import Site
from fedkin.federate.transports import ReopeningTransport, site_links
from fedkin.federate.trust import Pair, SecurityError

FINISHED, WRONG, STOPPED, LATER = 0, 2, 3, 4
#: State of a site that ended with an error.
CANNOT = "cannot go on"
#: Environment variable in which a supervisor says how often it has started the site again.
RESTARTS = "FEDKIN_RESTARTS"
_STATUS_SECONDS, _TICK_SECONDS = 0.5, 0.05
_LOOK_SECONDS = 1.0  # between two looks for a renewed certificate, and for sites that are out


@dataclass(frozen=True, eq=False)
class Result:
    """What a site has at the end: the averaged parameters ``theta (p,)``, in the units of its prepared rows."""

    site: Site
    plan: SitePlan
    theta: Array
    n_rows: int


#: What is done with a site's result; `fedkin.cli` makes a model of it.
Finish = Callable[[Result], None]


class Program:
    """A site, or the central machine, that runs: where and who it is, and what it writes to."""

    def __init__(self, place: Path, *, centre: bool = False, listen: str | None = None, lease: float = 10.0) -> None:
        self.place, self._listen, self._lease = place, listen, lease
        self._site: Site | None = None
        self._organiser: Organiser | None = None
        if centre:
            self._organiser = Organiser.read(place)
            self.name, self.authority = CENTRE, self._organiser.authority
            self._pair = self._organiser.centre_pair()  # its key is made anew at every start
        else:
            if not (place / INVITE).exists() and (place / FEDERATION).exists():
                raise DataError(f"{place} is the organiser's directory: give that of a site (fedkin site join)")
            self._site = Site.read(place)
            self.name, self.authority = self._site.name, self._site.authority
        self.pair()  # raises unless it is admitted, and its certificate good
        self.out = self._who_is_out()
        self.transport: ReopeningTransport | None = None
        self._seen: Any = None
        self._looked, self._ticked = time.monotonic(), -math.inf

    def begin(self, journal: Journal, status: StatusWriter) -> None:
        """Plan the run; what goes wrong from now on is written down."""
        self.journal, self.status = journal, status
        self.plan = site_plan(self.site) if self._organiser is None else centre_plan(self._organiser)

    @property
    def site(self) -> Site:
        """The site; not for the central machine."""
        assert self._site is not None
        return self._site

    def pair(self) -> Pair:
        """Return certificate and key, both valid now."""
        return self.site.pair() if self._organiser is None else self._pair

    def _who_is_out(self) -> frozenset[str]:
        return self.site.out if self._organiser is None else self._organiser.out()

    def gone(self) -> frozenset[int]:
        """Return the numbers of partners that are out, for good."""
        return frozenset(v for v in self.plan.partners() if self.plan.name(v) in self.out)

    @contextmanager
    def linked(self) -> Iterator[ReopeningTransport]:
        """Open a transport to those whom it exchanges messages with; it is closed at the end."""
        from fedkin.federate.zenoh import ZenohTransport

        def make() -> ZenohTransport:
            links = site_links(self.plan, self.pair(), self.authority, self.out, self._listen, self._lease)
            return ZenohTransport(links, self._on_link, self._on_refused, self.plan.most_bytes)

        self._seen = self._files()
        self.transport = ReopeningTransport(make)
        try:
            yield self.transport
        finally:
            self.transport.close()

    def _on_link(self, name: str | None, address: str, opened: bool) -> None:
        known = {self.plan.name(v) for v in self.plan.partners()} - self.out
        if opened and name not in known:
            words = "link from a stranger: all it does is refused"
            self.journal.sparingly("warning", words, peer=name, address=address)
        else:
            self.journal.sparingly("info", f"link {'opened' if opened else 'closed'}", peer=name)

    def _on_refused(self, key: str, size: int) -> None:
        parts = key.split("/")  # RUN/KIND/SENDER/..., RUN/ask/KIND/SENDER/...
        why = f"{size} bytes, but the largest message has {self.plan.most_bytes}"
        self.journal.sparingly("warning", "message refused", peer=parts[3 if parts[1] == "ask" else 2], why=why)

    def _files(self) -> list[tuple[str, int, int]]:
        folder = self.place / NOTICES
        paths = [self.place / ADMIT, self.place / KEY, self.place / NEXT_KEY]
        paths += sorted(folder.iterdir()) if folder.is_dir() else []
        facts = [(path, path.stat()) for path in paths if path.exists()]
        return [(path.name, fact.st_mtime_ns, fact.st_size) for path, fact in facts]

    def tick(self, *_: object) -> None:
        """Write the status, stop if asked to, and now and then look at the directory."""
        now = time.monotonic()
        if now - self._ticked < _TICK_SECONDS and not self.status.stop:
            return
        self._ticked = now
        if self.transport is not None:
            self.status.sent = self.transport.sent
        self.status.tick(now)
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            self._look()

    def _look(self) -> None:
        """Take note of a renewed certificate and of who is out: links are closed, and opened anew without them."""
        self.pair()  # raises when it has ended
        if self._site is not None and self._site.renewal_due():
            self.journal.sparingly("warning", f"the certificate ends soon: fedkin site renew {self.place}")
        seen = self._files()
        if seen == self._seen:
            return
        self._seen, before, renewed = seen, self.out, False
        try:
            if self._site is not None:
                certificate, self._site = self._site.certificate, Site.read(self.place)
                self.out = self._site.out
                self._site.pair()
                renewed = self._site.certificate != certificate
            self.out = self._who_is_out()
        except SecurityError as error:
            if self.name in self.out:
                raise
            self.journal.sparingly("warning", "file refused", why=str(error))
            return
        gone = sorted(self.out - before)
        for name in gone:
            self.journal.write("warning", "out for good: its link is closed, nothing more goes to it", peer=name)
        if renewed:
            self.journal.write("info", "certificate renewed: links are opened anew")
        if (renewed or gone) and self.transport is not None:
            self.transport.reopen()


class StatusWriter:
    """Keeps ``status.json`` up to date, and passes on the wish to stop. A site replaces ``status`` by its own."""

    def __init__(self, place: Path) -> None:
        self.place, before = place, records.read_status(place)
        # a site that cannot even begin is where it was
        self.rounds, self.status = before.rounds, Status(round=before.round)
        self.restarts = int(os.environ.get(RESTARTS, before.restarts))
        self.sent, self._sent_before = 0, before.sent  # bytes, by this process and those before
        self.why: str | None = None
        self.stop = False
        self._settle: Callable[[], None] = lambda: None
        self._written = -math.inf
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self.stop = True

    def begin(self, status: Status, settle: Callable[[], None]) -> None:
        """From now on write this status; before it tells of a round, ``settle`` has written the state after it."""
        self.status, self._settle = status, settle

    def tick(self, now: float) -> None:
        """Write the status if it is time to, and raise `Stopped` after SIGTERM or Ctrl-C."""
        if self.stop:
            self.end("stopped")
            raise Stopped("stopped on request")
        if now - self._written >= _STATUS_SECONDS:
            self._settle()
            self.write()

    def end(self, state: str, why: str | None = None) -> None:
        """Write the last state, and why it is."""
        self.status, self.why = replace(self.status, state=state), why
        self.write()

    def write(self) -> None:
        """Replace ``status.json``."""
        self._written, status = time.monotonic(), self.status
        told = ("state", "round", "waiting_for", "pulled", "repaired", "started")
        content = records.StatusFile(
            **{name: getattr(status, name) for name in told},
            pid=os.getpid(),
            time=time.time(),
            rounds=self.rounds,
            change=status.change if math.isfinite(status.change) else None,
            up=sorted(status.up),
            restarts=self.restarts,
            sent=self._sent_before + self.sent,
            shares=[[one if math.isfinite(one) else None for one in vars(share).values()] for share in status.shares],
            why=self.why,
        )
        with suppress(OSError):  # a full disk: checkpoints report it
            records.write_record(self.place / records.STATUS, content)


def run_program(place: Path, work: Callable[[Program], None], *, echo: bool = False, **how: Any) -> int:
    """Do ``work`` as the site whose directory is ``place``; errors go to its log, status and stderr.

    ``how`` goes to `Program`. Returns an exit code.
    """
    try:
        program = Program(place, **how)
        with only_one(place), closing(Journal(program.name, place / records.LOG, echo=echo)) as journal:
            status = StatusWriter(place)
            try:
                program.begin(journal, status)
                work(program)
            except Stopped:
                journal.write("info", "stopped on request")
                return STOPPED
            except (FedkinError, OSError) as error:
                journal.write("error", CANNOT, why=str(error))
                status.end(CANNOT, str(error))
                sys.stderr.write(f"{program.name}: {error}\n")
                return exit_code(error)
    except (FedkinError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)
    return FINISHED


def exit_code(error: FedkinError | OSError) -> int:
    """Return `LATER` for what may be gone at the next start, `WRONG` for what somebody has to fix first."""
    if isinstance(error, OSError):
        fix = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError) or error.errno == errno.EROFS
        return WRONG if fix else LATER
    return LATER if isinstance(error, PeerError) else WRONG


@contextmanager
def only_one(place: Path) -> Iterator[None]:
    """Hold the site's lock; raises `DataError` when another process does."""
    try:
        descriptor = lock(place / records.LOCK, str(os.getpid()))
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise DataError(
            f"{place} cannot be written ({error.strerror}), but a site keeps its state and its log there: make it "
            "writable for the user who runs the site, or carry it to a place that is"
        ) from None
    if descriptor is None:
        raise DataError(f"{place} is in use by another process: a site runs in one process at a time")
    try:
        yield
    finally:
        os.close(descriptor)


def parse(
    command: str, words: str, patience: Patience, arguments: Sequence[str] | None
) -> tuple[Path, Patience, dict[str, Any]]:
    """Parse the directory of a site, how long it waits (``patience`` has the defaults), and what else it is told."""
    parser = argparse.ArgumentParser(prog=f"fedkin {command}", description=words)
    parser.add_argument("place", type=Path, help="the site's directory")
    parser.add_argument("--listen", metavar="HOST:PORT", help="listen here instead of at the address in the list")
    parser.add_argument("--echo", action="store_true", help="log to standard error, too")
    for name, value in vars(patience).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, metavar="SECONDS")
    given = vars(parser.parse_args(arguments))
    place, waits = given.pop("place"), {name: given.pop(name) for name in vars(patience)}
    if given["listen"] is not None:
        given["listen"] = f"tls/{given['listen']}"
    try:
        patience = Patience(**waits)
    except FedkinError as error:
        parser.error(str(error))
    return place, patience, {**given, "lease": patience.lease}


def run(program: Program, patience: Patience, finish: Finish | None = None) -> None:
    """Do all rounds that are left, hand over the result, and stay while others need this process."""
    plan, place = program.plan, program.place
    program.status.rounds = plan.rounds

    def tick(participant: Participant) -> None:
        program.tick()
        if plan.placement == "peer" and (gone := program.gone()):
            participant.drop(gone)

    with program.linked() as transport:
        participant = Participant(
            plan,
            transport,
            program.journal,
            checkpoint=place / records.STATE,
            record=place / records.RECORD,
            patience=patience,
            left=program.gone() | records.read_selection(place, plan) if plan.placement == "peer" else (),
            tick=tick,
        )
        program.status.begin(participant.status, participant.settle)
        theta = participant.run()
        if finish is not None and not plan.is_centre:
            assert plan.rows is not None
            finish(Result(program.site, plan, theta, int(plan.rows.counts.sum())))
        link = participant.link
        if isinstance(link, CentralLink) or (isinstance(link, ReplicatedLink) and link.leads):
            parts = {"available": np.array(link.attended), "sites": np.array([plan.name(u) for u in link.members])}
            write_arrays(place / records.PRESENCE, parts, compressed=True, private=True)
        program.status.write()
        participant.linger()
        program.status.end("done")


def main(finish: Finish | None = None, arguments: Sequence[str] | None = None, *, centre: bool = False) -> int:
    """Parse arguments and run one site, or the central machine."""
    command = "federation run" if centre else "site run"
    place, patience, given = parse(command, "Do all rounds.", Patience(), arguments)
    return run_program(place, lambda program: run(program, patience, finish), centre=centre, **given)


if __name__ == "__main__":
    sys.exit(main())
