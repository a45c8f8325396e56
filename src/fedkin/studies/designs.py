"""What a replication is given, and the designs with a known truth that studies draw.

A generator, by name or as "module:function", is called by name with the grid point's parameters that it knows, the
entries of ``design`` among the options, and ``seed``; it returns a `fedkin.datasets.Design`.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.data import Federation
from fedkin.datasets import Design, paper_design
from fedkin.errors import ParameterError
from fedkin.graph import Graph


def find_function(name: str, where: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import the function called "module:function".

    ``where`` is the entry that names it, for messages; ``folder`` is where the study's own modules may lie.
    """
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module, _, function = name.partition(":")
    try:
        home = import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            words = f"there is no module {module!r}; put {module}.py next to the TOML file or install it"
            raise ParameterError(f"{where}: {words}") from None
        raise ParameterError(f"{where}: importing {module!r} failed: {_last_line(error)}; fix the module") from error
    file = getattr(home, "__file__", None)
    if file is None:
        words = "name a function in a .py file next to the TOML file"
        raise ParameterError(f"{where}: the module {module!r} has no file; {words}")
    if not hasattr(home, function):
        raise ParameterError(f"{where}: {file} has no function {function!r}; define it there or fix the name")
    found: Callable[..., Any] = getattr(home, function)
    if not callable(found):
        raise ParameterError(f"{where}: {function!r} of {file} is a {type(found).__name__}, not a function")
    return found


def code_digest(function: Callable[..., Any]) -> str:
    """Return the digest of the file that defines a function, so that edited code is not mistaken for what was run."""
    return hashlib.sha256(Path(str(sys.modules[function.__module__].__file__)).read_bytes()).hexdigest()


def _last_line(error: Exception) -> str:
    """Return file, line and words of an error in one line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}: {type(error).__name__}: {' '.join(str(error).split())}"


@dataclass(frozen=True)
class Replication:
    """One repetition at one grid point: what a task is given."""

    params: Mapping[str, Any]  # the grid point
    options: Mapping[str, Any]  # the study's [options]
    number: int  # 0, 1, ...
    seed: int  # for everything random in it
    data: Path | None = None  # the directory given as --data
    folder: Path | None = None  # where the study's own modules lie


Task = Callable[[Replication], Iterable[dict[str, Any]]]


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
    first, second = np.tril_indices(n_sites, -1)
    across = np.flatnonzero(design.labels[first] != design.labels[second])
    if not 0 <= false_edges <= across.size:
        raise ParameterError(
            f"false_edges must lie between 0 and the {across.size} pairs in different clusters, got {false_edges}"
        )
    chosen = np.random.default_rng([seed, 1]).choice(across, size=false_edges, replace=False)
    wrong = np.column_stack([first[chosen], second[chosen]])
    graph = Graph.from_indices(design.federation.sites, np.concatenate([design.truth.edges, wrong]))
    return replace(design, graph=graph)


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

    Parameters of "continuous" sites are ``N(centre, signal^2 / (4 sqrt(p)))``, and edges between them are drawn by lot;
    otherwise it is the paper's design with a fifth of the edges flipped.
    """
    if truth not in ("groups", "none", "continuous"):
        raise ParameterError(f'truth must be "groups", "none" or "continuous", got {truth!r}')
    if truth != "continuous":
        sizes = (n_sites, n_samples, n_features, 3 if truth == "groups" else 1)
        return paper_design(*sizes, varrho=0.2, loss=loss, signal=signal, seed=seed)
    rng = np.random.default_rng(seed)
    scale = signal * n_features**-0.25
    theta = scale * (rng.normal(size=n_features) + 0.5 * rng.normal(size=(n_sites, n_features)))
    graph = Graph.empty(range(n_sites)).corrupt(0.3, seed=rng)
    data = {}
    for u in range(n_sites):
        X = rng.normal(size=(n_samples, n_features))
        mean, noise = X @ theta[u], rng.normal(size=n_samples)
        data[u] = X, mean + noise if loss == "linear" else (mean + rng.logistic(size=n_samples) > 0).astype(np.float64)
    return Design(Federation(data), graph, Graph.empty(range(n_sites)), theta, np.arange(n_sites))


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
    """Draw equal clusters whose parameters have a few entries between 0.5 and 1.5 in size, and a corrupted graph."""
    if not 1 <= nonzero <= n_features:
        raise ParameterError(f"nonzero must lie between 1 and the {n_features} features, got {nonzero}")
    rng = np.random.default_rng(seed)
    labels = np.arange(n_sites) * n_clusters // n_sites
    centres = np.zeros((n_clusters, n_features))
    for centre in centres:
        support = rng.choice(n_features, nonzero, replace=False)
        centre[support] = rng.choice([-1.0, 1.0], nonzero) * rng.uniform(0.5, 1.5, nonzero)
    data = {}
    for u, theta in enumerate(centres[labels]):
        X = rng.normal(size=(n_samples, n_features))
        data[u] = X, X @ theta + rng.normal(size=n_samples)
    truth = Graph.clusters(labels.tolist())
    return Design(Federation(data), truth.corrupt(varrho, seed=rng), truth, centres[labels], labels)


GENERATORS: Mapping[str, Callable[..., Design]] = {
    "paper": paper_design,
    "false_edges": false_edge_design,
    "differing": differing_design,
    "sparse": sparse_design,
}


def generator_arguments(
    signature: inspect.Signature, design: Mapping[str, Any], point: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a generator is called with: ``design``, and what it takes of the grid point."""
    # a grid may also vary what the task does (level, availability, ...)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    return {**design, **{name: value for name, value in point.items() if takes_any or name in signature.parameters}}


def make_design(replication: Replication) -> Design:
    """Call the generator of a replication with its parameters and its seed."""
    name = replication.options.get("generator", "paper")
    generator = GENERATORS.get(name) or find_function(name, f"generator {name!r}", replication.folder)
    given = replication.options.get("design", {})
    design = generator(
        **generator_arguments(inspect.signature(generator), given, replication.params), seed=replication.seed
    )
    if not isinstance(design, Design):
        raise ParameterError(f"generator {name!r} gave a {type(design).__name__}; a fedkin.datasets.Design is expected")
    return design
