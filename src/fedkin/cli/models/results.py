"""What a fit ends with on the terminal: the groups, a few facts, and where the model is."""

from __future__ import annotations

from pathlib import Path

from fedkin._base import count
from fedkin.cli.shared.console import note, output
from fedkin.cli.shared.kin_words import kin_facts, kin_table
from fedkin.cli.shared.tables import MOST_GROUPS, gap_words, group_words, groups_table, note_lines, print_facts
from fedkin.fitting import FittedModel
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
