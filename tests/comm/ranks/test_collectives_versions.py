"""In-place collectives and autograd: a saved tensor that is overwritten is noticed in backward."""

# A gradient may be None to pyright.
# pyright: reportArgumentType=false

import pytest
import torch

import dure as dist
from tests.thread_ranks import on_ranks

pytestmark = pytest.mark.needs("engine")  # other backends write with torch, which counts

K = 4


def _into_first(x, call):
    """Call with a list of outputs that begins with `x`."""
    return call([x, torch.zeros(K)])


_WRITES = {
    "all_reduce": lambda x, r: dist.all_reduce(x),
    "all_reduce_async": lambda x, r: dist.all_reduce(x, async_op=True),
    "broadcast": lambda x, r: (dist.broadcast(x, 0), dist.broadcast(x, 1)),
    "reduce": lambda x, r: (dist.reduce(x, 0), dist.reduce(x, 1)),
    "all_gather": lambda x, r: _into_first(x, lambda o: dist.all_gather(o, torch.zeros(K))),
    "all_gather_single": lambda x, r: dist.all_gather_single(x, torch.zeros(K // 2)),
    "reduce_scatter_single": lambda x, r: dist.reduce_scatter_single(x, torch.zeros(2 * K)),
    "all_to_all_single": lambda x, r: dist.all_to_all_single(x, torch.zeros(K)),
    "recv": lambda x, r: (dist.isend(torch.zeros(K), 1 - r), dist.recv(x, 1 - r))[0],
    "irecv": lambda x, r: (dist.isend(torch.zeros(K), 1 - r).wait(), dist.irecv(x, 1 - r))[1],
}


@pytest.mark.parametrize("op", _WRITES)
@on_ranks(2, backend="shm")
def test_backward_of_a_saved_tensor_that_was_overwritten_raises(rank, op):
    x, w = torch.ones(K), torch.ones(K, requires_grad=True)
    loss = (x * w).sum()
    made = _WRITES[op](x, rank)
    if hasattr(made, "wait"):
        made.wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    dist.barrier()


@on_ranks(2, backend="shm")
def test_tensors_that_are_only_read_are_left_alone(rank):
    x, w = torch.ones(K), torch.ones(K, requires_grad=True)
    loss = (x * w).sum()
    dist.all_gather_single(torch.zeros(2 * K), x)
    dist.reduce_scatter_single(torch.zeros(K // 2), x)
    if rank == 0:
        dist.broadcast(x, 0)
        dist.reduce(x, 1)
    else:
        dist.broadcast(torch.zeros(K), 0)
        dist.reduce(torch.zeros(K), 1)
    loss.backward()
    assert torch.equal(w.grad, torch.ones(K))


@on_ranks(2, backend="shm")
def test_methods_of_a_group_count_nothing(rank):
    """What Dure writes for itself (buckets, unsharded parameters) goes through them."""

    x = torch.ones(K)
    dist.group.WORLD.all_reduce(x)
    assert x._version == 0
