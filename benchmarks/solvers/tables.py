"""Rows of results as tables of ratios, and as a figure."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log
from pathlib import Path
from statistics import fmean, median

import matplotlib
from matplotlib.figure import Figure

from .duel import Row

BEGIN, END = "<!-- begin: what make bench printed -->", "<!-- end -->"
OURS = "fedkin (numba)"


def render(rows: list[Row], here: Row) -> str:
    """All tables as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items() if version)
    parts = [
        f"{here['cpu']}, {here['cores']} cores, load {here['load']} at the start; Python {here['python']}, {versions}."
    ]
    if _quick(rows):
        parts += ["", "**A quick run: small instances and few repeats. It shows that everything works, not how fast.**"]
    for target in (1e-4, 1e-6):
        parts += _duel([row for row in rows if row["section"] == "duel" and row["target"] == target], target)
    parts += _paths([row for row in rows if row["section"] == "path"])
    parts += _starts([row for row in rows if row["section"] == "start"])
    large = [row for row in rows if row["section"] == "million"]
    parts += _large(large, "A million sites, made small" if _quick(large) else "A million sites")
    parts += _large([row for row in rows if row["section"] == "scaling" and row["against"] != "n"], "Growth")
    parts += _rows([row for row in rows if row["section"] == "scaling" and row["against"] == "n"])
    return "\n".join(parts) + "\n"


def _quick(rows: list[Row]) -> bool:
    return any(row.get("quick") for row in rows)


def _duel(rows: list[Row], target: float) -> list[str]:
    lines: list[str] = []
    # contenders that take part in the same kinds of instances share a table
    for title, scalar in (("", False), (", total variation", True)):
        own = [row for row in rows if ("p=1" in str(row["instance"]) or "TV" in str(row["instance"])) == scalar]
        lines += _one_duel(own, f"Suboptimality {target:.0e}{title}")
    return lines


def _one_duel(rows: list[Row], title: str) -> list[str]:
    timed = [row for row in rows if "seconds" in row]
    if not timed:
        return []
    contenders = [OURS, *dict.fromkeys(str(row["contender"]) for row in timed if row["contender"] != OURS)]
    lines = ["", f"### {title}: times slower than {OURS}", "", *_head(["instance", OURS, *contenders[1:]])]
    failed = []
    for instance in dict.fromkeys(str(row["instance"]) for row in rows):
        times = {
            name: _seconds(row for row in timed if row["instance"] == instance and row["contender"] == name)
            for name in contenders
        }
        ours = times[OURS]
        ratios = [f"{_ratio(times[name], ours):.3g}" if times[name] and ours else "-" for name in contenders[1:]]
        lines.append(_line([instance, _time(median(ours)) if ours else "-", *ratios]))
    for row in rows:
        if "skipped" in row and (row["contender"] in contenders or "installed" in str(row["skipped"])):
            failed.append((f"{row['contender']}: {row['skipped']}", str(row["instance"])))
    if failed:
        reasons = dict.fromkeys(why for why, _ in failed)
        told = [f"{why} ({', '.join(where for one, where in failed if one == why)})" for why in reasons]
        lines += ["", "Left out: " + "; ".join(told) + "."]
    return lines


def _seconds(rows: Iterable[Row]) -> list[float]:
    return [float(row["seconds"]) for row in rows if "seconds" in row]


def _ratio(theirs: list[float], ours: list[float]) -> float:
    """Median of the ratios of the same repeat; a slow peer is repeated once and compared with the median."""
    if len(theirs) == len(ours):
        return median(one / other for one, other in zip(theirs, ours, strict=True))
    return median(theirs) / median(ours)


def _paths(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    work = list(dict.fromkeys(str(row["work"]) for row in rows))
    lines = ["", "### A path of 20 levels at gap 1e-6, and 5-fold cross-validation over it", ""]
    lines += _head(["instance", *work, "path / cold", "cross-validation / path"])
    for instance in dict.fromkeys(str(row["instance"]) for row in rows):
        times = {
            name: min(_seconds(row for row in rows if row["instance"] == instance and row["work"] == name))
            for name in work
        }
        one, both = (name for name in work if name.startswith("path"))
        loose, tight = (name for name in work if name.startswith("cross"))
        cells = [instance, *[_time(times[name]) for name in work]]
        levels = times["20 levels cold"] / 20
        cells.append(
            f"{times[one] / times['cold']:.1f} on 1 core, {times[both] / times['cold']:.1f} on all "
            f"({times[both] / levels:.1f} of the mean level's)"
        )
        cells.append(
            f"gap 1e-4: {times[loose] / times[one]:.1f} of a path on 1 core, {times[loose] / times[both]:.1f} on all; "
            f"gap 1e-6: {times[tight] / times[one]:.1f}, {times[tight] / times[both]:.1f}"
        )
        lines.append(_line(cells))
    return lines


def _starts(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = ["", "### The first fit", ""]
    for row in rows:
        if "first" in row:
            lines.append(f"- first small fit of a fresh process {_time(row['first'])}, second {_time(row['second'])}")
        else:
            lines.append(f"- {row['work']} the kernels: {_time(row['seconds'])}")
    return lines


def _large(rows: list[Row], title: str) -> list[str]:
    if not rows:
        return []
    lines = ["", f"### {title}: certified gap 1e-6", ""]
    head = ["sites", "edges", "p", "loss, penalty", "time", "CPU time", "iterations", "memory (of it data)"]
    head += ["one iteration", "its bytes at memory bandwidth", "ratio"]
    lines += _head(head)
    for row in rows:
        kind = f"{row['loss']}, {row['penalty']}" + (", scrambled numbers" if row.get("scrambled") else "")
        if "failed" in row:
            lines.append(_line([f"{row['n']:,}", "", row["p"], kind, row["failed"], *[""] * 6]))
            continue
        least = row["iteration_bytes"] / row["bandwidth"]
        cells = [f"{row['n']:,}", f"{row['edges']:,}", row["p"], kind, _time(row["seconds"]), _time(row["cpu_seconds"])]
        cells += [row["n_iter"], f"{row['gigabytes']:.2f} GB ({row['data_gigabytes']:.2f})"]
        cells += [_time(row["iteration_seconds"]), _time(least), f"{row['iteration_seconds'] / least:.1f}"]
        lines.append(_line(cells))
    return lines


def _rows(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = ["", "### Rows per site: 1000 sites, p = 10", ""]
    lines += _head(["rows per site", "rows to Gram statistics", "statistics to solution", "memory"])
    for row in rows:
        cells = [str(row["value"]), _time(row["formed"]), _time(row["seconds"]), f"{row['gigabytes']:.2f} GB"]
        lines.append(_line(cells))
    return lines


def _head(cells: list[object]) -> list[str]:
    return [_line(cells), _line(["---"] * len(cells))]


def _line(cells: list[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _time(seconds: object) -> str:
    value = float(seconds)
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def insert(path: Path, text: str) -> None:
    """Put the text between the markers of a Markdown file."""
    whole = path.read_text()
    before, rest = whole.split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def draw_scaling(rows: list[Row], path: Path) -> None:
    """Draw time and memory against size."""
    if rows := [row for row in rows if row["section"] == "scaling" and "failed" not in row]:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "fedkin"}):  # the same rows give the same file
            scaling_figure(rows).savefig(path, metadata={"Date": None})


def scaling_figure(rows: list[Row]):
    """The matplotlib figure: a column of two panels for each quantity that was varied."""
    panels = list(dict.fromkeys(str(row["against"]) for row in rows))
    all_memory = [float(row["gigabytes"]) for row in rows]
    figure = Figure(figsize=(3.2 * len(panels), 6.0), layout="constrained")
    axes = figure.subplots(2, len(panels), squeeze=False)
    for k, against in enumerate(panels):
        own = sorted((row for row in rows if row["against"] == against), key=lambda row: float(row["value"]))
        x = [float(row["value"]) for row in own]
        total = [float(row["seconds"]) + float(row.get("formed", 0.0)) for row in own]
        (measured,) = axes[0, k].loglog(x, total, "o-")
        # slope 1 through the middle of the points
        rate = exp(fmean(map(log, total)) - fmean(map(log, x)))
        (linear,) = axes[0, k].loglog(x, [rate * one for one in x], "--", color="0.4")
        axes[1, k].loglog(x, [float(row["gigabytes"]) for row in own], "o-")
        for axis, values in ((axes[0, k], [*total, rate * x[0], rate * x[-1]]), (axes[1, k], all_memory)):
            low, high = (pick(values) * margin for pick, margin in ((min, 0.8), (max, 1.25)))
            ticks = _ticks(low, high)
            axis.set_ylim(low, high)
            axis.set_xticks(x, [_count(one) for one in x])
            axis.set_yticks(ticks, [f"{one:g}" for one in ticks])
            axis.minorticks_off()
            axis.grid(True, color="0.9")
        axes[1, k].set_xlabel(_SIZES.get(against, against))
    axes[0, 0].set_ylabel("seconds to gap 1e-6")
    axes[1, 0].set_ylabel("peak memory, GB")
    names = ["measured", "linear in the size: slope 1, through the middle of the points"]
    figure.legend([measured, linear], names, loc="outside upper center", ncols=2, frameon=False)
    fixed = f"about {min(all_memory):.1f} GB of it are Python and its libraries, whatever the size"
    figure.supxlabel(f"Memory has no linear line: {fixed}.", fontsize="medium")
    return figure


_SIZES = {"n": "rows per site", "|V|": "sites |V|", "|E|": "edges |E|", "p": "parameters per site p"}


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two numbers, and other digits where these are too few."""
    for digits in ((1, 2, 5), (1, 2, 3, 5, 7), range(1, 10)):
        ticks = [digit * 10.0**power for power in range(-5, 6) for digit in digits]
        found = [one for one in ticks if low <= one <= high]
        if len(found) >= 3:
            break
    return found


def _count(value: float) -> str:
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"
