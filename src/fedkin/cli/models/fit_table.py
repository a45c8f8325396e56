"""What ``fedkin fit`` does with the rows of a table: checks, the comparison on held-out rows, the model of all rows."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np

from fedkin._base import Mask, Say, count, listed
from fedkin.cli.models.hints import with_loss
from fedkin.cli.models.results import check_converged
from fedkin.cli.shared.console import Interrupted, note, stopping_early
from fedkin.data import Federation, Schema, level_text
from fedkin.errors import ConvergenceWarning, DataError, DegenerateSiteWarning
from fedkin.fitting import Comparison, FitOptions, FittedModel, compare, fit
from fedkin.graph import Graph
from fedkin.losses import loss_kind

#: Logarithm of the largest exposure that counts may have.
_MOST_LOG_EXPOSURE = 40.0


@dataclass(frozen=True)
class Comparing:
    """How the comparison is made, and what Ctrl-C does meanwhile."""

    test_size: float
    repeats: int
    keep_best: bool


def checked(rows: Federation, how: FitOptions) -> FitOptions:
    """Refuse what would give a model that is nonsense, or none at all; the options with the loss that suits the target.

    Remarks on what may be meant otherwise, and names sites with a single row.
    """
    y, offset = rows.y, rows.offset
    if y is not None and len(y) > 1 and (y == y[0]).all():
        raise DataError(
            f"the target {rows.target_name!r} is {level_text(y[0])} in all {len(y)} rows: there is nothing to predict; "
            "name another column with --target"
        )
    rates = how.loss != "auto" and loss_kind(how.loss).link == "log"
    if rates and offset is not None and np.abs(offset).max() > _MOST_LOG_EXPOSURE:
        raise DataError(
            f"the offset reaches {offset[np.abs(offset).argmax()]:g}, and its exponential is no exposure: an offset of "
            "counts is the logarithm of the exposure; add a column with it"
        )
    _remark_on_sites(rows)
    return with_loss(rows, how)


def _remark_on_sites(rows: Federation) -> None:
    """Name sites with a single row, and those where the target is always the same."""
    held, y = np.diff(rows.starts), rows.y
    if len(held) == 1:
        note(f"there is one site only, {rows.sites[0]!r}: kin needs several sites; is --site the right column?")
    single = _named(rows, held == 1)
    if single:
        note(f"one row only at {single}: it is never held out, and the model there rests on the others")
    if y is None:
        return
    values, code = np.unique(y, return_inverse=True)
    low, high = (every.reduceat(code, rows.starts[:-1]) for every in (np.minimum, np.maximum))
    flat = _named(rows, (low == high) & (held > 2))
    if not flat:
        return
    if y.dtype.kind == "f" and values.size > 2:
        note(f"the target {rows.target_name!r} never changes at {flat}: check that it was recorded there")
    else:
        note(f"the target {rows.target_name!r} has one class only at {flat}: how it varies there rests on other sites")


def _named(rows: Federation, which: Mask) -> str:
    sites = [rows.sites[u] for u in np.flatnonzero(which).tolist()]
    return f"site {sites[0]!r}" if len(sites) == 1 else f"{len(sites)} sites ({listed(sites)})" if sites else ""


def fit_table(
    federation: Federation,
    graph: Graph | None,
    how: FitOptions,
    how_compared: Comparing,
    say: Say,
    schema: Schema | None,
) -> tuple[Comparison | None, FittedModel]:
    """The comparison on held-out rows, and the model of all rows, which has converged."""
    if how_compared.test_size > 0 and (np.diff(federation.starts) <= 1).all():
        raise DataError(
            "every site has one row only, so that none can be held out: is --site the right column? If so, "
            "--test-size 0 fits without a comparison"
        )
    comparison, last = None, None
    with warnings.catch_warnings(), stopping_early(how_compared.keep_best):
        # both are said by the model: by its status, and by its notes
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", DegenerateSiteWarning)
        try:
            if how_compared.test_size > 0:
                comparison = compare(
                    federation,
                    graph,
                    how,
                    repeats=how_compared.repeats,
                    test_size=how_compared.test_size,
                    keep_best=how_compared.keep_best,
                    progress=lambda words: say(f"comparison: {words}"),
                    schema=schema,
                )
                last = comparison.models[-1]["Fedkin"]
            model = fit(federation, graph, how, lambda words: say(f"all rows: {words}"), schema)
        except KeyboardInterrupt:
            if last is None:
                note("--keep-best: no split was done, so there is nothing to keep yet")
                raise Interrupted from None
            model = last
            note(f"interrupted: the model is that of the last split, {count(int(last.n_samples.sum()), 'row')}")
    if model.fused is not None and model.status == "interrupted" and how_compared.keep_best:
        gap = model.fused.gap
        note(f"interrupted: the model is as far as the fit of all rows came, with a relative gap of {gap:.1e}")
    else:
        check_converged(model, how)
    for part in () if comparison is None else comparison.models:
        tried = part["Fedkin"].fused
        if tried is not None and tried.status != "converged":
            gap = tried.gap
            note(f"in the comparison, the fit of Fedkin did not converge (relative gap {gap:.1e}); on all rows it did")
            break
    return comparison, replace(model, comparison=None if comparison is None else comparison.plain())
