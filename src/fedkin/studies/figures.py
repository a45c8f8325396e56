"""Summarise rows, and draw the figures and tables of a study (see docs/studies.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedkin._base import write_file
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
    asked = {name: spec[name] for name in ("x", "y", "series", "rows", "columns") if name in spec}
    asked |= {f"points[{k}]": name for k, name in enumerate(spec.get("points", ()))}
    asked |= {f"reference[{k}]": line["column"] for k, line in enumerate(spec.get("reference", ())) if "column" in line}
    if ":" in spec.get("kind", "lines"):
        asked = {}  # the function knows what its entries mean
    chosen = chosen_rows(f"figure {spec['name']!r}", rows, asked, spec.get("where", {}), numbers=("x", "y"))
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


def line_panels(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path | None = None) -> Any:
    """Draw the mean of ``y`` against ``x``, a line per series, panels by the columns ``rows`` and ``columns``."""
    from matplotlib.figure import Figure

    down, across = spec.get("rows"), spec.get("columns")
    down_values = distinct(rows, down) if down else [None]
    across_values = distinct(rows, across) if across else [None]
    series = spec.get("series_values") or (distinct(rows, spec["series"]) if "series" in spec else [None])
    shape = (len(down_values), len(across_values))
    size = (max(2.9 * shape[1], 4.8) + 0.4, max(2.35 * shape[0] + 1.0, 4.3))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(*shape, sharex=spec.get("share_x", True), sharey=spec.get("share_y", True), squeeze=False)
    for i, vertical in enumerate(down_values):
        for j, horizontal in enumerate(across_values):
            axis = axes[i, j]
            fixed = {name: value for name, value in ((down, vertical), (across, horizontal)) if name is not None}
            panel = [row for row in rows if all(row[name] == value for name, value in fixed.items())]
            axis.set_xscale(spec.get("x_scale", "linear"))
            axis.set_yscale(spec.get("y_scale", "linear"))
            _draw_series(axis, spec, panel, series)
            axis.set_title(point_label(list(fixed), list(fixed.values())), loc="left")
            _finish_axis(axis, spec, panel)
    figure.supxlabel(spec.get("x_label", spec["x"]), fontsize=10)
    figure.supylabel(spec.get("y_label", spec["y"]), fontsize=10)
    add_legend(figure, axes, spec.get("reference", ()))
    return figure


def scaling(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path | None = None) -> Any:
    """Draw the mean of ``y`` against the mean of ``x`` at every grid point, with the line ``y = x``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.6), layout="constrained")
    axis = figure.subplots()
    axis.set_xscale("log")
    axis.set_yscale("log")
    x, y = (summarize(rows, spec["points"], spec[name]) for name in ("x", "y"))
    place = list(spec["points"]).index(spec["series"])
    for k, one in enumerate(distinct(rows, spec["series"])):
        keys = sorted((key for key in y if key[place] == one), key=lambda key: x[key].mean)
        style = {**STYLES[k % len(STYLES)], "label": _series_label(spec, one)}
        _points(axis, [x[key].mean for key in keys], [y[key] for key in keys], style)
    ends = np.array([min(one.mean for one in x.values()), max(one.mean for one in x.values())])
    axis.plot(ends, ends, **_REFERENCE, label="slope 1", zorder=1)
    axis.set_xlabel(spec.get("x_label", spec["x"]))
    axis.set_ylabel(spec.get("y_label", spec["y"]))
    add_legend(figure, [axis])
    return figure


def _series_label(spec: Mapping[str, Any], one: Any) -> str:
    return f"{spec.get('series_label', '')}{label_of(one)}"


def _finish_axis(axis: Any, spec: Mapping[str, Any], rows: Sequence[Row]) -> None:
    if not rows:
        axis.set_axis_off()
        return
    if spec.get("x_ticks") == "values":
        axis.set_xticks(distinct(rows, spec["x"]))
        axis.minorticks_off()
        axis.xaxis.set_major_formatter("{x:g}")
    if "y_limits" in spec:
        axis.set_ylim(*spec["y_limits"])
    for line in spec.get("reference", ()):
        # a level given as it is, or the mean of a column
        level = line["y"] if "y" in line else np.mean([row[line["column"]] for row in rows])
        axis.axhline(level, **_REFERENCE, zorder=1)
    if "diagonal" in spec:
        ends = [row[spec["x"]] for row in rows]
        line = np.linspace(min(ends), max(ends), 100)  # a curve where only one axis is logarithmic
        axis.plot(line, line, **_REFERENCE, zorder=1, label=spec["diagonal"])


def _draw_series(axis: Any, spec: Mapping[str, Any], rows: Sequence[Row], series: Sequence[Any]) -> None:
    name = spec.get("series")
    keys = [spec["x"]] if name is None else [spec["x"], name]
    table = summarize(rows, keys, spec["y"])
    for k, one in enumerate(series):
        points = {key[0]: summary for key, summary in table.items() if name is None or key[1] == one}
        if not points:
            continue
        x = sorted(points)
        style = {**STYLES[k % len(STYLES)], "label": None if one is None else _series_label(spec, one)}
        summaries = [points[value] for value in x]
        if spec.get("markers", True):
            _points(axis, _dodged(x, k, len(series), spec), summaries, style, spec.get("interval", "student"))
        else:
            mean, low, high = _intervals(axis, summaries, "student")
            # a few markers tell the curves apart without hiding them
            axis.plot(x, mean, linewidth=1.4, markersize=4.5, markevery=max(len(x) // 6, 1), **style)
            axis.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _dodged(x: Sequence[float], k: int, n: int, spec: Mapping[str, Any]) -> Any:
    """Shift series slightly so that overlapping ones remain visible."""
    values = np.asarray(x, dtype=np.float64)
    share = 0.012 * (k - (n - 1) / 2)
    if spec.get("x_scale") == "log":
        return values * np.exp(share * np.log(max(values.max() / values.min(), 2.0)))
    return values + share * (np.ptp(values) or 1.0)


def _points(
    axis: Any, x: Any, summaries: Sequence[Sample], style: Mapping[str, Any], interval: str = "student"
) -> None:
    mean, low, high = _intervals(axis, summaries, interval)
    marks = {"markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.5}
    bars = np.clip([mean - low, high - mean], 0.0, None)
    axis.errorbar(x, mean, yerr=bars, capsize=2.0, elinewidth=1.0, linewidth=1.4, **marks, **style)


def _intervals(axis: Any, summaries: Sequence[Sample], interval: str) -> tuple[Any, Any, Any]:
    """Return means with the ends of their 95% intervals; on a logarithmic axis those of log mean, above 0."""
    mean = np.array([summary.mean for summary in summaries])
    if interval == "wilson":
        ends = [summary.share_interval() for summary in summaries]
        return mean, np.array([one.low for one in ends]), np.array([one.high for one in ends])
    half = np.array([summary.half_width() if summary.n > 1 else 0.0 for summary in summaries])
    if axis.get_yscale() != "log":
        return mean, mean - half, mean + half
    factor = np.exp(half / mean)
    return mean, mean / factor, mean * factor


def add_legend(figure: Any, axes: Any, reference: Sequence[Mapping[str, Any]] = ()) -> None:
    """Add one legend for all panels above them."""
    from matplotlib.lines import Line2D

    found: dict[str, Any] = {}
    for axis in np.asarray(axes).flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    for line in reference:
        found[line["label"]] = Line2D([], [], **_REFERENCE)
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
        samples = [any(isinstance(line[k], Sample) for line in self.cells) for k in range(len(self.head))]
        parts = ("mean", "sd", "standard_error", "n")
        names = [
            f"{name} {part}".strip()
            for name, many in zip(self.head, samples, strict=True)
            for part in (parts if many else ("",))
        ]
        lines = []
        for line in self.cells:
            found: list[Any] = []
            for cell, many in zip(line, samples, strict=True):
                numbers = [cell.mean, cell.sd, cell.error, cell.n] if isinstance(cell, Sample) else [None] * len(parts)
                found += numbers if many else [cell]
            lines.append(found)
        return [re.sub(r"\W+", "_", name).strip("_") for name in names], lines


def make_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> ResultTable:
    """Make the table described by an entry of ``[[table]]``."""
    asked = {name: spec[name] for name in ("value", "columns")}
    asked |= {f"rows[{k}]": name for k, name in enumerate(spec["rows"])}
    asked |= {"at": spec["at"]["column"]} if "at" in spec else {}
    rows = chosen_rows(f"table {spec['name']!r}", rows, asked, spec.get("where", {}), numbers=("value",))
    names, across, value = list(spec["rows"]), spec["columns"], spec["value"]
    columns = distinct(rows, across)
    if "at" in spec:
        # of a long column (rounds), only the values at or next below some marks
        name, marks = spec["at"]["column"], spec["at"]["values"]
        known = distinct(rows, name)
        wanted = {max((value for value in known if value <= mark), default=known[0]) for mark in marks}
        rows = [row for row in rows if row[name] in wanted]
    found = summarize(rows, [*names, across], value)
    points = sorted({key[:-1] for key in found}, key=lambda key: [(isinstance(one, str), one) for one in key])
    cells = [[*point, *(found.get((*point, column)) for column in columns)] for point in points]
    long = [
        [*point, column, one.mean, one.sd, one.error, one.n]
        for point in points
        for column in columns
        if (one := found.get((*point, column))) is not None
    ]
    caption = spec.get("caption", f"Mean {value} over the replications, with its standard error in brackets.")
    head = [column_label(name) for name in names] + [label_of(column) for column in columns]
    exact = [*names, across, "mean", "sd", "standard_error", "replications"], long
    return ResultTable(spec["name"], head, cells, caption, exact=exact)


def sample_text(summary: Sample, error: float) -> str:
    """Format as ``0.124 (0.003)``: three digits of the mean, and the number in brackets to the same place."""
    size = abs(summary.mean)
    if 0 < size < 1e-3 or size >= 1e6:
        return f"{summary.mean:.2e} ({error:.0e})" if summary.n > 1 else f"{summary.mean:.2e}"
    digits = 3 if size >= 0.1 or size == 0 else 4 if size >= 0.01 else 5
    return f"{summary.mean:.{digits}f} ({error:.{digits}f})" if summary.n > 1 else f"{summary.mean:.{digits}f}"
