"""Describe a fitted model in sentences, shared by the terminal, the report page and the model card."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedkin._base import Index, count, decimals_for, fixed, listed, percent, probability, some_of
from fedkin.fitting import FittedModel
from fedkin.kin import AGREEMENT, Kin, by_size

_ENOUGH_DRAWS = 100
#: If one number of groups has this probability, few changes are not a sign of poor mixing.
_HARDLY_VARIES = 0.9
_MOST_NAMES = 12
_GRAPH_USE = {
    "used": ("good", "helped", "Sites that {near} are more often in the same group"),
    "ignored": ("fair", "ignored", "Whether sites {near} does not predict which sites are alike"),
    "inverted": ("fair", "read inverted", "Sites that {near} differ more often than others"),
}


class Statement(NamedTuple):
    """A diagnostic statement about a result; ``tone`` is "good", "fair" or "bad"."""

    topic: str
    tone: str
    title: str
    text: str
    detail: str = ""  # further sentences, which ``fedkin fit`` does not print

    @property
    def whole(self) -> str:
        """The text with its details."""
        return f"{self.text} {self.detail}".strip()


def group_labels(model: FittedModel) -> tuple[Index, bool]:
    """Return the group of each site, 0 for the largest, and whether groups are resolved."""
    kin = model.kin
    if kin is not None:
        return np.asarray(kin.groups, dtype=np.int64), bool(kin.resolved)
    resolved = 1 < model.n_groups < model.n_sites
    return by_size(model.groups if resolved else np.zeros(model.n_sites, dtype=np.int64)), resolved


def members(model: FittedModel) -> list[list[Hashable]]:
    """Return the sites of each group, the largest group first; none if no groups are resolved."""
    groups, resolved = group_labels(model)
    labels = range(int(groups.max()) + 1) if resolved else ()
    return [[model.sites[u] for u in np.flatnonzero(groups == k)] for k in labels]


def headline(model: FittedModel) -> tuple[str, str]:
    """Return the verdict if models were compared, otherwise the groups; and further notes."""
    found, title = model.comparison or {}, groups_text(model)
    if found.get("verdict"):
        return str(found["verdict"]), " ".join([title, *found.get("remarks", ())])
    if model.n_sites == 1:
        return title, ""
    if group_labels(model)[1] or (model.kin is None and model.n_groups == 1):
        return title, "Sites of one group share information; each keeps its own rows."
    return title, "Every site has its own model, and borrows strength from similar sites."


def groups_text(model: FittedModel) -> str:
    """Return a sentence about the groups."""
    groups, resolved = group_labels(model)
    sites = count(model.n_sites, "site")
    if model.n_sites == 1:
        return "A model for one site."
    if resolved:
        found = int(groups.max()) + 1
        alone = int((np.bincount(groups) == 1).sum())
        rest = f", {alone} of them single sites" if 0 < alone < found else ""
        rest = ", one of them a single site" if alone == 1 else rest
        return f"{sites} form {count(found, 'group')}{'' if model.kin is None else ' of kin'}{rest}."
    if model.kin is not None and model.kin.within is not None:
        districts = count(len(model.kin.districts), "district")
        return f"{sites} in {districts} share information; groups were not sought."
    if model.kin is not None:
        return f"No groups resolved: the {sites} differ gradually, or too little to show groups."
    if model.n_groups == 1:
        return f"All {sites} form one group."
    return f"Each of the {sites} has its own model."


def method_text(model: FittedModel) -> str:
    """Return the method of a model in words."""
    fused = model.fused
    if fused is None:
        return "partial pooling with groups (kin)"
    rule = ", one standard error" if model.options.get("cv_rule") == "1se" else ""
    how = f"by cross-validation{rule}" if model.options.get("lam") == "cv" else "given"
    return f"the fused estimator ({fused.penalty} penalty, lam {fused.lam:.4g} {how})"


def origin_text(model: FittedModel) -> str:
    """Describe the data of the fit, and its privacy guarantees."""
    origin = model.origin or {}
    if not origin:
        return "The fit read all rows in one place."
    rounds = int(origin.get("rounds", 1))
    if origin.get("from") == "rounds":
        passed = f"neighbours exchanged parameters, round by round ({count(rounds, 'round')})"
    else:
        passed = f"the fit read {count(rounds, 'message')} from each, with sums over rows"
    text, promised = f"No site shared its rows: {passed}.", origin.get("privacy")
    if promised is None:
        return text if origin.get("from") == "rounds" else f"{text} Differential privacy was not requested."
    limits = f"epsilon at most {promised['epsilon']:g} and delta at most {promised['delta']:g}"
    return f"{text} Differentially private with {limits}, at {count(int(promised['sites']), 'site')}."


# --- whether to trust it ----------------------------------------------------------------------------------------------


def statements(model: FittedModel) -> list[Statement]:
    """Return diagnostic statements about a model."""
    found = list(_about_fused(model) if model.kin is None else _about_kin(model, model.kin))
    if model.notes:
        some = next(iter(model.notes))
        text = f"{count(len(model.notes), 'site')} needed special treatment; site {some}: {model.notes[some][0]}"
        found.append(Statement("notes", "fair", "Notes on single sites", text))
    noise = 0.0 if model.kin is None else float(np.average(model.kin.noise, weights=model.kin.n_samples))
    if remark := model.loss.remark(noise):
        found.append(Statement("dispersion", "fair", "Rows vary more than the model expects", f"{remark}."))
    if model.origin and (alone := model.origin.get("alone")):
        found.append(Statement("alone", "fair", "Some sites were left out of the fit", f"{alone}."))
    if model.origin:
        found.append(Statement("from", "good", "Rows stayed where they are", origin_text(model)))
    return found


def facts(model: FittedModel, *, brief: bool = False) -> dict[str, str]:
    """Return the statements about the estimate by topic, for the terminal; ``brief`` ones have no details."""
    shown = ("groups", "graph", "covariates", "certificate", "sampler", *(() if brief else ("risk",)))
    kept = [one for one in statements(model) if one.topic in shown]
    told = {one.topic: f"{one.title}. {one.text if brief else one.whole}" for one in kept}
    return {"groups": groups_text(model), **told}


def _about_fused(model: FittedModel) -> Iterator[Statement]:
    fused = model.fused
    if fused is None or not math.isfinite(fused.gap):
        text = "A certificate needs the rows of all sites in one place."
        yield Statement("certificate", "fair", "No certificate", text)
    else:
        near = f"within {fused.gap:.1e} of its minimum" if fused.gap > 0 else "at its minimum, to rounding"
        after = count(fused.n_iter, "iteration")
        text = f"The objective is proven to be {near} (relative duality gap), after {after}."
        if fused.status == "converged":
            yield Statement("certificate", "good", "The optimum is certified", text)
        elif (model.options.get("fedadmm") or {}).get("stop") == "rounds" and fused.status == "iteration_limit":
            yield Statement("certificate", "fair", "All rounds were run", f"{text} No gap was required.")
        else:
            early = f"{text} The solver ended with the status {fused.status}: allow more iterations."
            yield Statement("certificate", "bad", "The solver stopped early", early)
    topic, chosen = "covariates" if model.options.get("covariates") else "graph", fused and fused.selection
    parts = count(model.graph.n_components, "connected component")
    if chosen and chosen.get("candidates"):
        level = f", level {chosen['level']:g}" if "level" in chosen else ""
        kept = f"{chosen['kept']} of {chosen['candidates']} edges kept ({chosen['method']}{level}); {parts}"
        text = f"{kept}. Sites of a group have equal estimates; a kept edge alone does not make a group."
        yield Statement(topic, "good", "Edges were tested", text)
    elif model.n_sites > 1:
        text = f"{count(model.graph.n_edges, 'edge')}; {parts}."
        yield Statement(topic, "fair", "Edges were taken as given", text)
    text = "A fused model has no intervals. The method kin gives intervals and probabilities."
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
        "Intervals cover 95% on average over sites. Coverage is lower for a site unlike all others; "
        'confint(kind="site") has intervals with coverage at each site.'
    )
    yield Statement("intervals", "good", "Coverage of the intervals", text)


def _about_sampler(kin: Kin) -> Statement:
    found = kin.diagnostics
    if found is None:
        why = "sites are in districts" if kin.within is not None else "too few sites, or no differences between them"
        text = f"Nothing was sampled: {why}."
        return Statement("sampler", "fair", "No sampling needed", text)
    harm = "another seed may give different groups" if kin.resolved else "the estimates are averaged over them"
    tone, title, agree = {
        "agree": ("good", "The sampler has mixed", "agree"),
        "nearly": ("fair", "The sampler has nearly mixed", "agree for most sites, less so for some"),
        "disagree": ("bad", "The sampler has not mixed", f"disagree about which sites are alike: {harm}"),
    }[found.verdict]
    size, most = found.size["number of groups"], float(kin.n_groups.max())
    if size >= _ENOUGH_DRAWS:
        groups = f"The number of groups has an effective sample size of {size:.0f}."
    elif most >= _HARDLY_VARIES:
        likely = f"{int(np.argmax(kin.n_groups))} with probability {probability(most)}"
        groups = f"The number of groups is {likely}, and hardly varies."
    else:
        groups = f"The number of groups has an effective sample size of {size:.0f}: its probabilities are imprecise."
        if found.verdict == "agree":
            tone, title = "fair", "The sampler has mixed for estimates, but not for the number of groups"
    rhat, least = found.rhat["parameters, worst"], found.size["parameters, worst"]
    worst = "<= 1.01" if rhat <= 1.01 else f"{rhat:.2f} at worst"
    chains = f"{count(len(found.starts), 'chain')} of {found.draws} draws {agree}"
    detail = (
        f"Parameters have an effective sample size of {least:,.0f} or more. Only groupings are sampled; given a "
        f"grouping, the sites' parameters are averaged analytically. {groups}"
    )
    return Statement("sampler", tone, title, f"{chains}: R-hat of the parameters is {worst}.", detail)


def _about_groups(kin: Kin) -> Statement:
    likely = int(np.argmax(kin.n_groups))
    without = f"a model without groups has weight {probability(kin.weight_mixed)}"
    if kin.within is not None:
        text = f"Sites are nested in {len(kin.districts)} districts, and shrunk towards their means."
        return Statement("groups", "good", "Groups were not sought", text)
    if not kin.resolved:
        agreed = fixed(kin.agreement(), 2)
        text = "The estimates average over all groupings, so they are good without them."
        detail = (
            f"The best grouping is expected to agree with the true one by {agreed} (adjusted Rand index); groups are "
            f"shown from {AGREEMENT:g} onwards, and {without}."
        )
        return Statement("groups", "good", "No groups are resolved", text, detail)
    each, between = kin.cohesion()
    inside, chance = float(each.min()), probability(float(kin.n_groups[likely]))
    least = probability(inside) if inside > 0.99 else f"{probability(inside)} or more"
    text = (
        f"Members of one group are alike with probability {least} on average, sites of different "
        f"groups with {probability(between)}."
    )
    detail = (
        f"The groups are expected to agree with the true ones by {fixed(kin.agreement(), 2)} (adjusted Rand index). "
        f"The most likely number of groups is {likely} (probability {chance}); {without}."
    )
    clear = inside > 0.8 and kin.weight_mixed < 0.2
    title = f"{count(int(kin.groups.max()) + 1, 'group')}, {'clear' if clear else 'uncertain'}"
    return Statement("groups", "good" if clear else "fair", title, text, detail)


def note_lines(notes: Mapping[Hashable, Sequence[str]]) -> list[str]:
    """Return the notes on sites, one line per distinct note."""
    alike: dict[tuple[str, ...], list[Hashable]] = {}
    for site, lines in notes.items():
        alike.setdefault(tuple(lines), []).append(site)
    shown = [f"{some_of(sites)}: {'; '.join(lines)}" for lines, sites in list(alike.items())[:_MOST_NAMES]]
    rest = sum(map(len, list(alike.values())[_MOST_NAMES:]))
    more = f"and notes on {count(rest, 'more site')}: see fedkin inspect --json"
    return [*shown, more] if rest else shown


# --- comparison -------------------------------------------------------------------------------------------------------


def number(value: float | str | None) -> float | None:
    """Return a number with six digits, None if it is not finite; model files store those as text."""
    return None if value is None or not math.isfinite(float(value)) else float(f"{float(value):.6g}")


def comparison_title(found: Mapping[str, Any]) -> str:
    """Describe the rows and the metric of a comparison; ``found`` is in plain values, as stored in a model."""
    if found.get("kind") == "folds":
        rows = f"{count(int(found['rows']), 'row')}, each predicted by a model fitted without its fold"
    else:
        splits = "one split" if found["repeats"] == 1 else f"{found['repeats']} splits"
        rows = f"held-out rows: {percent(found['test_size'])} of them, {splits}"
    return f"Error on {rows} ({found['metric']}: lower is better)"


def comparison_table(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the header and one row per method: error, difference from Fedkin, other scores."""
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
    """Describe how many sites gain and lose compared with their own models, and which gain and lose most."""
    sites = found.get("sites") or ()
    gains = {one["site"]: gain for one in sites if (gain := _float(one.get("gain"))) is not None}
    if len(gains) < 2:
        return []
    errors = {one["site"]: _float(one.get("gain_error")) or math.inf for one in sites}
    better, worse = [s for s, gain in gains.items() if gain > 0], [s for s, gain in gains.items() if gain < 0]

    def sure(which: Sequence[Hashable]) -> str:
        clear = sum(abs(gains[site]) > 2 * errors[site] for site in which)  # by two standard errors
        return "" if found.get("repeats", 1) == 1 else f" ({clear} clearly)"

    gaining = f"{count(len(better), 'site')} gain{sure(better)}"
    text = f"Compared with their own models, {gaining} and {len(worse)} lose{sure(worse)}"
    alike = len(found.get("constant", ()))
    if alike:
        text += f"; held-out rows cannot decide at {count(alike, 'site')} with the same target in every row"
    if rest := len(sites) - len(gains) - alike:
        text += f"; {count(rest, 'site')} had no held-out row"

    def named(which: Sequence[Hashable]) -> str:
        return ", ".join(f"{site} ({fixed(-gains[site], _decimals(found), sign=True)})" for site in which)

    best, worst = (sorted(which, key=lambda site: -abs(gains[site]))[:3] for which in (better, worse))
    lines = [f"{text}."]
    lines += [f"Largest gains: {named(best)}."] if best else []
    return [*lines, f"Largest losses: {named(worst)}."] if worst else lines


def _decimals(found: Mapping[str, Any]) -> int:
    errors = [_float(one.get(key)) for one in found["methods"] for key in ("standard_error", "difference_error")]
    return decimals_for([error for error in errors if error is not None]) if any(errors) else 4


def _float(value: float | str | None) -> float | None:
    return None if value is None else float(value)  # model files store non-finite numbers as text


# --- reproduction and the model card ----------------------------------------------------------------------------------

_LIMITS = (
    "A site's model is for rows like those that it was fitted on; it says nothing about other populations.",
    "Coefficients are associations, not effects of an intervention.",
    "Groups describe which sites look alike under this model, not why.",
)


def reproduction(model: FittedModel) -> dict[str, Any]:
    """Return version, seed, options, digest of the data, and the command."""
    history = model.history or {}
    data = history.get("data") or {}
    known = {
        "Fedkin": model.fedkin_version,
        "Seed": _shown(model.options.get("seed")),
        "Data": data.get("name"),
        "Rows": fixed(data.get("rows", int(model.n_samples.sum())), 0),
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
        f"# Model card\n\n{' '.join(filter(None, headline(model)))}",
        _section("Model", about),
        _section("Training data", [rows, f"{count(len(names), 'feature')}: {some_of(names, _MOST_NAMES)}"]),
    ]
    if found := model.comparison:
        head, *lines = (f"| {' | '.join(cells)} |" for cells in comparison_table(found))
        rule = "|---" * head.count(" | ") + "|---|"
        table = "\n".join([head, rule, *lines])
        parts.append(f"## How well it predicts\n\n{comparison_title(found)}.\n\n{table}")
    parts += [
        _section("Diagnostics", [f"**{one.title}.** {one.whole}" for one in statements(model)]),
        _section("Privacy", [origin_text(model)]),
        _section("Limits", list(_LIMITS)),
        _section("Reproduce this fit", [f"{name}: {value}" for name, value in again["facts"].items()]),
    ]
    if again["command"]:
        parts.append(f"    {again['command']}")
    return "\n\n".join(parts) + "\n"


def _section(title: str, lines: Sequence[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines)
