"""Draw site availability and batches with a counter-based random generator.

What site u draws in round t depends only on (seed, site, round). There is no generator state: SplitMix64 mixes the
three numbers into a 64-bit state, and the draws of that round are the SplitMix64 sequence from there. So results do not
depend on the number of processes, on the host of a site, or on the order of work.

Algorithm 2 divides the gradient of an available site by its availability probability ``p_i``; an absent site takes only
the penalty part of its step.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkin._base import Array, Index, Mask, check_choice
from fedkin.data import read_cells
from fedkin.errors import DataError, ParameterError, UnknownSiteError

Weighting = Literal["known", "estimated"]
#: Where steps of absent sites are computed: on a central machine, or in replicas on all other sites.
StandIns = Literal["central", "replicas"]
SiteProbabilities = float | Mapping[Any, float] | Sequence[float] | Array
Labels = Mapping[Any, Hashable] | Sequence[Hashable]
#: Presence ``(R, V)`` in the given rounds ``(R,)``.
Draw = Callable[[Index], Mask]
#: Long-run availability ``(V,)`` of some sites, the presence rule, and the facts it depends on.
Bound = tuple[Array, Draw, tuple[object, ...]]
#: Builds such a rule from sites and seed.
Pattern = Callable[[Sequence[Hashable], int], Bound]


@dataclass(frozen=True, eq=False)
class Availability:
    """Availability pattern of the sites over the rounds.

    Create one with `bernoulli`, `recorded` or `adversarial`.

    Attributes
    ----------
    pattern : callable
        Builds the presence rule from sites and seed.
    weighting : "known" or "estimated"
        Whether gradients are divided by the true ``p_i`` or by the share of rounds so far in which the site was seen,
        ``p_i(t) = (1 + rounds seen before t) / t``, which is never 0.
    placement : "central" or "replicas"
        Where the steps of absent sites are computed: on a central machine, or in replicas on all sites. The trajectory
        is the same, but the communication differs.
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
        p: SiteProbabilities,
        *,
        blocks: Labels | None = None,
        weighting: Weighting = "known",
        placement: StandIns = "central",
    ) -> Availability:
        """Make site i available with probability ``p_i``, independently in every round.

        Parameters
        ----------
        p : float, mapping {site: float} or array (V,)
            Greater than 0, at most 1.
        blocks : mapping {site: label} or sequence of V labels, optional
            Sites of a block fail together: with equal ``p_i`` they are available in the same rounds; with unequal ones
            the less reliable site is available only when the more reliable one is. Independent sites by default.
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

        def bind(sites: Sequence[Hashable], seed: int) -> Bound:
            share = _per_site(p, sites)
            keys = site_keys(sites if blocks is None else _labels(blocks, sites, "blocks"))
            return share, lambda rounds: uniforms(round_states(keys, seed, rounds, PRESENCE)) < share, (keys, seed)

        return cls(bind, weighting, placement)

    @classmethod
    def recorded(
        cls,
        trace: str | os.PathLike[str] | ArrayLike,
        *,
        repeat: bool = False,
        weighting: Weighting = "known",
        placement: StandIns = "central",
    ) -> Availability:
        """Replay a recorded availability trace.

        Parameters
        ----------
        trace : path or array (T, V)
            A CSV file with a column of 0 and 1 for each site, named in the first line (a column ``round`` is ignored);
            an NPZ file with ``available (T, V)`` and, optionally, ``sites (V,)``; or an array in the federation's order
            of sites.
        repeat : bool
            Whether to repeat the trace at its end; otherwise a run of more than T rounds is refused.
        weighting, placement
            See `Availability`. Known probabilities are the shares of each column.

        Examples
        --------
        >>> from fedkin import Availability
        >>> presence = Availability.recorded([[1, 0], [1, 1]], repeat=True).bind("ab", seed=0)
        >>> presence.rounds(1, 3)[0].astype(int).tolist()
        [[1, 0], [1, 1], [1, 0]]
        """
        names, source = None, "the trace"
        if isinstance(trace, str | os.PathLike):
            path, source = Path(trace), str(Path(trace))
            values, names = _read_npz(path) if path.suffix == ".npz" else _read_csv(path)
        else:
            values = _zero_one(np.asarray(trace), source)

        def bind(sites: Sequence[Hashable], seed: int) -> Bound:
            available, length = values, values.shape[0]
            if names is not None:
                column = {name: k for k, name in enumerate(names)}
                if missing := [site for site in sites if str(site) not in column]:
                    raise UnknownSiteError(f"{source} has no column for site {missing[0]!r}; add one for every site")
                available = values[:, [column[str(site)] for site in sites]]
            elif values.shape[1] != len(sites):
                raise DataError(f"{source} has {values.shape[1]} columns for {len(sites)} sites")
            share = available.mean(axis=0)
            if (share == 0).any():
                raise ParameterError(
                    f"site {sites[int(np.argmin(share))]!r} is never available in {source}: its p_i is 0 and its data "
                    "cannot be weighted; leave the site out"
                )

            def draw(rounds: Index) -> Mask:
                if not repeat and rounds[-1] > length:
                    raise ParameterError(
                        f"{source} has {length} rounds, but round {rounds[-1]} was requested; "
                        "run fewer rounds, or use Availability.recorded(..., repeat=True)"
                    )
                return np.asarray(available[(rounds - 1) % length])

            return share, draw, (available, repeat, source)

        return cls(bind, weighting, placement)

    @classmethod
    def adversarial(
        cls,
        p: float = 0.5,
        *,
        period: int = 20,
        groups: Labels | None = None,
        weighting: Weighting = "known",
        placement: StandIns = "central",
    ) -> Availability:
        """Make groups unavailable in turn for many rounds, a pattern that violates the theorem's assumptions.

        Parameters
        ----------
        p : float
            Share of rounds in which a site is available, ``round(p * period)`` consecutive rounds per period.
        period : int
            Number of rounds after which the pattern repeats.
        groups : mapping {site: label} or sequence of V labels, optional
            Groups; each becomes available when the previous one stops. By default two groups, even and odd positions.
        weighting, placement
            See `Availability`.

        Examples
        --------
        >>> from fedkin import Availability
        >>> presence = Availability.adversarial(0.5, period=4).bind("ab", seed=0)
        >>> presence.rounds(1, 4)[0].astype(int).tolist()
        [[1, 0], [1, 0], [0, 1], [0, 1]]
        """

        def bind(sites: Sequence[Hashable], seed: int) -> Bound:
            if not isinstance(period, int | np.integer) or period < 1:
                raise ParameterError(f"period must be a whole number of at least 1, got {period!r}")
            length = round(float(_per_site(p, sites)[0]) * period)
            if length < 1:
                raise ParameterError(f"p={p!r} of a period of {period} is less than one round; raise either")
            labels = [k % 2 for k in range(len(sites))] if groups is None else _labels(groups, sites, "groups")
            number: dict[Hashable, int] = {}
            shift = np.array([number.setdefault(label, len(number)) for label in labels]) * length

            def draw(rounds: Index) -> Mask:
                return np.asarray((rounds[:, None] - 1 - shift) % period < length, dtype=np.bool_)

            return np.full(len(sites), length / period), draw, (shift, length, int(period))

        return cls(bind, weighting, placement)

    def bind(self, sites: Sequence[Hashable], seed: int = 0) -> Presence:
        """Return the presence of these sites in a run with this seed."""
        return Presence(*self.pattern(sites, seed), self.weighting == "estimated")


class Presence:
    """Presence of sites by round, with the probabilities to divide by.

    ``probability (V,)`` is the long-run share of rounds with a site. ``seen (V,)``, the number of rounds in which each
    site was available, is the only state. ``facts`` identify the pattern, for comparison with a checkpoint.
    """

    def __init__(self, probability: Array, draw: Draw, facts: tuple[object, ...], estimated: bool) -> None:
        self.probability, self._draw, self.estimated = probability, draw, estimated
        self.facts = (estimated, probability, *facts)
        self.seen = np.zeros(probability.size, dtype=np.int64)

    def rounds(self, first: int, count: int) -> tuple[Mask, Array]:
        """Return presence and probability, both ``(count, V)``, from round ``first``; ask for each round once."""
        numbers = np.arange(first, first + count)
        available = self._draw(numbers)
        before = self.seen + np.cumsum(available, axis=0) - available
        self.seen = self.seen + available.sum(axis=0)
        if self.estimated:
            return available, (1.0 + before) / numbers[:, None]
        return available, np.broadcast_to(self.probability, available.shape).copy()


def _per_site(p: SiteProbabilities, sites: Sequence[Hashable]) -> Array:
    if isinstance(p, Mapping):
        if unknown := [site for site in p if site not in set(sites)]:
            raise UnknownSiteError(f"p names site {unknown[0]!r}, which the federation does not have")
        if missing := [site for site in sites if site not in p]:
            raise ParameterError(f"no p is given for site {missing[0]!r}; name every site, or give one number")
        values = np.array([float(p[site]) for site in sites])
    else:
        given = np.asarray(p, dtype=np.float64)
        if given.ndim > 1 or (given.ndim == 1 and given.size != len(sites)):
            raise ParameterError(f"p has shape {given.shape}, expected a number or one for each of {len(sites)} sites")
        values = np.broadcast_to(given, (len(sites),)).copy()
    bad = ~((values > 0) & (values <= 1))
    if bad.any():
        raise ParameterError(
            f"the availability p of site {sites[int(np.argmax(bad))]!r} is {float(values[bad][0])!r}, expected a "
            "number above 0 and at most 1; a site that is never available cannot be weighted: remove it"
        )
    return values


def _labels(labels: Labels, sites: Sequence[Hashable], what: str) -> list[Hashable]:
    if isinstance(labels, Mapping):
        if missing := [site for site in sites if site not in labels]:
            raise UnknownSiteError(f"{what} has no label for site {missing[0]!r}")
        return [labels[site] for site in sites]
    if len(labels) != len(sites):
        raise ParameterError(f"{what} has {len(labels)} labels for {len(sites)} sites; give one per site")
    return list(labels)


def _zero_one(values: NDArray[Any], source: str) -> Mask:
    if values.ndim != 2 or values.size == 0:
        raise DataError(f"{source} has shape {values.shape}, expected rounds x sites, at least one of each")
    if values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        raise DataError(f"{source} may hold only 0 and 1")
    return values.astype(np.bool_)


def _read_csv(path: Path) -> tuple[Mask, list[str]]:
    header, cells = read_cells(path)
    column = {name: cells[k] for k, name in enumerate(header) if name.lower() != "round"}
    for name, values in column.items():
        for row, cell in enumerate(values):
            if cell.strip() not in ("0", "1"):
                raise DataError(f"{path}: row {row + 1} of site {name!r}: expected 0 or 1, got {cell!r}")
    if not column or not cells[0]:
        raise DataError(f"{path}: expected a column for each site and at least one round")
    return np.array([[cell.strip() == "1" for cell in values] for values in column.values()]).T, list(column)


def _read_npz(path: Path) -> tuple[Mask, list[str] | None]:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read as NPZ: {error}") from None
    if "available" not in arrays:
        raise DataError(f"{path}: has no array 'available'; it holds {', '.join(arrays) or 'nothing'}")
    values = _zero_one(arrays["available"], str(path))
    names = [str(name) for name in arrays["sites"].tolist()] if "sites" in arrays else None
    if names is not None and len(names) != values.shape[1]:
        raise DataError(f"{path}: {len(names)} site names for {values.shape[1]} columns")
    return values, names


# --- draws by counting ---------------------------------------------------------------------------------------

Words = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32, _S11 = (np.uint64(bits) for bits in (27, 30, 31, 32, 11))

#: Streams that must not depend on each other get different purposes.
BATCHES, PRESENCE = 1, 2

#: Floyd's algorithm compares every draw with the earlier ones; beyond this batch size sorting is cheaper.
FLOYD_LIMIT = 64


def mix(words: Words) -> Words:
    """Apply the SplitMix64 finaliser, a bijection of 64-bit words in which every input bit moves every output bit."""
    words = (words ^ (words >> _S30)) * _MULTIPLY_1
    words = (words ^ (words >> _S27)) * _MULTIPLY_2
    return words ^ (words >> _S31)


def site_keys(sites: Iterable[Hashable]) -> Words:
    """Return a 64-bit key for each site id, the same in every process and for every federation that has the site."""
    words = []
    for site in sites:
        if isinstance(site, int | np.integer) and not isinstance(site, bool):
            words.append(int(site) % 2**64)
        else:
            text = f"{type(site).__name__}:{site!r}"
            words.append(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))
    return mix(np.array(words, dtype=np.uint64) + GOLDEN)


def round_states(keys: Words, seed: int, rounds: NDArray[np.integer], purpose: int = BATCHES) -> Words:
    """Return the state of each site in each round, ``(R, B)``; the purpose is `BATCHES` or `PRESENCE`."""
    counter = (rounds.astype(np.uint64) * GOLDEN)[:, None]
    return mix(site_roots(keys, seed, purpose)[None, :] + counter)


def site_roots(keys: Words, seed: int, purpose: int = BATCHES) -> Words:
    """Return the part ``(B,)`` of `round_states` that does not depend on the round."""
    check_seed(seed)
    root = mix(np.array([seed], dtype=np.uint64) * GOLDEN + np.uint64(purpose))
    return mix(keys ^ root)


def uniforms(states: Words) -> Array:
    """Return a number in [0, 1) for each state, with 53 random bits."""
    return (mix(states + GOLDEN) >> _S11).astype(np.float64) * 2.0**-53


def draw_batches(states: Words, counts: Index, size: int) -> Index:
    """Draw rows without replacement, every subset equally likely: ``(R, B, size)`` from 0 to ``counts - 1``.

    ``size`` is at most ``counts.min()``; all rows in their order when it equals the count. Floyd's algorithm: for j = n
    - size, ..., n - 1 draw r from 0..j and take r, or j if r was taken before. A draw uses 32 bits, so probabilities
    are off by less than n / 2**32.
    """
    shape = (*states.shape, size)
    if (counts == size).all():
        return np.broadcast_to(np.arange(size), shape).copy()
    if size > FLOYD_LIMIT:
        return _draw_by_sorting(states, counts, size)
    chosen = np.empty(shape, dtype=np.int64)
    steps = np.arange(1, size + 1, dtype=np.uint64) * GOLDEN
    for k in range(size):
        last = counts - size + k
        high = mix(states + steps[k]) >> _S32
        drawn = ((high * (last + 1).astype(np.uint64)) >> _S32).astype(np.int64)
        taken = (chosen[..., :k] == drawn[..., None]).any(axis=-1)
        chosen[..., k] = np.where(taken, last, drawn)
    # sites that use all their rows use them in order, as elsewhere
    return np.where((counts == size)[:, None], np.arange(size), chosen)


def _draw_by_sorting(states: Words, counts: Index, size: int) -> Index:
    """Return the rows with the smallest of ``n`` random words; ties have probability below n**2 / 2**64."""
    chosen = np.empty((*states.shape, size), dtype=np.int64)
    for which, n in enumerate(counts.tolist()):
        if n == size:
            chosen[:, which] = np.arange(size)
        else:
            steps = np.arange(1, n + 1, dtype=np.uint64) * GOLDEN
            words = mix(states[:, which, None] + steps)
            chosen[:, which] = np.sort(np.argpartition(words, size - 1, axis=-1)[:, :size], axis=-1)
    return chosen


def check_seed(seed: int) -> None:
    """Raise `ParameterError` unless ``seed`` is a whole number from 0 to 2**63 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**63:
        raise ParameterError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}")
