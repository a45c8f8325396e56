"""A terminal of a given size, for commands that show more on one."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time
from collections.abc import Sequence

# what tells Rich that a terminal is none, or of another size
_OPINIONS = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")


def on_terminal(words: Sequence[str], columns: int, lines: int, seconds: float = 120.0) -> tuple[int, str]:
    """Exit code of a command and all that it wrote to a terminal, without escape sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in _OPINIONS}
    environment |= {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
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
