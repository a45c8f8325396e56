"""Who gets which numbers of a run's plan, and plans that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federations import place
from fedkin.admm import Settings
from fedkin.data import Federation
from fedkin.errors import DataError
from fedkin.federate import (
    Manifest,
    ManifestError,
    SecurityError,
    device_parts,
    load_manifest,
    make_authority,
    make_manifest,
    plan_of,
    write_federation,
)
from fedkin.federate.contract.plans import COLUMNS, DevicePlan, PlanError
from fedkin.federate.programs.program import own_position
from fedkin.graph import Graph
from fedkin.objective import Problem

NAMES = ("a", "b", "c", "d", "e")


def uneven_problem(scale: float = 1.0, extra: int = 0) -> Problem:
    """Two parts, a-b-c and d-e; every device has another number of rows of another size, and d what is asked for."""
    data = {}
    for u, name in enumerate(NAMES):
        rng = np.random.default_rng(u)
        n = 7 + 3 * u + (extra if name == "d" else 0)
        X = (scale if name == "d" else 1.0 + u) * rng.normal(size=(n, 2))
        data[name] = (X, X.sum(axis=1) + rng.normal(size=n))
    return Problem(Federation(data), Graph(NAMES, [("a", "b"), ("b", "c"), ("d", "e")]), lam=0.02)


def planned(problem: Problem, **options: Any) -> Manifest:
    endpoints = [f"tls/127.0.0.1:{7000 + u}" for u in range(5)]
    settings = Settings(rho=0.5)  # the only shared number that curvature goes into
    absent = options.get("placement", "peer") != "peer"
    return make_manifest(problem, 5, settings, endpoints, run="0123456789abcdef", absent=absent, **options)


def written(folder: Path, **options: Any) -> Path:
    problem = uneven_problem()
    write_federation(folder / "fed", planned(problem, **options), device_parts(problem), make_authority("tests"))
    return folder / "fed"


def numbers(folder: Path, name: str) -> dict[str, list[str]]:
    """Of whom a device's plan has which numbers."""
    content = json.loads((place(folder, name) / "plan.json").read_bytes())
    assert content["device"] == name
    return {column: list(content[column]) for column in COLUMNS}


def test_the_manifest_is_the_same_whatever_the_rows_of_a_device() -> None:
    whole = planned(uneven_problem())
    other = planned(uneven_problem(scale=9.0, extra=8))
    assert whole.start != other.start and whole.deal != other.deal
    assert whole.to_bytes() == other.to_bytes()
    assert not set(json.loads(whole.to_bytes())) & {*COLUMNS, "planned_for"}


def test_rows_in_every_round_are_all_rows_of_a_device_and_no_number() -> None:
    whole = planned(uneven_problem())
    assert whole.batch == [0] * 5
    plan = plan_of(whole, device_parts(uneven_problem()))
    assert plan.rows.batch.tolist() == [7, 10, 13, 16, 19]


def test_a_device_gets_its_own_numbers_only(tmp_path: Path) -> None:
    folder = written(tmp_path)
    for name in NAMES:
        assert numbers(folder, name) == {key: [name] for key in COLUMNS}
        assert (place(folder, name) / "plan.json").stat().st_mode & 0o777 == 0o600


def test_a_replica_gets_the_steps_of_its_component(tmp_path: Path) -> None:
    folder = written(tmp_path, placement="replicas", compare_every=0)
    found = numbers(folder, "e")
    assert found["start"] == found["growth"] == ["d", "e"] and found["batch"] == found["deal"] == ["e"]


def test_the_central_machine_gets_steps_and_the_devices_their_own(tmp_path: Path) -> None:
    folder = written(tmp_path, placement="central", centre="tls/127.0.0.1:7100", compare_every=0)
    found = numbers(folder, "centre")
    assert found["start"] == list(NAMES) and found["batch"] == found["deal"] == []
    assert numbers(folder, "b") == {key: ["b"] for key in COLUMNS}


def test_what_is_read_back_is_what_was_planned(tmp_path: Path) -> None:
    folder = written(tmp_path)
    whole = load_manifest(folder)
    assert whole == planned(uneven_problem())
    own = load_manifest(place(folder, "c"))
    assert own.planned_for == "c" and own.shared() == whole.shared()
    for column in COLUMNS:
        expected = [None, None, getattr(whole, column)[2], None, None]
        assert getattr(own, column) == expected
    with pytest.raises(ManifestError, match="batch of a is not known here"):
        plan_of(own, device_parts(uneven_problem()))


def copied(folder: Path, source: Path) -> None:
    for name in ("plan.json", "plan.sig"):
        shutil.copy(source / name, folder / name)


def test_a_changed_plan_is_refused(tmp_path: Path) -> None:
    own = place(written(tmp_path), "b")
    text = (own / "plan.json").read_text()
    (own / "plan.json").write_text(text.replace('"batch": {\n  "b": 0', '"batch": {\n  "b": 3'))
    with pytest.raises(SecurityError, match=r"plan.json: .* changed after signing.*; carry plan.json, plan.sig"):
        load_manifest(own)


def test_a_plan_of_another_run_is_refused(tmp_path: Path) -> None:
    folder, authority = written(tmp_path), make_authority("same")
    problem = uneven_problem()
    for name, run in (("one", "00000000000000aa"), ("two", "00000000000000bb")):
        manifest = make_manifest(problem, 5, Settings(), [f"tls/127.0.0.1:{7000 + u}" for u in range(5)], run=run)
        write_federation(tmp_path / name, manifest, device_parts(problem), authority)
    own = place(tmp_path / "one", "b")
    copied(own, place(tmp_path / "two", "b"))
    with pytest.raises(ManifestError, match=r"plan.json is of run 00000000000000bb, but the manifest is of run"):
        load_manifest(own)
    copied(own, place(folder, "b"))
    with pytest.raises(SecurityError, match="another authority"):
        load_manifest(own)


@pytest.mark.parametrize("secure", [True, False])
def test_a_plan_of_another_device_is_refused(tmp_path: Path, secure: bool) -> None:
    folder = written(tmp_path, secure=secure)
    own = place(folder, "b")
    assert own_position(own, load_manifest(own), "b") == 1
    for source, words in ((place(folder, "c"), "is that of c"), (folder, "is those of all devices")):
        copied(own, source)
        with pytest.raises(DataError, match=rf"says that this is b, but plan.json {words}"):
            own_position(own, load_manifest(own), "b")
    (own / "plan.json").unlink()
    with pytest.raises(SecurityError, match=r"plan.json is missing"):
        own_position(own, load_manifest(own), "b")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("rounds", 0, "has a wrong rounds: expected `int` >= 1"),
        ("rounds", "many", "has a wrong rounds: expected `int`, got `str`"),
        ("rho", -1.0, "has a wrong rho: expected `float` > 0"),
        ("edges", [[1, 0, 2]], r"has a wrong edges\[0\]: expected `array` of length <= 2"),
        ("placement", "nowhere", "has a wrong placement: invalid enum value 'nowhere'"),
        ("format", "fedkin-manifest-2", "is not of the format .*: use the fedkin version that made it"),
        ("colour", "blue", "cannot be read: Object contains unknown field `colour`"),
        ("edge_radius", [1.0], "does not hold together: edge_radius has 1 entries, expected 3"),
        ("edges", [[1, 0], [2, 1], [3, 7]], r"edge \(3, 7\) does not name two of the 5 devices"),
    ],
)
def test_a_manifest_that_is_not_one_names_the_field(field: str, value: Any, words: str) -> None:
    content = json.loads(planned(uneven_problem()).to_bytes()) | {field: value}
    with pytest.raises(ManifestError, match=words):
        Manifest.from_bytes(json.dumps(content).encode())


def test_a_plan_that_is_not_one_names_the_field() -> None:
    content = json.loads(planned(uneven_problem()).plan_bytes(0))
    for change, words in (({"batch": {"a": "all"}}, r"wrong batch\[...\]: expected `int`"), ({"x": 1}, "field `x`")):
        with pytest.raises(PlanError, match=words):
            DevicePlan.from_bytes(json.dumps(content | change).encode())
