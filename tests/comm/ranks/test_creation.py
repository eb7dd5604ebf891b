"""How groups come into being: keys that are removed, backends that are closed."""

from __future__ import annotations

from pathlib import Path

import pytest

import dure as dist
from dure.comm.subgroups import Kind, new_groups
from dure.comm.world import current_world
from dure.errors import (
    Desync,
)
from dure.testing import run_ranks
from tests.thread_ranks import on_ranks

FILE = Path(__file__).name


def test_new_groups_that_disagree_raise_desync_with_both_lines():
    def body(rank):
        with pytest.raises(Desync) as caught:
            new_groups([[0, 1], [0, 1]], [Kind(backend=("threads", "cpu:threads")[rank])] * 2)
        return caught.value.calls

    said = run_ranks(2, body)[0]
    assert all(FILE in text for text in said.values())


def _keys() -> list[str]:
    joined = current_world().rendezvous
    assert joined is not None
    keys = [key.split("/") for key in joined.store.list_keys()]
    return [name for kind, name, *_ in keys if kind == "group" and name != "world"]


@pytest.mark.parametrize("backend", ["threads", "gloo"])
@on_ranks(3)
def test_keys_of_groups_that_all_have_left_are_removed(rank, backend):
    before = _keys()
    dist.barrier()
    kept = dist.new_group([0, 1], backend=backend)
    gone = dist.new_group([1, 2], backend=backend)
    dist.barrier()
    if gone is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.monitored_barrier(gone)
        dist.destroy_process_group(gone)
    dist.barrier()
    assert kept is not None
    assert (before, set(_keys())) == ([], {"1"})


@on_ranks(3)
def test_groups_left_by_all_at_once_keep_nobody_and_no_keys(rank):
    for _ in range(30):
        group = dist.new_group([0, 1, 2])
        dist.destroy_process_group(group)
    dist.barrier()
    assert _keys() == []
