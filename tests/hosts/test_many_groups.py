"""Hundreds of groups over hosts, made, used and destroyed: right values, and nothing is left.

Two ranks on each host. Each turn makes groups by `new_group` and `split_group` (within a host, over
all hosts, and pairs over two hosts), uses them one after another and at the same time, and destroys
them, now in the order in which they were made and now in the reverse one.
"""

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dure as dist
from dure.comm.world import current_world
from tests.comm.forked_ranks import Slot
from tests.comm.namespace_hosts import hosts
from tests.hosts.networks import ranks_on, set_variables
from tests.waiting import until

pytestmark = pytest.mark.needs("network namespaces", "engine")

EACH = 2
NUMELS = (1, 100_000)
MOST_GROWTH = 24 << 20
"""Of memory, in the second half of the turns: of the C library's allocator, and of caches."""


def _used_now() -> tuple[tuple[int, ...], int]:
    """Return what a rank uses that a group takes, and how many keys all ranks have.

    That is descriptors (ports among them), threads and mappings. Other ranks may still remove keys
    of a group that is gone here.
    """
    gc.collect()
    found = current_world().rendezvous
    mappings = Path("/proc/self/maps").read_text().count("dure")
    own = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings)
    return own, found.store.num_keys()


def _nothing_was_added(first: tuple[tuple[int, ...], int]) -> bool:
    own, num_keys = _used_now()
    # Less is right, too: what earlier groups had may still have been closing at the first look.
    no_more = all(now <= then for now, then in zip(own, first[0], strict=True))
    return no_more and num_keys <= first[1]


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _members(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _made() -> Iterator[dist.ProcessGroup]:
    """Make the groups of one turn; return those that have this rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for ranks in (list(range(n)), [n - 1, 0], [0, 1, 2]):
        group = dist.new_group(ranks)
        if rank in ranks:
            yield group
    of_hosts = [[first, first + 1] for first in range(0, n, EACH)]
    across = [list(range(0, n, EACH)), list(reversed(range(1, n, EACH)))]
    for split in (of_hosts, across):
        group = dist.split_group(split_ranks=split)
        assert group is not None
        yield group


def _use(groups: list[dist.ProcessGroup], turn: int) -> None:
    """Use them one after another, and then all at the same time."""
    rank = dist.get_rank()
    for numel in NUMELS:
        for group in groups:
            value = torch.full((numel,), float(rank + turn))
            dist.all_reduce(value, group=group)
            assert (value == sum(_members(group)) + turn * len(_members(group))).all()
        values = [torch.full((numel,), float(rank + turn)) for _ in groups]
        works = [
            dist.all_reduce(value, group=group, async_op=True)
            for value, group in zip(values, groups, strict=True)
        ]
        for value, group, work in zip(values, groups, works, strict=True):
            work.wait()
            assert (value == sum(_members(group)) + turn * len(_members(group))).all()


def turns(slot: Slot, variables: dict[str, str], backend: str, count: int) -> int:
    """Make turns; return how many bytes of memory the second half of them has cost.

    After each half it uses what it used after the first turn.
    """
    set_variables(slot.rank, variables)
    dist.init_process_group(backend)
    _turn(0)
    first, resident = _used_now(), [0, 0]
    for half in range(2):
        for turn in range(count // 2):
            _turn(turn)
        until(lambda: _nothing_was_added(first), lambda: f"{first}\n{_used_now()}")
        resident[half] = _resident()
        dist.barrier()
    dist.destroy_process_group()
    return resident[1] - resident[0]


def _turn(turn: int) -> None:
    groups = list(_made())
    _use(groups, turn)
    for group in groups if turn % 2 else reversed(groups):
        dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hybrid", "gloo"])
def test_groups_come_and_go(backend: str, tmp_path: Path):
    with (
        hosts(3, "groups") as made,
        ranks_on(made, tmp_path, turns, backend, 40, each=EACH) as ranks,
    ):
        grown = ranks.values()
    assert max(grown) < MOST_GROWTH, grown
