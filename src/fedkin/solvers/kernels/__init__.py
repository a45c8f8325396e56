"""Compiled loops (numba), which `fedkin.solvers.compiled` drives; here without numba: whether its cache holds them.

numba compiles a kernel again when its own file has changed, but not when a kernel that it calls has, in another file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_HERE = Path(__file__).parent
#: Whether every call of a kernel from Python has the types of its arguments compared, which costs 10 microseconds.
CHECKED = False


def sources(folder: Path = _HERE) -> list[Path]:
    """Files that kernels are made of: their own, and those whose constants are built in."""
    return [*folder.glob("*.py"), *folder.parent.glob("pdhg.py")]


def cached(folder: Path = _HERE, name: str = "steps.edge_moves") -> bool:
    """Whether a compiled kernel lies in one of numba's caches, no older than the sources; by default one of many."""
    newest = _newest_source(folder)
    return any(entry.stat().st_mtime >= newest for entry in entries(f"{name}-*", folder))


def entries(pattern: str, folder: Path = _HERE) -> Iterator[Path]:
    """Index files with such names in the places where numba keeps them."""
    pattern += ".nbi"
    yield from (folder / "__pycache__").glob(pattern)
    for place in (os.environ.get("NUMBA_CACHE_DIR"), Path.home() / ".cache" / "numba"):
        if place and Path(place).is_dir():
            yield from Path(place).glob(f"{folder.name}_*/{pattern}")


def _newest_source(folder: Path) -> float:
    return max(source.stat().st_mtime for source in sources(folder))
