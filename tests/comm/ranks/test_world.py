"""How code finds its world: threads of a program, thread-ranks, and autograd's threads."""

from __future__ import annotations

import threading

import pytest

import dure as dist
from dure.comm.aliases import _resolve_process_group
from dure.comm.operators import group_named
from dure.errors import UsageError
from dure.testing import run_ranks


def test_a_thread_that_a_program_starts_sees_the_process_world():
    seen = []
    with dist.process_group("threads", store=dist.HashStore(), rank=0, world_size=1):
        thread = threading.Thread(target=lambda: seen.append(dist.get_world_size()))
        thread.start()
        thread.join()
    assert seen == [1]


def test_a_thread_rank_sees_only_its_own_world():
    with dist.process_group("threads", store=dist.HashStore(), rank=0, world_size=1):

        def body(rank):
            return dist.get_rank(), dist.get_world_size()

        assert run_ranks(3, body) == [(r, 3) for r in range(3)]
        assert dist.get_world_size() == 1


def test_groups_are_found_by_name_and_the_default_one_as_0():
    def body(rank):
        default, other = dist.group.WORLD, dist.new_group([0])
        for name in ("0", default.group_name):
            assert _resolve_process_group(name) is default
        assert _resolve_process_group(other.group_name) is other
        with pytest.raises(UsageError):
            _resolve_process_group("nosuch")
        assert group_named("0", "all_reduce") is default

    run_ranks(1, body)
