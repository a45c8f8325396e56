"""The sentences of the report and of the model card: headline, whether to trust it, how to reproduce it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedkin._base import Index, count, listed
from fedkin.fitting import FittedModel
from fedkin.kin import AGREEMENT, Kin, by_size

_ENOUGH_DRAWS = 100
_GRAPHS = {
    "used": "The given graph helped: edges are more frequent inside groups than between them.",
    "ignored": "The given graph does not tell who is kin, so it was ignored.",
    "inverted": "The given graph joins sites that differ; Fedkin noticed, and read its edges as signs of difference.",
}

_COVARIATES = {
    "used": "They helped: sites that are near in them are more often in one group.",
    "ignored": "They do not tell who is kin, so they were ignored.",
    "inverted": "Sites that are near in them differ; Fedkin noticed, and read nearness as a sign of difference.",
}


def headline(
    model: FittedModel, groups: Index, resolved: bool, comparison: Mapping[str, Any] | None
) -> tuple[str, str]:
    """The result in one sentence, and what it is worth in another."""
    sites = count(model.n_sites, "site")
    if model.n_sites == 1:
        title = "A model for one site."
    elif resolved:
        found = int(groups.max()) + 1
        alone = int((np.bincount(groups) == 1).sum())
        rest = f", {alone} of them single sites" if 0 < alone < found else ""
        rest = ", one of them a single site" if alone == 1 else rest
        title = f"{sites} form {count(found, 'group')}{'' if model.kin is None else ' of kin'}{rest}."
    elif model.kin is None and model.n_groups == 1:
        title = f"All {sites} belong together."
    elif model.kin is None:
        title = f"Each of the {sites} has a model of its own."
    else:
        title = f"No groups resolved: the {sites} differ gradually, or too little for groups to show."
    if comparison and comparison.get("verdict"):
        return title, str(comparison["verdict"])
    if resolved:
        return title, "Sites of one group share what they know; each keeps its own rows."
    return title, "Every site keeps a model of its own, and borrows strength from the others as far as they are alike."


# --- trust -----------------------------------------------------------------------------------------------------


def trust(model: FittedModel) -> list[dict[str, str]]:
    """Return what to know before the result is believed: ``{"tone": "good" | "fair" | "bad", "title", "words"}``."""
    lines = list(_about_fused(model) if model.kin is None else _about_kin(model, model.kin))
    if model.notes:
        some = next(iter(model.notes))
        words = f"{count(len(model.notes), 'site')} needed special treatment; site {some}: {model.notes[some][0]}"
        lines.append(("fair", "Notes on single sites", words))
    if model.origin and model.origin.get("from") == "summaries":
        words = "The model was fitted from what sites shared about their rows, not from the rows."
        lines.append(("good", "Rows stayed where they are", words))
    return [dict(zip(("tone", "title", "words"), line, strict=True)) for line in lines]


def _about_fused(model: FittedModel) -> Iterator[tuple[str, str, str]]:
    fused = model.fused
    if fused is None or not math.isfinite(fused.gap):
        words = "No certificate came with these parameters: they are the result of rounds between sites."
        yield "fair", "No certificate", words
    else:
        near = f"within {fused.gap:.1e} of its minimum" if fused.gap > 0 else "at its minimum, to rounding"
        after = count(fused.n_iter, "iteration")
        words = f"The objective is proven to be {near} (relative duality gap), after {after}."
        if fused.status == "converged":
            yield "good", "The optimum is certified", words
        else:
            early = f"It ended with the status {fused.status}: allow more iterations."
            yield "bad", "The solver stopped early", f"{words} {early}"
    selection = None if fused is None else fused.selection
    if selection is not None and selection.get("candidates"):
        kept, edges = int(selection["kept"]), int(selection["candidates"])
        which = f"Each of the {edges} candidate edges" if edges > 1 else "The one candidate edge"
        words = (
            f"{which} was tested ({selection['method']}, level {selection.get('level', 0.05):g}); "
            f"{kept} stayed and {edges - kept} were dropped. A chain of kept edges makes one group even when its "
            "ends differ."
        )
        yield "good", "Edges were tested", words
    words = "A fused model has estimates without intervals. The method kin gives intervals and probabilities."
    yield "fair", "No intervals", words


def _about_kin(model: FittedModel, kin: Kin) -> Iterator[tuple[str, str, str]]:
    yield _about_sampler(kin)
    yield _about_groups(kin)
    names = model.options.get("covariates")
    if kin.graph_use in _GRAPHS:
        known = (f"The covariates ({', '.join(names)})", _COVARIATES) if names else ("The graph", _GRAPHS)
        yield "good" if kin.graph_use == "used" else "fair", known[0], known[1][kin.graph_use]
    words = (
        "Intervals cover 95% on average over sites. A site unlike all others is covered less often; "
        'confint(kind="site") has intervals for every single site.'
    )
    yield "good", "What intervals promise", words


def _about_sampler(kin: Kin) -> tuple[str, str, str]:
    found = kin.diagnostics
    if found is None:
        words = "Nothing was sampled: there are too few sites, or nothing differs between them."
        return "fair", "No sampling needed", words
    harm = "another seed may find other groups" if kin.resolved else "the estimates are averaged over them"
    tone, title, agree = {
        "agree": ("good", "The sampler has mixed", "agree"),
        "nearly": ("fair", "The sampler has nearly mixed", "agree for most sites, less so for some"),
        "disagree": ("bad", "The sampler has not mixed", f"do not agree about who is alike: {harm}"),
    }[found.verdict]
    worst, typical = found.rhat["parameters, worst"], found.rhat["parameters, median"]
    size = found.size["number of groups"]
    few = "" if size >= _ENOUGH_DRAWS else "; so its probabilities have a visible error"
    words = (
        f"{count(len(found.starts), 'chain')} of {found.draws} draws {agree}. R-hat of the sites' parameters is "
        f"{typical:.2f} (median) and {worst:.2f} (worst). The number of groups has an effective sample size of "
        f"{size:.0f}{few}."
    )
    return tone, title, words


def _about_groups(kin: Kin) -> tuple[str, str, str]:
    likely = int(np.argmax(kin.n_groups))
    chance, without = float(kin.n_groups[likely]), float(kin.weight_mixed)
    if not kin.resolved:
        words = (
            f"The model without groups has the weight {without:.2f}. The best grouping is expected to agree with the "
            f"true one by {kin.agreement():.2f} (adjusted Rand index); groups are shown from {AGREEMENT:g} on. The "
            "estimates average over all groupings, so they are good without them."
        )
        return "good", "Why there are no groups", words
    each, between = kin.cohesion()
    inside = float(each.min())
    words = (
        f"Members of one group are kin with probability {inside:.2f} or more on average, sites of different groups "
        f"with {between:.2f}. The groups are expected to agree with the true ones by {kin.agreement():.2f} (adjusted "
        f"Rand index). The most likely number of groups is {likely} (probability {chance:.2f}); a model without "
        f"groups has the weight {without:.2f}."
    )
    return "good" if inside > 0.8 and without < 0.2 else "fair", "How sure the groups are", words


# --- reproduction ----------------------------------------------------------------------------------------------


def reproduction(model: FittedModel) -> dict[str, Any]:
    """Version, seed, options, digest of the data, and the command."""
    history = model.history or {}
    data = history.get("data") or {}
    facts = {
        "Fedkin": model.fedkin_version,
        "Seed": _shown(model.options.get("seed")),
        "Data": data.get("name"),
        "Rows": _shown(data.get("rows", int(model.n_samples.sum()))),
        "SHA-256 of the data": data.get("sha256"),
        "Penalty level": None if model.fused is None else f"{model.fused.lam:.6g}",
    }
    return {
        "facts": {name: str(value) for name, value in facts.items() if value not in (None, "")},
        "command": history.get("command"),
        "options": {str(name): _shown(value) for name, value in model.options.items()},
    }


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def number(value: float | str | None) -> float | None:
    """A number of six significant digits, or None for what is no number; JSON has no others.

    Files of models hold numbers that are not finite as text.
    """
    return None if value is None or not math.isfinite(float(value)) else float(f"{float(value):.6g}")


def group_labels(model: FittedModel) -> tuple[Index, bool]:
    """Group of each site, 0 for the largest, and whether there are groups to believe in."""
    kin = model.kin
    if kin is not None:
        return np.asarray(kin.groups, dtype=np.int64), bool(kin.resolved)
    resolved = 1 < model.n_groups < model.n_sites
    return by_size(model.groups if resolved else np.zeros(model.n_sites, dtype=np.int64)), resolved


# --- the model card ---------------------------------------------------------------------------------------------

_MOST_NAMES = 12
_LIMITS = (
    "A site's model is for rows like those that the site gave; nothing was learned about other populations.",
    "Coefficients are associations, not effects of an intervention.",
    "Groups describe how sites' rows look under this model, not why.",
)


def model_card(model: FittedModel) -> str:
    """A model card in Markdown."""
    groups, resolved = group_labels(model)
    title, lead = headline(model, groups, resolved, model.comparison)
    again = reproduction(model)
    parts = [
        f"# Model card\n\n{title} {lead}",
        _section("What it is", _facts(model)),
        _section("What it was made of", _data(model)),
        _comparison(model.comparison),
        _section("Whether to trust it", [f"**{one['title']}.** {one['words']}" for one in trust(model)]),
        _section("Privacy", _privacy(model.origin)),
        _section("Limits", list(_LIMITS)),
        _section("How to make it again", [f"{name}: {value}" for name, value in again["facts"].items()]),
    ]
    if again["command"]:
        parts.append(f"    {again['command']}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, lines: list[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines)


def _facts(model: FittedModel) -> list[str]:
    method = "the fused estimator" if model.kin is None else "partial pooling that finds kin"
    target = "" if model.target_name is None else f" of `{model.target_name}`"
    what = f"A model{target} for each of {count(model.n_sites, 'site')}, by {method} ({model.loss.name} loss)"
    return [what] if model.classes is None else [what, f"Classes: {listed(list(map(str, model.classes)))}"]


def _data(model: FittedModel) -> list[str]:
    n, names = model.n_samples, list(model.feature_names)
    shown = names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], f"{len(names) - _MOST_NAMES} more"]
    rows = f"{count(int(n.sum()), 'row')}, {int(n.min())} to {int(n.max())} at a site"
    notes = [f"{count(len(model.notes), 'site')} needed special treatment"] if model.notes else []
    return [rows, f"{count(len(names), 'feature')}: {', '.join(f'`{name}`' for name in shown)}", *notes]


def _comparison(found: Any) -> str:
    if not found:
        return ""
    better = "lower" if found.get("lower_is_better", True) else "higher"
    lines = [f"| method | {found['metric']} | standard error |", "|---|---|---|"]
    for one in found["methods"]:
        mean, error = (number(one.get(key)) for key in ("mean", "standard_error"))
        cells = ["-" if mean is None else f"{mean:.4g}", "-" if error is None else f"{error:.2g}"]
        lines.append(f"| {one['name']} | {' | '.join(cells)} |")
    cuts = count(int(found["repeats"]), "fold" if found.get("kind") == "folds" else "split")
    how = f"On held-out rows of the same sites, {cuts}; {better} is better."
    return f"## How well it predicts\n\n{how}\n\n" + "\n".join(lines)


def _privacy(origin: Any) -> list[str]:
    if not origin:
        return ["The fit has read all rows in one place."]
    if origin.get("from") == "rounds":
        return ["No site has given its rows away: neighbours exchanged parameters, round by round."]
    lines = ["No site has given its rows away: the fit has read sums over them."]
    promised = origin.get("privacy")
    if promised is None:
        return [*lines, "No differential privacy was asked for."]
    words = f"Differentially private with epsilon {promised['epsilon']:g} and delta {promised['delta']:g} at most"
    return [*lines, f"{words}, at {count(int(promised['sites']), 'site')}."]
