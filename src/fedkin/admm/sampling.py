"""Randomness by counting: what site u draws in round t is a function of (seed, site, round) and of nothing else.

There is no generator to carry along. A 64-bit state is computed from the three numbers by the SplitMix64 mixing
function, and the draws of that round are the SplitMix64 sequence that starts there. So it does not matter how many
processes run, which of them hosts the site, or in which order they work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index
from fedkin.errors import ParameterError

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
