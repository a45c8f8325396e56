"""Read public tables with a column of sites, split as papers split them, or generate tables like them.

No data come with Fedkin. Put the files into one folder, a subfolder for each table as `SOURCES` has it, and pass the
folder, or name it in the environment variable ``FEDKIN_DATA``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkin._base import AnyArray, Mask, listed
from fedkin.data import Federation, read_columns
from fedkin.datasets import counties
from fedkin.errors import DataError, ParameterError, TableWarning

#: The folder that holds the files; None for the one that the environment variable names.
Folder = str | os.PathLike[str] | None
VARIABLE = "FEDKIN_DATA"
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
    **{f"election/{name}": source for name, source in counties.SOURCES.items()},
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
    place = _file(folder, f"election/{counties.RESULTS}").parent
    return PublicTable("election", counties.load_election(place).federation, "logistic", 1 / 3)


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
