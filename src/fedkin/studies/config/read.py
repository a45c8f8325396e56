"""From a TOML file to a `Study`.

::

    [study]
    name = "estimation"                  # of its directory (with --quick: estimation-quick); letters, digits, - and _
    title = "Estimation error"
    task = "estimation"                  # what one replication does: a built-in name or "module:function"
    seed = 1
    replications = 100
    block = 5                            # replications per cell, the unit that is cached
    shared = ["level"]                   # grid entries that are compared on the same random numbers; optional

    [[grid]]                             # each [[grid]] is a product of lists; several are put one after the other
    n_devices = [20, 40]
    varrho = [0.1, 0.2]

    [options]                            # handed to the task as they are
    generator = "paper"                  # or "module:function"

    [quick]                              # what --quick changes
    replications = 2
    grid = [{n_devices = [20], varrho = [0.1]}]

    [[figure]]                           # see `fedkin.studies.present.figures`
    kind = "lines"

    [[table]]                            # see `fedkin.studies.present.tables`
    name = "means"
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fedkin.errors import ParameterError
from fedkin.studies.config.entries import QUICK, STUDY, check_drawings, check_entries, check_shape
from fedkin.studies.config.study import SUFFIX, Study

#: The studies that come with Fedkin, in the order in which ``fedkin study all`` runs them.
BUILT_IN = ("estimation", "sensitivity", "convergence", "availability", "selection", "rate", "election")


def load_study(source: str | Path, *, quick: bool = False) -> Study:
    """Read a study.

    Parameters
    ----------
    source : str or Path
        The name of a built-in study, or a TOML file.
    quick : bool
        Apply the changes of the file's ``[quick]`` table: fewer points and replications.

    Raises
    ------
    ParameterError
        If the file is missing, is not TOML or has entries that mean nothing.
    """
    if isinstance(source, str) and source in BUILT_IN:
        text = resources.files("fedkin.studies.config").joinpath(f"built_in/{source}.toml").read_text(encoding="utf-8")
        return parse_study(text, f"the built-in study {source!r}", quick=quick)
    path = Path(source)
    if isinstance(source, Path) and not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise ParameterError(f"--config: {path} {what}; give the path of a study's TOML file")
    if not path.is_file():
        raise ParameterError(
            f"there is no study {str(source)!r}: give one of {', '.join(BUILT_IN)}, or the path of a TOML file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} cannot be read: {error}") from None
    return parse_study(text, str(path), quick=quick, folder=path.resolve().parent)


def parse_study(text: str, where: str, *, quick: bool = False, folder: Path | None = None) -> Study:
    """The study in a TOML text; ``where`` names it in messages, ``folder`` is where its modules may lie."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ParameterError(f"{where} is not valid TOML: {error}") from None
    check_shape(raw, where)
    head, options, changes = (dict(raw.get(name, {})) for name in ("study", "options", "quick"))
    grid, figures, tables = raw.get("grid", [{}]), raw.get("figure", []), raw.get("table", [])
    check_entries(head, STUDY, f"{where}, [study]")
    if head["name"].endswith(SUFFIX):
        words = f"name = {head['name']!r} ends in {SUFFIX}, as directories of quick runs do; choose another"
        raise ParameterError(f"{where}, [study]: {words}")
    check_entries(changes, QUICK, f"{where}, [quick]")  # whether it is used or not
    list(_points(changes.get("grid", []), f"{where}, [quick]"))
    check_drawings("figure", figures, where)
    check_drawings("table", tables, where)
    full = head.get("replications", Study.replications)
    if quick:
        grid = changes.pop("grid", grid)
        options.update(changes.pop("options", {}))
        head.update(changes)
    return Study(
        points=tuple(_points(grid, where)),
        options=options,
        figures=tuple(figures),
        tables=tuple(tables),
        quick=quick,
        folder=folder,
        source=where,
        full_replications=full,
        **head,
    )


def _points(grid: Any, where: str) -> Iterator[dict[str, Any]]:
    products = [grid] if isinstance(grid, Mapping) else grid
    if not isinstance(products, list) or not all(isinstance(one, Mapping) for one in products):
        raise ParameterError(f"{where}: grid must be tables of lists, [[grid]] with lines name = [...], got {grid!r}")
    seen = set()
    for product in products:
        lists = {name: values if isinstance(values, list) else [values] for name, values in product.items()}
        for name, values in lists.items():
            if not values or not all(isinstance(value, int | float | str | bool) for value in values):
                raise ParameterError(f"{where}: grid entry {name!r} must be a list of numbers or texts, got {values!r}")
            if len({isinstance(value, str) for value in values}) > 1:
                raise ParameterError(f"{where}: grid entry {name!r} has numbers and texts, {values!r}; give one kind")
        for chosen in itertools.product(*lists.values()):
            point = dict(zip(lists, chosen, strict=True))
            if (mark := json.dumps(point, sort_keys=True)) not in seen:
                seen.add(mark)
                yield point
