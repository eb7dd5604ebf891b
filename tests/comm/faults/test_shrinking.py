"""A group of the survivors: shrink, shrink_group, new_group after ranks have died."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import dure
from dure.comm import shrinking
from dure.errors import CommError, PeerLost, RendezvousTimeout, StoreLost, UsageError
from dure.store.rendezvous import Rendezvous
from dure.trace import dump, recorded
from tests.comm.forked_ranks import Ranks, Slot
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs("engine")


def _sum_of_ranks(group: dure.ProcessGroup | None = None) -> float:
    x = torch.full((1000,), float(dure.get_rank(group)))
    dure.all_reduce(x, group=group)
    return x[0].item()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _reduce_until_loss(slot: Slot, victims: tuple[int, ...]) -> PeerLost:
    """All reduce, and the victims are killed in the midst of it; no victim goes on after that."""
    if slot.rank in victims:
        threading.Timer(0.05, _die).start()
    x = torch.ones(300_000)
    try:
        while True:
            dure.all_reduce(x)
    except PeerLost as error:
        if slot.rank in victims:
            _die()
        return error


def _shrinks(slot: Slot, victims: tuple[int, ...]):
    slot.init()
    sub = dure.new_group([0, 1])
    lost = _reduce_until_loss(slot, victims)
    with pytest.raises(PeerLost):  # the same at every call
        dure.barrier()
    group = dure.shrink()
    assert group is dure.group.WORLD
    assert dure.get_process_group_ranks(group) == list(range(slot.size - len(victims)))
    assert sub is dure.GroupMember.NON_GROUP_MEMBER or sub.closed
    total = _sum_of_ranks()
    assert {(r.group, r.global_rank) for r in recorded()} == {(group.group_name, dure.get_rank())}
    assert dump(f"{slot.path}-traces").name == f"rank{dure.get_rank()}.json"
    pair = dure.new_group([0, 1])
    in_pair = _sum_of_ranks(pair) if dure.get_rank() < 2 else None
    dure.destroy_process_group()
    return lost.peer, total, in_pair


@pytest.mark.parametrize("victims", [(2,), (0, 1)])
def test_survivors_of_4_ranks_go_on_as_the_default_group(tmp_path: Path, victims: tuple[int, ...]):
    with Ranks(4, tmp_path, _shrinks, victims) as ranks:
        left = [r for r in range(4) if r not in victims]
        for rank, old in enumerate(left):
            peer, total, in_pair = ranks.result(old)
            assert peer in victims
            assert total == sum(range(len(left)))
            assert in_pair == (1.0 if rank < 2 else None)


def _makes_a_group(slot: Slot):
    slot.init()
    lost = _reduce_until_loss(slot, (0,))
    group = dure.new_group([1, 2])
    with pytest.raises(PeerLost) as named:
        dure.new_group([0, 1, 2])
    return lost.peer, _sum_of_ranks(group), dure.get_rank(), named.value.peer


def test_new_group_of_2_survivors_of_3_ranks(tmp_path: Path):
    with Ranks(3, tmp_path, _makes_a_group) as ranks:
        for rank in (1, 2):
            assert ranks.result(rank) == (0, 1.0, rank, 0)


def _loses_the_store(slot: Slot, run: str):
    os.environ.update(  # of a job on one host that no launcher of Dure's started
        RANK=str(slot.rank),
        WORLD_SIZE=str(slot.size),
        LOCAL_WORLD_SIZE=str(slot.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # nobody listens there
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID=run,
    )
    dure.init_process_group("shm")
    _reduce_until_loss(slot, (0,))
    require, asked = Rendezvous.require_store, list[str]()

    def require_late(self: Rendezvous, op: str) -> None:
        """Not know the first times: a death is told before the process has ended."""
        asked.append(op)
        if len(asked) > 4:
            require(self, op)

    Rendezvous.require_store = require_late
    lost: list[tuple[int | None, str]] = []
    for call in (dure.shrink, lambda: dure.shrink_group([0]), lambda: dure.new_group([1, 2])):
        with pytest.raises(StoreLost) as caught:
            call()
        lost.append((caught.value.peer, caught.value.fix))
    return lost


def test_nothing_new_is_made_when_rank_0_that_served_the_store_has_died(tmp_path: Path):
    with Ranks(3, tmp_path, _loses_the_store, f"run {uuid.uuid4()}") as ranks:
        for rank in (1, 2):
            peers, fixes = zip(*ranks.result(rank), strict=True)
            assert peers == (0, 0, 0)
            assert all("dure run" in fix for fix in fixes)


def _loses_the_store_of_another_host(slot: Slot, url: str) -> str:
    shrinking._ENDING_S = 2.0 * PATIENCE_S  # of a process whose end can be seen
    os.environ["DURE_HOST_ID"] = f"host {slot.rank}"
    dure.init_process_group("gloo", url, world_size=slot.size, rank=slot.rank)
    _reduce_until_loss(slot, (0,))
    with pytest.raises(StoreLost):
        dure.shrink()
    return "raised"


def test_no_rank_waits_for_the_end_of_a_process_on_another_host(tmp_path: Path, port: int):
    url = f"tcp://127.0.0.1:{port}"
    with Ranks(2, tmp_path, _loses_the_store_of_another_host, url) as ranks:
        assert ranks.result(1) == "raised"


def _excludes(slot: Slot):
    slot.init()
    for ranks in ([], [slot.size], [1, 1], [0, 1, 2, 3], [slot.rank]):
        with pytest.raises(UsageError):
            dure.shrink_group(ranks)
    with pytest.raises(UsageError):
        dure.shrink_group([3 - slot.rank], shrink_flags=7)
    with pytest.raises(TypeError):
        dure.shrink_group((3 - slot.rank,))  # pyright: ignore[reportArgumentType]
    assert _sum_of_ranks() == 6.0  # misuse leaves the group whole
    trio = dure.new_group([1, 2, 3])
    if slot.rank == 3:
        with pytest.raises(CommError):  # the others leave the default group
            dure.barrier()
        return None
    if slot.rank > 0:
        trio = dure.shrink_group([2], trio)
        assert (trio.size(), list(trio.global_ranks)) == (2, [1, 2])
        assert _sum_of_ranks(trio) == 1.0
        assert dure.get_world_size() == 4  # the default group is as it was
    group = dure.shrink_group([3], shrink_flags=dure.SHRINK_ABORT)
    return group.size(), _sum_of_ranks()


def test_shrink_group_excludes_ranks_that_live_of_4_ranks(tmp_path: Path):
    with Ranks(4, tmp_path, _excludes) as ranks:
        assert [ranks.result(rank) for rank in range(3)] == [(3, 3.0)] * 3
        assert ranks.result(3) is None


def _is_stopped(slot: Slot):
    slot.init()
    dure.barrier()
    if slot.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    with pytest.raises(RendezvousTimeout) as refusal:
        dure.shrink(timeout=timedelta(seconds=1))
    dure.shrink_group([1])
    return refusal.value.missing, _sum_of_ranks()


def test_stopped_rank_is_named_by_shrink_and_excluded_by_shrink_group_of_3_ranks(tmp_path: Path):
    with Ranks(3, tmp_path, _is_stopped) as ranks:
        for rank in (0, 2):
            missing, total = ranks.result(rank)
            assert 1 in missing and total == 1.0
        os.kill(ranks.pids[1], signal.SIGCONT)


def _loses_another(slot: Slot):
    slot.init()
    if slot.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost):
        dure.barrier()
    if slot.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dure.shrink()
    return dure.get_world_size(), _sum_of_ranks()


def test_death_during_shrink_is_seen_of_4_ranks(tmp_path: Path):
    with Ranks(4, tmp_path, _loses_another) as ranks:
        for rank in (2, 3):
            assert ranks.result(rank) == (2, 1.0)
