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
``partition-id`` among the directories in ``sites``. S ends with the averaged parameters in ``HEART/flower.npz``. A site
that does not answer a round within ``deadline`` seconds (60) counts as absent. The result is bit-identical to that of
``fed_admm`` with the same sites absent. Flower starts a process per message and takes seconds per round when deployed:
for speed use ``fedkin site run``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from fedkin.admm import Shard
from fedkin.errors import ParameterError, SolverError
from fedkin.federate import Organiser, SitePlan, centre_plan, read_invite, site_plan

RESULT, INVITE = "flower.npz", "invite.json"
_NUMBERS, _FACTS = "numbers", "facts"


def client_app(sites: Path | None = None) -> ClientApp:
    """Return a ClientApp for the sites whose directories are in ``sites``, or in the run's configuration ``sites``."""
    app = ClientApp()

    @app.query()
    def who(message: Message, context: Context) -> Message:
        number = read_invite(_place(sites, context) / INVITE).site.number
        return Message(RecordDict({_FACTS: ConfigRecord({"position": number})}), reply_to=message)

    @app.train()
    def step(message: Message, context: Context) -> Message:
        shard, t = _shard(_place(sites, context)), int(message.content[_FACTS]["round"])
        theta, pull, chance = np.split(_numbers(message), [shard.plan.n_params, 2 * shard.plan.n_params])
        shard.take_pull(theta[None], pull[None])
        with np.errstate(over="ignore", invalid="ignore"):
            shard.node_step(t, None, chance)
        return Message(_record(shard.theta[0], {"round": t}), reply_to=message)

    return app


def server_app(directory: Path | None = None, deadline: float = 60.0) -> ServerApp:
    """Return a ServerApp that does all rounds and writes the averaged parameters ``(V, p)``."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        place = _directory(directory, context.run_config)
        plan = centre_plan(Organiser.read(place))
        seconds = float(context.run_config.get("deadline", deadline))
        nodes = _find_sites(grid, plan, seconds)
        shard, presence = Shard(plan), []
        seen = np.zeros(plan.n_sites)
        for t in range(1, plan.rounds + 1):
            chance = (1.0 + seen) / t
            thetas = _ask(grid, nodes, seconds, t, np.concatenate([shard.theta, shard.pull(), chance[:, None]], axis=1))
            shard.node_step(t, None, chance)  # the penalty's part, for sites that are absent
            shard.take(thetas)
            shard.edge_step()
            presence.append(np.isin(plan.sites, list(thetas)))
            seen += presence[-1]
        np.savez(place / RESULT, theta=shard.average, available=np.array(presence))

    return app


def _find_sites(grid: Grid, plan: SitePlan, seconds: float) -> dict[int, int]:
    """Return the node of each site; wait until all are there."""
    seconds, ids = max(seconds, 60.0), list(grid.get_node_ids())
    end = time.monotonic() + seconds
    while len(ids) < plan.n_sites and time.monotonic() < end:
        time.sleep(0.5)
        ids = list(grid.get_node_ids())
    if len(ids) < plan.n_sites:
        raise SolverError(f"{len(ids)} Flower nodes for {plan.n_sites} sites; start one for each")
    messages = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in ids]
    found = {
        int(reply.content[_FACTS]["position"]): int(reply.metadata.src_node_id)
        for reply in grid.send_and_receive(messages, timeout=seconds)
        if not reply.has_error()
    }
    missing = [member.name for member in plan.members if member.number not in found]
    if missing:
        raise SolverError(f"no Flower node hosts {', '.join(missing)}; check partition-id or site of the nodes")
    return found


def _ask(
    grid: Grid, nodes: Mapping[int, int], seconds: float, t: int, questions: NDArray[np.float64]
) -> dict[int, NDArray[np.float64]]:
    messages = [
        Message(_record(questions[u], {"round": t}), dst_node_id=node, message_type="train")
        for u, node in nodes.items()
    ]
    by_node, p = {node: u for u, node in nodes.items()}, questions.shape[1] // 2
    answers: dict[int, NDArray[np.float64]] = {}
    for reply in grid.send_and_receive(messages, timeout=seconds):
        if reply.has_error() or int(reply.content[_FACTS]["round"]) != t:
            continue
        theta = _numbers(reply)
        if theta.shape == (p,) and np.isfinite(theta).all():
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
def _shard(place: Path) -> Shard:
    return Shard(site_plan(place))


def _record(values: NDArray[np.float64], facts: dict[str, Any]) -> RecordDict:
    numbers = ArrayRecord({_NUMBERS: Array(np.ascontiguousarray(values))})
    return RecordDict({_NUMBERS: numbers, _FACTS: ConfigRecord(facts)})


def _numbers(message: Message) -> NDArray[np.float64]:
    return np.asarray(message.content[_NUMBERS][_NUMBERS].numpy(), dtype=np.float64)


# flwr looks for these names in the text of this file: each needs an assignment of its own
server = server_app()
client = client_app()
