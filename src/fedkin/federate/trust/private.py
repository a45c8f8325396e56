"""Private files and places: only their owner may read or write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from fedkin._base import PRIVATE_FILE
from fedkin.errors import FedkinError


class SecurityError(FedkinError, RuntimeError):
    """A signature, certificate or file permission that is not as it must be."""


def open_private(path: Path) -> IO[bytes]:
    """Open a file that only its owner may read, to append to it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
    os.fchmod(descriptor, PRIVATE_FILE)  # also when the file was there before
    return os.fdopen(descriptor, "ab")


def check_private(path: Path) -> None:
    """Raise `SecurityError` when ``path`` is missing, or anybody but the owner may read or write it."""
    mode = _mode(path)
    if mode & 0o077:
        raise SecurityError(f"{path}: others may read or write it (mode {mode:o}); run: chmod go= {path}")


def check_place(place: Path) -> None:
    """Raise `SecurityError` when anybody but the owner may put files into the directory ``place``, or take them."""
    mode = _mode(place)
    if mode & 0o022:
        raise SecurityError(f"{place}: others may write in this directory (mode {mode:o}); run: chmod go= {place}")


def read_private(path: Path) -> bytes:
    """The content of a private file, after `check_private`."""
    check_private(path)
    return read_whole(path)


def read_whole(path: Path) -> bytes:
    """The content of a file; raises `SecurityError` that names it when it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SecurityError(f"{path} is missing") from None
    except OSError as error:
        raise SecurityError(f"{path} cannot be read ({error.strerror})") from None


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        raise SecurityError(f"{path} is missing") from None
