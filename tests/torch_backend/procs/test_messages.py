"""Messages of the plug-in: isend does not block."""

from __future__ import annotations

import torch

from tests.torch_backend.torch_worlds import in_pool, td, world


def sends_before_receives(rank: int, folder: str) -> None:
    with world(rank, folder):
        mine, theirs = torch.full((1 << 20,), float(rank)), torch.empty(1 << 20)
        batch = [td.P2POp(td.isend, mine, 1 - rank), td.P2POp(td.irecv, theirs, 1 - rank)]
        for work in td.batch_isend_irecv(batch):
            work.wait()
        assert (theirs == 1 - rank).all()
        from_anyone = torch.empty(1)
        if rank == 0:
            assert td.recv(from_anyone) == 1
        else:
            td.send(torch.ones(1), 0)


test_sends_before_receives = in_pool(sends_before_receives)
