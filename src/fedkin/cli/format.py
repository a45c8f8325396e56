"""Text, tables and JSON about a fitted model, its kin and its comparison, for every command that shows one."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from fedkin._base import count, decimals_for, fixed, percent, probability
from fedkin.cli.console import add_row, members, output, plain_table

if TYPE_CHECKING:  # commands of sites show no models, and need not load what fits them
    from fedkin.data import Finding, Schema
    from fedkin.fitting import FittedModel
    from fedkin.kin import Kin

MOST_GROUPS = 12  # groups that are listed with their members
_MOST_NOTES = 8
_MOST_FEATURES = 10  # features whose coefficients are shown
_MOST_COLUMNS = 6  # groups that are shown side by side
_VERDICTS = {
    "agree": "agree",
    "nearly": "agree on most sites",
    "disagree": "do not agree: take groups with care, another seed may find others",
}
_GRAPHS = {
    "none": "none was given",
    "used": "used: its edges join sites that are alike",
    "ignored": "ignored: it does not tell which sites are alike",
    "inverted": "read inverted: its edges join sites that differ",
}
_COVARIATES = {
    "used": "used: sites that are close in them are alike",
    "ignored": "ignored: they do not tell which sites are alike",
    "inverted": "read inverted: sites that are close in them differ",
}


# --- facts ------------------------------------------------------------------------------------------------------------


def format_method(model: FittedModel) -> str:
    """Say how a model was fitted."""
    return "partial pooling with groups (kin)" if model.fused is None else f"{model.fused.penalty} penalty"


def model_facts(model: FittedModel) -> dict[str, str]:
    """Return groups, graph and certificate, or groups, graph, risk and sampler, a line of text each."""
    kin = model.kin
    if kin is not None:
        risk = ", ".join(f"{name} {fixed(kin.sure[name], 1)}" for name in ("kin", "Local", "Global"))
        risk += " (SURE: estimated error of the sites' coefficients, not of predictions; lower is better)"
        facts = {"groups": _format_kin_groups(kin), **graph_fact(model)}
        return {**facts, "risk": risk, "sampler": _format_sampler(kin)}
    fused = model.fused
    assert fused is not None
    rule = ", one standard error" if model.options.get("cv_rule") == "1se" else ""
    how = f"cross-validation{rule}" if model.options.get("lam") == "cv" else "given"
    return {
        "groups": format_groups(model),
        "penalty": f"{fused.penalty}, lam {fused.lam:.4g} ({how})",
        "gap": _format_gap(model),
        **graph_fact(model),
    }


def format_groups(model: FittedModel) -> str:
    """Return the number of groups, and of models where a group holds more than one."""
    text, distinct = f"{model.n_groups} among {count(model.n_sites, 'site')}", n_distinct(model)
    return text if distinct == model.n_groups else f"{text}, holding {count(distinct, 'different model')}"


def n_distinct(model: FittedModel) -> int:
    """Return how many different models the sites hold; more than groups where a group is joined, but not fused."""
    stacked = np.concatenate([model.intercept[:, :, None], model.coef], axis=2).reshape(model.n_sites, -1)
    return len(np.unique(stacked, axis=0))


def graph_fact(model: FittedModel, source: str = "") -> dict[str, str]:
    """Say what was made of the graph, or of the covariates that it was made of; ``source`` is where it comes from."""
    kin, names = model.kin, model.options.get("covariates")
    head = f"{source}: " if source else ""
    if kin is None:
        return {"covariates" if names else "graph": head + _format_edges(model)}
    rates = ""
    if kin.rates is not None and kin.graph_use in ("used", "inverted"):
        rates = f" (edges: {percent(kin.rates[0])} of pairs inside groups, {percent(kin.rates[1])} between)"
    if names and kin.graph_use in _COVARIATES:
        return {"covariates": f"{head}{', '.join(names)}: {_COVARIATES[kin.graph_use]}{rates}"}
    return {"graph": f"{head}{_GRAPHS[kin.graph_use]}{rates}"}


def _format_edges(model: FittedModel) -> str:
    chosen = None if model.fused is None else model.fused.selection
    parts = count(model.graph.n_components, "connected component")
    if chosen is None:
        return f"{count(model.graph.n_edges, 'edge')}; {parts}"
    level = f", level {chosen['level']:g}" if "level" in chosen else ""
    return f"{chosen.get('kept')} of {chosen.get('candidates')} edges kept ({chosen.get('method')}{level}); {parts}"


def _format_gap(model: FittedModel) -> str:
    fused = model.fused
    assert fused is not None
    if math.isnan(fused.gap):
        rounds = model.origin is not None and model.origin.get("from") == "rounds"
        return "not certified: that takes the rows of all sites in one place" if rounds else "none"
    return f"{fused.gap:.1e} ({fused.status.replace('_', ' ')}) after {count(fused.n_iter, 'iteration')}"


def _format_kin_groups(kin: Kin) -> str:
    if not kin.resolved:
        return "no groups resolved: sites differ gradually, or too little for groups to show"
    likely = int(np.argmax(kin.n_groups))
    sure = f"most likely number {likely}, P = {probability(float(kin.n_groups[likely]))}"
    return f"{count(int(kin.groups.max()) + 1, 'group')} of sites that are alike ({sure})"


def _format_sampler(kin: Kin) -> str:
    found = kin.diagnostics
    if found is None:
        return "nothing was sampled: too few sites, or nothing differs between them"
    typical, worst = found.rhat["parameters, median"], found.rhat["parameters, worst"]
    text = _VERDICTS[found.verdict]
    if found.verdict == "disagree" and not kin.resolved:
        text = "disagree about which sites are alike; the estimates are averaged over them"
    chains = f"{count(len(found.starts), 'chain')} of {found.draws} sweeps"
    return f"{chains} {text} (R-hat {typical:.2f} median, {worst:.2f} worst)"


def format_origin(model: FittedModel) -> str:
    """Say where a model comes from, and what was promised about it."""
    origin = model.origin or {}
    if origin.get("from") == "rounds":
        return f"{count(int(origin['rounds']), 'round')} of Fed-ADMM between sites"
    if origin.get("from") != "summaries":
        return "rows"
    text, promised = f"summaries of sites, {count(int(origin['rounds']), 'message')} of each", origin.get("privacy")
    if promised is None:
        return text
    return f"{text}; differentially private: epsilon {promised['epsilon']:g}, delta {promised['delta']:g} at most"


def note_lines(notes: Mapping[Hashable, Sequence[str]]) -> list[str]:
    """Return the notes on sites, a line for all sites with the same notes."""
    alike: dict[tuple[str, ...], list[Hashable]] = {}
    for site, lines in notes.items():
        alike.setdefault(tuple(lines), []).append(site)
    shown = [f"{members(sites, 40)}: {'; '.join(lines)}" for lines, sites in list(alike.items())[:_MOST_NOTES]]
    rest = sum(map(len, list(alike.values())[_MOST_NOTES:]))
    if rest:
        shown.append(f"and notes on {count(rest, 'more site')}: fedkin inspect shows them with --json")
    return shown


# --- tables -----------------------------------------------------------------------------------------------------------


def schema_table(schema: Schema) -> Table:
    """Return the columns of a schema; centre and scale where they were agreed on."""
    agreed = schema.agreed
    heads = ("column", "what it must be", "centre", "scale") if agreed else ("column", "what it is")
    table = plain_table(*heads, numbers_from=2)
    for column in schema.columns:
        centre, scale = column.centre_and_scale
        scaled = column.kind != "category" and column is not schema.target
        numbers = (f"{centre:g}", f"{scale:g}") if scaled else ("", "")
        text = column.description + (" (target)" if column is schema.target else "")
        add_row(table, column.name, text, *(numbers if agreed else ()))
    if schema.offset is not None:
        add_row(table, schema.offset, "number (offset)", *(("", "") if agreed else ()))
    return table


def print_groups(model: FittedModel) -> None:
    """Print the largest groups with their members, and for kin how likely these are alike; nothing where none are."""
    kin = model.kin
    if kin is not None and not kin.resolved:
        return
    inside = None if kin is None else kin.cohesion()[0]
    groups = sorted(enumerate(model.members()), key=lambda group: len(group[1]), reverse=True)
    if kin is not None:
        groups = [(k, tuple(kin.members(k))) for k in range(int(kin.groups.max()) + 1)]
    table = plain_table("group", "sites", *([] if inside is None else ["P(kin)"]), "members", numbers_from=9)
    for number, (k, group) in enumerate(groups[:MOST_GROUPS], start=1):
        chance = [] if inside is None else [probability(float(inside[k])) if len(group) > 1 else "-"]
        add_row(table, str(number), str(len(group)), *chance, members(group, 60))
    rest = groups[MOST_GROUPS:]
    if rest:
        more = f"in {count(len(rest), 'smaller group')}"
        add_row(table, "...", str(sum(len(group) for _, group in rest)), *([] if inside is None else [""]), more)
    title = "belong together" if kin is None else "are alike, and how likely two members are"
    output().print(f"\n{count(len(groups), 'group')} of sites that {title}", style="bold")
    output().print(table)


def population_table(kin: Kin, most: int = 12) -> Table:
    """Return mean and standard deviation of coefficients in the population of sites, in the order of the columns."""
    table = plain_table("parameter", "population mean", "std err", "sd between sites")
    error = np.sqrt(np.diag(kin.mean_covariance))
    for j in range(min(len(kin.names), most)):
        decimals = decimals_for([float(error[j])])
        cells = (fixed(float(one), decimals) for one in (kin.mean[j], error[j], kin.sd[j]))
        add_row(table, kin.names[j], *cells)
    if len(kin.names) > most:
        add_row(table, f"and {len(kin.names) - most} more", "", "", "")
    return table


def print_coefficients(model: FittedModel) -> None:
    """Print the features with the largest coefficients: a column per group if there are few, else the range."""
    labels = sorted(range(model.n_groups), key=lambda k: -int((model.groups == k).sum()))
    by_group = len(labels) <= _MOST_COLUMNS and (len(labels) > 1 or n_distinct(model) == 1)
    by_group = by_group and (model.kin is None or model.kin.resolved)
    parts = [model.groups == k for k in labels] if by_group else [np.full(model.n_sites, True)]
    heads = [f"group {k + 1}" for k in range(len(labels))] if by_group else ["average", "least", "most"]
    # as large as what is shown: the average of all sites, or of one of the groups
    size = np.abs([model.coef[part].mean(axis=0) for part in parts]).max(axis=(0, 1))
    chosen = np.argsort(-size, kind="stable")[:_MOST_FEATURES]
    classes = [None] if model.coef.shape[1] == 1 or model.classes is None else list(model.classes[1:])
    rows = [("(intercept)", model.intercept)] if model.fit_intercept else []
    units = {} if model.schema is None else {column.name: column.unit for column in model.schema.features}
    for q in chosen.tolist():
        name = model.feature_names[q]
        rows.append((f"{name} (per {units[name]})" if units.get(name) else name, model.coef[:, :, q]))
    table = plain_table("feature", *heads)
    for name, values in rows:
        for j, label in enumerate(classes):
            cells = [float(values[part, j].mean()) for part in parts]
            cells += [] if by_group else [float(values[:, j].min()), float(values[:, j].max())]
            add_row(table, name if label is None else f"{name} [{label}]", *(f"{cell:.4g}" for cell in cells))
    title = "Coefficients of the sites"
    if size.size > _MOST_FEATURES:
        title += f": {'the intercept and ' if model.fit_intercept else ''}the {len(chosen)} largest of {size.size}"
    over = "the average of each group's sites" if by_group else "the average of all sites, the least and the most"
    output().print(f"\n{title}", style="bold")
    output().print(f"({over}; in the units of the features)")
    output().print(table)


def print_comparison(found: Mapping[str, Any]) -> None:
    """Print the errors of all methods on held-out rows, which sites gain and lose, and the verdict.

    ``found`` is a comparison in plain values, as a model holds it.
    """
    console, methods, more = output(), found["methods"], found.get("more") or {}
    if found.get("kind") == "folds":
        head = f"Error on {count(int(found['rows']), 'row')}, each predicted without its fold"
    else:
        splits = "one split" if found["repeats"] == 1 else f"{found['repeats']} splits"
        head = f"Error on rows that were held out: {percent(found['test_size'])} of them, {splits}"
    console.print(f"\n{head}", style="bold")
    console.print(f"({found['metric']}: lower is better)")
    errors = [_number(one.get(key)) for one in methods for key in ("standard_error", "difference_error")]
    decimals = decimals_for([error for error in errors if error is not None]) if any(errors) else 4
    table = plain_table("method", found["metric"], "s.e.", "difference from Fedkin", "s.e.", *more)
    best = min((one["mean"] for one in methods if one.get("mean") is not None), default=None)
    for one in methods:
        apart = ["-", "-"]
        if one["name"] != "Fedkin":
            difference = fixed(_number(one.get("difference")), decimals, sign=True)
            apart = [difference, fixed(_number(one.get("difference_error")), decimals)]
        cells = [fixed(_number(one.get("mean")), decimals), fixed(_number(one.get("standard_error")), decimals), *apart]
        cells += [fixed(_number(values.get(one["name"])), 4) for values in more.values()]
        add_row(table, one["name"], *cells, style="bold green" if one.get("mean") == best else "")
    console.print(table)
    for line in _site_lines(found.get("sites") or (), int(found.get("repeats", 1)), decimals):
        console.print(line, soft_wrap=True)
    console.print(str(found.get("verdict", "")), style="bold", soft_wrap=True)


def _site_lines(sites: Sequence[Mapping[str, Any]], repeats: int, decimals: int) -> list[str]:
    """Return how many sites gain and lose against models of their own, and which lose most."""
    gains = {one["site"]: gain for one in sites if (gain := _number(one.get("gain"))) is not None}
    if len(gains) < 2:
        return []
    errors = {one["site"]: _number(one.get("gain_error")) or math.inf for one in sites}
    better, worse = [s for s, gain in gains.items() if gain > 0], [s for s, gain in gains.items() if gain < 0]

    def told(which: Sequence[Hashable]) -> str:
        sure = sum(abs(gains[site]) > 2 * errors[site] for site in which)  # by two standard errors
        return str(len(which)) if repeats == 1 else f"{len(which)} ({sure} clearly)"

    text = f"sites: better than with their own models {told(better)}, worse {told(worse)}"
    if len(gains) < len(sites):
        text += f"; {count(len(sites) - len(gains), 'site')} had no row to hold out"
    worst = sorted(worse, key=lambda site: gains[site])[:3]
    named = ", ".join(f"{site} ({fixed(-gains[site], decimals, sign=True)})" for site in worst)
    return [text, f"largest losses: {named}"] if worst else [text]


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)  # files of models hold numbers that are not finite as text


# --- findings about tables --------------------------------------------------------------------------------------------


def print_findings(data: Path, found: Mapping[str, Sequence[Finding]]) -> None:
    """Print findings in a table: what must be fixed, then remarks."""
    shown = [(site, finding) for site, some in found.items() for finding in some]
    refused = sum(finding.refuses for _, finding in shown)
    console = output()
    if not shown:
        console.print(f"{data}: fits", style="green", soft_wrap=True)
        return
    by_site = any(site for site, _ in shown)
    table = plain_table(*(["site"] if by_site else []), "column", "finding", "", numbers_from=9)
    for site, finding in sorted(shown, key=lambda one: not one[1].refuses):
        weight = "must be fixed" if finding.refuses else "remark"
        cells = [finding.column or "(table)", finding.text, weight]
        add_row(table, *([site] if by_site else []), *cells, style="" if finding.refuses else "dim")
    console.print(table)
    verdict = f"{count(refused, 'finding')} to fix before the rows can be used" if refused else "fits, with remarks"
    console.print(f"{data}: {verdict}", style="red" if refused else "green", soft_wrap=True)


# --- JSON -------------------------------------------------------------------------------------------------------------


def model_document(model: FittedModel) -> dict[str, Any]:
    """Return what there is to say about a model, for ``--json``."""
    fused = model.fused
    return {
        "fedkin_version": model.fedkin_version,
        "method": "kin" if fused is None else "fused",
        "loss": model.loss.name,
        "penalty": None if fused is None else fused.penalty,
        "lam": None if fused is None else fused.lam,
        "gap": None if fused is None else finite(fused.gap),
        "n_iter": None if fused is None else fused.n_iter,
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
        "selection": None if fused is None or fused.selection is None else dict(fused.selection),
        "origin": None if model.origin is None else dict(model.origin),
        "notes": [{"site": site, "notes": list(lines)} for site, lines in model.notes.items()],
        "comparison": model.comparison,
        "kin": None if model.kin is None else _kin_document(model.kin, model.options.get("covariates")),
    }


def _kin_document(kin: Kin, covariates: Sequence[str] | None) -> dict[str, Any]:
    found = kin.diagnostics
    inside = kin.cohesion()[0].tolist() if kin.resolved else []
    errors = np.sqrt(np.diag(kin.mean_covariance)).tolist()
    rows = zip(kin.names, kin.mean.tolist(), errors, kin.sd.tolist(), strict=True)
    return {
        "resolved": kin.resolved,
        "groups": [
            {"sites": [kin.sites[u] for u in np.flatnonzero(kin.groups == k)], "probability": chance}
            for k, chance in enumerate(inside)
        ],
        "n_groups": kin.n_groups.tolist(),
        "weight_without_groups": kin.weight_mixed,
        "graph_use": kin.graph_use,
        "covariates": covariates,
        "graph_rates": kin.rates,
        "sure": kin.sure,
        "parameters": [dict(zip(("name", "mean", "standard_error", "sd"), row, strict=True)) for row in rows],
        "sampler": found
        and {
            "chains": list(found.starts),
            "sweeps": found.draws,
            "rhat": {name: finite(value) for name, value in found.rhat.items()},
            "effective_size": {name: finite(value) for name, value in found.size.items()},
        },
    }


def finite(value: float) -> float | None:
    """Return a number that JSON can hold, None for others."""
    return value if math.isfinite(value) else None
