"""Where sites are, for a map: coordinates from a file, or the states of the USA by name or code, as tiles."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkin._base import listed
from fedkin.data import read_columns
from fedkin.errors import DataError
from fedkin.report.arrays import number

#: Code, column and row of each state in a grid of tiles.
_TILES = """
AK 0 0, ME 10 0, VT 9 1, NH 10 1, WA 0 2, ID 1 2, MT 2 2, ND 3 2, MN 4 2, IL 5 2, WI 6 2, MI 7 2, NY 8 2, RI 9 2,
MA 10 2, OR 0 3, NV 1 3, WY 2 3, SD 3 3, IA 4 3, IN 5 3, OH 6 3, PA 7 3, NJ 8 3, CT 9 3, CA 0 4, UT 1 4, CO 2 4,
NE 3 4, MO 4 4, KY 5 4, WV 6 4, VA 7 4, MD 8 4, DE 9 4, AZ 1 5, NM 2 5, KS 3 5, AR 4 5, TN 5 5, NC 6 5, SC 7 5,
DC 8 5, OK 3 6, LA 4 6, MS 5 6, AL 6 6, GA 7 6, HI 0 7, TX 3 7, FL 8 7
"""
TILES = {code: (int(x), int(y)) for code, x, y in (entry.split() for entry in _TILES.replace("\n", " ").split(","))}
_NAMES = (
    "AK Alaska,AL Alabama,AR Arkansas,AZ Arizona,CA California,CO Colorado,CT Connecticut,DC District of Columbia,"
    "DE Delaware,FL Florida,GA Georgia,HI Hawaii,IA Iowa,ID Idaho,IL Illinois,IN Indiana,KS Kansas,KY Kentucky,"
    "LA Louisiana,MA Massachusetts,MD Maryland,ME Maine,MI Michigan,MN Minnesota,MO Missouri,MS Mississippi,"
    "MT Montana,NC North Carolina,ND North Dakota,NE Nebraska,NH New Hampshire,NJ New Jersey,NM New Mexico,"
    "NV Nevada,NY New York,OH Ohio,OK Oklahoma,OR Oregon,PA Pennsylvania,RI Rhode Island,SC South Carolina,"
    "SD South Dakota,TN Tennessee,TX Texas,UT Utah,VA Virginia,VT Vermont,WA Washington,WI Wisconsin,"
    "WV West Virginia,WY Wyoming"
)
_CODES = {name.casefold(): code for code, name in (entry.split(" ", 1) for entry in _NAMES.split(","))}
_HEADS = ({"x", "lon", "longitude", "easting"}, {"y", "lat", "latitude", "northing"})


def state_tiles(sites: Sequence[Hashable]) -> dict[str, Any] | None:
    """A map of tiles where all sites are states of the USA, by code or by name; None otherwise.

    Examples
    --------
    >>> state_tiles(["Ohio", "TX", "WY"])["codes"], state_tiles(["Ohio", "Paris", "WY"])
    (['OH', 'TX', 'WY'], None)
    """
    codes = [_code(site) for site in sites]
    if len(codes) < 3 or None in codes or len(set(codes)) < len(codes):
        return None
    return {"kind": "tiles", "codes": codes, "tiles": [[code, x, y] for code, (x, y) in TILES.items()]}


def _code(site: Hashable) -> str | None:
    words = str(site).strip().replace("_", " ")
    return words.upper() if words.upper() in TILES else _CODES.get(words.casefold())


def read_coordinates(path: str | os.PathLike[str], sites: Sequence[Hashable]) -> dict[str, Any]:
    """The map from a CSV file with a column of sites and two of coordinates: ``x,y`` or ``lon,lat``.

    Raises `DataError` for columns that are missing, and for sites without a line.
    """
    columns = {str(name): list(column) for name, column in read_columns(Path(path)).items()}
    across, up = (next((name for name in columns if name.casefold() in heads), None) for heads in _HEADS)
    key = next((name for name in columns if name.casefold() in ("site", "device", "name", "id")), None)
    if across is None or up is None or key is None:
        raise DataError(
            f"{path} has the columns {listed(list(columns))}, expected site and x, y (or lon, lat): rename its columns"
        )
    known: Mapping[str, tuple[Any, Any]] = {
        str(site): (x, y) for site, x, y in zip(columns[key], columns[across], columns[up], strict=True)
    }
    missing = [str(site) for site in sites if str(site) not in known]
    if missing:
        raise DataError(f"{path} has no line for {listed(missing)}: add coordinates for every site of the model")
    try:
        points = [(float(x), float(y)) for x, y in (known[str(site)] for site in sites)]
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: a coordinate is no number: {error}") from None
    globe = across.casefold().startswith("lon")
    return {
        "kind": "points",
        "globe": globe,
        "x": [number(x) for x, _ in points],
        "y": [number(y) for _, y in points],
    }
