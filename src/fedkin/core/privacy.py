"""`Privacy`: what is promised about noisy sums, and how noisy they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedkin._base import Array
from fedkin.core.plain import Reader


@dataclass(frozen=True, eq=False)
class Privacy:
    """Differential privacy of one message: replacing one row changes the odds of any message by ``exp(epsilon)``.

    Attributes
    ----------
    epsilon, delta : float
        The promise, except with probability ``delta``.
    bound : float
        L2 bound on a row in units of its limits; longer rows are shortened.
    limits : array (q + 1,)
        Bounds on the absolute values of the q columns and of the target; larger ones are cut. (Of the q columns, and a
        last 1 for the constant, for the mean loss.)
    noise : float
        Standard deviation of the Gaussian noise on every sum of products of two columns, fold by fold, in units of the
        columns' limits.
    """

    epsilon: float
    delta: float
    bound: float
    limits: Array = field(repr=False)
    noise: float

    def to_plain(self) -> dict[str, Any]:
        """Plain numbers, as a file holds them."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "bound": self.bound,
            "limits": self.limits.tolist(),
            "noise": self.noise,
        }

    @classmethod
    def from_plain(cls, plain: object, columns: int, what: str) -> Privacy:
        """What `to_plain` wrote about sums of that many columns; ``what`` begins errors."""
        reader = Reader(plain, f"{what}, entry 'privacy',")
        made = cls(
            reader.number("epsilon"),
            reader.number("delta"),
            reader.number("bound"),
            reader.numbers("limits", columns + 1),
            reader.number("noise"),
        )
        reader.done()
        if min(made.epsilon, made.delta, made.bound, made.noise, float(made.limits.min())) <= 0:
            reader.refuse("has a number that is not positive")
        return made
