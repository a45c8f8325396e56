"""Tables, claims, figure and maps of the election study, from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import Array, Index
from fedkin.datasets.counties import Rings, read_outlines
from fedkin.graph import Graph
from fedkin.studies.election import LABELS
from fedkin.studies.figures import Table, add_legend
from fedkin.studies.summary import Check, Row, Sample, distinct, doubt, doubt_of_means, paired_difference, summarize

#: Accuracies of the paper's table, mean and standard deviation.
PUBLISHED: Mapping[str, tuple[float, float]] = {
    "local": (0.741, 0.034),
    "global": (0.752, 0.012),
    "fed-loc": (0.793, 0.019),
    "fed-his": (0.742, 0.011),
}
PROTOCOLS: Mapping[str, str] = {
    "pooled": "pooled z-scores, intercept",
    "logs": "pooled z-scores of logarithms, intercept",
    "state": "z-scores within states, no intercept",
}
FLOORS = ("always-republican", "state-majority")
MAIN = "pooled"
#: Formats of what was chosen: inner log-loss, edges, lam, ridge.
_FORMS = (".3f", ".0f", ".1e", ".1e")


def accuracy_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    """Accuracy, balanced accuracy and log-loss of every method, mean (standard deviation) over splits."""
    keys = ["standardize", "method"]
    measures = ["accuracy", "balanced_accuracy", "log_loss"]
    chosen_names = ["inner_log_loss", "kept_edges", "lam", "ridge"]
    tables = {name: summarize(rows, keys, name) for name in [*measures, *chosen_names]}
    text, exact = [], []
    for key in tables["accuracy"]:
        protocol, method = key
        chosen = [tables[name].get(key) for name in chosen_names]
        published = PUBLISHED.get(method)
        text.append(
            [
                PROTOCOLS.get(protocol, protocol),
                LABELS[method],
                f"{published[0]:.3f} ({published[1]:.3f})" if published else "",
                *(_mean_sd(tables[name][key]) for name in measures),
                *("" if one is None else f"{one.mean:{form}}" for one, form in zip(chosen, _FORMS, strict=True)),
            ]
        )
        numbers = [value for name in measures for value in (tables[name][key].mean, tables[name][key].sd)]
        means = [None if one is None else one.mean for one in chosen]
        exact.append([protocol, method, *(published or (None, None)), *numbers, *means, tables["accuracy"][key].n])
    head = ["protocol", "method", "published accuracy", "accuracy", "balanced accuracy", "log-loss (nats)"]
    names = ["standardize", "method", "published_mean", "published_sd"]
    names += [f"{name}_{part}" for name in measures for part in ("mean", "sd")]
    caption = (
        "Mean (standard deviation) over the splits; edges, lam and ridge are means of what was chosen. The inner "
        "log-loss is that of held-out training rows: the only number that may choose between protocols."
    )
    return Table(
        spec["name"],
        [*head, "inner log-loss", "edges kept", "lam", "ridge"],
        text,
        [*names, *chosen_names, "splits"],
        exact,
        caption,
    )


#: Pairs of methods that are compared split by split.
PAIRS = (
    *((fed, other) for fed in ("fed-loc", "fed-his") for other in ("local", "global", "state-intercepts")),
    *(("kin", other) for other in ("local", "global", "state-intercepts", "fed-loc", "fed-his", "boosting")),
)


def difference_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    """Fed-ADMM and kin minus the others, split by split."""
    text, exact = [], []
    for protocol in distinct(rows, "standardize"):
        chosen = [row for row in rows if row["standardize"] == protocol]
        known = distinct(chosen, "method")
        for mine, other in (pair for pair in PAIRS if set(pair) <= set(known)):
            line = [PROTOCOLS.get(protocol, protocol), f"{LABELS[mine]} minus {LABELS[other]}"]
            numbers: list[Any] = [protocol, mine, other]
            for measure in ("accuracy", "balanced_accuracy", "log_loss"):
                difference = paired_difference(chosen, "method", (mine, other), measure)
                line.append(f"{difference.mean:+.4f} ({difference.error:.4f})")
                numbers += [difference.mean, difference.error]
            text.append(line)
            exact.append(numbers)
    head = ["protocol", "difference", "accuracy", "balanced accuracy", "log-loss (nats)"]
    names = ["standardize", "method", "minus"]
    names += [f"{one}_{part}" for one in ("accuracy", "balanced", "log_loss") for part in ("mean", "standard_error")]
    caption = "Mean paired difference over the splits, with its standard error in brackets."
    return Table(spec["name"], head, text, names, exact, caption)


def state_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    """What is found about each state, and how stable it is over the splits."""
    found = groups(rows)
    text, exact = [], []
    for u, state in enumerate(found.states):
        share = Sample.from_values(found.measure[:, u])
        stability = float(found.stability[u])
        text.append([state, found.name(u) or "alone", f"{stability:.2f}", f"{share.mean:.3f} ({share.sd:.3f})"])
        exact.append([state, int(found.labels[u]), stability, share.mean, share.sd])
    head = ["state", "group in D_loc", "stability", "coefficients shared with most states"]
    names = ["state", "group", "stability", "common_share_mean", "common_share_sd"]
    caption = (
        "Group: states that are connected in the selected graph D_loc in more than half of the splits. Stability: mean "
        "over splits of the share of the other states on which a split agrees with that grouping. Last column: share "
        "of a state's coefficients that Fed-ADMM with D_loc gives the value which most states have, mean (standard "
        "deviation) over splits."
    )
    return Table(spec["name"], head, text, names, exact, caption)


@dataclass(frozen=True, eq=False)
class Groups:
    """The grouping of the states that most splits agree on: two of a group are so in more than half of the splits."""

    states: list[str]
    labels: Index  # (V,), the largest group is 0
    stability: Array  # (V,), share of (split, other state) pairs that agree with the grouping
    together: Array  # (V, V), share of splits in which two states are in one group
    measure: Array  # (splits, V), what else was found about each state
    note: str  # how often there were groups at all

    def name(self, u: int) -> str:
        """A letter, or "" for a state that is connected to no other."""
        label = int(self.labels[u])
        return chr(ord("A") + label) if int((self.labels == label).sum()) > 1 else ""


def groups(rows: Sequence[Row], method: str = "fed-loc", standardize: str = MAIN) -> Groups:
    """The grouping over all splits of one protocol.

    By D_loc, with the share of coefficients that a state has in common with most others; or by kin, with the states'
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


def checks(rows: Sequence[Row]) -> list[Check]:
    """Fed-ADMM against validated Local and Global, the floors, the ceiling, and the published numbers.

    All claims are about the default protocol, not about whichever comes nearest; what the others give is shown as an
    observation.
    """
    main = [row for row in rows if row["standardize"] == MAIN]
    accuracy = {key[0]: one for key, one in summarize(main, ["method"], "accuracy").items()}
    protocol = f"With {PROTOCOLS[MAIN]}"
    known = [name for name in (*FLOORS, "boosting") if name in accuracy]
    beside = ", ".join(f"{LABELS[name]} {accuracy[name].mean:.3f}" for name in known)
    out = []
    for fed in ("fed-loc", "fed-his"):
        mean = accuracy[fed].mean
        claim = f"{protocol}: {LABELS[fed]}: accuracy at or above 0.94"
        in_doubt = doubt([accuracy[fed].interval()], low=0.94, form=".4f")
        out.append(Check(claim, f"{mean:.4f}; {beside}", mean >= 0.94, in_doubt))
        for other in ("local", "global"):
            difference = paired_difference(main, "method", (fed, other), "accuracy")
            observed = f"{difference.mean:+.4f}, standard error {difference.error:.4f} ({difference.n} splits)"
            claim = f"{LABELS[fed]} above {LABELS[other]} by more than two standard errors of the paired mean"
            in_doubt = doubt([difference.interval()], low=0.0, form="+.4f")
            out.append(Check(f"{protocol}: {claim}", observed, difference.mean > 2 * difference.error, in_doubt))
    floor = accuracy["always-republican"]
    below = [name for name, (value, _) in PUBLISHED.items() if value < floor.mean]
    observed = f"{len(below)} of 4 lie below {floor.mean:.3f}"
    in_doubt = doubt([floor.interval()], high=min(value for value, _ in PUBLISHED.values()), form=".3f")
    out.append(Check('Published accuracies lie above the floor "always Republican"', observed, not below, in_doubt))
    for name, (value, sd) in PUBLISHED.items():
        claim = f"published accuracy of {_short(name)}, {value:.3f}, met within its standard deviation {sd:.3f}"
        in_doubt = doubt([accuracy[name].interval()], value - sd, value + sd, ".3f")
        mean = accuracy[name].mean
        out.append(Check(f"{protocol}: {claim}", f"{mean:.3f}", abs(mean - value) <= sd, in_doubt))
    found = groups(rows)
    parts = int(found.labels.max()) + 1
    edges = [int(row["kept_edges"]) for row in main if row["method"] == "fed-loc"]
    kept = f"{min(edges)} to {max(edges)} of {len(found.states) * (len(found.states) - 1) // 2} edges kept"
    claim = f"{protocol}: two main groups of states, as on the published map"
    out.append(Check(claim, f"{kept}; {parts} group(s)", parts == 2))
    return out + [_nearest(rows, name) for name in PUBLISHED] + _winners(main, protocol)


def _winners(main: Sequence[Row], protocol: str) -> list[Check]:
    """Kin against every other model, and who is best."""
    names = [name for name in _MODELS if any(row["method"] == name for row in main)]
    if "kin" not in names:
        return []
    apart = {(name,): paired_difference(main, "method", ("kin", name), "log_loss") for name in names if name != "kin"}
    ahead = sum(one.mean < -2 * one.error for one in apart.values())
    nearest = max(apart, key=lambda key: apart[key].mean)
    close = f"{LABELS[nearest[0]]}, {apart[nearest].mean:+.4f}, standard error {apart[nearest].error:.4f}"
    observed = f"{ahead} of {len(apart)}; the nearest is {close}"
    claim = f"{protocol}: kin below every other model in log-loss by more than two standard errors of the paired mean"
    out = [Check(claim, observed, ahead == len(apart), doubt_of_means(apart, high=0.0, form="+.4f"))]
    for measure, sign, words in (("accuracy", -1, "highest accuracy"), ("log_loss", 1, "lowest log-loss")):
        table = {key[0]: one.mean for key, one in summarize(main, ["method"], measure).items() if key[0] in names}
        order = sorted(table, key=lambda name: sign * table[name])
        observed = ", ".join(f"{LABELS[name]} {table[name]:.4f}" for name in order)
        out.append(Check(f"{protocol}: the {words} of the models", observed, None))
    return out


def _nearest(rows: Sequence[Row], name: str) -> Check:
    """The recipe of that kind that comes nearest to the published accuracy, found by its test scores: no evidence."""
    table = summarize(rows, ["standardize", "method"], "accuracy")
    value, sd = PUBLISHED[name]
    alike = {key: one.mean for key, one in table.items() if key[1] in (name, f"{name}-steps")}
    nearest = min(alike, key=lambda key: abs(alike[key] - value))
    side = "within" if abs(alike[nearest] - value) <= sd else "outside"
    recipe = f"{PROTOCOLS.get(nearest[0], nearest[0])}; {LABELS[nearest[1]]}"
    return Check(
        f"Published accuracy of {_short(name)}, {value:.3f}: the nearest of {len(alike)} recipes, chosen by looking at "
        "test rows; not a reproduction",
        f"{alike[nearest]:.3f} ({recipe}), {side} the published standard deviation {sd:.3f}",
        None,
    )


def _short(name: str) -> str:
    return LABELS[name].replace(", ridge validated", "")


def _mean_sd(summary: Sample) -> str:
    return f"{summary.mean:.3f} ({summary.sd:.3f})" if summary.n > 1 else f"{summary.mean:.3f}"


_MODELS = ("local", "global", "state-intercepts", "fed-loc", "fed-his", "kin")
_LINES: Mapping[str, Mapping[str, Any]] = {
    "always-republican": {"color": "#777777", "linestyle": (0, (1, 1.5))},
    "state-majority": {"color": "#777777", "linestyle": (0, (5, 2))},
    "boosting": {"color": "#000000", "linestyle": (0, (5, 1, 1, 1))},
}


def accuracy(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Accuracies with their spread over splits, between the floors and the ceiling, beside the published ones."""
    from matplotlib.figure import Figure

    protocols = distinct(rows, "standardize")
    figure = Figure(figsize=(4.3 * len(protocols) + 0.8, 3.4), layout="constrained")
    axes = figure.subplots(1, len(protocols), sharey=True, sharex=True, squeeze=False)[0]
    table = summarize(rows, ["standardize", "method"], "accuracy")
    for axis, protocol in zip(axes, protocols, strict=True):
        places = np.arange(len(_MODELS))[::-1]
        for place, method in zip(places, _MODELS, strict=True):
            if (found := table.get((protocol, method))) is None:
                continue
            spread = {"xerr": np.nan_to_num(found.sd), "label": "here: mean ± sd over splits", "color": "#D55E00"}
            axis.errorbar(found.mean, place + 0.12, **spread, marker="o", markersize=6, capsize=3, linestyle="none")
            if method in PUBLISHED:
                value, sd = PUBLISHED[method]
                spread = {"xerr": sd, "label": "published: mean ± sd", "color": "#0072B2", "markerfacecolor": "white"}
                axis.errorbar(value, place - 0.12, **spread, marker="D", markersize=5, capsize=3, linestyle="none")
        for method, style in _LINES.items():
            if (line := table.get((protocol, method))) is not None:
                axis.axvline(line.mean, linewidth=1.2, zorder=1, label=LABELS[method], **style)
        axis.set_yticks(places, [LABELS[method] for method in _MODELS])
        axis.set_ylim(-0.6, len(_MODELS) - 0.4)
        axis.set_title(PROTOCOLS.get(protocol, protocol), loc="left")
        axis.grid(axis="y", visible=False)
    figure.supxlabel("accuracy: share of held-out counties predicted right", fontsize=10)
    add_legend(figure, axes)
    return figure


# --- maps -------------------------------------------------------------------------------------------------------------

# light and dark, and hatched, so that a grey print shows the groups
_GROUPS = (
    {"facecolor": "#F0E442", "hatch": ""},
    {"facecolor": "#0072B2", "hatch": "////"},
    {"facecolor": "#009E73", "hatch": "...."},
    {"facecolor": "#CC79A7", "hatch": "xxxx"},
)


def state_map(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Two maps: the groups of D_loc, and how much each state has in common with most others."""
    found = groups(rows)
    limits = (min(float(found.measure.mean(axis=0).min()), 0.9), 1.0)
    title = "Coefficients in common with most states (mean over splits)"
    return _two_maps(found, "Groups of D_loc", folder, limits, (title, "share of a state's coefficients (1 = all)"))


def kin_map(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Two maps: the groups of kin, and how far each state is from the common mean."""
    found = groups(rows, "kin")
    limits = (0.0, float(found.measure.mean(axis=0).max()))
    words = ("Distance from the common mean (mean over splits)", "log-odds")
    return _two_maps(found, "Groups of kin", folder, limits, words)


def _two_maps(
    found: Groups, title: str, folder: Path, limits: tuple[float, float], lower_words: tuple[str, str]
) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    shapes = read_outlines(folder)
    figure = Figure(figsize=(7.2, 9.0), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    for axis in (upper, lower):
        axis.set_aspect("equal")
        axis.set_axis_off()
        for rings in shapes.values():
            _outline(axis, rings, facecolor="white", edgecolor="#b5b5b5", linewidth=0.4)
    _draw_groups(upper, found, shapes)
    upper.set_title(f"{title}: {found.note}", loc="left")
    scale = ScalarMappable(Normalize(*limits), "cividis")
    for state, value in zip(found.states, found.measure.mean(axis=0), strict=True):
        _outline(lower, shapes[state], facecolor=scale.to_rgba(value), edgecolor="#333333", linewidth=0.5)
        dark = float(np.dot(scale.to_rgba(value)[:3], (0.3, 0.6, 0.1))) < 0.5
        _name(lower, shapes[state], f"{state}\n{value:.2f}", "white" if dark else "black")
    lower.set_title(lower_words[0], loc="left")
    figure.colorbar(scale, ax=lower, shrink=0.6, label=lower_words[1])
    return figure


def _draw_groups(axis: Any, found: Groups, shapes: Mapping[str, Rings]) -> None:
    from matplotlib.patches import Patch

    sizes = np.bincount(found.labels)
    handles: dict[str, Any] = {}
    for u, state in enumerate(found.states):
        style: Any = {"facecolor": "#9a9a9a", "hatch": ""}
        name = "alone"
        if letter := found.name(u):
            label = found.labels[u]
            style, name = _GROUPS[label % len(_GROUPS)], f"group {letter}: {sizes[label]} states"
        _outline(axis, shapes[state], edgecolor="#333333", linewidth=0.5, **style)
        _name(axis, shapes[state], state, "black")
        handles.setdefault(name, Patch(edgecolor="#333333", **style))
    handles["not in the study"] = Patch(facecolor="white", edgecolor="#b5b5b5")
    axis.legend(list(handles.values()), list(handles), loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3)


def _outline(axis: Any, rings: Rings, **style: Any) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    outline = Outline.make_compound_path(*(Outline(ring, closed=True) for ring in rings))
    axis.add_patch(PathPatch(outline, **style))
    axis.autoscale_view()


def _name(axis: Any, rings: Rings, text: str, color: str) -> None:
    x, y = _inside(max(rings, key=lambda ring: float(np.ptp(ring[:, 0]) * np.ptp(ring[:, 1]))))
    axis.text(x, y, text, ha="center", va="center", fontsize=5.5, color=color, linespacing=0.95)


def _inside(ring: Any) -> tuple[float, float]:
    """A point well inside a ring: of a lattice of points, the one farthest from the outline."""
    from matplotlib.path import Path as Outline

    low, high = ring.min(axis=0), ring.max(axis=0)
    x, y = np.meshgrid(*(np.linspace(a, b, 25)[1:-1] for a, b in zip(low, high, strict=True)))
    points = np.column_stack([x.ravel(), y.ravel()])
    points = points[Outline(ring).contains_points(points)]
    if not len(points):
        return float(ring[:, 0].mean()), float(ring[:, 1].mean())
    # a name is wider than high
    distance = np.hypot((points[:, None, 0] - ring[None, :, 0]) / 1.5, points[:, None, 1] - ring[None, :, 1])
    best = points[distance.min(axis=1).argmax()]
    return float(best[0]), float(best[1])
