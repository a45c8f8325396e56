"""Explanations of the numbers in a summary and what they reveal about rows, for a site to read before it shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.core import Summary

_PRODUCTS = (
    "means, variances and correlations of the columns; for levels, how many rows have each of them, and each pair of "
    "them (a cross table). Small counts can identify single rows, so cells below the thresholds are refused."
)
#: Meaning of numbers and what they reveal, by the name of the entry, or by entry and kind of loss.
_TEXT = {
    "rows": ("how many rows there are", "the number of rows."),
    "linear value": (
        "half the sum of the squared targets (less the offset)",
        "how large the targets are on average; with the other sums, how well any coefficients fit.",
    ),
    "mean value": ("half the sum of all squared entries", "how large the entries are on average."),
    "other value": (
        "the sum of the losses of rows at the parameters 'at'",
        "how well the model with those parameters fits the rows as a whole.",
    ),
    "linear gradient": (
        "minus the sum of every column times the target",
        "the sum of the targets (intercept), and for a level such as ward=B the sum of the targets of its rows; for "
        "a level with a single row, that row's target.",
    ),
    "mean gradient": ("minus the sum of every column", "the mean of every column."),
    "other gradient": (
        "the sum of every column times the error of the model's prediction",
        "for a level, the total error of the model on its rows; for a level with a single row, that row's target.",
    ),
    "products": ("sums of the products of every two columns", _PRODUCTS),
    "linear hessian": ("sums of the products of every two columns", _PRODUCTS),
    "other hessian": (
        "sums of the products of every two columns, each row weighted by how uncertain the model is of it",
        _PRODUCTS + " Weights blur these counts a little.",
    ),
    "column_sums": (
        "the sum of every column over all rows",
        "the mean of every column; for a level, its number of rows.",
    ),
    "column_squares": ("the sum of every column's square", "the variance of every column, together with its sum."),
    "own at": ("the parameters at which the sums are taken", "the site's own estimate from its rows."),
    "asked at": ("the parameters at which the sums are taken", "nothing new: they come from the query."),
    "own": ("how the estimate was found", "how noisy the rows are around the estimate"),
    "gap": (
        "how far the queried parameters are from balance with the neighbours, to three digits; infinite if they are "
        "far from it",
        "one number of the site's fit; nothing about single rows.",
    ),
    "privacy": ("how large the noise is, and what it guarantees", "nothing about rows."),
}


@dataclass(frozen=True)
class Disclosure:
    """Some numbers of a message, with their meaning and what they reveal about rows."""

    name: str  # of the entry of the message
    what: str
    tells: str
    numbers: Any  # as in the summary; of symmetric matrices, the rows from the diagonal onwards
    parts: tuple[str, ...] = ()  # of numbers by fold: which rows each entry is about


def describe_summary(summary: Summary) -> list[Disclosure]:
    """Return every number of a summary with its meaning and what it reveals about rows."""
    kind = "mean" if summary.loss.location else "linear" if summary.loss.quadratic else "other"
    used = summary.used.tolist()
    folds = [f"fold {k + 1}" for k in used if k < summary.folds]
    rest = [] if len(folds) == len(used) else ["rows in no fold" if folds else "all rows"]
    cut = f", in each of {len(folds)} folds" if folds else ", in all"
    cut += ", and of rows that are in no fold" if folds and rest else ""
    out = []

    def by_fold(name: str, key: str, numbers: Any) -> None:
        out.append(Disclosure(name, _TEXT[key][0] + cut, _TEXT[key][1], numbers, (*folds, *rest)))

    def plain(name: str, key: str, numbers: Any, more: str = "") -> None:
        out.append(Disclosure(name, _TEXT[key][0], _TEXT[key][1] + more, numbers))

    by_fold("rows", "rows", summary.count[used].tolist())
    by_fold("value", f"{kind} value", summary.value[used].tolist())
    by_fold("gradient", f"{kind} gradient", summary.gradient[used].tolist())
    if summary.scores is not None:
        by_fold("products", "products", [_triangle(summary.scores[k]) for k in used])
    elif summary.curvature is None:
        by_fold("hessian", f"{kind} hessian", [_triangle(summary.hessian[k]) for k in used])
    else:
        out.append(_of_curvature(summary, *_TEXT[f"{kind} hessian"]))
    plain("column_sums", "column_sums", summary.column_sums.tolist())
    plain("column_squares", "column_squares", summary.column_squares.tolist())
    if summary.at.any():
        plain("at", "asked at" if summary.own is None else "own at", summary.at.tolist())
    if (own := summary.own) is not None:
        numbers = {"dispersion": own.dispersion, "degrees of freedom": own.dof, "ridge": own.ridge.tolist()}
        plain("own", "own", numbers, f", and that it has none without a ridge ({own.note})." if own.note else ".")
    if summary.gap is not None:
        plain("gap", "gap", summary.gap)
    if (noise := summary.privacy) is not None:
        numbers = {name: getattr(noise, name) for name in ("epsilon", "delta", "bound", "noise")}
        odds = (
            f" All sums above are noisy: they change the odds of any guess about one row by a factor of at most "
            f"{np.exp(noise.epsilon):.3g} (except with probability {noise.delta:g}), whatever else is known."
        )
        plain("privacy", "privacy", numbers | {"limits": noise.limits.tolist()}, odds)
    return out


def _triangle(matrix: Array) -> list[list[float]]:
    return [row[k:].tolist() for k, row in enumerate(matrix)]


def _of_curvature(summary: Summary, what: str, tells: str) -> Disclosure:
    curvature, p = summary.curvature, summary.n_params
    assert curvature is not None
    what += f", in all, as a diagonal (first) plus {curvature.rank} directions of {p} numbers each"
    what += f"; {curvature.left_out} directions are left out" if curvature.left_out else ""
    if curvature.exact:
        tells = "the same as all products, which follow from it: " + tells
    else:
        directions = f"the {curvature.rank} directions in which they are largest, and roughly the rest"
        tells = f"products of columns in {directions}: {tells}"
    if summary.n_samples <= p:
        tells += " There are at most as many rows as parameters, so the rows follow from it up to a rotation."
    return Disclosure("curvature", what, tells, np.column_stack([curvature.diagonal, curvature.factor]).tolist())
