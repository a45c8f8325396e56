"""Define replications of studies, generators of designs with a known truth, and summaries of rows by grid point."""

from __future__ import annotations

import inspect
import math
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit
from scipy.stats import binomtest

from fedkin._base import Array
from fedkin.data import Federation
from fedkin.datasets import Design, paper_design
from fedkin.errors import ParameterError
from fedkin.graph import Graph


def find_function(name: str, where: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import the function called "module:function".

    ``where`` is the entry that names it, for messages; ``folder`` is the directory of the study's own modules.
    """
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found = pkgutil.resolve_name(name)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        own = frame.filename != pkgutil.__file__ and not frame.filename.startswith("<")
        place = f"{frame.filename}, line {frame.lineno}: " if own else ""
        problem = " ".join(f"{place}{type(error).__name__}: {error}".split())
        raise ParameterError(f"{where}: {problem}; put the module next to the TOML file, or fix it") from error
    home = sys.modules.get(str(getattr(found, "__module__", "")))
    if not callable(found) or getattr(home, "__file__", None) is None:
        raise ParameterError(f"{where}: {name!r} is a {type(found).__name__}, not a function in a .py file")
    function: Callable[..., Any] = found
    return function


@dataclass(frozen=True)
class Replication:
    """Replication at one grid point, the input of a task."""

    params: Mapping[str, Any]  # the grid point
    options: Mapping[str, Any]  # the study's [options]
    number: int  # 0, 1, ...
    seed: int  # for everything random in it
    data: Path | None = None  # the directory given as --data
    folder: Path | None = None  # where the study's own modules lie


StudyTask = Callable[[Replication], Iterable[dict[str, Any]]]


# --- designs ----------------------------------------------------------------------------------------------------------


def false_edge_design(
    n_sites: int = 100,
    n_samples: int = 100,
    n_features: int = 20,
    n_clusters: int = 5,
    *,
    false_edges: int = 0,
    signal: float = 1.0,
    noise: float = 1.0,
    seed: int = 0,
) -> Design:
    """Draw the paper's design with all true edges and exactly ``false_edges`` wrong ones, the |S| of Theorem 2."""
    sizes = (n_sites, n_samples, n_features, n_clusters)
    design = paper_design(*sizes, varrho=0.0, signal=signal, noise=noise, seed=seed)
    pairs = np.column_stack(np.tril_indices(n_sites, -1))
    across = np.flatnonzero(np.diff(design.labels[pairs])[:, 0])
    if not 0 <= false_edges <= across.size:
        raise ParameterError(
            f"false_edges must lie between 0 and the {across.size} pairs in different clusters, got {false_edges}"
        )
    chosen = np.random.default_rng([seed, 1]).choice(across, size=false_edges, replace=False)
    edges = np.concatenate([design.truth.edges, pairs[chosen]])
    return replace(design, graph=Graph.from_indices(design.federation.sites, edges))


def sparse_design(
    n_sites: int = 20,
    n_samples: int = 30,
    n_features: int = 60,
    n_clusters: int = 4,
    *,
    nonzero: int = 6,
    varrho: float = 0.1,
    seed: int = 0,
) -> Design:
    """Draw equal clusters whose parameters have a few entries between 0.5 and 1.5 in absolute value, and a corrupted
    graph."""
    if not 1 <= nonzero <= n_features:
        raise ParameterError(f"nonzero must lie between 1 and the {n_features} features, got {nonzero}")
    rng = np.random.default_rng(seed)
    labels = np.arange(n_sites) * n_clusters // n_sites
    centres = np.zeros((n_clusters, n_features))
    for centre in centres:
        support = rng.choice(n_features, nonzero, replace=False)
        centre[support] = rng.choice([-1.0, 1.0], nonzero) * rng.uniform(0.5, 1.5, nonzero)
    federation = _draw_rows(centres[labels], n_samples, rng)
    truth = Graph.clusters(labels.tolist())
    return Design(federation, truth.corrupt(varrho, seed=rng), truth, centres[labels], labels)


def differing_design(
    n_sites: int = 30,
    n_samples: int = 50,
    n_features: int = 8,
    *,
    truth: str = "groups",
    loss: str = "linear",
    signal: float = 1.0,
    seed: int = 0,
) -> Design:
    """Draw sites that differ in one of three ways, ``truth``: in three groups, not at all, or continuously.

    Parameters of "continuous" sites are ``N(centre, signal^2 / (4 sqrt(p)))`` and their edges are random; otherwise it
    is the paper's design with a fifth of the edges flipped.
    """
    if truth not in ("groups", "none", "continuous"):
        raise ParameterError(f'truth must be "groups", "none" or "continuous", got {truth!r}')
    if truth != "continuous":
        sizes = (n_sites, n_samples, n_features, 3 if truth == "groups" else 1)
        return paper_design(*sizes, varrho=0.2, loss=loss, signal=signal, seed=seed)
    rng = np.random.default_rng(seed)
    scale = signal * n_features**-0.25
    theta = scale * (rng.normal(size=n_features) + 0.5 * rng.normal(size=(n_sites, n_features)))
    empty = Graph.empty(range(n_sites))
    graph = empty.corrupt(0.3, seed=rng)
    return Design(_draw_rows(theta, n_samples, rng, loss), graph, empty, theta, np.arange(n_sites))


def _draw_rows(theta: Array, n_samples: int, rng: np.random.Generator, loss: str = "linear") -> Federation:
    """Draw the rows of sites with parameters ``theta (V, p)``, one site after the other."""
    data = {}
    for u, own in enumerate(theta):
        X = rng.normal(size=(n_samples, len(own)))
        mean, noise = X @ own, rng.normal(size=n_samples)
        data[u] = X, mean + noise if loss == "linear" else (mean + rng.logistic(size=n_samples) > 0).astype(np.float64)
    return Federation(data)


#: Generators by their short names.
GENERATORS: Mapping[str, str] = {
    "paper": "fedkin.datasets:paper_design",
    "false_edges": "fedkin.studies.replications:false_edge_design",
    "differing": "fedkin.studies.replications:differing_design",
    "sparse": "fedkin.studies.replications:sparse_design",
}


def generator_arguments(
    generator: Callable[..., Any], options: Mapping[str, Any], point: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a generator: ``design`` and the matching entries of the grid point."""
    # a grid may also vary what the task does (level, availability, ...)
    known = inspect.signature(generator).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    return {**options.get("design", {}), **{name: point[name] for name in point if takes_any or name in known}}


def make_design(replication: Replication) -> Design:
    """Call the generator of a replication with its parameters and its seed."""
    name = replication.options.get("generator", "paper")
    generator = find_function(GENERATORS.get(name, name), f"generator {name!r}", replication.folder)
    arguments = generator_arguments(generator, replication.options, replication.params)
    design = generator(**arguments, seed=replication.seed)
    if not isinstance(design, Design):
        raise ParameterError(f"generator {name!r} gave a {type(design).__name__}; a fedkin.datasets.Design is expected")
    return design


# --- summaries of rows ------------------------------------------------------------------------------------------------

Row = Mapping[str, Any]
Point = tuple[Any, ...]


@dataclass(frozen=True)
class ConfidenceInterval:
    """Estimate with the limits of its confidence interval."""

    estimate: float
    low: float
    high: float

    def text(self, form: str = ".3g") -> str:
        """Format as ``1.09 ± 0.08``, or with both ends if the interval is not symmetric."""
        if math.isinf(self.high - self.low):
            return f"{self.estimate:{form}}, without an interval"
        up, down = self.high - self.estimate, self.estimate - self.low
        if math.isclose(up, down, rel_tol=1e-6, abs_tol=1e-12):
            return f"{self.estimate:{form}} ± {up:.2g}"
        return f"{self.estimate:{form}}, between {self.low:{form}} and {self.high:{form}}"


@dataclass(frozen=True)
class Sample:
    """Mean, standard deviation (NaN for a single number) and size of a sample."""

    mean: float
    sd: float
    n: int

    @classmethod
    def from_values(cls, values: Iterable[float]) -> Sample:
        """Summarise numbers."""
        array = np.fromiter(values, dtype=np.float64)
        if array.size == 0:
            return cls(math.nan, math.nan, 0)
        return cls(float(array.mean()), float(array.std(ddof=1)) if array.size > 1 else math.nan, int(array.size))

    def scaled(self, factor: float, shift: float = 0.0) -> Sample:
        """Return the summary of ``factor * x + shift``."""
        return Sample(factor * self.mean + shift, abs(factor) * self.sd, self.n)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.sd / math.sqrt(self.n) if self.n > 1 else math.nan

    def interval(self, n_together: int = 1) -> ConfidenceInterval:
        """Return Student's 95% interval of the mean, simultaneous for ``n_together`` intervals (Bonferroni)."""
        half = student(self.n, n_together) * self.error if self.n > 1 else math.inf
        return ConfidenceInterval(self.mean, self.mean - half, self.mean + half)

    def share_interval(self, n_together: int = 1) -> ConfidenceInterval:
        """Return Wilson's 95% interval of a probability, for a sample of 0 and 1."""
        found = binomtest(round(self.mean * self.n), self.n).proportion_ci(1 - 0.05 / n_together, "wilson")
        return ConfidenceInterval(self.mean, float(found.low), float(found.high))


def student(n: int, n_together: int = 1) -> float:
    """Return Student's quantile for 95% intervals of ``n_together`` means of ``n`` numbers."""
    return float(stdtrit(n - 1, 1 - 0.025 / n_together)) if n > 1 else math.inf


def group(rows: Iterable[Row], names: Sequence[str], value: str) -> dict[Point, list[float]]:
    """Group values by the columns ``names`` in order of appearance; rows without a value are skipped."""
    groups: dict[Point, list[float]] = {}
    for row in rows:
        if row.get(value) is not None:
            groups.setdefault(tuple(row.get(name) for name in names), []).append(float(row[value]))
    return groups


def summarize(rows: Iterable[Row], names: Sequence[str], value: str) -> dict[Point, Sample]:
    """Summarise a column by the columns ``names``."""
    return {key: Sample.from_values(values) for key, values in group(rows, names, value).items()}


def distinct(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the distinct values of a column: numbers sorted, texts in order of appearance."""
    values = list(dict.fromkeys(row[name] for row in rows if row.get(name) is not None))
    return sorted(values) if values and not isinstance(values[0], str) else values


def paired(
    rows: Iterable[Row], names: Sequence[str], series: str, sides: tuple[Any, Any], value: str
) -> dict[Point, tuple[Array, Array]]:
    """Return the values of two series on their common replications, by the columns ``names``."""
    values: dict[Point, tuple[dict[Any, float], dict[Any, float]]] = {}
    for row in rows:
        if row[series] in sides and row.get(value) is not None:
            here = values.setdefault(tuple(row.get(name) for name in names), ({}, {}))
            here[sides.index(row[series])][row.get("replication")] = float(row[value])
    found = {}
    for point, (first, second) in values.items():
        if shared := [unit for unit in first if unit in second]:
            found[point] = (np.array([first[unit] for unit in shared]), np.array([second[unit] for unit in shared]))
    return found


def paired_difference(rows: Iterable[Row], series: str, sides: tuple[Any, Any], value: str) -> Sample:
    """Summarise ``value`` of the first side minus the second, replication by replication."""
    x, y = paired(rows, [], series, sides, value).get((), (np.empty(0), np.empty(0)))
    return Sample.from_values(x - y)


def ratio_of_sums(x: Array, y: Array) -> Sample:
    """Return the ratio of two sums over the same replications, with the sd of the linearised ratio (delta method)."""
    ratio = float(x.mean() / y.mean())
    return Sample(ratio, Sample.from_values((x - ratio * y) / y.mean()).sd, x.size)


def paired_ratios(
    rows: Iterable[Row], names: Sequence[str], series: str, sides: tuple[Any, Any], value: str
) -> dict[Point, Sample]:
    """Return ratios of the means of two series on the same replications, by the columns ``names``."""
    return {point: ratio_of_sums(x, y) for point, (x, y) in paired(rows, names, series, sides, value).items()}
