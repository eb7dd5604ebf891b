"""Break a Gloo group off in the middle of a message, whose sender has stopped; then end."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.torch_engine import create_gloo
from dure.comm.call import Call
from dure.store import FileStore

NUMEL = 64 << 20  # more than a kernel's buffers hold


def options(rank: int) -> BackendOptions:
    """Return what the group is; its time limits are somebody else's."""
    return BackendOptions(
        store=FileStore(sys.argv[1], 2),
        rank=rank,
        size=2,
        global_ranks=(0, 1),
        timeout=timedelta(seconds=30),
        name="test",
        op_timeout=timedelta(days=1),
    )


def broadcast(tensor: torch.Tensor) -> Call:
    """Return the call of rank 1's broadcast."""
    return Call(op="broadcast", inputs=(tensor,), outputs=(tensor,), root=1)


def send() -> None:
    """Broadcast for as long as the receiver lives."""
    engine, tensor = create_gloo(options(1)), torch.ones(NUMEL)
    while True:
        engine.run(broadcast(tensor), False)


def main() -> None:
    """Be the receiver, and start the sender, which is stopped within a message."""
    sender = os.fork()
    if not sender:
        send()
    engine = create_gloo(options(0))
    try:
        while True:
            tensor = torch.zeros(NUMEL)
            request = engine.run(broadcast(tensor), True)
            assert request is not None
            while not tensor[0]:
                pass
            os.kill(sender, signal.SIGSTOP)
            if not request.wait(0.5):
                break
            os.kill(sender, signal.SIGCONT)  # it was stopped too late: within the next one
        engine.close(True)
        assert request.done()
    finally:
        os.kill(sender, signal.SIGKILL)
    print("closed", flush=True)


main()
