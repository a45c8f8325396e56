"""What a neighbour that lies, floods or flaps can do to a site, and what a damaged disk can: nothing that counts."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builders import small_problem
from federations import in_process, in_threads, part_of, plan_of
from fedkin.admm import Store
from fedkin.data import Rows
from fedkin.errors import DataError, ModelFileError
from fedkin.federate import Contract, Journal, Participant, Patience, read_record, whole_plan, write_record
from fedkin.federate.inbox import Kind, PeerError, encode
from fedkin.federate.messages import ModelFile
from fedkin.federate.trust import SecurityError
from fedkin.graph import Graph
from memory_network import QUICK, MemoryNetwork

pytestmark = [pytest.mark.exhaustive, pytest.mark.clocks]

LOGISTIC = """
name = "heart"
method = "fused"
loss = "logistic"
features.age = {}
target = {name = "died", levels = ["no", "yes"]}
rounds.lam = 0.5
"""
HASTY = Patience(first_pull=0.02, last_pull=0.2, complain=0.2, give_up=1.0, linger=0.0)


@pytest.fixture
def network():
    made = MemoryNetwork(seed=1)
    yield made
    made.close()


def entries(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("penalty", ["l1", "l2", "linf"])
@pytest.mark.parametrize("size", [1.7e308, 1e160, 2e6])
def test_a_theta_outside_the_ball_does_not_count_and_its_sender_is_named(
    network: MemoryNetwork, tmp_path: Path, penalty: str, size: float
) -> None:
    problem = small_problem(3)
    plan = plan_of(problem, 20, penalty=penalty)
    liar = network.join()
    forged = encode(plan.run_bytes, Kind.THETA, 1, 1, np.array([size, -size, size / 2]))
    sites = {
        u: Participant(part_of(plan, u), network.join(), Journal(f"d{u}", tmp_path / f"{u}.jsonl"), patience=QUICK)
        for u in range(3)
    }
    liar.publish(plan.key(Kind.THETA, 1, 1), forged)
    network.settle()

    def live(u: int) -> None:
        sites[u].run()
        sites[u].linger()

    in_threads(live, 3)
    refused = [one for one in entries(tmp_path / "0.jsonl") if one["event"] == "message refused"]
    assert refused and {one["peer"] for one in refused} == {"d1"}
    assert "but at most 1e+06 is possible" in refused[0]["why"]
    right = in_process(problem, plan).average
    assert all(sites[u].shard.average[0].tobytes() == right[u].tobytes() for u in range(3))


def test_a_site_that_is_drawn_to_where_single_rows_have_the_weight_stops(network: MemoryNetwork) -> None:
    """A neighbour that lies inside the ball, with a strong penalty: the site goes no further, nor after a restart."""
    contract, n, rows = Contract.from_toml(LOGISTIC), 60, {}
    for u in range(2):
        rng = np.random.default_rng(u)
        X = np.column_stack([np.ones(n), rng.normal(size=(n, 1))])
        rows[u] = Rows(X, (rng.random(n) < 1 / (1 + np.exp(-X @ [0.2, 1.0]))).astype(float))
    plan = replace(whole_plan(contract, Graph([0, 1], [(0, 1)]), rows, run="0" * 16), effective_rows=5.0)
    liar, asked = network.join(), []

    def drawn(t: int) -> bytes:
        asked.append(t)
        return encode(plan.run_bytes, Kind.THETA, 0, t, np.array([0.0, 900.0]))

    liar.answer(plan.asking_key(Kind.THETA, 0, 1), drawn)
    site = Participant(part_of(plan, 1), network.join(), Journal("site-1"), patience=QUICK)
    with pytest.raises(DataError, match=r"pulled its parameters to a point at which \S+ rows in effect have"):
        site.run()
    assert 1 < len(set(asked)) < plan.rounds
    there = replace(part_of(plan, 1), theta=site.shard.theta.copy())
    again, before = Participant(there, network.join(), Journal("site-1"), patience=QUICK), len(asked)
    with pytest.raises(DataError, match="pulled its parameters"):
        again.run()
    assert len(asked) == before


def test_who_waits_says_of_each_neighbour_what_is_the_matter(network: MemoryNetwork) -> None:
    """One is down, one runs and does not send, what the third sends is refused: only one has to be started."""
    problem = small_problem(6)
    plan = plan_of(problem, 20)
    down, silent, liar = sorted(plan.neighbours(0))
    transport = network.join()
    transport.announce(plan.presence_key(silent))
    transport.announce(plan.presence_key(liar))
    site = Participant(part_of(plan, 0), network.join(), Journal("d0"), patience=HASTY)
    forged = encode(plan.run_bytes, Kind.THETA, liar, 1, np.full(3, 1e300))
    transport.publish(plan.key(Kind.THETA, liar, 0), forged)
    network.settle()
    with pytest.raises(PeerError) as told:
        site.run()
    words = str(told.value)
    assert f"d{down} (it is down: start it, then this site)" in words
    assert f"d{silent} (it is up: see its log for the site it is waiting for)" in words
    assert f"d{liar} (what it sends is refused: the numbers have size" in words
    assert words.count("start it") == 1


def test_who_asks_for_a_round_that_is_gone_is_named(network: MemoryNetwork, tmp_path: Path) -> None:
    problem = small_problem(6)
    plan = plan_of(problem, 200, checkpoint_every=1)
    journal = Journal("d0", tmp_path / "log.jsonl")
    site = Participant(part_of(plan, 0), network.join(), journal, patience=QUICK)
    for t in range(1, 50):
        site.endpoint.remember(Kind.THETA, t, np.zeros(3))
    first, *_, last = plan.neighbours(0)
    asker = network.join()
    for v in (first, last):
        asker.pull(plan.asking_key(Kind.THETA, 0, v), 3, lambda frame: None)
        network.settle()
        told = [one for one in entries(tmp_path / "log.jsonl") if "no longer kept" in one["event"]]
        assert told[-1]["peer"] == f"d{v}"


def test_a_neighbour_that_comes_and_goes_fills_no_disk(network: MemoryNetwork, tmp_path: Path) -> None:
    problem = small_problem(3)
    plan = plan_of(problem, 20)
    journal = Journal("d0", tmp_path / "log.jsonl")
    Participant(part_of(plan, 0), network.join(), journal, patience=QUICK)
    for _ in range(3000):
        flapping = network.join()
        flapping.announce(plan.presence_key(1))
        flapping.close()
    network.settle()
    network.settle()
    lines = entries(tmp_path / "log.jsonl")
    assert len(lines) < 40
    assert {one["peer"] for one in lines if one["event"] == "neighbour down"} == {"d1"}


# --- single bits of stored files --------------------------------------------------------------------------------------


def flips(content: bytes, count: int, seed: int = 0) -> list[bytes]:
    """Copies of a file with one bit changed, all over it."""
    rng = np.random.default_rng(seed)
    bits = rng.choice(8 * len(content), min(count, 8 * len(content)), replace=False)
    out = []
    for bit in bits.tolist():
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        out.append(bytes(changed))
    return out


def test_no_flipped_bit_of_a_status_counts(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    content = {"round": 7, "state": "running", "up": ["a", "b"], "change": 0.25, "why": None}
    write_record(path, content)
    for changed in flips(path.read_bytes(), 10_000):
        path.write_bytes(changed)
        try:
            assert read_record(path) == content
        except DataError as error:
            assert "status.json" in str(error)


@pytest.mark.parametrize("durable", [True, False])
def test_no_flipped_bit_of_a_checkpoint_counts(tmp_path: Path, durable: bool) -> None:
    """Every flip is found, or what is read is what was saved; in the log a torn record means the one before."""
    path, wal = tmp_path / "state.db", tmp_path / "state.db-wal"
    rng = np.random.default_rng(1)
    store = Store(path, "run-1")
    saved = {}
    for t in (1, 2):
        saved[t] = {"theta": rng.normal(size=(1, 5)), "alpha": rng.normal(size=(3, 5))}
        store.save(t, saved[t], {"site": "d0"}, durable=durable)
    whole = {one: one.read_bytes() for one in (path, wal) if one.exists()}
    damaged = wal if not durable else path
    store.close()
    found = 0
    for content in flips(whole[damaged], 1500):
        for one, text in whole.items():
            one.write_bytes(text)
        damaged.write_bytes(content)
        try:
            state = Store(path, "run-1").load()
        except ModelFileError as error:
            found += 1
            assert "state.db" in str(error)
            continue
        except sqlite3.Error as error:
            raise AssertionError(f"{error!r} should have been told as a damaged checkpoint") from error
        if state is None:  # what the next save would write over is of another run, it seems; a site refuses it
            assert not durable or Store(path, "run-1").others()
            continue
        assert durable <= (state.round == 2)
        for name, part in saved[state.round].items():
            assert state.arrays[name].tobytes() == part.tobytes()
    assert found > (20 if durable else -1)


def test_a_model_with_text_that_writes_over_the_terminal_is_refused(tmp_path: Path) -> None:
    model = ModelFile("0" * 16, "north", "", {"model.json": json.dumps({"target": "days\x1b[2J"})})
    with pytest.raises(SecurityError, match="would change what a terminal shows"):
        model.unpack(tmp_path / "model")
    assert not (tmp_path / "model").exists()
