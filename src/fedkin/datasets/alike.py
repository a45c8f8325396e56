"""Generated tables with the shape of the public ones: as many sites and columns, sites that differ about as much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedkin._base import listed
from fedkin.data import Federation
from fedkin.datasets.public import PublicTable
from fedkin.errors import ParameterError


@dataclass(frozen=True)
class Shape:
    """What a look-alike is drawn from.

    ``rows`` is the smallest and the largest number of a site's rows, ``slopes`` and ``intercepts`` the standard
    deviations between sites of each kind of parameter, ``groups`` how many groups of sites have slopes of their own.
    """

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


SHAPES: Mapping[str, Shape] = {
    "school": Shape(40, (25, 120), 10, "linear", 0.25, 0.4, 0.1),
    "landmine": Shape(29, (50, 70), 9, "logistic", 0.5, 0.4, 0.2, groups=2, level=-2.5),
    "sacramento": Shape(30, (1, 40), 3, "linear", 1 / 3, 0.5, 0.05, noise=0.6),
    "computer survey": Shape(60, (20, 20), 8, "linear", 0.2, 0.8, 0.4, groups=3),
    "melanoma": Shape(9, (3, 60), 1, "poisson", 0.3, 0.4, 0.1),
    "election": Shape(15, (50, 100), 12, "logistic", 1 / 3, 0.8, 0.3, level=-1.5),
}


def look_alike(name: str, seed: int = 0) -> PublicTable:
    """A small generated table that is like a public one, for where the files are not.

    Parameters
    ----------
    name : str
        One of `table_names`.
    seed : int
        Of everything that is drawn.

    Examples
    --------
    >>> from fedkin.datasets import look_alike
    >>> look_alike("melanoma").federation
    Federation(9 sites, 189 rows, 1 feature)
    """
    if name not in SHAPES:
        raise ParameterError(f"there is no table {name!r} to be like; choose one of {listed(SHAPES)}")
    shape, rng = SHAPES[name], np.random.default_rng(seed)
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
