"""A group that a foreign engine serves: our `Backend` contract on top of an engine's calls.

Engines differ from the contract; this module makes up for it:

* **Dtypes.** Data that are not reduced are sent as bytes. Data that are reduced are sent as a
  tensor of a wire dtype (see `engine.wire`); if there is none, bytes are gathered and reduced in
  rank order.
* **Lengths.** Engines need equal lengths. An uneven all_gather is padded to the longest part, an
  uneven reduce_scatter is an all_reduce of all parts of which each rank keeps its own; gather,
  scatter and all_to_all use the engine's all_to_all with split sizes, for which a rank needs to
  know only its own lengths.
* **Zero elements.** Engines treat them differently; here the call is a barrier.
* **Mismatched calls** cannot be checked cheaply: unlike Dure's own backends, an engine may hang
  until the timeout, fail, or return wrong numbers when ranks call different things.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import msgspec
import torch

from dure.comm.backends.abort import AbortRecord
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.engine.meeting import Meetings
from dure.comm.backends.engine.watchdog import GRACE_S, RECORD_S, SLACK_S, Deaths, look_after
from dure.comm.backends.engine.wire import WireTensor, as_wire
from dure.comm.backends.engine.work import (
    BatchedWork,
    CollectiveRequest,
    EngineState,
    ExitRecords,
    MessageRequest,
    drop_engines,
    keep_engine,
)
from dure.comm.backends.request import (
    Request,
    current_stream,
    finished,
    is_capturing,
    used_in_stream,
)
from dure.comm.call import Call
from dure.comm.reduction import as_bytes, joined, reduce_in_order
from dure.errors import DureError, PeerLost, UsageError
from dure.store.gathering import Gathering

if TYPE_CHECKING:
    from dure.comm.backends.torch_engine import EngineCalls

__all__ = ["EngineGroup"]

Start = Callable[["EngineCalls"], Any]
_TOWARDS = {"send": "to", "recv": "from"}
_KNOWN_LENGTHS = frozenset(
    {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "broadcast"}
    | {"all_gather", "all_gather_single", "all_to_all_single"}
)
"""Operations in which every rank knows the lengths of all ranks' tensors."""
_BATCH_S = 2.0
"""How long an abort waits for a batch that another thread is starting."""
_KEPT = 8
"""Up to this many requests are kept before finished ones are looked for."""


class EngineGroup:
    """One rank's part of a group that an engine serves; the contract is that of `Backend`.

    Args:
        engine: The engine's calls.
        options: Of the group.
    """

    makes_records = True
    """The engine records its work in torch's profilers itself (comm/profiling.py)."""

    def __init__(self, engine: EngineCalls, options: BackendOptions) -> None:
        self.name, self.device_types = engine.name, engine.device_types
        self.group_name, self._store, self._num_splits = options.name, options.store, 0
        self.rank, self._size = options.rank, options.size
        self.in_stream, self._bitwise = engine.in_stream, engine.bitwise
        self._any_source, self._native_floats = engine.any_source, engine.native_floats
        self._reduce_scatters = engine.reduce_scatters
        # Two ranks: see `_swap`. NCCL's all_gather copies nothing, so an exchange gains nothing.
        self._swaps = options.size == 2 and not engine.in_stream
        self.split_meetings = list[Gathering]()  # see comm/splitting.py
        self._device = options.device_id or torch.device(*engine.device_types)  # if `in_stream`
        # Held while a batch is started, so that calls of other threads are not added to it.
        self._calls: Any = threading.RLock() if engine.in_stream else nullcontext()
        self._batch: BatchedWork | None = None
        self._is_broken_off = False  # the communicators were aborted
        self._engine: EngineCalls | None = engine
        self._leaving: EngineCalls | None = None  # while `close` waits for operations to end
        self._deaths: Deaths | None = None
        self._departed: set[int] = set()  # ranks whose process has ended after they had left
        self._read_at = 0.0  # when the exit records are read next; see `Deaths.keeper`
        self._end_at: float | None = None  # when the communicators are aborted
        self._timeout = options.timeout
        self._op_timeout = options.op_timeout
        self._exits: ExitRecords | None = None
        if options.op_timeout is None:
            self._exits = ExitRecords(options.store, options.rank, options.size)
        self._state = EngineState(options, self._exits, self._break_off)
        self._meetings = Meetings(options.store, self._state, self._exits)
        self._collectives: set[CollectiveRequest] = set()
        self._most_kept = _KEPT
        self._messages: WeakSet[MessageRequest] = WeakSet()

    def run(self, call: Call, async_op: bool) -> Request | None:
        name = call.op if call.single else call.kind
        if name in _KNOWN_LENGTHS and not any(t.numel() for t in (*call.inputs, *call.outputs)):
            name = "barrier"
        return getattr(self, f"_{name}")(call, async_op)

    # ---- the engine's work -----------------------------------------------------------------------

    def _start(
        self,
        call: Call,
        start: Start,
        async_op: bool,
        copy_back: Callable[[], object] | None = None,
    ) -> Request | None:
        """Start the engine's work and, unless asynchronous, wait for it.

        `copy_back` brings the result to the user's tensors when the engine is done.
        """
        tensors = (*call.inputs, *call.outputs)
        with self._calls:  # so that a batch is this thread's
            self._meet(call.op)
            work = self._begin(call.op, start)
            waited: Any = work if self._batch is None else self._batch
        request = self._request(call.op, waited, copy_back, self._stream_device(*tensors))
        if async_op:
            return request
        request.wait()
        return None

    def _request(
        self,
        op: str,
        work: Any,
        copy_back: Callable[[], object] | None,
        device: torch.device | None,
        peer: int | None = None,
    ) -> CollectiveRequest:
        """Make a request, and keep it until the engine is done with it.

        Of work that is captured in a CUDA graph nothing may be asked, and torch keeps its memory.
        """
        is_kept = device is None or not is_capturing(device)
        is_watched = is_kept and self._deaths is not None
        request = CollectiveRequest(self._state, op, work, copy_back, device, peer, is_watched)
        if is_kept:
            self._keep(request)
        return request

    def _stream_device(self, *tensors: torch.Tensor) -> torch.device | None:
        """Return the device whose streams order the work; None: waiting blocks the host."""
        if not self.in_stream:
            return None
        return tensors[0].device if tensors else self._device

    def _keep(self, request: CollectiveRequest) -> None:
        """Keep a request until the engine is done with it.

        Finished ones are dropped once their number may have doubled since the last check, which
        takes a call of CUDA for each.
        """
        self._collectives.add(request)
        if len(self._collectives) > self._most_kept:
            for kept in [*self._collectives]:  # a copy: other threads may add requests
                if kept.engine_done:
                    self._collectives.discard(kept)
            self._most_kept = max(_KEPT, 2 * len(self._collectives))

    def _message(self, op: str, start: Start, tensor: torch.Tensor, peer: int | None) -> Request:
        """Start to send to a rank, or to receive from one; None: from any rank."""
        if self.in_stream:
            with self._calls:  # so that the batch is this thread's
                self._meet(op, peer)
                work = self._begin(op, start, peer)
                waited: Any = work if self._batch is None else self._batch
            return self._request(op, waited, None, tensor.device, peer)
        work = self._begin(op, start, peer)
        request = MessageRequest(self._state, op, work, peer, self._op_timeout)
        self._messages.add(request)
        return request

    def _meet(self, op: str, peer: int | None = None) -> None:
        """Wait for the ranks of the communicator, before its first operation (see meeting.py).

        Args:
            op: The operation.
            peer: Of a message. A batch of messages uses the communicator of all ranks.
        """
        sound = self._engine is not None and self._state.record is None
        if not self.in_stream or self._size == 1 or not sound or self._state.has_failed:
            return
        began = time.monotonic()
        if self._batch is not None:
            peer = None
        elif peer is not None:
            op = f"{op} {_TOWARDS[op]} rank {peer}"
        try:
            self._meetings.meet(peer, op, self._timeout)
        except DureError as error:  # it is not known which operations other ranks wait for
            self._state.adopt(AbortRecord.of(error))
            self._state.fail()
            if isinstance(error, PeerLost) and error.rank is None:  # of the store
                raise self._state.error(op, began=began) from None
            raise

    def _begin(self, op: str, start: Start, peer: int | None = None) -> Any:
        """Start something on the engine."""
        began = time.monotonic()
        if self.in_stream and self._state.record is not None:
            raise self._state.error(op, began=began)
        try:
            with self._calls:
                if self._engine is None or self._state.record is not None:
                    raise self._state.error(op, began=began)
                return start(self._engine)
        except RuntimeError as e:
            if isinstance(e, PeerLost):  # of the store, in which the engine finds its peers
                self._state.adopt(AbortRecord.of(e))
            elif isinstance(e, DureError) and self._state.record is None:
                raise
            if self.in_stream:  # operations before it will not end either
                error = self._state.diagnose(e, op, began, peer)
                self._state.adopt(AbortRecord.of(error))
                self._state.fail()
                raise error from e
            raise self._state.translate(e, op, began, peer) from e

    def _break_off(self) -> None:
        engine = self._engine or self._leaving
        if engine is not None:
            self._abandon()
            self._abort(engine)

    def _abort(self, engine: EngineCalls) -> None:
        """Close the connections; a batch that is being started is ended before.

        NCCL would hold back what its thread calls later, for any group, and must not be asked to
        end a batch of a communicator that is gone.
        """
        if not self.in_stream:
            engine.break_off()
            return
        held = self._calls.acquire(timeout=_BATCH_S)
        try:
            if held and self._batch is not None:  # it is this thread's: an operation in it failed
                with suppress(RuntimeError):
                    self._batch.work = engine.end_batch()
            self._is_broken_off = True
            engine.break_off()
        finally:
            if held:
                self._calls.release()

    def _abandon(self) -> None:
        """End the requests of operations that are about to be aborted.

        Afterwards they look like those that have ended: NCCL's work has no error then.
        """
        if self.in_stream:
            for request in [*self._collectives]:
                if not request.ended and not request.engine_done:
                    request.end(self._state.error(request.op, began=request.began))

    def _wire(self, tensor: torch.Tensor, call: Call) -> WireTensor | None:
        reduction = call.needed_reduction
        # Into another dtype, the sum is taken in float32 and rounded once.
        native = self._native_floats and all(t.dtype == tensor.dtype for t in call.outputs)
        return as_wire(tensor, reduction, self._size, self._bitwise, native)

    # ---- reductions ------------------------------------------------------------------------------

    def _all_reduce(self, call: Call, async_op: bool) -> Request | None:
        (tensor,) = call.inputs
        return self._reduce_all(call, tensor, tensor, 0, async_op)

    def _reduce(self, call: Call, async_op: bool) -> Request | None:
        (tensor,), dst = call.inputs, call.root
        wired, here = self._wire(tensor, call), self.rank == dst
        if wired is None:
            out = tensor if here else torch.empty_like(tensor)
            return self._gather_and_reduce(call, out, tensor, 0, async_op)
        wire = wired.wire
        if not here and wire.data_ptr() == tensor.data_ptr():
            wire = wire.clone()  # the engine uses it as scratch memory
        copy_back = _copying_back(wired, wire, tensor) if here else None
        return self._start(call, lambda e: e.reduce(wire, wired.op, dst), async_op, copy_back)

    def _reduce_scatter(self, call: Call, async_op: bool) -> Request | None:
        """Uneven lengths cost an all_reduce of everything, and so do all over Gloo."""
        (output,), lengths = call.outputs, [t.numel() for t in call.inputs]
        source = joined(call.inputs).view(output.dtype)
        if self._reduce_scatters and len(set(lengths)) == 1:
            return self._reduce_scatter_single(
                msgspec.structs.replace(call, inputs=(source,)), async_op
            )
        return self._reduce_all(call, output, source, sum(lengths[: self.rank]), async_op)

    def _reduce_scatter_single(self, call: Call, async_op: bool) -> Request | None:
        (output,), (tensor,) = call.outputs, call.inputs
        begin = self.rank * output.numel()
        if not self._reduce_scatters:
            return self._reduce_all(call, output, tensor.clone(), begin, async_op)
        wired = self._wire(tensor, call)
        if wired is None:
            return self._gather_and_reduce(call, output, tensor, begin, async_op)
        wire = wired.wire
        result = wire.new_empty(wire.numel() // self._size)
        start = lambda e: e.reduce_scatter(result, wire, wired.op)  # noqa: E731
        return self._start(call, start, async_op, _copying_back(wired, result, output))

    def _reduce_all(
        self, call: Call, output: torch.Tensor, tensor: torch.Tensor, begin: int, async_op: bool
    ) -> Request | None:
        """Reduce all ranks' `tensor` [k]; `output` gets the part from element `begin` on."""
        wired = self._wire(tensor, call)
        if wired is None:
            return self._gather_and_reduce(call, output, tensor, begin, async_op)
        wire = wired.wire
        ratio = wire.numel() // tensor.numel()
        part = wire[begin * ratio : (begin + output.numel()) * ratio]
        start = lambda e: e.all_reduce(wire, wired.op)  # noqa: E731
        return self._start(call, start, async_op, _copying_back(wired, part, output))

    def _gather_and_reduce(
        self, call: Call, output: torch.Tensor, tensor: torch.Tensor, begin: int, async_op: bool
    ) -> Request | None:
        """Do the same for dtypes and operations without a wire dtype; sends (n-1)*k."""
        gathered = tensor.new_empty((self._size, tensor.numel()))
        start = lambda e: e.all_gather(as_bytes(gathered), as_bytes(tensor))  # noqa: E731

        def copy_back() -> None:
            used_in_stream(gathered)
            rows = [row[begin : begin + output.numel()] for row in gathered]
            reduce_in_order(rows, call.needed_reduction, output)

        return self._start(call, start, async_op, copy_back)

    # ---- movements -------------------------------------------------------------------------------

    def _broadcast(self, call: Call, async_op: bool) -> Request | None:
        wire, src = as_bytes(call.inputs[0]), call.root
        return self._start(call, lambda e: e.broadcast(wire, src), async_op)

    def _all_gather(self, call: Call, async_op: bool) -> Request | None:
        """Shorter tensors are padded to the longest."""
        outputs, (tensor,) = call.outputs, call.inputs
        if self._swaps:
            return self._swap(call, [tensor, tensor], outputs, async_op)
        longest = max(t.numel() for t in outputs) * tensor.element_size()
        source = as_bytes(tensor)
        if len(source) < longest:
            source = torch.cat([source, source.new_zeros(longest - len(source))])
        gathered = source.new_empty((self._size, longest))

        def copy_back() -> None:
            used_in_stream(gathered)
            for target, row in zip(outputs, gathered, strict=True):
                target_bytes = as_bytes(target)
                target_bytes.copy_(row[: len(target_bytes)])

        start = lambda e: e.all_gather(gathered.view(-1), source)  # noqa: E731
        return self._start(call, start, async_op, copy_back)

    def _all_gather_single(self, call: Call, async_op: bool) -> Request | None:
        if self._swaps:
            gives = [call.inputs[0]] * 2
            return self._swap(call, gives, call.takes(2), async_op)
        output, source = as_bytes(call.outputs[0]), as_bytes(call.inputs[0])
        return self._start(call, lambda e: e.all_gather(output, source), async_op)

    def _swap(
        self,
        call: Call,
        gives: Sequence[torch.Tensor],
        takes: Sequence[torch.Tensor],
        async_op: bool,
    ) -> Request | None:
        """Send to the only other rank and receive from it, without copies.

        An all_gather of torch's Gloo copies its input once and its output twice.
        """
        here, other = self.rank, 1 - self.rank
        mine, kept = as_bytes(gives[here]), as_bytes(takes[here])
        if mine.data_ptr() != kept.data_ptr():
            with torch.inference_mode():  # the user's tensors may be inference tensors
                kept.copy_(mine)
        source, result = as_bytes(gives[other]), as_bytes(takes[other])
        if source.data_ptr() == result.data_ptr():
            source = source.clone()
        sent, taken = [0, 0], [0, 0]
        sent[other], taken[other] = len(source), len(result)
        return self._start(call, lambda e: e.exchange(result, source, taken, sent), async_op)

    def _all_to_all(self, call: Call, async_op: bool) -> Request | None:
        """Send to each rank and receive from each; empty tensors are free."""
        inputs, outputs = call.gives(self._size), call.takes(self._size)
        if self._size == 2:
            return self._swap(call, inputs, outputs, async_op)
        takes = [t.numel() * t.element_size() for t in outputs]
        gives = [t.numel() * t.element_size() for t in inputs]
        source = joined(inputs)
        result = source.new_empty(sum(takes))

        def copy_back() -> None:
            used_in_stream(result)
            end = 0
            for target, length in zip(outputs, takes, strict=True):
                begin, end = end, end + length
                if length:
                    as_bytes(target).copy_(result[begin:end])

        start = lambda e: e.exchange(result, source, takes, gives)  # noqa: E731
        return self._start(call, start, async_op, copy_back)

    _gather = _scatter = _all_to_all

    def _all_to_all_single(self, call: Call, async_op: bool) -> Request | None:
        output, source = as_bytes(call.outputs[0]), as_bytes(call.inputs[0])
        if source.data_ptr() == output.data_ptr():
            source = source.clone()
        return self._start(call, lambda e: e.exchange(output, source, [], []), async_op)

    def _new_group(self, call: Call, async_op: bool) -> Request | None:
        """Do nothing: an engine does not compare calls, and `VerifyingBackend` has done it."""
        return finished() if async_op else None

    def _barrier(self, call: Call, async_op: bool) -> Request | None:
        """Run a barrier; also called for collectives without elements."""
        device = self._stream_device()
        copy_back = None if device is None else lambda: current_stream(device).synchronize()
        return self._start(call, lambda e: e.barrier(), async_op, copy_back)

    # ---- messages --------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        start = lambda e: e.send(as_bytes(tensor), dst, tag)  # noqa: E731
        request = self._message("send", start, tensor, dst)
        if async_op:
            return request
        request.wait()
        return None

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        if src is None and not self._any_source:
            raise UsageError(
                f"{self.name} cannot receive from any source", op="recv", fix="Pass `src`."
            )
        memory = as_bytes(tensor)
        request = self._message("recv", lambda e: e.recv(memory, src, tag), tensor, src)
        if not async_op:
            request.wait()
        return request

    @contextmanager
    def together(self) -> Iterator[None]:
        """Start the asynchronous operations of the block as one, so that none waits for another.

        NCCL runs what was launched for a pair of ranks in order, and a message ends only after both
        sides have started it: two ranks that send to each other first would wait forever.

        Threads:
            Calls of other threads wait until the block has ended. NCCL may wait for peers when it
            starts a call (the first message to a peer opens a connection), and calls of other
            threads wait in the meantime.
        """
        with self._calls:
            if not self.in_stream or self._batch is not None:
                yield
                return
            self._begin("a batch", lambda e: e.begin_batch())
            batch = self._batch = BatchedWork()
            try:
                yield
            finally:
                self._batch = None
                self._end_batch(batch)

    def _end_batch(self, batch: BatchedWork) -> None:
        """Start the operations of a batch, also in a group that is about to be aborted.

        NCCL would hold back what this thread calls later, for any group.

        Raises:
            CommError: The communicators were aborted in the meantime.
        """
        began, engine = time.monotonic(), self._engine or self._leaving
        if engine is None or self._is_broken_off:
            raise self._state.error("a batch", began=began)
        try:
            batch.work = engine.end_batch()
        except RuntimeError as e:
            error = self._state.diagnose(e, "a batch", began)
            self._state.adopt(AbortRecord.of(error))
            self._state.fail()
            raise error from e

    # ---- splitting (see comm/splitting.py) -------------------------------------------------------

    @property
    def splits(self) -> bool:
        """Whether groups can be split off this one."""
        return self._engine is not None and self._engine.splits

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other threads from calling."""
        with self._calls:
            yield

    def check(self, op: str) -> None:
        """Raise if the group is broken or was left."""
        if self._engine is None or self._state.record is not None:
            raise self._state.error(op)

    def next_split(self, summarize: Callable[[list[bytes]], bytes]) -> Gathering:
        """Return the meeting of all ranks before they split the communicator again."""
        self._num_splits += 1
        meeting = Gathering(
            self._store, f"split/{self._num_splits}", self.rank, self._size, summarize,
            group=self.group_name,
        )  # fmt: skip
        self.split_meetings.append(meeting)
        return meeting

    def split_off(self, parent: EngineGroup, color: int) -> None:
        """Make the communicator by a split of the parent's.

        Raises:
            CommError: As any operation.
        """
        of = parent._engine
        assert of is not None
        try:
            work = self._begin("new_group", lambda e: e.split_off(of, color))
        except DureError as error:  # it is not known what other ranks wait for
            parent._state.adopt(AbortRecord.of(error))
            parent._state.fail()
            raise
        self._meetings.met()
        self._request("new_group", work, None, self._stream_device())

    def sit_out_split(self) -> None:
        """Take part in a split of this group, as a rank of none of the new groups."""
        self._begin("new_group", lambda e: e.sit_out_split())

    # ---- the rest --------------------------------------------------------------------------------

    def allocate(self, nbytes: int, node_shared: bool) -> torch.Tensor | None:
        """See `Backend.allocate`: an engine's ranks share no memory."""
        del nbytes, node_shared
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may wait for its peers."""
        self._timeout = timeout
        self._op_timeout = timeout  # messages would keep the engine's first timeout
        if self._engine is not None:
            self._engine.set_timeout(timeout)

    # ---- its end ---------------------------------------------------------------------------------

    def watch(self, deaths: Deaths) -> None:
        """Have operations that run in a stream ended when a member dies, or is too late.

        Args:
            deaths: How this rank knows of deaths.
        """
        if self.in_stream and self._size > 1:
            self._deaths = deaths
            look_after(self)

    def look(self) -> bool:
        """Break the group if a member has died, or an operation takes too long; see watchdog.py.

        Returns:
            Whether to look again.
        """
        if (self._engine or self._leaving) is None or self._state.has_failed:
            return False
        now = time.monotonic()
        self._read_records(now)
        if self._end_at is None:
            record = self._death() or self._delay(now)
            if record is None:
                return True
            self._state.adopt(record)
            self._end_at = now + (GRACE_S if record.kind == "PeerLost" else 0)
        if now < self._end_at:
            return True
        self._state.fail()
        return False

    def _read_records(self, now: float) -> None:
        """Find out whether the rank that serves the store has left, while it lives."""
        assert self._deaths is not None
        keeper = self._deaths.keeper
        if keeper in self._departed or keeper is None or self._exits is None or now < self._read_at:
            return
        self._read_at = now + RECORD_S
        if keeper in self._exits.have_left():
            self._departed.add(keeper)

    def _death(self) -> AbortRecord | None:
        """Return the record of a member that has died, and had not left before."""
        assert self._deaths is not None
        for rank in range(self._size):
            if rank == self.rank or rank in self._departed or not self._deaths.has_died(rank):
                continue
            if self._exits is not None and rank in self._exits.ask(False)[0]:
                self._departed.add(rank)
                continue
            return AbortRecord.of(self._deaths.error(rank))
        return None

    def _delay(self, now: float) -> AbortRecord | None:
        """Return the record of an operation that takes too long."""
        limit_s = self._timeout.total_seconds() + SLACK_S
        for request in [*self._collectives]:
            if now - request.began > limit_s:
                if not request.engine_done:
                    why = RuntimeError("timed out")
                    error = self._state.diagnose(why, request.op, request.began, request.peer)
                    return AbortRecord.of(error)
                self._collectives.discard(request)
        return None

    def close(self, abort: bool) -> None:
        """See `Backend.close`: pending operations fail, unless they run in a stream.

        The host does not wait for those, even if the program's streams do. So as in torch the group
        is left when they have ended, also if nothing has waited for them. In the meantime another
        thread may abort it.
        """
        if self._engine is not None:
            self._leaving = self._engine  # first: another thread may be starting a batch
        engine, self._engine = self._engine, None
        if engine is None:
            if abort:
                self._state.left.set()
                self._break_off()
            return
        works = [r.work for r in [*self._collectives] if r.work is not None and not r.engine_done]
        pending = works or not all(r.ended for r in self._messages)
        is_sound = self._state.record is None and not self._state.has_failed
        breaks_off = abort or not is_sound or (pending and not self.in_stream)
        if breaks_off:
            self._state.left.set()
            self._abandon()
        if breaks_off or not self.in_stream:
            self._forget_operations()
        if self._exits is not None:
            self._exits.publish("left")
        try:
            if breaks_off:
                self._abort(engine)
                keep_engine(engine, works)
            else:
                engine.leave()
        finally:
            self._leaving = None
            self._forget_operations()
            drop_engines()

    def _forget_operations(self) -> None:
        self._collectives.clear()  # requests without a wait would keep the engine's sockets open
        self._state.left.set()


def _copying_back(
    wired: WireTensor, result: torch.Tensor, target: torch.Tensor
) -> Callable[[], object] | None:
    """Return what brings `result` to `target` when the engine is done, if anything has to."""
    flat = target.detach().view(-1)
    copy_back = wired.copy_back or (lambda wire, out: out.copy_(wire))
    if wired.copy_back is None and result.data_ptr() == flat.data_ptr():
        return None

    def bring() -> None:
        used_in_stream(result)
        copy_back(result, flat)

    return bring
