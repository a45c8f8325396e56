"""One rank of ``fedkin mpi run``: ``mpiexec -n K python -m fedkin.cli.mpi_rank CONTRACT ...``."""

from __future__ import annotations

import sys
from pathlib import Path

from fedkin._base import Array
from fedkin.federate.mpi import Job, main


def write_model(job: Job, theta: Array, out: Path) -> None:
    """Write the model of all sites."""
    import math

    from fedkin.fitting import model_from_theta, near_groups

    contract, devices, view = job.contract, job.graph.devices, job.view([])
    model = model_from_theta(
        dict(zip(devices, theta, strict=True)),
        job.graph,
        schema=contract.schema,
        loss=contract.loss_object(),
        intercept=contract.intercept,
        n_samples={device: job.rows[k].n_samples for k, device in enumerate(devices)},
        penalty=contract.penalty,
        lam=view.lam,
        gap=math.nan,
        n_iter=view.rounds,
        clusters=near_groups(theta, job.graph),
        origin={"from": "rounds", "rounds": view.rounds},
    )
    model.save(out)


if __name__ == "__main__":
    sys.exit(main(write_model))
