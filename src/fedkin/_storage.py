"""Paths of files that are elsewhere, such as ``s3://bucket/rows``, read and written with `pyarrow.fs`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

from fedkin.errors import DataError, missing_dependency


def place_of(path: str | os.PathLike[str]) -> Path:
    """Return a path, which is a `Remote` if it is an address such as ``s3://bucket/rows``.

    Examples
    --------
    >>> str(place_of("s3://bucket/rows") / "a.parquet"), place_of("rows").name
    ('s3://bucket/rows/a.parquet', 'rows')
    """
    text = os.fspath(path)
    return Remote(text) if "://" in text else Path(text)


def file_system(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """Return the file system of a path or an address, and the path within it."""
    place = place_of(path)
    root, below = place.root_and_parts() if isinstance(place, Remote) else ("file:///", place.absolute().parts[1:])
    system, inner = _system(root)
    return system, "/".join([inner.rstrip("/"), *below])


@lru_cache(16)  # connections are reused
def _system(root: str) -> tuple[Any, str]:
    try:
        from pyarrow import ArrowException, fs
    except ImportError:
        raise missing_dependency("pyarrow", f"storage at {root}", extra="parquet") from None
    try:
        found: tuple[Any, str] = fs.FileSystem.from_uri(root)
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"{root} is not an address that pyarrow.fs supports: {error}") from None
    return found


class Remote(PosixPath):
    """A path at an address, with those methods of `Path` that readers and writers of tables use."""

    __slots__ = ()

    def root_and_parts(self) -> tuple[str, tuple[str, ...]]:
        """Return the address of the bucket, host or file system, and the names below it."""
        scheme, *parts = self.parts or ("file:",)
        hosts = 0 if scheme == "file:" else 1
        return f"{scheme}//" + ("".join(parts[:1]) if hosts else "/"), tuple(parts[hosts:])

    def __str__(self) -> str:
        root, below = self.root_and_parts()
        return root + "/" * bool(below and not root.endswith("/")) + "/".join(below)

    __fspath__ = __str__

    def _info(self) -> Any:
        system, path = file_system(self)
        return system.get_file_info(path)

    def exists(self, **_: Any) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self, **_: Any) -> bool:
        return bool(self._info().is_file)

    def is_dir(self, **_: Any) -> bool:
        from pyarrow import fs

        return bool(self._info().type == fs.FileType.Directory)

    def stat(self, **_: Any) -> os.stat_result:
        """Return the size of the file; nothing else is known."""
        return os.stat_result((0, 0, 0, 0, 0, 0, self._info().size, 0, 0, 0))

    def absolute(self) -> Remote:
        return self

    def resolve(self, strict: bool = False) -> Remote:
        return self

    def glob(self, pattern: str, **_: Any) -> Iterator[Remote]:  # type: ignore[override]
        """Yield files and folders below this path whose names match a pattern."""
        from pyarrow import fs

        (system, path), parts = file_system(self), PurePosixPath(pattern).parts
        for info in system.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=len(parts) > 1)):
            below = PurePosixPath(info.path).relative_to(PurePosixPath(path or "/")).parts
            if _fits(below, parts):
                yield self.joinpath(*below)

    def iterdir(self) -> Iterator[Remote]:  # type: ignore[override]
        return self.glob("*")

    def open(self, mode: str = "rb", *_: Any, **__: Any) -> Any:
        """Open the file for reading ("rb"), or for writing ("wb"), which makes its folder."""
        system, path = file_system(self)
        if mode == "rb":
            return system.open_input_file(path)
        self.parent.mkdir()
        return system.open_output_stream(path, compression=None)

    def mkdir(self, *_: Any, **__: Any) -> None:
        system, path = file_system(self)
        system.create_dir(path, recursive=True)

    def replace(self, target: str | os.PathLike[str]) -> Remote:
        system, path = file_system(self)
        system.move(path, file_system(target)[1])
        return Remote(target)

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok or self.is_file():
            system, path = file_system(self)
            system.delete_file(path)


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether names match a pattern, in which ``**`` stands for any number of names."""
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _fits(names, pattern[1:]) or _fits(names[1:], pattern)
    return fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])
