"""Define ``fedkin inspect`` and ``report``; show a fitted model in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedkin._base import Array, count, decimals_for, fixed, probability, some_of, write_file
from fedkin.cli.console import (
    Json,
    argument,
    messages,
    option,
    output,
    print_facts,
    print_json,
    print_rows,
    print_schema,
    switch,
)
from fedkin.cli.reading import check_new_file
from fedkin.errors import ParameterError
from fedkin.fitting import FittedModel, load
from fedkin.kin import Kin, population_sd, population_tests, variance_facts
from fedkin.report import model_card, read_coordinates, report_page
from fedkin.report.text import (
    comparison_table,
    comparison_title,
    facts,
    gains_text,
    group_labels,
    members,
    method_text,
    note_lines,
    origin_text,
)

Model = Annotated[Path, argument("MODEL", "A model directory that fedkin fit wrote.")]
_MOST_ROWS, _MOST_COLUMNS = 12, 6  # most groups or features in rows, and groups in columns
_MOST_EFFECTS = 40  # of the population


def inspect(
    model: Model,
    card: Annotated[bool, switch("--card", "Print a model card in Markdown instead.")] = False,
    site: Annotated[
        str | None, option("NAME", "Show one site: its parameters with intervals, and similar sites.")
    ] = None,
    group: Annotated[int | None, option("N", "Show one group: the mean of its members' parameters.")] = None,
    contrast: Annotated[tuple[str, str] | None, option("A B", "Show how two sites differ; group:N is a group.")] = None,
    level: Annotated[float, option("X", "Level of the intervals.")] = 0.95,
    own_rows: Annotated[
        bool, switch("--own-rows", "Intervals from a site's own rows only, with coverage at each site.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a fitted model: groups, graph, coefficients, and notes on single sites."""
    fitted = load(model)
    if card:
        typer.echo(model_card(fitted), nl=False)
        return
    if site is not None or group is not None or contrast is not None:
        _print_parameters(fitted, site, group, contrast, level, own_rows, as_json)
        return
    if as_json:
        schema = None if fitted.schema is None else fitted.schema.plain()
        more = {"model": str(model), "schema": schema, "options": dict(fitted.options)}
        print_json({**model_document(fitted), **more})
        return
    print_decision(fitted)
    classes = None if fitted.classes is None else ", ".join(map(str, fitted.classes))
    about = {"target": fitted.target_name, "offset": fitted.offset_name, "classes": classes}
    print_facts(
        {
            "model": f"{model}, written by Fedkin {fitted.fedkin_version}, {method_text(fitted)}",
            "loss": ", ".join([fitted.loss.name, *(f"{key} {value}" for key, value in about.items() if value)]),
            "sites": f"{fitted.n_sites}, fitted on {count(int(fitted.n_samples.sum()), 'row')}",
            "from": origin_text(fitted),
            **facts(fitted),
        }
    )
    console = output()
    if fitted.schema is not None:
        print_schema(fitted.schema, "Columns")
    print_groups(fitted)
    if fitted.kin is not None:
        print_population(fitted.kin)
    print_coefficients(fitted)
    if fitted.comparison:
        print_comparison(fitted.comparison)
    if lines := note_lines(fitted.notes):
        console.print("\nNotes", style="bold")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True)


def _print_parameters(
    model: FittedModel,
    site: str | None,
    group: int | None,
    contrast: tuple[str, str] | None,
    level: float,
    own_rows: bool,
    as_json: bool,
) -> None:
    """Print the parameters of a site or a group, or the difference of two; groups are numbered from 1."""
    kind: Any = "site" if own_rows else "average"
    one: Any = _sites(model, contrast[0] if contrast else f"group:{group}" if site is None else site)
    other: Any = _sites(model, contrast[1]) if contrast else None
    found = model.contrast(one, other, kind=kind)
    if not as_json:
        if contrast is not None:
            text = found.summary(level)
        elif site is not None:
            text = model.summary(level, site=one, kind=kind)
        else:
            text = model.summary(level, group=(group or 0) - 1, kind=kind)
        output().print(text, soft_wrap=True)
        return
    keys = ("name", "estimate", "standard_error", "p_value", "low", "high")
    ends = found.confint(level)
    rows = zip(found.names, found.estimate, found.standard_error, found.p_values, *ends.T, strict=True)
    print_json(
        {
            "about": found.label,
            "kind": found.kind,
            "level": level,
            "parameters": [dict(zip(keys, row, strict=True)) for row in rows],
            "wald": dict(zip(("statistic", "degrees", "p_value"), found.wald, strict=True)),
            "probability_of_being_kin": found.probability,
        }
    )


def _sites(model: FittedModel, name: str) -> Any:
    """Return a site by its name, or the members of ``group:N``."""
    if name.startswith("group:") and model.kin is not None:
        groups = int(model.kin.groups.max()) + 1 if model.kin.resolved else 0
        number = int(name[6:]) if name[6:].isdecimal() else 0
        if not 1 <= number <= groups:
            known = f"groups are 1 to {groups}" if groups else "no groups are resolved"
            raise ParameterError(f"there is no group {name[6:]}: {known}")
        return model.kin.members(number - 1)
    return model.sites[model.position(name)]


def report(
    model: Model,
    out: Annotated[Path, option("PAGE.html", "HTML file to write.")] = Path("report.html"),
    coordinates: Annotated[
        Path | None, option("FILE.csv", "Locations of the sites for a map: columns site and x, y (or lon, lat).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a model: one HTML page that works offline.

    It shows which sites are alike and with what probability, what each site gains, coefficients with intervals, and how
    to reproduce the fit.
    """
    check_new_file(out, "report.html", model, coordinates)
    size = write_report(load(model), out, coordinates)
    if as_json:
        print_json({"model": str(model), "report": str(out), "bytes": size})
    else:
        messages().print(f"{out}: {size / 1024:.0f} KB, opens in any browser", soft_wrap=True)


def write_report(model: FittedModel, out: Path, coordinates: Path | None = None) -> int:
    """Write the HTML page of a model, and return its size in bytes."""
    places = None if coordinates is None else read_coordinates(coordinates, model.sites)
    page = report_page(model, places).encode()
    write_file(out, page)
    return len(page)


# --- a model in the terminal and as JSON ------------------------------------------------------------------------------


def print_groups(model: FittedModel) -> None:
    """Print the largest groups with their members, if any, and for kin the probability that members are alike."""
    groups, kin = members(model), model.kin
    if not groups:
        return
    inside = None if kin is None else kin.cohesion()[0]
    rows = []
    for k, sites in enumerate(groups[:_MOST_ROWS]):
        chance = [] if inside is None else [probability(float(inside[k])) if len(sites) > 1 else "-"]
        rows.append([str(k + 1), str(len(sites)), *chance, some_of(sites, 10)])
    if rest := groups[_MOST_ROWS:]:
        more = f"in {count(len(rest), 'smaller group')}"
        rows.append(["...", str(sum(map(len, rest))), *([] if kin is None else [""]), more])
    title = "belong together" if kin is None else "are alike, and the probability that two members are"
    heads = ("group", "sites", *([] if kin is None else ["P(kin)"]), "members")
    print_rows(heads, rows, f"{count(len(groups), 'group')} of sites that {title}", numbers_from=9)


def print_population(kin: Kin) -> None:
    """Print the population effects with intervals and tests, and standard deviations between sites."""
    outer, rows = population_sd(kin, "districts"), []
    sds = ("sd",) if outer is None else ("sd of sites", "sd of districts")
    heads = ("parameter", "mean", "std err", "95% interval", "df", "p", *sds)
    error, between = np.sqrt(np.diag(kin.mean_covariance)), population_sd(kin)
    ends, (_, tails) = kin.population(0.95), population_tests(kin)
    for j, name in enumerate(kin.names[:_MOST_EFFECTS]):
        decimals = decimals_for([float(error[j])])
        mean, low, high, se, sd = (fixed(float(one), decimals) for one in (*ends[j], error[j], between[j]))
        df = ">1000" if kin.degrees[j] > 1000 else fixed(float(kin.degrees[j]), int(kin.degrees[j] < 100))
        tail = "<0.001" if tails[j] < 0.001 else fixed(float(tails[j]), 3)
        more = [] if outer is None else [fixed(float(outer[j]), decimals)]
        rows.append([name, mean, se, f"{low} to {high}", df, tail, sd, *more])
    if len(kin.names) > _MOST_EFFECTS:
        rows.append([f"and {len(kin.names) - _MOST_EFFECTS} more, with --json", *[""] * (len(heads) - 1)])
    print_rows(heads, rows, "Population effects: mean over sites, and standard deviation between sites")
    for name, value, remark in variance_facts(kin):
        output().print(f" {name:<15}{value}{', ' * bool(remark)}{remark}", soft_wrap=True)
    if kin.loss.ratio is None:
        return
    ratios = []
    for name, ends_of in zip(kin.names[:_MOST_EFFECTS], np.exp(ends), strict=False):
        decimals = decimals_for([float(np.ptp(ends_of)) / 4])
        mean, low, high = (fixed(one, decimals) for one in ends_of.tolist())
        ratios.append([name, mean, f"{low} to {high}"])
    title = f"{kin.loss.ratio.capitalize()}s of the population, per unit of a column"
    print_rows(("parameter", kin.loss.ratio, "95% interval"), ratios, title)


def print_coefficients(model: FittedModel) -> None:
    """Print the features with the largest coefficients: a column per group if there are few groups, else the range."""
    groups, resolved = group_labels(model)
    n_groups = int(groups.max()) + 1
    by_group = n_distinct(model) == 1 or (resolved and n_groups <= _MOST_COLUMNS)
    parts = [groups == k for k in range(n_groups)] if by_group else [np.full(model.n_sites, True)]
    heads = [f"group {k + 1}" for k in range(n_groups)] if by_group else ["average", "least", "most"]
    # sizes of the shown averages, of all sites or of groups
    size = np.abs([model.coef[part].mean(axis=0) for part in parts]).max(axis=(0, 1))
    chosen = np.argsort(-size, kind="stable")[:_MOST_ROWS]
    classes = [None] if model.coef.shape[1] == 1 or model.classes is None else list(model.classes[1:])
    rows: list[tuple[int | None, str, Array]] = [(None, "(intercept)", model.intercept)] if model.fit_intercept else []
    errors, first = None, int(model.fit_intercept)
    if model.kin is not None:
        errors = np.sqrt(np.einsum("vpp->p", model.kin.covariance) / model.n_sites).reshape(model.coef.shape[1], -1)
    units = {} if model.schema is None else {column.name: column.unit for column in model.schema.features}
    for q in chosen.tolist():
        name = model.feature_names[q]
        rows.append((q, f"{name} (per {units[name]})" if units.get(name) else name, model.coef[:, :, q]))
    shown = []
    for k, name, values in rows:
        for j, label in enumerate(classes):
            cells = [float(values[part, j].mean()) for part in parts]
            cells += [] if by_group else [float(values[:, j].min()), float(values[:, j].max())]
            # decimals from the standard error, or else three digits of the largest
            error = np.abs(cells).max() / 100 if errors is None else float(errors[j, 0 if k is None else first + k])
            decimals = decimals_for([error])
            shown.append([name if label is None else f"{name} [{label}]", *(fixed(cell, decimals) for cell in cells)])
    most = f", the {len(chosen)} largest of {size.size}" if size.size > _MOST_ROWS else ""
    over = "the average of each group's sites" if by_group else "the average, minimum and maximum over all sites"
    print_rows(("feature", *heads), shown, f"Coefficients of the sites{most}\n({over}; in the units of the features)")


def print_decision(model: FittedModel) -> None:
    """Print which model to use, by how much, and for how many sites, if models were compared."""
    if verdict := (model.comparison or {}).get("verdict"):
        output().print(str(verdict), style="bold", soft_wrap=True)


def print_comparison(found: Mapping[str, Any]) -> None:
    """Print the errors of all methods on held-out rows, which sites gain and lose, and further notes."""
    console = output()
    console.print(f"\n{comparison_title(found)}", style="bold", soft_wrap=True)
    head, *rows = comparison_table(found)
    means = [np.inf if one.get("mean") is None else float(one["mean"]) for one in found["methods"]]
    print_rows(head, rows, styles=["bold green" if mean == min(means) else "" for mean in means])
    for line in [*gains_text(found), *found.get("remarks", ())]:
        console.print(line, soft_wrap=True)


def n_distinct(model: FittedModel) -> int:
    """Return the number of distinct models; more than groups if the sites of a group are not fused."""
    stacked = np.concatenate([model.intercept[:, :, None], model.coef], axis=2).reshape(model.n_sites, -1)
    return len(np.unique(stacked, axis=0))


def model_document(model: FittedModel) -> dict[str, Any]:
    """Return the description of a model for ``--json``."""
    fused = model.fused
    about = {"method": "kin", "penalty": None, "lam": None, "gap": None, "n_iter": None, "selection": None}
    if fused is not None:
        about = {"method": "fused"} | {name: getattr(fused, name) for name in about if name != "method"}
    return {
        "fedkin_version": model.fedkin_version,
        **about,
        "loss": model.loss.name,
        "status": model.status,
        "target": model.target_name,
        "offset": model.offset_name,
        "features": model.feature_names,
        "classes": model.classes,
        "n_sites": model.n_sites,
        "n_rows": int(model.n_samples.sum()),
        "n_groups": model.n_groups,
        "n_distinct_models": n_distinct(model),
        "groups": sorted(model.members(), key=len, reverse=True),
        "edges": model.graph.n_edges,
        "origin": model.origin,
        "notes": [{"site": site, "notes": lines} for site, lines in model.notes.items()],
        "comparison": model.comparison,
        "kin": None if model.kin is None else _kin_document(model.kin, model.options.get("covariates")),
    }


def _kin_document(kin: Kin, covariates: Any) -> dict[str, Any]:
    found = kin.diagnostics
    inside = kin.cohesion()[0].tolist() if kin.resolved else []
    errors, tails = np.sqrt(np.diag(kin.mean_covariance)), population_tests(kin)[1]
    numbers = np.column_stack([kin.mean, errors, *kin.population(0.95).T[1:], kin.degrees, tails, population_sd(kin)])
    heads: tuple[str, ...] = ("name", "mean", "standard_error", "low", "high", "df", "p", "sd")
    if (outer := population_sd(kin, "districts")) is not None:
        numbers, heads = np.column_stack([numbers, outer]), (*heads, "sd_districts")
    names = {"chains": "starts", "sweeps": "draws", "rhat": "rhat", "effective_size": "size"}
    return {
        "resolved": kin.resolved,
        "groups": [{"sites": kin.members(k), "probability": chance} for k, chance in enumerate(inside)],
        "n_groups": kin.n_groups.tolist(),
        "weight_without_groups": kin.weight_mixed,
        "graph_use": kin.graph_use,
        "covariates": covariates,
        "graph_rates": kin.rates,
        "sure": kin.sure,
        "parameters": [
            dict(zip(heads, (name, *row), strict=True)) for name, row in zip(kin.names, numbers.tolist(), strict=True)
        ],
        "ratios": kin.loss.ratio
        and {"what": kin.loss.ratio, **dict(zip(kin.names, np.exp(kin.population(0.95)).tolist(), strict=True))},
        "sampler": found and {name: getattr(found, own) for name, own in names.items()},
    }
