"""`Summary`: everything that one site says about its rows. `Query`: what it may be asked next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedkin._base import AnyArray, Array, Index, check_whole
from fedkin.core.curvature import Curvature, shortened
from fedkin.core.linalg import least_eigenvalue
from fedkin.core.plain import INFINITE, Reader, upper_triangle
from fedkin.core.privacy import Privacy
from fedkin.core.telling import Disclosure, told_by
from fedkin.errors import DataError, ParameterError
from fedkin.losses import Loss, describe_loss, described_loss

#: Products of rows are positive semi-definite up to this.
IMPOSSIBLE = 1e-9


@dataclass(frozen=True, eq=False)
class OwnEstimate:
    """How a site found the point of its first message: its own minimiser, or a ridge fit where it has none.

    Attributes
    ----------
    ridge : array (p,)
        Extra curvature of the mean loss that the estimate needed; zeros for an ordinary one.
    dispersion : float
        Factor by which the variance of a score exceeds the Hessian.
    dof : float
        Degrees of freedom behind the dispersion; infinite where it is not estimated.
    note : str
        Why the site has no minimiser of its own; "" where it has one.
    """

    ridge: Array
    dispersion: float = 1.0
    dof: float = np.inf
    note: str = ""

    def to_plain(self) -> dict[str, Any]:
        """Plain numbers, as a file holds them."""
        dof = self.dof if np.isfinite(self.dof) else INFINITE
        return {"ridge": self.ridge.tolist(), "dispersion": self.dispersion, "dof": dof, "note": self.note}

    @classmethod
    def from_plain(cls, plain: object, p: int, what: str) -> OwnEstimate:
        """What `to_plain` wrote about an estimate of p parameters; ``what`` begins errors."""
        reader = Reader(plain, f"{what}, entry 'own',")
        made = cls(
            reader.numbers("ridge", p),
            reader.number("dispersion"),
            reader.number("dof", infinite=True),
            reader.text("note"),
        )
        reader.done()
        if (made.ridge < 0).any() or not made.dispersion > 0 or not made.dof > 0:
            reader.refuse("has a number below 0")
        return made


@dataclass(frozen=True, eq=False)
class Summary:
    """Everything that one site says about its rows: sums, fold by fold.

    Attributes
    ----------
    site : str (or any id of a site)
    loss : Loss
    feature_names : tuple of q str
        Columns of the prepared rows; the first is ``(intercept)`` where there is one.
    seed : int
        Of the folds.
    at : array (p,)
        The parameter at which the loss was expanded: 0 for quadratic losses, the site's own estimate in the first
        message of others, and then the parameter that it was asked about.
    count : int array (K + 1,)
        Rows of each of the K folds; the last part is of a single row, which is in no fold.
    value, gradient, hessian : arrays (K + 1,), (K + 1, p), (K + 1, p, p)
        Sums over the rows of each part of the loss and its derivatives at ``at``; ``hessian (K + 1,)`` for the mean
        loss, where all are multiples of the identity.
    column_sums, column_squares : array (q,)
        Sums over all rows of each column and of its square.
    scores : array (K + 1, p, p), optional
        Sums of the outer products of rows, for the mean loss only.
    own : OwnEstimate, optional
        In the first message about a loss that is not quadratic.
    privacy : Privacy, optional
        Where the sums are noisy: what is promised, and how large the noise is.
    curvature : Curvature, optional
        In a short message: the second derivatives of all rows, which are in no fold, as diagonal plus low rank.
        ``hessian`` has the same as a matrix.
    gap : float, optional
        In answers: how far the site's loss is from its minimum, given what the neighbours pull (its Young gap).

    Examples
    --------
    >>> import fedkin
    >>> fed = fedkin.Federation({"north": ([[1.0], [2.0], [4.0]], [1.0, 3.0, 5.0])})
    >>> summary = fedkin.summarise(fed, "linear", folds=2)["north"]
    >>> summary.n_samples, summary.gradient.sum(axis=0).tolist()  # minus the sum of x times y
    (3, [-27.0])
    """

    site: Hashable
    loss: Loss
    feature_names: tuple[str, ...]
    seed: int
    at: Array = field(repr=False)
    count: Index = field(repr=False)
    value: Array = field(repr=False)
    gradient: Array = field(repr=False)
    hessian: Array = field(repr=False)
    column_sums: Array = field(repr=False)
    column_squares: Array = field(repr=False)
    scores: Array | None = field(default=None, repr=False)
    own: OwnEstimate | None = field(default=None, repr=False)
    gap: float | None = None
    privacy: Privacy | None = None
    curvature: Curvature | None = field(default=None, repr=False)

    @property
    def n_samples(self) -> int:
        """Rows of the site."""
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
        """A name for each entry of ``at``: those of the columns, with the number of the class where there are more."""
        blocks = self.n_params // max(len(self.feature_names), 1)
        if blocks <= 1:
            return self.feature_names
        return tuple(f"{name} [class {k + 1}]" for k in range(blocks) for name in self.feature_names)

    def described(self) -> list[Disclosure]:
        """Every number of the summary, what it is and what it tells about rows, in plain words."""
        return told_by(self)

    def short(self, rank: int) -> Summary:
        """The same in a shorter message: second derivatives of this rank (plus a diagonal), no folds.

        Nothing but the folds is lost where the rank is at least the number of rows, or of parameters. Otherwise the
        loss keeps the place and depth of its minimum, and says less about how it rises around it (`Curvature`).

        Examples
        --------
        >>> import fedkin
        >>> fed = fedkin.Federation({"north": ([[1.0, 2.0, 0.0], [2.0, 0.0, 1.0]], [1.0, 3.0])})
        >>> summary = fedkin.summarise(fed)["north"]
        >>> short = summary.short(2)  # two rows, so this is exact
        >>> short.curvature.factor.shape, bool(abs(short.hessian[-1] - summary.hessian.sum(axis=0)).max() < 1e-12)
        ((3, 2), True)
        """
        check_whole("rank", rank, least=1)
        if self.privacy is not None:
            raise ParameterError("noisy sums have no low rank: leave out the rank, or the noise")
        if self.scores is not None:
            raise ParameterError("the mean loss has the same curvature in all directions: leave out the rank")
        if self.curvature is not None:
            raise ParameterError("this summary is short already: shorten the one that was made of the rows")
        sums = float(self.value.sum()), self.gradient.sum(axis=0), self.hessian.sum(axis=0)
        value, gradient, curvature = shortened(*sums, rank)
        return replace(
            self,
            count=_in_last(self.folds, self.count.sum(axis=0)),
            value=_in_last(self.folds, np.asarray(value)),
            gradient=_in_last(self.folds, gradient),
            hessian=_in_last(self.folds, curvature.dense()),
            curvature=curvature,
        )

    # --- as a message -------------------------------------------------------------------------------------------

    def to_plain(self) -> dict[str, Any]:
        """Plain numbers and names, as a file holds them; `from_plain` gets back the same bits."""
        if not isinstance(self.site, str):
            raise DataError(f"a site that writes files needs a name, but this one is called {self.site!r}")
        first, last = 0, self.folds if self.count[-1] == 0 else self.folds + 1
        if self.curvature is not None:
            first = self.folds
        plain: dict[str, Any] = {
            "site": self.site,
            "loss": describe_loss(self.loss),
            "columns": list(self.feature_names),
            "seed": self.seed,
            "at": self.at.tolist(),
            "column_sums": self.column_sums.tolist(),
            "column_squares": self.column_squares.tolist(),
            "n_folds": self.folds,
            "folds": [self._plain_part(k) for k in range(first, last)],
        }
        if self.own is not None:
            plain["own"] = self.own.to_plain()
        if self.privacy is not None:
            plain["privacy"] = self.privacy.to_plain()
        if self.curvature is not None:
            plain["curvature"] = self.curvature.to_plain()
        if self.gap is not None:
            plain["gap"] = self.gap if np.isfinite(self.gap) else INFINITE
        return plain

    def _plain_part(self, k: int) -> dict[str, Any]:
        part: dict[str, Any] = {
            "rows": int(self.count[k]),
            "value": float(self.value[k]),
            "gradient": self.gradient[k].tolist(),
        }
        if self.curvature is not None:
            return part
        if self.scores is None:
            part["hessian"] = upper_triangle(self.hessian[k])
        else:
            part["products"] = upper_triangle(self.scores[k])
        return part

    @classmethod
    def from_plain(cls, plain: object, loss: Loss | None = None) -> Summary:
        """The summary that `to_plain` wrote; ``loss`` is the custom loss, whose code no file holds.

        Raises
        ------
        DataError
            With what is wrong: an entry that is missing, of the wrong kind or length, or numbers that no rows have.
        """
        reader = Reader(plain, "the summary")
        site = reader.text("site")
        reader.what = f"the summary of site {site!r}"
        described = reader.take("loss")
        if loss is None or describe_loss(loss) != described:
            try:
                loss = described_loss(described)
            except (ParameterError, KeyError, TypeError, ValueError, AttributeError):
                reader.refuse(f"is of the loss {described!r}, which is not known here")
        assert loss is not None
        columns = reader.names("columns")
        p, q, folds = loss.n_params(len(columns)), len(columns), reader.whole("n_folds", least=2)
        location = loss.location and loss.quadratic
        curvature = None
        if "curvature" in reader.left and not location:
            curvature = Curvature.from_plain(reader.take("curvature"), p, reader.what)
        made = cls(
            site,
            loss,
            columns,
            reader.whole("seed"),
            reader.numbers("at", p),
            *(
                _parts_of(reader, p, folds, location=location)
                if curvature is None
                else _one_part(reader, folds, curvature)
            ),
            reader.numbers("column_sums", q),
            reader.numbers("column_squares", q),
            own=OwnEstimate.from_plain(reader.take("own"), p, reader.what) if "own" in reader.left else None,
            gap=reader.number("gap", infinite=True) if "gap" in reader.left else None,
            privacy=Privacy.from_plain(reader.take("privacy"), q, reader.what) if "privacy" in reader.left else None,
            curvature=curvature,
        )
        reader.done()
        if location:
            # the products of columns came in the place of second derivatives, which are the numbers of rows
            made = replace(made, scores=made.hessian, hessian=made.count.astype(np.float64))
        if made.n_samples < 1:
            reader.refuse("has no rows")
        made._check_possible(reader)
        return made

    def _check_possible(self, reader: Reader) -> None:
        """Refuse numbers that no rows have, noise apart."""
        if self.privacy is not None:
            return
        matrices = self.hessian if self.scores is None else self.scores
        if self.curvature is not None:
            matrices = np.zeros((1, 1, 1))  # no rows have another sign
        if not (least_eigenvalue(matrices) >= -IMPOSSIBLE).all() or (np.einsum("kpp->kp", matrices) < 0).any():
            reader.refuse("has sums of products that no rows have")
        if (self.n_samples * self.column_squares < (1 - IMPOSSIBLE) * self.column_sums**2).any():
            reader.refuse("has column_squares that are too small for its column_sums")


def _parts_of(reader: Reader, p: int, folds: int, *, location: bool) -> tuple[Index, Array, Array, Array]:
    """Rows, values, gradients and matrices of each fold, and of the single row that may come last."""
    parts = reader.take("folds")
    if not isinstance(parts, Sequence) or len(parts) not in (folds, folds + 1):
        reader.refuse(f"needs sums for {folds} folds")
    count, value = np.zeros(folds + 1, dtype=np.int64), np.zeros(folds + 1)
    gradient, matrix = np.zeros((folds + 1, p)), np.zeros((folds + 1, p, p))
    for k, part in enumerate(parts):
        own = Reader(part, f"{reader.what}, fold {k + 1},")
        count[k], value[k], gradient[k] = own.whole("rows"), own.number("value"), own.numbers("gradient", p)
        matrix[k] = own.symmetric("products" if location else "hessian", p)
        own.done()
    return count, value, gradient, matrix


def _one_part(reader: Reader, folds: int, curvature: Curvature) -> tuple[Index, Array, Array, Array]:
    """The same of a short message, whose rows are in no fold."""
    parts = reader.take("folds")
    if not isinstance(parts, Sequence) or len(parts) != 1:
        reader.refuse("is a short one, and needs sums over all rows only")
    own = Reader(parts[0], f"{reader.what}, sums over all rows,")
    count, value, gradient = own.whole("rows"), own.number("value"), own.numbers("gradient", len(curvature.diagonal))
    own.done()
    sums = np.asarray(count, dtype=np.int64), np.asarray(value), gradient, curvature.dense()
    rows, *others = (_in_last(folds, one) for one in sums)
    return rows, others[0], others[1], others[2]


def _in_last(folds: int, sums: AnyArray) -> AnyArray:
    """Sums over all rows as those of rows that are in none of the folds."""
    out = np.zeros((folds + 1, *sums.shape), dtype=sums.dtype)
    out[-1] = sums
    return out


@dataclass(frozen=True, eq=False)
class Query:
    """What the organiser asks a site: the loss and its derivatives at a point, and how far that is from balance.

    Attributes
    ----------
    site : str (or any id of a site)
    round : int
        From 2 on; the first round is the summary that nobody asked for.
    theta : array (p,)
        The point.
    balance : array (p,)
        What the neighbours pull: at the solution it is minus the gradient of the site's mean loss.
    radius : float
        Of a ball that holds the solution; it matters where the rows do not show all directions.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.core import Query
    >>> ask = Query("north", 2, np.array([0.5]), np.array([-0.1]), 10.0)
    >>> Query.from_plain(ask.to_plain()).theta
    array([0.5])
    """

    site: Hashable
    round: int
    theta: Array = field(repr=False)
    balance: Array = field(repr=False)
    radius: float = np.inf

    def described(self) -> list[Disclosure]:
        """Every number of the question, in plain words."""
        balance = "what the neighbours pull at this site"
        radius = "how large the parameters can be at most"
        return [
            Disclosure(
                "theta",
                "the parameters to be looked at",
                "what all sites together think of this one.",
                self.theta.tolist(),
            ),
            Disclosure("balance", balance, "how much the neighbours disagree with this site.", self.balance.tolist()),
            Disclosure("radius", radius, "nothing about rows.", self.radius),
        ]

    def to_plain(self) -> dict[str, Any]:
        """Plain numbers and names, as a file holds them."""
        if not isinstance(self.site, str):
            raise DataError(f"a site that reads files needs a name, but this one is called {self.site!r}")
        radius = self.radius if np.isfinite(self.radius) else INFINITE
        theta, balance = self.theta.tolist(), self.balance.tolist()
        return {"site": self.site, "round": self.round, "theta": theta, "balance": balance, "radius": radius}

    @classmethod
    def from_plain(cls, plain: object) -> Query:
        """The question that `to_plain` wrote; raises `DataError` with what is wrong."""
        reader = Reader(plain, "the question")
        site = reader.text("site")
        reader.what = f"the question to site {site!r}"
        theta = reader.take("theta")
        if not isinstance(theta, Sequence) or isinstance(theta, str):
            reader.refuse("has no list of numbers in 'theta'")
        reader.left["theta"] = theta
        made = cls(
            site,
            reader.whole("round", least=2),
            reader.numbers("theta", len(theta)),
            reader.numbers("balance", len(theta)),
            reader.number("radius", infinite=True),
        )
        reader.done()
        if not made.radius > 0:
            reader.refuse(f"has the radius {made.radius:g}, expected a positive number")
        return made
