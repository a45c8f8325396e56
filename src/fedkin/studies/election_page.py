"""Make the tables, figure, maps and claims of the election study from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import Array, Index, count
from fedkin.graph import Graph
from fedkin.report.payload import TILES
from fedkin.studies.claims import Check, doubt
from fedkin.studies.election import METHODS
from fedkin.studies.figures import ResultTable, add_legend
from fedkin.studies.replications import Row, Sample, distinct, paired_difference, summarize

#: Accuracies of the paper's table, mean and standard deviation.
PUBLISHED: Mapping[str, tuple[float, float]] = {
    "local": (0.741, 0.034),
    "global": (0.752, 0.012),
    "fed-loc": (0.793, 0.019),
    "fed-his": (0.742, 0.011),
}
LABELS = {name: label for name, (label, _) in METHODS.items()}
PROTOCOLS: Mapping[str, str] = {
    "pooled": "pooled z-scores, intercept",
    "logs": "pooled z-scores of logarithms, intercept",
    "state": "z-scores within states, no intercept",
}
MAIN = "pooled"
MEASURES = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "log_loss": "log-loss (nats)"}
CHOSEN = {"inner_log_loss": "inner log-loss", "kept_edges": "edges kept", "lam": "lam", "ridge": "ridge"}


def accuracy_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> ResultTable:
    """Make the table of scores of every method, mean (standard deviation) over splits, as the paper prints them."""
    columns = {**MEASURES, **CHOSEN}
    tables = [summarize(rows, ["standardize", "method"], name) for name in columns]
    published = {name: f"{value:.3f} ({sd:.3f})" for name, (value, sd) in PUBLISHED.items()}
    cells = [
        [PROTOCOLS.get(key[0], key[0]), LABELS[key[1]], published.get(key[1], ""), *(one.get(key) for one in tables)]
        for key in tables[0]
    ]
    caption = (
        "Mean (standard deviation) over the splits; edges, lam and ridge are means of what was chosen. The inner "
        "log-loss is that of held-out training rows: the only number that may choose between protocols."
    )
    head = ["protocol", "method", "published accuracy", *columns.values()]
    return ResultTable(spec["name"], head, cells, caption, brackets="sd")


#: Pairs of methods that are compared split by split.
PAIRS = (
    *((fed, other) for fed in ("fed-loc", "fed-his") for other in ("local", "global", "state-intercepts")),
    *(("kin", other) for other in ("local", "global", "state-intercepts", "fed-loc", "fed-his", "boosting")),
)


def difference_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> ResultTable:
    """Make the table of Fed-ADMM and kin minus the others, split by split."""
    cells = []
    for protocol in distinct(rows, "standardize"):
        chosen = [row for row in rows if row["standardize"] == protocol]
        known = set(distinct(chosen, "method"))
        for pair in (pair for pair in PAIRS if known.issuperset(pair)):
            name = f"{LABELS[pair[0]]} minus {LABELS[pair[1]]}"
            found = [paired_difference(chosen, "method", pair, measure) for measure in MEASURES]
            cells.append([PROTOCOLS.get(protocol, protocol), name, *found])
    caption = "Mean paired difference over the splits, with its standard error in brackets."
    return ResultTable(spec["name"], ["protocol", "difference", *MEASURES.values()], cells, caption)


def state_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> ResultTable:
    """Make the table of results by state and their stability over the splits."""
    found = groups(rows)
    cells = [
        [state, found.name(u) or "alone", f"{found.stability[u]:.2f}", Sample.from_values(found.measure[:, u])]
        for u, state in enumerate(found.states)
    ]
    caption = (
        "Group: states that are connected in the selected graph D_loc in more than half of the splits. Stability: mean "
        "over splits of the share of the other states on which a split agrees with that grouping. Last column: share "
        "of a state's coefficients that Fed-ADMM with D_loc gives the value which most states have, mean (standard "
        "deviation) over splits."
    )
    head = ["state", "group in D_loc", "stability", "coefficients shared with most states"]
    return ResultTable(spec["name"], head, cells, caption, brackets="sd")


@dataclass(frozen=True, eq=False)
class Groups:
    """Majority grouping of the states: two states share a group if they do so in more than half of the splits."""

    states: list[str]
    labels: Index  # (V,), the largest group is 0
    stability: Array  # (V,), share of (split, other state) pairs that agree with the grouping
    together: Array  # (V, V), share of splits in which two states are in one group
    measure: Array  # (splits, V), what else was found about each state
    note: str  # how often there were groups at all

    def name(self, u: int) -> str:
        """Return a letter, or "" for a state that is not connected to any other."""
        label = int(self.labels[u])
        return chr(ord("A") + label) if int((self.labels == label).sum()) > 1 else ""


def groups(rows: Sequence[Row], method: str = "fed-loc", standardize: str = MAIN) -> Groups:
    """Return the grouping over all splits of one protocol.

    For D_loc, it has the share of coefficients that a state has in common with most others; for kin, the states'
    distances from the common mean.
    """
    chosen = [row for row in rows if row["method"] == method and row["standardize"] == standardize]
    states = list(chosen[0]["states"])
    labels = np.array([row["group"] for row in chosen])
    same = labels[:, :, None] == labels[:, None, :]
    together = same.mean(axis=0)
    i, j = np.tril_indices(len(states), -1)
    often = together[i, j] > 0.5
    components = Graph.from_indices(range(len(states)), np.column_stack([i, j])[often]).components()
    by_size = np.argsort(-np.bincount(components), kind="stable")
    final = np.argsort(by_size)[components]
    agree = same == (final[:, None] == final[None, :])
    stability = (agree.sum(axis=2) - 1).mean(axis=0) / max(len(states) - 1, 1)
    if method == "kin":
        measure = np.array([row["distance"] for row in chosen])
        note = f"resolved in {sum(bool(row['resolved']) for row in chosen)} of {len(chosen)} splits"
    else:
        measure = np.array([row["common_share"] for row in chosen])
        full = sum(row["kept_edges"] == len(i) for row in chosen)
        note = f"in {full} of {len(chosen)} splits the test keeps all {len(i)} edges"
    return Groups(states, final, stability, together, measure, note)


MODELS = ("local", "global", "state-intercepts", "fed-loc", "fed-his", "kin")
_LINES: Mapping[str, Mapping[str, Any]] = {
    "always-republican": {"color": "#777777", "linestyle": (0, (1, 1.5))},
    "state-majority": {"color": "#777777", "linestyle": (0, (5, 2))},
    "boosting": {"color": "#000000", "linestyle": (0, (5, 1, 1, 1))},
}


def accuracy(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Draw accuracies with their sds over splits, between the floors and the ceiling, next to the published ones."""
    from matplotlib.figure import Figure

    protocols = distinct(rows, "standardize")
    figure = Figure(figsize=(4.3 * len(protocols) + 0.8, 3.4), layout="constrained")
    axes = figure.subplots(1, len(protocols), sharey=True, sharex=True, squeeze=False)[0]
    table = summarize(rows, ["standardize", "method"], "accuracy")
    for axis, protocol in zip(axes, protocols, strict=True):
        places = np.arange(len(MODELS))[::-1]
        for place, method in zip(places, MODELS, strict=True):
            if (found := table.get((protocol, method))) is None:
                continue
            bars = {"xerr": np.nan_to_num(found.sd), "label": "here: mean ± sd over splits", "color": "#D55E00"}
            axis.errorbar(found.mean, place + 0.12, **bars, marker="o", markersize=6, capsize=3, linestyle="none")
            if method in PUBLISHED:
                value, sd = PUBLISHED[method]
                bars = {"xerr": sd, "label": "published: mean ± sd", "color": "#0072B2", "markerfacecolor": "white"}
                axis.errorbar(value, place - 0.12, **bars, marker="D", markersize=5, capsize=3, linestyle="none")
        for method, style in _LINES.items():
            if (line := table.get((protocol, method))) is not None:
                axis.axvline(line.mean, linewidth=1.2, zorder=1, label=LABELS[method], **style)
        axis.set_yticks(places, [LABELS[method] for method in MODELS])
        axis.set_ylim(-0.6, len(MODELS) - 0.4)
        axis.set_title(PROTOCOLS.get(protocol, protocol), loc="left")
        axis.grid(axis="y", visible=False)
    figure.supxlabel("accuracy: share of held-out counties predicted right", fontsize=10)
    add_legend(figure, axes)
    return figure


# --- maps -------------------------------------------------------------------------------------------------------------


def state_map(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Map the share of coefficients that each state has in common with most others, and its group in D_loc."""
    found = groups(rows)
    limits = (min(float(found.measure.mean(axis=0).min()), 0.9), 1.0)
    return _map(found, "Groups of D_loc", limits, "share of coefficients in common with most states")


def kin_map(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Map the distance of each state from the mean over states, and its kin group."""
    found = groups(rows, "kin")
    limits = (0.0, float(found.measure.mean(axis=0).max()))
    return _map(found, "Groups of kin", limits, "distance from the mean over states (log-odds)")


def _map(found: Groups, title: str, limits: tuple[float, float], label: str) -> Any:
    """Colour tiles of states by the mean of the measure over splits, with the letters of groups."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axis, scale = figure.subplots(), ScalarMappable(Normalize(*limits), "cividis")
    axis.set_aspect("equal")
    axis.set_axis_off()
    values = dict(zip(found.states, found.measure.mean(axis=0), strict=True))
    for state, (x, y) in TILES.items():
        colour = scale.to_rgba(values[state]) if state in values else (1.0, 1.0, 1.0, 1.0)
        text = state
        if state in values:
            letter = found.name(found.states.index(state)) if found.labels.any() else ""  # none where all are together
            text = f"{state} {letter}".strip() + f"\n{values[state]:.2f}"
        ink = "white" if float(np.dot(colour[:3], (0.3, 0.6, 0.1))) < 0.5 else "black"
        axis.fill([x - 0.47, x + 0.47, x + 0.47, x - 0.47], [y - 0.47, y - 0.47, y + 0.47, y + 0.47], color=colour)
        axis.text(x, y, text, color=ink if state in values else "#999999", ha="center", va="center", fontsize=7)
    axis.invert_yaxis()
    axis.set_title(f"{title}: {found.note}", loc="left")
    figure.colorbar(scale, ax=axis, shrink=0.6, label=label)
    return figure


# --- claims -----------------------------------------------------------------------------------------------------------


def checks(rows: Sequence[Row]) -> list[Check]:
    """Check the sentences of section 6 and the numbers of its table, under the default protocol; then check kin."""
    main = [row for row in rows if row["standardize"] == MAIN]
    accuracy = {key[0]: one for key, one in summarize(main, ["method"], "accuracy").items()}
    floor = accuracy["always-republican"].mean

    claim = 'Section 6: "FedADMM with D_loc performs best" of the four of Table 1, by more than two standard errors'
    out, nearest = _ahead(main, claim, "fed-loc", ("local", "global", "fed-his"), "accuracy")
    if not out.holds:
        out = replace(out, reason=f"it is not clearly ahead of {nearest}, whose graph is nearly as good here")
    found = [out]
    one = paired_difference(main, "method", ("global", "local"), "accuracy")
    in_doubt = doubt([one.interval()], low=0.0, form="+.4f")
    found.append(Check('Section 6: "Global estimator outperforms the local one"', _words(one), one.mean > 0, in_doubt))
    one = paired_difference(main, "method", ("fed-his", "local"), "accuracy")
    claim = 'Section 6: "FedADMM with D_his performs on par with local estimator" (within two standard errors)'
    on_par = abs(one.mean) <= 2 * one.error
    why = "" if on_par else "sharing along D_his helps here, by a little"
    found.append(Check(claim, _words(one), on_par, reason=why))
    for name, (value, sd) in PUBLISHED.items():
        method = LABELS[name].removesuffix(", ridge validated")
        claim = f"Table 1: accuracy of {method} is {value:.3f}, within its standard deviation {sd:.3f}"
        mine, holds = accuracy[name], abs(accuracy[name].mean - value) <= sd
        in_doubt = doubt([mine.interval()], value - sd, value + sd, ".3f")
        why = "" if holds else f"the published number lies below a constant answer, which is right in {floor:.1%}"
        found.append(Check(claim, f"{mine.mean:.3f}", holds, in_doubt, reason=why))
    both = groups(rows)
    sizes = np.bincount(both.labels)
    edges = [int(row["kept_edges"]) for row in main if row["method"] == "fed-loc"]
    n_pairs = len(both.states) * (len(both.states) - 1) // 2
    kept = f"{min(edges)} to {max(edges)} of {n_pairs} edges kept; "
    why = "with as many predictors as counties, local fits are so uncertain that the test keeps nearly all edges"
    several, alone = int((sizes > 1).sum()), int((sizes == 1).sum())
    for claim, seen, holds in (
        ("D_loc has two main groups of states", count(several, "group"), several == 2),
        ("some states are connected to no other", count(alone, "state") + " alone", alone > 0),
    ):
        found.append(Check(f"Supplement, map: {claim}", kept + seen, holds, reason="" if holds else why))
    below = [name for name, (value, _) in PUBLISHED.items() if value < floor]
    observed = f"{len(below)} of the 4 published accuracies lie below it"
    found.append(Check(f"A constant answer is right in {floor:.1%} of the test counties", observed))
    names = [name for name in MODELS if name in accuracy]
    if "kin" not in names:
        return found
    claim = "Ours: kin below every other model in log-loss by more than two standard errors of the paired mean"
    found.append(_ahead(main, claim, "kin", [name for name in names if name != "kin"], "log_loss", sign=-1)[0])
    for measure, sign, words in (("accuracy", -1, "highest accuracy"), ("log_loss", 1, "lowest log-loss")):
        table = {key[0]: one.mean for key, one in summarize(main, ["method"], measure).items() if key[0] in names}
        order = sorted(table, key=lambda name: sign * table[name])
        observed = ", ".join(f"{LABELS[name]} {table[name]:.4f}" for name in order)
        found.append(Check(f"The {words} of the models", observed))
    return found


def _ahead(
    rows: Sequence[Row], claim: str, mine: str, others: Sequence[str], measure: str, *, sign: int = 1
) -> tuple[Check, str]:
    """Check that a method is ahead of all others by more than two standard errors; return the nearest, too."""
    apart = {name: paired_difference(rows, "method", (mine, name), measure) for name in others}
    ahead = {name: one.scaled(sign) for name, one in apart.items()}
    nearest = min(others, key=lambda name: ahead[name].mean)
    won = sum(one.mean > 2 * one.error for one in ahead.values())
    observed = f"ahead of {won} of {len(others)}; the nearest is {LABELS[nearest]}: {_words(apart[nearest])}"
    in_doubt = doubt((one.interval(len(ahead)) for one in ahead.values()), low=0.0, form="+.4f")
    return Check(claim, observed, won == len(others), in_doubt), LABELS[nearest]


def _words(one: Sample) -> str:
    return f"{one.mean:+.4f}, standard error {one.error:.4f} ({one.n} splits)"
