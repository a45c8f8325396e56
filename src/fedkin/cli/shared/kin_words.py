"""What a model with kin has to say: groups with probabilities, the spread of coefficients, how the sampler did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.table import Table

from fedkin._base import count, listed
from fedkin.cli.shared.console import output, print_json
from fedkin.cli.shared.tables import MOST_GROUPS, add_row, members, plain_table
from fedkin.data import near_name
from fedkin.errors import ParameterError, UnknownSiteError
from fedkin.fitting import FittedModel
from fedkin.kin import Kin

_VERDICTS = {
    "agree": "agree",
    "nearly": "agree on most sites",
    "disagree": "do not agree: take groups with care, another seed may find others",
}
_GRAPHS = {
    "none": "none was given",
    "used": "used: its edges join sites that are alike",
    "ignored": "ignored: it does not tell who is alike",
    "inverted": "read inverted: its edges join sites that differ",
}


_COVARIATES = {
    "used": "used: sites that are near in them are alike",
    "ignored": "ignored: they do not tell who is alike",
    "inverted": "read inverted: sites that are near in them differ",
}


def kin_facts(model: FittedModel) -> dict[str, str]:
    """Groups, graph or covariates, risk and sampler, a line of words each; of a model with kin."""
    kin = model.kin
    assert kin is not None
    return {
        "groups": groups_words(kin),
        **graph_use_words(model),
        "risk": risk_words(kin),
        "sampler": sampler_words(kin),
    }


def groups_words(kin: Kin) -> str:
    """How many groups there are, and how sure that is."""
    likely = int(np.argmax(kin.n_groups))
    if kin.resolved:
        shown = int(kin.groups.max()) + 1
        sure = f"most likely number {likely}, P = {kin.n_groups[likely]:.2f}"
        return f"{count(shown, 'group')} of sites that are alike ({sure})"
    return "no groups resolved: sites differ gradually, or too little for groups to show"


def graph_use_words(model: FittedModel) -> dict[str, str]:
    """What was made of the graph, or of the covariates that it was made of."""
    kin, names = model.kin, model.options.get("covariates")
    assert kin is not None
    rates = ""
    if kin.rates is not None and kin.graph_use in ("used", "inverted"):
        rates = f" (edges: {kin.rates[0]:.0%} of pairs inside groups, {kin.rates[1]:.0%} between)"
    if names and kin.graph_use in _COVARIATES:
        return {"covariates": f"{', '.join(names)}: {_COVARIATES[kin.graph_use]}{rates}"}
    return {"graph": f"{_GRAPHS[kin.graph_use]}{rates}"}


def risk_words(kin: Kin) -> str:
    """SURE beside the two extremes, and what it estimates."""
    sure = kin.sure
    each = f"kin {sure['kin']:.1f}, Local {sure['Local']:.1f}, Global {sure['Global']:.1f}"
    return f"{each} (SURE: estimated error of the sites' coefficients, not of predictions; lower is better)"


def sampler_words(kin: Kin) -> str:
    """Whether the chains agree."""
    found = kin.diagnostics
    if found is None:
        return "nothing was sampled: too few sites, or nothing differs between them"
    typical, worst = found.rhat["parameters, median"], found.rhat["parameters, worst"]
    chains = f"{count(len(found.starts), 'chain')} of {found.draws} sweeps"
    words = _VERDICTS[found.verdict]
    if found.verdict == "disagree" and not kin.resolved:
        words = "disagree about who is alike; the estimates are averaged over them"
    return f"{chains} {words} (R-hat {typical:.2f} median, {worst:.2f} worst)"


def kin_table(kin: Kin) -> Table:
    """Resolved groups with their members, and how likely these are kin."""
    table = plain_table("group", "sites", "P(kin)", "members", numbers_from=9)
    labels, (inside, _) = kin.groups, kin.cohesion()
    for k in range(min(int(labels.max()) + 1, MOST_GROUPS)):
        group = np.flatnonzero(labels == k)
        add_row(
            table,
            str(k + 1),
            str(len(group)),
            f"{inside[k]:.2f}" if len(group) > 1 else "-",
            members([kin.sites[u] for u in group], 60),
        )
    rest = int((labels >= MOST_GROUPS).sum())
    if rest:
        add_row(table, "...", str(rest), "", f"in {count(int(labels.max()) + 1 - MOST_GROUPS, 'smaller group')}")
    return table


def spread_table(kin: Kin, most: int = 12) -> Table:
    """Mean and spread of coefficients in the population of sites, in the order of the columns."""
    table = plain_table("parameter", "population mean", "std err", "spread between sites")
    error = np.sqrt(np.diag(kin.mean_covariance))
    for j in range(min(len(kin.names), most)):
        add_row(table, kin.names[j], f"{kin.mean[j]:.4g}", f"{error[j]:.2g}", f"{kin.sd[j]:.2g}")
    if len(kin.names) > most:
        add_row(table, f"and {len(kin.names) - most} more", "", "", "")
    return table


def kin_document(model: FittedModel) -> dict[str, Any] | None:
    """What there is to say about kin, for ``--json``."""
    kin = model.kin
    if kin is None:
        return None
    found = kin.diagnostics
    inside = kin.cohesion()[0].tolist() if kin.resolved else []
    return {
        "resolved": kin.resolved,
        "groups": [
            {
                "sites": [kin.sites[u] for u in np.flatnonzero(kin.groups == k)],
                "probability": chance,
            }
            for k, chance in enumerate(inside)
        ],
        "n_groups": kin.n_groups.tolist(),
        "weight_without_groups": kin.weight_mixed,
        "graph_use": kin.graph_use,
        "covariates": model.options.get("covariates"),
        "graph_rates": kin.rates,
        "sure": kin.sure,
        "parameters": [
            {"name": name, "mean": mean, "standard_error": error, "spread": spread}
            for name, mean, error, spread in zip(
                kin.names,
                kin.mean.tolist(),
                np.sqrt(np.diag(kin.mean_covariance)).tolist(),
                kin.sd.tolist(),
                strict=True,
            )
        ],
        "sampler": found
        and {
            "chains": list(found.starts),
            "sweeps": found.draws,
            "rhat": {name: _finite(value) for name, value in found.rhat.items()},
            "effective_size": {name: _finite(value) for name, value in found.size.items()},
        },
    }


@dataclass(frozen=True)
class Question:
    """What ``fedkin inspect`` was asked about sites and groups, by their names; groups count from 1."""

    site: str | None
    group: int | None
    contrast: tuple[str, str] | None
    level: float
    kind: Literal["average", "site"]


def answer(model: FittedModel, asked: Question, as_json: bool) -> None:
    """Print it, as text in the manner of statsmodels or as JSON."""
    one: Any
    other: Any = None
    if asked.contrast is not None:
        one, other = (_sites(model, name) for name in asked.contrast)
    else:
        one = _sites(model, f"group:{asked.group}" if asked.site is None else asked.site)
    found = model.contrast(one, other, kind=asked.kind)
    if not as_json:
        if asked.contrast is not None:
            text = found.summary(asked.level)
        elif asked.site is not None:
            text = model.summary(asked.level, site=one, kind=asked.kind)
        else:
            assert asked.group is not None
            text = model.summary(asked.level, group=asked.group - 1, kind=asked.kind)
        output().print(text, soft_wrap=True)
        return
    ends = found.confint(asked.level)
    rows = zip(found.names, found.estimate, found.standard_error, found.p_values, *ends.T, strict=True)
    keys = ("estimate", "standard_error", "p_value", "low", "high")
    statistic, degrees, tail = found.wald
    print_json(
        {
            "about": found.label,
            "kind": found.kind,
            "level": asked.level,
            "parameters": [
                {"name": name, **{key: _finite(float(value)) for key, value in zip(keys, values, strict=True)}}
                for name, *values in rows
            ],
            "wald": {"statistic": statistic, "degrees": degrees, "p_value": tail},
            "probability_of_being_kin": found.probability,
        }
    )


def _sites(model: FittedModel, name: str) -> Any:
    """A site by its name, or the members of ``group:N``."""
    if name.startswith("group:") and name[6:].isdigit() and model.kin is not None:
        number, groups = int(name[6:]), int(model.kin.groups.max()) + 1
        if model.kin.resolved and not 1 <= number <= groups:
            raise ParameterError(f"there is no group {number}: groups are 1 to {groups}")
        return model.kin.members(number - 1)
    known = {str(site): site for site in model.sites}
    if name not in known:
        near = near_name(name, known) or f"; its sites are {listed(list(known), 12)}"
        raise UnknownSiteError(f"the model has no site {name!r}{near}")
    return known[name]


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
