"""What there is to say about a fitted model: its groups, gap, graph, origin and notes, in words and for ``--json``."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from fedkin._base import count
from fedkin.cli.shared.console import as_options
from fedkin.cli.shared.tables import MOST_GROUPS, add_row, members, plain_table
from fedkin.fitting import FittedModel

_MOST_NOTES = 8


def groups_table(model: FittedModel) -> Table:
    """The largest groups and their members."""
    groups = sorted(model.members(), key=len, reverse=True)
    table = plain_table("group", "sites", "members", numbers_from=9)
    for number, group in enumerate(groups[:MOST_GROUPS], start=1):
        add_row(table, str(number), str(len(group)), members(group))
    rest = groups[MOST_GROUPS:]
    if rest:
        add_row(table, "...", str(sum(map(len, rest))), f"in {count(len(rest), 'smaller group')}")
    return table


def note_lines(notes: Mapping[Hashable, Sequence[str]]) -> list[str]:
    """Notes on sites; sites whose notes are the same but for numbers share a line."""
    alike: dict[str, list[Hashable]] = {}
    for site, lines in notes.items():
        alike.setdefault(re.sub(r"[0-9.e+-]*[0-9]", "#", "; ".join(lines)), []).append(site)
    shown = []
    for sites in list(alike.values())[:_MOST_NOTES]:
        differ = any(notes[site] != notes[sites[0]] for site in sites)
        whose = f" (the numbers are those of {sites[0]})" if differ else ""
        shown.append(as_options(f"{members(sites, 40)}: {'; '.join(notes[sites[0]])}{whose}"))
    left = list(alike.values())[_MOST_NOTES:]
    if left:
        shown.append(f"and notes on {count(sum(map(len, left)), 'more site')}: fedkin inspect shows them with --json")
    return shown


def n_distinct(model: FittedModel) -> int:
    """How many different models the sites hold; more than groups where a group is joined, but not fused."""
    stacked = np.concatenate([model.intercept[:, :, None], model.coef], axis=2).reshape(model.n_sites, -1)
    return len(np.unique(stacked, axis=0))


def group_words(model: FittedModel) -> str:
    """The number of groups, and of models where a group holds more than one."""
    words = f"{model.n_groups} among {count(model.n_sites, 'site')}"
    distinct = n_distinct(model)
    return words if distinct == model.n_groups else f"{words}, holding {count(distinct, 'different model')}"


def gap_words(model: FittedModel) -> str:
    """The certificate, and how the solver ended."""
    fused = model.fused
    if fused is None or math.isnan(fused.gap):
        rounds = model.origin is not None and model.origin.get("from") == "rounds"
        return "not certified: that takes the rows of all sites in one place" if rounds else "none"
    return f"{fused.gap:.1e} ({fused.status.replace('_', ' ')})"


def graph_words(model: FittedModel) -> str:
    """What happened to the edges, in words."""
    selection = None if model.fused is None else model.fused.selection
    if selection is None:
        return count(model.graph.n_edges, "edge")
    words = f"{selection.get('kept')} of {selection.get('candidates')} edges kept ({selection.get('method')})"
    return words if "level" not in selection else f"{words[:-1]}, level {selection['level']:g})"


def origin_words(model: FittedModel) -> str:
    """Where a model comes from, and what was promised about it."""
    origin = model.origin
    if origin is not None and origin.get("from") == "rounds":
        return f"{count(int(origin['rounds']), 'round')} of Fed-ADMM between sites"
    if origin is None or origin.get("from") != "summaries":
        return "rows"
    words = f"summaries of sites, {count(int(origin['rounds']), 'message')} of each"
    promised = origin.get("privacy")
    if promised is not None:
        words += f"; differentially private: epsilon {promised['epsilon']:g}, delta {promised['delta']:g} at most"
    return words


def model_document(model: FittedModel) -> dict[str, Any]:
    """What there is to say about a model, for ``--json``."""
    return {
        "method": "fused" if model.kin is None else "kin",
        "loss": model.loss.name,
        "penalty": None if model.fused is None else model.fused.penalty,
        "lam": None if model.fused is None else model.fused.lam,
        "gap": None if model.fused is None or np.isnan(model.fused.gap) else model.fused.gap,
        "n_iter": None if model.fused is None else model.fused.n_iter,
        "status": model.status,
        "target": model.target_name,
        "offset": model.offset_name,
        "features": list(model.feature_names),
        "classes": None if model.classes is None else list(model.classes),
        "n_sites": model.n_sites,
        "n_rows": int(model.n_samples.sum()),
        "n_groups": model.n_groups,
        "n_distinct_models": n_distinct(model),
        "groups": [list(group) for group in sorted(model.members(), key=len, reverse=True)],
        "edges": model.graph.n_edges,
        "selection": None if model.fused is None or model.fused.selection is None else dict(model.fused.selection),
        "origin": None if model.origin is None else dict(model.origin),
        "notes": [{"site": site, "notes": list(lines)} for site, lines in model.notes.items()],
    }
