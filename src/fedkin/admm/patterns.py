"""Rules that say which sites are there in which round: drawn, recorded, or as bad as can be."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index, Mask
from fedkin.admm.sampling import PRESENCE, round_states, site_keys, uniforms
from fedkin.errors import DataError, ParameterError, UnknownSiteError

PerSite = float | Mapping[Any, float] | Sequence[float] | Array


class Pattern(Protocol):
    """A rule that says who is there."""

    def bind(self, sites: Sequence[Hashable], seed: int) -> BoundPattern:
        """The rule for these sites, in this order."""
        ...


class BoundPattern(Protocol):
    """A rule for known sites."""

    @property
    def probability(self) -> Array:
        """Long-run share ``(V,)`` of rounds in which each site is there."""
        ...

    def available(self, rounds: Index) -> Mask:
        """Presence ``(R, V)`` in these rounds."""
        ...


@dataclass(frozen=True, eq=False)
class Bernoulli:
    p: PerSite
    blocks: Mapping[Any, Hashable] | Sequence[Hashable] | None

    def bind(self, sites: Sequence[Hashable], seed: int) -> BoundPattern:
        p = _per_site(self.p, sites)
        keys = site_keys(sites)
        if self.blocks is not None:
            keys = site_keys(_labels(self.blocks, sites, "blocks"))
        return _BoundBernoulli(p, keys, seed)


@dataclass(frozen=True, eq=False)
class _BoundBernoulli:
    probability: Array
    keys: NDArray[np.uint64]
    seed: int

    def available(self, rounds: Index) -> Mask:
        return uniforms(round_states(self.keys, self.seed, rounds, PRESENCE)) < self.probability


@dataclass(frozen=True, eq=False)
class Recorded:
    values: Mask
    names: list[str] | None
    repeat: bool
    source: str

    def bind(self, sites: Sequence[Hashable], seed: int) -> BoundPattern:
        values = self.values
        if self.names is not None:
            column = {name: k for k, name in enumerate(self.names)}
            missing = [site for site in sites if str(site) not in column]
            if missing:
                raise UnknownSiteError(
                    f"{self.source} has no column for site {missing[0]!r}; add one for every site"
                )
            values = values[:, [column[str(site)] for site in sites]]
        elif values.shape[1] != len(sites):
            raise DataError(f"{self.source} has {values.shape[1]} columns for {len(sites)} sites")
        share = values.mean(axis=0)
        if (share == 0).any():
            site = sites[int(np.argmin(share))]
            raise ParameterError(
                f"site {site!r} is never available in {self.source}: its p_i is 0 and its data cannot be weighted; "
                "leave the site out"
            )
        return _BoundTrace(share, values, self.repeat, self.source)


@dataclass(frozen=True, eq=False)
class _BoundTrace:
    probability: Array
    values: Mask
    repeat: bool
    source: str

    def available(self, rounds: Index) -> Mask:
        length = self.values.shape[0]
        if not self.repeat and rounds[-1] > length:
            raise ParameterError(
                f"{self.source} has {length} rounds, but round {rounds[-1]} was asked for; "
                "run fewer rounds, or use Availability.recorded(..., repeat=True)"
            )
        return np.asarray(self.values[(rounds - 1) % length])


@dataclass(frozen=True, eq=False)
class Bursts:
    p: float
    period: int
    groups: Mapping[Any, Hashable] | Sequence[Hashable] | None

    def bind(self, sites: Sequence[Hashable], seed: int) -> BoundPattern:
        if not isinstance(self.period, int | np.integer) or self.period < 1:
            raise ParameterError(f"period must be a whole number of at least 1, got {self.period!r}")
        share = float(_per_site(self.p, sites)[0])
        length = round(share * self.period)
        if length < 1:
            raise ParameterError(f"p={self.p!r} of a period of {self.period} is less than one round; raise either")
        labels = (
            [k % 2 for k in range(len(sites))] if self.groups is None else _labels(self.groups, sites, "groups")
        )
        number: dict[Hashable, int] = {}
        shift = np.array([number.setdefault(label, len(number)) for label in labels]) * length
        return _BoundBursts(np.full(len(sites), length / self.period), shift, length, int(self.period))


@dataclass(frozen=True, eq=False)
class _BoundBursts:
    probability: Array
    shift: Index
    length: int
    period: int

    def available(self, rounds: Index) -> Mask:
        return np.asarray((rounds[:, None] - 1 - self.shift) % self.period < self.length, dtype=np.bool_)


def _per_site(p: PerSite, sites: Sequence[Hashable]) -> Array:
    if isinstance(p, Mapping):
        unknown = [site for site in p if site not in set(sites)]
        if unknown:
            raise UnknownSiteError(f"p names site {unknown[0]!r}, which the federation does not have")
        missing = [site for site in sites if site not in p]
        if missing:
            raise ParameterError(f"no p is given for site {missing[0]!r}; name every site, or give one number")
        values = np.array([float(p[site]) for site in sites])
    else:
        given = np.asarray(p, dtype=np.float64)
        if given.ndim > 1 or (given.ndim == 1 and given.size != len(sites)):
            raise ParameterError(
                f"p has shape {given.shape}, expected a number or one for each of {len(sites)} sites"
            )
        values = np.broadcast_to(given, (len(sites),)).copy()
    bad = ~((values > 0) & (values <= 1))
    if bad.any():
        site, value = sites[int(np.argmax(bad))], float(values[bad][0])
        raise ParameterError(
            f"the availability p of site {site!r} is {value!r}, expected a number above 0 and at most 1; "
            "a site that is never there cannot be weighted: leave it out"
        )
    return values


def _labels(
    labels: Mapping[Any, Hashable] | Sequence[Hashable], sites: Sequence[Hashable], what: str
) -> list[Hashable]:
    if isinstance(labels, Mapping):
        missing = [site for site in sites if site not in labels]
        if missing:
            raise UnknownSiteError(f"{what} has no label for site {missing[0]!r}")
        return [labels[site] for site in sites]
    if len(labels) != len(sites):
        raise ParameterError(f"{what} has {len(labels)} labels for {len(sites)} sites; give one per site")
    return list(labels)


def read_recorded(path: Path) -> tuple[Mask, list[str] | None]:
    """Presence ``(T, V)`` in a CSV or NPZ file, and the names of the sites."""
    return _read_npz(path) if path.suffix == ".npz" else _read_csv(path)


def zero_one(values: NDArray[Any], source: str) -> Mask:
    """Presence ``(T, V)`` given as 0 and 1."""
    if values.ndim != 2 or values.size == 0:
        raise DataError(f"{source} has shape {values.shape}, expected rounds x sites, at least one of each")
    if values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        raise DataError(f"{source} may hold only 0 and 1")
    return values.astype(np.bool_)


def _read_csv(path: Path) -> tuple[Mask, list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if line]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as CSV: {error}") from None
    if len(lines) < 2:
        raise DataError(f"{path}: expected a line of site names and at least one round, got {len(lines)} lines")
    names = [name.strip() for name in lines[0]]
    wanted = [k for k, name in enumerate(names) if name.lower() != "round"]
    if len({names[k] for k in wanted}) < len(wanted):
        raise DataError(f"{path}: a site has more than one column")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(names):
            raise DataError(f"{path}: line {number} has {len(line)} cells, expected {len(names)}")
        cells = [line[k].strip() for k in wanted]
        bad = next((k for k, cell in enumerate(cells) if cell not in ("0", "1")), None)
        if bad is not None:
            raise DataError(
                f"{path}: line {number}, site {names[wanted[bad]]!r}: expected 0 or 1, got {cells[bad]!r}"
            )
        rows.append([cell == "1" for cell in cells])
    return np.array(rows, dtype=np.bool_), [names[k] for k in wanted]


def _read_npz(path: Path) -> tuple[Mask, list[str] | None]:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            if "available" not in file:
                raise DataError(f"{path}: has no array 'available'; it holds {', '.join(file.files) or 'nothing'}")
            values = zero_one(file["available"], str(path))
            names = [str(name) for name in file["sites"].tolist()] if "sites" in file else None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: cannot be read as NPZ: {error}") from None
    if names is not None and len(names) != values.shape[1]:
        raise DataError(f"{path}: {len(names)} site names for {values.shape[1]} columns")
    return values, names
