"""The agent: what a process does with the messages of remote calls.

**A call** has a number of the caller's. Its function and arguments are packed, sent, unpacked by a
thread of the callee that has a slot, and run there; the answer has the same number. Each call ends
once, by whatever takes it out of the table first: its answer, its timeout, a connection that broke
(it may have run, and is not sent again), or the callee's death.

**A value** that others refer to is in a table of its owner, from when it is known that it will be
made. Who wants it before it is there is answered when it is.

**What must arrive** (references, gradients) is numbered by a link a peer, rides along with the next
message to that peer, or goes by itself when none is about to be sent.

Threads: one lock guards all tables. Nothing is sent, and no code of the program's runs, with it
held: what a step leaves to be done is put on a list, and done after (`_step`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Protocol

import msgspec
import torch

from dure.errors import DureError, PeerLost, RpcError, UsageError
from dure.rpc import failures, references
from dure.rpc.allow import Allowed
from dure.rpc.current import using
from dure.rpc.envelope import Envelope, GradientTag, Kind, Transport, Waiter
from dure.rpc.figures import Board, Figures
from dure.rpc.functions import MARK, Later
from dure.rpc.futures import CallFuture
from dure.rpc.gatherings import Gatherings
from dure.rpc.links import Link, Numbered
from dure.rpc.message import Packed, ReferenceRow, pack, rebuild, unpack
from dure.rpc.names import WorkerInfo
from dure.rpc.references import Freed, Lost, References, RefId, Send
from dure.rpc.rref import RRef
from dure.rpc.timers import Timer, Timers

__all__ = ["MOST_BYTES", "UNSET", "Agent", "Call", "GradientHooks", "Request"]

MOST_BYTES = 1 << 30
"""How much of unanswered calls to one process may be under way before the program must wait."""

UNSET = -1.0
"""A timeout that is not given: the default holds. 0 is none."""

_ACKNOWLEDGE_S = 0.05
"""How long what was received may be unacknowledged, if nothing else is sent."""

_REFERENCES = 0
"""The topic of messages about references; others are the caller's of `on`."""

_log = logging.getLogger("dure.rpc")
_Future = torch.futures.Future.__mro__[1]  # of C++: what `then` returns
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(references.Message)


class GradientHooks(Protocol):
    """What distributed autograd adds to messages."""

    def sending(self, to: int, what: str, tensors: Sequence[torch.Tensor]) -> GradientTag | None:
        """Take note of the tensors of a call or an answer, in the thread that sends it."""
        ...

    def receiving(
        self, sender: int, tag: GradientTag, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the tensors of a message with their places in the graph, before it is unpacked."""
        ...

    def serving(self, tag: GradientTag) -> AbstractContextManager[None]:
        """Return what a call that came with the tag runs in, its answer included."""
        ...

    def waits(self, backward: tuple[int, int], arrival: Callable[[], None]) -> bool:
        """Whether a thread waits in that backward pass; it then runs what gradients set off."""
        ...

    def arrive(self, backward: tuple[int, int], read: Callable[[], Any]) -> None:
        """Run what gradients set off; `read` unpacks them."""
        ...

    def lost(self, worker: int, error: DureError) -> None:
        """Take note of a process that is gone (`PeerLost`), or of a connection that broke."""
        ...


@dataclass(slots=True)
class Request:
    """A call to be made.

    Args:
        kind: CALL, MAKE or FETCH.
        to: The callee's id.
        value: (function, arguments, keyword arguments); nothing for FETCH.
        what: For people.
        timeout: Seconds; `UNSET`, or 0 for none.
        ref: The reference to make or to fetch.
        counted: False for what RPC itself calls, which no shutdown waits for.
    """

    kind: Kind
    to: int
    value: object
    what: str
    timeout: float = UNSET
    ref: RefId | None = None
    counted: bool = True


@dataclass(slots=True, eq=False)
class Call:
    """A call that was made.

    Attributes:
        ticket: Done when the outcome is there, and, with `told`, when that has returned.
        outcome: The message that came, or what went wrong.
        told: Called once with the call, by a thread that may run code of the program's.
    """

    number: int
    request: Request
    ticket: Waiter
    deadline: float
    seconds: float
    nbytes: int
    told: Callable[[Call], None] | None = None
    timer: Timer | None = None
    outcome: _Incoming | Exception | None = None
    ended: bool = False


@dataclass(slots=True)
class _Incoming:
    envelope: Envelope
    memories: list[torch.Tensor]
    references: list[RRef[Any]]


@dataclass(slots=True)
class _Work:
    """What a thread of the transport's is to do; `call` is answered by it."""

    run: Callable[[], None]
    call: Envelope | None

    def __call__(self) -> None:
        self.run()


@dataclass(slots=True, eq=False)
class _Value:
    done: bool = False
    value: Any = None
    error: BaseException | None = None
    watchers: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


@dataclass(slots=True, eq=False)
class _Peer:
    link: Link = field(default_factory=Link)
    queued: list[Numbered] = field(default_factory=list[Numbered])
    in_flight: int = 0  # bytes
    calls: dict[int, Call] = field(default_factory=dict[int, Call])
    blocked: deque[Waiter] = field(default_factory=deque[Waiter])
    due: bool = False  # what is queued is sent soon
    acknowledging: bool = False  # or by a timer


class Agent:
    """The one of a process.

    Args:
        me: This process.
        transport: Not started yet.
        timeout: Of calls that give none, in seconds; 0 is none.
        allow: What others may call; None: everything.
        static: Whether nobody joins.

    Attributes:
        gradients: Of distributed autograd, when there is one.
        device_maps: For each worker, by name, where tensors of this process's devices belong there.
    """

    def __init__(
        self,
        me: WorkerInfo,
        transport: Transport,
        timeout: float = 60.0,
        allow: Allowed | None = None,
        static: bool = True,
    ) -> None:
        self.me, self.transport, self.timeout, self.static = me, transport, timeout, static
        self.gradients: GradientHooks | None = None
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.closed = False
        self.timers = Timers()
        self._allow = allow
        self._lock = threading.Lock()
        self._here = threading.local()
        self._todo: list[Callable[[], None]] = []
        self._workers: dict[int, WorkerInfo] = {}
        self._ids: dict[str, int] = {}
        self._dead: dict[int, str] = {}
        self._peers: dict[int, _Peer] = {}
        self._calls: dict[int, Call] = {}
        self._number = 0
        self._references = References(me.id)
        self._values: dict[RefId, _Value] = {}
        self._handlers: dict[int, Callable[[int, bytes], None]] = {}
        self._busy = self._started = 0
        self._board = Board(me.name, self.timers.at, self._figures)
        self.gatherings = Gatherings(lambda: {worker.name for worker in self.workers})
        self._told_of_deaths: list[Callable[[str, PeerLost], None]] = [self.gatherings.died]

    def start(self) -> None:
        """Begin to receive."""
        self.transport.start(self.receive, self.broken, self.died, self._refused, self.joined)

    # --- who is there ------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerInfo]:
        """Who is there, this process included, by id."""
        with self._lock:
            return [self._workers[id] for id in sorted(self._workers)]

    def find(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """Return who is meant.

        Raises:
            RpcError: Nobody has that name or id.
            PeerLost: It is gone.
            UsageError: It is no name, id or `WorkerInfo`.
        """
        if isinstance(to, WorkerInfo):
            return to
        if not isinstance(to, str | int):
            raise UsageError(
                "a worker is told by its name, its id or its WorkerInfo", op="rpc", seen=repr(to)
            )
        id = self._ids.get(to, -1) if isinstance(to, str) else int(to)
        if id in self._dead:
            raise self._lost(id)
        found = self._workers.get(id)
        if found is None:
            names = ", ".join(sorted(self._ids))
            raise RpcError("could not find destination", seen=f"{to!r}", fix=f"There are: {names}.")
        return found

    def joined(self, id: int, name: str) -> None:
        """Take note of a process; the transport calls this."""
        worker = WorkerInfo(name, id)
        with self._step():
            self._workers[worker.id] = worker
            self._ids[worker.name] = worker.id
            if worker.id not in self._dead:
                self._peers.setdefault(worker.id, _Peer())
                self._act(self._references.joined(worker.id))

    def died(self, id: int, how: str) -> None:
        """Take note that a process is gone for good; the transport calls this."""
        with self._step():
            if id in self._dead:
                return
            worker = self._workers.pop(id, None)
            self._dead[id] = f"{worker.name if worker else id}\0{how}"
            peer = self._peers.pop(id, _Peer())
            self._todo += [
                partial(self._fail, call, self._lost(id)) for call in peer.calls.values()
            ]
            self._todo += [partial(self.transport.complete, ticket) for ticket in peer.blocked]
            if self.gradients is not None:
                self._todo.append(partial(self.gradients.lost, id, self._lost(id)))
            self._act(self._references.died(id))
            if worker is not None:
                lost = self._lost(id)
                self._todo += [partial(told, worker.name, lost) for told in self._told_of_deaths]
            never = [ref for ref, value in self._values.items() if ref[0] == id and not value.done]
            for ref in never:
                if not self._references.has(ref):
                    del self._values[ref]

    def on_death(self, told: Callable[[str, PeerLost], None]) -> None:
        """Have a function called, with the name and an error, when a process is gone."""
        self._told_of_deaths.append(told)

    def broken(self, id: int) -> None:
        """Take note that a connection broke; the transport calls this."""
        with self._step():
            peer = self._peers.get(id)
            if peer is None:
                return
            name = self._workers[id].name
            for call in peer.calls.values():
                error = RpcError(
                    f"the connection to worker {name!r} broke: the call may have run",
                    seen=call.request.what,
                    fix="Call again if running twice does no harm.",
                )
                self._todo.append(partial(self._fail, call, error))
            if self.gradients is not None:
                error = RpcError(f"the connection to worker {name!r} broke: gradients were lost")
                self._todo.append(partial(self.gradients.lost, id, error))
            self._act(self._references.unsure(id, self._references.sent_to(id)))
            peer.queued, peer.due = peer.link.again(), True

    def _lost(self, id: int) -> PeerLost:
        name, how = self._dead[id].split("\0")
        return PeerLost(
            f"worker {name!r} (id {id}) is gone", peer=id, exit=how or None, op="rpc", seen=how
        )

    def info(self, id: int) -> WorkerInfo:
        """Return a worker by its id, be it gone."""
        found = self._workers.get(id)
        return found or WorkerInfo(self._dead[id].split("\0")[0], id)

    # --- calls -------------------------------------------------------------------------------

    def rpc_sync(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET,
    ) -> Any:
        """Call a function of another process (`api.rpc_sync`)."""
        call = self.call(self._request(Kind.CALL, to, func, args, kwargs, timeout))
        self.wait(call)
        return self.result(call)

    def rpc_async(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET,
    ) -> CallFuture:
        """Begin to call a function of another process (`api.rpc_async`)."""
        future = CallFuture()
        request = self._request(Kind.CALL, to, func, args, kwargs, timeout)
        self.call(request, future)
        return future

    def remote(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET,
    ) -> RRef[Any]:
        """Begin to make a value at another process (`api.remote`)."""
        request = self._request(Kind.MAKE, to, func, args, kwargs, timeout)
        own = request.to == self.me.id
        request.ref = self.own() if own else self.create(request.to)
        rref = RRef[Any].received(self, request.ref, request.to, True)
        rref.made_by(self.call(request))
        return rref

    def _request(
        self, kind: Kind, to: str | int | WorkerInfo, func: Callable[..., Any], *rest: Any
    ) -> Request:
        if not callable(func):
            raise UsageError("function should be callable", op="rpc", seen=repr(func))
        args, kwargs, timeout = rest
        worker = self.find(to)
        name = getattr(func, "__qualname__", type(func).__qualname__)
        value = (func, tuple(args or ()), dict(kwargs or {}))
        return Request(kind, worker.id, value, f"{name} on {worker.name}", timeout)

    def fetch(self, ref: RefId, owner: int, timeout: float) -> Call:
        """Ask for the value of a reference."""
        return self.call(Request(Kind.FETCH, owner, None, "to_here", timeout, ref))

    def method(self, owner: object, name: str) -> Callable[..., Any]:
        """Return a method of an object that others may call.

        Raises:
            RpcError: They may not.
        """
        return getattr(owner, name) if self._allow is None else self._allow.method(owner, name)

    def call(self, request: Request, future: CallFuture | None = None) -> Call:
        """Make a call, of which a future is told.

        Waits, if this is a thread of the program's and too much is under way.

        A callee that is gone is the call's outcome, no error of this.

        Raises:
            RpcError: What it says cannot be sent.
        """
        packed = self._pack(request.value, request.to) if request.value is not None else Packed()
        request.value = None  # the call would keep the arguments
        tag = None
        if self.gradients is not None:
            tag = self.gradients.sending(request.to, request.what, packed.sources)
        nbytes = _size(packed.pickled, packed.memories)
        if not getattr(self._here, "serves", False):
            self._wait_for_room(request.to, nbytes)
        seconds = self.timeout if request.timeout < 0 else request.timeout
        call = Call(
            number=0,
            request=request,
            ticket=self.transport.ticket(),
            deadline=time.monotonic() + seconds if seconds > 0 else inf,
            seconds=seconds,
            nbytes=nbytes,
            told=None if future is None else future.told,
        )
        if future is not None:
            future.begin(self, call)
        with self._lock:
            self._number += 1
            call.number = self._number
            self._started += request.counted
            peer = None if self.closed else self._peers.get(request.to)
            if peer is not None:
                self._calls[call.number] = peer.calls[call.number] = call
                peer.in_flight += nbytes
        if peer is None:
            self._not_sent(packed)
            lost = request.to in self._dead
            if self._end(call, self._lost(request.to) if lost else _closed()) is not None:
                self._tell(call)
            return call
        if (future is not None or request.kind == Kind.MAKE) and call.deadline < inf:
            call.timer = self.timers.at(call.deadline, partial(self._expire, call))
        envelope = Envelope(
            kind=request.kind,
            sender=self.me.id,
            number=call.number,
            pickled=packed.pickled,
            tensors=packed.tensors,
            references=packed.references,
            gradients=tag,
            make=request.ref,
        )
        try:
            self._send(request.to, envelope, packed.memories)
        except PeerLost as error:
            self._fail(call, error)
        return call

    def wait(self, call: Call) -> None:
        """Wait until a call has ended; the thread receives messages meanwhile."""
        before = getattr(self._here, "waits", None)
        self._here.waits = call
        try:
            while not call.ticket.done:
                left = inf if call.timer is not None else call.deadline - time.monotonic()
                if left <= 0.0:
                    self._expire(call)
                    left = 1.0
                self.transport.wait(call.ticket, min(left, 60.0))
        finally:
            self._here.waits = before
        self._tell(call)

    def result(self, call: Call) -> Any:
        """Return the value that a call has ended with.

        Raises:
            Exception: What the callee has raised, or what went wrong on the way.
        """
        outcome = call.outcome
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            raise RuntimeError("the call has not ended")
        if outcome.envelope.kind == Kind.ERROR:
            raise failures.decode(outcome.envelope.pickled)
        return self._unpack(outcome) if outcome.envelope.pickled else None

    def when_done(self, call: Call, told: Callable[[Call], None]) -> None:
        """Have somebody told of a call's end that nobody waits for."""
        with self._lock:
            call.told, over = told, call.outcome is not None
        if over:
            self._tell(call)

    # --- how calls end -----------------------------------------------------------------------

    def _end(self, call: Call, outcome: _Incoming | Exception) -> Callable[[], None] | None:
        """End a call that is in no table any more; return what a worker must do for it."""
        with self._lock:
            call.outcome = outcome
            told = call.told
        if call.timer is not None:
            self.timers.cancel(call.timer)
        if told is not None and getattr(self._here, "waits", None) is not call:
            return self._as_work(partial(self._tell, call))
        self.transport.complete(call.ticket)
        return None

    def _tell(self, call: Call) -> None:
        """Tell who wants to be told, once."""
        with self._lock:
            told, call.told = call.told, None
        if told is not None:
            told(call)
            self.transport.complete(call.ticket)

    def _fail(self, call: Call, error: Exception) -> None:
        """End a call without an answer, if it has not ended."""
        if self._take(call.number) is not None:
            work = self._end(call, error)
            if work is not None:
                self._submit(work)

    def _expire(self, call: Call) -> None:
        text = (
            f"RPC ran for more than set timeout ({call.seconds * 1000:.0f} ms) and will now be "
            "marked with an error"
        )
        error = RpcError(
            text,
            op=call.request.what,
            peer=call.request.to,
            fix="Give a larger timeout; 0 is none.",
        )
        self._fail(call, error)

    def _take(self, number: int) -> Call | None:
        """Take a call out of the tables; None: it has ended."""
        with self._lock:
            call = self._calls.pop(number, None)
            if call is None:
                return None
            peer = self._peers.get(call.request.to)
            free: list[Waiter] = []
            if peer is not None:
                peer.calls.pop(number, None)
                peer.in_flight -= call.nbytes
                free, peer.blocked = list(peer.blocked), deque()
        for ticket in free:
            self.transport.complete(ticket)
        return call

    def _wait_for_room(self, to: int, nbytes: int) -> None:
        while True:
            with self._lock:
                peer = self._peers.get(to)
                if peer is None or not peer.in_flight or peer.in_flight + nbytes <= MOST_BYTES:
                    return
                ticket = self.transport.ticket()
                peer.blocked.append(ticket)
            while not ticket.done:
                self.transport.wait(ticket, 60.0)

    # --- what comes --------------------------------------------------------------------------

    def receive(
        self, envelope: Envelope, memories: list[torch.Tensor]
    ) -> Callable[[], None] | None:
        """Take a message; the transport calls this. Returns what is to be run, if anything."""
        called = envelope.kind in (Kind.CALL, Kind.MAKE, Kind.FETCH)
        self._board.received(_size(envelope.pickled, memories), called)
        made, rows = True, list[RRef[Any]]()
        if envelope.link or envelope.references or envelope.kind == Kind.MAKE:
            with self._step(but=envelope.sender if called else -1):
                for numbered in envelope.link:
                    self._take_reliable(envelope.sender, numbered)
                rows = [self._take_reference(row, envelope.sender) for row in envelope.references]
                if envelope.kind == Kind.MAKE:
                    made = self._take_make(envelope)
        incoming = _Incoming(envelope, memories, rows)
        match envelope.kind:
            case Kind.CALL | Kind.MAKE:
                work = self._serve if made else self._refuse
            case Kind.FETCH:
                work = self._fetched
            case Kind.GRADIENTS:
                return self._gradients_came(incoming)
            case Kind.ANSWER | Kind.ERROR:
                call = self._take(envelope.number)
                return None if call is None else self._end(call, incoming)
            case _:
                return None
        return self._as_work(partial(work, incoming), envelope)

    def _gradients_came(self, incoming: _Incoming) -> _Work | None:
        hooks, backward = self.gradients, incoming.envelope.make
        if hooks is None or backward is None:
            return None
        run = partial(hooks.arrive, backward, partial(self._unpack, incoming))
        return None if hooks.waits(backward, run) else self._as_work(run)

    def _as_work(self, run: Callable[[], None], call: Envelope | None = None) -> _Work:
        """Return what a thread of the transport's is to do; it may be the program's code."""
        with self._lock:
            self._busy += 1
        return _Work(partial(self._work, run), call)

    def _work(self, run: Callable[[], None]) -> None:
        before = getattr(self._here, "serves", False)
        self._here.serves = True
        try:
            with using(self):
                run()
        finally:
            self._here.serves = before
            with self._lock:
                self._busy -= 1
            self._flush()

    def _refused(self, work: Callable[[], None], error: RpcError) -> None:
        """Take note that there is no thread for something; the transport calls this."""
        call = work.call if isinstance(work, _Work) else None
        if call is None:
            work()
        else:
            self._work(partial(self._answer_error, call, error))

    def _submit(self, work: Callable[[], None]) -> None:
        """Have something run that the program waits for."""
        try:
            self.transport.submit(work)
        except Exception:  # it is closed
            work()

    def _serve(self, incoming: _Incoming) -> None:
        """Run a call, and answer it."""
        envelope = incoming.envelope
        try:
            with self._serving(envelope.gradients):
                function, args, kwargs = self._unpack(incoming)
                if self._allow is not None:
                    self._allow.check(function)
                result = function(*args, **kwargs)
                if hasattr(function, MARK) and not isinstance(result, _Future):
                    raise RpcError(
                        "Functions decorated with @rpc.async_function must return a "
                        f"torch.futures.Future object, but got {result!r}"
                    )
                if hasattr(function, MARK):
                    self._answer_later(envelope, result, True)
                elif isinstance(result, Later):
                    self._answer_later(envelope, result.future, result.counted)
                else:
                    self._answer(envelope, result)
        except BaseException as error:
            self._answer_error(envelope, error)

    def _answer_later(
        self, envelope: Envelope, future: torch.futures.Future[Any], counted: bool
    ) -> None:
        def answer(done: torch.futures.Future[Any]) -> None:
            try:
                with using(self), self._serving(envelope.gradients):
                    self._answer(envelope, done.value())
            except BaseException as error:
                self._answer_error(envelope, error)
            finally:
                with self._lock:
                    self._busy -= counted

        with self._lock:
            self._busy += counted
        future.add_done_callback(answer)

    def _refuse(self, incoming: _Incoming) -> None:
        error = RpcError("this call was given up when a connection broke, and was not run")
        self._answer_error(incoming.envelope, error)

    def _serving(self, tag: GradientTag | None) -> AbstractContextManager[None]:
        if tag is None or self.gradients is None:
            return nullcontext()
        return self.gradients.serving(tag)

    def _fetched(self, incoming: _Incoming) -> None:
        """Answer who wants a value, as soon as it is there."""
        envelope = incoming.envelope
        ref = envelope.make
        assert ref is not None
        with self._lock:
            value = self._values.get(ref)
            if value is None and ref[0] != self.me.id:
                value = self._values[ref] = _Value()  # the call that makes it is on its way
            if value is not None and not value.done:
                value.watchers.append(partial(self._send_value, envelope, value))
                return
        if value is None:
            self._answer_error(envelope, RpcError("there is no such value any more", op="to_here"))
        else:
            self._send_value(envelope, value)

    def _send_value(self, envelope: Envelope, value: _Value) -> None:
        try:
            if value.error is not None:
                raise value.error
            with self._serving(envelope.gradients):
                self._answer(msgspec.structs.replace(envelope, kind=Kind.CALL), value.value)
        except BaseException as error:
            self._answer_error(envelope, error)

    def _answer(self, call: Envelope, result: Any) -> None:
        if call.make is not None and call.kind == Kind.MAKE:
            self.set_value(call.make, result)
            self._reply(call, Kind.ANSWER, Packed(), None)
            return
        packed = self._pack(result, call.sender)
        tag = None
        if self.gradients is not None:
            what = f"the result of {call.gradients.what}" if call.gradients is not None else ""
            tag = self.gradients.sending(call.sender, what, packed.sources)
        self._reply(call, Kind.ANSWER, packed, tag)

    def _answer_error(self, call: Envelope, error: BaseException) -> None:
        _log.warning("a call of worker %d failed here", call.sender, exc_info=error)
        if call.make is not None and call.kind == Kind.MAKE:
            self.set_value(call.make, None, error)
        self._reply(call, Kind.ERROR, Packed(failures.encode(error, self.me)), None)

    def _reply(self, call: Envelope, kind: Kind, packed: Packed, tag: GradientTag | None) -> None:
        envelope = Envelope(
            kind=kind,
            sender=self.me.id,
            number=call.number,
            pickled=packed.pickled,
            tensors=packed.tensors,
            references=packed.references,
            gradients=tag,
        )
        try:
            self._send(call.sender, envelope, packed.memories)
        except PeerLost:
            self._not_sent(packed)

    # --- values and references ---------------------------------------------------------------

    def own(self) -> RefId:
        """Begin a value of this process, with one object that refers to it."""
        with self._step():
            ref = self._references.own()
            self._values[ref] = _Value()
            return ref

    def create(self, owner: int) -> RefId:
        """Begin a reference to a value that a call is about to make at another process."""
        with self._step():
            return self._references.create(owner)

    def set_value(self, ref: RefId, value: Any, error: BaseException | None = None) -> None:
        """Say what a value of this process is; whoever waits for it gets it."""
        with self._lock:
            entry = self._values.get(ref)
            if entry is None:
                return  # nobody refers to it any more
            entry.value, entry.error, entry.done = value, error, True
            watchers, entry.watchers = entry.watchers, []
        for watcher in watchers:
            watcher()

    def local_value(self, ref: RefId) -> Any:
        """Return a value of this process; waits until it is there.

        Raises:
            Exception: What was raised in place of it.
        """
        with self._lock:
            entry = self._values[ref]
            ticket = None
            if not entry.done:
                ticket = self.transport.ticket()
                entry.watchers.append(partial(self.transport.complete, ticket))
        while ticket is not None and not ticket.done:
            self.transport.wait(ticket, 60.0)
        if entry.error is not None:
            raise entry.error
        return entry.value

    def pack_reference(self, ref: RefId, to: int) -> ReferenceRow:
        """Return what stands for a reference in a message.

        Raises:
            KeyError: It is lost.
        """
        with self._step():
            owner, token = self._references.pack(ref, to)
            return ReferenceRow(ref, owner, token)

    def is_held(self, ref: RefId) -> bool:
        """Whether the owner knows that this process holds a reference."""
        with self._lock:
            return self._references.is_held(ref)

    def why_lost(self, ref: RefId, owner: int) -> Exception | None:
        """Return why the value of a reference cannot be had, if so."""
        with self._lock:
            if self._references.has(ref):
                return None
            if owner in self._dead:
                return self._lost(owner)
        return RpcError("the value of this reference was never made, or its messages were lost")

    def forget(self, ref: RefId) -> None:
        """Take note that an object that refers to a value is gone; for finalizers."""
        if not self.closed:
            self.timers.soon(partial(self._dropped, ref))

    def _dropped(self, ref: RefId) -> None:
        with self._step():
            self._act(self._references.dropped(ref))

    def _not_sent(self, packed: Packed) -> None:
        if packed.references:
            with self._step():
                tokens = [row.token for row in packed.references]
                self._act(self._references.not_sent(tokens))

    def _take_make(self, envelope: Envelope) -> bool:
        """With the lock: take note of a value that a call will make."""
        ref = envelope.make
        assert ref is not None
        if envelope.sender == self.me.id:
            return True
        made, actions = self._references.made(ref, envelope.sender)
        self._act(actions)
        if made:
            self._values.setdefault(ref, _Value())
        return made

    def _take_reference(self, row: ReferenceRow, sender: int) -> RRef[Any]:
        """With the lock: take a reference out of a message."""
        known, actions = self._references.arrived(row.ref, row.owner, sender, row.token)
        self._act(actions)
        if known and row.owner == self.me.id:
            self._values.setdefault(row.ref, _Value())  # the call that makes it may come later
        return RRef.received(self, row.ref, row.owner, known)

    # --- what must arrive --------------------------------------------------------------------

    def tell(self, to: int, topic: int, body: bytes, hurry: bool = True) -> None:
        """Send a message that must arrive, once, as long as both processes live.

        Args:
            to: Who gets it.
            topic: 1 to 255; who has said `on` there gets it.
            body: The message.
            hurry: Whether it goes at once; otherwise with the next message, or a little later.

        Raises:
            PeerLost: The process is gone.
        """
        with self._step():
            if to in self._dead:
                raise self._lost(to)
            self._queue(to, topic, body, hurry)

    def send_gradients(self, to: int, backward: tuple[int, int], value: object) -> None:
        """Send gradients of a backward pass; they are lost with the connection.

        Raises:
            PeerLost: The process is gone.
        """
        packed = self._pack(value, to)
        envelope = Envelope(
            kind=Kind.GRADIENTS,
            sender=self.me.id,
            pickled=packed.pickled,
            tensors=packed.tensors,
            make=backward,
        )
        self._send(to, envelope, packed.memories)

    def on(self, topic: int, handler: Callable[[int, bytes], None]) -> None:
        """Have a function called with sender and body of messages; it must return quickly."""
        self._handlers[topic] = handler

    def _queue(self, to: int, topic: int, body: bytes, hurry: bool = True) -> None:
        peer = self._peers.get(to)
        if peer is None:
            return
        peer.queued.append(peer.link.send(bytes((topic,)) + body))
        peer.due |= hurry
        if not hurry:
            self._send_later(to, peer)

    def _take_reliable(self, sender: int, numbered: Numbered) -> None:
        peer = self._peers.get(sender)
        if peer is None:
            return
        for body in peer.link.receive(numbered):
            if body[0] == _REFERENCES:
                self._act(self._references.heard(sender, _decoder.decode(body[1:])))
            else:
                self._todo.append(partial(self._handlers[body[0]], sender, body[1:]))
        if peer.link.owes:
            self._send_later(sender, peer)

    def _send_later(self, to: int, peer: _Peer) -> None:
        """With the lock: send what is queued or owed in a while, if nothing else is sent before."""
        if not peer.acknowledging:
            peer.acknowledging = True
            when = time.monotonic() + _ACKNOWLEDGE_S
            self._todo.append(lambda: void(self.timers.at(when, partial(self._owed, to))))

    def _owed(self, to: int) -> None:
        with self._step():
            peer = self._peers.get(to)
            if peer is not None:
                peer.acknowledging = False
                if not peer.queued and peer.link.owes:
                    peer.queued.append(peer.link.acknowledge())
                peer.due = bool(peer.queued)

    # --- steps -------------------------------------------------------------------------------

    @contextmanager
    def _step(self, but: int = -1) -> Iterator[None]:
        """While within: the lock is held; after, what is left is done, and what is queued is sent.

        Args:
            but: To whom nothing is sent yet, for an answer will be.
        """
        with self._lock:
            yield
            todo, self._todo = self._todo, []
        for action in todo:
            action()
        self._flush(but)

    def _act(self, actions: Iterable[references.Action]) -> None:
        """With the lock: do what the state machine of references says."""
        for action in actions:
            match action:
                case Send(to, message):
                    self._queue(to, _REFERENCES, _encoder.encode(message))
                case Freed(ref):
                    freed = self._values.pop(ref, None)
                    self._todo.append(lambda freed=freed: None)  # it ends there, without the lock
                case Lost(ref):
                    for call in self._calls.values():
                        if call.request.ref == ref and call.request.kind == Kind.FETCH:
                            error = RpcError("the value was never made", op=call.request.what)
                            self._todo.append(partial(self._fail, call, error))
                    if ref in self._values:
                        error = RpcError("the call that was to make this value never came")
                        self._todo.append(partial(self.set_value, ref, None, error))

    def _flush(self, but: int = -1) -> None:
        """Send what is queued."""
        with self._lock:
            due = [id for id, peer in self._peers.items() if peer.queued and peer.due and id != but]
        for id in due:
            with suppress(PeerLost):  # `died` comes, or has come
                self._send(id, Envelope(kind=Kind.RELIABLE, sender=self.me.id), [])

    def _send(self, to: int, envelope: Envelope, memories: list[torch.Tensor]) -> None:
        """Send a message, and what is queued for the process with it."""
        with self._lock:
            peer = self._peers.get(to)
            if peer is not None:
                envelope.link, peer.queued, peer.due = peer.queued, [], False
                if not envelope.link and peer.link.owes:
                    envelope.link = [peer.link.acknowledge()]
        if envelope.kind != Kind.RELIABLE or envelope.link:
            self._board.sent(_size(envelope.pickled, memories))
            self.transport.send(to, envelope, memories)

    def _pack(self, value: object, to: int) -> Packed:
        try:
            return pack(value, to, RRef, partial(self._device_there, to))
        except RpcError as error:
            self._not_sent(getattr(error, "packed", Packed()))
            if isinstance(error.__cause__, DureError):  # of a reference
                raise error.__cause__ from None
            raise

    def _device_there(self, to: int, device: torch.device) -> str:
        device_map = self.device_maps.get(self.info(to).name, {})
        if device not in device_map:
            raise ValueError(f"a tensor on {device}, and no device map for it and {self.info(to)}")
        return str(device_map[device])

    def _unpack(self, incoming: _Incoming) -> Any:
        envelope = incoming.envelope
        tensors = rebuild(envelope.tensors, incoming.memories)
        if envelope.gradients is not None and self.gradients is not None:
            tensors = self.gradients.receiving(envelope.sender, envelope.gradients, tensors)
        find = None if self._allow is None else self._allow.find
        try:
            return unpack(envelope.pickled, tensors, incoming.references, find)
        except (AttributeError, ImportError) as error:
            raise RpcError(
                "a function or class of a message is not known here",
                seen=str(error),
                fix="The RPC pickler does not serialize code: define it, under the same name, in "
                "a module that both have.",
            ) from error

    # --- what people see, and the end --------------------------------------------------------

    def activity(self) -> tuple[int, int]:
        """Return how many calls were made here, and how many are under way or run here now."""
        with self._lock:
            waiting = sum(call.request.counted for call in self._calls.values())
            return self._started, waiting + self._busy

    def references_info(self) -> dict[str, str]:
        """Return how many references there are, with torch's names."""
        with self._lock:
            holders = self._references.holders().values()
            return {
                "num_owner_rrefs": str(sum(bool(held) for held in holders)),
                "num_pending_users": str(self._references.num_unsettled),
                "num_pending_futures": str(
                    sum(call.request.kind == Kind.MAKE for call in self._calls.values())
                ),
                "num_forks": str(sum(len(held) for held in holders)),
            }

    def get_debug_info(self) -> dict[str, str]:
        """Return figures, for people."""
        with self._lock:
            return {
                "agent.num_pending_requests": str(len(self._calls)),
                "agent.num_running_requests": str(self._busy),
                "agent.num_requests": str(self._started),
                "agent.bytes_in_flight": str(sum(p.in_flight for p in self._peers.values())),
            }

    def _figures(self) -> Figures:
        with self._lock:
            return Figures(
                made=self._started,
                waiting=len(self._calls),
                running=self._busy,
                owned=sum(bool(held) for held in self._references.holders().values()),
                held=len(self._references.users()),
            )

    def held(self) -> list[str]:
        """Return what others still hold of this process, and this process of others."""
        with self._lock:
            names = {id: worker.name for id, worker in self._workers.items()}
            lines = [
                f"value {ref}, held by {', '.join(names.get(id, str(id)) for id in holders)}"
                for ref, holders in self._references.holders().items()
                if holders
            ]
            users = self._references.users().items()
            return lines + [f"a reference to {ref} of {names.get(o, o)}" for ref, o in users]

    def close(self) -> None:
        """End: nothing is received any more, calls under way raise."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            calls = list(self._calls.values())
        for call in calls:
            self._fail(call, _closed())
        self.transport.close()
        self.timers.close()
        self._board.close()
        with self._lock:
            values, self._values = self._values, {}
        values.clear()


def _size(pickled: bytes, memories: list[torch.Tensor]) -> int:
    return len(pickled) + sum(memory.numel() for memory in memories)


def _closed() -> RpcError:
    return RpcError("RPC was shut down before this call was answered")


def void(_: object) -> None:
    """Let go of a result that is not wanted."""
