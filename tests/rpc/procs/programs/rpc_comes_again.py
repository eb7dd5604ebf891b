"""Workers that come and go: one is killed by a call, and comes again under its name."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from dure import rpc
from dure.errors import PeerLost, RpcError

_over = threading.Event()


def double(x: int) -> int:
    return 2 * x


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def finish() -> None:
    _over.set()


def joined(name: str, but: int = -1) -> rpc.WorkerInfo:
    """Wait for a worker, another than the one with the id `but`."""
    while True:
        try:
            found = rpc.get_worker_info(name)
            if found.id != but:
                return found
        except (PeerLost, RpcError):
            pass
        time.sleep(0.01)


def main() -> None:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        old = joined("worker1")
        joined("worker2")
        lost = text = ""
        try:
            rpc.rpc_sync("worker1", die)
        except PeerLost as error:
            lost, text = "PeerLost", str(error)
        other = rpc.rpc_sync("worker2", double, (4,))
        new = joined("worker1", but=old.id)
        report = {
            "lost": lost,
            "text": text,
            "other": other,
            "again": rpc.rpc_sync("worker1", double, (21,)),
            "ids": [old.id, new.id],
        }
        Path(sys.argv[1]).write_text(json.dumps(report))
        for name in ("worker1", "worker2"):
            rpc.rpc_sync(name, finish)
    else:
        _over.wait()
    rpc.shutdown()


if __name__ == "__main__":
    main()
