"""Algorithm 2 for users of Flower: a ServerApp that is the central machine S, and a ClientApp that is a site.

In the ``pyproject.toml`` of a Flower app (HEART is the organiser's directory of a federation whose contract has
``placement = "central"``)::

    [tool.flwr.app.components]
    serverapp = "fedkin_flower:server"
    clientapp = "fedkin_flower:client"

    [tool.flwr.app.config]
    federation = "HEART"
    sites = "FOLDER"

A node hosts the site whose directory its node configuration names in ``site``; in simulations, the one of its
``partition-id`` among the directories in ``sites``. S ends with the averaged parameters in ``HEART/flower.npz``. Who
does not answer a round within ``deadline`` seconds (60) counts as absent. The bits are those of ``fed_admm`` with the
same sites absent. Flower starts a process per message and takes seconds per round when deployed: for speed use
``fedkin site run``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from fedkin._base import count, wait_until, write_arrays
from fedkin.errors import ParameterError, SolverError
from fedkin.federate.central import Hub, NodeWorker
from fedkin.federate.manifest import Manifest
from fedkin.federate.messages import INVITE, read_invite
from fedkin.federate.organiser import Organiser
from fedkin.federate.site import Site
from fedkin.federate.views import centre_view, site_view

RESULT = "flower.npz"
_NUMBERS, _FACTS = "numbers", "facts"


def client_app(sites: Path | None = None) -> ClientApp:
    """A ClientApp for the sites whose directories are in ``sites``, or in the run's configuration ``sites``."""
    app = ClientApp()

    @app.query()
    def who(message: Message, context: Context) -> Message:
        number = read_invite(_place(sites, context) / INVITE).site.number
        return Message(RecordDict({_FACTS: ConfigRecord({"position": number})}), reply_to=message)

    @app.train()
    def step(message: Message, context: Context) -> Message:
        worker = _worker(_place(sites, context))
        t = int(message.content[_FACTS]["round"])
        theta = worker.answer(t, _numbers(message))
        return Message(_record(theta, {"round": t}), reply_to=message)

    return app


def server_app(directory: Path | None = None, deadline: float = 60.0) -> ServerApp:
    """A ServerApp that does all rounds and writes the averaged parameters ``(V, p)``."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        place = _directory(directory, context.run_config)
        manifest = centre_view(Organiser.read(place))
        seconds = float(context.run_config.get("deadline", deadline))  # type: ignore[arg-type, unused-ignore]
        hub = Hub(manifest)
        nodes = _find_sites(grid, manifest, seconds)
        while hub.done < manifest.rounds:
            hub.finish(_ask(grid, nodes, hub, seconds))
        found = {"theta": hub.shard.average, "available": np.array(hub.presence)}
        write_arrays(place / RESULT, found, private=True)

    return app


def _find_sites(grid: Grid, manifest: Manifest, seconds: float) -> dict[int, int]:
    """The node of each site; waits until all are there."""
    if not wait_until(lambda: len(list(grid.get_node_ids())) >= manifest.n_sites, max(seconds, 60.0)):
        nodes = len(list(grid.get_node_ids()))
        raise SolverError(f"{count(nodes, 'Flower node')} for {manifest.n_sites} sites; start one for each")
    ids = list(grid.get_node_ids())
    replies = grid.send_and_receive(
        [Message(RecordDict(), dst_node_id=node, message_type="query") for node in ids], timeout=max(seconds, 60.0)
    )
    found = {
        int(reply.content[_FACTS]["position"]): int(reply.metadata.src_node_id)
        for reply in replies
        if not reply.has_error()
    }
    missing = [member.name for member in manifest.members if member.number not in found]
    if missing:
        raise SolverError(f"no Flower node hosts {', '.join(missing)}; check partition-id or site of the nodes")
    return found


def _ask(grid: Grid, nodes: Mapping[int, int], hub: Hub, seconds: float) -> dict[int, NDArray[np.float64]]:
    t, questions = hub.done + 1, hub.questions()
    messages = [
        Message(_record(questions[u], {"round": t}), dst_node_id=node, message_type="train")
        for u, node in nodes.items()
    ]
    by_node = {node: u for u, node in nodes.items()}
    answers: dict[int, NDArray[np.float64]] = {}
    for reply in grid.send_and_receive(messages, timeout=seconds):
        if reply.has_error() or int(reply.content[_FACTS]["round"]) != t:
            continue
        theta = _numbers(reply)
        if theta.shape == (hub.manifest.n_params,) and np.isfinite(theta).all():
            answers[by_node[reply.metadata.src_node_id]] = theta
    return answers


def _directory(given: Path | None, configuration: Mapping[str, Any]) -> Path:
    if given is not None:
        return given
    if "federation" not in configuration:
        raise ParameterError("the run's configuration needs federation = 'DIR', the organiser's directory")
    return Path(str(configuration["federation"]))


def _place(sites: Path | None, context: Context) -> Path:
    """The directory of the site that a node hosts."""
    if "site" in context.node_config:
        return Path(str(context.node_config["site"]))
    folder = sites or context.run_config.get("sites")
    if "partition-id" not in context.node_config or folder is None:
        raise ParameterError("the node's configuration needs site = 'DIR', or a partition-id with sites = 'FOLDER'")
    found = {read_invite(path).site.number: path.parent for path in Path(str(folder)).glob(f"*/{INVITE}")}
    return found[int(context.node_config["partition-id"])]


@cache
def _worker(place: Path) -> NodeWorker:
    site = Site.read(place)
    return NodeWorker(site_view(site), site.rows())


def _record(values: NDArray[np.float64], facts: dict[str, Any]) -> RecordDict:
    numbers = ArrayRecord({_NUMBERS: Array(np.ascontiguousarray(values))})
    return RecordDict({_NUMBERS: numbers, _FACTS: ConfigRecord(facts)})


def _numbers(message: Message) -> NDArray[np.float64]:
    return np.asarray(message.content[_NUMBERS][_NUMBERS].numpy(), dtype=np.float64)


# flwr looks for these names in the text of this file: each needs an assignment of its own
server = server_app()
client = client_app()
