"""States of shards in a directory of any file system that `pyarrow.fs` knows: local, S3, GCS, HDFS."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.errors import DataError, missing_dependency


def file_system(address: str) -> tuple[Any, str]:
    """Return the file system and the path that an address such as ``s3://bucket/directory`` stands for."""
    try:
        from pyarrow import ArrowException, fs
    except ImportError:
        raise missing_dependency("pyarrow", f"storage at {address}", extra="parquet") from None
    try:
        place = address if "://" in address else str(Path(address).absolute())
        found: tuple[Any, str] = fs.FileSystem.from_uri(place)
    except (ArrowException, ValueError) as error:
        raise DataError(f"{address} is no address of a directory that pyarrow.fs knows: {error}") from None
    return found


def write_state(address: str, name: str, state: Mapping[str, Array]) -> None:
    """Write arrays to a file of that name, whole or not at all."""
    system, root = file_system(address)
    system.create_dir(root, recursive=True)
    held = io.BytesIO()
    arrays: dict[str, Any] = dict(state)
    np.savez(held, **arrays)
    with system.open_output_stream(f"{root}/{name}.part") as stream:
        stream.write(held.getbuffer())
    system.move(f"{root}/{name}.part", f"{root}/{name}.npz")


def read_state(address: str, name: str) -> dict[str, Array]:
    """Return the arrays of a file of that name."""
    system, root = file_system(address)
    with system.open_input_file(f"{root}/{name}.npz") as stream, np.load(io.BytesIO(stream.read())) as arrays:
        return dict(arrays)


def remove_states(address: str, names: Sequence[str]) -> None:
    """Remove the files of these names, where there are any."""
    from pyarrow import fs

    system, root = file_system(address)
    for name in names:
        path = f"{root}/{name}.npz"
        if system.get_file_info(path).type != fs.FileType.NotFound:
            system.delete_file(path)
