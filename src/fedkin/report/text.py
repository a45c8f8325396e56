"""Describe a fitted model in words: the terminal, the report page and the model card show the same sentences."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedkin._base import Index, count, decimals_for, fixed, listed, percent, probability, some_of
from fedkin.fitting import FittedModel
from fedkin.kin import AGREEMENT, Kin, by_size

_ENOUGH_DRAWS = 100
#: Probability of one number of groups from which it hardly varies: few changes are then no sign of bad mixing.
_HARDLY_VARIES = 0.9
_MOST_NAMES = 12
_GRAPH_USE = {
    "used": ("good", "helped", "Sites that {near} are more often in one group"),
    "ignored": ("fair", "ignored", "Whether sites {near} does not tell which sites are alike"),
    "inverted": ("fair", "read inverted", "Sites that {near} differ more often than others"),
}


class Statement(NamedTuple):
    """What to know before a result is believed; ``tone`` is "good", "fair" or "bad"."""

    topic: str
    tone: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.title}. {self.text}"


def group_labels(model: FittedModel) -> tuple[Index, bool]:
    """Return the group of each site, 0 for the largest, and whether there are groups to believe in."""
    kin = model.kin
    if kin is not None:
        return np.asarray(kin.groups, dtype=np.int64), bool(kin.resolved)
    resolved = 1 < model.n_groups < model.n_sites
    return by_size(model.groups if resolved else np.zeros(model.n_sites, dtype=np.int64)), resolved


def members(model: FittedModel) -> list[list[Hashable]]:
    """Return the sites of each group, the largest group first; no groups where none are to be believed in."""
    groups, resolved = group_labels(model)
    labels = range(int(groups.max()) + 1) if resolved else ()
    return [[model.sites[u] for u in np.flatnonzero(groups == k)] for k in labels]


def headline(model: FittedModel) -> tuple[str, str]:
    """Return the result in one sentence, and what it is worth in another."""
    groups, resolved = group_labels(model)
    sites = count(model.n_sites, "site")
    if model.n_sites == 1:
        title = "A model for one site."
    elif resolved:
        found = int(groups.max()) + 1
        alone = int((np.bincount(groups) == 1).sum())
        rest = f", {alone} of them single sites" if 0 < alone < found else ""
        rest = ", one of them a single site" if alone == 1 else rest
        title = f"{sites} form {count(found, 'group')}{'' if model.kin is None else ' of kin'}{rest}."
    elif model.kin is not None:
        title = f"No groups resolved: the {sites} differ gradually, or too little for groups to show."
    elif model.n_groups == 1:
        title = f"All {sites} belong together."
    else:
        title = f"Each of the {sites} has a model of its own."
    if model.comparison and model.comparison.get("verdict"):
        return title, str(model.comparison["verdict"])
    if resolved:
        return title, "Sites of one group share what they know; each keeps its own rows."
    return title, "Every site keeps a model of its own, and borrows strength from the others as far as they are alike."


def method_text(model: FittedModel) -> str:
    """Say how a model was fitted."""
    fused = model.fused
    if fused is None:
        return "partial pooling with groups (kin)"
    rule = ", one standard error" if model.options.get("cv_rule") == "1se" else ""
    how = f"by cross-validation{rule}" if model.options.get("lam") == "cv" else "given"
    return f"the fused estimator ({fused.penalty} penalty, lam {fused.lam:.4g} {how})"


def origin_text(model: FittedModel) -> str:
    """Say what the fit has read, and what was promised about it."""
    origin = model.origin or {}
    if not origin:
        return "The fit has read all rows in one place."
    rounds = int(origin.get("rounds", 1))
    if origin.get("from") == "rounds":
        passed = f"neighbours exchanged parameters, round by round ({count(rounds, 'round')})"
        return f"No site has given its rows away: {passed}."
    text = f"No site has given its rows away: the fit has read {count(rounds, 'message')} of each, with sums over them."
    promised = origin.get("privacy")
    if promised is None:
        return f"{text} No differential privacy was asked for."
    limits = f"epsilon {promised['epsilon']:g} and delta {promised['delta']:g} at most"
    return f"{text} Differentially private with {limits}, at {count(int(promised['sites']), 'site')}."


# --- whether to trust it ----------------------------------------------------------------------------------------------


def statements(model: FittedModel) -> list[Statement]:
    """Return what to know before a model is believed."""
    found = list(_about_fused(model) if model.kin is None else _about_kin(model, model.kin))
    if model.notes:
        some = next(iter(model.notes))
        text = f"{count(len(model.notes), 'site')} needed special treatment; site {some}: {model.notes[some][0]}"
        found.append(Statement("notes", "fair", "Notes on single sites", text))
    noise = 0.0 if model.kin is None else float(np.average(model.kin.noise, weights=model.kin.n_samples))
    if remark := model.loss.remark(noise):
        found.append(Statement("dispersion", "fair", "Rows vary more than the model has it", f"{remark}."))
    if model.origin and (alone := model.origin.get("alone")):
        found.append(Statement("alone", "fair", "Sites that stand alone had no part in the fit", f"{alone}."))
    if model.origin:
        found.append(Statement("from", "good", "Rows stayed where they are", origin_text(model)))
    return found


def facts(model: FittedModel) -> dict[str, str]:
    """Return the statements about the estimate by topic, for the terminal."""
    shown = ("groups", "graph", "covariates", "certificate", "risk", "sampler")
    told = {one.topic: str(one) for one in statements(model) if one.topic in shown}
    return {"groups": headline(model)[0], **told}


def _about_fused(model: FittedModel) -> Iterator[Statement]:
    fused = model.fused
    if fused is None or not math.isfinite(fused.gap):
        text = "A certificate takes the rows of all sites in one place."
        yield Statement("certificate", "fair", "No certificate", text)
    else:
        near = f"within {fused.gap:.1e} of its minimum" if fused.gap > 0 else "at its minimum, to rounding"
        after = count(fused.n_iter, "iteration")
        text = f"The objective is proven to be {near} (relative duality gap), after {after}."
        if fused.status == "converged":
            yield Statement("certificate", "good", "The optimum is certified", text)
        elif (model.options.get("fedadmm") or {}).get("stop") == "rounds" and fused.status == "iteration_limit":
            yield Statement("certificate", "fair", "All rounds were done", f"{text} No gap was asked for.")
        else:
            early = f"{text} It ended with the status {fused.status}: allow more iterations."
            yield Statement("certificate", "bad", "The solver stopped early", early)
    topic, chosen = "covariates" if model.options.get("covariates") else "graph", fused and fused.selection
    parts = count(model.graph.n_components, "connected component")
    if chosen and chosen.get("candidates"):
        level = f", level {chosen['level']:g}" if "level" in chosen else ""
        kept = f"{chosen['kept']} of {chosen['candidates']} edges kept ({chosen['method']}{level}); {parts}"
        text = f"{kept}. Sites of a group have equal estimates; an edge that was kept does not suffice."
        yield Statement(topic, "good", "Edges were tested", text)
    elif model.n_sites > 1:
        text = f"{count(model.graph.n_edges, 'edge')}; {parts}."
        yield Statement(topic, "fair", "Edges were taken as given", text)
    text = "A fused model has estimates without intervals. The method kin gives intervals and probabilities."
    yield Statement("intervals", "fair", "No intervals", text)


def _about_kin(model: FittedModel, kin: Kin) -> Iterator[Statement]:
    yield _about_groups(kin)
    names = model.options.get("covariates")
    if kin.graph_use in _GRAPH_USE:
        tone, title, text = _GRAPH_USE[kin.graph_use]
        rates = ""
        if kin.rates is not None and kin.graph_use != "ignored":
            rates = f" (edges: {percent(kin.rates[0])} of pairs inside groups, {percent(kin.rates[1])} between)"
        text = text.format(near=f"are close in {', '.join(names)}" if names else "are joined by edges") + rates
        what = "covariates" if names else "graph"
        verb = "" if title == "helped" else "were " if names else "was "
        yield Statement(what, tone, f"The {what} {verb}{title}", f"{text}.")
    errors = ", ".join(f"{name} {fixed(kin.sure[name], 1)}" for name in ("kin", "Local", "Global"))
    better = "good" if kin.sure["kin"] <= min(kin.sure.values()) else "fair"
    text = f"Stein's estimate (SURE) of the error of the sites' coefficients, not of predictions: {errors}."
    yield Statement("risk", better, "Estimated risk", text)
    yield _about_sampler(kin)
    text = (
        "Intervals cover 95% on average over sites. A site unlike all others is covered less often; "
        'confint(kind="site") has intervals for every single site.'
    )
    yield Statement("intervals", "good", "What intervals promise", text)


def _about_sampler(kin: Kin) -> Statement:
    found = kin.diagnostics
    if found is None:
        why = (
            "sites are within districts" if kin.within is not None else "too few sites, or nothing differs between them"
        )
        text = f"Nothing was sampled: {why}."
        return Statement("sampler", "fair", "No sampling needed", text)
    harm = "another seed may find other groups" if kin.resolved else "the estimates are averaged over them"
    tone, title, agree = {
        "agree": ("good", "The sampler has mixed", "agree"),
        "nearly": ("fair", "The sampler has nearly mixed", "agree for most sites, less so for some"),
        "disagree": ("bad", "The sampler has not mixed", f"do not agree about which sites are alike: {harm}"),
    }[found.verdict]
    size, most = found.size["number of groups"], float(kin.n_groups.max())
    if size >= _ENOUGH_DRAWS:
        groups = f"The number of groups has an effective sample size of {size:.0f}."
    elif most >= _HARDLY_VARIES:
        groups = (
            f"The number of groups is {int(np.argmax(kin.n_groups))} with probability {most:.2f}, and hardly varies."
        )
    else:
        groups = (
            f"The number of groups has an effective sample size of {size:.0f}: its probabilities have a visible error."
        )
        if found.verdict == "agree":
            tone, title = "fair", "The sampler has mixed for estimates, not for the number of groups"
    worst, typical = found.rhat["parameters, worst"], found.rhat["parameters, median"]
    text = (
        f"{count(len(found.starts), 'chain')} of {found.draws} draws {agree}. R-hat of the sites' parameters is "
        f"{typical:.2f} (median) and {worst:.2f} (worst). {groups}"
    )
    return Statement("sampler", tone, title, text)


def _about_groups(kin: Kin) -> Statement:
    likely, without = int(np.argmax(kin.n_groups)), f"a model without groups has the weight {kin.weight_mixed:.2f}"
    if kin.within is not None:
        text = f"Sites are within {len(kin.districts)} districts, around whose means they are estimated."
        return Statement("groups", "good", "No groups were looked for", text)
    if not kin.resolved:
        text = (
            f"The best grouping is expected to agree with the true one by {kin.agreement():.2f} (adjusted Rand index); "
            f"groups are shown from {AGREEMENT:g} on, and {without}. The estimates average over all groupings, so they "
            "are good without them."
        )
        return Statement("groups", "good", "No groups are resolved", text)
    each, between = kin.cohesion()
    inside, chance = float(each.min()), probability(float(kin.n_groups[likely]))
    text = (
        f"Members of one group are alike with probability {probability(inside)} or more on average, sites of different "
        f"groups with {probability(between)}. The groups are expected to agree with the true ones by "
        f"{kin.agreement():.2f} (adjusted Rand index). The most likely number of groups is {likely} (probability "
        f"{chance}); {without}."
    )
    clear = inside > 0.8 and kin.weight_mixed < 0.2
    title = f"{count(int(kin.groups.max()) + 1, 'group')}, {'clear' if clear else 'uncertain'}"
    return Statement("groups", "good" if clear else "fair", title, text)


def note_lines(notes: Mapping[Hashable, Sequence[str]]) -> list[str]:
    """Return the notes on sites, a line for all sites with the same notes."""
    alike: dict[tuple[str, ...], list[Hashable]] = {}
    for site, lines in notes.items():
        alike.setdefault(tuple(lines), []).append(site)
    shown = [f"{some_of(sites)}: {'; '.join(lines)}" for lines, sites in list(alike.items())[:_MOST_NAMES]]
    rest = sum(map(len, list(alike.values())[_MOST_NAMES:]))
    more = f"and notes on {count(rest, 'more site')}: fedkin inspect shows them with --json"
    return [*shown, more] if rest else shown


# --- comparison -------------------------------------------------------------------------------------------------------


def number(value: float | str | None) -> float | None:
    """Return a number of six digits, None where it is not finite; model files hold those as text."""
    return None if value is None or not math.isfinite(float(value)) else float(f"{float(value):.6g}")


def comparison_title(found: Mapping[str, Any]) -> str:
    """Say which rows a comparison was made on, by which metric; ``found`` is in plain values, as a model holds it."""
    if found.get("kind") == "folds":
        rows = f"{count(int(found['rows']), 'row')}, each predicted without its fold"
    else:
        splits = "one split" if found["repeats"] == 1 else f"{found['repeats']} splits"
        rows = f"rows that were held out: {percent(found['test_size'])} of them, {splits}"
    better = "lower" if found.get("lower_is_better", True) else "higher"
    return f"Error on {rows} ({found['metric']}: {better} is better)"


def comparison_table(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the header and a row for each method: its error, its difference from Fedkin, other scores."""
    more = found.get("more") or {}
    decimals = _decimals(found)
    table = [["method", str(found["metric"]), "s.e.", "difference from Fedkin", "s.e.", *more]]
    for one in found["methods"]:
        keys = ("mean", "standard_error", "difference", "difference_error")
        mean, error, apart, apart_error = (_float(one.get(key)) for key in keys)
        cells = [fixed(mean, decimals), fixed(error, decimals)]
        own = one["name"] == "Fedkin"
        cells += ["-", "-"] if own else [fixed(apart, decimals, sign=True), fixed(apart_error, decimals)]
        table.append([one["name"], *cells, *(fixed(_float(scores.get(one["name"])), 4) for scores in more.values())])
    return table


def gains_text(found: Mapping[str, Any]) -> list[str]:
    """Say how many sites gain and lose against models of their own, and which lose most."""
    sites = found.get("sites") or ()
    gains = {one["site"]: gain for one in sites if (gain := _float(one.get("gain"))) is not None}
    if len(gains) < 2:
        return []
    errors = {one["site"]: _float(one.get("gain_error")) or math.inf for one in sites}
    better, worse = [s for s, gain in gains.items() if gain > 0], [s for s, gain in gains.items() if gain < 0]

    def told(which: Sequence[Hashable]) -> str:
        sure = sum(abs(gains[site]) > 2 * errors[site] for site in which)  # by two standard errors
        return str(len(which)) if found.get("repeats", 1) == 1 else f"{len(which)} ({sure} clearly)"

    text = f"sites: better than with their own models {told(better)}, worse {told(worse)}"
    if len(gains) < len(sites):
        text += f"; {count(len(sites) - len(gains), 'site')} had no row to hold out"
    worst = sorted(worse, key=lambda site: gains[site])[:3]
    named = ", ".join(f"{site} ({fixed(-gains[site], _decimals(found), sign=True)})" for site in worst)
    return [text, f"largest losses: {named}"] if worst else [text]


def _decimals(found: Mapping[str, Any]) -> int:
    errors = [_float(one.get(key)) for one in found["methods"] for key in ("standard_error", "difference_error")]
    return decimals_for([error for error in errors if error is not None]) if any(errors) else 4


def _float(value: float | str | None) -> float | None:
    return None if value is None else float(value)  # model files hold numbers that are not finite as text


# --- reproduction and the model card ----------------------------------------------------------------------------------

_LIMITS = (
    "A site's model is for rows like those that the site gave; nothing was learned about other populations.",
    "Coefficients are associations, not effects of an intervention.",
    "Groups describe how sites' rows look under this model, not why.",
)


def reproduction(model: FittedModel) -> dict[str, Any]:
    """Return version, seed, options, digest of the data, and the command."""
    history = model.history or {}
    data = history.get("data") or {}
    known = {
        "Fedkin": model.fedkin_version,
        "Seed": _shown(model.options.get("seed")),
        "Data": data.get("name"),
        "Rows": _shown(data.get("rows", int(model.n_samples.sum()))),
        "SHA-256 of the data": data.get("sha256"),
        "Penalty level": None if model.fused is None else f"{model.fused.lam:.6g}",
    }
    return {
        "facts": {name: str(value) for name, value in known.items() if value not in (None, "")},
        "command": history.get("command"),
        "options": {str(name): _shown(value) for name, value in model.options.items()},
    }


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def model_card(model: FittedModel) -> str:
    """Return a model card in Markdown."""
    again, n, names = reproduction(model), model.n_samples, [f"`{name}`" for name in model.feature_names]
    target = "" if model.target_name is None else f" of `{model.target_name}`"
    sites = count(model.n_sites, "site")
    about = [f"A model{target} for each of {sites}, {model.loss.name} loss, {method_text(model)}"]
    if model.classes is not None:
        about.append(f"Classes: {listed(list(map(str, model.classes)))}")
    rows = f"{count(int(n.sum()), 'row')}, {int(n.min())} to {int(n.max())} at a site"
    parts = [
        f"# Model card\n\n{' '.join(headline(model))}",
        _section("What it is", about),
        _section("What it was made of", [rows, f"{count(len(names), 'feature')}: {some_of(names, _MOST_NAMES)}"]),
    ]
    if found := model.comparison:
        head, *lines = (f"| {' | '.join(cells)} |" for cells in comparison_table(found))
        rule = "|---" * head.count(" | ") + "|---|"
        table = "\n".join([head, rule, *lines])
        parts.append(f"## How well it predicts\n\n{comparison_title(found)}.\n\n{table}")
    parts += [
        _section("Whether to trust it", [f"**{one.title}.** {one.text}" for one in statements(model)]),
        _section("Privacy", [origin_text(model)]),
        _section("Limits", list(_LIMITS)),
        _section("How to make it again", [f"{name}: {value}" for name, value in again["facts"].items()]),
    ]
    if again["command"]:
        parts.append(f"    {again['command']}")
    return "\n\n".join(parts) + "\n"


def _section(title: str, lines: Sequence[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines)
