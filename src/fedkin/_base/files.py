"""Write files whole or not at all (to a temporary name, then renamed), and lock them for the life of a process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedkin._base.running import wait_until

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
def replacing(path: str | os.PathLike[str], *, private: bool = False, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the same directory, which replaces ``path`` when the block succeeds.

    A reader sees the old file or the new one, never half of it. When the block fails, nothing is left behind.

    Parameters
    ----------
    path : path
        A file of that name is replaced.
    private : bool
        Whether only the owner may read the file, from its first byte on.
    durable : bool
        Whether file and name are on the disk before this returns, so that they outlive a loss of power.
    """
    path = Path(path)
    # the suffix stays: writers of pictures and tables take their format from it
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{path.suffix}")
    try:
        if private:
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE))
        yield temporary
        if durable:
            _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_directory(path.parent)


def write_file(
    path: str | os.PathLike[str], content: str | bytes, *, private: bool = False, durable: bool = False
) -> None:
    """Write text (UTF-8) or bytes through `replacing`."""
    with replacing(path, private=private, durable=durable) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, npt.ArrayLike],
    *,
    compressed: bool = False,
    private: bool = False,
    durable: bool = False,
) -> None:
    """Write an NPZ file through `replacing`, under exactly this name."""
    save: Callable[..., None] = np.savez_compressed if compressed else np.savez
    with replacing(path, private=private, durable=durable) as temporary, temporary.open("wb") as file:
        save(file, **arrays)


@contextmanager
def replacing_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new directory, which replaces ``path`` and what it held when the block succeeds.

    The files directly in it are on the disk before the names change. A crash leaves the old directory or the new one.
    """
    path = Path(path)
    mark = secrets.token_hex(6)
    fresh, old = (path.with_name(f".{path.name}.{mark}.{kind}") for kind in ("new", "old"))
    fresh.mkdir()
    try:
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
        if replaced:
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make new names in a directory durable, where the system can."""
    with contextlib.suppress(OSError):
        _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(path: Path, text: str) -> int | None:
    """Lock a file, create it if need be, and write ``text`` to it; the lock ends with the process.

    Returns
    -------
    int or None
        A descriptor, to be closed in the end; None when another process holds the lock.
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
