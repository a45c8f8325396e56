"""A bare zenoh exchange of vectors between processes, for comparison: it imports nothing but zenoh.

``python benchmarks/bare_exchange.py FILE``: FILE is JSON with the ``configuration`` of zenoh, the key to ``write``, the
keys to ``read``, how many ``numbers`` a vector has, and the ``folder`` for signs. It goes on until it is ended; the
file ``round`` has the round, in eight bytes.
"""

import json
import mmap
import sys
import threading
import time
from pathlib import Path

import zenoh


def main() -> None:
    told = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(told["folder"])
    session = zenoh.open(zenoh.Config.from_json5(json.dumps(told["configuration"])))
    changed, come = threading.Condition(), dict.fromkeys(told["read"], 0)

    def receiver(key):
        def on_sample(sample):
            t = int.from_bytes(sample.payload.to_bytes()[:8], "little")
            with changed:
                come[key] = max(come[key], t)
                changed.notify()

        return on_sample

    kept = [session.declare_subscriber(key, receiver(key)) for key in told["read"]]
    block = zenoh.CongestionControl.BLOCK
    publisher = session.declare_publisher(told["write"], congestion_control=block, express=True)
    (folder / "ready").touch()
    while not (folder.parent / "go").exists():
        time.sleep(0.05)
    assert kept
    payload = bytes(8 * told["numbers"])
    (folder / "round").write_bytes(bytes(8))
    with (folder / "round").open("r+b") as file, mmap.mmap(file.fileno(), 8) as shown:
        t = 0
        while True:
            t += 1
            publisher.put(t.to_bytes(8, "little") + payload)
            with changed:
                if not changed.wait_for(lambda: min(come.values()) >= t, 600):  # noqa: B023
                    raise TimeoutError(f"{folder.name}: round {t}, {come}")
            shown[:] = t.to_bytes(8, "little")


if __name__ == "__main__":
    main()
