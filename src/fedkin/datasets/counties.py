"""Read counties, votes and the map of section 6 from a directory of the user; no data come with Fedkin."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import Array, write_file
from fedkin.data import Federation, read_cells
from fedkin.errors import DataError

#: The rings of a shape: closed lines of points, shape ``(k, 2)`` each.
Rings = tuple[Array, ...]


def read_shapes(path: Path) -> dict[str, Rings]:
    """Read the polygons of the only object of a TopoJSON file by the ``id`` of each shape, outer rings and holes alike.

    Arcs are lines shared by neighbours, stored as differences of whole numbers; a ring is a chain of arc numbers, where
    ``~i`` means arc i backwards, and consecutive arcs share the point at which they meet.
    """
    try:
        topology = json.loads(path.read_text(encoding="utf-8"))
        objects = topology["objects"]
        if len(objects) != 1:
            raise DataError(f"{path} has the objects {', '.join(objects)}; one is expected")
        arcs = [np.asarray(arc, dtype=np.float64)[:, :2] for arc in topology["arcs"]]
        if (transform := topology.get("transform")) is not None:
            scale, shift = np.asarray(transform["scale"]), np.asarray(transform["translate"])
            arcs = [np.cumsum(arc, axis=0) * scale + shift for arc in arcs]
        (only,) = objects.values()
        return {str(shape["id"]): _rings(shape, arcs) for shape in only["geometries"]}
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is not a TopoJSON file of polygons with ids ({problem})") from error


def _rings(shape: Mapping[str, Any], arcs: list[Array]) -> Rings:
    if shape["type"] not in ("Polygon", "MultiPolygon"):
        raise DataError(f"shape {shape.get('id')!r} is a {shape['type']}, a Polygon or MultiPolygon is expected")
    rings = []
    for chain in shape["arcs"] if shape["type"] == "Polygon" else itertools.chain.from_iterable(shape["arcs"]):
        parts = [arcs[number] if number >= 0 else arcs[~number][::-1] for number in chain]
        rings.append(np.concatenate([parts[0], *(part[1:] for part in parts[1:])]))
    return tuple(rings)


RESULTS = "2020_US_County_Level_Presidential_Results.csv"
EARLIER = "US_County_Level_Presidential_Results_08-16.csv"
FACTS = "county_facts.csv"
MAP = "states-albers-500k.topojson"
OUTLINES = "outlines.json"

#: Where each file comes from, for the message that says it is missing.
SOURCES: Mapping[str, str] = {
    RESULTS: "github.com/tonmcg/US_County_Level_Election_Results_08-20, at its root",
    EARLIER: "github.com/tonmcg/US_County_Level_Election_Results_08-20, at its root",
    FACTS: "kaggle.com/benhamner/2016-us-election (copies on GitHub, for example bcdunbar/datasets)",
    MAP: "github.com/tonmcg/US_County_Level_Election_Results_08-20, cartography/2020/",
}

_COLUMNS: Mapping[str, tuple[str, ...]] = {
    RESULTS: ("county_fips", "votes_gop", "votes_dem"),
    EARLIER: ("fips_code", "dem_2008", "gop_2008", "dem_2012", "gop_2012"),
    FACTS: ("fips", "state_abbreviation"),
}

#: What the complete files give: states with more than 50 counties, counties in them; rows of the earlier elections.
COMPLETE = (30, 2710)
EARLIER_ROWS = 3112

#: Shannon County became Oglala Lakota; county_facts and the 2008-16 file use the old number.
RECODED = {46113: 46102}
ALASKA = 2

# Not in the files: the states that the Democratic ticket won; all others went to the Republican one.
_DEMOCRATIC = {
    2000: "CA CT DE DC HI IL IA ME MD MA MI MN NJ NM NY OR PA RI VT WA WI",
    2004: "CA CT DE DC HI IL ME MD MA MI MN NH NJ NY OR PA RI VT WA WI",
}


@dataclass(frozen=True, eq=False)
class Election:
    """What section 6 needs: a site per state (two letters), a row per county, y = 1 where the Democratic ticket
    out-polled the Republican one in 2020; the lean of each state, "red" or "blue" when one party won every election of
    2000-2012, else "swing"; and the outlines of all states.
    """

    federation: Federation
    lean: dict[str, str]
    shapes: dict[str, Rings]


def load_election(folder: Path, more_than: int = 50) -> Election:
    """Read the four files of `SOURCES`; states with more than ``more_than`` counties become sites.

    Alaska reports districts that are no counties, and is left out.
    """
    check_files(folder)
    facts, names, state_of_number = _facts(folder / FACTS)
    votes = _votes(folder / RESULTS)
    joined = sorted(fips for fips in facts if fips in votes and fips // 1000 != ALASKA)
    by_state: dict[str, list[int]] = defaultdict(list)
    for fips in joined:
        by_state[state_of_number[fips // 1000]].append(fips)
    states = sorted(state for state, counties in by_state.items() if len(counties) > more_than)
    if not states:
        raise DataError(f"no state in {folder} has more than {more_than} counties with facts and votes")
    rows = [fips for state in states for fips in by_state[state]]
    X = np.array([facts[fips] for fips in rows])
    y = np.array([float(votes[fips]) for fips in rows])
    federation = Federation.from_arrays(X, y, [state_of_number[fips // 1000] for fips in rows], feature_names=names)
    return Election(federation, _leans(folder / EARLIER, state_of_number), _shapes(folder / MAP, state_of_number))


def write_outlines(data: Path, folder: Path) -> None:
    """Write the states' outlines in whole metres, so that the map can be drawn again without the data."""
    check_files(data)
    _, _, state_of_number = _facts(data / FACTS)
    shapes = _shapes(data / MAP, state_of_number)
    whole = {state: [np.rint(ring).astype(int).tolist() for ring in rings] for state, rings in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / OUTLINES, json.dumps(whole, separators=(",", ":")))


def read_outlines(folder: Path) -> dict[str, Rings]:
    """Read the outlines that `write_outlines` wrote."""
    path = folder / OUTLINES
    if not path.is_file():
        raise DataError(f"there is no {path}; run the election study again with --data DIR to draw its map")
    shapes = json.loads(path.read_text(encoding="utf-8"))
    return {state: tuple(np.asarray(ring, dtype=np.float64) for ring in rings) for state, rings in shapes.items()}


def check_files(folder: Path) -> None:
    """Raise `DataError` unless the directory has every file."""
    if not Path(folder).is_dir():
        raise DataError(f"there is no directory {folder}; give --data the directory that holds {', '.join(SOURCES)}")
    missing = [name for name in SOURCES if not (Path(folder) / name).is_file()]
    if missing:
        lines = "\n".join(f"  {name}: from {SOURCES[name]}" for name in missing)
        raise DataError(f"{folder} lacks {len(missing)} of the {len(SOURCES)} files of the election study:\n{lines}")


def check_data(folder: Path, more_than: int = 50, *, allow_incomplete: bool = False) -> None:
    """Raise `DataError` unless the files can be read and are as complete as those that the study was made for.

    With ``allow_incomplete`` fewer states or counties will do.
    """
    found = load_election(folder, more_than)
    without = [state for state in found.federation.sites if state not in found.shapes]
    if without:
        raise DataError(
            f"{folder / MAP} has no outline of {', '.join(map(str, without))}; take it again from {SOURCES[MAP]}"
        )
    if allow_incomplete:
        return
    remedy = "take the files again, or put allow_incomplete = true under [options] of a custom study"
    sizes = found.federation.n_samples if more_than <= 50 else load_election(folder, 50).federation.n_samples
    sizes = sizes[sizes > 50]
    states, counties = COMPLETE
    if sizes.size < states or sizes.sum() < counties:
        raise DataError(
            f"{folder}: {sizes.size} states with more than 50 counties that have facts and votes, "
            f"{sizes.sum()} counties in them; the complete files give {states} and {counties}, so "
            f"{FACTS} or {RESULTS} is cut off: {remedy}"
        )
    earlier = len(_read(folder / EARLIER))
    if earlier < EARLIER_ROWS:
        raise DataError(f"{folder / EARLIER} has {earlier} rows; the complete file has {EARLIER_ROWS}: {remedy}")


def fingerprint(folder: Path) -> str:
    """Return a digest of the files, so that rows computed from other data are not reused."""
    check_files(folder)
    return hashlib.sha256(b"".join((Path(folder) / name).read_bytes() for name in SOURCES)).hexdigest()


def _read(path: Path) -> list[dict[str, str]]:
    try:
        header, columns = read_cells(path)
        missing = [name for name in _COLUMNS[path.name] if name not in header]
        if missing:
            raise DataError(f"{path} has no column {missing[0]!r}")
        if not columns[0]:
            raise DataError(f"{path} has no rows")
    except DataError as error:
        raise DataError(f"{error}; or it was cut off or edited: take it again from {SOURCES[path.name]}") from None
    return [dict(zip(header, row, strict=True)) for row in zip(*columns, strict=True)]


def _number(text: str, path: Path, column: str, line: int) -> float:
    try:
        return float(text)
    except ValueError:
        raise DataError(f"{path}, line {line}: column {column!r} holds {text!r}, a number is expected") from None


def _facts(path: Path) -> tuple[dict[int, Array], Sequence[str], dict[int, str]]:
    """Predictors by county, their names, and the states' letters by their number."""
    rows = _read(path)
    names = [name for name in rows[0] if name not in ("fips", "area_name", "state_abbreviation")]
    facts, state_of_number = {}, {}
    for line, row in enumerate(rows, start=2):
        if not row["state_abbreviation"]:
            continue  # a sum, over the country or a state
        fips = int(_number(row["fips"], path, "fips", line))
        fips = RECODED.get(fips, fips)
        facts[fips] = np.array([_number(row[name], path, name, line) for name in names])
        state_of_number[fips // 1000] = row["state_abbreviation"]
    return facts, names, state_of_number


def _votes(path: Path) -> dict[int, bool]:
    """Whether the Democratic ticket was ahead, by county."""
    ahead = {}
    for line, row in enumerate(_read(path), start=2):
        fips = int(_number(row["county_fips"], path, "county_fips", line))
        democratic, republican = (_number(row[name], path, name, line) for name in ("votes_dem", "votes_gop"))
        ahead[fips] = democratic > republican
    return ahead


def _leans(path: Path, state_of_number: Mapping[int, str]) -> dict[str, str]:
    margin: dict[int, dict[str, float]] = {2008: defaultdict(float), 2012: defaultdict(float)}
    for line, row in enumerate(_read(path), start=2):
        number = int(_number(row["fips_code"], path, "fips_code", line)) // 1000
        state = state_of_number.get(number)
        if state is None:
            continue
        for year, sums in margin.items():
            for column, sign in ((f"dem_{year}", 1), (f"gop_{year}", -1)):
                sums[state] += sign * _number(row[column], path, column, line)
    leans = {}
    for state in set(state_of_number.values()):
        won = [state in _DEMOCRATIC[year].split() for year in (2000, 2004)]
        won += [sums[state] > 0 for sums in margin.values()]  # Alaska is not in the file and counts as Republican
        leans[state] = "blue" if all(won) else "red" if not any(won) else "swing"
    return leans


def _shapes(path: Path, state_of_number: Mapping[int, str]) -> dict[str, Rings]:
    try:
        shapes = read_shapes(path)
    except DataError as error:
        raise DataError(f"{error}; take it again from {SOURCES[path.name]}") from error
    return {state_of_number[int(number)]: rings for number, rings in shapes.items() if int(number) in state_of_number}
