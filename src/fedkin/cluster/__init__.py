"""Run work in this process, or on the machines of a Ray cluster.

An `Engine` maps a function over pieces of work, and hosts `Shards`: stateful objects that exchange arrays. `engine`
defines the engine of this process, and `ray` that of Ray; `engine_of` returns the engine for an argument ``on=``.
"""

from __future__ import annotations

from fedkin.cluster.engine import (
    Cut,
    Engine,
    Host,
    LocalEngine,
    On,
    Shards,
    chained,
    cut_graph,
    engine_of,
    partition,
    running_engine,
    running_on,
)

__all__ = [
    "Cut", "Engine", "Host", "LocalEngine", "On", "Shards", "chained", "cut_graph", "engine_of", "partition",
    "running_engine", "running_on",
]  # fmt: skip
