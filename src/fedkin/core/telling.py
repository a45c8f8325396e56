"""What the numbers of a summary tell about rows, in plain words: what a site reads before it shares them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkin.core.plain import upper_triangle

if TYPE_CHECKING:
    from fedkin.core.curvature import Curvature
    from fedkin.core.privacy import Privacy
    from fedkin.core.summary import Summary


@dataclass(frozen=True)
class Disclosure:
    """Some numbers of a message: their name there, what they are, and what they tell about rows.

    Attributes
    ----------
    name : str
    what : str
    tells : str
    numbers : Any
        As in the message.
    parts : tuple of str
        Where the message has numbers by fold: what rows each entry of ``numbers`` is about.
    """

    name: str
    what: str
    tells: str
    numbers: Any
    parts: tuple[str, ...] = ()


def told_by(summary: Summary) -> list[Disclosure]:
    """Every number of a summary."""
    kind = "mean" if summary.loss.location else "linear" if summary.loss.quadratic else "other"
    used = _used(summary)
    parts = tuple(_part_name(summary, k, len(used)) for k in used)
    folds = _folds_words(summary, used)
    entries = [
        Disclosure(
            "rows", f"how many rows there are {folds}", "the number of rows.", summary.count[used].tolist(), parts
        ),
        Disclosure("value", f"{_VALUE[kind]}, {folds}", _TELLS_VALUE[kind], summary.value[used].tolist(), parts),
        Disclosure(
            "gradient", f"{_GRADIENT[kind]}, {folds}", _TELLS_GRADIENT[kind], summary.gradient[used].tolist(), parts
        ),
    ]
    if kind == "mean":
        assert summary.scores is not None
        products = [upper_triangle(summary.scores[k]) for k in used]
        entries.append(
            Disclosure(
                "products", f"sums of the products of every two columns, {folds}", _TELLS_PRODUCTS, products, parts
            )
        )
    else:
        what = "sums of the products of every two columns"
        what += "" if kind == "linear" else ", each row weighted by how uncertain the model at that point is of it"
        tells = _TELLS_PRODUCTS if kind == "linear" else _TELLS_PRODUCTS + " Weights blur these counts a little."
        if summary.curvature is None:
            hessian = [upper_triangle(summary.hessian[k]) for k in used]
            entries.append(Disclosure("hessian", f"{what}, {folds}", tells, hessian, parts))
        else:
            entries.append(_told_curvature(summary, summary.curvature, what, tells))
    entries += [
        Disclosure("column_sums", "the sum of every column over all rows", _TELLS_SUMS, summary.column_sums.tolist()),
        Disclosure(
            "column_squares", "the sum of every column's square", _TELLS_SQUARES, summary.column_squares.tolist()
        ),
    ]
    if summary.at.any():
        where = "the parameters at which the sums are taken"
        tells = "the site's own estimate from its rows." if summary.own is not None else "nothing new: they were asked."
        entries.append(Disclosure("at", where, tells, summary.at.tolist()))
    if summary.own is not None:
        own = summary.own
        tells = "how noisy the rows are around the estimate"
        tells += "." if not own.note else f", and that the site has none without a ridge ({own.note})."
        numbers = {"dispersion": own.dispersion, "degrees of freedom": own.dof, "ridge": own.ridge.tolist()}
        entries.append(Disclosure("own", "how the estimate was found", tells, numbers))
    if summary.gap is not None:
        tells = "one number of the site's fit; nothing about single rows."
        entries.append(
            Disclosure("gap", "how far the asked parameters are from balance with the neighbours", tells, summary.gap)
        )
    if summary.privacy is not None:
        entries.append(_told_noise(summary.privacy))
    return entries


def _used(summary: Summary) -> list[int]:
    """The parts of the sums that are about rows: a site may use fewer folds than the contract has, or none."""
    told = (summary.count != 0) | (summary.value != 0) | (summary.gradient != 0).any(axis=1)
    return [int(k) for k in np.flatnonzero(told)]


def _part_name(summary: Summary, k: int, used: int) -> str:
    if k < summary.folds:
        return f"fold {k + 1}"
    return "all rows" if used == 1 else "rows in no fold"


def _folds_words(summary: Summary, used: list[int]) -> str:
    folds = sum(k < summary.folds for k in used)
    if not folds:
        return "in all"
    words = "in the one fold" if folds == 1 else f"in each of {folds} folds"
    return words if folds == len(used) else f"{words}, and of rows that are in no fold"


def _told_curvature(summary: Summary, curvature: Curvature, what: str, tells: str) -> Disclosure:
    rank, p = curvature.rank, summary.n_params
    words = f"{what}, in all, as a diagonal (first) plus {rank} directions of {p} numbers each"
    words += f"; {curvature.left_out} directions are left out" if curvature.left_out else ""
    if curvature.exact:
        tells = "the same as all products, which follow from it: " + tells
    else:
        tells = f"products of columns in the {rank} directions in which they are largest, roughly the rest: " + tells
    if summary.n_samples <= p:
        tells += " There are no more rows than parameters: rows follow from it up to a rotation."
    return Disclosure("curvature", words, tells, np.column_stack([curvature.diagonal, curvature.factor]).tolist())


def _told_noise(privacy: Privacy) -> Disclosure:
    odds = float(np.exp(privacy.epsilon))
    tells = (
        "nothing about rows. All sums above are noisy: they change the odds of any guess about one row by a factor of "
        f"at most {odds:.3g} (except with probability {privacy.delta:g}), whatever else is known."
    )
    return Disclosure("privacy", "how large the noise is, and what it promises", tells, privacy.to_plain())


_VALUE = {
    "linear": "half the sum of the squared targets (less the offset)",
    "mean": "half the sum of all squared entries",
    "other": "the sum of the losses of rows at the parameters 'at'",
}
_TELLS_VALUE = {
    "linear": "how large the targets are on average; with the other sums, how well any coefficients fit.",
    "mean": "how large the entries are on average.",
    "other": "how well the model with those parameters fits the rows as a whole.",
}
_GRADIENT = {
    "linear": "minus the sum of every column times the target",
    "mean": "minus the sum of every column",
    "other": "the sum of every column times the error of the model's prediction",
}
_TELLS_GRADIENT = {
    "linear": "the sum of the targets (intercept), and for a level such as ward=B the sum of the targets of its rows: "
    "of a level with a single row, that row's target.",
    "mean": "the mean of every column.",
    "other": "for a level, how far the model misses its rows in sum: of a level with a single row, that row's target.",
}
_TELLS_PRODUCTS = (
    "means, variances and correlations of the columns; for levels, how many rows have each of them, and each pair of "
    "them (a cross table). Small counts single rows out: thresholds on cells are for these."
)
_TELLS_SUMS = "the mean of every column; of a level, how many rows have it."
_TELLS_SQUARES = "the variance of every column, together with its sum."
