"""The wire format: round trips, and 100,000 frames that must be refused; and the inbox, in which frames wait."""

from __future__ import annotations

import struct
import threading
import time
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedkin.federate import Journal
from fedkin.federate.endpoint import Endpoint
from fedkin.federate.inbox import HEADER_BYTES, Expected, Inbox, Kind, MessageError, decode, encode

pytestmark = pytest.mark.clocks

RUN = b"\x00run\xffid\x01"
EXPECTED = Expected(RUN, Kind.THETA, 7, 5, first=41, last=42)


def frame_of(values: object = (1.0, -2.0, 0.0, 4.5, 1e-300), **changes: object) -> bytes:
    parts = {"run": RUN, "kind": Kind.THETA, "sender": 7, "round": 41, "values": np.asarray(values, dtype=float)}
    return encode(**(parts | changes))  # type: ignore[arg-type]


@given(
    hnp.arrays(np.float64, st.integers(0, 40), elements=st.floats(allow_nan=False, allow_infinity=False)),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from(Kind),
)
def test_what_is_sent_arrives_to_the_bit(values: np.ndarray, sender: int, round: int, kind: Kind) -> None:
    frame = encode(RUN, kind, sender, round, values)
    assert len(frame) == HEADER_BYTES + 8 * values.size
    got = decode(frame, Expected(RUN, kind, sender, values.size, round, round))
    assert got[0] == round and got[1].tobytes() == values.tobytes()


def test_float32_halves_the_payload_and_rounds_to_nearest() -> None:
    values = np.random.default_rng(0).normal(size=20)
    frame = encode(RUN, Kind.THETA, 7, 41, values, "float32")
    assert len(frame) == HEADER_BYTES + 80
    got = decode(frame, replace(EXPECTED, length=20, wire="float32"))[1]
    assert got.dtype == np.float64 and np.array_equal(got, values.astype(np.float32).astype(float))
    with pytest.raises(MessageError, match="number format"):
        decode(frame, replace(EXPECTED, length=20))


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "too few"),
        (frame_of()[:27], "too few"),
        (frame_of()[:-1], "do not hold"),
        (frame_of() + b"\x00", "do not hold"),
        (b"XX" + frame_of()[2:], "starts with"),
        (frame_of()[:2] + b"\x02" + frame_of()[3:], "version 2"),
        (frame_of(run=b"12345678"), "run 3132"),
        (frame_of(kind=Kind.ALPHA), "kind 2"),
        (frame_of(sender=8), "site number 8"),
        (frame_of(values=np.zeros(6)), "6 numbers, expected 5"),
        (frame_of(values=[0, 0, np.nan, 0, 0]), "number 2 is not finite"),
        (frame_of(values=[0, 0, 0, 0, -np.inf]), "number 4 is not finite"),
        (frame_of()[:-1] + b"\x7f", "checksum"),
    ],
)
def test_refusals_say_what_differs(frame: bytes, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        decode(frame, EXPECTED)


def test_an_announced_length_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    head = struct.pack("<2sBB8sIII", b"FK", 1, 1, RUN, 7, 41, 2**32 - 1)
    frame = head + struct.pack("<I", zlib.crc32(head))
    monkeypatch.setattr(np, "frombuffer", lambda *a, **k: pytest.fail("numbers were touched"))
    with pytest.raises(MessageError, match="4294967295 numbers"):
        decode(frame, EXPECTED)
    with pytest.raises(MessageError, match="do not hold"):
        decode(frame, replace(EXPECTED, length=2**32 - 1))


@pytest.mark.parametrize(
    ("kind", "inside", "outside"), [("length", [3, 4], [3.1, 4]), ("max", [5, -5], [5.1, 0]), ("sum", [2, -3], [3, -3])]
)
def test_dual_and_parameter_balls_are_enforced(kind: str, inside: list[float], outside: list[float]) -> None:
    ball = Expected(RUN, Kind.ALPHA, 7, 2, 41, 41, bound=5.0, bound_kind=kind)  # type: ignore[arg-type]
    decode(frame_of(values=inside, kind=Kind.ALPHA), ball)
    with pytest.raises(MessageError, match="at most 5"):
        decode(frame_of(values=outside, kind=Kind.ALPHA), ball)


def test_a_hundred_thousand_broken_frames_are_refused() -> None:
    """Flipped bits, cut and lengthened frames, swapped fields, and noise: refused, and by `MessageError` alone."""
    rng = np.random.default_rng(6)
    good = np.frombuffer(frame_of(), np.uint8)
    refused = 0
    for trial in range(100_000):
        which = trial % 5
        if which == 0:  # one to eight flipped bits
            mutant = good.copy()
            for bit in rng.integers(0, good.size * 8, rng.integers(1, 9)):
                mutant[bit // 8] ^= np.uint8(1 << (bit % 8))
        elif which == 1:  # cut
            mutant = good[: rng.integers(0, good.size)]
        elif which == 2:  # longer, or doubled
            mutant = np.concatenate([good, rng.integers(0, 256, rng.integers(1, 100)).astype(np.uint8)])
        elif which == 3:  # a run of random bytes
            mutant = good.copy()
            start = rng.integers(0, good.size - 1)
            stop = rng.integers(start + 1, good.size)
            mutant[start:stop] = rng.integers(0, 256, stop - start)
        else:  # noise, half of it with a valid beginning
            mutant = rng.integers(0, 256, rng.integers(0, 200)).astype(np.uint8)
            if trial % 2 and mutant.size > 24:
                mutant[:24] = good[:24]
        frame = mutant.tobytes()
        if frame == good.tobytes():
            continue
        try:
            accepted = decode(frame, EXPECTED)
        except MessageError:
            refused += 1
            continue
        # flipping a bit twice gives the good frame back; anything else accepted is a failure
        pytest.fail(f"trial {trial}: accepted {frame.hex()} as {accepted}")
    assert refused > 99_000


# --- the inbox -------------------------------------------------------------------------------------------------------

P = 3
SENDERS = [1, 2]


@pytest.fixture
def inbox() -> Inbox:
    made = Inbox({u: f"d{u}" for u in SENDERS}, Journal("here"))
    for u in SENDERS:
        made.expect(awaited(u))
    return made


def awaited(u: int) -> Expected:
    return Expected(RUN, Kind.THETA, u, P, 1, 2, bound=10.0)


def sent_by(u: int, t: int, size: float = 1.0) -> bytes:
    return encode(RUN, Kind.THETA, u, t, np.full(P, size))


def later(work: object, seconds: float = 0.05) -> None:
    threading.Timer(seconds, work).start()  # type: ignore[arg-type]


@pytest.mark.parametrize("lined", [True, False])
def test_a_wait_ends_when_the_last_one_has_come(inbox: Inbox, lined: bool) -> None:
    into = {u: inbox.line((Kind.THETA, u)) if lined else inbox.expect(awaited(u)) for u in SENDERS}
    into[1](sent_by(1, 1))
    assert inbox.wait(Kind.THETA, SENDERS, 1, 0.0) == [2]
    later(lambda: into[2](sent_by(2, 1, 0.5)))
    began = time.monotonic()
    assert inbox.wait(Kind.THETA, SENDERS, 1, 60.0) == []
    assert time.monotonic() - began < 30.0
    assert inbox.values(Kind.THETA, 2, 1).tolist() == [0.5] * P
    assert inbox.newest(Kind.THETA, 1, 0.0)[0] == 1  # type: ignore[index]
    later(lambda: into[1](sent_by(1, 2)))
    assert inbox.newest(Kind.THETA, 1, 60.0)[0] == 2  # type: ignore[index]


def test_frames_that_are_refused_do_not_end_a_wait(inbox: Inbox) -> None:
    into = {u: inbox.line((Kind.THETA, u)) for u in SENDERS}
    bad = [sent_by(1, 1, 100.0), sent_by(1, 7), sent_by(2, 1)[:-1], sent_by(1, 1, np.nan)]
    for one in bad:
        into[1](one)
    assert inbox.wait(Kind.THETA, SENDERS, 1, 0.01) == SENDERS
    assert inbox.journal.counts["message refused"] == 3
    assert inbox.journal.counts["round too far ahead ignored"] == 1
    assert "d1 (what it sends is refused: number 0 is not finite)" in inbox.format_missing([1], [])


def test_the_line_is_bounded_whatever_comes(inbox: Inbox) -> None:
    into = inbox.line((Kind.THETA, 1))
    for k in range(10_000):
        into(sent_by(1, 1, 100.0 + k))
    assert len(inbox._line) <= 64
    into(sent_by(1, 1))
    assert inbox.missing(Kind.THETA, [1], 1) == []
    assert inbox.journal.counts["message refused"] == 10_000


def test_somebody_may_wake_it(inbox: Inbox) -> None:
    later(inbox.wake)
    began = time.monotonic()
    assert inbox.wait(Kind.THETA, SENDERS, 1, 60.0) == SENDERS
    assert time.monotonic() - began < 30.0


def test_a_machine_is_not_busy_while_it_waits_for_sites_whose_thetas_are_there(inbox: Inbox) -> None:
    plan = SimpleNamespace(here=0, partners=lambda: SENDERS, name=lambda u: f"d{u}", checkpoint_every=1)
    looks: list[float] = []
    end = Endpoint(plan, None, inbox.journal, tick=lambda: looks.append(time.monotonic()))  # type: ignore[arg-type]
    for u in SENDERS:
        end.inbox.expect(awaited(u))(sent_by(u, 1))
    end.gather(0.5)
    assert 0 < len(looks) < 20


def test_a_pause_lasts_until_somebody_wakes_it(inbox: Inbox) -> None:
    began = time.monotonic()
    inbox.pause(0.2)
    assert time.monotonic() - began >= 0.2
    threading.Timer(0.2, inbox.wake).start()
    inbox.pause(60.0)
    assert 0.4 <= time.monotonic() - began < 30.0


def test_many_threads_at_once_lose_nothing(inbox: Inbox) -> None:
    into = {u: inbox.line((Kind.THETA, u)) for u in SENDERS}
    rounds, told = 400, {u: threading.Semaphore(0) for u in SENDERS}

    def neighbour(u: int) -> None:
        for t in range(1, rounds + 1):
            into[u](sent_by(u, t, t / rounds))
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
