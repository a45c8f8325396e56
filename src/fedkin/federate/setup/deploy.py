"""From a `Problem` to the manifest of a federation: the plan that `fed_admm` would follow, and where devices listen."""

from __future__ import annotations

import ipaddress
import math
import re
import secrets
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import check_whole
from fedkin.admm import Settings, device_rows, local_curvature, plan_run
from fedkin.data import Rows, device_ids, read_columns
from fedkin.errors import DataError, ParameterError
from fedkin.federate.contract.manifest import DEAL, RADIUS, Manifest, ManifestError, Member, plain_names
from fedkin.federate.messages import RUN_BYTES
from fedkin.losses import describe_loss
from fedkin.objective import Problem

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_LAST_PORT = 65535


def local_endpoints(n_devices: int, first_port: int) -> tuple[list[str], str]:
    """``host:port`` of all devices and of a central machine, on this machine."""
    if not 1 <= first_port <= _LAST_PORT:
        raise ParameterError(f"--port must be a whole number from 1 to {_LAST_PORT}, got {first_port}")
    last = first_port + n_devices
    if last > _LAST_PORT:
        most = _LAST_PORT - n_devices
        raise ParameterError(
            f"--port {first_port} leaves no room for {n_devices} devices and a central machine below "
            f"{_LAST_PORT + 1}: use at most {most}"
        )
    return [f"127.0.0.1:{first_port + u}" for u in range(n_devices)], f"127.0.0.1:{last}"


def read_endpoints(path: Path, devices: Sequence[Hashable], *, distinct: bool = True) -> list[str]:
    """``host:port`` of each device, from a table with the columns device, host and port.

    Parameters
    ----------
    path : path
        The table.
    devices : sequence of ids
        The devices of the federation; each must have one line, and nobody else.
    distinct : bool
        Whether two devices must not have the same host and port: all that listen.
    """
    columns = read_columns(path)
    for name in ("device", "host", "port"):
        if name not in columns:
            raise DataError(f"{path} has no column {name!r}; it needs device, host and port")
    names = [str(one) for one in device_ids(columns["device"])]
    known: dict[str, str] = {}
    for name, host, port in zip(names, columns["host"].tolist(), columns["port"].tolist(), strict=True):
        if name in known:
            raise DataError(f"{path} has two lines for device {name!r}")
        known[name] = _joined(f"{path}, device {name!r}", host, port)
    missing = [device for device in devices if str(device) not in known]
    if missing:
        raise DataError(f"{path} has no line for device {missing[0]!r}")
    unknown = [name for name in known if name not in {str(device) for device in devices}]
    if unknown:
        raise DataError(f"{path} has a line for {unknown[0]!r}, which is no device of the data: correct or remove it")
    places = [known[str(device)] for device in devices]
    first: dict[str, Hashable] = {}
    for device, place in zip(devices, places, strict=True):
        if distinct and place in first:
            raise DataError(
                f"{path}: devices {first[place]!r} and {device!r} both have {place}; give each its own port"
            )
        first[place] = device
    return places


def centre_endpoint(text: str) -> str:
    """``host:port`` of the central machine, checked.

    Examples
    --------
    >>> from fedkin.federate.setup.deploy import centre_endpoint
    >>> centre_endpoint("192.0.2.1:7447"), centre_endpoint("[2001:db8::1]:7447")
    ('192.0.2.1:7447', '[2001:db8::1]:7447')
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or (":" in host and not host.startswith("[")):
        raise ParameterError(f"--centre must be HOST:PORT, such as 192.0.2.1:7447 or [2001:db8::1]:7447, got {text!r}")
    try:
        return _joined("--centre", host, int(port))
    except DataError as error:
        raise ParameterError(str(error)) from None


def _joined(where: str, host: object, port: object) -> str:
    """``host:port``; raises `DataError` when either cannot be."""
    words = _checked_host(where, "" if host is None else str(host).strip())
    try:
        number = float(str(port))
    except ValueError:
        number = -1.0
    if not (1 <= number <= _LAST_PORT and number.is_integer()):
        got = "nothing" if math.isnan(number) else f"{number:.15g}" if isinstance(port, float) else port
        raise DataError(f"{where}: the port must be a whole number from 1 to {_LAST_PORT}, got {got}")
    return f"{words}:{int(number)}"


def _checked_host(where: str, words: str) -> str:
    """A name or an address, that of IPv6 in brackets; raises `DataError` when it is neither."""
    bare = words[1:-1] if words.startswith("[") and words.endswith("]") else words
    labels = words.split(".")
    try:
        # a name does not end with a number: what does is an address, or a slip in one
        numeric = ":" in bare or labels[-1].isdigit()
        address = ipaddress.ip_address(bare) if numeric else None
    except ValueError:
        raise DataError(f"{where}: the host {words!r} is neither a name nor an address") from None
    if address is None:
        if not all(_LABEL.fullmatch(label) for label in labels):
            raise DataError(f"{where}: the host {words!r} is neither a name nor an address")
        return words
    if address.is_unspecified:
        raise DataError(
            f"{where}: nobody can connect to {words}; give the address under which neighbours reach the device, and "
            "let it listen on all addresses by its zenoh.json5 (docs/peer.md, 'Behind NAT and in containers')"
        )
    return f"[{address}]" if address.version == 6 else words


#: Bytes of own thetas that a device keeps in memory for neighbours that go back to their checkpoints.
_KEPT_BYTES = 2_500_000


def usual_checkpoint_every(n_params: int) -> int:
    """Rounds between checkpoints: 100, and fewer where that many thetas would take too much memory.

    Examples
    --------
    >>> from fedkin.federate.setup.deploy import usual_checkpoint_every
    >>> usual_checkpoint_every(20), usual_checkpoint_every(10_000)
    (100, 31)
    """
    return max(min(100, _KEPT_BYTES // (8 * n_params)), 10)


def make_manifest(
    problem: Problem,
    rounds: int,
    settings: Settings,
    endpoints: Sequence[str],
    *,
    run: str | None = None,
    absent: bool = False,
    **options: Any,
) -> Manifest:
    """The manifest of a run of Fed-ADMM.

    Parameters
    ----------
    problem : Problem
        With a built-in loss, the same on all devices; ids are text or whole numbers.
    rounds : int
        Rounds to do.
    settings : Settings
        Batch size, rho, steps, average, kind of gradient and seed.
    endpoints : sequence of V str
        Where each device listens, ``tls/host:port``.
    run : str, optional
        Run id, 16 hexadecimal digits; random by default.
    absent : bool
        Whether devices come and go (central placement).
    **options
        Other fields of `Manifest`: ``wire``, ``checkpoint_every``, ``compare_every``, ``placement``, ``centre``,
        ``secure``, ``classes``.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.objective import Problem
    >>> from fedkin.federate.setup.deploy import make_manifest
    >>> from fedkin.admm import Settings
    >>> design = paper_design(n_devices=4, n_samples=30, n_features=3, n_clusters=2, seed=0)
    >>> problem = Problem(design.federation, design.graph, lam=0.01)
    >>> make_manifest(problem, 100, Settings(batch_size=5), [f"tls/127.0.0.1:{7000 + u}" for u in range(4)]).n_devices
    4
    """
    check_whole("rounds", rounds, least=1)
    if options.get("checkpoint_every") is None:
        options["checkpoint_every"] = usual_checkpoint_every(problem.n_params)
    federation = problem.rows_for("a plan")
    if len(endpoints) != federation.n_devices:
        raise ParameterError(f"{len(endpoints)} endpoints for {federation.n_devices} devices; give one for each")
    if len({id(loss) for loss in problem.losses}) > 1:
        raise ParameterError("devices with different losses cannot be deployed yet; give one loss")
    loss = describe_loss(problem.losses[0])
    if loss.get("own"):
        raise ManifestError(f"devices cannot be told about the custom loss {loss['name']!r}, as code is never sent")
    for device in federation.devices:
        if isinstance(device, bool) or not isinstance(device, str | int):
            raise DataError(f"device ids must be text or whole numbers to be deployed, got {device!r}")
    rows = device_rows(problem, settings.batch_size, set())
    noisy = absent or bool((rows.batch < rows.counts).any())
    plan = plan_run(problem, settings, rows, local_curvature(problem.terms, rows), noisy=noisy, absent=absent)
    names = plain_names(federation.devices)
    parts = zip(federation.devices, names, endpoints, strict=True)
    manifest = Manifest(
        run=run or secrets.token_hex(RUN_BYTES),
        members=tuple(Member(device, name, endpoint) for device, name, endpoint in parts),  # type: ignore[arg-type]
        edges=plan.edges.tolist(),
        edge_radius=plan.edge_radius.tolist(),
        loss=loss,
        penalty=plan.penalty.name,
        lam=float(problem.lam),
        n_params=problem.n_params,
        ridge=rows.ridge.tolist(),
        sparsity=None if plan.sparsity is None else plan.sparsity.tolist(),
        radius=plan.radius or RADIUS,
        rounds=int(rounds),
        seed=int(settings.seed),
        gradient=plan.gradient,
        snapshot_every=plan.snapshot_every if plan.gradient == "svrg" else 1,
        average=plan.average,
        rho=plan.rho,
        start=plan.steps.start.tolist(),
        growth=plan.steps.growth.tolist(),
        damping=plan.steps.damping.tolist(),
        batch=[0] * rows.batch.size if settings.batch_size is None else rows.batch.tolist(),
        feature_names=list(federation.feature_names),
        weights=problem.graph.weights.tolist(),
        deal=(federation.starts[:-1] % DEAL).tolist(),
        noisy=bool(plan.steps.growth.any()),
        **options,
    )
    manifest.check()
    return manifest


def device_parts(problem: Problem) -> dict[int, Rows]:
    """The rows of each device, by position."""
    federation = problem.rows_for("a plan")
    parts = enumerate(federation[device] for device in federation.devices)
    return {position: rows.map(lambda part: np.asarray(part, dtype=np.float64)) for position, rows in parts}
