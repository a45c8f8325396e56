"""What a fit ends with on the terminal: the groups, a few facts, and where the model is."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedkin._base import count
from fedkin.cli.shared.console import note, output
from fedkin.cli.shared.kin_words import kin_facts, kin_table
from fedkin.cli.shared.model_words import gap_words, group_words, groups_table, note_lines
from fedkin.cli.shared.tables import MOST_GROUPS, add_row, plain_table, print_facts
from fedkin.fitting import Comparison, FittedModel
from fedkin.kin import Kin


def print_model(out: Path, model: FittedModel, compared: bool) -> None:
    """Groups, facts, where the model is, and remarks; ``compared``: whether a comparison held rows out before."""
    facts = _fused_facts(model) if model.kin is None else _kin_facts(model.kin)
    rows = f"{out}, fitted on all {count(int(model.n_samples.sum()), 'row')}"
    print_facts({**facts, "saved": rows + (" (the comparison held some out)" if compared else "")})
    for words in note_lines(model.notes):
        note(words)


def _kin_facts(kin: Kin) -> dict[str, str]:
    console = output()
    if kin.resolved:
        console.print(f"{count(int(kin.groups.max()) + 1, 'group')} of sites that are alike", style="bold")
        console.print(kin_table(kin))
    facts = kin_facts(kin)
    return {name: facts[name] for name in ("groups", "sampler")}


def _fused_facts(model: FittedModel) -> dict[str, str]:
    if 1 < model.n_clusters <= MOST_GROUPS:
        console = output()
        console.print(f"{count(model.n_clusters, 'group')} of devices that belong together", style="bold")
        console.print(groups_table(model))
    rule = ", one standard error" if model.options["cv_rule"] == "1se" else ""
    how = f"cross-validation{rule}" if model.options["lam"] == "cv" else "given"
    return {"groups": group_words(model), "lam": f"{model.lam:.4g} ({how})", "gap": gap_words(model)}


def print_comparison(comparison: Comparison) -> None:
    """The errors of all methods on held-out rows, who gains by it and who loses, and the verdict."""
    table = plain_table("method", comparison.metric, "s.e.", "more than Fedkin", "s.e. of it", *comparison.more)
    best = min(comparison.errors, key=comparison.mean)
    for name in comparison.errors:
        extra = [f"{values[name]:.4g}" for values in comparison.more.values()]
        error, apart = comparison.standard_error(name), comparison.difference_error(name)
        cells = ["-", "-"] if name == "Fedkin" else [f"{comparison.difference(name):+.3g}", f"{apart:.2g}"]
        spread = "-" if np.isnan(error) else f"{error:.2g}"
        add_row(
            table,
            name,
            f"{comparison.mean(name):.4g}",
            spread,
            *cells,
            *extra,
            style="bold green" if name == best else "",
        )
    console = output()
    splits = "one split" if comparison.repeats == 1 else f"{comparison.repeats} splits"
    console.print(f"\nError on rows that were held out: {comparison.test_size:.0%} of them, {splits}", style="bold")
    console.print(f"({comparison.metric}: lower is better)")
    console.print(table)
    for line in _site_lines(comparison):
        console.print(line, soft_wrap=True)
    console.print(comparison.verdict, style="bold", soft_wrap=True)


def _site_lines(comparison: Comparison) -> list[str]:
    """Who gains and who loses against models of their own."""
    gain, error = comparison.gains()
    known = ~np.isnan(gain)
    if known.sum() < 2:
        return []
    clearly = known & (np.abs(gain) > 2 * np.nan_to_num(error, nan=np.inf))  # by two standard errors
    better, worse = known & (gain > 0), known & (gain < 0)
    said = (
        f"sites: better than with their own models {better.sum()} ({(clearly & better).sum()} clearly), "
        f"worse {worse.sum()} ({(clearly & worse).sum()} clearly)"
    )
    if not known.all():
        said += f"; {count(int((~known).sum()), 'site')} had no row to hold out"
    worst = [u for u in np.argsort(np.where(known, gain, np.inf))[:3].tolist() if gain[u] < 0]
    if not worst:
        return [said]
    named = ", ".join(f"{comparison.devices[u]} ({-gain[u]:+.3g})" for u in worst)
    return [said, f"worst: {named}"]
