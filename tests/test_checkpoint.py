"""Checkpoints: a resumed run is the uninterrupted one, and a file is whole or not there."""

from __future__ import annotations

import signal
import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import design_problem
from fedkin.admm import Availability
from fedkin.admm.algorithm import fed_admm
from fedkin.admm.checkpoint import digest_of
from fedkin.errors import ModelFileError, ParameterError

a_problem = partial(design_problem, V=8, n=12, p=3, groups=2)


def same(one, two):
    assert np.array_equal(one.theta, two.theta) and np.array_equal(one.alpha, two.alpha)
    assert one.gap == two.gap and one.objective == two.objective and one.n_iter == two.n_iter
    assert one.trace.keys() == two.trace.keys()
    for name, column in one.trace.items():
        assert np.array_equal(column, two.trace[name]), name


@settings(max_examples=25, deadline=None)
@given(
    first=st.integers(1, 40),
    every=st.one_of(st.none(), st.integers(1, 15)),
    gradient=st.sampled_from(["plain", "saga", "svrg"]),
    average=st.sampled_from(["tail", "paper", "last"]),
    availability=st.sampled_from([None, Availability.bernoulli(0.5, weighting="estimated")]),
    backend=st.sampled_from(["numpy", "numba"]),
    extras=st.booleans(),
)
def test_a_resumed_run_is_the_uninterrupted_one(
    tmp_path_factory, first, every, gradient, average, availability, backend, extras
):
    path = tmp_path_factory.mktemp("run") / "run.npz"
    problem = a_problem(sparsity=0.01 if extras else 0.0, ridge=0.01)
    run = dict(batch_size=3, gradient=gradient, average=average, availability=availability, backend=backend)
    reference = np.zeros((8, 3)) if extras else None
    whole = fed_admm(problem, 45, **run, reference=reference)
    fed_admm(problem, first, **run, reference=reference, checkpoint=path, checkpoint_every=every)
    same(whole, fed_admm(problem, 45, **run, reference=reference, checkpoint=path, resume=True))


def test_ctrl_c_leaves_a_resumable_file(tmp_path):
    problem, path, before = a_problem(), tmp_path / "run.npz", signal.getsignal(signal.SIGINT)

    def press(now):
        if now.n_iter >= 20:
            signal.raise_signal(signal.SIGINT)

    stopped = fed_admm(problem, 200, 3, callbacks=[press], checkpoint=path, checkpoint_every=1000)
    assert stopped.status == "interrupted" and stopped.n_iter < 200 and path.exists()
    assert stopped.objective < problem.objective(np.zeros_like(stopped.theta))
    assert signal.getsignal(signal.SIGINT) is before
    same(fed_admm(problem, 200, 3), fed_admm(problem, 200, 3, checkpoint=path, resume=True))


def test_restarts_are_remembered(tmp_path, monkeypatch):
    from fedkin.admm.run_plan import Curvature

    honest = Curvature.of_batches
    monkeypatch.setattr(Curvature, "of_batches", lambda *given, **more: honest(*given, **more) / 40)
    problem, path = a_problem(), tmp_path / "run.npz"
    whole = fed_admm(problem, 300, rho=0.001)
    assert "restarts" in whole.message
    fed_admm(problem, 250, rho=0.001, checkpoint=path)
    same(whole, fed_admm(problem, 300, rho=0.001, checkpoint=path, resume=True))


def test_another_run_is_refused(tmp_path):
    path = tmp_path / "run.npz"
    fed_admm(a_problem(), 10, 3, checkpoint=path)
    for problem, run in [
        (a_problem(lam=0.003), {}),
        (a_problem(ridge=0.1), {}),
        (a_problem(penalty="l2"), {}),
        (replace(a_problem(), loss="huber"), {}),
        (a_problem(), {"batch_size": 4}),
        (a_problem(), {"seed": 1}),
        (a_problem(), {"gradient": "saga"}),
        (a_problem(), {"availability": Availability.bernoulli(0.5)}),
        (a_problem(), {"rho": 0.3}),
    ]:
        with pytest.raises(
            ParameterError, match="was written by a run with other data, another graph or other settings"
        ):
            fed_admm(problem, **{"rounds": 20, "batch_size": 3, **run}, checkpoint=path, resume=True)


def test_files_that_cannot_be_used(tmp_path):
    problem, path = a_problem(), tmp_path / "run.npz"
    with pytest.raises(ModelFileError, match="there is no checkpoint to resume from"):
        fed_admm(problem, 20, 3, checkpoint=path, resume=True)
    fed_admm(problem, 10, 3, checkpoint=path)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"not a database", content[:-5000]):
        path.write_bytes(damaged)
        with pytest.raises(ModelFileError, match="cannot be read as a checkpoint"):
            fed_admm(problem, 20, 3, checkpoint=path, resume=True)
    with closing(sqlite3.connect(path := tmp_path / "other.db")) as other:
        other.execute("create table state (something)")
    with pytest.raises(ModelFileError, match="not a checkpoint of this version"):
        fed_admm(problem, 20, 3, checkpoint=path, resume=True)


def test_another_file_of_that_name_is_replaced_unless_it_is_to_be_resumed(tmp_path):
    path = tmp_path / "run.npz"
    path.write_bytes(b"something else")
    fed_admm(a_problem(), 10, 3, checkpoint=path)
    same(fed_admm(a_problem(), 20, 3), fed_admm(a_problem(), 20, 3, checkpoint=path, resume=True))


def test_fingerprints():
    one = np.arange(6.0)
    known = digest_of([one, 1, "a"])
    assert known == digest_of([one.copy(), 1, "a"])
    changed = one.copy()
    changed[3] = np.nextafter(3.0, 4.0)
    for other in (
        [changed, 1, "a"],
        [one.astype(np.float32), 1, "a"],
        [one, 1.0, "a"],
        [one, "a", 1],
        [one.reshape(2, 3), 1, "a"],
        [one, 1],
    ):
        assert digest_of(other) != known
