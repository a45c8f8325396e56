"""Batches by counting: uniform, without replacement, and the same whoever asks."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedkin.admm import site_keys
from fedkin.admm.sampling import PRESENCE, draw_batches, mix, round_states, uniforms
from fedkin.errors import ParameterError


def states(n_sites: int, rounds: int, seed: int = 0, purpose: int = 1) -> np.ndarray:
    return round_states(site_keys(range(n_sites)), seed, np.arange(rounds), purpose)


def test_mix_is_splitmix64():
    # first outputs of SplitMix64 with seed 1234567 (Rosetta Code, Vigna's reference)
    golden = np.uint64(0x9E3779B97F4A7C15)
    sequence = mix(np.array([1234567], dtype=np.uint64) + np.arange(1, 6, dtype=np.uint64) * golden)
    assert sequence.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize(("n", "size"), [(5, 2), (6, 3), (4, 4), (7, 1)])
def test_every_subset_is_equally_likely(n, size):
    drawn = draw_batches(states(40, 500), np.full(40, n), size).reshape(-1, size)
    subsets = {subset: k for k, subset in enumerate(combinations(range(n), size))}
    counts = np.bincount([subsets[tuple(sorted(row))] for row in drawn.tolist()], minlength=len(subsets))
    if len(subsets) > 1:
        assert stats.chisquare(counts).pvalue > 1e-4


def test_large_batches_are_uniform_too():
    drawn = draw_batches(states(20, 100), np.full(20, 150), 100)
    counts = np.bincount(drawn.ravel(), minlength=150)
    assert np.array_equal(np.sort(drawn, axis=-1), drawn)
    assert (np.diff(drawn, axis=-1) > 0).all()
    # without replacement: the counts vary less than multinomial ones, by the factor 1 - 100/150
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum() / (1 - 100 / 150)
    assert stats.chi2.sf(statistic, 149) > 1e-4 < stats.chi2.cdf(statistic, 149)


def test_sites_rounds_and_purposes_are_independent():
    first, other = uniforms(states(300, 200)), uniforms(states(300, 200, purpose=PRESENCE))
    assert stats.kstest(first.ravel(), "uniform").pvalue > 1e-4
    size = first.size**-0.5
    for one, two in (
        (first[1:], first[:-1]),
        (first[:, 1:], first[:, :-1]),
        (first, other),
        (first, uniforms(states(300, 200, seed=1))),
    ):
        assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 5 * size
        table = np.histogram2d(one.ravel(), two.ravel(), bins=8, range=[[0, 1]] * 2)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(3, 90), min_size=1, max_size=8),
    st.integers(0, 2**63 - 1),
    st.integers(0, 10**12),
    st.data(),
)
def test_a_batch_depends_on_its_own_site_and_round_only(counts, seed, t, data):
    counts = np.array(counts)
    size = data.draw(st.integers(1, int(counts.min())))
    keys = site_keys([f"site {k}" for k in range(counts.size)])
    together = draw_batches(round_states(keys, seed, np.arange(t, t + 3)), counts, size)
    assert (together >= 0).all() and (together < counts[:, None]).all()
    assert all(len(set(row)) == size for row in together.reshape(-1, size).tolist())
    u = data.draw(st.integers(0, counts.size - 1))
    alone = draw_batches(round_states(keys[u : u + 1], seed, np.array([t + 1])), counts[u : u + 1], size)
    assert np.array_equal(alone[0, 0], together[1, u])


def test_all_rows_come_in_order():
    drawn = draw_batches(states(2, 3), np.array([4, 6]), 4)
    assert drawn[:, 0].tolist() == [[0, 1, 2, 3]] * 3
    assert not np.array_equal(drawn[:, 1], [[0, 1, 2, 3]] * 3)


def test_keys_depend_on_the_id_alone():
    assert np.array_equal(site_keys([3, "a", ("x", 1)])[1:], site_keys(["a", ("x", 1)]))
    assert site_keys([1])[0] != site_keys(["1"])[0]
    assert site_keys([np.int64(7)])[0] == site_keys([7])[0]
    assert len(set(site_keys(range(-5, 10_000)).tolist())) == 10_005


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, "0"])
def test_bad_seeds(seed):
    with pytest.raises(ParameterError, match="seed must be a whole number"):
        round_states(site_keys([0]), seed, np.arange(2))
