"""Studies from a file of one's own: rows, tables, resuming, refusals."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from blackbox.conftest import COMMAND, PATIENCE, environment, files_below, run

pytestmark = pytest.mark.studies

TASK = """
import time
import numpy as np

def task(replication):
    with open(replication.options["log"], "a") as log:
        log.write(f"{replication.params['size']} {replication.number}\\n")
    time.sleep(replication.options["sleep"])
    rng = np.random.default_rng(replication.seed)
    yield {"value": float(rng.normal(loc=replication.params["size"]))}
"""

STUDY = """
[study]
name = "own"
title = "A study of one's own"
task = "owntask:task"
seed = 3
replications = 4
block = 2

[[grid]]
size = [10, 20]

[options]
log = "LOG"
sleep = SLEEP

[quick]
replications = 2

[[table]]
name = "means"
value = "value"
columns = "size"
rows = ["study"]
"""

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
    (folder / "owntask.py").write_text(TASK)
    path = folder / "own.toml"
    path.write_text(STUDY.replace("LOG", str(folder / "log")).replace("SLEEP", str(sleep)))
    return path


def computed(folder: Path) -> list[str]:
    """Return the replications that were computed, in the order in which they began."""
    return (folder / "log").read_text().splitlines() if (folder / "log").exists() else []


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A folder with a finished study."""
    folder = tmp_path_factory.mktemp("study")
    write_study(folder)
    ended = run(folder, "study", "own.toml", "--out", "out", "--jobs", "1", code=0)
    assert ended.stdout.splitlines()[-1].endswith("index.html")
    return folder


def test_a_study_writes_rows_a_table_and_a_page(done):
    out = done / "out" / "own"
    assert {"index.html", "means.csv", "means.md", "rows.parquet"} <= {path.name for path in out.iterdir()}
    assert len(list((out / "cells").iterdir())) == 4
    rows = pd.read_parquet(out / "rows.parquet")
    assert len(rows) == 8 and sorted(computed(done)) == sorted(f"{s} {k}" for s in (10, 20) for k in range(4))
    drawn = [
        np.random.default_rng(seed).normal(loc=size) for seed, size in zip(rows["seed"], rows["size"], strict=True)
    ]
    assert rows["value"].tolist() == drawn
    means = pd.read_csv(out / "means.csv").set_index("size")
    expected = rows.groupby("size")["value"]
    np.testing.assert_allclose(means["mean"], expected.mean())
    np.testing.assert_allclose(means["standard_error"], expected.sem())
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "A study of one" in page and 'src="http' not in page and "<link" not in page


def test_redraw_needs_only_the_rows_and_computes_nothing(tmp_path, done):
    write_study(tmp_path)
    place = tmp_path / "out" / "own"
    place.mkdir(parents=True)
    (place / "rows.parquet").write_bytes((done / "out" / "own" / "rows.parquet").read_bytes())
    run(tmp_path, "study", "own.toml", "--out", "out", "--redraw", code=0)
    assert computed(tmp_path) == []
    assert (place / "means.csv").read_bytes() == (done / "out" / "own" / "means.csv").read_bytes()
    assert (place / "index.html").is_file()


@pytest.mark.processes
def test_an_interrupted_study_resumes_with_the_rows_of_an_uninterrupted_one(tmp_path, done):
    write_study(tmp_path, sleep=0.5)
    command = [*COMMAND, "study", "own.toml", "--out", "out", "--jobs", "1"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while not list(tmp_path.glob("out/own/cells/[!.]*.parquet")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()
    kept = files_below(tmp_path / "out" / "own" / "cells")
    assert 1 <= len(kept) < 4
    before = computed(tmp_path)
    run(tmp_path, "study", "own.toml", "--out", "out", "--jobs", "1", code=0)
    assert len(computed(tmp_path)) - len(before) == 2 * (4 - len(kept))  # finished cells are not computed again
    assert kept.items() <= files_below(tmp_path / "out" / "own" / "cells").items()
    ours, theirs = (pd.read_parquet(folder / "out" / "own" / "rows.parquet") for folder in (tmp_path, done))
    keys = ["size", "replication", "seed", "value"]
    pd.testing.assert_frame_equal(ours[keys], theirs[keys])


def test_a_quick_run_has_its_own_directory_and_damaged_cells_are_computed_again(tmp_path):
    write_study(tmp_path)
    run(tmp_path, "study", "own.toml", "--out", "out", "--quick", "--jobs", "1", code=0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["own-quick"]
    place = tmp_path / "out" / "own-quick"
    first = pd.read_parquet(place / "rows.parquet")
    assert len(first) == len(computed(tmp_path)) == 4
    damaged = min((place / "cells").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:50])
    again = run(tmp_path, "study", "--config", "own.toml", "--out", "out", "--quick", "--jobs", "1", code=0)
    assert damaged.name in again.stderr.replace("\n", "")
    assert len(computed(tmp_path)) == 6
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
        ("owntask:task", "owntask:tusk", ["tusk"]),
        ('name = "own"', 'name = "../own"', ["../own"]),
        ("size = [10, 20]", "size = []", ["size"]),
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
