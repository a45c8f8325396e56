"""Shared helpers that know nothing of federated learning: checks, formats of numbers and names, files, progress."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import secrets
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import threadpool_limits

from fedkin.errors import ParameterError

if TYPE_CHECKING:
    from rich.console import Console

# --- arrays and parameters ---------------------------------------------------------------------------------------

Array = NDArray[np.float64]  #: numbers
Index = NDArray[np.int64]  #: positions and counts
Mask = NDArray[np.bool_]  #: which ones
AnyArray = NDArray[Any]  #: numbers, labels or ids

_Scalar = TypeVar("_Scalar", bound=np.generic)


def frozen(array: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """Make an array read only and return it."""
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
    if not number or not 0 < float(value) < np.inf:  # type: ignore[arg-type]
        raise ParameterError(f"{name} must be a positive number, got {value!r}")


def repeated(values: Iterable[Hashable]) -> list[Hashable]:
    """Return the values that come more than once, in order."""
    return [value for value, times in Counter(values).items() if times > 1]


# --- numbers and names for people --------------------------------------------------------------------------------

_MOST_DECIMALS = 6
_MOST_LINES = 10


def whole(number: float) -> str:
    """Format a count with commas between thousands: 15,362."""
    return f"{round(number):,}"


def count(number: int, word: str) -> str:
    """Format a count and its noun: 1 row, 15,362 rows."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def decimals_for(errors: Iterable[float]) -> int:
    """Return how many decimals a column of estimates needs: the smallest standard error shows two digits."""
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
    """Quote the first names, and say how many more there are: 'a', 'b' and 1 more."""
    return some_of([repr(name) for name in names], most)


def some_of(values: Sequence[object], most: int = 8) -> str:
    """Join the first few of many: a, b and 2 more."""
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


# --- files: written whole or not at all --------------------------------------------------------------------------

PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700
_LOCK_SECONDS = 0.4  # another process may just be testing whether it is held


@contextmanager
def in_file(path: str | os.PathLike[str], kind: type[Exception]) -> Iterator[None]:
    """Prefix errors of a kind with the file whose content is wrong."""
    try:
        yield
    except kind as error:
        raise kind(f"{path}: {error}") from None


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file that was to be written where the disk is full: such errors come without a name."""
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

    A reader sees the old file or the new one. ``private`` files are readable by their owner alone, from the first byte
    on; ``durable`` ones, with their names, are on the disk before this returns.
    """
    path = Path(path)
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
    """Yield a new directory, which replaces ``path`` and what it held when the block succeeds.

    The files directly in it are on the disk before the names change. A crash leaves the old directory or the new one.
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

    Return a descriptor, to be closed in the end; None when another process holds the lock.
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


# --- cores, waits and progress -----------------------------------------------------------------------------------

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
    """Return the number of threads for compiled loops: one per core, at most ``NUMBA_NUM_THREADS`` where it is set."""
    limit = os.environ.get("NUMBA_NUM_THREADS", "")
    return min(available_cores(), max(int(limit), 1)) if limit.isdecimal() else available_cores()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Keep linear algebra in the calling thread: matrices of single sites are too small to share out."""
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
    """Report to the listener how much of a loop is done."""
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
    """Call ``ready`` at growing intervals until it is true or the time is over, and return whether it was.

    ``complain`` is called with the seconds waited so far: after the first call in vain, after ``silence`` seconds more,
    and then ever less often.
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


#: Seconds between two lines where there is no terminal.
EVERY = 5.0
#: Turns of a loop from which on it says how many it does in a second: rows, not folds.
_MANY = 100_000


@contextmanager
def progress(words: str = "working", *, console: Console | None = None, every: float = EVERY) -> Iterator[Say]:
    """Show how far loops are, and about how long they still take: splits of a comparison, folds, levels.

    In a terminal and in a notebook it is a bar; elsewhere, a line on standard error every few seconds. For programs,
    the logger ``fedkin`` says the same: ``logging.basicConfig(level=logging.INFO)``.

    Parameters
    ----------
    words : str
        What is being done, until a step says more.
    console : rich.console.Console, optional
        Where to show it; by default standard error, or the notebook.
    every : float
        Seconds between two lines where there is neither a terminal nor a notebook.

    Yields
    ------
    callable
        ``say(words)`` changes the words.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.fitting import compare
    >>> with fedkin.progress():
    ...     found = compare(paper_design(n_sites=6, n_samples=30, n_features=3, n_clusters=1).federation)
    """
    from rich.console import Console

    place = console or Console(stderr=True, markup=False, highlight=False, emoji=False)
    with _bar(words, place) if place.is_terminal or place.is_jupyter else _lines(words, every, place.file) as say:
        yield say


@contextmanager
def _bar(words: str, console: Console) -> Iterator[Say]:
    from rich import progress as rich

    before, after = (rich.TextColumn(f"{{task.{what}}}", markup=False) for what in ("description", "fields[left]"))
    columns = (rich.SpinnerColumn(), before, rich.BarColumn(bar_width=24), rich.TimeElapsedColumn(), after)
    with rich.Progress(*columns, console=console, transient=True) as bars:
        top = bars.add_task(words, total=None, left="")
        tasks: dict[str, tuple[rich.TaskID, float]] = {}

        def hear(loop: str, done: int, total: int) -> None:
            now = time.monotonic()
            if loop not in tasks:
                tasks[loop] = (bars.add_task(loop, total=total, left=""), now)
            task, began = tasks[loop]
            bars.update(task, completed=done, left=time_left(began, now, done, total))
            if done == total:
                bars.remove_task(tasks.pop(loop)[0])

        with listening(hear):
            yield lambda said: bars.update(top, description=said)


@contextmanager
def _lines(words: str, every: float, file: IO[str] | None = None) -> Iterator[Say]:
    now, loops, over = [words], dict[str, tuple[int, int, float, float]](), threading.Event()

    def say(said: str) -> None:
        now[0] = said

    def hear(loop: str, done: int, total: int) -> None:
        last = time.monotonic()
        loops[loop] = (done, total, loops[loop][2] if loop in loops else last, last)
        if done == total:
            del loops[loop]

    def tell() -> None:
        start = time.monotonic()
        while not over.wait(every):
            parts = [now[0]]
            for loop, (done, total, began, last) in list(loops.items()):
                left = time_left(began, last, done, total)
                parts.append(f"{loop}, {done} of {total}" + (f" ({left})" if left else ""))
            line = f"[{time.monotonic() - start:.0f} s] {'; '.join(parts)}"
            print(line, file=file or sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        with listening(hear):
            yield say
    finally:
        over.set()
        teller.join()


def time_left(began: float, last: float, done: int, total: int) -> str:
    """Return how long a loop still takes, in words, given when its ``last`` turn was done; "" before the first."""
    if not 0 < done < total:
        return ""
    # less the time since the last turn, so that it never grows while a turn is under way
    seconds = max((last - began) / done * (total - done) - (time.monotonic() - last), 1.0)
    left = f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.0f} min left"
    return f"{done / max(last - began, 1e-3):,.0f} a second, {left}" if total >= _MANY else left
