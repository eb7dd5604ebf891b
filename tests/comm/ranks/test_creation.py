"""How groups come into being: keys that are removed, backends that are closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dure as dist
from dure.comm.backends.registry import register_backend, unregister_backend
from dure.comm.subgroups import GroupOptions, new_groups
from dure.comm.world import current_world
from dure.errors import Desync, UsageError
from dure.testing import run_ranks
from tests.thread_ranks import on_ranks

FILE = Path(__file__).name


def test_new_groups_that_disagree_raise_desync_with_both_lines():
    def body(rank):
        options = GroupOptions(backend=("threads", "cpu:threads")[rank])
        with pytest.raises(Desync) as caught:
            new_groups([[0, 1], [0, 1]], [options] * 2)
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


@pytest.fixture
def half_built():
    """Two backends, of which the second cannot be made; yields how the first was closed."""
    closed = []

    class First:
        name, device_types = "first", frozenset({"cpu"})

        def close(self, abort):
            closed.append(abort)

    def fail(options):
        raise UsageError("cannot run here")

    first: Any = First  # only what the test needs of a backend
    register_backend("first", lambda options: first(), devices=("cpu",))
    register_backend("second", fail, devices=("cuda",))
    yield closed
    unregister_backend("first")
    unregister_backend("second")


def test_a_backend_is_closed_where_the_groups_other_one_cannot_be_made(half_built):
    def body(rank):
        with pytest.raises(UsageError):
            dist.new_group(backend="cpu:first,cuda:second")
        return dist.get_pg_count()

    assert run_ranks(1, body) == [1]
    assert half_built == [True]
