"""Where work runs: in this process, or on the machines of a Ray cluster.

An `Engine` maps a function over pieces of work, and hosts `Shards`: objects with a state that exchange arrays with each
other. `engine` has that of this process, `ray` another; `engine_of` makes it of an argument ``on=``.
"""

from __future__ import annotations

from fedkin.cluster.engine import (
    Engine,
    LocalEngine,
    On,
    Peers,
    Shards,
    engine_of,
    partition,
    running_engine,
    running_on,
)

__all__ = ["Engine", "LocalEngine", "On", "Peers", "Shards", "engine_of", "partition", "running_engine", "running_on"]
