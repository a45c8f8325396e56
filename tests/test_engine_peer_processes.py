"""Real processes, real sockets, certificates on both sides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from builders import small_problem
from federations import reference
from fedkin.fitting import load
from fleet import Fleet

pytest.importorskip("zenoh")
pytestmark = pytest.mark.processes


def test_five_sites_over_tls_have_the_bits_of_fed_admm_and_end_with_models(tmp_path: Path) -> None:
    problem = small_problem(5)
    with Fleet.make(tmp_path / "fed", problem, 50, batch_size=4) as fleet:
        fleet.start()
        fleet.join()
        theta = reference(problem, fleet.plan)
        assert fleet.theta().tobytes() == theta.tobytes()
        model = load(fleet.place("d3") / "model")
        assert model.sites == ("d3",) and model.n_samples.tolist() == [12]
        row = {name: [1.0] for name in problem.federation.feature_names}
        assert model.predict(row)[0] == pytest.approx(theta[3].sum())


def test_ten_sites_with_three_killed_have_the_bits_of_fed_admm(tmp_path: Path) -> None:
    problem = small_problem(10, p=20, n=30)
    with Fleet.make(tmp_path / "fed", problem, 150, batch_size=10) as fleet:
        fleet.start()
        fleet.wait_for_round("d0", 20, 120)
        victims = [f"d{u}" for u in np.random.default_rng(0).choice(10, 3, replace=False)]
        for name in victims:
            fleet.kill(name)
        fleet.start(*victims)
        fleet.join(200)
        assert fleet.theta().tobytes() == reference(problem, fleet.plan).tobytes()
