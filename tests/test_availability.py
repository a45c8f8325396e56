"""Sites that come and go: the patterns, the weighting, and two placements with one trajectory."""

from __future__ import annotations

import networkx
import numpy as np
import pytest

from builders import design_problem
from fedkin.admm import Availability, LocalShards, RunPlan, StepRule, fed_admm, site_rows
from fedkin.core import Problem
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from fedkin.graph import Graph
from fedkin.solvers import solve

# --- patterns ---


def test_presence_depends_on_seed_site_and_round_only():
    whole = Availability.bernoulli(0.5).bind(["a", "b", "c"], seed=4)
    together = whole.rounds(1, 50)[0]
    pieces = Availability.bernoulli(0.5).bind(["c", "a"], seed=4)
    parts = np.concatenate([pieces.rounds(1, 20)[0], pieces.rounds(21, 30)[0]])
    assert np.array_equal(parts, together[:, [2, 0]])
    assert not np.array_equal(together, Availability.bernoulli(0.5).bind(["a", "b", "c"], seed=5).rounds(1, 50)[0])


def test_blocks_fail_together_with_their_own_shares():
    labels = {"a": "north", "b": "north", "c": "south", "d": "north"}
    p = {"a": 0.6, "b": 0.6, "c": 0.6, "d": 0.3}
    available, _ = Availability.bernoulli(p, blocks=labels).bind(list("abcd"), seed=0).rounds(1, 20_000)
    assert np.array_equal(available[:, 0], available[:, 1])
    assert (available[:, 3] <= available[:, 0]).all()
    assert abs(np.corrcoef(available[:, 0], available[:, 2])[0, 1]) < 0.03
    assert np.abs(available.mean(axis=0) - [0.6, 0.6, 0.6, 0.3]).max() < 0.02


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
    with pytest.raises(ParameterError, match="has 30 rounds, but round 31 was asked for"):
        Availability.recorded(csv).bind(["a", "b", "c"], seed=0).rounds(30, 2)


def test_bad_input(tmp_path):
    def file(name, text):
        path = tmp_path / name
        path.write_text(text)
        return path

    for p, message in [
        ({"a": 0.0, "b": 1.0}, "p of site 'a' is 0"),
        ([0.5, 1.5], "p of site 'b' is 1.5"),
        ([0.5, float("nan")], "p of site 'b' is nan"),
        ([0.5], "p has shape"),
        ({"a": 0.5}, "no p is given for site 'b'"),
    ]:
        with pytest.raises(ParameterError, match=message):
            Availability.bernoulli(p).bind(["a", "b"])
    with pytest.raises(UnknownSiteError, match="p names site 'z'"):
        Availability.bernoulli({"a": 0.5, "b": 0.5, "z": 0.5}).bind(["a", "b"])
    with pytest.raises(ParameterError, match="weighting must be one of"):
        Availability.bernoulli(0.5, weighting="guess")
    with pytest.raises(ParameterError, match="placement must be one of"):
        Availability.bernoulli(0.5, placement="cloud")
    with pytest.raises(ParameterError, match="blocks has 1 labels for 2"):
        Availability.bernoulli(0.5, blocks=[1]).bind(["a", "b"])
    with pytest.raises(UnknownSiteError, match="groups has no label for site 'b'"):
        Availability.adversarial(0.5, groups={"a": 1}).bind(["a", "b"])
    with pytest.raises(ParameterError, match="less than one round"):
        Availability.adversarial(0.01, period=10).bind(["a"])
    with pytest.raises(ParameterError, match="period must be"):
        Availability.adversarial(0.5, period=0).bind(["a"])
    with pytest.raises(DataError, match="line 3, site 'b': expected 0 or 1, got 'yes'"):
        Availability.recorded(file("t.csv", "a,b\n1,0\n0,yes\n"))
    with pytest.raises(DataError, match="line 2 has 1 cells, expected 2"):
        Availability.recorded(file("t.csv", "a,b\n1\n"))
    with pytest.raises(DataError, match="more than one column"):
        Availability.recorded(file("t.csv", "a,a\n1,1\n"))
    with pytest.raises(DataError, match="at least one round"):
        Availability.recorded(file("t.csv", "a,b\n"))
    with pytest.raises(DataError, match="cannot be read as CSV"):
        Availability.recorded(tmp_path / "missing.csv")
    with pytest.raises(DataError, match="cannot be read as NPZ"):
        Availability.recorded(file("t.npz", "no"))
    np.savez(tmp_path / "u.npz", presence=np.ones((2, 2)))
    with pytest.raises(DataError, match="no array 'available'; it holds presence"):
        Availability.recorded(tmp_path / "u.npz")
    with pytest.raises(DataError, match="only 0 and 1"):
        Availability.recorded([[0.5, 1.0]])
    with pytest.raises(UnknownSiteError, match="no column for site 'c'"):
        Availability.recorded(file("t.csv", "a,b\n1,0\n1,1\n")).bind(["a", "b", "c"])
    with pytest.raises(DataError, match="2 columns for 3 sites"):
        Availability.recorded([[1, 0]]).bind(["a", "b", "c"])
    with pytest.raises(ParameterError, match="site 'b' is never available in the trace: its p_i is 0"):
        Availability.recorded([[1, 0], [1, 0]]).bind(["a", "b"])


# --- in a run ---


def test_without_weighting_the_limit_would_be_wrong():
    # sites of very different reliability: dividing by p_i is what keeps their weights equal
    problem = design_problem()
    exact = solve(problem, 1e-10)
    unequal = np.where(np.arange(12) % 2, 1.0, 0.2)
    right = fed_admm(problem, 4000, 10, availability=Availability.bernoulli(unequal), reference=exact, backend="numba")

    plan_p = Availability.bernoulli(unequal)
    presence = plan_p.bind(problem.federation.sites, 0)
    available, _ = presence.rounds(1, 4000)
    plan = _plan(problem, 10)
    wrong = LocalShards(plan)
    wrong.run(1, 4000, available, np.ones((4000, 12)))
    error = ((wrong.gather("average") - exact.theta) ** 2).sum() / 12
    assert error > 3 * right.trace["distance"][-1]


def _plan(problem, batch):
    rows = site_rows(problem, batch)
    degree = problem.graph.degree.astype(float)
    steps = StepRule(np.full(problem.n_sites, 8.0), np.full(problem.n_sites, 0.4), 0.2 * degree)
    objective = problem.fused
    theta = np.zeros((problem.n_sites, problem.n_params))
    return RunPlan(
        np.arange(problem.n_sites), theta, problem.graph.edges, objective.edge_radius, objective.penalty, 0.2, steps,
        rows, sparsity=objective.sparsity, radius=problem.radius,
    )  # fmt: skip


@pytest.mark.parametrize("placement", ["central", "replicas"])
def test_what_travels_depends_on_who_steps_for_absent_sites(placement):
    g = networkx.disjoint_union(networkx.cycle_graph(5), networkx.star_graph(6))
    graph = Graph.from_indices(range(12), np.array([(max(e), min(e)) for e in g.edges]))
    problem = Problem(design_problem().federation, graph, lam=0.002)
    there = np.random.default_rng(0).random((60, 12)) < 0.5
    recorded = Availability.recorded(there, placement=placement)
    counted = fed_admm(problem, 60, 5, availability=recorded, record_every=60).trace["vectors"][-1]
    # theta and pull down, theta up; or to all others of the component
    assert counted == (3 * there.sum() if placement == "central" else (there @ np.array([4] * 5 + [6] * 7)).sum())
