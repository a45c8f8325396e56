"""The sentences of the report: its headline, whether to trust it, how to make it again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkin._base import Index, count
from fedkin.kin.display import AGREEMENT

if TYPE_CHECKING:  # loads what fits models
    from fedkin.fitting import FittedModel
    from fedkin.kin import Kin

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
        rest = (
            ", one of them a single site"
            if alone == 1
            else f", {alone} of them single sites"
            if 0 < alone < found
            else ""
        )
        title = f"{sites} form {count(found, 'group')}{' of kin' if model.kin is not None else ''}{rest}."
    elif model.kin is None and model.n_clusters == 1:
        title = f"All {sites} belong together."
    elif model.kin is None:
        title = f"Each of the {sites} has a model of its own."
    else:
        title = f"No groups resolved: the {sites} differ gradually, or too little for groups to show."
    lead = str(comparison["verdict"]) if comparison and comparison.get("verdict") else _without_comparison(resolved)
    return title, lead


def _without_comparison(resolved: bool) -> str:
    if resolved:
        return "Sites of one group share what they know; each keeps its own rows."
    return "Every site keeps a model of its own, and borrows strength from the others as far as they are alike."


# --- trust -----------------------------------------------------------------------------------------------------


def trust(model: FittedModel) -> list[dict[str, str]]:
    """What to know before the result is believed: ``{"tone": "good" | "fair" | "bad", "title", "words"}``."""
    lines = _about_kin(model) if model.kin is not None else _about_gap(model)
    if model.notes:
        some = next(iter(model.notes))
        words = f"{count(len(model.notes), 'site')} needed special treatment; site {some}: {model.notes[some][0]}"
        lines.append({"tone": "fair", "title": "Notes on single sites", "words": words})
    if model.origin and model.origin.get("from") == "summaries":
        words = "The model was fitted from what sites shared about their rows, not from the rows."
        lines.append({"tone": "good", "title": "Rows stayed where they are", "words": words})
    return lines


def _about_gap(model: FittedModel) -> list[dict[str, str]]:
    lines = []
    if math.isfinite(model.gap):
        done = model.status == "converged"
        nearness = f"within {model.gap:.1e} of its minimum" if model.gap > 0 else "at its minimum, to rounding"
        words = (
            f"The objective is proven to be {nearness} (relative duality gap), after "
            f"{count(model.n_iter, 'iteration')}."
        )
        lines.append(
            {
                "tone": "good" if done else "bad",
                "title": "The optimum is certified" if done else "The solver stopped early",
                "words": words if done else f"{words} It ended with the status {model.status}: allow more iterations.",
            }
        )
    else:
        words = "No certificate came with these parameters: they are the result of rounds between sites."
        lines.append({"tone": "fair", "title": "No certificate", "words": words})
    if model.selection is not None and model.selection.get("candidates"):
        kept, all_edges = int(model.selection["kept"]), int(model.selection["candidates"])
        which = f"Each of the {all_edges} candidate edges" if all_edges > 1 else "The one candidate edge"
        words = (
            f"{which} was tested ({model.selection['method']}, level {model.selection.get('level', 0.05):g}); "
            f"{kept} stayed and {all_edges - kept} were dropped. A chain of kept edges makes one group even when its "
            "ends differ."
        )
        lines.append({"tone": "good", "title": "Edges were tested", "words": words})
    lines.append(
        {
            "tone": "fair",
            "title": "No intervals",
            "words": "A fused model has estimates without intervals. The method kin gives intervals and probabilities.",
        }
    )
    return lines


def _about_kin(model: FittedModel) -> list[dict[str, str]]:
    kin, names = model.kin, model.options.get("covariates")
    assert kin is not None
    lines = [_about_sampler(kin), _about_groups(kin)]
    if kin.graph_use in _GRAPHS:
        tone = "good" if kin.graph_use == "used" else "fair"
        known = (f"The covariates ({', '.join(names)})", _COVARIATES) if names else ("The graph", _GRAPHS)
        lines.append({"tone": tone, "title": known[0], "words": known[1][kin.graph_use]})
    lines.append(
        {
            "tone": "good",
            "title": "What intervals promise",
            "words": "Intervals cover 95% on average over sites. A site unlike all others is covered less often; "
            'confint(kind="site") has intervals for every single site.',
        }
    )
    return lines


def _about_sampler(kin: Kin) -> dict[str, str]:
    found = kin.diagnostics
    if found is None:
        words = "Nothing was sampled: there are too few sites, or nothing differs between them."
        return {"tone": "fair", "title": "No sampling needed", "words": words}
    worst, typical = found.rhat["parameters, worst"], found.rhat["parameters, median"]
    size = found.size["number of groups"]
    chains = f"{count(len(found.starts), 'chain')} of {found.draws} draws"
    facts = f"R-hat of the sites' parameters is {typical:.2f} (median) and {worst:.2f} (worst)"
    if found.verdict == "agree":
        start = f"{chains} agree"
        tone, title = "good", "The sampler has mixed"
    elif found.verdict == "nearly":
        start = f"{chains} agree for most sites, less so for some"
        tone, title = "fair", "The sampler has nearly mixed"
    else:
        harm = "another seed may find other groups" if kin.resolved else "the estimates are averaged over them"
        start = f"{chains} do not agree about who is alike: {harm}"
        tone, title = "bad", "The sampler has not mixed"
    few = "" if size >= _ENOUGH_DRAWS else "; so its probabilities have a visible error"
    words = f"{start}. {facts}. The number of groups has an effective sample size of {size:.0f}{few}."
    return {"tone": tone, "title": title, "words": words}


def _about_groups(kin: Kin) -> dict[str, str]:
    likely = int(np.argmax(kin.n_groups))
    chance, without = float(kin.n_groups[likely]), float(kin.weight_mixed)
    if not kin.resolved:
        words = (
            f"The model without groups has the weight {without:.2f}. The best grouping is expected to agree with the "
            f"true one by {kin.agreement():.2f} (adjusted Rand index); groups are shown from {AGREEMENT:g} on. The "
            "estimates average over all groupings, so they are good without them."
        )
        return {"tone": "good", "title": "Why there are no groups", "words": words}
    each, between = kin.cohesion()
    inside = float(each.min())
    words = (
        f"Members of one group are kin with probability {inside:.2f} or more on average, sites of different groups "
        f"with {between:.2f}. The groups are expected to agree with the true ones by {kin.agreement():.2f} (adjusted "
        f"Rand index). The most likely number of groups is {likely} (probability {chance:.2f}); a model without "
        f"groups has the weight {without:.2f}."
    )
    return {
        "tone": "good" if inside > 0.8 and without < 0.2 else "fair",
        "title": "How sure the groups are",
        "words": words,
    }


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
        "Penalty level": None if model.kin is not None else f"{model.lam:.6g}",
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
