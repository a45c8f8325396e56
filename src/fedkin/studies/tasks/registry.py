"""The built-in tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from fedkin.studies.config import find_function
from fedkin.studies.tasks.replication import Replication

Task = Callable[[Replication], Iterable[dict[str, Any]]]

#: The function of each; imported when it is asked for.
BUILT_IN_TASKS: Mapping[str, str] = {
    "estimation": "fedkin.studies.tasks.estimation:estimation",
    "selection": "fedkin.studies.tasks.edge_selection:edge_selection",
    "convergence": "fedkin.studies.tasks.algorithms:convergence",
    "availability": "fedkin.studies.tasks.algorithms:availability",
    "election": "fedkin.studies.tasks.election:election",
}


def task_function(name: str) -> Task:
    """The task with a built-in name, or the function called "module:function"."""
    return find_function(BUILT_IN_TASKS.get(name, name), f"task {name!r}")


def task_options(name: str) -> Mapping[str, Sequence[str]]:
    """Options of a built-in task; those that are lists of names come with the names to choose from."""
    options: Mapping[str, Sequence[str]] = import_module(BUILT_IN_TASKS[name].partition(":")[0]).OPTIONS[name]
    return options
