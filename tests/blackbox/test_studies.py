"""Studies from a file of one's own: rows, tables, resuming, refusals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from blackbox.conftest import COMMAND, environment, files_below, run
from processes import PATIENCE, wait_for
from small_studies import OWN, UNDRAWN

pytestmark = pytest.mark.studies

#: Four cells of two replications, with two rows each.
STUDY = (
    UNDRAWN.replace("replications = 6", "replications = 2")
    + """
[options]
log = "LOG"
sleep = SLEEP
[quick]
replications = 1
"""
)

GENERATOR = """
import numpy as np
from fedkin import Federation, Graph
from fedkin.datasets import Design

def draw(n_sites, jump, seed):
    rng = np.random.default_rng(seed)
    labels = (np.arange(n_sites) >= n_sites // 2).astype(int)
    theta = np.where(labels[:, None] == 1, jump, 0.0) * np.ones((n_sites, 3))
    X = rng.normal(size=(n_sites, 20, 3))
    y = np.einsum("vnp,vp->vn", X, theta) + rng.normal(size=(n_sites, 20))
    return X, y, theta, labels

def design(n_sites, jump, seed):
    X, y, theta, labels = draw(n_sites, jump, seed)
    data = {u: (X[u], y[u]) for u in range(n_sites)}
    chain = Graph(range(n_sites), [(u, u + 1) for u in range(n_sites - 1)])
    return Design(Federation(data), chain, Graph.clusters(labels.tolist()), theta, labels)
"""

CHAINS = """
[study]
name = "chains"
task = "estimation"
seed = 1
replications = 2
block = 2

[[grid]]
n_sites = [6]
jump = [0.5, 2.0]

[options]
generator = "ownchains:design"
estimators = ["local", "global", "pooled"]
"""


def write_study(folder: Path, sleep: float = 0.0) -> Path:
    """Write the study with its task; every replication that is computed adds a line to ``log``."""
    sys.modules.pop("own", None)  # of another test's folder
    (folder / "own.py").write_text(OWN)
    path = folder / "own.toml"
    path.write_text(STUDY.replace("LOG", str(folder / "log")).replace("SLEEP", str(sleep)))
    return path


def computed(folder: Path) -> list[str]:
    """Return the replications that were computed, in the order in which they began."""
    lines = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
    return [line.partition(" ")[2] for line in lines]  # a line begins with the process


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A folder with a finished study."""
    folder = tmp_path_factory.mktemp("study")
    write_study(folder)
    ended = run(folder, "study", "own.toml", "--out", "out", "--jobs", "1", code=0)
    assert ended.stdout.splitlines()[-1].endswith("index.html")
    return folder


def test_a_study_writes_rows_a_table_and_a_page(done):
    out = done / "out" / "small"
    assert {"index.html", "means.csv", "means.md", "rows.parquet"} <= {path.name for path in out.iterdir()}
    assert len(list((out / "cells").iterdir())) == 4
    rows = pd.read_parquet(out / "rows.parquet")
    assert len(rows) == 16 and len(set(computed(done))) == len(computed(done)) == 8
    for row in rows.itertuples():
        left, right = np.random.default_rng(row.seed).normal(loc=row.n, size=2)
        assert row.value == (left if row.side == "left" else right)
    means = pd.read_csv(out / "means.csv").set_index(["n", "kind"])
    expected = rows.groupby(["n", "kind"])["value"]
    np.testing.assert_allclose(means["mean"], expected.mean())
    np.testing.assert_allclose(means["standard_error"], expected.sem())
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "A small study" in page and 'src="http' not in page and "<link" not in page


def test_redraw_needs_only_the_rows_and_computes_nothing(tmp_path, done):
    write_study(tmp_path)
    place = tmp_path / "out" / "small"
    place.mkdir(parents=True)
    (place / "rows.parquet").write_bytes((done / "out" / "small" / "rows.parquet").read_bytes())
    run(tmp_path, "study", "own.toml", "--out", "out", "--redraw", code=0)
    assert computed(tmp_path) == []
    assert (place / "means.csv").read_bytes() == (done / "out" / "small" / "means.csv").read_bytes()
    assert (place / "index.html").is_file()


@pytest.mark.processes
def test_an_interrupted_study_resumes_with_the_rows_of_an_uninterrupted_one(tmp_path, done):
    write_study(tmp_path, sleep=0.5)
    command = [*COMMAND, "study", "own.toml", "--out", "out", "--jobs", "1"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: list(tmp_path.glob("out/small/cells/[!.]*.parquet")))
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()
    kept = files_below(tmp_path / "out" / "small" / "cells")
    assert 1 <= len(kept) < 4
    before = computed(tmp_path)
    run(tmp_path, "study", "own.toml", "--out", "out", "--jobs", "1", code=0)
    assert len(computed(tmp_path)) - len(before) == 2 * (4 - len(kept))  # finished cells are not computed again
    assert kept.items() <= files_below(tmp_path / "out" / "small" / "cells").items()
    ours, theirs = (pd.read_parquet(folder / "out" / "small" / "rows.parquet") for folder in (tmp_path, done))
    keys = ["n", "kind", "replication", "seed", "side", "value"]
    pd.testing.assert_frame_equal(ours[keys], theirs[keys])


def test_a_quick_run_has_its_own_directory_and_damaged_cells_are_computed_again(tmp_path):
    write_study(tmp_path)
    run(tmp_path, "study", "own.toml", "--out", "out", "--quick", "--jobs", "1", code=0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["small-quick"]
    place = tmp_path / "out" / "small-quick"
    first = pd.read_parquet(place / "rows.parquet")
    assert len(first) == 8 and len(computed(tmp_path)) == 4
    damaged = min((place / "cells").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:50])
    again = run(tmp_path, "study", "--config", "own.toml", "--out", "out", "--quick", "--jobs", "1", code=0)
    assert damaged.name in again.stderr.replace("\n", "")
    assert len(computed(tmp_path)) == 5
    pd.testing.assert_frame_equal(pd.read_parquet(place / "rows.parquet"), first)


def test_errors_of_estimators_are_those_of_least_squares(tmp_path):
    (tmp_path / "ownchains.py").write_text(GENERATOR)
    (tmp_path / "chains.toml").write_text(CHAINS)
    run(tmp_path, "study", "chains.toml", "--out", "out", "--jobs", "1", code=0)
    rows = pd.read_parquet(tmp_path / "out" / "chains" / "rows.parquet")
    assert len(rows) == 2 * 2 * 3
    names: dict[str, object] = {}
    exec(GENERATOR, names)
    for row in rows.itertuples():
        X, y, theta, labels = names["draw"](row.n_sites, row.jump, row.seed)
        groups = {"local": np.arange(6), "global": np.zeros(6, int), "pooled": labels}[row.estimator]
        found = np.empty_like(theta)
        for group in set(groups.tolist()):
            own = groups == group
            found[own] = np.linalg.lstsq(X[own].reshape(-1, 3), y[own].ravel(), rcond=None)[0]
        assert row.error == pytest.approx(((found - theta) ** 2).sum(axis=1).mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "culprits"),
    [
        ("seed = 3", "sead = 3", ["sead", "seed"]),
        ("own:task", "own:tusk", ["tusk"]),
        ('name = "small"', 'name = "../small"', ["../small"]),
        ("n = [10, 20]", "n = []", ["n"]),
    ],
)
def test_a_wrong_study_is_refused_before_anything_is_computed(fedkin, tmp_path, old, new, culprits):
    path = write_study(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    fedkin("study", "own.toml", "--out", "out").refuses(*culprits)
    assert computed(tmp_path) == []
    assert not (tmp_path / "out").exists()


def test_an_unknown_study_is_refused_and_the_known_ones_are_named(fedkin, tmp_path):
    fedkin("study", "estimatoin", "--out", "out").refuses("estimatoin", "estimation")
    fedkin("study", "nowhere.toml", "--out", "out").refuses("nowhere.toml")
    assert files_below(tmp_path) == {}
