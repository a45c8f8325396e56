"""What neighbours send waits in line until the site looks at it; it is checked, bounded, and wakes whoever waits."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from fedkin.federate import Journal
from fedkin.federate.inbox import Expected, Inbox, Kind, encode

pytestmark = pytest.mark.clocks

RUN, P = b"run-0001", 3
SENDERS = [1, 2]


@pytest.fixture
def inbox() -> Inbox:
    made = Inbox({u: f"d{u}" for u in SENDERS}, Journal("here"))
    for u in SENDERS:
        made.expect(expected(u))
    return made


def expected(u: int) -> Expected:
    return Expected(RUN, Kind.THETA, u, P, 1, 2, bound=10.0)


def frame(u: int, t: int, size: float = 1.0) -> bytes:
    return encode(RUN, Kind.THETA, u, t, np.full(P, size))


def later(work: object, seconds: float = 0.05) -> None:
    threading.Timer(seconds, work).start()  # type: ignore[arg-type]


@pytest.mark.parametrize("lined", [True, False])
def test_a_wait_ends_when_the_last_one_has_come(inbox: Inbox, lined: bool) -> None:
    into = {u: inbox.line((Kind.THETA, u)) if lined else inbox.expect(expected(u)) for u in SENDERS}
    into[1](frame(1, 1))
    assert inbox.wait(Kind.THETA, SENDERS, 1, 0.0) == [2]
    later(lambda: into[2](frame(2, 1, 0.5)))
    began = time.monotonic()
    assert inbox.wait(Kind.THETA, SENDERS, 1, 60.0) == []
    assert time.monotonic() - began < 30.0
    assert inbox.values(Kind.THETA, 2, 1).tolist() == [0.5] * P
    assert inbox.newest(Kind.THETA, 1, 0.0)[0] == 1  # type: ignore[index]
    later(lambda: into[1](frame(1, 2)))
    assert inbox.newest(Kind.THETA, 1, 60.0)[0] == 2  # type: ignore[index]


def test_frames_that_are_refused_do_not_end_a_wait(inbox: Inbox) -> None:
    into = {u: inbox.line((Kind.THETA, u)) for u in SENDERS}
    bad = [frame(1, 1, 100.0), frame(1, 7), frame(2, 1)[:-1], frame(1, 1, np.nan)]
    for one in bad:
        into[1](one)
    assert inbox.wait(Kind.THETA, SENDERS, 1, 0.01) == SENDERS
    assert inbox.journal.counts["message refused"] == 3
    assert inbox.journal.counts["round too far ahead ignored"] == 1
    assert "d1 (what it sends is refused: number 0 is not finite)" in inbox.format_missing([1], [])


def test_the_line_is_bounded_whatever_comes(inbox: Inbox) -> None:
    into = inbox.line((Kind.THETA, 1))
    for k in range(10_000):
        into(frame(1, 1, 100.0 + k))
    assert len(inbox._line) <= 64
    into(frame(1, 1))
    assert inbox.missing(Kind.THETA, [1], 1) == []
    assert inbox.journal.counts["message refused"] == 10_000


def test_somebody_may_wake_it(inbox: Inbox) -> None:
    later(inbox.wake)
    began = time.monotonic()
    assert inbox.wait(Kind.THETA, SENDERS, 1, 60.0) == SENDERS
    assert time.monotonic() - began < 30.0


def test_many_threads_at_once_lose_nothing(inbox: Inbox) -> None:
    into = {u: inbox.line((Kind.THETA, u)) for u in SENDERS}
    rounds, told = 400, {u: threading.Semaphore(0) for u in SENDERS}

    def neighbour(u: int) -> None:
        for t in range(1, rounds + 1):
            into[u](frame(u, t, t / rounds))
            if t > 1:  # at most one round ahead
                told[u].acquire()

    threads = [threading.Thread(target=neighbour, args=[u]) for u in SENDERS]
    inbox.advance(Kind.THETA, 1, 2)
    for one in threads:
        one.start()
    for t in range(1, rounds + 1):
        inbox.advance(Kind.THETA, t, t + 1)
        assert inbox.wait(Kind.THETA, SENDERS, t, 60.0) == []
        assert [inbox.values(Kind.THETA, u, t)[0] for u in SENDERS] == [t / rounds] * 2
        for one in told.values():
            one.release()
    for one in threads:
        one.join()
