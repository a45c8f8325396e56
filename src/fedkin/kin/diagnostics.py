"""How well chains have mixed: split R-hat and effective sample size (Gelman et al., Bayesian Data Analysis, ch. 11)."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array


def split_rhat(draws: Array, variance: Array | None = None) -> Array:
    """Potential scale reduction of chains cut in half; near 1 when they agree.

    Parameters
    ----------
    draws : array (chains, draws, ...)
        At least four draws of each chain.
    variance : array (...), optional
        Where draws are expectations given a part of the state: the variance of what they are expectations of. By
        default that of the draws.

    Returns
    -------
    array (...)
        1 where nothing varies.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin import split_rhat
    >>> bool(split_rhat(np.random.default_rng(0).normal(size=(4, 500))) < 1.01)
    True
    """
    halves = _split(draws)
    n = halves.shape[1]
    within = halves.var(axis=1, ddof=1).mean(axis=0) if variance is None else variance
    between = n * halves.mean(axis=1).var(axis=0, ddof=1)
    moving = within > 1e-12 * (1e-300 + np.abs(halves).max(axis=(0, 1)) ** 2)
    ratio = np.divide(between, within, out=np.zeros_like(within), where=moving)
    apart = ~moving & (between > 1e-12 * (1e-300 + np.abs(halves).max(axis=(0, 1)) ** 2))
    rhat = np.sqrt((n - 1 + ratio) / n)
    return np.asarray(np.where(moving, rhat, np.where(apart, np.inf, 1.0)))


def effective_size(draws: Array, variance: Array | None = None) -> Array:
    """Effective sample size of all chains together, by Geyer's initial monotone sequence on split chains.

    Parameters
    ----------
    draws : array (chains, draws, ...)
        At least four draws of each chain.
    variance : array (...), optional
        Where draws are expectations given a part of the state: the variance of what they are expectations of, whose
        mean is known better than from as many draws. The size is then at most the number of draws.

    Returns
    -------
    array (...)
        The number of draws where nothing varies.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin import effective_size
    >>> bool(1500 < effective_size(np.random.default_rng(0).normal(size=(4, 500))) < 2500)
    True
    """
    halves = _split(draws)
    m, n = halves.shape[:2]
    chains = halves.reshape(m, n, -1)
    total = float(m * n)
    centred = chains - chains.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, 2 * n, axis=1)
    power = (spectrum.real**2 + spectrum.imag**2).mean(axis=0)
    covariance = np.fft.irfft(power, 2 * n, axis=0)[:n] / n
    plus = covariance[0] + (chains.mean(axis=1).var(axis=0, ddof=1) if m > 1 else 0.0)
    still = np.ptp(chains, axis=(0, 1)) <= 1e-12 * (1e-300 + np.abs(chains).max(axis=(0, 1)))
    correlation = 1.0 - (covariance[0] * n / (n - 1) - covariance) / np.where(still, 1.0, plus)
    correlation[0] = 1.0
    # sums of neighbours are positive in theory, and fall: the rest is noise
    pairs = correlation[: 2 * (n // 2)].reshape(n // 2, 2, -1).sum(axis=1)[: max((n - 3) // 2, 1)]
    kept = np.logical_and.accumulate(pairs > 0, axis=0)
    last = np.minimum(2 * kept.sum(axis=0), n - 1)
    time = -1.0 + 2.0 * (np.minimum.accumulate(pairs, axis=0) * kept).sum(axis=0)
    time = time + np.maximum(correlation[last, np.arange(len(last))], 0.0)
    sizes = total / np.maximum(time, 1.0 / np.log10(total))
    if variance is not None:
        spread = np.where(still, 1.0, covariance[0] * n / (n - 1) + chains.mean(axis=1).var(axis=0))
        sizes = np.minimum(sizes * np.maximum(variance.ravel() / spread, 1.0), total)
    return np.asarray(np.where(still, total, sizes).reshape(halves.shape[2:]))


def _split(draws: Array) -> Array:
    half = draws.shape[1] // 2
    return np.concatenate([draws[:, :half], draws[:, draws.shape[1] - half :]])
