"""Define `Summary`, the sums that a site shares, and `Query`, the organiser's request for further sums."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace as replace_in

from fedkin._base import AnyArray, Array, Index, check_whole
from fedkin.core.linalg import least_eigenvalue
from fedkin.core.sitedata import parameter_names
from fedkin.errors import DataError, ParameterError
from fedkin.losses import Loss, describe_loss, described_loss

#: Tolerance when checking that cross-products are positive semi-definite.
IMPOSSIBLE = 1e-9
#: Directions with less than this share of the largest curvature count as undetermined by the rows.
NOTHING = 1e-10
#: A diagonal stands for the rest if it keeps so much of it, and this times the share of directions that are kept: of
#: about as many rows as parameters it would know next to nothing, and not how little.
WORTH, WORTH_PER_RANK = 0.3, 1.5

#: A whole number of at least 0, and a number above 0.
WholeNumber = Annotated[int, msgspec.Meta(ge=0, le=10**10)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
#: Larger numbers cannot be valid sums, and their products would overflow.
_LARGEST = 1e100
_T = TypeVar("_T")


# --- plain names and numbers --------------------------------------------------------------------------------------


def to_plain(message: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a message as JSON values without loss, omitting those that are None or infinite."""

    def finite(plain: Any) -> Any:
        if isinstance(plain, list) and plain and isinstance(plain[0], dict):
            return [finite(one) for one in plain]
        if not isinstance(plain, dict):
            return plain
        return {name: finite(value) for name, value in plain.items() if value is not None and value != np.inf}

    made: dict[str, Any] = finite(msgspec.to_builtins(message, enc_hook=lambda array: array.tolist()))
    return made


def from_plain(plain: object, kind: type[_T], what: str) -> _T:
    """Read a message written by `to_plain`; raise a `DataError` that starts with ``what`` if it is invalid."""
    try:
        return msgspec.convert(plain, kind, dec_hook=_array)
    except msgspec.ValidationError as error:
        refuse(what, f"is damaged: {str(error).replace('$.', '')}")


def refuse(what: str, why: str) -> NoReturn:
    """Raise a `DataError` about a received message."""
    raise DataError(f"{what} {why}; ask for it again")


def check_shapes(message: Any, shapes: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Raise `DataError` unless an array of a message has the expected shape."""
    for name, shape in shapes.items():
        if (found := getattr(message, name)).shape != shape:
            refuse(what, f"has {name!r} of shape {found.shape}, expected {shape}")


def _array(kind: Any, value: Any) -> Any:
    array, whole = np.asarray(value), kind == Index
    if array.size and array.dtype.kind not in ("i" if whole else "if"):
        raise ValueError("expected whole numbers" if whole else "expected numbers")
    if not np.isfinite(array).all():
        raise ValueError("expected finite numbers")
    if array.size and float(np.abs(array).max()) > _LARGEST:
        raise ValueError(f"expected numbers up to {_LARGEST:g}")
    return array.astype(np.int64 if whole else np.float64)


class PlainMessage(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """Message between sites and the organiser; only defaults may be None or infinite."""


# --- parts of a summary -------------------------------------------------------------------------------------------


class OwnEstimate(PlainMessage, frozen=True):
    """Estimate of a site in its first message: its own minimiser, or a ridge fit if none exists."""

    ridge: Array  # (p,), extra curvature of the mean loss that the estimate needed; zeros for an ordinary one
    dispersion: Positive = 1.0  # factor by which the variance of a score exceeds the Hessian
    dof: Positive = np.inf  # degrees of freedom behind the dispersion; infinite where it is not estimated
    note: str = ""  # why the site has no minimiser of its own


class Privacy(PlainMessage, frozen=True):
    """Differential privacy of one message: replacing a row changes its probability by at most ``exp(epsilon)``."""

    epsilon: Positive
    delta: Positive  # the probability with which the promise may fail
    bound: Positive  # on the L2 norm of a row in units of its limits; longer rows are shortened
    limits: Array  # (q + 1,), on the sizes of columns and target (1 for the mean loss); larger values are cut
    noise: Positive  # standard deviation of that on every sum of products, fold by fold, in units of the limits


class LowRankCurvature(PlainMessage, frozen=True):
    """Diagonal plus low-rank matrix ``diag(diagonal) + factor factor'`` for p parameters."""

    diagonal: Array  # (p,)
    factor: Array  # (p, r)
    left_out: WholeNumber = 0  # directions that rows tell something about and this matrix nothing

    @property
    def rank(self) -> int:
        """Number of columns of the factor."""
        return int(self.factor.shape[1])

    @property
    def exact(self) -> bool:
        """Whether the approximation is exact."""
        return not self.left_out and not self.diagonal.any()

    def dense(self) -> Array:
        """Return the matrix ``(p, p)``."""
        return np.asarray(np.diag(self.diagonal) + self.factor @ self.factor.T)

    def apply(self, vector: Array) -> Array:
        """Return the matrix times ``vector (p,)``."""
        return np.asarray(self.diagonal * vector + self.factor @ (vector @ self.factor))


def shortened(value: float, gradient: Array, hessian: Array, rank: int) -> tuple[float, Array, LowRankCurvature]:
    """Approximate a quadratic by one of low-rank curvature with the same minimum, and return its derivatives.

    The factor holds the directions of largest curvature, in units where every parameter alone has curvature 1. For
    least squares, omitting directions is like omitting rows of a rotated table: information is lost, but no bias
    arises. If the rows determine all parameters well, the diagonal replaces the omitted directions, scaled so that the
    stated precision is correct on average over directions: ``trace(short / hessian) = p``.
    """
    size = np.sqrt(np.maximum(np.diag(hessian), 0.0))
    size = np.where(size > 0, size, 1.0)
    values, vectors = np.linalg.eigh(hessian / np.outer(size, size))
    values, vectors = values[::-1], vectors[:, ::-1] * np.where(vectors[:, ::-1].sum(axis=0) < 0, -1.0, 1.0)
    seen = int((values > NOTHING * max(float(values[0]), 0.0)).sum())
    p, kept = len(size), min(rank, seen)
    factor = size[:, None] * vectors[:, :kept] * np.sqrt(values[:kept])
    if kept == seen:
        return value, gradient, LowRankCurvature(np.zeros(p), factor)
    step = -(vectors[:, :seen] / values[:seen]) @ (vectors[:, :seen].T @ (gradient / size)) / size
    diagonal, left_out = np.zeros(p), seen - kept
    if seen == p:
        rest = np.maximum(1.0 - (vectors[:, :kept] ** 2) @ values[:kept], 0.0)
        scale = (p - kept) / float(rest @ (vectors**2 @ (1.0 / values)))
        if scale > max(WORTH, WORTH_PER_RANK * kept / p):
            diagonal, left_out = scale * rest * size**2, 0
    made = LowRankCurvature(diagonal, factor, left_out)
    bend = made.apply(step)
    return value + 0.5 * float(gradient @ step) + 0.5 * float(step @ bend), -bend, made


# --- summaries and queries ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Summary:
    """Sufficient statistics of one site: sums over its rows in K folds, and of a single row, which is in no fold."""

    site: Hashable
    loss: Loss
    feature_names: tuple[str, ...]  # columns of the prepared rows; the first is ``(intercept)`` where there is one
    seed: int  # of the folds
    at: Array = field(repr=False)  # (p,), where the loss was expanded: 0 if quadratic, the site's estimate, or asked
    count: Index = field(repr=False)  # (K + 1,), rows
    value: Array = field(repr=False)  # (K + 1,), sums of the loss
    gradient: Array = field(repr=False)  # (K + 1, p)
    hessian: Array = field(repr=False)  # (K + 1, p, p); (K + 1,) for the mean loss, all multiples of the identity
    column_sums: Array = field(repr=False)  # (q,)
    column_squares: Array = field(repr=False)  # (q,)
    scores: Array | None = field(default=None, repr=False)  # (K + 1, p, p), outer products of rows, for the mean loss
    own: OwnEstimate | None = field(default=None, repr=False)  # in the first message about a loss that is not quadratic
    gap: float | None = None  # in answers, the Young gap: the loss's distance from the minimum given the neighbours
    privacy: Privacy | None = None  # of noisy sums
    curvature: LowRankCurvature | None = field(default=None, repr=False)  # ``hessian`` over all rows in a short message

    @property
    def n_samples(self) -> int:
        """Number of rows of the site."""
        return int(self.count.sum())

    @property
    def n_params(self) -> int:
        """Length p of the parameter."""
        return int(self.at.size)

    @property
    def folds(self) -> int:
        """Number of folds K."""
        return int(self.count.size) - 1

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the entries of ``at``."""
        return parameter_names(self.feature_names, self.n_params // max(len(self.feature_names), 1))

    @property
    def used(self) -> Index:
        """Parts of the sums that contain rows; a site may use fewer folds than the contract allows, or none."""
        return np.flatnonzero((self.count != 0) | (self.value != 0) | (self.gradient != 0).any(axis=1))

    def short(self, rank: int) -> Summary:
        """Shorten the summary: second derivatives of this rank plus a diagonal, without folds.

        Only the folds are lost if the rank is at least the number of rows or parameters. Otherwise the minimiser and
        the minimum stay exact, but the curvature around them is approximate (`LowRankCurvature`).
        """
        check_whole("rank", rank, least=1)
        if self.privacy is not None:
            raise ParameterError("noisy sums have full rank: omit the rank or the noise")
        if self.scores is not None:
            raise ParameterError("the mean loss has the same curvature in all directions: omit the rank")
        if self.curvature is not None:
            raise ParameterError("this summary is already short: shorten the full summary instead")
        sums = float(self.value.sum()), self.gradient.sum(axis=0), self.hessian.sum(axis=0)
        value, gradient, curvature = shortened(*sums, rank)

        def last(sums: AnyArray) -> AnyArray:
            return np.concatenate([np.zeros((self.folds, *sums.shape), dtype=sums.dtype), sums[None]])

        count, hessian = last(self.count.sum()), last(curvature.dense())
        parts: dict[str, Any] = {"count": count, "value": last(np.array(value)), "gradient": last(gradient)}
        return replace(self, hessian=hessian, curvature=curvature, **parts)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for a file; `from_plain` restores exactly the same numbers."""
        if not isinstance(self.site, str):
            raise DataError(f"a site that writes files needs a string id, but this one has the id {self.site!r}")
        first = 0 if self.curvature is None else self.folds
        curvature = self.curvature and replace_in(self.curvature, factor=self.curvature.factor.T)
        parts = []
        for k in range(first, self.folds + int(self.count[-1] != 0)):
            entry, matrix = ("hessian", self.hessian[k]) if self.scores is None else ("products", self.scores[k])
            # matrices by their rows from the diagonal onwards
            told = {} if curvature else {entry: [row[j:] for j, row in enumerate(matrix)]}
            parts.append(_FoldSums(int(self.count[k]), float(self.value[k]), self.gradient[k], **told))
        gap: float | Literal["infinite"] | None = "infinite" if self.gap == np.inf else self.gap
        head = self.site, describe_loss(self.loss), self.feature_names, self.seed
        sums = self.at, self.column_sums, self.column_squares
        return to_plain(_PlainSummary(*head, *sums, self.folds, parts, self.own, self.privacy, curvature, gap))

    @classmethod
    def from_plain(cls, plain: object, loss: Loss | None = None) -> Summary:
        """Read a summary written by `to_plain`; pass ``loss`` for a custom loss, whose code is not stored.

        Raises
        ------
        DataError
            When an entry is missing, has the wrong type or length, or holds impossible numbers; the message names the
            site and the entry.
        """
        name = plain.get("site") if isinstance(plain, Mapping) else None
        what = "the summary" if name is None else f"the summary of site {name!r}"
        said = from_plain(plain, _PlainSummary, what)
        if loss is None or describe_loss(loss) != said.loss:
            try:
                loss = described_loss(said.loss)
            except ParameterError:
                refuse(what, f"is of the loss {said.loss!r}, which is not available here")
        q = len(said.columns)
        p, mean = loss.n_params(q), loss.location and loss.quadratic
        said.check(p, q, what)
        parts, n = said.folds, said.n_folds + 1
        if len(parts) not in ((1,) if said.curvature else (n - 1, n)):
            refuse(what, f"needs sums for {n - 1} folds, or over all rows only where it is a short one")
        where = slice(n - 1, n) if said.curvature else slice(0, len(parts))
        count, value, gradient = np.zeros(n, dtype=np.int64), np.zeros(n), np.zeros((n, p))
        matrices, entry = np.zeros((n, p, p)), "products" if mean else "hessian"
        count[where], value[where] = [one.rows for one in parts], [one.value for one in parts]
        for k, part in zip(range(n)[where], parts, strict=True):
            check_shapes(part, {"gradient": (p,)}, f"{what}, fold {k + 1},")
            gradient[k] = part.gradient
            if said.curvature is None:
                matrices[k] = _symmetric(getattr(part, entry), p, entry, f"{what}, fold {k + 1},")
        curvature = said.curvature and replace_in(said.curvature, factor=said.curvature.factor.T.copy())
        if curvature is not None:
            matrices[-1] = curvature.dense()
        hessian = count.astype(np.float64) if mean else matrices  # the mean loss has multiples of the identity
        head, columns = (said.site, loss, said.columns, said.seed, said.at), (said.column_sums, said.column_squares)
        made = cls(
            *(*head, count, value, gradient, hessian, *columns, matrices if mean else None),
            own=said.own,
            gap=np.inf if said.gap == "infinite" else said.gap,
            privacy=said.privacy,
            curvature=curvature,
        )
        made._refuse_impossible(matrices, entry, what)
        return made

    def _refuse_impossible(self, matrices: Array, entry: str, what: str) -> None:
        """Reject numbers that no rows can produce, apart from noise."""
        if self.n_samples < 1:
            refuse(what, "has no rows")
        if not np.isfinite(self.value).all() or np.abs(self.value).max() > _LARGEST:
            refuse(what, "has a 'value' that is not finite or is far too large")
        if self.privacy is not None:
            return
        if self.curvature is None and (
            not (least_eigenvalue(matrices) >= -IMPOSSIBLE).all() or (np.einsum("kpp->kp", matrices) < 0).any()
        ):
            refuse(what, f"has products of columns in {entry!r} that no rows can produce")
        if (self.n_samples * self.column_squares < (1 - IMPOSSIBLE) * self.column_sums**2).any():
            refuse(what, "has 'column_squares' that are too small for its 'column_sums'")


class _FoldSums(PlainMessage, frozen=True):
    """Sums of a fold as stored in a file; matrices are stored row by row from the diagonal onwards."""

    rows: WholeNumber
    value: float
    gradient: Array
    hessian: list[Array] | None = None
    products: list[Array] | None = None


class _PlainSummary(PlainMessage, frozen=True):
    site: str
    loss: dict[str, Any]
    columns: tuple[str, ...]
    seed: WholeNumber
    at: Array
    column_sums: Array
    column_squares: Array
    n_folds: Annotated[int, msgspec.Meta(ge=2, le=1000)]
    folds: list[_FoldSums]
    own: OwnEstimate | None = None
    privacy: Privacy | None = None
    curvature: LowRankCurvature | None = None
    gap: float | Literal["infinite"] | None = None  # JSON has no infinity

    def check(self, p: int, q: int, what: str) -> None:
        """Raise `DataError` if names or arrays do not fit p parameters of q columns, or have the wrong sign."""
        if len(set(self.columns)) < q:
            refuse(what, "has a name twice in 'columns'")
        check_shapes(self, {"at": (p,), "column_sums": (q,), "column_squares": (q,)}, what)
        if self.own is not None:
            check_shapes(self.own, {"ridge": (p,)}, f"{what}, entry 'own',")
            if (self.own.ridge < 0).any():
                refuse(what, "has a negative number in 'own'")
        if self.privacy is not None:
            check_shapes(self.privacy, {"limits": (q + 1,)}, f"{what}, entry 'privacy',")
            if not (self.privacy.limits > 0).all():
                refuse(what, "has a number that is not positive in 'privacy'")
        if self.curvature is not None:
            shapes = {"diagonal": (p,), "factor": (len(self.curvature.factor), p)}
            check_shapes(self.curvature, shapes, f"{what}, entry 'curvature',")
            if (self.curvature.diagonal < 0).any():
                refuse(what, "has a negative number in the 'diagonal' of 'curvature'")


def _symmetric(rows: list[Array] | None, p: int, entry: str, what: str) -> Array:
    if rows is None or [row.shape for row in rows] != [(p - k,) for k in range(p)]:
        refuse(what, f"needs {p} lists for {entry!r}, each shorter by one than the one before")
    matrix = np.zeros((p, p))
    for k, row in enumerate(rows):
        matrix[k, k:] = matrix[k:, k] = row
    return matrix


class Query(PlainMessage, frozen=True):
    """Query of the organiser to a site: evaluate the loss and its derivatives at a point."""

    site: Any
    round: Annotated[int, msgspec.Meta(ge=2)]  # round 1 is the initial summary
    theta: Array  # (p,), the point
    balance: Array  # (p,), dual force of the neighbours: at the solution, minus the gradient of the site's mean loss
    radius: Positive = np.inf  # of a ball that contains the solution; used if the rows do not determine all directions

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for a file."""
        if not isinstance(self.site, str):
            raise DataError(f"a site that reads files needs a string id, but this one has the id {self.site!r}")
        return to_plain(self)

    @classmethod
    def from_plain(cls, plain: object) -> Query:
        """Read a query written by `to_plain`; raise a `DataError` that names the problem."""
        what = "the query"
        made = from_plain(plain, cls, what)
        if not isinstance(made.site, str):
            refuse(what, f"is for the site {made.site!r}, expected a name")
        what = f"the query to site {made.site!r}"
        check_shapes(made, {"theta": (made.theta.size,), "balance": (made.theta.size,)}, what)
        return made
