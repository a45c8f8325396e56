"""Rows of `tables.py` as Markdown: for each table and method the error, its difference from the best baseline, time."""

from __future__ import annotations

from typing import Any

import numpy as np

from table_methods import METHODS

Row = dict[str, Any]
BASELINES = [method.name for method in METHODS if method.baseline]
REFERENCE = METHODS[0].name
FEDKIN = ("kin", "kin with boosting", "kin as recommended", "fused", "fused after kin")
#: Times the error of the best baseline in one split that count as a breakdown, however large the standard error.
BROKEN = 1.5
#: Differences that four digits do not show are none.
SEEN = 5e-5
#: Methods of the table that has all tables at a glance, and what they are called there.
GLANCE = {
    "ridge at each site": "each site alone",
    "one ridge": "one model",
    "site intercepts": "site intercepts",
    "mixed model, gpboost": "mixed model",
    "gradient boosting": "boosting",
    "boosting with random effects, gpboost": "boosting with random effects",
    "kin": "**kin**",
    "kin as recommended": "**kin, with boosting if recommended**",
}
#: The method whose difference from the best baseline stands there.
GLANCED = "kin as recommended"
ERRORS = {"explained": "RMSE", "auc": "log-loss"}
MORE = {"explained": "explained variance", "auc": "AUC per site", "accuracy": "accuracy"}


def latest(rows: list[Row]) -> dict[tuple[str, str, int], Row]:
    """The last row of every table, method and split."""
    return {(row["table"], row["method"], row["split"]): row for row in rows}


def render(rows: list[Row]) -> str:
    """All tables at a glance, who loses, and folded away a section for every table."""
    kept = latest(rows)
    names = list(dict.fromkeys(table for table, _, _ in kept))
    glance = ["| table | " + " | ".join(GLANCE.values()) + " | difference from the best baseline |"]
    glance.append("|---" * (len(GLANCE) + 2) + "|")
    sections: list[str] = []
    losses: list[str] = []
    for name in names:
        own = [row for (table, _, _), row in kept.items() if table == name]
        text, line, lost = _section(name, own)
        sections.append(text)
        glance.append(line)
        losses += lost
    summary = "\n".join(f"- {line}" for line in losses) or "- nowhere, in these splits"
    worse = (
        f"**Where Fedkin is worse than the best baseline by more than a standard error, or broke down:**\n\n{summary}"
    )
    folded = '<details markdown="1">\n<summary>All methods, table by table</summary>\n'
    parts = ["\n".join(glance), *([_surroundings(rows[-1])] if rows else []), worse, folded, *sections, "</details>"]
    return "\n\n".join(parts) + "\n"


def _surroundings(row: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if name in _SHOWN and version)
    return f"{row['date']}; {row['cpu']}, {row['cores']} cores, load {row['load']} at the start; {versions}."


_SHOWN = ("fedkin", "numpy", "scipy", "numba")


def _section(name: str, rows: list[Row]) -> tuple[str, str, list[str]]:
    """The section of a table, its line at a glance, and what Fedkin lost."""
    first = next((row for row in rows if "error" in row), rows[0])
    more = [key for key in MORE if key in first]
    error = ERRORS.get(more[0], "error") if more else "deviance"
    done = {
        row["method"]: {r["split"]: r for r in rows if r["method"] == row["method"] and "error" in r} for row in rows
    }
    means = {method: float(np.mean([row["error"] for row in each.values()])) for method, each in done.items() if each}
    baselines = [method for method in means if method in BASELINES]
    if not baselines:
        return f"### {name}\n\nNo baseline has been measured.", f"| {name} |" + " - |" * (len(GLANCE) + 1), []
    best = min(baselines, key=lambda method: means[method])
    made = "generated, like " if first["generated"] else ""
    columns = f"{first['features']} {_plural(first['features'])}"
    head = f"### {made}{name}: {first['sites']} sites, {first['rows']} rows, {columns}"
    titles = ["method", error, f"difference to {best}", "time", "groups", *(MORE[key] for key in more)]
    lines = [" | ".join(["", *titles, ""]).strip(), "|---" * len(titles) + "|"]
    losses, skipped = [], []
    for method in (one.name for one in METHODS if one.name in done):
        each = done[method]
        why = [row["failed"] for row in rows if row["method"] == method and "failed" in row]
        if why:
            skipped.append(f"{method}: {why[0]}" + (f" in split {len(each) + 1}, then left" if each else ""))
        if method not in means:
            continue
        cells, lost = _cells(each, done[best], done.get(REFERENCE, {}), more)
        mark = "**" if means[method] == min(means.values()) else ""
        fewer = "" if len(each) == len(done[best]) else f" ({len(each)} splits)"
        lines.append("| " + " | ".join([f"{mark}{method}{mark}{fewer}", *cells]) + " |")
        if method in FEDKIN and lost:
            losses.append(f"{name}: {method} against {best}, {cells[1]}")
        if method in FEDKIN:
            losses += _broken(name, method, each, done[best])
    note = f"\n\nNot run: {'; '.join(skipped)}." if skipped else ""
    splits = len(done[best])
    least = min((means[method] for method in GLANCE if method in means), default=0.0)
    shown = [_glance(means.get(method), least) for method in GLANCE]
    own = GLANCED if GLANCED in means else "kin"
    beside = _cells(done[own], done[best], {}, [])[0][1] if own in means else "-"
    line = f"| {made}{name} ({error}, {splits} splits) | {' | '.join(shown)} | {beside} |"
    return f"{head}\n\n{splits} splits.\n\n" + "\n".join(lines) + note, line, losses


def _glance(mean: float | None, least: float) -> str:
    if mean is None:
        return "-"
    return f"**{mean:.4g}**" if mean == least else f"{mean:.4g}"


def _broken(name: str, method: str, own: dict[int, Row], best: dict[int, Row]) -> list[str]:
    bad = [k for k in own if k in best and own[k]["error"] > BROKEN * best[k]["error"]]
    if not bad:
        return []
    worst = max(bad, key=lambda k: own[k]["error"] / best[k]["error"])
    return [
        f"{name}: {method} **broke down** in {len(bad)} of {len(own)} splits "
        f"({own[worst]['error']:.3g} where the best baseline has {best[worst]['error']:.3g})"
    ]


def _cells(
    own: dict[int, Row], best: dict[int, Row], reference: dict[int, Row], more: list[str]
) -> tuple[list[str], bool]:
    errors = np.array([row["error"] for row in own.values()])
    both = sorted(set(own) & set(best))
    apart = np.array([own[k]["error"] - best[k]["error"] for k in both])
    spread = _standard_error(apart)
    ratios = [own[k]["seconds"] / reference[k]["seconds"] for k in own if k in reference and "seconds" in reference[k]]
    groups = [row["groups"] for row in own.values() if row.get("groups") is not None]
    lost = bool(apart.mean() > max(spread, SEEN))
    said = "-" if not apart.any() else f"{apart.mean():+.4f} ({spread:.4f})" + (" worse" if lost else "")
    cells = [
        f"{errors.mean():.4f} ({_standard_error(errors):.4f})",
        said,
        f"{np.median(ratios):.2g}x" if ratios else "-",
        "-" if not groups else _span(groups),
    ]
    return cells + [f"{np.mean([row[key] for row in own.values()]):.4f}" for key in more], lost


def _span(groups: list[int]) -> str:
    low, high = min(groups), max(groups)
    return str(low) if low == high else f"{low}-{high}"


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def _plural(n: int) -> str:
    return "feature" if n == 1 else "features"
