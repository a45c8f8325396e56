"""Sites that come and go: the patterns, the weighting, and two placements with one trajectory."""

from __future__ import annotations

from dataclasses import replace

import networkx
import numpy as np
import pytest
from scipy import stats

from builders import design_problem
from fedkin.admm import Availability, LocalShards, RunPlan, Shard, StepRule, fed_admm, site_rows
from fedkin.admm.shard import node_update
from fedkin.core import Problem
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from fedkin.graph import Graph
from fedkin.solvers import solve

# --- patterns ---


def test_bernoulli_shares_and_independence():
    p = np.array([0.2, 0.5, 0.9, 1.0])
    available, probability = Availability.bernoulli(p).bind(range(4), seed=0).rounds(1, 20_000)
    counts = available.sum(axis=0)
    for k in range(3):
        assert stats.binomtest(int(counts[k]), 20_000, p[k]).pvalue > 1e-4
    assert counts[3] == 20_000 and (probability == p).all()
    assert abs(np.corrcoef(available[:, 0], available[:, 1])[0, 1]) < 0.03
    assert abs(np.corrcoef(available[1:, 1], available[:-1, 1])[0, 1]) < 0.03


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


@pytest.mark.parametrize(
    "availability",
    [
        Availability.bernoulli(np.linspace(0.3, 1.0, 12)),
        Availability.bernoulli(0.5, blocks=[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]),
        Availability.bernoulli(0.5, weighting="estimated"),
        Availability.adversarial(0.5, period=6),
        Availability.adversarial(0.5, period=6, weighting="estimated"),
        Availability.recorded(np.random.default_rng(0).random((50, 12)) < 0.7, repeat=True),
    ],
    ids=["unequal", "blocks", "estimated", "adversarial", "adversarial, estimated", "recorded"],
)
def test_converges_to_the_same_minimiser(availability):
    problem = design_problem()
    exact = solve(problem, 1e-10)
    found = fed_admm(problem, 6000, 10, availability=availability, reference=exact, backend="numba")
    assert found.trace["distance"][-1] < 2e-3 * (exact.theta**2).sum() / 12
    assert found.trace["distance"][-1] < 0.1 * found.trace["distance"][found.trace["n_iter"] >= 200][0]


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


@pytest.mark.parametrize("kind", ["random", "path", "disconnected"])
def test_central_machine_and_replicas_give_one_trajectory(kind):
    """Simulate both message patterns with the shard's own code, and count what travels."""
    g = {
        "random": networkx.gnp_random_graph(12, 0.3, seed=2),
        "path": networkx.path_graph(12),
        "disconnected": networkx.disjoint_union(networkx.cycle_graph(5), networkx.star_graph(6)),
    }[kind]
    graph = Graph.from_indices(range(12), np.array([(max(e), min(e)) for e in g.edges]))
    problem = Problem(design_problem().federation, graph, lam=0.002, sparsity=0.01)
    plan, rounds, p = _plan(problem, 5), 60, problem.n_params
    presence = Availability.bernoulli(0.5, weighting="estimated").bind(range(12), seed=3)
    available, probability = presence.rounds(1, rounds)
    together = LocalShards(plan)
    together.run(1, rounds, available, probability)

    own = [Shard(plan, np.array([u])).gradients for u in range(12)]

    def step_of(u, t, theta, pull):
        """What site u computes on its own machine from its theta and the pull of its edges."""
        chance = probability[t - 1, [u]]
        gradient = own[u](t, theta[None])
        steps = StepRule(plan.steps.start[[u]], plan.steps.growth[[u]], plan.steps.damping[[u]])
        direction = pull[None] + gradient / chance[:, None]
        return node_update(theta[None], direction, steps.eta(t, chance), plan.sparsity[[u]], plan.radius)[0]

    def without_rows(members):
        return Shard(replace(plan, rows=None), members)

    # a central machine S with all edge state; it takes the steps of absent sites itself
    centre, sent = without_rows(np.arange(12)), 0
    for t in range(1, rounds + 1):
        theta, pull = centre.theta.copy(), centre.pull()
        present = np.flatnonzero(available[t - 1])
        returned = np.array([step_of(u, t, theta[u], pull[u]) for u in present]).reshape(-1, p)
        sent += 3 * present.size  # theta and pull down, theta up
        nobody = np.zeros(12, dtype=bool)
        centre.node_step(t, nobody, probability[t - 1])
        centre.take(dict(zip(present.tolist(), returned, strict=True)))
        centre.edge_step()
    for name in ("theta", "average", "alpha"):
        assert np.array_equal(getattr(centre, name), together.gather(name)), name
    counted = fed_admm(problem, rounds, 5, seed=3, availability=Availability.bernoulli(0.5), record_every=rounds)
    assert counted.trace["vectors"][-1] == sent

    # no central machine: every site keeps a replica of its component, and takes absent sites' steps in it
    labels = graph.components()
    replicas = {u: without_rows(np.flatnonzero(labels == labels[u])) for u in range(12)}
    received = 0
    for t in range(1, rounds + 1):
        present = np.flatnonzero(available[t - 1])
        told = {}
        for u in present:
            here = np.flatnonzero(replicas[u].sites == u)[0]
            told[u] = step_of(u, t, replicas[u].theta[here], replicas[u].pull()[here])
        for replica in replicas.values():
            replica.node_step(t, np.zeros(replica.sites.size, dtype=bool), probability[t - 1, replica.sites])
            known = {u: told[u] for u in present.tolist() if u in replica.sites}
            received += len(known)
            replica.take(known)
            replica.edge_step()
        received -= present.size  # nobody sends to itself
    for u, replica in replicas.items():
        assert np.array_equal(replica.theta, together.gather("theta")[replica.sites]), u
        assert np.array_equal(replica.average, together.gather("average")[replica.sites])
    counted = fed_admm(
        problem, rounds, 5, seed=3, availability=Availability.bernoulli(0.5, placement="replicas"), record_every=rounds
    )
    assert counted.trace["vectors"][-1] == received
