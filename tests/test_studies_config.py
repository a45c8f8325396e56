"""Studies as data: from a TOML to cells and seeds, and what is said about a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkin.errors import ParameterError
from fedkin.studies import BUILT_IN, launch, load_study, parse_study, run_study
from fedkin.studies.config import replication_seed
from fedkin.studies.replications import find_function
from small_studies import OWN, SMALL, UNDRAWN


def test_grid_is_a_union_of_products_and_blocks_come_round_by_round():
    study = parse_study(SMALL + '[[grid]]\nn = 30\nkind = "a"\n', "test")
    assert [tuple(point.values()) for point in study.points] == [(10, "a"), (10, "b"), (20, "a"), (20, "b"), (30, "a")]


def test_cells_cover_every_replication_once(small_study: Path):
    cells = load_study(small_study).cells()
    assert len(cells) == 4 * 3
    assert [cell.replications[0].number for cell in cells] == [0] * 4 + [2] * 4 + [4] * 4
    assert [str(cell) for cell in cells[:2]] == [f"n=10, kind={kind}, replications 0 to 1" for kind in "ab"]
    seen = [(str(one.params), one.number) for cell in cells for one in cell.replications]
    assert len(set(seen)) == len(seen) == 4 * 6
    seeds = [one.seed for cell in cells for one in cell.replications]
    assert len(set(seeds)) == len(seeds)
    assert len({cell.key for cell in cells}) == len(cells)


def test_a_seed_depends_on_its_own_point_only():
    # fixed once and for all: rows of old runs must stay reproducible
    assert replication_seed(1, {"n": 50, "varrho": 0.1}, 0) == replication_seed(1, {"varrho": 0.1, "n": 50}, 0)
    assert replication_seed(1, {"n": 50}, 7) == 9200986603349319574
    text = SMALL.replace('task = "own:task"', 'task = "estimation"')
    few = parse_study(text, "test").cells()
    more = parse_study(text + "[[grid]]\nn = [40]\nkind = ['a']\n", "test").cells()
    by_key = {cell.key: cell.replications for cell in more}
    assert all(by_key[cell.key] == cell.replications for cell in few)


def test_shared_entries_are_compared_on_the_same_numbers():
    text = SMALL.replace('task = "own:task"', 'task = "estimation"\nshared = ["kind"]')
    cells = parse_study(text, "test").cells()
    first = {tuple(cell.replications[0].params.values()): [one.seed for one in cell.replications] for cell in cells[:4]}
    assert first[10, "a"] == first[10, "b"] != first[20, "a"]
    assert len({cell.key for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('task = "own:task"', ""), "[study]: Object missing required field `task`"),
        (("replications = 6", "replications = 0"), "[study]: Expected `int` >= 1 - at `replications`"),
        (
            ("n = [10, 20]", 'n = [10, "20"]'),
            "grid entry 'n' must be a list of numbers, or a list of texts, got [10, '20']",
        ),
        (("[study]", "[study"), "is not valid TOML"),
        (('name = "small"', 'name = "small-quick"'), "do not end in -quick"),
        (("seed = 3", "seed = -3"), "[study]: Expected `int` >= 0 - at `seed`"),
        (('y = "value"', 'y = "value"\nyscale = "log"'), "[[figure]] 'picture': unknown entry 'yscale'; known ones"),
        (('x = "n"', 'kind = "bars"\nx = "n"'), "unknown kind 'bars'; leave it out or give"),
        (('value = "value"', ""), "[[table]] 'means': Object missing required field `value`"),
        (("[study]", "[quick]\nreplicatons = 1\n[study]"), "[quick]: unknown entry 'replicatons'"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(change: tuple[str, str], message: str):
    with pytest.raises(ParameterError, match=r"some\.toml") as caught:
        parse_study(SMALL.replace(*change), "some.toml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("own:task", "nothing"), "[study]: task: unknown function 'nothing'; give one of estimation, selection"),
        (
            ("own:task", "nowhere:task"),
            "[study]: task = 'nowhere:task': ModuleNotFoundError: No module named 'nowhere'; put the module next",
        ),
        (("own:task", "broken:task"), "broken.py, line 1"),
        (("own:task", "falling:task"), "falling.py, line 2: ZeroDivisionError: division by zero; put the module"),
        (("own:task", "own:no_arguments"), "it is called as no_arguments(replication), but too many positional"),
        (("seed = 3", 'checks = "own:checks"'), "[study]: checks = 'own:checks'"),
        (
            ("own:task", "estimation"),
            "[options]: estimators must be a list of names, got 'es'; write estimators = ['es']",
        ),
        (("ESTIMATORS", '["es", "eS"]'), "[options]: estimators has an unknown name 'eS'; choose from local"),
        (("GENERATOR", "papers"), "[options]: generator: unknown function 'papers'; give one of paper, false_edges"),
    ],
)
def test_what_is_not_there_is_said_before_a_worker_starts(small_study: Path, change: tuple[str, str], message: str):
    small_study.with_name("broken.py").write_text("def task(:\n")
    small_study.with_name("falling.py").write_text("def task(r): ...\n1 / 0\n")
    text = SMALL + "[options]\ngenerator = 'GENERATOR'\nestimators = ESTIMATORS\n"
    if change[0] in ("ESTIMATORS", "GENERATOR"):
        text = text.replace("own:task", "estimation")
    text = text.replace(*change).replace("GENERATOR", "paper").replace("ESTIMATORS", '"es"')
    small_study.write_text(text)
    with pytest.raises(ParameterError) as caught:
        launch(None, config=small_study, out=small_study.with_name("out"), jobs=1)
    assert message in str(caught.value) and "small.toml" in str(caught.value) and "\n" not in str(caught.value)
    assert not small_study.with_name("out").exists()


@pytest.mark.studies
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ('y = "value"', 'y = "vale"'),
            r"figure 'picture': no row has the column 'vale' \(y\); there are study, n, kind",
        ),
        (('y = "value"', 'y = "kind"'), r"figure 'picture': column 'kind' \(y\) holds 'a', not numbers"),
        (('value = "value"', 'value = "vale"'), r"table 'means': no row has the column 'vale' \(value\)"),
    ],
)
def test_columns_that_no_row_has_are_named_and_the_rows_are_kept(
    small_study: Path, tmp_path: Path, change: tuple[str, str], message: str
):
    text = (SMALL if "figure" in message else UNDRAWN).replace("replications = 6", "replications = 1")
    small_study.write_text(text.replace(*change))
    with pytest.raises(ParameterError, match=message + ".*the results are kept"):
        launch(None, config=small_study, out=tmp_path / "out", jobs=1)
    small_study.write_text(text)
    assert "computed" not in run_study(load_study(small_study), tmp_path / "out", jobs=1).notes


def test_edited_code_is_not_mistaken_for_what_was_run(small_study: Path):
    before = [cell.key for cell in load_study(small_study).cells()]
    assert before == [cell.key for cell in load_study(small_study).cells()]
    small_study.with_name("own.py").write_text(OWN + "\n# another thought\n")
    assert not set(before) & {cell.key for cell in load_study(small_study).cells()}
    assert not set(before) & {cell.key for cell in load_study(small_study).cells(fingerprint="other data")}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_studies_are_whole(name: str, quick: bool):
    study = load_study(name, quick=quick)
    assert study.name == name and study.title and study.about and study.figures and study.tables
    assert callable(find_function(str(study.checks), "checks"))
    assert len(study.cells()) >= 1
    assert all(figure["name"] and figure["caption"] for figure in study.figures)
