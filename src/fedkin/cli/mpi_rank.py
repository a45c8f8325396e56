"""One rank of ``fedkin mpi run``: ``mpiexec -n K python -m fedkin.cli.mpi_rank CONTRACT ...``."""

from __future__ import annotations

import sys
from pathlib import Path

from fedkin._base import Array
from fedkin.federate.mpi import Job, main


def write_model(job: Job, theta: Array, out: Path) -> None:
    """Write the model of all sites."""
    from fedkin.cli.shared.contracts import model_of_rounds
    from fedkin.fitting import near_groups

    sites, view = job.graph.sites, job.view([])
    model = model_of_rounds(
        job.contract,
        dict(zip(sites, theta, strict=True)),
        job.graph,
        {site: job.rows[k].n_samples for k, site in enumerate(sites)},
        lam=view.lam,
        rounds=view.rounds,
        clusters=near_groups(theta, job.graph),
    )
    model.save(out)


if __name__ == "__main__":
    sys.exit(main(write_model))
