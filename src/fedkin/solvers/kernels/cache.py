"""Compiled kernels in numba's caches: whether they are there, and whether they are still what the source says.

numba compiles a kernel again when its own file has changed, but not when a kernel that it calls has, in another file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_HERE = Path(__file__).parent


def sources() -> list[Path]:
    """Files that kernels are made of: their own, the way they are compiled, and constants that are built in."""
    return [*_HERE.glob("*.py"), _HERE.parent / "pdhg.py"]


def cached() -> bool:
    """Whether compiled kernels lie in one of numba's caches, no older than their sources."""
    newest = _newest_source()
    return any(entry.stat().st_mtime >= newest for entry in entries("steps.run-*"))


def drop_stale() -> None:
    """Remove kernels from the caches that are older than any of the sources; numba compiles them again."""
    newest = _newest_source()
    for source in _HERE.glob("*.py"):
        for entry in entries(f"{source.stem}.*"):
            try:
                if entry.stat().st_mtime < newest:
                    entry.unlink()
            except OSError:  # gone meanwhile, or not ours to remove
                continue


def entries(pattern: str) -> Iterator[Path]:
    """Index files with such names in the places where numba keeps them."""
    pattern += ".nbi"
    yield from (_HERE / "__pycache__").glob(pattern)
    for folder in (os.environ.get("NUMBA_CACHE_DIR"), Path.home() / ".cache" / "numba"):
        if folder and Path(folder).is_dir():
            yield from Path(folder).glob(f"{_HERE.name}_*/{pattern}")


def _newest_source() -> float:
    return max(source.stat().st_mtime for source in sources())
