"""Results of functional collectives: when they are waited for, and what becomes of errors."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dure as dist
from dure.comm import functional as F
from dure.errors import PeerLost
from dure.testing import run_ranks
from tests.waiting import PATIENCE_S, descriptors, until

Pending = F.AsyncCollectiveTensor


def _late(rank: int, event: threading.Event, use: Callable[[torch.Tensor], Any]) -> Any:
    """Rank 0 calls, looks at everything but values, lets rank 1 call, and then uses the result."""
    if rank == 1:
        assert event.wait(PATIENCE_S)
    y = F.all_reduce(torch.ones(2, 2, requires_grad=True), "sum")
    if rank == 0:
        assert type(y) is Pending
        assert (y.shape, y.dtype, y.dim(), y.numel()) == ((2, 2), torch.float32, 2, 4)
        assert y.requires_grad
        assert y.grad_fn is not None
        assert y.is_contiguous()
        assert hash(y) == id(y)
        assert type(y) is Pending
        event.set()
    return use(y)


@pytest.mark.parametrize(
    "use",
    [
        lambda y: (y + 1)[0, 0].item() - 1,
        lambda y: torch.stack([y, y])[1, 1, 1].item(),
        lambda y: torch.cat(tensors=[y, y])[0, 1].item(),
        lambda y: y.tolist()[1][0],
        lambda y: y.detach().numpy()[0, 0].item(),
        lambda y: float(str(y)[9]),
        lambda y: y.view(4)[3].item(),
        lambda y: y.detach().add_(0)[0, 0].item(),
        lambda y: torch.frombuffer(bytearray(y.detach().numpy().tobytes()), dtype=y.dtype)[
            0
        ].item(),
        lambda y: F.wait_tensor(y)[0, 0].item(),
        lambda y: y[0, 0].item(),
    ],
)
def test_result_is_waited_for_at_its_first_use_and_is_ordinary_then(use):
    event = threading.Event()
    kept = []

    def body(rank):
        return _late(rank, event, lambda y: (kept.append(y), use(y))[1])

    assert run_ranks(2, body) == [2.0, 2.0]
    assert [type(y) for y in kept] == [torch.Tensor] * 2


def test_result_is_waited_for_inside_another_collective():
    def body(rank):
        y = F.all_reduce(F.all_reduce(torch.ones(3), "sum"), "sum")
        dist.all_reduce(y)
        return y.tolist()

    assert run_ranks(2, body) == [[8.0] * 3] * 2


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_memory_of_a_dropped_result_is_kept_until_it_is_written_and_no_longer(backend):
    came, went = threading.Event(), threading.Event()

    def body(rank):
        if rank == 1:
            assert came.wait(PATIENCE_S)
        F.all_reduce(torch.full((1000,), 3.0), "sum")  # and nobody looks
        if rank == 0:
            others = [torch.full((1000,), 7.0) for _ in range(50)]
            came.set()
            assert went.wait(PATIENCE_S)
            dist.barrier()
            return {t.item() for o in others for t in (o.min(), o.max())}
        went.set()
        dist.barrier()
        return {7.0}

    before = descriptors()
    gc.disable()  # the sockets of the group must not wait for a collection
    try:
        assert run_ranks(2, body, backend=backend) == [{7.0}] * 2
        until(lambda: not descriptors() - before, "sockets to be closed")
    finally:
        gc.enable()


def test_error_is_raised_where_the_result_is_used_and_again():
    called, gone = threading.Event(), threading.Event()

    def body(rank):
        if rank == 1:
            assert called.wait(PATIENCE_S)
            dist.destroy_process_group()
            gone.set()
            return
        y = F.all_reduce(torch.ones(2), "sum")
        called.set()
        assert gone.wait(PATIENCE_S)
        for _ in range(2):
            with pytest.raises(PeerLost) as caught:
                torch.add(y, 1)
            assert caught.value.peer == 1

    run_ranks(2, body)
