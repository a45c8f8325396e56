"""Models between organiser and sites: each site gets its own part, and hands its own over only if its rules say so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fedkin
import heart
from fedkin.data import Column, Schema
from fedkin.errors import DataError
from fedkin.federate import Organiser, Site, change_settings
from fedkin.federate.trust import SecurityError
from fedkin.fitting import FitOptions, FittedModel, FusedFit, fit, join_parts, model_from_theta
from fedkin.losses import make_loss


@pytest.fixture
def two(tmp_path: Path) -> tuple[Organiser, Path, Path]:
    made = heart.organiser(tmp_path, names=("north", "south"))
    return made, heart.admitted(made, "north"), heart.admitted(made, "south")


def model_of(contract, site: str, theta: float = 0.5, lam: float = 0.1) -> FittedModel:
    return model_from_theta(
        {site: np.full(4, theta)}, fedkin.Graph.empty([site]), schema=contract.schema, loss=contract.loss_object(),
        intercept=True, n_samples={site: 40}, fused=FusedFit("l1", lam), origin={"from": "rounds", "rounds": 7},
    )  # fmt: skip


def test_arrays_travel_to_the_bit(two, tmp_path: Path) -> None:
    made, north, _ = two
    model_of(made.contract, "north").save(tmp_path / "part")
    content = np.random.default_rng(0).bytes(1000)
    (tmp_path / "part" / "kin.npz").write_bytes(content)
    (path,) = made.deliver({"north": tmp_path / "part"})
    Site.read(north).accept(path)
    assert (north / "model" / "kin.npz").read_bytes() == content


def test_files_that_no_model_has_are_refused(two, tmp_path: Path) -> None:
    """Nothing is written elsewhere, whatever an organiser that was taken over signs."""
    made, north, _ = two
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "site.key").write_text("mine")
    (path,) = made.deliver({"north": tmp_path / "part"})
    before = (north / "site.key").read_bytes()
    with pytest.raises(SecurityError, match=r"north\.model: .*`\$\.files`"):
        Site.read(north).accept(path)
    assert (north / "site.key").read_bytes() == before and not (north / "model").exists()


def test_a_site_publishes_only_if_its_rules_say_so_and_for_itself(two) -> None:
    made, north, south = two
    with pytest.raises(DataError, match="has no model yet"):
        Site.read(north).publish()
    model_of(made.contract, "north").save(north / "model")
    with pytest.raises(DataError, match=r"the rules of north keep its parameters to itself.*--share-result"):
        Site.read(north).publish()
    change_settings(north, share_result=True)
    path = Site.read(north).publish(frozenset({"south"}))
    found = made.read_published(path)
    assert (found.site, found.dropped) == ("north", ("south",))
    model_of(made.contract, "south").save(south / "model")
    change_settings(south, share_result=True)
    other = Site.read(south).publish()
    with pytest.raises(SecurityError, match=str(other)):
        made.read_published(Path(_signed_for(other, "north")))
    made.expel("north")
    with pytest.raises(DataError, match="north has left or was expelled"):
        made.read_published(path)


def _signed_for(path: Path, site: str) -> str:
    content = json.loads(path.read_text())
    content["body"]["site"] = site
    path.write_text(json.dumps(content))
    return str(path)


def test_parts_of_different_rounds_are_not_joined(two) -> None:
    made, *_ = two
    graph = fedkin.Graph(["north", "south"], [("north", "south")])
    one, other = model_of(made.contract, "north"), model_of(made.contract, "south")
    assert join_parts([one, other], graph).members() == (("north", "south"),)
    assert join_parts([one, model_of(made.contract, "south", 0.6)], graph).n_groups == 2
    with pytest.raises(DataError, match="'north' and 'south' differ in lam: they are not of the same rounds"):
        join_parts([one, model_of(made.contract, "south", lam=0.2)], graph)
    with pytest.raises(DataError, match="each of them once"):
        join_parts([one, one], graph)


def test_joining_the_parts_gives_the_model_back() -> None:
    rng = np.random.default_rng(0)
    schema = Schema((Column("x", low=0, high=4), Column("z", low=-1, high=1)), Column("y"))
    theta = {site: rng.normal(size=3).round(2 if site != "b" else 1) for site in "abc"}
    theta["c"] = theta["a"]
    graph = fedkin.Graph(list("abc"), [("a", "b"), ("b", "c"), ("a", "c")])
    whole = model_from_theta(
        theta, graph, schema=schema, loss=make_loss("linear"), intercept=True, n_samples=dict.fromkeys("abc", 9)
    )
    again = join_parts([whole.part([site]) for site in "cab"], graph)
    assert again.coef.tobytes() == whole.coef.tobytes() and again.intercept.tobytes() == whole.intercept.tobytes()
    assert again.members() == whole.members() == (("a", "c"), ("b",))
    federation = fedkin.Federation({site: [[float(site > "a")]] for site in "abc"})
    means = fit(federation, graph, FitOptions(loss="mean", lam=0.01, select="none"))
    assert join_parts([means.part([site]) for site in "abc"], graph).members() == means.members()
