"""A contract drafted from an example table: kinds, levels, ranges and the loss guessed, units asked for in comments.

The draft tells nothing about single rows of the example: ranges are wider than the values and rounded, levels that only
a few rows have are left out.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedkin._base import AnyArray, Array, listed
from fedkin.data import Label, level_text, looks_like_date, parsed_numbers
from fedkin.errors import DataError
from fedkin.federate.disclosure import Thresholds
from fedkin.losses import LOSSES, loss_for

_ABOUT = (
    "",
    "# --- what the rows of a site must have",
    "# low, high: least and largest plausible value; values outside are refused. They are rounded from the example:",
    "#     correct them.",
    "# mean, scale: what is subtracted and by what is divided before fitting. Roughly mean and standard deviation is",
    "#     best; without them middle and half width of the range are taken.",
    "# levels: the first is the reference; add those that other sites have.",
)
_MOST_LEVELS = 20
_FEW_VALUES = 6  # whole numbers with so few values may be codes
_ENOUGH = 30  # values from which a mean is taken
_MARGIN = 0.1  # of the spread, by which a range is wider on either side
_SITE_NAMES = ("site", "hospital", "centre", "center", "clinic", "device", "institution", "practice", "ward_site")
_TARGET_NAMES = ("target", "outcome", "label", "response", "y", "event", "death", "died", "status", "score")
_COUNT_NAME = re.compile(r"(^n_|^num|count|visits|events|admissions|number)", re.IGNORECASE)
_ID_NAME = re.compile(r"(^|_)(id|uuid|name|mrn|ssn|number)$", re.IGNORECASE)
_NEGATIVE = ("no", "none", "false", "0", "alive", "control", "negative", "absent", "healthy", "never", "normal")


@dataclass(frozen=True)
class Draft:
    """The text of a contract, what it was taken from, and what was left out and why."""

    text: str
    target: str | None
    site_column: str | None
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Guess:
    """What a column seems to be: lines of TOML, or why it is left out."""

    lines: tuple[str, ...] = ()
    levels: tuple[Label, ...] = ()
    counts: bool = False
    reason: str = ""


def draft_contract(
    columns: Mapping[str, AnyArray], name: str, target: str | None = None, site_column: str | None = None
) -> Draft:
    """A contract in TOML with comments, to be read and corrected by who knows the data.

    Parameters
    ----------
    columns : mapping of name to array of shape (n,)
        An example table, as `fedkin.data.read_columns` gives it.
    name : str
        Of the federation.
    target : str, optional
        Column to predict; by default the last one, or one that is called like a target.
    site_column : str, optional
        Column of the sites, which is no feature; by default one that is called so.

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
    rest = [one for one in columns if one != site_column]
    guesses = {one: _guess(one, columns[one], one == target) for one in rest}
    usable = [one for one in rest if not guesses[one].reason]
    if target is None:
        named = [one for one in usable if one.lower() in _TARGET_NAMES]
        target = next(iter(named or usable[-1:]), None)
        if target is not None:
            guesses[target] = _guess(target, columns[target], True)
    features = [one for one in usable if one != target]
    if target is None or guesses[target].reason or not features:
        raise DataError(
            "a contract needs a target and at least one feature; "
            + "; ".join(f"{one}: {guess.reason}" for one, guess in guesses.items() if guess.reason)
        )
    left_out = {one: guesses[one].reason for one in rest if guesses[one].reason}
    lines = [*_head(name, target, guesses[target]), *_ABOUT]
    for one in features:
        lines += ["", f"[features.{_key(one)}]", *guesses[one].lines]
    for one, reason in left_out.items():
        lines += ["", f"# {one}: left out, {reason}"]
    lines += ["", "[target]", f"name = {_text(target)}", *guesses[target].lines, *_tail()]
    return Draft("\n".join(lines) + "\n", target, site_column, left_out)


def _head(name: str, target: str, guess: _Guess) -> list[str]:
    if guess.levels:
        loss, why = loss_for("class", len(guess.levels)).name, "classes"
    elif guess.counts:
        loss, why = loss_for("count").name, "counts"
    else:
        loss, why = loss_for("number").name, "numbers"
        other = ", ".join(f"{kind.name} for {kind.purpose}" for kind in LOSSES.values() if kind.purpose)
        why += f" ({other})"
    return [
        "# A contract, drafted from an example table. Read every line: this is what all sites agree on.",
        "# All keys are explained in docs/contract.md.",
        f"name = {_text(name)}",
        f'loss = "{loss}"  # {target} holds {why}',
        "intercept = true",
        'method = "kin"  # finds from one message who is alike, and how sure that is; rounds (site run) need "fused",',
        "#     which draws neighbours together by a penalty, with a certified gap",
        '# penalty = "l1"  # for fused: l1 fuses single coefficients, l2 and linf whole sites',
    ]


def _tail() -> list[str]:
    default = Thresholds()
    return [
        "",
        "# --- below these numbers nothing is computed from a site's rows; a site may ask for more",
        "[thresholds]",
        f"rows = {default.rows}",
        f"rows_per_parameter = {default.rows_per_parameter:g}",
        f"cell = {default.cell}  # rows with any level that occurs at all",
        "",
        "# --- for rounds between sites (fedkin site run), with the fused method; fedkin site share does not need them",
        "[rounds]",
        "rounds = 1000",
        "# lam = 0.01  # or let the summaries tell: fedkin fit DIR_OF_SUMMARIES",
    ]


# --- columns ----------------------------------------------------------------------------------------------------


def _guess(name: str, column: AnyArray, is_target: bool) -> _Guess:
    if not name:
        return _Guess(reason="it has no name")
    numbers = parsed_numbers(column)
    values = numbers.values[np.isfinite(numbers.values)]
    words = [cell for _, cell in numbers.wrong]
    if column.dtype.kind == "b":
        return _levels(Counter({False: int((~column).sum()), True: int(column.sum())}))
    if values.size == 0 and not words:
        return _Guess(reason="it is empty")
    if any(map(looks_like_date, words)):
        return _Guess(reason="it holds dates: give a number instead, such as an age in years")
    if len(words) > 0.05 * len(column):
        return _text_column(column)
    whole = bool((values == np.floor(values)).all())
    distinct = np.unique(values)
    if whole and not is_target and _ID_NAME.search(name) and distinct.size > 0.9 * values.size:
        return _Guess(reason="it looks like an identifier")
    if distinct.size == 1:
        return _Guess(reason="it is the same in every row of the example")
    if whole and distinct.size == 2:
        return _levels(Counter(int(value) for value in values.tolist()))
    return _number(name, values, whole, is_target)


def _text_column(column: AnyArray) -> _Guess:
    seen: Counter[Label] = Counter(level_text(cell) for cell in column if cell is not None and level_text(cell) != "NA")
    if len(seen) > 0.9 * len(column) and len(seen) > 2:
        return _Guess(reason="it has a different text in every row")
    if len(seen) > _MOST_LEVELS:
        return _Guess(reason=f"it has too many levels ({len(seen)}): join some of them")
    return _levels(seen)


def _levels(seen: Counter[Label]) -> _Guess:
    least = Thresholds().cell
    common = sorted((label for label, n in seen.items() if n >= least), key=lambda label: str(level_text(label)))
    if len(common) < 2:
        return _Guess(reason=f"fewer than two of its levels occur in {least} rows or more")
    negative = [label for label in common if level_text(label).lower() in _NEGATIVE]
    first = negative[0] if negative else common[0]
    ordered = (first, *(label for label in common if label != first))
    shown = ", ".join(_text(label) if isinstance(label, str) else level_text(label) for label in ordered)
    lines = [f"levels = [{shown}]"]
    if len(common) < len(seen):
        lines.append(
            f"# levels that occur in fewer than {least} rows of the example are left out: add those that exist"
        )
    return _Guess(tuple(lines), ordered)


def _number(name: str, values: Array, whole: bool, is_target: bool) -> _Guess:
    low, high = outward(values)
    lines = ['unit = ""  # which unit? for example "kg", "mmol/L"; empty for none']
    counts = is_target and whole and bool((values >= 0).all()) and _COUNT_NAME.search(name) is not None
    kind = ['kind = "count"'] if counts else []
    lines += [f"low = {low:.12g}", f"high = {high:.12g}"]
    if not is_target and values.size >= _ENOUGH:
        mean, scale = roughly(values)
        lines += [f"mean = {mean:.12g}", f"scale = {scale:.12g}"]
    if whole and np.unique(values).size <= _FEW_VALUES:
        lines.append("# few different values: if they are codes, write levels = [1, 2, ...] instead of unit, low, high")
    return _Guess((*kind, *lines), counts=counts)


def outward(values: Array) -> tuple[float, float]:
    """A range of round numbers that is wider than the values, and does not tell the least and the largest of them.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.federate.draft import outward
    >>> outward(np.array([43.7, 71.2, 107.3]))
    (30.0, 120.0)
    >>> outward(np.array([0.0, 3.0, 12.0]))
    (0.0, 14.0)
    """
    least, largest = float(values.min()), float(values.max())
    spread = largest - least
    step = _round_down(spread / 4)
    low = math.floor((least - _MARGIN * spread) / step) * step
    high = math.ceil((largest + _MARGIN * spread) / step) * step
    if least >= 0 > low:
        low = 0.0  # what cannot be negative should not become so
    if largest <= 0 < high:
        high = 0.0
    return _tidy(low, step), _tidy(high, step)


def roughly(values: Array) -> tuple[float, float]:
    """Mean and standard deviation, rounded so much that single values do not show; the latter up.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.federate.draft import roughly
    >>> roughly(np.array([43.7, 71.2, 107.3, 66.6]))
    (80.0, 40.0)
    """
    spread = float(values.std())
    step = _round_down(spread)
    # outward: a scale that is too small makes prepared features large, and their effects seem small
    scale = next(part * step for part in (1, 2, 2.5) if part * step >= spread * (1 - 1e-12))
    return _tidy(round(float(values.mean()) / step) * step, step), _tidy(scale, step)


def _round_down(number: float) -> float:
    """1, 2 or 5 times a power of ten, at most the number."""
    power = 10.0 ** math.floor(math.log10(number))
    return max(part * power for part in (1, 2, 5) if part * power <= number or part == 1)


def _tidy(number: float, step: float) -> float:
    """A multiple of a step without the digits that rounding errors add."""
    return round(number, max(0, -math.floor(math.log10(step))))


# --- TOML -------------------------------------------------------------------------------------------------------


def _text(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)
