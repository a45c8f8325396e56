"""How the rows of sites are cut into parts: held-out rows and folds, at random or in the order of time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from fedkin._base import Index, Mask
from fedkin.data.checks import shuffled_ranks, stable_hash
from fedkin.errors import ParameterError


def held_out_rows(
    sites: Sequence[Hashable], sizes: Index, test_size: float, seed: int, *, ordered: bool = False
) -> Mask:
    """Which stacked rows are held out: ``round(test_size * n)`` of a site's n, but never all; the last if ordered."""
    if not 0 < test_size < 1:
        raise ParameterError(f"test_size must be between 0 and 1, got {test_size!r}")
    each = zip(sites, sizes.tolist(), strict=True)
    ranks = [np.arange(n)[::-1] if ordered else shuffled_ranks(site, n, seed, "split") for site, n in each]
    held_out = np.where(sizes >= 2, np.clip(np.rint(test_size * sizes), 1, np.maximum(sizes - 1, 1)), 0)
    return np.asarray(np.concatenate(ranks) < np.repeat(held_out, sizes))


def fold_numbers(sites: Sequence[Hashable], sizes: Index, k: int, seed: int, *, ordered: bool = False) -> Index:
    """Fold 0..k-1 of each stacked row, cut within sites."""
    if not 2 <= k <= sizes.sum():
        raise ParameterError(f"the number of folds must be from 2 to the {sizes.sum()} rows, got {k!r}")
    each = zip(sites, sizes.tolist(), strict=True)
    return np.concatenate([block_folds(n, k) if ordered else deal_folds(site, n, k, seed) for site, n in each])


def deal_folds(site: Hashable, n: int, k: int, seed: int) -> Index:
    """Fold ``(n,)`` of each of a site's n rows; its id and the seed decide, whoever the other sites are.

    Shuffled rows are dealt to the k folds like cards, from a fold on that also depends on seed and site.
    """
    first = stable_hash(f"first fold, seed {seed}", site) % k
    return np.asarray((first + shuffled_ranks(site, n, seed, "folds")) % k, dtype=np.int64)


def block_folds(n: int, k: int) -> Index:
    """Fold ``(n,)`` of each of n rows in the order of time: k blocks, the earliest first.

    Examples
    --------
    >>> block_folds(7, 3)
    array([0, 0, 0, 1, 1, 2, 2])
    """
    return np.repeat(np.arange(k), [len(part) for part in np.array_split(np.arange(n), k)])
