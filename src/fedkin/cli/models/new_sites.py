"""Sites that were not part of a fit: their models from labelled rows, or from what all other sites have in common."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path

import numpy as np

from fedkin._base import AnyArray, count, in_file, listed
from fedkin.cli.shared.console import note
from fedkin.data import read_columns, site_ids
from fedkin.errors import DataError, UnknownSiteError
from fedkin.fitting import FittedModel, position_of


def models_of(
    fitted: FittedModel, sites: Sequence[Hashable], new: bool, known_rows: Path | None, column: str | None
) -> dict[Hashable, FittedModel]:
    """The model of every site: the fitted one, or for a new site one that it gets from its labelled rows, if any."""
    unknown = [site for site in dict.fromkeys(sites) if site not in fitted.index]
    if unknown and not new:
        try:
            position_of(unknown[0], fitted.index)
        except UnknownSiteError as error:
            hint = "" if fitted.kin is None else "; --new-site predicts it from what all sites have in common"
            raise UnknownSiteError(f"{error}{hint}") from None
    if new and not unknown:
        note("--new-site makes no difference: all sites of the table were part of the fit, and have their models")
    models: dict[Hashable, FittedModel] = {site: fitted for site in sites if site in fitted.index}
    labelled = {} if known_rows is None else _by_site(known_rows, column)
    idle = [name for name in labelled if name not in {str(site) for site in unknown}]
    if idle:
        note(f"--rows of {listed(idle)} are not used: they are for sites of the table that were not part of the fit")
    for site in unknown:
        rows = labelled.get(str(site))
        found = fitted.join(rows, name=site)
        models[site] = found.model
        n = 0 if rows is None else len(next(iter(rows.values())))
        words = f"new site {site}: a model from {count(n, 'labelled row')} and what all sites have in common"
        if len(found.groups):
            likely = int(np.argmax(found.groups))
            words += f"; group {likely + 1} with probability {found.groups[likely]:.2f}"
        note(words)
    return models


def _by_site(path: Path, column: str | None) -> dict[str, dict[str, AnyArray]]:
    """Labelled rows of each site."""
    with in_file(path, DataError):
        columns = read_columns(path)
        if column is None or column not in columns:
            raise DataError(f"say which column holds the sites: --site COL; there are {listed(columns, 20)}")
        ids = np.array([str(site) for site in site_ids(columns[column])], dtype=object)
    return {site: {name: values[ids == site] for name, values in columns.items()} for site in dict.fromkeys(ids)}
