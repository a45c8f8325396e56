"""Rows that keep arriving: what they lead to, when it is enough, and changes that are noticed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedkin import Federation, Graph, Problem, fed_admm
from fedkin.admm import ChangeTest
from fedkin.errors import ChangeWarning, ConvergenceWarning, DataError, ParameterError, SolverError, UnknownSiteError

TRUTH = {"a": np.array([1.0, -1.0]), "b": np.array([1.0, -1.0]), "c": np.array([-2.0, 0.5])}


def samples(site, seed=0, change=None):
    """Samples without end; those of a site that changes have another first coefficient from that row on."""
    rng = np.random.default_rng([seed, ord(site)])
    for row in itertools.count():
        x = rng.normal(size=2)
        shift = 1.0 if change is not None and row >= change else 0.0
        yield x, x @ TRUTH[site] + shift * x[0] + 0.5 * rng.normal()


def streams(**changes):
    return {site: samples(site, 1, changes.get(site)) for site in TRUTH}


@pytest.fixture(scope="module")
def problem():
    few = {site: tuple(map(np.array, zip(*itertools.islice(samples(site), 12), strict=True))) for site in TRUTH}
    return Problem(Federation(few), Graph(list(TRUTH), [("a", "b")]), lam=0.05)


@pytest.fixture(scope="module")
def found(problem):
    return fed_admm(problem, 3000, 4, streams=streams())


def test_streams_lead_to_the_truth_and_stored_rows_to_their_own_minimiser(problem, found):
    stored, goal = fed_admm(problem, 3000), np.stack(list(TRUTH.values()))
    assert np.abs(found.theta - goal).max() < 0.05 < np.abs(stored.theta - goal).max()
    part = fed_admm(problem, 500, 4, streams={"c": samples("c")})
    assert np.abs(part.theta[2] - TRUTH["c"]).max() < 0.15


def test_what_is_reported_is_about_new_rows(problem, found):
    assert np.isnan(found.gap) and "gap" not in found.trace  # stored rows prove nothing about a stream
    # the variance of the noise is 1/4, the penalty of the fused pair almost 0
    assert found.objective == pytest.approx(0.125, abs=4 * found.trace["new_error"][-1])
    assert abs(problem.objective(found.theta) - 0.125) > 4 * found.trace["new_error"][-1]
    assert found.trace["new_error"][-1] < 0.01 and "on rows not seen before" in found.message
    known = np.isfinite(found.trace["gain"])
    assert known.sum() > 10 and not known[0]
    assert found.trace["gain"][known][0] > 10 * abs(found.trace["gain"][-1])


def test_a_stream_ends_when_more_rounds_gain_nothing(problem):
    loose, tight = (fed_admm(problem, 20_000, 4, streams=streams(), tol=tol) for tol in (0.05, 0.002))
    assert loose.status == tight.status == "converged" and loose.n_iter < tight.n_iter < 20_000
    # the expected loss beyond the noise, which has 1/4 of variance, is what was promised
    for found, tol in ((loose, 0.05), (tight, 0.002)):
        excess = 0.5 * ((found.theta - np.stack(list(TRUTH.values()))) ** 2).sum() / 3
        assert excess < 2 * tol * 0.125
        last = {name: found.trace[name][-1] for name in ("gain", "gain_error", "new_objective")}
        assert abs(last["gain"]) + 2 * last["gain_error"] <= tol * last["new_objective"]
    with pytest.warns(ConvergenceWarning, match="did 100 rounds on streams"):
        fed_admm(problem, 100, 4, streams=streams(), tol=1e-9)


def test_a_change_of_a_site_is_noticed_and_where_it_began(problem):
    with pytest.warns(ChangeWarning, match="site 'b': its rows follow different parameters from about row") as caught:
        found = fed_admm(problem, 2000, 4, streams=streams(b=5000))
    assert len(caught) == 1 and found.trace["changes"][-1] == 1 and found.trace["changes"][0] == 0
    row = int(str(caught[0].message).split("about row ")[1].split()[0])
    assert abs(row - 5000) < 100


@pytest.mark.parametrize("noise", ["normal", "t"])
def test_false_alarms_are_rare_and_small_changes_are_found(noise):
    rng = np.random.default_rng(0)
    alarms, delays = 0, []
    for _ in range(20):
        X = rng.normal(size=(1200, 16, 4))
        e = rng.normal(size=(1200, 16)) if noise == "normal" else rng.standard_t(4, size=(1200, 16))
        e[1000:] += 0.5 * X[1000:, :, 1]
        test = ChangeTest(np.zeros(4))
        for k, score in enumerate(np.einsum("knp,kn->kp", X, e) / 16):
            began = test.add(score, 16)
            if began is not None:
                alarms += k < 1000
                delays.append(k - 1000)
                assert k < 1000 or abs(began // 16 - 1000) < 40
                break
    assert alarms == 0 and len(delays) == 20 and np.median(delays) < 40


def test_one_wild_batch_is_no_change():
    rng = np.random.default_rng(0)
    test, scores = ChangeTest(np.zeros(3)), rng.normal(size=(500, 3))
    scores[250] = 1e6
    assert all(test.add(score, 20) is None for score in scores)


def test_streams_are_wound_forward(problem, tmp_path):
    run = dict(batch_size=3, checkpoint=tmp_path / "run.db")
    whole = fed_admm(problem, 300, 3, streams=streams())
    fed_admm(problem, 111, **run, streams=streams())
    rest = fed_admm(problem, 300, **run, streams=streams(), resume=True)
    assert np.array_equal(whole.theta, rest.theta) and whole.objective == rest.objective
    for name, column in whole.trace.items():
        assert np.array_equal(column, rest.trace[name], equal_nan=True), name


def test_bad_streams(problem):
    with pytest.raises(SolverError, match="samples of site 'c' ended in round 6 after 20 rows"):
        fed_admm(problem, 50, 4, streams={"c": itertools.islice(samples("c"), 20)})
    with pytest.raises(UnknownSiteError, match="streams names site 'z'"):
        fed_admm(problem, 50, 4, streams={"z": samples("c")})
    with pytest.raises(ParameterError, match="rereads rows"):
        fed_admm(problem, 50, 4, streams={"c": samples("c")}, gradient="saga")
    with pytest.raises(DataError, match="must be an iterable"):
        fed_admm(problem, 50, 4, streams={"c": 5})
