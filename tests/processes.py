"""What tests of processes share: ports of their own, waits that end, caps, a terminal, and a look for what is left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import re
import resource
import signal
import socket
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from fedkin._base import wait_until

#: Seconds for what takes one or two on an idle machine: only what hangs takes as long, and then the test fails.
PATIENCE = 200.0

MEMORY = 3 * 2**30  # address space of a process; its resident memory is a hundredth of it

# Ports below those that the system gives to outgoing connections, in slots. A test process holds the lock of its slot
# for as long as it lives, so that no other one, of this run or of another, gives out the same ports.
_FIRST_PORT, _SLOT_PORTS, _SLOTS = 20_000, 400, 30
_ports: Iterator[int] | None = None

# what tells Rich that a terminal is none, or of another size
_OPINIONS = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")

# helpers of the standard library and of joblib that outlive the test which needed them first
_RESIDENTS = (b"resource_tracker", b"forkserver", b"loky")


def capped() -> None:
    """Limit the memory of a process to be (``preexec_fn``) and of all that it starts."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Children:
    """Processes by name; at the end of a ``with`` statement none is left."""

    def __init__(self) -> None:
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            if child.poll() is None:
                child.kill()
            child.wait(PATIENCE)

    def kill(self, name: str) -> None:
        self.children[name].kill()
        self.children[name].wait(PATIENCE)


def wait_for(
    condition: Callable[[], Any],
    seconds: float = PATIENCE,
    report: Callable[[], str] = lambda: "it did not happen in time",
) -> Any:
    """What ``condition()`` returns once that is true; fail with ``report()`` when it is not in time."""
    found: list[Any] = []
    assert wait_until(lambda: found.append(condition()) or found[-1], seconds, longest_pause=0.1), report()
    return found[-1]


# --- ports ------------------------------------------------------------------------------------------------------------


def _own_ports() -> Iterator[int]:
    """The ports of a slot that no other process has, over and over."""
    for slot in range(_SLOTS):
        handle = os.open(Path(tempfile.gettempdir()) / f"fedkin-test-ports-{slot}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            continue
        first = _FIRST_PORT + slot * _SLOT_PORTS
        while True:
            yield from range(first, first + _SLOT_PORTS)
    raise RuntimeError("too many test runs at once: no ports are left")


def free_ports(count: int) -> int:
    """The first of ``count`` consecutive ports that are free, and that nobody else is given."""
    global _ports
    _ports = _ports or _own_ports()
    run: list[int] = []
    for _ in range(3 * _SLOT_PORTS):
        port = next(_ports)
        if run and port != run[-1] + 1:
            run = []
        run = [*run, port] if _is_free(port) else []
        if len(run) == count:
            return run[0]
    raise RuntimeError(f"no {count} consecutive ports are free")


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# --- what is left -----------------------------------------------------------------------------------------------------


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def child_processes() -> set[int]:
    """Living children of this process, without helpers that stay on purpose; empty where /proc does not tell."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {int(word) for word in path.read_text().split()}
    return {pid for pid in found if not any(word in _command_line(pid) for word in _RESIDENTS)}


def processes_on(folder: Path) -> set[int]:
    """Processes whose command line names ``folder`` or something in it, wherever they were started."""
    name = re.compile(re.escape(os.fsencode(folder)) + rb"(?=[/\0])")
    return {
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if int(path.name) != os.getpid() and name.search(_command_line(int(path.name)))
    }


def end_processes(pids: set[int]) -> list[str]:
    """Kill what is left, and say what it was."""
    told = []
    for pid in sorted(pids):
        told.append(f"{pid}: {_command_line(pid).replace(bytes(1), b' ').decode(errors='replace') or 'ended, unread'}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return told


# --- a terminal -------------------------------------------------------------------------------------------------------


def on_terminal(words: Sequence[str], columns: int, lines: int, seconds: float = PATIENCE) -> tuple[int, str]:
    """Exit code of a command and all that it wrote to a terminal of that size, without escape sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in _OPINIONS} | {"TERM": "xterm"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, preexec_fn=capped)
    os.close(theirs)
    written, end = bytearray(), time.monotonic() + seconds
    try:
        while time.monotonic() < end and (piece := _read(ours)):
            written += piece
        code = process.wait(max(end - time.monotonic(), 0.1))
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode(errors="replace")).replace("\r", "")


def _read(terminal: int) -> bytes:
    """What was written to a terminal; nothing once everybody has closed it."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""
