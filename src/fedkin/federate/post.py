"""What everybody who steps in a run has: partners, an inbox, patience, a status; and how it waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedkin._base import wait_until
from fedkin.federate.frames import Kind
from fedkin.federate.journal import Journal
from fedkin.federate.links import Transport
from fedkin.federate.manifest import Manifest
from fedkin.federate.waiting import HOLDING, LOOK_SECONDS, Inbox, Patience, PeerError, Reminders, Status, Tick


class Post:
    """One process's end of a run: whom it knows by name, what has come, how long it waits, what its owner is told.

    ``tick`` is called several times a second while waiting, and may raise `Stopped`.
    """

    def __init__(
        self,
        manifest: Manifest,
        transport: Transport,
        journal: Journal,
        names: Mapping[int, str],
        patience: Patience | None,
        tick: Tick | None,
    ) -> None:
        self.manifest, self.position, self.transport, self.journal = manifest, manifest.here, transport, journal
        self.patience: Patience = patience or Patience()
        self.tick: Tick = tick or (lambda: None)
        self.names, self.status, self.inbox = names, Status(), Inbox(names, journal)

    def note_presence(self, name: str, here: bool) -> None:
        """Somebody is up, or down."""
        (self.status.up.add if here else self.status.up.discard)(name)

    def hold(
        self, write: Callable[[], None], path: Path, round: int, event: str = "checkpoint failed, holding"
    ) -> None:
        """Call ``write`` until the disk takes it, and wait where this process is; log lines come ever less often.

        Raises `PeerError` when it has not after ``patience.give_up`` seconds.
        """
        try:
            write()
            return
        except OSError as error:
            before, failures = self.status.state, [error]

        def is_written() -> bool:
            try:
                write()
            except OSError as error:
                failures.append(error)
                return False
            return True

        def complain(seconds: float) -> None:
            self.journal.write("error", event, round=round, why=str(failures[-1]), seconds=int(seconds))

        def pause(seconds: float) -> None:
            self.status.state = HOLDING
            time.sleep(seconds)
            self.tick()

        if not wait_until(is_written, self.patience.give_up, complain=complain, silence=1.0, sleep=pause):
            raise PeerError(f"cannot write {path}: {failures[-1]}; make room, then start again") from failures[-1]
        self.status.state = before

    def gather(self, senders: Sequence[int], t: int, seconds: float) -> None:
        """Wait until all senders are up, at most so long: a slow start is not to be taken for absence in round t."""

        def missing() -> list[str]:
            return [self.names[u] for u in senders if self.names[u] not in self.status.up]

        def look(seconds: float) -> None:
            self.inbox.wait(Kind.THETA, list(senders), t, seconds)
            self.tick()

        if not wait_until(lambda: not missing(), seconds, longest_pause=LOOK_SECONDS, sleep=look):
            self.journal.write("warning", "starting without", peers=missing())

    def collect(self, senders: Sequence[int], t: int, pull: Callable[[int], None], least: int = 0) -> list[int]:
        """Who has sent its theta of round t: all who are up, or whoever has by the deadline, but at least so many.

        ``pull(u)`` asks u again. Raises `PeerError` when fewer than ``least`` have come after ``patience.give_up``
        seconds.
        """
        inbox, names, status, patience = self.inbox, self.names, self.status, self.patience
        reminders = Reminders(patience)
        deadline = reminders.began + patience.deadline
        while True:
            missing = inbox.missing(Kind.THETA, list(senders), t)
            awaited = [u for u in missing if names[u] in status.up]
            now = time.monotonic()
            waited = now - reminders.began
            enough = len(senders) - len(missing) >= least
            if enough and (not awaited or now >= deadline):
                break
            if waited > patience.give_up and not enough:
                raise PeerError(f"no site has answered in round {t} for {waited:.0f} s; start some")
            if reminders.pull_is_due(now):
                for u in awaited:
                    pull(u)
                reminders.pulled(now)
            if reminders.complaint_is_due(now) and waited <= patience.give_up:
                peers = [names[u] for u in missing]
                self.journal.write("warning", "waiting", round=t, peers=peers, seconds=round(waited, 1))
                reminders.complained(now)
            status.waiting_for = [names[u] for u in awaited] if waited > 1.0 else []
            pause = min(LOOK_SECONDS, reminders.next_pull - now, deadline - now if now < deadline else LOOK_SECONDS)
            inbox.wait(Kind.THETA, awaited or list(senders), t, max(0.001, pause))
            if waited > LOOK_SECONDS:
                self.tick()
        status.waiting_for = []
        for u in awaited:
            self.journal.sparingly("warning", "up, but no theta before the deadline", peer=names[u])
        return [u for u in senders if u not in missing]
