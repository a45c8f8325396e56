"""Provide general helpers: argument checks, number formats, safe file writing, loops and waits."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import re
import secrets
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import threadpool_limits

from fedkin.errors import ParameterError

# --- arrays and parameters ---------------------------------------------------------------------------------------

Array = NDArray[np.float64]  #: numbers
Index = NDArray[np.int64]  #: positions and counts
Mask = NDArray[np.bool_]  #: which ones
AnyArray = NDArray[Any]  #: numbers, labels or ids

#: The smallest positive number with full precision, which keeps quotients finite.
TINY = float(np.finfo(np.float64).tiny)

_Scalar = TypeVar("_Scalar", bound=np.generic)


def frozen(array: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """Make an array read-only and return it."""
    array.flags.writeable = False
    return array


def check_whole(name: str, value: object, *, least: int) -> None:
    """Raise `ParameterError` unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ParameterError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_level(value: float) -> None:
    """Raise `ParameterError` unless a level lies between 0 and 1."""
    if not 0 < value < 1:
        hint = f": say {value / 100:g} for {value:g}%" if 1 < value < 100 else ""
        raise ParameterError(f"level must lie between 0 and 1, got {value:g}{hint}")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `ParameterError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ParameterError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_nonnegative(name: str, value: float) -> None:
    """Raise `ParameterError` unless ``value`` is a finite number of at least 0."""
    if not isinstance(value, int | float | np.number) or not np.isfinite(value) or value < 0:
        raise ParameterError(f"{name} must be a finite number of at least 0, got {value!r}")


def check_positive(name: str, value: object) -> None:
    """Raise `ParameterError` unless ``value`` is a finite number above 0."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise ParameterError(f"{name} must be a positive number, got {value!r}")


def repeated(values: Iterable[Hashable]) -> list[Hashable]:
    """Return the values that occur more than once, in order."""
    return [value for value, times in Counter(values).items() if times > 1]


# --- numbers and names for people --------------------------------------------------------------------------------

_MOST_DECIMALS = 6
_MOST_LINES = 10
#: Characters that end a line, write over others, or turn the direction of text.
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def whole(number: float) -> str:
    """Format a count with commas between thousands: 15,362."""
    return f"{round(number):,}"


def count(number: int, word: str) -> str:
    """Format a count and its noun: 1 row, 15,362 rows."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def decimals_for(errors: Iterable[float]) -> int:
    """Return the decimals of a column of estimates, so that the smallest standard error has two significant digits."""
    usable = [error for error in errors if 0 < error < math.inf]
    if not usable:
        return 3
    return min(max(1 - math.floor(math.log10(min(usable))), 0), _MOST_DECIMALS)


def fixed(value: float | None, decimals: int = 3, *, sign: bool = False) -> str:
    """Format a number with fixed decimals and commas between thousands; never ``-0.00``."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{round(value, decimals) + 0.0:{'+' if sign else ''},.{decimals}f}"


def probability(value: float) -> str:
    """Format a probability; one that rounds to 0 or 1 is given as a bound: ``>0.99``."""
    return "<0.01" if value < 0.01 else ">0.99" if value > 1 - 0.01 else fixed(value, 2)


def percent(share: float, decimals: int = 0, *, sign: bool = False) -> str:
    """Format a share of 1 in percent: 6.9%."""
    return "–" if math.isnan(share) else f"{fixed(100 * share, decimals, sign=sign)}%"


def listed(names: Iterable[object], most: int = 5) -> str:
    """Quote the first names and count the rest: 'a', 'b' and 1 more."""
    return some_of([repr(name) for name in names], most)


def hidden_text(value: object, allowed: str = "") -> str | None:
    """Return a text in plain lists and mappings that would change what a terminal shows, or None if there is none."""
    if isinstance(value, str):
        return value if set(_HIDDEN.findall(value)) - set(allowed) else None
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for part in parts if (found := hidden_text(part, allowed)) is not None), None)


def some_of(values: Sequence[object], most: int = 8) -> str:
    """Join the first few values and count the rest: a, b and 2 more."""
    shown = ", ".join(str(value) for value in values[:most])
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")


def html_card(
    title: str, facts: Mapping[str, object], head: Sequence[str] = (), lines: Sequence[Sequence[object]] = ()
) -> str:
    """Render an object for a notebook: a title, facts by name, the first lines of a table; all text is escaped."""
    style = 'style="text-align:left;padding:.15em 1.2em .15em 0;vertical-align:top;background:none"'

    def cells(tag: str, values: Iterable[object]) -> str:
        return "".join(f"<{tag} {style}>{escape(str(value))}</{tag}>" for value in values)

    row = '<tr style="background:none">'
    rows = (f"{row}{cells('th', [name])}{cells('td', [value])}</tr>" for name, value in facts.items())
    card = f"<strong>{escape(title)}</strong><table>{''.join(rows)}</table>"
    if lines:
        body = "".join(f"{row}{cells('td', line)}</tr>" for line in lines[:_MOST_LINES])
        more = f"<p>and {len(lines) - _MOST_LINES} more</p>" if len(lines) > _MOST_LINES else ""
        card += f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>{more}"
    return f"<div>{card}</div>"


def free_memory() -> float | None:
    """Return the free memory in bytes as reported by the system; cached files count as free."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * float(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return None


# --- files: written whole or not at all --------------------------------------------------------------------------

PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700
_LOCK_SECONDS = 0.4  # another process may just be testing whether it is held


@contextmanager
def in_file(path: str | os.PathLike[str], kind: type[Exception]) -> Iterator[None]:
    """Prefix errors of the given types with the path of the invalid file."""
    try:
        yield
    except kind as error:
        raise kind(f"{path}: {error}") from None


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file name to errors of a full disk, which lack it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        text = f"{os.strerror(error.errno)}, so it was not written; free some space, or choose another place"
        raise OSError(error.errno, text, str(path)) from error


@contextmanager
def replacing(path: str | os.PathLike[str], *, private: bool = False, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the same directory, which replaces ``path`` when the block succeeds.

    Readers see either the old file or the new one. ``private`` files are readable only by their owner from the start;
    ``durable`` files and their directory entries are on disk when this returns.
    """
    path = path if isinstance(path, Path) else Path(path)  # a path at an address stays there
    # the suffix stays: writers of pictures and tables take their format from it
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{path.suffix}")
    try:
        with _naming(path):
            if private:
                os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE))
            yield temporary
            if durable:
                _sync(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        _sync_names(path.parent)


def write_file(
    path: str | os.PathLike[str], content: str | bytes, *, private: bool = False, durable: bool = False
) -> None:
    """Write text (UTF-8) or bytes through `replacing`."""
    with replacing(path, private=private, durable=durable) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, ArrayLike], *, compressed: bool = False) -> None:
    """Write a private NPZ file through `replacing`, under exactly this name."""
    save: Callable[..., None] = np.savez_compressed if compressed else np.savez
    with replacing(path, private=True) as temporary, temporary.open("wb") as file:
        save(file, **arrays)


@contextmanager
def replacing_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new directory, which replaces ``path`` and its content when the block succeeds.

    Its files are on disk before the names change. A crash leaves either the old directory or the new one.
    """
    path = Path(path)
    mark = secrets.token_hex(6)
    fresh, old = (path.with_name(f".{path.name}.{mark}.{kind}") for kind in ("new", "old"))
    try:
        with _naming(path):
            fresh.mkdir()
            yield fresh
            for file in fresh.iterdir():
                _sync(file)
        replaced = path.exists()
        if replaced:
            path.rename(old)
        try:
            fresh.rename(path)
        except OSError:
            if replaced:
                old.rename(path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    _sync_names(path.parent)


def _sync_names(directory: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can
        _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(path: Path, text: str) -> int | None:
    """Lock a file for the life of this process and write ``text`` to it.

    Return a descriptor, which the caller must close, or None if another process holds the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
    try:
        if wait_until(lambda: _taken(descriptor), _LOCK_SECONDS):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _taken(descriptor)
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # some file systems of clusters have no locks: there nobody can tell
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


# --- cores, loops and waits -----------------------------------------------------------------------------------

T = TypeVar("T")
#: ``say(text)`` reports what is being done.
Say = Callable[[str], None]
#: ``listener(text, done, total)``: called before every turn of a loop and once after the last.
Listener = Callable[[str, int, int], None]

logger = logging.getLogger("fedkin")
logger.addHandler(logging.NullHandler())

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_threads() -> int:
    """Return the number of threads for compiled loops: one per core, at most ``NUMBA_NUM_THREADS`` if set."""
    limit = os.environ.get("NUMBA_NUM_THREADS", "")
    return min(available_cores(), max(int(limit), 1)) if limit.isdecimal() else available_cores()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Run linear algebra in the calling thread, because matrices of single sites are too small for threads."""
    with threadpool_limits(limits=1, user_api="blas"):
        yield


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Report every `tracked` loop within this context to ``listener``."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def report_progress(text: str, done: int, total: int) -> None:
    """Report the progress of a loop to the listener."""
    if (listener := _listener.get()) is not None:
        listener(text, done, total)


def tracked(items: Sequence[T], text: str) -> Iterator[T]:
    """Iterate over the items, and report how many are done to the listener and the logger ``fedkin``."""
    began = time.monotonic()
    for done, item in enumerate(items):
        report_progress(text, done, len(items))
        logger.debug("%s: %d of %d", text, done + 1, len(items))
        yield item
    report_progress(text, len(items), len(items))
    logger.info("%s: %d in %.2f s", text, len(items), time.monotonic() - began)


def wait_until(
    ready: Callable[[], object],
    seconds: float = math.inf,
    *,
    pause: float = 0.05,
    longest_pause: float = 0.5,
    complain: Callable[[float], object] | None = None,
    silence: float = 10.0,
    sleep: Callable[[float], object] = time.sleep,
) -> bool:
    """Call ``ready`` at growing intervals until it is true or time runs out; return the last result.

    ``complain`` is called with the seconds waited so far: after the first failed call, after ``silence`` more seconds,
    and then at growing intervals.
    """
    began = time.monotonic()
    complaint = 0.0
    while not ready():
        waited = time.monotonic() - began
        if waited >= seconds:
            return False
        if complain is not None and waited >= complaint:
            complain(waited)
            complaint = 2.0 * waited + silence
        sleep(min(pause, seconds - waited))
        pause = min(1.5 * pause, longest_pause)
    return True
