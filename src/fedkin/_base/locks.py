"""Locks of files that end with the process that holds them, so that nothing stays locked after a crash."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from fedkin._base.waiting import wait_until

_WAIT_SECONDS = 0.4  # somebody may just be looking whether it is held


def lock(path: Path, words: str) -> int | None:
    """Lock a file, make it if need be, and write ``words`` there.

    Returns
    -------
    int or None
        A descriptor, to be closed in the end; None when another process holds the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if wait_until(lambda: _taken(descriptor), _WAIT_SECONDS):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, words.encode(), 0)
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file."""
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
