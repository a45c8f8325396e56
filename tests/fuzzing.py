"""Damaged and hostile bytes for every reader: python tests/fuzzing.py 1000000 (make fuzz).

Half of the inputs are files with changed bytes. The other half have changed *content* in a valid envelope: the
checksums and signatures fit, as a hostile site or organiser would write them. A reader may accept an input or raise a
`FedkinError`. Everything else is a failure: another exception, more than `SECONDS`, or more memory than `MEGABYTES`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from pyarrow import csv, parquet

import fedkin
import heart
from builders import federation
from fedkin.admm import Store
from fedkin.core import Query
from fedkin.data import Rows, read_columns, row_places
from fedkin.errors import FedkinError
from fedkin.federate import Contract, Site, messages, received, sharing
from fedkin.federate.inbox import HEADER_BYTES, Expected, Kind, decode, encode
from fedkin.federate.ledger import read_ledger
from fedkin.federate.trust import Pair
from fedkin.fitting import FitOptions, fit, store
from fedkin.graph import Graph
from flips import flipped

MEGABYTES = 500  #: of the whole process
SECONDS = 10.0  #: for one input
Reader = Callable[[random.Random], object]

_DEEP, _VAST, _NAN = "@deep@", "@vast@", "@nan@"  # what Python's json does not write
_RAW = {_DEEP: "[" * 50_000 + "]" * 50_000, _VAST: "1e999", _NAN: "NaN"}
_NUMBERS = (0, 1, -1, 2, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400)
_FLOATS = (0.5, -0.0, 1e-308, 5e-324, 1e100, 1e200, 1.7e308, -1.7e308)
_TEXTS = ("", "x", "north", "../x", "\x00", "\ud800", "nan", "-inf", "9" * 5000, "a" * 100_000, _DEEP, _VAST, _NAN)
_OTHERS = (None, True, False, [], {}, [[]], [{}], {"": None}, [0] * 1000, ["a"] * 1000, [1e308] * 6)
_VALUES = tuple(json.dumps(value) for value in (*_NUMBERS, *_FLOATS, *_TEXTS, *_OTHERS))


# --- changes ----------------------------------------------------------------------------------------------------------


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """The content with one to four changes of bytes."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at, other = rng.randrange(len(found) + 1), rng.randrange(len(found) + 1)
        match rng.randrange(6):
            case 0 if found:
                found[at % len(found)] ^= 1 << rng.randrange(8)
            case 1:
                del found[min(at, other) : max(at, other)]
            case 2:
                found[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                found[at:at] = found[min(at, other) : max(at, other)][:10_000]
            case 4:
                found[at : at + 1] = rng.choice(
                    (b"9", b"-", b"e", b'"', b"[", b"{", b"]", b"}", b",", b"\x00", b"\xff")
                )
            case _:
                found[at:at] = rng.choice(_VALUES).encode()
    return bytes(found)


def changed_value(value: Any, rng: random.Random) -> Any:
    """Plain values with one to three of them changed, at any depth; the argument stays as it is."""
    found = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        found = _changed_once(found, rng)
    return found


def _changed_once(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(keys)
        match rng.randrange(12):
            case 0:
                del value[key]
            case 1 if isinstance(value, list):
                value.insert(key, _other(rng))
            case 1:
                value[rng.choice((*_TEXTS, f"{key}x"))] = _other(rng)
            case 2:
                value[key] = json.loads(json.dumps(value[rng.choice(keys)]))
            case _:
                value[key] = _changed_once(value[key], rng)
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15 and rng.random() < 0.5:
        return rng.choice((-value, value + 1, value * 2, value * 1e10, value * 1e-10, float(value), str(value)))
    if isinstance(value, str) and value and rng.random() < 0.5:
        return changed_bytes(value.encode(errors="ignore"), rng).decode(errors=rng.choice(("ignore", "replace")))
    return _other(rng)


def _other(rng: random.Random) -> Any:
    return json.loads(rng.choice(_VALUES))


def written(value: Any) -> bytes:
    """JSON, with what Python's json would not write."""
    text = json.dumps(value)
    for mark, raw in _RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text.encode()


def sealed(kind: str, body: Any, signer: Pair) -> bytes:
    """A signed file of any content; the signature fits wherever there can be one."""
    content = {"body": body, "format": f"fedkin-{kind}-1", "signer": signer.name}
    if signer.vouched is not None:
        content["certificate"] = signer.vouched.decode()
    text = written(content)
    try:
        signature = signer.sign(messages.canonical(msgspec.json.decode(text))).hex()
    except Exception:  # no reader gets as far as the signature
        signature = "00" * 64
    return text[:-1] + f', "signature": "{signature}"}}'.encode()


# --- readers ----------------------------------------------------------------------------------------------------------


def readers(folder: Path) -> dict[str, Reader]:
    """All readers, by name; each reads one input, made with a random generator, or raises."""
    found: dict[str, Reader] = {"frame": _read_frame, "contract": _read_contract}
    for seed, loss in enumerate(("linear", "huber")):  # a table that was shared has one contract
        made = _federation_readers(folder / loss, heart.CONTRACT.replace('"linear"', f'"{loss}"'), seed)
        found |= {f"{name} {loss}": reader for name, reader in made.items()}
    for name, options in {"kin": {}, "fused": {"method": "fused", "lam": 0.1}}.items():
        found[f"model {name}"] = _model_reader(folder / name, options)
    if importlib.util.find_spec("lightgbm") is not None:
        found["model boost"] = _model_reader(folder / "boost", {"boost": True}, n=40)
    return found | _table_readers(folder)


def _read_frame(rng: random.Random) -> object:
    numbers = np.array([rng.choice((*_FLOATS, float("nan"), float("inf"))) for _ in range(3)])
    kind, wire = rng.choice(list(Kind)), rng.choice(("float64", "float32"))
    with np.errstate(all="ignore"):
        frame = encode(b"run-0001", kind, 1, rng.randrange(9), numbers, wire)
    frame = flipped(frame, rng.randrange(8 * len(frame))) if rng.random() < 0.5 else changed_bytes(frame, rng)
    if rng.random() < 0.5 and len(frame) >= HEADER_BYTES:  # the checksum fits
        head, rest = frame[: HEADER_BYTES - 4], frame[HEADER_BYTES:]
        frame = head + struct.pack("<I", zlib.crc32(rest, zlib.crc32(head))) + rest
    bound_kind = rng.choice(("length", "max", "sum"))
    return decode(frame, Expected(b"run-0001", kind, 1, 3, 1, 5, wire, rng.choice((None, 10.0)), bound_kind))


def _read_contract(rng: random.Random) -> object:
    contract = Contract.from_toml(heart.CONTRACT)
    match rng.randrange(3):
        case 0:
            return Contract.from_toml(changed_bytes(heart.CONTRACT.encode(), rng).decode(errors="replace"))
        case 1:
            return Contract.from_bytes(changed_bytes(contract.to_bytes(), rng))
        case _:
            return Contract.from_bytes(written(changed_value(msgspec.json.decode(contract.to_bytes()), rng)))


def _table_readers(folder: Path) -> dict[str, Reader]:
    """Files of rows, edges and states, which are a user's own, but may come from others or a broken disk."""
    contract, table = Contract.from_toml(heart.CONTRACT), heart.write_table(folder / "table.csv")
    parquet.write_table(csv.read_csv(table), folder / "table.parquet")
    rows = contract.prepare(read_columns(table))
    rows.save(folder / "rows.npz")
    store = Store(folder / "state.db", "0" * 16, sent=1)
    store.save(1, {"theta": np.zeros((1, 4))}, {"site": "north"}, durable=True)
    store.close()
    shutil.copy(folder / "linear" / "north" / "ledger.jsonl", folder)

    def restored(path: Path) -> object:
        kept = Store(path, "0" * 16, sent=1)
        try:
            return kept.load(), kept.sent()
        finally:
            kept.close()

    def checked(path: Path) -> object:
        columns = read_columns(path)
        return contract.check(columns, at=row_places(path, columns)) or contract.prepare(columns)

    sources: dict[str, Callable[[Path], object]] = {
        "table.csv": checked,
        "table.parquet": checked,
        "rows.npz": Rows.load,
        "ring.csv": Graph.read,
        "state.db": restored,
        "ledger.jsonl": read_ledger,
    }
    heart.write_graph(folder / "ring.csv")
    (folder / "tables").mkdir()

    def reader(name: str, read: Callable[[Path], object]) -> Reader:
        content, target = (folder / name).read_bytes(), folder / "tables" / name
        target.write_bytes(content)
        read(target)  # what is not changed can be read

        def one(rng: random.Random) -> object:
            target.write_bytes(changed_bytes(content, rng))
            return read(target)

        return one

    return {name: reader(name, read) for name, read in sources.items()}


def _federation_readers(folder: Path, contract: str, seed: int) -> dict[str, Reader]:
    """What organiser and sites read from each other."""
    made = heart.organiser(folder, contract)
    place = heart.admitted(made, "north", seed=seed)
    site, authority = Site.read(place), made.signing()
    summary = sharing.share(place).path
    theta = np.array(json.loads(summary.read_bytes())["body"]["summary"]["at"])
    (query,) = made.write_queries([Query("north", 2, theta, np.zeros_like(theta))], {"a": 1})
    answer = sharing.answer(place, query).path
    made.order(lam=0.1)
    model = folder / "model-of-north"
    fit(federation("linear", (20, 20), 2), options=FitOptions(seed=0)).save(model)
    packed = messages.ModelFile.pack(made.charter.run, "north", made.contract.digest, model)
    packed.write(folder / "north.model", authority)
    made.expel("west")
    given, own, request = site.invite, site.pair(), site.request
    scratch = folder / "scratch"

    def organisers(path: Path) -> object:
        read, certificate = made.charter.read(path, messages.SummaryFile)
        made.keys().check_signer(path, read.site, certificate, made.out())
        return received._summary_in(path, read, made.contract)

    def answered(path: Path) -> object:
        return sharing.answer(place, path, dry_run=True)

    def unpacked(path: Path) -> object:
        given.read(path, messages.ModelFile, site="north")[0].unpack(scratch / "model")
        return fedkin.load(scratch / "model")

    def invited(path: Path) -> object:
        return messages.read_invite(path).terms

    def chartered(path: Path) -> object:
        return messages.read_charter(path).terms

    def form(kind: type[messages.Message]) -> Callable[[Path], object]:
        return lambda path: given.read(path, kind)

    asking = Pair(given.read(request, messages.Request)[0].request.encode(), own.key)
    sources: dict[str, tuple[Path, Pair, Callable[[Path], object]]] = {
        "summary": (summary, own, organisers),
        "answer": (answer, own, organisers),
        "ask": (query, authority, answered),
        "model": (folder / "north.model", authority, unpacked),
        "invite": (heart.invite_of(made, "north"), authority, invited),
        "charter": (made.directory / messages.FEDERATION, authority, chartered),
        "request": (request, asking, lambda path: made.charter.read(path, messages.Request)),
        "admit": (place / messages.ADMIT, authority, form(messages.Admit)),
        "notice": (made.directory / messages.NOTICES / "west.notice", authority, form(messages.Notice)),
        "order": (made.directory / messages.ORDER, authority, form(messages.Order)),
        "keys": (made.directory / messages.KEYS, authority, form(messages.KeyList)),
    }
    scratch.mkdir()

    def reader(path: Path, signer: Pair, read: Callable[[Path], object]) -> Reader:
        text = path.read_bytes()
        whole, target = json.loads(text), scratch / path.name
        kind = whole["format"].split("-")[1]
        target.write_bytes(text)
        target.chmod(0o600)
        read(target)  # what is not changed can be read

        def one(rng: random.Random) -> object:
            match rng.randrange(4):
                case 0:
                    content = changed_bytes(text, rng)
                case 1:
                    content = written(changed_value(whole, rng))
                case _:
                    content = sealed(kind, changed_value(whole["body"], rng), signer)
            target.write_bytes(content)
            return read(target)

        return one

    return {name: reader(*source) for name, source in sources.items()}


def _model_reader(place: Path, options: dict[str, Any], n: int = 20) -> Reader:
    """Directories of models, whose checksums fit in most cases, and predictions by those that are read."""
    rows = federation("linear", (n, n, n), 2)
    fit(rows, options=FitOptions(**options)).save(place)
    files = {path.name: path.read_bytes() for path in sorted(place.iterdir())}

    def one(rng: random.Random) -> object:
        contents = dict(files)
        name = rng.choice(list(contents))
        if name.endswith(".json") and rng.random() < 0.7:
            contents[name] = written(changed_value(json.loads(contents[name]), rng))
        else:
            contents[name] = changed_bytes(contents[name], rng)
        for file, content in contents.items():
            (place / file).write_bytes(content)
        if name != "model.json" and rng.random() < 0.9:
            write_checksum(place, name)
        return store.load(place).predict(rows.X[:2], [rows.sites[0]] * 2)

    return one


def write_checksum(model: Path, name: str) -> None:
    """Make the checksum of a file in a model's directory fit."""
    about = json.loads((model / "model.json").read_bytes())
    about["checksums"][name] = "sha256:" + hashlib.sha256((model / name).read_bytes()).hexdigest()
    (model / "model.json").write_text(json.dumps(about))


# --- the run ----------------------------------------------------------------------------------------------------------


def fuzz(inputs: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Read so many inputs; returns how many each reader accepted or refused, and the failures with their tracebacks."""
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}

    def too_long(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS:g} seconds")

    before = signal.signal(signal.SIGALRM, too_long)
    try:
        found = list(readers(folder).items())
        for k in range(inputs):
            name, read = found[k % len(found)]
            rng = random.Random(f"{seed} {k}")
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    read(rng)
                counts[f"{name}: accepted"] += 1
            except FedkinError:
                counts[f"{name}: refused"] += 1
            except Exception as error:
                counts[f"{name}: failed"] += 1
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{name}: {type(error).__name__} in {last.filename}:{last.lineno}"
                told = "".join(traceback.format_exception(error)[-12:])
                failures.setdefault(where, f"{where}, input {k} of seed {seed}\n{told}")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    return counts, list(failures.values())


def peak_megabytes() -> float:
    """The most memory that this process had; on Linux, ru_maxrss begins with that of the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 1024
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def main(inputs: int = 10_000, seed: int = 0) -> int:
    """Print what happened; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDKIN_LEDGERS"] = f"{folder}/ledgers"
        counts, failures = fuzz(inputs, seed, Path(folder))
    megabytes = peak_megabytes()
    lines = [f"{name}: {number:,}" for name, number in sorted(counts.items())]
    verdict = f"{inputs:,} inputs, {len(failures)} kinds of failures, {megabytes:.0f} MB"
    sys.stdout.write("\n".join([*failures, *lines, verdict]) + "\n")
    return int(bool(failures) or megabytes > MEGABYTES)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
