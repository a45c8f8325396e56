"""10,000 single-bit flips over everything that a site and an organiser keep: each is detected in words, or harmless."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heart
from fedkin.admm import Sent, Store
from fedkin.core import Query
from fedkin.errors import FedkinError
from fedkin.federate import Organiser, Site, read_invite, received, sharing
from flips import flipped

pytestmark = pytest.mark.exhaustive

FLIPS = 10_000
RUN = "00112233445566ff"


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> tuple[Organiser, Path]:
    """An organiser and the site north, which has shared, answered, got an order and a notice, and runs."""
    folder = tmp_path_factory.mktemp("flips")
    made = heart.organiser(folder)
    north, south = (heart.admitted(made, name, n=90) for name in ("north", "south"))
    for path, _ in made.order(lam=0.5, rounds=100):
        Site.read(north).accept(path)
    Site.read(north).accept(made.expel("west"))
    Site.read(north).renew()  # the second key waits
    made.write_queries([Query("north", 2, np.full(4, 0.1), np.zeros(4), 10.0)], {"round": 2})
    for shared in (
        sharing.share(north),
        sharing.share(south),
        sharing.answer(north, made.directory / "asks" / "north@2.ask"),
    ):
        (made.directory / "summaries" / shared.path.name).write_bytes(shared.path.read_bytes())
    (made.directory / "summaries" / "north@2.summary").unlink()
    store = Store(north / "state.db", RUN, 1)
    theta = np.linspace(0.0, 1.0, 24)
    store.save(7, {"theta": theta}, {"left": []}, [Sent(1, 7, theta)], durable=True)
    store.close()
    return made, north


def as_site(north: Path) -> Callable[[], Any]:
    def use() -> Any:
        site = Site.read(north)
        known = (site.invite, site.contract, site.settings, site.order, site.certificate, site.out)
        return known, site.rows().digest

    return use


def as_sharer(north: Path, question: Path) -> Callable[[], Any]:
    return lambda: sharing.answer(north, question, dry_run=True).summary.gradient.tolist()


def as_state(path: Path) -> Callable[[], Any]:
    def use() -> Any:
        store = Store(path, RUN, 1)
        found = store.load()
        return found and (found.round, found.arrays["theta"].tolist(), found.header), [
            (one.kind, one.round, one.values.tolist()) for one in store.sent()
        ]

    return use


def as_organiser(made: Organiser, north: Path, path: Path) -> Callable[[], Any]:
    """What reads that file of the organiser's."""
    heart, request = made.directory, made.directory / "admitted" / "south.request"

    def read_again() -> Any:
        again = Organiser.read(heart)
        return again.charter, again.contract, again.members, list(again.graph.edge_ids())

    def summaries() -> Any:
        found = received.read_summaries(heart / "summaries").summaries
        return {name: one.hessian.tolist() for name, one in found.items()}

    by_folder = {
        "invites": lambda: (read_invite(path), made.admit(request).fingerprint),
        "admitted": lambda: made.status() if path.suffix == ".admit" else made.steps(),
        "summaries": summaries,
        "notices": made.out,
        "asks": as_sharer(north, path) if path.suffix == ".ask" else lambda: made.read_state(),
    }
    by_name = {
        "authority.key": lambda: made.signing().certificate,
        "order.json": lambda: Site.read(north).accept(path),
    }
    return by_name.get(path.name) or by_folder.get(path.parent.name) or read_again


def test_ten_thousand_flips_are_detected_in_words_or_harmless(places, capfd):
    made, north = places
    uses: dict[Path, Callable[[], Any]] = {}
    site, sharer = as_site(north), as_sharer(north, made.directory / "asks" / "north@2.ask")
    for path in sorted(path for path in north.rglob("*") if path.is_file()):
        uses[path] = sharer if path.parent.name == "sent" else as_state(path) if path.name == "state.db" else site
    for path in sorted(path for path in made.directory.rglob("*") if path.is_file()):
        uses[path] = as_organiser(made, north, path)
    assert {"site.key", "next.key", "rows.npz", "site.toml", "state.db", "admit.json"} <= {path.name for path in uses}
    rng = random.Random(0)
    seen: Counter[str] = Counter()
    expected = {path: use() for path, use in uses.items()}
    for path, use in uses.items():
        content = path.read_bytes()
        for bit in rng.sample(range(8 * len(content)), min(8 * len(content), -(-FLIPS // len(uses)))):
            path.write_bytes(flipped(content, bit))
            try:
                found = use()
                assert found == expected[path], f"{path}, bit {bit}"
                seen["harmless"] += 1
            except FedkinError as error:
                assert str(error) and "Traceback" not in str(error)
                seen["detected"] += 1
        path.write_bytes(content)
    assert all(use() == expected[path] for path, use in uses.items())
    assert sum(seen.values()) >= 0.95 * FLIPS, seen
    assert seen["harmless"] < 0.25 * FLIPS, seen
    assert "Traceback" not in capfd.readouterr().err
