"""Numbers that sampler and results share; light to import."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

import numpy as np

from fedkin._base import Index, Mask

#: Shares of the spread between sites that may be inside groups: 0 is groups alone, 1 no groups.
SHARES = np.array([0.0, 0.03, 0.1, 0.3, 0.6, 1.0])
#: With more than this share of the spread inside groups these say little, whatever a graph says: a continuum.
CONTINUUM = 2 / 3
#: Chains' scores are bounds on the evidence, not evidences: differences count a quarter.
TEMPER = 4.0
#: With a weight of the mixed model above this there are no groups.
ALL_MIXED = 0.999
#: From this many sites on, groups are drawn once per sweep instead of being integrated out.
MANY_SITES = 300
#: From this many sites on, groups also split and merge as a whole; moves of single sites do for small ones.
WHOLE_GROUPS = 100
#: R-hat up to which chains agree, and up to which they nearly do.
AGREE, NEARLY = 1.05, 1.2
#: Sites times squares of directions times sweeps that chains which disagree may take, and the most sweeps they keep.
MOST_WORK, MOST_SWEEPS = 2e6, 300
#: Up to this many sites the probabilities of all pairs are kept.
MOST_PAIRS = 3000


def are_kin(share: Index | int, groups: Index | int) -> Mask:
    """Whether members of a group are kin, given the number of the share of the spread inside groups, and of groups.

    Not with one group that has a spread inside, nor where less than a third of what differs is between groups.
    """
    return np.asarray((np.asarray(share) == 0) | ((np.asarray(groups) > 1) & (SHARES[share] <= CONTINUUM)))


class Given(NamedTuple):
    """Groups ``z (V,)`` that somebody suggests; of fine ones those that are alike are to be merged."""

    z: Index
    fine: bool


@dataclass(frozen=True)
class Sampling:
    """How long to sample.

    Attributes
    ----------
    scout : int
        Sweeps of the chain from each start, and of those that are asked whether spreads are alike.
    burn, keep : int
        Sweeps of the chains that go on from the best scouts, before and after the first that is kept.
    chains : int
        How many go on.
    given : Given or None
        Groups to start a chain from beside those that are found.
    longer : bool
        Whether they go on for longer where they disagree.
    """

    scout: int = 16
    burn: int = 20
    keep: int = 70
    chains: int = 3
    given: Given | None = None
    longer: bool = False

    @classmethod
    def of(cls, V: int, sweeps: int | None, chains: int) -> Sampling:
        """For V sites: many of them leave little open, so that fewer sweeps do."""
        usual = cls() if V < MANY_SITES else cls(scout=8, burn=10, keep=30)
        if sweeps is None:
            return replace(usual, chains=chains, longer=chains > 1)
        # short chains have short beginnings
        return cls(min(usual.scout, max(6, sweeps // 3)), min(usual.burn, max(6, sweeps // 3)), sweeps, chains)

    def brief(self) -> Sampling:
        """For estimates from which one goes on."""
        return replace(Sampling.of(0, min(self.keep, QUICK["sweeps"]), self.chains), given=self.given)

    def again(self, V: int, d: int) -> Sampling | None:
        """Twice as long without a beginning, for chains that disagree about d coefficients; None where it is enough."""
        work = self.keep * 2 * V * d**2
        if not self.longer or work > MOST_WORK or 2 * self.keep > MOST_SWEEPS:
            return None
        return replace(self, burn=0, keep=2 * self.keep)


class Length(TypedDict, total=False):
    """How long `find_kin` samples."""

    sweeps: int
    chains: int


#: What `find_kin` takes where only predictions are wanted.
QUICK: Length = {"sweeps": 24, "chains": 2}
