"""Operations in torch's profiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dure as dist
from tests.profiles import arguments_in, names_in, profile_of
from tests.thread_ranks import on_ranks


def _pair() -> list[torch.Tensor]:
    return [torch.zeros(4), torch.zeros(4)]


def _message(rank: int, send: Any, recv: Any, sender: int = 0) -> None:
    work = send(torch.ones(4), 1 - rank) if rank == sender else recv(torch.zeros(4), 1 - rank)
    if isinstance(work, dist.Work):
        work.wait()


OPERATIONS: dict[str, tuple[Any, list[str]]] = {
    "all_reduce": (lambda r: dist.all_reduce(torch.ones(4)), ["allreduce_ all_reduce"]),
    "all_reduce_coalesced": (
        lambda r: dist.all_reduce_coalesced(_pair()),
        ["allreduce_ all_reduce", "allreduce_ all_reduce"],
    ),
    "all_gather_single": (
        lambda r: dist.all_gather_single(torch.zeros(8), torch.ones(4)),
        ["_allgather_base_ all_gather"],
    ),
    "all_to_all_single": (
        lambda r: dist.all_to_all_single(torch.zeros(4), torch.ones(4)),
        ["alltoall_base_ all_to_all"],
    ),
    "barrier": (lambda r: dist.barrier(), ["barrier barrier"]),
    "reduce_scatter_single": (
        lambda r: dist.reduce_scatter_single(torch.zeros(4), torch.ones(8)),
        ["_reduce_scatter_base_ reduce_scatter"],
    ),
    "isend": (lambda r: _message(r, dist.isend, dist.irecv), ["send send"]),
    "irecv": (lambda r: _message(r, dist.isend, dist.irecv, 1), ["recv_ recv"]),
}
"""What is called, and the records: after "c10d::", and after the backend's name."""

ASYNCHRONOUS = {"all_reduce_coalesced", "isend", "irecv"}
"""What starts operations: they have a record of their call, and one of the wait."""


@on_ranks(2)
def test_every_operation_is_a_call_with_an_operation_on_the_backend(rank):
    def run() -> None:
        for call, _ in OPERATIONS.values():
            call(rank)

    profile = profile_of(rank, run)
    if rank == 0:
        assert [n for n in names_in(profile) if "wait" not in n] == [
            f"{kind}{name}"
            for key, (_, records) in OPERATIONS.items()
            for record in records
            for kind, name in zip(("c10d::", "threads:"), record.split(), strict=True)
            if kind == "c10d::" or key not in ASYNCHRONOUS
        ]


@on_ranks(2)
def test_arguments_have_the_names_of_torchs_nccl(rank, tmp_path):
    group = dist.new_group([1, 0], group_desc="pair")

    def run() -> None:
        dist.all_gather_single(torch.zeros(8), torch.ones(4), group=group)
        _message(rank, dist.send, dist.recv)

    profile = profile_of(rank, run)
    if rank:
        return
    (gather, fields), (send, message) = arguments_in(profile, tmp_path)
    assert (gather, send) == ("c10d::_allgather_base_", "c10d::send")
    wanted = {
        "Collective name": "_allgather_base",
        "dtype": "Float",
        "In msg nelems": 4,
        "Out msg nelems": 8,
        "bytes": 16,
        "Group size": 2,
        "Process Group Name": group.group_name,
        "Process Group Description": "pair",
        "Process Group Ranks": "[0, 1]",
        "Global rank start": 0,
        "Global rank stride": 1,
        "Rank": 0,
    }
    assert {key: fields[key] for key in wanted} == wanted
    assert (message["Collective name"], message["Dst Rank"], message["bytes"]) == ("send", 1, 16)


@on_ranks(2)
def test_an_asynchronous_operation_is_its_start_and_the_wait(rank):
    def run() -> None:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        torch.ones(1).cos_()
        assert work is not None
        work.wait()
        work.wait()

    profile = profile_of(rank, run)
    if rank == 0:
        starts = {event.name: event.time_range.start for event in profile.events()}
        names = names_in(profile)
        assert names == ["c10d::allreduce_", "c10d::wait (all_reduce)"]
        assert starts[names[0]] < starts["aten::cos_"] < starts[names[1]]


@on_ranks(2, backend="gloo")
def test_what_gloo_records_is_not_recorded_twice(rank: int) -> None:
    profile = profile_of(rank, lambda: dist.all_reduce(torch.ones(4)))
    if rank == 0:
        assert names_in(profile) == ["c10d::allreduce_", "gloo:all_reduce"]


@pytest.mark.needs("engine")
@on_ranks(2, backend="shm")
def test_calls_of_the_engine_are_recorded_from_the_profiles_start_to_its_end(rank: int) -> None:
    tensor = torch.ones(4)

    def run() -> None:
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    dist.all_reduce(tensor)
    profile = profile_of(rank, run)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [16.0] * 4
    if rank == 0:
        names = ["c10d::allreduce_", "shm:all_reduce", "c10d::allreduce_"]
        assert names_in(profile) == [*names, "c10d::wait (all_reduce)"]
