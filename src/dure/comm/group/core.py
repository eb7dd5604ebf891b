"""The part of a process group that all operations share: membership, and how one is run.

Every operation takes three steps (the *slow path*):

1. *check*: errors that this rank alone can find are raised, before anything is sent;
2. *plain memory*: tensors that the backend cannot take (strided views, conjugates) are copied to
   contiguous ones, and results are copied back once the operation has ended;
3. *issue*: the operation gets its number in the group and its trace event, and the backend runs
   it: at once, or with ``async_op=True`` in the background of the returned `Work`.

The *fast path* (group/operations.py) skips all three: a call on plain tensors that is not traced is
passed to the engine, which makes the same checks (csrc/bindings/plain.cpp).

The flight recorder (`trace.flight`) notes every operation: in the backend's own ring if it has one
(a true attribute `keeps_records`), else here.

Ranks are group ranks here; the public functions of `collectives` and `point_to_point` translate
global ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Self, cast

import torch

from dure import torch_private, trace
from dure.comm import checks
from dure.comm.backends.base import Backend, PlainBackend, channel_name
from dure.comm.backends.request import Request, num_forks
from dure.comm.call import Call, call_site, check_one_device
from dure.comm.capture import has_no_values, refuse_if_captured
from dure.comm.group.calling_thread import CallingThread, Crossed, ExclusiveCall
from dure.comm.group.coalesced import Coalescing, PlainCollectives
from dure.comm.group.spec import GroupSpec
from dure.comm.profiling import operation, profiler
from dure.comm.work import Work
from dure.errors import DureError, NotInGroupError, UsageError
from dure.native import Channel, Outcome
from dure.native.status import ONE_THREAD_FIX, crossed, left_behind
from dure.store.base import Store
from dure.store.prefix import PrefixStore
from dure.trace import flight
from dure.trace.record import MESSAGES

count_writes = torch_private.increment_version
"""Increment the versions of tensors that an operation writes."""


def started(work: Work | None) -> Work:
    """Return the work of an operation that was called with ``async_op=True``."""
    assert work is not None
    return work


class GroupCore:
    """The members of a group, and how an operation of it is checked, numbered, traced and run.

    Attributes:
        group_name: The same on all ranks.
        global_ranks: Global rank of each group rank.
        timeout: How long an operation waits for its peers.
        creation_timeout: The default timeout for the creation of groups that are made from it.
        store: The group's key space in the store.
        group_rank_of: Group rank of each global rank.
        device_types: Kinds of device whose tensors it takes.
        desc: The user's description of the group.
        num_monitored: How many monitored barriers this rank has begun.
        num_attempts: How many attempts to shrink the group this rank has begun.
        belongings: Objects that other modules keep with the group, by type, until it is closed.
        companions: Groups that other modules made for this one; they are destroyed with it.
    """

    in_torch = False
    """Whether torch.distributed calls it, which makes its own records in a profile."""

    def __init__(
        self,
        spec: GroupSpec,
        rank: int,
        backends: dict[str, Backend],
        store: Store,
        second: Callable[[str], dict[str, Backend]],
    ) -> None:
        # CPython finds attributes quickly only in objects that have at most 30 of them.
        self.group_name, self._rank, self.global_ranks = spec.name, rank, spec.global_ranks
        self.timeout, self.store, self.desc = spec.timeout, store, spec.desc or spec.name
        self.creation_timeout = spec.creation_limit
        self.seq = 0
        self.num_monitored, self.num_attempts = 0, 0
        self._size = len(self.global_ranks)
        self.group_rank_of = {g: r for r, g in enumerate(self.global_ranks)}
        takes_meta = any("meta" in b.device_types for b in backends.values())
        self.device_types = frozenset([*backends, "meta"] if takes_meta else backends)
        self._use(backends)
        self._manager: Coalescing | None = None
        self._caller = CallingThread()
        self.closed, self._failed = False, False
        self.belongings: dict[type, Any] = {torch.device: spec.device_id}
        self.companions: list[Self] = []
        self._second = second
        self._channel, self._channels = 0, [self]
        self._channel_lock = threading.Lock()
        self._forks = num_forks()
        self._ring = self._open_ring()

    def _use(self, backends: dict[str, Backend]) -> None:
        """Use these backends, by type of device; `_first` serves calls without tensors."""
        self._backends = backends
        self._first = backends.get("cpu") or backends[min(backends)]
        self._engine: Channel | None = getattr(self._first, "plain", None)
        self._plain = self._engine

    def _open_ring(self) -> flight.FlightRing | None:
        """Make a flight recorder for backends without one."""
        without = dict.fromkeys(b.name for b in self._backends.values() if not _records(b))
        if not without:
            return None
        ring = flight.FlightRing(
            flight.Origin(
                group=self.group_name,
                rank=self._rank,
                global_ranks=self.global_ranks,
                backend=",".join(without),
            )
        )
        flight.add_source(ring)
        return ring

    def __repr__(self) -> str:
        return (
            f"ProcessGroup({self.group_name!r}, rank {self._rank} of {self._size}, "
            f"{self.backend_name})"
        )

    # ---------------------------------------------------------------- its channels

    def channel(self, index: int) -> Self:
        """Return one of the two channels of the group: the same ranks, with a separate order.

        Within a channel operations run in the order of their calls; operations of one channel do
        not wait for those of the other. So a program can gather on one while it reduces on the
        other, from one thread or from two. Channel 0 is the group itself. Channel 1 is used like a
        group: by its methods, or as the `group` of the public functions. Both channels share
        messages and memory, and closing one closes both. In errors and records channel 1 of the
        group G is called ``G[1]``.

        Args:
            index: 0 or 1.

        Collective:
            All ranks call in the same order on each channel; the order between channels may differ.
            If several threads call on one channel, the program must order them: orders that differ
            between ranks are a `Desync`, which names the threads, and a call while another thread
            is inside one is refused and breaks the group. On `shm` this method is local. If the
            backend has only one order, all ranks must call this method, and the first call makes a
            second backend, as making a group does.

        Threads:
            From any thread, at any time.
        """
        if index not in (0, 1):
            raise UsageError(
                "a group has channels 0 and 1", group=self.group_name, seen=f"index={index!r}"
            )
        with self._channel_lock:
            if index == len(self._channels):
                self._channels.append(self._open_channel(index))
        return self._channels[index]

    def _open_channel(self, index: int) -> Self:
        if self.closed:
            raise UsageError("the process group has been destroyed", group=self.group_name)
        self.refuse_in_child("channel")
        view = object.__new__(type(self))
        vars(view).update(vars(self))
        view._channel, view.seq = index, 0
        view.group_name = channel_name(self.group_name, index)
        view.store = PrefixStore(f"channel/{index}", self.store)
        view.num_monitored, view.num_attempts = 0, 0
        view._manager, view._caller = None, CallingThread(self._caller.crossed)
        if not all(getattr(b, "channels", 1) > index for b in self._backends.values()):
            view._use(self._second(view.group_name))
        elif view._engine is not None:
            view._engine = view._plain = cast(PlainBackend, view._first).plain_on(index)
        view._ring = view._open_ring()
        return view

    # ---------------------------------------------------------------- who is in it

    def rank(self) -> int:
        """Return this rank's number within the group."""
        return self._rank

    def size(self) -> int:
        """Return how many ranks the group has."""
        return self._size

    def name(self) -> str:
        """Return the backend's name (the group's own is `group_name`)."""
        return self.backend_name

    @property
    def backend_name(self) -> str:
        """Name of the backend, or a list such as "cpu:gloo,cuda:nccl"."""
        names = {b.name for b in self._backends.values()}
        return names.pop() if len(names) == 1 else self.backend_config

    def backend_of(self, device_type: str) -> str:
        """Return the name of the backend for tensors on a type of device; "" if there is none."""
        backend = self._backends.get(device_type)
        return "" if backend is None else backend.name

    def backends_with(self, attribute: str) -> list[Any]:
        """Return the backends that have a true attribute, each once."""
        found = {id(b): b for b in self._backends.values() if getattr(b, attribute, False)}
        return [*found.values()]

    @property
    def backend_config(self) -> str:
        """Which backend serves which kind of device, such as "cpu:shm"."""
        return ",".join(f"{d}:{b.name}" for d, b in sorted(self._backends.items()))

    @property
    def details(self) -> str:
        """The choices of its backends, as text for the log."""
        return "; ".join(dict.fromkeys(b.details for b in self.backends_with("details")))

    @property
    def group_desc(self) -> str:
        """The user's description of the group; "undefined" if there is none."""
        return self.desc if self.desc != self.group_name else "undefined"

    @property
    def bound_device_id(self) -> torch.device | None:
        """The device that this rank is bound to (`device_id`)."""
        return self.belongings.get(torch.device)

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self.belongings[torch.device] = device

    @property
    def message_device(self) -> torch.device:
        """The device for small tensors that this process makes for the group.

        The CPU if the group takes CPU tensors, else the rank's own device.
        """
        kind = "cpu" if "cpu" in self._backends else min(self._backends)
        bound = self.bound_device_id
        return bound if bound is not None and bound.type == kind else torch.device(kind)

    def get_group_store(self) -> Store:
        """Return the group's own key space in the store."""
        return self.store

    def group_rank(self, global_rank: int) -> int:
        """Return the group rank of `global_rank`."""
        try:
            rank = self.group_rank_of.get(global_rank)
        except TypeError:  # a list, say
            rank = None
        if rank is None:
            raise NotInGroupError(
                f"global rank {global_rank!r} is not in the group",
                group=self.group_name,
                seen=f"its members are {list(self.global_ranks)}",
            )
        return rank

    def peer(self, global_rank: int | None, group_rank: int | None, op: str, what: str) -> int:
        """Return the group rank for a pair of arguments such as `src` and `group_src`."""
        if group_rank is None and type(global_rank) is int:
            rank = self.group_rank_of.get(global_rank)
            if rank is not None:
                return rank
        if (global_rank is None) == (group_rank is None):
            raise UsageError(
                f"pass either {what} (a global rank) or group_{what} (a rank of the group)",
                op=op,
                group=self.group_name,
            )
        if global_rank is not None:
            return self.group_rank(global_rank)
        assert group_rank is not None
        if group_rank not in range(self._size):
            raise NotInGroupError(
                f"group_{what}={group_rank!r} is not a rank of the group",
                op=op,
                group=self.group_name,
                seen=f"its ranks are 0 to {self._size - 1}",
            )
        return group_rank

    def root(self, global_rank: int | None, group_rank: int | None, op: str, what: str) -> int:
        """Return as `peer` does; the group's first rank if neither is passed."""
        if global_rank is None and group_rank is None:
            return 0
        return self.peer(global_rank, group_rank, op, what)

    def source(self, src: int | None, group_src: int | None, op: str) -> int | None:
        """Return as `peer` does; None, for any rank, if neither is passed."""
        if src is None and group_src is None:
            return None
        return self.peer(src, group_src, op, "src")

    def renumber(self, global_ranks: tuple[int, ...]) -> None:
        """Give the members new global ranks, in the same order."""
        for group in self._channels:
            flight.renumber(group.group_name, group.global_ranks[self._rank], global_ranks)
            group.global_ranks = global_ranks
            group.group_rank_of = {g: r for r, g in enumerate(global_ranks)}

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long operations wait for their peers, if the backend can change it."""
        timeout = checks.duration(timeout, "set_timeout")
        for group in self._channels:
            group.timeout = group.creation_timeout = timeout
            for backend in group._backends.values():
                change = getattr(backend, "set_timeout", None)
                if change is not None:
                    change(timeout)

    def gone(self, rank: int) -> bool:
        """Return whether `rank` is known to have died or left; False if the backend cannot know."""
        return self._ask("gone", rank)

    def silent(self, rank: int) -> bool:
        """Return whether `rank` cannot be reached and may have died; False if it is not known."""
        return self._ask("silent", rank)

    def _ask(self, question: str, rank: int) -> bool:
        asked = [getattr(backend, question, None) for backend in self._backends.values()]
        return any(answer is not None and answer(rank) for answer in asked)

    # ---------------------------------------------------------------- how an operation is run

    def orders_by_stream(self, device_type: str) -> bool:
        """Return whether operations on such tensors run in a stream, in the order of the calls."""
        return getattr(self._backends.get(device_type), "in_stream", False)

    def together(self, tensors: Sequence[torch.Tensor] | None) -> AbstractContextManager[object]:
        """Start the asynchronous operations of the block as one batch, if streams order them.

        Args:
            tensors: Those of the operations; None: any.
        """
        in_stream = {d: b for d, b in self._backends.items() if getattr(b, "in_stream", False)}
        if not in_stream or self.closed:
            return nullcontext()
        devices = in_stream if tensors is None else {t.device.type for t in tensors}
        used = {id(b): b for d in devices if (b := in_stream.get(d)) is not None}
        with ExitStack() as stack:
            for backend in used.values():
                stack.enter_context(cast(Any, backend).together())
            return stack.pop_all()

    def _backend(self, op: str, *tensors: torch.Tensor) -> Backend:
        """Check that the group is open and the tensors reachable; return the backend for them."""
        if self.closed:
            raise UsageError(
                "the process group has been destroyed",
                op=op,
                group=self.group_name,
                fix="Create a new group; do not keep one across destroy_process_group().",
            )
        self.refuse_in_child(op)
        if seen := self._caller.crossed:
            where = {"group": self.group_name, "op": op, "seq": self.seq}
            raise crossed(seen, self._rank, where | {"rank": self._rank})
        for t in tensors:
            checks.check_tensor(t, op, self.device_types)
        if not tensors or len(self._backends) == 1:
            return self._first
        check_one_device(tensors, op)
        return self._backends.get(tensors[0].device.type) or self._first

    def refuse_in_child(self, op: str) -> None:
        """Raise in a child that was forked since the group was made."""
        if self._forks != num_forks():
            raise left_behind(op=op, group=self.group_name)

    def _prepare(self, call: Call) -> tuple[Backend, Call, checks.Finish | None]:
        """Check a call on the user's tensors.

        Returns:
            Its backend, the call on plain memory, and a function that copies the results back.
        """
        try:
            inputs, outputs = call.inputs, call.outputs
            tensors = inputs if inputs is outputs else (*inputs, *outputs)
            valueless = "meta" in self.device_types and has_no_values(tensors)
            refuse_if_captured(call.op, () if valueless else tensors)
            checks.check_lists(call, self._rank, self._size)
            backend = self._backend(call.op, *tensors)
            checks.check_call(call, self._rank, self._size)
            if valueless:  # no memory that could overlap
                return backend, call, None
            fuses = getattr(backend, "fuses", False)
            return backend, *checks.plain_call(call, self._rank, self._size, self._channel, fuses)
        except UsageError as error:
            error.locate(self.group_name, self._rank, self._size)
            raise

    def _issue(self, call: Call, async_op: bool = False, counts: bool = False) -> Work | None:
        """Run a call on the user's tensors; return a `Work` if it is asynchronous.

        `counts`: whether to increment the versions of the tensors that it writes on this rank.
        """
        backend, plain, finish = self._prepare(call)
        manager = self._own_manager()
        deferred = async_op or manager is not None
        start = self._start_recorded if profiler._is_profiler_enabled else self._start
        request, ended = start(backend, plain, deferred, finish)
        if counts and _writes(call, self._rank):
            count_writes(list(call.outputs))
        if not deferred:
            return None
        outputs = list(call.outputs or call.inputs)
        work = Work(request, outputs, call.op, self.seq, self, finish=finish, settled=ended)
        work.keep, work.site = plain, call_site()
        if manager is not None:
            manager.works.append(work)
        return work

    def _start(
        self, backend: Backend, call: Call, deferred: bool, finish: checks.Finish | None
    ) -> tuple[Request | None, Callable[[BaseException | None], None]]:
        """Number, trace and start an operation; unless it is `deferred`, wait for it.

        Returns:
            Its request, and a function to call when it ends, which was called if it has.
        """
        self.seq += 1
        event = None
        if trace.hooks:
            event = self._begin(call, deferred)
        noted = None
        if self._ring is not None and not _records(backend):
            noted = self._ring.begin(call.op, call.data, call.other_end, _detail(call), deferred)
        ended = partial(self._ended, event, noted)
        try:
            if call.op in MESSAGES or _records(backend):
                request = _run(backend, call, deferred)
            else:
                entered = self._enter(call.op, waits=not deferred)
                try:
                    request = _run(backend, call, deferred)
                finally:
                    if entered:
                        self._leave()
            if not deferred and finish is not None:
                finish()
        except BaseException as error:
            ended(error)
            raise
        if not deferred:
            ended(None)
        return request, ended

    def _start_recorded(
        self, backend: Backend, call: Call, deferred: bool, finish: checks.Finish | None
    ) -> tuple[Request | None, Callable[[BaseException | None], None]]:
        """As `_start`, while one of torch's profilers runs."""
        with operation(self, backend, call, deferred):
            return self._start(backend, call, deferred, finish)

    def _enter(self, op: str, waits: bool) -> bool:
        """Refuse a collective while another thread is in a call; see `CallingThread.enter`."""
        try:
            return self._caller.enter(waits)
        except Crossed as seen:
            for group in self._channels:
                group._caller.crossed = str(seen)
            raise UsageError(
                str(seen),
                op=op,
                group=self.group_name,
                rank=self._rank,
                world_size=self._size,
                fix=ONE_THREAD_FIX,
            ) from None

    def _leave(self) -> None:
        """Undo `_enter`; leave the group if a second thread was refused since."""
        self._caller.leave()
        if self._caller.crossed:
            for group in self._channels:
                for backend in group._backends.values():
                    backend.close(False)

    def hold(self, op: str) -> ExclusiveCall:
        """Return a context in which other threads cannot call collectives of this channel.

        Raises:
            UsageError: Another thread is inside a call.
        """
        return ExclusiveCall(partial(self._enter_block, op), self._leave_block)

    def _enter_block(self, op: str) -> bool:
        if self._engine is None:
            return self._enter(op, waits=True)
        entered = self._engine.enter()
        if isinstance(entered, Outcome):
            raise self._plain_error(entered)
        return entered

    def _leave_block(self) -> None:
        if self._engine is None:
            self._leave()
        else:
            self._engine.leave()

    @property
    def copies(self) -> object | None:
        """The `CopyPlan` (comm/backends/shm/copying.py) of a group of shared memory; else None."""
        return getattr(self._first, "copies", None)

    @property
    def runs_plain(self) -> bool:
        """Whether a collective that waits takes less time than starting it would."""
        return self._plain is not None

    @property
    def coalesced(self) -> list[Work] | None:
        """The operations of the coalescing manager; None outside of one."""
        return None if self._manager is None else self._manager.works

    def coalesce(self, works: list[Work] | None, waits: bool = False) -> None:
        """Begin a coalescing manager, whose asynchronous operations go to `works`; None: end it.

        If the manager `waits` at its end, plain collectives run at once, which costs a tenth of
        starting each. Messages do not: two ranks may send to each other first.
        """
        self._manager = None if works is None else Coalescing(works, threading.get_ident())
        if works is None:
            self._plain = self._engine
        elif waits and self._engine is not None:
            self._plain = cast(Channel, PlainCollectives(self._engine))
        else:
            self._plain = None

    def _own_manager(self) -> Coalescing | None:
        """Return the coalescing manager, if this thread is inside it."""
        manager = self._manager
        return manager if manager is not None and manager.thread == threading.get_ident() else None

    def refuse_coalescing(self, op: str, what: str, seen: str) -> None:
        """Raise inside a coalescing manager, for an operation of several steps."""
        if self._manager is not None:
            raise UsageError(
                what,
                op=op,
                group=self.group_name,
                seen=seen,
                fix="Call it before or after the manager's block.",
            )

    def _plain_work(self, op: str, started: object, *outputs: torch.Tensor) -> Work | None:
        """Return the `Work` of a plain call that was started, or raise its error."""
        if isinstance(started, Outcome):
            raise self._plain_error(started)
        self.seq += 1
        work = Work(started, list(outputs), op, self.seq, self)  # pyright: ignore
        if self._manager is not None:
            self._manager.works.append(work)
        return work

    def _plain_error(self, outcome: object) -> DureError:
        """Make the exception for a plain call that failed."""
        self.seq += 1
        error = cast(PlainBackend, self._first).error(outcome)
        self.note_error(error)
        return error

    def _ended(
        self,
        event: trace.Event | None,
        noted: flight.Noted | None,
        error: BaseException | None,
    ) -> None:
        """Notify hooks and the flight recorder that an operation has ended."""
        if noted is not None:
            flight.FlightRing.end(noted, error)
        if event is not None:
            trace.end(event, error)
        self.note_error(error)

    @property
    def sound(self) -> bool:
        """Whether it is open, and no operation for which this rank has waited has failed."""
        return not any(group.closed or group._failed for group in self._channels)

    def note_error(self, error: BaseException | None) -> None:
        """Report a failed operation to the flight recorder."""
        if isinstance(error, DureError):
            self._failed = True
            flight.on_error(error, self.global_ranks[self._rank])

    def _begin(self, call: Call, async_op: bool) -> trace.Event:
        data = call.data
        return trace.begin(
            trace.Event(
                group=self.group_name,
                op=call.op,
                seq=self.seq,
                rank=self._rank,
                global_rank=self.global_ranks[self._rank],
                world_size=self._size,
                nbytes=0 if data is None else data.nbytes,
                dtype="" if data is None else str(data.dtype).removeprefix("torch."),
                peer=call.other_end,
                async_op=async_op,
            )
        )

    def close(self, abort: bool = False) -> None:
        """Leave the group: pending operations end with `Aborted`, later calls raise `UsageError`.

        Operations over NCCL are waited for instead, unless `abort` is set, also in another thread
        in the meantime.

        A forked child only forgets it: the connections are its parent's.

        Args:
            abort: If True, close connections at once, and ignore errors. If False, peers may still
                complete the last common operation, and an error of the backend is raised.
        """
        if self.closed and not abort:
            return
        with self._channel_lock:
            for group in self._channels:
                group.closed = True
                group.belongings.clear()
                group._engine = group._plain = None
                if group._ring is not None:
                    flight.retire(group._ring)
        if self._forks != num_forks():
            return
        first: DureError | None = None
        backends = {id(b): b for g in self._channels for b in g._backends.values()}.values()
        # Members that still wait for operations in streams see by the others that this rank lives.
        for backend in sorted(backends, key=lambda b: not getattr(b, "in_stream", False)):
            try:
                backend.close(abort)
            except DureError as e:
                first = first or e
        if first is not None and not abort:
            raise first

    def shutdown(self) -> None:
        """Leave the group as `destroy_process_group` does, but keep it in the list of groups."""
        self.close()

    def abort(self) -> None:
        """Leave the group at once: pending operations end with `Aborted`, here and on peers."""
        self.close(abort=True)


def _records(backend: Backend) -> bool:
    """Return whether a backend notes its operations for the flight recorder itself."""
    return getattr(backend, "keeps_records", False)


def _writes(call: Call, rank: int) -> bool:
    """Return whether the call writes its outputs on `rank`; a root's may be its input."""
    match call.op:
        case "broadcast":
            return rank != call.root
        case "reduce":
            return rank == call.root
        case _:
            return True


def _run(backend: Backend, call: Call, async_op: bool) -> Request | None:
    match call.op:
        case "send" | "isend":
            assert call.peer is not None
            return backend.send(call.inputs[0], call.peer, call.tag, async_op)
        case "recv" | "irecv":
            return backend.recv(call.outputs[0], call.peer, call.tag, async_op)
        case _:
            return backend.run(call, async_op)


def _detail(call: Call) -> str | int | None:
    """Return the name of the reduction, or the tag of a message."""
    if call.op in MESSAGES:
        return call.tag
    return None if call.reduction is None else call.reduction.name
