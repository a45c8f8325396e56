"""Sum rows in another engine: python examples/engines.py ray|dask|spark|duckdb|polars FOLDER, Parquet files of visits.

Each function returns the same summaries, from which kin finds groups of clinics.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import fedkin

FEATURES = ["age", "dose"]
sums = functools.partial(fedkin.partial_sums, site="clinic", target="days", features=FEATURES)


def ray(folder: str) -> fedkin.Summaries:
    import ray.data

    dataset = ray.data.read_parquet(folder)
    parts = dataset.map_batches(sums, batch_format="pyarrow").iter_batches(batch_format="pyarrow")
    return fedkin.merge_sums(parts, features=FEATURES)


def dask(folder: str) -> fedkin.Summaries:
    import dask.dataframe

    frame = dask.dataframe.read_parquet(folder)
    parts = dask.compute(*[dask.delayed(sums)(part) for part in frame.to_delayed()])
    return fedkin.merge_sums(parts, features=FEATURES)


def spark(folder: str) -> fedkin.Summaries:
    from pyspark.sql import SparkSession

    def added(batches: Any) -> Any:
        for batch in batches:
            yield from sums(batch).to_batches()

    frame = SparkSession.builder.getOrCreate().read.parquet(folder)
    parts = frame.mapInArrow(added, "site string, rows long, sums array<double>").toArrow()
    return fedkin.merge_sums([parts], features=FEATURES)


def duckdb(folder: str) -> fedkin.Summaries:
    import duckdb

    rows = duckdb.sql(f"select clinic, age, dose, days from '{folder}/*.parquet'")
    return fedkin.merge_sums(map(sums, rows.to_arrow_reader()), features=FEATURES)


def polars(folder: str) -> fedkin.Summaries:
    import polars

    frame = polars.scan_parquet(f"{folder}/*.parquet")
    return fedkin.merge_sums(map(sums, frame.collect_batches()), features=FEATURES)


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    print(fedkin.find_kin(globals()[name](folder)))
