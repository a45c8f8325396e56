"""Draft a contract from an example table: infer kinds, levels, ranges and the loss; comments ask for units.

The draft reveals nothing about single rows of the example: ranges are widened and rounded, and levels with only a few
rows are left out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedkin._base import AnyArray, Array, listed
from fedkin.data import Column, Label, infer_kind, level_text, parsed_numbers
from fedkin.errors import DataError
from fedkin.federate.settings import Thresholds
from fedkin.federate.toml import toml_key, toml_text
from fedkin.losses import LOSSES, loss_for

_HEAD = """\
# A contract, drafted from an example table. Read every line: this is what all sites agree on.
# All keys are explained in docs/contract.md.
name = {name}
loss = "{loss}"  # {target} holds {why}
intercept = true
method = "kin"  # finds from one summary per site which sites are alike, with probabilities; rounds (site run)
#     need "fused": a penalty on differences between neighbours, with a certified gap
# penalty = "l1"  # for fused: l1 fuses single coefficients, l2 and linf whole sites

# --- the columns of a site's rows
# unit: for people; empty for none.
# low, high: least and largest plausible value; values outside are refused. They are rounded from the example:
#     correct them.
# mean, scale: subtracted, and divided by, before fitting. Approximate means and standard deviations work best;
#     without them, the middle and half the width of the range are used.
# levels: the first is the reference; add those that other sites have.
"""
_TAIL = f"""
# --- below these numbers nothing is computed from a site's rows; a site may choose larger ones
[thresholds]
rows = {Thresholds().rows}
rows_per_parameter = {Thresholds().rows_per_parameter:g}
cell = {Thresholds().cell}  # rows with any level that occurs at all

# --- for rounds between sites (fedkin site run), with the fused method; fedkin site share does not need them
[rounds]
rounds = 1000
# lam = 0.01  # or "cv": the sites choose it; to choose it from summaries: fedkin fit DIR_OF_SUMMARIES
"""
_MOST_LEVELS = 20
_ENOUGH = 30  # values from which a mean is taken
_MARGIN = 0.1  # of the range, by which it is wider on either side
_SITE_NAMES = ("site", "hospital", "centre", "center", "clinic", "device", "institution", "practice", "ward_site")
_TARGET_NAMES = ("target", "outcome", "label", "response", "y", "event", "death", "died", "status", "score")
_COUNT_NAME = re.compile(r"(^n_|^num|count|visits|events|admissions|number)", re.IGNORECASE)
_ID_NAME = re.compile(r"(^|_)(id|uuid|name|mrn|ssn|number)$", re.IGNORECASE)
_NEGATIVE = ("no", "none", "false", "0", "alive", "control", "negative", "absent", "healthy", "never", "normal")


@dataclass(frozen=True)
class Draft:
    """A drafted contract: its text, its columns, and what was left out and why."""

    text: str
    target: str
    site_column: str | None
    left_out: dict[str, str] = field(default_factory=dict)


def draft_contract(
    columns: Mapping[str, AnyArray], name: str, target: str | None = None, site_column: str | None = None
) -> Draft:
    """Draft a contract in TOML, with comments, for a person who knows the data to read and correct.

    By default the target is a column with a typical target name, or else the last one, and the site column is one with
    a typical name; it is not a feature.

    Examples
    --------
    >>> from fedkin.data import columns_of
    >>> from fedkin.federate import Contract, draft_contract
    >>> table = {"age": range(30, 80), "ward": ["A", "B"] * 25, "died": ["no"] * 40 + ["yes"] * 10}
    >>> contract = Contract.from_toml(draft_contract(columns_of(table), "heart").text)
    >>> contract.loss["name"], contract.schema.names, contract.schema.classes
    ('logistic', ('age', 'ward=B'), ('no', 'yes'))
    """
    for role, given in (("target", target), ("site column", site_column)):
        if given is not None and given not in columns:
            raise DataError(f"there is no column {given!r} for the {role}; the table has {listed(columns, 20)}")
    if site_column is None:
        site_column = next((one for one in columns if one.lower() in _SITE_NAMES and one != target), None)
    found = {one: _infer(one, cells, one == target) for one, cells in columns.items() if one != site_column}
    features = {one: column for one, column in found.items() if isinstance(column, Column)}
    if target is None and features:
        target = next((one for one in features if one.lower() in _TARGET_NAMES), list(features)[-1])
        found[target] = _infer(target, columns[target], True)
    left_out = {one: reason for one, reason in found.items() if isinstance(reason, str)}
    predicted = None if target is None else found[target]
    if target is None or not isinstance(predicted, Column) or not features.keys() - {target}:
        reasons = "; ".join(f"{one}: {reason}" for one, reason in left_out.items())
        raise DataError(f"a contract needs a target and at least one feature; {reasons}")
    loss, why = loss_for("number"), "numbers"
    if predicted.kind == "category":
        loss, why = loss_for("class", len(predicted.levels)), "classes"
    elif predicted.kind == "count":
        loss, why = loss_for("count"), "counts"
    else:
        why += f" ({', '.join(f'{kind.name} for {kind.purpose}' for kind in LOSSES.values() if kind.purpose)})"
    lines = [_HEAD.format(name=toml_text(name), loss=loss.name, target=target, why=why)]
    for one, column in features.items():
        if one != target:
            lines += [f"[features.{toml_key(one)}]", *_entries(column), ""]
    lines += [f"# {one}: left out, {reason}" for one, reason in left_out.items()]
    lines += ["", "[target]", f"name = {toml_text(target)}", *_entries(predicted), _TAIL]
    return Draft("\n".join(lines), target, site_column, left_out)


def _infer(name: str, cells: AnyArray, is_target: bool) -> Column | str:
    """Return the inferred kind of a column, or why it is left out."""
    if not name:
        return "it has no name"
    found, values = infer_kind(cells), parsed_numbers(cells).values
    values = values[np.isfinite(values)]
    if found.kind == "empty":
        return "it is empty"
    if found.kind == "date":
        return "it holds dates: give a number instead, such as an age in years"
    if found.kind == "category":
        if len(found.levels) > max(0.9 * len(cells), 2):
            return "it has a different text in every row"
        if len(found.levels) > _MOST_LEVELS:
            return f"it has too many levels ({len(found.levels)}): join some of them"
        return _category(name, dict(zip(found.levels, found.counts, strict=True)))
    distinct, whole = np.unique(values), bool((values == np.floor(values)).all())
    if whole and not is_target and _ID_NAME.search(name) and distinct.size > 0.9 * values.size:
        return "it looks like an identifier"
    if distinct.size == 1:
        return "it is the same in every row of the example"
    if whole and distinct.size == 2:
        return _category(name, Counter((cells if cells.dtype.kind == "b" else values.astype(np.int64)).tolist()))
    low, high = outward(values)
    counts = is_target and whole and bool((values >= 0).all()) and _COUNT_NAME.search(name) is not None
    mean, scale = (None, None) if is_target or values.size < _ENOUGH else roughly(values)
    return Column(name, "count" if counts else "number", low=low, high=high, mean=mean, scale=scale)


def _category(name: str, counts: Mapping[Label, int]) -> Column | str:
    least = Thresholds().cell
    common = sorted((label for label, n in counts.items() if n >= least), key=level_text)
    if len(common) < 2:
        return f"fewer than two of its levels occur in {least} rows or more"
    common.sort(key=lambda label: level_text(label).lower() not in _NEGATIVE)
    return Column(name, "category", levels=tuple(common))


def outward(values: Array) -> tuple[float, float]:
    """Return a range of round numbers that is wider than the values and does not reveal the extremes.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.federate.draft import outward
    >>> outward(np.array([43.7, 71.2, 107.3])), outward(np.array([0.0, 3.0, 12.0]))
    ((30.0, 120.0), (0.0, 14.0))
    """
    least, largest = float(values.min()), float(values.max())
    width = largest - least
    step = _round_down(width / 4)
    low = math.floor((least - _MARGIN * width) / step) * step
    high = math.ceil((largest + _MARGIN * width) / step) * step
    # what cannot be negative, or positive, should not become so
    return _tidy(max(low, 0.0) if least >= 0 else low, step), _tidy(min(high, 0.0) if largest <= 0 else high, step)


def roughly(values: Array) -> tuple[float, float]:
    """Return mean and standard deviation, rounded enough to hide single values; the latter has one digit.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.federate.draft import roughly
    >>> roughly(np.array([43.7, 71.2, 107.3, 66.6]))
    (80.0, 20.0)
    """
    sd = float(values.std())
    step = _round_down(sd)
    return _tidy(round(float(values.mean()) / step) * step, step), float(f"{sd:.0e}")


def _round_down(number: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at most the number."""
    power = 10.0 ** math.floor(math.log10(number))
    return max(part * power for part in (1, 2, 5) if part * power <= number or part == 1)


def _tidy(number: float, step: float) -> float:
    """Return a multiple of a step without the digits that rounding errors add."""
    return round(number, max(0, -math.floor(math.log10(step))))


def _entries(column: Column) -> list[str]:
    """Return the lines of TOML for a column."""
    if column.levels:
        shown = (toml_text(label) if isinstance(label, str) else level_text(label) for label in column.levels)
        return [f"levels = [{', '.join(shown)}]"]
    numbers = {key: getattr(column, key) for key in ("low", "high", "mean", "scale")}
    lines = ['kind = "count"'] if column.kind == "count" else []
    lines.append('unit = ""  # which unit? for example "kg", "mmol/L"')
    return [*lines, *(f"{key} = {value:.12g}" for key, value in numbers.items() if value is not None)]
