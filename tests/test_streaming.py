"""One pass over Parquet files or a CSV file, of which only sums are kept: the same fit as from rows in memory."""

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fedkin
import fedkin.data
from fedkin._storage import place_of
from fedkin.cli import main
from fedkin.cli.reading import stays_in_files
from fedkin.core import rows_in_files
from fedkin.data import Federation, FileTable, files
from fedkin.errors import DataError, ParameterError
from fedkin.fitting import FitOptions, fit

ROLES = {"site": "site", "target": "y"}


def table(n=900, sites=6, seed=0):
    rng = np.random.default_rng(seed)
    site = rng.integers(0, sites, n)
    x, ward = rng.normal(50, 5, n), rng.choice(["A", "B", "C"], n)
    y = 0.2 * x + (ward == "B") + (site % 2) * (ward == "C") + rng.normal(size=n)
    columns = {"site": [f"s{u:02d}" for u in site], "x": x, "z": rng.normal(size=n), "ward": ward.tolist(), "y": y}
    return {**columns, "w": rng.integers(1, 4, n)}


def written(folder, columns, files=3):
    folder.mkdir(exist_ok=True)
    whole, n = pa.table(columns), len(columns["site"])
    for k, part in enumerate(np.array_split(np.arange(n), files)):
        pq.write_table(whole.take(part), folder / f"part{k}.parquet", row_group_size=100)
    return folder / "*.parquet"


def test_weights_offsets_and_dropped_rows(tmp_path):
    columns = table()
    columns["x"][5:9] = np.nan
    columns["o"] = np.linspace(0, 1, 900)
    path = written(tmp_path / "rows", columns)
    with pytest.raises(
        DataError, match=r"cells are missing: 4 in 'x' \(first in .*row 6\); the table has 900 rows.*\"drop\""
    ):
        fedkin.summarise_files(path, **ROLES, weight="w", offset="o")
    streamed = fedkin.summarise_files(path, **ROLES, weight="w", offset="o", missing="drop")
    with pytest.warns(fedkin.errors.TableWarning, match="4 rows of 900 left out"):
        federation = Federation.read(path, **ROLES, weight="w", offset="o", missing="drop")
    expected = fedkin.summarise(federation.with_intercept(), "linear")
    ours, theirs = streamed.summaries.sums.total(), expected.sums.total()
    for name in ("count", "value", "gradient", "hessian"):
        assert np.allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-10), name
    assert np.allclose(streamed.summaries.column_squares, expected.column_squares)
    assert streamed.notes == ("4 rows of 900 left out, where 'x' is missing",)


@pytest.mark.parametrize(
    ("names", "place"),
    [
        (["rows.csv"], "line 1502"),
        (["rows.csv.gz"], "line 1502"),
        (["a.csv", "b.csv.gz", "c.tsv"], "c.tsv, line 168"),
    ],
)
def test_csv_files_in_batches_are_read_as_in_memory(tmp_path, monkeypatch, names, place):
    columns = table(2000)
    columns["x"][1500] = np.nan
    columns["treated"] = np.resize([True, False, False], 2000)
    lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    for name, rows in zip(names, np.array_split(lines, len(names)), strict=True):
        text = "\n".join([",".join(columns), *rows]).replace("nan", "NA") + "\n"
        with gzip.open(tmp_path / name, "wt") if name.endswith("gz") else (tmp_path / name).open("w") as file:
            file.write(text)
    path = tmp_path / names[0] if len(names) == 1 else tmp_path
    monkeypatch.setattr(files, "_BLOCK_BYTES", 8000)
    streamed = fedkin.summarise_files(path, **ROLES, missing="drop")
    with pytest.warns(fedkin.errors.TableWarning, match="1 row of 2000 left out"):
        federation = Federation.read(path, **ROLES, missing="drop")
    expected = fedkin.summarise(federation.with_intercept(), "linear")
    assert streamed.schema.names == federation.schema.names and streamed.summaries.sites == expected.sites
    assert np.allclose(streamed.summaries.sums.total().hessian, expected.sums.total().hessian, rtol=1e-10)
    with pytest.raises(DataError, match=rf"1 in 'x' \(first in {place}\); the table has 2,000 rows"):
        fedkin.summarise_files(path, **ROLES)
    monkeypatch.setattr(files, "_LARGE_CSV", 1000)
    monkeypatch.setattr("fedkin.cli.reading.free_memory", lambda: 1e5)
    assert stays_in_files(path, FitOptions(), ROLES)


def test_a_directory_of_large_csv_files_is_fitted_and_predicted_in_batches(tmp_path, monkeypatch, capsys):
    columns, rows = table(600), tmp_path / "rows"
    rows.mkdir()
    for site in sorted(set(columns["site"])):
        own = np.array(columns["site"]) == site
        part = {name: np.array(cells)[own].tolist() for name, cells in columns.items() if name != "site"}
        fedkin.data.write_csv(rows / f"{site}.csv", list(part), zip(*part.values(), strict=True))
    found = []
    for memory in (1e12, 1e5):
        out = str(tmp_path / f"{memory:.0f}")
        assert main(["fit", str(rows), "--target", "y", "--test-size", "0", "--out", out]) == 0
        assert main(["predict", out, str(rows), "--out", f"{out}.csv"]) == 0
        found.append((fedkin.load(out), fedkin.data.read_columns(f"{out}.csv")))
        monkeypatch.setattr(files, "_LARGE_CSV", 1000)
        monkeypatch.setattr("fedkin.cli.reading.free_memory", lambda: 1e5)
    assert capsys.readouterr().err.count("rows stay in their files") == 1
    (whole, expected), (streamed, predicted) = found
    assert streamed.sites == whole.sites == tuple(sorted(set(columns["site"])))
    np.testing.assert_allclose(streamed.coef, whole.coef, atol=1e-8)
    assert predicted["site"].tolist() == expected["site"].tolist()
    np.testing.assert_allclose(predicted["prediction"], expected["prediction"], atol=1e-6)


def test_a_word_among_the_numbers_of_a_csv_file_is_named(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("site,x,y\n" + "a,1,2\nb,2,1\n" * 40_000 + "a,soon,2\n")
    with pytest.raises(DataError, match=r"rows\.csv: .*Row #80002: .*invalid value 'soon'"):
        fedkin.summarise_files(path, **ROLES)


def test_folds_are_even_and_single_rows_train(tmp_path):
    columns = table()
    columns["site"][-1] = "alone"
    streamed = fedkin.summarise_files(written(tmp_path / "rows", columns), **ROLES)
    count = streamed.summaries.sums.count
    alone = streamed.summaries.index["alone"]
    assert count[alone].tolist() == [0, 0, 0, 0, 0, 1]
    rest = np.delete(count, alone, axis=0)[:, :-1]
    assert (rest.max(axis=1) - rest.min(axis=1) <= 1).all()
    assert count.sum() == 900


def test_columns_that_tell_nothing_or_too_much(tmp_path):
    columns = table()
    more = {**columns, "one": np.ones(900), "twice": 2 * columns["x"], "index": np.arange(900.0)}
    streamed = fedkin.summarise_files(written(tmp_path / "rows", more), **ROLES, weight="w")
    assert streamed.schema.names == ("x", "z", "ward=B", "ward=C")
    assert len(streamed.notes) == 3
    with pytest.raises(DataError, match="column 'copy' is the target 'y' under another name"):
        fedkin.summarise_files(written(tmp_path / "rows", {**columns, "copy": columns["y"]}), **ROLES)
    with pytest.raises(DataError, match=r"id: text with 900 distinct values in 900 rows, .*: a name or an id"):
        ids = {**columns, "id": [f"p{k}" for k in range(900)]}
        fedkin.summarise_files(written(tmp_path / "rows", ids), **ROLES)
    with pytest.raises(ParameterError, match="needs all rows in memory"):
        fedkin.summarise_files(tmp_path / "rows" / "*.parquet", **ROLES, missing="mean")
    with pytest.raises(ParameterError, match=r"time=.* needs all rows in memory"):
        fedkin.summarise_files(tmp_path / "rows" / "*.parquet", **ROLES, time="x")
    assert "x" not in fedkin.summarise_files(tmp_path / "rows" / "*.parquet", **ROLES, drop=["x", "id"]).schema.names


def test_rows_that_do_not_fit_are_refused_before_they_are_read(tmp_path, capsys, monkeypatch):
    columns = table()
    path = written(tmp_path / "rows", {**columns, "y": np.where(columns["y"] > 10, "high", "low").tolist()})
    fused = FitOptions(method="fused", loss="logistic")
    monkeypatch.setattr("fedkin.cli.reading.free_memory", lambda: 1e9)
    assert not stays_in_files(path, fused, ROLES)
    monkeypatch.setattr("fedkin.cli.reading.free_memory", lambda: 1e5)
    with pytest.raises(ParameterError, match=r"900 rows .* GB are free, but the fused estimator keeps all"):
        stays_in_files(path, fused, ROLES)
    assert stays_in_files(path, FitOptions(loss="logistic"), ROLES), "kin reads again"
    assert "read once for every Newton step" in " ".join(capsys.readouterr().err.split())


def test_too_many_coefficients_are_refused_before_memory_is_taken(monkeypatch):
    rng = np.random.default_rng(0)
    X, site = rng.normal(size=(2700, 1300)), np.repeat(["a", "b"], 1350)
    wide = Federation.from_arrays(X, X[:, 0], site)
    with pytest.raises(ParameterError, match=r"1,300 coefficients that vary .* 66 seconds per site: .*fixed="):
        fedkin.find_kin(wide)
    monkeypatch.setattr("fedkin.kin.sources.free_memory", lambda: 1e8)
    with pytest.raises(ParameterError, match=r"1,300 coefficients need about 0\.11 GB, and 0\.1 GB are free"):
        fedkin.find_kin(wide, fixed=wide.feature_names[1:])


def labelled(kind, n=600, sites=5, seed=1):
    """Rows with labels or counts; sites 0 and 1 are unlike the others."""
    rng = np.random.default_rng(seed)
    site = rng.integers(0, sites, n)
    x, ward = rng.normal(2.0, 1.5, n), rng.choice(["A", "B"], n)
    eta = np.where(site < 2, -0.8, 0.8) * (x - 2.0) + 0.5 * (ward == "B")
    y = {
        "logistic": np.where(eta + rng.logistic(size=n) > 0, "yes", "no"),
        "multinomial": np.array(["a", "b", "c"])[np.digitize(eta + rng.logistic(size=n), [-0.5, 1.0])],
        "poisson": rng.poisson(np.exp(0.5 * eta)).astype(float),
    }[kind]
    columns = {"site": [f"s{u}" for u in site], "x": x, "ward": ward.tolist(), "y": y}
    return {**columns, "o": 0.1 * rng.normal(size=n), "w": rng.integers(1, 3, n)}


@pytest.mark.parametrize("kind", ["logistic", "multinomial", "poisson"])
@pytest.mark.parametrize("more", [{}, {"weight": "w", "offset": "o"}], ids=["plain", "weighted"])
def test_kin_of_rows_in_files_is_that_of_rows_in_memory(tmp_path, kind, more):
    columns = labelled(kind)
    columns = {name: cells for name, cells in columns.items() if name not in "ow" or name in more.values()}
    path = written(tmp_path / "rows", columns)
    options = FitOptions(loss="poisson" if kind == "poisson" else "auto")
    rows = rows_in_files(path, **ROLES, **more, loss=options.loss)
    ours = fit(rows, None, options)
    theirs = fit(Federation.read(path, **ROLES, **more), None, options)
    assert ours.loss.name == theirs.loss.name == kind
    assert ours.sites == theirs.sites and ours.classes == theirs.classes
    spread = np.sqrt(np.stack([np.diag(part) for part in theirs.kin.covariance]))
    assert (np.abs(ours.kin.theta - theirs.kin.theta) < 0.1 * spread).all()
    assert np.allclose(ours.kin.sd, theirs.kin.sd, rtol=0.05, atol=1e-3)


def test_few_passes_and_one_batch_at_a_time(tmp_path, monkeypatch):
    path = written(tmp_path / "rows", {name: cells for name, cells in labelled("logistic").items() if name not in "ow"})
    rows = rows_in_files(path, **ROLES)
    passes, largest, read = [], [], FileTable.batches

    def counted(self, names):
        passes.append(1)
        for table in read(self, names):
            largest.append(len(table["site"]))
            yield table

    monkeypatch.setattr(FileTable, "batches", counted)
    fit(rows)
    assert len(passes) <= 40
    assert max(largest) <= 200  # the files have 200 rows each: never more than one of them


def test_predictions_of_files_in_batches_are_those_of_rows_in_memory(tmp_path, monkeypatch, capsys):
    columns = table(400)
    path, small = written(tmp_path / "rows", columns), tmp_path / "rows.csv"
    fedkin.data.write_csv(small, list(columns), zip(*columns.values(), strict=True))
    assert main(["fit", str(small), "--target", "y", "--site", "site", "--out", str(tmp_path / "model")]) == 0
    monkeypatch.setattr(files, "_BATCH_CELLS", 1024)
    found = {}
    for source, out in ((small, "a.csv"), (path, "b.csv"), (path, "c.parquet")):
        assert main(["predict", str(tmp_path / "model"), str(source), "--out", str(tmp_path / out)]) == 0
        found[out] = fedkin.data.read_columns(tmp_path / out)
    assert "400 predictions for 6 sites" in " ".join(capsys.readouterr().err.split())
    for name, cells in found["a.csv"].items():
        assert cells.tolist() == found["b.csv"][name].tolist() == found["c.parquet"][name].tolist(), name


@pytest.mark.parametrize("root", ["mock://bucket/study", "file://"], ids=["object store", "disk"])
def test_tables_at_addresses(tmp_path, capsys, root):
    columns, place = table(400), place_of(f"{root}{tmp_path}" if root == "file://" else root)
    here = written(tmp_path / "local", columns)
    for k, ward in enumerate("ABC"):  # a folder for each ward
        mine = np.array(columns["ward"]) == ward
        part = pa.table({name: np.array(cells)[mine] for name, cells in columns.items() if name != "ward"})
        with (place / "rows" / f"ward={ward}" / f"{k}.parquet").open("wb") as file:
            pq.write_table(part, file)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    with (place / "rows.csv.gz").open("wb") as file:
        file.write(gzip.compress("\n".join(lines).encode()))
    expected = fedkin.summarise(Federation.read(here, **ROLES).with_intercept(), "linear")
    for rows in ("rows", "rows/*/*.parquet", "rows.csv.gz"):
        path = f"{place}/{rows}"
        for found in (
            fedkin.summarise_files(path, **ROLES).summaries,
            fedkin.summarise(Federation.read(path, **ROLES).with_intercept(), "linear"),
        ):
            order = [found.sites.index(site) for site in expected.sites]
            names = [found.feature_names.index(name) for name in expected.feature_names]
            hessian = found.sums.total().hessian[order][:, 0][:, names][:, :, names]
            assert np.allclose(hessian, expected.sums.total().hessian[:, 0], rtol=1e-10), path
    model, options = str(tmp_path / "model"), ["--site", "site", "--target", "y", "--test-size", "0"]
    assert main(["fit", f"{place}/rows", *options, "--out", model]) == 0
    assert main(["predict", model, f"{place}/rows", "--out", f"{place}/new/out.parquet"]) == 0
    assert main(["predict", model, f"{place}/rows.csv.gz", "--out", f"{place}/new/out.csv"]) == 0
    found = [fedkin.data.read_columns(f"{place}/new/out.{kind}")["prediction"] for kind in ("parquet", "csv")]
    assert np.allclose(np.sort(found[0]), np.sort(found[1]))
    assert [file.name for file in sorted((place / "new").iterdir())] == ["out.csv", "out.parquet"]
    capsys.readouterr()
    assert main(["predict", model, f"{place}/rows", "--out", f"{place}/rows/ward=A/0.parquet"]) == 2
    assert main(["fit", f"{place}/absent.parquet", *options]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "is an input of this command" in said and f"there is no file or directory {place}/absent.parquet" in said


def test_addresses_that_nothing_serves():
    with pytest.raises(DataError, match=r"ftp://host is not an address that pyarrow\.fs supports"):
        Federation.read("ftp://host/rows.csv", **ROLES)
