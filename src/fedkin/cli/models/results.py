"""What a fit ends with: the comparison, the groups, a few facts and where the model is; or all of it as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.table import Table

from fedkin import __version__
from fedkin._base import Mask, count
from fedkin.cli.models.edge_files import EdgeFiles
from fedkin.cli.shared.console import note, output, print_json
from fedkin.cli.shared.kin_words import kin_document, kin_facts, kin_table
from fedkin.cli.shared.model_words import gap_words, group_words, groups_table, model_document, note_lines
from fedkin.cli.shared.options import flag
from fedkin.cli.shared.tables import MOST_GROUPS, add_row, plain_table, print_facts, rounded
from fedkin.errors import SolverError
from fedkin.fitting import Comparison, FitOptions, FittedModel
from fedkin.kin import Kin


def print_model(out: Path, model: FittedModel, compared: bool, n_rows: int | None = None) -> None:
    """Groups, facts, where the model is, and remarks; ``compared``: whether a comparison held rows out before.

    Where the table has more rows, ``n_rows``, the model is that of a split.
    """
    facts = _fused_facts(model) if model.kin is None else _kin_facts(model, model.kin)
    fitted = int(model.n_samples.sum())
    if n_rows is None or fitted == n_rows:
        rows = f"all {count(fitted, 'row')}" + (" (the comparison held some out)" if compared else "")
    else:
        rows = f"{fitted} of {count(n_rows, 'row')}, those of the last split: the fit of all rows was interrupted"
    print_facts({**facts, "saved": f"{out}, fitted on {rows}"})
    for words in note_lines(model.notes):
        note(words)


def _kin_facts(model: FittedModel, kin: Kin) -> dict[str, str]:
    console = output()
    if kin.resolved:
        console.print(f"{count(int(kin.groups.max()) + 1, 'group')} of sites that are alike", style="bold")
        console.print(kin_table(kin))
    facts = kin_facts(model)
    return {name: facts[name] for name in ("groups", "sampler")}


def _fused_facts(model: FittedModel) -> dict[str, str]:
    assert model.fused is not None
    if 1 < model.n_groups <= MOST_GROUPS:
        console = output()
        console.print(f"{count(model.n_groups, 'group')} of sites that belong together", style="bold")
        console.print(groups_table(model))
    rule = ", one standard error" if model.options["cv_rule"] == "1se" else ""
    how = f"cross-validation{rule}" if model.options["lam"] == "cv" else "given"
    return {"groups": group_words(model), "lam": f"{model.fused.lam:.4g} ({how})", "gap": gap_words(model)}


def print_comparison(comparison: Comparison, fused: bool = False) -> None:
    """The errors of all methods on held-out rows, who gains by it and who loses, and the verdict."""
    splits = "one split" if comparison.repeats == 1 else f"{comparison.repeats} splits"
    console = output()
    if comparison.kind == "folds":
        rows = count(int(comparison.held_out.sum()), "row")
        console.print(f"\nError on {rows}, each predicted without its fold", style="bold")
    else:
        console.print(f"\nError on rows that were held out: {comparison.test_size:.0%} of them, {splits}", style="bold")
    chosen = "; edges and lam were chosen with all rows" if fused and comparison.kind == "folds" else ""
    console.print(f"({comparison.metric}: lower is better{chosen})")
    means = {name: comparison.mean(name) for name in comparison.errors}
    console.print(_errors_table(comparison, means, comparison.more))
    for line in _site_lines(comparison):
        console.print(line, soft_wrap=True)
    console.print(comparison.verdict, style="bold", soft_wrap=True)


def _errors_table(
    comparison: Comparison, means: Mapping[str, float], more: Mapping[str, Mapping[str, float]]
) -> Table:
    """Errors with standard errors, and how much they are more than Fedkin's."""
    table = plain_table("method", comparison.metric, "s.e.", "more than Fedkin", "s.e. of it", *more)
    best = min(means, key=lambda name: means[name])
    for name, mean in means.items():
        apart = [rounded(comparison.difference(name), sign=True), rounded(comparison.difference_error(name))]
        cells = ["-", "-"] if name == "Fedkin" else apart
        extra = [rounded(values[name], 4) for values in more.values()]
        spread = rounded(comparison.standard_error(name))
        add_row(table, name, rounded(mean, 4), spread, *cells, *extra, style="bold green" if name == best else "")
    return table


def check_converged(model: FittedModel, how: FitOptions) -> None:
    """Raise `SolverError`, with what to do about it, for a model that has not converged."""
    if model.fused is None or model.status == "converged":
        return
    more = "rounds" if how.solver == "fedadmm" else "max_iter"
    raise SolverError(
        f"the fit did not converge, so no model was saved: after {count(model.fused.n_iter, 'iteration')} the relative "
        f"gap is {model.fused.gap:.1e}, not {how.tol:.1e}. Raise {flag(more)}, accept a larger {flag('tol')}, or add "
        f"{flag('ridge')} 0.001"
    )


def method_words(model: FittedModel) -> str:
    """How a model was fitted."""
    return f"{model.fused.penalty} penalty" if model.fused is not None else "partial pooling with groups (kin)"


def print_document(
    data: Path, files: EdgeFiles, out: Path, model: FittedModel, comparison: Comparison | None
) -> None:
    """All of it as JSON."""
    print_json(
        {
            "fedkin_version": __version__,
            "model": str(out),
            "data": str(data),
            "graph": None if files.graph is None else str(files.graph),
            "covariates": None if files.covariates is None else str(files.covariates),
            "comparison": None if comparison is None else comparison.plain(),
            **model_document(model),
            "kin": kin_document(model),
        }
    )


def _site_lines(comparison: Comparison) -> list[str]:
    """Who gains and who loses against models of their own."""
    gain, error = comparison.gains()
    known = ~np.isnan(gain)
    if known.sum() < 2:
        return []
    clearly = known & (np.abs(gain) > 2 * np.nan_to_num(error, nan=np.inf))  # by two standard errors
    better, worse = known & (gain > 0), known & (gain < 0)

    def told(which: Mask) -> str:
        sure = "" if comparison.repeats == 1 else f" ({(clearly & which).sum()} clearly)"
        return f"{which.sum()}{sure}"

    said = f"sites: better than with their own models {told(better)}, worse {told(worse)}"
    if not known.all():
        said += f"; {count(int((~known).sum()), 'site')} had no row to hold out"
    worst = [u for u in np.argsort(np.where(known, gain, np.inf))[:3].tolist() if gain[u] < 0]
    if not worst:
        return [said]
    named = ", ".join(f"{comparison.sites[u]} ({rounded(-gain[u], 3, sign=True)})" for u in worst)
    return [said, f"most is lost at (error more by): {named}"]
