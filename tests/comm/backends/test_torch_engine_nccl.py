"""NCCL through the same adapter as Gloo: one rank, one GPU; without a GPU, what surrounds NCCL."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch._C import _distributed_c10d as c10d

import dure as dist
from dure.comm import point_to_point
from dure.comm.backends import torch_engine
from dure.comm.backends.abort import AbortRecord
from dure.comm.backends.engine import group as group_module
from dure.comm.backends.engine.meeting import Meetings
from dure.comm.backends.engine.work import EngineState
from dure.comm.backends.registry import open_backend
from dure.comm.backends.verify import VerifyingBackend
from dure.comm.call import Call
from dure.comm.ops import ReduceOp
from dure.comm.work import Work, combine
from dure.errors import Aborted, DeviceError, InternalError, PeerLost, UsageError
from dure.store import HashStore
from tests.comm.options import options
from tests.waiting import PATIENCE_S, until

HAS_NCCL = torch.cuda.is_available() and dist.is_nccl_available()


@pytest.mark.skipif(HAS_NCCL, reason="needs a machine without NCCL: this one has it")
def test_nccl_without_cuda_is_a_usage_error():
    with pytest.raises(UsageError):
        open_backend("nccl", options(size=1)).complete()


class LateWork:
    """Work that is over when the test says so; a wait is noted with its stream."""

    def __init__(self, log, name):
        self.log, self.name, self.over, self.asked = log, name, False, 0

    def wait(self, timeout=None):
        assert timeout is None
        self.log.append(f"{Stream.current} waits for {self.name}")
        return True

    def is_completed(self):
        self.asked += 1
        return self.over


class Stream:
    """Notes what it is asked for in the place of a CUDA stream; `current` is the current one's."""

    current = "A"
    log: ClassVar[list[str]] = []

    def __init__(self, device=None):
        self.name = Stream.current

    def record_event(self):
        self.log.append(f"event in {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def synchronize(self):
        self.log.append(f"host waits for {self.name}")


class NotNccl:
    """Does with the store what NCCL does: C++ keeps it, and a clone, and calls them later."""

    Options = SimpleNamespace

    def __init__(self, store, rank, size, settings):
        self.store = c10d.PrefixStore("nccl", store)
        self.clone = self.store.clone()
        self.log, self.works = Stream.log, []

    def start(self, name):
        self.log.append(name)
        self.works.append(LateWork(self.log, name))
        return self.works[-1]

    def allreduce(self, tensors, options=None):
        return self.start("all_reduce")

    def _allgather_base(self, output, wire):
        return self.start("all_gather")

    def _reduce_scatter_base(self, output, wire, options):
        return self.start(f"reduce_scatter {wire.dtype}")

    def alltoall_base(self, output, wire, takes, gives):
        return self.start("exchange")

    def send(self, tensors, dst, tag):
        return self.start(f"send {dst}")

    def recv(self, tensors, src, tag):
        return self.start(f"recv {src}")

    def _start_coalescing(self):
        self.log.append("begin")

    def _end_coalescing(self):
        return self.start("end")


@pytest.fixture
def not_nccl(monkeypatch):
    monkeypatch.setattr(torch_engine, "ProcessGroupNCCL", NotNccl)
    monkeypatch.setattr(Meetings, "meet", lambda *_: None)  # the other ranks do not exist
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", None)  # no group changes the current device
    module = SimpleNamespace(current_stream=Stream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(Stream, "log", [])
    monkeypatch.setattr(Stream, "current", "A")


def test_nccl_store_is_usable_as_long_as_the_group(not_nccl):
    given = options(size=1)
    group = torch_engine.create_nccl(given)
    gc.collect()
    store, clone = group._engine._engine.store, group._engine._engine.clone
    store.set("id", "12")
    clone.append("id", "3")
    assert clone.multi_get(["id"]) == [b"123"]
    assert store.compare_set("id", "123", "4") == b"4"
    clone.multi_set(["a", "b"], ["5", "6"])
    assert clone.num_keys() == 3
    assert clone.has_extended_api()
    assert given.store.list_keys() == ["nccl/a", "nccl/b", "nccl/id"]


def test_nccl_work_orders_every_stream_that_waits(not_nccl):
    group, t = torch_engine.create_nccl(options(size=2)), torch.ones(2)
    finish = lambda: Stream.log.append("copy")  # noqa: E731
    request = group.run(Call(op="all_reduce", inputs=(t,), reduction=ReduceOp.SUM), True)
    work = Work(request, [t], "all_reduce", finish=finish)
    work.wait()
    Stream.current = "B"
    work.wait()
    Stream.current = "C"
    assert work.is_completed()
    first = ["all_reduce", "A waits for all_reduce", "copy", "event in A"]
    assert Stream.log == [*first, "B waits for event of A", "C waits for event of A"]
    both = combine([work], [], True)
    Stream.log.clear()
    both.wait()
    Stream.current = "D"
    both.wait()
    assert Stream.log[-2:] == ["event in C", "D waits for event of C"]


def test_nccl_message_waits_in_its_own_thread_and_asks_the_engine(not_nccl):
    group = torch_engine.create_nccl(options(size=2))
    request = group.recv(torch.ones(2), 1, 0, True)
    assert not request.done()
    assert not request.wait(0.001)
    assert Stream.log == ["recv 1"]
    group._engine._engine.works[0].over = True
    assert request.done()
    assert request.wait(PATIENCE_S)
    assert (Stream.log, request.source) == (["recv 1", "A waits for recv 1"], 1)


@pytest.mark.parametrize("verified", [False, True])
def test_nccl_messages_of_a_batch_are_started_as_one(not_nccl, monkeypatch, verified):
    inner = torch_engine.create_nccl(options(size=2))
    if verified:
        backend = object.__new__(VerifyingBackend)
        backend._inner, backend._engine, backend.in_stream = inner, threading.RLock(), True
    else:
        backend = inner
    group = object.__new__(dist.ProcessGroup)
    group._use({"cpu": backend})
    group.closed = False
    group.peer = group.source = lambda *_: 1
    group.global_ranks = (0, 1)
    group.send = backend.send
    group.irecv = lambda t, source, tag, _: backend.recv(t, source, tag, True)
    monkeypatch.setattr(point_to_point, "resolve", lambda *_: group)
    ops = [dist.P2POp(op, torch.ones(2), 1) for op in (dist.isend, dist.irecv)]
    works = dist.batch_isend_irecv(ops)
    assert Stream.log == ["begin", "send 1", "recv 1", "end"]
    assert not works[1].done()
    inner._engine._engine.works[2].over = True
    assert works[1].done()
    works[0].wait()
    assert Stream.log[4:] == ["A waits for end"]


def test_nccl_batch_in_which_a_death_is_found_is_ended_before_the_abort(not_nccl, monkeypatch):
    """NCCL would hold back later calls of the thread, also for the survivors' new group."""
    monkeypatch.setattr(NotNccl, "abort", lambda self: self.log.append("abort"), raising=False)
    group = torch_engine.create_nccl(options(size=2))
    with group.together():
        group.send(torch.ones(2), 1, 0, True)
        group._state.adopt(AbortRecord.gone(1))
        with pytest.raises(PeerLost):
            group.send(torch.ones(2), 1, 0, True)
    assert Stream.log == ["begin", "send 1", "end"]
    group._state.fail()
    with pytest.raises(PeerLost), group.together():
        raise AssertionError("it has begun")
    assert Stream.log[3:] == ["abort"]


def test_nccl_batch_is_ended_before_another_thread_aborts_its_group(not_nccl, monkeypatch):
    """And its operations raise, although NCCL's own work has no error."""
    monkeypatch.setattr(NotNccl, "abort", lambda self: self.log.append("abort"), raising=False)
    group = torch_engine.create_nccl(options(size=2))
    other = threading.Thread(target=group.close, args=(True,))
    with group.together():
        request = group.send(torch.ones(2), 1, 0, True)
        other.start()
        until(lambda: group._engine is None and request.ended, "the abort to begin")
        with pytest.raises(Aborted):
            group.send(torch.ones(2), 1, 0, True)
    other.join()
    assert Stream.log == ["begin", "send 1", "end", "abort"]
    with pytest.raises(Aborted):
        request.wait()
    with pytest.raises(Aborted), group.together():
        raise AssertionError("it has begun")


def test_nccl_batch_in_which_an_operation_fails_is_ended_before_the_abort(not_nccl, monkeypatch):
    def refuse(self, tensors, src, tag):
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(NotNccl, "abort", lambda self: self.log.append("abort"), raising=False)
    monkeypatch.setattr(NotNccl, "recv", refuse)
    group = torch_engine.create_nccl(options(size=2))

    def fail_inside():
        with group.together():
            group.send(torch.ones(2), 1, 0, True)
            group.recv(torch.ones(2), 1, 0, True)

    with pytest.raises(InternalError, match="unhandled system error"):
        fail_inside()
    assert Stream.log == ["begin", "send 1", "end", "abort"]


def test_nccl_batch_whose_communicator_was_aborted_raises(not_nccl, monkeypatch):
    """At its end, if the abort could not wait for it."""
    monkeypatch.setattr(NotNccl, "abort", lambda self: self.log.append("abort"), raising=False)
    monkeypatch.setattr(group_module, "_BATCH_S", 0)
    group = torch_engine.create_nccl(options(size=2))

    def abort_inside():
        with group.together():
            group.send(torch.ones(2), 1, 0, True)
            other = threading.Thread(target=group.close, args=(True,))
            other.start()
            other.join()

    with pytest.raises(Aborted):
        abort_inside()
    assert Stream.log == ["begin", "send 1", "abort"]


@pytest.mark.parametrize("bound", [False, True])
def test_nccl_groups_are_split_off_as_torch_does(not_nccl, monkeypatch, bound):
    """In the options that the class was made with: it reads them with the first operation."""
    splits = []

    class Splits(NotNccl):
        supports_splitting = True

        def __init__(self, store, rank, size, settings):
            super().__init__(store, rank, size, settings)
            self.settings = settings

        def allreduce(self, tensors, options=None):
            splits.append((self.settings.split_from, self.settings.split_color))
            return super().allreduce(tensors, options)

        def perform_nocolor_split(self, device):
            self.log.append(f"no color on {device}")

    monkeypatch.setattr(torch_engine, "ProcessGroupNCCL", Splits)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    here = torch.device("cuda", 1)
    parent, child = (
        torch_engine.create_nccl(options(size=size, device_id=here, all_bound=bound))
        for size in (4, 2)
    )
    assert (parent.splits, child.splits) == (bound, bound)
    child.split_off(parent, 3)
    parent.sit_out_split()
    assert splits == [(parent._engine._engine, 3)]
    assert Stream.log == ["all_reduce", "no color on cuda:1"]
    assert child._engine._engine.settings.split_from is None


class OnCuda(torch.Tensor):
    """Says that it is on a GPU, and notes which stream uses it."""

    device = property(lambda self: torch.device("cuda", 0))  # pyright: ignore

    def record_stream(self, stream):
        Stream.log.append(f"{stream.name} uses {self.numel()} elements")


def of_call(op, inputs, outputs, reduction=None):
    return Call(op=op, inputs=inputs, outputs=outputs, reduction=reduction)


@pytest.mark.parametrize(
    ("call", "temporary"),
    [
        (lambda x: of_call("reduce_scatter_single", (x,), (x[:3],), ReduceOp.SUM), 2),
        (lambda x: of_call("all_reduce", (x.char(),), (x.char(),), ReduceOp.BXOR), 18),
        (lambda x: of_call("all_gather", (x,), (x, x, x)), 72),
        (lambda x: of_call("all_to_all", (x[:2],) * 3, (x[2:4],) * 3), 24),
    ],
)
def test_nccl_temporaries_are_kept_for_the_stream_that_copies(not_nccl, call, temporary):
    group = torch_engine.create_nccl(options(size=3))
    request = group.run(call(torch.ones(6).as_subclass(OnCuda)), True)
    Stream.current = "B"
    with suppress(RuntimeError):  # what arrived, of three ranks, is not what ours copies
        request.wait()
    assert f"B uses {temporary} elements" in Stream.log


def test_nccl_barrier_waits_for_its_stream_only(not_nccl, monkeypatch):
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    torch_engine.create_nccl(options(size=1)).run(Call(op="barrier"), False)
    assert Stream.log == ["all_reduce", "A waits for all_reduce", "host waits for A"]


def test_nccl_barrier_during_which_the_group_is_aborted_raises(not_nccl, monkeypatch):
    """The stream goes on without an error then."""
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    group = torch_engine.create_nccl(options(size=2))
    death = AbortRecord.of(PeerLost("rank 1 was lost", peer=1))
    monkeypatch.setattr(Stream, "synchronize", lambda self: group._state.adopt(death))
    with pytest.raises(PeerLost):
        group.run(Call(op="barrier"), False)


def test_nccl_reduces_16_bits_itself_unless_the_result_is_wider(not_nccl):
    group, t = torch_engine.create_nccl(options(size=1)), torch.ones(2, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(2, dtype=dtype)
        call = Call(op="reduce_scatter_single", inputs=(t,), outputs=(out,), reduction=ReduceOp.SUM)
        group.run(call, True)
    assert Stream.log == [f"reduce_scatter torch.{name}" for name in ("bfloat16", "float32")]


def test_nccl_gathers_of_two_ranks_are_gathers(not_nccl):
    group = torch_engine.create_nccl(options(size=2))
    t, out = torch.ones(2), torch.empty(4)
    group.run(Call(op="all_gather_single", inputs=(t,), outputs=(out,)), True)
    group.run(Call(op="all_gather", inputs=(t,), outputs=tuple(out.view(2, 2))), True)
    assert Stream.log == ["all_gather", "all_gather"]


def test_nccl_asks_each_of_many_pending_works_a_few_times(not_nccl):
    group, t = torch_engine.create_nccl(options(size=1)), torch.ones(2)
    for _ in range(100):
        group.run(Call(op="all_reduce", inputs=(t,), reduction=ReduceOp.SUM), True)
    assert sum(work.asked for work in group._engine._engine.works) < 300  # not 100 * 99 / 2
    for work in group._engine._engine.works:
        work.over = True
    for _ in range(150):
        group.run(Call(op="all_reduce", inputs=(t,), reduction=ReduceOp.SUM), True)
    assert len(group._collectives) < 160  # those that are over were dropped


def test_nccl_work_that_a_graph_captures_is_asked_nothing(not_nccl, monkeypatch):
    """The end of captured work cannot be asked for, and to ask breaks the capture."""
    module = SimpleNamespace(current_stream=Stream, is_current_stream_capturing=lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    group, t = torch_engine.create_nccl(options(size=2)), torch.ones(2)
    for _ in range(20):
        group.run(Call(op="all_reduce", inputs=(t,), reduction=ReduceOp.SUM), False)
        group.send(t, 1, 0, True).wait()
    assert not group._collectives
    assert [work.asked for work in group._engine._engine.works] == [0] * 40


@pytest.mark.parametrize(("given", "seen"), [(None, "2"), ("1", "2"), ("3", "3"), ("0", "0")])
def test_nccl_own_watchdog_comes_after_ours_and_ends_no_process(not_nccl, monkeypatch, given, seen):
    """Unless the program wants that; "1" is what the launcher sets, for stock PyTorch."""
    name, found = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)

    class Reads(NotNccl):
        def __init__(self, store, rank, size, settings):
            super().__init__(store, rank, size, settings)
            found.append((os.environ.get(name), settings._timeout))

        def _set_default_timeout(self, timeout):
            found.append(timeout)

    monkeypatch.setattr(torch_engine, "ProcessGroupNCCL", Reads)
    made = options(size=2)
    group = torch_engine.create_nccl(made)
    group.set_timeout(timedelta(seconds=5))
    minute = timedelta(minutes=1)
    group.set_timeout(timedelta.max)
    assert found == [(seen, made.timeout + minute), timedelta(seconds=65), timedelta.max]
    assert os.environ.get(name) == given


def test_nccl_refusal_of_a_shared_gpu_is_a_device_error():
    said = "NCCL error in: x.cpp:93, invalid usage\nLast error:\nDuplicate GPU detected : rank 0"
    error = EngineState(options(size=1)).translate(RuntimeError(said), "all_reduce", 0.0)
    assert type(error) is DeviceError
    assert "Duplicate GPU" in error.seen


@pytest.mark.needs("GPU")
def test_nccl_one_rank_runs_every_collective():
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=device)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            t = torch.ones(5, device=device).to(dtype)
            dist.all_reduce(t)
            out = torch.empty_like(t)
            dist.reduce_scatter_single(out, t)
            dist.all_gather([out], t)
            dist.all_to_all_single(out, t)
            dist.broadcast(out, src=0)
            assert torch.equal(out.cpu(), torch.ones(5).to(dtype))
        dist.all_reduce(torch.ones(3, device=device, dtype=torch.int32), dist.ReduceOp.BXOR)
        dist.barrier()
    finally:
        dist.destroy_process_group()
