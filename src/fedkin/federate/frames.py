"""What travels between sites: a header of 28 bytes and numbers, nothing that could be executed.

::

    offset  bytes  field
    0       2      magic  "FK"
    2       1      version of the format, now 1
    3       1      kind (low half) and number format (high half: 0 float64, 1 float32)
    4       8      run id
    12      4      sender, its position in the manifest
    16      4      round
    20      4      how many numbers follow
    24      4      CRC-32 of everything else
    28      ...    the numbers, little endian

A receiver knows what it expects (`Expected`), and `decode` compares the whole header with it before any memory is taken
for the numbers. A message that differs in anything is refused with `MessageError`.
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Literal, NoReturn

import numpy as np

from fedkin._base import Array
from fedkin.admm import Wire
from fedkin.errors import FedkinError

MAGIC = b"FK"
VERSION = 1
_HEAD = struct.Struct("<2sBB8sIII")
_U32 = struct.Struct("<I")
_PARTS = struct.Struct("<16sIII")  # the same bytes: what never changes, round, how many, checksum
HEADER_BYTES = _HEAD.size + _U32.size
RUN_BYTES = 8
_FORMATS: tuple[np.dtype[np.float64] | np.dtype[np.float32], ...] = (np.dtype("<f8"), np.dtype("<f4"))
_WIRES: tuple[Wire, ...] = ("float64", "float32")
#: Size of a vector of so many numbers 1, in each norm.
_SPREAD: dict[str, Callable[[int], float]] = {"length": math.sqrt, "max": lambda n: 1.0, "sum": float}


class Kind(IntEnum):
    """What the numbers are."""

    THETA = 1  #: a site's parameters after its node step
    ALPHA = 2  #: the dual of one edge, for the comparison of its two replicas
    DONE = 3  #: no numbers: the sender has finished its last round
    DOWN = 4  #: from the central machine: theta, pull, probability
    RESULT = 5  #: averaged parameters, for an owner who collects
    SUMMARY = 6  #: a site's local fit, for edge selection
    VERDICT = 7  #: the p-value of an edge, from the end that decides
    PRESENT = 8  #: from a leader: who was there in a round
    REPLICA = 9  #: from a leader: the state of its component
    CHOSEN = 10  #: no numbers: the sender has tested its edges


class MessageError(FedkinError, ValueError):
    """A message that is not what the receiver expects; the text says how it differs."""


@dataclass(frozen=True)
class Expected:
    """What a receiver knows about the next message on a key: rounds from ``first`` to ``last`` are of use now.

    ``bound`` is the largest size of the numbers in the norm of ``bound_kind``: Euclidean ("length") for the parameter
    ball; for an edge dual, the dual norm of the penalty.
    """

    run: bytes
    kind: Kind
    sender: int
    length: int
    first: int
    last: int
    wire: Wire = "float64"
    bound: float | None = None
    bound_kind: Literal["length", "max", "sum"] = "length"

    @cached_property
    def start(self) -> bytes:
        """The header up to the round."""
        mixed = self.kind | _WIRES.index(self.wire) << 4
        return _HEAD.pack(MAGIC, VERSION, mixed, self.run, self.sender, 0, 0)[:16]

    @cached_property
    def format(self) -> np.dtype[Any]:
        """How numbers are written."""
        return _FORMATS[_WIRES.index(self.wire)]

    @cached_property
    def size(self) -> int:
        """Bytes of the whole message."""
        return HEADER_BYTES + self.length * self.format.itemsize

    @cached_property
    def inside(self) -> float:
        """Numbers that are all at most so large are within the bound, whatever they are."""
        most = sys.float_info.max if self.bound is None else self.bound
        return min(most, sys.float_info.max) / _SPREAD[self.bound_kind](max(self.length, 1))


def encode(run: bytes, kind: Kind, sender: int, round: int, values: Array, wire: Wire = "float64") -> bytes:
    """The bytes of a message; sender and round are from 0 to 2**32 - 1."""
    code = _WIRES.index(wire)
    numbers = values.astype(_FORMATS[code]).tobytes()
    head = _HEAD.pack(MAGIC, VERSION, kind | code << 4, run, sender, round, values.size)
    return head + _U32.pack(zlib.crc32(numbers, zlib.crc32(head))) + numbers


def decode(frame: bytes, expected: Expected, first: int | None = None, last: int | None = None) -> tuple[int, Array]:
    """Return round and numbers of a message, if it is the expected one, of the rounds from ``first`` to ``last``.

    Raises `MessageError`, naming the first thing that differs. Header and checksum are compared before numbers are
    allocated.
    """
    first, last = expected.first if first is None else first, expected.last if last is None else last
    if len(frame) != expected.size:
        _say_what_differs(frame, expected)
    start, round, length, checksum = _PARTS.unpack_from(frame)
    if start != expected.start or length != expected.length:
        _say_what_differs(frame, expected)
    if not first <= round <= last:
        raise OutsideWindow(f"round {round} is outside {first}..{last}", round)
    if zlib.crc32(memoryview(frame)[HEADER_BYTES:], zlib.crc32(frame[: _HEAD.size])) != checksum:
        raise MessageError("the checksum does not fit: it was changed on the way")
    values = np.frombuffer(frame, expected.format, length, HEADER_BYTES).astype(np.float64)
    # nearly always one look is enough; it is False for what is not a number
    if not np.maximum.reduce(np.absolute(values), initial=0.0) <= expected.inside:
        _check_values(values, expected)
    return round, values


def _say_what_differs(frame: bytes, expected: Expected) -> NoReturn:
    """Raise `MessageError` with the first part of the header that is not as expected."""
    if len(frame) < HEADER_BYTES:
        raise MessageError(f"{len(frame)} bytes are too few for a header of {HEADER_BYTES}")
    magic, version, mixed, run, sender, _, length = _HEAD.unpack_from(frame)
    if magic != MAGIC:
        raise MessageError(f"it starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise MessageError(
            f"format version {version}, but this program speaks {VERSION}; use the same fedkin everywhere"
        )
    if run != expected.run:
        raise MessageError(f"run {run.hex()}, but this is run {expected.run.hex()}")
    kind, code = mixed & 15, mixed >> 4
    if kind != expected.kind:
        raise MessageError(f"kind {kind}, expected {expected.kind.name} ({int(expected.kind)})")
    if code != _WIRES.index(expected.wire):
        raise MessageError(f"number format {code}, expected {expected.wire}")
    if sender != expected.sender:
        raise MessageError(f"it claims to come from site number {sender}, but {expected.sender} writes here")
    if length != expected.length:
        raise MessageError(f"{length} numbers, expected {expected.length}")
    raise MessageError(f"{len(frame)} bytes do not hold a header and {length} numbers")


class OutsideWindow(MessageError):
    """A message of a round that is over or too far ahead: a replay, a duplicate, or a neighbour that catches up."""

    def __init__(self, text: str, round: int) -> None:
        super().__init__(text)
        self.round = round


def _check_values(values: Array, expected: Expected) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(values.dot(values))  # finite only if all numbers are
    if not math.isfinite(squares) and not np.isfinite(values).all():
        raise MessageError(f"number {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite")
    if expected.bound is None:
        return
    if expected.bound_kind == "length":
        size = math.sqrt(squares) if math.isfinite(squares) else math.inf
    else:
        size = float(np.abs(values).max(initial=0.0) if expected.bound_kind == "max" else np.abs(values).sum())
    # both ends round differently: a relative slack, far below anything that matters
    if size > expected.bound * (1.0 + 1e-6):
        raise MessageError(f"the numbers have size {size:.6g}, but at most {expected.bound:.6g} is possible")
