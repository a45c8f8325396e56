"""The command ``fedkin mpi run`` and its options. What it does is in `fedkin.cli.mpi_run`."""

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
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a federation (fedkin peer init).")],
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", metavar="K", help="Processes, each with a piece of the graph.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where the parameters go: .npz, or .csv with a row per device. [DIR/mpi/theta.npz]"
        ),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(metavar="ROUNDS", help="Rounds between checkpoints.")] = 500,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from round 0, although a run with K ranks could be continued.")
    ] = False,
    mpiexec: Annotated[
        Path | None, typer.Option(metavar="PROGRAM", help="The mpiexec to use; by default it is looked for.")
    ] = None,
) -> None:
    """Run all rounds on K ranks; after a crash the same command continues. What follows -- goes to mpiexec.

    For example: fedkin mpi run fed -n 8 -- --hostfile hosts
    """
    from fedkin.cli.mpi_run import MpiCommand, run

    run(
        MpiCommand(
            directory=directory,
            ranks=ranks,
            out=out,
            checkpoint_every=checkpoint_every,
            fresh=fresh,
            mpiexec=mpiexec,
            launcher_options=tuple(context.args),
        )
    )
