"""Studies: from a TOML to rows to pictures, through processes that are killed in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import fedkin
from fedkin.datasets import paper_design
from fedkin.errors import ParameterError
from fedkin.studies import checks
from fedkin.studies.config import BUILT_IN, load_study, parse_study, replication_seed
from fedkin.studies.designs import false_edge_design, make_design
from fedkin.studies.estimators import Settings, Workbench
from fedkin.studies.launch import launch
from fedkin.studies.pool import WorkerError, map_in_processes
from fedkin.studies.preflight import check_study
from fedkin.studies.progress import Progress, TimeLeft, duration
from fedkin.studies.report import write_report
from fedkin.studies.runner import run_study
from fedkin.studies.store import Store, StudyError, read_rows, read_seconds, write_rows
from fedkin.studies.summary import Summary, paired_difference
from fedkin.studies.tables import make_table
from fedkin.studies.tasks import Job, Replication, find_function, run_job
from fedkin.studies.validation import fold_scores, validated_lam

SMALL = """
[study]
name = "small"
title = "A small study"
task = "own:task"
seed = 3
replications = 6
block = 2

[[grid]]
n = [10, 20]
kind = ["a", "b"]

[[figure]]
name = "picture"
x = "n"
y = "value"
series = "kind"
columns = "side"

[[table]]
name = "means"
value = "value"
columns = "kind"
rows = ["n"]
"""

OWN = """
import os, time
from pathlib import Path
import numpy as np

def task(replication):
    log = replication.options.get("log")
    if log:
        with open(log, "a") as handle:  # one short write: lines of two processes do not mix
            handle.write(f"{os.getpid()} {replication.params} {replication.number}\\n")
    time.sleep(replication.options.get("sleep", 0.0))
    rng = np.random.default_rng(replication.seed)
    for side in ("left", "right"):
        value = float(rng.normal(loc=replication.params["n"]))
        yield {"side": side, "value": value, "threads": os.environ["OMP_NUM_THREADS"]}

def failing(replication):
    raise ZeroDivisionError("seven over nothing")
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A study with its own task, as a user would write it."""
    (tmp_path / "own.py").write_text(OWN)
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


# --- a study as data ------------------------------------------------------------------------------------------


def test_grid_is_a_union_of_products_and_blocks_come_round_by_round():
    study = parse_study(SMALL + '[[grid]]\nn = 30\nkind = "a"\n', "test")
    assert [tuple(point.values()) for point in study.points] == [(10, "a"), (10, "b"), (20, "a"), (20, "b"), (30, "a")]


def test_cells_cover_every_replication_once(small: Path):
    study = load_study(small)
    sys.path.insert(0, str(small.parent))
    try:
        cells = study.cells()
    finally:
        sys.path.remove(str(small.parent))
    assert len(cells) == 4 * 3
    assert [cell.replications[0] for cell in cells] == [0] * 4 + [2] * 4 + [4] * 4
    seen = [(cell.point, number) for cell in cells for number in cell.replications]
    assert len(set(seen)) == len(seen) == 4 * 6
    seeds = [seed for cell in cells for seed in cell.seeds]
    assert len(set(seeds)) == len(seeds)
    assert len({cell.key for cell in cells}) == len(cells)


def test_a_seed_depends_on_its_own_point_only():
    # fixed once and for all: rows of old runs must stay reproducible
    assert replication_seed(1, {"n": 50, "varrho": 0.1}, 0) == replication_seed(1, {"varrho": 0.1, "n": 50}, 0)
    assert replication_seed(1, {"n": 50}, 7) == 9200986603349319574
    text = SMALL.replace('task = "own:task"', 'task = "estimation"')
    few = parse_study(text, "test").cells()
    more = parse_study(text + "[[grid]]\nn = [40]\nkind = ['a']\n", "test").cells()
    by_key = {cell.key: cell.seeds for cell in more}
    assert all(by_key[cell.key] == cell.seeds for cell in few)


def test_shared_entries_are_compared_on_the_same_numbers():
    text = SMALL.replace('task = "own:task"', 'task = "estimation"\nshared = ["kind"]')
    cells = parse_study(text, "test").cells()
    first = {(cell.params["n"], cell.params["kind"]): cell.seeds for cell in cells[:4]}
    assert first[10, "a"] == first[10, "b"] != first[20, "a"]
    assert len({cell.key for cell in cells}) == len(cells)


def test_quick_changes_what_it_names():
    text = SMALL + '[quick]\nreplications = 1\ngrid = [{n = [10], kind = ["a"]}]\noptions = {depth = 1}\n'
    study = parse_study(text, "test", quick=True)
    assert (len(study.points), study.replications, study.block, study.options["depth"]) == (1, 1, 2, 1)
    assert parse_study(text, "test").replications == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seed = 3", "sed = 3"), "unknown entry 'sed'"),
        (('task = "own:task"', ""), "needs task"),
        (("replications = 6", "replications = 0"), "replications must be a whole number of at least 1, got 0"),
        (("n = [10, 20]", "n = []"), "grid entry 'n' must be a list"),
        (("[[grid]]", "[[gird]]"), "unknown table 'gird'"),
        (("[study]", "[study"), "is not valid TOML"),
        (('name = "small"', 'name = "../evil"'), "name = '../evil' will be the name of files: use only letters"),
        (('name = "small"', 'name = "small-quick"'), "ends in -quick"),
        (('name = "picture"', 'name = "/tmp/x"'), "[[figure]] '/tmp/x': name = '/tmp/x' will be the name of files"),
        (('name = "means"', 'name = "a.b"'), "[[table]] 'a.b': name = 'a.b' will be the name of files"),
        (("seed = 3", "seed = -3"), "seed must be a whole number of at least 0, got -3"),
        (("seed = 3", "seed = true"), "seed must be a whole number of at least 0, got True"),
        (('title = "A small study"', "title = 7"), "title must be a text"),
        (("seed = 3", 'shared = "kind"'), "shared must be a list of texts"),
        (('y = "value"', 'y = "value"\nyscale = "log"'), "[[figure]] 'picture': unknown entry 'yscale'; known ones"),
        (('y = "value"', 'y = "value"\ny_scale = "lg"'), '[[figure]] \'picture\': y_scale must be "linear" or "log"'),
        (('y = "value"', ""), "[[figure]] 'picture': y is missing; add y = "),
        (('x = "n"', 'kind = "bars"\nx = "n"'), "unknown kind 'bars'; give one of lines"),
        (('value = "value"', ""), "[[table]] 'means': value is missing; add value = "),
        (('value = "value"', 'vlue = "value"'), "[[table]] 'means': unknown entry 'vlue'"),
        (('rows = ["n"]', 'rows = "n"'), "[[table]] 'means': rows must be a list of texts"),
        (("[[table]]", "[table]"), "begin each table with a line [[table]]"),
        (("[study]", "[quick]\nreplicatons = 1\n[study]"), "[quick]: unknown entry 'replicatons'"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(change: tuple[str, str], message: str):
    with pytest.raises(ParameterError, match=r"some\.toml"):
        parse_study(SMALL.replace(*change), "some.toml")
    with pytest.raises(ParameterError) as caught:
        parse_study(SMALL.replace(*change), "some.toml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("own:task", "nothing"), "[study]: unknown task 'nothing'; give one of estimation, selection"),
        (("own:task", "nowhere:task"), "[study]: task = 'nowhere:task': there is no module 'nowhere'; put nowhere.py"),
        (("own:task", "own:tsk"), "own.py has no function 'tsk'"),
        (("own:task", "broken:task"), "broken.py, line 1"),
        (("seed = 3", 'checks = "own:checks"'), "[study]: checks = 'own:checks'"),
        (('x = "n"', 'kind = "own:bars"'), "[[figure]] 'picture': kind = 'own:bars'"),
        (
            ("own:task", "estimation"),
            "[options]: estimators must be a list of names, got 'es'; write estimators = ['es']",
        ),
        (("ESTIMATORS", '["es", "eS"]'), "[options]: estimators has an unknown name 'eS'; choose from local"),
        (("GENERATOR", "papers"), "[options]: unknown generator 'papers'; give one of paper, false_edges"),
        (("GENERATOR", "own:design"), "[options]: generator = 'own:design'"),
    ],
)
def test_what_is_not_there_is_said_before_a_worker_starts(small: Path, change: tuple[str, str], message: str):
    small.with_name("broken.py").write_text("def task(:\n")
    text = SMALL + "[options]\ngenerator = 'GENERATOR'\nestimators = ESTIMATORS\n"
    if change[0] in ("ESTIMATORS", "GENERATOR"):
        text = text.replace("own:task", "estimation")
    text = text.replace(*change).replace("GENERATOR", "paper").replace("ESTIMATORS", '"es"')
    small.write_text(text)
    with pytest.raises(ParameterError) as caught:
        launch(None, config=small, out=small.with_name("out"), jobs=1)
    assert message in str(caught.value) and "small.toml" in str(caught.value) and "\n" not in str(caught.value)
    assert not small.with_name("out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ('y = "value"', 'y = "vale"'),
            r"figure 'picture': no row has the column 'vale' \(y\); there are study, n, kind",
        ),
        (('columns = "side"', 'columns = "sid"'), r"figure 'picture': no row has the column 'sid' \(columns\)"),
        (('y = "value"', 'y = "kind"'), r"figure 'picture': column 'kind' \(y\) holds 'a', not numbers"),
        (('value = "value"', 'value = "vale"'), r"table 'means': no row has the column 'vale' \(value\)"),
        (('rows = ["n"]', 'rows = ["n", "m"]'), r"table 'means': no row has the column 'm' \(rows\[1\]\)"),
        (('rows = ["n"]', 'rows = ["n"]\nwhere = {n = 3}'), r"table 'means': no row has \{'n': 3\} \(where\)"),
    ],
)
def test_columns_that_no_row_has_are_named_and_the_rows_are_kept(
    small: Path, tmp_path: Path, change: tuple[str, str], message: str
):
    text = SMALL.replace("replications = 6", "replications = 1")
    small.write_text(text.replace(*change))
    with pytest.raises(ParameterError, match=message + ".*the rows are safe"):
        launch(None, config=small, out=tmp_path / "out", jobs=1)
    small.write_text(text)
    assert run_study(load_study(small), tmp_path / "out", jobs=1).computed == 0


def test_an_unknown_study_lists_the_known_ones():
    with pytest.raises(ParameterError, match=r"estimation, sensitivity, .*election"):
        load_study("estimaton")


def test_edited_code_is_not_mistaken_for_what_was_run(small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(small.parent))
    before = [cell.key for cell in load_study(small).cells()]
    assert before == [cell.key for cell in load_study(small).cells()]
    small.with_name("own.py").write_text(OWN + "\n# another thought\n")
    assert not set(before) & {cell.key for cell in load_study(small).cells()}
    assert not set(before) & {cell.key for cell in load_study(small).cells(fingerprint="other data")}


def test_a_picture_is_no_reason_to_run_again(small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(small.parent))
    before = [cell.key for cell in load_study(small).cells()]
    small.write_text(
        SMALL.replace('title = "A small study"', 'title = "Another title"').replace('x = "n"', 'x = "kind"')
    )
    assert before == [cell.key for cell in load_study(small).cells()]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_studies_are_whole(name: str, quick: bool):
    study = load_study(name, quick=quick)
    assert study.name == name and study.title and study.about and study.figures and study.tables
    assert callable(find_function(str(study.checks), "checks"))
    assert len(study.cells()) >= 1
    assert all(figure["name"] and figure["caption"] for figure in study.figures)


def test_estimation_is_the_papers_grid():
    study = load_study("estimation")
    assert len(study.points) == 30 and study.replications == 100
    assert {point["n_devices"] for point in study.points} == {20, 40, 60, 80, 100}
    assert {point["n_samples"] for point in study.points} == {50, 100, 200}


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


def _same(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name != "cpu_seconds"}


def test_rows_carry_seed_versions_and_cpu(small: Path, tmp_path: Path):
    run = run_study(load_study(small), tmp_path / "out", jobs=2)
    assert (run.computed, run.cached, len(run.rows)) == (12, 0, 4 * 6 * 2)
    row = run.rows[0]
    assert (
        row["fedkin"] == fedkin.__version__ and row["numpy"] == np.__version__ and row["cpu"] and row["threads"] == "1"
    )
    rng = np.random.default_rng(row["seed"])
    assert row["value"] == rng.normal(loc=row["n"])
    again = run_study(load_study(small), tmp_path / "out", jobs=1)
    assert (again.computed, again.cached) == (0, 12)
    assert again.rows == run.rows


def test_more_replications_only_add(small: Path, tmp_path: Path):
    first = run_study(load_study(small), tmp_path / "out", jobs=1)
    small.write_text(SMALL.replace("replications = 6", "replications = 8"))
    second = run_study(load_study(small), tmp_path / "out", jobs=1)
    assert (second.computed, second.cached) == (4, 12)
    kept = [row for row in second.rows if row["replication"] < 6]
    assert sorted(map(str, kept)) == sorted(map(str, first.rows))


def test_a_quick_run_leaves_a_full_one_alone(small: Path, tmp_path: Path):
    small.write_text(SMALL + "[quick]\nreplications = 2\n")
    out = tmp_path / "out"
    (full,) = launch(None, config=small, out=out, jobs=1)
    files = sorted(path for path in (out / "small").rglob("*") if path.is_file())
    before = {path: path.read_bytes() for path in files}
    (quick,) = launch(None, config=small, out=out, jobs=1, quick=True)
    assert full.page == out / "small" / "index.html" and quick.page == out / "small-quick" / "index.html"
    assert {path: path.read_bytes() for path in (out / "small").rglob("*") if path.is_file()} == before
    assert len(read_rows(out / "small-quick" / "rows.parquet")) == 4 * 2 * 2


def test_a_failing_task_names_its_cell_and_keeps_the_rest(small: Path, tmp_path: Path):
    small.write_text(SMALL.replace("own:task", "own:failing"))
    with pytest.raises(StudyError, match=r"n=10, kind=a, replications 0 to 1 .*\n(.*\n)*.*seven over nothing"):
        run_study(load_study(small), tmp_path / "out", jobs=1)


def test_a_generator_that_is_not_there(small: Path, tmp_path: Path):
    small.write_text(SMALL.replace("own:task", "nowhere:task"))
    with pytest.raises(ParameterError, match="no module 'nowhere'"):
        run_study(load_study(small), tmp_path / "out", jobs=1)


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


def _slow(small: Path) -> Path:
    """The small study with 24 cells that take a while, and a log of what was run."""
    log = small.with_name("log.txt")
    text = (
        SMALL.replace("replications = 6", "replications = 12")
        + f"\n[options]\nsleep = 0.05\nlog = {json.dumps(str(log))}\n"
    )
    small.write_text(text)
    return log


def _wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_in_the_middle_and_started_again_gives_the_same_rows(small: Path, tmp_path: Path):
    log = _slow(small)
    out = tmp_path / "killed"
    process = subprocess.Popen(_command(small, out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        _wait_for(lambda: len(list((out / "small" / "cells").glob("*.parquet"))) >= 4)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    finished = len(list((out / "small" / "cells").glob("*.parquet")))
    assert 4 <= finished < 24
    assert not (out / "small" / "rows.parquet").exists()
    workers = {int(line.split()[0]) for line in log.read_text().splitlines()}
    assert 1 <= len(workers) <= 2
    _wait_for(lambda: not any(_alive(pid) for pid in workers), 20.0)  # no ghosts

    before = log.read_text().splitlines()
    done = subprocess.run(_command(small, out), capture_output=True, text=True, timeout=120, check=True)
    assert f"{finished} found finished" in done.stderr
    assert Path(done.stdout.strip()) == out / "small" / "index.html"
    again = log.read_text().splitlines()[len(before) :]
    # nothing that was stored is done again; nothing is lost
    assert len(again) == 2 * (24 - finished)
    rows = read_rows(out / "small" / "rows.parquet")
    untouched = run_study(load_study(small), tmp_path / "whole", jobs=2).rows
    assert len(rows) == 4 * 12 * 2
    assert [_same(row) for row in rows] == [_same(row) for row in untouched]


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
def test_ctrl_c_leaves_no_process_and_no_half_file(small: Path, tmp_path: Path):
    log = _slow(small)
    out = tmp_path / "stopped"
    process = subprocess.Popen(_command(small, out), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        _wait_for(lambda: len(list((out / "small" / "cells").glob("*.parquet"))) >= 2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    workers = {int(line.split()[0]) for line in log.read_text().splitlines()}
    _wait_for(lambda: not any(_alive(pid) for pid in workers), 20.0)
    assert not list((out / "small").rglob("*.writing"))
    for part in (out / "small" / "cells").glob("*.parquet"):
        assert read_rows(part)


def test_two_runs_in_one_directory_are_kept_apart(tmp_path: Path):
    store = Store(tmp_path / "one")
    with store.lock(), pytest.raises(StudyError, match="another run is writing"), Store(tmp_path / "one").lock():
        pass
    with store.lock():
        pass


def test_leftovers_of_a_kill_are_swept_and_broken_files_named(tmp_path: Path):
    store = Store(tmp_path)
    leftover = store.cells / "abc.parquet.writing"
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
    back = read_rows(tmp_path / "rows.parquet")
    assert back == [{"a": 1, "b": [1.0, 2.0], "c": None, "d": None}, {"a": 2, "b": None, "c": None, "d": "ü"}]


# --- what is shown --------------------------------------------------------------------------------------------


def test_everything_is_drawn_from_the_rows_alone(small: Path, tmp_path: Path):
    study = load_study(small)
    run = run_study(study, tmp_path / "out", jobs=1)
    write_report(study, run.folder, "made in a test")
    names = ["picture.svg", "picture.pdf", "picture.png", "means.md", "means.csv", "index.html"]
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "rows.parquet").write_bytes((run.folder / "rows.parquet").read_bytes())
    write_report(study, alone, "made in a test")
    for name in names:
        assert (alone / name).read_bytes() == (run.folder / name).read_bytes(), name
    page = (alone / "index.html").read_text()
    assert (
        "A small study" in page
        and "data:image/svg+xml;base64," in page
        and "http" not in page.replace("http://www.w3", "")
    )


def test_a_page_drawn_again_still_tells_the_computing_time(small: Path, tmp_path: Path):
    small.write_text(SMALL.replace("replications = 6", "replications = 2") + "[options]\nsleep = 0.6\n")
    (first,) = launch(None, config=small, out=tmp_path / "out", jobs=2)
    assert "4 cells computed in" in first.page.read_text()
    took = [read_seconds(path) for path in (tmp_path / "out" / "small" / "cells").glob("*.parquet")]
    assert all(1.2 <= one < 10 for one in took)
    (again,) = launch(None, config=small, out=tmp_path / "out", jobs=2)
    page = again.page.read_text()
    assert f"4 cells found finished, all 4 took {duration(sum(took))} in sum (each in one process)." in page
    # parts from before times were noted
    part = next((tmp_path / "out" / "small" / "cells").glob("*.parquet"))
    write_rows(part, read_rows(part))
    (third,) = launch(None, config=small, out=tmp_path / "out", jobs=2)
    assert "all 4 (1 of them without a noted time) took" in third.page.read_text()


def test_tables_are_means_with_standard_errors():
    rows = [{"n": 10, "kind": "a", "value": value} for value in (1.0, 2.0, 3.0)] + [
        {"n": 10, "kind": "b", "value": 5.0}
    ]
    table = make_table({"name": "t", "rows": ["n"], "columns": "kind", "value": "value"}, rows)
    assert table.head == ["n", "a", "b"] and table.text == [["10", "2.000 (0.577)", "5.000"]]
    assert table.exact[0] == [10, "a", 2.0, 1.0, pytest.approx(3**-0.5), 3]
    assert table.markdown().splitlines()[0] == "| n | a | b |"


@pytest.mark.parametrize(("panels", "series"), [(1, 2), (3, 6), (2, 4)])
def test_legends_do_not_cover_panels(panels: int, series: int):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from fedkin.studies.figures import line_panels

    rng = np.random.default_rng(0)
    rows = [
        {"x": x, "y": float(rng.random() + 0.1), "series": f"a rather long name {s}", "panel": panel}
        for x in (1, 2, 3)
        for s in range(series)
        for panel in range(panels)
        for _ in range(4)
    ]
    figure = line_panels(
        {"x": "x", "y": "y", "series": "series", "columns": "panel", "x_label": "x", "y_label": "y"}, rows
    )
    FigureCanvasAgg(figure).draw()
    legend = figure.legends[0].get_window_extent()
    whole = figure.bbox
    assert legend.x0 >= whole.x0 and legend.x1 <= whole.x1 and legend.y1 <= whole.y1
    for axis in figure.axes:
        assert not legend.overlaps(axis.get_tightbbox())


def test_availability_says_what_it_shows_and_the_label_fits():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from fedkin.studies.figures import line_panels

    study = load_study("availability")
    (spec,) = study.figures
    assert spec["y"] == "distance"
    assert all("squared distance" in text.lower() for text in (study.title, spec["y_label"], spec["caption"]))
    assert all("squared" in table["caption"] for table in study.tables)
    points = [(p, name) for p in (0.3, 1.0) for name in study.options["variants"]]
    figure = line_panels(spec, [{"availability": p, "variant": name, "distance": 1e-3 / p} for p, name in points])
    FigureCanvasAgg(figure).draw()
    (label,) = [text for text in figure.texts if text.get_text() == spec["y_label"]]
    extent = label.get_window_extent()
    assert extent.y0 >= 0 and extent.y1 <= figure.bbox.y1


def test_intervals_against_scipy_and_statsmodels():
    from scipy import stats
    from statsmodels.stats.proportion import proportion_confint

    x = np.random.default_rng(1).normal(size=12)
    summary = Summary.of(x)
    low, high = stats.t.interval(0.95, 11, loc=x.mean(), scale=stats.sem(x))
    assert (summary.mean - summary.half_width, summary.mean + summary.half_width) == pytest.approx((low, high))
    zeros = Summary.of([1.0] * 17 + [0.0] * 3)
    assert zeros.wilson() == pytest.approx(proportion_confint(17, 20, method="wilson"))
    y = x + np.random.default_rng(2).normal(size=12)
    rows = [{"replication": r, "m": m, "v": v[r]} for r in range(12) for m, v in (("x", x), ("y", y))]
    difference = paired_difference(rows, "m", "x", "y", "v")
    assert difference.mean / difference.error == pytest.approx(stats.ttest_rel(x, y).statistic)


def test_durations():
    assert [duration(seconds) for seconds in (0, 59.4, 61, 3600)] == ["0 s", "59 s", "1 min 1 s", "1 h 0 min"]


def test_lines_come_while_no_cell_ends():
    stream = StringIO()
    with Progress("slow", 3, 0, stream, every=0.05) as progress:
        _wait_for(lambda: stream.getvalue().count("slow: 0 of 3 cells\n") >= 2, 10.0)
        progress.advance(None)
        _wait_for(lambda: "slow: 1 of 3 cells\n" in stream.getvalue(), 10.0)
        progress.advance(10_000.0)
        _wait_for(lambda: "slow: 2 of 3 cells, 2 h 46 min left\n" in stream.getvalue(), 10.0)
        progress.advance(0.0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "slow: 3 cells" and lines[-1] == "slow: 3 of 3 cells, done"
    time.sleep(0.15)
    assert stream.getvalue().splitlines() == lines  # silent after the end


def test_no_time_left_before_every_process_has_ended_a_cell():
    cells = parse_study(ESTIMATION, "test").cells()
    assert [TimeLeft(cells, jobs=2).finished(cells[0], 5.0), TimeLeft(cells, jobs=1).finished(cells[0], 5.0)] == [
        None,
        5,
    ]
    left = TimeLeft(cells[:1], jobs=8)
    assert left.finished(cells[0], 5.0) == 0.0


def test_the_example_of_the_documentation(repository: Path, tmp_path: Path):
    text = (repository / "docs" / "studies.md").read_text(encoding="utf-8")
    for language, name in (("python", "chains.py"), ("toml", "chains.toml")):
        block = text.partition(f"```{language}\n# {name}\n")[2].partition("```")[0]
        assert block
        (tmp_path / name).write_text(block)
    study = load_study(tmp_path / "chains.toml", quick=True)
    run = run_study(study, tmp_path / "out", jobs=1)
    assert len(run.rows) == 4 * 3 * 5
    report = write_report(study, run.folder)
    assert report.page.exists() and len(report.tables[0].text) == 4
    # two groups of devices that differ by much: the chain knows, one model for all does not
    far = [row for row in run.rows if row["jump"] == 2.0]
    error = {name: np.mean([row["error"] for row in far if row["estimator"] == name]) for name in ("global", "fedadmm")}
    assert error["fedadmm"] < 0.2 * error["global"]


# --- what a cell computes -------------------------------------------------------------------------------------


def _least_squares(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.linalg.lstsq(X, y, rcond=None)[0]


def test_estimators_against_plain_least_squares():
    design = paper_design(12, 40, 3, 3, varrho=0.2, seed=4)
    bench = Workbench(design, Settings(n_lams=6), seed=1)
    X, y = design.federation.X.reshape(12, 40, 3), design.federation.y.reshape(12, 40)
    local = np.stack([_least_squares(X[u], y[u]) for u in range(12)])
    np.testing.assert_allclose(bench.estimate("local").theta, local, atol=1e-8)
    pooled = np.stack(
        [_least_squares(X[design.labels == k].reshape(-1, 3), y[design.labels == k].ravel()) for k in design.labels]
    )
    np.testing.assert_allclose(bench.estimate("pooled").theta, pooled, atol=1e-8)
    everyone = _least_squares(X.reshape(-1, 3), y.ravel())
    np.testing.assert_allclose(bench.estimate("global").theta, np.tile(everyone, (12, 1)), atol=1e-8)
    attainable = bench.estimate("attainable")
    labels = attainable.graph.components()
    assert (design.labels[attainable.graph.edges[:, 0]] == design.labels[attainable.graph.edges[:, 1]]).all()
    for k in np.unique(labels):
        own = _least_squares(X[labels == k].reshape(-1, 3), y[labels == k].ravel())
        np.testing.assert_allclose(attainable.theta[labels == k], np.tile(own, ((labels == k).sum(), 1)), atol=1e-8)


def test_penalised_estimators_solve_their_own_problem():
    design = paper_design(12, 40, 3, 3, varrho=0.2, seed=4)
    bench = Workbench(design, Settings(n_lams=6, tol=1e-8), seed=1)
    for name in ("fedadmm", "es", "local-es", "oracle"):
        found = bench.estimate(name)
        exact = fedkin.solve(fedkin.Problem(design.federation, found.graph, lam=found.lam), 1e-10)
        np.testing.assert_allclose(found.theta, exact.theta, atol=1e-3)
    kept = {tuple(edge) for edge in bench.estimate("es").graph.edges}
    assert kept <= {tuple(edge) for edge in design.graph.edges}
    assert bench.estimate("oracle").graph == design.truth


@pytest.mark.parametrize(("n_samples", "loss"), [(40, "linear"), (12, "mean"), (5, "linear")])
def test_bulk_validation_gives_the_scores_of_the_library(n_samples: int, loss: str):
    # five rows for four parameters: training sets are singular
    design = paper_design(9, n_samples, 4, 3, varrho=0.2, seed=2)
    graph = design.graph.reweighted(np.linspace(0.5, 2.0, design.graph.n_edges))
    problem = fedkin.Problem(design.federation, graph, loss=loss)
    lams = np.geomspace(0.1, 1e-3, 6)
    expected = fedkin.cross_validate_lam(problem, lams, folds=4, seed=3, tol=1e-9)
    found = fold_scores(problem, lams, folds=4, seed=3, tol=1e-9)
    np.testing.assert_allclose(found, expected.scores, rtol=2e-4)
    assert validated_lam(problem, lams, folds=4, seed=3, tol=1e-9) == expected.lam


def test_validation_of_other_losses_is_the_librarys():
    design = paper_design(6, 30, 2, 2, loss="logistic", seed=2)
    problem = fedkin.Problem(design.federation, design.graph, loss="logistic", ridge=0.01)
    lams = np.geomspace(0.1, 1e-3, 4)
    expected = fedkin.cross_validate_lam(problem, lams, folds=3, seed=3, tol=1e-4)
    assert validated_lam(problem, lams, folds=3, seed=3, tol=1e-4) == expected.lam


@pytest.mark.parametrize(
    ("task", "option", "message"),
    [
        ("selection", 'variances = "model"', r"variances must be a list .*write variances = \['model'\]"),
        (
            "selection",
            'variances = ["modle"]',
            "variances has an unknown name 'modle'; choose from model, sandwich, bart",
        ),
        ("convergence", 'methods = ["fedadmm"]', "methods has an unknown name 'fedadmm'; choose from fedadmm-full"),
        ("availability", 'variants = ["known"]', "variants has an unknown name 'known'; choose from known-central"),
        ("election", 'methods = ["fed"]', "methods has an unknown name 'fed'; choose from always-republican"),
    ],
)
def test_names_among_the_options_of_built_in_tasks(task: str, option: str, message: str):
    study = parse_study(f'[study]\nname = "s"\ntask = "{task}"\n[options]\n{option}\n', "some.toml")
    with pytest.raises(ParameterError, match=rf"some\.toml, \[options\]: {message}"):
        check_study(study)


def test_unknown_names_are_refused():
    bench = Workbench(paper_design(4, 30, 2, 2), Settings(), seed=0)
    with pytest.raises(ParameterError, match="unknown estimator 'best'; choose from local"):
        bench.estimate("best")
    with pytest.raises(ParameterError, match="unknown task 'nothing'"):
        find_function("nothing", "task")
    with pytest.raises(ParameterError, match="has no function 'nothing'"):
        find_function("fedkin.studies.tasks:nothing", "task")


ESTIMATION = """
[study]
name = "tiny"
task = "estimation"
replications = 2
block = 2
[[grid]]
n_devices = [8]
false_edges = [0, 3]
[options]
generator = "false_edges"
design = { n_samples = 30, n_features = 2, n_clusters = 2 }
n_lams = 5
"""


def test_a_job_gives_the_same_rows_every_time():
    cells = parse_study(ESTIMATION, "test").cells()
    for cell in cells:
        first, second = (run_job(Job(cell))[0] for _ in range(2))
        assert [_same(row) for row in first] == [_same(row) for row in second]
        by_name = {row["estimator"]: row for row in first if row["replication"] == 0}
        S = cell.params["false_edges"]
        K = 1 if S else 2
        assert by_name["fedadmm"]["edges_across"] == S and by_name["fedadmm"]["edges"] == 12 + S
        assert by_name["fedadmm"]["rate"] == pytest.approx(2 * (K + S) / (30 * 8))
        assert by_name["oracle"]["components"] == 2


def test_warnings_stay_with_their_rows(small: Path):
    own = small.with_name("loud.py")
    own.write_text("import warnings\ndef task(r):\n    warnings.warn('careful')\n    yield {'value': 1.0}\n")
    small.write_text(SMALL.replace("own:task", "loud:task"))
    study = load_study(small)
    sys.path.insert(0, str(small.parent))
    try:
        rows, seconds = run_job(Job(study.cells()[0], study.folder))
    finally:
        sys.path.remove(str(small.parent))
    assert [row["warnings"] for row in rows] == ["careful", "careful"] and seconds >= 0


def test_false_edges_are_exactly_as_many_and_all_false():
    design = false_edge_design(12, 10, 2, 3, false_edges=9, seed=5)
    across = design.labels[design.graph.edges[:, 0]] != design.labels[design.graph.edges[:, 1]]
    assert across.sum() == 9 and (~across).sum() == design.truth.n_edges
    with pytest.raises(ParameterError, match="between 0 and the 48 pairs"):
        false_edge_design(12, 10, 2, 3, false_edges=49)


def test_a_generator_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text(
        dedent("""
        from fedkin.datasets import paper_design
        def small(n_devices, seed):
            return paper_design(n_devices, 30, 2, 2, seed=seed)
        def wrong(seed):
            return 3
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made = make_design(Replication({"n_devices": 6, "level": 0.1}, {"generator": "mine:small"}, 0, 5))
    assert made.federation.n_devices == 6
    np.testing.assert_array_equal(made.federation.X, paper_design(6, 30, 2, 2, seed=5).federation.X)
    with pytest.raises(ParameterError, match=r"a fedkin\.datasets\.Design is expected"):
        make_design(Replication({}, {"generator": "mine:wrong"}, 0, 5))
    with pytest.raises(ParameterError, match="generator 'mine:small' was called with"):
        make_design(Replication({}, {"generator": "mine:small"}, 0, 5))


def test_edge_selection_rows_against_scipy():
    from scipy.stats import chi2

    from fedkin.studies.edge_selection import edge_selection

    options = {"design": {"n_devices": 10, "n_features": 3, "n_clusters": 2, "varrho": 0.3}, "variances": ["bartlett"]}
    replication = Replication({"n_samples": 400, "signal": 5.0}, options, 0, 8)
    (row,) = edge_selection(replication)
    assert row["exact"] == 1.0 and row["true_dropped"] == row["false_kept"] == 0
    design = paper_design(10, 400, 3, 2, varrho=0.3, signal=5.0, seed=8)
    i, j = design.graph.edges.T
    squared = ((design.theta_star[i] - design.theta_star[j]) ** 2).sum(axis=1)
    least = squared[squared > 0].min()
    assert row["signal_ratio"] == pytest.approx(400 * least / 2 / (4 * chi2.isf(0.05 / design.graph.n_edges, 3)))
    weak = Replication({"n_samples": 20, "signal": 0.01}, options, 0, 8)
    (row,) = edge_selection(weak)
    assert row["exact"] == 0.0 and row["false_kept"] > 0 and row["signal_ratio"] < 1


TINY = {"design": {"n_devices": 8, "n_samples": 30, "n_features": 2, "n_clusters": 2, "varrho": 0.1}, "n_lams": 5}


def test_availability_rows_are_paired():
    from fedkin.studies.algorithms import VARIANTS, availability

    options = {**TINY, "rounds": 200}
    rows = {row["variant"]: row for row in availability(Replication({"availability": 0.5}, options, 0, 6))}
    assert set(rows) == set(VARIANTS)
    for weighting in ("known", "estimated"):
        assert rows[f"{weighting}-central"]["distance"] == rows[f"{weighting}-replicas"]["distance"]
    assert rows["known-central"]["distance"] != rows["estimated-central"]["distance"]
    always = {row["variant"]: row for row in availability(Replication({"availability": 1.0}, options, 0, 6))}
    assert always["known-central"]["distance"] == always["estimated-central"]["distance"]
    assert always["known-central"]["distance"] < rows["known-central"]["distance"]


def test_convergence_rows_end_at_the_minimiser():
    from fedkin.studies.algorithms import convergence

    rows = list(convergence(Replication({}, {**TINY, "rounds": 300}, 0, 6)))
    curves = {
        name: [row for row in rows if row["method"] == name] for name in ("fedadmm-full", "fedadmm-batch", "gd", "sgd")
    }
    assert all(curve[-1]["round"] == 300 for curve in curves.values())
    assert all(len({row["round"] for row in curve}) == len(curve) for curve in curves.values())
    end = curves["fedadmm-full"][-1]
    assert end["distance"] < 1e-8 and end["error"] == pytest.approx(end["error_of_minimiser"], abs=1e-3)
    assert curves["sgd"][-1]["distance"] < curves["sgd"][0]["distance"]


# --- claims ---------------------------------------------------------------------------------------------------


def _estimation_rows(es: float, local: float = 20 / 79) -> list[dict[str, object]]:
    point = {"varrho": 0.1, "n_samples": 100, "n_devices": 20}
    errors = {"local": local, "oracle": 0.05, "es": es, "attainable": 0.05, "pooled": 0.05}
    return [
        {**point, "replication": r, "estimator": name, "error": error * (1 + 0.01 * r)}
        for name, error in errors.items()
        for r in (-1, 0, 1)
    ]


def test_estimation_claims_hold_and_fail():
    assert [check.holds for check in checks.estimation(_estimation_rows(0.052))] == [True, True, True]
    assert [check.holds for check in checks.estimation(_estimation_rows(0.06))] == [False, False, True]
    assert [check.holds for check in checks.estimation(_estimation_rows(0.05, local=0.3))] == [True, True, False]


def _sensitivity_rows(slope: float, es: float) -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    errors = {"local": 0.7, "es": es, "local-es": 0.1}
    return [
        {
            "n_samples": 50,
            "n_devices": 40,
            "varrho": varrho,
            "replication": r,
            "estimator": name,
            "error": error + (slope * varrho if name == "local-es" else 0) + 0.01 * rng.normal(),
        }
        for varrho in (0.0, 0.3, 0.6, 0.9)
        for name, error in errors.items()
        for r in range(20)
    ]


def test_sensitivity_claims_hold_and_fail():
    assert [check.holds for check in checks.sensitivity(_sensitivity_rows(0.0, 0.2))] == [True, True]
    assert [check.holds for check in checks.sensitivity(_sensitivity_rows(0.05, 0.8))] == [False, False]


def test_rate_claims_hold_and_fail():
    def rows(power: float) -> list[dict[str, object]]:
        rng = np.random.default_rng(0)
        falling = {"varied": "n", "n_devices": 40, "n_clusters": 5, "false_edges": 20}
        growing = {"varied": "|S|", "n_devices": 40, "n_clusters": 5, "n_samples": 100}
        out: list[dict[str, object]] = []
        for x in (50, 100, 200):
            for _ in range(10):
                noise = 1 + 0.02 * rng.normal()
                out.append({**falling, "n_samples": x, "rate": 1 / x, "error": x**-power * noise})
                out.append({**growing, "false_edges": x, "rate": 1.0 * x, "error": x**power * noise})
        return out

    assert [check.holds for check in checks.rate(rows(1.0))] == [True, True]
    assert [check.holds for check in checks.rate(rows(1.5))] == [True, False]  # falling faster is no harm
    assert [check.holds for check in checks.rate(rows(0.5))] == [False, True]


def test_availability_claims_hold_and_fail():
    def rows(estimated: float, replicas: float) -> list[dict[str, object]]:
        rng = np.random.default_rng(0)
        out = []
        for p in (0.5, 1.0):
            for r in range(10):
                known = (1 + 0.1 * rng.normal()) / p
                for weighting, factor in (("known", 1.0), ("estimated", estimated)):
                    for placement, shift in (("central", 0.0), ("replicas", replicas)):
                        distance = known * factor + shift
                        out.append(
                            {
                                "availability": p,
                                "replication": r,
                                "variant": f"{weighting}-{placement}",
                                "weighting": weighting,
                                "placement": placement,
                                "distance": distance,
                            }
                        )
        return out

    assert [check.holds for check in checks.availability(rows(1.01, 0.0))] == [True, True, True]
    assert [check.holds for check in checks.availability(rows(1.5, 1e-12))] == [False, False, True]
