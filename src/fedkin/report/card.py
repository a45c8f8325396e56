"""The model card: what a model is for, what it was made of, what it is worth and what it may not be used for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedkin._base import count, listed
from fedkin.report.arrays import number
from fedkin.report.payload import group_labels
from fedkin.report.words import headline, reproduction, trust

if TYPE_CHECKING:  # loads what fits models
    from fedkin.fitting import FittedModel

_MOST_NAMES = 12
_LIMITS = (
    "A site's model is for rows like those that the site gave; nothing was learned about other populations.",
    "Coefficients are associations, not effects of an intervention.",
    "Groups describe how sites' rows look under this model, not why.",
)


def model_card(model: FittedModel) -> str:
    """A model card in Markdown.

    Parameters
    ----------
    model : FittedModel
        With ``kin``, ``comparison``, ``history`` and ``origin`` where it has them.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit_federation
    >>> from fedkin.report import model_card
    >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
    >>> model = fit_federation(fed, None, FitOptions(loss="mean", lam=0.02, select="none"))
    >>> print(model_card(model)[:36])
    # Model card
    <BLANKLINE>
    4 sites form 2 groups.
    """
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
    classes = [] if model.classes is None else [f"Classes: {listed(list(map(str, model.classes)))}"]
    return [
        f"A model{target} for each of {count(model.n_sites, 'site')}, by {method} ({model.loss.name} loss)",
        *classes,
    ]


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
    cuts = count(int(found["repeats"]), "split") if "repeats" in found else count(int(found["folds"]), "fold")
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
