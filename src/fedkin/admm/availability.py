"""Randomness by counting: which sites are there in a round, and which rows they draw.

What site u draws in round t is a function of (seed, site, round) and of nothing else. There is no generator to carry
along: a 64-bit state is computed from the three numbers by the SplitMix64 mixing function, and the draws of that round
are the SplitMix64 sequence that starts there. So it does not matter how many processes run, which of them hosts the
site, or in which order they work.

Algorithm 2 divides the gradient of an available site by its probability ``p_i`` of being available; an absent
site gets only the penalty's part of its step.
"""

from __future__ import annotations

import csv
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
from fedkin.errors import DataError, ParameterError, UnknownSiteError

Weighting = Literal["known", "estimated"]
#: Who steps for absent sites: a central machine, or all others in their replicas.
StandIns = Literal["central", "replicas"]
PerSite = float | Mapping[Any, float] | Sequence[float] | Array
Labels = Mapping[Any, Hashable] | Sequence[Hashable]
#: Presence ``(R, V)`` in the given rounds ``(R,)``.
Draw = Callable[[Index], Mask]
#: Long-run shares ``(V,)`` of some sites, the rule that says who is there, and what it depends on.
Bound = tuple[Array, Draw, tuple[object, ...]]
#: Makes such a rule of sites and seed.
Pattern = Callable[[Sequence[Hashable], int], Bound]


@dataclass(frozen=True, eq=False)
class Availability:
    """Which sites are there in which round.

    Make one with `bernoulli`, `recorded` or `adversarial`.

    Attributes
    ----------
    pattern : callable
        Makes the rule that says who is there, of sites and seed.
    weighting : "known" or "estimated"
        Whether gradients are divided by the true ``p_i`` or by the share of rounds so far in which the site was seen,
        ``p_i(t) = (1 + rounds seen before t) / t``, which is never 0.
    placement : "central" or "replicas"
        Who takes the steps of absent sites: a central machine, or replicas on all sites. The trajectory is the
        same; what travels is not.

    Examples
    --------
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
        return cls(_bernoulli(p, blocks), weighting, placement)

    @classmethod
    def recorded(
        cls,
        trace: str | os.PathLike[str] | ArrayLike,
        *,
        repeat: bool = False,
        weighting: Weighting = "known",
        placement: StandIns = "central",
    ) -> Availability:
        """Repeat presence as it was once recorded.

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
        names, source = None, "the trace"
        if isinstance(trace, str | os.PathLike):
            path, source = Path(trace), str(Path(trace))
            values, names = _read_npz(path) if path.suffix == ".npz" else _read_csv(path)
        else:
            values = _zero_one(np.asarray(trace), source)
        return cls(_recorded(values, names, repeat, source), weighting, placement)

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
        """Silence groups for many rounds in turn, so that they hardly ever meet: what the theorem excludes.

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
        return cls(_bursts(p, period, groups), weighting, placement)

    def bind(self, sites: Sequence[Hashable], seed: int = 0) -> Presence:
        """Return the presence of these sites in a run with this seed."""
        return Presence(*self.pattern(sites, seed), self.weighting == "estimated")


class Presence:
    """Who is there, round after round, with the probability to divide by.

    ``probability (V,)`` is the long-run share of rounds; ``seen (V,)``, the rounds so far in which each site was there,
    is the only state. ``facts`` say which pattern it is, for a checkpoint to compare.
    """

    def __init__(self, probability: Array, draw: Draw, facts: tuple[object, ...], estimated: bool) -> None:
        self.probability, self._draw, self.estimated = probability, draw, estimated
        self.facts = (estimated, probability, *facts)
        self.seen = np.zeros(probability.size, dtype=np.int64)

    def rounds(self, first: int, count: int) -> tuple[Mask, Array]:
        """Return presence and probability, both ``(count, V)``, from round ``first`` on; ask for each round once."""
        numbers = np.arange(first, first + count)
        available = self._draw(numbers)
        before = self.seen + np.cumsum(available, axis=0) - available
        self.seen = self.seen + available.sum(axis=0)
        if self.estimated:
            return available, (1.0 + before) / numbers[:, None]
        return available, np.broadcast_to(self.probability, available.shape).copy()


def _bernoulli(p: PerSite, blocks: Labels | None) -> Pattern:
    def bind(sites: Sequence[Hashable], seed: int) -> Bound:
        share = _per_site(p, sites)
        keys = site_keys(sites if blocks is None else _labels(blocks, sites, "blocks"))
        return share, lambda rounds: uniforms(round_states(keys, seed, rounds, PRESENCE)) < share, (keys, seed)

    return bind


def _recorded(trace: Mask, names: list[str] | None, repeat: bool, source: str) -> Pattern:
    def bind(sites: Sequence[Hashable], seed: int) -> Bound:
        values, length = trace, trace.shape[0]
        if names is not None:
            column = {name: k for k, name in enumerate(names)}
            if missing := [site for site in sites if str(site) not in column]:
                raise UnknownSiteError(f"{source} has no column for site {missing[0]!r}; add one for every site")
            values = values[:, [column[str(site)] for site in sites]]
        elif values.shape[1] != len(sites):
            raise DataError(f"{source} has {values.shape[1]} columns for {len(sites)} sites")
        share = values.mean(axis=0)
        if (share == 0).any():
            raise ParameterError(
                f"site {sites[int(np.argmin(share))]!r} is never available in {source}: its p_i is 0 and its data "
                "cannot be weighted; leave the site out"
            )

        def draw(rounds: Index) -> Mask:
            if not repeat and rounds[-1] > length:
                raise ParameterError(
                    f"{source} has {length} rounds, but round {rounds[-1]} was asked for; "
                    "run fewer rounds, or use Availability.recorded(..., repeat=True)"
                )
            return np.asarray(values[(rounds - 1) % length])

        return share, draw, (values, repeat, source)

    return bind


def _bursts(p: float, period: int, groups: Labels | None) -> Pattern:
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

    return bind


def _per_site(p: PerSite, sites: Sequence[Hashable]) -> Array:
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
            "number above 0 and at most 1; a site that is never there cannot be weighted: leave it out"
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
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if line]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as CSV: {error}") from None
    if len(lines) < 2:
        raise DataError(f"{path}: expected a line of site names and at least one round, got {len(lines)} lines")
    names = [name.strip() for name in lines[0]]
    wanted = [k for k, name in enumerate(names) if name.lower() != "round"]
    if len({names[k] for k in wanted}) < len(wanted):
        raise DataError(f"{path}: a site has more than one column")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(names):
            raise DataError(f"{path}: line {number} has {len(line)} cells, expected {len(names)}")
        cells = {names[k]: line[k].strip() for k in wanted}
        for name, cell in cells.items():
            if cell not in ("0", "1"):
                raise DataError(f"{path}: line {number}, site {name!r}: expected 0 or 1, got {cell!r}")
        rows.append([cell == "1" for cell in cells.values()])
    return np.array(rows, dtype=np.bool_), [names[k] for k in wanted]


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

    ``size`` is at most ``counts.min()``; all rows in their order when it equals the count. Floyd's algorithm: for
    j = n - size, ..., n - 1 draw r from 0..j and take r, or j where r was taken before. A draw uses 32 bits, so
    probabilities are off by less than n / 2**32.
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
    # sites that give all their rows give them in order, like everywhere else
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
