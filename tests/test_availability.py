"""Who is there in a round, and which rows a site draws: by counting, uniform, and the same for any order of asking."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from builders import design_problem
from fedkin.admm import Availability, site_keys
from fedkin.admm.algorithm import fed_admm
from fedkin.admm.availability import PRESENCE, draw_batches, mix, round_states, uniforms
from fedkin.core import Problem
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from fedkin.graph import Graph


def test_presence_depends_on_seed_site_and_round_only():
    whole = Availability.bernoulli(0.5).bind(["a", "b", "c"], seed=4)
    together = whole.rounds(1, 50)[0]
    pieces = Availability.bernoulli(0.5).bind(["c", "a"], seed=4)
    parts = np.concatenate([pieces.rounds(1, 20)[0], pieces.rounds(21, 30)[0]])
    assert np.array_equal(parts, together[:, [2, 0]])
    assert not np.array_equal(together, Availability.bernoulli(0.5).bind(["a", "b", "c"], seed=5).rounds(1, 50)[0])


def test_estimated_shares_are_never_zero_and_become_right():
    presence = Availability.bernoulli(0.3, weighting="estimated").bind(range(50), seed=1)
    available, probability = presence.rounds(1, 4000)
    assert (probability > 0).all() and (probability[0] == 1).all()
    # after the first t - 1 rounds: (1 + rounds seen) / t
    assert np.allclose(probability[9], (1 + available[:9].sum(axis=0)) / 10)
    assert np.abs(probability[-1] - 0.3).max() < 0.05
    assert np.array_equal(presence.seen, available.sum(axis=0))


def test_adversarial_groups_never_meet():
    available, probability = Availability.adversarial(0.5, period=10).bind(range(6), seed=0).rounds(1, 100)
    assert (probability == 0.5).all() and (available.mean(axis=0) == 0.5).all()
    assert not (available[:, 0] & available[:, 1]).any()
    runs = np.diff(np.flatnonzero(np.diff(available[:, 0].astype(int))))
    assert (runs == 5).all()


def test_recorded_traces(tmp_path):
    values = np.random.default_rng(0).random((30, 3)) < 0.6
    csv = tmp_path / "trace.csv"
    lines = ["round,c,a,b", *(f"{t},{int(v[2])},{int(v[0])},{int(v[1])}" for t, v in enumerate(values))]
    csv.write_text("\n".join(lines) + "\n")
    npz, unnamed = tmp_path / "trace.npz", tmp_path / "unnamed.npz"
    np.savez(npz, available=values[:, ::-1], sites=np.array(["c", "b", "a"]))
    np.savez(unnamed, available=values)
    for source in (csv, npz, unnamed, values, str(csv)):
        available, probability = Availability.recorded(source).bind(["a", "b", "c"], seed=0).rounds(1, 30)
        assert np.array_equal(available, values)
        assert np.allclose(probability[0], values.mean(axis=0))
    repeated = Availability.recorded(csv, repeat=True).bind(["a", "b", "c"], seed=0).rounds(1, 60)[0]
    assert np.array_equal(repeated[30:], values)
    with pytest.raises(ParameterError, match="has 30 rounds, but round 31 was requested"):
        Availability.recorded(csv).bind(["a", "b", "c"], seed=0).rounds(30, 2)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (lambda: Availability.bernoulli({"a": 0.0, "b": 1.0}), "p of site 'a' is 0"),
        (lambda: Availability.bernoulli([0.5, 1.5]), "p of site 'b' is 1.5"),
        (lambda: Availability.bernoulli([0.5, float("nan")]), "p of site 'b' is nan"),
        (lambda: Availability.bernoulli([0.5]), "p has shape"),
        (lambda: Availability.bernoulli({"a": 0.5}), "no p is given for site 'b'"),
        (lambda: Availability.bernoulli({"a": 0.5, "b": 0.5, "z": 0.5}), "p names site 'z'"),
        (lambda: Availability.bernoulli(0.5, weighting="guess"), "weighting must be one of"),
        (lambda: Availability.bernoulli(0.5, placement="cloud"), "placement must be one of"),
        (lambda: Availability.bernoulli(0.5, blocks=[1]), "blocks has 1 labels for 2"),
        (lambda: Availability.adversarial(0.5, groups={"a": 1}), "groups has no label for site 'b'"),
        (lambda: Availability.adversarial(0.01, period=10), "less than one round"),
        (lambda: Availability.adversarial(0.5, period=0), "period must be"),
        (lambda: Availability.recorded([[0.5, 1.0]]), "only 0 and 1"),
        (lambda: Availability.recorded([[1, 0, 1]]), "3 columns for 2 sites"),
        (lambda: Availability.recorded([[1, 0], [1, 0]]), "site 'b' is never available in the trace: its p_i is 0"),
    ],
)
def test_patterns_that_make_no_sense_are_refused(pattern, message):
    with pytest.raises((DataError, ParameterError, UnknownSiteError), match=message):
        pattern().bind(["a", "b"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "a,b\n1,0\n0,yes\n", "row 2 of site 'b': expected 0 or 1, got 'yes'"),
        ("t.csv", "a,b\n1\n", "line 2: 1 cell, but the header has 2"),
        ("t.csv", "a,a\n1,1\n", "several columns are called 'a'"),
        ("t.csv", "a,b\n", "at least one round"),
        ("t.csv", "a,c\n1,0\n1,1\n", "no column for site 'b'"),
        ("t.npz", "no", "cannot be read as NPZ"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises((DataError, UnknownSiteError), match=message):
        Availability.recorded(tmp_path / name).bind(["a", "b"])


@pytest.mark.parametrize("placement", ["central", "replicas"])
def test_what_travels_depends_on_who_steps_for_absent_sites(placement):
    ring_and_star = [(u, (u + 1) % 5) for u in range(5)] + [(5, u) for u in range(6, 12)]
    graph = Graph.from_indices(range(12), ring_and_star)
    problem = Problem(design_problem().federation, graph, lam=0.002)
    there = np.random.default_rng(0).random((60, 12)) < 0.5
    recorded = Availability.recorded(there, placement=placement)
    counted = fed_admm(problem, 60, 5, availability=recorded, record_every=60).trace["vectors"][-1]
    # theta and pull down, theta up; or to all others of the component
    assert counted == (3 * there.sum() if placement == "central" else (there @ np.array([4] * 5 + [6] * 7)).sum())


# --- batches


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
    st.lists(st.integers(3, 90), min_size=1, max_size=8), st.integers(0, 2**63 - 1), st.integers(0, 10**12), st.data()
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


def test_keys_depend_on_the_id_alone():
    assert np.array_equal(site_keys([3, "a", ("x", 1)])[1:], site_keys(["a", ("x", 1)]))
    assert site_keys([1])[0] != site_keys(["1"])[0]
    assert site_keys([np.int64(7)])[0] == site_keys([7])[0]
    assert len(set(site_keys(range(-5, 10_000)).tolist())) == 10_005
