"""What every command shares: two consoles, progress, notes, errors in one line, and a clean end after Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from fedkin.errors import FedkinError, FedkinWarning, SolverError

if TYPE_CHECKING:  # loads numpy
    from fedkin._base import Say

OK, SOLVER_FAILED, WRONG_INPUT, STOPPED, INTERRUPTED = 0, 1, 2, 3, 130

_SHOWN_PER_KIND = 3  # warnings of one kind that are written out


class Interrupted(BaseException):
    """Ctrl-C. Not a KeyboardInterrupt, which the solver takes for "return what you have" and a path for "go on"."""


class StopRequested(Interrupted):
    """Another command asked this one to stop, as ``fedkin site stop`` does."""


def output() -> Console:
    """The console for results. Nothing in them is taken for markup, since site ids may look like it."""
    return Console(markup=False, highlight=False, emoji=False)


def messages() -> Console:
    """The console for progress, notes and errors: standard error."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def print_json(document: Mapping[str, Any]) -> None:
    """A JSON document on standard output."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n")


def note(words: str, console: Console | None = None) -> None:
    """A remark on standard error, or on a console that shows something else meanwhile."""
    (console or messages()).print(Text.assemble(("note: ", "yellow"), as_options(words)), soft_wrap=True)


def say(*lines: str) -> None:
    """Sentences on standard output, broken by the terminal only."""
    for line in lines:
        output().print(line, soft_wrap=True)


@contextmanager
def working(first: str) -> Iterator[Say]:
    """What is being done, on standard error: a bar with the time left, or a line now and then without a terminal."""
    from fedkin.fitting.progress import progress

    with progress(first, console=messages()) as say:
        yield say


@contextmanager
def stopping_early(wanted: bool) -> Iterator[None]:
    """Within this context the first Ctrl-C is a KeyboardInterrupt, which ends a step with what it has; if wanted."""
    if not wanted:
        yield
        return
    came: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        came.append(number)
        if len(came) > 1:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise Interrupted
        raise KeyboardInterrupt

    with handling([signal.SIGINT], interrupt):
        yield


def guarded(run: Callable[[], None]) -> int:
    """Run a command; turn what can go wrong into one line on standard error and an exit code."""
    try:
        with _raising_once([signal.SIGINT]), _warnings_as_notes():
            run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK if end.code is None else WRONG_INPUT
    except StopRequested:
        messages().print("stopped on request", style="yellow")
        return STOPPED
    except (Interrupted, KeyboardInterrupt):
        messages().print("interrupted: nothing was left half-written", style="yellow")
        return INTERRUPTED
    except FedkinError as error:
        _print_error(str(error))
        return SOLVER_FAILED if isinstance(error, SolverError) else WRONG_INPUT
    except OSError as error:
        _print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return WRONG_INPUT
    return OK


def _print_error(words: str) -> None:
    messages().print(Text.assemble(("error: ", "bold red"), (as_options(words), "red")), soft_wrap=True)


#: What Python and the command line call the same about tables.
_OF_TABLES = ("site", "features", "offset", "target", "weight", "time", "missing", "categories", "drop")


def as_options(words: str) -> str:
    """A message of the library, with the arguments of Python spelled as those of the command line.

    Examples
    --------
    >>> as_options("say which columns to use with features=, or add ridge=1e-3 or so")
    'say which columns to use with --features, or add --ridge 1e-3 or so'
    >>> as_options("unknown loss 'x'; choose one of mean, linear, or pass a Loss object")
    "unknown loss 'x'; choose one of mean, linear"
    """
    if "=" not in words:
        return words.replace(", or pass a Loss object", "")
    from fedkin.cli.shared.options import flag
    from fedkin.fitting import DEFAULTS

    names = "|".join((*DEFAULTS, *_OF_TABLES, "graph"))

    def spelled(found: re.Match[str]) -> str:
        value = (found[2] or "").strip("\"'")
        return f"{flag(found[1])} {value}" if value else flag(found[1])

    return re.sub(rf"\b({names})=(\.\.\.|\"\w+\"|'\w+'|[\d.e+-]*\d)?(?=[\s,;:.)]|$)", spelled, words)


@contextmanager
def _raising_once(signals: Sequence[signal.Signals], on_request: signal.Signals | None = None) -> Iterator[None]:
    """Let these signals raise `Interrupted`, and one of them `StopRequested`."""

    def interrupt(number: int, frame: object) -> None:
        for one in {*signals, signal.SIGINT}:
            signal.signal(one, signal.SIG_IGN)  # once is enough: cleaning up must not be interrupted again
        raise StopRequested if number == on_request else Interrupted

    with handling(signals, interrupt):
        yield


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Keep Ctrl-C until the end of this context. For imports, some of which swallow every exception."""
    came: list[int] = []
    with handling([signal.SIGINT], lambda number, frame: came.append(number)):
        yield
    if came:
        raise Interrupted


@contextmanager
def handling(signals: Sequence[signal.Signals], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Let ``handler`` have these signals for a while; nothing happens outside the main thread."""
    before: dict[signal.Signals, Any] = {}
    try:
        for one in signals:
            before[one] = signal.signal(one, handler)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        for one, previous in before.items():
            signal.signal(one, previous)


def ended_like_ctrl_c(on_request: signal.Signals | None = None) -> AbstractContextManager[None]:
    """Within this context SIGTERM and SIGHUP do what Ctrl-C does, and the signal ``on_request`` stops on request.

    For commands that start processes with sessions of their own, which would stay behind.
    """
    # who ignores a signal, as nohup does, wants that
    heeded = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    return _raising_once(heeded if on_request is None else [*heeded, on_request], on_request)


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    seen: Counter[str] = Counter()
    said = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if str(message) in said:
            return
        said.add(str(message))
        seen[category.__name__] += 1
        if seen[category.__name__] <= _SHOWN_PER_KIND:
            note(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", FedkinWarning)
        warnings.showwarning = show
        try:
            yield
        finally:  # a command ends with SystemExit
            for kind, times in seen.items():
                if times > _SHOWN_PER_KIND:
                    note(f"{times - _SHOWN_PER_KIND} more of the kind {kind}")
