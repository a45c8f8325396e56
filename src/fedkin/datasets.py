"""Read public tables with a column of sites, split as papers split them; generate tables like them, and simulations.

No data come with Fedkin. Put the files into one folder, a subfolder for each table as `SOURCES` has it, and pass the
folder, or name it in the environment variable ``FEDKIN_DATA``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import AnyArray, Array, Mask, listed, write_file
from fedkin.data import Federation, RawColumns, parsed_numbers, read_columns
from fedkin.errors import DataError, ParameterError, TableWarning
from fedkin.graph import Graph

__all__ = ["Design", "PublicTable", "load_table", "look_alike", "paper_design", "table_names"]

#: The folder that holds the files; None for the one that the environment variable names.
Folder = str | os.PathLike[str] | None
VARIABLE = "FEDKIN_DATA"
RESULTS = "2020_US_County_Level_Presidential_Results.csv"
EARLIER = "US_County_Level_Presidential_Results_08-16.csv"
FACTS = "county_facts.csv"
MAP = "states-albers-500k.topojson"
OUTLINES = "outlines.json"

#: Where each file comes from, for the message that says it is missing.
ELECTION: Mapping[str, str] = {
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

#: {file below the folder: where it comes from}.
SOURCES: Mapping[str, str] = {
    "school/school.csv": "exam scores in 139 schools (Goldstein 1991): data/school.mat of github.com/jiayuzhou/MALSAR",
    "school/school_splits.csv": "the ten splits of github.com/tjanez/PyMTL, 1 for training rows",
    "landmine/landmine.csv": (
        "29 fields (Xue et al. 2007): LandmineData.mat of "
        "github.com/daizhongxiang/Federated_Bayesian_Optimization, with the columns task, label, x1 to x9"
    ),
    "computer_survey/computer_survey.csv": (
        "190 people (Lenk et al. 1996): data/computer_survey of github.com/tjanez/PyMTL"
    ),
    "melanoma/melanoma.csv": "354 counties (Langford et al. 1998): csv/mlmRev/Mmmec.csv of Rdatasets",
    "sacramento/sacramento_real_estate.csv": (
        "985 sales (Hallac et al. 2015): Data/Sacramentorealestatetransactions.csv of "
        "github.com/davidhallac/NetworkLasso"
    ),
    **{f"election/{name}": source for name, source in ELECTION.items()},
}


@dataclass(frozen=True, eq=False)
class PublicTable:
    """A table of sites.

    Attributes
    ----------
    name : str
    federation : Federation
    loss : str
        The loss that suits the target.
    test_size : float
        Share of each site's rows that a split holds out.
    splits : bool array (K, N) or None
        Held-out rows of the splits that others have published, in the order of the federation's rows.
    generated : bool
        Whether it is a look-alike.
    """

    name: str
    federation: Federation
    loss: str
    test_size: float
    splits: Mask | None = None
    generated: bool = False

    def held_out(self, number: int) -> Mask:
        """Return which rows ``(N,)`` split ``number`` holds out: a published one while there are, else by seed."""
        if self.splits is not None and number < len(self.splits):
            return np.asarray(self.splits[number])
        test = self.federation.split(self.test_size, number)[1]
        return np.isin(self.federation.row_order, test.row_order)


def _school(folder: Folder) -> PublicTable:
    """Load exam scores of 15,362 pupils in 139 schools; the ten splits of multi-task papers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)  # of each set of 0/1 columns one follows from the others
        federation = Federation.read(_file(folder, "school/school.csv"), site="school", target="exam_score")
    columns = read_columns(_file(folder, "school/school_splits.csv"))
    training = np.column_stack([np.asarray(column, dtype=np.float64) for column in columns.values()])
    if len(training) != len(federation.X):
        raise DataError(
            f"school_splits.csv has {len(training)} rows, but school.csv {len(federation.X)}: take both again"
        )
    return PublicTable("school", federation, "linear", 0.25, (training[federation.row_order] == 0).T)


def _landmine(folder: Folder) -> PublicTable:
    """Load landmines in 29 fields, 14,820 radar images with nine features; half of each field is held out."""
    federation = Federation.read(_file(folder, "landmine/landmine.csv"), site="task", target="label")
    return PublicTable("landmine", federation, "logistic", 0.5)


def _computer_survey(folder: Folder) -> PublicTable:
    """Load how 190 people rate 20 computers each by 13 attributes; four ratings of each are held out."""
    columns = read_columns(_file(folder, "computer_survey/computer_survey.csv"))
    features = [name for name in columns if name not in ("person", "profile", "part", "like")]
    federation = Federation.from_frame(columns, site="person", target="like", features=features)
    return PublicTable("computer survey", federation, "linear", 0.2)


def _melanoma(folder: Folder) -> PublicTable:
    """Load deaths by melanoma in 354 counties of 9 nations, with log expected deaths as the offset; 30% held out."""
    columns = dict(read_columns(_file(folder, "melanoma/melanoma.csv")))
    columns["log_expected"] = np.log(columns["expected"])
    federation = Federation.from_frame(columns, site="nation", target="deaths", features=["uvb"], offset="log_expected")
    return PublicTable("melanoma", federation, "poisson", 0.3)


def _sacramento(folder: Folder) -> PublicTable:
    """Load log prices of 813 houses in 66 zip codes by beds, baths and area; a third is held out.

    Sales below 10,000 dollars, and houses without area or beds, are left out.
    """
    columns = read_columns(_file(folder, "sacramento/sacramento_real_estate.csv"))
    sold = (columns["sq__ft"] > 0) & (columns["beds"] > 0) & (columns["price"] > 10_000)
    kept: dict[str, AnyArray] = {name: columns[name][sold] for name in ("zip", "beds", "baths", "sq__ft")}
    kept["log_price"] = np.log(columns["price"][sold])
    federation = Federation.from_frame(kept, site="zip", target="log_price")
    return PublicTable("sacramento", federation, "linear", 1 / 3)


def _election(folder: Folder) -> PublicTable:
    """Load who won the counties of 30 states in 2020, by 51 facts about them; a third of each state is held out."""
    place = _file(folder, f"election/{RESULTS}").parent
    return PublicTable("election", load_election(place).federation, "logistic", 1 / 3)


_LOADERS: Mapping[str, Callable[[Folder], PublicTable]] = {
    "school": _school,
    "landmine": _landmine,
    "sacramento": _sacramento,
    "computer survey": _computer_survey,
    "melanoma": _melanoma,
    "election": _election,
}


def table_names() -> tuple[str, ...]:
    """Return the tables that `load_table` knows."""
    return tuple(_LOADERS)


def load_table(name: str, folder: Folder = None) -> PublicTable:
    """Load one of the public tables by name.

    Parameters
    ----------
    name : str
        One of `table_names`.
    folder : path, optional
        That holds the files; by default what the environment variable ``FEDKIN_DATA`` names.

    Raises
    ------
    DataError
        When the files are not there; the message says where they come from.
    """
    if name not in _LOADERS:
        raise ParameterError(f"there is no table {name!r}; choose one of {listed(table_names())}")
    return _LOADERS[name](folder)


def _file(folder: Folder, name: str) -> Path:
    given = os.environ.get(VARIABLE) if folder is None else folder
    if given is None:
        raise DataError(
            f"say where the public tables are: pass the folder that holds {name}, or name it in {VARIABLE}; "
            "fedkin.datasets.look_alike generates tables like them"
        )
    path = Path(given) / name
    if not path.is_file():
        raise DataError(f"there is no file {path}; it has {SOURCES[name]}")
    return path


# --- section 6: counties, votes and the map -----------------------------------------------------------------------

#: The rings of a shape: closed lines of points, shape ``(k, 2)`` each.
Rings = tuple[Array, ...]


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
    """Read the four files of `ELECTION`; states with more than ``more_than`` counties become sites.

    Alaska reports districts that are no counties, and is left out.
    """
    check_files(folder)
    facts, names, state_of_number = _facts(folder / FACTS)
    votes = _votes(folder / RESULTS)
    state_of = {fips: state_of_number[fips // 1000] for fips in facts if fips in votes and fips // 1000 != ALASKA}
    counties = Counter(state_of.values())
    rows = sorted((fips for fips in state_of if counties[state_of[fips]] > more_than), key=lambda f: (state_of[f], f))
    if not rows:
        raise DataError(f"no state in {folder} has more than {more_than} counties with facts and votes")
    X, y = np.array([facts[fips] for fips in rows]), np.array([float(votes[fips]) for fips in rows])
    federation = Federation.from_arrays(X, y, [state_of[fips] for fips in rows], feature_names=names)
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
        raise DataError(f"there is no directory {folder}; give --data the directory that holds {', '.join(ELECTION)}")
    missing = [name for name in ELECTION if not (Path(folder) / name).is_file()]
    if missing:
        lines = "\n".join(f"  {name}: from {ELECTION[name]}" for name in missing)
        raise DataError(f"{folder} lacks {len(missing)} of the {len(ELECTION)} files of the election study:\n{lines}")


def check_election(folder: Path, more_than: int = 50, *, allow_incomplete: bool = False) -> None:
    """Raise `DataError` unless the files can be read and are as complete as those that the study was made for.

    With ``allow_incomplete`` fewer states or counties will do.
    """
    found = load_election(folder, more_than)
    without = [state for state in found.federation.sites if state not in found.shapes]
    if without:
        raise DataError(
            f"{folder / MAP} has no outline of {', '.join(map(str, without))}; take it again from {ELECTION[MAP]}"
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


def election_digest(folder: Path) -> str:
    """Return a digest of the files, so that rows computed from other data are not reused."""
    check_files(folder)
    return hashlib.sha256(b"".join((Path(folder) / name).read_bytes() for name in ELECTION)).hexdigest()


def _read(path: Path) -> RawColumns:
    try:
        columns = read_columns(path)
        missing = [name for name in _COLUMNS[path.name] if name not in columns]
        if missing:
            raise DataError(f"{path} has no column {missing[0]!r}")
        if not len(columns[_COLUMNS[path.name][0]]):
            raise DataError(f"{path} has no rows")
    except DataError as error:
        raise DataError(f"{error}; or it was cut off or edited: take it again from {ELECTION[path.name]}") from None
    return columns


def _numbers(path: Path, columns: RawColumns, name: str) -> Array:
    values = parsed_numbers(columns[name]).values
    for row in np.flatnonzero(~np.isfinite(values))[:1]:
        raise DataError(f"{path}: column {name!r} holds {columns[name][row]!r}, a number is expected")
    return values


def _facts(path: Path) -> tuple[dict[int, Array], Sequence[str], dict[int, str]]:
    """Return predictors by county, their names, and the states' letters by their number."""
    columns = _read(path)
    county = np.array([state is not None for state in columns["state_abbreviation"]])  # others are sums over counties
    columns = {name: cells[county] for name, cells in columns.items() if name != "area_name"}
    states = columns.pop("state_abbreviation").tolist()
    numbers = {name: _numbers(path, columns, name) for name in columns}
    fips = [RECODED.get(number, number) for number in numbers.pop("fips").astype(int).tolist()]
    facts = dict(zip(fips, np.column_stack(list(numbers.values())), strict=True))
    return facts, list(numbers), dict(zip((number // 1000 for number in fips), states, strict=True))


def _votes(path: Path) -> dict[int, bool]:
    """Return whether the Democratic ticket was ahead, by county."""
    columns = _read(path)
    fips, democratic, republican = (_numbers(path, columns, name) for name in ("county_fips", "votes_dem", "votes_gop"))
    return dict(zip(fips.astype(int).tolist(), (democratic > republican).tolist(), strict=True))


def _leans(path: Path, state_of_number: Mapping[int, str]) -> dict[str, str]:
    columns = _read(path)
    numbers = {name: _numbers(path, columns, name) for name in _COLUMNS[path.name]}
    state, leans = numbers["fips_code"].astype(int) // 1000, {}
    for number, letters in state_of_number.items():
        won = [letters in _DEMOCRATIC[year].split() for year in (2000, 2004)]
        margins = ((numbers[f"dem_{year}"] - numbers[f"gop_{year}"])[state == number] for year in (2008, 2012))
        won += [bool(margin.sum() > 0) for margin in margins]  # Alaska is not in the file and counts as Republican
        leans[letters] = "blue" if all(won) else "red" if not any(won) else "swing"
    return leans


def _shapes(path: Path, state_of_number: Mapping[int, str]) -> dict[str, Rings]:
    try:
        shapes = read_shapes(path)
    except DataError as error:
        raise DataError(f"{error}; take it again from {ELECTION[path.name]}") from error
    return {state_of_number[int(number)]: rings for number, rings in shapes.items() if int(number) in state_of_number}


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


@dataclass(frozen=True, eq=False)
class Design:
    """A generated federation together with the truth behind it.

    Attributes
    ----------
    federation : Federation
    graph : Graph
        The corrupted graph G that a user would be given.
    truth : Graph
        The characteristic graph G0: a clique per cluster.
    theta_star : array (V, p)
    labels : array (V,)
        Cluster of each site.
    """

    federation: Federation
    graph: Graph
    truth: Graph
    theta_star: Array
    labels: NDArray[np.int64]

    def error(self, theta: Array) -> float:
        """Return the average squared estimation error ``||theta - theta_star||_F^2 / |V|``."""
        return float(((theta - self.theta_star) ** 2).sum() / self.theta_star.shape[0])


def paper_design(
    n_sites: int = 100,
    n_samples: int = 100,
    n_features: int = 20,
    n_clusters: int = 5,
    *,
    varrho: float = 0.1,
    loss: str = "linear",
    signal: float = 1.0,
    noise: float = 1.0,
    seed: int = 0,
) -> Design:
    """Draw the simulation design of section 5.

    Parameters
    ----------
    n_sites, n_samples, n_features, n_clusters : int
        |V|, n on every site, p and K0; clusters are contiguous and as equal as possible.
    varrho : float
        Probability with which each pair's edge status is flipped.
    loss : "linear" or "logistic"
        How responses are drawn.
    signal : float
        Factor on the cluster parameters, which are N(0, p^{-1/2} I).
    noise : float
        Standard deviation of the linear model's noise.
    seed : int
        Of all draws: parameters, flips, features and noise, in this order.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(seed=0)
    >>> design.graph.n_edges
    1284
    """
    if not 1 <= n_clusters <= n_sites:
        raise ParameterError(f"n_clusters must lie between 1 and n_sites={n_sites}, got {n_clusters}")
    if loss not in ("linear", "logistic"):
        raise ParameterError(f"loss must be 'linear' or 'logistic', got {loss!r}")
    rng = np.random.default_rng(seed)
    # the order of the draws is fixed: parameters, flips, features, noise
    centres = signal * rng.normal(scale=n_features**-0.25, size=(n_clusters, n_features))
    labels = np.arange(n_sites) * n_clusters // n_sites
    truth = Graph.clusters(labels.tolist())
    graph = truth.corrupt(varrho, seed=rng)
    X = rng.normal(size=(n_sites, n_samples, n_features))
    theta_star = centres[labels]
    mean = np.einsum("vnp,vp->vn", X, theta_star)
    if loss == "linear":
        y = mean + noise * rng.normal(size=mean.shape)
    else:
        y = (rng.random(mean.shape) < 1.0 / (1.0 + np.exp(-mean))).astype(np.float64)
    site = np.repeat(np.arange(n_sites), n_samples)
    federation = Federation.from_arrays(X.reshape(-1, n_features), y.reshape(-1), site)
    return Design(federation, graph, truth, theta_star, labels)


# --- tables like them ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """What a look-alike is drawn from: ``intercepts`` and ``slopes`` are standard deviations between sites."""

    sites: int
    rows: tuple[int, int]
    features: int
    loss: str
    test_size: float
    intercepts: float
    slopes: float
    groups: int = 1
    level: float = 0.0
    noise: float = 1.0


_SHAPES: Mapping[str, _Shape] = {
    "school": _Shape(40, (25, 120), 10, "linear", 0.25, 0.4, 0.1),
    "landmine": _Shape(29, (50, 70), 9, "logistic", 0.5, 0.4, 0.2, groups=2, level=-2.5),
    "sacramento": _Shape(30, (1, 40), 3, "linear", 1 / 3, 0.5, 0.05, noise=0.6),
    "computer survey": _Shape(60, (20, 20), 8, "linear", 0.2, 0.8, 0.4, groups=3),
    "melanoma": _Shape(9, (3, 60), 1, "poisson", 0.3, 0.4, 0.1),
    "election": _Shape(15, (50, 100), 12, "logistic", 1 / 3, 0.8, 0.3, level=-1.5),
}


def look_alike(name: str, seed: int = 0) -> PublicTable:
    """Generate a small table that is like a public one, for where the files are not.

    Examples
    --------
    >>> from fedkin.datasets import look_alike
    >>> look_alike("melanoma").federation
    Federation(9 sites, 189 rows, 1 feature)
    """
    if name not in _SHAPES:
        raise ParameterError(f"there is no table {name!r} to be like; choose one of {listed(_SHAPES)}")
    shape, rng = _SHAPES[name], np.random.default_rng(seed)
    sizes = rng.integers(shape.rows[0], shape.rows[1] + 1, shape.sites)
    site = np.repeat(np.arange(shape.sites), sizes)
    centre = rng.normal(scale=(2 * shape.features) ** -0.5, size=(shape.groups, shape.features))
    slopes = centre[np.arange(shape.sites) * shape.groups // shape.sites]
    slopes = slopes + shape.slopes * rng.normal(size=slopes.shape)
    X = rng.normal(size=(len(site), shape.features))
    eta = shape.level + (shape.intercepts * rng.normal(size=shape.sites))[site] + (X * slopes[site]).sum(axis=1)
    offset = None
    if shape.loss == "linear":
        y = eta + shape.noise * rng.normal(size=len(eta))
    elif shape.loss == "logistic":
        y = (rng.random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(np.float64)
    else:
        offset = rng.uniform(1.0, 4.0, len(eta))
        y = rng.poisson(np.exp(eta + offset)).astype(np.float64)
    federation = Federation.from_arrays(X, y, [f"site {u}" for u in site], offset=offset)
    return PublicTable(name, federation, shape.loss, shape.test_size, generated=True)
