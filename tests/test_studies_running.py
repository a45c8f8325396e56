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
from fedkin.errors import ParameterError
from fedkin.studies.config import load_study
from fedkin.studies.launch import launch
from fedkin.studies.pool import WorkerError, map_in_processes
from fedkin.studies.rows import StudyError, read_rows, write_rows
from fedkin.studies.run import Store, run_study
from processes import PATIENCE, wait_for
from small_studies import SMALL, UNDRAWN, without_times

pytestmark = pytest.mark.studies

# --- processes ------------------------------------------------------------------------------------------------


def _square(x: int) -> tuple[int, str]:
    return x * x, os.environ["OMP_NUM_THREADS"]


def _fail_at_three(x: int) -> int:
    if x == 3:
        raise ValueError("three is too much")
    return x


def _die(x: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_pool_gives_every_item_its_own_result(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    found = dict(map_in_processes(_square, range(1, 8), jobs=2))
    assert found == {x: (x * x, "1") for x in range(1, 8)}
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_pool_without_work():
    assert list(map_in_processes(_square, [], jobs=2)) == []


def test_a_failing_worker_tells_where_and_why():
    with pytest.raises(WorkerError, match="three is too much") as caught:
        list(map_in_processes(_fail_at_three, [3], jobs=1))
    assert caught.value.item == 3
    assert "_fail_at_three" in str(caught.value)


def test_a_worker_that_dies_is_noticed():
    with pytest.raises(WorkerError, match="exit code -9"):
        list(map_in_processes(_die, [1], jobs=1))


# --- running, stopping, going on ------------------------------------------------------------------------------


def test_rows_carry_seed_versions_and_cpu(small_study: Path, tmp_path: Path):
    run = run_study(load_study(small_study), tmp_path / "out", jobs=2)
    assert (run.computed, run.cached, len(run.rows)) == (12, 0, 4 * 6 * 2)
    row = run.rows[0]
    assert (
        row["fedkin"] == fedkin.__version__ and row["numpy"] == np.__version__ and row["cpu"] and row["threads"] == "1"
    )
    rng = np.random.default_rng(row["seed"])
    assert row["value"] == rng.normal(loc=row["n"])
    again = run_study(load_study(small_study), tmp_path / "out", jobs=1)
    assert (again.computed, again.cached) == (0, 12)
    assert again.rows == run.rows


def test_more_replications_only_add(small_study: Path, tmp_path: Path):
    first = run_study(load_study(small_study), tmp_path / "out", jobs=1)
    small_study.write_text(SMALL.replace("replications = 6", "replications = 8"))
    second = run_study(load_study(small_study), tmp_path / "out", jobs=1)
    assert (second.computed, second.cached) == (4, 12)
    kept = [row for row in second.rows if row["replication"] < 6]
    assert sorted(map(str, kept)) == sorted(map(str, first.rows))


def test_a_quick_run_leaves_a_full_one_alone(small_study: Path, tmp_path: Path):
    small_study.write_text(UNDRAWN + "[quick]\nreplications = 2\n")
    out = tmp_path / "out"
    (full,) = launch(None, config=small_study, out=out, jobs=1)
    files = sorted(path for path in (out / "small").rglob("*") if path.is_file())
    before = {path: path.read_bytes() for path in files}
    (quick,) = launch(None, config=small_study, out=out, jobs=1, quick=True)
    assert full.page == out / "small" / "index.html" and quick.page == out / "small-quick" / "index.html"
    assert {path: path.read_bytes() for path in (out / "small").rglob("*") if path.is_file()} == before
    assert len(read_rows(out / "small-quick" / "rows.parquet").rows) == 4 * 2 * 2


def test_a_failing_task_names_its_cell_and_keeps_the_rest(small_study: Path, tmp_path: Path):
    small_study.write_text(SMALL.replace("own:task", "own:failing"))
    with pytest.raises(StudyError, match=r"n=10, kind=a, replications 0 to 1 .*\n(.*\n)*.*seven over nothing"):
        run_study(load_study(small_study), tmp_path / "out", jobs=1)


def test_a_worker_that_is_killed_is_reported_with_its_cell_and_the_study_goes_on(small_study: Path, tmp_path: Path):
    cured = tmp_path / "cured"
    options = f"[options]\ncured = {json.dumps(str(cured))}\n"
    small_study.write_text(SMALL.replace("own:task", "own:dying") + options)
    with pytest.raises(StudyError, match=r"stopped at n=20, kind=b, replications 0 to 1 (.*\n)*.*exit code -9"):
        run_study(load_study(small_study), tmp_path / "out", jobs=1)
    cured.touch()
    run = run_study(load_study(small_study), tmp_path / "out", jobs=1)
    assert (run.computed, run.cached) == (9, 3)  # what was finished before is kept


def test_wrong_input_that_only_a_worker_sees_is_one_line(small_study: Path, tmp_path: Path):
    small_study.with_name("own.py").write_text(
        "from fedkin.errors import ParameterError\ndef task(replication):\n    raise ParameterError('n is too odd')\n"
    )
    done = subprocess.run(_command(small_study, tmp_path / "out", 1), capture_output=True, text=True, timeout=PATIENCE)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "stopped at n=10, kind=a, replications 0 to 1 (finished cells are kept): n is too odd" in line


def test_a_directory_that_cannot_be_made_names_out(small_study: Path):
    with pytest.raises(
        StudyError, match=r"--out: the directory /proc/nope/.* cannot be made \(.*; choose another --out"
    ):
        run_study(load_study(small_study), Path("/proc/nope"), jobs=1)


def test_damaged_cells_are_named_first_and_computed_again(
    small_study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, log = tmp_path / "out", small_study.with_name("log.txt")
    small_study.write_text(SMALL + f"\n[options]\nlog = {json.dumps(str(log))}\n")
    first = run_study(load_study(small_study), out, jobs=1)
    store, cells = Store(out / "small"), load_study(small_study).cells()
    whole = store.part(cells[0]).read_bytes()
    store.part(cells[1]).write_bytes(store.part(cells[0]).read_bytes())  # another cell's file, whole
    store.part(cells[5]).write_bytes(store.part(cells[5]).read_bytes()[:-40])  # cut off
    place = whole.index(b"left", 100)  # a byte in the middle, as a bad disk has it
    store.part(cells[0]).write_bytes(whole[:place] + b"L" + whole[place + 1 :])
    capsys.readouterr()
    log.unlink()
    again = run_study(load_study(small_study), out, jobs=1)
    said = capsys.readouterr().err.splitlines()
    assert (again.computed, again.cached) == (3, 9)
    assert [without_times(row) for row in again.rows] == [without_times(row) for row in first.rows]
    assert len(log.read_text().splitlines()) == 3 * 2
    assert [line.endswith("this cell is computed again") for line in said[:4]] == [True, True, True, False]
    assert f"{cells[1].key}.parquet holds the rows of another cell" in said[1]
    assert f"{cells[5].key}.parquet cannot be read (" in said[2]


def test_a_generator_that_is_not_there(small_study: Path, tmp_path: Path):
    small_study.write_text(SMALL.replace("own:task", "nowhere:task"))
    with pytest.raises(ParameterError, match="no module 'nowhere'"):
        run_study(load_study(small_study), tmp_path / "out", jobs=1)


def _command(config: Path, out: Path, jobs: int = 2) -> list[str]:
    return [
        sys.executable,
        "-m",
        "fedkin.cli",
        "study",
        "--config",
        str(config),
        "--out",
        str(out),
        "--jobs",
        str(jobs),
    ]


def _parts(out: Path) -> list[Path]:
    """Finished cells; files that are being written begin with a dot."""
    return [path for path in (out / "small" / "cells").glob("*.parquet") if not path.name.startswith(".")]


def _slow(small_study: Path) -> Path:
    """The small study with 24 cells that take a while, and a log of what was run."""
    log = small_study.with_name("log.txt")
    text = (
        UNDRAWN.replace("replications = 6", "replications = 12")
        + f"\n[options]\nsleep = 0.05\nlog = {json.dumps(str(log))}\n"
    )
    small_study.write_text(text)
    return log


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_in_the_middle_and_started_again_gives_the_same_rows(small_study: Path, tmp_path: Path):
    log = _slow(small_study)
    out = tmp_path / "killed"
    process = subprocess.Popen(_command(small_study, out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(_parts(out)) >= 4)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=PATIENCE)
    finished = len(_parts(out))
    assert 4 <= finished < 24
    assert not (out / "small" / "rows.parquet").exists()
    workers = {int(line.split()[0]) for line in log.read_text().splitlines()}
    assert 1 <= len(workers) <= 2
    wait_for(lambda: not any(_alive(pid) for pid in workers), 20.0)  # no ghosts

    before = log.read_text().splitlines()
    done = subprocess.run(_command(small_study, out), capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert f"{finished} found finished" in done.stderr
    assert Path(done.stdout.strip()) == out / "small" / "index.html"
    again = log.read_text().splitlines()[len(before) :]
    # nothing that was stored is done again; nothing is lost
    assert len(again) == 2 * (24 - finished)
    rows = read_rows(out / "small" / "rows.parquet").rows
    untouched = run_study(load_study(small_study), tmp_path / "whole", jobs=2).rows
    assert len(rows) == 4 * 12 * 2
    assert [without_times(row) for row in rows] == [without_times(row) for row in untouched]


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
def test_ctrl_c_leaves_no_process_and_no_half_file(small_study: Path, tmp_path: Path):
    log = _slow(small_study)
    out = tmp_path / "stopped"
    process = subprocess.Popen(_command(small_study, out), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        wait_for(lambda: len(_parts(out)) >= 2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    workers = {int(line.split()[0]) for line in log.read_text().splitlines()}
    wait_for(lambda: not any(_alive(pid) for pid in workers), 20.0)
    assert not list((out / "small" / "cells").glob(".*"))
    for part in _parts(out):
        assert read_rows(part).rows


def test_two_runs_in_one_directory_are_kept_apart(tmp_path: Path):
    store = Store(tmp_path / "one")
    with store.lock(), pytest.raises(StudyError, match="another run is writing"), Store(tmp_path / "one").lock():
        pass
    with store.lock():
        pass


def test_leftovers_of_a_kill_are_swept_and_broken_files_named(tmp_path: Path):
    store = Store(tmp_path)
    leftover = store.cells / ".abc.0123456789abcdef.parquet"
    leftover.write_bytes(b"half")
    with store.lock():
        assert not leftover.exists()
    broken = store.cells / "abc.parquet"
    broken.write_bytes(b"not parquet")
    with pytest.raises(StudyError, match=r"abc\.parquet cannot be read .* remove it"):
        read_rows(broken)


def test_rows_with_different_columns_and_lists_survive(tmp_path: Path):
    rows = [{"a": 1, "b": [1.0, 2.0], "c": None}, {"a": 2, "d": "ü"}]
    write_rows(tmp_path / "rows.parquet", rows)
    back = read_rows(tmp_path / "rows.parquet").rows
    assert back == [{"a": 1, "b": [1.0, 2.0], "c": None, "d": None}, {"a": 2, "b": None, "c": None, "d": "ü"}]
