"""The commands ``fedkin peer ...`` and their options. What they do is in `fedkin.cli.peer_commands`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

peer = typer.Typer(
    no_args_is_help=True,
    help="Run devices as processes that talk only to their neighbours, on one machine or on many.",
)


class Placement(StrEnum):
    """Where edge state lives."""

    peer = "peer"
    central = "central"
    replicas = "replicas"


class Gradient(StrEnum):
    """Kinds of gradients."""

    plain = "plain"
    saga = "saga"
    svrg = "svrg"


Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a federation.")]
EitherDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The directory of a federation, or that of one device.")
]
DeviceDirectory = Annotated[Path, typer.Argument(metavar="DIR/devices/U", help="The directory of one device.")]
GiveUp = Annotated[
    float, typer.Option(metavar="SECONDS", help="Longest wait for a neighbour; after that a device ends with code 4.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")]


@peer.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to make.")],
    data: Annotated[Path, typer.Option(metavar="DATA", help="Table of rows, or a directory with a file per device.")],
    graph: Annotated[Path, typer.Option(metavar="FILE", help="Edges between devices, CSV or GraphML.")],
    lam: Annotated[float, typer.Option(metavar="X", help="Penalty level.")],
    device: Annotated[str | None, typer.Option(metavar="COL", help="Column of the devices.")] = None,
    target: Annotated[str | None, typer.Option(metavar="COL", help="Column to predict.")] = None,
    features: Annotated[str | None, typer.Option(metavar="A,B,...", help="Columns to predict from.")] = None,
    offset: Annotated[str | None, typer.Option(metavar="COL", help="Column added to the linear predictor.")] = None,
    intercept: Annotated[bool, typer.Option("--intercept/--no-intercept", help="Add a column of ones.")] = True,
    loss: Annotated[str, typer.Option(help="mean, linear, logistic, poisson, huber or multinomial.")] = "linear",
    penalty: Annotated[str, typer.Option(help="l1, l2 or linf.")] = "l1",
    rounds: Annotated[int, typer.Option(metavar="T", help="Rounds to do.")] = 1000,
    batch_size: Annotated[int | None, typer.Option(metavar="B", help="Rows per round; by default all.")] = None,
    gradient: Annotated[
        Gradient, typer.Option(help="Mini-batch gradients, plain or variance-reduced.")
    ] = Gradient.plain,
    ridge: Annotated[float, typer.Option(help="Small quadratic penalty.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the batches.")] = 0,
    endpoints: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Columns device, host, port; by default all on this machine."),
    ] = None,
    port: Annotated[int, typer.Option(help="First port, when all are on this machine.")] = 7447,
    placement: Annotated[
        Placement,
        typer.Option(
            help="peer: devices talk to neighbours and wait for them; central: to one machine, and may come and go; "
            "replicas: to all they are connected with, and may come and go."
        ),
    ] = Placement.peer,
    centre: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Of the central machine.")] = None,
    ca_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Your own certificate authority, PEM.")] = None,
    ca_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, PEM.")] = None,
    plain_tcp: Annotated[
        bool, typer.Option("--plain-tcp", help="No encryption and no access lists: for closed test networks only.")
    ] = False,
    float32: Annotated[bool, typer.Option("--float32", help="Send rounded parameters, half the bytes.")] = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(metavar="ROUNDS", help="Between durable checkpoints; 100, fewer if p is large.")
    ] = None,
    compare_every: Annotated[int, typer.Option(help="Rounds between comparisons of edge duals; 0 for never.")] = 200,
    select_level: Annotated[
        float | None,
        typer.Option(metavar="LEVEL", help="Let the devices test their edges first, and drop those that are rejected."),
    ] = None,
    variance: Annotated[str, typer.Option(help="Of the edge tests: model, sandwich or bartlett.")] = "model",
    share_results: Annotated[
        bool, typer.Option("--share-results", help="Let collect have the parameters; owners may change it.")
    ] = False,
) -> None:
    """Make the directory of a federation: signed manifest, and rows, key and certificate for each device."""
    from fedkin.cli.peer_init import InitCommand, init

    init(
        InitCommand(
            directory=directory,
            data=data,
            graph=graph,
            lam=lam,
            device=device,
            target=target,
            features=None if features is None else tuple(name.strip() for name in features.split(",") if name.strip()),
            offset=offset,
            intercept=intercept,
            loss=loss,
            penalty=penalty,
            rounds=rounds,
            batch_size=batch_size,
            gradient=gradient.value,
            ridge=ridge,
            seed=seed,
            endpoints=endpoints,
            port=port,
            placement=placement.value,
            centre=centre,
            ca_cert=ca_cert,
            ca_key=ca_key,
            secure=not plain_tcp,
            float32=float32,
            checkpoint_every=checkpoint_every,
            compare_every=compare_every,
            select_level=select_level,
            variance=variance,
            share_results=share_results,
        )
    )


def _seconds(words: str) -> Any:
    return typer.Option(metavar="SECONDS", help=words)


@peer.command()
def run(
    place: DeviceDirectory,
    first_pull: Annotated[float, _seconds("A theta that has not come is asked for after this time,")] = 0.25,
    last_pull: Annotated[float, _seconds("and then again and again, at most so far apart.")] = 5.0,
    complain: Annotated[float, _seconds("To the first log line about a wait; to the next it doubles.")] = 5.0,
    give_up: GiveUp = 3600.0,
    linger: Annotated[float, _seconds("Longest stay after the end, for neighbours that have not finished.")] = 600.0,
    gather: Annotated[float, _seconds("A central machine or leader waits so long before its first round,")] = 60.0,
    deadline: Annotated[float, _seconds("and so long for answers in a round.")] = 5.0,
    echo: Annotated[bool, typer.Option("--echo/--no-echo", help="Log to standard error, too.")] = True,
) -> None:
    """Run one device until its last round; the same command continues after a crash."""
    from fedkin.cli.peer_commands import run_one
    from fedkin.federate import Patience

    run_one(place, Patience(first_pull, last_pull, complain, give_up, linger, gather, deadline), echo)


@peer.command()
def select(place: DeviceDirectory, give_up: GiveUp = 3600.0) -> None:
    """Test the edges of one device together with its neighbours, before the rounds; up does it by itself."""
    from fedkin.cli.peer_commands import select_one

    select_one(place, give_up)


@peer.command()
def up(
    directory: Directory,
    restarts: Annotated[int, typer.Option(help="How often a device that dies is started again.")] = 10,
    give_up: GiveUp = 3600.0,
    as_json: Json = False,
) -> None:
    """Run all devices of a directory on this machine, watch them, and start again what dies. Ctrl-C stops them.

    Exit codes: 0 all have finished, 1 one failed for good, 2 wrong input, 3 fedkin peer stop, 130 Ctrl-C or a signal.
    """
    from fedkin.cli.peer_commands import up

    up(directory, restarts, give_up, as_json)


@peer.command()
def status(
    directory: EitherDirectory,
    metrics: Annotated[bool, typer.Option("--metrics", help="Print the text format of Prometheus.")] = False,
    as_json: Json = False,
) -> None:
    """Show how far the devices on this machine are."""
    from fedkin.cli.peer_commands import status

    status(directory, metrics, as_json)


@peer.command()
def stop(directory: EitherDirectory) -> None:
    """Ask all devices on this machine to stop, and a fedkin peer up; the same commands continue later."""
    from fedkin.cli.peer_commands import stop

    stop(directory)


@peer.command()
def leave(
    directory: Directory,
    device: Annotated[str, typer.Argument(metavar="NAME", help="Name of a device that will never come back.")],
    ca_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Key of your own certificate authority, PEM.")
    ] = None,
) -> None:
    """Declare, signed by the authority, that a device has left for good: its neighbours drop their edges to it."""
    from fedkin.cli.peer_commands import leave

    leave(directory, device, ca_key)


@peer.command()
def collect(
    directory: Directory,
    out: Annotated[Path, typer.Option(metavar="FILE.csv", help="Where the coefficients go.")],
) -> None:
    """Gather the parameters of devices whose owners share them: a row per device."""
    from fedkin.cli.peer_commands import collect

    collect(directory, out)
