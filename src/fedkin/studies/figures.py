"""Summarise rows, and draw the figures and tables of a study (see docs/studies.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedkin._base import Array, write_file
from fedkin.data import write_csv
from fedkin.errors import ParameterError, missing_dependency
from fedkin.studies.replications import Row, Sample, distinct, summarize

COLUMN_LABELS: Mapping[str, str] = {
    "n_samples": "n",
    "n_features": "p",
    "n_sites": "|V|",
    "varrho": "ϱ",
    "n_clusters": "K₀",
    "false_edges": "|S|",
    "signal": "s",
    "ratio": "mean / sd",
}
VALUE_LABELS: Mapping[str, str] = {
    "local": "Local",
    "global": "Global",
    "oracle": "Oracle",
    "fedadmm": "Fed-ADMM (exact minimiser)",
    "fedadmm-printed": "Fed-ADMM (Algorithm 1 as printed)",
    "fedadmm-variant": "Fed-ADMM (our steps and average)",
    "fedadmm-scaled": "Minimiser with lam times |V|",
    "es": "Fed-ADMM-ES (exact)",
    "es-printed": "Fed-ADMM-ES (as printed)",
    "local-es": "Fed-ADMM-Local-ES (exact)",
    "pooled": "Pooled by true cluster",
    "attainable": "Pooled along the true edges of G",
    "local-lasso": "Local lasso",
    "fused": "Fused, no sparsity",
    "sparse-fused": "Fused and sparse, both by CV",
    "sparse-sites": "Fused and sparse, levels by site",
    "sparse-oracle": "Fused and sparse, true graph",
    "told-levels": "Fused and sparse, best levels",
    "rivals:clustering": "Greedy clustering, BIC",
    "clusterpath": "Clusterpath, lam by CV",
    "rivals:mixed": "Mixed model",
    "rivals:ifca": "IFCA, told K",
    "kin": "kin",
    "rivals:limit": "Information limit",
    "fedadmm-full": "Our steps, all samples",
    "fedadmm-batch": "Our steps, batches of 10",
    "printed-full": "Algorithm 1 as printed, all samples",
    "printed-batch": "Algorithm 1 as printed, batches of 10",
    "unprojected-batch": "As printed, without the projection",
    "gd": "GD, all samples",
    "sgd": "SGD, batches of 10",
    "known-central": "p known, central S",
    "estimated-central": "p estimated, central S",
    "known-replicas": "p known, S-less",
    "estimated-replicas": "p estimated, S-less",
    "bartlett": "the paper's (Bartlett)",
    "model": "noise estimated, F test",
    "bonferroni": "Bonferroni",
    "holm": "Holm",
    "bh": "Benjamini-Hochberg",
    "by": "Benjamini-Yekutieli",
}


def column_label(name: str) -> str:
    """Return the display name of a column."""
    return COLUMN_LABELS.get(name, name)


def label_of(value: Any) -> str:
    """Return the display text of a value."""
    return VALUE_LABELS.get(value, value) if isinstance(value, str) else f"{value:g}"


def point_label(names: Sequence[str], point: Sequence[object]) -> str:
    """Format a grid point: ``ϱ = 0.2, n = 100, |V| = 20``."""
    return ", ".join(f"{column_label(name)} = {label_of(value)}" for name, value in zip(names, point, strict=True))


def chosen_rows(
    what: str, rows: Sequence[Row], asked: Mapping[str, str], where: Mapping[str, Any], numbers: Sequence[str]
) -> list[Row]:
    """Return the rows with the values ``where``; ``what`` names the figure or table in messages.

    ``asked`` are the entries of the study's file that name columns, ``numbers`` those whose columns must hold numbers.
    """
    known = list(dict.fromkeys(name for row in rows for name in row))
    safe = "the results are kept: fix the study's file and run the same command again, which only redraws"
    for entry, column in [*asked.items(), *(("where", name) for name in where)]:
        if column not in known:
            have = ", ".join(known)
            raise ParameterError(f"{what}: no row has the column {column!r} ({entry}); there are {have}; {safe}")
    for entry in set(numbers) & set(asked):
        value = next((row[asked[entry]] for row in rows if row.get(asked[entry]) is not None), 0.0)
        if not isinstance(value, int | float):
            raise ParameterError(f"{what}: column {asked[entry]!r} ({entry}) holds {value!r}, not numbers; {safe}")
    chosen = [row for row in rows if all(row.get(name) == value for name, value in where.items())]
    if not chosen:
        raise ParameterError(f"{what}: no row has {dict(where)} (where); {safe}")
    return chosen


# --- figures ----------------------------------------------------------------------------------------------------------

#: A function ``(spec, rows, folder) -> matplotlib Figure``.
Drawer = Callable[[Mapping[str, Any], Sequence[Row], Path], Any]

# Colours differ in lightness as well, and every series has its own marker and dashes, so that a grey print can be read
# (Okabe and Ito's palette, from dark to light).
STYLES: Sequence[Mapping[str, Any]] = (
    {"color": "#000000", "marker": "s", "linestyle": (0, (1, 1))},
    {"color": "#CC79A7", "marker": "v", "linestyle": (0, (6, 2))},
    {"color": "#0072B2", "marker": "D", "linestyle": "-"},
    {"color": "#E69F00", "marker": "^", "linestyle": (0, (4, 1, 1, 1))},
    {"color": "#D55E00", "marker": "o", "linestyle": "-"},
    {"color": "#009E73", "marker": "X", "linestyle": (0, (3, 1.5))},
    {"color": "#56B4E9", "marker": "P", "linestyle": (0, (1, 2))},
    {"color": "#999999", "marker": "p", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
)
_REFERENCE: Mapping[str, Any] = {"color": "#555555", "linewidth": 1.0, "linestyle": (0, (2, 2))}

_STYLE: Any = {
    "savefig.dpi": 200,
    "svg.hashsalt": "fedkin",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
}


def draw(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path, drawer: Drawer) -> None:
    """Draw the figure of an entry of ``[[figure]]`` and write it to ``folder`` as SVG, PDF and PNG."""
    asked = {}
    if not spec["kind"]:  # else the function knows what its entries mean
        asked = {name: spec[name] for name in ("x", "y", "series", "rows", "columns") if spec.get(name)}
        asked |= {f"points[{k}]": name for k, name in enumerate(spec.get("points") or ())}
        asked |= {
            f"reference[{k}]": line["column"] for k, line in enumerate(spec.get("reference", ())) if line["column"]
        }
    chosen = chosen_rows(f"figure {spec['name']!r}", rows, asked, spec["where"], numbers=("x", "y"))
    try:
        import matplotlib
    except ImportError:
        raise missing_dependency("matplotlib", "drawing figures", "report") from None
    with matplotlib.rc_context(_STYLE):
        figure = drawer(spec, chosen, folder)
        # without dates, so that the same rows give the same files
        for suffix, metadata in (("svg", {"Date": None}), ("pdf", {"CreationDate": None}), ("png", None)):
            figure.savefig(folder / f"{spec['name']}.{suffix}", metadata=metadata)
    # paths to a hundredth of a point: half the size
    image = folder / f"{spec['name']}.svg"
    short = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), image.read_text("utf-8"))
    write_file(image, short)


def line_panels(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Draw the mean of ``y`` against ``x``, a line per series, panels by the columns ``rows`` and ``columns``."""
    from matplotlib.figure import Figure

    down, across = (distinct(rows, spec[name]) if spec[name] else [None] for name in ("rows", "columns"))
    series = spec["series_values"] or (distinct(rows, spec["series"]) if spec["series"] else [None])
    size = (max(2.9 * len(across), 4.8) + 0.4, max(2.35 * len(down) + 1.0, 4.3))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(down), len(across), sharex=True, sharey=True, squeeze=False)
    for axis, (vertical, horizontal) in zip(axes.flat, product(down, across), strict=True):
        fixed = {spec[name]: value for name, value in (("rows", vertical), ("columns", horizontal)) if spec[name]}
        panel = [row for row in rows if all(row[name] == value for name, value in fixed.items())]
        axis.set_xscale(spec["x_scale"])
        axis.set_yscale(spec["y_scale"])
        _draw_series(axis, spec, panel, series)
        axis.set_title(point_label(list(fixed), list(fixed.values())), loc="left")
        _finish_axis(axis, spec, panel)
    figure.supxlabel(spec["x_label"] or spec["x"], fontsize=10)
    figure.supylabel(spec["y_label"] or spec["y"], fontsize=10)
    add_legend(figure, axes, [line["label"] for line in spec["reference"]])
    return figure


def _finish_axis(axis: Any, spec: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Set ticks and limits, and draw lines of reference."""
    if not rows:
        axis.set_axis_off()
        return
    if spec["x_ticks"] == "values":
        axis.set_xticks(distinct(rows, spec["x"]))
        axis.minorticks_off()
        axis.xaxis.set_major_formatter("{x:g}")
    if spec["y_limits"]:
        axis.set_ylim(*spec["y_limits"])
    for line in spec["reference"]:
        level = np.mean([row[line["column"]] for row in rows]) if line["y"] is None else line["y"]
        axis.axhline(level, **_REFERENCE, zorder=1)
    if spec["diagonal"]:
        ends = [row[spec["x"]] for row in rows]
        line = np.linspace(min(ends), max(ends), 100)  # a curve where only one axis is logarithmic
        axis.plot(line, line, **_REFERENCE, zorder=1, label=spec["diagonal"])


def _draw_series(axis: Any, spec: Mapping[str, Any], rows: Sequence[Row], series: Sequence[Any]) -> None:
    """Draw the line of each value of the column ``series``."""
    keys = [*(spec["points"] or [spec["x"]]), spec["series"]]
    across, table = (summarize(rows, keys, spec[name]) for name in ("x", "y"))
    for k, one in enumerate(series):
        points = sorted((key for key in table if key[-1] == one), key=lambda key: across[key].mean)
        if not points:
            continue
        x = [across[key].mean for key in points]
        style = {**STYLES[k % len(STYLES)], "label": None if one is None else spec["series_label"] + label_of(one)}
        intervals = _intervals(axis, [table[key] for key in points], spec["interval"])
        if spec["markers"]:
            _points(axis, _dodged(x, k - (len(series) - 1) / 2, spec["x_scale"] == "log"), intervals, style)
        else:
            mean, low, high = intervals
            # a few markers tell the curves apart without hiding them
            axis.plot(x, mean, linewidth=1.4, markersize=4.5, markevery=max(len(x) // 6, 1), **style)
            axis.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _dodged(x: Sequence[float], steps: float, log: bool) -> Any:
    """Shift a series slightly so that overlapping ones remain visible."""
    values = np.asarray(x, dtype=np.float64)
    if log:
        return values * np.exp(0.012 * steps * np.log(max(values.max() / values.min(), 2.0)))
    return values + 0.012 * steps * (np.ptp(values) or 1.0)


def _points(axis: Any, x: Any, intervals: Array, style: Mapping[str, Any]) -> None:
    mean, low, high = intervals
    marks = {"markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.5}
    bars = np.clip([mean - low, high - mean], 0.0, None)
    axis.errorbar(x, mean, yerr=bars, capsize=2.0, elinewidth=1.0, linewidth=1.4, **marks, **style)


def _intervals(axis: Any, samples: Sequence[Sample], kind: str = "student") -> Array:
    """Return means with the ends of their 95% intervals, ``(3, n)``; on a logarithmic axis those of log mean."""
    mean = np.array([one.mean for one in samples])
    if kind == "wilson":
        ends = [one.share_interval() for one in samples]
        return np.array([mean, [one.low for one in ends], [one.high for one in ends]])
    half = np.array([one.interval().high - one.mean if one.n > 1 else 0.0 for one in samples])
    if axis.get_yscale() != "log":
        return np.array([mean, mean - half, mean + half])
    return np.array([mean, mean * np.exp(-half / mean), mean * np.exp(half / mean)])


def add_legend(figure: Any, axes: Any, references: Sequence[str] = ()) -> None:
    """Add one legend for all panels above them."""
    from matplotlib.lines import Line2D

    found: dict[str, Any] = {}
    for axis in np.asarray(axes).flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    found |= {label: Line2D([], [], **_REFERENCE) for label in references}
    if found:
        room = figure.get_figwidth() / (0.075 * max(map(len, found)) + 0.75)  # inches of text and of its sign
        columns = max(1, min(len(found), int(room)))
        rows = -(-len(found) // columns)
        columns = -(-len(found) // rows)  # evenly filled
        figure.legend(list(found.values()), list(found), loc="outside upper center", ncols=columns, handlelength=3.2)


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResultTable:
    """Table whose cells are text, numbers, `Sample`s or None.

    Markdown shows means with standard errors (``brackets="sd"``: standard deviations) in brackets. CSV files have a
    line per row with the mean, sd, standard error and size of every sample, or the lines ``exact``.
    """

    name: str
    head: list[str]
    cells: list[list[Any]]
    caption: str = ""
    brackets: Literal["error", "sd"] = "error"
    exact: tuple[list[str], list[list[Any]]] | None = None

    @property
    def text(self) -> list[list[str]]:
        """Formatted cells."""
        return [[self._format(cell) for cell in line] for line in self.cells]

    def _format(self, cell: Any) -> str:
        if isinstance(cell, Sample):
            return sample_text(cell, cell.sd if self.brackets == "sd" else cell.error)
        return "" if cell is None else label_of(cell)

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [self.head, ["---"] * len(self.head), *self.text]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"{body}\n\n{self.caption}\n" if self.caption else f"{body}\n"

    def write(self, folder: Path) -> None:
        """Write ``name.md`` and ``name.csv``."""
        write_file(folder / f"{self.name}.md", self.markdown())
        write_csv(folder / f"{self.name}.csv", *(self.exact or self._wide()))

    def _wide(self) -> tuple[list[str], list[list[Any]]]:
        """Return the table with four columns for each column that has samples."""
        parts = {"mean": "mean", "sd": "sd", "standard_error": "error", "n": "n"}
        head: list[str] = []
        columns: list[list[Any]] = []
        for k, name in enumerate(self.head):
            cells = [line[k] for line in self.cells]
            if any(isinstance(cell, Sample) for cell in cells):
                head += [f"{name} {part}" for part in parts]
                columns += [[getattr(cell, part, None) for cell in cells] for part in parts.values()]
            else:
                head.append(name)
                columns.append(cells)
        lines = [list(line) for line in zip(*columns, strict=True)]
        return [re.sub(r"\W+", "_", name).strip("_") for name in head], lines


def make_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> ResultTable:
    """Make the table described by an entry of ``[[table]]``."""
    names, across, value, at = spec["rows"], spec["columns"], spec["value"], spec["at"]
    asked = {"value": value, "columns": across, **{f"rows[{k}]": name for k, name in enumerate(names)}}
    asked |= {"at": at["column"]} if at else {}
    rows = chosen_rows(f"table {spec['name']!r}", rows, asked, spec["where"], numbers=("value",))
    columns = distinct(rows, across)
    if at:
        # of a long column (rounds), only the values at or next below some marks
        known = distinct(rows, at["column"])
        wanted = {max((value for value in known if value <= mark), default=known[0]) for mark in at["values"]}
        rows = [row for row in rows if row[at["column"]] in wanted]
    found = summarize(rows, [*names, across], value)
    points = sorted({key[:-1] for key in found}, key=lambda key: [(isinstance(one, str), one) for one in key])
    cells = [[*point, *(found.get((*point, column)) for column in columns)] for point in points]
    long = [
        [*point, column, one.mean, one.sd, one.error, one.n]
        for point in points
        for column in columns
        if (one := found.get((*point, column))) is not None
    ]
    caption = spec["caption"] or f"Mean {value} over the replications, with its standard error in brackets."
    head = [*map(column_label, names), *map(label_of, columns)]
    exact = [*names, across, "mean", "sd", "standard_error", "replications"], long
    return ResultTable(spec["name"], head, cells, caption, exact=exact)


def sample_text(summary: Sample, error: float) -> str:
    """Format as ``0.124 (0.003)``: three digits of the mean, and the number in brackets to the same place."""
    size = abs(summary.mean)
    if 0 < size < 1e-3 or size >= 1e6:
        return f"{summary.mean:.2e} ({error:.0e})" if summary.n > 1 else f"{summary.mean:.2e}"
    digits = 3 if size >= 0.1 or size == 0 else 4 if size >= 0.01 else 5
    return f"{summary.mean:.{digits}f} ({error:.{digits}f})" if summary.n > 1 else f"{summary.mean:.{digits}f}"
