"""One HTML page per study: figures, tables, claims, and how it was made. No script, nothing from elsewhere."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedkin.studies.checks import Check
from fedkin.studies.config import Study
from fedkin.studies.summary import Row
from fedkin.studies.tables import Table

# A table that is wider than the window has a shadow at the side where more of it is.
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
figure { margin: 1.2rem 0; } figure img { min-width: 55%; max-width: 100%; height: auto; }
figcaption, .small { color: #52606d; font-size: .9rem; } p, figcaption { max-width: 62rem; }
.wide { overflow-x: auto; background: linear-gradient(90deg, #fff 2rem, #fff0) 0 0 / 4rem 100% no-repeat local,
  linear-gradient(270deg, #fff 2rem, #fff0) 100% 0 / 4rem 100% no-repeat local,
  linear-gradient(90deg, #9aa5b1, #fff0) 0 0 / 1rem 100% no-repeat scroll,
  linear-gradient(270deg, #9aa5b1, #fff0) 100% 0 / 1rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .8rem; } .claims table { font-size: .9rem; }
th, td { padding: .2rem .45rem; text-align: right; border-bottom: 1px solid #d9dee3; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child, .claims td, .claims th { text-align: left; white-space: normal; }
.whole { white-space: nowrap; } .yes { color: #0f6b50; font-weight: 600; } .no { color: #a23b00; font-weight: 600; }
@media print {
  html { font-size: 12px; } body { font-size: 1rem; margin: 0; max-width: none; padding: 0; } h2 { break-after: avoid; }
  .wide { overflow: visible; background: none; } figure, tr { break-inside: avoid; }
  table, .claims table { font-size: 7.5pt; } th, td { padding: .1rem .3rem; white-space: normal; }
}
"""

_CLASSES = {True: "yes", False: "no", None: "small"}

#: Columns that say where a row was computed.
ENVIRONMENT = ("fedkin", "python", "numpy", "scipy", "scikit_learn", "numba", "platform", "cpu")


def write_page(
    study: Study,
    rows: Sequence[Row],
    checks: Sequence[Check],
    figures: Sequence[tuple[Path, str]],
    tables: Sequence[Table],
    notes: str,
    folder: Path,
) -> Path:
    """Write ``index.html``.

    Parameters
    ----------
    study : Study
        What was run.
    rows : sequence of mappings
        All its rows.
    checks : sequence of Check
        Shown first.
    figures : sequence of (SVG file, caption)
        Embedded.
    tables : sequence of Table
        Shown after the figures.
    notes : str
        A sentence about how it was made.
    folder : Path
        Where the page goes.
    """
    title = study.title or study.name
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(study.about.strip())}</p>" if study.about else ""]
    if study.quick:
        parts.append("<p class='no'>A quick look: fewer settings and replications than the full study.</p>")
    if checks:
        parts.append("<h2>Claims</h2>" + _claims(checks) + _how_decided(study, rows))
    for path, caption in figures:
        parts.append(_figure(path, caption))
    for table in tables:
        parts.append(f"<h2>Table: {escape(table.name)}</h2>" + _table(table))
    parts.append("<h2>How it was made</h2>" + _making(study, rows, notes))
    text = (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
    path = folder / "index.html"
    path.write_text(text, encoding="utf-8")
    return path


def _claims(checks: Sequence[Check]) -> str:
    lines = "".join(
        f"<tr><td>{escape(check.claim)}</td><td>{escape(check.observed)}</td>"
        f"<td class='{_CLASSES[check.holds]}'>{check.verdict}</td></tr>"
        for check in checks
    )
    head = "<thead><tr><th>claim</th><th>observed</th><th></th></tr></thead>"
    return f"<div class='wide claims'><table>{head}{lines}</table></div>"


def settings(study: Study, rows: Sequence[Row]) -> dict[tuple[Any, ...], set[Any]]:
    """The replications that the rows have at each grid point."""
    names = list(dict.fromkeys(name for point in study.points for name in point))
    found: dict[tuple[Any, ...], set[Any]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in names), set()).add(row.get("replication"))
    return found


def replications(study: Study, rows: Sequence[Row]) -> int:
    """Replications at the grid point that has most: a run has as many at all, rows put together may lack some."""
    return max(map(len, settings(study, rows).values()), default=0)


def _how_decided(study: Study, rows: Sequence[Row]) -> str:
    n, full = replications(study, rows), study.full_replications
    if n < full:
        how = (
            f"With {n} of the {full} replications of the full study, a claim about means holds or fails only where 95% "
            "confidence intervals (valid for all settings of the claim together) leave no doubt."
        )
    else:
        how = (
            f"The rows have all {full} replications of the study: each claim is judged by its own criterion, "
            "on the numbers as observed."
        )
    return f"<p class='small'>{how}</p>"


def _figure(path: Path, caption: str) -> str:
    image = base64.b64encode(path.read_bytes()).decode()
    return (
        f"<figure><img alt='{escape(caption.strip(), quote=True)}' src='data:image/svg+xml;base64,{image}'>"
        f"<figcaption>{escape(caption.strip())} Files: <a href='{path.stem}.svg'>SVG</a>, "
        f"<a href='{path.stem}.pdf'>PDF</a>, <a href='{path.stem}.png'>PNG</a>.</figcaption></figure>"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    lines = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in line) + "</tr>" for line in table.text)
    files = f"Files: <a href='{table.name}.md'>Markdown</a>, <a href='{table.name}.csv'>CSV</a>."
    body = f"<div class='wide'><table><thead><tr>{head}</tr></thead>{lines}</table></div>"
    return f"{body}<p class='small'>{escape(table.caption)} {files}</p>"


def _cell(text: str) -> str:
    """A cell's text; where it has to be broken, not within a number like 7.3e-04."""
    return re.sub(r"\S*\de-\d\S*", r"<span class='whole'>\g<0></span>", escape(text))


def _making(study: Study, rows: Sequence[Row], notes: str) -> str:
    places = list(dict.fromkeys(tuple(str(row.get(name) or "") for name in ENVIRONMENT) for row in rows))
    head = "".join(f"<th>{escape(name)}</th>" for name in ENVIRONMENT)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in place) + "</tr>" for place in places)
    warned = sum(bool(row.get("warnings")) for row in rows)
    points = settings(study, rows)
    least, most = (pick(map(len, points.values()), default=0) for pick in (min, max))
    counted = f"{most}" if least == most else f"{least} to {most}"
    troubles = f"{warned} of them carry a warning (column <code>warnings</code>)." if warned else "None has a warning."
    return (
        f"<p>{escape(notes)} {len(points)} settings, {counted} replications, seed {study.seed}; "
        f"{len(rows)} rows in <a href='rows.parquet'>rows.parquet</a>, each with its own seed. {troubles}</p>"
        f"<div class='wide'><table><thead><tr>{head}</tr></thead>{lines}</table></div>"
    )
