"""Save models to directories, completely or not at all, and load them with version and checksums verified.

A model directory contains no executable code:

- ``model.json``: what was fitted and how, with the format version and the checksums of the others;
- ``coefficients.csv``: a row per site (and per class but the first, for more than two classes);
- ``edges.csv``: the graph that was used. The ends are named by id and by row number of the site;
- ``kin``, ``baseline`` and ``boosting``, where the model has them: numbers and names in JSON, arrays in NPZ;
- ``comparison.json`` and ``history.json``, where they are known: errors of other methods on held-out rows, and how the
  model was fitted, for its report.
"""

from __future__ import annotations

import csv
import errno
import glob
import hashlib
import io
import json
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from datetime import date, datetime
from pathlib import Path
from typing import Any, NoReturn, cast, get_type_hints

import msgspec
import numpy as np

from fedkin import __version__
from fedkin._base import Array, Index, listed, lock, replacing_directory
from fedkin.errors import ModelFileError
from fedkin.fitting.boosting import CODES, Boosting
from fedkin.fitting.model import FittedModel, column_name
from fedkin.fitting.survival import Baselines
from fedkin.graph import Graph
from fedkin.kin import Diagnostics, Kin, Learned, Nested, Pairs, Population, States, Units
from fedkin.losses import Loss, describe_loss, restore_loss

FORMAT, FORMAT_VERSION = "fedkin-model", 2
_MODEL, _COEFFICIENTS, _EDGES = "model.json", "coefficients.csv", "edges.csv"
#: Attributes of a model in files of plain values, and in JSON with arrays.
_OPTIONAL = ("comparison", "history")
_PACKED: dict[str, type] = {"kin": Kin, "baseline": Baselines, "boosting": Boosting}
_MORE = (*(f"{name}.json" for name in (*_OPTIONAL, *_PACKED)), *(f"{name}.npz" for name in _PACKED))
_FILES = (_MODEL, _COEFFICIENTS, _EDGES, *_MORE)
_STALE_SECONDS, _MOST_BYTES = 3600.0, 2**30  # until a save was interrupted; of a file of a model
#: Types in these files besides plain values.
_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Baselines, Boosting, Diagnostics, Kin, Learned, Nested, Pairs, Population, States, Units)
}
_OF_MODEL = ("sites", "loss")  # fields of kin that the model has


class _Head(msgspec.Struct, kw_only=True):
    format: str
    format_version: int
    fedkin_version: str = "unknown"
    n_sites: int = 0


#: Keys of ``model.json`` that hold an attribute of the model.
_KEYS = {
    "target": "target_name",
    "offset": "offset_name",
    "features": "feature_names",
    **{name: name for name in ("classes", "fit_intercept", "fused", "options", "origin", "schema")},
}
_KINDS = get_type_hints(FittedModel)
#: ``model.json`` with the types of these attributes; notes are by number of the site.
_Description: Any = msgspec.defstruct(
    "_Description",
    [
        ("loss", dict[str, Any]),
        *((key, _KINDS[name]) for key, name in _KEYS.items()),
        ("site_codes", _KINDS["site_codes"], None),
        ("notes", list[tuple[int, tuple[str, ...]]]),
        ("checksums", dict[str, str]),
    ],
    bases=(_Head,),
    kw_only=True,
)


# --- writing ----------------------------------------------------------------------------------------------------


def save(model: FittedModel, directory: str | os.PathLike[str]) -> None:
    """Write a model; see `FittedModel.save`."""
    contents = {_COEFFICIENTS: _coefficients_csv(model), _EDGES: _edges_csv(model)}
    for name in _PACKED:
        if (part := getattr(model, name)) is not None:
            arrays: dict[str, Any] = {}
            contents[f"{name}.json"] = _json(_packed(part, "", arrays))
            stream = io.BytesIO()
            np.savez(stream, allow_pickle=False, **arrays)
            contents[f"{name}.npz"] = stream.getvalue()
    for name in _OPTIONAL:
        if getattr(model, name) is not None:
            contents[f"{name}.json"] = _json(getattr(model, name))
    description = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "fedkin_version": model.fedkin_version,
        "n_sites": model.n_sites,
        "loss": describe_loss(model.loss),
        **{key: getattr(model, name) for key, name in _KEYS.items()},
        "site_codes": model.site_codes,
        "fused": None if model.fused is None else asdict(model.fused),
        "schema": None if model.schema is None else model.schema.plain(),
        "notes": [(model.index[site], lines) for site, lines in model.notes.items()],
        "checksums": {name: _checksum(content) for name, content in contents.items()},
    }
    target = Path(directory).resolve()
    check_model_place(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing_directory(target) as fresh:
            for name, content in {_MODEL: _json(description), **contents}.items():
                (fresh / name).write_bytes(content)
        # left by interrupted saves; a recent one may belong to a save that is still running
        for left in (*_leftovers(target, "old"), *_leftovers(target, "new")):
            if left.suffix == ".old" or time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        _unwritable(target, error)


def _json(values: Any) -> bytes:
    try:
        return msgspec.json.format(msgspec.json.encode(_plain(values)), indent=2) + b"\n"
    except (TypeError, ValueError) as error:
        raise ModelFileError(f"the model cannot be written as JSON: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON has no such numbers; float() reads it back
    return value


def _packed(value: Any, path: str, arrays: dict[str, Any]) -> Any:
    """Return a value for JSON; arrays in fields are put into ``arrays`` by the path of their field."""
    if type(value).__name__ in _TYPES:
        names = [item.name for item in fields(value) if not (isinstance(value, Kin) and item.name in _OF_MODEL)]
        packed: dict[str, Any] = {"type": type(value).__name__}
        for name in names:
            inside = getattr(value, name)
            if isinstance(inside, np.ndarray):
                arrays[f"{path}{name}"] = inside
            else:
                packed[name] = _packed(inside, f"{path}{name}.", arrays)
        return packed
    if isinstance(value, Mapping):
        return {str(name): _packed(one, path, arrays) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(one, path, arrays) for one in value]
    if isinstance(value, np.ndarray):  # of a list of arrays
        return {"array": value.tolist()}
    if isinstance(value, float | np.floating) and not math.isfinite(value):
        return {"float": repr(float(value))}
    return value


def _unpacked(value: Any, path: str, arrays: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return tuple(_unpacked(one, path, arrays, {}) for one in value)
    if not isinstance(value, dict):
        return value
    if set(value) == {"float"}:
        return float(value["float"])
    if set(value) == {"array"}:
        return np.array(value["array"], dtype=np.float64)
    if "type" not in value:
        return {name: _unpacked(one, path, arrays, {}) for name, one in value.items()}
    kind = _TYPES[value["type"]]
    inside = {name: _unpacked(one, f"{path}{name}.", arrays, {}) for name, one in value.items() if name != "type"}
    named = {item.name: f"{path}{item.name}" for item in fields(kind)}
    inside |= {name: arrays[key] for name, key in named.items() if key in arrays}
    return kind(**inside, **more)


def check_model_place(target: str | os.PathLike[str]) -> int | None:
    """Raise `ModelFileError` if no model can be written here; return the number of sites of an existing one."""
    target, replaced = Path(target).resolve(), None
    if target.is_dir():
        replaced = _check_replaceable(target)
    elif target.exists():
        raise ModelFileError(f"{target} is a file, expected a directory for the model: choose another name")
    parent = next(place for place in target.parents if os.path.lexists(place))
    try:
        Path(tempfile.mkdtemp(dir=parent, prefix=".fedkin-")).rmdir()
    except OSError as error:
        _unwritable(target, error)
    return replaced


@contextmanager
def reserved_place(target: str | os.PathLike[str]) -> Iterator[int | None]:
    """Check the place as `check_model_place` does, and refuse other reservations of it until the block ends."""
    check_model_place(target)
    place = Path(target).resolve()
    file = next(one for one in place.parents if os.path.lexists(one)) / f".fedkin-{place.name}.lock"
    held = lock(file, "")
    if held is None:
        raise ModelFileError(f"another fit is about to write to {target}: wait for it, or choose another directory")
    try:
        yield check_model_place(target)  # another fit may just have ended
    finally:
        file.unlink(missing_ok=True)
        os.close(held)


def _check_replaceable(target: Path) -> int | None:
    held = sorted(entry.name for entry in target.iterdir())
    if not held:
        return None
    if _MODEL not in held:
        what = f"is not empty and not a Fedkin model (it holds {listed(held)})"
        raise ModelFileError(f"{target} {what}: choose another directory")
    head = _read_head(target, _read_bytes(target / _MODEL))
    foreign = [name for name in held if name not in _FILES]
    if foreign:
        what = f"holds a model, but also {listed(foreign)}, which replacing the model would delete"
        raise ModelFileError(f"{target} {what}: move them away or choose another directory")
    return head.n_sites


def _unwritable(target: Path, error: OSError) -> NoReturn:
    hint = "" if error.errno == errno.ENOSPC else "; choose another directory"  # which says so itself
    raise ModelFileError(f"cannot write the model to {target}: {error.strerror or error}{hint}") from None


def _leftovers(target: Path, kind: str) -> list[Path]:
    """Return the directories that `replacing_directory` left next to the target."""
    return sorted(target.absolute().parent.glob(f".{glob.escape(target.name)}.*.{kind}"))


def _checksum(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


# --- reading ----------------------------------------------------------------------------------------------------


def load(directory: str | os.PathLike[str], *, loss: Loss | None = None) -> FittedModel:
    """Read a model written by `FittedModel.save` (or ``fedkin fit --out``).

    Parameters
    ----------
    directory : path
        Directory of the model. `ModelFileError` is raised if it is not a model, or one of its files is missing, damaged
        or from another version.
    loss : Loss, optional
        The custom loss that the model was fitted with. Code is never stored, so without it such a model predicts the
        linear predictor, with a warning.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import fedkin
    >>> from fedkin.fitting import fit
    >>> fed = fedkin.Federation({"a": ([[0.0], [1.0]], [1.0, 3.0])})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fit(fed).save(pathlib.Path(folder, "model"))
    ...     model = fedkin.load(pathlib.Path(folder, "model"))
    >>> model.sites, model.coef.shape
    (('a',), (1, 1, 1))
    """
    folder = Path(directory)
    if not folder.exists():
        # after a crash between the two renames of a save, the older model is next to it
        older = _leftovers(folder, "old")
        folder = max(older, key=lambda path: path.stat().st_mtime) if older else folder
    about, contents = _read(folder)
    restored = restore_loss(about.loss, loss, folder / _MODEL)
    sites, groups, n_samples, intercept, coef = _read_coefficients(folder / _COEFFICIENTS, contents, about)
    if len(sites) != about.n_sites:
        _damaged(folder / _COEFFICIENTS, f"it has {len(sites)} sites, expected {about.n_sites}")
    if any(not 0 <= u < len(sites) for u, _ in about.notes):
        _damaged(folder / _MODEL, "it has notes on unknown sites")
    boosted = "boosting.json" in contents
    if about.schema is not None and about.schema.names != (about.features[:-1] if boosted else about.features):
        _damaged(folder / _MODEL, "its schema does not match its features")
    if about.classes is not None and len(about.classes) != coef.shape[1] + 1:
        _damaged(folder / _MODEL, f"it has {len(about.classes)} classes, expected {coef.shape[1] + 1}")
    codes = about.site_codes
    if codes is not None and [len(one) in (0, CODES) for one in codes] != [True] * about.n_sites:
        _damaged(folder / _MODEL, "its codes do not match its sites")
    own: dict[str, dict[str, Any]] = {"kin": {"sites": sites, "loss": restored}}
    found = {name: _read_packed(folder, contents, name, own.get(name, {})) for name in _PACKED}
    if found["baseline"] is not None and len(found["baseline"].times) != len(sites):
        _damaged(folder / "baseline.json", f"it has {len(found['baseline'].times)} sites, expected {len(sites)}")
    pairs = () if found["kin"] is None else found["kin"].within or ()
    if not isinstance(pairs, tuple) or not all(isinstance(one, tuple) and len(one) == 2 for one in pairs):
        _damaged(folder / "kin.json", "its districts are not pairs of a site and a district")
    if boosted and found["boosting"].feature.max() >= len(about.features) - 1 + CODES * (codes is not None):
        _damaged(folder / "boosting.npz", "it has columns that the model does not have")
    plain = [(name, f"{name}.json") for name in _OPTIONAL]
    found |= {one: _decoded(folder / name, contents[name], dict[str, Any]) for one, name in plain if name in contents}
    return FittedModel(
        sites=sites,
        coef=coef,
        intercept=intercept,
        groups=groups,
        n_samples=n_samples,
        loss=restored,
        graph=_read_edges(folder / _EDGES, contents, sites),
        fedkin_version=about.fedkin_version,
        notes={sites[u]: lines for u, lines in about.notes},
        site_codes=codes,
        **{name: getattr(about, key) for key, name in _KEYS.items()},
        **found,
    )


def _read(folder: Path) -> tuple[Any, dict[str, bytes]]:
    """Return the content of ``model.json``, and the other files, with their checksums verified."""
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise ModelFileError(f"{folder} {kind}, expected a model directory: check the path")
    path = folder / _MODEL
    if not path.exists():
        right = "Give the directory that `fedkin fit --out` or FittedModel.save wrote"
        raise ModelFileError(f"{folder} is not a Fedkin model: it has no {_MODEL}. {right}")
    content = _read_bytes(path)
    head = _read_head(folder, content)
    if head.format_version != FORMAT_VERSION:
        reads = f"Fedkin {__version__} reads version {FORMAT_VERSION}"
        other = f"{reads}: install the Fedkin that wrote it ({head.fedkin_version})"
        raise ModelFileError(f"{path} has the format version {head.format_version}, but {other}")
    about = _decoded(path, content, _Description)
    contents = {}
    for name in (_COEFFICIENTS, _EDGES, *(name for name in _MORE if name in about.checksums)):
        contents[name] = _read_bytes(folder / name)
        if _checksum(contents[name]) != about.checksums.get(name):
            _damaged(folder / name, f"its content does not match the checksum in {_MODEL}: it was cut off or changed")
    return about, contents


def _read_head(folder: Path, content: bytes) -> _Head:
    path = folder / _MODEL
    plain = _decoded(path, content, Any)
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise ModelFileError(f'{path} is not the description of a Fedkin model: its "format" is not "{FORMAT}"')
    return cast("_Head", _decoded(path, content, _Head))


def _decoded(path: Path, content: bytes, kind: Any) -> Any:
    try:
        # a gap that is not finite is text, as JSON has no such numbers
        return msgspec.json.decode(content, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _damaged(path, f"it cannot be read ({error})")


def _damaged(path: Path, what: str) -> NoReturn:
    raise ModelFileError(f"{path}: {what}; the file is damaged, copy the model again or fit it again") from None


def _read_bytes(path: Path) -> bytes:
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
            raise ModelFileError(f"{path} is not a file of at most {_MOST_BYTES:,} bytes, so it is not read")
        return path.read_bytes()
    except FileNotFoundError:
        again = "copy the whole model directory again or fit the model again"
        raise ModelFileError(f"{path} is missing: {again}") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None


def _read_packed(folder: Path, contents: Mapping[str, bytes], name: str, more: Mapping[str, Any]) -> Any:
    """Return the attribute of the model that two files hold; None if there are none."""
    path, packed = folder / f"{name}.json", contents.get(f"{name}.npz")
    if path.name not in contents:
        return None
    try:
        if packed is None:
            raise ValueError("which is missing")
        with np.load(io.BytesIO(packed), allow_pickle=False) as stored:
            if sum(item.file_size for item in stored.zip.infolist()) > len(packed):
                raise ValueError("its arrays are larger than the file")  # Fedkin never compresses them
            arrays = {key: stored[key] for key in stored.files}
        found = _unpacked(_decoded(path, contents[path.name], dict), "", arrays, more)
    except Exception as error:  # zipfile, zlib and numpy have no common base of errors
        if isinstance(error, ModelFileError):
            raise
        _damaged(path, f"it does not match {name}.npz ({error})")
    return found if isinstance(found, _PACKED[name]) else _damaged(path, "it is not the result of a fit")


# --- tables -----------------------------------------------------------------------------------------------------


def _coefficients_csv(model: FittedModel) -> bytes:
    """Return the coefficients as CSV, with all digits of each number."""
    k = model.coef.shape[1]
    classes = None if k == 1 or model.classes is None else [str(label) for label in model.classes[1:]]
    header = ["site", "site_type", "group", "n_samples", *(["class"] if classes else []), "intercept"]
    rows: list[list[Any]] = [[*header, *map(column_name, model.feature_names)]]
    of_sites = zip(map(_id_cells, model.sites), model.groups.tolist(), model.n_samples.tolist(), strict=True)
    numbers = np.concatenate([model.intercept[:, :, None], model.coef], axis=2).tolist()
    for (cells, *counts), each in zip(of_sites, numbers, strict=True):
        rows += [[*cells, *counts, *([classes[j]] if classes else []), *each[j]] for j in range(k)]
    return _csv(rows)


def _read_coefficients(
    path: Path, contents: Mapping[str, bytes], about: Any
) -> tuple[tuple[Hashable, ...], Index, Index, Array, Array]:
    try:
        header, *rows = csv.reader(io.StringIO(contents[path.name].decode(), newline=""))
        k = max(len(about.classes) - 1, 1) if about.classes is not None else 1
        first = header.index("intercept")
        if header[first + 1 :] != list(map(column_name, about.features)):
            _damaged(path, f"its columns do not match the features in {_MODEL}")
        if not rows or len(rows) % k or any(len(row) != len(header) for row in rows):
            _damaged(path, f"it has {len(rows)} rows, which is not {k} for every site")
        numbers = np.array([[float(cell) for cell in row[first:]] for row in rows])
        numbers, heads = numbers.reshape(-1, k, 1 + len(about.features)), rows[::k]
        groups, n_samples = (np.array([int(row[at]) for row in heads], dtype=np.int64) for at in (2, 3))
        sites = tuple(_READERS[row[1]](row[0]) for row in heads)
        return sites, groups, n_samples, numbers[:, :, 0], numbers[:, :, 1:]
    except (ValueError, LookupError, OverflowError, RecursionError, csv.Error) as error:
        if isinstance(error, ModelFileError):
            raise
        _damaged(path, str(error))


def _edges_csv(model: FittedModel) -> bytes:
    names = [_id_cells(site)[0] for site in model.sites]
    edges = zip(model.graph.edges.tolist(), model.graph.weights.tolist(), strict=True)
    rows = ([names[j], names[i], weight, j, i] for (i, j), weight in edges)
    return _csv([["source", "target", "weight", "source_row", "target_row"], *rows])


def _read_edges(path: Path, contents: Mapping[str, bytes], sites: tuple[Hashable, ...]) -> Graph:
    try:
        rows = list(csv.reader(io.StringIO(contents[path.name].decode(), newline="")))[1:]
        index = np.array([[int(row[3]), int(row[4])] for row in rows], dtype=np.int64).reshape(-1, 2)
        return Graph.from_indices(sites, index, [float(row[2]) for row in rows])
    except (IndexError, ValueError, OverflowError, csv.Error) as error:
        _damaged(path, str(error))


def _id_cells(site: Hashable) -> tuple[str, str]:
    """Return a site id as text, with the type that restores it."""
    if isinstance(site, str):
        return site, "str"
    if isinstance(site, bool | int | float):
        return repr(site), type(site).__name__
    if isinstance(site, date):
        return site.isoformat(), "datetime" if isinstance(site, datetime) else "date"
    if isinstance(site, tuple):
        with suppress(TypeError, ValueError):
            text = json.dumps(site, ensure_ascii=False)
            if _as_tuple(json.loads(text)) == site:
                return text, "tuple"
    raise ModelFileError(
        f"site id {site!r} of type {type(site).__name__} cannot be written to a file: use text, numbers, dates "
        "or tuples of text and numbers as ids"
    )


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


_READERS: dict[str, Callable[[str], Hashable]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": {"True": True, "False": False}.__getitem__,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "tuple": lambda text: _as_tuple(json.loads(text)),
}


def _csv(rows: Iterable[Sequence[object]]) -> bytes:
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC).writerows(rows)
    return stream.getvalue().encode()
