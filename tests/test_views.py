"""What a site sees of a run is enough for the bits of one process that sees all of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from builders import small_problem
from federations import in_process, join_site, make_heart, make_sites, part_of, reference, whole_of
from fedkin.errors import ParameterError
from fedkin.federate import Site, centre_plan, site_plan


@pytest.mark.parametrize("gradient", ["plain", "saga", "svrg"])
@pytest.mark.parametrize("batch", [None, 5])
def test_what_sites_plan_alone_is_the_run_of_fed_admm_from_their_own_estimates(tmp_path: Path, gradient, batch) -> None:
    problem = small_problem(5)
    heart = make_heart(tmp_path, problem, rounds=40, rho=0.7, gradient=gradient, batch_size=batch)
    whole = whole_of(heart, problem)
    local = in_process(problem, whole)
    assert np.abs(whole.theta).min() > 0
    assert local.average.tobytes() == reference(problem, whole).tobytes()


@pytest.mark.parametrize("placement", ["peer", "replicas", "central"])
def test_a_sites_own_directory_is_enough_for_its_view(tmp_path: Path, placement: str) -> None:
    problem = small_problem(5)
    heart = make_sites(tmp_path, problem, rounds=40, rho=0.7, batch_size=5, placement=placement)
    whole = whole_of(heart, problem) if placement == "peer" else None
    if placement == "central":
        whole = centre_plan(heart)
    for u, name in enumerate(problem.federation.sites):
        view = site_plan(tmp_path / name)
        assert view.here == u and view.federation_size == 5
        if whole is None:
            assert view.numbers == list(range(5)) and len(view.edges) == problem.graph.n_edges
            assert view.sites.tolist() == list(range(5)) and view.revision == 1
            continue
        expected = part_of(whole, u)
        names = ("members", "edges", "edge_radius", "sites", "theta", "rho", "radius", "average", "snapshot_every")
        for part in names[3:-1] if placement == "central" else names:
            assert np.array_equal(getattr(view, part), getattr(expected, part)), part
        for part, value in vars(view.steps).items():
            assert np.array_equal(value, getattr(expected.steps, part)), part
        if placement == "central":
            assert view.numbers == [u] and view.partners() == [5]
        else:
            assert view.numbers == sorted([u, *whole.neighbours(u)])


def test_without_lam_the_cure_is_named(tmp_path: Path) -> None:
    problem = small_problem(3)
    heart = make_heart(tmp_path, problem, rounds=4, lam=None)
    join_site(heart, problem, "d0")
    with pytest.raises(ParameterError, match="no lam is set; the organiser can set it: fedkin federation order"):
        site_plan(tmp_path / "d0")
    (path, names), *_ = heart.order(lam=0.3, rounds=7, rho=0.2)
    assert "d0" in names
    Site.read(tmp_path / "d0").accept(path)
    view = site_plan(tmp_path / "d0")
    assert (view.lam, view.rounds, view.rho, view.revision) == (0.3, 7, 0.2, 1)
    assert view.edge_radius.tolist() == [0.3 * 3] * len(view.edges)
