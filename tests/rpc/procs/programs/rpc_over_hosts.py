"""A worker on a host of its own: the first one waits in a call to the second, which is cut off."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from dure import rpc
from dure.errors import PeerLost, RpcError
from tests.rpc.procs.rpc_workers import double, wait_here


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RpcError, PeerLost) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=120)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    if rank != 0:
        time.sleep(120)  # it serves, and is killed at the end
        return
    assert [rpc.rpc_sync(f"worker{n}", double, (n,)) for n in (1, 2)] == [2, 4]
    waiting = rpc.rpc_async("worker1", wait_here, (1.0,))
    assert rpc.rpc_sync("worker1", double, (3,)) == 6
    began = time.monotonic()
    (folder / "calling").touch()
    first = error_of(waiting.wait)
    later = error_of(lambda: rpc.rpc_sync("worker1", double, (1,)))
    report = {
        "first": first,
        "later": later,
        "seconds": time.monotonic() - began,
        "others": rpc.rpc_sync("worker2", double, (21,)),
    }
    (folder / "0.json").write_text(json.dumps(report))
    rpc.shutdown(graceful=False)


if __name__ == "__main__":
    main()
