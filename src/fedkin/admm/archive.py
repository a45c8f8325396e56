"""Checkpoints as one file of plain arrays, replaced in one step."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import ModelFileError, ParameterError

_FORMAT = "fedkin-checkpoint-1"
_HEADER = "header"


def save_checkpoint(
    path: str | os.PathLike[str], run: str, arrays: Mapping[str, NDArray[Any]], header: Mapping[str, Any]
) -> None:
    """Write a checkpoint; a crash at any time leaves the file before it or this one, never half of it.

    Parameters
    ----------
    path : path
        Of the file. A temporary file next to it is written first.
    run : str
        `fingerprint` of the run.
    arrays : mapping {name: array}
        The state.
    header : mapping
        Numbers and strings that go with it.
    """
    target = Path(path)
    text = json.dumps({"format": _FORMAT, "run": run, **header})
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **{_HEADER: np.array(text)}, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    _sync_directory(target.parent)


def load_checkpoint(path: str | os.PathLike[str], run: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays and the header of a checkpoint that ``run`` wrote.

    Raises
    ------
    ModelFileError
        When there is no such file, or it cannot be read as a checkpoint.
    ParameterError
        When another run wrote it.
    """
    try:
        # opened here: numpy would leave a damaged file open
        with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            header = json.loads(str(file[_HEADER]))
            arrays = {name: file[name] for name in file.files if name != _HEADER}
    except FileNotFoundError:
        raise ModelFileError(f"{path}: there is no checkpoint to resume from; run once without resume") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ModelFileError(f"{path}: cannot be read as a checkpoint: {error}") from None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ModelFileError(f"{path}: is not a checkpoint of this version ({_FORMAT})")
    if header.get("run") != run:
        raise ParameterError(
            f"{path}: was written by a run with other data, another graph or other settings; resume needs the same "
            "problem, batch size, steps, seed and availability (only rounds and shards may change)"
        )
    return arrays, header


def _sync_directory(directory: Path) -> None:
    # the new name is durable only when the directory is; some systems cannot open directories
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
