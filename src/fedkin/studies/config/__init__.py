"""A study as data.

In: a TOML file, or the name of a built-in one. Out: a checked `Study`, its `Cell`s with their seeds, and the functions
that it names. Imports nothing of the other parts of `fedkin.studies`.
"""

from __future__ import annotations

from fedkin.studies.config.entries import FIGURES, check_names
from fedkin.studies.config.functions import find_function, modules_beside
from fedkin.studies.config.read import BUILT_IN, load_study, parse_study
from fedkin.studies.config.study import Cell, Study, replication_seed

__all__ = [
    "BUILT_IN",
    "FIGURES",
    "Cell",
    "Study",
    "check_names",
    "find_function",
    "load_study",
    "modules_beside",
    "parse_study",
    "replication_seed",
]
