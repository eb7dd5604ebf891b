"""Python objects as messages."""

import tracemalloc

import pytest
import torch

import dure as dist
from dure.errors import ShapeError, UsageError
from tests.thread_ranks import on_ranks


@on_ranks(2)
def test_wrong_lengths_raise_before_anything_is_sent(rank):
    with pytest.raises(ShapeError):
        dist.all_gather_object([None], rank)
    with pytest.raises(UsageError):
        dist.scatter_object_list([], ["a", "b"], src=rank)
    with pytest.raises(ShapeError):
        dist.scatter_object_list([None], ["a"], src=rank)
    dist.barrier()


@on_ranks(2)
def test_objects_and_sparse_tensors_are_refused_within_a_coalescing_manager(rank):
    calls = (
        lambda: dist.all_gather_object([None] * 2, rank),
        lambda: dist.gather_object(rank, [None] * 2 if rank == 0 else None),
        lambda: dist.broadcast_object_list([rank]),
        lambda: dist.scatter_object_list([None], [1, 2]),
        lambda: dist.send_object_list([rank], 1 - rank),
        lambda: dist.recv_object_list([rank], 1 - rank),
        lambda: dist.all_reduce(torch.eye(3).to_sparse()),
    )
    for call in calls:
        with pytest.raises(UsageError), dist._coalescing_manager():
            call()
    t = torch.eye(3).to_sparse()
    dist.all_reduce(t)
    assert torch.equal(t.to_dense(), 2 * torch.eye(3))


@on_ranks(1)
def test_a_large_object_is_in_memory_as_its_pickle_and_as_what_arrives(rank):
    """The collective's own buffer is torch's, which is not counted here."""
    payload, places = b"x" * (1 << 20), [None]
    for collect in (
        lambda: dist.all_gather_object(places, payload),
        lambda: dist.gather_object(payload, places),
    ):
        tracemalloc.start()
        collect()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert places == [payload]
        places[0] = None
        assert peak < 2.5 * len(payload)
