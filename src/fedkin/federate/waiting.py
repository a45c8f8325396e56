"""How long a device waits for what, what it tells its owner meanwhile, and how it waits for a full disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fedkin.errors import FedkinError, ParameterError
from fedkin.federate.journal import Journal

#: State of a device that cannot write what has to be written before it goes on.
HOLDING = "holding: no room for a checkpoint"
#: Log lines about the same wait are at most this far apart, in seconds.
LONGEST_SILENCE = 600.0


class PeerError(FedkinError, RuntimeError):
    """A device that cannot go on; starting it again continues where it was."""


class Stopped(FedkinError):
    """The device was asked to stop; starting it again continues where it was."""


@dataclass(frozen=True)
class Patience:
    """How long a device waits for what, in seconds.

    Attributes
    ----------
    first_pull, last_pull : float
        A theta that has not come is pulled after ``first_pull``, then again and again, up to ``last_pull`` apart.
    complain : float
        Time to the first log line about a wait; to the next ones it doubles, up to ten minutes.
    give_up : float
        A wait as long as this ends the process.
    linger : float
        How long a device that has finished stays to serve neighbours that have not.
    gather, deadline : float
        How long a central machine waits for devices before its first round, and for answers in a round.

    Raises
    ------
    ParameterError
        When one of them is not a number, or not above 0 (``linger``, ``gather`` and ``deadline`` may be 0).
    """

    first_pull: float = 0.25
    last_pull: float = 5.0
    complain: float = 5.0
    give_up: float = 3600.0
    linger: float = 600.0
    gather: float = 60.0
    deadline: float = 5.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_be_zero = name in ("linger", "gather", "deadline")
            if not (value > 0 or (may_be_zero and value == 0)):  # nor for nan
                least = "at least 0" if may_be_zero else "above 0"
                option = f"--{name.replace('_', '-')}"
                raise ParameterError(f"{option} must be a number of seconds {least}, got {value:g}")


@dataclass
class Status:
    """What an owner may want to know about a device while it runs."""

    round: int = 0
    change: float = float("nan")  # of theta in the last round
    waiting_for: list[str] = field(default_factory=list)
    up: set[str] = field(default_factory=set)
    state: str = "starting"
    pulled: int = 0
    repaired: int = 0
    started: float = field(default_factory=time.time)


class Reminders:
    """When to ask again for what is missing, and when to complain about it: ever less often.

    Parameters
    ----------
    patience : Patience
    """

    def __init__(self, patience: Patience) -> None:
        self.began = time.monotonic()
        self._end = self.began + patience.give_up
        self._pause, self._longest_pause, self._silence = patience.first_pull, patience.last_pull, patience.complain
        self.next_pull, self._next_complaint = self.began + self._pause, self.began + self._silence

    def pull_is_due(self, now: float) -> bool:
        """Whether to ask the senders."""
        return now >= self.next_pull

    def pulled(self, now: float) -> None:
        """They were asked."""
        self.next_pull, self._pause = now + self._pause, min(2.0 * self._pause, self._longest_pause)

    def complaint_is_due(self, now: float) -> bool:
        """Whether to tell the user."""
        return now >= min(self._next_complaint, self._end)

    def complained(self, now: float) -> None:
        """The user was told."""
        self._next_complaint, self._silence = now + self._silence, min(2.0 * self._silence, LONGEST_SILENCE)


def hold_until(
    write: Callable[[], None],
    path: Path | None,
    round: int,
    status: Status,
    journal: Journal,
    patience: Patience,
    tick: Callable[[], None],
    event: str = "checkpoint failed, holding",
) -> None:
    """Call ``write`` until the disk takes it; log lines about failures come ever less often.

    Raises
    ------
    PeerError
        When it has not after ``patience.give_up`` seconds.
    """
    began = next_line = time.monotonic()
    silence, before = 1.0, status.state
    while True:
        try:
            write()
        except OSError as error:
            now = time.monotonic()
            if now >= next_line:
                journal.write("error", event, round=round, why=str(error), seconds=int(now - began))
                next_line, silence = now + silence, min(2.0 * silence, LONGEST_SILENCE)
            if now - began > patience.give_up:
                raise PeerError(f"cannot write {path}: {error}; make room, then start again") from error
            status.state = HOLDING
            time.sleep(min(1.0, patience.complain, patience.give_up))
            tick()
        else:
            status.state = before
            return
