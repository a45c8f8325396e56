"""The process of a site, or of the central machine: its directory, lock, log, status, signals, transport, exit code.

``fedkin site run`` and ``fedkin federation run`` do all rounds (`run`); ``fedkin site select`` tests edges before them
(`run_selection`). Exit codes: 0 finished, 3 stopped on request, 4 cannot continue now (start again later), 2 wrong
directory or input.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import Array, lock, wait_until, write_arrays
from fedkin.errors import DataError, FedkinError, ParameterError
from fedkin.federate import records
from fedkin.federate.arrivals import Arrivals
from fedkin.federate.attendance import AttendedLink
from fedkin.federate.inbox import Patience, PeerError, Stopped
from fedkin.federate.ledger import What
from fedkin.federate.messages import ADMIT, CENTRE, FEDERATION, INVITE, KEY, KEYS, NEXT_KEY, NOTICES, KeyList
from fedkin.federate.organiser import Organiser
from fedkin.federate.participant import Participant, select
from fedkin.federate.plan import ChoicePlan, SitePlan, centre_plan, list_key, site_plan
from fedkin.federate.records import CANNOT, SELECTION, Journal, SiteStatus, write_record
from fedkin.federate.site import Site
from fedkin.federate.transports import Transport, ZenohTransport, link_configuration, site_links
from fedkin.federate.trust import Pair, SecurityError, link_name, read_whole

FINISHED, WRONG, STOPPED, LATER = 0, 2, 3, 4
#: Environment variable in which a supervisor says how often it has started the site again.
RESTARTS = "FEDKIN_RESTARTS"
_STATUS_SECONDS, _TICK_SECONDS = 0.5, 0.05
_FIRST_LINK_SECONDS = 1.5  # after which the organiser takes it that no site runs
_MOST_LISTS = 16  # of keys that wait to be looked at
_LOOK_SECONDS = 1.0  # between two looks for a renewed certificate, and for a newer list of keys


@dataclass(frozen=True, eq=False)
class Result:
    """Result of a site: the averaged parameters ``theta (p,)``, in the units of its prepared rows."""

    site: Site
    plan: SitePlan
    theta: Array
    n_rows: int


#: Function that takes a site's result; `fedkin.cli` makes a model of it.
Finish = Callable[[Result], None]


class Program:
    """Process of a site or the central machine: its directory, identity, log and status."""

    def __init__(self, place: Path, *, centre: bool = False, listen: str | None = None, lease: float = 10.0) -> None:
        self.place, self._listen, self._lease = place, listen, lease
        self._site: Site | None = None
        self._organiser: Organiser | None = None
        if centre:
            self._organiser = Organiser.read(place)
            self.name, self.authority = CENTRE, self._organiser.authority
            if (placement := self._organiser.contract.rounds.placement) != "central":
                raise ParameterError(f"the contract's placement is {placement!r}, not 'central'")
            self._pair = self._organiser.link_pair()  # its key is made anew at every start
        else:
            if not (place / INVITE).exists() and (place / FEDERATION).exists():
                raise DataError(f"{place} is the organiser's directory: give that of a site (fedkin site join)")
            self._site = Site.read(place)
            self.name, self.authority = self._site.name, self._site.authority
        self.pair()  # raises unless it is admitted, and its certificate good
        self.out, self.keys = self._who_is_out(), self._keys()
        self._heard: deque[bytes] = deque(maxlen=_MOST_LISTS)
        self._open: dict[tuple[str, str], float] = {}  # links by common name and address, and since when
        self.transport: ZenohTransport | None = None
        self._seen: Any = None
        self._stop = False
        self._settle: Callable[[], object] = lambda: None
        self._looked, self._ticked, self._written = time.monotonic(), -math.inf, -math.inf

    def begin(self, journal: Journal) -> None:
        """Plan the run; errors are logged from now on."""
        self.journal, before = journal, records.read_status(self.place)
        # a site that cannot even begin is where it was
        self.status = SiteStatus(state="starting", started=time.time(), round=before.round, rounds=before.rounds)
        self.rounds, self._sent_before = before.rounds, before.sent
        self._restarts = int(os.environ.get(RESTARTS, before.restarts))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.plan = site_plan(self.site) if self._organiser is None else centre_plan(self._organiser)

    def _on_signal(self, *_: object) -> None:
        self._stop = True

    def report(self, participant: Participant) -> None:
        """Write the participant's status from now on; before it reports a round, the state after it is written."""
        self.status, self._settle = participant.status, participant.settle

    def write(self, state: str | None = None, why: str | None = None) -> None:
        """Replace ``status.json``, optionally with another state and its reason."""
        self._written, status = time.monotonic(), self.status
        if state is not None:
            status.state, status.why = state, why
        status.pid, status.time, status.rounds, status.restarts = os.getpid(), time.time(), self.rounds, self._restarts
        status.sent = self._sent_before + (0 if self.transport is None else self.transport.sent)
        with suppress(OSError):  # a full disk: checkpoints report it
            write_record(self.place / records.STATUS, status)

    @property
    def site(self) -> Site:
        """The site; not available for the central machine."""
        assert self._site is not None
        return self._site

    def pair(self) -> Pair:
        """Return a certificate that is valid now, and its key."""
        return self.site.pair() if self._organiser is None else self._pair

    def allow(self, what: What) -> None:
        """Raise `DataError` if nothing may leave the site for its neighbours; otherwise record what leaves."""
        if self._site is not None:
            to = "the central machine" if self.plan.placement == "central" else "its neighbours"
            note = "estimate and covariance" if what == "select" else f"thetas, order {self.plan.revision}"
            note += ", and held-out losses by level" if isinstance(self.plan, ChoicePlan) else ""
            self._site.let_out(what, to, note)

    def _who_is_out(self) -> frozenset[str]:
        return self.site.out if self._organiser is None else self._organiser.out()

    def _keys(self) -> KeyList:
        return self.site.keys if self._organiser is None else self._organiser.keys()

    def _links(self) -> dict[str, str]:
        """Return the common names under which partners get a link, by name."""
        plan, known = self.plan, {v: self.keys.keys[v] for v in self.plan.partners() if v < self.plan.federation_size}
        names = {plan.name(v): link_name(plan.name(v), mark) for v, mark in known.items() if mark}
        return {one: name for one, name in {CENTRE: CENTRE, **names}.items() if one not in self.out}

    def gone(self) -> frozenset[int]:
        """Return the numbers of partners that are permanently out."""
        if not self.out:  # as in nearly every round
            return frozenset()
        return frozenset(v for v in self.plan.partners() if self.plan.name(v) in self.out)

    @contextmanager
    def linked(self) -> Iterator[ZenohTransport]:
        """Open a transport to the partners; it is closed at the end."""

        def configure() -> dict[str, Any]:
            self._open = {}
            about = (self.pair(), self.authority, self.out, self._links())
            return site_links(self.plan, *about, self._listen, self._lease)

        self._seen = self._files()
        self.transport = ZenohTransport(configure, self._on_link, self._on_refused, self.plan.most_bytes)
        for v in self.plan.partners():
            asked = list_key(self.plan.run, self.name, self.plan.name(v))
            self.transport.answer(asked, partial(self._newer_keys, self.plan.name(v)))
        try:
            yield self.transport
        finally:
            self.transport.close()

    def _on_link(self, name: str | None, address: str, opened: bool) -> None:
        site, links = (name or "").partition("~")[0], self._links()
        if opened:
            self._open[name or "", address] = time.monotonic()
        else:
            self._open.pop((name or "", address), None)
        if opened and name not in links.values():
            words = "link with a key that is not on the list" if site in links else "link from a stranger"
            self.journal.sparingly("warning", f"{words}: all it does is refused", peer=site, key=name, address=address)
            if site in links:
                self.status.why = f"someone at {address} has a key of {site} that is not on the list: refused"
            self._looked = -math.inf  # a newer list may have it
        else:
            self.journal.sparingly("info", f"link {'opened' if opened else 'closed'}", peer=site)

    def _warn_of_copies(self) -> None:
        """Warn where one key has had two links for longer than a broken one lasts: someone has a copy of it."""
        ends: dict[str, list[str]] = {}
        for (name, address), since in list(self._open.items()):
            if time.monotonic() - since > self._lease and name != CENTRE and name in self._links().values():
                ends.setdefault(name, []).append(address)
        for name, places in ends.items():
            if len(places) > 1:
                site, where = name.partition("~")[0], " and ".join(sorted(places))
                event = "two links with one key: is there a copy of the site's directory?"
                self.journal.sparingly("warning", event, peer=site, addresses=where)
                self.status.why = f"{where} have the same key of {site}: ask {site}, and tell the organiser"

    def _newer_keys(self, partner: str, revision: int) -> bytes | None:
        """Return the list of keys for a partner that has this revision of it; None when that is as new."""
        if self._organiser is not None:
            return self._organiser.admission(partner, revision)
        return read_whole(self.place / KEYS) if 0 <= revision < self.keys.revision else None

    def _ask_for_keys(self) -> None:
        """Adopt the lists of keys received, and ask partners and the organiser for newer ones."""
        if self._site is None:  # the central machine has the organiser's own
            return
        while self._heard:
            self._site.take(self._heard.popleft())
        if self.transport is not None:
            due = self._site.renewal_due()
            for name in {CENTRE, *(self.plan.name(v) for v in self.plan.partners())} - self.out:
                asked, known = list_key(self.plan.run, name, self.name), self.keys.revision
                self.transport.pull(asked, 0 if due and name == CENTRE else known, self._hear)

    def _hear(self, text: bytes) -> None:
        """Keep news from the organiser for the next look; anything else, of which much may come, takes no place."""
        try:
            if self.site.is_news(text) and text not in self._heard:
                self._heard.append(text)
        except SecurityError as error:
            self.journal.sparingly("warning", "list of keys refused", why=str(error))

    def _on_refused(self, key: str, size: int) -> None:
        parts = key.split("/")  # RUN/KIND/SENDER/..., RUN/ask/KIND/SENDER/...
        why = f"{size} bytes, but the largest message has {self.plan.most_bytes}"
        self.journal.sparingly("warning", "message refused", peer=parts[3 if parts[1] == "ask" else 2], why=why)

    def _files(self) -> list[tuple[str, int, int]]:
        folder = self.place / NOTICES
        paths = [self.place / ADMIT, self.place / KEY, self.place / NEXT_KEY, self.place / KEYS]
        paths += sorted(folder.iterdir()) if folder.is_dir() else []
        facts = [(path, path.stat()) for path in paths if path.exists()]
        return [(path.name, fact.st_mtime_ns, fact.st_size) for path, fact in facts]

    def tick(self, *_: object) -> None:
        """Write the status, stop if requested, and occasionally check the directory."""
        now = time.monotonic()
        if now - self._ticked < _TICK_SECONDS and not self._stop:
            return
        self._ticked = now
        if self._stop:  # SIGTERM or Ctrl-C
            self.write("stopped")
            raise Stopped("stopped on request")
        if now - self._written >= _STATUS_SECONDS:
            self._settle()
            self.write()
        if now - self._looked > _LOOK_SECONDS or self._heard:
            self._looked = now
            self._look()

    def _look(self) -> None:
        """React to a renewed certificate, changed keys and departed sites: close links, and reopen them."""
        self._ask_for_keys()
        self._warn_of_copies()
        self.pair()  # raises when it has ended
        if self._site is not None and self._site.renewal_due():
            hint = "it is renewed when the organiser runs fedkin federation renew"
            self.journal.sparingly("warning", f"the certificate ends soon: {hint}")
        seen = self._files()
        if seen == self._seen:
            return
        self._seen, before, links, renewed = seen, self.out, self._links(), False
        try:
            if self._site is not None:
                certificate, self._site = self._site.certificate, Site.read(self.place)
                self.out = self._site.out
                self._site.pair()
                renewed = self._site.certificate != certificate
            self.out, self.keys = self._who_is_out(), self._keys()
        except SecurityError as error:
            if self.name in self.out:
                raise
            self.journal.sparingly("warning", "file refused", why=str(error))
            return
        gone = sorted(self.out - before)
        for name in gone:
            self.journal.write(
                "warning", "permanently out: its link is closed, and nothing more is sent to it", peer=name
            )
        if renewed:
            self.journal.write("info", "certificate renewed: links are reopened")
        changed = [(name, one) for name, one in self._links().items() if links.get(name) != one]
        for name, one in changed:
            event = "key replaced: links with the old one are refused" if name in links else "key known"
            self.journal.write("warning" if name in links else "info", event, peer=name, link=one)
        self.status.why = None  # until the next link with a key that is not on the list
        if (renewed or gone or changed) and self.transport is not None:
            self.transport.reopen()


def spread_keys(organiser: Organiser, seconds: float = 5.0) -> list[str]:
    """Send the newest list of keys to running sites that listen; others get it from them, or at their next start.

    Returns the names of those that have it, after at most this many seconds, or earlier if no site answers.
    """
    out, revision = organiser.out(), organiser.keys().revision
    sites = {one.name: one.endpoint for one in organiser.members if one.endpoint is not None and one.name not in out}
    if not sites or organiser.contract.rounds.placement == "central":  # the central machine tells its sites
        return []
    have: set[str] = set()
    links: list[str | None] = []

    def answer(name: str, known: int) -> bytes | None:
        if known >= revision:
            have.add(name)
        return organiser.admission(name, known)

    pair, endpoints = organiser.link_pair(), [one for one in sites.values() if one is not None]
    configuration = link_configuration([], endpoints, None, pair, organiser.authority)
    with closing(ZenohTransport(lambda: configuration, lambda name, *_: links.append(name))) as transport:
        for name in sites:
            transport.answer(list_key(organiser.charter.run, CENTRE, name), partial(answer, name))
        if wait_until(lambda: bool(links), min(seconds, _FIRST_LINK_SECONDS), pause=0.05, sleep=time.sleep):
            wait_until(lambda: len(have) == len(sites), seconds, pause=0.05, sleep=time.sleep)
    return sorted(have)


def run_program(place: Path, work: Callable[[Program], None], *, echo: bool = False, **how: Any) -> int:
    """Run ``work`` as the site whose directory is ``place``; errors go to its log, status and stderr.

    ``how`` is passed to `Program`. Returns an exit code.
    """
    try:
        program = Program(place, **how)
        with only_one(place), closing(Journal(program.name, place / records.LOG, echo=echo)) as journal:
            try:
                program.begin(journal)
                work(program)
            except Stopped:
                journal.write("info", "stopped on request")
                return STOPPED
            except (FedkinError, OSError) as error:
                journal.write("error", CANNOT, why=str(error))
                program.write(CANNOT, str(error))
                sys.stderr.write(f"{program.name}: {error}\n")
                return exit_code(error)
    except (FedkinError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)
    return FINISHED


def exit_code(error: FedkinError | OSError) -> int:
    """Return `LATER` for an error that may be gone at the next start, `WRONG` for one to fix first."""
    if isinstance(error, OSError):
        fix = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError) or error.errno == errno.EROFS
        return WRONG if fix else LATER
    return LATER if isinstance(error, PeerError) else WRONG


@contextmanager
def only_one(place: Path) -> Iterator[None]:
    """Hold the site's lock; raise `DataError` if another process does."""
    try:
        descriptor = lock(place / records.LOCK, str(os.getpid()))
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise DataError(
            f"{place} cannot be written ({error.strerror}), but a site keeps its state and its log there: make it "
            "writable for the user who runs the site, or move it to a place that is"
        ) from None
    if descriptor is None:
        raise DataError(f"{place} is in use by another process: a site runs in one process at a time")
    try:
        yield
    finally:
        os.close(descriptor)


def parse(
    command: str, words: str, patience: Patience, arguments: Sequence[str]
) -> tuple[Path, Patience, dict[str, Any]]:
    """Parse the directory of a site, its waiting times (``patience`` has the defaults), and its other options."""
    parser = argparse.ArgumentParser(prog=f"fedkin {command}", description=words)
    parser.add_argument("place", type=Path, help="the site's directory")
    parser.add_argument("--listen", metavar="HOST:PORT", help="listen here instead of at the address in the list")
    if command == "site run":
        parser.add_argument("--follow", type=Path, metavar="PATH", help="a growing table, or a directory of files")
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


def run(program: Program, patience: Patience, finish: Finish | None = None, follow: Path | None = None) -> None:
    """Run all remaining rounds, deliver the result, and stay while others need this process.

    ``follow`` is a table that grows, or a directory to which files are added.
    """
    program.allow("run")
    with program.linked() as transport:
        if isinstance(program.plan, ChoicePlan):
            choose(program, program.plan, transport, patience)
        plan, place, arrivals = program.plan, program.place, None
        if plan.noisy is not None and follow is not None:
            raise ParameterError("arriving rows need their own sums, and therefore more noise: leave out --follow")
        if not plan.is_centre and plan.noisy is None and (follow is not None or records.read_arrived(place).parts):
            about = (plan.theta[0], plan.loss_object(), program.journal)
            arrivals = Arrivals(program.site, plan.revision, follow, *about)
        participant = _begin(program, transport, patience, record=place / records.RECORD, arrivals=arrivals)
        theta = participant.run()
        program.write()  # a model takes a while
        if finish is not None and not plan.is_centre:
            assert participant.shard.gradients is not None
            finish(Result(program.site, plan, theta, int(participant.shard.gradients.rows.counts.sum())))
        link = participant.link
        if isinstance(link, AttendedLink) and link.decides:
            parts = {"available": np.array(link.attended), "sites": np.array([plan.name(u) for u in link.members])}
            write_arrays(place / records.PRESENCE, parts, compressed=True)
        program.write()
        participant.linger()
        program.write("done")


def _begin(
    program: Program,
    transport: Transport,
    patience: Patience,
    state: str = records.STATE,
    record: Path | None = None,
    arrivals: Arrivals | None = None,
) -> Participant:
    """Return the participant of the program's plan, whose status is written from now on."""
    plan = program.plan
    program.rounds = plan.rounds

    def tick(participant: Participant) -> None:
        program.tick()
        if plan.placement == "peer" and (gone := program.gone()):
            participant.drop(gone)

    participant = Participant(
        plan,
        transport,
        program.journal,
        checkpoint=program.place / state,
        record=record,
        patience=patience,
        left=program.gone() | records.read_selection(program.place, plan) if plan.placement == "peer" else (),
        arrivals=arrivals,
        tick=tick,
    )
    program.report(participant)
    return participant


def choose(program: Program, plan: ChoicePlan, transport: Transport, patience: Patience) -> None:
    """Run the rounds that choose ``lam``, write ``choice.json``, and plan the rounds that follow."""
    journal = program.journal
    journal.write("info", "choosing lam", levels=plan.levels.size, folds=len(plan.training), held_out=plan.n_held)
    participant = _begin(program, transport, patience, state=records.CHOICE_STATE)
    chosen = plan.chosen(participant.run())
    participant.save(participant.done, True)  # with what the others told
    participant.linger()
    write_record(program.place / records.CHOICE, chosen)
    journal.write("info", "lam chosen", lam=chosen.lam, sites=chosen.sites)
    program.plan = site_plan(program.site)


def main(finish: Finish | None, arguments: Sequence[str], *, centre: bool = False) -> int:
    """Parse arguments and run one site, or the central machine."""
    command = "federation run" if centre else "site run"
    place, patience, given = parse(command, "Do all rounds.", Patience(), arguments)
    follow = given.pop("follow", None)
    return run_program(place, lambda program: run(program, patience, finish, follow), centre=centre, **given)


def run_selection(program: Program, patience: Patience) -> None:
    """Test the edges of a site and write its ``selection.json``."""
    program.status.state = "testing edges"
    program.allow("select")
    with program.linked() as transport:
        chosen = select(program.plan, transport, program.journal, patience, program.tick)
        write_record(program.place / SELECTION, chosen)
        program.write("selected")


def select_main(arguments: Sequence[str]) -> int:
    """Parse arguments and test the edges of one site."""
    place, patience, given = parse("site select", "Test the edges of one site.", Patience(linger=60.0), arguments)
    return run_program(place, lambda program: run_selection(program, patience), **given)
