"""What a task is given, and the designs that it draws: federations with a known truth.

A generator, by name or as "module:function", is called by name with the grid point's parameters that it knows, the
entries of ``design`` among the options, and ``seed``; it returns a `fedkin.datasets.Design`.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.data import Federation
from fedkin.datasets import Design, paper_design
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.solvers import compile_kernels
from fedkin.studies.config import find_function


@dataclass(frozen=True)
class Replication:
    """One repetition at one grid point.

    Attributes
    ----------
    params : mapping
        The grid point.
    options : mapping
        The study's ``[options]``.
    number : int
        0, 1, ...
    seed : int
        For everything random in it.
    data : Path or None
        The directory given as ``--data``.
    """

    params: Mapping[str, Any]
    options: Mapping[str, Any]
    number: int
    seed: int
    data: Path | None = None


def settle_backend() -> str:
    """Load the compiled kernels, so that every solve of this process uses the same backend.

    Left alone, the solver would begin with numpy and change when loading pays, and the last digits of a row would
    depend on what its process had done before.
    """
    compile_kernels()
    return "numba"


Generator = Callable[..., Design]


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
    """The paper's design with all true edges and exactly ``false_edges`` wrong ones, the |S| of Theorem 2."""
    design = paper_design(
        n_sites, n_samples, n_features, n_clusters, varrho=0.0, signal=signal, noise=noise, seed=seed
    )
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
    """Sites that differ in one of three ways, ``truth``: in three groups, not at all, or continuously.

    Parameters of "continuous" sites are ``N(centre, signal^2 / (4 sqrt(p)))``, and edges between them are drawn by lot;
    otherwise it is the paper's design with a fifth of the edges flipped.
    """
    if truth not in ("groups", "none", "continuous"):
        raise ParameterError(f'truth must be "groups", "none" or "continuous", got {truth!r}')
    n_clusters = 3 if truth == "groups" else 1
    if truth != "continuous":
        return paper_design(
            n_sites, n_samples, n_features, n_clusters, varrho=0.2, loss=loss, signal=signal, seed=seed
        )
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


#: Options of every task that generates its data.
DESIGN_OPTIONS: Mapping[str, Sequence[str]] = {"generator": (), "design": ()}

BUILT_IN_GENERATORS: Mapping[str, Generator] = {
    "paper": paper_design,
    "false_edges": false_edge_design,
    "differing": differing_design,
}


def make_design(replication: Replication) -> Design:
    """The design of a replication: its generator, called with its parameters and its seed."""
    name = replication.options.get("generator", "paper")
    generator = BUILT_IN_GENERATORS.get(name) or find_function(name, f"generator {name!r}")
    arguments = dict(replication.options.get("design", {}))
    signature = inspect.signature(generator)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    # a grid may also vary what the task does (level, availability, ...): the generator gets what it can take
    arguments |= {key: value for key, value in replication.params.items() if takes_any or key in signature.parameters}
    try:
        signature.bind(**arguments, seed=replication.seed)
    except TypeError as error:
        raise ParameterError(f"generator {name!r} was called with {sorted(arguments)} and seed: {error}") from None
    try:
        design = generator(**arguments, seed=replication.seed)
    except TypeError as error:
        texts = {key: value for key, value in arguments.items() if isinstance(value, str)}
        if not texts:
            raise  # a mistake in the generator, which its traceback shows
        given = ", ".join(f"{key} = {value!r}" for key, value in texts.items())
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise ParameterError(
            f"generator {name!r} was called with the text {given}; is a number meant? ({place}: {error})"
        ) from error
    if not isinstance(design, Design):
        raise ParameterError(f"generator {name!r} gave a {type(design).__name__}; a fedkin.datasets.Design is expected")
    return design
