"""Small JSON files of a site that a damaged disk must not change unnoticed: each carries a digest of its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedkin._base import write_file
from fedkin.errors import DataError


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file that only its owner may read."""
    # a line for each entry, by hand: the json module indents without its compiled encoder, many times slower
    whole = {**content, "digest": _digest(content)}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in whole.items()]
    write_file(path, "{\n" + ",\n".join(lines) + "\n}\n", private=True)


def read_record(path: Path) -> dict[str, Any]:
    """What `write_record` wrote; raises `DataError` when the file is missing, damaged or was changed by hand.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from fedkin.federate.records import read_record, write_record
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "status.json")
    ...     write_record(path, {"round": 7})
    ...     read_record(path)
    {'round': 7}
    """
    try:
        content = json.loads(path.read_bytes())
        told = content.pop("digest")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise DataError(f"{path} is damaged: it is not a record with a digest") from None
    if told != _digest(content):
        raise DataError(f"{path} is damaged: its digest does not fit its content")
    return dict(content)


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
