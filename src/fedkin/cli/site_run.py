"""The light process of ``fedkin site run`` and ``fedkin federation run``, which ends with a model.

``python -m fedkin.cli.site_run [--centre] DIR``, or ``--select DIR`` for the edge tests before them. Modules needed to
make a model are imported at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from fedkin.federate.messages import MODEL
from fedkin.federate.program import FINISHED, Result, main, select_main
from fedkin.federate.records import read_choice


def write_model(result: Result) -> None:
    """Write the model of this site alone into its directory."""
    from fedkin.fitting import FusedFit, model_from_theta
    from fedkin.graph import Graph

    view, member, contract = result.plan, result.site.invite.site, result.site.contract
    chosen = {} if read_choice(result.site.directory, view.run, view.revision) is None else {"lam": "cv"}
    origin: dict[str, Any] = {"from": "rounds", "rounds": view.rounds}
    if view.noisy is not None and (promised := view.noisy[0].privacy) is not None:
        about = {"epsilon": promised.epsilon, "delta": promised.delta, "sites": 1}
        origin |= {"privacy": about, "sums": view.noisy[1]}
    model = model_from_theta(
        {member.id: result.theta},
        Graph.empty([member.id]),
        schema=contract.schema,
        loss=contract.loss_object(),
        intercept=contract.intercept,
        n_samples={member.id: result.n_rows},
        fused=FusedFit(contract.penalty, view.lam, n_iter=view.rounds),  # a certificate needs the rows of all sites
        origin=origin,
        options={"contract": contract.name, "contract_digest": contract.digest, **chosen},
        notes={member.id: [f"found in rounds with its neighbours: run {view.run}, order {view.revision}"]},
    )
    model.save(result.site.directory / MODEL)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one site, or with ``--centre`` the central machine, or test edges; returns an exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    rest = [word for word in words if word not in ("--centre", "--select")]
    if "--select" in words:
        return select_main(rest)
    made: list[Result] = []

    def finish(result: Result) -> None:
        write_model(result)
        made.append(result)

    code = main(finish, rest, centre="--centre" in words)
    if code == FINISHED and made and "--echo" in rest:  # a person reads it
        site = made[0].site
        model, share = site.directory / MODEL, f"; to share it: fedkin site publish {site.directory}"
        told = share if site.settings.share_result else ""
        sys.stdout.write(f"{model} has the model of {site.name}; fedkin predict {model} TABLE{told}\n")
    return code


if __name__ == "__main__":
    sys.exit(run())
