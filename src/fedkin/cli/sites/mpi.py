"""The command ``fedkin mpi run`` and its options. What it does is in `fedkin.cli.sites.mpi_run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

mpi = typer.Typer(
    no_args_is_help=True,
    help="Run a federation as big shards on trusted machines with a common file system.",
)


@mpi.callback()
def _root() -> None:
    # a callback keeps "run" a sub-command although it is the only one
    ...


@mpi.command(context_settings={"allow_extra_args": True})
def run(
    context: typer.Context,
    contract: Annotated[Path, typer.Argument(metavar="CONTRACT", help="The contract, TOML (fedkin federation draft).")],
    data: Annotated[Path, typer.Option(metavar="TABLE", help="The rows of all sites.")],
    site: Annotated[str, typer.Option(metavar="COL", help="Column that says whose a row is.")],
    graph: Annotated[Path, typer.Option(metavar="FILE", help="Edges between sites, CSV or GraphML.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Model directory to make.")],
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", metavar="K", help="Processes, each with a piece of the graph.")
    ] = None,
    lam: Annotated[float | None, typer.Option(metavar="X", help="Penalty level. [the contract's]")] = None,
    rho: Annotated[float | None, typer.Option(metavar="X", help="Step of the edge duals. [the contract's]")] = None,
    rounds: Annotated[int | None, typer.Option(metavar="T", help="Rounds to do. [the contract's]")] = None,
    checkpoint_every: Annotated[int, typer.Option(metavar="ROUNDS", help="Rounds between checkpoints.")] = 500,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from round 0, although a run with K ranks could be continued.")
    ] = False,
    mpiexec: Annotated[
        Path | None, typer.Option(metavar="PROGRAM", help="The mpiexec to use; by default it is looked for.")
    ] = None,
) -> None:
    """Run all rounds on K ranks; after a crash the same command continues. What follows -- goes to mpiexec.

    For example: fedkin mpi run heart.toml --data all.csv --site site --graph edges.csv --out model -n 8
    """
    from fedkin.cli.sites.mpi_run import MpiCommand, run

    run(
        MpiCommand(
            contract=contract,
            data=data,
            site=site,
            graph=graph,
            out=out,
            ranks=ranks,
            settings={"lam": lam, "rho": rho, "rounds": rounds},
            checkpoint_every=checkpoint_every,
            fresh=fresh,
            mpiexec=mpiexec,
            launcher_options=tuple(context.args),
        )
    )
