"""Files that are there whole or not at all: written beside their place, then renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700


@contextmanager
def in_file(path: str | os.PathLike[str], kind: type[Exception]) -> Iterator[None]:
    """Within this context, errors of a kind begin with the file whose content is wrong.

    Examples
    --------
    >>> from fedkin.errors import DataError
    >>> with in_file("rows.csv", DataError):
    ...     raise DataError("there are no rows")
    Traceback (most recent call last):
    fedkin.errors.DataError: rows.csv: there are no rows
    """
    try:
        yield
    except kind as error:
        raise kind(f"{path}: {error}") from None


@contextmanager
def replacing(path: str | os.PathLike[str], *, private: bool = False, durable: bool = False) -> Iterator[Path]:
    """A temporary path in the same directory that takes the place of ``path`` when the block ends well.

    A reader sees the old file or the new one, never half of it. When the block fails, nothing is left behind.

    Parameters
    ----------
    path : path
        A file of that name is replaced.
    private : bool
        Whether only the owner may read the file, from its first byte on.
    durable : bool
        Whether file and name are on the disk before this returns, so that they outlive a loss of power.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "note.txt")
    ...     with replacing(path) as temporary:
    ...         _ = temporary.write_text("hello")
    ...     path.read_text()
    'hello'
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
    """A new directory that takes the place of ``path`` when the block ends well; what was there goes away.

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
