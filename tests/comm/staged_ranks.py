"""What ranks do in the tests of staging: each process gets an accelerator without hardware."""

from __future__ import annotations

import os
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

import dure as dist
from dure.errors import CommError, DeviceError
from dure.testing import accelerator, run_ranks
from dure.testing.accelerator import Stream
from dure.testing.accelerator.memory import backing_of, on_host
from tests.comm.conformance import suite

WHERE = "sim:0"


Ran = dict[str, list[str]]


def _module() -> Any:
    return torch.get_device_module("sim")


def conformance(backend: str, subjects: tuple[str, ...], skip: tuple[str, ...]) -> Ran:
    """Run the cases of some subjects with tensors of the accelerator; over hybrid, on two hosts."""
    accelerator.install()
    if backend.startswith("cpu:hybrid"):
        os.environ["DURE_HOST_ID"] = os.environ["RANK"]
    dist.init_process_group(backend)
    ran = _run(dist.get_rank(), subjects, skip)
    dist.destroy_process_group()
    return ran


def conformance_of_threads(subjects: tuple[str, ...], skip: tuple[str, ...]) -> list[Ran]:
    """The same on three ranks that are threads of this process, without a named device."""
    accelerator.install()
    return run_ranks(3, lambda rank: _run(rank, subjects, skip))


def _run(rank: int, subjects: tuple[str, ...], skip: tuple[str, ...]) -> Ran:
    with torch.device("sim"):
        return {subject: suite.run(rank, subject, skip) for subject in subjects}


def streams(cases: list[str]) -> dict[str, str]:
    """Run the cases below, each in a group of its own; return this rank's errors."""
    accelerator.install()
    errors: dict[str, str] = {}
    for case in cases:
        dist.init_process_group("cpu:shm,sim:shm")
        try:
            rank = dist.get_rank()
            globals()[f"case_{case}"](rank, 1 - rank)
            errors[case] = ""
        except BaseException:
            errors[case] = traceback.format_exc()
        dist.destroy_process_group()
    return errors


def stock() -> list[object]:
    """Run some operations of torch.distributed on the backend "dure"; return the results."""
    accelerator.install()
    torch_dist.init_process_group("dure")
    rank, received = torch_dist.get_rank(), torch.empty(2, device=WHERE)
    torch_dist.all_reduce(t := late(rank + 1.0))
    gathered, objects = [torch.empty(3, device=WHERE) for _ in range(2)], [None, None]
    torch_dist.all_gather(gathered, t + rank, async_op=True).wait()
    torch_dist.all_gather_object(objects, rank)
    send = torch_dist.P2POp(torch_dist.isend, late(rank + 5.0, 2), 1 - rank)
    receive = torch_dist.P2POp(torch_dist.irecv, received, 1 - rank)
    for work in torch_dist.batch_isend_irecv([send, receive]):
        work.wait()
    torch_dist.destroy_process_group()
    return [t.tolist(), [one.tolist() for one in gathered], objects, received.tolist()]


def late(values: float, numel: int = 3) -> Any:
    """Return a tensor whose values the current stream has still to write."""
    return torch.empty(numel, device=WHERE).fill_(values)


def case_inputs_are_complete(rank: int, peer: int) -> None:
    """Work that is queued before the call is done when the ranks read."""
    for async_op in (False, True):
        t = late(rank + 1.0)
        work = dist.all_reduce(t, async_op=async_op)
        if work is not None:
            work.wait()
        assert t.tolist() == [3.0] * 3


def case_message_is_written_after_earlier_work(rank: int, peer: int) -> None:
    """A receive does not wait on the host, and its result is copied in another stream."""
    first, second = Stream(), Stream()
    with _module().stream(first):
        t = late(7.0)
        receive = dist.irecv(t, peer)
    dist.isend(late(rank + 1.0), peer).wait()
    with _module().stream(second):
        receive.wait()
    second.synchronize()
    first.synchronize()
    assert on_host(t).tolist() == [peer + 1.0] * 3
    assert second in backing_of(t).block.used_in


def case_every_stream_that_waits_is_ordered(rank: int, peer: int) -> None:
    """Streams that wait after the first one, which has not run yet."""
    streams = Stream(), Stream(), Stream()
    t = late(rank + 1.0)
    work = dist.all_reduce(t, async_op=True)
    copies = []
    for number, stream in enumerate(streams):
        with _module().stream(stream):
            if number == 1:
                assert work.is_completed()
            else:
                work.wait()
            copies.append(t.clone())
    for stream, copy in zip(reversed(streams), reversed(copies), strict=True):
        stream.synchronize()
        assert on_host(copy).tolist() == [3.0] * 3


def case_two_waits_for_one_request(rank: int, peer: int) -> None:
    """A thread that waits beside the one that copies the results back."""
    from dure.comm.call import Call
    from dure.comm.ops import ReduceOp

    group: Any = dist.group.WORLD
    t, streams = late(rank + 1.0), (Stream(), Stream())
    both = (t,)
    call = Call(op="all_reduce", inputs=both, outputs=both, reduction=ReduceOp.SUM)
    request = group._backends["sim"].run(call, True)
    for stream in streams:
        with _module().stream(stream):
            request.wait()
            copy = t.clone()
    streams[1].synchronize()
    assert on_host(copy).tolist() == [3.0] * 3


def case_batches_do_not_wait_for_each_other(rank: int, peer: int) -> None:
    """Both ranks send first; more than any buffer holds."""
    received = torch.empty(1 << 20, device=WHERE)
    send = dist.P2POp(dist.isend, late(rank + 1.0, 1 << 20), peer)
    receive = dist.P2POp(dist.irecv, received, peer)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    assert received.sum().item() == (peer + 1.0) * (1 << 20)


def case_versions_are_counted_once(rank: int, peer: int) -> None:
    """As on the CPU: by public functions, and not by Dure's own calls."""
    group: Any = dist.group.WORLD
    t = late(1.0)
    for counts in (True, False):
        before = t._version
        group.all_reduce(t, counts=counts)
        assert t._version - before == counts
        work = group.all_reduce(t, async_op=True, counts=counts)
        work.wait()
        assert t._version - before == 2 * counts


def case_an_error_leaves_tensors_as_they_were(rank: int, peer: int) -> None:
    """Ranks that call different operations."""
    t = late(rank + 1.0)
    work = dist.all_reduce(t, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, async_op=True)
    with pytest.raises(CommError):
        work.wait()
    assert t.tolist() == [rank + 1.0] * 3


def case_cpu_tensors_and_others_are_one_order(rank: int, peer: int) -> None:
    """Ranks with CPU tensors meet ranks with tensors of the accelerator; one call has one kind."""
    kinds = (torch.full((3,), 1.0), late(1.0))
    works = [dist.all_reduce(kinds[number == rank], async_op=True) for number in (0, 1)]
    for work in works:
        work.wait()
    assert [t.tolist() for t in kinds] == [[2.0] * 3] * 2
    with pytest.raises(DeviceError):
        dist.all_gather([torch.empty(1), torch.empty(1)], late(1.0, 1))
    objects = [None, None]
    dist.all_gather_object(objects, rank)
    assert objects == [0, 1]


def case_several_calls_are_coalesced(rank: int, peer: int) -> None:
    """In a block, and as one call."""
    tensors = [late(rank + 1.0), late(rank + 3.0)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for t in tensors:
            dist.all_reduce(t)
    manager.wait()
    dist.all_reduce_coalesced(tensors)
    assert [t.tolist() for t in tensors] == [[6.0] * 3, [14.0] * 3]
