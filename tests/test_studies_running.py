"""Studies through processes that fail, are killed in between, and go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedkin
from fedkin.studies import StudyError, load_study, read_rows, run_study, write_rows
from fedkin.studies.run import Store
from processes import PATIENCE, wait_for
from small_studies import SMALL, UNDRAWN, without_times

pytestmark = pytest.mark.studies


def test_rows_carry_seed_versions_and_cpu_and_more_replications_only_add(small_study: Path, tmp_path: Path):
    run = run_study(load_study(small_study), tmp_path / "out", jobs=1)
    assert (run.computed, run.cached, len(run.rows)) == (12, 0, 4 * 6 * 2)
    row = run.rows[0]
    assert (row["fedkin"], row["numpy"]) == (fedkin.__version__, np.__version__) and row["cpu"]
    assert row["value"] == np.random.default_rng(row["seed"]).normal(loc=row["n"])
    again = run_study(load_study(small_study), tmp_path / "out", jobs=1)
    assert (again.computed, again.cached, again.rows) == (0, 12, run.rows)
    small_study.write_text(SMALL.replace("replications = 6", "replications = 8"))
    more = run_study(load_study(small_study), tmp_path / "out", jobs=1)
    assert (more.computed, more.cached) == (4, 12)
    kept = [row for row in more.rows if row["replication"] < 6]
    assert sorted(map(str, kept)) == sorted(map(str, run.rows))


def test_a_failing_task_names_its_cell(small_study: Path, tmp_path: Path):
    small_study.write_text(SMALL.replace("own:task", "own:failing"))
    with pytest.raises(StudyError, match=r"n=10, kind=a, replications 0 to 1 .*\n(.*\n)*.*seven over nothing"):
        run_study(load_study(small_study), tmp_path / "out", jobs=1)


def _command(config: Path, out: Path, jobs: int = 2) -> list[str]:
    options = ["--config", str(config), "--out", str(out), "--jobs", str(jobs)]
    return [sys.executable, "-m", "fedkin", "study", *options]


def _parts(out: Path) -> list[Path]:
    """Return the finished cells; files that are being written begin with a dot."""
    return [path for path in (out / "small" / "cells").glob("*.parquet") if not path.name.startswith(".")]


def _slow(small_study: Path) -> Path:
    """Write the small study with 24 cells that take a while, and return its log of what was run."""
    log = small_study.with_name("log.txt")
    text = UNDRAWN.replace("replications = 6", "replications = 12")
    small_study.write_text(f"{text}\n[options]\nsleep = 0.05\nlog = {json.dumps(str(log))}\n")
    return log


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def _workers(log: Path) -> set[int]:
    return {int(line.split()[0]) for line in log.read_text().splitlines()}


def test_a_worker_that_is_killed_is_reported_and_the_study_goes_on(small_study: Path, tmp_path: Path):
    cured, out = tmp_path / "cured", tmp_path / "out"
    options = f"[options]\ncured = {json.dumps(str(cured))}\n"
    small_study.write_text(UNDRAWN.replace("own:task", "own:dying") + options)
    done = subprocess.run(_command(small_study, out), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "fewer --jobs" in done.stderr
    cured.touch()
    run = run_study(load_study(small_study), out, jobs=1)
    assert run.computed + run.cached == 12 and run.computed >= 3


def test_killed_in_the_middle_and_started_again_gives_the_same_rows(small_study: Path, tmp_path: Path):
    log, out = _slow(small_study), tmp_path / "killed"
    process = subprocess.Popen(_command(small_study, out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(_parts(out)) >= 4)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=PATIENCE)
    finished = len(_parts(out))
    assert 4 <= finished < 24 and not (out / "small" / "rows.parquet").exists()
    wait_for(lambda: not any(_alive(pid) for pid in _workers(log)), 60.0)  # no ghosts
    done = subprocess.run(_command(small_study, out), capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert f"{finished} found finished" in done.stderr
    assert Path(done.stdout.strip()) == out / "small" / "index.html"
    rows = read_rows(out / "small" / "rows.parquet").rows
    untouched = run_study(load_study(small_study), tmp_path / "whole", jobs=1).rows
    assert len(rows) == 4 * 12 * 2
    assert [without_times(row) for row in rows] == [without_times(row) for row in untouched]


def test_two_runs_in_one_directory_are_kept_apart_and_leftovers_are_swept(tmp_path: Path):
    store = Store(tmp_path)
    leftover = store.cells / ".abc.0123456789abcdef.parquet"
    leftover.write_bytes(b"half")
    with store.lock(), pytest.raises(StudyError, match="another run is writing"), Store(tmp_path).lock():
        pass
    assert not leftover.exists()
    broken = store.cells / "abc.parquet"
    broken.write_bytes(b"not parquet")
    with pytest.raises(StudyError, match=r"abc\.parquet cannot be read .* remove it"):
        read_rows(broken)
    with pytest.raises(StudyError, match=r"--out: the directory /proc/nope/.* cannot be made \(.*; choose another"):
        Store(Path("/proc/nope"))


def test_rows_with_different_columns_and_lists_survive(tmp_path: Path):
    rows = [{"a": 1, "b": [1.0, 2.0], "c": None}, {"a": 2, "d": "ü"}]
    write_rows(tmp_path / "rows.parquet", rows)
    back = read_rows(tmp_path / "rows.parquet").rows
    assert back == [{"a": 1, "b": [1.0, 2.0], "c": None, "d": None}, {"a": 2, "b": None, "c": None, "d": "ü"}]
