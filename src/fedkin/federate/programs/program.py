"""What all programs of a site have in common: who it is, lock, log, status, signals, links, exit code.

Exit codes: 0 finished, 3 stopped on request, 4 cannot go on now (start again later), 2 wrong directory or input.
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
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from fedkin._base import lock
from fedkin.errors import DataError, FedkinError
from fedkin.federate.journal import Journal
from fedkin.federate.links.access import site_links
from fedkin.federate.links.reopening import ReopeningTransport
from fedkin.federate.manifest import Manifest
from fedkin.federate.messages import ADMIT, CENTRE, FEDERATION, INVITE, KEY, NEXT_KEY, NOTICES
from fedkin.federate.organiser import Organiser
from fedkin.federate.programs.files import LOCK, LOG, STATUS, read_status
from fedkin.federate.records import write_record
from fedkin.federate.site import Site
from fedkin.federate.trust import Pair, SecurityError
from fedkin.federate.views import centre_view, site_view
from fedkin.federate.waiting import Patience, PeerError, Status, Stopped

T = TypeVar("T")

FINISHED, WRONG, STOPPED, LATER = 0, 2, 3, 4
#: State of a site that ended with an error.
CANNOT = "cannot go on"
#: Environment variable in which a supervisor says how often it has started the site again.
RESTARTS = "FEDKIN_RESTARTS"
_STATUS_SECONDS, _TICK_SECONDS = 0.5, 0.05
_LOOK_SECONDS = 1.0  # between two looks for a renewed certificate, and for sites that are out


class SitePlace:
    """A site's directory, checked: what the organiser signed, the site's certificate, who is out."""

    def __init__(self, place: Path) -> None:
        self.place, self.site = place, Site.read(place)
        self.name, self.authority = self.site.name, self.site.authority
        self.site.pair()  # raises unless it is admitted, and its certificate good

    def view(self) -> Manifest:
        """Its view of the run."""
        return site_view(self.site)

    def again(self) -> bool:
        """Read the directory again; whether the certificate is another one."""
        before, self.site = self.site.certificate, Site.read(self.place)
        self.site.pair()
        return self.site.certificate != before

    def pair(self) -> Pair:
        """Certificate and key, both valid now."""
        return self.site.pair()

    @property
    def out(self) -> frozenset[str]:
        """Names of the sites that have left or were expelled."""
        return self.site.out

    @property
    def ends_soon(self) -> bool:
        """Whether the certificate must be renewed."""
        return self.site.renewal_due()


class CentrePlace:
    """The organiser's directory, where the central machine runs; its key is made anew at every start."""

    def __init__(self, place: Path) -> None:
        self.place, self.name, self.ends_soon = place, CENTRE, False
        self.organiser: Organiser = Organiser.read(place)
        self.authority, self.out = self.organiser.authority, self.organiser.out()
        self._pair = self.organiser.centre_pair()
        self.site: Site | None = None

    def view(self) -> Manifest:
        """Its view of the run."""
        return centre_view(self.organiser)

    def again(self) -> bool:
        """Read the directory again."""
        self.out = self.organiser.out()
        return False

    def pair(self) -> Pair:
        """Certificate and key."""
        return self._pair


@dataclass
class Program:
    """A site, or the central machine, that runs: where and who it is, and what it writes to."""

    where: SitePlace | CentrePlace
    manifest: Manifest
    journal: Journal
    status: StatusWriter
    listen: str | None = None
    lease: float = 10.0
    transport: ReopeningTransport | None = None
    _seen: Any = None
    _looked: float = field(default_factory=time.monotonic)
    _ticked: float = -math.inf

    @property
    def place(self) -> Path:
        return self.where.place

    @property
    def name(self) -> str:
        return self.where.name

    @property
    def site(self) -> Site:
        """The site; not for the central machine."""
        assert self.where.site is not None
        return self.where.site

    @cached_property
    def out(self) -> frozenset[int]:
        """Numbers of partners that are out, for good."""
        return frozenset(v for v in self.manifest.partners() if self.manifest.name(v) in self.where.out)

    @contextmanager
    def linked(self) -> Iterator[ReopeningTransport]:
        """A transport to those whom it exchanges messages with; closed at the end."""
        from fedkin.federate.links.zenoh import ZenohTransport

        def make() -> ZenohTransport:
            who = (self.where.pair(), self.where.authority, self.where.out)
            links = site_links(self.manifest, *who, self.listen, self.lease)
            return ZenohTransport(links, self._on_link, self._on_refused, self.manifest.most_bytes)

        self._seen = self._files()
        self.transport = ReopeningTransport(make)
        try:
            yield self.transport
        finally:
            self.transport.close()

    def _on_link(self, name: str | None, address: str, opened: bool) -> None:
        known = {self.manifest.name(v) for v in self.manifest.partners()} - self.where.out
        if not opened:
            self.journal.sparingly("info", "link closed", peer=name)
        elif name in known:
            self.journal.sparingly("info", "link opened", peer=name)
        else:
            words = "link from a stranger: all it does is refused"
            self.journal.sparingly("warning", words, peer=name, address=address)

    def _on_refused(self, key: str, size: int) -> None:
        why = f"{size} bytes, but the largest message has {self.manifest.most_bytes}"
        self.journal.sparingly("warning", "message refused", peer=key.split("/")[2], why=why)

    # --- what changes while it runs ---

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
        self.where.pair()  # raises when it has ended
        if self.where.ends_soon:
            self.journal.sparingly("warning", f"the certificate ends soon: fedkin site renew {self.place}")
        seen = self._files()
        if seen == self._seen:
            return
        self._seen, before = seen, self.where.out
        try:
            renewed = self.where.again()
        except SecurityError as error:
            if self.where.name in self.where.out:
                raise
            self.journal.sparingly("warning", "file refused", why=str(error))
            return
        gone = sorted(self.where.out - before)
        if gone:
            vars(self).pop("out", None)  # it is counted again
        for name in gone:
            self.journal.write("warning", "out for good: its link is closed, nothing more goes to it", peer=name)
        if renewed:
            self.journal.write("info", "certificate renewed: links are opened anew")
        if (renewed or gone) and self.transport is not None:
            self.transport.reopen()


def open_place(place: Path, *, centre: bool = False) -> SitePlace | CentrePlace:
    """The directory of a site, or of the organiser, checked before anything is written to it."""
    if not centre and not (place / INVITE).exists() and (place / FEDERATION).exists():
        raise DataError(f"{place} is the organiser's directory: give that of a site (fedkin site join makes it)")
    return CentrePlace(place) if centre else SitePlace(place)


def run_program(
    place: Path,
    work: Callable[[Program], None],
    *,
    echo: bool = False,
    centre: bool = False,
    listen: str | None = None,
    lease: float = 10.0,
) -> int:
    """Do ``work`` as the site whose directory is ``place``; errors go to its log, status and stderr.

    Returns an exit code.
    """
    try:
        where = open_place(place, centre=centre)
        with only_one(place), closing(Journal(where.name, place / LOG, echo=echo)) as journal:
            status = StatusWriter(place)
            try:
                work(Program(where, where.view(), journal, status, listen, lease))
            except Stopped:
                journal.write("info", "stopped on request")
                return STOPPED
            except (FedkinError, OSError) as error:
                journal.write("error", CANNOT, why=str(error))
                status.fail(str(error))
                sys.stderr.write(f"{where.name}: {error}\n")
                return exit_code(error)
    except (FedkinError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)
    return FINISHED


class SiteParser(argparse.ArgumentParser):
    """Parses the directory of a site, and how long it waits (``patience`` has the defaults)."""

    def __init__(self, command: str, words: str, patience: Patience) -> None:
        super().__init__(prog=f"fedkin {command}", description=words)
        self.add_argument("place", type=Path, help="the site's directory")
        self.add_argument("--listen", metavar="HOST:PORT", help="listen here instead of at the address in the list")
        for name, value in vars(patience).items():
            self.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, metavar="SECONDS")

    def parsed(self, arguments: Sequence[str] | None) -> tuple[Path, Patience, dict[str, Any]]:
        """The directory, the waits, and the other options."""
        given = vars(self.parse_args(arguments))
        waits = {name: given.pop(name) for name in vars(Patience())}
        if given["listen"] is not None:
            given["listen"] = f"tls/{given['listen']}"
        return given.pop("place"), self.checked(lambda: Patience(**waits)), given

    def checked(self, make: Callable[[], T]) -> T:
        """What ``make`` makes; options of which it cannot be made end the process like those that cannot be parsed."""
        try:
            return make()
        except FedkinError as error:
            self.error(str(error))


def exit_code(error: FedkinError | OSError) -> int:
    """`LATER` for what may be gone at the next start, `WRONG` for what somebody has to mend first."""
    if isinstance(error, OSError):
        mend = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError) or error.errno == errno.EROFS
        return WRONG if mend else LATER
    return LATER if isinstance(error, PeerError) else WRONG


@contextmanager
def only_one(place: Path) -> Iterator[None]:
    """Hold the site's lock; raises `DataError` when another process does."""
    try:
        descriptor = lock(place / LOCK, str(os.getpid()))
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


class StatusWriter:
    """Keeps ``status.json`` up to date, and passes on the wish to stop. A site replaces ``status`` by its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        before = read_status(place)
        # a site that cannot even begin is where it was
        self.rounds = int(before.get("rounds", 0))
        self.status = Status(round=int(before.get("round", 0)))
        self.restarts = int(os.environ.get(RESTARTS, before.get("restarts", 0)))
        self.sent = 0  # bytes, by this process
        self._sent_before = int(before.get("sent", 0))
        self.why: str | None = None
        self.stop = False
        self._settle: Callable[[], None] = lambda: None
        self._written = -math.inf
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop = True

    def begin(self, status: Status, rounds: int, settle: Callable[[], None] | None = None) -> None:
        """From now on write this status; before it tells of a round, ``settle`` has written the state after it."""
        self.status, self.rounds, self._settle = status, rounds, settle or self._settle

    def tick(self, now: float) -> None:
        """Write the status if it is time to, and raise `Stopped` after SIGTERM or Ctrl-C."""
        if self.stop:
            self.status = replace(self.status, state="stopped")
            self.write()
            raise Stopped("stopped on request")
        if now - self._written >= _STATUS_SECONDS:
            self._settle()
            self.write()

    def end(self, state: str) -> None:
        """Write the last state."""
        self.status.state = state
        self.write()

    def fail(self, why: str) -> None:
        """Write that the site cannot go on."""
        self.status, self.why = replace(self.status, state=CANNOT), why
        self.write()

    def write(self) -> None:
        """Replace ``status.json``."""
        self._written, status = time.monotonic(), self.status
        content = {
            "pid": os.getpid(),
            "time": time.time(),
            "state": status.state,
            "round": status.round,
            "rounds": self.rounds,
            "change": status.change if math.isfinite(status.change) else None,
            "up": sorted(status.up),
            "waiting_for": status.waiting_for,
            "pulled": status.pulled,
            "repaired": status.repaired,
            "started": status.started,
            "restarts": self.restarts,
            "sent": self._sent_before + self.sent,
            "shares": [
                [value if math.isfinite(value) else None for value in vars(share).values()] for share in status.shares
            ],
            "why": self.why,
        }
        with suppress(OSError):  # a full disk: checkpoints report it
            write_record(self.place / STATUS, content)
