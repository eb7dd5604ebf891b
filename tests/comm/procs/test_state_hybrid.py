"""Reductions of the hybrid backend, and deaths, on hosts that are only pretended."""

from __future__ import annotations

import os
import signal
import traceback

import pytest
import torch

import dure as dist
from dure.errors import PeerLost
from dure.testing import ProcessPool
from tests.comm import mpi_jobs
from tests.comm.forked_ranks import Ranks, Slot

pytestmark = pytest.mark.needs("engine")


@pytest.fixture(scope="module", params=["aabb", "abca"])
def pool(request):
    with ProcessPool(4, None, hosts=request.param) as pool:
        yield pool


def _sums(rank: int, count: int, dtype: torch.dtype) -> bool:
    """Tell whether sums are folded within hosts, then over hosts, and rounded once; every time."""
    hosts = dist.group.WORLD.hosts
    everyone = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    everyone = [t.to(dtype) for t in everyone]
    partial = []
    for ranks in hosts:
        total = everyone[ranks[0]].float()
        for r in ranks[1:]:
            total = total + everyone[r].float()
        partial.append(total)
    wanted = partial[0]
    for total in partial[1:]:
        wanted = wanted + total
    wanted = wanted.to(dtype)
    for async_op in (False, True):
        mine = everyone[rank].clone()
        work = dist.all_reduce(mine, async_op=async_op)
        if work is not None:
            work.wait()
        assert torch.equal(mine, wanted), (count, dtype, async_op)
        part = torch.empty_like(mine)
        dist.reduce_scatter(part, [everyone[rank]] * 4)
        assert torch.equal(part, wanted)
        root = everyone[rank].clone()
        dist.reduce(root, dst=3)
        assert torch.equal(root, wanted if rank == 3 else everyone[rank])
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [5, 3001, 2_500_001])  # small; one chunk; several
def test_sums_are_folded_by_host_and_rounded_once(pool, count, dtype):
    assert all(pool.run(_sums, count, dtype))


def _loss(t: torch.Tensor) -> PeerLost | None:
    try:
        dist.all_reduce(t)
    except PeerLost as error:
        return error
    return None


def _lose(slot: Slot, who: int) -> tuple[int | None, int, float]:
    os.environ["DURE_HOST_ID"] = "aabb"[slot.rank]
    slot.init(None)
    t = torch.ones(100_000)
    dist.barrier()
    if slot.rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    while (lost := _loss(t)) is None:
        pass
    assert '"kind"' not in "".join(traceback.format_exception(lost))  # no record as text
    dist.shrink()
    total = torch.full((100_000,), float(dist.get_rank()))
    dist.all_reduce(total)
    return lost.peer, dist.get_rank(), total[-1].item()


@pytest.mark.parametrize("who", [2, 3])  # a leader, and a rank that is none
def test_killed_rank_is_peer_lost_on_all_ranks_of_all_hosts_which_go_on_without(tmp_path, who):
    with Ranks(4, tmp_path, _lose, who) as ranks:
        survivors = [r for r in range(4) if r != who]
        found = [ranks.result(rank) for rank in survivors]
    assert found == [(who, new_rank, 3.0) for new_rank in range(3)]


@pytest.mark.needs("MPI")
@pytest.mark.parametrize(
    "subjects",
    [
        ("moving",),
        pytest.param(
            ("failing", "reducing", "layouts", "messages", "misuse"), marks=pytest.mark.slow
        ),
    ],
    ids=["some", "others"],
)
def test_hybrid_over_mpi_keeps_the_contract(subjects):
    ended = mpi_jobs.mpirun(3, "mpi_over_hosts.py", *subjects)  # hosts of 2 and of 1
    assert ended.code == 0, ended.err
    ran = [line.split() for line in ended.out.splitlines()]
    assert [name for name, _, _ in ran] == list(subjects)
    assert {backend for _, _, backend in ran} == {"hybrid_mpi"}
