"""The fit of rows that stay in files: by kin, one pass for every Newton step."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from fedkin._base import Say
from fedkin.core import FileRows
from fedkin.errors import ParameterError
from fedkin.fitting.model import ColumnUnits, FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Prepared
from fedkin.fitting.ways.kin import kin_model, with_covariates
from fedkin.graph import Graph
from fedkin.kin import Covariates, hint_of


def fit_files(
    rows: FileRows,
    graph: Graph | None = None,
    options: FitOptions | None = None,
    progress: Say | None = None,
    *,
    covariates: Covariates | None = None,
) -> FittedModel:
    """Fit a model for every site of files that are larger than memory, as `fit_federation` would from rows in memory.

    Parameters
    ----------
    rows : FileRows
        Of `fedkin.core.rows_in_files`, which has the loss and the intercept.
    graph, options, progress, covariates
        As in `fit_federation`; the method is kin.

    Returns
    -------
    FittedModel

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import pyarrow, pyarrow.parquet
    >>> import numpy as np
    >>> from fedkin.fitting import fit_files
    >>> from fedkin.core import rows_in_files
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=120)
    >>> y = np.where(x + rng.logistic(size=120) > 0, "yes", "no")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = pyarrow.table({"site": ["a", "b", "c"] * 40, "x": x, "y": y})
    ...     pyarrow.parquet.write_table(table, pathlib.Path(folder, "a.parquet"))
    ...     rows = rows_in_files(pathlib.Path(folder, "*.parquet"), site="site", target="y")
    ...     model = fit_files(rows)
    >>> model.classes, model.predict({"x": [5.0]}, "a").tolist()
    (('no', 'yes'), ['yes'])
    """
    options = FitOptions() if options is None else options
    if options.chosen != "kin":
        raise ParameterError(
            f"the fused estimator needs the rows of the {rows.loss.name} loss in memory: leave its options out, or "
            "read the table as a whole"
        )
    names, roles = rows.schema.names, rows.roles
    zeros, ones = np.zeros(len(names)), np.ones(len(names))
    about = (names, zeros, ones, rows.classes, roles.target, roles.offset, rows.schema)
    units = ColumnUnits(rows.loss, rows.intercept, *about)
    if progress is not None:
        progress("finding kin, with a pass over the files for every step")
    hint = hint_of(graph, covariates, rows.sites)
    return with_covariates(kin_model(Prepared(cast(Any, rows), cast(Any, rows), units), hint, options), covariates)
