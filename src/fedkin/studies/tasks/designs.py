"""Generators of federations with a known truth, by name or as "module:function".

A generator is called by name with the grid point's parameters that it knows, the entries of ``design`` among the
options, and ``seed``; it returns a `fedkin.datasets.Design`.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedkin.datasets import Design, paper_design
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.studies.config import find_function
from fedkin.studies.tasks.replication import Replication

Generator = Callable[..., Design]


def false_edge_design(
    n_devices: int = 100,
    n_samples: int = 100,
    n_features: int = 20,
    n_clusters: int = 5,
    *,
    false_edges: int = 0,
    signal: float = 1.0,
    noise: float = 1.0,
    seed: int = 0,
) -> Design:
    """The paper's design with all true edges and exactly ``false_edges`` wrong ones, the |S| of Theorem 2.

    Parameters
    ----------
    n_devices, n_samples, n_features, n_clusters, signal, noise, seed
        As in `fedkin.datasets.paper_design`.
    false_edges : int
        Edges between different clusters, drawn without replacement.

    Examples
    --------
    >>> from fedkin.studies.tasks.designs import false_edge_design
    >>> design = false_edge_design(20, 30, 3, false_edges=7)
    >>> design.graph.n_edges - design.truth.n_edges
    7
    """
    design = paper_design(
        n_devices, n_samples, n_features, n_clusters, varrho=0.0, signal=signal, noise=noise, seed=seed
    )
    first, second = np.tril_indices(n_devices, -1)
    across = np.flatnonzero(design.labels[first] != design.labels[second])
    if not 0 <= false_edges <= across.size:
        raise ParameterError(
            f"false_edges must lie between 0 and the {across.size} pairs in different clusters, got {false_edges}"
        )
    chosen = np.random.default_rng([seed, 1]).choice(across, size=false_edges, replace=False)
    wrong = np.column_stack([first[chosen], second[chosen]])
    devices = design.federation.devices
    graph = Graph.from_indices(devices, np.concatenate([design.truth.edges, wrong]))
    return replace(design, graph=graph)


#: Options of every task that generates its data.
DESIGN_OPTIONS: Mapping[str, Sequence[str]] = {"generator": (), "design": ()}

BUILT_IN_GENERATORS: Mapping[str, Generator] = {"paper": paper_design, "false_edges": false_edge_design}


def make_design(replication: Replication) -> Design:
    """The design of a replication: its generator, called with its parameters and its seed."""
    name = replication.options.get("generator", "paper")
    generator = BUILT_IN_GENERATORS.get(name) or find_function(name, f"generator {name!r}")
    arguments = dict(replication.options.get("design", {}))
    signature = inspect.signature(generator)
    known = _parameters(signature)
    # a grid may also vary what the task does (level, availability, ...): the generator gets what it can take
    arguments.update({key: value for key, value in replication.params.items() if known is None or key in known})
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
        raise ParameterError(
            f"generator {name!r} was called with the text {given}; is a number meant? ({_last_line(error)})"
        ) from error
    if not isinstance(design, Design):
        raise ParameterError(f"generator {name!r} gave a {type(design).__name__}; a fedkin.datasets.Design is expected")
    return design


def _last_line(error: TypeError) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}: {error}"


def _parameters(signature: inspect.Signature) -> set[str] | None:
    """Names of a function's parameters, None when it takes any."""
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}
