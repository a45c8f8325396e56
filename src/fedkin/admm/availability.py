"""Sites that come and go: which of them are there in a round, and how likely that was.

Algorithm 2 divides the gradient of an available site by its probability ``p_i`` of being available; an absent
site gets only the penalty's part of its step. Like the batches, presence is drawn by counting
(`fedkin.admm.sampling`): it depends on the seed, the site and the round, not on who asks.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, Mask, check_choice
from fedkin.admm.patterns import Bernoulli, BoundPattern, Bursts, Pattern, PerSite, Recorded, read_recorded, zero_one

Weighting = Literal["known", "estimated"]
#: Who steps for absent sites: a central machine, or all others in their replicas.
StandIns = Literal["central", "replicas"]


@dataclass(frozen=True, eq=False)
class Availability:
    """Which sites are there in which round.

    Make one with `bernoulli`, `recorded` or `adversarial`.

    Attributes
    ----------
    pattern : Pattern
    weighting : "known" or "estimated"
        Whether gradients are divided by the true ``p_i`` or by the share of rounds so far in which the site was seen,
        ``p_i(t) = (1 + rounds seen before t) / t``, which is never 0.
    placement : "central" or "replicas"
        Who takes the steps of absent sites: a central machine, or replicas on all sites. The trajectory is the
        same; what travels is not.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin import Availability
    >>> presence = Availability.bernoulli({"a": 0.5, "b": 1.0}).bind(["a", "b"], seed=0)
    >>> available, probability = presence.rounds(1, 4)
    >>> available[:, 1].all(), probability[0].tolist()
    (np.True_, [0.5, 1.0])
    """

    pattern: Pattern
    weighting: Weighting = "known"
    placement: StandIns = "central"

    def __post_init__(self) -> None:
        check_choice("weighting", self.weighting, ("known", "estimated"))
        check_choice("placement", self.placement, ("central", "replicas"))

    @classmethod
    def bernoulli(
        cls,
        p: PerSite,
        *,
        blocks: Mapping[Any, Hashable] | Sequence[Hashable] | None = None,
        weighting: Weighting = "known",
        placement: StandIns = "central",
    ) -> Availability:
        """Site i is there with probability ``p_i``, independently in every round.

        Parameters
        ----------
        p : float, mapping {site: float} or array (V,)
            Greater than 0, at most 1.
        blocks : mapping {site: label} or sequence of V labels, optional
            Sites of a block fail together: with equal ``p_i`` they are there in the same rounds, and with unequal
            ones the less reliable is there only when the more reliable is. Independent sites by default.
        weighting, placement
            See `Availability`.

        Examples
        --------
        >>> from fedkin import Availability
        >>> presence = Availability.bernoulli(0.5, blocks=[0, 0, 1]).bind("abc", seed=3)
        >>> available, _ = presence.rounds(1, 100)
        >>> bool((available[:, 0] == available[:, 1]).all()), bool((available[:, 0] == available[:, 2]).all())
        (True, False)
        """
        return cls(Bernoulli(p, blocks), weighting, placement)

    @classmethod
    def recorded(
        cls,
        trace: str | os.PathLike[str] | ArrayLike,
        *,
        repeat: bool = False,
        weighting: Weighting = "known",
        placement: StandIns = "central",
    ) -> Availability:
        """Presence as it was once recorded.

        Parameters
        ----------
        trace : path or array (T, V)
            A CSV file with a column of 0 and 1 for each site, named in the first line (a column ``round`` is passed
            over); an NPZ file with ``available (T, V)`` and, optionally, ``sites (V,)``; or an array in the
            federation's order of sites.
        repeat : bool
            Whether to start again at the end; otherwise a run of more than T rounds is refused.
        weighting, placement
            See `Availability`. Known probabilities are the shares of each column.

        Examples
        --------
        >>> from fedkin import Availability
        >>> presence = Availability.recorded([[1, 0], [1, 1]], repeat=True).bind("ab", seed=0)
        >>> presence.rounds(1, 3)[0].astype(int).tolist()
        [[1, 0], [1, 1], [1, 0]]
        """
        if isinstance(trace, str | os.PathLike):
            path = Path(trace)
            values, names = read_recorded(path)
            return cls(Recorded(values, names, repeat, str(path)), weighting, placement)
        return cls(Recorded(zero_one(np.asarray(trace), "the trace"), None, repeat, "the trace"), weighting, placement)

    @classmethod
    def adversarial(
        cls,
        p: float = 0.5,
        *,
        period: int = 20,
        groups: Mapping[Any, Hashable] | Sequence[Hashable] | None = None,
        weighting: Weighting = "known",
        placement: StandIns = "central",
    ) -> Availability:
        """Silence in long runs, and groups that hardly ever meet: everything that the theorem's independence excludes.

        Parameters
        ----------
        p : float
            Share of rounds in which a site is there; each is there for ``round(p * period)`` rounds on end.
        period : int
            Rounds after which it starts again.
        groups : mapping {site: label} or sequence of V labels, optional
            Each group begins where the one before it ends. By default two groups, even and odd positions.
        weighting, placement
            See `Availability`.

        Examples
        --------
        >>> from fedkin import Availability
        >>> presence = Availability.adversarial(0.5, period=4).bind("ab", seed=0)
        >>> presence.rounds(1, 4)[0].astype(int).tolist()
        [[1, 0], [1, 0], [0, 1], [0, 1]]
        """
        return cls(Bursts(p, period, groups), weighting, placement)

    def bind(self, sites: Sequence[Hashable], seed: int = 0) -> Presence:
        """Presence of these sites in a run with this seed."""
        return Presence(self.pattern.bind(sites, seed), self.weighting == "estimated", len(sites))


class Presence:
    """Who is there, round after round, with the probability to divide by.

    ``seen (V,)``, the rounds so far in which each site was there, is the only state.
    """

    def __init__(self, pattern: BoundPattern, estimated: bool, n_sites: int) -> None:
        self.pattern, self.estimated = pattern, estimated
        self.seen = np.zeros(n_sites, dtype=np.int64)

    def rounds(self, first: int, count: int) -> tuple[Mask, Array]:
        """Presence and probability, both ``(count, V)``, in the ``count`` rounds from ``first`` on.

        Rounds are asked for in their order, each once.
        """
        numbers = np.arange(first, first + count)
        available = self.pattern.available(numbers)
        before = self.seen + np.cumsum(available, axis=0) - available
        self.seen = self.seen + available.sum(axis=0)
        if self.estimated:
            return available, (1.0 + before) / numbers[:, None]
        return available, np.broadcast_to(self.pattern.probability, available.shape).copy()
