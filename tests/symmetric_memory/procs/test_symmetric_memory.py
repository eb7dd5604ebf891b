"""The symmetric heap with real processes: found by address in every group, and by rendezvous."""

from __future__ import annotations

import pytest

from dure import symmetric_memory
from tests.comm.forked_ranks import Ranks
from tests.symmetric_memory import heap_ranks

pytestmark = pytest.mark.needs("engine")


# In the order of the pools, of which one is kept at a time.


def test_a_view_begins_where_it_began_2_ranks(process_pool):
    assert process_pool(2, "shm").run(heap_ranks.view_of_a_tensor, 2) == [10.0, 10.0]


def test_wrong_uses_are_told_2_ranks(process_pool):
    assert process_pool(2, "shm").run(heap_ranks.wrong_uses, 2) == [True, True]


@pytest.mark.parametrize(("backend", "large"), [("shm", True), ("gloo", False)])
def test_large_functional_results_lie_in_the_heap_where_ranks_share_memory_2_ranks(
    backend, large, process_pool
):
    wanted = [large, large, False, False]  # the part of a reduce_scatter is 512 KiB
    assert process_pool(2, backend).run(heap_ranks.functional_results, 2) == [wanted] * 2


@pytest.mark.parametrize(("n", "backend"), [(2, "gloo"), (3, "shm")])
def test_a_peers_tensor_is_read_and_written(n, backend, process_pool):
    wanted = [[r + 0.5] for r in range(n)]
    assert process_pool(n, backend).run(heap_ranks.neighbours, n) == [wanted] * n


def test_signals_order_writes_and_reads_3_ranks(process_pool):
    got = process_pool(3, "shm").run(heap_ranks.signals, 3)
    assert got[-1] == [4.0 * k for k in range(50)]


def test_heap_tensors_beside_ordinary_ones_3_ranks(process_pool):
    process_pool(3, "shm").run(heap_ranks.mixed_memory, 3)


def test_parts_of_one_memory_3_ranks(process_pool):
    process_pool(3, "shm").run(heap_ranks.parts_of_one_node_shared_tensor, 3)


def test_zero_copy_in_every_group_4_ranks(process_pool):
    for grew in process_pool(4, "shm").run(heap_ranks.zero_copy_in_every_group, 4):
        assert len(grew) == 3  # the world, its twin, its axis
        # Staging would touch the 512 KiB buffers of all members; headers take a few pages.
        assert max(grew) < 256 * 1024


def test_freed_memory_goes_back_with_trim():
    x = symmetric_memory.empty(1 << 20)
    x.fill_(1.0)
    del x
    assert symmetric_memory.trim() >= 4 << 20
    assert symmetric_memory.trim() == 0


def test_a_rank_that_dies_is_not_waited_for_3_ranks(tmp_path):
    with Ranks(3, tmp_path, heap_ranks.dies_while_it_is_waited_for) as ranks:
        assert [r for r in ranks.values() if isinstance(r, int)] == [2, 2]


def test_a_late_write_does_not_reach_a_tensor_used_again_3_ranks(tmp_path):
    with Ranks(3, tmp_path, heap_ranks.written_after_it_failed) as ranks:
        assert ranks.values() == [None, True, True]
